"""The teacher's program of a paired stream: its hidden states meet the student's in the service.

    with head.teacher_stream(number, recipe, hidden_dtype=torch.bfloat16) as teacher:
        for batch in micro_batches:
            teacher.send(trunk(batch))
"""

from __future__ import annotations

import concurrent.futures
from types import TracebackType
from typing import TYPE_CHECKING, List, Optional, Tuple, Type

import torch

from lmhead import _native, _staging
from lmhead.recipe import Recipe
from lmhead.step import Streams

if TYPE_CHECKING:
    from lmhead.head import RemoteHead


class TeacherStream:
    """The teacher's side of one worker in one step; made by ``RemoteHead.teacher_stream``, used as a context manager.

    Leaving the block waits until the student's program has the results of everything that was sent, and says how much
    that was, without which the step cannot be prepared. An exception cancels instead: the student's side then waits for
    up to the server's --pair_timeout_seconds. Not thread-safe.
    """

    def __init__(self, head: "RemoteHead", step: int, recipe: Recipe, dtype: torch.dtype, hidden_dtype: torch.dtype,
                 worker: str, token_weights: bool, token_temperature: bool, incarnation: int):
        self._dtype = dtype
        self._hidden_dtype = hidden_dtype
        message = {
            "head": head.name, "step": str(step), "worker": worker, "incarnation": str(incarnation), "teacher_side": True,
            "hidden_dtype": _staging.DTYPE_NAMES[hidden_dtype],
            "recipe": recipe.message(token_weights, token_temperature, _staging.DTYPE_NAMES[self._dtype], 0)}
        self._streams = Streams(head.writer_of(message))
        self._waiter = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="lmhead-teacher")
        self._sent: List["concurrent.futures.Future[None]"] = []

    def send(self, hidden: torch.Tensor) -> None:
        """Sends the teacher's hidden states of one loss call of the student's, in the order of its calls.

        Returns at once; ``hidden`` must not change before the block is left. Its memory is kept until the student's
        program has the result.

        Args:
            hidden: [..., the teacher's hidden_size], in the dtype that the recipe's ``paired_stream`` says; as many rows
                as the student's, never shifted.

        Raises:
            ValueError: it does not fit; nothing was sent.
            Error: what was sent before was refused.
        """
        if hidden.dtype != self._dtype:
            raise ValueError(f"hidden is {hidden.dtype}, want {self._dtype} as the recipe's paired_stream says")
        if hidden.dim() < 2 or hidden.numel() == 0:
            raise ValueError(f"hidden has shape {tuple(hidden.shape)}, want [..., the teacher's hidden_size] and at least "
                             "one row")
        for sent in self._sent:
            if sent.done():
                sent.result()
        download = _staging.Download({"hidden": hidden.detach().reshape(-1, hidden.shape[-1])})
        ticket = self._streams.thread.submit(self._submit, download)
        self._sent.append(self._waiter.submit(self._wait, ticket))

    def _submit(self, download: _staging.Download) -> Tuple[int, torch.Tensor]:
        """On the thread that submits: the ticket, and the rows lent until it is waited for."""
        rows = download.wait()["hidden"]
        return self._streams.writer.submit(_native.LossRows(
            num_tokens=rows.shape[0], hidden_dtype=_staging.DTYPES[self._hidden_dtype], grad_scale=1.0,
            teacher_hidden_states=rows.data_ptr(), teacher_hidden_size=rows.shape[1],
            teacher_hidden_dtype=_staging.DTYPES[rows.dtype])), rows

    def _wait(self, ticket: "concurrent.futures.Future[Tuple[int, torch.Tensor]]") -> None:
        """On a thread of its own: lets go of the rows as soon as the service has no more use for them."""
        number, _rows = ticket.result()
        self._streams.writer.wait(number)

    def __enter__(self) -> "TeacherStream":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], _error: Optional[BaseException],
                 _traceback: Optional[TracebackType]) -> None:
        try:
            if kind is None:
                for sent in self._sent:
                    sent.result()
                self._streams.writer.finish()
        finally:
            self._streams.writer.cancel()  # What is still under way, so that nobody waits for it.
            self._waiter.shutdown(wait=True)
            self._streams.close()
            self._sent = []
