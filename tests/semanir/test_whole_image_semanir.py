"""Whole images within a budget of memory: the result of the whole network at once, in less memory."""

import json

import peft
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from hf_ext.fast.semanir_strips import memory_of_call
from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration
from hf_ext.semanir.configuration_semanir import PRESETS
from tests.kit.refusals import refused

# The layouts of the presets with less width and depth.
COLUMNAR = {"embed_dim": 12, "depths": [2, 2], "num_heads": [2, 3], "window_size": 4, "top_k": 6}
LEVELS = {"architecture": "u-shaped", "embed_dim": 8, "depths": [2, 2, 2], "num_heads": [1, 2, 4]}
STRIDED = {**LEVELS, "refinement_depth": 2, "reduce_top_skip": False, "window_size": 4, "top_k": 6}
UNSHUFFLED = {**STRIDED, "downsampling": "unshuffle", "reduce_top_skip": True}
DEMOSAICKING = {**UNSHUFFLED, "num_channels": 4, "num_channels_out": 3, "scale": 2}


def make_model(**fields) -> SemanIRForImageRestoration:
    torch.manual_seed(0)
    model = SemanIRForImageRestoration(SemanIRConfig(**fields)).eval()
    with torch.no_grad():
        # As large as in training, so that differences in the body are seen in the image.
        model.reconstruction[0].weight *= 50
    return model


def make_images(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def restore(model, images, **options) -> torch.Tensor:
    return model(images, **options).reconstruction


def restore_within(memory_budget, model, images) -> torch.Tensor:
    model.memory_budget = memory_budget
    return restore(model, images)


@pytest.mark.parametrize(
    "fields",
    [
        COLUMNAR,
        {**COLUMNAR, "depths": [5, 1], "scale": 2, "image_mean": [0.4, 0.5, 0.6]},
        {**COLUMNAR, "scale": 3},
        {**COLUMNAR, "scale": 4, "shift_policy": "stage"},
        {**COLUMNAR, "scale": 4, "upsampler": "direct", "shift_policy": "none"},
        {**COLUMNAR, "scale": 3, "interpolated_base": True},
        STRIDED,
        UNSHUFFLED,
        DEMOSAICKING,
        *({**fields, "stem_scale": 2} for fields in (COLUMNAR, {**COLUMNAR, "scale": 4}, STRIDED, DEMOSAICKING)),
    ],
)
def test_parts_of_an_image_make_the_same_image(fields):
    model = make_model(**fields)
    images = make_images(2, model.config.num_channels, 23, 18)
    given = images.clone()
    expected = restore_within(None, model, images)
    # Smallest parts, and parts that do not divide the image.
    for memory_budget in (1, 30_000):
        torch.testing.assert_close(restore_within(memory_budget, model, images), expected, atol=1e-5, rtol=0)
    assert torch.equal(images, given)


@settings(max_examples=12)
@given(
    size=st.tuples(st.integers(1, 18), st.integers(1, 18)),
    memory_budget=st.sampled_from([1, 2_000, 20_000, 100_000]),
    u_shaped=st.booleans(),
)
@example(size=(1, 1), memory_budget=1, u_shaped=True)
@example(size=(17, 3), memory_budget=1, u_shaped=True)
def test_parts_of_images_of_any_size(size, memory_budget, u_shaped):
    fields = {**UNSHUFFLED, "depths": [1, 1], "num_heads": [1, 2], "refinement_depth": 0} if u_shaped else COLUMNAR
    model = make_model(**fields)
    images = make_images(1, 3, *size)
    restored = restore_within(memory_budget, model, images)
    assert restored.shape == images.shape and restored.isfinite().all()
    torch.testing.assert_close(restored, restore_within(None, model, images), atol=1e-5, rtol=0)


def test_parts_in_half_precision():
    model, images = make_model(**UNSHUFFLED), make_images(1, 3, 8, 12)
    # Autocast computes some operators in float32: maps change their precision on the way.
    for autocast in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            found, expected = (restore_within(memory_budget, model, images) for memory_budget in (1, None))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        model.half()


def calls_of_the_extractor(model, **options) -> int:
    """Into how many parts the image was cut, once or twice."""
    calls = []
    forward = model.model.extractor.forward
    model.model.extractor.forward = lambda images: calls.append(1) or forward(images)
    model(make_images(1, 3, 8, 8), **options)
    model.model.extractor.forward = forward
    return len(calls)


def test_what_needs_whole_maps_gets_them():
    model = make_model(**UNSHUFFLED)
    model.memory_budget = 1
    assert calls_of_the_extractor(model) == 1
    with torch.no_grad():
        assert calls_of_the_extractor(model) == 8
        assert calls_of_the_extractor(model, output_hidden_states=True) == 1
        # The hooks that record hidden states stay, and see nothing more.
        assert calls_of_the_extractor(model) == 8
        seen = []
        handle = model.model.body.refinement.register_forward_hook(lambda module, given, result: seen.append(result))
        assert calls_of_the_extractor(model) == 1 and seen[0].shape == (1, 8, 8, 8)
        handle.remove()
        for model.memory_budget in (None, 2**30):
            assert calls_of_the_extractor(model) == 1


def test_budget_is_one_number_of_the_whole_model():
    model = make_model(**COLUMNAR)
    assert model.memory_budget == model.model.memory_budget == 512 * 2**20
    model.memory_budget = 7
    assert model.model.memory_budget == 7
    for wrong in (0, -1, "512 MB", 1e9):
        with refused(ValueError, "1 up"):
            model.memory_budget = wrong
    assert "memory_budget" not in model.config.to_dict()


def peak_of(model, side: int, file) -> int:
    """Bytes of all tensors that live at one time of a call, temporary ones of torch's operators included. What the
    process holds would also tell of freed blocks that the allocator keeps, and of threads: more on a busy machine."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen, torch.no_grad():
        model(torch.zeros(1, 3, side, side))
    seen.export_chrome_trace(str(file))
    events = [event["args"] for event in json.loads(file.read_text())["traceEvents"] if event["name"] == "[memory]"]
    sizes = [event["Total Allocated"] for event in events]
    return max(sizes) - sizes[0] + events[0]["Bytes"]


def test_peak_memory_keeps_to_the_budget(tmp_path):
    fields = {"architecture": "u-shaped", "embed_dim": 16, "depths": [1, 1], "num_heads": [1, 1], "window_size": 8}
    model, budget, pixels = make_model(**fields, top_k=32), 4 * 2**20, 320**2
    # A map of 16 channels, one of 32 at half of its resolution; the image as given, padded and restored.
    held = pixels * 4 * (16 + 32 // 4 + 4 * 3)
    model(torch.zeros(1, 3, 16, 16))
    peaks = {}
    for allowed in (budget, None):
        model.memory_budget = allowed
        peaks[allowed] = peak_of(model, 320, tmp_path / "trace.json")
    assert peaks[budget] < held + budget < peaks[None], peaks


def test_presets_bound_their_memory_by_themselves():
    """Every preset has so wide layers that a 12-megapixel image is cut."""
    for preset in PRESETS.values():
        with torch.device("meta"):
            model = SemanIRForImageRestoration(SemanIRConfig(**preset))
        with torch.no_grad():
            assert memory_of_call(model.model, 12_000_000, False) == model.memory_budget
            assert memory_of_call(model.model, 64 * 64, False) is None


def test_parts_on_a_processor_are_those_that_its_cache_holds():
    model = make_model(**COLUMNAR).model
    cache = 8 * 2**20 * torch.get_num_threads()
    with torch.no_grad():
        for budget, parts in {512 * 2**20: cache, cache - 1: cache - 1, None: None}.items():
            model.memory_budget = budget
            assert memory_of_call(model, 12_000_000, False) == parts


class StandIn(torch.nn.Module):
    """A wrapper that calls the part in whose place it stands."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "part" else getattr(self.part, name)

    def forward(self, *given):
        return self.part(*given)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        *((COLUMNAR, place) for place in ("extractor", "body", "body.stages.1", "body.stages.0.layers.1")),
        *((COLUMNAR, place) for place in ("body.stages.1.convolution", "body.first_norm")),
        *((STRIDED, place) for place in ("body", "body.down_stages.2", "body.up_stages.0", "body.refinement")),
        *((STRIDED, place) for place in ("body.upsamples.0", "body.downsamples.1", "body.reductions.1")),
    ],
)
def test_parts_in_whose_place_an_adapter_stands(fields, place):
    model, images = make_model(**fields), make_images(1, 3, 23, 18)
    expected = restore_within(None, model, images)
    model.model.set_submodule(place, StandIn(model.model.get_submodule(place)))
    torch.testing.assert_close(restore_within(1, model, images), expected, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["extractor", "query_key_value"]},
        {"target_modules": ["query_key_value"], "modules_to_save": ["stages.1"]},
        {"target_modules": ["extractor"], "modules_to_save": ["body"]},
    ],
)
def test_a_trained_adapter_is_evaluated_in_parts(options):
    adapted = peft.get_peft_model(make_model(**COLUMNAR), peft.LoraConfig(**options, init_lora_weights=False)).eval()
    model, images = adapted.get_base_model(), make_images(1, 3, 23, 18)
    expected = restore_within(None, model, images)
    torch.testing.assert_close(restore_within(1, model, images), expected, atol=1e-5, rtol=0)
