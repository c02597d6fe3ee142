"""Log-probabilities and entropies that autograd goes through, for objectives that are written in PyTorch.

Forward evaluates. What the objective makes of the values is known in its backward pass alone, so that this one sends
the hidden states again, with d objective / d logprob and d objective / d entropy: the service's linear objective
(lmhead.PolicyCoefficients) then gives their gradient and sums the head's. Any factor, however it differs between
tokens, is so in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Dict, NamedTuple, Optional, Tuple

import torch

from lmhead.recipe import PolicyCoefficients, Recipe

if TYPE_CHECKING:
    from lmhead.head import RemoteHead

# The gradient of the hidden states, [n, hidden_size], None where there is none, of a recipe with coefficients.
Backward = Callable[[Recipe, Dict[str, Optional[torch.Tensor]]], Optional[torch.Tensor]]


class Logprobs(NamedTuple):
    """What ``Step.logprobs`` gives: [...] each.

    Attributes:
        logprob: log-probability of the label, float32; 0 where ignored.
        entropy: of the distribution, in nats, float32; 0 where ignored.
        argmax: the likeliest id, int32; without a gradient.
    """

    logprob: torch.Tensor
    entropy: torch.Tensor
    argmax: torch.Tensor


class LogprobFunction(torch.autograd.Function):
    """Hands out values that were evaluated; backward is ``run``."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, anchor: torch.Tensor, logprob: torch.Tensor, entropy: torch.Tensor,
                run: Callable[..., Optional[torch.Tensor]]) -> Tuple[torch.Tensor, torch.Tensor]:
        ctx.shape = hidden.shape
        ctx.run = run
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Tuple[Optional[torch.Tensor], None, None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError("lmhead: log-probabilities cannot be differentiated twice: the service computes first "
                               "derivatives only. Call backward() or grad() without create_graph=True")
        grad = ctx.run(*upstream)
        return None if grad is None else grad.reshape(ctx.shape), None, None, None, None


def differentiable_logprobs(head: "RemoteHead", hidden: torch.Tensor, labels: torch.Tensor, temperature: float,
                            ignore_index: int, backward: Backward) -> Logprobs:
    """The values for ``labels``, which are shifted already; ``backward`` is asked for gradients."""
    values = head.outputs(hidden, labels, ("logprob", "entropy", "argmax"),
                          recipe=Recipe(ignore_index=ignore_index, temperature=temperature))
    ignored = (labels == ignore_index).to(hidden.device)
    logprob, entropy = values["logprob"], values["entropy"].masked_fill(ignored, 0.0)
    if not torch.is_grad_enabled():
        return Logprobs(logprob, entropy, values["argmax"])
    recipe = Recipe(ignore_index=ignore_index, temperature=temperature, policy=PolicyCoefficients())

    def run(logprob_grad: torch.Tensor, entropy_grad: torch.Tensor) -> Optional[torch.Tensor]:
        return backward(recipe, {"logprob_grad": logprob_grad.masked_fill(ignored, 0.0),
                                 "entropy_grad": entropy_grad.masked_fill(ignored, 0.0)})

    # Autograd enters here also where hidden wants no gradient: the head does.
    anchor = torch.zeros((), device=hidden.device, requires_grad=True)
    logprob, entropy = LogprobFunction.apply(hidden, anchor, logprob, entropy, run)
    return Logprobs(logprob, entropy, values["argmax"])
