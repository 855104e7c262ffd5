"""Optimizers of our own: Muon for matrices and kernels beside AdamW, and fine-tuning to 1-bit deltas."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel

# Of a narrower matrix, such as an adapter's or a bias table's, the iteration makes little that AdamW does not.
_NARROWEST = 16
# An odd polynomial whose repetition brings every singular value between 0.03 and 1 near 1, from
# https://kellerjordan.github.io/posts/muon/ (Jordan et al., 2024).
_POLYNOMIAL = (3.4445, -4.7750, 2.0315)
_REPETITIONS = 5


def list_matrices(module: torch.nn.Module) -> list[Tensor]:
    """Weights of linear layers and convolutions, 16 or more wide both ways, for Muon; not those of tokens."""
    # Of tokens, into a model or out of it, a step moves few rows. A convolution of groups mixes no channels.
    tokens = {id(part.weight) for part in module.modules() if isinstance(part, torch.nn.Embedding)}
    last = module.get_output_embeddings() if isinstance(module, PreTrainedModel) else None
    return [
        part.weight
        for part in module.modules()
        if (isinstance(part, torch.nn.Linear) or (isinstance(part, _ConvNd) and part.groups == 1))
        and min(part.weight.shape[0], part.weight[0].numel()) >= _NARROWEST
        and part is not last
        and id(part.weight) not in tokens
    ]


def orthogonalize(matrices: Tensor) -> Tensor:
    """Matrices with the same singular vectors, and singular values between about 0.7 and 1.2, [n, rows, columns]."""
    linear, cubic, quintic = _POLYNOMIAL
    is_tall = matrices.shape[1] > matrices.shape[2]
    result = matrices.mT if is_tall else matrices
    result = result / result.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(_REPETITIONS):
        square = result @ result.mT
        change = torch.baddbmm(square, square, square, beta=cubic, alpha=quintic)
        result = torch.baddbmm(result, change, result, beta=linear)
    return result.mT if is_tall else result


class MuonWithAdamW(torch.optim.Optimizer):
    """
    Muon for some weights and `torch.optim.AdamW` for all other parameters, at one learning rate and weight decay.

    A step of a matrix, or of a kernel with a row for each output, is its Nesterov momentum, made orthogonal, times
    `rms * max(rows, columns) ** 0.5`. An `rms` of 0.2 is that of AdamW's steps, in learning rates (Liu et al., Muon is
    Scalable for LLM Training, 2025).
    """

    # torch's own Muon refuses kernels, which gain from it, and takes matrices one by one: here equal shapes make one
    # batch. AdamW has the state and the other groups of this optimizer: a schedule writes into groups, a checkpoint
    # holds both states, and `step` hands over what loading may have replaced.

    def __init__(
        self,
        params: list[dict[str, Any]],
        matrices: list[Tensor],
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
        rms: float = 0.2,
    ):
        if not (0 <= momentum < 1 and rms > 0):
            raise ValueError(f"momentum is {momentum}, rms {rms}; allowed: from 0 to less than 1, and more than 0")
        chosen = {id(value) for value in matrices}
        split: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for group in params:
            for is_muon, parts in split.items():
                if values := [value for value in group["params"] if (id(value) in chosen) == is_muon]:
                    parts.append({**group, "params": values, "is_muon": is_muon})
        if not split[True]:
            raise ValueError("Muon trains matrices and kernels, and this model has no wide ones: use AdamW")
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "rms": rms}
        # An empty group, so that a model without others has an AdamW too.
        others = [*split[False], {"params": [], "is_muon": False}]
        self._adamw = torch.optim.AdamW(others, lr, weight_decay=weight_decay, foreach=True)
        super().__init__([*split[True], *self._adamw.param_groups[:-1]], defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Takes a step with the gradients that are there."""
        for group in self.param_groups:
            if group["is_muon"]:
                self._step_matrices(group)
        self._adamw.state = self.state
        self._adamw.param_groups = [group for group in self.param_groups if not group["is_muon"]]
        self._adamw.step()

    def _step_matrices(self, group: dict[str, Any]) -> None:
        weights = [value for value in group["params"] if value.grad is not None]
        if not weights:
            return
        for value in weights:
            if not self.state[value]:
                self.state[value]["momentum_buffer"] = torch.zeros_like(value)
        gradients = [value.grad for value in weights]
        momenta = [self.state[value]["momentum_buffer"] for value in weights]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        steps = torch._foreach_lerp(gradients, momenta, group["momentum"])
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        shapes: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, value in enumerate(weights):
            shapes[value.shape[0], value[0].numel()].append(index)
        for shape, places in shapes.items():
            length = group["rms"] * max(shape) ** 0.5 * group["lr"]
            made = orthogonalize(torch.stack([steps[index].reshape(shape) for index in places]))
            for index, step in zip(places, made, strict=True):
                weights[index].add_(step.reshape(weights[index].shape), alpha=-length)


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
        self, params: Any, lr: float, weight_decay: float = 0.0, betas: Any = (0.9, 0.999), eps: float = 1e-8
    ):
        super().__init__(params, lr, betas, eps, weight_decay, foreach=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Takes a step with the gradients that are there."""
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
