"""Rules of the embedded Hub against their origin: git's object ids and `.gitignore`; names that are safe on a disk."""

import hashlib
import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_ext.embedded_hub.descriptions import count_parameters
from hf_ext.embedded_hub.errors import HubError
from hf_ext.embedded_hub.names import check_file_path, check_ref_name
from hf_ext.embedded_hub.objects import Entry, Operation, Snapshot
from hf_ext.embedded_hub.repository import Change, Repository
from hf_ext.embedded_hub.storage import Blob, lfs_pointer
from hf_ext.embedded_hub.store import HubStore
from hf_ext.embedded_hub.uploads import IgnoreRules, plan_uploads
from tests.kit.hub import store_now
from tests.kit.own_data import write_files
from tests.kit.refusals import refused

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is the reference of this test")


def git(folder: Path, *arguments: str, text: str | None = None) -> str:
    """Run git in a folder, without the configuration of the user."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C.UTF-8"}
    command = ["git", "-c", "core.quotePath=false", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, input=text, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HubStore]:
    """A folder without a server."""
    opened = HubStore(tmp_path / "hub")
    yield opened
    opened.close()


def model(store: HubStore, files: dict[str, bytes]) -> Repository:
    operations = [Operation(path, store_now(data, store.blobs)) for path, data in files.items()]
    return store.create("models", "me/model", False, operations)


@needs_git
def test_ids_are_those_of_git(store: HubStore, tmp_path: Path) -> None:
    names = ("a.txt", "a-b", "a/z", "a/b/c/d", "a.d/x", "\u00e9t\u00e9/\u96ea")
    files = {"empty": b""} | {name: name.encode() for name in names}
    repository = model(store, files)
    late = [Operation("late", store_now(b"7", store.blobs))]
    head = repository.append("main", Change("title", "body\n\nmore", late))
    git(tmp_path, "init", "-q", "work")
    work = write_files(tmp_path / "work", files | {"late": b"7"})
    git(work, "add", "-A")
    assert git(work, "write-tree").strip() == head.tree
    snapshot = repository.snapshot(head.oid)
    listed = [line.split(maxsplit=3) for line in git(work, "ls-tree", "-r", "-t", head.tree).splitlines()]
    assert {path: oid for _, _, oid, path in listed} == {
        path: snapshot.id_of(path) for path in (*snapshot.files, *snapshot.folders) if path
    }
    stored = (repository.folder / "commits" / head.oid).read_text()
    assert git(work, "hash-object", "-t", "commit", "--stdin", text=stored).strip() == head.oid
    assert (head.title, head.description) == ("title", "body\n\nmore")


def test_the_id_of_a_large_file_is_that_of_its_pointer() -> None:
    pointer, entry = lfs_pointer("ab" * 32, 5), Entry.of_lfs(Blob("ab" * 32, 5))
    assert pointer == b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 5\n"
    assert entry.oid == hashlib.sha1(b"blob %d\0" % len(pointer) + pointer).hexdigest() and entry.etag == "ab" * 32


IGNORE = "\n# comment\n*.env\n/root.txt\nbuild/\ndocs/*.tmp\n**/cache\ndeep/**/x.log\ntail/**\n!keep.env\n\\#literal\n"
IGNORE += "\\!bang\n[ab]?.txt\n[!ab]z.md\nspace\\ s\na*b*c\ntrailing.txt  \nmid/only\n"
PATHS = [
    ".env", "x.env", "sub/x.env", "keep.env", "sub/keep.env", "root.txt", "sub/root.txt", "build/x", "sub/build/y/z",
    "build", "docs/a.tmp", "docs/sub/a.tmp", "other/docs/a.tmp", "cache/x", "p/cache", "p/q/cache/r", "deep/x.log",
    "deep/a/b/x.log", "deep/x.logs", "tail/a", "tail/a/b", "tail", "#literal", "!bang", "a1.txt", "c1.txt",
    "sub/b2.txt", "cz.md", "az.md", "space s", "abc", "axbxc", "ab", "a/b/c", "trailing.txt", "mid/only",
    "x/mid/only", "commentx", "build/keep.env", "# comment", "ax.txt.bak",
]  # fmt: skip


def count_ignored(folder: Path, rules: str, paths: list[str]) -> int:
    """How many paths we and git ignore, which must be the same ones."""
    (folder / ".gitignore").write_text(rules)
    theirs = git(folder, "check-ignore", "--no-index", "--stdin", text="\n".join(paths)).splitlines()
    ours = IgnoreRules(rules)
    assert [path for path in paths if ours.match(path)] == theirs, rules
    return len(theirs)


@needs_git
def test_ignore_rules_are_those_of_git(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert 10 < count_ignored(tmp_path, IGNORE, PATHS) < len(PATHS) - 10
    rng = random.Random(0)
    paths = sorted({"/".join(rng.choices(["a", "b", "ab", "a.b", "ba"], k=rng.randint(1, 4))) for _ in range(150)})
    # What is a folder for one path cannot be a file for another one.
    paths = [path for path in paths if not any(other.startswith(f"{path}/") for other in paths)]
    parts = ["a", "b", "a", "b", "/", "*", "?", ".", "/**/", "[ab]", "[!a]", "[^b]"]
    compared = 0
    for _ in range(300):
        lines = [
            rng.choice(["", "", "!"]) + rng.choice(["", "", "**/"]) + "".join(rng.choices(parts, k=rng.randint(1, 5)))
            for _ in range(3)
        ]
        if any("***" in line or "//" in line or line.strip("!/*") == "" for line in lines):
            # Git takes them for nothing or for names that cannot be.
            continue
        count_ignored(tmp_path, "\n".join(lines), paths)
        compared += 1
    assert compared > 100


@given(st.text(max_size=40) | st.text(alphabet="./\\ab\0\n~", max_size=12))
def test_accepted_paths_stay_inside(path: str) -> None:
    try:
        accepted = check_file_path(path)
    except HubError as error:
        assert error.status == 400
        return
    assert os.path.normpath(os.path.join("/base", accepted)) == f"/base/{accepted}"
    parts = PurePosixPath(accepted).parts
    assert ".git" not in [part.lower() for part in parts] and not PurePosixPath(accepted).is_absolute()
    assert "\\" not in accepted and "\0" not in accepted


letters = st.text(alphabet="ab./-@{~^:?*[\\ \x7f", min_size=1, max_size=8)


@needs_git
@given(letters | st.sampled_from(["x.lock", "a.lock/b", "v1.0"]))
def test_accepted_refs_are_accepted_by_git(name: str) -> None:
    try:
        check_ref_name(name)
    except HubError:
        return
    assert subprocess.run(["git", "check-ref-format", f"refs/heads/{name}"]).returncode == 0


def test_how_files_are_to_be_sent(store: HubStore) -> None:
    attributes = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\ndata/*.csv filter=lfs -text\n*.md text\n"
    repository = model(store, {".gitattributes": attributes, ".gitignore": b"*.env\n", "old.txt": b"old"})
    snapshot = repository.snapshot(repository.resolve("main"))

    def plan(path: str, size: int = 10, sample: str = "YWJj", **more: str) -> dict[str, object]:
        payload = {"files": [{"path": path, "size": size, "sample": sample}], **more}
        return plan_uploads(payload, snapshot, store.blobs)[0]

    paths = ("w.safetensors", "data/x.csv", "x.csv", "x.md", "sub/w.safetensors")
    assert [plan(path)["uploadMode"] for path in paths] == ["lfs", "lfs", "regular", "regular", "lfs"]
    assert plan("x.txt", sample="AGE=")["uploadMode"] == "lfs", "a NUL makes a file binary"
    assert plan("x.txt", size=(10 << 20) + 1)["uploadMode"] == "lfs"
    assert plan("x.txt", size=10 << 20)["uploadMode"] == "regular"
    assert plan("w.safetensors", size=0)["uploadMode"] == "regular", "an empty file has nothing to send"
    assert plan("a.env")["shouldIgnore"] is True and plan("a.txt")["shouldIgnore"] is False
    assert plan("a.env", gitIgnore="*.txt")["shouldIgnore"] is False
    assert plan("old.txt")["oid"] == hashlib.sha1(b"blob 3\0old").hexdigest() and plan("new.txt")["oid"] is None
    for fact, wrong in {"size": -1, "sample": "?"}.items():
        with refused(HubError, fact, status=400):
            plan("x", **{fact: wrong})


def test_parameters_are_counted_where_they_can_be(store: HubStore) -> None:
    header = b'{"w": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]}}'
    good = len(header).to_bytes(8, "little") + header + bytes(12)
    bad = [b"", b"short", b"\xff" * 20, (2).to_bytes(8, "little") + b"[]", (9).to_bytes(8, "little") + b'{"w": {}}']
    # The product of such sizes fills the memory, takes minutes or is infinite.
    for sizes in (["A" * 1000, 300_000], [2**62] * 100_000, [10**4000, 1], [1e308, 1e308], [2.5], [-1], [True], 3):
        wild = header.replace(b"[2, 3]", json.dumps(sizes).encode())
        bad.append(len(wild).to_bytes(8, "little") + wild + bytes(12))
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    sharded = {"model.safetensors.index.json": json.dumps(index).encode(), "one.safetensors": good}

    def count(files: dict[str, bytes]) -> dict[str, int]:
        return count_parameters(Snapshot({p: store_now(d, store.blobs) for p, d in files.items()}), store.blobs)

    assert count({"model.safetensors": good}) == {"F16": 6}
    assert count({**sharded, "two.safetensors": good}) == {"F16": 12}
    for broken in bad:
        assert count({"model.safetensors": broken}) == {} == count({**sharded, "two.safetensors": broken})
        assert count({"model.safetensors.index.json": broken}) == {}
    assert count({}) == {}


def test_merging_keeps_both_sides(store: HubStore) -> None:
    repository = model(store, {"same": b"0", "ours": b"0", "theirs": b"0", "gone": b"0", "both": b"0"})

    def write(**files: bytes) -> Change:
        return Change("c", "", [Operation(path, store_now(data, store.blobs)) for path, data in files.items()])

    pull = repository.open_pull("main", "a pull", "", write(theirs=b"1", both=b"1", new=b"1"))
    repository.append(f"refs/pr/{pull['num']}", Change("d", "", [Operation("gone", None)]))
    repository.append("main", write(ours=b"2", both=b"1"))
    merge = repository.merge_pull(pull["num"])
    contents = {path: entry.sha256 for path, entry in repository.snapshot(merge.oid).files.items()}
    wanted = {"same": b"0", "ours": b"2", "theirs": b"1", "both": b"1", "new": b"1"}
    assert contents == {path: hashlib.sha256(data).hexdigest() for path, data in wanted.items()}
    assert len(merge.parents) == 2 and repository.resolve("main") == merge.oid
    for late in (lambda: repository.merge_pull(pull["num"]), lambda: repository.set_pull_status(pull["num"], "open")):
        with refused(HubError, "merged", status=409):
            late()
    closed = repository.open_pull("main", "closed", "", write(x=b"x"))
    repository.set_pull_status(closed["num"], "closed")
    with refused(HubError, "closed", status=409):
        repository.append(f"refs/pr/{closed['num']}", write(x=b"y"))


def test_a_deleted_repository_refuses_late_writers(store: HubStore) -> None:
    repository = model(store, {"a": b"0"})
    store.delete("models", repository)
    with refused(HubError, code="RepoNotFound"):
        repository.append("main", Change("late", "", []))
    assert store.repository("models", "me/model") is None and list(store.incoming.iterdir()) == []
    assert model(store, {"b": b"1"}).refs.keys() == {"refs/heads/main"}


def test_deleting_from_snapshots() -> None:
    entry = Entry("0" * 40, 0, "0" * 64, False)
    snapshot = Snapshot({"a/x": entry, "a/y": entry, "ab": entry})
    assert set(snapshot.apply([Operation("a", None, folder=True)]).files) == {"ab"}
    assert set(snapshot.apply([Operation("a", None, folder=True), Operation("a/z", entry)]).files) == {"a/z", "ab"}
    assert set(snapshot.apply([Operation("a", None)]).files) == {"ab"}, "as on the Hub"
    many = Snapshot({f"{number}.txt": entry for number in range(20_000)})
    begun = time.process_time()
    assert many.apply([Operation(path, None) for path in many.files]).files == {}
    # If each looked at all others, it would take ten seconds.
    assert time.process_time() - begun < 2
    for missing in (Operation("b", None), Operation("b", None, folder=True), Operation("ab", None, folder=True)):
        with refused(HubError, code="EntryNotFound"):
            snapshot.apply([missing])
    assert snapshot.children("", recursive=False) == ["a", "ab"] and snapshot.children("a", True) == ["a/x", "a/y"]
