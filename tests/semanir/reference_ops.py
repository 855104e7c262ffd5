# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Textbook SemanIR operators: `ops_semanir` with the same names and signatures, as loops over tokens.

For tests and benchmarks: slow, never shipped with a checkpoint. Each function states its equation literally.
"""

import math

import torch

from hf_ext.semanir.ops_windows_semanir import Dictionary
from tests.semanir.reference_windows import key_regions, pack_keys, partition_windows, relative_offsets, unpack_keys


def semantic_keys(
    tokens: torch.Tensor,
    regions: torch.Tensor | None,
    top_k: int,
    similarity: str = "dot",
    include_self: bool = True,
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
    window = (min(window_size, height), min(window_size, width))
    shift = (
        window[0] // 2 if shifted and height > window_size else 0,
        window[1] // 2 if shifted and width > window_size else 0,
    )
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


__all__ = ["build_dictionary", "key_semantic_attention", "semantic_keys"]
