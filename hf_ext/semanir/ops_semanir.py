# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""SemanIR operators (arXiv 2405.20008): windows, the key-semantic dictionary and attention restricted to it.

The exact masked-dense form. `reference_semanir` has the same functions as loops.
Shapes: batch B, feature map [B, height, width, channels], W = B * windows of an image, N = tokens of a window.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers.utils.generic import maybe_autocast

Pair = tuple[int, int]

# Logits of one call of fused attention: near the size of a CPU's cache, and enough to fill a GPU.
_LOGITS_CPU = 2**22
_LOGITS_GPU = 2**26


class Dictionary(NamedTuple):
    """
    Key-semantic dictionary D_K of one partition of a feature map. All layers of a stage on that partition read it.

    Args:
        window (`tuple[int, int]`): Height and width of a window in tokens.
        shift (`tuple[int, int]`): Rows and columns by which the partition is moved.
        mask (`torch.Tensor` of shape `(W, N, N)`, *optional*):
            0 where token i attends to token j, -inf elsewhere. `None` when every token attends to its whole window.
        offsets (`torch.LongTensor` of shape `(N, N)`):
            Row of the position-bias table for query i and key j.
    """

    window: Pair
    shift: Pair
    mask: torch.Tensor | None
    offsets: torch.Tensor


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _normalize(vectors: torch.Tensor, length: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Vectors of a given length: as F.normalize, with two thirds of its backward time."""
    return vectors * (vectors.square().sum(-1, keepdim=True).clamp_min(1e-24).rsqrt() * length)


def partition_windows(features: torch.Tensor, window: Pair, shift: Pair) -> torch.Tensor:
    """
    Move a feature map up and left by `shift`, cyclically, and cut it into windows.

    Args:
        features (`torch.Tensor` of shape `(B, height, width, channels)`): Height and width are multiples of `window`.
        window (`tuple[int, int]`): Height and width of a window.
        shift (`tuple[int, int]`): Rows and columns to move by, below those of the window.

    Returns:
        `torch.Tensor` of shape `(W, N, channels)`: Windows in reading order, one image after the other.
    """
    if any(shift):
        features = features.roll((-shift[0], -shift[1]), dims=(1, 2))
    batch, height, width, channels = features.shape
    grid = features.reshape(batch, height // window[0], window[0], width // window[1], window[1], channels)
    return grid.transpose(2, 3).reshape(-1, window[0] * window[1], channels)


def merge_windows(windows: torch.Tensor, size: Pair, window: Pair, shift: Pair) -> torch.Tensor:
    """
    Undo [`partition_windows`].

    Args:
        windows (`torch.Tensor` of shape `(W, N, channels)`): Windows in reading order, one image after the other.
        size (`tuple[int, int]`): Height and width of the feature map.
        window (`tuple[int, int]`): Height and width of a window.
        shift (`tuple[int, int]`): The shift with which the windows were cut.

    Returns:
        `torch.Tensor` of shape `(B, height, width, channels)`: The feature map.
    """
    rows, columns = size[0] // window[0], size[1] // window[1]
    grid = windows.reshape(-1, rows, columns, window[0], window[1], windows.shape[-1])
    features = grid.transpose(2, 3).reshape(-1, *size, windows.shape[-1])
    return features.roll(shift, dims=(1, 2)) if any(shift) else features


def legal_keys(size: Pair, window: Pair, shift: Pair, device: torch.device | None = None) -> torch.Tensor:
    """
    Pairs of tokens that a shifted window did not bring together from opposite borders of the image.

    Args:
        size (`tuple[int, int]`): Height and width of the feature map.
        window (`tuple[int, int]`): Height and width of a window.
        shift (`tuple[int, int]`): Rows and columns by which the partition is moved.
        device (`torch.device`, *optional*): Where to build the mask.

    Returns:
        `torch.BoolTensor` of shape `(windows of an image, N, N)`: True where token i may attend to token j.
    """
    wrapped_rows = torch.arange(size[0], device=device) >= size[0] - shift[0]
    wrapped_columns = torch.arange(size[1], device=device) >= size[1] - shift[1]
    regions = 2 * wrapped_rows[:, None].int() + wrapped_columns.int()
    regions = partition_windows(regions[None, :, :, None], window, (0, 0))
    return regions == regions.mT


@torch.no_grad()
def semantic_mask(
    tokens: torch.Tensor,
    legal: torch.Tensor | None,
    top_k: int,
    similarity: str = "dot",
    include_self: bool = True,
) -> torch.Tensor:
    """
    Choose the k most similar legal keys of every token: I_i = top-k_j <p_i, p_j>. Without gradient, in float32.

    Args:
        tokens (`torch.Tensor` of shape `(W, N, channels)`): Window tokens P of the stage's input.
        legal (`torch.BoolTensor` of shape `(windows of an image, N, N)`, *optional*): See [`legal_keys`].
        top_k (`int`): Keys per token, at least 1; clipped to N.
        similarity (`str`, *optional*, defaults to `"dot"`): `"dot"` or `"cosine"`.
        include_self (`bool`, *optional*, defaults to `True`): Whether a token is always among its own keys.

    Returns:
        `torch.Tensor` of shape `(W, N, N)`, float32 at least: 0 for the chosen keys, exactly `min(top_k, N)` a row or
        all the legal ones if they are fewer, and -inf for the others.
    """
    with maybe_autocast(tokens.device.type, enabled=False):
        tokens = tokens.to(_at_least_float32(tokens.dtype))
        if similarity == "cosine":
            tokens = _normalize(tokens)
        scores = tokens @ tokens.mT
    if legal is not None:
        # Before the selection, or illegal keys would take places among the k.
        scores.view(-1, *legal.shape).masked_fill_(~legal, -torch.inf)
    if include_self:
        scores.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
    chosen = scores.topk(min(top_k, scores.shape[-1]), dim=-1, sorted=False).indices
    # Scattered, because a threshold at the k-th score would also take every key tied with it.
    mask = scores.fill_(-torch.inf).scatter_(-1, chosen, 0.0)
    if legal is not None:
        # A small region has fewer than k legal keys; the rest of its k are illegal.
        mask.view(-1, *legal.shape).masked_fill_(~legal, -torch.inf)
    return mask


def relative_coordinates(
    window_size: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> torch.Tensor:
    """
    Inputs of the position-bias MLP: t = sign(u) log2(1 + |u|) / log2(8), u = 8 delta / (w - 1), for every offset.

    Args:
        window_size (`int`): Side w of the largest window.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): Precision.
        device (`torch.device`, *optional*): Where to build them.

    Returns:
        `torch.Tensor` of shape `((2w - 1)^2, 2)`: Vertical and horizontal coordinate, offsets from 1 - w up.
    """
    offsets = torch.arange(1 - window_size, window_size, dtype=dtype, device=device)
    scaled = 8 * offsets / max(window_size - 1, 1)
    coordinates = scaled.sign() * torch.log2(1 + scaled.abs()) / 3
    return torch.cartesian_prod(coordinates, coordinates)


def relative_offsets(window: Pair, window_size: int, device: torch.device | None = None) -> torch.Tensor:
    """
    Row of [`relative_coordinates`] for every pair of tokens of a window.

    Args:
        window (`tuple[int, int]`): Height and width of the window, at most `window_size`.
        window_size (`int`): Side w of the largest window.
        device (`torch.device`, *optional*): Where to build them.

    Returns:
        `torch.LongTensor` of shape `(N, N)`: Row for the offset from key j to query i.
    """
    rows = torch.arange(window[0], device=device).repeat_interleave(window[1])
    columns = torch.arange(window[1], device=device).repeat(window[0])
    vertical = rows[:, None] - rows + window_size - 1
    horizontal = columns[:, None] - columns + window_size - 1
    return vertical * (2 * window_size - 1) + horizontal


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
    window = (min(window_size, size[0]), min(window_size, size[1]))
    # One window that spans the axis has no neighbour to shift into.
    shift = (
        window[0] // 2 if shifted and window[0] < size[0] else 0,
        window[1] // 2 if shifted and window[1] < size[1] else 0,
    )
    legal = legal_keys(size, window, shift, features.device) if any(shift) else None
    mask: torch.Tensor | None = None
    if legal is not None or top_k < window[0] * window[1]:
        mask = semantic_mask(partition_windows(features, window, shift), legal, top_k, similarity, include_self)
    return Dictionary(window, shift, mask, relative_offsets(window, window_size, features.device))


def key_semantic_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    temperature: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """
    Attention of every token to its dictionary keys: o_i = sum_{j in I_i} softmax_j(tau cos(q_i, k_j) + B(i - j)) v_j.

    Args:
        query, key, value (`torch.Tensor` of shape `(W, heads, N, head_dim)`): Projections of the window tokens.
        temperature (`torch.Tensor` of shape `(heads,)`): tau of each head.
        bias (`torch.Tensor` of shape `(heads, N, N)`): Position bias B.
        mask (`torch.Tensor` of shape `(W, N, N)`, *optional*): [`Dictionary`] mask; at least one key a row.

    Returns:
        `torch.Tensor` of shape `(W, heads, N, head_dim)`: Attended values, in the dtype of `value`.
    """
    chunk = max(1, (_LOGITS_CPU if query.device.type == "cpu" else _LOGITS_GPU) // bias.numel())
    if not torch.is_grad_enabled() and len(query) > chunk:
        # Bias and mask together are as large as all logits: for a whole image, gigabytes.
        parts = [slice(start, start + chunk) for start in range(0, len(query), chunk)]
        return torch.cat(
            [
                key_semantic_attention(
                    query[part], key[part], value[part], temperature, bias, None if mask is None else mask[part]
                )
                for part in parts
            ]
        )
    precise = _at_least_float32(query.dtype)
    query = _normalize(query.to(precise), temperature.to(precise)[:, None, None])
    key = _normalize(key.to(precise))
    if torch.is_grad_enabled() and query.device.type == "cpu":
        # A bias that needs a gradient sends SDPA on a CPU to a path that takes 1.5 times as long as these lines.
        logits = (query @ key.mT).add_(bias)
        logits = logits if mask is None else logits.add_(mask[:, None])
        return logits.softmax(-1).to(value.dtype) @ value
    bias = bias[None] if mask is None else bias + mask[:, None]
    return F.scaled_dot_product_attention(
        query.to(value.dtype), key.to(value.dtype), value, attn_mask=bias.to(value.dtype), scale=1.0
    )
