"""The journal: what is finished stays finished, what a kill or a loss of power took is done again."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hf_ext.merging.journal import Journal
from tests.kit import warm_python


def values(journal: Journal, units: int) -> list[list[float]]:
    return [sums.tolist() for sums in journal.read(units)]


@given(st.lists(arrays(np.float64, st.integers(0, 9), elements=st.floats(allow_nan=False)), min_size=1, max_size=5))
def test_sums_are_read_back_exactly_and_in_order(tmp_path_factory, sums):
    journal = Journal(tmp_path_factory.mktemp("journal"))
    for unit in reversed(range(len(sums))):
        journal.add(unit, sums[unit])
    assert [read.tobytes() for read in journal.read(len(sums))] == [given.tobytes() for given in sums]
    journal.close()


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
    assert values(tuesday, 3) == [[1], [8], [7]]
    tuesday.close()


KILLED = """
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
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)]
    done = warm_python.run(command, env=os.environ, cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL, done.stderr
    # The last line may have been cut off.
    told = [int(line) for line in done.stdout.splitlines(keepends=True) if line.endswith("\n")]
    assert len(told) > 50
    journal = Journal(tmp_path)
    assert journal.finished >= set(told)
    assert values(journal, len(told)) == [[unit] * 5 for unit in told]
    journal.close()
