# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""SemanIR operators (arXiv 2405.20008): the key-semantic dictionary and attention restricted to it.

Every way to compute them gives the same. `tests/semanir/reference_ops.py` has the same functions as loops.
Shapes: batch B, feature map [B, height, width, channels], W = B * windows of an image, N = tokens of a window.
"""

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F

from .kernels_operators_semanir import (
    NUMBA_IS_INSTALLED,
    choose_keys,
    native_attention,
    normalize,
    similarities,
    windows_of_calls,
)
from .ops_windows_semanir import (
    Dictionary,
    Pair,
    key_regions,
    merge_windows,
    pack_keys,
    partition_windows,
    relative_coordinates,
    relative_offsets,
    unpack_keys,
)

IMPLEMENTATIONS = ("auto", "eager", "sdpa", "native", "flex_attention", "triton")

# Channels of a head that fit the registers of the kernels for CPUs.
_NATIVE_HEAD = 64
# Values of a feature map of which the windows are copied at a time.
_BAND = 2**24


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@cache
def _native() -> bool:
    """Whether there are kernels for CPUs. They are imported when they are needed: numba takes a second."""
    try:
        from .kernels_semanir import select_keys  # noqa: F401
    except ImportError:
        return False
    return True


def _runs_natively(tensor: torch.Tensor) -> bool:
    """Whether the kernels for CPUs take a tensor, and a graph with them could be run."""
    if tensor.device.type != "cpu" or tensor.dtype == torch.float64 or torch.compiler.is_exporting():
        return False
    # A compiler follows calls but not imports: here it must be content with the package being there.
    return NUMBA_IS_INSTALLED if torch.compiler.is_compiling() else _native()


def _needs_gradient(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


@torch.no_grad()
def semantic_keys(
    tokens: torch.Tensor,
    regions: torch.Tensor | None,
    top_k: int,
    similarity: str = "dot",
    include_self: bool = True,
) -> torch.Tensor:
    """
    Choose the k most similar legal keys of every token: I_i = top-k_j <p_i, p_j>. Without gradient, in float32.
    Of equally similar keys the first are taken.

    Args:
        tokens (`torch.Tensor` of shape `(W, N, channels)`): Window tokens P of the stage's input.
        regions (`torch.ByteTensor` of shape `(windows of an image, N)`, *optional*): See [`key_regions`].
        top_k (`int`): Keys per token, at least 1; clipped to N.
        similarity (`str`, *optional*, defaults to `"dot"`): `"dot"` or `"cosine"`.
        include_self (`bool`, *optional*, defaults to `True`): Whether a token is always among its own keys.

    Returns:
        `torch.ByteTensor` of shape `(W, N, ceil(N / 8))`: The chosen keys as in [`Dictionary`], exactly
        `min(top_k, N)` a row, or all the legal ones if they are fewer.
    """
    windows, count = tokens.shape[:2]
    if regions is not None:
        regions = regions.repeat(windows // regions.shape[0], 1)
    top_k, cosine = min(top_k, count), similarity == "cosine"
    if _runs_natively(tokens):
        return choose_keys(tokens, regions, top_k, cosine, include_self)
    rows = []
    for part in windows_of_calls(windows, count**2, tokens.device):
        scores = similarities(tokens[part], cosine)
        rows.append(_best_keys(scores, None if regions is None else regions[part], top_k, include_self))
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _best_keys(scores: torch.Tensor, regions: torch.Tensor | None, top_k: int, include_self: bool) -> torch.Tensor:
    """Bits of the `top_k` highest scores of each row; of equal ones the first. Overwrites the scores."""
    legal = None
    if regions is not None:
        # Before the selection, or illegal keys would take places among the k.
        legal = regions[:, :, None] == regions[:, None]
        scores.masked_fill_(~legal, -torch.inf)
    if include_self:
        # Not `scores.diagonal().fill_`: exporters do not know views that are written to.
        scores.masked_fill_(torch.eye(scores.shape[-1], dtype=torch.bool, device=scores.device), torch.inf)
    smallest = scores.topk(top_k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    # A threshold alone would also take every key tied with the k-th.
    above, tied = scores > smallest, scores == smallest
    free = top_k - above.sum(-1, keepdim=True, dtype=torch.int32)
    chosen = above | tied & (tied.cumsum(-1, dtype=torch.int32) <= free)
    if legal is not None:
        # A small region has fewer than k legal keys; the rest of its k are illegal.
        chosen.logical_and_(legal)
    return pack_keys(chosen)


def build_dictionary(
    features: torch.Tensor,
    window_size: int,
    shifted: bool,
    top_k: int,
    similarity: str = "dot",
    include_self: bool = True,
) -> Dictionary:
    """
    Build the key-semantic dictionary of a stage from its input, for one partition into windows.

    Args:
        features (`torch.Tensor` of shape `(B, height, width, channels)`): Input of the stage. Height and width are
            multiples of `window_size`, or smaller than it, in which case the window is clipped to them.
        window_size (`int`): Side of a window.
        shifted (`bool`): Whether the partition is moved by half a window.
        top_k (`int`): Keys per token.
        similarity (`str`, *optional*, defaults to `"dot"`): `"dot"` or `"cosine"`.
        include_self (`bool`, *optional*, defaults to `True`): Whether a token is always among its own keys.

    Returns:
        [`Dictionary`]: The dictionary, without gradient.
    """
    size = (features.shape[1], features.shape[2])
    # Not `min`: in a graph of many sizes it stays what it is, and every later shape would be a function of it.
    window = (
        window_size if size[0] > window_size else size[0],
        window_size if size[1] > window_size else size[1],
    )
    # One window that spans the axis has no neighbour to shift into.
    shift = (
        window[0] // 2 if shifted and window[0] < size[0] else 0,
        window[1] // 2 if shifted and window[1] < size[1] else 0,
    )
    regions = key_regions(size, window, shift, features.device) if any(shift) else None
    bits: torch.Tensor | None = None
    if regions is not None or top_k < window[0] * window[1]:
        rows = []
        for windows, legal in _bands(features, window, shift, regions):
            rows.append(semantic_keys(windows, legal, top_k, similarity, include_self))
        bits = rows[0] if len(rows) == 1 else torch.cat(rows)
    return Dictionary(window, shift, window_size, bits)


def _bands(
    features: torch.Tensor, window: Pair, shift: Pair, regions: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Windows and their regions, at once or, of maps so large that a copy counts, some rows of windows at a time."""
    _, height, width, channels = features.shape
    band = max(1, _BAND // (window[0] * width * channels)) * window[0]
    if torch.compiler.is_compiling() or features.numel() <= _BAND:
        yield partition_windows(features, window, shift), regions
        return
    for image in features:
        for start in range(0, height, band):
            stop = min(start + band, height)
            rows = (torch.arange(start, stop, device=features.device) + shift[0]) % height
            windows = partition_windows(image[rows][None], window, (0, shift[1]))
            first = start // window[0] * (width // window[1])
            yield windows, None if regions is None else regions[first : first + len(windows)]


def _masked_bias(table: torch.Tensor, dictionary: Dictionary) -> torch.Tensor:
    """B(i - j) for the keys of each token, -inf for the others: [W or 1, heads, N, N]."""
    bias = table[:, relative_offsets(dictionary.window, dictionary.window_size, table.device)][None]
    if dictionary.bits is None:
        return bias
    return bias.masked_fill(~unpack_keys(dictionary.bits, bias.shape[-1])[:, None], -torch.inf)


def _automatic(value: torch.Tensor, gradient: bool) -> str:
    """The fastest implementation."""
    if value.device.type != "cpu":
        return "sdpa"
    # Measured from 64 to 1024 tokens and for every k: the kernels need no masks, and no copies of what is given.
    if value.shape[-1] <= _NATIVE_HEAD and _runs_natively(value):
        return "native"
    # SDPA on a CPU computes the gradient of a bias along a path that is slower than these lines.
    return "eager" if gradient else "sdpa"


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    dictionary: Dictionary,
    implementation: str,
) -> torch.Tensor:
    """Attention with scaled queries and keys of unit length, of at least float32."""
    if implementation == "eager":
        logits = query @ key.mT + _masked_bias(table, dictionary)
        return logits.softmax(-1).to(value.dtype) @ value
    query, key = query.to(value.dtype), key.to(value.dtype)
    if implementation == "flex_attention":
        from .kernels_flex_semanir import flex_attention_

        return flex_attention_(query, key, value, table, dictionary)
    if implementation == "triton":
        from .kernels_triton_semanir import triton_attention

        return triton_attention(query, key, value, table, dictionary)
    bias = _masked_bias(table, dictionary).to(value.dtype)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)


def key_semantic_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    temperature: torch.Tensor,
    table: torch.Tensor,
    dictionary: Dictionary,
    implementation: str = "auto",
) -> torch.Tensor:
    """
    Attention of every token to its dictionary keys: o_i = sum_{j in I_i} softmax_j(tau cos(q_i, k_j) + B(i - j)) v_j.

    Args:
        query, key, value (`torch.Tensor` of shape `(W, heads, N, head_dim)`): Projections of the window tokens.
        temperature (`torch.Tensor` of shape `(heads,)`): tau of each head.
        table (`torch.Tensor` of shape `(heads, (2 * window_size - 1)^2)`):
            Position bias B of every offset, in the order of [`relative_offsets`].
        dictionary ([`Dictionary`]): The keys of these windows, at least one a token.
        implementation (`str`, *optional*, defaults to `"auto"`):
            `"eager"` (matrix products and softmax), `"sdpa"` (`scaled_dot_product_attention` with masks), `"native"`
            (fused; CPUs, in float32), `"flex_attention"` and `"triton"` (fused, for GPUs), or `"auto"`: the fastest
            here. All give the same.

    Returns:
        `torch.Tensor` of shape `(W, heads, N, head_dim)`: Attended values, in the dtype of `value`.

    Raises:
        ValueError: If `implementation` is none of these, or `"native"` where that cannot be.
        TypeError: If `implementation` does not compute in this dtype.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"`implementation` is {implementation!r}; allowed: {', '.join(map(repr, IMPLEMENTATIONS))}.")
    gradient = _needs_gradient(query, key, value, temperature, table)
    if implementation == "auto":
        implementation = _automatic(value, gradient)
    if implementation == "native":
        return _attend_natively(query, key, value, temperature, table, dictionary)
    precise = _at_least_float32(query.dtype)
    windows, heads, tokens = query.shape[:3]
    # Bias and mask together are as large as all logits: for a whole image, gigabytes. A graph would keep them all.
    parts = [slice(None)] if gradient else windows_of_calls(windows, heads * tokens**2, query.device)
    outputs = []
    for part in parts:
        scaled = normalize(query[part].to(precise), temperature.to(precise)[:, None, None])
        unit = normalize(key[part].to(precise))
        outputs.append(_attend(scaled, unit, value[part], table, dictionary.part(part), implementation))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_natively(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    temperature: torch.Tensor,
    table: torch.Tensor,
    dictionary: Dictionary,
) -> torch.Tensor:
    """Attention by the kernels for CPUs."""
    problem = None
    if torch.compiler.is_exporting():
        problem = "the model is exported, and other programs do not have the kernels"
    elif query.device.type != "cpu" or value.dtype == torch.float64 or value.shape[-1] > _NATIVE_HEAD:
        problem = f"it got {value.dtype} on {value.device} with heads of {value.shape[-1]} channels"
    elif not _runs_natively(value):
        problem = "numba is not installed"
    if problem is not None:
        raise ValueError(
            f"`implementation` is 'native' but {problem}; it needs numba, at most float32 on a CPU, heads of at most "
            f"{_NATIVE_HEAD} channels. Use 'auto', which chooses it where it can."
        )
    dictionary.check_sizes(query, key, value, temperature, table)
    outputs = native_attention(
        query.float(),
        key.float(),
        value.float(),
        temperature.float(),
        table.float(),
        dictionary.window,
        dictionary.window_size,
        dictionary.bits,
    )
    return outputs.to(value.dtype)


__all__ = [
    "IMPLEMENTATIONS",
    "Dictionary",
    "Pair",
    "build_dictionary",
    "key_regions",
    "key_semantic_attention",
    "merge_windows",
    "pack_keys",
    "partition_windows",
    "relative_coordinates",
    "relative_offsets",
    "semantic_keys",
    "unpack_keys",
]
