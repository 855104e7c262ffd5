"""The pipeline as modular blocks: from a folder, whole or in parts, the pictures are the pipeline's."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler

from hf_ext.pipelines.disentangled_dit.blocks import (
    DisentangledDiTBlocks,
    DisentangledDiTDecodeStep,
    DisentangledDiTDenoiseStep,
    DisentangledDiTTextEncoderStep,
)
from tests.disentangled_dit.dit_testing import generator
from tests.disentangled_dit.pipeline_testing import make_pipeline, make_text_pipeline, make_vae

NEAR = {"rtol": 1e-4, "atol": 1e-4}
CASES = {
    "pixels": (make_pipeline, {"class_labels": ["hen", 3], "crop": (1, 2), "control_guidance_scale": 1.5}),
    "latents": (lambda: make_pipeline(vae=make_vae()), {"class_labels": [1], "num_images_per_prompt": 2}),
    "texts": (make_text_pipeline, {"prompt": ["a red hen", "green fish"], "negative_prompt": "a fish"}),
    "tokens, no guidance": (make_text_pipeline, {"prompt": "a hen", "guidance_scale": 1.0}),
}


def load(blocks, folder):
    pipeline = blocks.init_pipeline(str(folder))
    pipeline.load_components()
    return pipeline


@pytest.mark.parametrize("case", CASES)
def test_blocks_draw_what_the_pipeline_draws(case, tmp_path):
    make, given = CASES[case]
    make().save_pretrained(tmp_path)
    options = {**given, "num_inference_steps": 3, "output_type": "np"}
    modular = load(DisentangledDiTBlocks(), tmp_path)
    pictures = modular(**options, generator=generator(), output="images")
    np.testing.assert_allclose(pictures, make()(**options, generator=generator()).images, **NEAR)


def test_blocks_run_apart_with_their_own_components(tmp_path):
    whole = make_text_pipeline()
    whole.save_pretrained(tmp_path)
    expected = whole(prompt="a red hen", num_inference_steps=3, generator=generator(), output_type="np").images
    texts = load(DisentangledDiTTextEncoderStep(), tmp_path)
    assert set(texts.components) == {"text_encoder", "tokenizer"}
    state = texts(prompt="a red hen")
    network = load(DisentangledDiTDenoiseStep(), tmp_path)
    assert set(network.components) == {"transformer", "scheduler", "vae"}
    tokens = {name: state.get(name) for name in ("prompt_embeds", "negative_prompt_embeds")}
    latents = network(**tokens, num_inference_steps=3, generator=generator(), output="latents")
    found = load(DisentangledDiTDecodeStep(), tmp_path)(latents=latents, output_type="np", output="images")
    np.testing.assert_allclose(found, expected, **NEAR)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_tokens_are_guided_away_from_the_null_text(scale, tmp_path):
    pipeline = make_text_pipeline()
    pipeline.save_pretrained(tmp_path)
    tokens, null = pipeline.encode_prompt("a red hen")
    options = {"prompt_embeds": tokens, "guidance_scale": scale, "num_inference_steps": 3, "output_type": "np"}
    expected = pipeline(**options, generator=generator()).images
    found = load(DisentangledDiTBlocks(), tmp_path)(**options, generator=generator(), output="images")
    np.testing.assert_allclose(found, expected, **NEAR)
    # Without a text encoder that is for the other blocks, the tokens of both are needed.
    given = load(DisentangledDiTBlocks(), tmp_path)
    given.update_components(text_encoder=None)
    found = given(**options, negative_prompt_embeds=null, generator=generator(), output="images")
    np.testing.assert_allclose(found, expected, **NEAR)


def test_components_are_replaced_and_blocks_put_between(tmp_path):
    make_pipeline().save_pretrained(tmp_path)
    blocks = DisentangledDiTBlocks()
    del blocks.sub_blocks["text_encoder"], blocks.sub_blocks["decode"]
    network = load(blocks, tmp_path)
    network.update_components(scheduler=DDPMScheduler())
    options = {"class_labels": 2, "num_inference_steps": 4}
    found = network(**options, generator=generator(), output="latents")
    other = make_pipeline(scheduler=DDPMScheduler())
    expected = other(**options, generator=generator(), output_type="latent").images
    torch.testing.assert_close(found, expected, **NEAR)


def test_errors_are_the_pipelines_own(tmp_path, caplog):
    make_pipeline().save_pretrained(tmp_path)
    modular = load(DisentangledDiTBlocks(), tmp_path)
    with pytest.raises(ValueError, match="There is no class 'dog'"):
        modular(class_labels="dog")
    with pytest.raises(ValueError, match="This is a class model: give class_labels"):
        modular()


@pytest.mark.slow
def test_the_blocks_do_not_load_with_the_package():
    code = "import sys, hf_ext.pipelines; sys.exit('diffusers.modular_pipelines.modular_pipeline' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
