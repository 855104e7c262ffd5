"""Derivatives that gradients written by hand have not: those of the gradients, and of transforms of `torch.func`."""

from collections.abc import Callable

import torch
from torch import Tensor


def is_transformed() -> bool:
    """True in a transform of `torch.func` or a forward-mode derivative: these follow plain expressions only."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def needs_plain_gradients() -> bool:
    """True in a backward pass that is differentiated (`create_graph`) or transformed (`is_grads_batched`)."""
    return not torch.compiler.is_compiling() and (torch.is_grad_enabled() or is_transformed())


def plain_gradients(form: Callable[..., Tensor], gradient: Tensor, *inputs: Tensor) -> list[Tensor | None]:
    """Gradients of the inputs of a plain form, by autograd, from that of its result."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views: what an input gives by way of another is counted where that one was made, and not here.
        given = [value.view_as(value) for value in inputs]
        wanted = [value for value in given if value.requires_grad]
        found = iter(torch.autograd.grad(form(*given), wanted, gradient, create_graph=create_graph))
    return [next(found) if value.requires_grad else None for value in given]
