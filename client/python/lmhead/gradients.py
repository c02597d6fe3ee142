"""Gradients of trunk and head together: clipping by the global norm, and averaging over ranks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, Iterable, List, Optional, Tuple

import torch

from lmhead.step import Report


@dataclasses.dataclass(frozen=True)
class Clipped:
    """What ``clip_grad_norm`` did.

    Attributes:
        grad_norm: global L2 norm of trunk and head before clipping, of the gradient of the mean.
        clip_coefficient: 1, or max_norm / grad_norm.
        grad_multiplier: for ``Step.commit``: the mean's factor times the clip coefficient.
    """

    grad_norm: float
    clip_coefficient: float
    grad_multiplier: float


def clip_grad_norm(parameters: Iterable[torch.Tensor], report: Report, max_norm: Optional[float] = None, *,
                   grad_multiplier: Optional[float] = None, averaged_over: int = 1) -> Clipped:
    """Makes the trunk's gradients those of the mean loss, and clips them by the norm of trunk and head together.

    Args:
        parameters: the trunk's; their ``.grad`` is scaled in place, once a step.
        report: of ``Step.prepare``.
        max_norm: limit of the global norm; None: only the scaling.
        grad_multiplier: what makes a mean of a sum; None: the report's (1 / num_tokens after sums, nothing to do after
            means).
        averaged_over: ranks that the trunk's gradients were averaged over, as DistributedDataParallel and
            ``average_gradients`` do; the head's gradient is a sum.

    The device is waited for once.
    """
    multiplier = report.grad_multiplier if grad_multiplier is None else grad_multiplier
    trunk_factor = multiplier * averaged_over
    grads = [p.grad for p in ([parameters] if isinstance(parameters, torch.Tensor) else parameters) if p.grad is not None]
    squares = (multiplier * report.grad_norm) ** 2
    if grads:
        device = grads[0].device
        norms = torch.stack([grad.detach().float().norm().to(device) for grad in grads])
        squares += (trunk_factor * float(norms.double().norm())) ** 2
    norm = math.sqrt(squares)
    clip = 1.0
    if max_norm is not None and norm > max_norm:  # A NaN norm clips nothing, as in torch.
        clip = max_norm / (norm + 1e-6)
    if trunk_factor * clip != 1.0:
        for grad in grads:
            grad.detach().mul_(trunk_factor * clip)
    return Clipped(norm, clip, multiplier * clip)


def average_gradients(parameters: Iterable[torch.Tensor], group: Any = None) -> None:
    """Averages the trunk's gradients over the ranks, as DistributedDataParallel does.

    For between ``prepare`` and ``commit``, when no rank can lose the step in its losses any more; then pass
    ``averaged_over=world_size`` to ``clip_grad_norm``. A parameter without a gradient counts as zero.
    """
    size = torch.distributed.get_world_size(group)
    grads = []
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grads.append(parameter.grad)
    by_dtype: Dict[Tuple[torch.dtype, torch.device], List[torch.Tensor]] = {}
    for grad in grads:
        by_dtype.setdefault((grad.dtype, grad.device), []).append(grad)
    for same in by_dtype.values():
        flat = torch.cat([grad.reshape(-1) for grad in same])
        torch.distributed.all_reduce(flat, group=group)
        flat.div_(size)
        offset = 0
        for grad in same:
            grad.copy_(flat[offset:offset + grad.numel()].view_as(grad))
            offset += grad.numel()
