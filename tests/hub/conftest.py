"""Fixtures of the tests of publishing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, close_session
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

from hf_ext.embedded_hub.server import EmbeddedHub

from .published import save_bert, save_snapshot


@pytest.fixture(autouse=True)
def _quiet_clean_client(hub_cache: Path) -> Iterator[None]:
    disable_progress_bars()
    yield
    enable_progress_bars()
    close_session()


@pytest.fixture
def api(hub: EmbeddedHub) -> HfApi:
    return HfApi(endpoint=hub.url, token=False)


@pytest.fixture
def options(hub: EmbeddedHub) -> dict[str, Any]:
    return {"endpoint": hub.url, "token": False, "check": False}


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save_bert(tmp_path / "bert")


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """What a training of ours leaves."""
    return save_snapshot(tmp_path / "snapshot")
