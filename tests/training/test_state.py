"""Weight averages, resume states that are kept, and the rows and pictures of a run."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hf_ext.hub.cards import MARKER
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


# What lies in a model's folder when the next one is saved, and whether it stays.
FOUND = {
    **dict.fromkeys(
        ("LICENSE", "results/a/table.csv", ".git/config", "tokenizer.json", "model.fp16.safetensors"), True
    ),
    **dict.fromkeys(("model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json"), False),
    ".eval_results/hf_ext.yaml": False,
}
OFTEN = {"save_steps": 1, "eval_steps": 1, "max_steps": 2, "lr_scheduler_type": "constant"}
CARDS = [(b"# Mine\n", True), (b"\xff mine", True), (f"---\nlicense: mit\n---\n{MARKER}\n".encode(), False)]


@pytest.mark.parametrize(("card", "stays"), CARDS)
def test_what_the_owner_put_into_a_models_folder_stays(tmp_path, examples, card, stays):
    folder, task = RunFolder(tmp_path / "run"), ScoredTask()
    arguments = make_arguments(folder.path, evaluated(examples), **OFTEN)
    task.scores = [5.0]
    run(task, arguments)
    for place in (folder.snapshot, folder.best):
        for name in FOUND:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(b"mine")
        (place / "README.md").write_bytes(card)
        (place / "empty").mkdir()
        (place / "link").symlink_to("nowhere")
    task.scores = [1.0]
    run(task, replace(arguments, max_steps=3))
    for place in (folder.snapshot, folder.best):
        assert json.loads((place / "training.json").read_text())["steps"] == 3
        assert (place / "empty").is_dir() and (place / "link").is_symlink() and (place / "eval.json").is_file()
        found = {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}
        assert {name: found.get(name) == b"mine" for name in FOUND} == FOUND
        assert found.get("README.md") == (card if stays else None)
        TinyModel.from_pretrained(place)


def test_each_evaluation_is_one_of_the_weights_of_its_step(tmp_path, examples, monkeypatch):
    # What becomes better is worse here, so that nothing is saved after most of them.
    monkeypatch.setattr(TinyTask, "greater_is_better", True)
    found = {}
    for save_steps in (1, 100):
        arguments = make_arguments(
            tmp_path / str(save_steps), evaluated(examples), save_steps=save_steps, eval_steps=1
        )
        run(TinyTask(), arguments)
        rows = RunFolder(tmp_path / str(save_steps)).read_metrics()
        found[save_steps] = [row["eval_mse"] for row in rows if "eval_mse" in row]
    assert found[1] == found[100] and len({*found[1]}) == len(found[1]) > 3


@pytest.mark.parametrize("value", [torch.ones(2), np.ones(2), Path("a"), {1}, b"a", TinyTask])
def test_a_task_may_hold_what_json_does_not(tmp_path, examples, value):
    class OwnTask(TinyTask):
        def describe(self) -> dict:
            return {"held": value}

    folder = RunFolder(tmp_path / "run")
    run(OwnTask(), make_arguments(folder.path, evaluated(examples), max_steps=1))
    about = [json.loads((folder.snapshot / name).read_text()) for name in ("training.json", "eval.json")]
    assert about[0]["task"]["held"] == about[1]["results"][0]["arguments"]["held"] == str(value)
