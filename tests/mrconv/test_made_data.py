"""Made examples: folders that `datasets` reads, whole or not there; labels of ListOps and Pathfinder are right."""

import hashlib
import re
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import datasets
import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from made_data import SPLITS, Made, main
from make_listops import ListOps
from make_pathfinder import DRAWINGS, UNIT, Pathfinder

from hf_ext.files import TakenError
from hf_ext.settings import SettingsError, build
from hf_ext.tasks.signals import PixelTask
from tests.kit.refusals import refused
from tests.kit.studies import EXAMPLES


class Maker(NamedTuple):
    """A kind of made data, and small settings, as fields and as words for the script."""

    kind: type[Made]
    small: dict[str, int]
    words: list[str]
    column: str


LIMITS = ["--seed", "7", "--min-length", "63", "--max-length", "200"]
MAKERS = {
    "listops": Maker(ListOps, {"seed": 7, "min_length": 63, "max_length": 200}, LIMITS, "text"),
    "pathfinder": Maker(Pathfinder, {"seed": 3}, ["--seed", "3"], "image"),
}
COUNTS = {"train": 6, "validation": 2, "test": 3}
COUNTED = [word for split, count in COUNTS.items() for word in (f"--{split}", count)]


@pytest.fixture(params=MAKERS)
def maker(request) -> Maker:
    return MAKERS[request.param]


def call(maker: Maker, monkeypatch, *words: Any) -> None:
    monkeypatch.setattr("sys.argv", ["make.py", *map(str, words)])
    main(maker.kind, "What is made.")


@pytest.mark.parametrize("by_script", [False, True])
def test_a_folder_is_read_by_datasets(maker, by_script, tmp_path, monkeypatch, capsys):
    folder, task = tmp_path / "made", maker.kind(**maker.small)
    if by_script:
        call(maker, monkeypatch, folder, *COUNTED, *maker.words)
        assert capsys.readouterr().out == f"{folder}\n"
    else:
        assert task.write(folder, COUNTS) == folder
    data = datasets.load_dataset(str(folder))
    assert {name: len(part) for name, part in data.items()} == COUNTS
    for name, part in data.items():
        for index in (0, len(part) - 1):
            value, label = task.example(index, name)
            assert part[index]["label"] == label and np.array_equal(np.asarray(part[index][maker.column]), value)
    assert {path.name for path in folder.iterdir()} == {"README.md", *(f"{split}.parquet" for split in COUNTS)}
    assert f"6 train, 2 validation, 3 test; seed {maker.small['seed']}" in (folder / "README.md").read_text()


def test_nothing_is_overwritten_or_left_half_written(maker, tmp_path):
    (tmp_path / "there").mkdir()
    for kind, facts, wrong in (
        (TakenError, ["exists", "folder"], lambda: maker.kind().write(tmp_path / "there", {"train": 1})),
        (ValueError, ["1 example"], lambda: maker.kind().write(tmp_path / "new", {"train": 0})),
        (ValueError, ["example 0", "dev"], lambda: maker.kind().example(0, "dev")),
        (ValueError, ["600000 tokens"], lambda: ListOps(0, 500_000, 600_000).example(0)),
    ):
        with refused(kind, *facts):
            wrong()

    class Interrupted(maker.kind):
        def example(self, index, split="train"):
            if split == "validation":
                raise KeyboardInterrupt
            return super().example(index, split)

    with pytest.raises(KeyboardInterrupt):
        Interrupted(**maker.small).write(tmp_path / "half", {"train": 2, "validation": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_settings_that_cannot_be_met_are_refused():
    for kind, values, named in (
        *((kind, {"seed": seed}, f"2**32, got {seed}") for kind in (ListOps, Pathfinder) for seed in (-1, 2**32)),
        (ListOps, {"min_length": 1997}, "max_length"),
        (ListOps, {"min_length": 62}, "come twice"),
        (Pathfinder, {"size": 64}, "32 (Pathfinder) or 128 (Path-X)"),
    ):
        with refused(SettingsError, named):
            build(kind, values, "settings")


def test_a_script_ends_with_one_line_that_says_what_is_wrong(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    for name, *words in (
        ("listops", "new", "--max-length", 501),
        ("listops", "new", "--train", 0),
        ("pathfinder", "there"),
    ):
        with refused(SystemExit, "error: "):
            call(MAKERS[name], monkeypatch, *words)
        assert not Path("new").exists()


def test_the_scripts_make_as_many_as_long_range_arena_has(monkeypatch):
    asked = []
    monkeypatch.setattr(Made, "write", lambda *words: asked.append(words))
    for maker in MAKERS.values():
        call(maker, monkeypatch, "new")
    assert asked == [
        (ListOps(), Path("new"), {"train": 96000, "validation": 2000, "test": 2000}, 1),
        (Pathfinder(), Path("new"), {"train": 160000, "validation": 20000, "test": 20000}, 1),
    ]


def test_the_recipe_of_pathfinder_reads_what_its_script_draws(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = yaml.safe_load((EXAMPLES / "mrconv" / "pathfinder.yaml").read_text())
    call(MAKERS["pathfinder"], monkeypatch, "data/pathfinder32", *COUNTED, "--seed", 3)
    data = datasets.load_dataset(recipe["data"]["train"]["path"])
    picture, label = Pathfinder(3).example(1, "validation")
    sample = PixelTask(**recipe["task"]).encode(data["validation"][1])
    assert sample["labels"] == label
    assert np.array_equal(np.rint(sample["input_values"].numpy().reshape(32, 32) * 255), picture)


FUNCTIONS = {"[MIN": min, "[MAX": max, "[MED": lambda values: int(median(values)), "[SM": lambda v: sum(v) % 10}


def evaluate(text):
    """Value, depth and largest number of arguments, read from the text alone."""
    stack, most, deepest = [[]], 0, 0
    for token in text.split(" "):
        if token in FUNCTIONS:
            stack.append([token])
            # Its arguments lie a level deeper than the operator.
            deepest = max(deepest, len(stack))
        elif token == "]":
            name, *arguments = stack.pop()
            assert len(arguments) >= 2
            most = max(most, len(arguments))
            stack[-1].append(FUNCTIONS[name](arguments))
        else:
            assert re.fullmatch("[0-9]", token)
            stack[-1].append(int(token))
    ((value,),) = stack
    return value, deepest, most


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(0, 30), st.integers(63, 70))
def test_labels_and_limits_of_short_expressions(seed, index, shortest):
    text, label = ListOps(seed, shortest, shortest + 200).example(index)
    value, deepest, most = evaluate(text)
    assert label == value
    assert shortest < len(text.split()) < shortest + 200
    assert deepest <= 10 and most <= 10


def test_examples_are_those_of_earlier_versions():
    """Data that were made before are made again: the rules of Long Range Arena, with its lengths, depth and shares."""
    rows = "".join(repr(ListOps().example(index, split)) for split in SPLITS for index in range(3))
    digest = hashlib.sha256(rows.encode()).hexdigest()
    assert digest == "c05c371efbdbf0ac5242b4ea9b595f2a46585114a1b141dd36bada4c9c7c0d58"
    # No text comes twice or in two splits.
    rows = [ListOps(0, 63, 200).example(index, split) for split in SPLITS for index in range(40)]
    assert len({text for text, _ in rows}) == len(rows)


def chains(scene):
    """The dashes of each path, in order: the two long ones grow in turns, then come the short ones."""
    return [scene.dashes[0:28:2], scene.dashes[1:28:2], *scene.dashes[28:].reshape(-1, 4, 2, 2)]


@pytest.mark.parametrize(("size", "count"), [(32, 20), (128, 4)])
def test_the_class_says_whether_one_path_has_both_discs(size, count):
    task, drawing, labels = Pathfinder(1, size), DRAWINGS[size], []
    for index in range(count):
        scene = task.scene(index)
        # The first two dashes begin the two paths, at the centres of pixels, and as far apart as in the benchmark.
        distance = np.linalg.norm(scene.dashes[0][0] - scene.dashes[1][0]) / UNIT
        assert distance == pytest.approx(drawing.distance, abs=0.75)
        assert scene.dashes.min() >= UNIT and scene.dashes.max() <= (size - 1) * UNIT
        assert scene.margin in drawing.margins
        paths = chains(scene)
        assert len(paths) - 2 <= drawing.distractors
        for path in paths:
            directions = np.diff(path, axis=1)[:, 0] / UNIT / drawing.dash
            assert np.allclose(np.linalg.norm(directions, axis=-1), 1, atol=0.01)
            # Straight on over one margin, then a turn; dashes end at the centres of pixels.
            joints = path[:-1, 1] / UNIT + scene.margin * directions[:-1]
            assert np.abs((joints + (scene.margin + drawing.dash) * directions[1:]) - path[1:, 1] / UNIT).max() <= 0.51
            bends = np.arccos((directions[1:] * directions[:-1]).sum(-1).clip(-1, 1))
            assert bends.max() < np.pi / 2 / drawing.continuity + 0.05
        begins = [np.array_equal(scene.discs[0], path[0][0]) for path in paths]
        finishes = [np.array_equal(scene.discs[1], path[-1][1]) for path in paths]
        assert sum(begins[:2]) == sum(finishes[:2]) == 1
        assert scene.label == int(begins == finishes)
        labels.append(scene.label)
    assert sum(labels) * 2 == count


def test_discs_lie_alike_in_both_classes():
    """The discs of both classes are as far apart: who looks at them alone learns nothing."""
    scenes = [Pathfinder(4).scene(index) for index in range(100)]
    distance = lambda scene: np.linalg.norm(np.diff(scene.discs, axis=0)) / UNIT  # noqa: E731
    distances = [[distance(scene) for scene in scenes if scene.label == side] for side in (0, 1)]
    means, errors = np.mean(distances, 1), np.std(distances, 1) / np.sqrt(50)
    assert abs(means[0] - means[1]) < 4 * np.hypot(*errors)


@pytest.mark.parametrize(("size", "digest"), [(32, "efd67b62036bd6a7"), (128, "ae99ff06d6587922")])
def test_pictures_are_the_same_on_any_machine(size, digest):
    """Recorded; they change when numpy changes its generator or we the rules, and then the README's note must too."""
    pictures = b"".join(Pathfinder(0, size).example(index)[0].tobytes() for index in range(2))
    assert hashlib.sha256(pictures).hexdigest()[:16] == digest
    if size == 32:
        drawn = [Pathfinder(seed).example(index, split)[0] for seed in (0, 1) for split in SPLITS for index in (0, 1)]
        assert len({picture.tobytes() for picture in drawn}) == 12


@pytest.mark.slow
def test_two_processes_write_what_one_does(tmp_path):
    for workers in ("1", "2"):
        Pathfinder(9).write(tmp_path / workers, {"train": 120, "validation": 2}, int(workers))
    one, two = (datasets.load_dataset(str(tmp_path / workers)) for workers in "12")
    assert all(one[split].data.table.equals(two[split].data.table) for split in ("train", "validation"))
