"""A merge that fails, here or by a Hub: what is left, and that the same command goes on to the same bits."""

import contextlib
import dataclasses
import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, close_session

from hf_ext.emr.manifest import Manifest
from hf_ext.errors import DataError, OtherRun, UsageError
from hf_ext.files import copy_into
from hf_ext.hub.header_format import CheckpointError
from hf_ext.hub.safetensors_writer import SafetensorsWriter
from hf_ext.merging import finishing, merge_checkpoints
from hf_ext.merging.engine import Engine
from hf_ext.merging.methods import METHODS, Block, merge_method
from hf_ext.merging.sources import Source, open_weights
from tests.emr.emr_testing import push_folder
from tests.hub.unfaithful_hub import UnfaithfulHub
from tests.kit.models import file_limit
from tests.kit.refusals import refused

from .merging import assert_same_files, contents, merge, write_set

pytestmark = pytest.mark.usefixtures("own_cache")


def interrupted(config: dict[str, Any], out: Path, monkeypatch, after: int = 3) -> Path:
    """A merge whose disk was full after some writes; its partial folder."""
    done = iter(range(after))
    write_bytes, location = SafetensorsWriter.write_bytes, SafetensorsWriter.location

    def write(self: SafetensorsWriter, *arguments: Any) -> None:
        if next(done, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_bytes(self, *arguments)

    def find(self: SafetensorsWriter, name: str) -> tuple[int, int]:
        # where compiled code writes
        return location(self, name) if next(done, None) is not None else (full.fileno(), 0)

    facts = ("the result need", "run the same command again", ".merged-out.partial")
    with monkeypatch.context() as patch, open("/dev/full", "wb") as full, refused(OSError, *facts) as caught:
        patch.setattr(SafetensorsWriter, "write_bytes", write)
        patch.setattr(SafetensorsWriter, "location", find)
        merge(config, out, workers=1)
    assert caught.value.errno == errno.ENOSPC
    # one sentence, not that of the file inside that of the merge
    assert str(caught.value).count("No space left") == 1
    assert not out.exists()
    return out.with_name(f".{out.name}.partial")


@pytest.mark.parametrize("after", [0, 1, 5, 9, 17])
def test_a_full_disk_leaves_what_the_same_command_goes_on_from(config, tmp_path, monkeypatch, after):
    expected = merge(config, tmp_path / "merged-expected")
    partial = interrupted(config, tmp_path / "merged-out", monkeypatch, after)
    assert (partial / "merge.json").is_file()
    done: list[int] = []
    run = Engine.run

    def counted(self: Engine, units: Any, call: Any) -> None:
        done.append(len(units))
        run(self, units, call)

    monkeypatch.setattr(Engine, "run", counted)
    assert_same_files(merge(config, tmp_path / "merged-out", workers=2, memory="1MB"), expected)
    merge(config, tmp_path / "merged-other")
    assert done[0] < done[1] or after < 5
    assert not partial.exists()


@pytest.mark.parametrize(("limit", "late"), [(100_000, False), (90_000, True), (3_000, True)])
def test_a_limit_of_the_system_on_file_sizes(config, tmp_path, monkeypatch, limit, late):
    """Met when the files are made, and while they are written."""
    run = Engine.run

    def limited(self: Engine, *arguments: Any) -> None:
        with file_limit(limit):
            run(self, *arguments)

    facts = ("command", "again") if late else ("result", "bytes")
    with monkeypatch.context() as patch, refused(OSError, *facts) as caught:
        if late:
            patch.setattr(Engine, "run", limited)
        with contextlib.nullcontext() if late else file_limit(limit):
            merge(config, tmp_path / "merged-out", workers=1)
    assert caught.value.errno == errno.EFBIG
    assert_same_files(merge(config, tmp_path / "merged-out"), merge(config, tmp_path / "merged-expected"))


@pytest.fixture
def meanwhile() -> Iterator[list[Callable[[], None]]]:
    """What happens while the method "meanwhile", an average, is merging: each of these functions once, in order."""
    events: list[Callable[[], None]] = []

    @merge_method("meanwhile", "an average, and what happens meanwhile")
    def average(tensor: Block) -> torch.Tensor:
        if events:
            events.pop(0)()
        return METHODS["average"].function(tensor, weight=[1.0] * len(tensor.vectors))

    yield events
    del METHODS["meanwhile"]


SHARD = "t2/model-00001-of-00002"


@pytest.mark.parametrize(
    ("file", "change", "error", "fact"),
    [
        (SHARD, lambda path: os.truncate(path, 20_000), CheckpointError, SHARD),
        ("base/model", lambda path: os.utime(path, ns=(1, 1)), DataError, "checkpoints.base"),
    ],
    ids=["cut", "touched"],
)
def test_a_checkpoint_that_changes_while_it_is_merged(config, tmp_path, meanwhile, file, change, error, fact):
    meanwhile.append(lambda: change(tmp_path / f"{file}.safetensors"))
    with refused(error, fact):
        merge(config | {"method": "meanwhile", "workers": 1}, tmp_path / "merged-out")
    assert not (tmp_path / "merged-out").exists()


def test_what_compiled_code_cannot_read_is_read_again(config, tmp_path, monkeypatch):
    expected = merge(config, tmp_path / "merged-expected")
    # of a file that is not open
    monkeypatch.setattr(Source, "location", lambda self, name: (10**6, 0))
    assert_same_files(merge(config, tmp_path / "merged-out"), expected)


def test_another_merge_does_not_go_on_from_what_is_left(config, tmp_path, monkeypatch):
    partial, out = interrupted(config, tmp_path / "merged-out", monkeypatch, 12), tmp_path / "merged-out"

    def refuse(*facts: str, **options: Any) -> None:
        with refused(OtherRun, *facts):
            merge(config, out, **options)

    refuse("config.rescale", "global", rescale="l2")
    refuse("order", "['t2', 't1', 't0']", tasks=dict(reversed(config["tasks"].items())))
    weights = sorted((tmp_path / "t0").glob("*.safetensors"))[0]
    os.utime(weights, ns=(1, 1))
    refuse(weights.name, "checkpoints.t0.files", "mtime_ns")
    configuration = tmp_path / "t0" / "config.json"
    before = configuration.read_text()
    configuration.write_text(before + "\n")
    refuse("checkpoints.t0", "small_files.config.json")
    configuration.write_text(before)
    (partial / "result" / "model.safetensors").unlink()
    shutil.rmtree(tmp_path / "t0")
    write_set(tmp_path)
    refuse()


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 100)], ids=["taken", "cut"])
def test_a_file_of_the_partial_folder_that_was_taken_or_cut(config, tmp_path, monkeypatch, damage):
    partial = interrupted(config, tmp_path / "merged-out", monkeypatch, 12)
    damage(partial / "result" / "tasks" / "t1" / "mask.safetensors")
    for _ in range(2):
        with refused(DataError, "mask.safetensors", "merged-out.partial"):
            merge(config, tmp_path / "merged-out")


def test_two_merges_into_one_folder_at_once(config, tmp_path, meanwhile):
    def merge_there_too() -> None:
        with refused(UsageError, "process", "merging"):
            merge(config, tmp_path / "merged-out")

    meanwhile.append(merge_there_too)
    merge(config | {"method": "meanwhile"}, tmp_path / "merged-out")
    assert not meanwhile


def test_the_copy_of_the_base_is_read_when_all_of_it_is_there(config, tmp_path, monkeypatch):
    asked, found = threading.Event(), []

    def copy_later(files: dict[str, Path], folder: Path) -> None:
        # Whoever reads beside the copying gets the time to do so.
        asked.wait(0.2)
        copy_into(files, folder)

    def read_copy(label: str, folder: Path):
        asked.set()
        found.append((folder / "config.json").is_file())
        return open_weights(label, folder)

    monkeypatch.setattr(finishing, "copy_into", copy_later)
    monkeypatch.setattr(finishing, "open_weights", read_copy)
    merge(config, tmp_path / "merged-out", include_base=True)
    assert found == [True]


def test_a_failure_at_the_very_end_is_resumed_without_reading_again(config, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(finishing, "make_report", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            merge(config, tmp_path / "merged-out")
    assert not (tmp_path / "merged-out").exists()
    # What a process leaves that is killed while it writes.
    (tmp_path / ".merged-out.partial" / "result" / ".emr.json.tmp-0a0b0c0d").write_text("{")
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "run", lambda self, units, done: units and 1 / 0)
        merge(config, tmp_path / "merged-out")
    assert_same_files(tmp_path / "merged-out", merge(config, tmp_path / "merged-expected"))


def weights(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(folder).items() if name.endswith((".safetensors", ".index.json"))}


def test_the_same_bits_as_from_local_folders_by_range_reads_alone(hub, tmp_path):
    local = write_set(tmp_path)
    commits = {name: push_folder(hub.url, f"me/{name}", tmp_path / name) for name in ("base", *local["tasks"])}
    # a later commit changes nothing for who asked for an earlier one
    write_set(tmp_path / "later", seed=1)
    push_folder(hub.url, "me/t0", tmp_path / "later" / "t0")
    remote = {"base": "me/base", "tasks": {name: f"me/{name}@{commits[name]}" for name in local["tasks"]}}
    first = merge(local, tmp_path / "merged-local")
    second = merge_from(hub, remote, tmp_path / "merged-remote")
    assert weights(second) == weights(first)
    manifest, other = Manifest.read(second), Manifest.read(first)
    assert manifest.base.source == "me/base" and manifest.base.revision == commits["base"]
    assert all(task.origin.revision == commits[name] for name, task in manifest.tasks.items())
    assert manifest.base.files["model.safetensors"]["sha256"] == other.base.files["model.safetensors"]["sha256"]
    # They differ in their sources alone.
    tasks = {name: dataclasses.replace(task, origin=other.tasks[name].origin) for name, task in manifest.tasks.items()}
    assert dataclasses.replace(manifest, base=other.base, tasks=tasks) == other
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert (second / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()


@pytest.fixture
def broken(hub, tmp_path) -> Iterator[tuple[UnfaithfulHub, dict[str, Any], Path]]:
    """A Hub that holds `t1` as org/name, the configuration of a merge with it, and the result that is expected."""
    local = write_set(tmp_path)
    expected = merge(local, tmp_path / "merged-expected")
    push_folder(hub.url, "org/name", tmp_path / "t1")
    proxy = UnfaithfulHub(hub.url)
    yield proxy, local | {"tasks": local["tasks"] | {"t1": "org/name"}, "workers": 1}, expected
    close_session()
    proxy.stop()


def merge_from(hub: Any, config: dict[str, Any], out: Path) -> Path:
    return merge_checkpoints(config, out, endpoint=hub.url, token=False, progress=False).path


def fail_after(hub: UnfaithfulHub, ranges: int, **answer: int) -> None:
    """Answers rightly for so many ranges of weights (the headers are four), then as told."""
    left = iter(range(ranges))

    def rule(method, path, body, forward):
        reply = forward(body)
        is_range = reply.status == 206 and path.endswith(".safetensors")
        return reply._replace(**answer) if is_range and next(left, None) is None else reply

    hub.rule = rule


def count_ranges(hub: UnfaithfulHub) -> int:
    return len([one for one in hub.asked if one.range])


CUT = pytest.param({"sent": 3}, "short read", marks=pytest.mark.slow)


# The other faults of a Hub end a read in the same way; tests/hub reads through each of them.
@pytest.mark.parametrize(("answer", "fact"), [CUT, ({"status": 404}, "no such file at this commit")])
def test_a_fault_of_the_hub_leaves_a_merge_that_can_go_on(broken, tmp_path, answer, fact):
    hub, config, expected = broken
    fail_after(hub, 9, **answer)
    with refused(CheckpointError, "org/name@", "/model", fact):
        merge_from(hub, config, tmp_path / "merged-out")
    assert not (tmp_path / "merged-out").exists()
    before = count_ranges(hub)
    fail_after(hub, 10**9)
    assert weights(merge_from(hub, config, tmp_path / "merged-out")) == weights(expected)
    resumed = count_ranges(hub) - before
    merge_from(hub, config, tmp_path / "merged-again")
    # what was finished was not read again
    assert resumed < count_ranges(hub) - before - resumed


def test_another_commit_does_not_go_on_from_what_was_left(broken, tmp_path):
    hub, config, _ = broken
    first = HfApi(endpoint=hub.url, token=False).model_info("org/name").sha
    fail_after(hub, 9, status=404)
    with pytest.raises(CheckpointError):
        merge_from(hub, config, tmp_path / "merged-out")
    fail_after(hub, 10**9)
    (tmp_path / "t1" / "notes.md").write_text("mine")
    push_folder(hub.url, "org/name", tmp_path / "t1")
    with refused(OtherRun, str(first), "checkpoints.t1.revision"):
        merge_from(hub, config, tmp_path / "merged-out")
