"""The paper's tables as recipes: their very files and commands run against an embedded Hub that holds tiny stand-ins
under the ids of the real models and data."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import HfApi, constants
from PIL import Image

from hf_ext.embedded_hub.server import EmbeddedHub
from hf_ext.merging.configuration import MergeConfig
from hf_ext.settings import build, parse_yaml, read_yaml
from hf_ext.training.all_tasks import METHODS, Recipe
from hf_ext.training.launch import find_task
from tests.emr.paper_standins import TABLES
from tests.hub_testing import run_python

PAPER = Path(__file__).resolve().parents[2] / "examples" / "emr" / "paper"
# As the README has it.
OTHER_METHOD = ["--method", "ties", "--rescale", "global"]
LONGER = [name for name in TABLES if name not in ("gpt2-glue", "beit3-5")]
# A process that runs commands as the shell would: hf-ext's, and Python files.
CLIENT = """
    import json, runpy, sys
    from click.testing import CliRunner
    from hf_ext_cli.main import main
    for words in json.loads(sys.argv[1]):
        if words[0] == "python":
            sys.argv = words[1:]
            runpy.run_path(words[1], run_name="__main__")
            continue
        result = CliRunner().invoke(main, words[1:])
        assert result.exit_code == 0, (words, result.output, result.exception)
        print(result.stdout)
"""


def written_commands(script: str, *arguments: str) -> list[list[str]]:
    """The calls of python and hf-ext that a piece of bash would make."""
    record = 'python() { printf "%q " python "$@"; echo; }; hf-ext() { printf "%q " hf-ext "$@"; echo; }\n'
    record += "export -f python hf-ext\n"
    command = ["bash", "-c", record + script, "bash", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [shlex.split(line) for line in done.stdout.splitlines()]


def told_commands(table: str) -> list[list[str]]:
    """What the head of a table's merge.yaml says to run first."""
    lines = (PAPER / table / "merge.yaml").read_text().splitlines()
    script = "\n".join(line[4:] for line in lines if line.startswith("#   "))
    words = [] if "NAME" in script else written_commands(script)
    return [
        [str(PAPER / Path(word).name) if word.startswith("examples/") else word for word in line] for line in words
    ]


def reproduce(table: str, out: str) -> list[list[str]]:
    """What reproduce.sh runs."""
    return written_commands('exec bash "$@"', str(PAPER / "reproduce.sh"), table, out)


@pytest.mark.parametrize("table", TABLES)
def test_recipes_are_valid(table: str):
    config = MergeConfig.from_yaml(PAPER / table / "merge.yaml")
    assert config.method == "emr"
    if table != "beit3-5":
        recipe = build(Recipe, read_yaml(PAPER / table / "evaluate.yaml"))
        assert list(recipe.entries) == list(config.tasks)
        for entry in recipe.entries.values():
            build(find_task(entry.method, METHODS), entry.task, "task")


def test_the_recipe_of_the_readme_is_valid():
    text = (PAPER.parent / "README.md").read_text(encoding="utf-8").partition("## The paper's tables")[2]
    text = text.partition("\n## ")[0]
    (shown,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert set(build(Recipe, parse_yaml(shown)).entries) == {"cola", "rte"}
    told = {row.split("`")[1] for row in text.splitlines() if re.match(r"\| `[\w-]+` \| \d", row)}
    assert f"merge.yaml ties {' '.join(OTHER_METHOD)}`" in text
    assert told == set(TABLES) == {path.parent.name for path in PAPER.glob("*/merge.yaml")}


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes what a table needs, in a Hub and in a folder; gives the Hub's address, the folder and
    the scores that the individual models must get."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with EmbeddedHub(tmp_path / "hub") as hub:
        api = HfApi(endpoint=hub.url, token=False)

        def push(repo_id: str, folder: Path, repo_type: str = "model") -> None:
            api.create_repo(repo_id, repo_type=repo_type)
            api.upload_folder(repo_id=repo_id, folder_path=folder, repo_type=repo_type)

        def make(table: str) -> tuple[str, Path, dict[str, float]]:
            place = tmp_path / "work"
            place.mkdir()
            file = PAPER / table / "evaluate.yaml"
            scores = TABLES[table](place, yaml.safe_load(file.read_text()) if file.is_file() else {}, push)
            return hub.url, place, scores

        yield make


@pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")
@pytest.mark.parametrize(
    "table",
    # One of them takes about ten seconds.
    [
        "gpt2-glue",
        *(pytest.param(name, marks=pytest.mark.slow) for name in LONGER),
    ],
)
def test_a_table_by_its_commands(table: str, stand_ins: Any):
    url, place, scores = stand_ins(table)
    commands = [*told_commands(table), *reproduce(table, "out")]
    if table == "vit-b32-8":
        # One model of all tasks, by another method.
        words = ["--config", str(PAPER / table / "evaluate.yaml"), "--all-tasks", "--output", "ties.json"]
        commands += [["hf-ext", "merge", str(PAPER / table / "merge.yaml"), "ties", *OTHER_METHOD]]
        commands += [["hf-ext", "evaluate", "ties", *words]]
    printed = run_python(CLIENT, url, place, json.dumps(commands))
    individual, merged = (json.loads((place / "out" / name).read_text()) for name in ("individual.json", "emr.json"))
    assert {name: row["value"] for name, row in individual["tasks"].items()} == pytest.approx(scores)
    assert individual["mean"]["value"] == pytest.approx(sum(scores.values()) / len(scores))
    for name, row in merged["tasks"].items():
        assert row["individual"] == individual["tasks"][name]["value"]
        assert f"{row['value']:.4f}" in printed
    if table == "vit-b32-8":
        assert list(json.loads((place / "ties.json").read_text())["tasks"]) == list(scores)
    with Image.open(place / "out" / "emr.png") as picture:
        assert picture.size[0] > 300


@pytest.mark.slow
def test_tensors_of_beit3_go_there_and_back(stand_ins: Any):
    url, place, _ = stand_ins("beit3-5")
    commands = told_commands("beit3-5")
    merge = ["hf-ext", "merge", str(PAPER / "beit3-5" / "merge.yaml"), "merged"]
    run_python(CLIENT, url, place, json.dumps([*commands[:6], merge, *commands[6:]]))
    own = torch.load(place / "downloaded" / "beit3_base_patch16_480_coco_captioning.pth")["model"]
    back = torch.load(place / "captioning.pth")["model"]
    assert {name: value.shape for name, value in back.items()} == {name: value.shape for name, value in own.items()}
    for name, value in own.items():
        # Heads and positions of larger pictures are the task's own; what was merged is near.
        assert torch.equal(back[name], value) == (not name.endswith("fc1.A.weight")), name
        torch.testing.assert_close(back[name], value, atol=0.5, rtol=0)
