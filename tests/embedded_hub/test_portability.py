"""The embedded Hub where calls of Linux are missing: it starts, stores, keeps others out, and starts again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.hub import client_environment

# What Windows lacks of what a Hub uses, or what lies below it does.
PROGRAM = """
import os, sys
missing = ("O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "fdatasync", "sendfile", "pread", "pwrite", "preadv")
for name in missing:
    assert hasattr(os, name), name
    delattr(os, name)
sys.modules["fcntl"] = None

from hf_ext.embedded_hub.server import EmbeddedHub
from hf_ext.embedded_hub.store import HubStore
from tests.kit.hub import ask, commit_body, create_repository

root = sys.argv[1]
for attempt in range(2):
    with EmbeddedHub(root, port=0) as hub:
        try:
            HubStore(root)
        except ValueError as error:
            assert "is served by another process" in str(error)
        else:
            raise AssertionError("two have the folder open")
        if attempt == 0:
            assert create_repository(hub.url, "me/model").status == 200
            files = {f"{number}.txt": b"text" + bytes([number]) for number in range(40)}
            assert ask(hub.url, "POST", "/api/models/me/model/commit/main", commit_body(files)).status == 200
        assert ask(hub.url, "GET", "/me/model/resolve/main/7.txt").body == b"text\\x07"
print("done")
"""


@pytest.mark.slow
def test_a_hub_without_the_calls_of_linux(tmp_path: Path) -> None:
    environment = client_environment("http://127.0.0.1:9", tmp_path / "home")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "hub")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr
