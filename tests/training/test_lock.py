"""One run folder, one training."""

import errno
import os
import signal

import pytest

from hf_ext.training.state import RunFolder
from tests.kit.refusals import refused

from .tiny import make_arguments, prepare


def test_a_second_holder_is_refused_until_the_first_lets_go(tmp_path):
    arguments = make_arguments(tmp_path, {})
    with RunFolder(tmp_path) as first:
        prepare(first, arguments)
        prepare(first, arguments)
        # It gives back nothing that it does not have.
        for _ in range(2):
            with RunFolder(tmp_path) as second, refused(ValueError, tmp_path):
                prepare(second, arguments)
        assert first.lock.is_locked
    with RunFolder(tmp_path) as second:
        prepare(second, arguments)


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOLCK, errno.ENOSPC])
def test_a_disk_without_locks_is_named(tmp_path, monkeypatch, number):
    folder = RunFolder(tmp_path)

    def fail():
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(folder.lock, "acquire", fail)
    # Other errors say themselves what is wrong.
    named = [] if number == errno.ENOSPC else [tmp_path / ".lock"]
    with refused(OSError if number == errno.ENOSPC else ValueError, *named):
        prepare(folder, make_arguments(tmp_path, {}))
    assert not folder.lock.is_locked


def test_a_killed_holder_frees_the_folder_though_its_loaders_live(tmp_path):
    ready, done = os.pipe(), os.pipe()
    arguments = make_arguments(tmp_path, {})
    holder = os.fork()
    if not holder:
        folder = RunFolder(tmp_path)
        prepare(folder, arguments)
        if not os.fork():
            # A loader process, which has inherited what the training had open.
            os.write(ready[1], b"1")
            os.read(done[0], 1)
            os._exit(0)
        signal.pause()
    os.read(ready[0], 1)
    with refused(ValueError, tmp_path):
        prepare(RunFolder(tmp_path), arguments)
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    with RunFolder(tmp_path) as folder:
        prepare(folder, arguments)
    os.write(done[1], b"1")
