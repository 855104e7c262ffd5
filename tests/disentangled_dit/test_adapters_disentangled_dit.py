"""Attachments of diffusers to a model: adapters, attention backends, caches, checkpointing, casting, compilation."""

import shutil

import accelerate
import pytest
import torch
from diffusers import FirstBlockCacheConfig
from diffusers.hooks import apply_group_offloading
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from peft import LoraConfig

from hf_ext.pipelines.disentangled_dit.transformer_disentangled_dit import DisentangledDiTTransformer2DModel
from tests.disentangled_dit.dit_testing import make_inputs, make_transformer
from tests.kit.models import assert_same_answers

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]


def predict(model, **inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(**(inputs or make_inputs(model))).sample


def gradients(model) -> list[torch.Tensor]:
    model.zero_grad()
    model(**make_inputs(model)).sample.square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def with_lora(**fields) -> DisentangledDiTTransformer2DModel:
    model = make_transformer(**fields)
    model.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=TARGETS, init_lora_weights=False))
    return model


def test_lora_is_added_disabled_and_trained_alone():
    base = predict(make_transformer())
    model = with_lora()
    adapted = predict(model)
    # Three blocks of eight layers, but for the two that the last one lacks.
    assert sum(name.endswith("lora_A.default.weight") for name, _ in model.named_parameters()) == 3 * 8 - 2
    assert (adapted - base).abs().max() > 1e-3
    model.disable_lora()
    torch.testing.assert_close(predict(model), base, atol=1e-5, rtol=0)
    model.enable_lora()
    torch.testing.assert_close(predict(model), adapted, atol=1e-5, rtol=0)
    model(**make_inputs(model)).sample.sum().backward()
    assert {"lora" in name for name, parameter in model.named_parameters() if parameter.grad is not None} == {True}


# Layers of each kind that a LoRA may adapt; peft's `scale_layer` passes over that of an embedding.
KINDS = ["patch_embed", "timestep_embedder.linear_1", "control_embedders.crop.linear_2", "class_embedder",
         "transformer_blocks.0.ff.net.2", "modulations.0", "proj_out"]  # fmt: skip


@pytest.mark.parametrize("target", KINDS)
def test_a_lora_of_any_layer_is_scaled_by_its_weight_and_by_scales_of_calls(target):
    base = predict(make_transformer())
    model = make_transformer()
    model.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=[target], init_lora_weights=False))
    inputs, adapted = make_inputs(model), predict(model)
    assert (adapted - base).abs().max() > 1e-3
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
    with torch.no_grad():
        context, modulation = model(
            **{name: value for name, value in inputs.items() if name != "hidden_states"}, return_conditioning=True
        )
        found = model(inputs["hidden_states"], context=context, modulation=modulation).sample
    assert_same_answers(found, expected)


def test_sequential_offloading():
    """As `enable_sequential_cpu_offload`, which itself refuses to run without an accelerator."""
    model = make_transformer(modulation="shared")
    inputs = make_inputs(model)
    expected = predict(model, **inputs)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    # a parameter of the model itself, not of one of its layers
    assert model.modulation_table.device.type == "meta"
    assert_same_answers(predict(model, **inputs), expected)
