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

IMPLEMENTATIONS = ("auto", "eager", "sdpa")

# Logits of one call of fused attention: near the size of a CPU's cache, and enough to fill a GPU.
_LOGITS_CPU = 2**22
_LOGITS_GPU = 2**26


class Dictionary(NamedTuple):
    """
    Key-semantic dictionary D_K of one partition of a feature map. All heads and layers of a stage on that partition
    read it.

    Args:
        window (`tuple[int, int]`): Height and width of a window in tokens, at most `window_size`.
        shift (`tuple[int, int]`): Rows and columns by which the partition is moved.
        window_size (`int`): Side w of the largest window: the table of position biases has (2w - 1)^2 columns.
        bits (`torch.ByteTensor` of shape `(W, N, ceil(N / 8))`, *optional*):
            The keys of every token: key j is bit `j % 8` of byte `j // 8`, the lowest bit first; bits past N are 0.
            `None` when every token attends to its whole window.
    """

    window: Pair
    shift: Pair
    window_size: int
    bits: torch.Tensor | None

    def part(self, windows: slice) -> "Dictionary":
        """
        The dictionary of some of the windows.

        Args:
            windows (`slice`): Which of the W windows.

        Returns:
            [`Dictionary`]: A view, not a copy.
        """
        return self if self.bits is None else self._replace(bits=self.bits[windows])


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


def key_regions(size: Pair, window: Pair, shift: Pair, device: torch.device | None = None) -> torch.Tensor:
    """
    Parts of each shifted window that lie together in the image. A token may attend to keys of its own region only:
    the others came into the window from the opposite border.

    Args:
        size (`tuple[int, int]`): Height and width of the feature map.
        window (`tuple[int, int]`): Height and width of a window.
        shift (`tuple[int, int]`): Rows and columns by which the partition is moved.
        device (`torch.device`, *optional*): Where to build them.

    Returns:
        `torch.ByteTensor` of shape `(windows of an image, N)`: Number of each token's region, 0 to 3.
    """
    wrapped_rows = torch.arange(size[0], device=device) >= size[0] - shift[0]
    wrapped_columns = torch.arange(size[1], device=device) >= size[1] - shift[1]
    regions = 2 * wrapped_rows[:, None].byte() + wrapped_columns.byte()
    return partition_windows(regions[None, :, :, None], window, (0, 0)).squeeze(-1)


def pack_keys(chosen: torch.Tensor) -> torch.Tensor:
    """
    Store one bit for each pair of tokens.

    Args:
        chosen (`torch.BoolTensor` of shape `(..., N)`): Whether each key is chosen.

    Returns:
        `torch.ByteTensor` of shape `(..., ceil(N / 8))`: As in [`Dictionary`].
    """
    padded = F.pad(chosen, (0, -chosen.shape[-1] % 8)).unflatten(-1, (-1, 8)).byte()
    places = torch.arange(8, dtype=torch.uint8, device=chosen.device)
    return (padded << places).sum(-1, dtype=torch.uint8)


def unpack_keys(bits: torch.Tensor, tokens: int) -> torch.Tensor:
    """
    Undo [`pack_keys`].

    Args:
        bits (`torch.ByteTensor` of shape `(..., ceil(N / 8))`): As in [`Dictionary`].
        tokens (`int`): N.

    Returns:
        `torch.BoolTensor` of shape `(..., N)`: Whether each key is chosen.
    """
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits[..., None] >> places & 1).flatten(-2)[..., :tokens].bool()


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
    with maybe_autocast(tokens.device.type, enabled=False):
        tokens = tokens.to(_at_least_float32(tokens.dtype))
        if similarity == "cosine":
            tokens = _normalize(tokens)
        scores = tokens @ tokens.mT
    legal = None
    if regions is not None:
        # Before the selection, or illegal keys would take places among the k.
        legal = regions[:, :, None] == regions[:, None]
        scores.view(-1, *legal.shape).masked_fill_(~legal, -torch.inf)
    if include_self:
        scores.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
    top_k = min(top_k, scores.shape[-1])
    smallest = scores.topk(top_k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    # A threshold alone would also take every key tied with the k-th.
    above, tied = scores > smallest, scores == smallest
    free = top_k - above.sum(-1, keepdim=True, dtype=torch.int32)
    chosen = above | tied & (tied.cumsum(-1, dtype=torch.int32) <= free)
    if legal is not None:
        # A small region has fewer than k legal keys; the rest of its k are illegal.
        chosen.view(-1, *legal.shape).logical_and_(legal)
    return pack_keys(chosen)


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
    regions = key_regions(size, window, shift, features.device) if any(shift) else None
    bits: torch.Tensor | None = None
    if regions is not None or top_k < window[0] * window[1]:
        bits = semantic_keys(partition_windows(features, window, shift), regions, top_k, similarity, include_self)
    return Dictionary(window, shift, window_size, bits)


def _eager(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Masked dense attention with a softmax of its own."""
    return ((query @ key.mT) + bias).softmax(-1).to(value.dtype) @ value


def _masked_bias(table: torch.Tensor, dictionary: Dictionary) -> torch.Tensor:
    """B(i - j) for the keys of each token, -inf for the others: [W or 1, heads, N, N]."""
    bias = table[:, relative_offsets(dictionary.window, dictionary.window_size, table.device)][None]
    if dictionary.bits is None:
        return bias
    return bias.masked_fill(~unpack_keys(dictionary.bits, bias.shape[-1])[:, None], -torch.inf)


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
            `"eager"` (matrix products and softmax), `"sdpa"` (`scaled_dot_product_attention` with masks), or `"auto"`:
            the fastest of them here. All give the same.

    Returns:
        `torch.Tensor` of shape `(W, heads, N, head_dim)`: Attended values, in the dtype of `value`.

    Raises:
        ValueError: If `implementation` is none of these.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"`implementation` is {implementation!r}; allowed: {', '.join(map(repr, IMPLEMENTATIONS))}.")
    heads, tokens = query.shape[1:3]
    chunk = max(1, (_LOGITS_CPU if query.device.type == "cpu" else _LOGITS_GPU) // (heads * tokens**2))
    if not torch.is_grad_enabled() and len(query) > chunk:
        # Bias and mask together are as large as all logits: for a whole image, gigabytes.
        parts = [slice(start, start + chunk) for start in range(0, len(query), chunk)]
        return torch.cat(
            [
                key_semantic_attention(
                    query[part], key[part], value[part], temperature, table, dictionary.part(part), implementation
                )
                for part in parts
            ]
        )
    precise = _at_least_float32(query.dtype)
    query = _normalize(query.to(precise), temperature.to(precise)[:, None, None])
    key = _normalize(key.to(precise))
    bias = _masked_bias(table, dictionary)
    if implementation == "auto":
        # A bias that needs a gradient sends SDPA on a CPU to a path that takes 1.5 times as long.
        implementation = "eager" if torch.is_grad_enabled() and query.device.type == "cpu" else "sdpa"
    if implementation == "eager":
        return _eager(query, key, value, bias)
    return F.scaled_dot_product_attention(
        query.to(value.dtype), key.to(value.dtype), value, attn_mask=bias.to(value.dtype), scale=1.0
    )
