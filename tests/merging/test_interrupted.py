"""A merge that is killed, or shared by processes, has the bits of one that ran through; its journal."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_ext.merging.journal import Journal
from tests.kit import warm_python

from .merging import assert_same_files, merge, write_set

ROOT = Path(__file__).parents[2]
PREPARE = """
    import json, os, random, signal, sys
    from pathlib import Path
    from hf_ext.merging import engine
    from hf_ext.emr import arithmetic, arithmetic as ops
    from hf_ext.merging.merge import merge_checkpoints
    engine.SEGMENT = 2 * ops.SUB_BLOCK
    config, out = json.loads(sys.argv[1]), Path(sys.argv[2])
"""
# One process imports everything, and every attempt is a fork of it that kills itself at its n-th write, flush or
# rename, whichever thread does it; some in the middle of the write.
KILLED = (
    PREPARE
    + """
    import threading

    def dying(name, left, lock):
        original = getattr(os, name)
        def call(first, data=b"", *rest, **options):
            with lock:
                left[0] -= 1
                if left[0] == 0:
                    if name in ("write", "pwrite") and left[1] < 0.5:
                        original(first, data[: len(data) // 2], *rest)
                    os.kill(os.getpid(), signal.SIGKILL)
            return original(first, data, *rest, **options) if data != b"" or rest else original(first)
        setattr(os, name, call)

    def attempt(out, after, chance):
        child = os.fork()
        if not child:
            try:
                left, lock = [after, chance], threading.RLock()
                for name in ("pwrite", "write", "fdatasync", "fsync", "replace"):
                    dying(name, left, lock)
                merge_checkpoints(config, out, progress=False)
                print("writes", after - left[0], flush=True)
                os._exit(0)
            except BaseException as error:
                print("failed", repr(error), flush=True)
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    arithmetic.find_kernels("cpu")
    randomness, kills = random.Random(int(sys.argv[3])), 0
    assert attempt(out.with_name("merged-expected"), 10**9, 1) == 0
    for index in range(int(sys.argv[4])):
        # an attempt that only has to finish takes some eighty operations still
        while code := attempt(out.with_name(f"merged-{index}"), randomness.randrange(1, 150), randomness.random()):
            assert code == -signal.SIGKILL, code
            kills += 1
    print("kills", kills)
"""
)
LAUNCHED = (
    PREPARE
    + """
    import atexit
    import torch

    # Registered first, called last. One write of a whole line: what two processes print to one pipe would mix.
    def tell_whether_left():
        os.write(1, f"group left {torch.distributed.is_initialized()}\\n".encode())

    atexit.register(tell_whether_left)
    merge_checkpoints(config, out, progress=False)
"""
)


def run(script: str, *arguments: str, command: tuple[str, ...] = (sys.executable, "-c"), **environment: str) -> Any:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment
    if command[-1] == "-c":
        command = (*command, textwrap.dedent(script), *arguments)
        return warm_python.run(command, env=environment, cwd=ROOT)
    return subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_killed_at_random_moments_it_goes_on_to_the_same_bits(tmp_path):
    config = write_set(tmp_path)
    done = run(KILLED, json.dumps(config), str(tmp_path / "merged"), "1", "3")
    assert done.returncode == 0, done.stdout + done.stderr[:6000]
    assert int(done.stdout.split()[-1]) >= 3, done.stdout
    for index in range(3):
        assert_same_files(tmp_path / f"merged-{index}", tmp_path / "merged-expected")
    assert not list(tmp_path.glob(".*")), list(tmp_path.glob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"method": "ties", "masks": True, "density": 0.3}, {}], ids=["ties", "emr"])
def test_two_processes_of_accelerate_launch_share_the_work(tmp_path, options):
    config = write_set(tmp_path) | options
    script = tmp_path / "launched.py"
    script.write_text(textwrap.dedent(LAUNCHED))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # with --num_processes instead of the file, accelerate starts one process on a CPU without saying so
    settings = ("--config_file", str(ROOT / "examples" / "accelerate" / "ddp_2_cpu.yaml"), "--main_process_port", port)
    launch = (sys.executable, "-m", "accelerate.commands.launch", *settings, str(script))
    told = {"command": launch, "ACCELERATE_USE_CPU": "true"}
    done = run("", json.dumps(config), str(tmp_path / "merged-two"), **told)
    assert done.returncode == 0, done.stdout + done.stderr[:6000]
    # or their threads might have aborted a process that ends
    assert done.stdout.count("group left False") == 2, done.stdout
    assert_same_files(tmp_path / "merged-two", merge(config, tmp_path / "merged-one"))
    # a failure of one is a failure of both, with the message
    if not options:
        done = run("", json.dumps(config), str(tmp_path / "merged-two"), **told)
        assert done.returncode != 0 and "exists and is not empty" in done.stderr
        assert "process 0 of 2 failed: TakenError" in done.stderr


def test_a_line_that_was_cut_off_or_damaged_does_not_count(tmp_path):
    journal = Journal(tmp_path)
    for unit in range(4):
        journal.add(unit, np.full(2, unit / 3))
    journal.close()
    (path,) = tmp_path.iterdir()
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 5
    lines[2] = lines[2].replace(b'"sums":"', b'"sums":"ff')
    lines[3] = bytes(len(lines[3]) - 1) + b"\n"
    for cut in range(len(lines[4])):
        path.write_bytes(b"".join(lines[:4]) + lines[4][:cut])
        again = Journal(tmp_path)
        assert again.finished == {0}
        again.add(3, np.ones(1))
        again.close()
        assert Journal(tmp_path).finished == {0, 3}
        for other in set(tmp_path.iterdir()) - {path}:
            other.unlink()


def test_after_another_boot_only_what_was_flushed_counts(tmp_path):
    journal = Journal(tmp_path, boot="monday")
    journal.add(0, np.ones(1))
    lines = journal.lines
    journal.add(1, np.ones(1))
    journal.confirm(lines)
    journal.add(2, np.ones(1))
    journal.close()
    assert Journal(tmp_path, boot="monday").finished == {0, 1, 2}
    tuesday = Journal(tmp_path, boot="tuesday")
    assert tuesday.finished == {0}
    tuesday.add(2, np.full(1, 7.0))
    tuesday.add(1, np.full(1, 8.0))
    assert [sums.tolist() for sums in tuesday.read(3)] == [[1], [8], [7]]
    tuesday.close()


KILLED_JOURNAL = """
    import os, signal, sys, threading
    from pathlib import Path
    import numpy as np
    from hf_ext.merging.journal import Journal
    journal, enough = Journal(Path(sys.argv[1])), threading.Event()

    def kill():
        enough.wait()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill).start()
    for unit in range(10**9):
        journal.add(unit, np.full(5, unit))
        print(unit, flush=True)
        if unit == 50:
            enough.set()
"""


def test_all_that_was_added_survives_a_kill(tmp_path: Path):
    command = [sys.executable, "-c", textwrap.dedent(KILLED_JOURNAL), str(tmp_path)]
    done = warm_python.run(command, env=os.environ, cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL, done.stderr
    # The last line may have been cut off.
    told = [int(line) for line in done.stdout.splitlines(keepends=True) if line.endswith("\n")]
    assert len(told) > 50
    journal = Journal(tmp_path)
    assert journal.finished >= set(told)
    assert [sums.tolist() for sums in journal.read(len(told))] == [[unit] * 5 for unit in told]
    journal.close()
