"""Options of a call beside the schedule: pictures and masks in every form, guidance that is limited, long texts."""

import numpy as np
import pytest
import torch
from diffusers import EulerDiscreteScheduler, KDPM2AncestralDiscreteScheduler, KDPM2DiscreteScheduler
from peft import LoraConfig, get_peft_model
from PIL import Image

from hf_ext.pipelines import DisentangledDiTPipeline
from tests.disentangled_dit import pipeline_testing
from tests.disentangled_dit.dit_testing import generator
from tests.disentangled_dit.pipeline_testing import from_picture, make_pipeline, make_text_pipeline, make_vae, start
from tests.disentangled_dit.pipeline_testing import within_mask as in_mask
from tests.kit.refusals import refused

FEW = {"num_inference_steps": 3, "output_type": "latent"}
BYTES = np.random.default_rng(0).integers(0, 256, (6, 10, 3), dtype=np.uint8)
BYTES[0, 0] = 0
FORMS = {
    "array": BYTES,
    "floats": BYTES.astype(np.float32) / 255,
    "resized": np.where(BYTES == 0, -0.01, BYTES / 255),
    "turned": np.ascontiguousarray(BYTES[::-1])[::-1] / 255,
    "long": BYTES.astype(np.longdouble) / 255,
    "tensor": torch.from_numpy(BYTES).permute(2, 0, 1)[None],
    "list": [Image.fromarray(BYTES)],
    "opaque": Image.fromarray(BYTES).convert("RGBA"),
}


def test_a_picture_is_read_alike_in_every_form_and_a_transparent_one_is_put_on_white():
    pipeline = from_picture(make_pipeline())
    read = lambda image: pipeline(class_labels=0, image=image, strength=0.7, generator=generator(), **FEW).images  # noqa: E731
    expected = read(Image.fromarray(BYTES))
    for name, form in FORMS.items():
        torch.testing.assert_close(read(form), expected, msg=lambda text, name=name: f"{name}: {text}")
    hidden = Image.fromarray(np.dstack([BYTES, np.zeros((6, 10), dtype=np.uint8)]))
    assert torch.equal(read(hidden), read(Image.new("RGB", (10, 6), "white")))


def test_a_mask_may_be_of_truth_values():
    mask = np.zeros((6, 10), dtype=bool)
    mask[2:, 4:] = True
    pipeline, images = in_mask(make_pipeline()), []
    grey, hole = mask.astype(np.uint8) * 255, torch.from_numpy(mask)
    colours, alpha = np.dstack([mask] * 3), np.dstack([grey] * 3 + [np.full_like(grey, 255)])
    arrays = [colours, colours.astype(np.float32), colours[None], np.dstack([grey] * 3), alpha, alpha / 255.0]
    planes = hole.expand(1, 3, -1, -1)
    arrays += [planes, planes.double().requires_grad_(), [colours], [planes]]
    for each in (mask, hole[None, None], Image.fromarray(mask), grey, *arrays):
        call = {"class_labels": 0, "image": BYTES, "mask_image": each, "generator": generator(), **FEW}
        images.append(pipeline(**call).images)
    assert all(torch.equal(image, images[0]) for image in images)
    clean = torch.from_numpy(BYTES).permute(2, 0, 1)[None].float() / 127.5 - 1
    torch.testing.assert_close(images[0][:, :, ~hole], clean[:, :, ~hole])


@pytest.mark.parametrize("kind", [KDPM2DiscreteScheduler, KDPM2AncestralDiscreteScheduler])
def test_what_is_kept_has_the_noise_of_the_state(kind):
    """Both halves of a step of KDPM2: the noise of the kept part is that of the part that is made."""
    pipeline = in_mask(DisentangledDiTPipeline(pipeline_testing.GaussianDenoiser(std=0.75, sample_size=64), kind()))
    mask, seen = torch.zeros(1, 1, 64, 64), []
    mask[..., 32:] = 1

    def look(pipe, step, timestep, tensors):
        free, kept = tensors["latents"][..., 32:], tensors["latents"][..., :32]
        seen.append((float(free.std()), float(kept.std())))
        return {}

    image = (torch.randn(1, 1, 64, 64, generator=generator(2)) / 2 + 0.5).clamp(0, 1)
    call = {"class_labels": 0, "image": image, "mask_image": mask, "generator": generator(), "guidance_scale": 1.0}
    pipeline(**call, strength=1.0, num_inference_steps=8, output_type="latent", callback_on_step_end=look)
    assert len(seen) == 15
    # the steps are coarse, the last ones most; on the wrong level the ratio would be 1.5 to 3
    assert all(0.75 < free / kept < 1.33 for free, kept in seen[:-3]), seen


def test_guidance_in_a_part_of_the_steps():
    pipeline = make_pipeline()
    options = {"class_labels": 0, "latents": start(pipeline, 1), "output_type": "latent", "num_inference_steps": 10}
    seen = pipeline_testing.record(pipeline)
    pipeline(guidance_interval=(0.2, 0.8), **options)
    assert seen.images == [1, 1, 2, 2, 2, 2, 2, 2, 1, 1]
    whole = pipeline(**options).images
    assert torch.equal(pipeline(guidance_interval=(0, 1), **options).images, whole)
    none = pipeline(guidance_interval=(0.5, 0.5), **options).images
    torch.testing.assert_close(none, pipeline(guidance_scale=1.0, **options).images)
    assert not torch.allclose(none, whole, atol=1e-3)


def test_rescaled_guidance_has_the_spread_of_the_conditional_prediction():
    pipeline = make_pipeline()
    options = {"class_labels": [0, 1], "latents": start(pipeline, 2), **FEW}

    def first_spread(**guidance):
        seen = []
        note = lambda pipe, step, timestep, tensors: seen.append(tensors["noise_pred"].std(dim=(1, 2, 3))) or {}  # noqa: E731
        look = {"callback_on_step_end": note, "callback_on_step_end_tensor_inputs": ["noise_pred"]}
        pipeline(**guidance, **options, **look)
        return seen[0]

    conditional = first_spread(guidance_scale=1.0)
    none, part, all_of_it = (first_spread(guidance_scale=5.0, guidance_rescale=share) for share in (0.0, 0.7, 1.0))
    torch.testing.assert_close(all_of_it, conditional)
    torch.testing.assert_close(part, 0.7 * conditional + 0.3 * none)
    # A network that was just made predicts zero.
    torch.nn.init.zeros_(pipeline.transformer.proj_out.weight)
    torch.nn.init.zeros_(pipeline.transformer.proj_out.bias)
    assert pipeline(guidance_rescale=0.7, **options).images.isfinite().all()


# Depths that pictures are not read with.
DEEP = [Image.fromarray(BYTES[..., 0]).convert("I").convert(kind) for kind in ("I;16", "I", "F")]
DEEP += [np.zeros((6, 10, 3), np.uint16), torch.zeros(1, 3, 6, 10, dtype=torch.int64), "a.png"]
# Two kinds, two shapes.
DEEP += [[Image.new("RGB", (10, 6)), BYTES], [torch.zeros(3, 6, 10), torch.zeros(3, 8, 8)]]
# What a callback may not return: no dictionary, an unknown name, no tensors, tensors of another shape.
RETURNED = [[1], [], "latents", torch.zeros(1, 3, 6, 10), {"latent": torch.zeros(1, 3, 6, 10)}, {"latents": None}]
RETURNED += [{"latents": np.zeros((1, 3, 6, 10))}, {"latents": torch.zeros(2, 3, 6, 10)}]
RETURNED += [{"prompt_embeds": torch.zeros(2, 1, 3)}, {"negative_prompt_embeds": torch.zeros(1, 9, 16)}]
NO_NUMBERS = [float("nan"), float("inf"), [1.0, 2.0], "4", None]
VALUES = {
    **dict.fromkeys(("guidance_scale", "control_guidance_scale"), NO_NUMBERS),
    "guidance_rescale": [*NO_NUMBERS, 2.0],
    "eta": [*NO_NUMBERS, 5],
    "guidance_interval": [0.5, (0.2,), (0.2, float("nan")), ("a", "b"), None, (0.8, 0.2), (-1, 5)],
    "strength": [float("nan"), "all", None, 0, 1.01],
    "flip": [0.5, 2, "left", []],
    "original_size": [(True, True), (0, 4), (float("nan"), 4), [(4, 4), None], [(4, 4), (4,)], [64, 64, 3]],
    "crop": [3, (0, -1)],
    # none, unknown, no whole numbers, empty
    "class_labels": [None, [0, 6], True, np.bool_(True), np.float64(1), [], np.array([], int)],
    "negative_class_labels": [[], [1, 2]],
    "num_images_per_prompt": [0],
    "num_inference_steps": [0, -1, 3.0, True],
    # no lists, empty, no numbers; a scheduler that takes none
    "timesteps": [5, torch.tensor(5), [], "steps", [9]],
    "sigmas": [0.5, []],
    "height": [7],
    "width": [0],
    "output_type": ["jpg"],
    "attention_kwargs": [{"scale": None}, {"scale": "1"}, {"mask": 1}, [1]],
    "callback_on_step_end": ["look", [print], *(lambda *step, value=value: value for value in RETURNED)],
    "callback_on_step_end_tensor_inputs": [None, "latents", [["latents"]]],
    "generator": [[None], ("a",), [torch.Generator()] * 2, 7, []],
    # floats up to 255, NaN, no picture; bytes of 0 and 1, no hole; of NumPy, not finite, none
    # of as many colours as no picture has
    "image": [
        np.zeros((6, 10, 5)),
        torch.zeros(1, 2, 6, 10),
        torch.zeros(4, 3, 5),
        BYTES.astype(np.float32),
        np.full((6, 10, 3), np.nan),
        [],
        np.zeros((0, 6, 10, 3)),
        *DEEP,
    ],
    "mask_image": [np.eye(6, 10).astype(np.uint8), np.zeros((6, 10), dtype=bool)],
    "latents": [np.zeros((1, 3, 6, 10)), torch.full((1, 3, 6, 10), torch.nan), torch.zeros(2, 3, 6, 10)],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in VALUES.items() for value in values])
def test_what_is_no_fitting_value_is_refused(name, value):
    call = {"class_labels": 0, "image": BYTES, "mask_image": np.ones((6, 10), dtype=bool), "strength": 1.0, **FEW}
    with refused(ValueError, name):
        in_mask(make_pipeline())(**{**call, name: value})


def test_another_pipeline_of_the_same_parts_leaves_their_types():
    pipeline = make_pipeline(vae=make_vae())
    pipeline.transformer.to(torch.bfloat16)
    made = from_picture(pipeline)
    assert [made.transformer.dtype, made.vae.dtype, made.labels] == [torch.bfloat16, torch.float32, pipeline.labels]


def test_a_callback_may_replace_the_null_context_alone():
    pipeline = make_text_pipeline()
    options = {"prompt": ["a red hen", "green fish"], "latents": start(pipeline, 2), "guidance_scale": 3.0, **FEW}

    def replace(pipe, step, timestep, tensors):
        if not step:
            assert len(tensors["negative_prompt_embeds"]) == 2 and len(tensors["prompt_embeds"]) == 4
            assert torch.equal(tensors["prompt_embeds"][:2], tensors["negative_prompt_embeds"])
        return {"negative_prompt_embeds": tensors["negative_prompt_embeds"] * 0}

    def replace_both(pipe, step, timestep, tensors):
        null, context = tensors["prompt_embeds"].chunk(2)
        return {"prompt_embeds": torch.cat([null * 0, context])}

    names = {"callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds", "negative_prompt_embeds"]}
    images = pipeline(callback_on_step_end=replace, **options, **names).images
    torch.testing.assert_close(images, pipeline(callback_on_step_end=replace_both, **options, **names).images)
    assert not torch.allclose(images, pipeline(**options).images, atol=1e-3)


def test_a_long_text_is_cut_with_a_warning(monkeypatch):
    pipeline, said = make_text_pipeline(), []
    monkeypatch.setattr(pipeline._LOGGER, "warning", said.append)
    pipeline.encode_prompt("a red hen on grass")
    assert not said
    long, _ = pipeline.encode_prompt("a red hen on grass " * 3)
    assert len(said) == 1 and long.shape[1] == 9
    short, _ = pipeline.encode_prompt("a red hen on grass", max_sequence_length=4)
    assert len(said) == 2 and short.shape[1] == 4
    assert pipeline(prompt="a hen", max_sequence_length=12, **FEW).images.shape == (1, 3, 6, 10)


@pytest.mark.parametrize("prompt", [3, ["a hen", None], [], {"a": 1}, "half a pair: \ud800"])
def test_what_is_no_text_is_refused(prompt):
    for texts in ({"prompt": prompt}, {"prompt": "a hen", "negative_prompt": prompt}):
        with pytest.raises(ValueError):
            make_text_pipeline()(**texts, **FEW)
    for length in (0, 513):
        with refused(ValueError, "max_sequence_length"):
            make_text_pipeline()(prompt="a hen", max_sequence_length=length, **FEW)


def test_scales_that_leave_something_without_effect_are_said(monkeypatch):
    pipeline, said = make_pipeline(control_alpha={}), []
    monkeypatch.setattr(pipeline._LOGGER, "warning", said.append)
    pipeline(class_labels=0, **FEW)
    assert not said
    pipeline(class_labels=0, control_guidance_scale=2.0, **FEW)
    pipeline(class_labels=0, negative_class_labels=1, guidance_scale=1.0, **FEW)
    assert len(said) == 2 and "control_guidance_scale" in said[0] and "negative" in said[1]


def test_pictures_are_one_or_as_many_as_classes_or_as_results():
    pipeline, two = from_picture(make_pipeline()), [BYTES] * 2
    for labels, each in ((2, 1), (2, 3), (1, 2)):
        given = {"class_labels": [0] * labels, "num_images_per_prompt": each}
        images = pipeline(image=two, generator=(generator(),) * labels * each, **given, **FEW).images
        assert len(images) == labels * each
    with refused(ValueError, "image"):
        pipeline(class_labels=[0, 1, 2, 0], image=two, **FEW)


def test_encoded_texts_of_another_length_need_no_negative_ones():
    pipeline, options = make_text_pipeline(), {"callback_on_step_end": lambda *step: {}, **FEW}
    embeds, _ = pipeline.encode_prompt("a red hen", max_sequence_length=12)
    expected = pipeline(prompt="a red hen", max_sequence_length=12, generator=generator(), **options).images
    assert torch.equal(pipeline(prompt_embeds=embeds, generator=generator(), **options).images, expected)


@pytest.mark.parametrize("given", [{"timesteps": [1, 500, 999]}, {"sigmas": [1.0, 5.0]}, {"sigmas": [0.0]}])
def test_a_call_with_a_schedule_that_is_refused_leaves_the_pipeline_as_it_was(given):
    pipeline = make_pipeline(EulerDiscreteScheduler())
    options = {"class_labels": 0, "latents": start(pipeline, 1)}
    expected = pipeline(**options, **FEW).images
    with pytest.raises(ValueError):
        pipeline(**options, **given, **FEW)
    assert torch.equal(pipeline(**options, **FEW).images, expected)


@pytest.mark.parametrize("way", ["unload_lora_weights", "merge_and_unload"])
def test_a_pipeline_with_adapters_is_not_saved_and_a_fused_one_is(tmp_path, way):
    pipeline = make_pipeline()
    noise, layers = start(pipeline, 1), LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False)
    if way == "unload_lora_weights":
        pipeline.transformer.add_adapter(layers)
    else:
        pipeline.transformer = get_peft_model(pipeline.transformer, layers)
    with refused(ValueError, way):
        pipeline.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
    expected = pipeline(class_labels=0, latents=noise, **FEW).images
    if way == "unload_lora_weights":
        pipeline.fuse_lora()
        pipeline.unload_lora_weights()
    else:
        pipeline.transformer = pipeline.transformer.merge_and_unload()
    pipeline.save_pretrained(tmp_path / "fused")
    loaded = pipeline_testing.quiet(DisentangledDiTPipeline.from_pretrained(tmp_path / "fused"))
    torch.testing.assert_close(loaded(class_labels=0, latents=noise, **FEW).images, expected, rtol=1e-4, atol=1e-4)


def test_large_pictures_are_decoded_in_tiles():
    pipeline = make_pipeline(vae=make_vae())
    pipeline.vae.tile_latent_min_size, pipeline.vae.tile_sample_min_size = 16, 32
    options = {"class_labels": 0, "height": 64, "width": 64, "num_inference_steps": 1, "output_type": "pt"}
    whole = pipeline(generator=generator(), **options).images
    pipeline.vae.enable_tiling()
    tiled = pipeline(generator=generator(), **options).images
    assert tiled.shape == whole.shape and not torch.equal(tiled, whole) and (tiled - whole).abs().mean() < 0.05
