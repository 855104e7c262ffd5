# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""SemanIR's kernels for CPUs as operators of torch: selection of the keys, attention and its gradient.

A compiled graph calls them as they are, in one step each, and its compiler knows the shapes of their results without
looking inside. The kernels themselves, in `kernels_semanir`, are imported by the first call: numba takes a second.
Shapes: W windows of N tokens.
"""

import re
from importlib.util import find_spec
from typing import Any

import torch
from torch.library import Library, register_autograd, register_fake
from transformers.utils.generic import maybe_autocast

# Similarities of one selection, logits of one call of fused attention: near the size of a CPU's cache, and enough to
# fill a GPU.
_LOGITS_CPU = 2**22
_LOGITS_GPU = 2**26
NUMBA_IS_INSTALLED = find_spec("numba") is not None


def normalize(vectors: torch.Tensor, length: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Vectors of a given length: as F.normalize, with two thirds of its backward time."""
    return vectors * (vectors.square().sum(-1, keepdim=True).clamp_min(1e-24).rsqrt() * length)


def windows_of_calls(windows: int, logits: int, device: torch.device) -> list[slice]:
    """Which windows are computed together, each having so many logits. All of them where a loop would tie a graph to
    their number."""
    if torch.compiler.is_compiling():
        return [slice(None)]
    chunk = max(1, (_LOGITS_CPU if device.type == "cpu" else _LOGITS_GPU) // logits)
    return [slice(start, start + chunk) for start in range(0, windows, chunk)]


def similarities(tokens: torch.Tensor, cosine: bool) -> torch.Tensor:
    """Similarities of all pairs of tokens of each window, in at least float32: [W, N, N]."""
    with maybe_autocast(tokens.device.type, enabled=False):
        tokens = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
        tokens = normalize(tokens) if cosine else tokens
        return tokens @ tokens.mT


def _choose_keys(
    tokens: torch.Tensor, regions: torch.Tensor | None, top_k: int, cosine: bool, include_self: bool
) -> torch.Tensor:
    from .kernels_semanir import select_keys

    windows, count = tokens.shape[:2]
    rows = []
    for part in windows_of_calls(windows, count**2, tokens.device):
        scores = similarities(tokens[part], cosine)
        rows.append(select_keys(scores, None if regions is None else regions[part], top_k, include_self))
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    temperature: torch.Tensor,
    table: torch.Tensor,
    bits: torch.Tensor | None,
    width: int,
    window_size: int,
) -> torch.Tensor:
    from .kernels_semanir import attend

    return attend(query, key, value, temperature, table, bits, width, window_size)


def _attend_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    temperature: torch.Tensor,
    table: torch.Tensor,
    bits: torch.Tensor | None,
    width: int,
    window_size: int,
) -> tuple[torch.Tensor, ...]:
    from .kernels_semanir import attend_gradients

    return attend_gradients(gradient, query, key, value, temperature, table, bits, width, window_size)


def _shape_of_keys(tokens: torch.Tensor, *_: Any) -> torch.Tensor:
    windows, count = tokens.shape[:2]
    return tokens.new_empty(windows, count, (count + 7) // 8, dtype=torch.uint8)


def _shape_of_result(query: torch.Tensor, *_: Any) -> torch.Tensor:
    windows, heads, tokens, dim = query.shape
    return query.new_empty(windows, tokens, heads, dim)


def _shapes_of_gradients(gradient: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    query, _, _, temperature, table = given[:5]
    maps = [_shape_of_result(query) for _ in range(3)]
    return *maps, temperature.new_empty(temperature.shape), table.new_empty(table.shape)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Nothing but the inputs is kept for the gradient, which computes the logits again."""
    ctx.save_for_backward(*inputs[:6])
    ctx.geometry = inputs[6:]


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    slopes = _attend_backward_operator(gradient, *ctx.saved_tensors, *ctx.geometry)
    return *(slope.transpose(1, 2) for slope in slopes[:3]), *slopes[3:], None, None, None


def _free_namespace() -> str:
    """A name for the operators: each copy of this file has its own, and transformers copies it beside a checkpoint."""
    name, number = re.sub(r"\W", "_", __name__), 0
    while hasattr(getattr(torch.ops, f"{name}_{number}"), "attend"):
        number += 1
    return f"{name}_{number}"


_NAMESPACE = _free_namespace()
# The operators last as long as this object.
_LIBRARY = Library(_NAMESPACE, "DEF")
_GIVEN = "Tensor query, Tensor key, Tensor value, Tensor temperature, Tensor table, Tensor? bits"
_SIZES = "SymInt width, SymInt window_size"


def _define(name: str, signature: str, kernel: Any, shapes: Any) -> Any:
    """An operator: what computes it, and what knows the shape of its result."""
    _LIBRARY.define(f"{name}{signature}", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CPU")
    register_fake(f"{_NAMESPACE}::{name}", shapes, lib=_LIBRARY)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


_choose_operator = _define(
    "choose_keys",
    "(Tensor tokens, Tensor? regions, SymInt top_k, bool cosine, bool include_self) -> Tensor",
    _choose_keys,
    _shape_of_keys,
)
_attend_operator = _define("attend", f"({_GIVEN}, {_SIZES}) -> Tensor", _attend, _shape_of_result)
_attend_backward_operator = _define(
    "attend_backward",
    f"(Tensor gradient, {_GIVEN}, {_SIZES}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _attend_backward,
    _shapes_of_gradients,
)
register_autograd(f"{_NAMESPACE}::attend", _gradients, setup_context=_keep_inputs, lib=_LIBRARY)


def choose_keys(
    tokens: torch.Tensor, regions: torch.Tensor | None, top_k: int, cosine: bool, include_self: bool
) -> torch.Tensor:
    """
    The `top_k` most similar legal keys of every token; of equally similar ones the first.

    Args:
        tokens (`torch.Tensor` of shape `(W, N, channels)`): Window tokens on the CPU, at most float32.
        regions (`torch.ByteTensor` of shape `(W, N)`, *optional*): See [`ops_semanir.key_regions`].
        top_k (`int`): Keys per token.
        cosine (`bool`): Whether the similarity is the cosine, not the dot product.
        include_self (`bool`): Whether a token comes first among its own keys.

    Returns:
        `torch.ByteTensor` of shape `(W, N, ceil(N / 8))`: As in [`ops_semanir.Dictionary`].
    """
    return _choose_operator(tokens, regions, top_k, cosine, include_self)


def native_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    temperature: torch.Tensor,
    table: torch.Tensor,
    window: tuple[int, int],
    window_size: int,
    bits: torch.Tensor | None,
) -> torch.Tensor:
    """
    Attention to the chosen keys. Reads those only, or, where there are many, computes all logits a few at a time. For
    the gradient the logits are computed again.

    Args:
        query, key, value (`torch.Tensor` of shape `(W, heads, N, head_dim)`):
            Projections, float32 on the CPU, of any layout; without a copy where the last dimension lies together.
        temperature (`torch.Tensor` of shape `(heads,)`): tau of each head, float32.
        table (`torch.Tensor` of shape `(heads, (2 * window_size - 1)^2)`): Position biases, float32.
        window (`tuple[int, int]`): Height and width of a window.
        window_size (`int`): Side of the largest window.
        bits (`torch.ByteTensor` of shape `(W, N, ceil(N / 8))`, *optional*):
            Keys of each token, at least one; all when not given.

    Returns:
        `torch.Tensor` of shape `(W, heads, N, head_dim)`: A view of `(W, N, heads, head_dim)`.
    """
    return _attend_operator(query, key, value, temperature, table, bits, window[1], window_size).transpose(1, 2)


__all__ = [
    "NUMBA_IS_INSTALLED",
    "choose_keys",
    "native_attention",
    "normalize",
    "similarities",
    "windows_of_calls",
]
