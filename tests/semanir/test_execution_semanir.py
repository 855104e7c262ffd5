"""How SemanIR runs: attention implementations, half precision, torch.compile, torch.export, demosaicking."""

import json

import pytest
import torch
from transformers import AutoModelForImageToImage

from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration, modeling_layers_semanir
from hf_ext.semanir.modeling_layers_semanir import bilinear_demosaick
from hf_ext.semanir.ops_semanir import unpack_keys
from tests.semanir.test_whole_image_semanir import COLUMNAR, DEMOSAICKING, UNSHUFFLED, make_images, make_model


@torch.no_grad()
def restore(model, images, **options) -> torch.Tensor:
    return model(images, **options).reconstruction


def test_attention_is_chosen_by_the_switch_of_transformers(tmp_path):
    model = make_model(**COLUMNAR)
    assert model.config._attn_implementation == "auto"
    model.save_pretrained(tmp_path)
    assert "attn" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    loaded = AutoModelForImageToImage.from_pretrained(tmp_path, attn_implementation="eager")
    assert loaded.config._attn_implementation == loaded.model.config._attn_implementation == "eager"
    images = make_images(1, 3, 9, 13)
    seen = []
    original = modeling_layers_semanir.key_semantic_attention

    def attend(*arguments):
        seen.append(arguments[-1])
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_layers_semanir, "key_semantic_attention", attend)
        eager = restore(loaded, images)
        loaded.set_attn_implementation("sdpa")
        torch.testing.assert_close(restore(loaded, images), eager, atol=1e-5, rtol=0)
    assert seen == ["eager"] * 4 + ["sdpa"] * 4


@pytest.mark.parametrize("name", ["flash_attention_2", "dense", "paged|eager"])
def test_unknown_attention_is_refused(name):
    message = "allowed: 'auto', 'eager', 'sdpa', 'native', 'flex_attention', 'triton'"
    with pytest.raises(ValueError, match=message):
        make_model(**COLUMNAR).set_attn_implementation(name)
    with pytest.raises(ValueError, match=message):
        SemanIRForImageRestoration._from_config(SemanIRConfig(**COLUMNAR), attn_implementation=name)


def mosaic_of(image: torch.Tensor) -> torch.Tensor:
    """RGGB samples of an RGB image, packed."""
    red, green, blue = image[:, 0], image[:, 1], image[:, 2]
    cells = [red[:, ::2, ::2], green[:, ::2, 1::2], green[:, 1::2, ::2], blue[:, 1::2, 1::2]]
    return torch.stack(cells, dim=1)


def test_bilinear_demosaicking_keeps_samples_and_restores_ramps():
    image = torch.stack([torch.arange(80.0).view(8, 10), torch.arange(80.0).view(8, 10) / 2, torch.full((8, 10), 3.0)])
    restored = bilinear_demosaick(mosaic_of(image[None]))
    torch.testing.assert_close(restored[..., 1:-1, 1:-1], image[None, :, 1:-1, 1:-1])
    noise = make_images(2, 3, 8, 6)
    assert torch.equal(mosaic_of(bilinear_demosaick(mosaic_of(noise))), mosaic_of(noise))
    assert bilinear_demosaick(make_images(1, 4, 1, 1)).shape == (1, 3, 2, 2)


@pytest.mark.parametrize("upsampler", ["direct", "pixelshuffle"])
def test_untrained_demosaicking_is_nearly_bilinear(upsampler):
    torch.manual_seed(0)
    model = SemanIRForImageRestoration(SemanIRConfig(**DEMOSAICKING, upsampler=upsampler)).eval()
    mosaic = make_images(1, 4, 7, 9)
    restored = restore(model, mosaic)
    assert restored.shape == (1, 3, 14, 18)
    assert 0 < (restored - bilinear_demosaick(mosaic)).abs().mean() < 0.05


def test_bfloat16_deviates_by_rounding_and_by_keys_that_are_nearly_as_similar():
    """Rounding swaps some keys at the border of the selection, which random weights answer with another image. With
    the same keys bfloat16 is near float32."""
    model = make_model(**UNSHUFFLED)
    images = make_images(1, 3, 24, 24)
    build = modeling_layers_semanir.build_dictionary
    dictionaries, swapped = [], []

    def record(*arguments):
        dictionaries.append(build(*arguments))
        return dictionaries[-1]

    def replay(*arguments):
        own, recorded = build(*arguments), dictionaries.pop(0)
        if own.bits is not None:
            tokens = own.window[0] * own.window[1]
            swapped.append((unpack_keys(own.bits, tokens) & ~unpack_keys(recorded.bits, tokens)).float().sum())
            swapped[-1] /= unpack_keys(own.bits, tokens).sum()
        return recorded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_layers_semanir, "build_dictionary", record)
        expected = restore(model, images)
        patch.setattr(modeling_layers_semanir, "build_dictionary", replay)
        restored = restore(model.bfloat16(), images)
    # The correction has a mean of 0.7 here.
    assert (restored - expected).abs().mean() < 0.03
    assert 0 < max(swapped) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("fields", [COLUMNAR, UNSHUFFLED], ids=["columnar", "u-shaped"])
def test_compiled_model_restores_and_trains_alike(fields):
    model = make_model(**fields)
    images = make_images(1, 3, 10, 12)
    expected = restore(model, images)
    # A budget that would cut the image is not obeyed: the graph must not depend on it.
    model.memory_budget = 1
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(restore(compiled, images), expected, atol=1e-5, rtol=0)
    gradients = []
    for runner in (model.train(), compiled):
        model.zero_grad()
        runner(images, labels=images).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for eager, traced in zip(*gradients, strict=True):
        torch.testing.assert_close(traced, eager, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [COLUMNAR, UNSHUFFLED], ids=["columnar", "u-shaped"])
def test_exported_model_restores_alike(fields, tmp_path):
    model = make_model(**fields)
    images = make_images(1, 3, 10, 12)
    expected = restore(model, images)
    model.memory_budget = 1
    with torch.no_grad():
        torch.export.save(torch.export.export(model, (), {"pixel_values": images}), tmp_path / "model.pt2")
    exported = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(exported(pixel_values=images).reconstruction, expected, atol=1e-5, rtol=0)
