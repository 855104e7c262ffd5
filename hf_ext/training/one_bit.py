"""Fine-tuning to 1-bit deltas: what a merge by the method `onebit` keeps whole."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class OneBit(torch.optim.AdamW):
    """
    `torch.optim.AdamW` whose weights differ from those it begins with by one size per tensor: W_0 + mean |τ| sign τ.
    Rates of 1e-3, or 3e-4 for a task near that of the base, are good beginnings.
    """

    # AdamW moves W_0 + τ, and τ is kept whole; the network computes, forward and backward, with its signs and mean
    # size alone. The gradient there is taken as that of τ (the straight-through estimator; Courbariaux et al., 2015):
    # small steps that agree add up in τ until a sign turns. `onebit` finds these signs, and as the mean of equal sizes
    # this size: a merge restores the fine-tune but for the rounding of W_0 + τ. A test merges one.

    def __init__(
        self,
        params: list[dict[str, Any]],
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, foreach=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes a step with the gradients that are there."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        weights = [value for group in self.param_groups for value in group["params"] if value.grad is not None]
        first: list[Tensor] = []
        for value in weights:
            known = self.state.get(value)
            first.append(known["first"] if known else value.clone())
            if known:
                value.copy_(known["moved"])
        super().step()
        for value, start in zip(weights, first, strict=True):
            self.state[value].update(first=start, moved=value.clone())
            difference = value - start
            size = difference.abs().mean()
            # Not `sign`, which is 0 at 0: one bit has no third value.
            value.copy_(start + torch.where(difference >= 0, size, -size))
        return loss
