"""Folders of made examples: read by `datasets`, whole or not there, and as many as the benchmark has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import make_listops
import make_pathfinder
import numpy as np
import pytest
import yaml
from made_data import run
from make_listops import ListOps, write_listops
from make_pathfinder import Pathfinder, write_pathfinder

from hf_ext.files import TakenError
from hf_ext.settings import SettingsError, build
from hf_ext.tasks.signals import PixelTask
from tests.kit.refusals import refused
from tests.kit.studies import EXAMPLES


class Maker(NamedTuple):
    """A kind of made data: its settings, writer and script; small settings, as fields and as words for the script."""

    kind: type
    write: Callable[..., Path]
    module: Any
    small: dict[str, int]
    words: list[str]
    column: str


MAKERS = {
    "listops": Maker(
        ListOps,
        write_listops,
        make_listops,
        {"seed": 7, "min_length": 63, "max_length": 200, "max_depth": 6, "max_arguments": 8},
        ["--seed", "7", "--min-length", "63", "--max-length", "200", "--max-depth", "6", "--max-arguments", "8"],
        "text",
    ),
    "pathfinder": Maker(Pathfinder, write_pathfinder, make_pathfinder, {"seed": 3}, ["--seed", "3"], "image"),
}
COUNTS = {"train": 6, "validation": 2, "test": 3}


@pytest.fixture(params=MAKERS)
def maker(request) -> Maker:
    return MAKERS[request.param]


def call(maker: Maker, monkeypatch, *words: Any) -> None:
    monkeypatch.setattr("sys.argv", ["make.py", *map(str, words)])
    run(maker.module.main)


@pytest.mark.parametrize("by_script", [False, True])
def test_a_folder_is_read_by_datasets(maker, by_script, tmp_path, monkeypatch, capsys):
    folder, task = tmp_path / "made", maker.kind(**maker.small)
    if by_script:
        counts = [word for split, count in COUNTS.items() for word in (f"--{split}", count)]
        call(maker, monkeypatch, folder, *counts, *maker.words)
        assert capsys.readouterr().out == f"{folder}\n"
    else:
        assert maker.write(folder, COUNTS, task, progress=False) == folder
    data = datasets.load_dataset(str(folder))
    assert {name: len(part) for name, part in data.items()} == COUNTS
    for name, part in data.items():
        for index in (0, len(part) - 1):
            value, label = task.example(index, name)
            assert part[index]["label"] == label and np.array_equal(np.asarray(part[index][maker.column]), value)
    files = {path.name for path in folder.iterdir()}
    assert files == {"README.md", *(f"{split}.parquet" for split in COUNTS)}
    assert f"6 train, 2 validation, 3 test; seed {maker.small['seed']}" in (folder / "README.md").read_text()


def test_nothing_is_overwritten_or_left_half_written(maker, tmp_path):
    (tmp_path / "there").mkdir()
    with refused(TakenError, "exists", "folder"):
        maker.write(tmp_path / "there", {"train": 1}, maker.kind())
    with refused(ValueError, "1 example"):
        maker.write(tmp_path / "new", {"train": 0}, maker.kind())
    with refused(ValueError, "example 0", "dev"):
        maker.kind().example(0, "dev")

    class Interrupted(maker.kind):
        def examples(self, split):
            if split == "validation":
                raise KeyboardInterrupt
            return super().examples(split)

    with pytest.raises(KeyboardInterrupt):
        maker.write(tmp_path / "half", {"train": 2, "validation": 2}, Interrupted(**maker.small), progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize(
    ("kind", "values", "named"),
    [
        *((kind, {"seed": seed}, f"2**32, got {seed}") for kind in (ListOps, Pathfinder) for seed in (-1, 2**32)),
        (ListOps, {"max_arguments": 1}, "got 10 and 1"),
        (ListOps, {"min_length": 1997}, "max_length"),
        (ListOps, {"min_length": 62}, "come twice"),
        (Pathfinder, {"size": 64}, "32 (Pathfinder) or 128 (Path-X)"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(kind, values, named):
    with refused(SettingsError, named):
        build(kind, values, "settings")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("listops", ["there"]),
        ("listops", ["new", "--max-length", 501]),
        ("listops", ["new", "--train", 0]),
        ("pathfinder", ["there"]),
        ("pathfinder", ["new", "--size", 64]),
    ],
)
def test_a_script_ends_with_one_line_that_says_what_is_wrong(name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    with refused(SystemExit, "error: "):
        call(MAKERS[name], monkeypatch, *words)
    assert not Path("new").exists()


def test_the_scripts_make_as_many_as_long_range_arena_has(monkeypatch):
    asked = []
    for name, maker in MAKERS.items():
        monkeypatch.setattr(maker.module, f"write_{name}", lambda *words, **options: asked.append(words))
        call(maker, monkeypatch, "new")
    assert asked == [
        (Path("new"), {"train": 96000, "validation": 2000, "test": 2000}, ListOps()),
        (Path("new"), {"train": 160000, "validation": 20000, "test": 20000}, Pathfinder()),
    ]


def test_the_recipe_of_pathfinder_reads_what_its_script_draws(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = yaml.safe_load((EXAMPLES / "mrconv" / "pathfinder.yaml").read_text())
    counts = [word for split, count in COUNTS.items() for word in (f"--{split}", count)]
    call(MAKERS["pathfinder"], monkeypatch, "data/pathfinder32", *counts, "--seed", 3)
    data = datasets.load_dataset(recipe["data"]["train"]["path"])
    picture, label = Pathfinder(3).example(1, "validation")
    sample = PixelTask(**recipe["task"]).encode(data["validation"][1])
    assert sample["labels"] == label
    assert np.array_equal(np.rint(sample["input_values"].numpy().reshape(32, 32) * 255), picture)
