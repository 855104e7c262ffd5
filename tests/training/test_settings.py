"""Each setting of a run does what it says, and is told with the default that it really has; fp16 leaves steps out."""

import ast
import contextlib
import dataclasses
import json
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from click.testing import CliRunner
from safetensors.torch import load_file

from hf_ext.docstrings import read_entries
from hf_ext.settings import Section, SettingsError
from hf_ext.training import run as run_module
from hf_ext.training.arguments import (
    SCHEDULES,
    DataArguments,
    DataSource,
    SourcePart,
    TrainingArguments,
    apply_overrides,
    build,
)
from hf_ext.training.evaluation import public_arguments
from hf_ext.training.methods import TASKS, find_task, list_sections
from hf_ext.training.optimizing import build_optimizer, build_schedule
from hf_ext.training.run import make_accelerator
from hf_ext.training.state import RunFolder
from hf_ext_cli.main import main
from tests.kit.refusals import refused

from .launching import ROOT
from .tiny import TinyConfig, TinyModel, TinyTask, make_arguments, run


def rows(folder: Path, data: Path, **changes):
    """Rows of a run that logs each of its five steps, and its weights."""
    values = {"max_steps": 5, "logging_steps": 1, "save_steps": 5, "warmup_steps": 0, "ema_decay": 0.0, **changes}
    run(TinyTask(), make_arguments(folder, data, **values))
    return RunFolder(folder).read_metrics(), load_file(RunFolder(folder).state(5) / "model.safetensors")


def test_warm_up_and_decay(tmp_path, examples):
    found, _ = rows(tmp_path / "run", examples, warmup_steps=2, lr_scheduler_type="linear", learning_rate=0.06)
    # The rate that the next step uses.
    assert [row["learning_rate"] for row in found] == pytest.approx([0.03, 0.06, 0.04, 0.02, 0.0])


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_made(tmp_path, name):
    options = {"cosine_with_min_lr": {"min_lr_rate": 0.1}, "warmup_stable_decay": {"num_decay_steps": 2}}
    chosen = {"lr_scheduler_type": name, "lr_scheduler_kwargs": options.get(name, {}), "warmup_steps": 2}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = build_schedule(optimizer, make_arguments(tmp_path, {}, **chosen))
    rates = []
    for _ in range(7):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert min(rates) >= 0 and max(rates) <= 0.1
    # The floor, and the plateau before the last two steps.
    assert name != "cosine_with_min_lr" or schedule.get_last_lr()[0] == pytest.approx(0.01)
    assert name != "warmup_stable_decay" or rates[2:6] == [0.1] * 4 and rates[6] < 0.1


def test_gradients_are_clipped_and_decay_reaches_its_group_only(tmp_path, examples):
    plain, weights = rows(tmp_path / "plain", examples, weight_decay=0.0)
    free, unclipped = rows(tmp_path / "free", examples, weight_decay=0.0, max_grad_norm=0.0)
    assert max(row["gradient_norm"] for row in plain) > 1.0
    assert all("gradient_norm" not in row for row in free)
    assert not torch.equal(weights["enter.weight"], unclipped["enter.weight"])
    # One step without a gradient to speak of: only the decay moves weights.
    still = {"max_grad_norm": 1e-30, "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    _, kept = rows(tmp_path / "kept", examples, weight_decay=0.0, **still)
    _, decayed = rows(tmp_path / "decayed", examples, weight_decay=0.5, **still)
    torch.testing.assert_close(decayed["enter.weight"], kept["enter.weight"] * 0.95**5)
    # Biases start at zero and have no decay.
    assert decayed["enter.bias"].abs().max() < 1e-20


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_the_launch_configurations(path):
    assert load_config_from_file(str(path)).num_processes == 2 and path.read_text().startswith("# ")


def test_what_is_published_names_no_folder_of_this_machine(tmp_path):
    photos, vae, start = (str(tmp_path / name) for name in ("photos", "vae", "start"))
    for folder in (photos, vae, start):
        Path(folder).mkdir()
    data, task = {"path": [photos, "org/set"], "pairs": ["noisy", "clean"]}, {"text_column": "", "image_size": 8}
    task |= {"text_encoder": "org/encoder", "vae": vae}
    output = str(tmp_path / "run")
    arguments = TrainingArguments("disentangled-dit", output, {"train": data}, task=task, init_from=start)
    published = public_arguments(arguments)
    assert str(tmp_path) not in json.dumps(published)
    assert published["task"] == {**task, "vae": "vae"}
    assert published["init_from"] == "start"
    paths = [{"path": "photos"}, {"path": "org/set"}]
    assert published["data"]["train"] == {"path": paths, "pairs": ["noisy", "clean"]}
    assert arguments.task["vae"] == vae


@pytest.mark.parametrize(
    "kind",
    [*(TrainingArguments, DataArguments, DataSource, SourcePart), *(find_task(method) for method in TASKS)],
    ids=lambda kind: kind.__name__,
)
def test_every_field_is_told_with_its_type_and_default(kind):
    told = {name: entry for entry in read_entries(kind) for name in entry.names}
    for item in dataclasses.fields(kind):
        entry = told[item.name]
        assert len(entry.meaning) > 10
        default = item.default
        if isinstance(default, (bool, int, float, str)):
            written = re.search(r"defaults to `(.+?)`|defaults to ([\w.e-]+)", entry.kind)
            assert written, (item.name, entry.kind)
            assert ast.literal_eval(written[1] or written[2]) == default, item.name


def test_the_page_has_every_field_of_every_method():
    page = runpy.run_path(str(ROOT / "docs" / "options_reference.py"))["write_reference"]()
    for method in (None, *TASKS):
        for heading, entries in list_sections(method).values():
            assert f"## {heading}" in page
            assert all(f"- **{', '.join(entry.names)}**" in page for entry in entries)


def test_help_lists_the_fields_of_a_file_s_method():
    path = str(ROOT / "examples" / "semanir" / "denoise_color.yaml")
    for words in (["train", "--help", path], ["train", path, "--max_steps", "3", "--help"]):
        said = CliRunner().invoke(main, words)
        assert said.exit_code == 0
        for name in ("max_bad_examples: float, defaults to 0.001", "patch_size: int", "embed_dim: int", "sigma"):
            assert name in said.stdout
    said = CliRunner().invoke(main, ["train", "--help"]).stdout
    assert "learning_rate: float, defaults to 2e-4" in said and "patch_size" not in said
    assert CliRunner().invoke(main, ["train"]).exit_code == 2
    assert "task.degradation" in list_sections("semanir")


def make_scaling(arguments, folder):
    """An accelerator that scales losses as in fp16, which accelerate itself does on GPUs alone."""
    accelerator = make_accelerator(replace(arguments, mixed_precision="no"), folder)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    accelerator.native_amp = True
    accelerator.state._mixed_precision = "fp16"
    return accelerator


def test_a_skipped_step_moves_neither_schedule_nor_average(tmp_path, examples, monkeypatch):
    monkeypatch.setattr(run_module, "make_accelerator", make_scaling)
    changes = {"mixed_precision": "fp16", "gradient_accumulation_steps": 1, "logging_steps": 1, "save_steps": 1}
    arguments = make_arguments(tmp_path / "run", examples, max_steps=4, warmup_steps=4, save_total_limit=9, **changes)
    run(TinyTask(overflow_at=2), arguments)
    states = [tmp_path / "run" / "state" / f"step-{step}" for step in range(1, 5)]
    averages = [torch.load(state / "custom_checkpoint_2.pkl")["optimization_step"] for state in states]
    assert averages == [1, 2, 2, 3]
    rates = [row["learning_rate"] for row in RunFolder(tmp_path / "run").read_metrics()]
    assert rates[2] == rates[1] < rates[3]
    weights = [(state / "model.safetensors").read_bytes() for state in states]
    assert weights[1] != weights[0] and weights[3] != weights[2]


def test_the_kernel_that_hides_skipped_steps_is_not_taken(tmp_path, examples):
    def is_fused(**changes):
        arguments = make_arguments(tmp_path / "run", examples, **changes)
        return build_optimizer(TinyTask(), TinyModel(TinyConfig()), arguments).defaults["fused"]

    assert is_fused(mixed_precision="no") and not is_fused(mixed_precision="fp16")
    with pytest.raises(ValueError):
        is_fused(mixed_precision="fp16", optim_args={"fused": True})


@pytest.mark.parametrize(
    ("word", "number"),
    [("1e1", 10), ("+2E2", 200), ("1.0e+1", 10), ("1.5e1", 15), ("15e-1", None), ("1e999", None), ("1.5", None)],
)
@pytest.mark.parametrize("field", ["max_steps", "data.num_workers", "per_device_eval_batch_size"])
def test_a_whole_number_may_have_an_exponent(field, word, number):
    given = Section({"method": "semanir", "output_dir": "run", "data": Section({"train": {"path": "p"}})})
    with contextlib.nullcontext() if number else refused(SettingsError, field.rpartition(".")[2], "int"):
        built = build(TrainingArguments, apply_overrides(given, [f"--{field}", word]))
        owner = built.data_arguments if "." in field else built
        assert (found := getattr(owner, field.rpartition(".")[2])) == number and type(found) is int
