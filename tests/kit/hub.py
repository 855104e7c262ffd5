"""Helpers for tests that talk to the embedded Hub; import them as `from tests.kit.hub import ...`."""

import base64
import contextlib
import hashlib
import http.client
import json
import os
import socket
import sys
import textwrap
from collections.abc import Iterable
from email.message import Message
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from hf_ext.embedded_hub.errors import HubError
from hf_ext.embedded_hub.objects import Entry
from hf_ext.embedded_hub.storage import BlobStore, git_oid
from hf_ext.embedded_hub.store import KINDS, HubStore
from hf_ext.embedded_hub.uploads import store_regular
from tests.kit import warm_python


def client_environment(url: str, home: str | Path, token: str | None = None) -> dict[str, str]:
    """
    Environment of a process whose Hugging Face libraries use the Hub at `url`, a folder `home` for caches and tokens,
    and nothing else. The libraries read it when they are imported, which is why a test needs a process of its own.
    """
    hidden = ("HF_", "HUGGING", "TRANSFORMERS_", "DIFFUSERS_", "PYTHONPATH", "PYTHONWARNINGS")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    environment = {key: value for key, value in environment.items() if not key.lower().endswith("_proxy")}
    # Pushing through Xet would need a server for it, which the embedded Hub is not.
    ones = ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_TELEMETRY", "OMP_NUM_THREADS")
    environment |= dict.fromkeys(ones, "1") | {"HF_ENDPOINT": url, "HF_HOME": str(home)}
    return environment | ({"HF_TOKEN": token} if token else {})


def run_python(script: str, url: str, home: str | Path, *arguments: str, token: str | None = None) -> str:
    """
    Runs a script, with its arguments, as a client of the Hub at `url` in a process of its own, in the folder of its
    caches; what it printed to its standard output. It must succeed.
    """
    Path(home).mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    done = warm_python.run(command, env=client_environment(url, home, token), cwd=home)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


CONTENT = bytes(range(256)) * 10


class Answer(NamedTuple):
    """A server's answer: status, headers (by case-insensitive name) and body."""

    status: int
    headers: Message
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


Body = dict[str, Any] | bytes | Iterable[bytes] | None


def ask(url: str, method: str, path: str, body: Body = None, headers: dict[str, str] | None = None) -> Answer:
    """
    Sends one HTTP request exactly as given, its path and query already quoted, without the client library's checks. A
    mapping is sent as JSON, another iterable in chunks, unless `Content-Length` is among the headers.
    """
    body, headers = json.dumps(body).encode() if isinstance(body, dict) else body, headers or {}
    chunked = body is not None and not isinstance(body, bytes) and "Content-Length" not in headers
    headers = headers | ({"Transfer-Encoding": "chunked"} if chunked else {})
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)) as connection:
        connection.request(method, path, body, headers, encode_chunked=chunked)
        response = connection.getresponse()
        return Answer(response.status, response.headers, response.read())


def commit_body(files: dict[str, bytes], *others: tuple[str, dict[str, Any]], **header: str) -> bytes:
    """The body of a commit request that stores regular files; `others` are further operations, by name and value."""
    lines: list[dict[str, Any]] = [{"key": "header", "value": {"summary": "a commit", **header}}]
    for path, content in files.items():
        value = {"path": path, "content": base64.b64encode(content).decode(), "encoding": "base64"}
        lines.append({"key": "file", "value": value})
    lines += [{"key": key, "value": value} for key, value in others]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def store_now(data: bytes, blobs: BlobStore) -> Entry:
    with blobs.batch() as batch:
        return store_regular(data, batch)


def create_repository(url: str, repository_id: str, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    owner, name = repository_id.split("/")
    return ask(url, "POST", "/api/repos/create", {"organization": owner, "name": name, **fields}, headers)


def lfs_pointer(path: str, content: bytes) -> tuple[str, dict[str, Any]]:
    """The line of a commit that stores a large file whose content was sent."""
    oid = hashlib.sha256(content).hexdigest()
    return "lfsFile", {"path": path, "algo": "sha256", "oid": oid, "size": len(content)}


def request_lfs_upload(url: str, sha256: str, size: int) -> str | None:
    """Ask where to send a large file of me/model; the path and query of the URL, or None when it is there."""
    batch = {"operation": "upload", "objects": [{"oid": sha256, "size": size}], "hash_algo": "sha256"}
    planned = ask(url, "POST", "/me/model.git/info/lfs/objects/batch", batch).json()["objects"][0]
    if "actions" not in planned:
        return None
    split = urlsplit(planned["actions"]["upload"]["href"])
    return f"{split.path}?{split.query}"


def commit_large(url: str, files: dict[str, bytes]) -> str:
    """Commits files of me/model as LFS objects; the commit."""
    for content in files.values():
        place = request_lfs_upload(url, hashlib.sha256(content).hexdigest(), len(content))
        assert place is None or ask(url, "PUT", place, content).status == 200
    body = commit_body({}, *(lfs_pointer(path, content) for path, content in files.items()))
    answer = ask(url, "POST", "/api/models/me/model/commit/main", body)
    assert answer.status == 200, answer.body
    return str(answer.json()["commitOid"])


def raw(url: str, data: bytes) -> bytes:
    """
    Send bytes as they are and return all that the server says until it closes the connection.

    A connection is kept after a request that is whole: such a one asks for `Connection: close`.
    """
    split = urlsplit(url)
    with socket.create_connection((split.hostname, split.port), timeout=30) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def find_damage(store: HubStore) -> list[str]:
    """Read everything that a ref of any repository can reach, recompute every hash, and name what differs."""
    found = []
    for repository in (each for kind in KINDS for each in store.repositories(kind)):
        for ref, head in repository.refs.items():
            where = f"{repository.kind} {repository.id}, {ref}"
            try:
                for commit in repository.history(head):
                    snapshot = repository.snapshot(commit.oid)
                    if snapshot.folders[""] != commit.tree:
                        found.append(f"{where}, commit {commit.oid}: the snapshot is not {commit.tree}")
                    for path, entry in snapshot.files.items():
                        with store.blobs.open(entry.sha256) as file:
                            data = file.read()
                        same = (len(data), hashlib.sha256(data).hexdigest()) == (entry.size, entry.sha256)
                        if not same or not (entry.lfs or git_oid("blob", data) == entry.oid):
                            found.append(f"{where}, commit {commit.oid}: {path}")
            except (HubError, OSError) as error:
                found.append(f"{where}: {error}")
    return found
