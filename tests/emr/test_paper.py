"""The paper's tables as recipes: their very files and commands run against an embedded Hub that holds tiny stand-ins
under the ids of the real models and data."""

import importlib.util
import inspect
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, constants
from PIL import Image
from sklearn.metrics import matthews_corrcoef
from transformers import GPT2Config, GPT2ForSequenceClassification

from hf_ext.embedded_hub.server import EmbeddedHub
from hf_ext.files import read_json
from hf_ext.merging.configuration import MergeConfig
from hf_ext.settings import SettingsError
from hf_ext.tasks.texts import byte_tokenizer
from tests.emr.emr_testing import perturb, tiny_bert, write_tokenizer
from tests.emr.paper_standins import TABLES
from tests.kit.hub import run_python
from tests.kit.refusals import refused

PAPER = Path(__file__).resolve().parents[2] / "examples" / "emr" / "paper"
SPEC = importlib.util.spec_from_file_location("paper_score", PAPER / "score.py")
score = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(score)
# As the README has it.
OTHER_METHOD = ["--method", "ties", "--rescale", "global"]
RECIPES = sorted(path.parent.name for path in PAPER.glob("*/merge.yaml"))
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
    return written_commands('exec bash "$@"', str(PAPER / "reproduce.sh"), table, out)


@pytest.mark.parametrize("table", RECIPES)
def test_recipes_are_valid(table: str):
    config = MergeConfig.from_yaml(PAPER / table / "merge.yaml")
    assert config.method == "emr"
    if table != "beit3-5":
        entries, _ = score.read_recipe(PAPER / table / "evaluate.yaml")
        assert list(entries) == list(config.tasks)
        for entry in entries.values():
            # Every option is one that the method takes.
            inspect.signature(score.METHODS[entry.method]).bind("model", [], 1, **entry.task)


def test_the_recipe_of_the_readme_is_valid(tmp_path: Path):
    text = (PAPER.parent / "README.md").read_text(encoding="utf-8").partition("## The paper's tables")[2]
    text = text.partition("\n## ")[0]
    (shown,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "recipe.yaml").write_text(shown)
    assert set(score.read_recipe(tmp_path / "recipe.yaml")[0]) == {"cola", "rte"}
    told = {row.split("`")[1] for row in text.splitlines() if re.match(r"\| `[\w-]+` \| \d", row)}
    assert f"merge.yaml ties {' '.join(OTHER_METHOD)}`" in text
    assert told == set(RECIPES) > TABLES.keys()


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
            scores = TABLES[table](place, score.read_settings(file) if file.is_file() else {}, push)
            return hub.url, place, scores

        yield make


@pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")
@pytest.mark.slow
# Of each kind of model and data one is run.
@pytest.mark.parametrize("table", ["gpt2-glue", "vit-b32-8", "t0-3b-ia3"])
def test_a_table_by_its_commands(table: str, stand_ins: Any):
    url, place, scores = stand_ins(table)
    commands = [*told_commands(table), *reproduce(table, "out")]
    if table == "vit-b32-8":
        # One model of all tasks, by another method.
        words = [str(PAPER / table / "evaluate.yaml"), "ties.json"]
        commands += [["hf-ext", "merge", str(PAPER / table / "merge.yaml"), "ties", *OTHER_METHOD]]
        commands += [["python", str(PAPER / "score.py"), "ties", *words]]
    printed = run_python(CLIENT, url, place, json.dumps(commands))
    individual, merged = (read_json(place / "out" / f"{name}.json") for name in ("individual", "emr"))
    assert {name: row["value"] for name, row in individual["tasks"].items()} == pytest.approx(scores)
    assert individual["mean"]["value"] == pytest.approx(sum(scores.values()) / len(scores))
    for name, row in merged["tasks"].items():
        assert row["individual"] == individual["tasks"][name]["value"]
        assert f"{row['value']:.4f}" in printed
    if table == "vit-b32-8":
        assert list(read_json(place / "ties.json")["tasks"]) == list(scores)
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


def write_recipe(folder: Path, **entry: Any) -> Path:
    """A recipe of one task on six texts."""
    texts = ["a b c", "d e", "f g h i", "a", "z y x w v", "b b"]
    rows = [json.dumps({"text": text, "label": index % 2}) for index, text in enumerate(texts)]
    (folder / "texts.jsonl").write_text("\n".join(rows))
    entry = {
        "data": {"path": str(folder / "texts.jsonl"), "split": "train"},
        "task": {"text_columns": ["text"]},
    } | entry
    (folder / "recipe.yaml").write_text(json.dumps({"method": "text-classification", "tasks": {"a": entry}}))
    return folder / "recipe.yaml"


def score_table(monkeypatch: pytest.MonkeyPatch, *words: Any) -> None:
    monkeypatch.setattr("sys.argv", ["score.py", *map(str, words)])
    score.main()


def test_a_text_is_scored_alike_alone_and_beside_longer_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # The configuration names another token for padding than the tokenizer.
    tokenizer = byte_tokenizer(64)
    torch.manual_seed(2)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=16, n_layer=1, n_head=2, pad_token_id=50)
    model = GPT2ForSequenceClassification(config).eval()
    perturb(model, 2, 0.5)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    recipe = write_recipe(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    model.config.pad_token_id = tokenizer.pad_token_id
    with torch.no_grad():
        found = [int(model(**tokenizer(row["text"], return_tensors="pt")).logits.argmax()) for row in rows]
    assert 0 < sum(found) < len(found)
    truth = [row["label"] for row in rows]
    for batch in (1, 6):
        recipe.write_text(json.dumps(read_json(recipe) | {"batch_size": batch}))
        score_table(monkeypatch, tmp_path / "model", recipe, tmp_path / f"{batch}.json")
        scores = read_json(tmp_path / f"{batch}.json")["tasks"]["a"]["scores"]
        assert scores["accuracy"] == pytest.approx(sum(map(int.__eq__, found, truth)) / len(truth)), batch
        assert scores["matthews"] == pytest.approx(matthews_corrcoef(truth, found)), batch


def test_scores_of_another_recipe_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_tokenizer(tiny_bert(tmp_path / "model", 1, base=tiny_bert(tmp_path / "base"), num_labels=2))
    recipe = write_recipe(tmp_path)
    score_table(monkeypatch, tmp_path / "model", recipe, tmp_path / "alone.json")
    words = (tmp_path / "model", recipe, tmp_path / "out.json", "--against", tmp_path / "alone.json")
    score_table(monkeypatch, *words)
    row = read_json(tmp_path / "out.json")["tasks"]["a"]
    assert row["individual"] == row["value"] > 0 and row["of_individual"] == 1
    for key, kind, fact in (("metric", SystemExit, "measured"), ("metrics", SettingsError, "tasks.a")):
        write_recipe(tmp_path, **{key: "matthews"})
        with refused(kind, fact, key if kind is SettingsError else "recipe"):
            score_table(monkeypatch, *words)
