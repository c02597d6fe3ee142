"""What is computed: the loss of a call, as dataclasses behind lmhead.v1.LossRecipe."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Optional, Tuple

import torch

from lmhead import _staging

IGNORE_INDEX = -100


@dataclasses.dataclass(frozen=True)
class Distillation:
    """A divergence from a teacher, alone or mixed with cross entropy.

    Distributions are softmax(logits / kl_temperature) on both sides; p is the student, q the teacher.

    Attributes:
        teacher_head: name of the teacher's head in the same service; None for a teacher given by its top-k
            log-probabilities.
        divergence: "forward_kl" KL(q || p), "reverse_kl" KL(p || q), or "jsd" with weight ``jsd_beta`` on the teacher.
        kl_temperature: temperature of both sides.
        scale_by_temperature_squared: multiply the divergence by kl_temperature squared.
        cross_entropy_weight, divergence_weight: weights of the mix.
        topk_mass: with top-k: what becomes of the teacher's mass outside, "renormalise", "keep" or "tail".
        vocabulary: heads of two vocabulary sizes: "equal" refuses, "common" takes the ids both have, "pad" gives an id
            that one side lacks probability 0 there.
        paired_stream: dtype of the hidden states that the teacher's program sends on a stream of its own
            (``RemoteHead.teacher_stream``); None: they come with each call, as ``teacher_hidden``.
    """

    teacher_head: Optional[str] = None
    divergence: str = "forward_kl"
    kl_temperature: float = 1.0
    scale_by_temperature_squared: bool = False
    jsd_beta: float = 0.5
    cross_entropy_weight: float = 0.0
    divergence_weight: float = 1.0
    topk_mass: str = "renormalise"
    vocabulary: str = "equal"
    paired_stream: Optional[torch.dtype] = None

    def message(self, teacher_dtype: Optional[str], top_k: int) -> Dict[str, Any]:
        """lmhead.v1.DistillationSpec as JSON."""
        spec: Dict[str, Any] = {
            "kl_temperature": self.kl_temperature,
            "scale_by_temperature_squared": self.scale_by_temperature_squared,
            "cross_entropy_weight": self.cross_entropy_weight,
            "divergence_weight": self.divergence_weight,
        }
        if self.vocabulary != "equal":
            spec["vocabulary"] = f"VOCABULARY_{self.vocabulary.upper()}"
        if self.teacher_head is None:
            if self.divergence != "forward_kl":
                raise ValueError(f"divergence is {self.divergence!r} without a teacher_head, want 'forward_kl': top-k "
                                 "log-probabilities are known of the teacher only")
            spec.update(divergence="DIVERGENCE_TOPK_FORWARD_KL", top_k=top_k,
                        topk_mass=f"TOPK_MASS_{self.topk_mass.upper()}")
            return spec
        spec.update(teacher_head=self.teacher_head, divergence=f"DIVERGENCE_{self.divergence.upper()}",
                    teacher_hidden_dtype=teacher_dtype)
        if self.paired_stream is not None:
            spec.update(paired_stream=True, teacher_hidden_dtype=_staging.DTYPE_NAMES[self.paired_stream])
        if self.divergence == "jsd":
            spec["jsd_beta"] = self.jsd_beta
        return spec


@dataclasses.dataclass(frozen=True)
class ClippedPolicy:
    """The token-level clipped loss of PPO and GRPO.

    With r = exp(logprob - old_logprob), advantage A and d = reference_logprob - logprob, a token's loss is
    ``-min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A) - entropy_coefficient entropy
    + reference_kl_coefficient (exp(d) - d - 1)``; where A < 0 at most ``-dual_clip A``, when dual_clip is not 0.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    entropy_coefficient: float = 0.0
    reference_kl_coefficient: float = 0.0
    dual_clip: float = 0.0

    def message(self) -> Dict[str, Any]:
        """lmhead.v1.PolicySpec as JSON."""
        return {"kind": "KIND_CLIPPED", **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class PolicyCoefficients:
    """The linear objective ``sum_t logprob_grad_t logprob_t + entropy_grad_t entropy_t``.

    What any policy-gradient method comes to: work the coefficients out from ``logprobs(..., entropy=True)``. It is
    minimised like a loss, so that REINFORCE has ``logprob_grad = -advantage``.
    """

    def message(self) -> Dict[str, Any]:
        """lmhead.v1.PolicySpec as JSON."""
        return {"kind": "KIND_COEFFICIENTS"}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Options of a loss; docs/NUMERICS.md has the formulas.

    Attributes:
        ignore_index: label that contributes nothing.
        label_smoothing, z_loss: of the cross entropy.
        class_weights: one a vocabulary row, as in torch.nn.CrossEntropyLoss, or None: a tuple, a list or a tensor, kept as
            a tuple.
        temperature: logits / temperature; ``token_temperature`` of a call replaces it row by row.
        distillation: a teacher, or None.
        policy: a policy loss, or None. A recipe has one objective: not both.
    """

    ignore_index: int = IGNORE_INDEX
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    class_weights: Optional[Tuple[float, ...]] = None
    temperature: float = 1.0
    distillation: Optional[Distillation] = None
    policy: Any = None

    def __post_init__(self) -> None:
        for name, kinds in (("distillation", (Distillation,)), ("policy", (ClippedPolicy, PolicyCoefficients))):
            given = getattr(self, name)
            if given is not None and not isinstance(given, kinds):
                raise TypeError(f"{name} is a {type(given).__name__}, want " +
                                " or ".join(f"lmhead.{kind.__name__}" for kind in kinds))
        weights: Any = self.class_weights
        if weights is not None and not isinstance(weights, tuple):
            weights = weights.tolist() if isinstance(weights, torch.Tensor) else weights
            object.__setattr__(self, "class_weights", tuple(float(weight) for weight in weights))

    def message(self, token_weights: bool, token_temperature: bool, teacher_dtype: Optional[str],
                top_k: int) -> Dict[str, Any]:
        """lmhead.v1.LossRecipe as JSON."""
        recipe: Dict[str, Any] = {
            "ignore_index": self.ignore_index,
            "label_smoothing": self.label_smoothing,
            "z_loss": self.z_loss,
            "temperature": self.temperature,
            "token_weights": token_weights,
            "per_token_temperature": token_temperature,
        }
        if self.class_weights is not None:
            recipe["class_weights"] = [float(weight) for weight in self.class_weights]
        if self.distillation is not None:
            recipe["distillation"] = self.distillation.message(teacher_dtype, top_k)
        if self.policy is not None:
            recipe["policy"] = self.policy.message()
        return recipe
