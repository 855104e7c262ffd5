"""Helpers for tests of examples/: modules by their bare names, made-up runs, READMEs with tables."""

import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def module_loader(folder: Path) -> Callable[..., Any]:
    """A fixture that imports modules of a folder, which find each other by their bare names."""

    @pytest.fixture
    def load(monkeypatch):
        for place in (EXAMPLES, folder):
            monkeypatch.syspath_prepend(place)
        names = {path.stem for path in folder.glob("*.py")}
        kept = {name: sys.modules.pop(name) for name in names & set(sys.modules)}
        yield importlib.import_module
        for name in names & set(sys.modules):
            del sys.modules[name]
        sys.modules.update(kept)

    return load


def fill_readme(tables: ModuleType, result: dict[str, Any], folder: Path) -> str:
    """The text of a study's README with the tables of a result, in a copy; filling it twice changes nothing."""
    copy = folder / "README.md"
    copy.write_text((tables.EXAMPLES / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    texts = []
    for _ in range(2):
        importlib.import_module("experiments").write_blocks(tables.blocks(result), copy)
        texts.append(copy.read_text(encoding="utf-8"))
    assert texts[0] == texts[1]
    return texts[0]


def write_photos(folder: Path, indices: Iterable[int], shape: tuple[int, ...]) -> Path:
    """Pictures of random pixels, each named by its index, which is its seed."""
    folder.mkdir(parents=True)
    for index in indices:
        pixels = np.random.default_rng(index).integers(0, 256, shape, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    return folder


def write_tweets(folder: Path) -> Path:
    """A task of TweetEval's layout with two classes of letters."""
    folder.mkdir(parents=True)
    (folder / "mapping.txt").write_text("0\tcalm\n1\tloud", encoding="utf-8")
    for part, count in (("train", 8), ("val", 4), ("test", 4)):
        texts = [" ".join("ab" if index % 2 else "xy") for index in range(count)]
        (folder / f"{part}_text.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
        (folder / f"{part}_labels.txt").write_text("\n".join(str(index % 2) for index in range(count)))
    return folder
