"""hf-ext init: what it writes for each kind of data trains, or merges, as it stands."""

import json
from pathlib import Path

import datasets
import numpngw
import numpy as np
import pandas as pd
import pytest
import tifffile
import yaml

from hf_ext.data.opening import open_source
from hf_ext.data.source import DataSource
from hf_ext.data.survey import look_at
from hf_ext.data.writing import write_recipe
from hf_ext.errors import DataError
from hf_ext.training.methods import build_task, read_arguments
from tests.cli.init_testing import SHORT, measured, train
from tests.cli.init_testing import in_a_folder_of_its_own as in_a_folder_of_its_own
from tests.emr.emr_testing import tiny_bert
from tests.emr.use_testing import write_berts
from tests.kit.command_line import run
from tests.kit.own_data import write_files, write_pictures, write_sounds, write_tables
from tests.kit.pictures import encode, noise
from tests.kit.refusals import refused


def test_photographs_become_a_restorer():
    write_pictures("photos", [""], 12, size=(50, 45))
    recipe = train("semanir", "photos", only_check=True)
    assert recipe["init_from"] == "denoise-color" and recipe["task"]["patch_size"] == 40
    # One of twelve measures.
    assert measured(recipe) == 1
    # One of a kind is one.
    write_pictures("photo", [""], 1)
    assert "data: 1 picture of 40 x 32 pixels" in run("init", "semanir", "other", "--data", "photo").stdout
    assert "1 example of" in run("data", "check", "other/semanir.yaml").stdout


def test_sounds_in_folders_become_classes():
    write_sounds("sounds", ["cat", "dog", "owl"], 4, 16000, 0.1)
    recipe = train("mrconv", "sounds")
    assert recipe["method"] == "mrconv-audio"
    # Heard at 8 kHz on a CPU; 95 of 100 are not longer.
    sounds = {"sampling_rate": 8000, "max_length": 800}
    assert recipe["task"] == {**sounds, "num_labels": 3, "label_names": ["cat", "dog", "owl"]}
    # Of each class one is kept back, though the folder is read class by class.
    assert measured(recipe) == 3
    data = open_source(DataSource(**recipe["data"]["eval"]))
    assert sorted(data["label"][:]) == [0, 1, 2]


def test_small_pictures_are_read_pixel_by_pixel_if_they_are_squares():
    for number, (size, mode) in enumerate([((32, 32), "RGB"), ((8, 8), "L"), ((24, 32), "RGB"), ((8, 300), "L")]):
        write_pictures(f"digits{number}", ["one", "two"], 6, size=size, mode=mode)
        Path(f"digits{number}/one/0.png").write_bytes(b"broken")
        recipe = yaml.safe_load(write_recipe("mrconv", Path("mine"), look_at(f"digits{number}"), False))
        assert recipe["method"] == ("mrconv-pixels" if size[0] == size[1] else "mrconv-images")


@pytest.mark.parametrize("write", [numpngw.write_png, tifffile.imwrite])
def test_colours_of_16_bits_are_said_to_become_8(tmp_path, write):
    for index, picture in enumerate(noise(4, 8, 8, 3, dtype=np.uint16)):
        write(tmp_path / f"{index}.{'png' if write is numpngw.write_png else 'tif'}", picture)
    assert any("16 bits" in text for text in look_at(str(tmp_path)).notes)


def test_splits_in_capitals_are_not_learned_from_together_but_a_class_may_be_called_like_a_split():
    for folder in ("Train Val TEST", "TRAIN test", "train Test"):
        for name in folder.split():
            write_pictures(f"{folder}/{name}", ["cat", "dog"], 3)
        with refused(DataError, *(name for name in folder.split() if name != name.lower())):
            look_at(folder)
        with refused(DataError, "small letters"):
            open_source(DataSource(folder))
    write_pictures("signs", ["Test", "Stop"], 3)
    assert look_at("signs").classes == ["Stop", "Test"]


@pytest.mark.parametrize("ends", [("_noisy", "_clean"), ("-LR", "-HR"), ("_input", "_target")])
def test_pairs_in_one_folder_are_refused(ends):
    names = [f"{number}{end}.png" for number in range(3) for end in ends]
    write_files("photos", {name: encode(noise(32, 40, 3, seed=seed)) for seed, name in enumerate(names)})
    with refused(DataError, "two folders"):
        look_at("photos")
    # Classifiers have classes in names of folders; a word at the end of a few names says little.
    assert look_at("photos", restores=False).kind == "pictures"


@pytest.mark.parametrize(("labels", "method"), [([0, 1] * 6, "mrconv-text"), (None, "mrconv-lm")])
def test_texts_are_classified_or_continued(labels, method):
    rows = {"review": [f"a text with the number {number}" for number in range(12)], "id": [str(n) for n in range(12)]}
    datasets.Dataset.from_dict({**rows, **({} if labels is None else {"label": labels})}).to_json("texts.jsonl")
    recipe = train("mrconv", "texts.jsonl")
    assert recipe["method"] == method and recipe["task"]["text_column"] == "review"
    assert recipe["task"].get("num_labels") == (None if labels is None else 2)
    said = look_at("texts.jsonl").about
    assert ("classes would be in a column `label`, not in id" in said) == (labels is None)


def test_two_texts_become_a_classifier_of_pairs():
    rows = [f"this is sentence {n},that is sentence {n * 7},{'ab'[n % 2]}" for n in range(24)]
    Path("pairs.csv").write_text("\n".join(["premise,hypothesis,label", *rows]))
    recipe = train("mrconv", "pairs.csv", init=["--inputs", "premise,hypothesis"])
    columns = recipe["task"]["text_column"], recipe["task"]["second_text_column"]
    assert (recipe["method"], columns) == ("mrconv-retrieval", ("premise", "hypothesis"))
    Path("new.jsonl").write_text('{"hypothesis": "ja", "premise": "nö"}\n{"hypothesis": "", "premise": "b"}\n')
    found = json.loads(run("classify", "mine/run/snapshot", "new.jsonl", "--top-k", "9", "--json").stdout)
    assert [item["input"] for item in found] == ["new.jsonl, row 1", "new.jsonl, row 2"]
    assert all({each["label"] for each in item["classes"]} == {"a", "b"} for item in found)
    turned = ["new.jsonl", "--columns", "hypothesis,premise", "--top-k", "9", "--json"]
    assert json.loads(run("classify", "mine/run/snapshot", *turned).stdout) != found
    for words in (["new.jsonl", "--columns", "premise"], ["new.jsonl", "--columns", "premise,nothing"]):
        assert "--columns" in run("classify", "mine/run/snapshot", *words, code=1).stderr


def test_series_without_labels_are_refused_with_who_forecasts():
    write_tables(".", ["load", "parts/a", "parts/b"], 40)
    for data in ("load.csv", "parts"):
        said = run("init", "mrconv", "mine", "--data", data, code=2).stderr
        assert all(name in said for name in ("statsmodels", "sktime", "--label")) and not Path("mine").exists()


def test_classes_of_pictures_are_drawn_and_a_recipe_for_a_gpu_is_valid_too(tmp_path):
    write_pictures("animals", ["cat", "dog"], 6, size=(20, 18))
    recipe = train("dit", "animals", "--task.samples_per_class", "1", "--task.sample_steps", "2")
    assert recipe["model"]["num_classes"] == 2 and recipe["task"]["image_size"] == 16
    for method in ("semanir", "mrconv", "dit"):
        Path("gpu.yaml").write_text(write_recipe(method, tmp_path, look_at("animals"), gpu=True))
        arguments = read_arguments(Path("gpu.yaml"), [])
        assert arguments.mixed_precision == "bf16" and build_task(arguments)


def test_a_folder_or_a_list_of_models_becomes_a_merge(tmp_path):
    write_berts(tmp_path / "models", ("irony", "news"))
    run("init", "emr", "mine", "--data", "models")
    run("merge", "mine/merge.yaml", "mine/merged")
    assert "irony" in run("emr", "compare", "mine/merged").stdout
    # As an editor of Windows writes it, with a folder whose name has the sign.
    Path("models/news").rename("models/lr=1e-3")
    lines = ["# mine", "base=models/base", "models/irony", "models/lr=1e-3"]
    Path("list.txt").write_text("\r\n".join(lines), encoding="utf-8-sig", newline="")
    run("init", "emr", "listed", "--data", "list.txt")
    for place, second in (("mine", "news"), ("listed", "lr=1e-3")):
        text = Path(place, "merge.yaml").read_text()
        assert list(yaml.safe_load(text)["tasks"]) == ["irony", second] and "2 fine-tunes of models/base" in text


def test_names_of_any_kind_are_written_so_that_they_are_read_back():
    names = ["no", "it's: {odd}", "1e5", "ü #2", "a\x81b\x85c\u2028d"]
    write_pictures("a: b's", names, 2, size=(9, 9))
    run("init", "mrconv", "mine", "--data", "a: b's")
    recipe = yaml.safe_load(Path("mine/mrconv.yaml").read_text())
    assert recipe["data"]["train"]["path"] == "a: b's" and recipe["task"]["label_names"] == sorted(names)
    # Words that YAML reads otherwise are quoted, and a comment stays one.
    write_pictures("null", [""], 3)
    run("init", "semanir", "yes", "--data", "null")
    recipe = yaml.safe_load(Path("yes/semanir.yaml").read_text())
    assert recipe["data"]["train"]["path"] == "null" and recipe["output_dir"] == "yes/run"
    Path("texts.csv").write_text('text,label\n"hello","a\nseed: 3"\nyou,"b"\n')
    run("init", "mrconv", "my texts", "--data", "texts.csv")
    written = Path("my texts/mrconv.yaml").read_text()
    assert "seed" not in yaml.safe_load(written) and "hf-ext train 'my texts/mrconv.yaml'" in written


def test_labels_of_texts_are_classes_as_those_of_series_are(capfd):
    for labels, classes in (
        ("a,,b,a", ["a", "b"]),
        ("2,,0,10", ["0", "2", "10"]),
        ("0,99999999", ["0", "99999999"]),
        (f"{10**19},{10**19 + 1}", [f"{10**19}", f"{10**19 + 1}"]),
    ):
        Path("texts.csv").write_text("text,label\n" + "".join(f"word,{label}\n" for label in labels.split(",") * 2))
        assert look_at("texts.csv").classes == classes
    assert "examples/s" not in capfd.readouterr().err
    for label in ("1.5", "1e-300"):
        Path("texts.csv").write_text(f"text,label\nhello,0\nyou,{label}\n")
        assert "which are not classes" in run("init", "mrconv", "mine", "--data", "texts.csv", code=2).stderr


def test_gaps_in_texts_are_left_out_and_one_class_is_refused():
    lines = [f"{f'a text {n}' if n % 6 else ''},{'ab'[n % 2]}" for n in range(36)]
    Path("texts.csv").write_text("\n".join(["text,label", *lines]))
    recipe = train("mrconv", "texts.csv", only_check=True)
    assert recipe["data"]["max_bad_examples"] > 1 / 6 and measured(recipe) == 4
    assert "6 of 36 examples without a text" in look_at("texts.csv").left_out
    Path("one.csv").write_text("text,label\n" + "words,a\nothers,a\n" * 6)
    assert "only the class a" in run("init", "mrconv", "one", "--data", "one.csv", code=2).stderr


def test_names_of_many_classes_are_left_out_only_where_data_give_numbers():
    names = [f"c{number:03d}" for number in range(101)]
    for labels, named in ((names, True), (range(101), False)):
        rows = [f"word,{label}\n" for label in [*labels] * 2]
        Path("texts.csv").write_text("text,label\n" + "".join(rows))
        recipe = train("mrconv", "texts.csv", only_check=True) if named else None
        text = write_recipe("mrconv", Path("other"), look_at("texts.csv"), gpu=False)
        assert ("label_names" in text) == named and "num_labels: 101" in text
        assert recipe is None or recipe["task"]["label_names"] == names
    write_pictures("many", names, 1, size=(9, 9))
    assert "label_names" not in write_recipe("mrconv", Path("other"), look_at("many"), gpu=False)


def test_what_cannot_be_learned_from_is_refused_with_what_to_do(tmp_path):
    tiny_bert(tmp_path / "models" / "a")
    write_pictures("photos", [""], 3)
    write_sounds("sounds", [""], 2, 8000, 0.1)
    Path("empty").mkdir()
    Path("noname.txt").write_text("base=models/a\n=models/a\n")
    for method, data, message in (
        ("semanir", "empty", "empty is empty: add pictures, sounds, texts or tables"),
        ("semanir", "sounds", "semanir learns from pictures, pairs, but the data are sounds"),
        ("mrconv", "sounds", "the sounds have no classes: put them into one folder per class"),
        ("mrconv", "photos", "the pictures have no classes"),
        ("dit", "photos", "the pictures have neither classes nor captions"),
        ("emr", "empty", "no model in empty"),
        ("emr", "models", "the base of a is unknown"),
        ("emr", "noname.txt", "'=models/a' lacks a name or a model"),
        ("emr", "photos/0.png", "photos/0.png is not a text file with one model per line"),
    ):
        assert message in run("init", method, "mine", "--data", data, code=2).stderr
    assert not Path("mine").exists()
    run("init", "semanir", "mine", "--data", "photos")
    assert "exists; give another folder" in run("init", "semanir", "mine", "--data", "photos", code=2).stderr


GENERATOR = np.random.default_rng(0)


def write_folders() -> str:
    """A table is a series, the name of its folder the class."""
    write_tables("machines/train", ["good/1", "good/2", "worn/1", "worn/2"], 30)
    write_tables("machines/test", ["good/3", "worn/3"], 30)
    return "machines"


def write_steps() -> str:
    """A row is a step with a class."""
    write_tables("knocks", ["1", "2", "3"], 30, label=True)
    survey = look_at("knocks/*.csv")
    assert survey.count == 3 and survey.train["path"] == "knocks/*.csv" and survey.train["rows"] == "positions"
    return "knocks"


def write_wide() -> str:
    """A row is a series."""
    table = pd.DataFrame(GENERATOR.normal(size=(12, 20))).add_prefix("t").assign(label=["a", "b"] * 6)
    table.to_csv("table.csv")
    return "table.csv"


def write_panel() -> str:
    """Series one below the other, backwards in time, each with a value."""
    days = [f"2024-01-{31 - day:02}" for day in range(20)]
    rows = {"patient": np.repeat(range(6), 20), "date": days * 6, "pulse": GENERATOR.normal(size=120)}
    pd.DataFrame(rows).assign(label=np.repeat(range(6), 20) / 3).to_csv("table.csv", index=False)
    return "table.csv"


def write_arrays() -> str:
    np.savez("arrays.npz", X=GENERATOR.normal(size=(20, 12, 3)), y=np.arange(20) % 3 + 1)
    return "arrays.npz"


def write_ts() -> str:
    series = [":".join(",".join(f"{x:.2f}" for x in GENERATOR.normal(size=9 + n)) for _ in "xy") for n in range(12)]
    head = ["% made", "@problemName knocks", "@univariate false", "@classLabel true up down", "@data"]
    lines = [f"{values}:{('up', 'down')[number % 2]}" for number, values in enumerate(series)]
    names = "knocks/knocks_TRAIN.ts", "knocks/knocks_TEST.ts"
    write_files(".", dict.fromkeys(names, "\n".join([*head, *lines])))
    return "knocks"


SHAPES = [
    (write_folders, "mrconv-series", {"columns": ["x", "y"], "max_length": 30, "label_names": ["good", "worn"]}),
    (write_steps, "mrconv-positions", {"label_names": ["down", "up"]}),
    (write_wide, "mrconv-series", {"columns": ["values"], "label_names": ["a", "b"]}),
    (write_panel, "mrconv-regression", {"columns": ["pulse"], "target_columns": ["label"]}),
    (write_arrays, "mrconv-series", {"num_channels": 3, "label_names": ["1", "2", "3"]}),
    (write_ts, "mrconv-series", {"num_channels": 2, "label_names": ["down", "up"]}),
]


@pytest.mark.parametrize(("write", "method", "expected"), SHAPES)
def test_series_of_every_shape_train_as_the_recipe_says(write, method, expected):
    # With this schedule a run can be made longer.
    steady = ["--lr_scheduler_type", "constant"]
    recipe = train("mrconv", write(), *steady, only_check=write is write_panel)
    assert recipe["method"] == method and expected.items() <= recipe["task"].items()
    if write is write_wide:
        run("train", "mine/mrconv.yaml", *SHORT, *steady, "--max_steps", "3")
        assert json.loads(Path("mine/run/metrics.jsonl").read_text().splitlines()[-1])["step"] == 3


def test_a_run_inside_of_its_data_is_refused_before_anything_is_written():
    write_pictures("photos", ["one", "two"], 2)
    before = sorted(Path("photos").rglob("*"))
    for folder in ("photos", "photos/a/b", "./other/../photos/mine"):
        run("init", "mrconv", folder, "--data", "photos", code=2)
        assert sorted(Path("photos").rglob("*")) == before
