"""Whole repositories on the embedded Hub: their cards, ids of one part, listings, moving."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from hf_ext.embedded_hub.server import EmbeddedHub
from tests.kit.hub import CONTENT, Answer, ask, commit_body, commit_large, create_repository, find_damage

from .conftest import BEARER, COMMIT


def post(url: str, path: str, **payload: Any) -> Answer:
    """Send a JSON object."""
    return ask(url, "POST", path, payload)


def reject_constant(name: str) -> None:
    """What JSON does not have."""
    raise AssertionError(f"{name} is no JSON")


ODD = {
    "a date as key": ("changelog:\n  2024-01-01: first", {"changelog": {"2024-01-01": "first"}}),
    "a binary": ("a: !!binary aGk=", {"a": "aGk="}),
    "other keys": ("null: 1\ntrue: 2\n3: 4\n1.5: 6", {"null": 1, "true": 2, "3": 4, "1.5": 6}),
    "a huge integer": ("a: 0x" + "F" * 5000, None),
    "a large integer as key": ("1" + "0" * 40 + ": a", {"1e+40": "a"}),
    "a sexagesimal float": ("a: 1" + ":59" * 200 + ".5", None),
    "no numbers": ("a: .nan\nb: .inf\nc: -.inf", {"a": None, "b": None, "c": None}),
    "a set": ("a: !!set {x, y}", None),
    "an ordered map": ("a: !!omap [b: 1]", {"a": [["b", 1]]}),
    "a surrogate": ('a: "\\ud800"', None),
    "a tag on an empty number": ("a: !!int ''", None),
    "a date that is none": ("a: 2024-13-45", None),
}


@pytest.mark.parametrize("name", ODD)
def test_a_card_makes_no_repository_unreachable(steady: str, name: str) -> None:
    text, wanted = ODD[name]
    card = f"---\nlicense: mit\n{text}\n---\n# Title\n"
    checked = post(steady, "/api/validate-yaml", content=card)
    assert checked.status in (200, 400) and isinstance(checked.json()["errors"], list)
    assert ask(steady, "POST", COMMIT, commit_body({"README.md": card.encode()})).status == 200
    answer = ask(steady, "GET", "/api/models/me/model")
    assert answer.status == 200
    described = json.loads(answer.body, parse_constant=reject_constant)
    if wanted is not None:
        assert described["cardData"] == {"license": "mit", **wanted}
        assert "license:mit" in described["tags"]
        assert checked.status == 200
    assert ask(steady, "GET", "/api/models/me/model/revision/main?blobs=true").status == 200


# Ids.


@pytest.mark.parametrize(
    "path",
    [
        *("/api/models/bert-base-uncased", "/api/models/bert-base-uncased/tree/main", "/api/models/bert/refs"),
        *("/api/datasets/squad/tree/main/plain", "/bert/resolve/main/config.json", "/spaces/x/resolve/main/app.py"),
    ],
)
def test_unknown_ids_of_one_part_are_repositories_that_are_not_there(steady: str, path: str) -> None:
    answer = ask(steady, "GET", path)
    assert (answer.status, answer.headers["X-Error-Code"]) == (404, "RepoNotFound")


def test_an_id_of_one_part_is_of_the_only_user(url: str) -> None:
    assert post(url, "/api/repos/create", name="mine").json()["name"] == "local/mine"
    assert ask(url, "POST", "/api/models/mine/commit/main", commit_body({"a/b.txt": b"x"})).status == 200
    assert ask(url, "GET", "/api/models/mine").json()["id"] == "local/mine"
    assert ask(url, "GET", "/mine/resolve/main/a/b.txt").body == b"x"
    assert [branch["name"] for branch in ask(url, "GET", "/api/models/mine/refs").json()["branches"]] == ["main"]
    # A model of that name comes first.
    assert create_repository(url, "mine/refs").status == 200
    assert ask(url, "GET", "/api/models/mine/refs").json()["id"] == "mine/refs"


def test_listings_obey_their_limit(url: str, hub: EmbeddedHub) -> None:
    for i in range(5):
        assert create_repository(url, f"other/m{i}", private=i == 2).status == 200
    path, sizes, names = "/api/models?limit=2", [], []
    while path:
        page = ask(url, "GET", path)
        sizes.append(len(page.json()))
        names += [each["id"] for each in page.json()]
        path = page.headers.get("Link", "").partition(">")[0].removeprefix(f"<{url}")
    assert sizes == [2, 2, 2] and names == ["me/model", *(f"other/m{i}" for i in range(5))]
    assert [each["id"] for each in ask(url, "GET", "/api/models?author=other&search=M3").json()] == ["other/m3"]
    link = ask(url, "GET", "/api/models?author=other&limit=4").headers["Link"]
    assert "author=other" in link
    assert [each["id"] for each in ask(url, "GET", link[len(url) + 1 :].partition(">")[0]).json()] == ["other/m4"]


def test_files_of_file_managers_are_no_repositories_and_tags_filter(url: str, hub: EmbeddedHub) -> None:
    (hub.root / "models" / "me" / ".DS_Store").touch()
    (hub.root / "models" / "me" / "@eaDir").mkdir()
    for number, card in enumerate((b"---\nlicense: mit\ntags: [a]\n---\n", b"---\ntags: [a]\n---\n", b"")):
        assert create_repository(url, f"me/model{number}").status == 200
        body = commit_body({"README.md": card})
        assert ask(url, "POST", f"/api/models/me/model{number}/commit/main", body).status == 200
    for query, found in {"": 4, "filter=a": 2, "filter=license:mit&filter=a": 1, "filter=b": 0}.items():
        assert len(ask(url, "GET", f"/api/models?{query}").json()) == found
    first = ask(url, "GET", "//api/models?filter=a&limit=1")
    rest = ask(url, "GET", first.headers["Link"].partition(url)[2].partition(">")[0])
    assert [each["id"] for each in first.json() + rest.json()] == ["me/model0", "me/model1"]
    assert ask(url, "GET", "/").status == 200


def test_moving(url: str, hub: EmbeddedHub) -> None:
    head = ask(url, "GET", "/api/models/me/model").json()["sha"]
    assert create_repository(url, "me/taken").status == 200
    taken = post(url, "/api/repos/move", fromRepo="me/model", toRepo="me/taken", type="model")
    assert taken.status == 409 and "me/taken already exists" in taken.headers["X-Error-Message"]
    for wrong, status in (("../x", 400), ("me/a..b", 400), ("datasets/x", 400), ("alone", 400)):
        assert post(url, "/api/repos/move", fromRepo="me/model", toRepo=wrong).status == status, wrong
    assert post(url, "/api/repos/move", fromRepo="me/none", toRepo="me/x").status == 404
    assert post(url, "/api/repos/move", fromRepo="me/model", toRepo="new/place", type="model").status == 200
    assert ask(url, "GET", "/new/place/resolve/main/file.bin").body == CONTENT
    described = ask(url, "GET", "/api/models/new/place").json()
    assert (described["id"], described["sha"]) == ("new/place", head)
    assert ask(url, "POST", "/api/models/new/place/commit/main", commit_body({"later": b"x"})).status == 200
    hub.stop()
    with EmbeddedHub(hub.root) as again:
        assert find_damage(again.store) == []
        assert again.store.identifiers("models") == ["me/taken", "new/place"]
        assert ask(again.url, "GET", "/api/models/me/model").headers["Location"] == "/api/models/new/place"


def test_old_ids_lead_to_the_new_ones(url: str, hub: EmbeddedHub) -> None:
    def place(path: str, method: str = "GET") -> str | None:
        answer = ask(url, method, path)
        return answer.headers["Location"] if answer.status == 307 else None

    assert post(url, "/api/repos/move", fromRepo="me/model", toRepo="new/place").status == 200
    assert post(url, "/api/repos/move", fromRepo="new/place", toRepo="local/last").status == 200
    assert place("/me/model/resolve/main/a%2Fb.bin", "HEAD") == "/local/last/resolve/main/a%2Fb.bin"
    assert place("/api/models/me/model/tree/main?recursive=True&x=a%26b") == (
        "/api/models/local/last/tree/main?recursive=True&x=a%26b"
    )
    assert place("/api/models/new/place/commit/main", "POST") == "/api/models/local/last/commit/main"
    assert place("/me/model") == "/local/last"
    # What is not there, of another kind, or has the name again is no move.
    for path in ("/me/none", "/datasets/me/model", "/api/datasets/me/model", "/local/last"):
        assert place(path) is None
    assert create_repository(url, "me/model").status == 200
    assert place("/api/models/me/model") is None and ask(url, "GET", "/api/models/me/model").status == 200
    assert ask(url, "DELETE", "/api/repos/delete", b'{"organization": "me", "name": "model"}').status == 200
    assert ask(url, "GET", "/api/models/me/model").status == 404
    # Back again, and by a name of one part.
    assert post(url, "/api/repos/move", fromRepo="local/last", toRepo="new/place").status == 200
    assert place("/last/resolve/main/file.bin") == "/new/place/resolve/main/file.bin"
    assert place("/new/place") is None and ask(url, "GET", "/new/place/resolve/main/file.bin").body == CONTENT


def test_an_old_id_tells_nothing_of_what_is_private(tmp_path: Path) -> None:
    with EmbeddedHub(tmp_path, token="correct-horse", public_url="https://hub.lab/mirror/") as hub:
        assert create_repository(hub.url, "me/old", BEARER, private=True).status == 200
        moved = ask(hub.url, "POST", "/api/repos/move", {"fromRepo": "me/old", "toRepo": "me/new"}, BEARER)
        assert moved.status == 200
        refused, missing = (ask(hub.url, "GET", f"/api/models/me/{name}") for name in ("old", "none"))
        assert refused.status == missing.status == 401 and refused.headers["Location"] is None
        assert refused.body.replace(b"old", b"none") == missing.body
        # A proxy has a path of its own before that of the server.
        seen = ask(hub.url, "GET", "/api/models/me/old", headers=BEARER)
        assert (seen.status, seen.headers["Location"]) == (307, "/mirror/api/models/me/new")


def test_files_as_text(url: str) -> None:
    data = b"large" * 1000
    commit_large(url, {"w.bin": data})
    assert ask(url, "POST", COMMIT, commit_body({"a b.txt": "\u00e9t\u00e9 <b>".encode()})).status == 200
    answer = ask(url, "GET", "/me/model/raw/main/a%20b.txt")
    assert (answer.body.decode(), answer.headers["Content-Type"]) == ("\u00e9t\u00e9 <b>", "text/plain; charset=utf-8")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "sandbox" in answer.headers["Content-Security-Policy"]
    pointer = ask(url, "GET", "/me/model/raw/main/w.bin").body.decode().splitlines()
    assert pointer[1:] == [f"oid sha256:{hashlib.sha256(data).hexdigest()}", "size 5000"]
    head = ask(url, "HEAD", "/me/model/raw/main/a%20b.txt")
    assert (head.body, head.headers["Content-Length"]) == (b"", str(len("\u00e9t\u00e9 <b>".encode())))
    assert ask(url, "GET", "/me/model/raw/main/none").headers["X-Error-Code"] == "EntryNotFound"


# Revisions.


def test_revisions_by_their_first_digits(url: str) -> None:
    head = ask(url, "GET", "/api/models/me/model").json()["sha"]
    assert ask(url, "POST", COMMIT, commit_body({"file.bin": b"new"})).status == 200
    assert post(url, f"/api/models/me/model/tag/{head[:7]}", tag="short").status == 200
    assert ask(url, "GET", f"/me/model/resolve/{head[:9]}/file.bin").body == CONTENT
    assert ask(url, "GET", "/me/model/resolve/short/file.bin").headers["X-Repo-Commit"] == head
    for revision in (head[:6], head[:7] + "g", "0" * 10):
        assert ask(url, "GET", f"/me/model/resolve/{revision}/file.bin").headers["X-Error-Code"] == "RevisionNotFound"


def test_the_title_of_a_pull_request_is_one_line(url: str) -> None:
    made = post(url, "/api/models/me/model/discussions", title=" a\n\nb ", pullRequest=True)
    assert made.json()["title"] == "a b"
    assert post(url, "/api/models/me/model/discussions", title=" \n", pullRequest=True).status == 400


def test_a_folder_may_be_deleted_after_its_files(url: str) -> None:
    assert ask(url, "POST", COMMIT, commit_body({"d/a": b"1", "d/b": b"2"})).status == 200
    files = [("deletedFile", {"path": f"d/{name}"}) for name in "ab"]
    assert ask(url, "POST", COMMIT, commit_body({}, *files, ("deletedFolder", {"path": "d/"}))).status == 200
    names = [each["path"] for each in ask(url, "GET", "/api/models/me/model/tree/main?recursive=true").json()]
    assert names == [".gitattributes", "file.bin"]


@pytest.mark.parametrize("again", ["created", "moved there"])
def test_an_old_id_does_not_lead_to_another_repository_of_the_new_name(url: str, again: str) -> None:
    assert post(url, "/api/repos/move", fromRepo="me/model", toRepo="new/place").status == 200
    assert ask(url, "DELETE", "/api/repos/delete", b'{"organization": "new", "name": "place"}').status == 200
    if again == "created":
        assert create_repository(url, "new/place").status == 200
    else:
        assert create_repository(url, "me/other").status == 200
        assert post(url, "/api/repos/move", fromRepo="me/other", toRepo="new/place").status == 200
        assert ask(url, "GET", "/api/models/me/other").status == 307
    assert ask(url, "GET", "/api/models/me/model").status == 404
    assert ask(url, "GET", "/api/models/new/place").status == 200


def test_a_reference_hides_no_other_one(url: str) -> None:
    def make(kind: str, name: str) -> int:
        if kind == "branch":
            return ask(url, "POST", f"/api/models/me/model/branch/{name}", b"{}").status
        return post(url, "/api/models/me/model/tag/main", tag=name).status

    commit = ask(url, "GET", "/api/models/me/model").json()["sha"]
    for first, second in (("branch", "tag"), ("tag", "branch"), ("tag", "tag"), ("branch", "branch")):
        name = f"{first}-{second}"
        assert make(first, name) == 200 and make(second, name) == 409
    for name in (commit[:7], commit[:12], "main"):
        assert make("tag", name) == 409 and make("branch", name) == 409
    assert make("branch", "f" * 7) == 200
