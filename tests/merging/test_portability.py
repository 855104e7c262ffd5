"""Merging where calls of Linux are missing: without them, the files are the same."""

import errno
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_ext import system
from hf_ext.emr.weights import TaskWeights
from hf_ext.hub.safetensors_writer import SafetensorsWriter
from hf_ext.merging import add_task, remove_task

from .merging import merge, siblings, weights_of, write_set

ROOT = Path(__file__).resolve().parents[2]
# The first line is missing on macOS, both on Windows, with `fcntl` and the exchange of two folders. Windows' own
# `shutil.disk_usage` asks the system by another way.
MISSING = (
    *("posix_fallocate", "posix_fadvise", "fdatasync", "sched_getaffinity", "preadv", "pwritev"),
    *("pread", "pwrite", "statvfs", "fstatvfs", "O_CLOEXEC"),
)
SCRIPT = """
    import os, shutil, sys
    from types import SimpleNamespace
    missing, place = sys.argv[1].split(","), sys.argv[2]
    sys.modules["fcntl"] = None
    shutil.disk_usage = lambda path: SimpleNamespace(free=10**12)
    for name in missing:
        assert hasattr(os, name), name
        delattr(os, name)
    from hf_ext import files
    # No exchange of two folders in one step.
    files.sys = SimpleNamespace(platform="win32")
    from hf_ext.emr.artifact import verify_artifact
    from hf_ext.emr.weights import TaskWeights
    from hf_ext.merging import add_task, merge_checkpoints, remove_task

    def config(*names, **options):
        return {"base": f"{place}/base", "tasks": {name: f"{place}/{name}" for name in names}, **options}

    merge_checkpoints(config("t0", "t1", "t2"), f"{place}/merged", progress=False)
    merge_checkpoints(config("t0", "t1", "t2"), f"{place}/merged", progress=False, overwrite=True)
    merge_checkpoints(config("t0", "t1"), f"{place}/grown", progress=False)
    assert add_task(f"{place}/grown", "t2", f"{place}/t2")["how"] == "merged again"
    remove_task(f"{place}/grown", "t1")
    TaskWeights(f"{place}/merged").export("t1", f"{place}/exported")
    for name in ("merged", "grown"):
        assert verify_artifact(f"{place}/{name}").wrong == []
    assert not [name for name in os.listdir(place) if name.startswith(".")], os.listdir(place)
"""


@pytest.mark.slow
def test_a_merge_without_the_calls_of_linux(tmp_path: Path):
    config, here = write_set(tmp_path), tmp_path / "here"
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), ",".join(MISSING), str(tmp_path)]
    # A process from the start: where torch is imported already, so is filelock, and with it fcntl.
    # Compiled code would be compiled anew in each.
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_EXT_NO_NUMBA": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    merged = merge(config, here / "merged")
    grown = merge(siblings(tmp_path, "t0", "t1"), here / "grown")
    add_task(grown, "t2", config["tasks"]["t2"])
    remove_task(grown, "t1")
    TaskWeights(merged).export("t1", here / "exported")
    for folder in ("merged", "grown", "exported"):
        found, expected = weights_of(tmp_path / folder), weights_of(here / folder)
        assert "model.safetensors" in found and found.keys() == expected.keys()
        assert [name for name in found if found[name] != expected[name]] == []


@pytest.mark.parametrize("missing", [(), ("preadv",), ("preadv", "pread", "pwrite")])
def test_bytes_at_a_place_of_a_file(missing: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in missing:
        monkeypatch.delattr(os, name)
    assert system.has_positions() == ("pwrite" not in missing)
    path = tmp_path / "file"
    descriptor = system.open_descriptor(path, os.O_RDWR | os.O_CREAT)
    try:
        system.reserve(descriptor, 100, path)
        assert path.stat().st_size == 100
        assert system.write_at(descriptor, memoryview(b"abc"), 7) == 3
        assert system.write_at(descriptor, memoryview(b"xyz"), 50) == 3
        system.sync_data(descriptor)
        buffer = bytearray(5)
        assert system.read_at(descriptor, memoryview(buffer), 6) == 5 and bytes(buffer) == b"\0abc\0"
        assert system.read_at(descriptor, memoryview(buffer), 98) == 2
        assert system.read_at(descriptor, memoryview(buffer), 100) == 0
        # The file is still open, and its bytes are where they were put.
        assert path.read_bytes()[50:53] == b"xyz"
    finally:
        os.close(descriptor)


def test_a_full_disk_is_noticed_where_nothing_can_be_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "posix_fallocate")
    # More than is free; as a hole it takes no room.
    size = system.free_bytes(tmp_path) + 2**30
    descriptor = system.open_descriptor(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        system.reserve(descriptor, 1000, tmp_path / "file")
        # What the file has already is not needed again.
        os.truncate(descriptor, size)
        system.reserve(descriptor, size + 1000, tmp_path / "file")
        with pytest.raises(OSError) as caught:
            system.reserve(descriptor, 2 * size + 1000, tmp_path / "file")
        assert caught.value.errno == errno.ENOSPC
    finally:
        os.close(descriptor)


def test_cores_where_the_system_does_not_tell_which(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    for told, cores in ((7, 7), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda told=told: told)
        assert system.count_cores() == cores


def test_threads_write_at_once_where_a_file_has_one_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("preadv", "pread", "pwrite"):
        monkeypatch.delattr(os, name)
    writer = SafetensorsWriter(tmp_path / "w.safetensors", {"a": (torch.int64, (400,))})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: writer.write("a", i, torch.tensor([i])), range(400)))
    writer.close()
    assert torch.equal(load_file(tmp_path / "w.safetensors")["a"], torch.arange(400))
