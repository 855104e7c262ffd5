"""Who may ask the embedded Hub for what: hosts, origins, interfaces, the token, private repositories."""

import contextlib
import re
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from hf_ext.embedded_hub.routes import ROUTES
from hf_ext.embedded_hub.server import EmbeddedHub
from tests.kit.hub import CONTENT, ask, commit_body, create_repository, raw
from tests.kit.refusals import refused

from .conftest import BEARER, COMMIT


def test_other_hosts_and_pages_of_other_origins_are_refused(steady: str) -> None:
    port = urlsplit(steady).port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", "127.0.0.1:1", f"localhost.evil:{port}"):
        assert ask(steady, "GET", "/api/models", headers={"Host": host}).status == 403, host
    for name in ("localhost", "127.0.0.1", "[::1]", "LOCALHOST"):
        assert ask(steady, "GET", "/api/models", headers={"Host": f"{name}:{port}"}).status == 200, name
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
        assert ask(steady, "POST", COMMIT, commit_body({"x": b"x"}), {"Origin": origin}).status == 403, origin
    assert ask(steady, "GET", "/api/models", headers={"Origin": steady}).status == 200


def test_requests_without_one_host_are_refused(steady: str) -> None:
    def first_line(words: str, *headers: str) -> bytes:
        return raw(steady, "\r\n".join([f"GET {words}", *headers, "", ""]).encode()).split(b"\r\n")[0]

    # RFC 9112, section 3.2: none and two are malformed. HTTP/1.0 needs none, but then we do not know the name.
    host = f"Host: {urlsplit(steady).netloc}"
    assert b" 400 " in first_line("/api/models HTTP/1.1")
    assert b" 403 " in first_line("/api/models HTTP/1.0")
    assert b" 400 " in first_line("/api/models HTTP/1.1", host, "Host: evil.example")
    for target in ("http://[/x", "http://evil.example/api/models", "//evil.example/api/models", "*"):
        assert b" 40" in first_line(f"{target} HTTP/1.1", "Connection: close", host)


SENSELESS: list[tuple[str, dict[str, Any]]] = [
    *(("token", {"host": host}) for host in ("0.0.0.0", "::")),
    *(("token", {"host": "0.0.0.0", "token": token}) for token in ("", "two words", "caf\u00e9")),
    *(("host", {"allowed_hosts": [name]}) for name in ("", "*", "a b", "http://x", "x:", "x:123456")),
    *(("public_url", {"public_url": f"https://{rest}"}) for rest in ("", "a b", "x?y=1", "u:p@x", "[x")),
    *(("public_url", {"public_url": url}) for url in ("hub.lab", "ftp://hub.lab")),
]


@pytest.mark.parametrize(("named", "options"), SENSELESS)
def test_settings_that_make_no_sense_are_refused(tmp_path: Path, named: str, options: dict[str, Any]) -> None:
    with refused(ValueError, named):
        EmbeddedHub(tmp_path, **options)


def test_with_a_token_every_interface_is_served(tmp_path: Path) -> None:
    with EmbeddedHub(tmp_path, host="0.0.0.0", token="secret") as hub:
        assert hub.url.startswith("http://127.0.0.1:")
        assert ask(hub.url, "GET", "/api/models").status == 200
        assert ask(hub.url, "GET", "/api/models", headers={"Host": "evil.example"}).status == 403


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
def test_ipv6_loopback_needs_no_token(tmp_path: Path) -> None:
    try:
        hub = EmbeddedHub(tmp_path, host="::1").start()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    with contextlib.ExitStack() as stack:
        stack.callback(hub.stop)
        assert hub.url.startswith("http://[::1]:")
        assert ask(hub.url, "GET", "/api/models").json() == []


# What a path of a route holds in the place of a name, for those that change something.
FILLED = {"kind_of_ref": "branch", "kind": "models", "owner": "me", "repository": "public", "number": "1", "name": "b"}


def fill(pattern: str) -> str:
    """A path that a route answers."""
    pattern = pattern.replace("/(?:(?P<kind>datasets|spaces)/)?", "/").replace(r"\.", ".")
    return re.sub(r"\(\?P<(\w+)>[^()]*\)", lambda found: FILLED.get(found[1], "main"), pattern)


WRITES = [(method, fill(pattern.pattern)) for method, pattern, _, guarded in ROUTES if guarded]


def test_writes_need_the_token(locked: EmbeddedHub) -> None:
    sent = ("Bearer correct-hors", "correct-horse", "Basic correct-horse", "Bearer ", "Bearer \u00e9")
    for method, path in WRITES:
        for headers in ({}, *({"Authorization": each} for each in sent)):
            assert ask(locked.url, method, path, b"{}", headers).status == 401, (method, path, headers)
        assert ask(locked.url, method, path, b"{}", BEARER).status not in (401, 403), (method, path)
    # Two at once are none.
    head = f"GET /api/whoami-v2 HTTP/1.1\r\nHost: {urlsplit(locked.url).netloc}\r\nConnection: close\r\n"
    twice = "Authorization: Bearer x\r\nAuthorization: Bearer correct-horse\r\n\r\n"
    assert b" 401 " in raw(locked.url, f"{head}{twice}".encode()).split(b"\r\n")[0]


def test_every_route_that_changes_something_is_among_those_tested() -> None:
    assert len(WRITES) > 20
    guarded = [(method, pattern) for method, pattern, _, needs_token in ROUTES if needs_token]
    assert all(any(method == m and pattern.fullmatch(p) for m, p in WRITES) for method, pattern in guarded)
    # What may be sent without a token reads only, or carries a signature.
    reading = {"validate_yaml", "paths_info", "lfs_upload"}
    assert {f.__name__ for m, _, f, needs_token in ROUTES if m != "GET" and not needs_token} == reading


def test_further_names(tmp_path: Path) -> None:
    with EmbeddedHub(tmp_path, allowed_hosts=["Hub.lab", "other.lab:81", "[fd00::1]"]) as hub:
        for host in ("hub.lab", "HUB.lab:8443", "other.lab:81", "[fd00::1]:9", urlsplit(hub.url).netloc):
            assert ask(hub.url, "GET", "/api/models", headers={"Host": host}).status == 200, host
        for host in ("x.hub.lab", "other.lab", "other.lab:82", "hub.lab:", "hub.lab:x", "hub.lab@evil", "[fd00::2]"):
            assert ask(hub.url, "GET", "/api/models", headers={"Host": host}).status in (400, 403), host


def test_behind_a_proxy_all_links_are_public(tmp_path: Path) -> None:
    """A proxy may pass on the public name, or the one by which it reaches the server itself."""
    with EmbeddedHub(tmp_path, public_url="https://hub.lab/mirror/") as hub:
        for host in ("hub.lab", urlsplit(hub.url).netloc):
            name = {"Host": host}
            url = create_repository(hub.url, f"me/m{len(host)}", name).json()["url"]
            assert url == f"https://hub.lab/mirror/me/m{len(host)}"
            batch = {"operation": "upload", "objects": [{"oid": "0" * 64, "size": 3}]}
            path = f"/me/m{len(host)}.git/info/lfs/objects/batch"
            planned = ask(hub.url, "POST", path, batch, name).json()["objects"][0]
            assert planned["actions"]["upload"]["href"].startswith("https://hub.lab/mirror/lfs/upload/000")
            link = ask(hub.url, "GET", "/api/models?limit=0", headers=name).headers["Link"]
            assert link.startswith("<https://hub.lab/mirror/api/models?limit=0")
            assert ask(hub.url, "GET", "/api/models", headers=name | {"Origin": "https://hub.lab"}).status == 200
            assert ask(hub.url, "GET", "/api/models", headers=name | {"Origin": "https://evil.lab"}).status == 403


def test_private_repositories_look_absent(locked: EmbeddedHub) -> None:
    for path in ("/api/models/me/{}", "/me/{}/resolve/main/file.bin", "/api/models/me/{}/refs"):
        private, absent = (ask(locked.url, "GET", path.format(name)) for name in ("private", "absent"))
        assert private.status == absent.status == 401
        assert private.headers["X-Error-Code"] == absent.headers["X-Error-Code"] == "RepoNotFound"
        assert private.body.replace(b"private", b"absent") == absent.body
        assert ask(locked.url, "GET", path.format("public")).status == 200
        assert ask(locked.url, "GET", path.format("private"), headers=BEARER).status == 200
    assert ask(locked.url, "GET", "/me/private/resolve/main/file.bin", headers=BEARER).body == CONTENT
    for headers, count in (({}, 1), (BEARER, 2)):
        assert len(ask(locked.url, "GET", "/api/models", headers=headers).json()) == count
    assert ask(locked.url, "GET", "/api/whoami-v2").status == 401
    known = ask(locked.url, "GET", "/api/whoami-v2", headers=BEARER).json()
    assert (known["name"], known["auth"]["accessToken"]["role"]) == ("local", "write")
