"""The examples run: YAML files are valid, fine-tunes are merged and used, the quickstart keeps its promise."""

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hf_ext.merging.configuration import MergeConfig
from hf_ext.training import TrainingArguments, build_task
from hf_ext.training.arguments import build, read_yaml
from tests.emr.emr_testing import tiny_bert
from tests.kit import warm_python
from tests.kit.studies import module_loader, write_tweets

ROOT = Path(__file__).resolve().parents[1]
EMR = ROOT / "examples" / "emr"
DIT = ROOT / "examples" / "disentangled_dit"
# Not of the registered methods: launch configurations, a merge, and tasks that their examples define.
OWN_TASKS = {DIT / "classifier.yaml", DIT / "judge.yaml", DIT / "distill.yaml"}
OTHERS = {*(ROOT / "examples" / "accelerate").iterdir(), *EMR.glob("*.yaml"), *OWN_TASKS}
EXPERIMENTS = sorted(set((ROOT / "examples").glob("*/*.yaml")) - OTHERS)
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1"}
load = module_loader(EMR)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_experiment_file_is_valid(path: Path) -> None:
    arguments = build(TrainingArguments, read_yaml(path))
    task = build_task(arguments)
    if arguments.init_from is None:
        with torch.device("meta"):
            assert sum(map(torch.numel, task.build_model(arguments.model, None).parameters())) > 10_000


@pytest.mark.parametrize("method", ["semanir", "mrconv", "disentangled_dit"])
def test_each_method_has_a_script_for_accelerate_launch(
    method: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ROOT / "examples" / method / "train.py"
    monkeypatch.setattr("sys.argv", [str(script), str(script.parent / "nothing.yaml")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 2 and "nothing.yaml" in capsys.readouterr().err


# As `python SCRIPT WORDS…`.
SCRIPT = "import os, runpy, sys; del sys.argv[0]; sys.path[0] = os.path.dirname(sys.argv[0]); "
SCRIPT += 'runpy.run_path(sys.argv[0], run_name="__main__")'


def run_python(script: str, *words: str | Path) -> str:
    """Runs a program as a user would, in a process of its own, and returns what it printed."""
    result = warm_python.run([sys.executable, "-c", script, *map(str, words)], env=ENVIRONMENT, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.slow
def test_fine_tunes_are_trained_merged_and_used(load: Callable[[str], Any], tmp_path: Path) -> None:
    base = tiny_bert(tmp_path / "base")
    tweets = load("tweets")
    write_tweets(tmp_path / "tweeteval" / "irony")
    tweets.write_task(tmp_path / "tweeteval", "irony", tmp_path / "data")
    labels = (tmp_path / "data" / "labels.json").read_text()
    data = ["--data.train.path", tmp_path / "data/train.jsonl", "--data.eval.path", tmp_path / "data/test.jsonl"]
    short = ["--max_steps", "3", "--warmup_steps", "0", "--per_device_train_batch_size", "4", "--task.max_length", "8"]
    words = ["--init_from", base, "--output_dir", tmp_path / "run", "--task.labels", labels, *data, *short]
    run_python(SCRIPT, EMR / "train.py", EMR / "finetune.yaml", *words)

    snapshot = tmp_path / "run" / "snapshot"
    assert json.loads((snapshot / "config.json").read_text())["id2label"] == {"0": "calm", "1": "loud"}
    results = json.loads((snapshot / "eval.json").read_text())["results"]
    assert [row["metric"] for row in results] == ["f1", "accuracy"]
    other = tiny_bert(tmp_path / "other", 1, base=base, num_labels=3)
    command = "from hf_ext_cli.main import main; main()"
    merged, tasks = tmp_path / "merged", ["--task", f"irony={snapshot}", "--task", f"other={other}"]
    run_python(command, "merge", "--base", base, *tasks, "--out", merged)
    told = run_python(command, "classify", merged, "a b", "x y", "--task", "irony")
    assert len(re.findall("calm|loud", told)) == 2


def test_merge_example_is_valid(load: Callable[[str], Any]) -> None:
    config = MergeConfig.from_yaml(EMR / "merge.yaml")
    assert set(config.tasks) == set(load("tweets").TASKS) and config.method == "emr"


@pytest.mark.slow
def test_quickstart_beats_total_variation(tmp_path: Path) -> None:
    # A Hub on this machine is what it talks to, so it must not be offline.
    environment = {**os.environ, "HF_HUB_OFFLINE": "0"}
    environment.pop("OMP_NUM_THREADS", None)
    script = ROOT / "examples" / "quickstart.py"
    result = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    names, made = ("result", "merge", "digits", "samples"), tmp_path / "quickstart"
    outcome, merged, digits, samples = (json.loads((made / f"{name}.json").read_text()) for name in names)
    assert outcome["margin"] >= 1 and len(outcome["psnr"]) >= 3
    # One artifact, switched to JPEG, removes more of it than the base and than the average do.
    assert merged["merged (EMR)"]["jpeg"] > max(merged[name]["jpeg"] for name in ("base", "average"))
    assert digits["accuracy"] >= 0.9 and digits["difference"] < 1e-5
    assert samples["same_weights"] and samples["grey_levels_apart"] <= 1 and samples["recognised"] >= 0.8
    for name, width in (("before_after", 800), ("samples", 600)):
        with Image.open(made / f"{name}.png") as picture:
            assert picture.size[0] > width
