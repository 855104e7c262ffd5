# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Key-semantic attention of SemanIR (arXiv 2405.20008) through torch's flex_attention."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from hf_ext.semanir.ops_semanir import Dictionary

from ..errors import UsageError

# What torch's kernel requires of a head on a GPU.
_SMALLEST_HEAD = 16


@cache
def compile_attention() -> Callable[..., Tensor]:
    """The fused kernel."""
    fused: Callable[..., Tensor] = torch.compile(flex_attention, fullgraph=True)

    def call(*tensors: Tensor, **options: Any) -> Tensor:
        # A kernel for each number of heads and each head size, so more than torch keeps by default; above, an error.
        # An argument of `compile` since torch 2.12 only.
        with torch._dynamo.config.patch(recompile_limit=128):
            return fused(*tensors, **options)

    return call


def _places(dictionary: Dictionary, device: torch.device) -> Tensor:
    """Position of each token, counted so that the difference of two is the difference of their table rows."""
    height, width = dictionary.window
    rows = torch.arange(height, device=device)[:, None] * (2 * dictionary.window_size - 1)
    return (rows + torch.arange(width, device=device)).flatten()


# The score of a pair is changed where it is computed: bias added from the small table, -inf unless its bit is set. So
# nothing of the size of the logits exists in the fused form, forward and backward. No block mask: with k of N/8 and
# more every block of keys holds a neighbour, so none could be skipped.
def score_change(table: Tensor, dictionary: Dictionary) -> Callable[..., Tensor]:
    """The logit of a pair from its cosine part, as flex_attention wants it: a function of scalars."""
    # Geometry in tensors and not in numbers: one compiled kernel serves every window.
    keys = _places(dictionary, table.device)
    queries = keys + 2 * dictionary.window_size * (dictionary.window_size - 1)
    bits = dictionary.bits

    def biased(score, window, head, i, j):  # type: ignore[no-untyped-def]
        return score + table[head, queries[i] - keys[j]]

    def selected(score, window, head, i, j):  # type: ignore[no-untyped-def]
        chosen = bits[window, i, j >> 3].to(torch.int32) >> (j & 7) & 1  # type: ignore[index]
        return torch.where(chosen != 0, biased(score, window, head, i, j), -torch.inf)

    return biased if bits is None else selected


def flex_attention_(query: Tensor, key: Tensor, value: Tensor, table: Tensor, dictionary: Dictionary) -> Tensor:
    """
    Attention of every token to its dictionary keys: o_i = sum_{j in I_i} softmax_j(<q_i, k_j> + B(i - j)) v_j.

    On a GPU one fused kernel, compiled at the first call, with gradients of queries, keys, values and table. On a CPU
    torch's plain form, which computes all logits, for checking: without gradients and not inside a compiled model,
    neither of which torch can do there.
    """
    device, head_dim, compiling = query.device.type, query.shape[-1], torch.compiler.is_compiling()
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, table))
    # In a compiled model, inductor's kernel for the CPU cannot read a table or bits that the same graph computes.
    if device == "cpu" and (gradients or compiling):
        what = "does not work in a compiled model" if compiling else "has no gradients"
        raise UsageError(f"flex_attention {what} on a CPU; choose 'sdpa' or 'eager', or use a GPU.")
    change = score_change(table.to(torch.promote_types(query.dtype, torch.float32)), dictionary)
    if device == "cuda":
        padding = (0, max(0, _SMALLEST_HEAD - head_dim))
        query, key, value = (F.pad(x, padding) for x in (query, key, value))
        attend: Any = flex_attention if compiling else compile_attention()
        attended: Tensor = attend(query, key, value, change, scale=1.0)
        return attended[..., :head_dim]
    with warnings.catch_warnings():
        # It warns that it computes all logits; here that is the intention.
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return flex_attention(query, key, value, change, scale=1.0)
