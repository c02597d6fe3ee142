"""One optimizer step of a remote head: losses in, then prepare, then commit."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Set, Tuple, Type, TypeVar

import torch

from lmhead import _native
from lmhead._staging import check_tensor
from lmhead.errors import (Aborted, Cancelled, DeadlineExceeded, Error, FailedPrecondition, HeadPoisoned, InvalidArgument,
                           NotFound, StepLost, Unavailable)
from lmhead.logprobs import Logprobs, differentiable_logprobs
from lmhead.loss import (REDUCTIONS, TOKEN_INPUTS, TOPK_INPUTS, Arguments, Call, LossFuture, UpstreamLedger, gather,
                         narrow_ids, shift_left)
from lmhead.recipe import IGNORE_INDEX, Recipe
from lmhead.workers import Workers

T = TypeVar("T")

if TYPE_CHECKING:
    from lmhead.head import RemoteHead


@dataclasses.dataclass(frozen=True)
class Report:
    """What the head has of a step once all workers are through; the same for every worker.

    Attributes:
        num_tokens: valid tokens (label differs from ignore_index, hidden states finite): what a mean divides by.
        num_rows: all tokens.
        loss_sum: sum over valid tokens; ``loss_mean`` divides it.
        grad_norm: L2 norm of the head's gradient as torch's ``.grad`` would hold it: with upstream factors, before
            ``grad_multiplier``.
        grad_multiplier: what makes a mean of the gradient: 1 / num_tokens after losses reduced by sum or none, 1 /
            number of workers after losses reduced by mean.
        num_nonfinite_rows: rows with NaN or infinity, left out of everything; commit refuses them unless told.
        sums: every sum and count (lmhead.v1.LossSums).
    """

    step: int
    num_tokens: int
    num_rows: int
    loss_sum: float
    grad_norm: float
    grad_multiplier: float
    num_nonfinite_rows: int
    sums: Dict[str, Any]

    @property
    def loss_mean(self) -> float:
        """loss_sum / num_tokens; 0 without valid tokens."""
        return self.loss_sum / self.num_tokens if self.num_tokens else 0.0


@dataclasses.dataclass(frozen=True)
class Commit:
    """The answer to a commit: the step, updates so far, and the norm of the gradient that was applied."""

    step: int
    num_updates: int
    grad_norm: float


def _number(value: Any) -> Any:
    """A number of protobuf's JSON, which has 64-bit integers, NaN and the infinities as strings."""
    if not isinstance(value, str):
        return value
    return int(value) if value.lstrip("-").isdigit() else float(value)


class Streams:
    """A worker's writer for one recipe, dtype and set of outputs, and the thread that submits to it in order."""

    def __init__(self, writer: _native.NativeWriter):
        self.writer = writer
        self.thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="lmhead-submit")

    def close(self) -> None:
        self.writer.cancel()
        self.thread.shutdown(wait=True)
        self.writer.close()


_LOST_CODES = (Aborted, Cancelled, DeadlineExceeded, FailedPrecondition, NotFound, Unavailable)


class Step:
    """An open step; made by ``RemoteHead.step``, used as a context manager.

    Leaving the block without ``commit()`` aborts the step: with an exception under way silently, else with a
    RuntimeError. Not thread-safe.
    """

    def __init__(self, head: "RemoteHead", number: int, workers: Workers, num_recipes: int):
        if number < 1:
            raise ValueError(f"step is {number}, want at least 1: see RemoteHead.next_step")
        if num_recipes < 1:
            raise ValueError(f"num_recipes is {num_recipes}, want at least 1")
        self.head = head
        self.number = number
        self.workers = workers
        self.incarnation = 0
        self.report: Optional[Report] = None
        self._num_recipes = num_recipes
        self._streams: Dict[Any, Streams] = {}
        self._ledger = UpstreamLedger(once=head.trainable)
        self._reductions: Set[str] = set()
        self._futures: List[LossFuture] = []
        self._upstream = 1.0
        self._num_gradient_pieces = 0
        self._state = "new"
        self._agreed_failure = False
        self.commit_patience_seconds = 0.0  # How long commit() goes on trying while nobody answers.

    # --- Opening and closing ------------------------------------------------------------------------------------------

    def _names(self, worker: str) -> List[str]:
        return [worker] + [f"{worker}.{i}" for i in range(1, self._num_recipes)]

    def __enter__(self) -> "Step":
        every = [name for worker in self.workers.names for name in self._names(worker)]
        answer, _ = self._agree(lambda: self.head.client.call(
            "BeginStep", head=self.head.name, step=str(self.number), workers=every))
        self.incarnation = int(answer["incarnation"])
        self._state = "open"
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 _traceback: Optional[TracebackType]) -> None:
        if self._state in ("committed", "aborted"):
            return
        # Of a call within the block that is not the step's, such as an evaluation: it, too, may mean that the step is lost.
        cause = error if error is None or self._state == "new" else self._explain(error)
        if cause is not None and self.workers.grouped and not self._agreed_failure and self._state != "new":
            self._tell_group(cause)
        self._abort(f"{kind.__name__}: {error}" if kind else "the block ended without a commit")
        if error is None:
            raise RuntimeError(f"step {self.number} was neither committed nor aborted; it is aborted now")
        if cause is not error and cause is not None:
            raise cause from error

    def _tell_group(self, error: BaseException) -> None:
        """The other ranks wait in their next agreement: fail it for them."""
        def fail() -> None:
            raise error if isinstance(error, Exception) else RuntimeError(str(error))
        try:
            self.workers.agree(fail)
        except Exception:
            pass  # The caller's error goes on.

    def abort(self, reason: str = "the trainer gave it up") -> None:
        """Throws the step's gradient away, on all workers; losses still under way are cancelled. Every rank calls it."""
        self._abort(reason)

    def _abort(self, reason: str) -> None:
        self._close_streams()
        state, self._state = self._state, "aborted"
        if state == "new":
            return
        try:
            self.head.client.call("AbortStep", timeout=10.0, head=self.head.name, step=str(self.number),
                                  incarnation=str(self.incarnation), reason=reason[:500])
        except Error:
            pass  # Gone already, or nobody there: either way nothing of it will be applied.

    def _close_streams(self) -> None:
        for streams in self._streams.values():
            streams.close()
        self._streams = {}
        self._futures = []

    @property
    def committed(self) -> bool:
        """Whether commit() has succeeded."""
        return self._state == "committed"

    def _require(self, state: str, what: str) -> None:
        if self._state == "new":
            raise RuntimeError(f"{what} of step {self.number}: the step is not open, want it within `with head.step(...) as "
                               "step:`")
        if self._state != state:
            raise RuntimeError(f"{what} of step {self.number}: the step is {self._state}, want {state}")

    # --- Losses -------------------------------------------------------------------------------------------------------

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
        """The loss of a micro-batch, with the gradient of ``hidden`` behind it; adds to the head's gradient.

        Under ``torch.no_grad()`` it is an evaluation that leaves the step alone.

        Args:
            hidden: [..., hidden_size], float32, bfloat16 or float16, on the CPU or a CUDA device: input of the head.
            labels: [...], integers: vocabulary ids, or the recipe's ignore_index.
            recipe: lmhead.Recipe; a step's losses share one, unless the step was opened with more.
            shift: labels are those of the inputs themselves, as Hugging Face has them: position t is trained on label
                t + 1, and every tensor beside ``hidden`` is shifted alike. False: they are aligned with ``hidden``.
            reduction: "sum" (the mean over all tokens of all workers is then made at commit, which alone knows their
                number), "mean" over this call's valid tokens, or "none": [...], zero where ignored. For a trainable
                head upstream factors must be alike for all losses of the step, and within a "none" for all tokens.
            num_items: what "mean" divides by instead, such as the tokens of all micro-batches when that is known.
            grad_scale: factor of the objective, known before: loss and all gradients are multiplied by it.
            token_weights, token_temperature: [...]; see docs/NUMERICS.md.
            logprob_grad, entropy_grad, old_logprob, advantage, reference_logprob: [...]; of a policy recipe.
            teacher_hidden: [..., the teacher's hidden_size]; of a distillation recipe.
            teacher_topk_ids, teacher_topk_logprobs: [..., k]; of a distillation without a teacher head.

        Returns:
            float32: a scalar, or [...] for "none".

        Raises:
            ValueError: a tensor does not fit; nothing was sent.
            StepLost: repeat the step.
            Error: any other refusal of the service.
        """
        return self.loss_async(hidden, labels, **options).result()

    def loss_async(self, hidden: torch.Tensor, labels: torch.Tensor, *, recipe: Recipe = Recipe(), shift: bool = False,
                   reduction: str = "sum", num_items: Optional[float] = None, grad_scale: float = 1.0,
                   teacher_hidden: Optional[torch.Tensor] = None, **tensors: Optional[torch.Tensor]) -> LossFuture:
        """Like ``loss``, at once: ``result()`` of the answer is the loss. ``hidden`` must not change before that."""
        self._require("open", "a loss")
        if not torch.is_grad_enabled():
            return self.head.loss_async(hidden, labels, recipe=recipe, shift=shift, reduction=reduction,
                                        num_items=num_items, grad_scale=grad_scale, teacher_hidden=teacher_hidden,
                                        **tensors)
        arguments = checked_arguments(self.head, hidden, labels, recipe, shift, reduction, grad_scale, teacher_hidden,
                                      tensors)
        if grad_scale == 0.0:
            raise ValueError("grad_scale is 0: leave the loss out, or evaluate it under torch.no_grad()")
        outputs = ("token_loss",) if reduction == "none" else ()
        call = Call(arguments, outputs, hidden.requires_grad, reduction, grad_scale, checked_items(num_items, reduction))
        try:
            streams = self._streams_for(arguments, outputs, hidden.requires_grad)
        except Error as error:
            raise self._explain(error) from error
        if self.head.trainable:
            self._ledger.expect()
        self._reductions.add("mean" if reduction == "mean" else "sum")
        ticket = streams.thread.submit(call.submit, streams.writer)
        future = LossFuture(call, lambda: streams.writer, ticket, hidden, self._ledger, self._explain, lambda: None)
        self._futures = [other for other in self._futures if not other.waited] + [future]
        return future

    def logprobs(self, hidden: torch.Tensor, labels: torch.Tensor, *, shift: bool = False, temperature: float = 1.0,
                 ignore_index: int = IGNORE_INDEX) -> Logprobs:
        """Log-probabilities of the labels, and entropies, for an objective that is written in PyTorch.

        Autograd goes through them into ``hidden`` and into the head, whatever the objective makes of them: factors may
        differ between tokens and calls, and a backward pass may run several times, or not at all. For that it computes
        the logits a second time; where one of the losses that a Recipe has is meant, ``loss`` does without.

        The report's ``grad_multiplier`` is 1 / workers after these: the objective is the mean, or the sum, that it is.

        Args:
            hidden: [..., hidden_size]; must not change before the backward pass.
            labels: [...], integers.
            shift: position t predicts label t + 1, as for ``loss``.
            temperature: logits / temperature.
            ignore_index: label whose log-probability and entropy are 0.

        Returns:
            logprob, entropy and argmax, [...] each.

        Raises:
            ValueError: a tensor does not fit; nothing was sent.
            RuntimeError: in the backward pass: the step is over, or create_graph=True.
            StepLost: repeat the step. Also raised by the backward pass.
            Error: any other refusal of the service, such as of a NaN in the objective's gradient.
        """
        self._require("open", "log-probabilities")
        labels = shift_left(labels, ignore_index) if shift else labels
        return differentiable_logprobs(
            self.head, hidden, labels, temperature, ignore_index,
            lambda recipe, coefficients: self._backward(hidden, labels, recipe, coefficients))

    def _backward(self, hidden: torch.Tensor, labels: torch.Tensor, recipe: Recipe,
                  coefficients: Dict[str, Optional[torch.Tensor]]) -> Optional[torch.Tensor]:
        self._require("open", "a backward pass through log-probabilities")
        arguments = checked_arguments(self.head, hidden, labels, recipe, False, "sum", 1.0, None, coefficients)
        call = Call(arguments, (), hidden.requires_grad, "sum", 1.0, None)
        try:
            streams = self._streams_for(arguments, (), hidden.requires_grad)
            call.finish(streams.writer, streams.thread.submit(call.submit, streams.writer).result())
        except Error as error:
            raise self._explain(error) from error
        self._reductions.add("mean")
        if self.head.trainable:
            self._ledger.record_exact(hidden.device)
        return call.grad

    def _streams_for(self, arguments: Arguments, outputs: Tuple[str, ...], want_grad: bool) -> Streams:
        message = arguments.recipe_message()
        distillation = message.get("distillation", {})
        key = (arguments.recipe, arguments.dtype, outputs, want_grad, message["token_weights"],
               message["per_token_temperature"], distillation.get("teacher_hidden_dtype"), distillation.get("top_k"))
        if key in self._streams:
            return self._streams[key]
        if len(self._streams) == self._num_recipes:
            changed = differences(("recipe", "dtype", "outputs", "gradient of hidden", "token_weights", "token_temperature",
                                   "the teacher's dtype", "top k"), next(iter(self._streams)), key)
            raise InvalidArgument(f"step {self.number} has a loss that differs from its first: {changed}. A step is opened with "
                                  f"num_recipes= as many as it has such combinations, this one with {self._num_recipes}")
        worker = self._names(self.workers.name)[len(self._streams)]
        self._streams[key] = Streams(self.head.open_writer(arguments, outputs, want_grad, self.number, worker,
                                                            self.incarnation))
        return self._streams[key]

    @property
    def settled(self) -> bool:
        """Whether the backward pass has run through every loss so far, and there was one."""
        return self._ledger.settled

    def upstream_factor(self) -> float:
        """The factor that the losses so far were multiplied by before backward(); waits for the device."""
        return self._ledger.factor()

    def accumulate_weight_gradient(self, rows: torch.Tensor, row_ids: Optional[torch.Tensor] = None,
                                   row_start: int = 0) -> None:
        """Adds a gradient of the head's weight that was computed elsewhere, such as a tied embedding's.

        Args:
            rows: [n, hidden_size], any floating dtype; on the scale of the losses as they were given to ``loss``, that
                is without the upstream factor, which commit applies to everything.
            row_ids: [n], distinct vocabulary ids; None: rows row_start and on.
        """
        self._require("open", "accumulate_weight_gradient")
        data = rows.detach().to("cpu", torch.float32).contiguous()
        ids = None if row_ids is None else narrow_ids(row_ids.detach().cpu(), "row_ids").contiguous()
        if data.dim() != 2 or (ids is not None and tuple(ids.shape) != (data.shape[0],)):
            raise ValueError(f"rows has shape {tuple(data.shape)} and row_ids "
                             f"{None if ids is None else tuple(ids.shape)}, want [n, hidden_size] and [n]")
        try:
            self._num_gradient_pieces += self.head.client.native.accumulate_weight_gradient(
                self.head.name, self.number, self.incarnation, self.workers.name, self._num_gradient_pieces, row_start,
                None if ids is None else ids.data_ptr(), data.shape[0], data.shape[1], data.data_ptr())
        except Error as error:
            raise self._explain(error) from error

    # --- Prepare and commit -------------------------------------------------------------------------------------------

    def prepare(self, wait_seconds: float = 0.0, *, loss_scale: float = 1.0) -> Report:
        """Ends this worker's part, waits for the other workers, and reports. Every worker calls it, once.

        Args:
            wait_seconds: how long to wait for workers that are not through; 0 means 60.
            loss_scale: what the trunk's gradients were divided by since the backward passes, such as a GradScaler's
                get_scale() after its unscale_(): report and commit then speak of gradients without it.

        Raises:
            ValueError: losses whose backward pass did not run, or whose upstream factors differ.
            DeadlineExceeded: another worker is not through yet; prepare() may be called again.
        """
        if self._state == "finished":  # Called before; another worker was late.
            return self._prepare(wait_seconds)
        self._require("open", "prepare")
        if not (math.isfinite(loss_scale) and loss_scale > 0.0):
            raise ValueError(f"loss_scale is {loss_scale}, want a finite number above 0")
        _, factors = self._agree(lambda: self._finish_streams() / loss_scale)
        self._upstream = factors[0]
        if any(abs(factor - self._upstream) > 1e-6 * abs(self._upstream) for factor in factors):
            self._agreed_failure = True
            raise ValueError(f"the ranks multiplied their losses by different factors, {factors}; want one")
        self._state = "finished"
        return self._prepare(wait_seconds)

    def _finish_streams(self) -> float:
        for future in self._futures:
            future.wait()
        self._futures = []
        factor = self._ledger.factor()
        names = self._names(self.workers.name)
        for worker in names[len(self._streams):]:  # A worker that has nothing to send says so.
            hidden = torch.zeros(1, self.head.hidden_size)
            arguments = gather(hidden, torch.zeros(1, dtype=torch.int64), Recipe(), False, {}, None, {})
            self._streams[worker] = Streams(self.head.open_writer(arguments, (), False, self.number, worker,
                                                                   self.incarnation))
        for streams in self._streams.values():
            streams.writer.finish()
        return factor

    def _prepare(self, wait_seconds: float) -> Report:
        answer, _ = self._agree(lambda: self.head.client.call(
            "PrepareStep", head=self.head.name, step=str(self.number), incarnation=str(self.incarnation),
            wait_seconds=wait_seconds))
        sums = {name: _number(value) for name, value in answer["sums"].items()}
        if len(self._reductions) > 1:
            raise self._local_failure(ValueError("the step mixes losses reduced by mean, or log-probabilities, with "
                                                 "others: their gradients have no common factor; use one reduction, or "
                                                 "num_items="))
        num_valid = sums["num_valid_tokens"]
        by_mean = "mean" in self._reductions
        self.report = Report(
            step=self.number, num_tokens=num_valid, num_rows=sums["num_tokens"], loss_sum=sums["loss_sum"],
            grad_norm=math.sqrt(_number(answer["grad_squared_norm"])) * abs(self._upstream),
            grad_multiplier=1.0 / len(self.workers.names) if by_mean else 1.0 / max(num_valid, 1),
            num_nonfinite_rows=sums["num_nonfinite_rows"], sums=sums)
        self._state = "prepared"
        return self.report

    def _local_failure(self, error: Exception) -> Exception:
        self._agreed_failure = True  # The same on all ranks.
        return error

    def commit(self, learning_rate: float, grad_multiplier: Optional[float] = None,
               allow_nonfinite_rows: bool = False) -> Commit:
        """Applies the head's optimizer, once. Every worker may call it; the first worker's arguments count.

        Args:
            learning_rate: of this step; the trainer owns the schedule.
            grad_multiplier: multiplied into the gradient as torch's ``.grad`` would hold it (the losses' upstream factor
                is applied besides): a mean's denominator times the clip coefficient. None: the report's.
            allow_nonfinite_rows: go on although rows with NaN or infinity were left out.

        Raises:
            ValueError: a number is not finite; nothing was applied.
            FailedPrecondition: rows with NaN or infinity, without ``allow_nonfinite_rows``.
            StepLost: ``RemoteHead.info().last_committed_step`` tells whether it was applied.
        """
        if self._state == "open" or self._state == "finished":
            self.prepare()
        self._require("prepared", "commit")
        assert self.report is not None  # Of _prepare().
        multiplier = float(self.report.grad_multiplier if grad_multiplier is None else grad_multiplier)
        rate = float(learning_rate)
        if not (math.isfinite(multiplier) and math.isfinite(rate)):
            raise ValueError(f"learning_rate is {rate} and grad_multiplier {multiplier}, want finite numbers: abort() a step "
                             "whose gradients overflowed")
        self.head.num_changes += 1  # Before it: one whose answer is lost may have been applied.
        answer, everyone = self._agree(lambda: self._commit(rate, multiplier, allow_nonfinite_rows)
                                       if self.workers.leader or not self.workers.grouped else None)
        answer = next(given for given in [answer, *everyone] if given is not None)
        self._state = "committed"
        self.head.last_commit = (self.incarnation, self.number)
        self._close_streams()
        return Commit(int(answer["step"]), int(answer["num_updates"]), _number(answer["grad_norm"]))

    def _commit(self, learning_rate: float, multiplier: float, allow_nonfinite_rows: bool) -> Dict[str, Any]:
        # A head that is not trainable has no gradient: the multiplier must be some number.
        factor = multiplier * self._upstream if self.head.trainable else 1.0
        deadline = time.monotonic() + self.commit_patience_seconds
        while True:  # Repeating it is safe: the same server gives the stored answer.
            try:
                return self.head.client.call(
                    "CommitStep", head=self.head.name, step=str(self.number), incarnation=str(self.incarnation),
                    learning_rate=learning_rate, grad_multiplier=factor, allow_nonfinite_rows=allow_nonfinite_rows)
            except Unavailable:
                if time.monotonic() >= deadline:
                    raise

    # --- Errors -------------------------------------------------------------------------------------------------------

    def _agree(self, action: Callable[[], T]) -> Tuple[T, List[T]]:
        def explained() -> T:
            try:
                return action()
            except Error as error:
                raise self._explain(error) from error
        try:
            return self.workers.agree(explained)
        except Exception:
            self._agreed_failure = True
            raise

    def _explain(self, error: BaseException) -> BaseException:
        """StepLost or HeadPoisoned where the service says so; else the error itself."""
        if not isinstance(error, _LOST_CODES):
            return error
        try:
            info = self.head.client.server_info()
        except Error:
            return StepLost(f"the service does not answer; when it does, repeat step {self.number} ({error})", error.code)
        incarnation = int(info["incarnation"])
        if self.incarnation and incarnation != self.incarnation:
            lost = StepLost(f"the service has restarted: restore head {self.head.name} where it is not, and repeat step "
                            f"{self.number} ({error})", error.code)
            lost.restarted = True
            return lost
        mine = next((head for head in info["heads"] if head["spec"]["name"] == self.head.name), None)
        if mine is None:
            return error
        if mine["poisoned_by"]:
            return HeadPoisoned(f"head {self.head.name} had a fatal error, restore it or create it again: "
                                f"{mine['poisoned_by']}", error.code)
        is_open = int(mine["open_step"]) == self.number
        if self.incarnation and not is_open and int(mine["last_committed_step"]) < self.number:
            lost = StepLost(f"step {self.number} was aborted meanwhile: repeat it ({error})", error.code)
            lost.restarted = False
            return lost
        if self.incarnation and is_open and isinstance(error, (Unavailable, Aborted)):
            why = ("the step cannot go on" if isinstance(error, Aborted)
                   else "the connection broke for longer than the client retries")
            lost = StepLost(f"{why}: repeat step {self.number} ({error})", error.code)
            lost.restarted = False
            return lost
        return error


def differences(names: Tuple[str, ...], first: Tuple[Any, ...], now: Tuple[Any, ...]) -> str:
    """What a call has that an earlier one had not, in words."""
    return ", ".join(f"{name} was {a} and is {b}" for name, a, b in zip(names, first, now) if a != b)


def checked_items(num_items: Any, reduction: str) -> Optional[float]:
    """What a mean divides by, where it is stated. ValueError when it is no count, or there is no mean."""
    if num_items is None:
        return None
    items = float(num_items)
    if reduction != "mean":
        raise ValueError(f"num_items is {items:g} and reduction is {reduction!r}: want reduction='mean', which divides by it")
    if not math.isfinite(items) or items < 0.0:
        raise ValueError(f"num_items is {items:g}, want a number of tokens")
    return items


def checked_arguments(head: "RemoteHead", hidden: torch.Tensor, labels: torch.Tensor, recipe: Recipe, shift: bool,
                      reduction: str, grad_scale: float, teacher_hidden: Optional[torch.Tensor],
                      tensors: Dict[str, Optional[torch.Tensor]]) -> Arguments:
    """A call's tensors as rows. ValueError or TypeError naming what does not fit."""
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe is a {type(recipe).__name__}, want an lmhead.Recipe")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, want one of {REDUCTIONS}")
    if not math.isfinite(grad_scale):
        raise ValueError(f"grad_scale is {grad_scale}, want a finite number")
    unknown = set(tensors) - set(TOKEN_INPUTS) - set(TOPK_INPUTS)
    if unknown:
        raise TypeError(f"unknown arguments {sorted(unknown)}; beside recipe, shift, reduction, num_items, grad_scale and "
                        f"teacher_hidden want some of {TOKEN_INPUTS + TOPK_INPUTS}")
    check_tensor(hidden, "hidden")
    check_tensor(labels, "labels")
    if hidden.dim() < 2:
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}, want [..., hidden_size]")
    if hidden.shape[-1] != head.hidden_size:
        raise ValueError(f"hidden has {hidden.shape[-1]} columns, head {head.name} expects {head.hidden_size}")
    return gather(hidden, labels, recipe, shift, {name: tensors.get(name) for name in TOKEN_INPUTS}, teacher_hidden,
                  {name: tensors.get(name) for name in TOPK_INPUTS})
