"""Trains the released models, or goes on: one after the other, on one thread at the lowest priority.

python examples/released/train.py DATA [WORK] [--minutes M] [--only NAME...]
DATA holds bsds500, cifar10, set5, set12, bsd68 and fsdd. WORK, by default in the user's cache, keeps data and runs. It
may be stopped at any time (Ctrl-C, SIGTERM): what was reached is saved, and the same command goes on. With --minutes
each run saves after so long, and the next one's turn comes. `release.py` makes models of what they have reached.
"""

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

import torch
from data import prepare
from runs import RUNS, find_words, is_done, is_run

from hf_ext.training import main as train
from hf_ext.training.stopping import EXIT_CODE

WORK = Path.home() / ".cache" / "hf_ext_released"


def work_through(work: Path, names: list[str], minutes: float) -> int:
    """Trains what is not done, in the work folder; 75 where a signal ended it, 1 where a run failed, otherwise 0."""
    failed = False
    for name in names:
        source = RUNS[name]
        if is_done(work, name):
            print(f"{name} is done", flush=True)
        elif source and is_run(work, source) and not is_done(work, source):
            print(f"{name} waits for {source}", flush=True)
        else:
            print(f"{name} trains in {work / 'runs' / name}", flush=True)
            began = time.monotonic()
            code = train([*find_words(work, name), f"--deadline_minutes={minutes:g}"])
            # The same code says that the minutes are over.
            if code == EXIT_CODE and not 0 < 60 * minutes <= time.monotonic() - began:
                return code
            failed |= code not in (0, EXIT_CODE)
    return int(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DATA", type=lambda word: Path(word).resolve())
    parser.add_argument("work", metavar="WORK", nargs="?", type=lambda word: Path(word).resolve(), default=WORK)
    parser.add_argument("--minutes", type=float, default=0.0, help="of each run; without it each trains to its end")
    parser.add_argument("--only", metavar="NAME", nargs="+", choices=list(RUNS), default=list(RUNS))
    options = parser.parse_args()
    prepare(options.data, options.work, options.only)
    torch.set_num_threads(1)
    with contextlib.suppress(AttributeError):  # Windows has no such thing.
        os.nice(19)
    with contextlib.chdir(options.work):
        return work_through(options.work, options.only, options.minutes)


if __name__ == "__main__":
    sys.exit(main())
