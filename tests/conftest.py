"""Fixtures of all tests, and those of the Hub tests."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import DEVNULL, TimeoutExpired
from types import SimpleNamespace

import pytest
from huggingface_hub import close_session
from hypothesis import HealthCheck, settings

from hf_ext.embedded_hub.server import EmbeddedHub
from tests.kit import warm_python
from tests.kit.hub import CONTENT, ask, commit_body, create_repository, run_python
from tests.kit.process_state import forget_accelerate

# A busy machine draws examples slowly; the fixtures are folders and registries that all examples may share.
_CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("any machine", deadline=None, suppress_health_check=_CHECKS)
settings.load_profile("any machine")

# Seconds after which a slow test counts as hanging: three times what the longest takes on two busy cores.
SLOW_LIMIT = 900


def pytest_configure(config: pytest.Config) -> None:
    """Files that `datasets` converts go to a folder of this session, here and in processes that tests start."""
    # It is read when datasets is imported, which no test may do before.
    os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="hf-ext-datasets-")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Nothing of a session stays."""
    shutil.rmtree(os.environ.pop("HF_DATASETS_CACHE"), ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A slow test may take longer than the limit of pyproject.toml, but not for ever."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT))


@pytest.fixture(scope="session", autouse=True)
def hubs_that_stop_at_once() -> Iterator[None]:
    """uvicorn pauses for a tenth of a second, twice before it ends: half a minute for hundreds of Hubs."""
    hurried = SimpleNamespace(**{**vars(asyncio), "sleep": lambda seconds: asyncio.sleep(seconds / 10)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uvicorn.server.asyncio", hurried)
        yield


@pytest.fixture(scope="session", autouse=True)
def hashes_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The record of hashed files lies in the cache of the user otherwise."""
    file = tmp_path_factory.mktemp("hashes") / "sha256.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_ext.hub.file_hashes.cache_file", lambda: file)
        yield


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """No test finds what another one made accelerate keep."""
    yield
    forget_accelerate()


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of huggingface_hub of the test's own: repositories of different tests have the same names."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def modules_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of the test's own for code that comes with models, which transformers imports as one package.

    Python takes the first folder of its path that has the package: the folder of the tests before leaves the path.
    """
    from transformers import dynamic_module_utils

    shared = dynamic_module_utils.HF_MODULES_CACHE
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != shared])
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    own = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "transformers_modules"}
    for name in own:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        del sys.modules[name]
    sys.modules.update(own)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As with HF_HUB_OFFLINE=1, which the libraries read when they are imported."""
    for place in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{place}.HF_HUB_OFFLINE", True)
    close_session()
    yield
    close_session()


@pytest.fixture
def released_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package without released models; the folder that they would lie in."""
    folder = tmp_path / "model_cards" / "released"
    monkeypatch.setattr("hf_ext.hub.released.FOLDER", folder)
    return folder


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[EmbeddedHub]:
    """A running embedded Hub without a token, on a folder of its own."""
    with EmbeddedHub(tmp_path / "hub") as running:
        yield running


@pytest.fixture
def url(hub: EmbeddedHub) -> str:
    """URL of a Hub with one repository that holds `file.bin`."""
    assert create_repository(hub.url, "me/model").status == 200
    assert ask(hub.url, "POST", "/api/models/me/model/commit/main", commit_body({"file.bin": CONTENT})).status == 200
    return hub.url


@pytest.fixture
def run_client(hub: EmbeddedHub, tmp_path: Path) -> Callable[..., str]:
    """`run_client(script, *arguments)`: run a Python script in a process whose Hugging Face libraries use `hub`."""
    return lambda script, *arguments: run_python(script, hub.url, tmp_path / "home", *arguments)


@pytest.fixture
def warm_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load check of what is published runs in processes that start with torch imported."""
    replaced = SimpleNamespace(run=warm_python.run, TimeoutExpired=TimeoutExpired, DEVNULL=DEVNULL)
    monkeypatch.setattr("hf_ext.hub.load_check.subprocess", replaced)
