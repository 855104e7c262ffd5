# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Textbook SemanIR operators: `ops_semanir` with the same names and signatures, as loops over tokens.

For tests and benchmarks: slow, never shipped with a checkpoint. Each function states its equation literally.
"""

import math

import torch

from hf_ext.semanir.ops_semanir import Dictionary, Pair


def _token_positions(size: Pair, window: Pair, shift: Pair) -> list[list[Pair]]:
    """The place of each token of each window in the feature map that was not moved."""
    return [
        [
            ((top + row + shift[0]) % size[0], (left + column + shift[1]) % size[1])
            for row in range(window[0])
            for column in range(window[1])
        ]
        for top in range(0, size[0], window[0])
        for left in range(0, size[1], window[1])
    ]


def partition_windows(features: torch.Tensor, window: Pair, shift: Pair) -> torch.Tensor:
    """Collect the tokens of each window one by one. See [`ops_semanir.partition_windows`]."""
    positions = _token_positions((features.shape[1], features.shape[2]), window, shift)
    windows = [torch.stack([image[place] for place in places]) for image in features for places in positions]
    return torch.stack(windows)


def merge_windows(windows: torch.Tensor, size: Pair, window: Pair, shift: Pair) -> torch.Tensor:
    """Put the tokens of each window back one by one. See [`ops_semanir.merge_windows`]."""
    positions = _token_positions(size, window, shift)
    images = []
    for image in windows.split(len(positions)):
        tokens = {
            place: token
            for window_tokens, places in zip(image, positions, strict=True)
            for token, place in zip(window_tokens, places, strict=True)
        }
        rows = [torch.stack([tokens[row, column] for column in range(size[1])]) for row in range(size[0])]
        images.append(torch.stack(rows))
    return torch.stack(images)


def key_regions(size: Pair, window: Pair, shift: Pair, device: torch.device | None = None) -> torch.Tensor:
    """Tokens that came around the bottom (2), the right (1), both (3). See [`ops_semanir.key_regions`]."""
    regions = []
    for places in _token_positions(size, window, shift):
        top, left = places[0]
        regions.append([2 * (row < top) + (column < left) for row, column in places])
    return torch.tensor(regions, dtype=torch.uint8, device=device)


def pack_keys(chosen: torch.Tensor) -> torch.Tensor:
    """Add up 2^(j mod 8) of the chosen keys of each byte. See [`ops_semanir.pack_keys`]."""
    rows = []
    for row in chosen.reshape(-1, chosen.shape[-1]).tolist():
        rows.append([sum(2**j for j, key in enumerate(row[i : i + 8]) if key) for i in range(0, len(row), 8)])
    return torch.tensor(rows, dtype=torch.uint8).view(*chosen.shape[:-1], -1)


def unpack_keys(bits: torch.Tensor, tokens: int) -> torch.Tensor:
    """Read the keys of each token one by one. See [`ops_semanir.unpack_keys`]."""
    rows = [[row[j // 8] // 2 ** (j % 8) % 2 == 1 for j in range(tokens)] for row in bits.flatten(0, -2).tolist()]
    return torch.tensor(rows).view(*bits.shape[:-1], tokens)


def relative_coordinates(
    window_size: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> torch.Tensor:
    """Coordinates of each offset in turn. See [`ops_semanir.relative_coordinates`]."""

    def coordinate(offset: int) -> float:
        scaled = 8 * offset / (window_size - 1) if window_size > 1 else 0.0
        return math.copysign(math.log2(1 + abs(scaled)) / math.log2(8), scaled)

    offsets = range(1 - window_size, window_size)
    pairs = [(coordinate(vertical), coordinate(horizontal)) for vertical in offsets for horizontal in offsets]
    return torch.tensor(pairs, dtype=dtype, device=device)


def relative_offsets(window: Pair, window_size: int, device: torch.device | None = None) -> torch.Tensor:
    """Look each pair's offset up in the list of all offsets. See [`ops_semanir.relative_offsets`]."""
    offsets = range(1 - window_size, window_size)
    table = [(vertical, horizontal) for vertical in offsets for horizontal in offsets]
    tokens = [(row, column) for row in range(window[0]) for column in range(window[1])]
    rows = [[table.index((query[0] - key[0], query[1] - key[1])) for key in tokens] for query in tokens]
    return torch.tensor(rows, device=device)


def semantic_keys(
    tokens: torch.Tensor, regions: torch.Tensor | None, top_k: int, similarity: str = "dot", include_self: bool = True
) -> torch.Tensor:
    """Sort the legal keys of each token, itself first, and keep k. See [`ops_semanir.semantic_keys`]."""
    precise = torch.promote_types(tokens.dtype, torch.float32)
    chosen = torch.zeros(len(tokens), tokens.shape[1], tokens.shape[1], dtype=torch.bool)
    for number, window in enumerate(tokens.detach().to(precise)):
        for i, query in enumerate(window):
            scores = {}
            for j, key in enumerate(window):
                score = query @ key
                if similarity == "cosine":
                    score = score / (query.norm() * key.norm())
                if regions is None or (region := regions[number % len(regions)])[i] == region[j]:
                    scores[j] = math.inf if include_self and i == j else score.item()
            # Sorting keeps the order of equals: the first ones are taken.
            for j in sorted(scores, key=scores.__getitem__, reverse=True)[:top_k]:
                chosen[number, i, j] = True
    return pack_keys(chosen)


def window_and_shift(size: Pair, window_size: int, shifted: bool) -> tuple[Pair, Pair]:
    """Clip the window to each side, and move along sides that are longer than it."""
    window = (min(window_size, size[0]), min(window_size, size[1]))
    moves = [shifted and side > window_size for side in size]
    return window, (window[0] // 2 * moves[0], window[1] // 2 * moves[1])


def build_dictionary(
    features: torch.Tensor,
    window_size: int,
    shifted: bool,
    top_k: int,
    similarity: str = "dot",
    include_self: bool = True,
) -> Dictionary:
    """Build the mask of every window, dense or not. See [`ops_semanir.build_dictionary`]."""
    height, width = features.shape[1:3]
    window, shift = window_and_shift((height, width), window_size, shifted)
    tokens = partition_windows(features, window, shift)
    regions = key_regions((height, width), window, shift)
    return Dictionary(window, shift, window_size, semantic_keys(tokens, regions, top_k, similarity, include_self))


def key_semantic_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    temperature: torch.Tensor,
    table: torch.Tensor,
    dictionary: Dictionary,
    implementation: str = "auto",
) -> torch.Tensor:
    """Attend from each token to its keys and to no other. See [`ops_semanir.key_semantic_attention`]."""
    outputs = []
    tokens = query.shape[2]
    offsets = relative_offsets(dictionary.window, dictionary.window_size)
    everything = torch.ones(len(query), tokens, tokens, dtype=torch.bool)
    chosen = everything if dictionary.bits is None else unpack_keys(dictionary.bits, tokens)
    for window in range(len(query)):
        for head in range(query.shape[1]):
            for i, vector in enumerate(query[window, head]):
                allowed = chosen[window, i]
                keys, values = key[window, head, allowed], value[window, head, allowed]
                cosines = keys @ vector / (keys.norm(dim=-1) * vector.norm())
                weights = (temperature[head] * cosines + table[head, offsets[i, allowed]]).exp()
                outputs.append(weights / weights.sum() @ values)
    return torch.stack(outputs).view_as(value)
