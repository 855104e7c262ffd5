"""Networks of diffusers behind our network's interface: they train by the same task, and the class matters."""

import pytest
import torch
from diffusers import DDIMScheduler, DiffusionPipeline

from hf_ext.pipelines.disentangled_dit.pipeline import DisentangledDiTPipeline
from tests.disentangled_dit.dit_testing import generator, make_inputs, shake
from tests.disentangled_dit.pipeline_testing import write_encoder
from tests.kit.models import assert_same_answers, assert_same_weights
from tests.kit.studies import EXAMPLES, module_loader

load = module_loader(EXAMPLES / "disentangled_dit")
SIZES = {"sample_size": [8, 8], "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 12, "num_classes": 5}
NAMES = ["unet-cross", "dit", "pixart", "sd3"]
WITH_CONTROLS = {"unet-cross", "pixart", "sd3"}


@pytest.fixture
def peers(load):
    return load("peers")


def make(peers, name: str):
    torch.manual_seed(0)
    peer = peers.PEERS[name](**SIZES)
    shake(peer)
    return peer


@pytest.mark.parametrize("name", NAMES)
def test_forward_and_backward_and_what_the_output_depends_on(peers, name):
    # In training mode: nothing is dropped but by the task.
    peer = make(peers, name).train()
    given = make_inputs(peer, 3)
    output = peer(**given).sample
    assert output.shape == (3, 3, 8, 8)
    output.square().mean().backward()
    unused = [key for key, value in peer.named_parameters() if value.grad is None]
    assert not unused
    with torch.no_grad():
        assert_same_answers(peer(**given).sample, output)
        changes = {
            "class_labels": given["class_labels"] + torch.tensor([3, 0, 0]),
            "timestep": given["timestep"] + torch.tensor([1, 0, 0]),
            "controls": {key: value + torch.tensor([[3.0], [0], [0]]) for key, value in given["controls"].items()},
        }
        for key, value in changes.items():
            changed = (peer(**{**given, key: value}).sample - output).abs().amax((1, 2, 3))
            matters = key != "controls" or name in WITH_CONTROLS
            assert bool(changed[0] > 1e-5) == matters, key
            assert changed[1:].max() < 1e-5
        # A masked sample does not see its controls.
        other = {key: value + torch.tensor([[0.0], [3], [0]]) for key, value in given["controls"].items()}
        torch.testing.assert_close(peer(**{**given, "controls": other}).sample, output, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_peer_takes_any_rectangle_and_another_size_has_the_same_weights(peers, name):
    peer = make(peers, name).eval()
    small = make_inputs(peer, 3)
    wide = {**small, "hidden_states": torch.randn(3, 3, 8, 16, generator=generator())}
    made = peers.PEERS[name](
        **{**SIZES, "sample_size": [8, 16], "pos_embed_base_size": peer.config.pos_embed_base_size}
    )
    made.load_state_dict(peer.state_dict())
    with torch.no_grad():
        found = made.eval()(**wide).sample
        assert found.shape == (3, 3, 8, 16) and (found[..., :8] - found[..., 8:]).abs().amax() > 1e-5
        assert_same_answers(peer(**wide).sample, found)
        assert_same_answers(made(**small).sample, peer(**small).sample)
    if hasattr(peer.network, "pos_embed"):
        # Twice as many patches lie between the pre-training's places: every second one is one of these.
        positions = made.network.pos_embed.position_embedding
        torch.testing.assert_close(positions(4, 8).view(4, 8, -1)[:, ::2], positions(4, 4).view(4, 4, -1))


@pytest.mark.parametrize("name", ["unet-cross", "pixart", "sd3"])
def test_a_peer_that_attends_draws_texts_and_so_does_its_snapshot(peers, name, tmp_path):
    task = peers.PeerTask(image_size=8, text_encoder=str(write_encoder(tmp_path / "encoder", 16)), max_text_length=5)
    torch.manual_seed(0)
    task.model_class = peers.PEERS[name]
    peer = task.build_model(
        {key: SIZES[key] for key in ("num_layers", "num_attention_heads", "attention_head_dim")}, None
    )
    shake(peer)
    assert peer.config.num_classes is None and peer.config.joint_attention_dim == 16
    given = make_inputs(peer)
    tokens = given.pop("encoder_hidden_states")
    answers = [peer(**given, encoder_hidden_states=states).sample for states in (tokens, tokens.flip(1) + 1)]
    assert (answers[0] - answers[1]).abs().amax((1, 2, 3)).min() > 1e-5
    task.save_model(peer, peer.state_dict(), tmp_path / "snapshot")
    call = {"prompt": ["red", "blue"], "num_inference_steps": 2, "guidance_scale": 2.0, "output_type": "pt"}
    images = []
    for pipeline in (task.pipeline(peer.eval()), DiffusionPipeline.from_pretrained(tmp_path / "snapshot")):
        pipeline.set_progress_bar_config(disable=True)
        assert pipeline.config.max_text_length == 5
        images.append(pipeline(**call, generator=generator()).images)
    assert_same_answers(*images)


@pytest.mark.parametrize("name", NAMES)
def test_our_pipeline_samples_from_a_peer_and_its_snapshot(peers, name, tmp_path):
    peer = make(peers, name).eval()
    scheduler = DDIMScheduler(clip_sample=True)
    pipeline = DisentangledDiTPipeline(peer, scheduler, None, None, None)
    pipeline.set_progress_bar_config(disable=True)
    call = {"class_labels": [0, 4], "num_inference_steps": 2, "guidance_scale": 2.0, "output_type": "pt"}
    noise = torch.randn(2, 3, 8, 8, generator=generator())
    images = pipeline(**call, latents=noise).images
    assert images.shape == (2, 3, 8, 8)
    other = pipeline(**{**call, "class_labels": [1, 4]}, latents=noise).images
    assert (images - other).abs().max() > 1e-3

    task = peers.PeerTask(image_size=8)
    task.scheduler = scheduler
    task.save_model(peer, peer.state_dict(), tmp_path)
    loaded = DiffusionPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert_same_weights(loaded.transformer, peer)
    assert_same_answers(loaded(**call, latents=noise).images, images)


def test_a_peer_refuses_what_it_cannot_do(peers):
    with pytest.raises(ValueError, match="DiTPeer takes classes only"):
        peers.PEERS["dit"](**{**SIZES, "num_classes": None, "joint_attention_dim": 4})
    with pytest.raises(ValueError, match="not both or neither"):
        peers.PEERS["sd3"](**{**SIZES, "joint_attention_dim": 4})
    with pytest.raises(ValueError, match="divisible by 3, got 64"):
        peers.PEERS["pixart"](**{**SIZES, "attention_head_dim": 16})
