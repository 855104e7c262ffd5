"""The study of MRConv on real data, in the background: spoken digits, sequential CIFAR-10, ablations, MRConvNeXt.

python examples/mrconv/study.py DATA [WORK]
DATA holds fsdd and cifar10. WORK, by default in the user's cache, keeps WORK/mrconv: runs, their resume states, and
what they had reached at each mark. One training runs at a time. It may be stopped at any time (Ctrl-C, SIGTERM), and
the same command goes on; an empty file WORK/pause holds it. `tables.py` scores what is reached, also meanwhile, and
keeps results/reached.zip, from which the study goes on on another machine.
"""

import functools
import shutil
import sys
from pathlib import Path

from keeping import bring_back
from measuring import choose_rate
from runs import (
    COMPARISONS,
    MARKS,
    PLACES,
    Run,
    ablations,
    candidates,
    find_mark,
    keep_mark,
    make_job,
    prepare,
    steps_taken,
)

from hf_ext.files import whole_folder

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from background import SECONDS_BETWEEN_LOOKS, WORK, Job, end_with_runs, work_through  # noqa: E402  found above

# A comparison and the core minutes that all its models reach before the next round begins; and the ablations.
ROUNDS: list[tuple[str, int]] = [
    *((name, 3) for name in COMPARISONS),
    ("ablations", 0),
    *((name, minutes) for minutes in (8, 15, 30, 60, 120) for name in COMPARISONS if minutes in MARKS[name]),
]


def find_runs(study: Path, data: dict[str, str], name: str, minutes: int) -> list[Run]:
    """The runs of a round: all rates up to the first mark, the best of them later."""
    if name == "ablations":
        return [run for _, run in ablations(choose_rate(study, data, "digits", "mrconv").rate)]
    models = COMPARISONS[name].models
    if minutes == MARKS[name][0]:
        return [run for model in models for run in candidates(name, model)]
    return [choose_rate(study, data, name, model) for model in models]


def find_jobs(study: Path, data: dict[str, str], core_seconds: dict[str, float]) -> list[Job]:
    """What is left of the first round that is not over. What a run has reached at its mark is kept."""
    for name, minutes in ROUNDS:
        jobs = []
        runs = find_runs(study, data, name, minutes)
        for run in [run for run in runs if not find_mark(study, run, minutes).is_dir()]:
            job = make_job(run, minutes)
            used = core_seconds.get(run.name, 0.0)
            if used >= job.core_seconds or steps_taken(study, run) >= run.steps:
                keep_mark(study, run, minutes, used)
            else:
                jobs.append(job)
        if jobs:
            return jobs
    return []


def find_data(source: Path, study: Path) -> dict[str, str]:
    """The data of each comparison, copied once."""
    prepare(source / "fsdd", study / PLACES["digits"])
    if not (images := study / PLACES["images"]).is_dir():
        with whole_folder(images) as folder:
            shutil.copytree(source / "cifar10", folder, dirs_exist_ok=True)
    return {name: str(study / place) for name, place in PLACES.items()}


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    work = Path(sys.argv[2]).resolve() if len(sys.argv) == 3 else WORK
    study = work / "mrconv"
    study.mkdir(parents=True, exist_ok=True)
    bring_back(study)
    find = functools.partial(find_jobs, study, find_data(Path(sys.argv[1]), study))
    end_with_runs(lambda: work_through(study, find, 1, work / "pause", SECONDS_BETWEEN_LOOKS))


if __name__ == "__main__":
    main()
