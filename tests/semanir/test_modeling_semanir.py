"""SemanIR models: configurations, presets, shapes, k, precision, saving, training, adapters."""

import pytest
import torch
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageToImage

from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration, SemanIRImageProcessor, SemanIRModel
from hf_ext.semanir.configuration_semanir import PRESETS
from hf_ext.semanir.modeling_semanir import SemanIRStage
from tests.kit import models as kit
from tests.kit.models import assert_same_answers
from tests.kit.refusals import refused
from tests.semanir import test_whole_image_semanir as whole
from tests.semanir.test_whole_image_semanir import make_images, make_model, restore

COLUMNAR = {**whole.COLUMNAR, "image_mean": [0.4, 0.5, 0.6]}
U_SHAPED = {**whole.STRIDED, "depths": [1, 2, 1], "reduce_top_skip": True}
HALF = {**COLUMNAR, "stem_scale": 2}


class SemanIRTester(kit.ModelTesterMixin):
    model_class = SemanIRForImageRestoration
    bfloat16_tolerance = 0.05
    lora_targets = ["query_key_value", "projection"]
    fields: dict

    def make_config(self):
        return SemanIRConfig(**self.fields)

    def make_inputs(self):
        clean = make_images(4, 3, 12, 10)
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))
        return {"pixel_values": clean + 0.2 * noise, "labels": clean}


class TestColumnar(SemanIRTester, kit.TrainerTesterMixin, kit.LoraTesterMixin):
    fields = COLUMNAR


class TestHalfResolution(SemanIRTester):
    fields = HALF


def test_a_stem_of_two_is_the_network_on_cells_of_pixels():
    """The same weights by hand: pixels of a cell of 2 x 2 as channels, the body, and the cells back."""
    model = make_model(**HALF)
    images = make_images(2, 3, 16, 24)
    with torch.no_grad():
        shifted = images - model.model.image_mean
        cells = shifted.unflatten(2, (8, 2)).unflatten(4, (12, 2)).permute(0, 1, 3, 5, 2, 4).flatten(1, 3)
        added = model.reconstruction[0](model.model.body(model.model.extractor(cells), HALF["top_k"]))
    by_hand = added.unflatten(1, (3, 2, 2)).permute(0, 1, 4, 2, 5, 3).reshape(images.shape)
    torch.testing.assert_close(restore(model, images), images + by_hand)
    assert model.model(images).last_hidden_state.shape[-2:] == (8, 12)
    assert model.config.multiple_of == 2 * HALF["window_size"]


class TestUShaped(SemanIRTester):
    fields = {**U_SHAPED, "reconstruction_loss": "charbonnier"}


class TestUShapedWideTop(SemanIRTester):
    fields = {**U_SHAPED, "downsampling": "unshuffle", "reduce_top_skip": False, "refinement_depth": 0}


@pytest.mark.parametrize("fields", [COLUMNAR, U_SHAPED, HALF], ids=["columnar", "u-shaped", "half"])
def test_padding_is_that_of_a_padded_image_and_images_do_not_see_each_other(fields):
    """The model's own padding equals giving it the image reflected by hand, image by image."""
    model = make_model(**fields)
    images = make_images(3, 3, 13, 14)
    restored = restore(model, images)
    padded = torch.nn.functional.pad(images, (0, 2, 0, 3), mode="reflect")
    torch.testing.assert_close(restored, restore(model, padded)[..., :13, :14])
    alone = torch.cat([restore(model, image[None]) for image in images])
    torch.testing.assert_close(restored, alone, atol=1e-5, rtol=1e-5)
    # One pixel is enough.
    assert restore(model, images[..., :1, :1]).isfinite().all()


def test_k_of_the_call_overrides_the_configured_k():
    model = make_model(**COLUMNAR)
    images = make_images(1, 3, 16, 16)
    assert_same_answers(restore(model, images, top_k=6), restore(model, images))
    few, all_keys = restore(model, images, top_k=1), restore(model, images, top_k=16)
    assert not torch.allclose(few, restore(model, images))
    assert not torch.allclose(all_keys, restore(model, images))
    assert_same_answers(restore(model, images, top_k=1000), all_keys)


def test_k_outside_the_trained_range_is_warned_of(caplog):
    model = make_model(**COLUMNAR, train_top_k=[3, 9])
    images = make_images(1, 3, 8, 8)
    for top_k in (None, 3, 5, 9):
        restore(model, images, top_k=top_k)
    assert not caplog.records
    restore(model, images, top_k=11)
    assert "`top_k` is 11, but the model is trained with 3 to 9" in caplog.text


@pytest.mark.parametrize(
    "option", [("similarity", "cosine"), ("include_self", False), ("shift_policy", "none"), ("shift_policy", "stage")]
)
def test_dictionary_options_change_the_result(option):
    images = make_images(1, 3, 16, 16)
    base, changed = make_model(**COLUMNAR), make_model(**COLUMNAR, **dict([option]))
    with torch.no_grad():
        # A common direction makes tokens that have much of it the most similar to all.
        base.model.body.first_norm.bias.copy_(torch.linspace(-3, 3, 12))
    changed.load_state_dict(base.state_dict())
    assert not torch.allclose(restore(base, images), restore(changed, images))


def test_shift_policy_says_which_layers_are_shifted():
    def shifted(policy):
        model = SemanIRModel(SemanIRConfig(**COLUMNAR, shift_policy=policy))
        return [module.shifted for module in model.modules() if isinstance(module, SemanIRStage)]

    assert shifted("none") == [[False, False], [False, False]]
    assert shifted("stage") == [[False, False], [True, True]]
    assert shifted("layer") == [[False, True], [False, True]]


def test_losses_are_those_of_their_formulas():
    labels = make_images(2, 3, 8, 8)
    for loss, formula in (
        ("l1", lambda error: error.abs().mean()),
        ("charbonnier", lambda error: (error**2 + 1e-6).sqrt().mean()),
    ):
        model = make_model(**COLUMNAR, reconstruction_loss=loss)
        with torch.no_grad():
            outputs = model(labels.flip(0), labels=labels)
        torch.testing.assert_close(outputs.loss, formula(outputs.reconstruction - labels))


def test_wrong_inputs_are_refused_with_the_reason():
    model = make_model(**COLUMNAR)
    for kind, fact, images in (
        (ValueError, "batch_size", make_images(1, 1, 8, 8)),
        (ValueError, "least 1", make_images(1, 3, 0, 8)),
        (ValueError, "shape", make_images(3, 8, 8)),
        (TypeError, "torch.uint8", torch.zeros(1, 3, 8, 8, dtype=torch.uint8)),
    ):
        with refused(kind, fact):
            model(images)
    for wrong in (0, 2.5, float("nan"), "6"):
        with refused(ValueError, "top_k", repr(wrong)):
            model(make_images(1, 3, 8, 8), top_k=wrong)
    with refused(ValueError, "labels"):
        model(make_images(1, 3, 8, 8), labels=make_images(1, 1, 8, 8))


def test_float16_output_is_finite_with_large_features_and_as_precise_as_the_input():
    """Post-norm keeps the stream bounded: a body whose input is large does not overflow."""
    model = make_model(**COLUMNAR).half()
    with torch.no_grad():
        model.model.extractor.weight *= 100
    restored = restore(model, make_images(1, 3, 8, 8))
    assert restored.isfinite().all() and restored.dtype == torch.float32


def test_all_layers_of_a_partition_read_one_dictionary():
    model = make_model(**{**COLUMNAR, "depths": [4], "num_heads": [2]})
    seen = []
    for layer in model.model.body.stages[0].layers:
        layer.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[1]))
    restore(model, make_images(1, 3, 8, 8))
    assert seen[0] is seen[2] and seen[1] is seen[3] and seen[0] is not seen[1]


def test_auto_classes(tmp_path):
    model = make_model(**COLUMNAR)
    model.save_pretrained(tmp_path)
    SemanIRImageProcessor().save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is SemanIRConfig
    assert type(AutoModelForImageToImage.from_pretrained(tmp_path)) is SemanIRForImageRestoration
    assert type(AutoImageProcessor.from_pretrained(tmp_path)) is SemanIRImageProcessor
    body = AutoModel.from_pretrained(tmp_path)
    assert type(body) is SemanIRModel
    images = make_images(1, 3, 8, 8)
    with torch.no_grad():
        assert_same_answers(body(images).last_hidden_state, model.model(images).last_hidden_state)


class TestSemanIRConfig(kit.ConfigTesterMixin):
    config_class = SemanIRConfig
    # Pictures; layers; keys; output and training.
    config_changes = (
        {"num_channels": 1, "num_channels_out": 2, "architecture": "u-shaped", "embed_dim": 8, "mlp_ratio": 1.5}
        | {"depths": [2, 3], "num_heads": [2, 4], "refinement_depth": 1, "downsampling": "unshuffle"}
        | {"reduce_top_skip": False, "window_size": 4, "shift_policy": "stage", "top_k": 5, "train_top_k": [2, 8]}
        | {"similarity": "cosine", "include_self": False, "scale": 3, "upsampler": "direct"}
        | {"reconstruction_loss": "charbonnier", "initializer_range": 0.1}
    )
    bad_configs = [
        ({"embed_dim": "180"}, "expected int"),
        ({"similarity": "euclidean"}, "allowed: 'dot', 'cosine'"),
        ({"scale": 5}, "allowed: 1, 2, 3, 4"),
        ({"train_top_k": [0, 64]}, "each value must be at least 1"),
        ({"mlp_ratio": 0.0}, "must be positive"),
        ({"depths": []}, "`depths` has 0 values"),
        ({"depths": [6, 6]}, "`num_heads` 6"),
        ({"depths": [6], "num_heads": [7]}, "must divide the width 180"),
        ({"refinement_depth": 2}, "columnar model has no refinement stage"),
        ({"architecture": "u-shaped", "depths": [6], "num_heads": [6]}, "at least two levels"),
        ({"architecture": "u-shaped", "embed_dim": 9, "depths": [1, 1], "num_heads": [3, 3]}, "even width"),
        ({"image_mean": [0.5]}, "`image_mean` has 1 values"),
        ({"image_mean": [0.4, 0.4, 0.4], "num_channels_out": 1}, "as many output as input channels"),
        ({"interpolated_base": True}, "`interpolated_base` needs a `scale` above 1"),
        ({"interpolated_base": True, "scale": 2, "num_channels": 4, "num_channels_out": 3}, "_base` needs"),
    ]


def test_sizes_and_kinds_follow_from_the_fields():
    assert SemanIRConfig(top_k=24).top_k_range == (24, 24)
    assert SemanIRConfig(top_k=24, train_top_k=[64, 8, 32]).top_k_range == (8, 64)
    denoiser = SemanIRConfig(**PRESETS["u-shaped-small"], num_channels=1)
    assert (denoiser.num_channels_out, denoiser.multiple_of, denoiser.tile_overlap) == (1, 32, 64)
    assert SemanIRConfig(**PRESETS["columnar-s"], scale=4).multiple_of == 32
    assert SemanIRConfig(num_channels=4, num_channels_out=3, scale=2).demosaicks
    assert not SemanIRConfig(num_channels=4, num_channels_out=3).demosaicks


def test_auto_map_names_every_head_and_no_repository():
    config = SemanIRConfig(auto_map={"AutoConfig": "org/name--configuration_semanir.SemanIRConfig"})
    assert config.to_dict()["auto_map"] == {
        "AutoConfig": "configuration_semanir.SemanIRConfig",
        "AutoModel": "modeling_semanir.SemanIRModel",
        "AutoModelForImageToImage": "modeling_semanir.SemanIRForImageRestoration",
    }
    config.auto_map["AutoModel"] = "other.Model"
    assert SemanIRConfig().auto_map["AutoModel"] == "modeling_semanir.SemanIRModel"


# Millions of parameters by scale: published of S, B and the denoiser; and of small layouts of our own.
PARAMETERS = {
    "columnar-s": {2: 11.87, 3: 12.05, 4: 12.02}, "columnar-b": {2: 19.90, 3: 20.08, 4: 20.04}, "u-shaped": {1: 25.82},
    "u-shaped-small": {1: 3.59}, "columnar-tiny": {2: 0.53, 3: 0.72, 4: 0.68}, "columnar-half": {1: 0.208},
}  # fmt: skip


@pytest.mark.parametrize("preset", PARAMETERS)
def test_parameter_counts_are_the_published_ones(preset):
    for scale, millions in PARAMETERS[preset].items():
        with torch.device("meta"):
            model = SemanIRForImageRestoration(SemanIRConfig(**PRESETS[preset], scale=scale))
        # The published figures are cut or rounded to two decimals.
        assert model.num_parameters() / 1e6 == pytest.approx(millions, abs=0.006), scale
