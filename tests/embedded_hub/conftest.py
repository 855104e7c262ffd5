"""Hubs with tokens, and Hubs in processes of their own."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_ext.embedded_hub.server import EmbeddedHub
from tests.kit.hub import CONTENT, ask, client_environment, commit_body, create_repository

COMMIT = "/api/models/me/model/commit/main"
BEARER = {"Authorization": "Bearer correct-horse"}


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[EmbeddedHub]:
    """A Hub with a token, a public and a private repository."""
    with EmbeddedHub(tmp_path / "locked", token="correct-horse") as hub:
        for name in ("public", "private"):
            assert create_repository(hub.url, f"me/{name}", BEARER, visibility=name).status == 200
            files = {"file.bin": CONTENT, "README.md": f"The card of what is {name}".encode()}
            path = f"/api/models/me/{name}/commit/main"
            assert ask(hub.url, "POST", path, commit_body(files), BEARER).status == 200
        yield hub


@pytest.fixture(scope="module")
def steady_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedHub]:
    """A Hub with one repository that holds `file.bin`, for the tests of a file that leave it as it is."""
    with EmbeddedHub(tmp_path_factory.mktemp("steady") / "hub") as hub:
        assert create_repository(hub.url, "me/model").status == 200
        assert ask(hub.url, "POST", COMMIT, commit_body({"file.bin": CONTENT})).status == 200
        yield hub


@pytest.fixture(scope="module")
def steady(steady_hub: EmbeddedHub) -> str:
    return steady_hub.url


RUN = """
import sys
from hf_ext_cli.main import main
try:
    main(sys.argv[1:])
finally:
    heavy = {"torch", "transformers", "numpy", "diffusers", "datasets", "hf_ext.semanir"} & set(sys.modules)
    print("heavy:", sorted(heavy), flush=True)
"""


@contextlib.contextmanager
def serving(root: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`hf-ext hub serve` in a process of its own, killed at the end: the address that it tells, and the process."""
    environment = client_environment("http://127.0.0.1:9", root.parent / "home")
    command = [sys.executable, "-c", RUN, "hub", "serve", "--root", str(root), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    assert process.stdout is not None
    try:
        told = process.stdout.readline()
        assert told, "the server did not start"
        yield told.split(" at ")[1].partition(";")[0], process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
