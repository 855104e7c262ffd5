"""Fixtures of the tests of merges."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session

from hf_ext.emr.arithmetic import SUB_BLOCK
from tests.merging.merging import merge, siblings, write_set, write_sources


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of two sub-blocks, so that small tensors have several."""
    monkeypatch.setattr("hf_ext.merging.engine.SEGMENT", 2 * SUB_BLOCK)


@pytest.fixture
def own_cache(hub_cache: Path) -> Iterator[Path]:
    """A cache and a client of the test's own: the Hubs of all tests have the same names."""
    yield hub_cache
    close_session()


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
    return {names: merge(siblings(sources, *names), place / names) for names in ("ab", "abc")}


@pytest.fixture
def artifact(kept: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept["ab"], tmp_path / "artifact"))
