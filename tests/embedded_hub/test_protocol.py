"""The embedded Hub on the wire: what it refuses, who may do what, ranges, hashes, limits, concurrency."""

import hashlib
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from hf_ext.embedded_hub.server import EmbeddedHub
from tests.kit.hub import CONTENT, ask, commit_body, create_repository, find_damage, lfs_pointer, request_lfs_upload
from tests.kit.own_data import write_files
from tests.kit.refusals import refused

from .conftest import COMMIT


def resolve(url: str, path: str = "file.bin", headers: dict[str, str] | None = None, method: str = "GET"):
    return ask(url, method, f"/me/model/resolve/main/{quote(path)}", headers=headers)


# Bytes that a range means; None where there are none, and "all" where it must be ignored.
RANGES: dict[str, tuple[int, int] | None | str] = {
    "bytes=0-0": (0, 1),
    "bytes=5-9": (5, 10),
    "bytes=2550-": (2550, 2560),
    "bytes=2550-99999": (2550, 2560),
    "bytes=-7": (2553, 2560),
    "bytes=-99999": (0, 2560),
    **dict.fromkeys(("bytes=2560-", "bytes=99999-100000", "bytes=-0")),
    **dict.fromkeys(("bytes=9-5", "bytes=-", "bytes=a-b", "lines=0-1", "bytes=0-1,5-6", "bytes=1--2"), "all"),
}


@pytest.mark.parametrize("header", RANGES)
def test_ranges(steady: str, header: str) -> None:
    wanted = RANGES[header]
    answer, head = (resolve(steady, headers={"Range": header}, method=method) for method in ("GET", "HEAD"))
    assert (head.status, head.body) == (answer.status, b"")
    assert head.headers["Content-Range"] == answer.headers["Content-Range"]
    if wanted is None:
        assert (answer.status, answer.headers["Content-Range"]) == (416, "bytes */2560")
    elif wanted == "all":
        assert (answer.status, answer.body, answer.headers["Content-Range"]) == (200, CONTENT, None)
    else:
        start, stop = wanted
        assert (answer.status, answer.body) == (206, CONTENT[start:stop])
        assert answer.headers["Content-Range"] == f"bytes {start}-{stop - 1}/2560"
        assert answer.headers["Content-Length"] == str(stop - start)


def test_headers_of_files(steady: str) -> None:
    commit = ask(steady, "GET", "/api/models/me/model").json()["sha"]
    head = resolve(steady, method="HEAD")
    oid = hashlib.sha1(b"blob 2560\0" + CONTENT).hexdigest()
    assert (head.headers["ETag"], head.headers["X-Repo-Commit"], head.body) == (f'"{oid}"', commit, b"")
    assert (head.headers["Content-Length"], head.headers["Accept-Ranges"]) == ("2560", "bytes")
    missing = resolve(steady, "none.txt")
    assert (missing.status, missing.headers["X-Error-Code"]) == (404, "EntryNotFound")
    assert missing.headers["X-Repo-Commit"] == commit
    # A range of other content than there is now gives the whole file.
    for etag, status in ((f'"{oid}"', 206), ('"other"', 200)):
        assert resolve(steady, headers={"Range": "bytes=0-3", "If-Range": etag}).status == status


ASKED = {
    b'{"paths": ["file.bin", "none"], "expand": false}': ("json", ["file.bin"]),
    b"paths=file.bin&paths=none": ("x-www-form-urlencoded", ["file.bin"]),
    **dict.fromkeys((b'{"paths": "file.bin"}', b"{}"), ("json", None)),
}


@pytest.mark.parametrize("body", ASKED)
def test_paths_are_asked_for_by_forms_and_by_json(body: bytes, steady: str) -> None:
    kind, found = ASKED[body]
    headers = {"Content-Type": f"application/{kind}"}
    answer = ask(steady, "POST", "/api/models/me/model/paths-info/main", body, headers)
    assert answer.status == (400 if found is None else 200)
    assert found is None or [entry["path"] for entry in answer.json()] == found


BAD_PATHS = ["a/../../escape", "/etc/passwd", "a//b", "./a", "a/.", "..\\escape", "nul\0byte", "line\nbreak"]
BAD_PATHS += ["a/.GIT/hooks/post-checkout", "", "x" * 256, "/".join(["y" * 200] * 6), "\ud800"]
UNREADABLE = ["..%2F..%2F..%2Fetc%2Fpasswd", "%2e%2e/%2e%2e/etc/passwd", "%2Fetc%2Fpasswd"]
UNREADABLE += ["a%00b", "%ff", "..%5c..%5cx"]


@pytest.mark.parametrize("path", BAD_PATHS)
def test_bad_paths_are_not_stored(steady_hub: EmbeddedHub, path: str) -> None:
    url = steady_hub.url
    before = ask(url, "GET", "/api/models/me/model").json()["sha"]
    assert ask(url, "POST", COMMIT, commit_body({path: b"x"})).status == 400
    for key in ("lfsFile", "deletedFile", "deletedFolder"):
        assert ask(url, "POST", COMMIT, commit_body({}, (key, {"path": path, "oid": "0" * 64}))).status == 400
    question = {"files": [{"path": path, "size": 1, "sample": ""}]}
    assert ask(url, "POST", "/api/models/me/model/preupload/main", question).status == 400
    assert ask(url, "GET", "/api/models/me/model").json()["sha"] == before
    assert not list(steady_hub.root.parent.rglob("*escape*"))


@pytest.mark.parametrize("path", UNREADABLE)
def test_bad_paths_are_not_read(steady: str, path: str) -> None:
    for prefix in ("/me/model/resolve/main/", "/api/models/me/model/tree/main/"):
        assert ask(steady, "GET", prefix + path).status in (400, 404)
    assert ask(steady, "GET", f"/me/model/resolve/{path}/file.bin").status in (400, 404)


BAD_NAMES = ["..", "a..b", ".hidden", "a--b", "x.git", "a/b", "a" * 97, "a\\b", "caf\u00e9", ""]
BAD_IDS = [("..", "me"), ("datasets", "x"), ("api", "x"), *(("me", name) for name in BAD_NAMES)]


@pytest.mark.parametrize(("owner", "name"), BAD_IDS)
def test_bad_repository_names(steady_hub: EmbeddedHub, owner: str, name: str) -> None:
    body = {"organization": owner, "name": name}
    assert ask(steady_hub.url, "POST", "/api/repos/create", body).status == 400
    assert [repository.id for repository in steady_hub.store.repositories("models")] == ["me/model"]


BAD_REFS = ["a..b", "-x", ".x", "x.lock", "a//b", "a b", "a~1", "a^", "a:b", "a?", "a*", "a[", "a\\b", "refs/heads/x"]
BAD_REFS += ["@{x", "0" * 40, "HEAD", "x/", "a" * 256, "nul\0", "@"]


@pytest.mark.parametrize("name", BAD_REFS)
def test_bad_branch_and_tag_names(steady: str, name: str) -> None:
    assert ask(steady, "POST", f"/api/models/me/model/branch/{quote(name, safe='')}", b"{}").status in (400, 404)
    assert ask(steady, "POST", "/api/models/me/model/tag/main", {"tag": name}).status == 400
    refs = ask(steady, "GET", "/api/models/me/model/refs").json()
    assert ([branch["name"] for branch in refs["branches"]], refs["tags"]) == (["main"], [])


def test_a_file_is_never_also_a_folder(steady: str) -> None:
    for files in ({"file.bin/inner": b"x"}, {"one/two": b"x", "one": b"y"}):
        answer = ask(steady, "POST", COMMIT, commit_body(files))
        assert answer.status == 400 and "cannot be a file and a folder" in answer.headers["X-Error-Message"]


def test_symbolic_links_are_not_followed(url: str, hub: EmbeddedHub, tmp_path: Path) -> None:
    outside = write_files(tmp_path / "outside", {"secret": CONTENT})
    blob = hub.store.blobs.path(hashlib.sha256(CONTENT).hexdigest())
    blob.unlink()
    blob.symlink_to(outside / "secret")
    assert resolve(url).status == 500
    (hub.root / "models" / "linked").symlink_to(outside, target_is_directory=True)
    assert create_repository(url, "linked/model").status == 500
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]


def upload(url: str, data: bytes, announced: bytes | None = None, **changes: str):
    """Upload `data` where the announced content may go, with changes to the query of the URL."""
    announced = data if announced is None else announced
    path = str(request_lfs_upload(url, hashlib.sha256(announced).hexdigest(), len(announced)))
    for key, value in changes.items():
        path = re.sub(f"{key}=[^&]*", f"{key}={value}", path)
    return ask(url, "PUT", path, data)


def test_lfs_upload(url: str, hub: EmbeddedHub) -> None:
    data = b"\0large" * 1000
    pointer = lfs_pointer("w.bin", data)
    sha256, body = pointer[1]["oid"], commit_body({}, pointer)
    assert ask(url, "POST", COMMIT, body).status == 400, "a pointer to nothing must be refused"
    assert upload(url, data).status == 200
    assert request_lfs_upload(url, sha256, len(data)) is None
    pointer[1]["size"] += 1
    assert ask(url, "POST", COMMIT, commit_body({}, pointer)).status == 400
    assert ask(url, "POST", COMMIT, body).status == 200
    answer = resolve(url, "w.bin")
    assert (answer.body, answer.headers["ETag"]) == (data, f'"{sha256}"')
    assert (answer.headers["X-Linked-ETag"], answer.headers["X-Linked-Size"]) == (f'"{sha256}"', str(len(data)))
    assert find_damage(hub.store) == []


def test_lfs_content_that_differs_is_refused(url: str, hub: EmbeddedHub) -> None:
    announced = b"x" * 5000
    for data, status in ((b"y" * 5000, 400), (b"x" * 4999, 400), (b"x" * 5001, 413), (b"", 400)):
        answer = upload(url, data, announced)
        assert answer.status == status
    assert request_lfs_upload(url, hashlib.sha256(announced).hexdigest(), 5000) is not None
    assert list(hub.store.incoming.iterdir()) == []


def test_lfs_tickets_cannot_be_changed(url: str) -> None:
    data, zeros = b"x" * 100, "0" * 64
    for changes in ({"size": "101"}, {"expires": "99999999999"}, {"signature": zeros}, {"signature": "caf%C3%A9"}):
        assert upload(url, data, **changes).status == 403
    for query in ("", f"?size=100&expires=99999999999&signature={zeros}"):
        assert ask(url, "PUT", f"/lfs/upload/{zeros}{query}", data).status == 403
    assert ask(url, "PUT", "/lfs/upload/..%2F..%2Fx?size=1", data).status == 400
    assert upload(url, data).status == 200


def test_chunked_bodies(url: str) -> None:
    body = commit_body({"chunked.txt": b"c" * 100_000})
    assert ask(url, "POST", COMMIT, (body[i : i + 7777] for i in range(0, len(body), 7777))).status == 200
    assert resolve(url, "chunked.txt").body == b"c" * 100_000


def test_a_client_that_leaves_in_the_middle_of_a_body_changes_nothing(url: str, hub: EmbeddedHub) -> None:
    split, body = urlsplit(url), commit_body({"late.txt": b"late"})
    head = f"POST {COMMIT} HTTP/1.1\r\nHost: {split.netloc}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for sent in (head, head + body[:-5]):
        with socket.create_connection((split.hostname, split.port), timeout=30) as connection:
            connection.sendall(sent)
    assert [commit["title"] for commit in ask(url, "GET", "/api/models/me/model/commits/main").json()][0] == "a commit"
    assert resolve(url, "late.txt").status == 404
    hub.stop()
    assert list((hub.root / "incoming").iterdir()) == []


def test_bodies_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_ext.embedded_hub.uploads.MAXIMUM_FILE_BYTES", 100_000)
    with EmbeddedHub(tmp_path) as hub:
        create_repository(hub.url, "me/model")
        batch = {"operation": "upload", "objects": [{"oid": "0" * 64, "size": 100_001}]}
        path = "/me/model.git/info/lfs/objects/batch"
        assert ask(hub.url, "POST", path, batch).json()["objects"][0]["error"]["code"] == 413
        big = commit_body({f"{i}.txt": b"x" * 5000 for i in range(30)})
        assert ask(hub.url, "POST", COMMIT, big).status == 413
        assert ask(hub.url, "POST", COMMIT, iter([big[:50_000], big[50_000:]])).status == 413
        # Far more than the sockets buffer: a client that is still sending must get the refusal, not a broken pipe.
        zeros = bytes(1 << 20)
        answer = ask(hub.url, "POST", COMMIT, (zeros for _ in range(40)), {"Content-Length": str(40 << 20)})
        assert answer.status == 413
        assert ask(hub.url, "POST", "/api/repos/create", b" " * (17 << 20)).status == 413
        assert find_damage(hub.store) == [] and list(hub.store.incoming.iterdir()) == []


def test_a_regular_file_that_is_too_large(url: str) -> None:
    answer = ask(url, "POST", COMMIT, commit_body({"big.txt": bytes((10 << 20) + 1)}))
    assert answer.status == 413 and "use LFS" in answer.headers["X-Error-Message"]
    assert ask(url, "POST", COMMIT, commit_body({"fits.txt": bytes(10 << 20)})).status == 200


HEADER = b'{"key": "header", "value": {"summary": "s"}}\n'
FILE = b'{"key": "file", "value": {"path": "x", "content": "%s", "encoding": "base64"}}'
COMMITS = [b"", b"[]", b"not json", b"[" * 100_000, FILE % b"", HEADER + FILE % b"?"]
COMMITS += [
    b'{"key": "header", "value": %s}' % value for value in (b"3", b'{"summary": ""}', b'{"summary": "\\ud800"}')
]
COMMITS += [HEADER + b'{"key": "unknown", "value": {"path": "x"}}']
COMMITS += [HEADER + b'{"key": "lfsFile", "value": {"path": "x", "oid": "../../../x"}}']


@pytest.mark.parametrize("body", COMMITS)
def test_malformed_commits(steady: str, body: bytes) -> None:
    before = ask(steady, "GET", "/api/models/me/model").json()["sha"]
    assert ask(steady, "POST", COMMIT, body).status == 400
    assert ask(steady, "GET", "/api/models/me/model").json()["sha"] == before


def test_commits_go_to_branches_only(url: str) -> None:
    head = ask(url, "GET", "/api/models/me/model").json()["sha"]
    assert ask(url, "POST", "/api/models/me/model/tag/main", b'{"tag": "v1"}').status == 200
    for revision, status in (("v1", 400), ("refs%2Ftags%2Fv1", 400), (head, 400), ("refs%2Fpr%2F1", 404)):
        path = f"/api/models/me/model/commit/{revision}"
        assert ask(url, "POST", path, commit_body({"x": b"x"})).status == status, revision


def test_simultaneous_commits(url: str, hub: EmbeddedHub) -> None:
    def commit(number: int, **header: str):
        return ask(url, "POST", COMMIT, commit_body({f"{number}.txt": b"%d" % number}, **header))

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(commit, range(30)))
    assert [answer.status for answer in answers] == [200] * 30
    repository = hub.store.repository("models", "me/model")
    assert repository is not None
    history = list(repository.history(repository.resolve("main")))
    assert {answer.json()["commitOid"] for answer in answers} < {commit.oid for commit in history}
    assert len(history) == 32 and all(len(commit.parents) == 1 for commit in history[:-1])
    assert len(repository.snapshot(history[0].oid).files) == 32
    # Of those who commit to the same parent, one wins.
    with ThreadPoolExecutor(6) as threads:
        racers = threads.map(lambda number: commit(number, parentCommit=history[0].oid).status, range(90, 96))
    assert sorted(racers) == [200] + [412] * 5
    assert find_damage(hub.store) == []


def test_listings_come_in_pages(url: str) -> None:
    commit = ask(url, "POST", COMMIT, commit_body({f"many/{i:04}.txt": b"x" for i in range(2100)})).json()["commitOid"]
    path, pages = "/api/models/me/model/tree/main/many?recursive=true", []
    while path:
        page = ask(url, "GET", path)
        pages.append([entry["path"] for entry in page.json()])
        path = page.headers.get("Link", "").partition(">")[0].removeprefix(f"<{url}")
        assert not path or commit in path
    names = [f"many/{i:04}.txt" for i in range(2100)]
    assert pages == [names[:1000], names[1000:2000], names[2000:]]


def test_connections_are_kept_and_end_with_the_server(tmp_path: Path) -> None:
    hub = EmbeddedHub(tmp_path).start()
    split = urlsplit(hub.url)
    question = f"GET /api/models HTTP/1.1\r\nHost: {split.netloc}\r\n\r\n".encode()
    with socket.create_connection((split.hostname, split.port), timeout=30) as connection:
        for _ in range(2):
            connection.sendall(question)
            answer = b""
            while not answer.endswith(b"\r\n\r\n[]"):
                answer += connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200")
        hub.stop()
        assert connection.recv(65536) == b""
    hub.stop()
    with refused(ValueError, "start"):
        _ = hub.url
