# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Steps of SemanIR that a compiled graph takes as they are: operators of torch, of which a compiler knows the shapes.

Selection of the keys and attention are kernels for CPUs, in `kernels_semanir`, imported by the first call: numba takes
a second. Cutting maps into windows and joining them again is plain torch. A compiler that looks inside writes each
index as a function of those before it, through the layers of a stage, and does not come to an end with these formulas.
Shapes: B feature maps [B, height, width, channels], W windows of N tokens.
"""

import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch.library import Library, register_autograd, register_fake
from transformers.utils.generic import maybe_autocast

Pair = tuple[int, int]

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


def _cut(features: torch.Tensor, window: Pair, shift: Pair) -> torch.Tensor:
    if any(shift):
        features = features.roll((-shift[0], -shift[1]), dims=(1, 2))
    batch, height, width, channels = features.shape
    rows, columns = height // window[0], width // window[1]
    grid = features.reshape(batch, rows, window[0], columns, window[1], channels)
    # Sizes are written out, not left to -1, which in a graph of any size becomes a quotient of all the others.
    return grid.transpose(2, 3).reshape(batch * rows * columns, window[0] * window[1], channels)


def _join(windows: torch.Tensor, size: Pair, window: Pair, shift: Pair) -> torch.Tensor:
    rows, columns = size[0] // window[0], size[1] // window[1]
    batch, channels = windows.shape[0] // (rows * columns), windows.shape[-1]
    grid = windows.reshape(batch, rows, columns, window[0], window[1], channels)
    features = grid.transpose(2, 3).reshape(batch, *size, channels)
    return features.roll(tuple(shift), dims=(1, 2)) if any(shift) else features


def _copy_of(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same with a result of its own: an operator must not give a view of what it got."""

    def apply(given: torch.Tensor, *arguments: Any) -> torch.Tensor:
        result = function(given, *arguments)
        shared = result.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
        return result.clone(memory_format=torch.contiguous_format) if shared else result.contiguous()

    return apply


def _shape_of_windows(features: torch.Tensor, window: Pair, shift: Pair) -> torch.Tensor:
    batch, height, width, channels = features.shape
    count = batch * (height // window[0]) * (width // window[1])
    return features.new_empty(count, window[0] * window[1], channels)


def _shape_of_map(windows: torch.Tensor, size: Pair, window: Pair, shift: Pair) -> torch.Tensor:
    count = (size[0] // window[0]) * (size[1] // window[1])
    return windows.new_empty(windows.shape[0] // count, size[0], size[1], windows.shape[-1])


def _keep_size(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.geometry = (inputs[0].shape[1:3], *inputs[1:])


def _keep_layout(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.geometry = inputs[2:]


def _gradient_of_cut(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return _join_operator(gradient, *ctx.geometry), None, None


def _gradient_of_join(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return _cut_operator(gradient, *ctx.geometry), None, None, None


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


def _define(name: str, signature: str, kernel: Any, shapes: Any, where: str = "CPU") -> Any:
    """An operator: what computes it, and what knows the shape of its result."""
    _LIBRARY.define(f"{name}{signature}", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, where)
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
_LAYOUT = "SymInt[] window, SymInt[] shift"
_EVERYWHERE = "CompositeExplicitAutograd"
_cut_operator = _define(
    "cut", f"(Tensor features, {_LAYOUT}) -> Tensor", _copy_of(_cut), _shape_of_windows, _EVERYWHERE
)
_join_operator = _define(
    "join", f"(Tensor windows, SymInt[] size, {_LAYOUT}) -> Tensor", _copy_of(_join), _shape_of_map, _EVERYWHERE
)
register_autograd(f"{_NAMESPACE}::attend", _gradients, setup_context=_keep_inputs, lib=_LIBRARY)
register_autograd(f"{_NAMESPACE}::cut", _gradient_of_cut, setup_context=_keep_size, lib=_LIBRARY)
register_autograd(f"{_NAMESPACE}::join", _gradient_of_join, setup_context=_keep_layout, lib=_LIBRARY)


def _is_compiled() -> bool:
    """Whether a graph is made for torch itself; other programs do not have our operators."""
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting()


def cut_windows(features: torch.Tensor, window: Pair, shift: Pair) -> torch.Tensor:
    """See [`ops_windows_semanir.partition_windows`]."""
    return (_cut_operator if _is_compiled() else _cut)(features, window, shift)


def join_windows(windows: torch.Tensor, size: Pair, window: Pair, shift: Pair) -> torch.Tensor:
    """See [`ops_windows_semanir.merge_windows`]."""
    return (_join_operator if _is_compiled() else _join)(windows, size, window, shift)


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
    "Pair",
    "choose_keys",
    "cut_windows",
    "join_windows",
    "native_attention",
    "normalize",
    "similarities",
    "windows_of_calls",
]
