"""The parts of the pipeline: autoencoders, pictures, text encoders and padding, LoRA; numbers of every form."""

from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DDPMScheduler,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeunDiscreteScheduler,
)
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from PIL import Image

from hf_ext.pipelines import DisentangledDiTPipeline
from tests.disentangled_dit import pipeline_testing
from tests.disentangled_dit.dit_testing import generator
from tests.disentangled_dit.pipeline_testing import from_picture, make_pipeline, make_text_pipeline, make_vae, start
from tests.kit.models import assert_same_answers

FEW = {"num_inference_steps": 3, "output_type": "latent"}


def test_latents_pass_through_the_autoencoder_shifted_and_scaled():
    vae = make_vae()
    pipeline = make_pipeline(vae=vae)
    assert pipeline.vae_scale_factor == 2
    image = torch.rand(1, 3, 12, 20, generator=generator()) * 2 - 1
    with torch.no_grad():
        latents = pipeline.encode_image(vae, image)
        torch.testing.assert_close(latents, (vae.encode(image).latent_dist.mode() - 0.3) * 0.7)
        torch.testing.assert_close(pipeline.decode_latents(vae, latents), vae.decode(latents / 0.7 + 0.3).sample)
    options = {"class_labels": 0, "num_inference_steps": 2}
    latents, images = (
        pipeline(output_type=kind, generator=generator(), **options).images for kind in ("latent", "pt")
    )
    assert latents.shape == (1, 4, 6, 10) and images.shape == (1, 3, 12, 20)
    torch.testing.assert_close(images, (vae.decode(latents / 0.7 + 0.3).sample / 2 + 0.5).clamp(0, 1).detach())
    with pytest.raises(ValueError, match="height and width are .10, 20.; they must be multiples of 4 pixels"):
        pipeline(class_labels=0, height=10, **FEW)


def test_latents_of_an_autoencoder_that_knows_each_channel():
    """As Stable Diffusion XL's pipelines use `latents_mean` and `latents_std`."""
    plain = make_vae()
    mean, deviation = [0.1, -0.2, 0.3, -0.4], [0.5, 1.0, 2.0, 4.0]
    vae = AutoencoderKL(**{**plain.config, "latents_mean": mean, "latents_std": deviation}).eval()
    vae.load_state_dict(plain.state_dict())
    image = torch.rand(2, 3, 12, 20, generator=generator()) * 2 - 1
    mean, deviation = (torch.tensor(values)[None, :, None, None] for values in (mean, deviation))
    with torch.no_grad():
        latents = DisentangledDiTPipeline.encode_image(vae, image)
        torch.testing.assert_close(latents, (plain.encode(image).latent_dist.mode() - mean) * 0.7 / deviation)
        decoded = DisentangledDiTPipeline.decode_latents(vae, latents)
        torch.testing.assert_close(decoded, plain.decode(latents * deviation / 0.7 + mean).sample)
        torch.testing.assert_close(decoded, plain.decode(plain.encode(image).latent_dist.mode()).sample)


def test_a_vae_in_half_precision_is_lifted_where_it_must_be_and_put_back():
    vae, seen = make_vae().half(), []
    vae.decoder.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    with torch.no_grad():
        image = make_pipeline(vae=vae).decode_latents(vae, torch.zeros(1, 4, 3, 3))
    assert vae.config.force_upcast and seen == [torch.float32]
    assert vae.dtype == torch.float16 and image.dtype == torch.float32
    vae.decoder.forward = Mock(side_effect=torch.OutOfMemoryError)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        make_pipeline(vae=vae).decode_latents(vae, torch.zeros(1, 4, 3, 3))
    assert vae.dtype == torch.float16


@pytest.mark.parametrize("kind", ["epsilon", "flow_prediction"])
def test_image_to_image_starts_where_the_strength_says(kind):
    scheduler = DDIMScheduler(timestep_spacing="trailing") if kind == "epsilon" else FlowMatchEulerDiscreteScheduler()
    pipeline = from_picture(DisentangledDiTPipeline(pipeline_testing.GaussianDenoiser(kind, std=0.2), scheduler))
    image = 0.2 * torch.randn(1, 1, 48, 48, generator=generator(5))
    options = {"class_labels": 0, "num_inference_steps": 100, "guidance_scale": 1.0, "output_type": "latent"}

    def distance(strength):
        seen = []
        out = pipeline(
            image=image / 2 + 0.5, strength=strength, generator=generator(), **options,
            callback_on_step_end=lambda pipe, step, time, tensors: seen.append(float(time)) or {},
        ).images  # fmt: skip
        assert len(seen) == pipeline.num_timesteps == round(100 * strength)
        assert float(out.std()) == pytest.approx(0.2, rel=0.1)
        # The start is a image + s noise; the exact solution carries it to a picture correlated with the given one.
        if kind == "epsilon":
            power = float(scheduler.alphas_cumprod[int(seen[0])])
            a, s = power**0.5, (1 - power) ** 0.5
        else:
            a, s = 1 - seen[0] / 1000, seen[0] / 1000
        correlation = 0.2 * a / (0.04 * a**2 + s**2) ** 0.5
        assert float((out - image).std()) == pytest.approx(0.2 * (2 - 2 * correlation) ** 0.5, rel=0.1)
        return float((out - image).std())

    near, half, far = map(distance, (0.1, 0.5, 1.0))
    assert near < half < far
    for wrong in (0.001, 1.5, -0.5):
        with pytest.raises(ValueError, match=f"strength is {wrong} for 100 steps; give 1/100, which leaves one, to 1"):
            pipeline(image=image / 2 + 0.5, strength=wrong, **options)


@pytest.mark.parametrize("kind", [DDPMScheduler, EulerDiscreteScheduler, HeunDiscreteScheduler])
def test_a_strength_leaves_as_many_steps_by_any_option(kind):
    pipeline = from_picture(make_pipeline())
    plain = {"num_inference_steps": 5, "timesteps": None, "sigmas": None}

    def steps(strength: float, **more: object) -> int:
        return pipeline.retrieve_timesteps(SimpleNamespace(strength=strength, **{**plain, **more}))[1]

    pipeline.scheduler = kind()
    pipeline.scheduler.set_timesteps(5)
    own = {"timesteps": [900, 700, 500, 300, 100]}
    if kind is EulerDiscreteScheduler:
        # Its last is the end, 0.
        own = {"sigmas": pipeline.scheduler.sigmas}
    for strength, left in ((1.0, 5), (0.8, 4), (0.4, 2), (0.2, 1)):
        assert steps(strength) == steps(strength, **own) == left
    # 1/n times n may be a little below 1.
    for count in (49, 98, 103):
        assert steps(1 / count, num_inference_steps=count) == 1


def test_image_to_image_takes_pictures_of_any_size_and_latents():
    pipeline = from_picture(make_pipeline(vae=make_vae()))
    pictures = [Image.fromarray(np.full((30, 30, 3), value, dtype=np.uint8)) for value in (10, 200)]
    options = {"class_labels": [0, 1], "strength": 0.5, "num_inference_steps": 4, "output_type": "latent"}
    images = pipeline(image=pictures, num_images_per_prompt=2, generator=generator(), **options).images
    assert images.shape == (4, 4, 6, 10)
    pixels = pipeline.image_processor.preprocess(pictures, height=12, width=20)
    latents = pipeline.encode_image(pipeline.vae, pixels).detach()
    again = pipeline(image=latents, num_images_per_prompt=2, generator=generator(), **options).images
    torch.testing.assert_close(images, again)
    for form in ([*latents], (latents[:1], latents[1:])):
        found = pipeline(image=form, num_images_per_prompt=2, generator=generator(), **options).images
        assert torch.equal(found, again)
    one = {**options, "class_labels": 0}
    found = [pipeline(image=form, generator=generator(), **one).images for form in (latents[:1], latents[0])]
    assert torch.equal(*found)
    # No latents of this model, and no pictures.
    wrong = latents.abs()
    for form in (wrong[:, :2], [wrong[0, :2]] * 2, np.zeros((12, 20, 5))):
        with pytest.raises(ValueError, match="image"):
            pipeline(image=form, **options)
    with pytest.raises(ValueError, match="image has 3 values for 2 pictures"):
        pipeline(image=torch.zeros(3, 4, 6, 10), **options)


def test_inpainting_keeps_the_latents_of_black_pixels():
    pipeline = pipeline_testing.within_mask(make_pipeline(vae=make_vae()))
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8))
    white = np.zeros((12, 20), dtype=np.uint8)
    # one pixel of a latent of 2 x 2 is enough
    white[5, 7], white[8:, 16:] = 255, 255
    options = {"class_labels": [0, 1], "strength": 1.0, "num_inference_steps": 4, "output_type": "latent"}
    options |= {"image": picture, "generator": generator()}
    images = pipeline(mask_image=Image.fromarray(white), **options).images
    clean = pipeline.encode_image(pipeline.vae, pipeline.image_processor.preprocess(picture)).detach()
    hole = torch.zeros(6, 10, dtype=torch.bool)
    hole[2, 3] = hole[4:, 8:] = True
    torch.testing.assert_close(images[:, :, ~hole], clean.expand(2, -1, -1, -1)[:, :, ~hole])
    assert (images - clean)[:, :, hole].abs().min() > 1e-5
    # a mask for each picture, as numbers
    masks = torch.from_numpy(np.stack([white, 255 - white]) / 255.0)[:, None].float()
    each = pipeline(mask_image=masks, **{**options, "generator": generator()}).images
    torch.testing.assert_close(each[:1], images[:1])
    torch.testing.assert_close(each[1:, :, 4:, 8:], clean[:, :, 4:, 8:])
    with pytest.raises(ValueError):
        pipeline(class_labels=0, mask_image=masks)
    with pytest.raises(ValueError, match="mask_image has 3 values for 2 pictures"):
        pipeline(mask_image=masks.repeat(2, 1, 1, 1)[:3], **options)


def test_a_text_pipeline_equals_plain_sampling():
    pipeline = make_text_pipeline()
    noise, texts = start(pipeline, 2), {"prompt": ["a red hen", "green fish on grass"], "negative_prompt": "a fish"}
    embeds, negative = pipeline.encode_prompt(**texts)
    images, again, null, empty = (
        pipeline(**given, latents=noise, guidance_scale=3.0, **FEW).images
        for given in (
            texts,
            {"prompt_embeds": embeds, "negative_prompt_embeds": negative},
            {"prompt": texts["prompt"]},
            {"prompt": texts["prompt"], "negative_prompt": ""},
        )
    )
    torch.testing.assert_close(images, again, rtol=1e-4, atol=1e-5)
    assert_same_answers(null, empty)
    assert not torch.allclose(null, images, atol=1e-4)
    sizes = {"original_size": [[6, 10]] * 2, "crop": [[0, 0]] * 2, "target_size": [[6, 10]] * 2}
    controls = {**sizes, "flip": [[0]] * 2, "aspect_ratio": [[float(np.log(10 / 6))]] * 2}
    plain = pipeline_testing.sample_plainly(pipeline, noise, embeds, controls, 3.0, null=negative)
    torch.testing.assert_close(images, plain, rtol=1e-4, atol=1e-4)


def test_a_text_gives_the_same_tokens_in_any_company():
    pipeline = make_text_pipeline()
    alone, null = pipeline.encode_prompt("a red hen")
    torch.manual_seed(9)
    among, nulls = pipeline.encode_prompt(["green fish on grass", "a red hen", "a red hen"])
    torch.testing.assert_close(pipeline.encode_prompt("a red hen")[0], alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(nulls, null.expand(3, -1, -1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pipeline.encode_prompt("")[0], null, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(among[1:], alone.expand(2, -1, -1), rtol=1e-5, atol=1e-6)
    # [CLS] a red hen [SEP], then the same five with noise
    assert 0 < (alone[:, 5:] - alone[:, :4]).abs().max() < 0.2
    other, nothing = pipeline.encode_prompt("a red fish", do_classifier_free_guidance=False)
    assert nothing is None and pipeline.encode_prompt(None) == (None, None)
    assert not torch.allclose(other[:, 5:] - other[:, :4], alone[:, 5:] - alone[:, :4], atol=1e-5)


pad_text = DisentangledDiTPipeline.pad_text


@pytest.mark.parametrize("mode", ["zeros", "replicate", "noisy_replicate"])
def test_modes_of_padding(mode):
    tokens = torch.randn(3, 10, 6, generator=generator(), dtype=torch.float64).float()
    lengths = torch.tensor([10, 4, 1])
    padded, again = (pad_text(tokens, lengths, mode, 0.1, generator(1)) for _ in range(2))
    assert torch.equal(padded, again) and torch.equal(padded[0], tokens[0])
    assert torch.equal(padded[1, :4], tokens[1, :4]) and torch.equal(padded[2, :1], tokens[2, :1])
    copies = tokens[1, torch.arange(10) % 4]
    if mode == "zeros":
        assert not padded[1, 4:].any() and not padded[2, 1:].any()
    else:
        # one token has no spread to be noisy with
        torch.testing.assert_close(padded[2], tokens[2, :1].expand(10, -1))
        assert torch.equal(padded[1], copies) == (mode == "replicate")


def test_the_noise_of_padding_has_the_strength_of_the_formula():
    total, real, width = 4000, 40, 8
    tokens = torch.randn(1, total, width, generator=generator()) * torch.arange(1.0, width + 1)
    lengths = torch.tensor([real])
    copies, exact = pad_text(tokens, lengths, "replicate", 0.05), pad_text(tokens, lengths, "noisy_replicate", 0.0)
    torch.testing.assert_close(exact, copies)
    noisy = partial(pad_text, lengths=lengths, mode="noisy_replicate", noise=0.05)
    measured = (noisy(tokens, generator=generator(1)) - copies)[:, real:].std(dim=1)
    expected = 0.05 * (total / real - 1) ** 0.5 * tokens[:, :real].std(dim=1, correction=0)
    torch.testing.assert_close(measured, expected, rtol=0.06, atol=0)
    assert not torch.equal(noisy(tokens), noisy(tokens))
    padded = noisy(tokens.bfloat16(), generator=generator(1))
    assert padded.dtype == torch.bfloat16 and torch.equal(padded[:, :real], tokens.bfloat16()[:, :real])


def test_half_precision_keeps_the_latents_in_full():
    half, whole = make_pipeline().to(torch.bfloat16), make_pipeline()
    options = {"class_labels": 1, "latents": start(whole, 1), "guidance_scale": 1.0, **FEW}
    images, full = half(**options).images, whole(**options).images
    assert images.dtype == torch.float32
    assert 0 < (images - full).norm() < 0.1 * full.norm()


def test_lora_layers_are_saved_loaded_and_switched_off(tmp_path):
    pipeline, other = make_pipeline(), make_pipeline()
    options = {"class_labels": 1, "latents": start(pipeline, 1), **FEW}
    before = pipeline(**options).images
    layers = ["to_q", "to_k", "to_v", "to_out.0"]
    pipeline.transformer.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=layers, init_lora_weights=False))
    adapted = pipeline(**options).images
    assert not torch.allclose(adapted, before, atol=1e-4)
    DisentangledDiTPipeline.save_lora_weights(tmp_path, get_peft_model_state_dict(pipeline.transformer))
    other.load_lora_weights(tmp_path, adapter_name="style")
    assert_same_answers(other(**options).images, adapted)
    torch.testing.assert_close(other(attention_kwargs={"scale": 0.0}, **options).images, before, rtol=1e-5, atol=1e-5)
    other.fuse_lora()
    torch.testing.assert_close(other(**options).images, adapted, rtol=1e-3, atol=1e-4)
    other.unfuse_lora()
    other.unload_lora_weights()
    torch.testing.assert_close(other(**options).images, before, rtol=1e-3, atol=1e-4)


OPTIONAL = ["vae", "text_encoder", "tokenizer"]
# Outputs of two copies of a network differ in the last bits, which the steps multiply.
NEAR = {"rtol": 1e-4, "atol": 1e-4}


def load(folder, **parts) -> DisentangledDiTPipeline:
    pipeline = DiffusionPipeline.from_pretrained(folder, **parts)
    assert isinstance(pipeline, DisentangledDiTPipeline)
    return pipeline_testing.quiet(pipeline)


def test_texts_are_encoded_first_and_pictures_made_later(tmp_path):
    """The pattern by which diffusers' users keep text encoder and transformer out of memory together."""
    whole = make_text_pipeline()
    whole.save_pretrained(tmp_path)
    options = {"num_images_per_prompt": 2, "guidance_scale": 3.0, **FEW}
    texts = {"prompt": ["a red hen", "green fish"], "negative_prompt": "a fish"}
    expected = whole(**texts, generator=generator(), **options).images

    encoding = load(tmp_path, transformer=None, scheduler=None)
    assert encoding.transformer is None and encoding.scheduler is None
    with torch.no_grad():
        embeds, negative = encoding.encode_prompt(**texts)
    assert embeds.shape == negative.shape == (2, 9, 8)
    with pytest.raises(ValueError, match="There is no transformer and no scheduler; load the pipeline with it"):
        encoding(prompt="a hen", **FEW)

    making = load(tmp_path, text_encoder=None, tokenizer=None)
    given = {"prompt_embeds": embeds, "negative_prompt_embeds": negative}
    torch.testing.assert_close(making(**given, generator=generator(), **options).images, expected, **NEAR)
    with pytest.raises(ValueError, match="give prompt_embeds and, with guidance, negative_prompt_embeds"):
        making(prompt_embeds=embeds, **options)
    making(prompt_embeds=embeds, **{**options, "guidance_scale": 1.0})


def test_a_scheduler_may_come_later(tmp_path):
    whole = make_pipeline()
    whole.save_pretrained(tmp_path)
    later = load(tmp_path, scheduler=None)
    assert later.config.prediction_type == "epsilon"
    with pytest.raises(ValueError, match="There is no scheduler; load the pipeline with it"):
        later(class_labels=1, **FEW)
    later.scheduler = FlowMatchEulerDiscreteScheduler()
    with pytest.raises(ValueError, match="flow_prediction, and this network predicts epsilon"):
        later(class_labels=1, **FEW)
    later.scheduler = DDIMScheduler.from_config(whole.scheduler.config)
    expected = whole(class_labels=1, generator=generator(), **FEW).images
    torch.testing.assert_close(later(class_labels=1, generator=generator(), **FEW).images, expected, **NEAR)


def test_optional_parts_that_are_taken_away_stay_away_when_saved(tmp_path):
    pipeline = make_pipeline(vae=make_vae())
    for name in OPTIONAL:
        setattr(pipeline, name, None)
    options = {"class_labels": 1, **FEW}
    images = pipeline(generator=generator(), **options).images
    pipeline.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert all(getattr(loaded, name) is None for name in OPTIONAL)
    torch.testing.assert_close(loaded(generator=generator(), **options).images, images, **NEAR)


def test_another_autoencoder_brings_its_own_size_and_colours():
    pipeline = make_pipeline(vae=make_vae())
    options = {"class_labels": 1, "num_inference_steps": 2, "output_type": "pt"}
    assert pipeline(height=16, width=8, **options).images.shape == (1, 3, 16, 8)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 3, "up_block_types": ["UpDecoderBlock2D"] * 3}
    sizes = {"block_out_channels": [4, 4, 4], "norm_num_groups": 2, "in_channels": 1, "out_channels": 1}
    pipeline.vae = AutoencoderKL(**blocks, **sizes, latent_channels=4).eval()
    assert pipeline.vae_scale_factor == 4
    assert pipeline(height=16, width=8, **options).images.shape == (1, 1, 16, 8)
    # pictures to start from become grey like the autoencoder's
    picture = pipeline.image_processor.numpy_to_pil(np.full((1, 16, 8, 3), 0.5))[0]
    assert from_picture(pipeline)(image=picture, height=16, width=8, **options).images.shape == (1, 1, 16, 8)
    pipeline.vae = make_vae()
    images = from_picture(pipeline)(image=picture.convert("L"), height=16, width=8, **options).images
    assert images.shape == (1, 3, 16, 8)
    pipeline.vae = None
    assert pipeline.vae_scale_factor == 1
    assert pipeline(height=16, width=8, **{**options, "output_type": "latent"}).images.shape == (1, 4, 16, 8)


# What a call means, and the same as other libraries write it; of two pictures.
PLAIN = {"class_labels": [1, 2], "negative_class_labels": [3, 4], "original_size": [(12, 20), (6, 10)], "crop": (1, 2)}
PLAIN |= {"target_size": (6, 10), "flip": [True, False], "height": 6, "width": 10, "num_inference_steps": 3}
SAME = {
    "NumPy": {name: np.asarray(value)[()] for name, value in PLAIN.items()},
    "torch": {name: torch.tensor(value) for name, value in PLAIN.items()},
    "mixed": {
        "class_labels": ["goldfish", torch.tensor(2)],
        "negative_class_labels": (np.str_("ostrich"), "brambling"),
        "original_size": ([12, 20], np.array([6, 10])),
        "crop": [torch.tensor(1), np.int8(2)],
        "target_size": [6, 10],
        "flip": (np.bool_(True), 0),
        "num_images_per_prompt": np.int64(1),
    },
}


@pytest.mark.parametrize("form", SAME)
def test_numbers_come_in_every_form(form):
    pipeline = make_pipeline()
    options = {"latents": start(pipeline, 2), "output_type": "latent"}
    expected = pipeline(**PLAIN, **options).images
    torch.testing.assert_close(pipeline(**{**PLAIN, **SAME[form]}, **options).images, expected, **NEAR)
    assert SAME[form].keys() <= PLAIN.keys() | {"num_images_per_prompt"}
    for name in ("original_size", "crop", "flip"):
        without = {key: value for key, value in PLAIN.items() if key != name}
        assert not torch.allclose(pipeline(**without, **options).images, expected, atol=1e-3), name
