"""Each setting of a run does what it says."""

import json
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file

from hf_ext.training import TrainingArguments
from hf_ext.training.arguments import SCHEDULES
from hf_ext.training.evaluation import public_arguments
from hf_ext.training.optimizing import build_schedule
from hf_ext.training.state import RunFolder

from .launching import ROOT
from .tiny import TinyTask, make_arguments, run


def rows(folder: Path, **changes):
    """Rows of a run that logs each of its five steps, and its weights."""
    values = {"max_steps": 5, "logging_steps": 1, "save_steps": 5, "warmup_steps": 0, "ema_decay": 0.0, **changes}
    data = values.pop("data")
    run(TinyTask(), make_arguments(folder, data, **values))
    run_folder = RunFolder(folder)
    return run_folder.read_metrics(), load_file(run_folder.state(5) / "model.safetensors")


def test_warm_up_and_decay(tmp_path, examples):
    found, _ = rows(tmp_path / "run", data=examples, warmup_steps=2, lr_scheduler_type="linear", learning_rate=0.06)
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
    plain, weights = rows(tmp_path / "plain", data=examples, weight_decay=0.0)
    free, unclipped = rows(tmp_path / "free", data=examples, weight_decay=0.0, max_grad_norm=0.0)
    assert max(row["gradient_norm"] for row in plain) > 1.0
    assert all("gradient_norm" not in row for row in free)
    assert not torch.equal(weights["enter.weight"], unclipped["enter.weight"])
    # One step without a gradient to speak of: only the decay moves weights.
    still = {"max_grad_norm": 1e-30, "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    _, kept = rows(tmp_path / "kept", data=examples, weight_decay=0.0, **still)
    _, decayed = rows(tmp_path / "decayed", data=examples, weight_decay=0.5, **still)
    torch.testing.assert_close(decayed["enter.weight"], kept["enter.weight"] * 0.95**5)
    # Biases start at zero and have no decay.
    assert decayed["enter.bias"].abs().max() < 1e-20


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_the_launch_configurations(path):
    config = load_config_from_file(str(path))
    assert config.num_processes == 2
    assert path.read_text().startswith("# ")


def test_what_is_published_names_no_folder_of_this_machine(tmp_path):
    for name in ("photos", "vae", "start"):
        (tmp_path / name).mkdir()
    arguments = TrainingArguments(
        method="disentangled-dit",
        output_dir=str(tmp_path / "run"),
        data={"train": {"path": [str(tmp_path / "photos"), "org/set"], "pairs": ["noisy", "clean"]}},
        task={"vae": str(tmp_path / "vae"), "text_encoder": "org/encoder", "text_column": "", "image_size": 8},
        init_from=str(tmp_path / "start"),
    )
    published = public_arguments(arguments)
    assert str(tmp_path) not in json.dumps(published)
    assert published["task"] == {"vae": "vae", "text_encoder": "org/encoder", "text_column": "", "image_size": 8}
    assert published["init_from"] == "start"
    assert published["data"]["train"] == {
        "path": [{"path": "photos"}, {"path": "org/set"}],
        "pairs": ["noisy", "clean"],
    }
    assert arguments.task["vae"] == str(tmp_path / "vae")
