"""Steps that survive the service."""

from __future__ import annotations

import time
from typing import Callable, Optional, Tuple, TypeVar

from lmhead.errors import FailedPrecondition, HeadPoisoned, NotFound, StepLost, Unavailable
from lmhead.head import RemoteHead
from lmhead.step import Step
from lmhead.workers import SINGLE, Workers

T = TypeVar("T")


def elastic_step(head: RemoteHead, number: int, body: Callable[[Step], T], *, workers: Workers = SINGLE,
                 num_recipes: int = 1, on_restart: Optional[Callable[[RemoteHead], None]] = None, attempts: int = 5,
                 outage_seconds: float = 600.0) -> T:
    """Runs ``body(step)`` within ``head.step(number)``, again when the step is lost; gives what ``body`` returned.

    ``body`` computes the losses, their backward passes, prepare and commit. It starts with zero_grad(), reads the same
    batches each time, and leaves the trunk's optimizer alone: its step comes after ``elastic_step``, when the head's has
    been applied. So a lost step leaves no trace.

    A service that was restarted has no heads, also when that was between two steps. ``on_restart(head)`` brings this one
    back as of the last commit: restores a checkpoint (RemoteHead.restore_checkpoint), or deletes, creates and loads it. The
    same is asked of it for a head that was poisoned. On the ranks of a torch.distributed job the first rank calls it.

    Args:
        attempts: how often the step is tried in all.
        outage_seconds: how long to wait for a service that does not answer.

    Raises:
        StepLost: the last attempt was lost, too. Also where an evaluation within ``body`` found the service away.
        Unavailable: the service did not come back in time.
        FailedPrecondition: the head came back as of another step.
        Error: whatever ``body`` or ``on_restart`` raise besides.
    """
    incarnation, committed = _begin(head, workers, on_restart, outage_seconds)
    for attempt in range(1, attempts + 1):
        step = head.step(number, workers, num_recipes)
        step.commit_patience_seconds = outage_seconds
        try:
            with step:
                result = body(step)
                if not step.committed:
                    raise RuntimeError("body returned without step.commit()")
            return result
        except (StepLost, HeadPoisoned):
            if attempt == attempts:
                raise
            incarnation = _recover(head, number, committed, incarnation, workers, on_restart, outage_seconds)
    raise AssertionError("unreachable")


def _begin(head: RemoteHead, workers: Workers, on_restart: Optional[Callable[[RemoteHead], None]],
           outage_seconds: float) -> Tuple[int, int]:
    """(incarnation, the last committed step), once the head is as this process left it."""
    def settle() -> Tuple[int, int]:
        now = _await_service(head, outage_seconds)
        if head.last_commit is None:  # Nobody to say what the head should be.
            return now, head.info().last_committed_step
        incarnation, committed = head.last_commit
        if now != incarnation and (workers.leader or not workers.grouped):
            _restore(head, committed, on_restart)
        return now, committed

    found, _ = workers.agree(settle)
    return found


def _recover(head: RemoteHead, number: int, committed: int, incarnation: int, workers: Workers,
             on_restart: Optional[Callable[[RemoteHead], None]], outage_seconds: float) -> int:
    """Waits for the service and makes it ready for another attempt. Nobody leaves before all are done: a late abort
    would hit the new attempt."""
    def settle() -> int:
        now = _await_service(head, outage_seconds)
        if now == incarnation:
            info = head.info()
            if not info.poisoned_by:
                if info.open_step == number:
                    head.client.call("AbortStep", head=head.name, step=str(number), incarnation=str(now),
                                     reason="a worker lost the step")
                return now
            if on_restart is None:
                raise HeadPoisoned(f"head {head.name} had a fatal error, and there is no on_restart to bring it back: "
                                   f"{info.poisoned_by}")
        if workers.leader or not workers.grouped:
            _restore(head, committed, on_restart)
        return now

    now, _ = workers.agree(settle)
    return now


def _restore(head: RemoteHead, committed: int, on_restart: Optional[Callable[[RemoteHead], None]]) -> None:
    if on_restart is not None:
        on_restart(head)
    try:
        info = head.info()  # Also of a server that restores its heads itself.
    except NotFound as error:
        raise NotFound(f"{error.message}; the service has restarted: pass on_restart= to elastic_step, which restores a "
                       "checkpoint or creates and loads the head") from error
    # A head that was created anew counts from 0.
    if info.last_committed_step not in (0, committed):
        raise FailedPrecondition(f"head {head.name} was restored as of step {info.last_committed_step}, the trainer is at "
                                 f"step {committed}: restore the trunk of step {info.last_committed_step}, too, and go on "
                                 "from there")


def _await_service(head: RemoteHead, outage_seconds: float) -> int:
    deadline = time.monotonic() + outage_seconds
    while True:
        try:
            return head.client.incarnation()
        except Unavailable as error:
            if time.monotonic() >= deadline:
                raise Unavailable(f"the service did not come back within {outage_seconds:g} s: {error.message}") from error
            time.sleep(0.2)
