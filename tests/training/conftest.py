"""Fixtures of the training tests."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest

from .launching import environment
from .tiny import make_arguments, run_interrupted, write_images, write_shards


@pytest.fixture(autouse=True, scope="session")
def without_pause() -> Iterator[None]:
    """Streams that end at once: `datasets` waits five seconds at each end of a mixture or of a buffer."""
    before = datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN
    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0.02
    yield
    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = before


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """Nine examples in two parquet files: an odd number, so that epochs end within batches."""
    return write_shards(tmp_path / "examples", shards=2, examples=9)


@pytest.fixture(scope="session")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was interrupted in its fifth step, and of its data."""
    root = tmp_path_factory.mktemp("interrupted")
    run_interrupted(make_arguments(root / "run", write_shards(root / "examples", shards=2, examples=9)), 5)
    return root


@pytest.fixture
def halfway(interrupted: Path, tmp_path: Path) -> Path:
    """The data of that run, of which a copy is in `tmp_path / "run"`."""
    shutil.copytree(interrupted / "run", tmp_path / "run")
    return interrupted / "examples"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the test starts have one thread each, and no GPU."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """22 examples in four parquet files, for streams."""
    return write_shards(tmp_path / "shards", shards=4, examples=22)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of nine pictures."""
    return write_images(tmp_path / "images", 9)
