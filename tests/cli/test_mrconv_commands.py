"""hf-ext mrconv on real folders."""

import datasets
import pytest
from click.testing import CliRunner
from PIL import Image

from hf_ext.mrconv import MRConvConfig, MRConvForSequenceClassification
from hf_ext.tasks.listops import ListOps
from hf_ext_cli.main import main


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


def test_more_examples_than_there_are_are_refused(tmp_path):
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
        (["plot", "nowhere/at-all"], "Missing argument 'OUT.png'"),
    ],
)
def test_wrong_values_are_named(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in run(*words, code=2).stderr
    assert list(tmp_path.iterdir()) == []


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
