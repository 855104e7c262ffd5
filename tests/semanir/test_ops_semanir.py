"""Fast SemanIR operators against the textbook ones, and what the method promises about its dictionary."""

import itertools
import runpy

import pytest
import torch
import torch.nn.functional as F

from hf_ext.semanir import ops_semanir as ops
from tests.kit.models import assert_operators_agree, operator_pairs
from tests.kit.refusals import refused
from tests.semanir import reference_ops as reference

PAIRS = operator_pairs(ops, reference)
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}
# Height and width, window, shift: square, oblong, shifted on both axes and on one.
LAYOUTS = [
    ((6, 9), (3, 3), (0, 0)),
    ((6, 9), (3, 3), (1, 1)),
    ((5, 6), (5, 2), (0, 1)),
    ((8, 4), (4, 4), (2, 0)),
    ((1, 7), (1, 7), (0, 0)),
]


def random(*shape: int, seed: int = 0, gradient: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(gradient)


def partition_cases():
    for size, window, shift in LAYOUTS:
        yield {"features": random(2, *size, 5), "window": window, "shift": shift}


def merge_cases():
    for size, window, shift in LAYOUTS:
        tokens = window[0] * window[1]
        windows = 2 * size[0] * size[1] // tokens
        yield {"windows": random(windows, tokens, 5), "size": size, "window": window, "shift": shift}


def region_cases():
    for size, window, shift in LAYOUTS:
        yield {"size": size, "window": window, "shift": shift}


def chosen_cases():
    generator = torch.Generator().manual_seed(0)
    for tokens in (1, 7, 8, 9, 24):
        yield {"chosen": torch.rand(2, 3, tokens, generator=generator) < 0.5}


def bit_cases():
    for case in chosen_cases():
        yield {"bits": ops.pack_keys(case["chosen"]), "tokens": case["chosen"].shape[-1]}


def key_cases():
    regions = ops.key_regions((6, 6), (3, 3), (1, 1))
    for top_k, similarity, include_self, given in itertools.product(
        (1, 5, 20), ("dot", "cosine"), (True, False), (None, regions)
    ):
        options = {"top_k": top_k, "similarity": similarity, "include_self": include_self}
        yield {"tokens": random(8, 9, 7, gradient=False), "regions": given, **options}


def coordinate_cases():
    for window_size in (1, 2, 5, 8):
        yield {"window_size": window_size, "dtype": torch.float64}


def offset_cases():
    for window, window_size in (((3, 3), 3), ((2, 5), 5), ((1, 1), 4), ((4, 3), 8)):
        yield {"window": window, "window_size": window_size}


def dictionary_cases():
    for size, shifted, top_k in itertools.product(((6, 9), (2, 9), (9, 3)), (False, True), (1, 4, 5)):
        options = {"window_size": 3, "shifted": shifted, "top_k": top_k, "similarity": "dot", "include_self": True}
        yield {"features": random(2, *size, 7, gradient=False), **options}
    # Dense, in shifted windows.
    yield {"features": random(2, 6, 6, 7, gradient=False), "window_size": 3, "shifted": True, "top_k": 9}


def attention_cases():
    regions = ops.key_regions((6, 6), (3, 3), (1, 1))
    tokens = random(8, 9, 7, gradient=False)
    chosen = [None] + [ops.semantic_keys(tokens, given, k) for given, k in ((None, 4), (regions, 1), (regions, 20))]
    for bits in chosen:
        yield {
            "query": random(8, 3, 9, 5, seed=1),
            "key": random(8, 3, 9, 5, seed=2),
            "value": random(8, 3, 9, 5, seed=3),
            "temperature": (1 + random(3, seed=4, gradient=False).abs()).requires_grad_(),
            "table": random(3, 49, seed=5),
            "dictionary": ops.Dictionary((3, 3), (0, 0), 4, bits),
        }


CASES = {
    "partition_windows": partition_cases,
    "merge_windows": merge_cases,
    "key_regions": region_cases,
    "pack_keys": chosen_cases,
    "unpack_keys": bit_cases,
    "semantic_keys": key_cases,
    "relative_coordinates": coordinate_cases,
    "relative_offsets": offset_cases,
    "build_dictionary": dictionary_cases,
    "key_semantic_attention": attention_cases,
}


def legal_keys(*layout):
    regions = ops.key_regions(*layout)
    return regions[:, :, None] == regions[:, None]


def test_every_operator_has_cases():
    assert CASES.keys() == PAIRS.keys()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_operator_equals_its_reference(name, dtype):
    cases = list(CASES[name]())
    assert cases
    for arguments in cases:
        assert_operators_agree(*PAIRS[name], arguments, dtype, TOLERANCES[dtype])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_windows_in_several_calls_give_what_one_call_gives(implementation):
    """Without a graph, many windows are attended to a few at a time, here 16; the last few may be fewer."""
    features = random(1, 16, 16 * 37, 4, gradient=False).float()
    dictionary = ops.build_dictionary(features, 16, True, 9)
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
    """Of large maps, or with little memory, some rows of windows are copied at a time."""
    features = random(2, 28, 24, 6, gradient=False).float()
    whole = ops.build_dictionary(features, 4, shifted, 5)
    found = [ops.build_dictionary(features, 4, shifted, 5, memory=memory) for memory in (1, 3 * 4 * 24 * 4 * 22)]
    monkeypatch.setattr(ops, "_BAND", 3 * 4 * 24 * 6)
    for one in (*found, ops.build_dictionary(features, 4, shifted, 5)):
        assert one.bits.equal(whole.bits)
        assert one[:3] == whole[:3] == ((4, 4), (2, 2) if shifted else (0, 0), 4)


def test_a_dictionary_has_geometry_bits_where_it_is_not_dense_and_parts():
    for arguments in dictionary_cases():
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
    query = torch.tensor([[1.0, 0.0], [0.0, 1.0]])[None, None]
    key = torch.tensor([[-1.0, 0.0], [1.0, 0.0]])[None, None]
    value = torch.tensor([[1.0, 0.0], [0.0, 1.0]])[None, None]
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
        logits = logits.masked_fill(~legal_keys((16, 16), (window, window), dictionary.shift)[:, None], -torch.inf)
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
