"""One loss call: from tensors to the service and back into autograd.

The service sums the gradient of the head's weight while it computes the loss, before anybody has called backward(). An
upstream factor (loss / 4, a GradScaler's scale) is therefore applied where that is still possible: to the hidden
states' gradient here, and to the head's gradient at commit, which needs one factor for all losses of the step. Factors
that differ go into ``grad_scale`` or ``token_weights``, which are known before.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from lmhead import _native, _staging
from lmhead.recipe import Recipe

REDUCTIONS = ("sum", "mean", "none")
# Per-token inputs beside the targets, with their dtype on the wire; aligned with the labels.
TOKEN_INPUTS = ("token_weights", "token_temperature", "logprob_grad", "entropy_grad", "old_logprob", "advantage",
                "reference_logprob")
TOPK_INPUTS = ("teacher_topk_ids", "teacher_topk_logprobs")
OUTPUTS = {"token_loss": torch.float32, "logprob": torch.float32, "lse": torch.float32, "entropy": torch.float32,
           "argmax": torch.int32}


def shift_left(tensor: torch.Tensor, fill: Any) -> torch.Tensor:
    """``tensor`` with position t holding what was at t + 1 in its last dimension, and ``fill`` in the last position."""
    shifted = torch.full_like(tensor, fill)
    shifted[..., :-1] = tensor[..., 1:]
    return shifted


@dataclasses.dataclass
class Arguments:
    """A call's tensors, flattened to rows: what goes down once."""

    leading: Tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    num_tokens: int
    hidden_size: int
    inputs: Dict[str, torch.Tensor]  # hidden, targets (int64), teacher_hidden_states, and what else was given.
    recipe: Recipe

    def release(self) -> None:
        """Lets go of what is not needed once the results are there."""
        self.inputs = {name: self.inputs[name] for name in ("targets", "token_weights") if name in self.inputs}

    def recipe_message(self) -> Dict[str, Any]:
        teacher = self.inputs.get("teacher_hidden_states")
        topk = self.inputs.get("teacher_topk_ids")
        return self.recipe.message(
            "token_weights" in self.inputs, "token_temperature" in self.inputs,
            None if teacher is None else _staging.DTYPE_NAMES[teacher.dtype], 0 if topk is None else topk.shape[-1])


def gather(hidden: torch.Tensor, labels: torch.Tensor, recipe: Recipe, shift: bool,
           token_inputs: Dict[str, Optional[torch.Tensor]], teacher_hidden: Optional[torch.Tensor],
           topk: Dict[str, Optional[torch.Tensor]]) -> Arguments:
    """Checks shapes and dtypes and flattens. ValueError naming the tensor."""
    _staging.check_dtype(hidden, "hidden")
    leading = tuple(hidden.shape[:-1])
    if tuple(labels.shape) != leading:
        raise ValueError(f"labels has shape {tuple(labels.shape)}, want {leading} like hidden without its last dimension")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels is {labels.dtype}, want integers")
    if 0 in leading:
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}, want at least one token")
    inputs = {"hidden": hidden.detach().reshape(-1, hidden.shape[-1])}
    targets = labels.detach().to(torch.int64)
    inputs["targets"] = (shift_left(targets, recipe.ignore_index) if shift else targets).reshape(-1)
    for name, tensor in token_inputs.items():
        if tensor is None:
            continue
        _staging.check_tensor(tensor, name)
        if tuple(tensor.shape) != leading:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, want {leading} like labels")
        values = tensor.detach().to(torch.float32)
        fill = 1.0 if name == "token_temperature" else 0.0
        inputs[name] = (shift_left(values, fill) if shift else values).reshape(-1)
    if teacher_hidden is not None:
        _staging.check_dtype(teacher_hidden, "teacher_hidden")
        if tuple(teacher_hidden.shape[:-1]) != leading:
            raise ValueError(f"teacher_hidden has shape {tuple(teacher_hidden.shape)}, want {leading} and the teacher's "
                             "hidden_size")
        inputs["teacher_hidden_states"] = teacher_hidden.detach().reshape(-1, teacher_hidden.shape[-1])
    for name, tensor in topk.items():
        if tensor is None:
            continue
        _staging.check_tensor(tensor, name)
        if tuple(tensor.shape[:-1]) != leading:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, want {leading} and top_k")
        values = narrow_ids(tensor.detach(), name) if name == "teacher_topk_ids" else tensor.detach().to(torch.float32)
        inputs[name] = values.reshape(-1, tensor.shape[-1])
    columns = {name: inputs[name].shape[-1] for name in topk if name in inputs}
    if len(set(columns.values())) > 1:
        raise ValueError(f"the top-k teacher's tensors have {columns} columns, want as many in both")
    rows = inputs["hidden"]
    return Arguments(leading, hidden.device, hidden.dtype, rows.shape[0], rows.shape[1], inputs, recipe)


def _int32(targets: torch.Tensor) -> torch.Tensor:
    narrow = targets.to(torch.int32)
    if not torch.equal(narrow.to(torch.int64), targets):
        raise ValueError("labels has ids that 32 bits do not hold")
    return narrow


def narrow_ids(ids: torch.Tensor, name: str) -> torch.Tensor:
    """As int32, without waiting for the device: what 32 bits do not hold becomes an id that the service refuses."""
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"{name} is {ids.dtype}, want integers")
    limits = torch.iinfo(torch.int32)
    return ids.to(torch.int64).clamp(limits.min, limits.max).to(torch.int32)


def _times(loss: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """As the service weighs: a factor of 0 leaves even an infinite loss out."""
    return torch.where(factor == 0, torch.zeros_like(loss), loss * factor)


class Call:
    """One call under way: its download, its ticket, its results."""

    def __init__(self, arguments: Arguments, outputs: Tuple[str, ...], want_grad: bool, reduction: str,
                 grad_scale: float, num_items: Optional[float], top_k: int = 0):
        self.top_k = top_k
        self.arguments = arguments
        self.want_grad = want_grad
        self.reduction = reduction
        self.scale = grad_scale  # Of the objective; becomes grad_scale / items for a mean.
        self.num_items = num_items
        self.sums: Optional[_native.LossResult] = None
        self._download = _staging.Download(arguments.inputs)
        self._host: Dict[str, torch.Tensor] = {}  # Lent to the library until its wait returns.
        self._outputs = outputs
        self.used = False  # Its backward pass has run.
        self.grad: Optional[torch.Tensor] = None
        self.results: Dict[str, torch.Tensor] = {}

    def submit(self, writer: _native.NativeWriter) -> int:
        """Waits for the download and sends. On the thread that submits."""
        host = self._download.wait()
        self._host = dict(host, targets=_int32(host["targets"]))
        if self.reduction == "mean":
            self.scale /= self._items()
        rows = _native.LossRows(num_tokens=self.arguments.num_tokens, hidden_size=self.arguments.hidden_size,
                                hidden_dtype=_staging.DTYPES[self.arguments.dtype], grad_scale=self.scale)
        for name, tensor in self._host.items():
            setattr(rows, "hidden_states" if name == "hidden" else name, tensor.data_ptr())
        teacher = self._host.get("teacher_hidden_states")
        if teacher is not None:
            rows.teacher_hidden_size = teacher.shape[1]
            rows.teacher_hidden_dtype = _staging.DTYPES[teacher.dtype]
        if "teacher_topk_ids" in self._host:
            rows.teacher_top_k = self._host["teacher_topk_ids"].shape[1]
        device = self.arguments.device
        if self.want_grad:
            self.grad = _staging.empty_like_host(self._host["hidden"].shape, self.arguments.dtype, device)
            rows.grad_hidden_states = self.grad.data_ptr()
        for name in self._outputs:
            self.results[name] = _staging.empty_like_host((self.arguments.num_tokens,), OUTPUTS[name], device)
            setattr(rows, name, self.results[name].data_ptr())
        if self.top_k:
            for name, dtype in (("topk_ids", torch.int32), ("topk_logprobs", torch.float32)):
                self.results[name] = _staging.empty_like_host((self.arguments.num_tokens, self.top_k), dtype, device)
                setattr(rows, name, self.results[name].data_ptr())
        return writer.submit(rows)

    def _items(self) -> float:
        """Denominator of a mean: as stated, or the weights of the valid rows. 1 where there are none."""
        recipe = self.arguments.recipe
        targets = self._host["targets"]
        valid = targets != recipe.ignore_index
        if self.num_items is not None:
            if self.num_items == 0 and valid.any():
                raise ValueError(f"num_items is 0, and {int(valid.sum())} tokens are valid: want the number that the mean "
                                 "divides by")
            return self.num_items or 1.0
        if recipe.class_weights is None and "token_weights" not in self._host:
            return max(int(valid.sum()), 1)
        weights = valid.to(torch.float64)
        if recipe.class_weights is not None:
            # Ids that the vocabulary does not have are for the service to refuse.
            last = len(recipe.class_weights) - 1
            weights *= torch.tensor(recipe.class_weights, dtype=torch.float64)[targets.clamp(min=0, max=last).long()]
        if "token_weights" in self._host:
            weights *= self._host["token_weights"].double()
        return float(weights.sum()) or 1.0

    def finish(self, writer: _native.NativeWriter, ticket: int) -> None:
        """Waits for the results, and starts them on their way to the device."""
        self.sums = writer.wait(ticket)
        device = self.arguments.device
        self.results = {name: _staging.upload(tensor, device).reshape(*self.arguments.leading, *tensor.shape[1:])
                        for name, tensor in self.results.items()}
        if self.grad is not None:
            self.grad = _staging.upload(self.grad, device)
        self._host = {}
        self.arguments.release()

    def counted(self) -> _native.LossResult:
        """Sums and counts. REQUIRES: finish() has returned."""
        assert self.sums is not None
        return self.sums

    def value(self) -> torch.Tensor:
        """The reduced loss, without a graph."""
        if self.reduction == "none":
            loss = self.results["token_loss"]
            if "token_weights" in self.arguments.inputs:
                loss = _times(loss, self.arguments.inputs["token_weights"].to(loss.device).reshape(loss.shape))
            return loss * self.scale if self.scale != 1.0 else loss
        return torch.full((), self.counted().loss_sum * self.scale, dtype=torch.float32, device=self.arguments.device)


class RemoteLossFunction(torch.autograd.Function):
    """Hands out a finished call's loss; backward is its hidden states' gradient times the upstream factor."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, anchor: torch.Tensor, call: Call, ledger: "UpstreamLedger") -> torch.Tensor:
        ctx.call = call
        ctx.ledger = ledger
        return call.value()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Tuple[Optional[torch.Tensor], None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError("lmhead: the loss cannot be differentiated twice: the service computes first derivatives "
                               "only. Call backward() or grad() without create_graph=True")
        call = ctx.call
        ctx.ledger.record(call, upstream)
        if call.grad is None:
            return None, None, None, None
        if ctx.ledger.once:  # Used once: no copy.
            grad, call.grad = call.grad, None
        else:
            grad = call.grad.clone()
        factor = upstream.to(torch.float32)
        grad.mul_(factor.reshape(-1, 1) if call.reduction == "none" else factor)
        return grad.reshape(*call.arguments.leading, -1), None, None, None


class UpstreamLedger:
    """The upstream factors of a step's losses: they must be one number, which commit applies to the head.

    Nothing here waits for the device; ``factor`` does, once a step.
    """

    def __init__(self, once: bool):
        self.once = once  # A trainable head's step: every loss takes part in one backward pass.
        self._factors: List[torch.Tensor] = []
        self._open = 0

    def expect(self) -> None:
        self._open += 1

    @property
    def settled(self) -> bool:
        """Whether every loss so far was backpropagated, and there was one."""
        return not self._open and bool(self._factors)

    def record(self, call: Call, upstream: torch.Tensor) -> None:
        if not self.once:
            return
        if call.used:
            raise RuntimeError("lmhead: backward() ran through this loss before; its gradient is in the head once, so "
                               "that a second pass would count in the trunk only")
        call.used = True
        self._open -= 1
        upstream = upstream.detach().to(torch.float32).reshape(-1)
        if call.reduction == "none":
            targets = call.arguments.inputs["targets"].to(upstream.device)
            ignored = targets == call.arguments.recipe.ignore_index
            low = upstream.masked_fill(ignored, math.inf).min()
            high = upstream.masked_fill(ignored, -math.inf).max()
            self._factors += [low, high]
        else:
            self._factors.append(upstream[0])

    def record_exact(self, device: torch.device) -> None:
        """A gradient that has all of its factors already: the others' must be 1."""
        self._factors.append(torch.ones((), device=device))

    def factor(self) -> float:
        """The one upstream factor; 1 when no loss was backpropagated. ValueError when there are several."""
        if self._open:
            raise ValueError(f"{self._open} losses of this step were computed with gradients but backward() did not run "
                             "through them: the head has their gradient, the trunk has not. Evaluate under torch.no_grad(), "
                             "and keep the loss call outside activation checkpointing, which runs it twice")
        if not self._factors:
            return 1.0
        device = self._factors[0].device
        values = [value for value in torch.stack([f.to(device) for f in self._factors]).tolist() if math.isfinite(value)
                  or math.isnan(value)]
        if not values:  # Only ignored tokens.
            return 1.0
        low, high = min(values), max(values)
        if not high - low <= 1e-6 * abs(high):
            raise ValueError(
                f"the losses of this step were multiplied by factors from {low:g} to {high:g} after the call. The head's "
                "gradient is summed before backward(), so that only one common factor can still be applied to it: pass "
                "different ones as grad_scale= (a call) or token_weights= (a token)")
        return float(high)


class LossFuture:
    """A loss under way: the trunk's next micro-batch can run meanwhile.

    ``result()`` waits and gives the tensor that ``loss()`` would have given; ``done()`` says whether it would wait for
    the sending (the computation may still go on).
    """

    def __init__(self, call: Call, writer: Callable[[], _native.NativeWriter], ticket: "concurrent.futures.Future[int]",
                 hidden: torch.Tensor, ledger: UpstreamLedger, explain: Callable[[BaseException], BaseException],
                 close: Callable[[], None]):
        self._call, self._writer, self._ticket = call, writer, ticket
        self._hidden: Optional[torch.Tensor] = hidden
        self._ledger, self._explain, self._close = ledger, explain, close
        self._loss: Optional[torch.Tensor] = None

    def done(self) -> bool:
        """Whether everything has been sent."""
        return self._ticket.done()

    @property
    def waited(self) -> bool:
        """Whether the results are here."""
        return self._call.sums is not None

    def result(self) -> torch.Tensor:
        """The loss. Errors as ``Step.loss``."""
        if self._loss is None:
            self.wait()
            if self._call.want_grad or self._ledger.once and torch.is_grad_enabled():
                anchor = torch.zeros((), device=self._call.arguments.device, requires_grad=True)
                self._loss = RemoteLossFunction.apply(self._hidden, anchor, self._call, self._ledger)
            else:
                self._loss = self._call.value()
            self._hidden = None
        return self._loss

    def wait(self) -> Call:
        """Waits for the results, without making a loss of them."""
        if self._call.sums is None:
            try:
                ticket = self._ticket.result()
                self._call.finish(self._writer(), ticket)
            except Exception as error:
                raise self._explain(error) from error
            finally:
                self._close()
        return self._call

    @property
    def sums(self) -> Dict[str, float]:
        """Sums and counts of the call (lmhead.v1.LossSums) and its timings; waits."""
        result = self.wait().counted()
        return {field[0]: getattr(result, field[0]) for field in result._fields_ if field[0] != "struct_size"}
