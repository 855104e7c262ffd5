"""Data as somebody has them, and a training of what `hf-ext init` wrote for them."""

import json
from collections.abc import Sequence
from pathlib import Path

import datasets
import pytest
import yaml

from hf_ext.data.opening import open_source
from hf_ext.data.source import DataSource
from tests.kit.command_line import run
from tests.kit.own_data import open_apart

# Two steps on one core, whatever the recipe was written for.
SHORT = ["--max_steps", "2", "--warmup_steps", "0", "--eval_steps", "2", "--save_steps", "2"]
SHORT += ["--data.num_workers", "0"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def measured(recipe: dict) -> int:
    """How many examples measure; none of them is trained on."""
    return len(open_apart(recipe["data"]["train"], recipe["data"]["eval"])[1])


def names_of(source: dict) -> set[str]:
    data = open_source(DataSource(**source)).cast_column("image", datasets.Image(decode=False))
    return {Path(value["path"]).name for value in data["image"]}


def train(method: str, data: str, *words: str | Path, init: Sequence[str] = (), only_check: bool = False) -> dict:
    """What `init` wrote, after its data were checked and it was trained for two steps."""
    said = run("init", method, "mine", "--data", data, *init).stdout
    file = Path("mine", f"{method}.yaml")
    assert said.endswith(f"{file}\nnext: hf-ext train {file}\n")
    text = file.read_text()
    assert f"hf-ext train {file}" in text and text.count("#") > 8
    recipe = yaml.safe_load(text)
    assert Path(recipe["data"]["train"]["path"]).exists()
    run("data", "check", file, "--data.num_workers", "0")
    if only_check:
        return recipe
    run("train", file, *SHORT, *words)
    assert Path("mine/run/snapshot").is_dir()
    if "eval" in recipe["data"]:
        scores = [json.loads(line) for line in Path("mine/run/metrics.jsonl").read_text().splitlines()]
        assert any(key.startswith("eval") for row in scores for key in row)
    return recipe
