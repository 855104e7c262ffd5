"""MRConvNeXt: presets, sizes, merging, training, saving, and pictures in, classes out."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from hf_ext.mrconv import MRConvNextConfig, MRConvNextForImageClassification, MRConvNextImageProcessor, MRConvNextModel
from hf_ext.mrconv.configuration_mrconvnext import PRESETS
from tests.kit import models as kit
from tests.kit.models import assert_same_answers, assert_same_weights
from tests.kit.pictures import noise
from tests.kit.refusals import refused
from tests.mrconv.mrconv_testing import IMAGES, make_image_model, make_images
from tests.mrconv.reference_ops import long_conv


@torch.no_grad()
def classify(model, images: torch.Tensor) -> torch.Tensor:
    return model(images).logits


class TestMRConvNext(kit.ModelTesterMixin, kit.TrainerTesterMixin, kit.LoraTesterMixin):
    model_class = MRConvNextForImageClassification
    bfloat16_tolerance = 0.05
    lora_targets = ["expand", "project"]

    def make_config(self):
        return MRConvNextConfig(**IMAGES)

    def make_inputs(self):
        return {"pixel_values": make_images(6, 3, 16, 16), "labels": torch.arange(6) % 3}


class TestConfig(kit.ConfigTesterMixin):
    config_class = MRConvNextConfig
    config_changes = (
        {"image_size": [32, 48], "num_channels": 1, "patch_size": 2, "hidden_sizes": [8, 16], "depths": [1, 2]}
        | {"kernel_type": "dilated", "kernel_size": 8, "num_modes": 3, "branch_norm": "kernel", "norm_eps": 1e-4}
        | {"sync_batch_norm": False, "layer_norm_eps": 1e-5, "layer_scale_init_value": 1.0, "drop_path_rate": 0.1}
        | {"initializer_range": 0.01, "reparameterized": True}
    )
    bad_configs = [
        ({"image_size": 31}, "of at least 32 pixels"),
        ({"depths": [1, 2]}, "`depths` has 2 values and `hidden_sizes` 4"),
        ({"depths": []}, "at least one"),
        ({"depths": [3, 3, 0, 3]}, "each value must be at least 1"),
        ({"patch_size": 0}, "`patch_size` is 0"),
        ({"drop_path_rate": 1.0}, "below 1"),
        ({"layer_norm_eps": 0.0}, "must be positive"),
        ({"kernel_type": "wavelet"}, "wavelet"),
        ({"branch_norm": "layer", "reparameterized": True}, "cannot be merged"),
    ]


# ConvNeXt's own counts for 1000 classes are 28 589 128, 50 223 688 and 88 591 464.
PARAMETERS = {"tiny": 29_384_872, "small": 51_938_728, "base": 90_878_184}


@pytest.mark.parametrize("preset", ["tiny", *(pytest.param(it, marks=pytest.mark.slow) for it in ("small", "base"))])
def test_presets_have_the_documented_numbers_of_parameters(preset):
    with torch.device("meta"):
        model = MRConvNextForImageClassification(MRConvNextConfig(**PRESETS[preset], num_labels=1000))
    assert model.num_parameters() == PARAMETERS[preset]


@pytest.mark.parametrize("fields", [{}, {"kernel_type": "fourier_sparse"}, {"branch_norm": "kernel"}], ids=str)
def test_merging_changes_no_result_and_is_saved(fields, tmp_path):
    model = make_image_model(**fields).double()
    images = [make_images(2, 3, *size).double() for size in [(16, 16), (4, 4), (7, 21), (32, 20)]]
    expected = [classify(model, image) for image in images]
    assert model.reparameterize() is model and model.config.reparameterized
    merged = [classify(model, image) for image in images]
    torch.testing.assert_close(merged, expected, atol=1e-10, rtol=0)
    for image, wanted in zip(images, merged, strict=True):
        assert_same_answers(classify(model.reparameterize(), image), wanted)
    model.save_pretrained(tmp_path)
    loaded = MRConvNextForImageClassification.from_pretrained(tmp_path, dtype=torch.float64)
    assert not any("alpha" in name for name, _ in loaded.named_parameters())
    torch.testing.assert_close(classify(loaded, images[0]), merged[0], atol=1e-6, rtol=0)


def test_a_layer_is_what_the_paper_says_on_the_map_row_by_row():
    """x + s W_2 GELU(W_1 LN(k * x + b)), where a lag of one row is the width of the map."""
    layer = make_image_model().double().model.stages[0].layers[0]
    features = make_images(2, 6, 8, 8).double()
    kernel, ahead, bias = layer.convolution.merged()
    assert kernel.shape == (6, 64) and ahead.shape == (6, 64)
    flat = features.reshape(2, 6, 64)
    mixed = (long_conv(flat, kernel, ahead) + bias[:, None]).transpose(1, 2)
    normed = F.layer_norm(mixed, (6,), layer.norm.weight, layer.norm.bias, 1e-6)
    branch = layer.project(F.gelu(layer.expand(normed))) * layer.layer_scale
    torch.testing.assert_close(layer(flat), flat + branch.transpose(1, 2), atol=1e-12, rtol=0)
    # One pixel reaches every pixel of the map, before and after it.
    moved = flat + (torch.arange(64) == 27)
    assert (layer.convolution(moved) - layer.convolution(flat)).abs().amin((0, 1)).min() > 1e-6


@pytest.mark.parametrize("size", [(4, 4), (5, 7), (16, 16), (33, 18), (64, 4)])
def test_any_size_gives_maps_of_the_strides(size):
    model = make_image_model()
    outputs = model(make_images(1, 3, *size), output_hidden_states=True)
    shapes = [tuple(state.shape) for state in outputs.hidden_states]
    assert shapes == [(1, width, size[0] // stride, size[1] // stride) for width, stride in ((6, 2), (6, 2), (8, 4))]
    assert outputs.logits.isfinite().all()
    # What is pooled is the normalised mean.
    body = model.model(make_images(1, 3, *size))
    assert_same_answers(body.pooler_output, model.model.norm(body.last_hidden_state.mean((2, 3))))


def test_drop_path_grows_with_depth_and_keeps_the_mean():
    model = make_image_model(depths=[2, 3], drop_path_rate=0.4)
    rates = [layer.drop_path.drop_prob for stage in model.model.stages for layer in stage.layers]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    drop = model.model.stages[1].layers[-1].drop_path.train()
    torch.manual_seed(0)
    kept = drop(torch.ones(20000, 2, 3))
    torch.testing.assert_close(kept.unique(), torch.tensor([0, 1 / 0.6]))
    assert kept.mean().item() == pytest.approx(1, abs=0.02)
    assert torch.equal(kept.amin((1, 2)), kept.amax((1, 2)))
    assert torch.equal(drop.eval()(kept), kept)


def test_wrong_images_are_refused_with_the_reason():
    model = make_image_model()
    for images, error, words in (
        (make_images(1, 1, 16, 16), ValueError, "expected (batch_size, 3, height, width)"),
        (make_images(3, 16, 16), ValueError, "has shape"),
        (make_images(0, 3, 16, 16), ValueError, "has shape"),
        (make_images(1, 3, 16, 3), ValueError, "16 x 3 pixels; each side must be at least 4"),
        (torch.zeros(1, 3, 16, 16, dtype=torch.uint8), TypeError, "torch.uint8; give normalised"),
    ):
        with refused(error, words):
            model(images)
    with refused(ValueError, "sampling", "images"):
        model.change_rate(2)


def test_auto_classes(tmp_path):
    model, images = make_image_model(), make_images(1, 3, 16, 16)
    model.save_pretrained(tmp_path)
    options = {"size": {"shortest_edge": 16}, "crop_pct": 1.0, "do_convert_rgb": False, "image_mean": [0.5]}
    MRConvNextImageProcessor(**options).save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is MRConvNextConfig
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert type(loaded) is MRConvNextForImageClassification
    assert_same_weights(loaded, model)
    assert_same_answers(classify(loaded, images), classify(model, images))
    body = AutoModel.from_pretrained(tmp_path)
    assert type(body) is MRConvNextModel
    with torch.no_grad():
        assert_same_answers(body(images).pooler_output, model.model(images).pooler_output)
    with refused(TypeError, "label"):
        loaded(images, label=torch.tensor([0]))
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    assert type(processor) is MRConvNextImageProcessor
    assert processor.crop_pct == 1.0 and processor.size.shortest_edge == 16
    assert (processor.do_convert_rgb, list(processor.image_mean)) == (False, [0.5])


COLOUR = noise(20, 31, 3)
RGB = Image.fromarray(COLOUR)


def expected_pixels(picture: Image.Image, side: int, crop_pct: float) -> np.ndarray:
    """The documented steps, by Pillow and numpy."""
    shorter = int(side / crop_pct)
    size = [int(shorter * length / min(picture.size)) for length in picture.size]
    resized = picture.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    left, top = (size[0] - side) // 2, (size[1] - side) // 2
    cut = np.asarray(resized.crop((left, top, left + side, top + side)), np.float64) / 255
    return ((cut - IMAGENET_DEFAULT_MEAN) / IMAGENET_DEFAULT_STD).transpose(2, 0, 1)


KINDS = [RGB, RGB.convert("RGBA"), COLOUR, COLOUR.transpose(2, 0, 1), torch.from_numpy(COLOUR), [COLOUR], COLOUR[None]]


def test_pictures_of_every_kind_become_normalised_squares():
    processor = MRConvNextImageProcessor(size={"shortest_edge": 14}, crop_pct=0.875)
    for image in KINDS:
        pixels = processor(image, return_tensors="np").pixel_values
        assert pixels.shape == (1, 3, 14, 14) and pixels.dtype == np.float32
        np.testing.assert_allclose(pixels[0], expected_pixels(RGB, 14, 0.875), atol=1e-5)
    # Beside pictures of other sizes and modes too.
    pictures = [RGB, Image.fromarray(noise(9, 50)), Image.fromarray(noise(12, 5, 3))]
    for values, picture in zip(processor(pictures, return_tensors="np").pixel_values, pictures, strict=True):
        np.testing.assert_allclose(values, expected_pixels(picture, 14, 0.875), atol=1e-5)


def test_values_within_0_and_1_that_are_divided_by_255_are_told(monkeypatch):
    told = []
    monkeypatch.setattr("hf_ext.mrconv.image_processing_mrconvnext.logger.warning_once", told.append)
    grey, dark = torch.from_numpy(COLOUR).bfloat16(), {"do_rescale": False}
    for values, options in ((COLOUR / 256.0, {}), (COLOUR > 99, {}), (COLOUR / 255.0, dark), (grey, {})):
        MRConvNextImageProcessor()(values, **options)
    assert len(told) == 2 and all("do_rescale=False" in line for line in told)


def test_float_and_16_bit_arrays_keep_their_precision():
    processor = MRConvNextImageProcessor(size={"shortest_edge": 14}, do_normalize=False)
    ramp = np.broadcast_to(np.linspace(0.4, 0.41, 20, dtype=np.float32)[:, None, None], (20, 20, 3))
    values = processor(ramp, do_rescale=False, return_tensors="np").pixel_values
    # In 8 bits there would be four levels.
    assert len(np.unique(values[0, 0, :, 0].round(6))) == 14
    # Away from black and white, where 8 bits cut off what a bicubic filter overshoots.
    grey = COLOUR // 4 + 96
    plain = processor(grey, return_tensors="np").pixel_values
    deep = grey.astype(np.uint16) * 257
    values = processor(deep, do_convert_rgb=False, rescale_factor=1 / 65535, return_tensors="np").pixel_values
    np.testing.assert_allclose(values, plain, atol=1.5 / 255)


def test_pictures_that_do_not_fit_are_refused():
    for images, options, words in (
        ([], {}, "`images` is empty"),
        (COLOUR, {"crop_pct": 0.0}, "`crop_pct` is 0.0"),
        (COLOUR, {"crop_pct": 1.5}, "`crop_pct` is 1.5"),
        (COLOUR, {"size": {"height": 8, "width": 8}}, "'shortest_edge': pixels"),
        ([COLOUR, COLOUR[:10]], {"do_resize": False}, "pixel_values"),
        (np.full((20, 20, 3), 65535, np.uint16), {"do_convert_rgb": False}, "up to 65535"),
        (Image.fromarray(np.zeros((20, 20), np.uint16)), {}, "more than 8 bits a channel"),
        (np.full((20, 20, 3), -1, np.int16), {}, "int16 has values from -1"),
        (np.full((20, 20, 3), np.nan), {"do_rescale": False}, "NaN or infinite"),
        (np.where(COLOUR > 9, np.inf, COLOUR), {}, "NaN or infinite"),
        (COLOUR[:, :0], {}, "no pixels"),
    ):
        with refused(ValueError, words):
            MRConvNextImageProcessor()(images, return_tensors="pt", **options)
