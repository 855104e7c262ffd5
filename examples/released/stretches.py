"""What a run has behind it, on this machine and on those before.

A state to resume from is too large to be committed, the weights of a small model are not. So a run goes on bit for bit
on one machine, from its state in WORK; on the next machine, where WORK is empty, it begins another stretch: with the
weights that were committed, a new optimizer, and the steps that its recipe leaves. Steps and hours of all stretches
are added up.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from hf_ext.files import whole_folder

RECIPES = Path(__file__).resolve().parent
RELEASED = RECIPES.parents[1] / "model_cards" / "released"
# Weights of runs that are not good enough for a release, or are steps to one.
REACHED = RECIPES / "reached"
# Fine-tunes of denoise-color by one recipe, restore-tasks.yaml, each for one degradation; release.py merges them.
RESTORE_TASKS: dict[str, dict[str, Any]] = {
    "noise": {"kind": "gaussian_noise", "sigma": [50, 100]},
    "jpeg": {"kind": "jpeg", "quality": [5, 40]},
    "blur": {"kind": "blur", "sigma": [0.8, 2]},
    "resize": {"kind": "resize", "factor": [0.4, 0.7]},
}
# In this order; each entry waits for the runs that it starts from.
QUEUE: dict[str, tuple[str, ...]] = {
    "spoken-digits": (),
    "cifar10-16": (),
    "denoise-color": (),
    "jpeg-color": ("denoise-color",),
    "denoise-gray": (),
    "super-resolution-x2": (),
    **{f"restore-tasks-{task}": ("denoise-color",) for task in RESTORE_TASKS},
    "photo": ("denoise-color",),
    "cifar10": ("cifar10-16",),
}


def committed_weights(name: str) -> Path | None:
    """The folder with what a run had reached when it was last committed."""
    return next((folder / name for folder in (REACHED, RELEASED) if (folder / name).is_dir()), None)


def find_start(work: Path, name: str) -> Path | None:
    """
    The weights that the stretch of this machine begins with: the run's own, else those of a run before it that did not
    run here; none where the recipe's own words are enough. A stretch that has begun keeps its copy in WORK/starts.
    """
    if (work / "runs" / name).is_dir():
        kept = work / "starts" / name
        return next(kept.iterdir(), None) if kept.is_dir() else None
    before = [source for source in QUEUE[name] if not (work / "runs" / source).is_dir()]
    return next((weights for source in (name, *before) if (weights := committed_weights(source))), None)


def read_before(work: Path, name: str) -> dict[str, float]:
    """`steps` of the stretches before this machine's, and `core_hours` of all that its weights have behind them."""
    start = find_start(work, name)
    if start is None:
        return {"steps": 0, "core_hours": 0.0}
    told: dict[str, Any] = json.loads((start / "training.json").read_text(encoding="utf-8"))["released"]
    return {"steps": told["steps"] if start.name == name else 0, "core_hours": told["core_hours"]}


def count_steps(work: Path, name: str) -> int:
    """Steps of all stretches."""
    report = work / "runs" / name / "snapshot" / "training.json"
    here = json.loads(report.read_text(encoding="utf-8"))["steps"] if report.is_file() else 0
    return int(read_before(work, name)["steps"] + here)


def find_recipe(name: str) -> tuple[Path, list[str]]:
    """The YAML file of a run, and the words that make it this run's."""
    group, _, task = name.rpartition("-")
    if group != "restore-tasks":
        return RECIPES / f"{name}.yaml", []
    return RECIPES / f"{group}.yaml", [
        f"--output_dir=runs/{name}",
        f"--task.degradation={json.dumps(RESTORE_TASKS[task])}",
    ]


def wanted_steps(name: str) -> int:
    """The steps of the recipe."""
    return int(yaml.safe_load(find_recipe(name)[0].read_text(encoding="utf-8"))["max_steps"])


def is_done(work: Path, name: str) -> bool:
    """Whether a run has taken the steps of its recipe; on a new machine the released merge tells it of fine-tunes."""
    group = name.rpartition("-")[0]
    if group == "restore-tasks" and not (work / "runs" / name).is_dir():
        return (RELEASED / group).is_dir()
    return count_steps(work, name) >= wanted_steps(name)


def begin_stretch(work: Path, name: str) -> list[str]:
    """The words of `hf-ext train` for this machine's stretch: its recipe, where it begins, how many steps it has."""
    recipe, words = find_recipe(name)
    start = find_start(work, name)
    if start is None:
        return [str(recipe), *words]
    if not (work / "runs" / name).is_dir():
        # It begins: what an earlier stretch began with, or a kill left, does not count.
        shutil.rmtree(work / "starts" / name, ignore_errors=True)
        with whole_folder(work / "starts" / name / start.name) as kept:
            shutil.copytree(start, kept, dirs_exist_ok=True)
    left = wanted_steps(name) - int(read_before(work, name)["steps"])
    return [str(recipe), *words, f"--init_from=starts/{name}/{start.name}", f"--max_steps={left}"]


def count_core_hours(work: Path, name: str) -> float:
    """Processor time of all stretches, and of the runs that they went on from."""
    seconds = json.loads((work / "core_seconds.json").read_text(encoding="utf-8"))
    hours: float = seconds.get(name, 0.0) / 3600
    if find_start(work, name) is not None:
        return hours + read_before(work, name)["core_hours"]
    return hours + sum(count_core_hours(work, source) for source in QUEUE[name])
