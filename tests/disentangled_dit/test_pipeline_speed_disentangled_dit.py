"""diffusers' means to make a pipeline faster or smaller: caches, offloading, one upload."""

from pathlib import Path

import pytest
import torch
from accelerate.hooks import CpuOffload
from diffusers import MagCacheConfig, PyramidAttentionBroadcastConfig, TaylorSeerCacheConfig
from huggingface_hub import HfApi, close_session

from hf_ext.pipelines import DisentangledDiTPipeline
from tests.disentangled_dit.dit_testing import generator, make_transformer
from tests.disentangled_dit.pipeline_testing import make_pipeline, make_text_pipeline, make_vae, quiet, record
from tests.kit.models import assert_same_answers

STEPS = 8


def pyramid(pipeline: DisentangledDiTPipeline, last: int):
    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, last),
        current_timestep_callback=lambda: pipeline.current_timestep,
    )


# Made so that a cache leaves out nothing, and so that it leaves out what it can; steps that are left then.
CACHES = {
    "pyramid, in later steps": (lambda pipeline: pyramid(pipeline, -1), lambda pipeline: pyramid(pipeline, 500), 6),
    "taylor, lite": (
        lambda _: TaylorSeerCacheConfig(disable_cache_before_step=STEPS, use_lite_mode=True),
        lambda _: TaylorSeerCacheConfig(cache_interval=3, disable_cache_before_step=2, use_lite_mode=True),
        4,
    ),
    "magnitudes": (
        lambda _: MagCacheConfig(mag_ratios=[0.5] * STEPS, num_inference_steps=STEPS, threshold=0.0),
        lambda _: MagCacheConfig(mag_ratios=[1.0] * STEPS, num_inference_steps=STEPS),
        3,
    ),
}


def count_attention(pipeline: DisentangledDiTPipeline) -> list[int]:
    """Counts of each block's attention from now on."""
    counts = [0] * len(pipeline.transformer.transformer_blocks)

    def count(index: int) -> None:
        counts[index] += 1

    for index, block in enumerate(pipeline.transformer.transformer_blocks):
        block.attn.to_q.register_forward_hook(lambda *_, index=index: count(index))
    return counts


@pytest.mark.parametrize("fields", [{}, {"shared_stream": True, "modulation": "shared"}], ids=["streams", "shared"])
@pytest.mark.parametrize("guidance", [{}, {"control_guidance_scale": 2.0}], ids=["two branches", "three branches"])
@pytest.mark.parametrize("name", CACHES)
def test_caches_leave_out_steps(name, guidance, fields):
    pipeline = make_pipeline(**fields)
    exact, approximate, left = CACHES[name]
    options = {"class_labels": [1, 2], "num_inference_steps": STEPS, "output_type": "latent", **guidance}

    def sample():
        return pipeline(generator=generator(), **options).images

    expected = sample()
    pipeline.transformer.enable_cache(exact(pipeline))
    assert_same_answers(sample(), expected)
    pipeline.transformer.disable_cache()
    pipeline.transformer.enable_cache(approximate(pipeline))
    counts = count_attention(pipeline)
    found = sample()
    assert counts == [left] * 3 and found.isfinite().all() and not torch.equal(found, expected)
    # a call leaves nothing behind for the next one
    assert_same_answers(sample(), found)
    pipeline.transformer.disable_cache()
    assert_same_answers(sample(), expected)


def test_a_cache_forgets_where_other_branches_are_computed():
    """One picture: what one branch kept could be added to the tokens of two without an error."""
    pipeline = make_pipeline()
    pipeline.transformer.enable_cache(pyramid(pipeline, 1000))
    asked, attended = record(pipeline).images, []
    layer = pipeline.transformer.transformer_blocks[0].attn.to_q
    layer.register_forward_pre_hook(lambda _, inputs: attended.append((len(asked) - 1, len(inputs[0]))))

    def strengthen(pipe, step, timestep, tensors):
        pipe._control_guidance_scale = 2.0 if step >= 4 else 1.0
        return {}

    pipeline(class_labels=1, guidance_scale=1.0, num_inference_steps=12, callback_on_step_end=strengthen)
    # steps from the fifth on have a second branch
    assert asked == [1] * 5 + [2] * 7
    assert attended == [(step, asked[step]) for step in [*range(0, 5, 2), *range(5, 12, 2)]]


def test_whole_models_move_to_the_accelerator_in_the_order_of_their_use(monkeypatch):
    """The processor stands for the accelerator: hooks are called, and nothing needs to be moved."""
    parts = make_text_pipeline().components | {"vae": make_vae()}
    parts["transformer"] = make_transformer(num_classes=None, joint_attention_dim=8, in_channels=4)
    pipeline = quiet(DisentangledDiTPipeline(**parts, max_text_length=9))
    names = {id(part): name for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    options = {"prompt": "a red hen", "num_inference_steps": 2, "output_type": "pt"}
    expected = pipeline(generator=generator(), **options).images
    called, plain = [], CpuOffload.pre_forward

    def note(hook, module, *arguments, **inputs):
        called.append(names[id(module)])
        return plain(hook, module, *arguments, **inputs)

    monkeypatch.setattr(CpuOffload, "pre_forward", note)
    pipeline.enable_model_cpu_offload(device="cpu")
    for _ in range(2):
        called.clear()
        assert_same_answers(pipeline(generator=generator(), **options).images, expected)
        assert list(dict.fromkeys(called)) == pipeline.model_cpu_offload_seq.split("->")
        assert set(called) == set(names.values())


# Runs in its own process, whose Hub is the embedded one. Arguments: a saved pipeline.
PUSH = """
import sys
from hf_ext.pipelines import DisentangledDiTPipeline

pipeline = DisentangledDiTPipeline.from_pretrained(sys.argv[1])
for name in ("transformer", "vae"):
    part = getattr(pipeline, name)
    plain = part.save_pretrained
    part.save_pretrained = lambda *words, name=name, plain=plain, **more: (print("saved", name), plain(*words, **more))
pipeline.save_pretrained("pictures", push_to_hub=True, repo_id="me/pictures", commit_message="First")
"""


@pytest.mark.slow
def test_a_pipeline_that_is_saved_for_a_hub_is_saved_once(hub, run_client, tmp_path):
    pipeline = make_pipeline(vae=make_vae())
    pipeline.save_pretrained(tmp_path / "pipeline")
    printed = run_client(PUSH, str(tmp_path / "pipeline"))
    assert sorted(line for line in printed.splitlines() if "saved" in line) == ["saved transformer", "saved vae"]
    api = HfApi(endpoint=hub.url, token=False)
    assert [commit.title for commit in api.list_repo_commits("me/pictures")].count("First") == 1
    folder = Path(api.snapshot_download("me/pictures", local_dir=tmp_path / "hub"))
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    assert {"README.md", "model_index.json", "pipeline.py", "transformer/disentangled_dit.py"} < files
    again = DisentangledDiTPipeline.from_pretrained(folder)
    assert torch.equal(again.transformer.proj_out.weight, pipeline.transformer.proj_out.weight)
    close_session()
