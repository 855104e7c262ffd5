"""hf-ext mrconv on real folders."""

from pathlib import Path

import datasets
import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from PIL import Image

from hf_ext.mrconv import MRConvConfig, MRConvForSequenceClassification
from hf_ext.tasks.listops import ListOps
from hf_ext.tasks.pathfinder import Pathfinder
from hf_ext.tasks.signals import PixelTask
from hf_ext_cli.main import main

ROOT = Path(__file__).parents[2]


def run(*arguments, code=0):
    result = CliRunner().invoke(main, ["mrconv", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_listops_are_made_as_asked(tmp_path):
    out = tmp_path / "listops"
    limits = ["--min-length", 5, "--max-length", 40, "--max-depth", 5, "--max-arguments", 4, "--seed", 7]
    counts = ["--train", 6, "--validation", 2, "--test", 3]
    assert run("make-listops", out, *counts, *limits, "--no-progress").stdout == f"{out}\n"
    data = datasets.load_dataset(str(out))
    assert {name: len(part) for name, part in data.items()} == {"train": 6, "validation": 2, "test": 3}
    text, label = ListOps(7, 5, 40, 5, 4).example(2, "test")
    assert data["test"][2] == {"text": text, "label": label}
    assert "seed 7" in (out / "README.md").read_text()
    result = run("make-listops", out, *counts, code=2)
    assert f"{out} exists: name another folder" in result.stderr


def test_pathfinder_is_made_as_its_recipe_reads_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    counts = ["--train", 4, "--validation", 2, "--test", 2]
    assert run("make-pathfinder", "data/pathfinder32", *counts, "--seed", 3, "--no-progress").exit_code == 0
    recipe = yaml.safe_load((ROOT / "examples/mrconv/pathfinder.yaml").read_text())
    data = datasets.load_dataset(recipe["data"]["train"]["path"])
    assert {name: len(part) for name, part in data.items()} == {"train": 4, "validation": 2, "test": 2}
    picture, label = Pathfinder(3).example(1, "validation")
    sample = PixelTask(**recipe["task"]).encode(data["validation"][1])
    assert sample["labels"] == label
    assert np.array_equal(np.rint(sample["input_values"].numpy().reshape(32, 32) * 255), picture)
    assert (
        "data/pathfinder32 exists: name another folder" in run("make-pathfinder", "data/pathfinder32", code=2).stderr
    )


def test_more_examples_than_there_are_are_refused(tmp_path, caplog):
    limits = ["--min-length", 0, "--max-length", 5, "--no-progress"]
    result = run("make-listops", tmp_path / "new", "--train", 1000, *limits, code=2)
    assert "too few different expressions of more than 0 and fewer than 5 tokens" in result.stderr
    assert "Ask for fewer examples, or widen these limits." in " ".join(result.stderr.split())
    assert not (tmp_path / "new").exists()


def test_the_default_sizes_are_those_of_long_range_arena():
    command = main.get_command(None, "mrconv").commands["make-listops"]
    defaults = {option.name: option.default for option in command.params}
    assert {name: defaults[name] for name in ("train", "validation", "test")} == {
        "train": 96000,
        "validation": 2000,
        "test": 2000,
    }
    settings = ListOps()
    names = ("seed", "min_length", "max_length", "max_depth", "max_arguments")
    assert {name: defaults[name] for name in names} == {name: getattr(settings, name) for name in names}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["make-listops", "new", "--max-length", 501], "min_length must be at least 0 and at least 4 below"),
        (["make-listops", "new", "--train", 0], "0 is not in the range"),
        (["make-pathfinder", "new", "--size", 64], "'64' is not one of '32', '128'"),
        (["plot", "nowhere/at-all"], "Missing argument 'OUT.png'"),
    ],
)
def test_wrong_values_are_named(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in run(*words, code=2).stderr
    assert list(tmp_path.iterdir()) == []


def test_the_default_sizes_of_pathfinder_are_the_splits_of_the_benchmark():
    defaults = {
        option.name: option.default for option in main.get_command(None, "mrconv").commands["make-pathfinder"].params
    }
    assert [defaults[name] for name in ("train", "validation", "test", "size")] == [160000, 20000, 20000, "32"]


def test_kernels_are_drawn(tmp_path):
    config = MRConvConfig(hidden_size=4, num_hidden_layers=2, kernel_size=4, max_position_embeddings=16)
    model = MRConvForSequenceClassification(config)
    model.save_pretrained(tmp_path / "model")
    assert run("plot", tmp_path / "model", tmp_path / "kernels.png").stdout == f"{tmp_path / 'kernels.png'}\n"
    with Image.open(tmp_path / "kernels.png") as picture:
        assert picture.format == "PNG"
    model.reparameterize().save_pretrained(tmp_path / "merged")
    result = run("plot", tmp_path / "merged", tmp_path / "other.png", code=2)
    assert "the model is merged, its branches are gone" in result.stderr
    assert not (tmp_path / "other.png").exists()
