"""Fixtures of the training tests."""

from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest

from .tiny import write_images, write_shards


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


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """22 examples in four parquet files, for streams."""
    return write_shards(tmp_path / "shards", shards=4, examples=22)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of nine pictures."""
    return write_images(tmp_path / "images", 9)
