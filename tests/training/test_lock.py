"""One run folder, one training; on one machine and on several that share a disk."""

import errno
import json
import os
import signal
import socket
import threading
import time

import pytest

from hf_ext.training import lock
from hf_ext.training.lock import FolderLock


def write_owner(folder, host, beat=0):
    owner = {"host": host, "process": 77, "since": "2026-01-02 03:04:05", "beat": beat}
    (folder / ".owner").write_text(json.dumps(owner))


def test_the_holder_is_named_and_leaves_no_name(tmp_path):
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.acquire()
    first.acquire()
    with pytest.raises(ValueError, match=rf"process {os.getpid()} of {socket.gethostname()}, since .*choose another"):
        second.acquire()
    assert not second.is_held
    second.release()
    first.release()
    assert not (tmp_path / ".owner").exists()
    second.acquire()
    second.release()


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOLCK])
def test_a_disk_without_locks_is_named(tmp_path, monkeypatch, number):
    holder = FolderLock(tmp_path)

    def fail():
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(holder._lock, "acquire", fail)
    with pytest.raises(ValueError, match=r"\.lock cannot be locked \(.*\): .*another output_dir, on a local disk"):
        holder.acquire()
    assert not holder.is_held
    # Other errors say themselves what is wrong.
    number = errno.ENOSPC
    with pytest.raises(OSError, match="No space left"):
        holder.acquire()


def test_an_owner_on_another_machine_that_beats_is_left_alone(tmp_path):
    write_owner(tmp_path, "elsewhere")
    beats = threading.Timer(0.2, write_owner, (tmp_path, "elsewhere", 1))
    beats.start()
    with pytest.raises(ValueError, match="process 77 of elsewhere, since 2026-01-02"):
        FolderLock(tmp_path, beat=0.2).acquire()
    beats.join()
    # It has not taken the system's lock with it.
    write_owner(tmp_path, socket.gethostname())
    holder = FolderLock(tmp_path)
    holder.acquire()
    holder.release()


def test_an_owner_on_another_machine_that_is_silent_is_followed(tmp_path, caplog):
    write_owner(tmp_path, "elsewhere")
    holder = FolderLock(tmp_path, beat=0.04)
    holder.acquire()
    assert "was trained in by elsewhere" in caplog.text
    # It beats itself.
    first, end = (tmp_path / ".owner").read_text(), time.monotonic() + 30
    while (tmp_path / ".owner").read_text() == first:
        assert time.monotonic() < end
        time.sleep(0.01)
    holder.release()


def test_a_killed_owner_of_this_machine_delays_nobody_though_its_loaders_live(tmp_path):
    ready, done = os.pipe(), os.pipe()
    owner = os.fork()
    if not owner:
        FolderLock(tmp_path).acquire()
        if not os.fork():
            # A loader process, which has inherited what the training had open.
            os.write(ready[1], b"1")
            os.read(done[0], 1)
            os._exit(0)
        signal.pause()
    os.read(ready[0], 1)
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    begin, follower = time.monotonic(), FolderLock(tmp_path)
    follower.acquire()
    assert time.monotonic() - begin < lock.BEAT
    follower.release()
    os.write(done[1], b"1")
