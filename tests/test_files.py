"""Files and folders appear whole or not at all, also where the system cannot exchange two folders."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hf_ext import files
from hf_ext.emr import emr_loader
from hf_ext.emr.manifest import artifact_file
from hf_ext.errors import DataError, UsageError
from hf_ext.hub.header_format import CheckpointError
from tests.hub.published import contents
from tests.kit.refusals import refused


@pytest.fixture
def pair(tmp_path) -> tuple[Path, Path]:
    for name in ("new", "out"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "file").write_text(name)
    return tmp_path / "new", tmp_path / "out"


@pytest.fixture
def renames(monkeypatch):
    """A system that cannot exchange two folders."""
    monkeypatch.setattr(files, "exchange_folders", lambda first, second: False)


@pytest.fixture(params=["exchange", "renames"])
def either(request):
    if request.param == "renames":
        request.getfixturevalue("renames")
    elif not hasattr(os, "posix_fadvise"):
        pytest.skip("only Linux exchanges folders")


@pytest.mark.parametrize("kind", ["absent", "empty", "full"])
def test_the_new_folder_is_there_and_the_old_one_gone(pair, tmp_path, either, kind):
    new, _ = pair
    out = tmp_path / kind if kind != "full" else tmp_path / "out"
    if kind == "empty":
        out.mkdir()
    files.replace_folder(new, out)
    assert contents(out) == {"sub/file": b"new"}
    assert {path.name for path in tmp_path.iterdir()} == {"out", out.name}


def test_a_reader_never_finds_nothing(tmp_path):
    """Hundreds of exchanges while another thread reads: each read finds one whole folder."""
    if not files.exchange_folders(*[Path(tmp_path, name) for name in ("a", "b") if not Path(tmp_path, name).mkdir()]):
        pytest.skip("this file system cannot exchange folders")
    out = tmp_path / "out"
    out.mkdir()
    (out / "file").touch()
    done, missing = threading.Event(), []

    def look() -> None:
        while not done.is_set():
            missing.append(not out.exists())

    reader = threading.Thread(target=look)
    reader.start()
    for index in range(300):
        new = tmp_path / f"new-{index}"
        new.mkdir()
        (new / "file").touch()
        files.replace_folder(new, out)
    done.set()
    reader.join()
    assert not any(missing)


def test_what_cannot_be_moved_in_or_a_kill_left_between_two_renames_is_put_right(pair, tmp_path, renames):
    new, out = pair
    with pytest.raises(FileNotFoundError):
        files.replace_folder(tmp_path / "gone", out)
    assert contents(tmp_path) == {"new/sub/file": b"new", "out/sub/file": b"out"}
    os.replace(out, tmp_path / ".out.old")
    files.recover_folder(out)
    assert contents(tmp_path) == {"new/sub/file": b"new", "out/sub/file": b"out"}
    # Killed one step later: the new folder is in its place, the old one not yet deleted.
    os.replace(out, tmp_path / ".out.old")
    os.replace(new, out)
    files.recover_folder(out)
    files.recover_folder(out)
    assert contents(tmp_path) == {"out/sub/file": b"new"}


def test_a_file_appears_when_its_block_ends(tmp_path):
    path = tmp_path / "folder" / "file.txt"
    with files.whole_file(path, "w") as file:
        file.write("ä")
        assert not path.exists()
    assert path.read_bytes() == "ä".encode()
    with files.whole_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == "ä".encode()
    assert contents(tmp_path) == {"folder/file.txt": b"new"}
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode
    # Two writers of a file do not meet.
    long = tmp_path / ("n" * 255)
    with files.whole_file(long) as first, files.whole_file(long) as second:
        second.write(b"second")
        first.write(b"first")
    assert contents(tmp_path) == {"folder/file.txt": b"new", "plain": b"", long.name: b"first"}


@pytest.mark.parametrize("kind", ["write", "sync", "rename"])
def test_a_file_that_could_not_be_written_leaves_the_earlier_one(tmp_path, kind):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    reading, writing = os.pipe()
    with pytest.raises(OSError), files.whole_file(path) as file:
        file.write(b"new")
        if kind == "write":
            raise OSError("no space left")
        if kind == "sync":
            # What the bytes go to now cannot be synced.
            os.dup2(writing, file.fileno())
        if kind == "rename":
            Path(file.name).unlink()
    os.close(reading)
    os.close(writing)
    assert contents(tmp_path) == {"file": b"old"}


@pytest.mark.parametrize("target", ["there", "deep/blobs/new", "models--a--b/blobs/one", "hub/blobs/one"])
def test_a_link_stays_and_its_file_is_written_unless_it_is_one_of_a_cache(tmp_path, target):
    for folder in ("models--a--b/blobs", "hub/blobs", "hub/models--a--b"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("there", "models--a--b/blobs/one", "hub/blobs/one"):
        (tmp_path / name).write_text("old")
    (link := tmp_path / "link").symlink_to(target)
    files.check_places([link])
    files.write_json(link, "new")
    assert files.read_json(link) == "new"
    if target.endswith("one"):
        assert (tmp_path / target).read_text() == "old"
    else:
        assert os.readlink(link) == target and files.read_json(tmp_path / target) == "new"


@pytest.mark.parametrize("kind", ["pipe", "device", "link", "disk"])
def test_what_is_no_file_is_written_into_or_refused_and_stays(tmp_path, kind):
    place, got = tmp_path / "place", list[bytes]()
    # A pair of devices made here: nothing below /dev is touched.
    modes = {"pipe": stat.S_IFIFO, "device": stat.S_IFCHR, "link": stat.S_IFIFO, "disk": stat.S_IFBLK}
    try:
        os.mknod(place, 0o600 | modes[kind], os.makedev(*((1, 3) if kind == "device" else (7, 250))))
    except (PermissionError, AttributeError):
        pytest.skip("no such node may be made here")
    out = tmp_path / "out" if kind == "link" else place
    if kind == "link":
        out.symlink_to(place)
    if kind == "disk":
        with refused(UsageError, "is a disk or a socket", "give the name of a file"):
            files.check_places([out])
        with refused(UsageError), files.whole_file(out):
            pass
    else:
        reader = threading.Thread(target=lambda: got.append(place.read_bytes()), daemon=True)
        if kind != "device":
            reader.start()
        files.check_places([out])
        files.write_json(out, "new")
        if kind != "device":
            reader.join(10)
            assert got == [b'"new"\n']
    assert stat.S_IFMT(place.stat().st_mode) == modes[kind] and out.is_symlink() is (kind == "link")
    assert {path.name for path in tmp_path.iterdir()} == {"place", out.name}


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_our_own_output_gets_a_file_after_what_was_printed(tmp_path, kind):
    (tmp_path / "out").symlink_to("/proc/self/fd/1")
    code = "from hf_ext import files; print(1); files.check_places(['out']); files.write_json('out', 2); print(3)"
    with contextlib.ExitStack() as opened:
        file = subprocess.PIPE if kind == "pipe" else opened.enter_context(open(tmp_path / "log", "wb"))
        ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stdout=file, check=True)
    assert (ended.stdout or (tmp_path / "log").read_bytes()).split() == [b"1", b"2", b"3"]
    assert (tmp_path / "out").is_symlink()


def test_a_folder_appears_when_its_block_ends_and_can_be_synced(tmp_path, either, monkeypatch):
    path = tmp_path / "deep" / "folder"
    for content in ("old", "new"):
        with files.whole_folder(path) as folder:
            (folder / "file").write_text(content)
            mode = (folder / "file").stat().st_mode
            # As safetensors does.
            (folder / "file").chmod(0o600)
            assert path.exists() is (content == "new")
        assert (path / "file").stat().st_mode == mode
    with refused(RuntimeError, "stop"), files.whole_folder(path) as folder:
        (folder / "file").write_text("half")
        raise RuntimeError("stop")
    with pytest.raises(OSError), files.whole_folder(path) as folder:
        (folder / "file").write_text("newer")
        # A socket cannot be opened, and so not be synced. The name of one is short.
        monkeypatch.chdir(folder)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("socket")
    assert contents(tmp_path) == {"deep/folder/file": b"new"}


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_folder_that_may_not_replace_one_leaves_what_is_there(tmp_path, early, kind):
    path = tmp_path / "folder"

    def appear():
        if kind == "link":
            path.symlink_to(tmp_path / "nowhere")
        else:
            path.write_text("own") if kind == "file" else path.mkdir()

    if early:
        appear()
    with pytest.raises(files.TakenError), files.whole_folder(path, replace=False) as new:
        assert not early
        (new / "file").write_text("new")
        appear()
    assert [found.name for found in tmp_path.iterdir()] == ["folder"] and not (path / "file").exists()


def test_what_appears_in_the_last_instant_is_not_replaced(tmp_path, monkeypatch):
    def find_taken(old, new):
        (Path(new) / "theirs").mkdir(parents=True)
        rename(old, new)

    rename = os.rename
    monkeypatch.setattr(files.os, "rename", find_taken)
    with pytest.raises(files.TakenError), files.whole_folder(tmp_path / "new", replace=False) as folder:
        (folder / "ours").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "theirs"]


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path):
    mine = tmp_path / ".mine.tmp"
    mine.touch()
    files.neighbour(tmp_path / "folder").mkdir()
    (files.neighbour(tmp_path / "file")).touch()
    assert len([*tmp_path.iterdir()]) == 3
    files.remove_leftovers(tmp_path)
    assert [*tmp_path.iterdir()] == [mine]
    # Of named files alone.
    ours = tmp_path / ("long" * 30 + ".png")
    kept = [files.neighbour(tmp_path / name) for name in ("theirs.png", "long.png")]
    young = files.neighbour(ours)
    for path in [files.neighbour(ours), files.neighbour(ours), young, *kept]:
        path.touch()
        if path != young:
            # What was written an hour ago is nobody's any more.
            os.utime(path, (0, 0))
    files.remove_leftovers_of([ours, tmp_path / "never" / "made.png"])
    assert sorted(tmp_path.iterdir()) == sorted([*kept, young, mine])


def test_json_is_text_with_a_last_newline_and_what_is_none_is_named(tmp_path):
    # With what Python makes of a byte that is not UTF-8.
    files.write_json(tmp_path / "a.json", {"ä\udce4": [1]}, indent=None)
    assert files.read_json(tmp_path / "a.json") == {"ä\udce4": [1]}
    assert (tmp_path / "a.json").read_bytes() == '{"ä\\udce4": [1]}\n'.encode()
    with pytest.raises(TypeError):
        files.write_json(tmp_path / "a.json", {1, 2})
    assert (tmp_path / "a.json").read_bytes() == '{"ä\\udce4": [1]}\n'.encode()
    for content in (b"{", b"[" * 100_000, b"\xff"):
        (tmp_path / "a.json").write_bytes(content)
        with refused(DataError, "a.json", "JSON"):
            files.read_json(tmp_path / "a.json")


COMMIT = "hub/models--org--name/snapshots/" + "c" * 40
# Where a file of a folder really lies: the folder, the file, what it is a link to, and whether that is inside.
LINKS = {
    "a file": ("folder", "weights.safetensors", None, True),
    "a link in the folder": ("folder", "weights.safetensors", "folder/other", True),
    "a link out of it": ("folder", "weights.safetensors", "secret", False),
    "a neighbour whose name begins alike": ("folder", "weights.safetensors", "folder-2/secret", False),
    "a folder that is a link out": ("folder", "sub/weights.safetensors", "outside/weights.safetensors", False),
    "a cache": (COMMIT, "weights.safetensors", "hub/models--org--name/blobs/1", True),
    "a cache, of a folder in the commit": (f"{COMMIT}/base", "w.safetensors", "hub/models--org--name/blobs/1", True),
    "a cache, two folders deep": (f"{COMMIT}/tasks/a", "w.safetensors", "hub/models--org--name/blobs/1", True),
    "a cache with shared files": (COMMIT, "weights.safetensors", "hub/blobs/1", True),
    "a cache, of a data set": (COMMIT.replace("models", "datasets"), "w", "hub/datasets--org--name/blobs/1", True),
    "another repository of the cache": (COMMIT, "w", "hub/models--org--other/blobs/1", False),
    "another commit of the cache": (COMMIT, "w", "hub/models--org--name/snapshots/other/w", False),
    "out of a cache": (COMMIT, "weights.safetensors", "secret", False),
    "a folder called snapshots, without a cache": ("x/snapshots/y", "w.safetensors", "x/blobs/1", False),
    "the same, one higher": ("x/z/snapshots/y", "w.safetensors", "x/blobs/1", False),
    "a cache whose blobs are a link": (COMMIT, "weights.safetensors", "elsewhere/1", False),
}


@pytest.mark.parametrize("case", LINKS)
def test_one_rule_says_what_lies_inside_and_the_loader_that_travels_agrees(case, tmp_path):
    place, name, target, expected = LINKS[case]
    folder = tmp_path / place
    path = folder / name
    folder.mkdir(parents=True)
    if target is None:
        path.touch()
    else:
        (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / target).touch()
        if target.startswith("elsewhere"):
            (folder.parents[1] / "blobs").symlink_to(tmp_path / "elsewhere")
        if "/" in name:
            path.parent.symlink_to((tmp_path / target).parent)
        else:
            path.symlink_to(os.path.relpath(tmp_path / target, folder))
    assert files.stays_inside(folder, path) is expected
    assert emr_loader.stays_inside(folder, path) is expected
    with contextlib.nullcontext() if expected else refused(CheckpointError, "leaves", "folder"):
        assert artifact_file(folder, name) == path
    if name.endswith(".safetensors") and "/" not in name:
        with contextlib.nullcontext() if expected else refused(ValueError, "leaves", "folder"):
            assert emr_loader.inside(folder, name, folder) == path


@pytest.mark.parametrize("found", ["nothing", "an empty folder", "a folder", "a file", "a link to nowhere"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_is_free_or_of_the_kind_that_may_be_replaced(tmp_path, found, overwrite):
    out = tmp_path / "out"
    if "folder" in found:
        out.mkdir()
    if found in ("a folder", "a file"):
        (out / "merge" if out.is_dir() else out).touch()
    if found.startswith("a link"):
        out.symlink_to(tmp_path / "nowhere")
    is_free = found in ("nothing", "an empty folder") or (found == "a folder" and overwrite)
    # A TakenError is a ValueError too.
    with contextlib.nullcontext() if is_free else refused(ValueError, path=out):
        files.require_free(out, overwrite, kind="merge", is_kind=lambda folder: (folder / "merge").exists())


def test_what_is_the_owners_goes_over_into_the_folder_that_replaces_theirs(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    new.mkdir()
    for name in ("ours/weights", "ours/notes.txt", "LICENSE", ".git/config", "both/mine"):
        (old / name).parent.mkdir(parents=True, exist_ok=True)
        (old / name).write_text(name)
    (old / "empty").mkdir()
    (old / "both" / "link").symlink_to("nowhere")
    (new / "both").mkdir()
    files.carry_over(old, new, lambda name: name == "ours/weights")
    assert contents(new) == {name: found for name, found in contents(old).items() if name != "ours/weights"}
    assert (new / "empty").is_dir() and os.readlink(new / "both" / "link") == "nowhere"
    (new / "both" / "link").unlink()
    (new / "LICENSE").unlink()
    (new / "LICENSE").write_text("another")
    with refused(files.TakenError, path=old / "LICENSE"):
        files.carry_over(old, new, lambda name: name == "ours/weights")
