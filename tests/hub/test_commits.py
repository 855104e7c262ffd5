"""A push is what is there afterwards: a Hub may ignore, drop, delay and refuse, and others may push."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hf_ext.embedded_hub.server import EmbeddedHub
from hf_ext.errors import FAILED, classify
from hf_ext.hub import commits
from hf_ext.hub.commits import NoHub, NotOnHub
from hf_ext.hub.publish import push, stage
from tests.kit.refusals import refused

from .published import commit, contents, on_hub, save_bert, titles
from .unfaithful_hub import Reply, UnfaithfulHub

COMMIT = "/api/models/org/model/commit/main"
TREE = "/api/models/org/model/tree/"


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch) -> None:
    monkeypatch.setattr(commits, "_WAITS", (0.01, 0.01))


@pytest.fixture
def proxy(hub) -> Iterator[UnfaithfulHub]:
    running = UnfaithfulHub(hub.url)
    yield running
    running.stop()


def publish(source: Path, hub: EmbeddedHub | UnfaithfulHub, **options):
    return push(source, "org/model", endpoint=hub.url, token=False, check=False, **options)


def differences(source: Path, hub: EmbeddedHub | UnfaithfulHub, **options) -> list[str]:
    """The files for which a push is refused."""
    with pytest.raises(NotOnHub) as caught:
        publish(source, hub, **options)
    return list(caught.value.files)


def assert_whole(api, source: Path, tmp_path: Path, **others: bytes) -> None:
    """What is on the Hub is what is staged of a folder, and other files by their names."""
    assert on_hub(api, tmp_path) == contents(stage(source, tmp_path / "staged", repo_id="org/model")) | others


def test_what_the_hub_would_ignore_is_refused_before_anything_is_sent(hub, api, bert, tmp_path):
    api.create_repo("org/model")
    commit(api, **{".gitignore": b"/model*\n*.json\n"})
    before = api.list_repo_files("org/model"), titles(api)
    with refused(NotOnHub, repo_id="org/model") as caught:
        publish(bert, hub)
    assert set(caught.value.files) == {"model.safetensors", "config.json"}
    assert (api.list_repo_files("org/model"), titles(api)) == before
    assert classify(caught.value).exit_code == FAILED
    # Rules for other files are no hindrance.
    commit(api, **{".gitignore": b"*.bin\nruns/\n"})
    publish(bert, hub)
    assert_whole(api, bert, tmp_path)


@pytest.mark.parametrize("there", ["README.md/mine", ".eval_results"])
def test_a_file_where_the_repository_has_a_folder_and_the_other_way_round_are_refused(hub, api, snapshot, there):
    api.create_repo("org/model")
    commit(api, **{there: b"mine"})
    assert differences(snapshot, hub) == [there]
    assert len(titles(api)) == 2


def change_commit(name, change=lambda line: []):
    """A rule that changes the line of a file on its way in a commit, which is without it if nothing else is said."""

    def rule(method, path, body, forward):
        if method == "POST" and path.startswith(COMMIT):
            lines = [json.loads(line) for line in body.splitlines() if line.strip()]
            lines = [
                each for line in lines for each in (change(line) if line["value"].get("path") == name else [line])
            ]
            body = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        return forward(body)

    return rule


def rewritten(start):
    """A file has another beginning, or no content."""

    def rewrite(line):
        content = start and start + line["value"]["content"][len(start) :]
        return [line | {"value": line["value"] | {"content": content}}]

    return rewrite


CHANGED = [("model.safetensors",), ("README.md",), ("config.json", rewritten("")), ("config.json", rewritten("QUFB"))]


@pytest.mark.parametrize("changed", CHANGED)
def test_a_hub_that_drops_or_changes_a_file_is_found_out(proxy, bert, changed):
    proxy.rule = change_commit(*changed)
    assert differences(bert, proxy) == [changed[0]]


def test_weights_of_an_earlier_push_that_stay_are_found_out(proxy, api, bert):
    publish(bert, proxy)
    commit(api, **{"training.json": b"{}"})
    proxy.rule = change_commit("training.json")
    (bert / "vocab.txt").write_text("a\n")
    assert differences(bert, proxy) == ["training.json"]


def test_a_commit_that_no_branch_has_is_found_out(proxy, bert):
    oid = "0123456789" * 4

    def rule(method, path, body, forward):
        if method == "POST" and path.startswith(COMMIT):
            told = {"commitOid": oid, "commitUrl": f"{proxy.url}/org/model/commit/{oid}"}
            return Reply(200, json.dumps(told).encode())
        return forward(body)

    proxy.rule = rule
    assert differences(bert, proxy) == ["main"]


def test_a_hub_that_shows_a_commit_late_is_waited_for(proxy, api, bert, tmp_path):
    stale: list[Reply] = []
    committed: list[str] = []

    def rule(method, path, body, forward):
        reply = forward(body)
        if method == "POST" and path.startswith(COMMIT):
            committed.append(path)
        if path.startswith(TREE) and not committed:
            stale.append(reply)
        if path.startswith(TREE) and committed and len(committed) < 2:
            committed.append("late")
            return stale[0]
        return reply

    proxy.rule = rule
    publish(bert, proxy)
    assert len(committed) == 2
    assert_whole(api, bert, tmp_path)


# Where a push asks, and what may happen to it there: an answer that is lost, late, an error, of another kind, or cut.
ASKED = {"create": "/api/repos/create", "look": TREE, "modes": "/preupload/", "batch": "/info/lfs/objects/batch"}
ASKED |= {"content": "/lfs/upload/", "commit": "/commit/"}
HAPPENS: dict[str, Callable[[Callable[[], Reply]], Reply | None]] = {
    # The true Hub never hears of it, or does what was asked before its answer is changed.
    "unheard": lambda send: None,
    "unheard, 500": lambda send: Reply(500, b"oops"),
    "lost": lambda send: send() and None,
    "late": lambda send: threading.Event().wait(0.2) or send(),
    "401": lambda send: Reply(401, b'{"error": "no"}'),
    "403": lambda send: send() and Reply(403, b'{"error": "no"}'),
    "404": lambda send: Reply(404, b'{"error": "no"}'),
    "413": lambda send: Reply(413, b'{"error": "too large"}'),
    "429": lambda send: Reply(429, b'{"error": "later"}', {"Retry-After": "0"}),
    "503": lambda send: send() and Reply(503, b""),
    "504": lambda send: send() and Reply(504, b"{}"),
    "a page": lambda send: send() and Reply(200, b"<html>Please log in</html>", {"Content-Type": "text/html"}),
    "a list": lambda send: send() and Reply(200, b"[]", {"Content-Type": "application/json"}),
    "an object": lambda send: send() and Reply(200, b"{}", {"Content-Type": "application/json"}),
    "412": lambda send: Reply(412, b'{"error": "changed"}'),
    "torn": lambda send: (reply := send())._replace(sent=len(reply.body) // 2),
    "cut": lambda send: (reply := send()) and Reply(reply.status, reply.body[: len(reply.body) // 2], reply.headers),
}


# All of them, four of them in each run of the tests.
OFTEN = [("commit", "lost"), ("modes", "a page"), ("modes", "413"), ("commit", "unheard"), ("content", "403")]
ALL = [pytest.param(asked, kind, marks=pytest.mark.slow) for asked in ASKED for kind in HAPPENS]


@pytest.mark.parametrize(("asked", "happens"), OFTEN + [row for row in ALL if row.values not in OFTEN])
def test_whatever_happens_a_push_is_whole_or_refused_in_words(proxy, api, bert, tmp_path, monkeypatch, asked, happens):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    met = []

    def rule(method, path, body, forward):
        if ASKED[asked] not in path:
            return forward(body)
        met.append(path)
        return HAPPENS[happens](lambda: forward(body))

    proxy.rule = rule
    try:
        publish(bert, proxy, commit_message="Mine")
    except Exception as error:
        ending = classify(error)
        assert ending is not None and ending.message, error
        # A commit of which only the answer was lost is found; what answers in another way than a Hub is named.
        assert (asked, happens) not in (("commit", "lost"), ("commit", "504")), error
        named = isinstance(error, NoHub) and error.endpoint == proxy.url
        assert named or (asked, happens) not in (("modes", "a page"), ("modes", "an object")), error
        # A large file that does not arrive is named.
        assert (asked, happens) != ("content", "403") or list(error.files) == ["model.safetensors"], error
        assert ending.exit_code == FAILED or happens in ("401", "404"), error
        # Where only the answer was lost, the commit may be there, and then it is whole.
        if not api.repo_exists("org/model") or titles(api) == ["initial commit"]:
            return
    assert met
    assert titles(api) == ["Mine", "initial commit"]
    assert_whole(api, bert, tmp_path)


def interrupting(api, files):
    """A rule by which somebody else commits between the first look and the commit of a push."""
    left = list(files)

    def rule(method, path, body, forward):
        if method == "POST" and path.startswith(COMMIT) and left:
            commit(api, **{left.pop(0): b"---\nlicense: mit\n---\n"})
        return forward(body)

    return rule


def test_other_files_that_somebody_commits_meanwhile_are_kept(proxy, api, bert, tmp_path):
    proxy.rule = interrupting(api, ["notes.md", "more.md"])
    publish(bert, proxy, commit_message="Mine")
    assert titles(api)[0] == "Mine"
    assert_whole(api, bert, tmp_path, **dict.fromkeys(("notes.md", "more.md"), b"---\nlicense: mit\n---\n"))
    # A repository that is never quiet is given up in words.
    proxy.rule = interrupting(api, [f"{index}.md" for index in range(20)])
    (bert / "vocab.txt").write_text("a\n")
    assert differences(bert, proxy) == ["main"]


@pytest.mark.parametrize("name", ["config.json", "README.md", "training.json"])
def test_the_same_files_that_somebody_commits_meanwhile_are_not_replaced(proxy, api, bert, name):
    proxy.rule = interrupting(api, [name])
    assert differences(bert, proxy) == [name]
    assert len(titles(api)) == 2


def test_pushes_at_once_end_with_one_model_or_in_words(hub, api, tmp_path):
    sources = [save_bert(tmp_path / f"bert{index}") for index in range(4)]
    for index, source in enumerate(sources[1:]):
        (source / "vocab.txt").write_text(f"{index}\n")

    def attempt(source):
        try:
            return publish(source, hub)
        except NotOnHub as error:
            return error

    publish(sources[0], hub)
    with ThreadPoolExecutor(4) as threads:
        ends = list(threads.map(attempt, sources))
    refused = [end for end in ends if isinstance(end, NotOnHub)]
    assert len(refused) < 4 and all(set(error.files) == {"vocab.txt"} for error in refused)
    # What is there is what those who were not refused pushed: the last of them, whole.
    pushed = {end.oid for end in ends if not isinstance(end, NotOnHub)}
    assert api.model_info("org/model").sha in pushed


def test_the_same_model_pushed_by_four_is_one_commit(hub, api, bert):
    with ThreadPoolExecutor(4) as threads:
        ends = list(threads.map(lambda _: publish(bert, hub, commit_message="Mine"), range(4)))
    assert {end.oid for end in ends} == {api.model_info("org/model").sha}
    assert titles(api) == ["Mine", "initial commit"]


def test_a_commit_that_is_refused_before_the_other_one_shows_is_tried_again(proxy, api, bert):
    left = [Reply(412, b"{}")]
    proxy.rule = lambda method, path, body, forward: left.pop() if COMMIT in path and left else forward(body)
    publish(bert, proxy, commit_message="Mine")
    assert titles(api) == ["Mine", "initial commit"]
    proxy.rule = lambda method, path, body, forward: Reply(412, b"{}") if COMMIT in path else forward(body)
    (bert / "vocab.txt").write_text("a\n")
    assert differences(bert, proxy) == ["main"]


def test_the_reason_of_a_hub_that_has_no_room_is_told(proxy, bert):
    full = {"objects": [{"oid": "0" * 64, "size": 1, "error": {"code": 507, "message": "quota of 1 GB"}}]}
    told = Reply(200, json.dumps(full).encode(), {"Content-Type": "application/json"})
    proxy.rule = lambda method, path, body, forward: told if "objects/batch" in path else forward(body)
    with refused(NoHub, "quota of 1 GB"):
        publish(bert, proxy)


def test_the_cause_of_an_upload_that_failed_for_another_reason_is_kept(proxy, bert):
    def rule(method, path, body, forward):
        reply = forward(body)
        if "objects/batch" not in path:
            return reply
        told = json.loads(reply.body)
        told["objects"][0]["actions"]["upload"]["header"] = {"chunk_size": "large"}
        return reply._replace(body=json.dumps(told).encode())

    proxy.rule = rule
    with refused(RuntimeError, "model.safetensors") as caught:
        publish(bert, proxy)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_pull_request_is_verified_too(proxy, api, bert, tmp_path):
    api.create_repo("org/model")
    proxy.rule = change_commit("README.md")
    assert differences(bert, proxy, create_pr=True) == ["README.md"]
    assert {each.path.partition("?")[2] for each in proxy.asked if "/preupload/" in each.path} == {"create_pr=1"}
    assert titles(api) == ["initial commit"]
