"""Logits in the trainer, for sampling from a model whose head is in the service: from a local copy of the head's rows."""

from __future__ import annotations

from typing import Any, NoReturn, Optional, Tuple

import torch

from lmhead.head import RemoteHead

READ_BYTES = 64 << 20  # Of the weight in one call, so that the host has one such part of it at a time.


class LocalLogits(torch.autograd.Function):
    """The output layer on rows that are no parameters: a loss made of such logits would train the trunk against a head that
    stands still, so that the backward pass says what to do."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.linear(hidden.to(weight.device, weight.dtype), weight, bias)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> NoReturn:
        raise RuntimeError(
            "lmhead: these logits are of a copy of the head's rows, for sampling: a loss made of them would leave the head "
            "untrained. Pass labels to the model, which gives the loss, or take Step.logprobs; a Trainer's label smoothing goes "
            "into lmhead.patch(recipe=lmhead.Recipe(label_smoothing=...)), distillation into a loop with lmhead.Distillation")


class LocalRows:
    """The weight and bias of a head as they were committed last: read when first wanted, and again after each change.

    At most one copy, vocab_size x hidden_size elements; of a tied weight none, since the input embedding has its rows.
    """

    def __init__(self, head: RemoteHead, tied: Optional[torch.nn.Parameter], has_bias: bool) -> None:
        self._head, self._tied, self._has_bias = head, tied, has_bias
        self._rows: Optional[Tuple[torch.Tensor, Optional[torch.Tensor]]] = None
        self._read_as: Optional[Tuple[int, torch.device, torch.dtype]] = None

    def get(self, like: torch.Tensor) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """The weight, [vocab_size, hidden_size], and the bias, [vocab_size] or None, with ``like``'s device and dtype."""
        wanted = (self._head.num_changes, like.device, like.dtype)
        if self._rows is None or self._read_as != wanted:
            self.drop()  # Before the next one is there.
            self._rows = self._read(like)
            self._read_as = wanted
        return self._rows

    def drop(self) -> None:
        """Frees the copy; the next ``get`` reads another."""
        self._rows = None

    def _read(self, like: torch.Tensor) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        bias = self._head.read_bias().to(like) if self._has_bias else None
        if self._tied is not None:
            return self._tied, bias
        num_rows = self._head.vocab_size
        weight = torch.empty(num_rows, self._head.hidden_size, dtype=like.dtype, device=like.device)
        rows = max(1, READ_BYTES // (4 * self._head.hidden_size))
        for start in range(0, num_rows, rows):
            part = self._head.read_weight(start, min(rows, num_rows - start))
            weight[start:start + part.shape[0]].copy_(part)
        return weight, bias
