"""The examples run: YAML files are valid, scripts train, evaluate and restore, the quickstart keeps its promise."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hf_ext.training import TrainingArguments, build_task
from hf_ext.training.arguments import build, read_yaml

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = sorted(path for path in (ROOT / "examples").glob("*/*.yaml") if path.parent.name != "accelerate")
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_experiment_file_is_valid(path: Path) -> None:
    arguments = build(TrainingArguments, read_yaml(path))
    task = build_task(arguments)
    if arguments.init_from is None:
        parameters = sum(parameter.numel() for parameter in task.build_model(arguments.model, None).parameters())
        assert parameters > 10_000


def run_example(*words: str | Path) -> str:
    """Runs a script as a user would and returns what it printed."""
    command = [sys.executable, *map(str, words)]
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def picture_size(path: Path) -> tuple[int, int]:
    with Image.open(path) as picture:
        return picture.size


def test_scripts_train_evaluate_and_restore(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    for index in range(8):
        folder = photos / ("train" if index < 4 else "test")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(index).integers(0, 256, (24, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    config = ROOT / "examples" / "semanir" / "quickstart.yaml"
    data = ["--data.train.path", photos, "--data.eval.path", photos]
    tiny = ["--model.embed_dim", "8", "--task.patch_size", "16", "--max_steps", "2", "--eval_steps", "2"]
    folder = tmp_path / "run"
    script = ROOT / "examples" / "semanir"
    run_example(script / "train.py", config, "--output_dir", folder, *data, *tiny)
    printed = run_example(script / "eval.py", folder / "snapshot", config, *data)

    scores = {row["metric"]: row["value"] for row in json.loads(printed)["results"]}
    trained = {
        row["metric"]: row["value"] for row in json.loads((folder / "snapshot/eval.json").read_text())["results"]
    }
    assert scores == pytest.approx(trained)
    run_example(script / "infer.py", folder / "snapshot", photos / "test" / "4.png", tmp_path / "restored.png")
    assert picture_size(tmp_path / "restored.png") == (20, 24)
    assert picture_size(folder / "samples" / "step-2.png")[0] == 3 * 20
    assert picture_size(folder / "curves.png")[0] > 300


@pytest.mark.slow
def test_quickstart_beats_total_variation(tmp_path: Path) -> None:
    # A Hub on this machine is what it talks to, so it must not be offline.
    environment = {**os.environ, "HF_HUB_OFFLINE": "0"}
    environment.pop("OMP_NUM_THREADS", None)
    script = ROOT / "examples" / "quickstart.py"
    result = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    outcome = json.loads((tmp_path / "quickstart" / "result.json").read_text())
    assert outcome["margin"] >= 0.3
    assert len(outcome["psnr"]) >= 3
    assert picture_size(tmp_path / "quickstart" / "before_after.png")[0] > 800
