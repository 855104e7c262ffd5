"""Fixtures of the tests of merges."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.merging.merging import write_set
from tests.merging.updating_sources import merge, write_sources


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return write_set(tmp_path)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def kept(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Merges of the first two tasks, and of all."""
    place = tmp_path_factory.mktemp("kept")
    return {names: merge(sources, names, place / names) for names in ("ab", "abc")}


@pytest.fixture
def artifact(kept: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept["ab"], tmp_path / "artifact"))
