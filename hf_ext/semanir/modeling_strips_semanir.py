# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""SemanIR on whole images: functions of feature maps, computed part by part within a budget of bytes.

Only feature maps are held in full. The results are those of the function on the whole map: no tiles, no seams.
Shapes: maps [B, channels, height, width] with channels last in memory, tokens [B, height, width, channels].
"""

from collections.abc import Callable

import torch

from .ops_semanir import Dictionary, Pair, merge_windows, partition_windows


def by_rows(
    function: Callable[..., torch.Tensor],
    *maps: torch.Tensor,
    memory: int | None,
    channels: int,
    rows: int | None = None,
    halo: int = 0,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    `function(*maps)`, computed for some rows at a time.

    Args:
        function (`Callable`): Maps feature maps to a feature map. A row of its result depends on the same row of the
            maps and on `halo` rows on both sides.
        maps (`torch.Tensor` of shape `(B, channels, height, width)`): Heights are multiples of `rows`.
        memory (`int`, *optional*): Bytes of temporary memory; at least one row is computed at a time. `None`: all.
        channels (`int`): Temporary values for each of the `rows` times the width of the first map.
        rows (`int`, *optional*): Rows of the coarsest map, the result included: the unit in which maps are cut; that
            of the first map when not given.
        halo (`int`, *optional*, defaults to 0): In units of `rows`.
        into (`torch.Tensor`, *optional*): One of the maps, overwritten with the result if it has its dtype. `function`
            may read its rows without halo only.

    Returns:
        `torch.Tensor` of shape `(B, new_channels, new_height, new_width)`: The result.
    """
    if memory is None:
        return function(*maps)
    first = maps[0]
    rows = first.shape[-2] if rows is None else rows
    row_bytes = first.numel() // (first.shape[1] * rows) * channels * first.element_size()
    strip = max(1, memory // row_bytes - 2 * halo)
    result: torch.Tensor | None = None
    for start in range(0, rows, strip):
        stop = min(start + strip, rows)
        top, bottom = max(start - halo, 0), min(stop + halo, rows)
        factors = [features.shape[-2] // rows for features in maps]
        parts = [
            features[:, :, top * factor : bottom * factor] for features, factor in zip(maps, factors, strict=True)
        ]
        part = function(*parts)
        factor = part.shape[-2] // (bottom - top)
        if result is None:
            result = into if into is not None and into.dtype == part.dtype else _empty_map(part, rows * factor)
        result[:, :, start * factor : stop * factor] = part[:, :, (start - top) * factor : (stop - top) * factor]
    assert result is not None
    return result


def _empty_map(part: torch.Tensor, height: int) -> torch.Tensor:
    """A map as high as the whole result, otherwise like the part."""
    batch, channels, _, width = part.shape
    return part.new_empty(batch, height, width, channels).permute(0, 3, 1, 2)


def by_windows(
    function: Callable[[torch.Tensor, Dictionary], torch.Tensor],
    tokens: torch.Tensor,
    dictionary: Dictionary,
    memory: int | None,
    channels: int,
    in_place: bool = False,
) -> torch.Tensor:
    """
    `function(windows, dictionary)` on a partition of a feature map, put together again; some windows at a time.

    Args:
        function (`Callable`): Maps windows, `(W, N, channels)`, and their dictionary to windows of the same shape.
        tokens (`torch.Tensor` of shape `(B, height, width, channels)`): The feature map.
        dictionary ([`Dictionary`]): Says how the map is cut.
        memory (`int`, *optional*): Bytes of temporary memory; at least one window is computed at a time. `None`: all.
        channels (`int`): Temporary values for each token.
        in_place (`bool`, *optional*, defaults to `False`): Whether `tokens` may be overwritten with the result.

    Returns:
        `torch.Tensor` of shape `(B, height, width, channels)`: The result.
    """
    size, window, shift = (tokens.shape[1], tokens.shape[2]), dictionary.window, dictionary.shift
    if memory is None:
        windows = function(partition_windows(tokens, window, shift), dictionary)
        return merge_windows(windows, size, window, shift)
    window_tokens = window[0] * window[1]
    count = tokens.numel() // (tokens.shape[-1] * window_tokens)
    chunk = max(1, memory // (window_tokens * channels * tokens.element_size()))
    source = tokens.reshape(-1, tokens.shape[-1])
    result: torch.Tensor | None = None
    for start in range(0, count, chunk):
        chosen = slice(start, min(start + chunk, count))
        places = _window_places(chosen, size, window, shift, tokens.device)
        windows = source.index_select(0, places).unflatten(0, (-1, window_tokens))
        part = function(windows, dictionary.part(chosen)).flatten(0, 1)
        if result is None:
            result = source if in_place and source.dtype == part.dtype else part.new_empty(source.shape)
        result.index_copy_(0, places, part)
    assert result is not None
    return result.view(tokens.shape)


def _window_places(windows: slice, size: Pair, window: Pair, shift: Pair, device: torch.device) -> torch.Tensor:
    """Places of the tokens of some windows in the list of all tokens of the feature maps: [W * N]."""
    rows, columns = size[0] // window[0], size[1] // window[1]
    numbers = torch.arange(windows.start, windows.stop, device=device)[:, None]
    image, row, column = numbers // (rows * columns), numbers // columns % rows, numbers % columns
    vertical = (row * window[0] + torch.arange(window[0], device=device) + shift[0]) % size[0]
    horizontal = (column * window[1] + torch.arange(window[1], device=device) + shift[1]) % size[1]
    lines = image * size[0] + vertical  # [W, window height]
    return (lines[:, :, None] * size[1] + horizontal[:, None]).flatten()


__all__ = ["by_rows", "by_windows"]
