"""Networks of diffusers behind our network's interface, and distillation of ours to few steps."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler, DiffusionPipeline

from hf_ext.errors import UsageError
from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline
from hf_ext.settings import SettingsError
from hf_ext.training import TrainingArguments, main, train
from hf_ext.training.arguments import build
from tests.disentangled_dit.dit_testing import generator, make_controls, make_inputs, make_transformer, shake
from tests.disentangled_dit.pipeline_testing import quiet, write_encoder
from tests.kit.models import assert_same_answers, assert_same_weights
from tests.kit.own_data import write_pictures
from tests.kit.refusals import refused
from tests.kit.studies import EXAMPLES, module_loader

FOLDER = EXAMPLES / "disentangled_dit"
load = module_loader(FOLDER)
peers, distill = (pytest.fixture(lambda load, name=name: load(name)) for name in ("peers", "distill"))
SIZES = {"sample_size": [8, 8], "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 12, "num_classes": 5}
ATTENDING = ["unet-cross", "pixart", "sd3"]
NAMES = [*ATTENDING, "dit"]


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
    assert not [key for key, value in peer.named_parameters() if value.grad is None]
    with torch.no_grad():
        assert_same_answers(peer(**given).sample, output)
        changes = {
            "class_labels": given["class_labels"] + torch.tensor([3, 0, 0]),
            "timestep": given["timestep"] + torch.tensor([1, 0, 0]),
            "controls": {key: value + torch.tensor([[3.0], [0], [0]]) for key, value in given["controls"].items()},
        }
        for key, value in changes.items():
            changed = (peer(**{**given, key: value}).sample - output).abs().amax((1, 2, 3))
            matters = key != "controls" or name in ATTENDING
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
    other = {"sample_size": [8, 16], "pos_embed_base_size": peer.config.pos_embed_base_size}
    made = peers.PEERS[name](**{**SIZES, **other})
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


@pytest.mark.parametrize("name", ATTENDING)
def test_a_peer_that_attends_draws_texts_and_so_does_its_snapshot(peers, name, tmp_path):
    task = peers.PeerTask(image_size=8, text_encoder=str(write_encoder(tmp_path / "encoder", 16)), max_text_length=5)
    torch.manual_seed(0)
    task.model_class = peers.PEERS[name]
    peer = task.build_model({"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 12}, None)
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
        assert pipeline.config.max_text_length == 5
        images.append(quiet(pipeline)(**call, generator=generator()).images)
    assert_same_answers(*images)


@pytest.mark.parametrize("name", NAMES)
def test_our_pipeline_samples_from_a_peer_and_its_snapshot(peers, name, tmp_path):
    peer, task = make(peers, name).eval(), peers.PeerTask(image_size=8)
    task.scheduler = DDIMScheduler(clip_sample=True)
    pipeline = quiet(DisentangledDiTPipeline(peer, task.scheduler))
    call = {"latents": torch.randn(2, 3, 8, 8, generator=generator()), "output_type": "pt"}
    call |= {"num_inference_steps": 2, "guidance_scale": 2.0}
    images, other = (pipeline(class_labels=labels, **call).images for labels in ([0, 4], [1, 4]))
    assert images.shape == (2, 3, 8, 8) and (images - other).abs().max() > 1e-3
    task.save_model(peer, peer.state_dict(), tmp_path)
    loaded = quiet(DiffusionPipeline.from_pretrained(tmp_path))
    assert_same_weights(loaded.transformer, peer)
    assert_same_answers(loaded(class_labels=[0, 4], **call).images, images)


def test_a_peer_refuses_what_it_cannot_do(peers):
    for name, message, fields in (
        ("dit", "DiTPeer takes classes only", {"num_classes": None, "joint_attention_dim": 4}),
        ("sd3", "not both or neither", {"joint_attention_dim": 4}),
        ("pixart", "divisible by 3, got 64", {"attention_head_dim": 16}),
    ):
        with pytest.raises(ValueError, match=message):
            peers.PEERS[name](**{**SIZES, **fields})


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    network = make_transformer(sample_size=[8, 8], num_layers=2, attention_head_dim=12, num_classes=3)
    schedule = {"beta_schedule": "squaredcos_cap_v2", "prediction_type": "v_prediction"}
    scheduler = DDIMScheduler(**schedule, timestep_spacing="trailing", clip_sample=True)
    folder = tmp_path_factory.mktemp("teacher")
    DisentangledDiTPipeline(network, scheduler).save_pretrained(folder)
    return folder


def make_task(distill, teacher, **options):
    task = distill.DistillTask(image_size=8, objective="v_prediction", **options)
    return task, task.build_model({}, str(teacher))


def batch_of(count: int) -> dict:
    clean = torch.rand(count, 3, 8, 8, generator=generator()) * 2 - 1
    return {"pixels": clean, "label": torch.arange(count) % 3, "controls": make_controls(count)}


@pytest.mark.parametrize("clip", [True, False])
def test_a_move_is_a_step_of_the_scheduler(distill, teacher, clip):
    task, _ = make_task(distill, teacher, steps=4, teacher_steps=40)
    task.scheduler.register_to_config(clip_sample=clip)
    samples, velocity = torch.randn(2, 4, 3, 8, 8, generator=generator()).unbind()
    for steps in (4, 40):
        task.scheduler.set_timesteps(steps)
        for start in task.scheduler.timesteps:
            expected = task.scheduler.step(velocity, start, samples).prev_sample
            places = start.repeat(4)
            found = task.move(samples, velocity, places, places - 1000 // steps)
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)


def test_the_target_leads_where_the_steps_lead(distill, teacher):
    """One teacher's step with guidance and one of the student, by the scheduler; then the student's step by v."""
    task, student = make_task(distill, teacher, steps=2, teacher_steps=10, guidance=3.0)
    student.requires_grad_(False)
    shake(student)
    batch, place = batch_of(10), torch.arange(10)
    noisy = torch.randn(10, 3, 8, 8, generator=generator())
    found = task.target(student, noisy, place, batch)
    none = torch.zeros(1, dtype=torch.bool)
    for row in range(10):
        one = {name: value[[row]] for name, value in batch.items() if name != "controls"}
        one["controls"] = {name: value[[row]] for name, value in batch["controls"].items()}
        start, middle, end = torch.tensor([[row * 100 + 99], [row * 100 - 1], [499 if row >= 5 else -1]])
        given, empty = (
            task.teacher(noisy[[row]], start, **task._conditions(one, left_out, left_out)).sample
            for left_out in (none, ~none)
        )
        reached = task.move(noisy[[row]], empty + 3 * (given - empty), start, middle)
        if middle != end:
            velocity = student(reached, middle, **task._conditions(one, none, none)).sample
            reached = task.move(reached, velocity, middle, end)
        before, after = task.angle(start), task.angle(end)
        clean = before.cos() * noisy[row] - before.sin() * found[row]
        noise = before.sin() * noisy[row] + before.cos() * found[row]
        torch.testing.assert_close(after.cos() * clean + after.sin() * noise, reached, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder, [*"abc"], 4)
    return folder


def recipe(run: Path, teacher: Path, pictures: Path, **changes) -> dict:
    task = {"image_size": 8, "objective": "v_prediction", "steps": 2, "teacher_steps": 10, "samples_per_class": 1}
    task |= {"sample_steps": 2, "sample_guidance": 1.0}
    told = {"method": "disentangled-dit", "output_dir": str(run), "init_from": str(teacher), "report_to": "none"}
    told |= {"data": {"train": {"path": str(pictures), "split": "train"}}, "task": task, "learning_rate": 1e-3}
    told |= {"max_steps": 4, "lr_scheduler_type": "constant", "warmup_steps": 0, "per_device_train_batch_size": 4}
    return {**told, "save_steps": 2, "eval_steps": 4, "logging_steps": 1, **changes}


def test_a_run_ends_in_a_pipeline_and_goes_on_bit_by_bit(distill, teacher, pictures, tmp_path):
    whole, parts = (recipe(tmp_path / name, teacher, pictures) for name in ("whole", "parts"))
    for settings, lengths in ((whole, [4]), (parts, [2, 4])):
        file = Path(settings["output_dir"]).with_suffix(".yaml")
        file.write_text(json.dumps(settings))
        for steps in lengths:
            assert main([str(file), f"--max_steps={steps}"], distill.make_task) in (None, 0)
    models = [DiffusionPipeline.from_pretrained(f"{one['output_dir']}/snapshot") for one in (whole, parts)]
    for one, other in zip(*(model.transformer.state_dict().values() for model in models), strict=True):
        assert torch.equal(one, other)
    drawn = models[0](class_labels=[0, 1], num_inference_steps=2, guidance_scale=1.0, output_type="np").images
    assert drawn.shape == (2, 8, 8, 3)


def test_what_cannot_be_distilled_is_refused(distill, teacher, pictures, tmp_path):
    for name, value, named in (
        ("steps", 3, "teacher_steps"),
        ("steps", 0, "steps"),
        ("teacher_steps", 0, "teacher_steps"),
        ("teacher_steps", -4, "teacher_steps"),
        ("guidance", float("nan"), "guidance"),
        ("objective", "epsilon", "epsilon"),
    ):
        with refused(SettingsError, named):
            build(distill.DistillTask, {"image_size": 8, "objective": "v_prediction", name: value}, "task")
    settings = recipe(tmp_path / "run", teacher, pictures, init_from=None)
    with refused(UsageError, "init_from"):
        train(distill.DistillTask(**settings["task"]), TrainingArguments(**settings))
    with refused(UsageError, "teacher_steps"):
        make_task(distill, teacher, steps=7, teacher_steps=7)


def test_the_table_of_the_readme_is_what_was_measured():
    rows = json.loads((FOLDER / "results" / "distill.json").read_text(encoding="utf-8"))
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name, row in rows.items():
        numbers = f"{row['network_calls']} | {row['feature_distance']:.1f} | {100 * row['accuracy']:.1f}"
        assert f"| {name} | {numbers} |" in text
