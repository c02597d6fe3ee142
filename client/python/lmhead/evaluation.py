"""Losses without a step over one stream: many calls open it once, and a teacher's program can join.

    with head.evaluation("validation") as evaluation, torch.no_grad():
        for batch in batches:
            loss = evaluation.loss(trunk(batch), batch, shift=True)
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, List, Optional, Tuple, Type

import torch

from lmhead._staging import check_tensor
from lmhead.loss import Arguments, Call, LossFuture, UpstreamLedger
from lmhead.recipe import Recipe
from lmhead.step import Streams, checked_arguments, checked_items, differences

if TYPE_CHECKING:
    from lmhead.head import RemoteHead


def evaluation_call(head: "RemoteHead", hidden: torch.Tensor, labels: torch.Tensor, *, recipe: Recipe = Recipe(),
                    shift: bool = False, reduction: str = "sum", num_items: Optional[float] = None,
                    grad_scale: float = 1.0, teacher_hidden: Optional[torch.Tensor] = None, frozen: bool = False,
                    **tensors: Optional[torch.Tensor]) -> Tuple[Call, Tuple[str, ...]]:
    """A loss without a step, with the outputs it asks for. Errors as ``RemoteHead.loss``."""
    check_tensor(hidden, "hidden")
    want_grad = torch.is_grad_enabled() and hidden.requires_grad
    if want_grad and head.trainable and not frozen:
        raise RuntimeError(f"head {head.name} is trainable: use head.step(...).loss(...), torch.no_grad() to evaluate, "
                           "or frozen=True for the gradient of hidden alone")
    arguments = checked_arguments(head, hidden, labels, recipe, shift, reduction, grad_scale, teacher_hidden, tensors)
    outputs = ("token_loss",) if reduction == "none" else ()
    return Call(arguments, outputs, want_grad, reduction, grad_scale, checked_items(num_items, reduction)), outputs


def _same(error: BaseException) -> BaseException:
    """Without a step there is nothing to repeat: an error is what it is."""
    return error


def evaluation_future(call: Call, streams: Streams, hidden: torch.Tensor, close: Any) -> LossFuture:
    """Sends the call."""
    ticket = streams.thread.submit(call.submit, streams.writer)
    return LossFuture(call, lambda: streams.writer, ticket, hidden, UpstreamLedger(once=False), _same, close)


class Evaluation:
    """Losses without a step over one stream; made by ``RemoteHead.evaluation``, used as a context manager.

    The first loss opens the stream, for its recipe, dtype and outputs, which the later ones share. Leaving the block
    waits for what is under way. Not thread-safe.
    """

    def __init__(self, head: "RemoteHead", worker: str):
        self.head = head
        self.worker = worker
        self._key: Any = None
        self._streams: Optional[Streams] = None
        self._futures: List[LossFuture] = []
        self._over = False

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
        """A loss; arguments, result and errors as for ``RemoteHead.loss``.

        Raises:
            ValueError: a tensor does not fit, or the call has not the recipe, dtype and outputs of the first one;
                nothing was sent.
            DeadlineExceeded: of a paired stream: the teacher's program did not come.
        """
        return self.loss_async(hidden, labels, **options).result()

    def loss_async(self, hidden: torch.Tensor, labels: torch.Tensor, **options: Any) -> LossFuture:
        """Like ``loss``, at once; ``result()`` of the answer is the loss. ``hidden`` must not change before that."""
        if self._over:
            raise RuntimeError(f"the evaluation of head {self.head.name} is over: a loss needs an open one")
        call, outputs = evaluation_call(self.head, hidden, labels, **options)
        future = evaluation_future(call, self._opened(call.arguments, outputs, call.want_grad), hidden, lambda: None)
        self._futures = [other for other in self._futures if not other.waited] + [future]
        return future

    def _opened(self, arguments: Arguments, outputs: Tuple[str, ...], want_grad: bool) -> Streams:
        key = (arguments.recipe_message(), arguments.dtype, outputs, want_grad)
        if self._streams is None:
            self._streams = Streams(self.head.open_writer(arguments, outputs, want_grad, 0, self.worker, 0))
            self._key = key
        if key != self._key:
            changed = differences(("recipe", "dtype", "outputs", "gradient of hidden"), self._key, key)
            raise ValueError(f"the evaluation has a loss that differs from its first: {changed}. Open another one for it")
        return self._streams

    def __enter__(self) -> "Evaluation":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], _error: Optional[BaseException],
                 _traceback: Optional[TracebackType]) -> None:
        self._over = True
        try:
            if kind is None:
                for future in self._futures:
                    future.wait()
                if self._streams is not None:
                    self._streams.writer.finish()
        finally:
            self._futures = []
            if self._streams is not None:
                self._streams.close()
                self._streams = None
