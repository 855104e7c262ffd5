"""Attachments of diffusers to a model and its pipeline: adapters, attention backends, caches, offloading, uploads."""

import shutil
from pathlib import Path

import accelerate
import pytest
import torch
from accelerate.hooks import CpuOffload
from diffusers import FirstBlockCacheConfig, MagCacheConfig, PyramidAttentionBroadcastConfig, TaylorSeerCacheConfig
from diffusers.hooks import apply_group_offloading
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from huggingface_hub import HfApi, close_session
from peft import LoraConfig

from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline
from tests.disentangled_dit.dit_testing import generator, make_inputs, make_transformer
from tests.disentangled_dit.pipeline_testing import make_pipeline, make_text_pipeline, make_vae, quiet, record
from tests.kit.models import assert_same_answers

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]


def predict(model, **inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(**(inputs or make_inputs(model))).sample


def gradients(model) -> list[torch.Tensor]:
    model.zero_grad()
    model(**make_inputs(model)).sample.square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


# Layers of each kind that a LoRA may adapt; peft's `scale_layer` passes over that of an embedding.
KINDS = ["patch_embed", "timestep_embedder.linear_1", "control_embedders.crop.linear_2", "class_embedder",
         "transformer_blocks.0.ff.net.2", "modulations.0", "proj_out"]  # fmt: skip


@pytest.mark.parametrize("targets", [*([kind] for kind in KINDS), ATTENTION])
def test_a_lora_of_any_layer_is_switched_trained_alone_and_scaled_by_its_weight_and_by_calls(targets):
    base, model = predict(make_transformer()), make_transformer()
    model.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=targets, init_lora_weights=False))
    inputs, adapted = make_inputs(model), predict(model)
    assert (adapted - base).abs().max() > 1e-3
    # In attention three blocks of eight layers, but for the two that the last one lacks.
    layers = sum(".lora_A." in name or "lora_embedding_A" in name for name, _ in model.named_parameters())
    assert layers == (3 * 8 - 2 if targets is ATTENTION else 1)
    for switch, expected in ((model.disable_lora, base), (model.enable_lora, adapted)):
        switch()
        torch.testing.assert_close(predict(model), expected, atol=1e-5, rtol=0)
    model(**inputs).sample.sum().backward()
    assert {"lora" in name for name, parameter in model.named_parameters() if parameter.grad is not None} == {True}
    model.set_adapters("default", 0.5)
    half = predict(model)
    assert (half - base).abs().max() > 1e-4 and (half - adapted).abs().max() > 1e-4
    # A call's scale multiplies the weight, which is afterwards what it was.
    for scale, expected in ((0.0, base), (2.0, adapted), (1.0, half)):
        torch.testing.assert_close(predict(model, attention_kwargs={"scale": scale}, **inputs), expected)
        assert torch.equal(predict(model), half)
    for wrong in ({"scale": float("nan")}, {"scale": 1.0, "ip_adapter_masks": None}):
        with pytest.raises(ValueError, match="scale"):
            predict(model, attention_kwargs=wrong, **inputs)
    model.fuse_lora(lora_scale=2.0)
    with pytest.warns(UserWarning, match="already merged"):
        model.fuse_lora(lora_scale=2.0)
    torch.testing.assert_close(predict(model), adapted, atol=1e-4, rtol=1e-4)
    model.unfuse_lora()
    model.disable_lora()
    torch.testing.assert_close(predict(model), base, atol=1e-4, rtol=1e-4)


def test_gradient_checkpointing_changes_no_gradient_and_runs_blocks_again():
    model = make_transformer().train()
    calls = []
    for block in model.transformer_blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    expected = gradients(model)
    assert len(calls) == 3
    model.enable_gradient_checkpointing()
    assert model.is_gradient_checkpointing
    for found, wanted in zip(gradients(model), expected, strict=True):
        assert_same_answers(found, wanted)
    assert len(calls) == 3 + 2 * 3


@pytest.mark.parametrize("backend", ["native", "_native_math"])
def test_attention_backend_is_set_and_used(backend):
    model = make_transformer()
    expected = predict(model)
    # diffusers sets it for all models that follow, and puts it back only after `with`.
    with attention_backend("native"):
        model.set_attention_backend(backend)
        processors = model.attn_processors
        assert len(processors) == 3
        assert {processor._attention_backend for processor in processors.values()} == {AttentionBackendName(backend)}
        torch.testing.assert_close(predict(model), expected, atol=1e-5, rtol=1e-5)
        model.reset_attention_backend()
    with attention_backend(backend):
        torch.testing.assert_close(predict(model), expected, atol=1e-5, rtol=1e-5)


def test_first_block_cache():
    model = make_transformer()
    inputs = make_inputs(model)
    steps = [{**inputs, "timestep": torch.tensor([t, t])} for t in (600.0, 590.0, 580.0)]
    expected = [predict(model, **step) for step in steps]
    for threshold, equal in ((0.0, True), (1e3, False)):
        model.enable_cache(FirstBlockCacheConfig(threshold=threshold))
        with model.cache_context("cond"):
            found = [predict(model, **step) for step in steps]
        model.disable_cache()
        # The first step computes everything; later ones leave out blocks if the threshold lets them.
        assert_same_answers(found[0], expected[0])
        assert torch.allclose(found[2], expected[2], rtol=0, atol=1e-4) is equal
    assert_same_answers(predict(model, **steps[2]), expected[2])


def test_layerwise_casting_stores_blocks_in_8_bits():
    model = make_transformer()
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    found = predict(model)
    stored = model.state_dict()
    small = {name for name, value in stored.items() if value.dtype == torch.float8_e4m3fn}
    assert "transformer_blocks.0.attn.to_q.weight" in small
    assert "transformer_blocks.1.ff_context.net.0.proj.weight" in small
    # What is sensitive or tiny stays as it was.
    assert not any("norm" in name or "modulation" in name or "patch_embed" in name for name in small)
    expected = make_transformer()
    expected.load_state_dict({name: value.float() for name, value in stored.items()})
    assert_same_answers(found, predict(expected))
    # Nothing has an image to take its precision from here.
    assert model(timestep=5, return_conditioning=True)[1].dtype == torch.float32


# Dynamo looks at the gradient of tensors that it meets.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="inductor needs a compiler")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_repeated_blocks_compile_as_one_graph_for_all_timesteps(backend):
    model = make_transformer(num_layers=2)
    inputs = make_inputs(model)
    other = {**inputs, "timestep": torch.tensor([5.0, 7.0])}
    expected, later, training = predict(model), predict(model, **other), gradients(model)
    near = 1e-6 if backend == "eager" else 1e-5
    torch.compiler.reset()
    model.compile_repeated_blocks(backend=backend, fullgraph=True)
    torch.testing.assert_close(predict(model), expected, atol=near, rtol=near)
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(predict(model, **other), later, atol=near, rtol=near)
    if backend == "eager":
        torch.testing.assert_close(gradients(model), training, atol=1e-5, rtol=1e-5)
    torch.compiler.reset()


@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_group_offloading_to_disk(kind, tmp_path):
    """The processor stands for the accelerator: between calls the weights lie in files only."""
    model = make_transformer(modulation="shared")
    inputs = make_inputs(model)
    expected = predict(model)
    blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    apply_group_offloading(model, torch.device("cpu"), offload_type=kind, offload_to_disk_path=str(tmp_path), **blocks)
    assert_same_answers(predict(model), expected)
    latents = inputs.pop("hidden_states")
    with torch.no_grad():
        context, modulation = model(**inputs, return_conditioning=True)
        assert_same_answers(model(latents, context=context, modulation=modulation).sample, expected)


def test_sequential_offloading():
    """As `enable_sequential_cpu_offload`, which itself refuses to run without an accelerator."""
    model = make_transformer(modulation="shared")
    inputs = make_inputs(model)
    expected = predict(model, **inputs)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    # a parameter of the model itself, not of one of its layers
    assert model.modulation_table.device.type == "meta"
    assert_same_answers(predict(model, **inputs), expected)


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
        lambda _: TaylorSeerCacheConfig(cache_interval=3, disable_cache_before_step=2, use_lite_mode=True), 4),
    "magnitudes": (
        lambda _: MagCacheConfig(mag_ratios=[0.5] * STEPS, num_inference_steps=STEPS, threshold=0.0),
        lambda _: MagCacheConfig(mag_ratios=[1.0] * STEPS, num_inference_steps=STEPS), 3),
}  # fmt: skip


@pytest.mark.parametrize("fields", [{}, {"shared_stream": True, "modulation": "shared"}], ids=["streams", "shared"])
@pytest.mark.parametrize("guidance", [{}, {"control_guidance_scale": 2.0}], ids=["two branches", "three branches"])
@pytest.mark.parametrize("name", CACHES)
def test_caches_leave_out_steps(name, guidance, fields):
    pipeline = make_pipeline(**fields)
    exact, approximate, left = CACHES[name]
    options = {"class_labels": [1, 2], "num_inference_steps": STEPS, "output_type": "latent", **guidance}
    sample = lambda: pipeline(generator=generator(), **options).images  # noqa: E731
    expected = sample()
    pipeline.transformer.enable_cache(exact(pipeline))
    assert_same_answers(sample(), expected)
    pipeline.transformer.disable_cache()
    pipeline.transformer.enable_cache(approximate(pipeline))
    attended = []
    for index, block in enumerate(pipeline.transformer.transformer_blocks):
        block.attn.to_q.register_forward_hook(lambda *_, index=index: attended.append(index))
    found = sample()
    assert sorted(attended) == sorted([0, 1, 2] * left)
    assert found.isfinite().all() and not torch.equal(found, expected)
    # a call leaves nothing behind for the next one
    assert_same_answers(sample(), found)
    pipeline.transformer.disable_cache()
    assert_same_answers(sample(), expected)


def test_a_cache_forgets_where_other_branches_are_computed():
    """One picture: what one branch kept could be added to the tokens of two without an error."""
    pipeline = make_pipeline()
    pipeline.transformer.enable_cache(pyramid(pipeline, 1000))
    asked, attended, layer = record(pipeline).images, [], pipeline.transformer.transformer_blocks[0].attn.to_q
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
