"""Operators of SemanIR against the textbook ones, and every way to compute its attention and selection."""

import importlib
import itertools
import math
import runpy
import sys
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ext.errors import UsageError
from hf_ext.fast import semanir_operators
from hf_ext.semanir import ops_semanir as ops
from tests.kit.models import assert_operators_agree, operator_pairs
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
    dictionary = ops.build_dictionary(torch.randn(1, *size, 6, generator=generator), largest, shifted, top_k)
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


PAIRS = operator_pairs(ops, reference)
EXACT = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}
# Height and width, window, shift: square, oblong, shifted on both axes and on one.
WINDOWS = [((6, 9), (3, 3), (0, 0)), ((6, 9), (3, 3), (1, 1)), ((5, 6), (5, 2), (0, 1))]
WINDOWS += [((8, 4), (4, 4), (2, 0)), ((1, 7), (1, 7), (0, 0))]


def random(*shape: int, seed: int = 0, gradient: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(gradient)


def cases(names: str, rows) -> list[dict]:
    """The arguments of each case, by name."""
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


REGIONS = ops.key_regions((6, 6), (3, 3), (1, 1))
CHOSEN = [
    torch.rand(2, 3, tokens, generator=torch.Generator().manual_seed(tokens)) < 0.5 for tokens in (1, 7, 8, 9, 24)
]
TOKENS = random(8, 9, 7, gradient=False)
SEARCHES = itertools.product([TOKENS], (None, REGIONS), (1, 5, 20), ("dot", "cosine"), (True, False))
# The last is dense, in shifted windows.
MAPS = [*itertools.product(((6, 9), (2, 9), (9, 3)), (False, True), (1, 4, 5)), ((6, 6), True, 9)]
ATTENDED = {name: random(8, 3, 9, 5, seed=seed) for seed, name in enumerate(("query", "key", "value"), 1)}
ATTENDED |= {
    "temperature": (1 + random(3, seed=4, gradient=False).abs()).requires_grad_(),
    "table": random(3, 49, seed=5),
}
BITS = [None, *(ops.semantic_keys(TOKENS, *keys) for keys in ((None, 4), (REGIONS, 1), (REGIONS, 20)))]
CASES = {
    "partition_windows": cases("features window shift", [(random(2, *size, 5), *rest) for size, *rest in WINDOWS]),
    "merge_windows": [
        {
            "windows": random(2 * math.prod(case["size"]) // math.prod(case["window"]), math.prod(case["window"]), 5),
            **case,
        }
        for case in cases("size window shift", WINDOWS)
    ],
    "key_regions": cases("size window shift", WINDOWS),
    "pack_keys": [{"chosen": chosen} for chosen in CHOSEN],
    "unpack_keys": [{"bits": ops.pack_keys(chosen), "tokens": chosen.shape[-1]} for chosen in CHOSEN],
    "semantic_keys": cases("tokens regions top_k similarity include_self", SEARCHES),
    "relative_coordinates": [{"window_size": size, "dtype": torch.float64} for size in (1, 2, 5, 8)],
    "relative_offsets": cases("window window_size", [((3, 3), 3), ((2, 5), 5), ((1, 1), 4), ((4, 3), 8)]),
    "window_and_shift": cases("size window_size shifted", [((9, 4), 4, True), ((3, 8), 4, True), ((8, 8), 4, False)]),
    "build_dictionary": [
        {"features": random(2, *size, 7, gradient=False), "window_size": 3, "shifted": shifted, "top_k": top_k}
        for size, shifted, top_k in MAPS
    ],
    "key_semantic_attention": [{**ATTENDED, "dictionary": ops.Dictionary((3, 3), (0, 0), 4, bits)} for bits in BITS],
}


def test_every_operator_has_cases():
    assert CASES.keys() == PAIRS.keys() and all(CASES.values())


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_operator_equals_its_reference(name, dtype):
    for arguments in CASES[name]:
        assert_operators_agree(*PAIRS[name], arguments, dtype, EXACT[dtype])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_windows_in_several_calls_give_what_one_call_gives(implementation):
    """Without a graph, many windows are attended to a few at a time, here 16; the last few may be fewer."""
    dictionary = ops.build_dictionary(random(1, 16, 16 * 37, 4, gradient=False).float(), 16, True, 9)
    query, key, value = random(37, 4, 256, 3, 8, gradient=False).float().unbind(3)
    temperature, table = torch.full((4,), 3.0), random(4, 31**2, gradient=False).float()

    def attend(part):
        rest = temperature, table, dictionary.part(part), implementation
        return ops.key_semantic_attention(query[part], key[part], value[part], *rest)

    with torch.no_grad():
        alone = torch.cat([attend(slice(window, window + 1)) for window in range(37)])
        torch.testing.assert_close(attend(slice(None)), alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("shifted", [False, True])
def test_dictionary_of_a_large_map_is_built_band_by_band(shifted, monkeypatch):
    """Of large maps some rows of windows are copied at a time."""
    features = random(2, 28, 24, 6, gradient=False).float()
    whole = ops.build_dictionary(features, 4, shifted, 5)
    monkeypatch.setattr(ops, "_BAND", 3 * 4 * 24 * 6)
    one = ops.build_dictionary(features, 4, shifted, 5)
    assert one.bits.equal(whole.bits)
    assert one[:3] == whole[:3] == ((4, 4), (2, 2) if shifted else (0, 0), 4)


def test_a_dictionary_has_geometry_bits_where_it_is_not_dense_and_parts():
    for arguments in CASES["build_dictionary"]:
        fast, plain = (build(**arguments) for build in PAIRS["build_dictionary"])
        assert (fast.window, fast.shift) == (plain.window, plain.shift)
    features = random(1, 6, 6, 4)
    dictionary = ops.build_dictionary(features, 3, False, 8)
    assert not dictionary.bits.requires_grad and dictionary.part(slice(1, 3)).bits.equal(dictionary.bits[1:3])
    dense = ops.build_dictionary(features, 3, False, 9)
    assert dense.bits is None and dense.part(slice(1, 3)).bits is None
    # A window as large as the image has nothing to shift into.
    assert ops.build_dictionary(features, 6, True, 36) == ((6, 6), (0, 0), 6, None)


def test_bfloat16_tokens_are_compared_in_float32():
    # The scores of the last token, 256, 257 and 257, are one number in bfloat16.
    tokens = torch.tensor([[[16.0, 0.0]] * 3 + [[16.0, 1.0]] * 2], dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chosen = ops.unpack_keys(ops.semantic_keys(tokens, None, 2), 5)
    assert chosen[0, 4].tolist() == [False, False, False, True, True]


def test_high_temperature_never_selects_an_illegal_key():
    """With tau = 100 the best key may exceed the others by 200: a finite penalty of -100 would let it through."""
    query = value = torch.eye(2)[None, None]
    key = torch.tensor([[-1.0, 0.0], [1.0, 0.0]])[None, None]
    dictionary = ops.Dictionary((1, 2), (0, 0), 2, torch.tensor([[[0b01], [0b11]]], dtype=torch.uint8))
    arguments = (query, key, value, torch.tensor([100.0]), torch.zeros(1, 9), dictionary)
    for gradient in (False, True):
        with torch.set_grad_enabled(gradient):
            assert ops.key_semantic_attention(*arguments)[0, 0, 0].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("shift", [0, 4])
def test_k_from_the_window_up_is_dense_window_attention(shift):
    window, heads = 8, 2
    features = torch.randn(1, 16, 16, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    dictionary = ops.build_dictionary(features, window, bool(shift), window**2)
    assert dictionary.shift == (shift, shift)
    tokens = ops.partition_windows(features, dictionary.window, dictionary.shift)
    query, key, value = tokens.unflatten(-1, (3, heads, 2)).permute(2, 0, 3, 1, 4).unbind(0)
    table = torch.randn(heads, 15**2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    temperature = torch.full((heads,), 10.0, dtype=torch.float64)
    attended = ops.key_semantic_attention(query, key, value, temperature, table, dictionary)

    bias = table[:, ops.relative_offsets((window, window), window)]
    logits = 10 * F.cosine_similarity(query[..., :, None, :], key[..., None, :, :], dim=-1) + bias
    if shift:
        regions = ops.key_regions((16, 16), (window, window), dictionary.shift)
        logits = logits.masked_fill((regions[:, :, None] != regions[:, None])[:, None], -torch.inf)
    torch.testing.assert_close(attended, logits.softmax(-1) @ value, atol=1e-12, rtol=0)


def test_operators_run_alone_and_say_what_hf_ext_would_add():
    """The file as it travels with a checkpoint: nothing has registered itself with this copy."""
    alone = runpy.run_path(ops.__file__)
    dictionary = alone["build_dictionary"](torch.rand(1, 6, 6, 4), 3, True, 4)
    given = *torch.rand(3, 4, 2, 9, 5), torch.ones(2), torch.zeros(2, 25), dictionary
    wanted = alone["key_semantic_attention"](*given, "eager")
    for name in ("auto", "sdpa"):
        torch.testing.assert_close(alone["key_semantic_attention"](*given, name), wanted)
    with refused(ValueError, "native", "'auto', 'eager', 'sdpa'; 'native', 'triton'", "hf-ext"):
        alone["key_semantic_attention"](*given, "native")


# torch itself asks for its own old compiler.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("implementation", ["auto", "native"])
def test_second_derivatives_and_transforms_are_those_of_the_plain_form(implementation):
    if implementation == "native":
        pytest.importorskip("numba")
    inputs, dictionary = make_inputs("24", 8)

    def found(dtype, implementation):
        given = [one.to(dtype).requires_grad_() for one in inputs]

        def attend(query):
            return ops.key_semantic_attention(query, *given[1:], dictionary, implementation).sin().sum()

        slopes = torch.autograd.grad(attend(given[0]), given, create_graph=True)
        second = torch.autograd.grad(sum(slope.sin().sum() for slope in slopes), given)
        query = given[0].detach()
        return [*second, torch.func.grad(attend)(query), torch.func.jvp(attend, (query,), (query.cos(),))[1]]

    assert_near(found(torch.float32, implementation), found(torch.float64, "eager"), 1e-4)
