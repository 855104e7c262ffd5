"""Attention of GPUs: Triton's kernels in its interpreter, compiled, and on a device."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from hf_ext.semanir import ops_semanir as ops
from tests.kit.refusals import refused
from tests.semanir import reference_ops as reference

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
HEADS, WINDOWS = 2, 2


class Case(NamedTuple):
    """Unit-length keys, queries of length 10, as views of one projection that are not contiguous."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    table: torch.Tensor
    dictionary: ops.Dictionary


def make_case(window: ops.Pair, largest: int, head_dim: int, top_k: int | None, dtype: torch.dtype) -> Case:
    generator = torch.Generator().manual_seed(0)
    tokens = window[0] * window[1]
    drawn = torch.randn(WINDOWS, tokens, 3, HEADS, head_dim, generator=generator)
    drawn[:, :, :2] /= drawn[:, :, :2].norm(dim=-1, keepdim=True)
    drawn[:, :, 0] *= 10
    query, key, value = drawn.to(dtype).permute(2, 0, 3, 1, 4)
    table = torch.randn(HEADS, (2 * largest - 1) ** 2, generator=generator)
    bits = None
    if top_k is not None:
        scores = torch.rand(WINDOWS, tokens, tokens, generator=generator)
        bits = ops.pack_keys(torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(top_k).indices, True))
    return Case(query, key, value, table, ops.Dictionary(window, (0, 0), largest, bits))


def assert_attention_agrees(attend: Callable[..., torch.Tensor], case: Case, tolerance: float, device="cpu") -> None:
    """Output and the gradients of query, key, value and table, relative to the largest of each, with the reference."""
    given = [x.detach().to(device).requires_grad_() for x in case[:4]]
    exact = [x.detach().double().requires_grad_() for x in case[:4]]
    bits = case.dictionary.bits
    out = attend(*given, case.dictionary._replace(bits=None if bits is None else bits.to(device)))
    # The reference scales queries and keys itself: 10 is the length that they already have.
    temperature = torch.full((HEADS,), 10.0, dtype=torch.float64)
    expected = reference.key_semantic_attention(*exact[:3], temperature, exact[3], case.dictionary)
    assert out.dtype == case.value.dtype and out.shape == case.value.shape
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out.backward(direction.to(device, out.dtype))
    expected.backward(direction)
    # The reference is blind to the lengths, so its gradient has no part along a query or key; ours is cut to that.
    for index in (0, 1):
        along = exact[index].detach() / exact[index].detach().norm(dim=-1, keepdim=True)
        gradient = given[index].grad.cpu().double()
        given[index].grad = (gradient - (gradient * along).sum(-1, keepdim=True) * along).to(given[index])
    for found, wanted in [(out, expected), *((a.grad, b.grad) for a, b in zip(given, exact, strict=True))]:
        allowed = tolerance * max(wanted.abs().max().item(), 1.0)
        torch.testing.assert_close(found.detach().cpu().double(), wanted.detach(), atol=allowed, rtol=0)


INTERPRETED = """
import torch
from hf_ext.semanir import ops_semanir as ops
from hf_ext.fast.semanir_triton import triton_attention
from tests.semanir.test_triton_semanir import assert_attention_agrees, make_case

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-2}
# Window, largest window, channels of a head, keys (None: all), dtype. Tokens within a block of 64 and beyond, bytes
# of bits that are not full, a window cut by the image.
for window, largest, head_dim, top_k, dtype in (
    ((3, 5), 5, 5, 4, torch.float32),
    ((8, 9), 9, 30, 2, torch.float32),
    ((7, 10), 12, 33, None, torch.float32),
    ((5, 5), 5, 16, 20, torch.float16),
):
    case = make_case(window, largest, head_dim, top_k, dtype)
    assert_attention_agrees(triton_attention, case, TOLERANCES[dtype])

# No key at all: zeros, and no gradient.
case = make_case((2, 3), 3, 4, 2, torch.float32)
bits = case.dictionary.bits.clone()
bits[0, 1] = 0
case = case._replace(dictionary=case.dictionary._replace(bits=bits))
query, key, value = (x.requires_grad_() for x in (case.query, case.key, case.value))
out = triton_attention(query, key, value, case.table, case.dictionary)
out.sum().backward()
assert not out[0, :, 1].any() and not query.grad[0, :, 1].any()
assert all(x.grad.isfinite().all() for x in (query, key, value))
# A number that is none stays visible.
query = case.query.detach().clone()
query[1, 0, 2] = torch.nan
out = triton_attention(query, case.key, case.value, case.table, case.dictionary)
assert out[1, 0, 2].isnan().all() and out.isnan().sum() == out.shape[-1]
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hf_ext.fast import semanir_triton as kernels

FLOATS = {"table": "*fp32", "sums": "*fp32", "deltas": "*fp32", "grad_table": "*fp32", "bits": "*u8"}
# Shared memory of a block, in bytes.
SHARED = {80: 163 * 1024, 90: 227 * 1024}


def compiled(function, dtype, settings, capability):
    signature, constants = {}, {}
    for number, name in enumerate(function.arg_names):
        if name in settings:
            signature[name], constants[(number,)] = "constexpr", settings[name]
        elif name.endswith("strides"):
            signature[name], constants[(number, 3)] = ("i32", "i32", "i32", "constexpr"), 1
        elif name == "geometry":
            signature[name] = ("i32",) * 5
        else:
            signature[name] = "i32" if name in ("heads", "rows") else FLOATS.get(name, "*" + dtype)
    source = ASTSource(function, signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": True})


settings = {"head_dim": 30, "width": 32, "block": 64, "selected": True, "precision": "ieee", "with_table": True}
for capability in (80, 90):
    for dtype in ("bf16", "fp32"):
        for function in (kernels._forward, kernels._backward_queries, kernels._backward_keys):
            kernel = compiled(function, dtype, settings, capability)
            assert kernel.asm["cubin"] and kernel.metadata.shared <= SHARED[capability]
"""


def run_apart(program: str, **environment: str) -> None:
    # Triton decides when it is imported whether it interprets, hence a process of its own.
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env={**os.environ, **environment}, check=True)


@needs_triton
def test_interpreted_kernels_equal_the_reference():
    run_apart(INTERPRETED, TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.slow
def test_kernels_compile_for_devices_that_are_not_here(tmp_path):
    run_apart(COMPILED, TRITON_CACHE_DIR=str(tmp_path))


def test_what_the_kernels_do_not_take_is_refused():
    case = make_case((2, 3), 3, 4, 2, torch.float32)
    arguments = (*case[:3], torch.ones(2), case.table, case.dictionary, "triton")
    installed = importlib.util.find_spec("triton") is not None
    with refused(ValueError, "GPU", "sdpa") if installed else pytest.raises(ImportError):
        ops.key_semantic_attention(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_device_equals_the_reference(dtype):
    from hf_ext.fast.semanir_triton import triton_attention

    for window, head_dim, top_k in (((5, 7), 5, 4), ((16, 16), 30, 64), ((8, 8), 64, None), ((8, 9), 128, 9)):
        case = make_case(window, 16, head_dim, top_k, dtype)
        assert_attention_agrees(triton_attention, case, 2e-5 if dtype is torch.float32 else 4e-2, "cuda")
