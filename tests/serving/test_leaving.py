"""hf-ext emr serve with clients that send too much or nothing, and that leave before the answer."""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2LMHeadModel

from hf_ext.emr import EMRModel
from hf_ext.serving.tasks import ServedTask, restore
from tests.emr.emr_testing import tiny_bert, tiny_gpt2, tiny_semanir
from tests.emr.use_testing import merge
from tests.serving.test_serving import picture

uvicorn = pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
application = pytest.importorskip("hf_ext.serving.application", reason="the extra `serve` is not installed")


@contextlib.contextmanager
def served(merged: Path) -> Iterator[tuple[str, int]]:
    """The address of a server of a merge."""
    app, _ = application.load_application(str(merged))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield listening.getsockname()
        finally:
            server.should_exit = True
            thread.join()


def open_post(address: tuple[str, int], path: str, *headers: str, body: bytes = b"") -> socket.socket:
    """A request of which no more than this is sent, so far."""
    client = socket.create_connection(address, 60)
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *headers, "", ""]
    client.sendall("\r\n".join(lines).encode() + body)
    return client


def ask(address: tuple[str, int], path: str, **body: Any) -> str:
    """The answer to a whole request."""
    content = json.dumps(body).encode()
    with open_post(address, path, f"Content-Length: {len(content)}", "Connection: close", body=content) as client:
        return client.makefile().read()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("classifier")
    base = tiny_bert(place / "base")
    return merge(base, {"a": tiny_bert(place / "a", 1, base=base)}, place / "merged")


def test_chunks_do_not_pass_beside_a_length(classifier: Path):
    with served(classifier) as address:
        headers = ("Content-Length: 10", "Transfer-Encoding: chunked")
        with open_post(address, "/v1/classify", *headers, body=b"2\r\n{}\r\n0\r\n\r\n") as client:
            assert client.recv(1000).startswith(b"HTTP/1.1 411 ")


def test_clients_that_send_nothing_lock_nobody_out(classifier: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(application, "_PATIENCE", 5.0)
    with served(classifier) as address, contextlib.ExitStack() as opened:
        silent = [
            opened.enter_context(open_post(address, "/v1/classify", f"Content-Length: {64 * 2**20}"))
            for _ in range(17)
        ]
        assert ask(address, "/v1/classify", model="a", input="a b c").startswith("HTTP/1.1 200 ")
        for client in silent:
            assert client.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_what_has_come_counts(classifier: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(application, "_MAX_TOGETHER", 1000)
    with served(classifier) as address:
        with open_post(address, "/v1/classify", "Content-Length: 2000", body=b" " * 990) as client:
            deadline = time.monotonic() + 60
            while not (refused := ask(address, "/v1/classify", model="a", input="a").startswith("HTTP/1.1 503 ")):
                assert time.monotonic() < deadline
            client.sendall(b" " * 1010)
            assert refused and client.recv(1000).startswith(b"HTTP/1.1 503 ")
        assert ask(address, "/v1/classify", model="a", input="a").startswith("HTTP/1.1 200 ")


@pytest.mark.parametrize("stream", [True, False])
def test_nothing_is_generated_for_who_left(stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    base = tiny_gpt2(tmp_path / "base")
    merged = merge(base, {"a": tiny_gpt2(tmp_path / "a", 1, base=base)}, tmp_path / "merged")
    began, go, tokens, forward = threading.Event(), threading.Event(), [], GPT2LMHeadModel.forward

    @functools.wraps(forward)
    def count(*arguments: Any, **options: Any) -> Any:
        tokens.append(1)
        began.set()
        assert go.wait(60)
        time.sleep(0.1)
        return forward(*arguments, **options)

    monkeypatch.setattr(GPT2LMHeadModel, "forward", count)
    body = {"model": "a", "prompt": "a b c", "temperature": 0, "stream": stream}
    content = json.dumps(body | {"max_tokens": 13}).encode()
    with served(merged) as address:
        # Two who leave: one while the worker is at it, the other before.
        clients = []
        for _ in range(2):
            clients.append(open_post(address, "/v1/completions", f"Content-Length: {len(content)}", body=content))
            assert began.wait(60)
        time.sleep(0.5)
        for client in clients:
            client.close()
        time.sleep(0.5)
        go.set()
        assert ask(address, "/v1/completions", **body, max_tokens=2).startswith("HTTP/1.1 200 ")
    assert len(tokens) < 8
    tokens.clear()
    with served(merged) as address:
        assert ask(address, "/v1/completions", **body, max_tokens=13).startswith("HTTP/1.1 200 ")
    assert len(tokens) == 13


def test_no_more_of_a_picture_is_restored_for_who_left(tmp_path: Path):
    base = tiny_semanir(tmp_path / "base")
    merged = merge(base, {"a": tiny_semanir(tmp_path / "a", 1, base=base)}, tmp_path / "merged")
    emr = EMRModel.from_pretrained(merged)
    job = ServedTask(emr, "a").restoration_job(picture())
    job.cancel()
    with pytest.raises(ValueError, match="the client has left"):
        restore(emr, [job])
    assert job.answer.cancelled()
