"""Fixtures of the tests of pictures in and out."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_ext.restoration.encoding import Picture
from tests.kit.pictures import noise, write_image
from tests.kit.restorers import tiny_restorer


@pytest.fixture
def hide_library(monkeypatch) -> Callable[[str], None]:
    """Makes the import of a library fail, as where it is not installed."""
    return lambda name: monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """A restorer and one that enlarges, as folders."""
    place = tmp_path_factory.mktemp("models")
    for name, scale in (("restore", 1), ("enlarge", 2)):
        tiny_restorer(scale=scale).save_pretrained(place / name)
    return place


@pytest.fixture
def folder_of_model(models) -> Path:
    return models / "restore"


@pytest.fixture
def photos(tmp_path) -> Path:
    """Two good pictures, one of them in a folder of its own."""
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    write_image(folder / "a.png", Picture(noise(10, 13, 3)))
    write_image(folder / "more" / "b.png", Picture(noise(9, 7, 4)))
    return folder
