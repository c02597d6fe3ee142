"""A head that lives in the service."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Dict, Optional, Tuple, Union

import torch

from lmhead import _native, _staging
from lmhead.client import Client
from lmhead.evaluation import Evaluation, evaluation_call, evaluation_future
from lmhead.logprobs import Logprobs, differentiable_logprobs
from lmhead.loss import OUTPUTS, Arguments, Call, LossFuture, shift_left
from lmhead.recipe import IGNORE_INDEX, Recipe
from lmhead.step import Step, Streams, checked_arguments
from lmhead.teacher import TeacherStream
from lmhead.workers import SINGLE, Workers

CLIENT_OPTIONS = tuple(inspect.signature(Client).parameters)[1:]
WRITER_OPTIONS = ("connections", "chunk_bytes", "chunk_tokens", "max_inflight_chunks", "checksums")
CHECKPOINT_SECONDS = 3600.0  # A large head on slow storage.
TENSORS = {"weight": 1, "bias": 2, "grad_weight": 3, "grad_bias": 4, "master_weight": 5}


@dataclasses.dataclass(frozen=True)
class AdamW:
    """torch.optim.AdamW; the learning rate comes with each commit."""

    betas: Tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay_bias: bool = False

    def message(self) -> Dict[str, Any]:
        """lmhead.v1.OptimizerSpec as JSON."""
        return {"kind": "OPTIMIZER_KIND_ADAMW", "beta1": self.betas[0], "beta2": self.betas[1], "eps": self.eps,
                "weight_decay": self.weight_decay, "decay_bias": self.decay_bias}


@dataclasses.dataclass(frozen=True)
class SGD:
    """torch.optim.SGD; the learning rate comes with each commit."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    decay_bias: bool = False

    def message(self) -> Dict[str, Any]:
        """lmhead.v1.OptimizerSpec as JSON."""
        return {"kind": "OPTIMIZER_KIND_SGD", "momentum": self.momentum, "weight_decay": self.weight_decay,
                "decay_bias": self.decay_bias}


@dataclasses.dataclass(frozen=True)
class HeadInfo:
    """A head's specification and state; ``raw`` is all of lmhead.v1.HeadInfo."""

    name: str
    vocab_size: int
    hidden_size: int
    weight_dtype: torch.dtype
    has_bias: bool
    trainable: bool
    logit_scale: float
    softcap: float
    last_committed_step: int
    open_step: int
    weights_loaded: bool
    poisoned_by: str
    raw: Dict[str, Any]


def _info_of(raw: Dict[str, Any]) -> HeadInfo:
    spec = raw["spec"]
    return HeadInfo(
        name=spec["name"], vocab_size=int(spec["vocab_size"]), hidden_size=int(spec["hidden_size"]),
        weight_dtype=_staging.DTYPES_BY_NAME[spec["weight_dtype"]], has_bias=spec["has_bias"],
        trainable=spec["trainable"], logit_scale=spec["logit_scale"] or 1.0, softcap=spec["softcap"],
        last_committed_step=int(raw["last_committed_step"]), open_step=int(raw["open_step"]),
        weights_loaded=raw["weights_loaded"], poisoned_by=raw["poisoned_by"], raw=raw)


def _client(address: Union[str, Client], options: Dict[str, Any]) -> Client:
    unknown = set(options) - (set() if isinstance(address, Client) else set(CLIENT_OPTIONS))
    if unknown:
        raise TypeError(f"arguments {sorted(unknown)} are unknown; beside those of the call want some of {WRITER_OPTIONS}, "
                        f"or with an address in place of a Client of {CLIENT_OPTIONS}")
    return address if isinstance(address, Client) else Client(address, **options)


class RemoteHead:
    """A head of the service, by name.

    Args:
        address: of the server, or a Client to share.
        name: of the head.
        connections: TCP connections of a worker; more than one pays beyond about 2 GB/s.
        chunk_bytes: hidden states of one message.
        chunk_tokens: rows of one message instead; None: as chunk_bytes says. The two programs of a paired stream state it,
            and alike.
        max_inflight_chunks: on each connection, without an answer.
        checksums: let the server verify what arrived.
        client_options: keyword arguments of Client, such as ``tls_ca_file``.

    Raises:
        NotFound: there is no such head: ``RemoteHead.create`` makes one.
        Unavailable: nobody answers.
    """

    def __init__(self, address: Union[str, Client], name: str, *, connections: int = 1, chunk_bytes: int = 4 << 20,
                 chunk_tokens: Optional[int] = None, max_inflight_chunks: int = 4, checksums: bool = True,
                 **client_options: Any):
        self.client = _client(address, client_options)
        self.name = name
        self.last_commit: Optional[Tuple[int, int]] = None  # This process's: the server's incarnation, the step.
        self.num_changes = 0  # Of the weight, through this object, those included that may have failed.
        self._writer_options = (connections, max_inflight_chunks, chunk_bytes, chunk_tokens or 0, checksums)
        info = self.info()
        self.vocab_size, self.hidden_size, self.trainable = info.vocab_size, info.hidden_size, info.trainable

    @classmethod
    def create(cls, address: Union[str, Client], name: str, *, vocab_size: int, hidden_size: int,
               optimizer: Union[AdamW, SGD, None] = None, weight_dtype: torch.dtype = torch.float32, bias: bool = False,
               logit_scale: float = 1.0, softcap: float = 0.0, init_std: Optional[float] = None, seed: int = 0,
               spec: Optional[Dict[str, Any]] = None, **options: Any) -> "RemoteHead":
        """Creates the head in the service, or finds the equal one there, and connects to it.

        Args:
            address, name, options: as for RemoteHead.
            vocab_size, hidden_size: of the weight.
            optimizer: AdamW or SGD; None makes a frozen head, such as a teacher.
            weight_dtype: float32, or bfloat16 with a float32 master weight.
            bias: a float32 bias a vocabulary row, zero at first.
            logit_scale, softcap: logits = softcap * tanh(logit_scale * logits / softcap).
            init_std: fill the weight with normal values of that deviation and ``seed``; None: ``load_weight`` must.
            spec: further fields of lmhead.v1.HeadSpec, such as ``{"teacher_hidden_size": 4096}`` for a student.

        Raises:
            ResourceExhausted: it does not fit; the message has the memory plan.
            AlreadyExists: there is one of that name that differs.
            InvalidArgument: the specification is none, such as a size of 0.
        """
        if optimizer is not None and not isinstance(optimizer, (AdamW, SGD)):
            raise TypeError(f"optimizer is {optimizer!r}, want lmhead.AdamW(...), lmhead.SGD(...) or None for a frozen head")
        if weight_dtype not in _staging.DTYPE_NAMES:
            raise ValueError(f"weight_dtype is {weight_dtype}, want torch.float32 or torch.bfloat16")
        writer_options = {key: options.pop(key) for key in WRITER_OPTIONS if key in options}
        client = _client(address, options)
        message: Dict[str, Any] = {
            "name": name, "vocab_size": str(vocab_size), "hidden_size": str(hidden_size),
            "weight_dtype": _staging.DTYPE_NAMES[weight_dtype], "has_bias": bias,
            "logit_scale": logit_scale, "softcap": softcap, "trainable": optimizer is not None,
            "optimizer": {"kind": "OPTIMIZER_KIND_NONE"} if optimizer is None else optimizer.message()}
        if init_std is not None:
            message["weight_init"] = {"kind": "KIND_NORMAL", "std": init_std, "seed": str(seed)}
        message.update(spec or {})
        client.call("CreateHead", spec=message)
        return cls(client, name, **writer_options)

    def info(self) -> HeadInfo:
        """The head's specification and state now."""
        return _info_of(self.client.call("GetHead", head=self.name)["head"])

    def next_step(self) -> int:
        """The number after the last committed step."""
        return self.info().last_committed_step + 1

    def delete(self, force: bool = False) -> None:
        """Deletes the head and frees its memory; ``force``: also while a step is open or the head teaches.

        Raises:
            NotFound: it is gone already.
            FailedPrecondition: a step is open, or a student's stream, without ``force``.
        """
        self.client.call("DeleteHead", head=self.name, force=force)

    # --- Weights ------------------------------------------------------------------------------------------------------

    def load_weight(self, weight: torch.Tensor, row_start: int = 0) -> None:
        """Sends rows row_start and on of the weight; between steps.

        Args:
            weight: [n, hidden_size]; float32, bfloat16 or float16, on any device.

        Raises:
            ValueError: another dtype, or not two dimensions.
            InvalidArgument: rows or columns that the head does not have.
            FailedPrecondition: a step is open.
        """
        self._load("weight", weight, row_start)

    def load_bias(self, bias: torch.Tensor) -> None:
        """Sends the bias, [vocab_size], of any floating dtype; between steps. Errors as for ``load_weight``."""
        self._load("bias", bias.float().reshape(-1, 1), 0)

    def _load(self, tensor: str, rows: torch.Tensor, row_start: int) -> None:
        _staging.check_dtype(rows, tensor)
        host = rows.detach().to("cpu").contiguous()
        if host.dim() != 2:
            raise ValueError(f"{tensor} has shape {tuple(rows.shape)}, want two dimensions")
        self.num_changes += 1
        self.client.native.load_weights(self.name, TENSORS[tensor], _staging.DTYPES[host.dtype], row_start,
                                        host.shape[0], host.shape[1], host.data_ptr())

    def read_weight(self, row_start: int = 0, num_rows: Optional[int] = None, *, master: bool = False) -> torch.Tensor:
        """Rows of the weight in the head's dtype, or of its float32 master weight: [num_rows, hidden_size], on the CPU.

        Args:
            row_start, num_rows: which rows; None: to the end.
            master: the float32 values that the optimizer updates.

        Raises:
            ValueError: the head does not have these rows.
            InvalidArgument: a frozen head has no master weight.
        """
        if not master:
            return self._read("weight", self.info().weight_dtype, self.hidden_size, row_start, num_rows)
        return self._read("master_weight", torch.float32, self.hidden_size, row_start, num_rows)

    def read_bias(self) -> torch.Tensor:
        """The bias: [vocab_size], float32, on the CPU. InvalidArgument: the head has none."""
        return self._read("bias", torch.float32, 1, 0, None).reshape(-1)

    def read_grad_weight(self, row_start: int = 0, num_rows: Optional[int] = None) -> torch.Tensor:
        """The open step's gradient so far, before any multiplier: [num_rows, hidden_size], float32, on the CPU.

        Raises:
            ValueError: the head does not have these rows.
            FailedPrecondition: no step is open.
        """
        return self._read("grad_weight", torch.float32, self.hidden_size, row_start, num_rows)

    def _read(self, tensor: str, dtype: torch.dtype, columns: int, row_start: int,
              num_rows: Optional[int]) -> torch.Tensor:
        count = self.vocab_size - row_start if num_rows is None else num_rows
        if row_start < 0 or count < 1 or row_start + count > self.vocab_size:
            raise ValueError(f"rows [{row_start}, {row_start + count}) of {tensor} are wanted, head {self.name} has "
                             f"{self.vocab_size}")
        rows = torch.empty(count, columns, dtype=dtype)
        self.client.native.read_weights(self.name, TENSORS[tensor], _staging.DTYPES[dtype], row_start, rows.shape[0],
                                        columns, rows.data_ptr())
        return rows

    # --- Checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, name: str = "") -> str:
        """Writes weights, optimizer state and step to the server's checkpoint folder, between steps; gives its name.

        Args:
            name: below the head's folder there; empty: after the step.

        Raises:
            FailedPrecondition: the server has no --checkpoint_dir, or a step is open.
            AlreadyExists: a checkpoint of that name has another step.
        """
        return str(self.client.call("SaveCheckpoint", timeout=CHECKPOINT_SECONDS, head=self.name, name=name)["name"])

    def restore_checkpoint(self, name: str = "") -> HeadInfo:
        """Brings the head back from a checkpoint, the newest complete one when none is named; makes it when it is gone.

        Raises:
            NotFound: there is no such checkpoint.
            FailedPrecondition: the server has no --checkpoint_dir, or a step is open.
            DataLoss: a file is torn.
        """
        self.num_changes += 1
        return _info_of(self.client.call("RestoreCheckpoint", timeout=CHECKPOINT_SECONDS, head=self.name,
                                         name=name)["head"])

    # --- Training -----------------------------------------------------------------------------------------------------

    def step(self, number: Optional[int] = None, workers: Workers = SINGLE, num_recipes: int = 1) -> Step:
        """Opens an optimizer step; use it as ``with head.step(number) as step:``.

        Args:
            number: greater than the last committed step; None: the next one (with several workers state it).
            workers: who feeds it; lmhead.distributed_workers() for the ranks of a torch.distributed job.
            num_recipes: how many combinations of recipe, dtype and outputs the step's losses have.
        """
        return Step(self, self.next_step() if number is None else number, workers, num_recipes)

    def teacher_stream(self, step: Optional[int], recipe: Recipe, *, hidden_dtype: torch.dtype = torch.float32,
                       worker: Optional[str] = None, token_weights: bool = False, token_temperature: bool = False,
                       incarnation: Optional[int] = None) -> TeacherStream:
        """The teacher's side of the student's step or evaluation, for the program that runs the teacher's trunk.

        This is the student's head, connected to with the same ``chunk_tokens`` as in the student's program, which has
        opened the step. Everything below is as there.

        Args:
            step: the student's step; None: its ``evaluation(worker)``.
            recipe: with a Distillation that has a ``teacher_head`` and a ``paired_stream``.
            hidden_dtype: of the student's hidden states.
            worker: the student's; None: ``w0``. With several recipes a step those after the first are ``w0.1``,
                ``w0.2``, .... An evaluation's is stated.
            token_weights, token_temperature: whether the student's losses have them.
            incarnation: the student's ``step.incarnation``; None: the server's now.

        Raises:
            ValueError: the recipe is none of a paired stream, or an evaluation's worker is not stated.
            FailedPrecondition: the step is not open.
        """
        distillation = recipe.distillation
        if distillation is None or distillation.teacher_head is None or distillation.paired_stream is None:
            raise ValueError("the recipe has no distillation with teacher_head and paired_stream, which a teacher's stream "
                             "needs")
        if step is not None and step < 1:
            raise ValueError(f"step is {step}, want at least 1, or None for an evaluation")
        if step is None and not worker:
            raise ValueError("worker is not stated: an evaluation is joined by the worker's name, as in the student's "
                             "head.evaluation(worker)")
        if step is not None and incarnation is None:
            incarnation = self.client.incarnation()
        return TeacherStream(self, step or 0, recipe, distillation.paired_stream, hidden_dtype, worker or "w0",
                             token_weights, token_temperature, incarnation or 0)

    # --- Without a step -----------------------------------------------------------------------------------------------

    def evaluation(self, worker: str = "") -> Evaluation:
        """Many losses without a step over one stream; use it as ``with head.evaluation() as evaluation:``.

        Args:
            worker: names it for the teacher's program, where the recipe has a ``paired_stream``: a name that no other
                evaluation of this head has meanwhile, 1 to 100 characters of [A-Za-z0-9._-].
        """
        return Evaluation(self, worker)

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
        """An evaluation, or the loss of a frozen head with the gradient of ``hidden``; arguments as for Step.loss.

        Args:
            frozen: True gives the gradient of ``hidden`` although the head is trainable, and leaves the head alone.

        Raises:
            ValueError: a tensor does not fit, or the recipe has a ``paired_stream``; nothing was sent.
            RuntimeError: gradients are wanted of a trainable head, which takes a step.
        """
        return self.loss_async(hidden, labels, **options).result()

    def loss_async(self, hidden: torch.Tensor, labels: torch.Tensor, **options: Any) -> LossFuture:
        """Like ``loss``, at once; ``result()`` of the answer is the loss."""
        call, outputs = evaluation_call(self, hidden, labels, **options)
        distillation = call.arguments.recipe.distillation
        if distillation is not None and distillation.paired_stream is not None:
            raise ValueError("the recipe has a paired_stream, whose teacher has to know the stream: use "
                             "head.evaluation(worker).loss(...), or teacher_hidden= without paired_stream")
        return self._evaluate(call, outputs, hidden)

    def outputs(self, hidden: torch.Tensor, labels: torch.Tensor, names: Tuple[str, ...], *, recipe: Recipe = Recipe(),
                shift: bool = False, token_temperature: Optional[torch.Tensor] = None) -> Dict[str, torch.Tensor]:
        """Per-token outputs without gradients, [...] each.

        Args:
            names: of token_loss, logprob, lse, entropy (float32; nats) and argmax (int32).

        Raises:
            ValueError: a tensor does not fit, or a name is none of these; nothing was sent.
        """
        unknown = set(names) - set(OUTPUTS)
        if unknown:
            raise ValueError(f"outputs {sorted(unknown)} are unknown, want some of {sorted(OUTPUTS)}")
        with torch.no_grad():
            arguments = checked_arguments(self, hidden, labels, recipe, shift, "sum", 1.0, None,
                                          {"token_temperature": token_temperature})
            call = Call(arguments, tuple(names), False, "sum", 1.0, None)
            return dict(self._evaluate(call, tuple(names), hidden).wait().results)

    def topk(self, hidden: torch.Tensor, k: int, *, temperature: float = 1.0) -> Tuple[torch.Tensor, torch.Tensor]:
        """The k likeliest ids, [..., k], int32, and their log-probabilities, [..., k], float32.

        What ``teacher_topk_ids`` and ``teacher_topk_logprobs`` of a distillation take.

        Raises:
            ValueError: k is less than 1.
            InvalidArgument: k is more than the ``top_k_max`` of the head's specification, which is 0 unless stated.
        """
        if k < 1:
            raise ValueError(f"k is {k}, want at least 1")
        with torch.no_grad():
            arguments = checked_arguments(self, hidden, torch.zeros(hidden.shape[:-1], dtype=torch.int64,
                                                                    device=hidden.device),
                                          Recipe(temperature=temperature), False, "sum", 1.0, None, {})
            call = Call(arguments, (), False, "sum", 1.0, None, top_k=k)
            results = self._evaluate(call, (), hidden).wait().results
        return results["topk_ids"], results["topk_logprobs"]

    def logprobs(self, hidden: torch.Tensor, labels: torch.Tensor, *, entropy: bool = False, shift: bool = False,
                 temperature: float = 1.0,
                 ignore_index: int = IGNORE_INDEX) -> Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]:
        """Log-probabilities of the labels, [...], float32, 0 where ignored; with ``entropy`` also the entropies.

        Without gradients: ``Step.logprobs`` and ``frozen_logprobs`` have them. Where lmhead.ClippedPolicy or
        lmhead.PolicyCoefficients is the objective, that recipe computes the logits once less.
        """
        names = ("logprob", "entropy") if entropy else ("logprob",)
        found = self.outputs(hidden, labels, names, recipe=Recipe(ignore_index=ignore_index, temperature=temperature),
                             shift=shift)
        return (found["logprob"], found["entropy"]) if entropy else found["logprob"]

    def frozen_logprobs(self, hidden: torch.Tensor, labels: torch.Tensor, *, shift: bool = False,
                        temperature: float = 1.0, ignore_index: int = IGNORE_INDEX) -> Logprobs:
        """Like ``Step.logprobs`` without a step: autograd goes into ``hidden``, and leaves the head alone."""
        labels = shift_left(labels, ignore_index) if shift else labels
        return differentiable_logprobs(
            self, hidden, labels, temperature, ignore_index,
            lambda recipe, coefficients: self._frozen_grad(hidden, labels, recipe, coefficients))

    def _frozen_grad(self, hidden: torch.Tensor, labels: torch.Tensor, recipe: Recipe,
                     coefficients: Dict[str, Optional[torch.Tensor]]) -> Optional[torch.Tensor]:
        arguments = checked_arguments(self, hidden, labels, recipe, False, "sum", 1.0, None, coefficients)
        return self._evaluate(Call(arguments, (), hidden.requires_grad, "sum", 1.0, None), (), hidden).wait().grad

    def _evaluate(self, call: Call, outputs: Tuple[str, ...], hidden: torch.Tensor) -> LossFuture:
        streams = Streams(self.open_writer(call.arguments, outputs, call.want_grad, 0, "", 0, call.top_k))
        return evaluation_future(call, streams, hidden, streams.close)

    def open_writer(self, arguments: Arguments, outputs: Tuple[str, ...], want_grad: bool, step: int, worker: str,
                    incarnation: int, top_k: int = 0) -> _native.NativeWriter:
        """The streams for such calls. For Step; there is no need to call it."""
        message = {"head": self.name, "step": str(step), "worker": worker, "incarnation": str(incarnation),
                   "hidden_dtype": _staging.DTYPE_NAMES[arguments.dtype], "recipe": arguments.recipe_message(),
                   "outputs": {"grad_hidden_states": want_grad, "top_k": top_k, **{name: True for name in outputs}}}
        return self.writer_of(message)

    def writer_of(self, message: Dict[str, Any]) -> _native.NativeWriter:
        """The streams that lmhead.v1.StreamOpen, as JSON, describes. For Step and TeacherStream, likewise."""
        return _native.NativeWriter(self.client.native, message, *self._writer_options)

    def close(self) -> None:
        """Closes the connection; the head stays."""
        self.client.close()

    def __enter__(self) -> "RemoteHead":
        return self

    def __exit__(self, *_: Optional[object]) -> None:
        self.close()
