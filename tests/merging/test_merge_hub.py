"""Merging from a Hub: only ranges are read, at one commit, and what goes wrong leaves a merge that can go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session

from hf_ext.emr.manifest import Manifest
from hf_ext.errors import OtherRun
from hf_ext.hub.safetensors_headers import CheckpointError
from hf_ext.merging.merge import merge_checkpoints
from tests.emr.emr_testing import push_folder
from tests.hub.misbehaving_hub import COMMIT, Handler, MisbehavingHub
from tests.kit.refusals import refused

from .merging import contents, short_segments, write_set

__all__ = ["short_segments"]


pytestmark = pytest.mark.usefixtures("own_cache")


def weights(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(folder).items() if name.endswith((".safetensors", ".index.json"))}


def without_sources(folder: Path) -> dict[str, Any]:
    record = json.loads((folder / "emr.json").read_text())
    for source in (record["base"], *record["tasks"].values()):
        del source["source"], source["revision"], source["files"]
    return record


def test_the_same_bits_as_from_local_folders_by_range_reads_alone(hub, tmp_path):
    local = write_set(tmp_path)
    commits = {name: push_folder(hub.url, f"me/{name}", tmp_path / name) for name in ("base", *local["tasks"])}
    # a later commit changes nothing for who asked for an earlier one
    write_set(tmp_path / "later", seed=1)
    push_folder(hub.url, "me/t0", tmp_path / "later" / "t0")
    remote = {"base": "me/base", "tasks": {name: f"me/{name}@{commits[name]}" for name in local["tasks"]}}
    first = merge_checkpoints(local, tmp_path / "merged-local", progress=False).path
    options = {"endpoint": hub.url, "token": False, "progress": False}
    second = merge_checkpoints(remote, tmp_path / "merged-remote", **options).path
    assert weights(second) == weights(first)
    assert without_sources(second) == without_sources(first)
    manifest = Manifest.read(second)
    assert manifest.base.source == "me/base" and manifest.base.revision == commits["base"]
    assert all(task.origin.revision == commits[name] for name, task in manifest.tasks.items())
    hashes = [read.base.files["model.safetensors"]["sha256"] for read in (manifest, Manifest.read(first))]
    assert hashes[0] == hashes[1]
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert (second / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()


@pytest.fixture
def broken(tmp_path) -> Iterator[tuple[MisbehavingHub, dict[str, Any], Path]]:
    """A Hub that holds `t1` as org/name, the configuration of a merge with it, and the result that is expected."""
    local = write_set(tmp_path)
    expected = merge_checkpoints(local, tmp_path / "merged-expected", progress=False).path
    hub = MisbehavingHub()
    hub.files = {path.name: path.read_bytes() for path in (tmp_path / "t1").iterdir()}
    yield hub, local | {"tasks": local["tasks"] | {"t1": "org/name"}, "workers": 1}, expected
    close_session()
    hub.stop()


def merge(hub: MisbehavingHub, config: dict[str, Any], out: Path) -> Path:
    return merge_checkpoints(config, out, endpoint=hub.url, token=False, progress=False).path


def fail_after(hub: MisbehavingHub, ranges: int, **answer: int) -> None:
    """Answers rightly for so many ranges of weights (the headers are four), then as told."""
    left = iter(range(ranges))

    def resolve(handler: Handler, name: str) -> None:
        wanted = name.endswith(".safetensors") and handler.headers.get("Range")
        handler.send_file(name, **(answer if wanted and next(left, None) is None else {}))

    hub.resolve = resolve


# The other faults of a Hub end a read in the same way; tests/hub reads through each of them.
@pytest.mark.parametrize(
    ("answer", "fact"),
    [
        pytest.param({"keep": 3}, "short read", marks=pytest.mark.slow),
        ({"status": 404}, "no such file at this commit"),
    ],
    ids=["cut connections", "gone"],
)
def test_a_fault_of_the_hub_leaves_a_merge_that_can_go_on(broken, tmp_path, answer, fact):
    hub, config, expected = broken
    fail_after(hub, 9, **answer)
    with refused(CheckpointError, f"org/name@{COMMIT[:12]}/model", fact):
        merge(hub, config, tmp_path / "merged-out")
    assert not (tmp_path / "merged-out").exists()
    before = len(hub.ranges())
    hub.resolve = lambda handler, name: handler.send_file(name)
    assert weights(merge(hub, config, tmp_path / "merged-out")) == weights(expected)
    resumed = len(hub.ranges()) - before
    merge(hub, config, tmp_path / "merged-again")
    # what was finished was not read again
    assert resumed < len(hub.ranges()) - before - resumed


def test_all_is_read_at_one_commit_and_a_connection_that_is_cut_now_and_then_does_no_harm(broken, tmp_path):
    hub, config, expected = broken
    asked: list[str] = []

    def resolve(handler: Handler, name: str) -> None:
        asked.append(handler.path)
        handler.send_file(name, keep=40 if len(asked) % 3 == 2 else None)

    hub.resolve = resolve
    assert weights(merge(hub, config, tmp_path / "merged-out")) == weights(expected)
    assert asked and all(f"/resolve/{COMMIT}/" in path for path in asked)


def test_another_commit_does_not_go_on_from_what_was_left(broken, tmp_path, monkeypatch):
    hub, config, _ = broken
    fail_after(hub, 9, status=404)
    with pytest.raises(CheckpointError):
        merge(hub, config, tmp_path / "merged-out")
    monkeypatch.setattr("tests.hub.misbehaving_hub.COMMIT", "f" * 40)
    hub.resolve = lambda handler, name: handler.send_file(name)
    with refused(OtherRun, COMMIT, "checkpoints.t1.revision"):
        merge(hub, config, tmp_path / "merged-out")
