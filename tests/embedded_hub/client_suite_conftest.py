"""conftest.py of huggingface_hub's own tests, which their sdist leaves out: fixtures, and the tests that fail.

`test_client_suite.py` copies it beside them. It runs in their process, where this package is not importable.
"""

import fnmatch
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, RepoUrl

from .testing_constants import ENDPOINT_STAGING, TOKEN
from .testing_utils import repo_name

RepoFactory = Callable[..., RepoUrl]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what needs the internet or Xet; what is on the list must fail, or it need not be there."""
    lists: dict[str, Any] = json.loads(Path(os.environ["CLIENT_SUITE_LISTS"]).read_text())
    for item in items:
        name = item.nodeid.partition("tests/")[2]
        for pattern, reason in (lists["failing"] | lists["unsure"]).items():
            if fnmatch.fnmatchcase(name, pattern):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=pattern in lists["failing"]))
        if name in lists["online"]:
            item.add_marker(pytest.mark.skip(reason="asks a site on the internet"))
        for mark in ("production", "xet", "git_lfs", "inference"):
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=f"marked {mark}: needs what is not here"))


@pytest.fixture(scope="session")
def api() -> HfApi:
    """A client that may write."""
    return HfApi(endpoint=ENDPOINT_STAGING, token=TOKEN)


@pytest.fixture
def repo_factory(api: HfApi) -> Iterator[RepoFactory]:
    """`repo_factory(repo_type="model", repo_id=None, token=None, **options)` makes a repository for one test."""
    made: list[tuple[HfApi, RepoUrl]] = []

    def make(repo_type: str = "model", *, repo_id: str | None = None, token: str | None = None, **options) -> RepoUrl:
        client = HfApi(endpoint=ENDPOINT_STAGING, token=token) if token else api
        url = client.create_repo(repo_id or repo_name(), repo_type=repo_type, **options)
        made.append((client, url))
        return url

    yield make
    for client, url in made:
        client.delete_repo(url.repo_id, repo_type=url.repo_type, missing_ok=True)
