"""Weight averages, resume states that are kept, and the rows and pictures of a run."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hf_ext.training.callbacks import Clock, list_tracker_settings
from hf_ext.training.optimizing import WeightAverage
from hf_ext.training.state import RunFolder

from .tiny import TIMINGS, ScoredTask, TinyConfig, TinyModel, TinyTask, evaluated, make_arguments, run


def move(model: TinyModel, seed: int) -> None:
    """Other weights, and a forward pass that moves the statistics of BatchNorm."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator)
    model(torch.randn(3, 1, 8, 8, generator=generator))


def test_the_average_follows_parameters_and_saved_buffers():
    torch.manual_seed(0)
    model = TinyModel(TinyConfig()).train()
    average = WeightAverage(model, 0.9)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for step in range(4):
        move(model, step)
        average.step()
        # diffusers reaches the decay from below; its first step copies.
        decay = 0.0 if step == 0 else min(0.9, (1 + step) / (10 + step))
        for name, tensor in model.state_dict().items():
            blended = decay * expected[name] + (1 - decay) * tensor if tensor.is_floating_point() else tensor.clone()
            expected[name] = blended
    now = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert not torch.equal(now["norm.running_mean"], expected["norm.running_mean"])
    # The weights come back after an error too.
    for error in (nullcontext(), pytest.raises(ZeroDivisionError)):
        with error, average.apply():
            torch.testing.assert_close(dict(model.state_dict()), expected)
            assert model.norm.num_batches_tracked == 4
            assert model.mask.tolist() == [0.0, float("-inf")]
            _ = 1 / isinstance(error, nullcontext)
        assert all(torch.equal(tensor, now[name]) for name, tensor in model.state_dict().items())


def test_averaged_weights_are_evaluated_and_published(tmp_path, examples):
    class SeeingTask(TinyTask):
        def evaluate_batch(self, model, examples, indices):
            self.seen = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            assert not model.training
            return super().evaluate_batch(model, examples, indices)

    task, folder = SeeingTask(), RunFolder(tmp_path / "run")
    run(task, make_arguments(folder.path, evaluated(examples)))
    published = TinyModel.from_pretrained(folder.snapshot)
    assert not torch.equal(load_file(folder.state(7) / "model.safetensors")["enter.weight"], published.enter.weight)
    assert all(torch.equal(tensor, task.seen[name]) for name, tensor in published.state_dict().items())
    assert published.mask.tolist() == [0.0, float("-inf")]


def test_the_best_and_the_last_states_are_kept(tmp_path, examples):
    intervals = {"max_steps": 10, "save_steps": 1, "eval_steps": 2, "save_total_limit": 2}
    task, folder = ScoredTask(), RunFolder(tmp_path / "run")
    task.scores = [5.0, 1.0, 3.0, 2.0, float("nan")]
    run(task, make_arguments(folder.path, evaluated(examples), **intervals))
    assert folder.saved_steps() == [4, 9, 10]
    assert json.loads((folder.best / "eval.json").read_text())["results"][0]["value"] == 1.0
    steps = [json.loads((kept / "training.json").read_text())["steps"] for kept in (folder.best, folder.snapshot)]
    assert steps == [4, 10]


def test_a_run_leaves_rows_pictures_and_tracks(tmp_path, examples):
    run(TinyTask(), make_arguments(tmp_path / "run", evaluated(examples), report_to="tensorboard"))
    folder = RunFolder(tmp_path / "run")
    rows = folder.read_metrics()
    trained = [row for row in rows if "loss" in row]
    assert [row["step"] for row in trained] == [2, 3, 4, 6, 7]
    assert [row["step"] for row in rows if "eval_mse" in row] == [3, 6, 7]
    assert all(row["samples"] == 4 * row["step"] for row in rows)
    assert {"loss", *TIMINGS, "learning_rate", "gradient_norm"} < rows[0].keys()
    for row in trained:
        shares = [row[f"{part}_share"] for part in ("data", "compute", "overhead")]
        assert all(0 <= share <= 1 for share in shares) and sum(shares) == pytest.approx(1, abs=0.002)
        assert row["compute_share"] > 0
    assert rows[0]["memory_gb"] > 0.01 and trained[-1]["minutes_left"] == 0
    assert sorted(path.name for path in (folder.path / "samples").iterdir()) == [f"step-{n}.png" for n in (3, 6, 7)]
    events = EventAccumulator(str(next(folder.path.glob("tensorboard/**/events.out.tfevents.*")).parent))
    events.Reload()
    assert [event.step for event in events.Images("samples")] == [3, 6, 7]
    assert {event.step for event in events.Scalars("loss")} == {2, 3, 4, 6, 7}
    assert not [*folder.snapshot.glob("*optimizer*")]
    # Who can read the folder can read all of its files.
    files = [path for path in folder.path.rglob("*") if path.is_file() and not path.name.startswith(".")]
    assert {path.name for path in files} >= {"model.safetensors", "optimizer.bin", "manifest.json"}
    assert {path.stat().st_mode for path in files} == {folder.metrics.stat().st_mode}


def test_the_time_between_two_rows_is_data_compute_and_overhead(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("hf_ext.training.callbacks.time", SimpleNamespace(perf_counter=lambda: now[0]))
    clock = Clock()
    # An evaluation is excluded.
    for part, seconds in (("data", 4), ("compute", 5), ("excluded", 1000)):
        with clock.count(part):
            now[0] += seconds
    now[0] += 1
    row = clock.row(samples=20, left=120, device=torch.device("cpu"))
    assert row.pop("memory_gb") > 0.01
    shares = {"data_share": 0.4, "compute_share": 0.5, "overhead_share": 0.1}
    assert row == {"samples_per_second": 2, "minutes_left": 1, **shares}
    clock.restart()
    now[0] += 1
    assert clock.seconds == 1 and clock.row(1, 1, torch.device("cpu"))["overhead_share"] == 1


def test_a_run_folder_is_one_run_of_a_tracker(tmp_path):
    arguments = make_arguments(tmp_path / "run", {}, run_name="mine")
    (tmp_path / "run").mkdir()
    first, again = (list_tracker_settings(arguments, tmp_path / "run", step) for step in (0, 40))
    assert first["wandb"] == again["wandb"] and first["wandb"]["resume"] == "allow"
    assert first["trackio"]["name"] == "mine" and again["tensorboard"] == {"purge_step": 41}
    (tmp_path / "other").mkdir()
    other = list_tracker_settings(make_arguments(tmp_path / "other", {}), tmp_path / "other", 0)
    assert other["wandb"]["id"] != first["wandb"]["id"] and other["wandb"]["name"] == "other"


def test_a_run_in_the_home_folder_lies_there(tmp_path, examples, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    run(TinyTask(), make_arguments("~/runs/x", {"train": {"path": str(examples)}}, max_steps=1))
    assert (tmp_path / "home" / "runs" / "x" / "snapshot").is_dir() and not (tmp_path / "~").exists()
