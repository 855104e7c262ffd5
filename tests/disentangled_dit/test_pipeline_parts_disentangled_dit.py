"""Pipelines with parts left out or changed, and numbers as NumPy, torch, JSON and YAML give them.

The first tests do what `test_encode_prompt_works_in_isolation` and `test_save_load_optional_components` of diffusers'
own PipelineTesterMixin do, which is in no distribution that could be downloaded.
"""

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiffusionPipeline, FlowMatchEulerDiscreteScheduler

from hf_ext.pipelines import DisentangledDiTPipeline
from tests.disentangled_dit.dit_testing import generator
from tests.disentangled_dit.pipeline_testing import (
    from_picture,
    make_pipeline,
    make_text_pipeline,
    make_vae,
    quiet,
    start,
)

OPTIONAL = ["vae", "text_encoder", "tokenizer"]
FEW = {"num_inference_steps": 3, "output_type": "latent"}
# Outputs of two copies of a network differ in the last bits, which the steps multiply.
NEAR = {"rtol": 1e-4, "atol": 1e-4}


def load(folder, **parts) -> DisentangledDiTPipeline:
    pipeline = DiffusionPipeline.from_pretrained(folder, **parts)
    assert isinstance(pipeline, DisentangledDiTPipeline)
    return quiet(pipeline)


# Parts


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
    images = making(**given, generator=generator(), **options).images
    torch.testing.assert_close(images, expected, **NEAR)
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


# Numbers

# What a call means, and the same as other libraries write it; of two pictures.
PLAIN = {
    "class_labels": [1, 2],
    "negative_class_labels": [3, 4],
    "original_size": [(12, 20), (6, 10)],
    "crop": (1, 2),
    "target_size": (6, 10),
    "flip": [True, False],
    "height": 6,
    "width": 10,
    "num_inference_steps": 3,
}
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
