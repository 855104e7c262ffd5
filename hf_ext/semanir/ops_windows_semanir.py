# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""SemanIR's windows (arXiv 2405.20008): cutting feature maps, places in a window, one bit for each pair of tokens.

Shapes: batch B, feature map [B, height, width, channels], W = B * windows of an image, N = tokens of a window.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from .kernels_operators_semanir import Pair, cut_windows, join_windows


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

    def check_sizes(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        temperature: torch.Tensor | None,
        table: torch.Tensor,
    ) -> None:
        """
        Check the arguments of an attention that a kernel reads by address.

        Args:
            query, key, value (`torch.Tensor` of shape `(W, heads, N, head_dim)`): Projections of the window tokens.
            temperature (`torch.Tensor` of shape `(heads,)`, *optional*): One for each head.
            table (`torch.Tensor` of shape `(heads, (2 * window_size - 1)^2)`): Position biases.

        Raises:
            ValueError: If they fit neither each other nor the dictionary, or lie on several devices.
        """
        windows, heads, tokens = query.shape[:3]
        expected = {
            "key": (key, tuple(query.shape)),
            "value": (value, tuple(query.shape)),
            "temperature": (temperature, (heads,)),
            "table": (table, (heads, (2 * self.window_size - 1) ** 2)),
            "dictionary.bits": (self.bits, (windows, tokens, (tokens + 7) // 8)),
        }
        for name, (found, shape) in expected.items():
            if found is not None and (tuple(found.shape) != shape or found.device != query.device):
                raise ValueError(
                    f"`{name}` has shape {tuple(found.shape)} on {found.device}; queries of shape "
                    f"{tuple(query.shape)} on {query.device} need {shape} there."
                )
        if self.window[0] * self.window[1] != tokens or max(self.window) > self.window_size:
            raise ValueError(
                f"`dictionary.window` is {self.window}; it must hold {tokens} tokens, with sides of at most "
                f"{self.window_size}."
            )


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
    return cut_windows(features, window, shift)


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
    return join_windows(windows, size, window, shift)


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
    padded = F.pad(chosen, (0, -chosen.shape[-1] % 8)).unflatten(-1, (-1, 8)).int()
    # In steps that ONNX has as well: no shifts, no sums of bytes.
    return (padded * _bit_values(torch.int32, chosen.device)).sum(-1, dtype=torch.int32).byte()


def unpack_keys(bits: torch.Tensor, tokens: int) -> torch.Tensor:
    """
    Undo [`pack_keys`].

    Args:
        bits (`torch.ByteTensor` of shape `(..., ceil(N / 8))`): As in [`Dictionary`].
        tokens (`int`): N.

    Returns:
        `torch.BoolTensor` of shape `(..., N)`: Whether each key is chosen.
    """
    return (bits[..., None] & _bit_values(torch.uint8, bits.device)).bool().flatten(-2)[..., :tokens]


def _bit_values(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=dtype, device=device)


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


__all__ = [
    "Dictionary",
    "Pair",
    "key_regions",
    "merge_windows",
    "pack_keys",
    "partition_windows",
    "relative_coordinates",
    "relative_offsets",
    "unpack_keys",
]
