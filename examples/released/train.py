"""Trains the released models, or goes on: a run for each core, on one thread at the lowest priority.

python examples/released/train.py DATA [WORK]
DATA holds bsds500, cifar10, set5, set12, bsd68 and fsdd. WORK keeps data, runs and their resume states, by default in
the user's cache: it may be stopped at any time (Ctrl-C), and the same command goes on. An empty file WORK/pause holds
all runs while something else is timed. `release.py` makes models of what they have reached.

On another machine, where WORK is empty, a run begins another stretch with the weights that were committed: those of
the released model, or of `reached/NAME`, which `release.py --keep` writes.
"""

import functools
import os
import sys
from pathlib import Path

from data import prepare
from stretches import QUEUE, begin_stretch, find_recipe, is_done

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from background import SECONDS_BETWEEN_LOOKS, WORK, Job, end_with_runs, work_through  # noqa: E402  found above


def find_words(work: Path, name: str) -> list[str]:
    """The command of a run; where it begins, its start is copied."""
    return ["-m", "hf_ext_cli.main", "train", *begin_stretch(work, name)]


def find_jobs(work: Path, core_seconds: dict[str, float]) -> list[Job]:
    """The runs of the queue that are not done, and need not wait for another."""
    return [
        Job(name, functools.partial(find_words, work, name))
        for name in QUEUE
        if find_recipe(name)[0].is_file()
        and not is_done(work, name)
        and all(is_done(work, source) for source in QUEUE[name])
    ]


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    work = Path(sys.argv[2]) if len(sys.argv) == 3 else WORK
    prepare(Path(sys.argv[1]), work)
    find, slots = functools.partial(find_jobs, work), os.cpu_count() or 1
    end_with_runs(lambda: work_through(work, find, slots, work / "pause", SECONDS_BETWEEN_LOOKS))


if __name__ == "__main__":
    main()
