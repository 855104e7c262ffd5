"""Classes by their names: data, task, checkpoint and an adapter's base number them differently, none is swapped."""

import contextlib

import datasets
import pandas as pd
import pytest
from PIL import Image

from hf_ext.data.source import DataSource
from hf_ext.errors import DataError, OtherRun
from hf_ext.tasks.diffusion import DisentangledDiTTask
from hf_ext.tasks.series import PositionsTask, SeriesClassificationTask
from hf_ext.training import classes
from hf_ext.training.arguments import build
from hf_ext.training.classes import check_labels, match_classes, name_unlabelled
from hf_ext.training.models import build_model
from tests.kit.refusals import refused

from .tiny import make_arguments, make_task, run, write_images

TINY = {"hidden_size": 4, "num_hidden_layers": 1, "kernel_size": 4}
DIT = {"num_layers": 1, "num_attention_heads": 1, "attention_head_dim": 8, "mlp_ratio": 2.0, "patch_size": 4}


def named(names: list[str], column: str = "x") -> datasets.Dataset:
    """An example of each class."""
    kind, value = (datasets.List(datasets.Value("float32")), [0.0, 1.0]) if column == "x" else (datasets.Image(), None)
    values = [value or Image.new("RGB", (8, 8))] * len(names)
    kinds = datasets.Features({column: kind, "label": datasets.ClassLabel(names=names)})
    return datasets.Dataset.from_dict({column: values, "label": [*range(len(names))]}, features=kinds)


def series(names: list[str], kind: type = SeriesClassificationTask):
    return kind(columns=["x"], max_length=4, num_labels=3, label_names=names)


def learned(folder, method: str, given: str, found: str, stored: str | None, use: str) -> list[str]:
    """The names by which a model calls the classes of data, each of which has one example."""
    is_series = method == "series"
    make = series if is_series else lambda names: build(DisentangledDiTTask, {"image_size": 8}, "task")
    section, base = TINY if is_series else DIT, None
    if stored is not None:
        task = make(stored.split())
        if is_series:
            task.build_model(section, None).save_pretrained(folder)
        else:
            task.read_data(named(stored.split(), "image"))
            task.pipeline(task.build_model(section, None)).save_pretrained(folder)
        base, section = str(folder), {}
    task, data = make(given.split()), named(found.split(), "x" if is_series else "image")
    if use != "evaluate":
        task.read_data(data)
    model = build_model(task, section, base, use)
    names = model.config.id2label if is_series else task.pipeline(model).config.id2label
    numbers = [task.read_class(label) for label in match_classes(data, task)["label"]]
    return [names[number] if is_series else names[str(number)] for number in numbers]


BASE = "bird cat dog"
CALLED = [
    # Each class of the data is called by its own name, whatever its number is here and there.
    *(("", found, BASE, "train") for found in ("dog cat bird", "apple fig pear", "dog cat", "dog cat fox", BASE)),
    *(("", found, None, "train") for found in ("dog cat bird", "3 1 2")),
    *(("", found, BASE, "adapt") for found in ("dog cat bird", "dog", BASE)),
    *(("", found, BASE, "evaluate") for found in ("dog cat bird", "dog")),
    ("", "1 2 3", "3 1 2", "train"),
    ("dog cat bird", BASE, None, "train"),
    ("dog cat bird", "bird cat", None, "train"),
    ("dog cat bird", BASE, BASE, "train"),
    ("3 1 2", "1 2 3", None, "train"),
    *(
        (given, "Bird Cat Dog", stored, use)
        for given in ("bird cat dog", "dog cat bird", "")
        for stored in (given or BASE,)
        for use in ("train", "evaluate", "adapt")
    ),
    # Other words for all of them.
    ("eins zwei drei", "zwei eins", BASE, "evaluate"),
]


REFUSED = [
    # One misspelt name, or all of them, of the task.
    ("dog cat brid", BASE, None, "train", ["bird", "task.label_names"]),
    ("Dog Dog. dog", BASE, None, "train", ["bird", "task.label_names"]),
    ("one two three", "bird cat", None, "train", ["bird", "task.label_names"]),
    # An adapter keeps the names of its base.
    ("", "ape cat dog", BASE, "adapt", ["ape", "adapter"]),
    ("", "ape cow fox", BASE, "adapt", ["ape", "adapter"]),
    ("dog cat bird", BASE, BASE, "adapt", ["dog", "adapter"]),
    # A checkpoint does not learn.
    ("", "dog fox", BASE, "evaluate", ["fox", "the model knows"]),
    ("dog cat brid", BASE, BASE, "evaluate", ["brid", "task.label_names"]),
    ("dog cat bird", BASE, BASE, "evaluate", ["order", "task.label_names"]),
    # Which of three classes without names are these?
    ("", "dog cat", "", "evaluate", ["dog", "0"]),
]


# A diffusion has no names of its own, and those of its base.
CASES = [
    pytest.param(method, *row, id=f"{method}: {' | '.join(map(str, row[:4]))}")
    for method in ("series", "dit")
    for row in (*((*row, []) for row in CALLED), *REFUSED)
    if method == "series" or not (row[0] or row[2] == "")
]


@pytest.mark.parametrize(("method", "given", "found", "stored", "use", "facts"), CASES)
def test_classes_are_called_by_the_names_of_the_data_or_refused(tmp_path, method, given, found, stored, use, facts):
    if not facts:
        called = [name.casefold() for name in learned(tmp_path, method, given, found, stored, use)]
        assert called == found.casefold().split()
        return
    with refused(DataError, *facts):
        learned(tmp_path, method, given, found, stored, use)


def test_words_for_the_classes_of_folders_are_told(tmp_path, caplog):
    assert learned(tmp_path, "series", "one two three", BASE, None, "train") == ["one", "two", "three"]
    assert "bird" in caplog.text and "one" in caplog.text
    caplog.clear()
    learned(tmp_path, "series", "", "apple fig pear", BASE, "train")
    assert "bird" in caplog.text and "apple" in caplog.text


@pytest.mark.parametrize("given", [[], ["1", "2", "3"], ["3", "1", "2"]])
def test_folders_and_tables_of_classes_that_are_called_numbers_agree(given):
    task, folders = series(given), named(["1", "2", "3"])
    task.read_data(folders)
    build_model(task, TINY, None)
    table = datasets.Dataset.from_dict({"label": [1, 2, 3]})
    stream = match_classes(folders.to_iterable_dataset(), task)
    for rows in (match_classes(folders, task), match_classes(table, task), stream, match_classes(folders, task)):
        assert [str((given or "123")[task.read_class(row["label"])]) for row in rows] == ["1", "2", "3"]
    check_labels(table, task)
    # Neither a place nor a name.
    with refused(DataError, "0", "one of"):
        check_labels(datasets.Dataset.from_dict({"label": [1, 0]}), task)


@pytest.mark.parametrize("names", [["c", "a", "b"], ["3", "1", "2"]])
def test_lists_of_classes_are_matched_too(names):
    kinds = datasets.Features(
        {"label": datasets.List(datasets.ClassLabel(names=sorted(names))), "x": datasets.Value("int8")}
    )
    data = datasets.Dataset.from_dict({"label": [[0, 1], [2]], "x": [0, 0]}, features=kinds)
    task = series(names, PositionsTask)
    task.known_classes = sorted(names)
    build_model(task, TINY, None)
    found = [[names[task.read_class(label)] for label in row["label"]] for row in match_classes(data, task)]
    assert found == [sorted(names)[:2], sorted(names)[2:]]


def test_labels_that_an_evaluation_cannot_read_end_a_run_before_its_first_step(tmp_path):
    rows = {"x": [[0.0, 1.0]] * 3}
    datasets.Dataset.from_dict({**rows, "label": [0, 1, 2]}).to_parquet(tmp_path / "train.parquet")
    datasets.Dataset.from_dict({**rows, "label": ["zero", "one", "two"]}).to_parquet(tmp_path / "words.parquet")
    data = {
        name: {"path": str(tmp_path / f"{place}.parquet")} for name, place in (("train", "train"), ("eval", "words"))
    }
    arguments = make_arguments(tmp_path / "run", data, model=TINY, method="mrconv-series", max_steps=1)
    with refused(DataError, "evaluation", "zero", "task.label_names"):
        run(series([]), arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("found", "refuses"), [("bird cat dog", False), ("bird dog cat", True), ("cat", True)])
def test_a_run_goes_on_with_the_numbers_of_its_classes(tmp_path, found, refuses):
    settings = {"method": "mrconv-series", "lr_scheduler_type": "constant", "model": TINY, "allow_other_data": True}
    settings |= {"task": {"columns": ["x"], "max_length": 4, "num_labels": 3}}
    for steps, names in ((2, "bird cat"), (4, found)):
        # The names of folders, in the order of their numbers.
        named(names.split()).to_parquet(tmp_path / "train.parquet")
        arguments = make_arguments(tmp_path / "run", tmp_path / "train.parquet", **settings, max_steps=steps)
        with refused(OtherRun, "cat", "--init_from") if steps == 4 and refuses else contextlib.nullcontext():
            run(series([]), arguments)


def write_unlabelled(folder, kind: str, lacks: str) -> None:
    """Three tables, the second of which lacks a label or all of them; or pictures and such a table of them."""
    rows = pd.DataFrame({"text": ["ab", "cd", "ef"] * 2, "label": pd.array([0, 1, 1] * 2, dtype="Int64")})
    holed = rows.drop(columns="label") if lacks == "column" else rows.assign(label=rows["label"].mask(rows.index == 4))
    if kind == "folder":
        names = [path.name for path in sorted(write_images(folder, 6).iterdir())]
        holed.assign(file_name=names).drop(columns="text").to_csv(folder / "metadata.csv", index=False)
        return
    folder.mkdir()
    for name, table in (("a", rows), ("b", holed), ("c", rows)):
        file = folder / f"{name}.{kind}"
        if kind == "csv":
            table.to_csv(file, index=False)
        elif kind == "jsonl":
            table.to_json(file, orient="records", lines=True)
        else:
            table.to_parquet(file)


@pytest.mark.parametrize(
    ("kind", "lacks", "use"),
    [
        *((kind, lacks, "map") for kind in ("csv", "jsonl", "parquet") for lacks in ("cell", "column")),
        *((kind, lacks, "stream") for kind in ("csv", "jsonl", "parquet") for lacks in ("cell", "column")),
        *((kind, "cell", "eval") for kind in ("csv", "jsonl", "parquet")),
        *(("folder", "cell", use) for use in ("map", "stream")),
    ],
)
def test_the_file_that_lacks_a_label_is_named(tmp_path, kind, lacks, use):
    write_unlabelled(tmp_path / "data", kind, lacks)
    source = {"path": str(tmp_path / "data"), "streaming": use == "stream"}
    whole = {"path": str(tmp_path / "data" / f"a.{kind}")}
    data = {"train": whole, "eval": source} if use == "eval" else {"train": source}
    method, task = ("mrconv-pixels", "image_size") if kind == "folder" else ("mrconv-text", "max_length")
    settings = {"method": method, "task": {task: 8, "num_labels": 2}, "max_steps": 9}
    settings |= {"model": {"hidden_size": 4, "num_hidden_layers": 1}}
    arguments = make_arguments(tmp_path / "run", {**data, "max_bad_examples": 0.0}, **settings)
    with refused(DataError, *(["004.png", "metadata.csv"] if kind == "folder" else [f"b.{kind}"])):
        run(make_task(arguments), arguments)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize(
    ("tables", "seconds", "named"),
    [
        # An error of a missing label is not one of -100; a column that no table has is not looked for in any.
        ([{"label": [0, -100]}, {"label": [0, None]}], 60, 1),
        ([{"label": [0, -100]}, {"label": [1, 0]}], 60, None),
        ([{"x": [0, 1]}, {"label": [0, 1]}], 60, 0),
        ([{"label": [0, 1]}, {"x": [0, 1]}, {"label": [0, None]}], 60, 1),
        ([{"x": [0, 1]}, {"x": [None, 1]}], 60, None),
        # All tables together are read for so long.
        ([{"label": [0, 1]}, {"label": [0, None]}], 0, None),
    ],
)
def test_the_first_table_without_a_label_is_found(tmp_path, monkeypatch, kind, tables, seconds, named):
    monkeypatch.setattr(classes, "_SECONDS", seconds)
    for number, table in enumerate(tables):
        data = datasets.Dataset.from_dict({"text": ["ab", "cd"], **table})
        {"csv": data.to_csv, "jsonl": data.to_json, "parquet": data.to_parquet}[kind](tmp_path / f"{number}.{kind}")
    with pytest.raises(DataError) as caught, name_unlabelled(DataSource(str(tmp_path))):
        series([]).read_class(None)
    assert [n for n in range(len(tables)) if f"{n}.{kind}" in str(caught.value)] == [named] * (named is not None)
