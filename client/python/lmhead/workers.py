"""Which workers feed a step, and how the ranks of a torch.distributed job agree on what happened to it."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, List, Optional, Sequence, Tuple, TypeVar

import torch

from lmhead.errors import Error, HeadPoisoned, StepLost

T = TypeVar("T")


class RankFailed(Error):
    """Another rank failed, so that the step cannot go on here; the message is that rank's."""

    code, code_name = 10, "ABORTED"


@dataclasses.dataclass(frozen=True)
class Workers:
    """The workers of a step: this process is one of them.

    Attributes:
        names: all workers' names, the same everywhere, each 1 to 100 characters of [A-Za-z0-9._-].
        name: this process's.
        group: the torch.distributed group whose ranks the workers are, or None for one process, or for processes that
            agree by other means.
    """

    names: Tuple[str, ...] = ("w0",)
    name: str = "w0"
    group: Any = None
    grouped: bool = False

    def __post_init__(self) -> None:
        if self.name not in self.names:
            raise ValueError(f"worker {self.name!r} is not one of {self.names}")

    @property
    def leader(self) -> bool:
        """Whether this process's arguments count where all should be equal."""
        return self.name == self.names[0]

    def agree(self, action: Callable[[], T]) -> Tuple[T, List[T]]:
        """Runs ``action`` on every rank and gives (this rank's result, all ranks' results) when it worked on all.

        When it failed anywhere it fails everywhere: here with the own error, else StepLost when the others may repeat
        the step, else RankFailed. Collective: each rank calls it the same number of times.
        """
        if not self.grouped:
            result = action()
            return result, [result]
        error: Optional[BaseException] = None
        outcome: Any = None
        try:
            outcome = action()
        except Exception as caught:
            error = caught
        message = None if error is None else (isinstance(error, (StepLost, HeadPoisoned)), f"{type(error).__name__}: {error}")
        everyone: List[Any] = [None] * torch.distributed.get_world_size(self.group)
        torch.distributed.all_gather_object(everyone, (message, outcome), group=self.group)
        if error is not None:
            raise error
        failed = [(rank, failure) for rank, (failure, _) in enumerate(everyone) if failure is not None]
        if not failed:
            return outcome, [result for _, result in everyone]
        text = "; ".join(f"rank {rank}: {failure[1]}" for rank, failure in failed)
        if all(failure[0] for _, failure in failed):
            raise StepLost(text)
        raise RankFailed(text)


def named_workers(name: str, names: Sequence[str]) -> Workers:
    """Workers that are no torch.distributed job: each process states its own name and all names."""
    return Workers(tuple(names), name)


def distributed_workers(group: Any = None, prefix: str = "w") -> Workers:
    """One worker a rank of a torch.distributed group (None: all ranks), named ``w0``, ``w1``, ….

    Every rank then calls ``step``, ``loss``, ``prepare`` and ``commit``; all get the same report and the same commit's
    answer, and an error of one rank is an error of all, so that they repeat or give up together. The first rank's
    learning rate and multiplier count.

    Backward passes must not wait for each other meanwhile: with DistributedDataParallel work under ``no_sync()`` and
    call ``lmhead.average_gradients`` between ``prepare`` and ``commit``.
    """
    size = torch.distributed.get_world_size(group)
    names = tuple(f"{prefix}{rank}" for rank in range(size))
    return Workers(names, names[torch.distributed.get_rank(group)], group, size > 1)


SINGLE = Workers()
