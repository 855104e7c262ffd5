"""No client stops the embedded Hub: malformed HTTP, slow or many clients, rules and cards made to be slow."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from hf_ext.embedded_hub import connections
from hf_ext.embedded_hub.server import EmbeddedHub
from tests.hub_testing import CONTENT, ask, commit_body, create_repository, raw

COMMIT = "/api/models/me/model/commit/main"
PREUPLOAD = "/api/models/me/model/preupload/main"


def connect(url: str) -> socket.socket:
    """An open connection."""
    split = urlsplit(url)
    return socket.create_connection((split.hostname, split.port), timeout=30)


def read_all(connection: socket.socket) -> bytes:
    """What the server says until it closes the connection."""
    with contextlib.suppress(ConnectionResetError):
        return b"".join(iter(lambda: connection.recv(65536), b""))
    return b""


def answer_of(received: bytes) -> tuple[int, dict[str, object]]:
    """Status and JSON body of the only answer in some bytes."""
    assert received.count(b"HTTP/1.1 ") == 1, received
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"\r\ncontent-type: application/json" in head.lower() and b"\r\nconnection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)


SECOND = b"GET /me/model/resolve/main/file.bin HTTP/1.1\r\nHost: %s\r\n\r\n"


@pytest.mark.parametrize(
    "header",
    [
        b"Content-Length : %d",
        b"Broken line\r\nContent-Length: %d",
        b": empty\r\nContent-Length: %d",
        b" Leading: x\r\nContent-Length: %d",
        b"X: a\0b\r\nContent-Length: %d",
        b"X: a\rContent-Length: %d",
        b"X\x0b: a\r\nContent-Length: %d",
        b"Content-Length: %d\r\nContent-Length: 0",
        b"Content-Length: %d, 0",
        b"Content-Length: +%d",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\nX: %d",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\nX: %d",
        b"Transfer-Encoding: identity, chunked\r\nX: %d",
        b"Transfer-Encoding: chunked\r\nContent-Length: %d",
        b"Transfer-Encoding : chunked\r\nX: %d",
    ],
)
def test_no_second_request_in_what_is_malformed(url: str, header: bytes) -> None:
    """A proxy that reads such a head in another way takes what follows for the body, or for another request."""
    host = urlsplit(url).netloc.encode()
    second = SECOND % host
    head = b"GET /api/models HTTP/1.1\r\nHost: " + host + b"\r\n" + header % len(second) + b"\r\n\r\n"
    status, body = answer_of(raw(url, head + second))
    # A line that begins with a space continues the one before, which is `Host`.
    assert status == (403 if header.startswith(b" ") else 400) and "error" in body


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"GET /api/models\r\n\r\n", 400),
        (b"GET /api/models HTTP/1.1\r\nHost: x", 400),
        (b"GET /" + b"a" * (100 << 10) + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000 + b"\r\n", 431),
    ],
)
def test_what_is_no_request_gets_an_answer_in_json(url: str, request_: bytes, status: int) -> None:
    found, body = answer_of(raw(url, request_))
    assert found == status and ("malformed request" in str(body["error"]) or status == 505)


def test_several_requests_in_one_piece_are_answered_in_order(url: str) -> None:
    host = urlsplit(url).netloc.encode()
    one = b"GET /api/models HTTP/1.1\r\nHost: %s\r\n\r\n" % host
    post = b"POST /api/validate-yaml HTTP/1.1\r\nHost: %s\r\nContent-Length: 15\r\n\r\n" % host + b'{"content": ""}'
    received = raw(url, one + SECOND % host + post + one)
    assert received.count(b"HTTP/1.1 200 ") == 4
    assert received.index(b'"id": "me/model"') < received.index(CONTENT) < received.index(b'"errors"')


def test_a_client_that_asks_first_is_told_to_go_on(url: str) -> None:
    body = commit_body({"asked.txt": b"x"})
    head = f"POST {COMMIT} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nExpect: 100-continue\r\n"
    with connect(url) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 100 Continue\r\n")
        connection.sendall(body)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_whatever_fails_is_an_answer_and_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with EmbeddedHub(tmp_path / "hub") as hub:
        assert create_repository(hub.url, "me/model").status == 200
    for tree in (tmp_path / "hub" / "models" / "me" / "model" / "trees").iterdir():
        tree.write_bytes(b'{"file.bin": "what no version of the Hub wrote"}')
    with EmbeddedHub(tmp_path / "hub") as hub, caplog.at_level(logging.ERROR):
        answer = ask(hub.url, "GET", "/api/models/me/model")
        assert answer.status == 500 and "TypeError" in answer.json()["error"]
        assert answer.headers["X-Request-Id"] in caplog.text and "Traceback" in caplog.text
        assert create_repository(hub.url, "me/other").status == 200
        assert ask(hub.url, "GET", "/api/models/me/other").status == 200


# Slow clients.


@pytest.fixture
def wait_only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`wait_only(STALL_SECONDS=0.3)`: the Hub waits for so long and no longer."""

    def change(**seconds: float) -> None:
        for name, value in seconds.items():
            monkeypatch.setattr(connections, name, value)

    return change


def test_a_head_that_drips_is_cut_off(url: str, wait_only: Callable[..., None]) -> None:
    wait_only(HEADER_SECONDS=0.6)
    with connect(url) as connection:
        started = time.monotonic()
        connection.settimeout(0.1)
        received = b""
        while not received and time.monotonic() < started + 30:
            # A byte each tenth of a second: no wait of the server is long.
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(b"G")
            with contextlib.suppress(TimeoutError):
                received = connection.recv(65536)
        connection.settimeout(30)
        status, body = answer_of(received + read_all(connection))
    assert status == 408 and "0.6 seconds" in str(body["error"])


def test_a_silent_connection_is_closed(url: str, wait_only: Callable[..., None]) -> None:
    wait_only(IDLE_SECONDS=0.3)
    with connect(url) as connection:
        assert read_all(connection) == b""


def test_a_body_that_drips_is_cut_off(url: str, hub: EmbeddedHub, wait_only: Callable[..., None]) -> None:
    wait_only(STALL_SECONDS=0.6)
    head = f"POST {COMMIT} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Length: 1000000\r\n\r\n"
    with connect(url) as connection:
        connection.sendall(head.encode())
        connection.settimeout(0.1)
        started, received = time.monotonic(), b""
        while not received and time.monotonic() < started + 30:
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                received = connection.recv(65536)
        connection.settimeout(30)
        status, body = answer_of(received + read_all(connection))
    assert status == 408 and "too slowly" in str(body["error"])
    assert list(hub.store.incoming.iterdir()) == []


def test_a_client_that_does_not_read_is_cut_off(url: str, wait_only: Callable[..., None]) -> None:
    assert ask(url, "POST", COMMIT, commit_body({f"{i}.txt": bytes(10 << 20) for i in range(1)})).status == 200
    wait_only(STALL_SECONDS=0.3)
    with connect(url) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        question = SECOND.replace(b"file.bin", b"0.txt") % urlsplit(url).netloc.encode()
        connection.sendall(question * 8)
        wait_until(lambda: count_served() == 1)
        wait_until(lambda: count_served() == 0)


# Many clients.


def count_served() -> int:
    """How many connections the Hub of this process has: each is a thread."""
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def wait_until(condition) -> None:
    """Wait for something that other threads do."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[EmbeddedHub]:
    """A Hub for eight connections, with a token and one public repository."""
    bearer = {"Authorization": "Bearer secret"}
    with EmbeddedHub(tmp_path / "crowded", token="secret", max_connections=8) as hub:
        body = json.dumps({"organization": "me", "name": "model"}).encode()
        assert ask(hub.url, "POST", "/api/repos/create", body, bearer).status == 200
        assert ask(hub.url, "POST", COMMIT, commit_body({"file.bin": CONTENT}), bearer).status == 200
        yield hub


HELD = {
    "silent": b"",
    "half a head": b"GET /api/models HTTP/1.1\r\nHo",
    "half a body": b"POST /api/validate-yaml HTTP/1.1\r\nHost: %s\r\nContent-Length: 100\r\n\r\n{",
    "refused": b"BROKEN\r\n\r\n",
}


@pytest.mark.parametrize("held", HELD)
def test_who_holds_many_connections_keeps_nobody_out(crowded: EmbeddedHub, held: str) -> None:
    host = urlsplit(crowded.url).netloc.encode()
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            connection = stack.enter_context(connect(crowded.url))
            with contextlib.suppress(OSError):
                connection.sendall(HELD[held].replace(b"%s", host))
        for _ in range(10):
            assert ask(crowded.url, "GET", "/me/model/resolve/main/file.bin").body == CONTENT
        wait_until(lambda: count_served() <= 8)


def test_an_address_of_the_network_has_half_of_the_connections(
    crowded: EmbeddedHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_ext.embedded_hub.listener.is_loopback", lambda host: False)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connect(crowded.url))
        assert ask(crowded.url, "GET", "/me/model/resolve/main/file.bin").body == CONTENT
        wait_until(lambda: count_served() <= 4)


def test_who_has_shown_the_token_is_not_cut_off(crowded: EmbeddedHub) -> None:
    body = commit_body({"slow.txt": b"x" * 1000})
    head = f"POST {COMMIT} HTTP/1.1\r\nHost: {urlsplit(crowded.url).netloc}\r\nAuthorization: Bearer secret\r\n"
    with contextlib.ExitStack() as stack:
        uploads = [stack.enter_context(connect(crowded.url)) for _ in range(8)]
        for upload in uploads:
            upload.sendall(f"{head}Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode())
            # It goes on after the token was looked at.
            assert upload.recv(65536).startswith(b"HTTP/1.1 100 ")
            upload.sendall(body[:10])
        with connect(crowded.url) as late:
            status, told = answer_of(read_all(late))
        assert status == 503 and "try again" in str(told["error"])
        for upload in uploads:
            upload.sendall(body[10:])
            assert upload.recv(65536).startswith(b"HTTP/1.1 200 ")


# Requests that cost more than they weigh.


@pytest.mark.parametrize(
    ("rules", "path"),
    [
        ("*a" * 8 + "b", "a" * 60),
        ("*a" * 40 + "b", "a" * 200),
        ("?*" * 10 + "b", "a" * 60),
        ("*[a]" * 8 + "b", "a" * 60),
        ("a/" + "**/a/" * 9 + "b", "/".join("a" * 200)),
        ("*" * 30 + "b", "a" * 200),
        ("[z-a]", "a"),
        ("ok\n\n[z-a]\n", "a"),
        ("!", "a"),
        ("a\\", "a"),
        ("x" * 5000, "a"),
        ("x\n" * 200_000, "a"),
    ],
)
def test_rules_that_cannot_be_used_are_refused(url: str, rules: str, path: str) -> None:
    question = {"files": [{"path": path, "size": 1, "sample": ""}], "gitIgnore": rules}
    answer = ask(url, "POST", PREUPLOAD, json.dumps(question).encode())
    assert answer.status == 400 and ".gitignore" in answer.json()["error"]


def test_rules_that_cannot_be_used_are_refused_where_they_are_committed(url: str) -> None:
    assert ask(url, "POST", COMMIT, commit_body({".gitignore": b"*.tmp\n[z-a]\n"})).status == 200
    question = json.dumps({"files": [{"path": "a", "size": 1, "sample": ""}]}).encode()
    answer = ask(url, "POST", PREUPLOAD, question)
    assert answer.status == 400 and "line 2 of .gitignore is no pattern: '[z-a]'" in answer.json()["error"]


def test_many_stars_are_no_matter_where_they_have_few_places(url: str) -> None:
    rules = "**/" * 10 + "x\n*-*-*-*-*-*.log\n/a/**/b/**/*foo*.t?t\n"
    wanted = {
        "run-1-2-3-4-5.log": True,
        "run-1-2.log": False,
        "deep/er/x": True,
        "a/b/c/afoob.txt": True,
        "a/xx": False,
    }
    files = [{"path": path, "size": 1, "sample": ""} for path in wanted]
    planned = ask(url, "POST", PREUPLOAD, json.dumps({"files": files, "gitIgnore": rules}).encode()).json()["files"]
    assert {plan["path"]: plan["shouldIgnore"] for plan in planned} == wanted


def test_strangers_get_no_large_card_read(crowded: EmbeddedHub) -> None:
    large = json.dumps({"content": "---\nx: [" + "1," * 50_000 + "\n---\n"}).encode()
    answer = ask(crowded.url, "POST", "/api/validate-yaml", large)
    assert answer.status == 200 and "not checked without the token" in answer.json()["warnings"][0]["message"]
    answer = ask(crowded.url, "POST", "/api/validate-yaml", large, {"Authorization": "Bearer secret"})
    assert answer.status == 400 and "not valid YAML" in answer.json()["errors"][0]["message"]
    assert ask(crowded.url, "POST", "/api/validate-yaml", bytes(5 << 20)).status == 413
    create = create_repository(crowded.url, "me/other")
    assert create.status == 401
