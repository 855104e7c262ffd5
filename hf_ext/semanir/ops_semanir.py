# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""SemanIR operators (arXiv 2405.20008): windows, the key-semantic dictionary and attention restricted to it.

Plain torch, complete by itself. Where hf_ext is imported it puts faster ways beside these or in their place
(`ATTENTION` and `STEPS` below); all give the same. `tests/semanir/reference_ops.py` has the same functions as loops.
Shapes: batch B, feature map [B, height, width, channels], W = B * windows of an image, N = tokens of a window.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils.generic import maybe_autocast

Pair = tuple[int, int]

# Ways to compute attention by the name of `attn_implementation`, and the steps that "auto" chooses among several ways
# to do. This file fills them with plain torch at its end. `hf_ext.fast.semanir_operators` adds its own, as backends
# add theirs to transformers' AttentionInterface: a checkpoint's copy of this file knows nothing of them.
ATTENTION: dict[str, Callable[..., Tensor]] = {}
STEPS: dict[str, Callable[..., Any]] = {}

# Similarities of one selection, logits of one call of fused attention: about a CPU's cache, and enough for a GPU.
_LOGITS_CPU = 2**22
_LOGITS_GPU = 2**26
# Values of a feature map of which the windows are copied at a time.
_BAND = 2**24


class UnknownAttentionError(ValueError):
    """A name of `attn_implementation` that is not in `ATTENTION`."""

    def __init__(self, option: str, name: str):
        missing = [known for known in ("native", "triton") if known not in ATTENTION]
        elsewhere = (
            f"; {', '.join(map(repr, missing))} come with the package hf-ext ('native' with numba, 'triton' with "
            "triton): install it and import hf_ext before the model is loaded"
        )
        allowed = ", ".join(map(repr, ("auto", *ATTENTION)))
        super().__init__(f"`{option}` is {name!r}; allowed: {allowed}{elsewhere if missing else ''}.")


def partition_windows(features: Tensor, window: Pair, shift: Pair) -> Tensor:
    """Move a map up and left by `shift`, cyclically, and cut it: windows [W, N, C] in reading order, by images."""
    return STEPS["cut"](features, window, shift)


def merge_windows(windows: Tensor, size: Pair, window: Pair, shift: Pair) -> Tensor:
    """Undo [`partition_windows`] of maps of `size`: windows [W, N, C] to maps [B, height, width, C]."""
    return STEPS["join"](windows, size, window, shift)


def _cut(features: Tensor, window: Pair, shift: Pair) -> Tensor:
    if any(shift):
        features = features.roll((-shift[0], -shift[1]), dims=(1, 2))
    batch, height, width, channels = features.shape
    rows, columns = height // window[0], width // window[1]
    grid = features.reshape(batch, rows, window[0], columns, window[1], channels)
    # Sizes are written out, not left to -1, which in a graph of any size becomes a quotient of all the others.
    return grid.transpose(2, 3).reshape(batch * rows * columns, window[0] * window[1], channels)


def _join(windows: Tensor, size: Pair, window: Pair, shift: Pair) -> Tensor:
    rows, columns = size[0] // window[0], size[1] // window[1]
    batch, channels = windows.shape[0] // (rows * columns), windows.shape[-1]
    grid = windows.reshape(batch, rows, columns, window[0], window[1], channels)
    features = grid.transpose(2, 3).reshape(batch, *size, channels)
    return features.roll(tuple(shift), dims=(1, 2)) if any(shift) else features


def key_regions(size: Pair, window: Pair, shift: Pair, device: torch.device | None = None) -> Tensor:
    """Number, 0 to 3, of the part of a shifted window that each token lies in: uint8 [windows of an image, N]. A token
    may attend to keys of its own part only: the others came into the window from the opposite border."""
    wrapped_rows = torch.arange(size[0], device=device) >= size[0] - shift[0]
    wrapped_columns = torch.arange(size[1], device=device) >= size[1] - shift[1]
    regions = 2 * wrapped_rows[:, None].byte() + wrapped_columns.byte()
    return partition_windows(regions[None, :, :, None], window, (0, 0)).squeeze(-1)


def relative_coordinates(
    window_size: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """Inputs of the position-bias MLP, t = sign(u) log2(1 + |u|) / log2(8) with u = 8 delta / (w - 1), for every
    vertical and horizontal offset delta from 1 - w up: [(2w - 1)^2, 2]."""
    offsets = torch.arange(1 - window_size, window_size, dtype=dtype, device=device)
    scaled = 8 * offsets / max(window_size - 1, 1)
    coordinates = scaled.sign() * torch.log2(1 + scaled.abs()) / 3
    return torch.cartesian_prod(coordinates, coordinates)


def relative_offsets(window: Pair, window_size: int, device: torch.device | None = None) -> Tensor:
    """Row of [`relative_coordinates`] for the offset from key j to query i of a window: int64 [N, N]."""
    rows = torch.arange(window[0], device=device).repeat_interleave(window[1])
    columns = torch.arange(window[1], device=device).repeat(window[0])
    vertical = rows[:, None] - rows + window_size - 1
    horizontal = columns[:, None] - columns + window_size - 1
    return vertical * (2 * window_size - 1) + horizontal


class Dictionary(NamedTuple):
    """Key-semantic dictionary D_K of one partition of a feature map. All heads and layers of a stage on that partition
    read it. The window is at most `window_size` x `window_size` tokens, and the partition is moved by `shift`.

    `bits`, uint8 [W, N, ceil(N / 8)], are the keys of every token: key j is bit `j % 8` of byte `j // 8`, the lowest
    bit first; bits past N are 0. `None` when every token attends to its whole window."""

    window: Pair
    shift: Pair
    window_size: int
    bits: Tensor | None

    def part(self, windows: slice) -> "Dictionary":
        """The dictionary of some of the W windows: a view, not a copy."""
        return self if self.bits is None else self._replace(bits=self.bits[windows])


def pack_keys(chosen: Tensor) -> Tensor:
    """One bit for each pair of tokens, as in [`Dictionary`]: bool [..., N] to uint8 [..., ceil(N / 8)]."""
    padded = F.pad(chosen, (0, -chosen.shape[-1] % 8)).unflatten(-1, (-1, 8)).int()
    # In steps that ONNX has as well: no shifts, no sums of bytes.
    return (padded * _bit_values(torch.int32, chosen.device)).sum(-1, dtype=torch.int32).byte()


def unpack_keys(bits: Tensor, tokens: int) -> Tensor:
    """Undo [`pack_keys`] of N tokens: uint8 [..., ceil(N / 8)] to bool [..., N]."""
    return (bits[..., None] & _bit_values(torch.uint8, bits.device)).bool().flatten(-2)[..., :tokens]


def _bit_values(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=dtype, device=device)


@torch.no_grad()
def semantic_keys(
    tokens: Tensor, regions: Tensor | None, top_k: int, similarity: str = "dot", include_self: bool = True
) -> Tensor:
    """Choose the k most similar legal keys of every token [W, N, C]: I_i = top-k_j <p_i, p_j>, as bits of
    [`Dictionary`].

    Without gradient, in float32. Of equally similar keys the first are taken. Regions are those of [`key_regions`];
    where a region has fewer than k tokens, all of it is chosen. With `include_self` a token is always its own key."""
    all_regions = None if regions is None else regions.repeat(tokens.shape[0] // regions.shape[0], 1)
    return STEPS["choose_keys"](tokens, all_regions, min(top_k, tokens.shape[1]), similarity == "cosine", include_self)


def _best_keys(scores: Tensor, regions: Tensor | None, top_k: int, include_self: bool) -> Tensor:
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


def _choose_keys(
    tokens: Tensor,
    regions: Tensor | None,
    top_k: int,
    cosine: bool,
    include_self: bool,
    best_keys: Callable[..., Tensor] = _best_keys,
) -> Tensor:
    """[`semantic_keys`] with regions for all W windows, some windows at a time; `best_keys` selects from scores."""
    windows, count = tokens.shape[:2]
    rows = []
    for part in _windows_of_calls(windows, count**2, tokens.device):
        with maybe_autocast(tokens.device.type, enabled=False):
            precise = tokens[part].to(torch.promote_types(tokens.dtype, torch.float32))
            precise = _normalize(precise) if cosine else precise
            scores = precise @ precise.mT
        rows.append(best_keys(scores, None if regions is None else regions[part], top_k, include_self))
        # Before the next ones take as much memory.
        del precise, scores
    return _join_parts(rows)


def window_and_shift(size: Pair, window_size: int, shifted: bool) -> tuple[Pair, Pair]:
    """The windows of a map of that size, clipped to it, and how far their partition is moved."""
    # Not `min`: in a graph of many sizes it stays what it is, and every later shape would be a function of it.
    window = (window_size if size[0] > window_size else size[0], window_size if size[1] > window_size else size[1])
    # One window that spans the axis has no neighbour to shift into.
    return window, (
        window[0] // 2 if shifted and window[0] < size[0] else 0,
        window[1] // 2 if shifted and window[1] < size[1] else 0,
    )


def build_dictionary(
    features: Tensor, window_size: int, shifted: bool, top_k: int, similarity: str = "dot", include_self: bool = True
) -> Dictionary:
    """Build the key-semantic dictionary of a stage from its input, for one partition into windows. Without gradient.

    Height and width of the features [B, height, width, C] are multiples of `window_size`, or smaller than it, in which
    case the window is clipped to them. `shifted` moves the partition by half a window."""
    size = (features.shape[1], features.shape[2])
    window, shift = window_and_shift(size, window_size, shifted)
    regions = key_regions(size, window, shift, features.device) if any(shift) else None
    bits: Tensor | None = None
    if regions is not None or top_k < window[0] * window[1]:
        bands = _bands(features, window, shift, regions)
        bits = _join_parts([semantic_keys(*band, top_k, similarity, include_self) for band in bands])
    return Dictionary(window, shift, window_size, bits)


def _bands(
    features: Tensor, window: Pair, shift: Pair, regions: Tensor | None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Windows and their regions, at once or, of maps so large that a copy counts, some rows of windows at a time."""
    batch, height, width, channels = features.shape
    # Tokens of a band, each of which is copied.
    tokens = _BAND // channels
    band = max(1, tokens // (window[0] * width)) * window[0]
    if torch.compiler.is_compiling() or batch * height * width <= tokens:
        yield partition_windows(features, window, shift), regions
        return
    for image in features:
        for start in range(0, height, band):
            stop = min(start + band, height)
            rows = (torch.arange(start, stop, device=features.device) + shift[0]) % height
            windows = partition_windows(image[rows][None], window, (0, shift[1]))
            first = start // window[0] * (width // window[1])
            yield windows, None if regions is None else regions[first : first + len(windows)]


def key_semantic_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    temperature: Tensor,
    table: Tensor,
    dictionary: Dictionary,
    implementation: str = "auto",
) -> Tensor:
    """Attention of every token to its dictionary keys: o_i = sum_{j in I_i} softmax_j(tau cos(q_i, k_j) + B(i - j))
    v_j.

    Queries, keys and values are [W, heads, N, head_dim], the temperature tau [heads], the table of B
    [heads, (2 * window_size - 1)^2] in the order of [`relative_offsets`]; each token has at least one key. The result
    has the dtype of the values.

    `implementation` is `"eager"` (matrix products and softmax), `"sdpa"` (`scaled_dot_product_attention` with masks);
    with hf_ext `"native"` (fused; CPUs, in float32) and `"triton"` (fused, for GPUs); or `"auto"`: the fastest here.
    All give the same; what one does not take, it refuses."""
    given = (query, key, value, temperature, table)
    if implementation == "auto":
        implementation = STEPS["choose_attention"](value, _needs_gradient(*given))
    if implementation not in ATTENTION:
        raise UnknownAttentionError("implementation", implementation)
    return ATTENTION[implementation](*given, dictionary)


def _choose_attention(value: Tensor, gradient: bool) -> str:
    # SDPA on a CPU computes the gradient of a bias along a path that is slower than "eager".
    return "eager" if gradient and value.device.type == "cpu" else "sdpa"


class UnitAttention:
    """Attention by a function of scaled queries and keys of unit length, for some windows at a time."""

    def __init__(self, attend: Callable[..., Tensor]):
        self.attend = attend

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, temperature: Tensor, table: Tensor, dictionary: Dictionary
    ) -> Tensor:
        precise = torch.promote_types(query.dtype, torch.float32)
        windows, heads, tokens = query.shape[:3]
        # Bias and mask together are as large as all logits: for a whole image, gigabytes. A graph would keep them all.
        whole = _needs_gradient(query, key, value, temperature, table)
        parts = [slice(None)] if whole else _windows_of_calls(windows, heads * tokens**2, query.device)
        outputs = []
        for part in parts:
            scaled = _normalize(query[part].to(precise), temperature.to(precise)[:, None, None])
            unit = _normalize(key[part].to(precise))
            outputs.append(self.attend(scaled, unit, value[part], table, dictionary.part(part)))
        return _join_parts(outputs)


def _attend_eagerly(query: Tensor, key: Tensor, value: Tensor, table: Tensor, dictionary: Dictionary) -> Tensor:
    logits = query @ key.mT + _masked_bias(table, dictionary)
    return logits.softmax(-1).to(value.dtype) @ value


def _attend_by_sdpa(query: Tensor, key: Tensor, value: Tensor, table: Tensor, dictionary: Dictionary) -> Tensor:
    bias = _masked_bias(table, dictionary).to(value.dtype)
    query, key = query.to(value.dtype), key.to(value.dtype)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)


def _masked_bias(table: Tensor, dictionary: Dictionary) -> Tensor:
    """B(i - j) for the keys of each token, -inf for the others: [W or 1, heads, N, N]."""
    bias = table[:, relative_offsets(dictionary.window, dictionary.window_size, table.device)][None]
    if dictionary.bits is None:
        return bias
    return bias.masked_fill(~unpack_keys(dictionary.bits, bias.shape[-1])[:, None], -torch.inf)


def _normalize(vectors: Tensor, length: Tensor | float = 1.0) -> Tensor:
    """Vectors of a given length: as F.normalize, with two thirds of its backward time."""
    return vectors * (vectors.square().sum(-1, keepdim=True).clamp_min(1e-24).rsqrt() * length)


def _join_parts(parts: list[Tensor]) -> Tensor:
    """One tensor; a copy only where there are several."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _windows_of_calls(windows: int, logits: int, device: torch.device) -> list[slice]:
    """Windows that are computed together, each having so many logits. All where a loop would tie a graph to them."""
    if torch.compiler.is_compiling():
        return [slice(None)]
    chunk = max(1, (_LOGITS_CPU if device.type == "cpu" else _LOGITS_GPU) // logits)
    return [slice(start, start + chunk) for start in range(0, windows, chunk)]


ATTENTION |= {"eager": UnitAttention(_attend_eagerly), "sdpa": UnitAttention(_attend_by_sdpa)}
STEPS |= {"cut": _cut, "join": _join, "choose_keys": _choose_keys, "choose_attention": _choose_attention}
