"""Runs of the released models: their recipes, what they start from, how far they are."""

import json
from pathlib import Path
from typing import Any

import yaml

from hf_ext.files import read_json

RECIPES = Path(__file__).resolve().parent
RELEASED = RECIPES.parents[1] / "model_cards" / "released"
# Weights that are a step to a release, and are committed too.
REACHED = RECIPES / "reached"
# Fine-tunes of denoise-color by one recipe, restore-tasks.yaml, each for one degradation; release.py merges them.
RESTORE_TASKS: dict[str, dict[str, Any]] = {
    "noise": {"kind": "gaussian_noise", "sigma": [50, 100]},
    "jpeg": {"kind": "jpeg", "quality": [5, 40]},
    "blur": {"kind": "blur", "sigma": [0.8, 2]},
    "resize": {"kind": "resize", "factor": [0.4, 0.7]},
}
# In this order; each run and the run, or the committed step, whose weights it begins with.
RUNS: dict[str, str | None] = {
    # A step is 2,600 steps on the recordings as they are, 1.11 core-hours: 97.0 % of the official test.
    "spoken-digits": "spoken-digits-first",
    "cifar10-16": None,
    # A step is the network of two stages, here 36,000 steps in 1.1 core-hours, of denoise-gray 30,000 in 0.9.
    "denoise-color": "denoise-color-first",
    "jpeg-color": "denoise-color",
    "denoise-gray": "denoise-gray-first",
    # A step is 24,000 steps of Muon on three stages, after two trainings on two: 4.2 core-hours.
    "super-resolution-x2": "super-resolution-x2-third",
    **dict.fromkeys((f"restore-tasks-{task}" for task in RESTORE_TASKS), "denoise-color"),
    # A step is the model that turned pure colours grey: 0.6 core-hours on photographs alone.
    "photo": "photo-first",
    # Steps of them are committed, and are no releases: deblur gains 1.0 dB, derain-first took flat colours for mist.
    "deblur": "deblur-first",
    "derain": "derain-first",
    "demosaick": None,
    "cifar10": None,
}


def committed_weights(name: str) -> Path:
    """The released model of a run, or the step to one."""
    return next(folder / name for folder in (REACHED, RELEASED) if (folder / name).is_dir())


def find_recipe(name: str) -> tuple[Path, list[str]]:
    """The YAML file of a run, and the words that make it this run's."""
    group, _, task = name.rpartition("-")
    if group != "restore-tasks":
        return RECIPES / f"{name}.yaml", []
    # At the recipe's rate of 1e-3 noise has 25.65 dB on the photographs that choose, at this one 26.23.
    slower = ["--learning_rate=3e-4"] if task == "noise" else []
    degradation = f"--task.degradation={json.dumps(RESTORE_TASKS[task])}"
    return RECIPES / f"{group}.yaml", [f"--output_dir=runs/{name}", degradation, *slower]


def is_run(work: Path, name: str) -> bool:
    """True for a run that began in WORK, false for a committed step."""
    return name in RUNS and (work / "runs" / name).is_dir()


def find_words(work: Path, name: str) -> list[str]:
    """The words of `hf-ext train` in WORK. Where the run that it starts from did not run, its committed weights do."""
    recipe, words = find_recipe(name)
    source = RUNS[name]
    if source is not None and not is_run(work, source):
        words = [*words, f"--init_from={committed_weights(source)}"]
    return [str(recipe), *words]


def read_report(work: Path, name: str) -> dict[str, Any]:
    """The training.json of a run, with no steps where it has not saved yet."""
    path = work / "runs" / name / "snapshot" / "training.json"
    return dict(read_json(path)) if path.is_file() else {"steps": 0, "seconds": 0.0}


def is_done(work: Path, name: str) -> bool:
    """True for a run that has taken the steps of its recipe."""
    recipe, _ = find_recipe(name)
    return int(read_report(work, name)["steps"]) >= yaml.safe_load(recipe.read_text(encoding="utf-8"))["max_steps"]


def count_core_hours(work: Path, name: str) -> float:
    """Hours of training on one thread, of the run and of those that it goes on from."""
    hours: float = read_report(work, name)["seconds"] / 3600
    if (source := RUNS[name]) is None:
        return hours
    if is_run(work, source):
        return hours + count_core_hours(work, source)
    return hours + read_json(committed_weights(source) / "training.json")["released"]["core_hours"]
