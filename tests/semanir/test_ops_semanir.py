"""Fast SemanIR operators against the textbook ones, and what the method promises about its dictionary."""

import itertools
import math
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


REGIONS = ops.key_regions((6, 6), (3, 3), (1, 1))
CHOSEN = [
    torch.rand(2, 3, tokens, generator=torch.Generator().manual_seed(tokens)) < 0.5 for tokens in (1, 7, 8, 9, 24)
]
# Of the operator, the arguments of each case.
CASES = {
    "partition_windows": [
        {"features": random(2, *size, 5), "window": window, "shift": shift} for size, window, shift in LAYOUTS
    ],
    "merge_windows": [
        {
            "windows": random(2 * math.prod(size) // math.prod(window), math.prod(window), 5),
            **{"size": size, "window": window, "shift": shift},
        }
        for size, window, shift in LAYOUTS
    ],
    "key_regions": [{"size": size, "window": window, "shift": shift} for size, window, shift in LAYOUTS],
    "pack_keys": [{"chosen": chosen} for chosen in CHOSEN],
    "unpack_keys": [{"bits": ops.pack_keys(chosen), "tokens": chosen.shape[-1]} for chosen in CHOSEN],
    "semantic_keys": [
        {
            "tokens": random(8, 9, 7, gradient=False),
            **{"regions": regions, "top_k": top_k, "similarity": similarity, "include_self": include_self},
        }
        for top_k, similarity, include_self, regions in itertools.product(
            (1, 5, 20), ("dot", "cosine"), (True, False), (None, REGIONS)
        )
    ],
    "relative_coordinates": [{"window_size": size, "dtype": torch.float64} for size in (1, 2, 5, 8)],
    "relative_offsets": [
        {"window": window, "window_size": size}
        for window, size in (((3, 3), 3), ((2, 5), 5), ((1, 1), 4), ((4, 3), 8))
    ],
    # The last is dense, in shifted windows.
    "build_dictionary": [
        {"features": random(2, *size, 7, gradient=False), "window_size": 3, "shifted": shifted, "top_k": top_k}
        for size, shifted, top_k in (
            *itertools.product(((6, 9), (2, 9), (9, 3)), (False, True), (1, 4, 5)),
            ((6, 6), True, 9),
        )
    ],
    "key_semantic_attention": [
        {
            **{name: random(8, 3, 9, 5, seed=seed) for seed, name in enumerate(("query", "key", "value"), 1)},
            "temperature": (1 + random(3, seed=4, gradient=False).abs()).requires_grad_(),
            "table": random(3, 49, seed=5),
            "dictionary": ops.Dictionary((3, 3), (0, 0), 4, bits),
        }
        for bits in (
            None,
            *(
                ops.semantic_keys(random(8, 9, 7, gradient=False), regions, top_k)
                for regions, top_k in ((None, 4), (REGIONS, 1), (REGIONS, 20))
            ),
        )
    ],
}


def test_every_operator_has_cases():
    assert CASES.keys() == PAIRS.keys() and all(CASES.values())


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_operator_equals_its_reference(name, dtype):
    for arguments in CASES[name]:
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
