"""Hugging Face causal language models: the head moves out, the rest of the model stays as it is.

Models are known by their structure: a forward() that takes ``labels`` and calls ``get_output_embeddings()``, a linear
layer, on the hidden states. That layer is replaced by one that keeps the hidden states and gives a sliver of them in
place of logits; the loss is then computed by the service. A model that shall generate, too, gets its logits from a local
copy of the head's rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import warnings
from typing import Any, Callable, Dict, Iterable, Iterator, List, NoReturn, Optional, Tuple, Union

import torch

from lmhead._staging import DTYPES
from lmhead.errors import AlreadyExists, DataLoss, Error, FailedPrecondition, NotFound, ResourceExhausted
from lmhead.gradients import clip_grad_norm
from lmhead.head import RemoteHead
from lmhead.local_logits import LocalLogits, LocalRows
from lmhead.logprobs import Logprobs
from lmhead.loss import shift_left
from lmhead.recipe import IGNORE_INDEX, Recipe
from lmhead.step import Commit, Step
from lmhead.workers import SINGLE, Workers


class RemoteLmHead(torch.nn.Module):
    """Stands where lm_head was. Keeps its input for the loss; what it gives has the shape of logits of one word. Within
    ``logits`` it is the linear layer that it replaces.

    It has no parameters, but state_dict() has the head's, read from the service, and load_state_dict() sends them there:
    what a patched model saves is what it would save unpatched.
    """

    def __init__(self, patched: "PatchedModel", layer: Any) -> None:
        super().__init__()
        self.hidden: Optional[torch.Tensor] = None
        self._patched = patched
        self._rows: Optional[Tuple[torch.Tensor, Optional[torch.Tensor]]] = None
        # Has the device and dtype that the layer would have: model.to() moves it.
        self.register_buffer("like", torch.empty(0, dtype=layer.weight.dtype, device=layer.weight.device), persistent=False)

    @contextlib.contextmanager
    def logits(self, rows: LocalRows) -> Iterator[None]:
        """Within it forward() gives logits, of the positions that the model asks of its output layer."""
        self._rows = rows.get(self.like)
        try:
            yield
        finally:
            self._rows = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] to [..., 1], or within ``logits`` to [..., vocab_size]."""
        if self._rows is not None:
            found: torch.Tensor = LocalLogits.apply(hidden, *self._rows)
            return found
        self.hidden = hidden
        return hidden[..., :1].detach()

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            raise AttributeError(f"lmhead: the output layer's {name} is in the service: patched.head.read_{name}() reads it, "
                                 "patched.restore() takes it back into the model")
        return super().__getattr__(name)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, tensor in self._patched.head_tensors().items():
            destination[prefix + name] = tensor if keep_vars else tensor.detach()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: List[str],
                              unexpected_keys: List[str], error_msgs: List[str]) -> None:
        found = {}
        for name in self._patched.head_tensor_names:
            tensor = state_dict.get(prefix + name)
            if tensor is not None:
                found[name] = tensor
            elif strict:
                missing_keys.append(prefix + name)
        try:
            self._patched.load_head_tensors(found)
        except (ValueError, Error) as error:
            error_msgs.append(f"{prefix[:-1]}: {error}")

    def send_tied(self, *_: Any) -> None:
        """After the model's load_state_dict()."""
        self._patched.send_tied()

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise TypeError("lmhead: a patched model can be neither copied nor pickled: its head is in the service, once. Copy the "
                        "model before lmhead.patch or after patched.restore(), or save its state_dict()")

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise RuntimeError("lmhead: torch.nn.DataParallel cannot replicate a patched model: run one process a GPU, as torchrun "
                           "does, or let the trainer see one GPU (CUDA_VISIBLE_DEVICES)")

    def take(self) -> torch.Tensor:
        """The hidden states of the last forward(), once."""
        hidden, self.hidden = self.hidden, None
        if hidden is None:
            raise RuntimeError("lmhead: the model's forward() did not call its output layer; this model cannot be patched")
        return hidden


def _output_layer(model: Any) -> Tuple[torch.nn.Module, str, Any]:
    """The output layer with the module that owns it and its name there. ValueError when there is none to move."""
    if any(isinstance(module, RemoteLmHead) for module in model.modules()):
        raise ValueError(f"{type(model).__name__} is patched already: restore() it first")
    getter = getattr(model, "get_output_embeddings", None)
    layer = getter() if callable(getter) else getattr(model, "lm_head", None)
    if layer is None or not isinstance(getattr(layer, "weight", None), torch.Tensor) or layer.weight.dim() != 2:
        raise ValueError(f"{type(model).__name__} has no output layer with a two-dimensional weight: neither "
                         "get_output_embeddings() nor lm_head gives one")
    for owner in model.modules():
        for name, child in owner.named_children():
            if child is layer:
                return owner, name, layer
    raise ValueError(f"the output layer of {type(model).__name__} is not one of its modules")


def _logit_transform(config: Any) -> Dict[str, float]:
    """logit_scale and softcap as the configuration has them, under the names that models use."""
    if hasattr(config, "get_text_config"):  # Of a model that sees or hears, too.
        config = config.get_text_config()
    factors = [getattr(config, name, None) for name in ("logit_scale", "output_multiplier", "lm_head_multiplier")]
    scale = next((float(factor) for factor in factors if factor), 1.0)
    divisor = getattr(config, "logits_scaling", None)
    if divisor:
        scale /= float(divisor)
    softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "final_logits_soft_cap", None)
    return {"logit_scale": scale, "softcap": float(softcap or 0.0)}


def _check_logits(model: Any, layer: Any) -> None:
    """ValueError when the model makes something else of the layer's output than the configuration says."""
    outputs: List[torch.Tensor] = []
    hook = layer.register_forward_hook(lambda _layer, _inputs, output: outputs.append(output))
    ids = torch.zeros(1, 2, dtype=torch.int64, device=_device_of_inputs(model))
    try:
        # Dropout draws no numbers that the training would have drawn.
        with torch.no_grad(), torch.random.fork_rng(devices=[ids.device] if ids.is_cuda else []):
            logits = model(input_ids=ids).logits
    finally:
        hook.remove()
    if not outputs:
        raise ValueError(f"the forward() of {type(model).__name__} does not call its output layer: it cannot be patched")
    transform = _logit_transform(getattr(model, "config", None))
    want = outputs[-1].float() * transform["logit_scale"]
    if transform["softcap"]:
        want = transform["softcap"] * torch.tanh(want / transform["softcap"])
    got = logits.float().to(want.device)
    bound = 1e-4 if layer.weight.dtype == torch.float32 else 3e-2
    if got.shape != want.shape or not torch.allclose(got, want, rtol=bound, atol=bound * float(want.abs().max())):
        raise ValueError(f"{type(model).__name__} makes other logits of its output layer than the configuration says "
                         f"({transform}): the service would compute another loss. Pass check_logits=False when it would not")


class NoBackward(torch.autograd.Function):
    """A value whose backward pass says why there is none."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> NoReturn:
        raise RuntimeError("lmhead: this loss was computed in evaluation mode, which leaves the head alone: call model.train() "
                           "before the forward pass to train")


def _evaluated(value: torch.Tensor) -> torch.Tensor:
    """``value``, computed without gradients, where the caller may want them all the same."""
    if not torch.is_grad_enabled():
        return value
    found: torch.Tensor = NoBackward.apply(value, torch.zeros((), device=value.device, requires_grad=True))
    return found


def _input_embedding(model: Any) -> Any:
    return model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None


def _device_of_inputs(model: Any) -> torch.device:
    parameter: torch.nn.Parameter = next((_input_embedding(model) or model).parameters())
    return parameter.device


@functools.lru_cache(maxsize=None)
def _fused_output_type() -> Any:
    """What a forward() with ``fused_lm_head=True`` gives, as TRL's trainers take it."""
    from transformers.utils.generic import ModelOutput

    @dataclasses.dataclass
    class FusedOutput(ModelOutput):
        """Per-token values, zero where the label is ignored."""

        loss: Any = None
        log_probs: Any = None
        entropy: Any = None
        is_top1: Any = None
        label_mask: Any = None
        aux_loss: Any = None
        log_sum_sq_probs: Any = None  # What the service does not compute.
        mean_logits: Any = None

    return FusedOutput


def _fused_temperature(forward: Any) -> Optional[float]:
    """The temperature that a trainer's fused forward() around the model's divides by; None without such a one."""
    function = getattr(forward, "__func__", forward)
    while function is not None:
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        if "temperature" in names:
            return float(function.__closure__[names.index("temperature")].cell_contents)
        function = getattr(function, "__wrapped__", None)
    return None


def head_arguments(model: torch.nn.Module) -> Dict[str, Any]:
    """Arguments of RemoteHead.create for this model's head: sizes, bias, logit scale and softcap."""
    _, _, layer = _output_layer(model)
    vocab_size, hidden_size = layer.weight.shape
    return {"vocab_size": vocab_size, "hidden_size": hidden_size, "bias": getattr(layer, "bias", None) is not None,
            **_logit_transform(getattr(model, "config", None))}


class PatchedModel:
    """A model whose head is remote; made by ``patch``.

    Training losses feed the head's open step, which the first of them opens. It ends with ``commit``, or by itself with
    each step of an optimizer given to ``attach``.
    """

    def __init__(self, model: torch.nn.Module, head: RemoteHead, recipe: Recipe, workers: Workers, averaged_over: int,
                 generate: bool):
        self.model: Any = model
        self.head = head
        self.recipe = recipe
        self.workers = workers
        self.averaged_over = averaged_over
        self.step: Optional[Step] = None
        self.last_commit: Optional[Commit] = None
        self._owner, self._name, self._layer = _output_layer(model)
        embedding = _input_embedding(self.model)
        tied = embedding is not None and embedding.weight is self._layer.weight
        self._tied: Optional[torch.nn.Parameter] = embedding.weight if tied else None
        self._has_bias = getattr(self._layer, "bias", None) is not None
        self._local_rows = LocalRows(head, self._tied, self._has_bias) if generate else None
        self._trunk_at_open = 0
        self._told = False  # That nobody commits.
        self._detachers: List[Callable[[], None]] = []
        self._next_step = head.next_step()
        self._check()

    def _check(self) -> None:
        info = self.head.info()
        wanted = head_arguments(self.model)
        have = {"vocab_size": info.vocab_size, "hidden_size": info.hidden_size, "bias": info.has_bias,
                "logit_scale": info.logit_scale, "softcap": info.softcap}
        wrong = [f"{name} is {have[name]}, the model has {value}" for name, value in wanted.items()
                 if abs(float(have[name]) - float(value)) > 1e-6 * abs(float(value))]
        if wrong:
            raise ValueError(f"head {self.head.name} does not fit {type(self.model).__name__}: {'; '.join(wrong)}")

    def install(self, load_weights: bool, check_logits: bool) -> None:
        """Moves the weights into the service, where wanted, and puts the stand-in into the model."""
        temperature = _fused_temperature(self.model.forward)
        if temperature is not None and abs(temperature - self.recipe.temperature) > 1e-6:
            raise ValueError(f"the trainer divides logits by a temperature of {temperature}, the recipe by "
                             f"{self.recipe.temperature}: pass recipe=lmhead.Recipe(temperature={temperature})")
        if check_logits:
            _check_logits(self.model, self._layer)
        if load_weights:
            # Together: no rank opens a step while another still sends.
            self._by_leader(self._load_layer)
        self._shape = tuple(self._layer.weight.shape)
        self._stand_in = RemoteLmHead(self, self._layer)
        self._layer = None  # Its parameters are freed, but for a tied weight, which the embedding needs.
        # A tied weight is loaded as the embedding's, wherever in the model that comes.
        self._loaded_hook = self.model.register_load_state_dict_post_hook(self._stand_in.send_tied)
        setattr(self._owner, self._name, self._stand_in)
        self._forward = self.model.forward
        self._trainers_forward = self.model.__dict__.get("forward")
        self.model.forward = self._wrapped_forward()
        self._getter = self.model.__dict__.get("get_output_embeddings")
        self.model.get_output_embeddings = lambda: None  # Nothing to tie to the embedding any more.

    def _load_layer(self) -> None:
        self.head.load_weight(self._layer.weight)
        if self._has_bias:
            self.head.load_bias(self._layer.bias)

    @property
    def _dtype(self) -> torch.dtype:
        found: torch.dtype = self._stand_in.like.dtype
        return found

    @property
    def head_tensor_names(self) -> Tuple[str, ...]:
        """Of the output layer's parameters in state_dict()."""
        return ("weight", "bias") if self._has_bias else ("weight",)

    def head_tensors(self) -> Dict[str, torch.Tensor]:
        """The output layer's parameters as the model would have them: read from the service, on the CPU, but for a tied
        weight."""
        weight = self.head.read_weight().to(self._dtype) if self._tied is None else self._tied
        return {"weight": weight, "bias": self.head.read_bias().to(self._dtype)} if self._has_bias else {"weight": weight}

    def load_head_tensors(self, tensors: Dict[str, torch.Tensor]) -> None:
        """Sends such parameters to the service, of several ranks the first; between steps."""
        self._drop_rows()
        if not self.workers.leader:
            return
        for name, tensor in tensors.items():
            wanted = self._shape if name == "weight" else self._shape[:1]
            if tuple(tensor.shape) != wanted:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, head {self.head.name} wants {wanted}")
            if name == "bias":
                self.head.load_bias(tensor)
            elif self._tied is None:
                self.head.load_weight(tensor if tensor.dtype in DTYPES else tensor.float())

    def send_tied(self) -> None:
        """Sends the tied weight to the service, of several ranks the first; between steps."""
        if self._tied is not None and self.workers.leader:
            self.head.load_weight(self._tied)

    def _wrapped_forward(self) -> Callable[..., Any]:
        original = self._forward
        signature = inspect.signature(original)
        rest = next((name for name, parameter in signature.parameters.items()
                     if parameter.kind is inspect.Parameter.VAR_KEYWORD), None)

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            fused, shift_labels = kwargs.pop("fused_lm_head", False), kwargs.pop("shift_labels", None)
            arguments = dict(signature.bind(*args, **kwargs).arguments)
            arguments.update(arguments.pop(rest, {}) if rest else {})
            labels, num_items = arguments.pop("labels", None), arguments.pop("num_items_in_batch", None)
            as_tuple = arguments.get("return_dict") is False
            if rest or "return_dict" in signature.parameters:
                arguments["return_dict"] = True
            if labels is None and shift_labels is None:
                with self._logits():
                    output = original(**arguments)
                return output.to_tuple() if as_tuple else output
            output = original(**arguments)
            hidden = self._stand_in.take()
            if fused:
                return self._fused(hidden, labels, shift_labels, num_items, getattr(output, "aux_loss", None))
            output["loss"] = self.loss(hidden, labels if shift_labels is None else shift_labels, num_items,
                                       shift=shift_labels is None)
            output["logits"] = None
            output = type(output)(**{key: value for key, value in output.items() if value is not None})
            return output.to_tuple() if as_tuple else output

        return forward

    def _logits(self) -> Any:
        """In which the output layer computes logits. RuntimeError when the model was not patched for that."""
        if self._local_rows is None:
            raise RuntimeError(
                "lmhead: the model's head is remote, so that forward() without labels has no logits: pass labels, or call "
                "patched.restore() first, as for generate(). lmhead.patch(..., generate=True) lets the patched model generate, as "
                "a trainer that samples from it (GRPO) needs, from a local copy of the head's rows. A trainer that compares "
                "logits (GKD and other distillation) cannot be patched: write its loop with lmhead.Distillation "
                "(examples/distil.py). A Trainer's label smoothing goes into "
                "lmhead.patch(recipe=lmhead.Recipe(label_smoothing=...))")
        return self._stand_in.logits(self._local_rows)

    def _drop_rows(self) -> None:
        """Frees the local copy of the head's rows, which change now or are wanted no more."""
        if self._local_rows is not None:
            self._local_rows.drop()

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor, num_items: Any = None, *,
             shift: bool = True) -> torch.Tensor:
        """The causal loss: the mean over this call's tokens, or its sum over ``num_items``."""
        if tuple(labels.shape) != tuple(hidden.shape[:-1]):
            raise ValueError(f"labels has shape {tuple(labels.shape)} and the head was given hidden states of shape "
                             f"{tuple(hidden.shape)}: all positions are wanted")
        options: Dict[str, Any] = {"recipe": self.recipe, "shift": shift, "reduction": "mean",
                                   "num_items": None if num_items is None else float(num_items)}
        if not torch.is_grad_enabled() or not self.model.training:
            with torch.no_grad():
                value = self.head.loss(hidden, labels, **options)
            return _evaluated(value)
        return self._open().loss(hidden, labels, **options)

    def _open(self) -> Union[Step, RemoteHead]:
        """The step that losses of training feed, opened by the first of them; of a frozen head the head."""
        if self.step is None and self.head.trainable:
            step = self.head.step(self._next_step, self.workers)
            step.__enter__()
            self.step = step
            self._trunk_at_open = self._trunk_version()
        elif self.step is not None and self._trunk_version() != self._trunk_at_open and not self._told:
            self._told = True
            warnings.warn(f"the trunk was updated while step {self.step.number} of head {self.head.name} stayed open: the head is "
                          "not trained. Give patched.attach() the optimizer, a Trainer patched.trainer_callback(), or call "
                          "patched.commit() before each optimizer.step()", stacklevel=3)
        return self.step or self.head

    @property
    def tied(self) -> bool:
        """Whether the head's weight is the input embedding, too, which stays in the model."""
        return self._tied is not None

    def _trunk_version(self) -> int:
        """Rises with every change of the trunk's parameters in place, such as an optimizer's."""
        return sum(parameter._version for parameter in self.model.parameters() if parameter.requires_grad)

    def logprobs(self, hidden: torch.Tensor, labels: torch.Tensor, *, shift: bool = True) -> Logprobs:
        """Per-token values for an objective in PyTorch, as ``Step.logprobs``; without gradients in evaluation."""
        options: Dict[str, Any] = {"shift": shift, "temperature": self.recipe.temperature,
                                   "ignore_index": self.recipe.ignore_index}
        if not torch.is_grad_enabled() or not self.model.training:
            with torch.no_grad():
                values = self.head.frozen_logprobs(hidden, labels, **options)
            return Logprobs(_evaluated(values.logprob), _evaluated(values.entropy), values.argmax)
        source = self._open()
        call = source.logprobs if isinstance(source, Step) else source.frozen_logprobs
        return call(hidden, labels, **options)

    def _fused(self, hidden: torch.Tensor, labels: Any, shift_labels: Optional[torch.Tensor], num_items: Any,
               aux_loss: Any) -> Any:
        """What TRL's trainers ask of a model with ``fused_lm_head=True``; they shift by leaving the last position out."""
        targets = shift_left(labels, self.recipe.ignore_index) if shift_labels is None else shift_labels
        values = self.logprobs(hidden, targets, shift=False)
        mask = (targets != self.recipe.ignore_index).to(hidden.device)
        found = {"log_probs": values.logprob, "entropy": values.entropy, "label_mask": mask,
                 "is_top1": (values.argmax == targets.to(hidden.device)) & mask}
        if shift_labels is None:
            found = {name: tensor[..., :-1] for name, tensor in found.items()}
        count = mask.sum().clamp(min=1) if num_items is None else num_items
        return _fused_output_type()(loss=-values.logprob.sum() / count, aux_loss=aux_loss, **found)

    # --- Steps --------------------------------------------------------------------------------------------------------

    def commit(self, learning_rate: float, max_grad_norm: Optional[float] = None,
               parameters: Optional[Iterable[torch.Tensor]] = None, loss_scale: float = 1.0) -> Optional[Commit]:
        """Ends the open step; before the trunk's optimizer.step(). None when there is none, as for a frozen head.

        Args:
            learning_rate: of the head.
            max_grad_norm: clip trunk and head together by their global norm; leave the trainer's own clipping off then.
            parameters: the trunk's, to be clipped; None: the model's.
            loss_scale: what the trunk's gradients were divided by since the backward passes, as for ``Step.prepare``.
        """
        if self.step is None:
            return None
        step = self.step
        self._drop_rows()
        try:
            self._push_tied(step, loss_scale)
            report = step.prepare(loss_scale=loss_scale)
            multiplier = report.grad_multiplier
            if max_grad_norm is not None:
                trunk = list(self.model.parameters() if parameters is None else parameters)
                multiplier = clip_grad_norm(trunk, report, max_grad_norm, averaged_over=self.averaged_over).grad_multiplier
            self.last_commit = step.commit(learning_rate, multiplier)
        except BaseException:
            self.abort()
            raise
        self.step = None
        self._next_step += 1
        self._pull_tied()
        return self.last_commit

    def abort(self) -> None:
        """Throws the open step away, if there is one; the next loss opens it again."""
        step, self.step = self.step, None
        if step is not None and not step.committed:
            step.abort()

    def _push_tied(self, step: Step, loss_scale: float) -> None:
        if self._tied is None or self._tied.grad is None:
            return
        grad, self._tied.grad = self._tied.grad, None  # Without one the trunk's optimizer leaves it alone.
        if not self.workers.leader and self.averaged_over > 1:
            return  # The ranks' gradients are one average already.
        rows = grad.detach().float()
        touched = (rows != 0).any(dim=1).nonzero().reshape(-1)
        if touched.numel():
            factor = self.averaged_over * loss_scale / step.upstream_factor()
            step.accumulate_weight_gradient(rows[touched] * factor, touched)

    def _pull_tied(self) -> None:
        if self._tied is None:
            return
        with torch.no_grad():
            self._tied.copy_(self.head.read_weight())

    def attach(self, optimizer: Any, max_grad_norm: Optional[float] = None, scaler: Any = None) -> None:
        """Commits the head's step with each ``optimizer.step()``, before it, at the first group's learning rate.

        Args:
            optimizer: the trunk's. Its ``zero_grad()`` throws the head's gradient away, too, where nothing was committed
                since, as after a step that a GradScaler has skipped.
            max_grad_norm: as for ``commit``.
            scaler: the GradScaler whose ``step(optimizer)`` is called in place of ``optimizer.step()``.
        """
        inner = optimizer
        wrapped_scaler = None
        while hasattr(inner, "optimizer"):  # What a trainer wrapped around it.
            wrapped_scaler = wrapped_scaler or getattr(inner, "scaler", None)
            inner = inner.optimizer
        scaler = scaler or wrapped_scaler

        def before_step(*_: Any) -> None:
            self._commit_with(inner, max_grad_norm, scaler)

        zero_grad = inner.zero_grad

        @functools.wraps(zero_grad)
        def zero_both(*args: Any, **kwargs: Any) -> Any:
            if self.step is not None and self.step.settled:
                self.abort()
            return zero_grad(*args, **kwargs)

        inner.zero_grad = zero_both
        self._detachers.append(lambda: setattr(inner, "zero_grad", zero_grad))
        if hasattr(inner, "register_step_pre_hook"):  # From PyTorch 2 on.
            self._detachers.append(inner.register_step_pre_hook(before_step).remove)
            return
        if wrapped_scaler is not None:  # The wrapper calls the step() that it has seen, not a replacement.
            raise RuntimeError("lmhead: a trainer with a GradScaler (fp16=True) needs PyTorch 2: train in bfloat16, or in a loop "
                               "of your own")
        self._replace_step(inner, before_step)

    def _replace_step(self, optimizer: Any, before_step: Callable[[], None]) -> None:
        trunk_step = optimizer.step

        @functools.wraps(trunk_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            before_step()
            return trunk_step(*args, **kwargs)

        optimizer.step = step
        self._detachers.append(lambda: setattr(optimizer, "step", trunk_step))

    def _commit_with(self, optimizer: Any, max_grad_norm: Optional[float], scaler: Any) -> None:
        """Commits for an optimizer that steps now."""
        overflowed = getattr(optimizer, "found_inf", None)  # Of a fused optimizer, which skips such a step itself.
        if overflowed is not None and float(overflowed) > 0.0:
            self.abort()
            return
        if getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError("lmhead: the trunk's gradients still have the GradScaler's scale, which a fused optimizer takes "
                               "out itself: call scaler.unscale_(optimizer) before its step, or take an optimizer that is not "
                               "fused (TrainingArguments(optim=\"adamw_torch\"))")
        scale = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.commit(optimizer.param_groups[0]["lr"], max_grad_norm, parameters, scale)

    def trainer_callback(self, max_grad_norm: Optional[float] = None) -> Any:
        """A transformers.TrainerCallback that attaches to the Trainer's optimizer when training begins.

        With ``max_grad_norm`` set ``TrainingArguments(max_grad_norm=0)``: the Trainer would clip the trunk alone, and training
        begins with a ValueError.

        A checkpoint of the Trainer has the head's weight, as an unpatched model's has. Beside it the callback asks the service
        for a checkpoint ``trainer-STEP`` of the head, with its optimizer state; ``train(resume_from_checkpoint=...)`` brings
        that back. Where the service cannot (it has no --checkpoint_dir), a warning says so, and the weight alone comes back.
        """
        from transformers import TrainerCallback

        patched = self

        class LmheadCallback(TrainerCallback):
            """Ties the head's steps to the Trainer's."""

            def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
                if max_grad_norm is not None and args.max_grad_norm:
                    raise ValueError(f"TrainingArguments.max_grad_norm is {args.max_grad_norm}, want 0 beside "
                                     f"trainer_callback(max_grad_norm={max_grad_norm}): the trunk would be clipped twice")
                if getattr(args, "use_vllm", False) and not patched.tied:
                    raise ValueError("use_vllm is True: the trainer would send vLLM the model's parameters, of which the head is "
                                     "none, and sample from the head as it was at first. See docs/PYTHON.md, TRL")
                patched.resume(state.global_step)
                patched.attach(optimizer, max_grad_norm)

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                patched.abort()  # Of a step that a GradScaler has skipped; the others are committed.

            def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                patched.save(state.global_step)

            def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                patched.detach()

        return LmheadCallback()

    def save(self, trainer_step: int) -> None:
        """Asks the service for the head's checkpoint ``trainer-STEP``; warns where it cannot. Of several ranks all call it."""
        def run() -> None:
            try:
                self.head.save_checkpoint(f"trainer-{trainer_step}")
            except (AlreadyExists, FailedPrecondition, ResourceExhausted) as error:
                warnings.warn(f"the trainer's checkpoint {trainer_step} has the head's weight without its optimizer state: {error}",
                              stacklevel=2)
        self._by_leader(run)

    def resume(self, trainer_step: int) -> None:
        """Brings the head's checkpoint ``trainer-STEP`` back, when it is that of the weights which were loaded.

        For after ``load_state_dict``; of several ranks all call it. Warns where there is no such checkpoint.

        Raises:
            ValueError: it has other weights: it is another run's.
        """
        def run() -> None:
            if trainer_step == 0:
                return
            loaded = self._some_rows()
            try:
                self.head.restore_checkpoint(f"trainer-{trainer_step}")
            except (DataLoss, FailedPrecondition, NotFound) as error:
                warnings.warn(f"head {self.head.name} goes on with the weight of the trainer's checkpoint {trainer_step} and without "
                              f"the optimizer state of that step: {error}", stacklevel=2)
                return
            if not torch.equal(self.head.read_weight(0, loaded.shape[0]).to(self._dtype), loaded):
                raise ValueError(f"checkpoint trainer-{trainer_step} of head {self.head.name} has other weights than the trainer's "
                                 "checkpoint: it is another run's. Give each run a head of its own name, or remove it there")
        self._drop_rows()
        self._by_leader(run)
        self._next_step = self.head.next_step()

    def _some_rows(self) -> torch.Tensor:
        """Of the weight that was loaded last; every step changes all rows."""
        rows = min(64, self._shape[0])
        found = self.head.read_weight(0, rows) if self._tied is None else self._tied.detach()[:rows]
        return found.to("cpu", self._dtype)

    def _by_leader(self, action: Callable[[], None]) -> None:
        self.workers.agree(lambda: action() if self.workers.leader or not self.workers.grouped else None)

    def detach(self) -> None:
        """Undoes ``attach``, and aborts a step that is still open."""
        self.abort()
        while self._detachers:
            self._detachers.pop()()

    def restore(self) -> Any:
        """Takes the trained head back into the model, for generating or local training; gives the model."""
        self.detach()
        self._drop_rows()
        if getattr(self._owner, self._name) is not self._stand_in:  # Restored before.
            return self.model
        layer = torch.nn.Linear(self._shape[1], self._shape[0], bias=self._has_bias, dtype=self._dtype,
                                device=self._stand_in.like.device)
        with torch.no_grad():
            if self._tied is not None:
                layer.weight = self._tied
            layer.weight.copy_(self.head.read_weight())
            if self._has_bias:
                layer.bias.copy_(self.head.read_bias())
        setattr(self._owner, self._name, layer)
        self._loaded_hook.remove()
        del self.model.forward  # With what was wrapped around it since.
        if self._trainers_forward is not None:
            self.model.forward = self._trainers_forward
        if self._getter is None:
            del self.model.get_output_embeddings
        else:
            self.model.get_output_embeddings = self._getter
        return self.model


def patch(model: torch.nn.Module, head: RemoteHead, *, recipe: Recipe = Recipe(ignore_index=IGNORE_INDEX),
          load_weights: bool = True, workers: Workers = SINGLE, averaged_over: int = 1,
          check_logits: bool = True, generate: bool = False) -> PatchedModel:
    """Moves a causal language model's head into the service. The model's ``loss`` is then computed there.

    Make the trunk's optimizer afterwards: the head's parameter is gone from the model. A tied embedding stays, since the
    trunk needs it: its gradient joins the head's in the service, whose optimizer updates both, and its new rows are read
    back after each commit (vocab_size x hidden_size elements a step).

    Of a trainer that wraps the model's forward() itself, as TRL's do, make the trainer first, then patch its model, then
    add the callback. Such trainers ask for per-token log-probabilities, which ``Step.logprobs`` gives.

    Args:
        model: with the Hugging Face causal language models' structure (forward(labels=...), get_output_embeddings()).
        head: as ``RemoteHead.create(address, name, **lmhead.head_arguments(model), optimizer=...)`` makes it.
        recipe: of the loss; label smoothing of a Trainer goes here.
        load_weights: send the model's head to the service; False when the service has it, such as after a restart.
        workers, averaged_over: for several ranks: see distributed_workers and clip_grad_norm.
        check_logits: run the model on two tokens, to see that its logits are what the configuration says.
        generate: let the patched model generate(), as a trainer that samples from it needs: forward() without labels then
            gives the logits, without gradients, of the positions it is asked for. They come from a copy of the head's weight
            and bias on the model's device and in its dtype: the trainer holds vocab_size x hidden_size elements from the
            first such call to the next commit, after which the copy is read again (as much over the network). A tied
            embedding has the rows already. Without it such a call is refused.

    Raises:
        ValueError: the model has no such structure, or the head differs in size, bias, logit scale or softcap, or the
            model in what it makes of its output layer, or the trainer in its temperature.
    """
    patched = PatchedModel(model, head, recipe, workers, averaged_over, generate)
    patched.install(load_weights, check_logits)
    return patched
