"""The transformer: equal to its textbook twin, in values and gradients; sizes, positions, controls; errors."""

import json
import math

import numpy as np
import pytest
import torch

from hf_ext.pipelines.disentangled_dit.transformer_disentangled_dit import DisentangledDiTTransformer2DModel
from tests.disentangled_dit import reference_transformer as reference
from tests.disentangled_dit.dit_testing import SIZES, generator, make_inputs, make_transformer
from tests.kit.models import assert_same_answers

SHARED = {"shared_stream": True, "modulation": "shared"}
MODELS = {
    "class": {},
    "one control": {"control_alpha": {"crop": 2.0}},
    "text": {"num_classes": None, "joint_attention_dim": 7},
    "one layer, no controls": {"num_layers": 1, "control_alpha": {}},
    "one stream": {"shared_stream": True},
    "shared modulation": {"modulation": "shared"},
    "both shared": {**SHARED, "num_classes": None, "joint_attention_dim": 7},
}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}


def fast(model, hidden_states, **inputs) -> torch.Tensor:
    context, modulation = model(**inputs, return_conditioning=True)
    return model(hidden_states, context=context, modulation=modulation, return_dict=False)[0]


def plain(model, **inputs) -> torch.Tensor:
    return model(**inputs).sample


def assert_equals_reference(model, inputs: dict, path, dtype: torch.dtype) -> None:
    """Outputs, and the gradients of the latents and of every parameter."""
    latents = inputs["hidden_states"].requires_grad_()
    outputs = path(model, **inputs), reference.predict(dict(model.named_parameters()), model.config, **inputs)
    torch.testing.assert_close(*outputs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    weights = torch.randn(outputs[0].shape, generator=generator(3), dtype=dtype)
    leaves = {"latents": latents, **dict(model.named_parameters())}
    found, wanted = (
        torch.autograd.grad((output * weights).sum(), leaves.values(), allow_unused=True) for output in outputs
    )
    # A layer that is not used has no gradient, or one of zeros.
    found, wanted = (
        {name: torch.zeros_like(leaves[name]) if x is None else x for name, x in zip(leaves, gradients, strict=True)}
        for gradients in (found, wanted)
    )
    torch.testing.assert_close(found, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("path", [plain, fast], ids=["plain", "fast"])
@pytest.mark.parametrize("name", MODELS)
def test_equals_reference(name, path):
    model = make_transformer(**MODELS[name]).double()
    inputs = make_inputs(model, batch=3, dtype=torch.float64)
    inputs["controls"] = {key: value for key, value in inputs["controls"].items() if key in model.control_embedders}
    assert_equals_reference(model, inputs, path, torch.float64)


@pytest.mark.parametrize("absent", DisentangledDiTTransformer2DModel.CONTROL_SIZES)
def test_what_is_absent_adds_nothing_and_the_rest_its_weight_from_the_clean_end_to_noise(absent):
    model = make_transformer().double()
    inputs = make_inputs(model, batch=2, dtype=torch.float64)
    inputs |= {"timestep": torch.tensor([0.0, 1000.0], dtype=torch.float64), "control_mask": None}
    del inputs["controls"][absent]
    assert_equals_reference(model, inputs, plain, torch.float64)


@pytest.mark.parametrize("name", ["class", "text", "both shared"])
def test_equals_reference_in_single_precision_for_one_sample_of_another_size(name):
    """One sample takes the path on which the modulation is the norm's own affine map."""
    model = make_transformer(**MODELS[name])
    inputs = make_inputs(model, batch=1)
    inputs["hidden_states"] = torch.randn(1, 3, 8, 4, generator=generator(5))
    assert_equals_reference(model, inputs, plain, torch.float32)


def count_parameters(preset: str, **fields) -> dict[str, int]:
    with torch.device("meta"):
        model = DisentangledDiTTransformer2DModel(**DisentangledDiTTransformer2DModel.PRESETS[preset] | fields)
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


# Spec 1.3: millions of parameters of this kind of network, of which adaLN; then what ours has, with 1000 classes and
# five controls.
KNOWN = [("S", 63, 21, 64_240_464), ("B", 251, 83, 254_110_416), ("L", 899, 298, 903_842_768)]


@pytest.mark.parametrize(("preset", "expected", "expected_adaln", "count"), [*KNOWN, ("XL", 1329, 441, 1_334_582_728)])
def test_presets_have_the_known_sizes(preset, expected, expected_adaln, count):
    counts = count_parameters(preset)
    assert sum(counts.values()) == count
    network = {name: n for name, n in counts.items() if not name.startswith(("class_embedder", "control_embedders"))}
    assert sum(network.values()) / 1e6 == pytest.approx(expected, rel=0.012)
    adaln = sum(n for name, n in network.items() if name.startswith("modulations"))
    assert adaln / 1e6 == pytest.approx(expected_adaln, rel=0.012)
    # One embedder of timesteps, where each block of diffusers' DiT has one.
    assert sum("timestep_embedder" in name for name in counts) == 4
    # The width that a later paper of the authors states, for about 800 M, with all weights shared.
    shared = count_parameters("XL", shared_stream=True, modulation="shared", attention_head_dim=96)
    assert sum(shared.values()) / 1e6 == pytest.approx(826.8, abs=0.05)


@pytest.mark.parametrize("fields", [{}, SHARED])
def test_tiny_preset_runs_and_a_new_model_predicts_zero(fields):
    tiny = DisentangledDiTTransformer2DModel.PRESETS["tiny"]
    model = DisentangledDiTTransformer2DModel(sample_size=8, num_classes=3, **tiny, **fields)
    latents = torch.randn(2, 4, 8, 8, generator=generator())
    assert not model(latents, 10, class_labels=torch.tensor([0, 3])).sample.any()
    for block, numbers in zip(model.transformer_blocks, model.modulations, strict=False):
        numbers = numbers(torch.randn(2, 64)) + model.modulation_offset[: numbers.out_features]
        tokens, context = torch.randn(2, 16, 64), torch.randn(2, 1, 64)
        torch.testing.assert_close(block(tokens, context, numbers), (context, tokens), atol=0, rtol=0)


def test_every_parameter_learns():
    for fields in ({}, SHARED):
        model = make_transformer(**fields)
        model(**make_inputs(model, batch=4)).sample.square().sum().backward()
        assert all(parameter.grad.any() for parameter in model.parameters())


def test_grid_is_saved_and_kept_at_another_size(tmp_path):
    small = make_transformer()
    small.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["pos_embed_base_size"] == [3, 5]
    large = DisentangledDiTTransformer2DModel.from_pretrained(tmp_path, sample_size=[12, 20])
    assert large.config.pos_embed_base_size == [3, 5] and large.config.sample_size == [12, 20]
    inputs = make_inputs(large)
    with torch.no_grad():
        assert_same_answers(large(**inputs).sample, small(**inputs).sample)
    again = DisentangledDiTTransformer2DModel.from_config(large.config, pos_embed_base_size=[6, 10])
    again.load_state_dict(large.state_dict())
    with torch.no_grad():
        assert not torch.allclose(again(**inputs).sample, small(**inputs).sample)


@pytest.mark.parametrize("fields", [{}, SHARED])
def test_loading_in_another_precision(fields, tmp_path):
    model = make_transformer(**fields)
    model.save_pretrained(tmp_path)
    loaded = DisentangledDiTTransformer2DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert {x.dtype for x in loaded.state_dict().values()} == {torch.bfloat16}
    assert torch.equal(loaded.modulation_offset.float(), model.modulation_offset)
    inputs = make_inputs(model)
    with torch.no_grad():
        found = loaded(**{**inputs, "hidden_states": inputs["hidden_states"].bfloat16()}).sample
        expected = model(**inputs).sample
    assert found.dtype == torch.bfloat16
    # Bfloat16 keeps 8 bits; the outputs are of size 1.
    assert (found - expected).square().mean().sqrt() < 0.05


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"joint_attention_dim": 4}, "one of num_classes"),
        ({"modulation": "none"}, "'per_block' or 'shared', not 'none'"),
        ({"num_classes": 0}, "'num_classes': 0. must be whole numbers from 1"),
        *(({"patch_size": value}, "patch_size") for value in (0, "2", 2.0)),
        ({"control_alpha": {"colour": 1.0}}, "control_alpha .*'original_size'.* not {'colour': 1.0}"),
        ({"control_alpha": {"crop": -1.0}}, "numbers from 0 to 1e6"),
        ({"num_attention_heads": 1, "attention_head_dim": 6}, "divisible by 4, unlike 6"),
        ({"sample_size": [6, 9]}, "divisible by patch_size 2"),
        ({"pos_embed_base_size": [0, 4]}, "one positive number or two"),
        # of strangers, mistyped, or nearly right: nothing is built of them
        *(({"num_layers": value}, "num_layers") for value in (10**9, 1001, True, None)),
        *(({"sample_size": value}, "sample_size") for value in (10**9, "66", [6.5, 10], 6.0, [6], None)),
        *(({"mlp_ratio": value}, "mlp_ratio") for value in (1e30, "4", 0, -1, float("nan"), None)),
        *(({name: 10**9}, name) for name in ("attention_head_dim", "num_classes", "in_channels", "patch_size")),
        *(({"control_alpha": value}, "control_alpha") for value in ({"crop": "8"}, {"crop": None}, ["crop"])),
        *(({"condition_dropout": value}, "dropouts") for value in (None, "0.1", 1.0)),
        ({"shared_stream": "no"}, "shared_stream"),
    ],
)
def test_bad_configurations(fields, message):
    with pytest.raises(ValueError, match=message):
        make_transformer(**fields)


def test_bad_inputs():
    model, text = make_transformer(control_alpha={"crop": 0.0}), make_transformer(**MODELS["text"])
    latents, labels = torch.randn(2, 3, 6, 10), torch.tensor([0, 1])
    given = {"timestep": 5, "class_labels": labels}
    whole = {"hidden_states": latents, **given}
    halved = {**whole, "timestep": torch.ones(2), "controls": {"crop": torch.ones(4, 2)}}
    for message, network, inputs in (
        ("needs `hidden_states`; `timestep` or", model, {**whole, "timestep": None}),
        ("and `class_labels`", model, {**whole, "class_labels": None}),
        (r"\(batch, 3, height, width\)", model, {**whole, "hidden_states": latents[:, :2]}),
        ("by the patch size 2, got", model, {**whole, "hidden_states": latents[..., 1:]}),
        ("modulation, .* must have 2 rows", model, {**whole, "timestep": torch.ones(3)}),
        ("integers of shape .* from 0 to 5", model, {**whole, "class_labels": labels + 0.5}),
        ("no controls \\['flip'\\]; it has \\['crop'\\]", model, {**given, "controls": {"flip": labels[:, None]}}),
        (r"'crop' must have shape \(batch, 2\)", model, {**given, "controls": {"crop": labels[:, None]}}),
        ("'crop' has 4 rows, and the batch 2: .* FasterCache", model, halved),
        *(
            ("finite `scale` only", model, {**whole, "attention_kwargs": it})
            for it in ({"mask": 1}, {"scale": None}, [1])
        ),
        ("text model", text, whole),
        ("class model", model, {**whole, "class_labels": None, "encoder_hidden_states": latents[0]}),
    ):
        with pytest.raises(ValueError, match=message):
            network(**inputs)


def test_a_narrow_network_starts_with_labels_and_timesteps_that_differ():
    """With weights of 0.02, as wide networks have them, adaLN had not found the class after 500 steps."""
    torch.manual_seed(0)
    model = DisentangledDiTTransformer2DModel(num_classes=10, **DisentangledDiTTransformer2DModel.PRESETS["tiny"])
    steps = model.timestep_embedder(model.time_proj(torch.linspace(0, 999, 50)))
    assert steps.std(0).mean() > 0.1 and 0.8 < model.class_embedder.weight.std() < 1.2


def test_positions_of_a_grid_are_computed_once(monkeypatch):
    model, asked = make_transformer(), []
    plain = model.position_embedding
    monkeypatch.setattr(model, "position_embedding", lambda *grid: asked.append(grid) or plain(*grid))
    inputs = make_inputs(model)
    other = {**inputs, "hidden_states": torch.randn(2, 3, 8, 4, generator=generator())}
    with torch.no_grad():
        outputs = [model(**other).sample for _ in range(3)]
        model(**inputs)
    assert asked == [(4, 2)]
    assert torch.equal(outputs[0], outputs[2])
    fresh = make_transformer()
    with torch.no_grad():
        assert torch.equal(fresh(**other).sample, outputs[0])
    # a few are kept, not all that there ever were
    for columns in range(1, model.GRIDS + 9):
        model._positions_of(1, columns, torch.device("cpu"))
    assert len(model._other_positions) <= model.GRIDS
    assert not any("other_positions" in name for name in model.state_dict())


def test_the_weight_is_one_at_the_clean_end_and_zero_in_pure_noise():
    """t = 0 is the END of sampling: the weight rises while an image is made, later with a larger exponent."""
    weigh = make_transformer(num_train_timesteps=500).control_weight
    times = torch.linspace(0, 500, 101)
    for alpha in (0.5, 1.0, 4.0, 8.0):
        weight = weigh(times, alpha)
        assert weight[0] == 1 and weight[-1] == 0 and (weight.diff() <= 0).all()
        assert (weigh(times, 2 * alpha) <= weight).all()
    # The specification's numbers.
    torch.testing.assert_close(weigh(times[[25, 50]], 8.0), torch.tensor([0.282, 0.0039]), atol=5e-4, rtol=0)
    assert weigh(times[30], 2.0).item() == pytest.approx(((1 + math.cos(0.3 * math.pi)) / 2) ** 2)
    assert torch.equal(weigh(times, 0.0), torch.ones(101))
    # Whole numbers are timesteps too.
    assert torch.equal(weigh(torch.tensor([0, 125, 500]), 1.0), weigh(torch.tensor([0.0, 125.0, 500.0]), 1.0))


def test_numbers_of_numpy_and_default_exponents_are_saved_and_an_empty_dictionary_means_none(tmp_path):
    model = make_transformer(num_layers=np.int64(2), sample_size=np.int32(6), mlp_ratio=np.float32(2))
    model.save_pretrained(tmp_path)
    loaded = DisentangledDiTTransformer2DModel.from_pretrained(tmp_path)
    exponents = {"original_size": 8.0, "crop": 0.0, "target_size": 8.0, "flip": 0.0, "aspect_ratio": 0.0}
    assert loaded.grid == [3, 3] and loaded.config.control_alpha == exponents
    assert list(loaded.control_embedders) == list(loaded.CONTROL_SIZES)
    assert not any("control" in name for name in make_transformer(control_alpha={}).state_dict())


def test_controls_of_a_new_model_change_nothing():
    """Their last layer is zero, so that a trained model can be given controls."""
    trained = make_transformer(control_alpha={})
    torch.manual_seed(1)
    model = DisentangledDiTTransformer2DModel(**SIZES)
    missing, unexpected = model.load_state_dict(trained.state_dict(), strict=False)
    assert all(name.startswith("control_embedders") for name in missing) and not unexpected
    inputs = make_inputs(model)
    with torch.no_grad():
        found = model(**inputs).sample
        expected = trained(**{**inputs, "controls": None, "control_mask": None}).sample
    assert_same_answers(found, expected)
    # They are not dead: the gradient reaches the zero layer.
    model(**inputs).sample.sum().backward()
    assert all(embedder.linear_2.weight.grad.any() for embedder in model.control_embedders.values())
