"""Distillation to few steps: targets against the scheduler's own steps, a run that resumes, and refusals."""

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
from tests.disentangled_dit.dit_testing import generator, make_controls, make_transformer, shake
from tests.kit.own_data import write_pictures
from tests.kit.refusals import refused
from tests.kit.studies import EXAMPLES, module_loader

CLASSES = 3

load = module_loader(EXAMPLES / "disentangled_dit")


@pytest.fixture
def distill(load):
    return load("distill")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    network = make_transformer(sample_size=[8, 8], num_layers=2, attention_head_dim=12, num_classes=CLASSES)
    schedule = {"beta_schedule": "squaredcos_cap_v2", "prediction_type": "v_prediction"}
    scheduler = DDIMScheduler(**schedule, timestep_spacing="trailing", clip_sample=True)
    folder = tmp_path_factory.mktemp("teacher")
    DisentangledDiTPipeline(network, scheduler).save_pretrained(folder)
    return folder


def make(distill, teacher, **options):
    task = distill.DistillTask(image_size=8, objective="v_prediction", **options)
    return task, task.build_model({}, str(teacher))


def batch_of(count: int) -> dict:
    clean = torch.rand(count, 3, 8, 8, generator=generator()) * 2 - 1
    return {"pixels": clean, "label": torch.arange(count) % CLASSES, "controls": make_controls(count)}


@pytest.mark.parametrize("clip", [True, False])
def test_a_move_is_a_step_of_the_scheduler(distill, teacher, clip):
    task, _ = make(distill, teacher, steps=4, teacher_steps=40)
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
    task, student = make(distill, teacher, steps=2, teacher_steps=10, guidance=3.0)
    student.requires_grad_(False)
    shake(student)
    batch, place = batch_of(10), torch.arange(10)
    noisy = torch.randn(10, 3, 8, 8, generator=generator())
    found = task.target(student, noisy, place, batch)
    none = torch.zeros(1, dtype=torch.bool)
    for row in range(10):
        one = {name: value[row : row + 1] for name, value in batch.items() if name != "controls"}
        one["controls"] = {name: value[row : row + 1] for name, value in batch["controls"].items()}
        start, middle = row * 100 + 99, row * 100 - 1
        end = 499 if row >= 5 else -1
        given = task.teacher(noisy[row : row + 1], torch.tensor([start]), **task._conditions(one, none, none)).sample
        empty = task.teacher(noisy[row : row + 1], torch.tensor([start]), **task._conditions(one, ~none, ~none)).sample
        steps = torch.tensor([start]), torch.tensor([middle])
        reached = task.move(noisy[row : row + 1], empty + 3 * (given - empty), *steps)
        if middle != end:
            velocity = student(reached, torch.tensor([middle]), **task._conditions(one, none, none)).sample
            reached = task.move(reached, velocity, torch.tensor([middle]), torch.tensor([end]))
        angles = task.angle(torch.tensor([start])), task.angle(torch.tensor([end]))
        clean = angles[0].cos() * noisy[row] - angles[0].sin() * found[row]
        noise = angles[0].sin() * noisy[row] + angles[0].cos() * found[row]
        torch.testing.assert_close(angles[1].cos() * clean + angles[1].sin() * noise, reached, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder, [*"abc"], 4)
    return folder


def recipe(run: Path, teacher: Path, pictures: Path, **changes) -> dict:
    task = {"image_size": 8, "objective": "v_prediction", "steps": 2, "teacher_steps": 10, "samples_per_class": 1}
    schedule = {"max_steps": 4, "lr_scheduler_type": "constant", "warmup_steps": 0, "learning_rate": 1e-3}
    return {
        "method": "disentangled-dit",
        "output_dir": str(run),
        "init_from": str(teacher),
        "data": {"train": {"path": str(pictures), "split": "train"}},
        "task": {**task, "sample_steps": 2, "sample_guidance": 1.0},
        **schedule,
        "per_device_train_batch_size": 4,
        "save_steps": 2,
        "eval_steps": 4,
        "logging_steps": 1,
        "report_to": "none",
        **changes,
    }


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


@pytest.mark.parametrize(
    ("options", "named"),
    [({"steps": 3}, "teacher_steps"), ({"steps": 0}, "steps"), ({"objective": "epsilon"}, "epsilon")],
)
def test_what_cannot_be_distilled_is_refused(distill, options, named):
    with refused(SettingsError, named):
        build(distill.DistillTask, {"image_size": 8, "objective": "v_prediction", **options}, "task")


def test_a_teacher_is_needed(distill, teacher, pictures, tmp_path):
    settings = recipe(tmp_path / "run", teacher, pictures, init_from=None)
    with refused(UsageError, "init_from"):
        train(distill.DistillTask(**settings["task"]), TrainingArguments(**settings))
    with refused(UsageError, "teacher_steps"):
        make(distill, teacher, steps=7, teacher_steps=7)


def test_the_table_of_the_readme_is_what_was_measured():
    folder = EXAMPLES / "disentangled_dit"
    rows = json.loads((folder / "results" / "distill.json").read_text(encoding="utf-8"))
    text = (folder / "README.md").read_text(encoding="utf-8")
    for name, row in rows.items():
        numbers = f"{row['network_calls']} | {row['feature_distance']:.1f} | {100 * row['accuracy']:.1f}"
        assert f"| {name} | {numbers} |" in text
