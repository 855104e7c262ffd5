"""Key-semantic attention of SemanIR (arXiv 2405.20008) as fused Triton kernels, forward and backward.

Equal to the textbook form in Triton's interpreter and compiled for sm_80 and sm_90. The table's gradient is summed by
atomic additions, hence its last bits differ from run to run.
Shapes: W windows, H heads, N tokens of a window, D channels of a head, T rows of the table. Logits are in base 2.
"""
# Triton's functions carry no types that mypy could read.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

import os
from functools import partial
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "triton is not installed: install it, or choose another attention implementation, such as 'sdpa'"
    ) from error

from hf_ext.semanir.ops_semanir import ATTENTION, Dictionary

from .derivatives import needs_plain_gradients, plain_gradients

LOG2_E = tl.constexpr(1.4426950408889634)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LARGEST_HEAD = 128


@triton.jit
def _place(block, blocks, heads):
    """Window, head and block of a program. One grid axis: the others end at 65535."""
    number = tl.program_id(0).to(tl.int64)
    return number // (blocks * heads), number // blocks % heads, (number % blocks).to(tl.int32) * block


@triton.jit
def _tile(address, strides, window, head, token, tokens, head_dim: tl.constexpr, width: tl.constexpr):
    """Pointers to tokens of a head, [rows, D padded], and which of them exist."""
    channel = tl.arange(0, width)
    first = address + window * strides[0] + head * strides[1]
    places = first + token.to(tl.int64)[:, None] * strides[2] + channel[None, :] * strides[3]
    return places, (token < tokens)[:, None] & (channel < head_dim)[None, :]


@triton.jit
def _load(address, strides, window, head, token, tokens, head_dim: tl.constexpr, width: tl.constexpr):
    places, inside = _tile(address, strides, window, head, token, tokens, head_dim, width)
    return tl.load(places, mask=inside, other=0.0)


@triton.jit
def _logits(query, key, queries, keys, bits, bias, geometry, selected: tl.constexpr, precision: tl.constexpr):
    """q k + B(i - j), -inf where a key is not selected; and of each pair the table row and whether it is selected."""
    tokens, row_bytes, middle, window_width, table_width = geometry
    row = queries // window_width * table_width + queries % window_width
    column = keys // window_width * table_width + keys % window_width
    offsets = row[:, None] - column[None, :] + middle
    allowed = (queries < tokens)[:, None] & (keys < tokens)[None, :]
    if selected:
        places = bits + queries.to(tl.int64)[:, None] * row_bytes + (keys // 8)[None, :]
        byte = tl.load(places, mask=allowed, other=0).to(tl.int32)
        allowed = allowed & (((byte >> (keys % 8)[None, :]) & 1) != 0)
    logits = tl.dot(query, tl.trans(key), input_precision=precision)
    logits += tl.load(bias + offsets, mask=allowed, other=0.0)
    return tl.where(allowed, logits * LOG2_E, float("-inf")), offsets, allowed


# A program computes some queries of one head of one window by an online softmax: it walks over blocks of keys with the
# largest logit m so far, the sum of exp(S - m) and the values weighted so. A block that raises m to m' multiplies both
# by exp(m - m'), so that at the end they are those of one softmax over all keys. The dictionary's packed bits and the
# small bias table are read where they are needed: neither logits nor a mask nor the bias of all pairs exist in memory.
@triton.jit
def _forward(
    query, key, value, bits, table, out, sums, query_strides, key_strides, value_strides, out_strides, heads, rows,
    geometry, head_dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr, selected: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """Attended values, and the logarithm of each row's sum of exponentials."""
    tokens = geometry[0]
    window, head, start = _place(block, tl.cdiv(tokens, block), heads)
    queries = start + tl.arange(0, block)
    bits += window * tokens * geometry[1]
    bias = table + head * rows
    q = _load(query, query_strides, window, head, queries, tokens, head_dim, width)
    largest = tl.full([block], float("-inf"), tl.float32)
    total = tl.zeros([block], tl.float32)
    attended = tl.zeros([block, width], tl.float32)
    for first in range(0, tokens, block):
        keys = first + tl.arange(0, block)
        k = _load(key, key_strides, window, head, keys, tokens, head_dim, width)
        logits, _, _ = _logits(q, k, queries, keys, bits, bias, geometry, selected, precision)
        now = tl.maximum(largest, tl.max(logits, 1))
        # A row may have no key in the blocks so far: -inf less -inf is no number.
        pivot = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(logits - pivot[:, None])
        scale = tl.exp2(largest - pivot)
        total = total * scale + tl.sum(weights, 1)
        v = _load(value, value_strides, window, head, keys, tokens, head_dim, width)
        attended = attended * scale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=precision)
        largest = now
    places, inside = _tile(out, out_strides, window, head, queries, tokens, head_dim, width)
    # A row without keys: zeros, and +inf, so that the backward pass finds weights of zero.
    positive = tl.where(total == 0, 1.0, total)
    tl.store(places, attended / positive[:, None], mask=inside)
    logarithm = tl.where(total == 0, float("inf"), largest + tl.log2(positive))
    tl.store(sums + (window * heads + head) * tokens + queries, logarithm, mask=queries < tokens)


# Backward, from g = dO: with the kept logarithm of each row's sum the weights P are exp(S - log), nothing to be summed
# again, and dS = P (g V^T - D), where D = rowsum(P dP) = g . O is one number a row. dq = dS k is a sum over keys and
# dk = dS^T q, dv = P^T g are sums over queries: two kernels, each of which writes a row once.
@triton.jit
def _backward_queries(
    query, key, value, bits, table, grad, sums, deltas, grad_query, grad_table, query_strides, key_strides,
    value_strides, grad_strides, out_strides, heads, rows, geometry, head_dim: tl.constexpr, width: tl.constexpr,
    block: tl.constexpr, selected: tl.constexpr, precision: tl.constexpr, with_table: tl.constexpr,
):  # fmt: skip
    """Gradients of some queries, over all keys, and what they add to the gradient of the table."""
    tokens = geometry[0]
    window, head, start = _place(block, tl.cdiv(tokens, block), heads)
    queries = start + tl.arange(0, block)
    bits += window * tokens * geometry[1]
    bias = table + head * rows
    line = (window * heads + head) * tokens + queries
    q = _load(query, query_strides, window, head, queries, tokens, head_dim, width)
    g = _load(grad, grad_strides, window, head, queries, tokens, head_dim, width)
    logarithm = tl.load(sums + line, mask=queries < tokens, other=float("inf"))
    delta = tl.load(deltas + line, mask=queries < tokens, other=0.0)
    found = tl.zeros([block, width], tl.float32)
    for first in range(0, tokens, block):
        keys = first + tl.arange(0, block)
        k = _load(key, key_strides, window, head, keys, tokens, head_dim, width)
        v = _load(value, value_strides, window, head, keys, tokens, head_dim, width)
        logits, offsets, allowed = _logits(q, k, queries, keys, bits, bias, geometry, selected, precision)
        weights = tl.exp2(logits - logarithm[:, None])
        slope = weights * (tl.dot(g, tl.trans(v), input_precision=precision) - delta[:, None])
        found += tl.dot(slope.to(k.dtype), k, input_precision=precision)
        if with_table:
            tl.atomic_add(grad_table + head * rows + offsets, slope, mask=allowed, sem="relaxed")
    places, inside = _tile(grad_query, out_strides, window, head, queries, tokens, head_dim, width)
    tl.store(places, found, mask=inside)


@triton.jit
def _backward_keys(
    query, key, value, bits, table, grad, sums, deltas, grad_key, grad_value, query_strides, key_strides,
    value_strides, grad_strides, out_strides, heads, rows, geometry, head_dim: tl.constexpr, width: tl.constexpr,
    block: tl.constexpr, selected: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Gradients of some keys and values, over all queries."""
    tokens = geometry[0]
    window, head, start = _place(block, tl.cdiv(tokens, block), heads)
    keys = start + tl.arange(0, block)
    bits += window * tokens * geometry[1]
    bias = table + head * rows
    k = _load(key, key_strides, window, head, keys, tokens, head_dim, width)
    v = _load(value, value_strides, window, head, keys, tokens, head_dim, width)
    found_key = tl.zeros([block, width], tl.float32)
    found_value = tl.zeros([block, width], tl.float32)
    for first in range(0, tokens, block):
        queries = first + tl.arange(0, block)
        line = (window * heads + head) * tokens + queries
        q = _load(query, query_strides, window, head, queries, tokens, head_dim, width)
        g = _load(grad, grad_strides, window, head, queries, tokens, head_dim, width)
        logarithm = tl.load(sums + line, mask=queries < tokens, other=float("inf"))
        delta = tl.load(deltas + line, mask=queries < tokens, other=0.0)
        logits, _, _ = _logits(q, k, queries, keys, bits, bias, geometry, selected, precision)
        weights = tl.exp2(logits - logarithm[:, None])
        found_value += tl.dot(tl.trans(weights).to(g.dtype), g, input_precision=precision)
        slope = weights * (tl.dot(g, tl.trans(v), input_precision=precision) - delta[:, None])
        found_key += tl.dot(tl.trans(slope).to(q.dtype), q, input_precision=precision)
    places, inside = _tile(grad_key, out_strides, window, head, keys, tokens, head_dim, width)
    tl.store(places, found_key, mask=inside)
    places, _ = _tile(grad_value, out_strides, window, head, keys, tokens, head_dim, width)
    tl.store(places, found_value, mask=inside)


def _empty(value: Tensor) -> Tensor:
    """[W, H, N, D] with the channels of all heads of a token together, as the next projection reads them."""
    windows, heads, tokens, head_dim = value.shape
    return value.new_empty(windows, tokens, heads, head_dim).transpose(1, 2)


def _settings(query: Tensor, table: Tensor, dictionary: Dictionary) -> dict[str, Any]:
    """The arguments of all three kernels: geometry of the window, sizes of blocks, precision of products."""
    tokens, head_dim = query.shape[2:]
    table_width = 2 * dictionary.window_size - 1
    width = max(16, triton.next_power_of_2(head_dim))
    bits = dictionary.bits
    middle = (dictionary.window_size - 1) * (table_width + 1)
    exact = query.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return {
        "heads": query.shape[1],
        "rows": table.shape[1],
        "geometry": (tokens, 0 if bits is None else bits.shape[2], middle, dictionary.window[1], table_width),
        "head_dim": head_dim,
        "width": width,
        # Tiles of 8 KiB at most: larger ones leave the registers and the shared memory of smaller devices.
        "block": min(64, max(16, 8192 // (width * query.element_size()))),
        "selected": bits is not None,
        "precision": "ieee" if exact else "tf32",
        # Said explicitly, because Triton's default changes.
        "enable_fp_fusion": True,
    }


class _Attention(torch.autograd.Function):
    """Attention with its gradients: dS = P (dP - D), with D the product of output and its gradient."""

    @staticmethod
    def forward(ctx, query, key, value, table, dictionary):
        settings = _settings(query, table, dictionary)
        out = _empty(value)
        sums = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        # Without a selection no bit is read, but a pointer is needed.
        bits = sums if dictionary.bits is None else dictionary.bits
        given = (query, key, value, bits, table)
        strides = [x.stride() for x in (query, key, value, out)]
        _forward[_grid(query, settings)](*given, out, sums, *strides, **settings)
        ctx.save_for_backward(*given, out, sums)
        ctx.settings, ctx.dictionary = settings, dictionary
        return out

    @staticmethod
    def backward(ctx, grad):
        *given, out, sums = ctx.saved_tensors
        query, key, value, _, table = given
        if needs_plain_gradients():
            form = partial(ATTENTION["eager"].attend, dictionary=ctx.dictionary)
            return *plain_gradients(form, grad, query, key, value, table), None
        grid, settings = _grid(query, ctx.settings), ctx.settings
        deltas = (grad.float() * out.float()).sum(-1)
        grad_query, grad_key, grad_value = _empty(query), _empty(query), _empty(query)
        with_table = ctx.needs_input_grad[3]
        grad_table = torch.zeros_like(table) if with_table else None
        shared = (*given, grad, sums, deltas)
        strides = [x.stride() for x in (query, key, value, grad, out)]
        _backward_queries[grid](
            *shared, grad_query, grad_table if with_table else table, *strides, **settings, with_table=with_table
        )
        _backward_keys[grid](*shared, grad_key, grad_value, *strides, **settings)
        return grad_query, grad_key, grad_value, grad_table, None


def _grid(query: Tensor, settings: dict[str, Any]) -> tuple[int]:
    return (query.shape[0] * query.shape[1] * triton.cdiv(query.shape[2], settings["block"]),)


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("The Triton kernel got tensors on the CPU; move the model to a GPU, or choose 'sdpa'.")
    dtypes = {query.dtype, key.dtype, value.dtype}
    if query.shape[-1] > _LARGEST_HEAD or len(dtypes) > 1 or query.dtype not in _DTYPES:
        got = f"The Triton kernel got {', '.join(sorted(map(str, dtypes)))} with heads of {query.shape[-1]} channels"
        allowed = f"one of {', '.join(map(str, _DTYPES))}, at most {_LARGEST_HEAD} channels"
        raise ValueError(f"{got}; allowed: {allowed}. Or choose 'sdpa'.")


def triton_attention(query: Tensor, key: Tensor, value: Tensor, table: Tensor, dictionary: Dictionary) -> Tensor:
    """Attention of every token to its dictionary keys: o_i = sum_{j in I_i} softmax_j(<q_i, k_j> + B(i - j)) v_j.

    Forward and backward, with products in the dtype of the inputs and sums in float32. float32 products have full
    precision unless `torch.set_float32_matmul_precision` allows less. Checked in Triton's interpreter
    (`TRITON_INTERPRET=1`, which also takes tensors of the CPU) and compiled for sm_80 and sm_90."""
    _check(query, key, value)
    if not query.numel():
        return torch.zeros_like(value)
    if dictionary.bits is not None:
        dictionary = dictionary._replace(bits=dictionary.bits.contiguous())
    return _Attention.apply(query, key, value, table.float().contiguous(), dictionary)
