"""hf-ext mrconv on real folders."""

import io
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from click.testing import CliRunner
from PIL import Image

from hf_ext.mrconv import (
    MRConvCache,
    MRConvConfig,
    MRConvForSequenceClassification,
    MRConvForTimeSeriesPrediction,
    MRConvForTokenClassification,
)
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


SERIES = {"hidden_size": 4, "num_hidden_layers": 1, "kernel_size": 4, "max_position_embeddings": 32, "input_size": 2}
UNITS = {"input_mean": [100.0, 3.0], "input_std": [20.0, 1.0]}


def save_series_model(folder, model_class, **fields):
    torch.manual_seed(0)
    model = model_class(MRConvConfig(**{**SERIES, **UNITS, **fields})).eval()
    model.save_pretrained(folder)
    return model


def write_table(path, length):
    values = np.random.default_rng(0).normal([100, 3], [20, 1], (length, 2)).round(3)
    lines = [f"2024-01-01T{row % 24:02}:00,{a},{b},yes" for row, (a, b) in enumerate(values)]
    path.write_text("\n".join(["time,a,b,note", *lines]))
    return torch.from_numpy(values).float()[None]


@torch.no_grad()
def test_a_file_is_predicted_by_every_head_that_tells_no_class(tmp_path):
    values = write_table(tmp_path / "short.csv", 20)
    file, columns = tmp_path / "short.csv", ["--columns", "a,b"]
    targets = {"problem_type": "regression", "target_mean": [70.0, 0.0], "target_std": [5.0, 1.0]}
    model = save_series_model(tmp_path / "values", MRConvForSequenceClassification, **targets, num_labels=2)
    row = pd.read_csv(io.StringIO(run("predict", tmp_path / "values", file, *columns).stdout))
    assert row.to_numpy()[0] == pytest.approx(model(input_values=values).logits[0].numpy(), rel=1e-4)
    model = save_series_model(
        tmp_path / "forecast", MRConvForTimeSeriesPrediction, context_length=16, prediction_length=3
    )
    run("predict", tmp_path / "forecast", file, *columns, "--out", tmp_path / "next.csv")
    table = pd.read_csv(tmp_path / "next.csv")
    assert list(table) == ["a", "b"]
    assert table.to_numpy() == pytest.approx(model(values[:, -16:]).prediction_outputs[0].numpy(), rel=1e-4)


@torch.no_grad()
def test_a_file_of_any_length_is_predicted_as_a_stream(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_ext.tasks.predicting._ROWS", 30)
    values = write_table(tmp_path / "long.csv", 100)
    model = save_series_model(tmp_path / "positions", MRConvForTokenClassification, num_labels=3)
    table = pd.read_csv(
        io.StringIO(run("predict", tmp_path / "positions", tmp_path / "long.csv", "--columns", "a,b").stdout)
    )
    cache, parts = MRConvCache(model.config), []
    for position in range(100):
        parts.append(model(input_values=values[:, position : position + 1], past_key_values=cache).logits)
    shares = torch.cat(parts, 1)[0].softmax(-1).numpy()
    assert table.iloc[:, 1:].to_numpy() == pytest.approx(shares, abs=1e-5) and len(table) == 100
    # Each class by name, and the first positions are those of the full forward.
    full = model(input_values=values[:, :32]).logits[0].softmax(-1).numpy()
    assert table.iloc[:32, 1:].to_numpy() == pytest.approx(full, abs=1e-5)


VALUES = {"problem_type": "regression", "target_mean": [70.0], "target_std": [5.0], "num_labels": 1}


def test_channels_are_those_of_the_training_in_whatever_order(tmp_path):
    save_series_model(tmp_path / "values", MRConvForSequenceClassification, **VALUES, input_columns=["a", "b"])
    write_table(tmp_path / "plain.csv", 20)
    pd.read_csv(tmp_path / "plain.csv")[["b", "note", "a"]].to_csv(tmp_path / "swapped.csv", index=False)
    answers = {run("predict", tmp_path / "values", tmp_path / f"{name}.csv").stdout for name in ("plain", "swapped")}
    assert len(answers) == 1


def test_names_of_channels_may_have_spaces_between_them(tmp_path):
    save_series_model(tmp_path / "values", MRConvForSequenceClassification, **VALUES)
    write_table(tmp_path / "short.csv", 20)
    answers = {
        run("predict", tmp_path / "values", tmp_path / "short.csv", "--columns", names).stdout
        for names in ("a,b", "a, b ")
    }
    assert len(answers) == 1


def test_files_that_cannot_be_predicted_are_refused(tmp_path, caplog):
    save_series_model(tmp_path / "values", MRConvForSequenceClassification, **VALUES)
    save_series_model(tmp_path / "classes", MRConvForSequenceClassification)
    write_table(tmp_path / "long.csv", 40)
    file = tmp_path / "long.csv"
    said = run("predict", tmp_path / "values", file, code=2).stderr
    assert "has the channels time, a, b, the model takes 2: name those" in said
    said = run("predict", tmp_path / "values", file, "--columns", "a,note", code=2).stderr
    assert "line 2: column 'note' holds 'yes'" in said
    run("predict", tmp_path / "values", file, "--columns", "a,b")
    assert "has 40 positions: the first 32 count" in caplog.text
    said = run("predict", tmp_path / "values", file, "--columns", "a,c", code=2).stderr
    assert "has no column c; it has time, a, b, note: name those" in said
    assert "absent.csv cannot be read" in run("predict", tmp_path / "values", tmp_path / "absent.csv", code=2).stderr
    (tmp_path / "words.txt").write_text("a")
    assert "is no file of a sequence" in run("predict", tmp_path / "values", tmp_path / "words.txt", code=2).stderr
    MRConvForSequenceClassification(MRConvConfig(**SERIES, vocab_size=9)).save_pretrained(tmp_path / "tokens")
    assert "the model reads no numbers" in run("predict", tmp_path / "tokens", file, code=2).stderr
    said = run("predict", tmp_path / "classes", file, "--columns", "a,b", code=2).stderr
    assert "the model tells the class of a whole series: say `hf-ext classify MODEL FILE`" in said
