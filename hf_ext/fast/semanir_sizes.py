# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Shape checks for SemanIR's kernels, which read memory by address."""

from torch import Tensor

from hf_ext.semanir.ops_semanir import Dictionary


def check_sizes(
    dictionary: Dictionary, query: Tensor, key: Tensor, value: Tensor, temperature: Tensor | None, table: Tensor
) -> None:
    """Refuse arguments of `key_semantic_attention` that fit neither each other nor the dictionary."""
    windows, heads, tokens = query.shape[:3]
    expected = {
        "key": (key, tuple(query.shape)),
        "value": (value, tuple(query.shape)),
        "temperature": (temperature, (heads,)),
        "table": (table, (heads, (2 * dictionary.window_size - 1) ** 2)),
        "dictionary.bits": (dictionary.bits, (windows, tokens, (tokens + 7) // 8)),
    }
    for name, (found, shape) in expected.items():
        if found is not None and (tuple(found.shape) != shape or found.device != query.device):
            raise ValueError(
                f"`{name}` has shape {tuple(found.shape)} on {found.device}; queries of shape "
                f"{tuple(query.shape)} on {query.device} need {shape} there."
            )
    if dictionary.window[0] * dictionary.window[1] != tokens or max(dictionary.window) > dictionary.window_size:
        raise ValueError(
            f"`dictionary.window` is {dictionary.window}; it must hold {tokens} tokens, with sides of at most "
            f"{dictionary.window_size}."
        )
