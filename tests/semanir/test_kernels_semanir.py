"""Every way to compute SemanIR's attention gives what the reference gives, values and gradients; so does selection."""

import importlib
import sys
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ext.errors import UsageError
from hf_ext.fast import semanir_operators
from hf_ext.semanir import ops_semanir as ops
from tests.kit.refusals import refused
from tests.semanir import reference_ops as reference

HEADS = 2
# Feature map and largest window: N of 9, 25, 64, 24 (rectangular, 4 x 6 of at most 8), 48 (rows of whole vectors), and
# so many that more than 128 keys are chosen of them.
LAYOUTS = {"9": ((6, 9), 3), "25": ((5, 10), 5), "64": ((8, 16), 8), "24": ((4, 6), 8), "48": ((3, 16), 16)}
LAYOUTS |= {"144": ((12, 24), 12)}
# Relative to the largest value of each; the reference computes in float64.
TOLERANCES = {torch.float64: 1e-14, torch.float32: 5e-6, torch.bfloat16: 4e-2}


def make_inputs(layout, top_k, shifted=False, head_dim=5, seed=0):
    """Query, key, value, temperature and table in float64, and a dictionary of their windows."""
    size, largest = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(1, *size, 6, generator=generator)
    dictionary = ops.build_dictionary(features, largest, shifted, top_k)
    windows = size[0] * size[1] // (dictionary.window[0] * dictionary.window[1])
    tokens = dictionary.window[0] * dictionary.window[1]
    drawn = torch.randn(windows, tokens, 3, HEADS, head_dim, generator=generator, dtype=torch.float64)
    temperature = 1 + 10 * torch.rand(HEADS, generator=generator, dtype=torch.float64)
    table = torch.randn(HEADS, (2 * largest - 1) ** 2, generator=generator, dtype=torch.float64)
    return [*drawn.permute(2, 0, 3, 1, 4), temperature, table], dictionary


def run(function, inputs, dictionary, dtype, *arguments):
    """Result and gradients."""
    inputs = [tensor.to(dtype).detach().requires_grad_() for tensor in inputs]
    out = function(*inputs, dictionary, *arguments)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, direction)]


def assert_near(found, expected, tolerance):
    for ours, theirs in zip(found, expected, strict=True):
        allowed = tolerance * theirs.abs().max().clamp(min=1).item()
        torch.testing.assert_close(ours.double(), theirs.double(), atol=allowed, rtol=0)


@cache
def expected(layout, top_k, shifted):
    inputs, dictionary = make_inputs(layout, top_k, shifted)
    return run(reference.key_semantic_attention, inputs, dictionary, torch.float64)


IMPLEMENTATIONS = dict.fromkeys(("eager", "sdpa", "auto"), tuple(TOLERANCES))
IMPLEMENTATIONS |= {"native": (torch.float32, torch.bfloat16)}
# Layouts, numbers of keys, and whether windows are shifted.
PROBLEMS = [("9", 8, False), ("25", 8, False), ("24", 8, False), ("24", 99, False), ("48", 16, False)]
PROBLEMS += [("9", 4, True), ("25", 99, True), ("64", 32, True)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_implementation_equals_the_reference(implementation, problem):
    if implementation == "native":
        pytest.importorskip("numba")
    (inputs, dictionary), wanted, attend = make_inputs(*problem), expected(*problem), ops.key_semantic_attention
    for dtype in IMPLEMENTATIONS[implementation]:
        assert_near(run(attend, inputs, dictionary, dtype, implementation), wanted, TOLERANCES[dtype])
        with torch.no_grad():
            plain = attend(*(tensor.to(dtype) for tensor in inputs), dictionary, implementation)
        assert plain.dtype == dtype
        assert_near([plain], wanted[:1], TOLERANCES[dtype])


def test_every_implementation_is_compared():
    # Those for GPUs have tests of their own, one in Triton's interpreter.
    assert IMPLEMENTATIONS.keys() | {"triton"} == {"auto", *ops.ATTENTION}


@pytest.mark.parametrize(("layout", "top_k"), [("64", 8), ("24", 8), ("48", 8), ("144", 140)])
@pytest.mark.parametrize("head_dim", [30, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (16, 48, 64))])
def test_native_attention_of_every_width(layout, top_k, head_dim):
    """One to four vectors a row, filled up or not; few keys are looked up, of many all logits are computed."""
    pytest.importorskip("numba")
    inputs, dictionary = make_inputs(layout, top_k, True, head_dim)
    wanted = run(ops.key_semantic_attention, inputs, dictionary, torch.float64, "eager")
    found = run(ops.key_semantic_attention, inputs, dictionary, torch.float32, "native")
    assert_near(found, wanted, TOLERANCES[torch.float32])


def test_threads_share_the_work_and_change_nothing():
    pytest.importorskip("numba")
    inputs, dictionary = make_inputs("9", 4, True)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(run(ops.key_semantic_attention, inputs, dictionary, torch.float32, "native"))
        torch.testing.assert_close(*results, atol=0, rtol=0)
    finally:
        torch.set_num_threads(threads)


def test_large_logits_do_not_overflow():
    """tau = 100 and cosines of 1 and -1: exp(116) is not a number of float32."""
    pytest.importorskip("numba")
    inputs, dictionary = make_inputs("64", 32)
    inputs[3].fill_(100)
    inputs[1][:, :, ::2] = inputs[0][:, :, ::2]
    inputs[1][:, :, 1::2] = -inputs[0][:, :, 1::2]
    wanted = run(ops.key_semantic_attention, inputs, dictionary, torch.float64, "eager")
    # The logits have rounding errors of 100 units in the last place of 1.
    assert_near(run(ops.key_semantic_attention, inputs, dictionary, torch.float32, "native"), wanted, 1e-4)
    # Tokens without length have finite gradients.
    inputs[0][:, :, 2] = 0
    inputs[1][:, :, 3] = 0
    assert all(part.isfinite().all() for part in run(ops.key_semantic_attention, inputs, dictionary, torch.float32))


@settings(max_examples=40)
@given(
    tokens=st.integers(1, 70),
    top_k=st.integers(1, 80),
    values=st.sampled_from(["distinct", "tied", "equal", "extreme"]),
    regions=st.integers(0, 3),
    include_self=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_selection_equals_sorting(tokens, top_k, values, regions, include_self, seed):
    """The kernel and torch's way choose what a stable sort of the legal scores puts first."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, tokens, tokens, generator=generator)
    if values == "tied":
        scores = scores.round()
    elif values == "equal":
        scores = torch.where(scores > 0, 0.0, -0.0)
    elif values == "extreme":
        scores = scores * 1e38 * 10
    given_regions = torch.randint(0, regions, (2, tokens), generator=generator).byte() if regions else None
    # An infinite score stays before (or behind) every finite one, and a legal one before an illegal one.
    ranked = scores.double().clamp(-1e300, 1e300)
    if include_self:
        ranked.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    legal = torch.ones_like(scores, dtype=torch.bool)
    if given_regions is not None:
        legal = given_regions[:, :, None] == given_regions[:, None]
        ranked = torch.where(legal, ranked, -torch.inf)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices[..., : min(top_k, tokens)]
    wanted = ops.pack_keys(torch.zeros_like(legal).scatter_(-1, order, True) & legal)
    if semanir_operators.native_kernels_work():
        from hf_ext.fast.semanir_native import select_keys

        assert select_keys(scores, given_regions, min(top_k, tokens), include_self).equal(wanted)
    if values != "extreme":
        # torch's way marks illegal keys by -inf, which scores of finite tokens never are.
        assert ops._best_keys(scores.clone(), given_regions, min(top_k, tokens), include_self).equal(wanted)


def test_without_numba_torch_computes(monkeypatch):
    """The same dictionary, and attention within rounding; asking for the kernels says what is missing."""
    features = torch.randn(1, 16, 16, 6, generator=torch.Generator().manual_seed(0))
    inputs, dictionary = make_inputs("64", 16, True)
    inputs = [tensor.float() for tensor in inputs]
    with_numba = ops.build_dictionary(features, 8, True, 16), ops.key_semantic_attention(*inputs, dictionary)
    for name in [name for name in sys.modules if name.startswith("hf_ext.fast.semanir_native")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("numba", "numba.core", "numba.extending"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError):
        importlib.import_module("hf_ext.fast.semanir_native")
    semanir_operators.native_kernels_work.cache_clear()
    try:
        assert not semanir_operators.native_kernels_work()
        assert ops.build_dictionary(features, 8, True, 16).bits.equal(with_numba[0].bits)
        torch.testing.assert_close(ops.key_semantic_attention(*inputs, dictionary), with_numba[1], atol=5e-6, rtol=0)
        with refused(UsageError, "native"):
            ops.key_semantic_attention(*inputs, dictionary, "native")
    finally:
        monkeypatch.undo()
        semanir_operators.native_kernels_work.cache_clear()
