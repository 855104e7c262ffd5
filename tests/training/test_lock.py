"""One run folder, one training."""

import errno
import os
import signal

import pytest

from hf_ext.training.lock import FolderLock
from hf_ext.training.state import RunFolder

from .tiny import make_arguments, prepare


def test_a_second_holder_is_refused_until_the_first_lets_go(tmp_path):
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.acquire()
    first.acquire()
    with pytest.raises(ValueError) as refused:
        second.acquire()
    assert str(tmp_path) in str(refused.value)
    assert first.is_held and not second.is_held
    # It gives back nothing that it does not have.
    second.release()
    with pytest.raises(ValueError):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOLCK])
def test_a_disk_without_locks_is_named(tmp_path, monkeypatch, number):
    holder = FolderLock(tmp_path)

    def fail():
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(holder._lock, "acquire", fail)
    with pytest.raises(ValueError) as refused:
        holder.acquire()
    assert str(tmp_path / ".lock") in str(refused.value)
    assert not holder.is_held
    # Other errors say themselves what is wrong.
    number = errno.ENOSPC
    with pytest.raises(OSError) as full:
        holder.acquire()
    assert full.value.errno == errno.ENOSPC


def test_a_killed_holder_frees_the_folder_though_its_loaders_live(tmp_path):
    ready, done = os.pipe(), os.pipe()
    holder = os.fork()
    if not holder:
        lock = FolderLock(tmp_path)
        lock.acquire()
        if not os.fork():
            # A loader process, which has inherited what the training had open.
            os.write(ready[1], b"1")
            os.read(done[0], 1)
            os._exit(0)
        signal.pause()
    os.read(ready[0], 1)
    arguments = make_arguments(tmp_path, {})
    with pytest.raises(ValueError) as refused:
        prepare(RunFolder(tmp_path), arguments)
    assert str(tmp_path) in str(refused.value)
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    with RunFolder(tmp_path) as folder:
        prepare(folder, arguments)
    os.write(done[1], b"1")
