"""Whole repositories on the embedded Hub: their cards, ids of one part, listings, searches, moving."""

import hashlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from hf_ext.embedded_hub.objects import Snapshot
from hf_ext.embedded_hub.server import EmbeddedHub
from tests.kit.hub import CONTENT, Answer, ask, commit_body, commit_large, create_repository, find_damage

from .conftest import BEARER, COMMIT


def post(url: str, path: str, **payload: Any) -> Answer:
    return ask(url, "POST", path, payload)


def move(url: str, old: str, new: str) -> int:
    return post(url, "/api/repos/move", fromRepo=old, toRepo=new).status


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
    # NaN and infinities are no JSON.
    described = json.loads(answer.body, parse_constant=pytest.fail)
    if wanted is not None:
        assert described["cardData"] == {"license": "mit", **wanted}
        assert "license:mit" in described["tags"]
        assert checked.status == 200
    assert ask(steady, "GET", "/api/models/me/model/revision/main?blobs=true").status == 200


def test_an_id_of_one_part_is_of_the_only_user(url: str) -> None:
    # Those that nobody made are repositories that are not there.
    for path in (
        *("/api/models/bert-base-uncased", "/api/models/bert-base-uncased/tree/main", "/api/models/bert/refs"),
        *("/api/datasets/squad/tree/main/plain", "/bert/resolve/main/config.json", "/spaces/x/resolve/main/app.py"),
    ):
        answer = ask(url, "GET", path)
        assert (answer.status, answer.headers["X-Error-Code"]) == (404, "RepoNotFound"), path
    assert post(url, "/api/repos/create", name="mine").json()["name"] == "local/mine"
    assert ask(url, "POST", "/api/models/mine/commit/main", commit_body({"a/b.txt": b"x"})).status == 200
    assert ask(url, "GET", "/api/models/mine").json()["id"] == "local/mine"
    assert ask(url, "GET", "/mine/resolve/main/a/b.txt").body == b"x"
    assert [branch["name"] for branch in ask(url, "GET", "/api/models/mine/refs").json()["branches"]] == ["main"]
    # A model of that name comes first.
    assert create_repository(url, "mine/refs").status == 200
    assert ask(url, "GET", "/api/models/mine/refs").json()["id"] == "mine/refs"


def test_listings_obey_their_limit(url: str) -> None:
    for i in range(5):
        assert create_repository(url, f"other/m{i}", private=i == 2).status == 200
    for query, pages in {
        "limit=2": [["me/model", "other/m0"], ["other/m1", "other/m2"], ["other/m3", "other/m4"]],
        "author=other&search=M3": [["other/m3"]],
        "author=other&limit=4": [["other/m0", "other/m1", "other/m2", "other/m3"], ["other/m4"]],
    }.items():
        path, found = f"/api/models?{query}", []
        while path:
            assert query.partition("&")[0] in path
            page = ask(url, "GET", path)
            found.append([each["id"] for each in page.json()])
            path = page.headers.get("Link", "").partition(">")[0].removeprefix(f"<{url}")
        assert found == pages


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


@pytest.mark.parametrize("state", [b"", b"{", b"{}", b"[]", b"\xff"])
def test_a_damaged_repository_hides_no_other_one(url: str, hub: EmbeddedHub, state: bytes) -> None:
    assert create_repository(url, "me/other").status == 200
    hub.stop()
    (hub.root / "models" / "me" / "other" / "repository.json").write_bytes(state)
    hub.start()
    assert [each["id"] for each in ask(hub.url, "GET", "/api/models").json()] == ["me/model"]
    assert ask(hub.url, "GET", "/").body.count(b"me/model") and ask(hub.url, "GET", "/me/other").status == 500
    # nor is it replaced
    assert create_repository(hub.url, "me/other").status == 500


def test_moving(url: str, hub: EmbeddedHub) -> None:
    head = ask(url, "GET", "/api/models/me/model").json()["sha"]
    assert create_repository(url, "me/taken").status == 200
    taken = post(url, "/api/repos/move", fromRepo="me/model", toRepo="me/taken", type="model")
    assert taken.status == 409 and "me/taken already exists" in taken.headers["X-Error-Message"]
    for wrong in ("../x", "me/a..b", "datasets/x", "alone"):
        assert move(url, "me/model", wrong) == 400, wrong
    assert move(url, "me/none", "me/x") == 404
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

    assert move(url, "me/model", "new/place") == move(url, "new/place", "local/last") == 200
    assert place("/me/model/resolve/main/a%2Fb.bin", "HEAD") == "/local/last/resolve/main/a%2Fb.bin"
    query = "tree/main?recursive=True&x=a%26b"
    assert place(f"/api/models/me/model/{query}") == f"/api/models/local/last/{query}"
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
    assert move(url, "local/last", "new/place") == 200
    assert place("/last/resolve/main/file.bin") == "/new/place/resolve/main/file.bin"
    assert place("/new/place") is None and ask(url, "GET", "/new/place/resolve/main/file.bin").body == CONTENT


@pytest.mark.parametrize("made", ["new/place", "me/other"])
def test_an_old_id_does_not_lead_to_another_repository_of_the_new_name(url: str, made: str) -> None:
    assert move(url, "me/model", "new/place") == 200
    assert ask(url, "DELETE", "/api/repos/delete", b'{"organization": "new", "name": "place"}').status == 200
    assert create_repository(url, made).status == 200
    if made == "me/other":
        assert move(url, made, "new/place") == 200 and ask(url, "GET", "/api/models/me/other").status == 307
    assert [ask(url, "GET", f"/api/models/{name}").status for name in ("me/model", "new/place")] == [404, 200]


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


def test_revisions_by_their_first_digits(url: str) -> None:
    head = ask(url, "GET", "/api/models/me/model").json()["sha"]
    assert ask(url, "POST", COMMIT, commit_body({"file.bin": b"new"})).status == 200
    assert post(url, f"/api/models/me/model/tag/{head[:7]}", tag="short").status == 200
    assert ask(url, "GET", f"/me/model/resolve/{head[:9]}/file.bin").body == CONTENT
    assert ask(url, "GET", "/me/model/resolve/short/file.bin").headers["X-Repo-Commit"] == head
    for revision in (head[:6], head[:7] + "g", "0" * 10):
        assert ask(url, "GET", f"/me/model/resolve/{revision}/file.bin").headers["X-Error-Code"] == "RevisionNotFound"


def test_the_title_of_a_pull_request_is_one_line(url: str) -> None:
    path = "/api/models/me/model/discussions"
    assert post(url, path, title=" a\n\nb ", pullRequest=True).json()["title"] == "a b"
    assert post(url, path, title=" \n", pullRequest=True).status == 400


def test_a_folder_may_be_deleted_after_its_files(url: str) -> None:
    assert ask(url, "POST", COMMIT, commit_body({"d/a": b"1", "d/b": b"2"})).status == 200
    files = [("deletedFile", {"path": f"d/{name}"}) for name in "ab"]
    assert ask(url, "POST", COMMIT, commit_body({}, *files, ("deletedFolder", {"path": "d/"}))).status == 200
    names = [each["path"] for each in ask(url, "GET", "/api/models/me/model/tree/main?recursive=true").json()]
    assert names == [".gitattributes", "file.bin"]


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


CARD = (
    b"---\nlanguage: [en, de]\nlicense: mit\ntask_categories: [translation]\nsize_categories: n<1K\ntags: [a]\n---\n"
)


def test_data_sets_are_found_by_the_tags_of_the_hub(tmp_path: Path) -> None:
    with EmbeddedHub(tmp_path / "hub") as hub:
        api = HfApi(hub.url)
        for kind in ("dataset", "model"):
            api.create_repo("me/mine", repo_type=kind)
            api.upload_file(path_or_fileobj=CARD, path_in_repo="README.md", repo_id="me/mine", repo_type=kind)
        words = ["language:en", "license:mit", "task_categories:translation", "size_categories:n<1K", "a"]
        for wanted in (*words, words):
            assert [found.id for found in api.list_datasets(filter=wanted)] == ["me/mine"], wanted
        assert [found.id for found in api.list_datasets(language="de", task_categories="translation")] == ["me/mine"]
        assert not [*api.list_datasets(filter="language:fr")] and not [*api.list_datasets(filter="en")]
        assert [found.id for found in api.list_models(filter=["en", "license:mit"])] == ["me/mine"]


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HfApi]:
    """A Hub with three models and data sets, whose order by time is none of letters."""
    begun = datetime(2026, 1, 1, tzinfo=UTC)
    clock = SimpleNamespace(now=lambda zone: begun + timedelta(seconds=next(seconds)))
    seconds = count()
    monkeypatch.setattr("hf_ext.embedded_hub.repository.datetime", clock)
    with EmbeddedHub(tmp_path / "hub") as hub:
        api = HfApi(hub.url)
        for kind in ("dataset", "model"):
            for name in ("zz/old", "mm/mid", "aa/new"):
                api.create_repo(name, repo_type=kind)
            api.upload_file(path_or_fileobj=CARD, path_in_repo="README.md", repo_id="mm/mid", repo_type=kind)
        yield api


CREATED, CHANGED = ["aa/new", "mm/mid", "zz/old"], ["mm/mid", "aa/new", "zz/old"]


def test_listings_are_sorted_and_told_as_they_are_asked_for(listed: HfApi, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 3):
        monkeypatch.setattr("hf_ext.embedded_hub.routes._REPOSITORIES_PAGE", number)
        for search in (listed.list_models, listed.list_datasets):
            for sort, wanted in {"created_at": CREATED, "last_modified": CHANGED, "likes": CREATED}.items():
                assert [found.id for found in search(sort=sort)] == wanted, sort
                assert [found.id for found in search(sort=sort, limit=1)] == wanted[:1], sort
            assert [found.id for found in search(search="m", sort="created_at", filter="a")] == ["mm/mid"]
    for search, info in ((listed.list_models, listed.model_info), (listed.list_datasets, listed.dataset_info)):
        (told,), whole = search(search="mid", full=True), info("mm/mid")
        names = ("sha", "tags", "last_modified", "siblings", "author")
        assert [getattr(told, name) for name in names] == [getattr(whole, name) for name in names]
        (told,) = search(search="mid", expand=["sha", "tags"])
        assert (told.sha, told.tags, told.private) == (whole.sha, whole.tags, None)
        assert len(list(search(gated=False))) == 3 and not list(search(gated=True))
    (told,) = listed.list_models(search="mid", cardData=True)
    assert told.card_data == listed.model_info("mm/mid").card_data and told.sha is None
    (told,) = listed.list_datasets(search="mid", full=True)
    assert told.card_data == listed.dataset_info("mm/mid").card_data


@pytest.mark.parametrize(
    "asked", [{"num_parameters": "min:6B"}, {"inference": "warm"}, {"apps": "ollama"}, {"sort": "size"}], ids=str
)
def test_what_a_listing_cannot_choose_by_is_refused(listed: HfApi, asked: dict[str, str]) -> None:
    with pytest.raises(HfHubHTTPError, match=f"this Hub .*{asked.get('sort', next(iter(asked)))}"):
        list(listed.list_models(**asked))


def test_the_sdk_of_a_space_is_kept(listed: HfApi) -> None:
    listed.create_repo("me/space", repo_type="space", space_sdk="gradio")
    assert listed.space_info("me/space").sdk == "gradio"
    assert [found.sdk for found in listed.list_spaces(full=True)] == ["gradio"]


def test_a_listing_by_pages_reads_the_history_once(listed: HfApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_ext.embedded_hub.routes._EXPANDED_TREE_PAGE", 1)
    files = [f"d{number}/{name}.txt" for number in range(3) for name in "ab"]
    for number, path in enumerate(files):
        listed.upload_file(
            path_or_fileobj=path.encode(), path_in_repo=path, repo_id="zz/old", commit_message=f"Add {number}"
        )
    loads = []
    load = Snapshot.load
    monkeypatch.setattr(Snapshot, "load", lambda data: loads.append(0) or load(data))
    found = list(listed.list_repo_tree("zz/old", recursive=True, expand=True))
    titles = {each.path: each.last_commit.title for each in found if each.path != ".gitattributes"}
    assert titles == {path: f"Add {number}" for number, path in enumerate(files)} | {
        f"d{number}": f"Add {2 * number + 1}" for number in range(3)
    }
    assert len(loads) <= len(files) + 1
