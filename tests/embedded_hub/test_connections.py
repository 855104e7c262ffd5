"""No client stops the embedded Hub: malformed HTTP, slow or many clients, rules and cards made to be slow."""

import contextlib
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from hf_ext.embedded_hub import server
from hf_ext.embedded_hub.server import EmbeddedHub
from hf_ext.embedded_hub.store import HubStore
from tests.kit.hub import CONTENT, ask, commit_body, create_repository, raw

from .conftest import BEARER, COMMIT


def connect(url: str) -> socket.socket:
    split = urlsplit(url)
    return socket.create_connection((split.hostname, split.port), timeout=30)


def status_of(received: bytes) -> int:
    """Status of the only answer in some bytes, after which the connection ends."""
    assert received.count(b"HTTP/1.1 ") == 1, received
    assert b"\r\nconnection: close" in received.partition(b"\r\n\r\n")[0].lower()
    return int(received.split()[1])


SECOND = b"GET /me/model/resolve/main/file.bin HTTP/1.1\r\nHost: %s\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
BEFORE = (b": empty\r\n", b" Leading: x\r\nConnection: close\r\n", b"X: a\0b\r\n", b"X: a\r", CHUNKED)
LENGTHS = [before + b"Content-Length: %d" for before in BEFORE]
LENGTHS += [b"Content-Length" + rest for rest in (b" : %d", b": %d\r\nContent-Length: 0", b": %d, 0", b": +%d")]
LENGTHS += [CHUNKED + b"Transfer-Encoding: identity\r\nX: %d", b"Transfer-Encoding: identity, chunked\r\nX: %d"]


@pytest.mark.parametrize("header", LENGTHS)
def test_no_second_request_in_what_is_malformed(steady: str, header: bytes) -> None:
    """A proxy that reads such a head in another way takes what follows for the body, or for another request."""
    host = urlsplit(steady).netloc.encode()
    second = SECOND % host
    head = b"GET /api/models HTTP/1.1\r\nHost: " + host + b"\r\n" + header % len(second) + b"\r\n\r\n"
    # A line that begins with a space continues the one before, which is `Host`.
    assert status_of(raw(steady, head + second)) == (403 if header.startswith(b" ") else 400)


POST = b"POST /api/repos/create HTTP/1.1\r\nHost: %s\r\n"
NO_REQUESTS = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /api/models\r\n\r\n",
    b"GET /caf\xe9 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /" + b"a" * (100 << 10) + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    POST + b"Transfer-Encoding: gzip\r\n\r\n",
    *(POST + b"Content-Length: " + length + b"\r\n\r\n" for length in (b"-5", b"1_0", b"9" * 5000)),
    *(POST + CHUNKED + b"\r\n" + size + b"\r\nabcde\r\n0\r\n\r\n" for size in (b"0x5", b"-5", b"3")),
]


@pytest.mark.parametrize("request_", NO_REQUESTS)
def test_what_is_no_request_is_refused(steady: str, request_: bytes) -> None:
    whole = request_.replace(b"%s", urlsplit(steady).netloc.encode())
    assert status_of(raw(steady, whole)) == (505 if b"HTTP/2.0" in request_ else 400)


def test_several_requests_in_one_piece_are_answered_in_order(steady: str) -> None:
    host = urlsplit(steady).netloc.encode()
    one = b"GET /api/models HTTP/1.1\r\nHost: %s\r\n\r\n" % host
    post = b"POST /api/validate-yaml HTTP/1.1\r\nHost: %s\r\nContent-Length: 15\r\n\r\n" % host + b'{"content": ""}'
    last = one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    received = raw(steady, one + SECOND % host + post + last)
    assert received.count(b"HTTP/1.1 200 ") == 4
    assert received.index(b'"id": "me/model"') < received.index(CONTENT) < received.index(b'"errors"')


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


HELD = {
    "silent": b"",
    "half a head": b"GET /api/models HTTP/1.1\r\nHo",
    "half a body": b"POST /api/validate-yaml HTTP/1.1\r\nHost: %s\r\nContent-Length: 100\r\n\r\n{",
    "refused": b"BROKEN\r\n\r\n",
    "never read": SECOND.replace(b"file.bin", b"large.txt"),
}


@pytest.mark.parametrize("held", HELD)
def test_clients_that_are_silent_or_do_not_read_keep_nobody_waiting(url: str, held: str) -> None:
    assert ask(url, "POST", COMMIT, commit_body({"large.txt": bytes(10 << 20)})).status == 200
    # More of them than anything but the limit of connections has places.
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            connection = stack.enter_context(connect(url))
            connection.sendall(HELD[held].replace(b"%s", urlsplit(url).netloc.encode()))
        for _ in range(10):
            assert ask(url, "GET", "/me/model/resolve/main/file.bin").body == CONTENT
            assert ask(url, "POST", COMMIT, commit_body({"beside.txt": b"x"})).status == 200


def test_a_silent_client_does_not_keep_the_server_from_stopping(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(server, "_GRACE_SECONDS", 1)
    with EmbeddedHub(tmp_path) as hub, connect(hub.url) as silent:
        url = hub.url
        silent.sendall(HELD["half a body"].replace(b"%s", urlsplit(url).netloc.encode()))
        # Its request is in a thread when the next one is answered.
        assert ask(url, "GET", "/api/models").status == 200
        hub.stop()
        # Nobody has the folder open.
        HubStore(hub.root).close()
        with pytest.raises(ConnectionRefusedError):
            connect(url)


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[EmbeddedHub]:
    """A Hub for eight connections, with a token and one public repository."""
    with EmbeddedHub(tmp_path / "crowded", token="correct-horse", max_connections=8) as hub:
        assert create_repository(hub.url, "me/model", BEARER).status == 200
        yield hub


def test_more_connections_than_allowed_are_refused_and_the_others_go_on(crowded: EmbeddedHub) -> None:
    body = commit_body({"slow.txt": b"x" * 1000})
    head = f"POST {COMMIT} HTTP/1.1\r\nHost: {urlsplit(crowded.url).netloc}\r\nAuthorization: Bearer correct-horse\r\n"
    with contextlib.ExitStack() as stack:
        uploads = [stack.enter_context(connect(crowded.url)) for _ in range(8)]
        for upload in uploads:
            upload.sendall(f"{head}Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode())
            # It goes on after the token was looked at.
            assert upload.recv(65536).startswith(b"HTTP/1.1 100 ")
            upload.sendall(body[:10])
        assert ask(crowded.url, "GET", "/api/models").status == 503
        for upload in uploads:
            upload.sendall(body[10:])
            assert upload.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert ask(crowded.url, "GET", "/api/models").status == 200


def preupload(url: str, rules: str, *paths: str):
    """Asks how files are to be sent under the rules of a `.gitignore`."""
    files = [{"path": path, "size": 1, "sample": ""} for path in paths]
    return ask(url, "POST", "/api/models/me/model/preupload/main", {"files": files, "gitIgnore": rules})


@pytest.mark.parametrize("rules", ["*" * 5000 + "b", "*a" * 300, "**/" * 2000 + "x", "[" * 5000, "a*" * 999 + "\\"])
def test_rules_that_go_back_and_forth_take_no_longer(steady: str, rules: str) -> None:
    begun = time.process_time()
    assert preupload(steady, rules, "/".join(["a" * 200] * 5)).status == 200
    assert time.process_time() - begun < 20


def test_many_stars_are_no_matter_where_they_have_few_places_and_rules_end(steady: str) -> None:
    wanted = {"run-1-2-3-4-5.log": True, "run-1-2.log": False, "deep/er/x": True, "a/b/c/afoob.txt": True}
    planned = preupload(steady, "**/" * 10 + "x\n*-*-*-*-*-*.log\n/a/**/b/**/*foo*.t?t\n", *wanted).json()["files"]
    assert {plan["path"]: plan["shouldIgnore"] for plan in planned} == wanted
    answer = preupload(steady, "x\n" * 200_000, "a")
    assert answer.status == 400 and ".gitignore" in answer.json()["error"]


def test_strangers_get_no_large_card_read(crowded: EmbeddedHub) -> None:
    large = {"content": "---\nx: [" + "1," * 50_000 + "\n---\n"}
    answer = ask(crowded.url, "POST", "/api/validate-yaml", large)
    assert answer.status == 200 and "checked only with the token" in answer.json()["warnings"][0]["message"]
    answer = ask(crowded.url, "POST", "/api/validate-yaml", large, BEARER)
    assert answer.status == 400 and "not valid YAML" in answer.json()["errors"][0]["message"]
    assert ask(crowded.url, "POST", "/api/validate-yaml", bytes(5 << 20)).status == 413
    assert create_repository(crowded.url, "me/other").status == 401
