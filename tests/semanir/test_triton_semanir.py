"""Attention of GPUs: Triton's kernels in its interpreter and compiled, flex_attention on a CPU, both on a device."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_ext.errors import UsageError
from hf_ext.fast import semanir_flex as kernels
from hf_ext.semanir import ops_semanir as ops
from tests.kit.refusals import refused
from tests.semanir.attention_testing import Case, assert_attention_agrees, make_case

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

INTERPRETED = """
import torch
from hf_ext.semanir import ops_semanir as ops
from hf_ext.fast.semanir_triton import triton_attention
from tests.semanir.attention_testing import assert_attention_agrees, make_case

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


for capability in (80, 90):
    for dtype, head_dim, width, block in (("bf16", 30, 32, 64), ("fp32", 30, 32, 64)):
        settings = {"head_dim": head_dim, "width": width, "block": block, "selected": True, "precision": "ieee"}
        settings["with_table"] = True
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


def plain_form(query, key, value, table, dictionary):
    """The result of flex_attention, from the same function of scores: torch has no gradient of it on a CPU."""
    change = kernels.score_change(table, dictionary)
    for dimensions in ((0, None, None, None, 0), (0, None, None, 0, None), (0, None, 0, None, None)):
        change = torch.vmap(change, in_dims=dimensions)
    change = torch.vmap(change, in_dims=(0, 0, None, None, None))
    windows, heads, tokens = query.shape[:3]
    logits = change(query @ key.mT, *(torch.arange(count) for count in (windows, heads, tokens, tokens)))
    return logits.softmax(-1) @ value


def without_gradient(case: Case) -> torch.Tensor:
    with torch.no_grad():
        return plain_form(*(x.double() for x in case[:4]), case.dictionary)


@pytest.mark.parametrize("top_k", [1, 5, None])
def test_changed_scores_have_the_values_and_gradients_of_the_reference(top_k):
    case = make_case((3, 5), 5, 7, top_k, torch.float64)
    assert_attention_agrees(plain_form, case, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plain_form_equals_the_reference(dtype):
    for window, largest, top_k in (((3, 5), 5, 4), ((2, 2), 4, None)):
        case = make_case(window, largest, 5, top_k, dtype)
        found = kernels.flex_attention_(*case)
        tolerance = 1e-5 if dtype is torch.float32 else 4e-2
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), without_gradient(case), atol=tolerance, rtol=0)


# torch's own compiler uses what torch deprecates.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.slow
def test_fused_form_equals_the_reference():
    """The CPU's counterpart of the kernel for GPUs. Once: torch makes faulty C++ when a second case follows."""
    case = make_case((8, 8), 8, 16, 9, torch.float32)
    with torch.no_grad():
        found = kernels.compile_attention()(*case[:3], kernels.score_change(case.table, case.dictionary), scale=1.0)
    torch.testing.assert_close(found.double(), without_gradient(case), atol=1e-5, rtol=0)


def test_what_the_kernels_do_not_take_is_refused():
    case = make_case((2, 3), 3, 4, 2, torch.float32)
    with refused(UsageError, "CPU"):
        kernels.flex_attention_(*case._replace(table=case.table.requires_grad_()))
    arguments = (*case[:3], torch.ones(2), case.table, case.dictionary, "triton")
    if importlib.util.find_spec("triton") is None:
        with pytest.raises(ImportError):
            ops.key_semantic_attention(*arguments)
        return
    with refused(ValueError, "GPU", "sdpa"):
        ops.key_semantic_attention(*arguments)


# Warnings of torch 2.11 of its own doing while it compiles: `.grad` of inner tensors, `torch.jit.script_method`.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("implementation", ["triton", "flex_attention"])
def test_the_device_equals_the_reference(implementation, dtype):
    if implementation == "triton":
        from hf_ext.fast.semanir_triton import triton_attention as attend

        cases, tolerance = (((5, 7), 5, 4), ((16, 16), 30, 64), ((8, 8), 64, None), ((8, 9), 128, 9)), 2e-5
    else:
        attend = kernels.flex_attention_
        cases, tolerance = (((16, 16), 30, 64), ((8, 8), 5, None), ((8, 9), 64, 9)), 1e-4
    for window, head_dim, top_k in cases:
        case = make_case(window, 16, head_dim, top_k, dtype)
        assert_attention_agrees(attend, case, tolerance if dtype is torch.float32 else 4e-2, "cuda")
