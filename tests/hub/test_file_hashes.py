"""Hashes of files that were read once are not read again, as long as the files stay as they are."""

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from hf_ext.hub import file_hashes
from hf_ext.hub.file_hashes import file_sha256


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write(path: Path, content: bytes, at: int = 10**18) -> Path:
    """A file that was last changed at a time, long ago if nothing is said."""
    path.write_bytes(content)
    os.utime(path, ns=(at, at))
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the hashes are kept between processes."""
    path = tmp_path / "sha256.json"
    monkeypatch.setattr(file_hashes, "_known", {})
    monkeypatch.setattr(file_hashes, "cache_file", lambda: path)
    return path


def test_what_another_process_read_is_not_read_again(tmp_path: Path, cache: Path):
    path = write(tmp_path / "file", b"one")
    assert file_sha256(path) == sha256(b"one")
    # What nobody would find in the file itself.
    (key,) = json.loads(cache.read_text())
    cache.write_text(json.dumps({key: "what was kept"}))
    file_hashes._known.clear()
    assert file_sha256(path) == "what was kept"
    assert file_sha256(path, fresh=True) == sha256(b"one")
    # In this process not even the cache is read again.
    cache.unlink()
    assert file_sha256(path) == sha256(b"one")


def test_a_file_that_was_just_written_is_read_again(tmp_path: Path, cache: Path):
    path, now = tmp_path / "file", time.time_ns()
    # As if all had happened within one tick of the clock of the file system.
    for content in (b"one", b"two", b"six"):
        assert file_sha256(write(path, content, now)) == sha256(content)
    assert not cache.exists()
    assert file_sha256(write(path, b"six")) == sha256(b"six")
    assert list(json.loads(cache.read_text()).values()) == [sha256(b"six")]


def test_another_content_with_the_old_time_is_read(tmp_path: Path, cache: Path):
    """A copy that keeps its time may get the inode of what it replaces: the time of the inode tells them apart."""
    for content in (b"one", b"two"):
        assert file_sha256(write(tmp_path / "file", content)) == sha256(content)
        time.sleep(0.02)
    os.replace(write(tmp_path / "other", b"six"), tmp_path / "file")
    assert file_sha256(tmp_path / "file") == sha256(b"six")


def test_a_cache_that_is_damaged_or_cannot_be_written_does_no_harm(tmp_path: Path, cache: Path, monkeypatch):
    path = write(tmp_path / "file", b"one")
    for text in ("[1, 2]", "{", '{"a": 1}', ""):
        cache.write_text(text)
        file_hashes._known.clear()
        assert file_sha256(path) == sha256(b"one")
    # A file is where its folder should be.
    monkeypatch.setattr(file_hashes, "cache_file", lambda: path / "sha256.json")
    file_hashes._known.clear()
    assert file_sha256(path) == file_sha256(path) == sha256(b"one")


def test_the_cache_does_not_grow_for_ever(tmp_path: Path, cache: Path, monkeypatch):
    monkeypatch.setattr(file_hashes, "_MOST", 3)
    for number in range(5):
        file_sha256(write(tmp_path / f"file{number}", b"%d" % number))
    assert list(json.loads(cache.read_text()).values()) == [sha256(b"%d" % number) for number in (2, 3, 4)]
