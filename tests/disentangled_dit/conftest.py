"""Every test has a cache of data sets of its own, and leaves no state of accelerate behind."""

from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest

from tests.process_state import forget_accelerate


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    yield
    forget_accelerate()
