"""Every task of a merge evaluated by one command: a recipe says on what and how, and one table comes out."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict

from ..distributed import Ranks
from ..figures import can_draw, new_figure, save_figure
from ..files import read_json, write_json
from ..settings import SettingsError, build, read_yaml

# The libraries are imported where they are needed, which is after everything was read and checked.
from .arguments import DataSource, apply_overrides
from .launch import EVALUATIONS, TASKS, find_task
from .sections import check_sections

# A recipe may name the methods of trainings too.
METHODS = EVALUATIONS | TASKS


@strict
@dataclass
class RecipeEntry:
    """
    How one task is evaluated. A recipe's own `method`, `metric` and `task` hold for all entries that say nothing else.

    Args:
        method (`str`): How: `text-classification`, `image-classification`, `zero-shot-images`, `multiple-choice`, or
            the method of a training.
        data (`dict`): On what: a [`DataSource`].
        metric (`str`, *optional*): Which of the method's metrics the table shows; its first when not given.
        task (`dict`): Options of the method.
    """

    method: str
    data: dict
    metric: str | None = None
    task: dict = field(default_factory=dict)


@strict
@dataclass
class Recipe:
    """
    A file of `hf-ext evaluate --all-tasks`.

    Args:
        tasks (`dict`): A [`RecipeEntry`] for each task of the merge, by its name.
        method (`str`, *optional*): That of all entries.
        metric (`str`, *optional*): That of all entries.
        task (`dict`): Options of all entries, which their own complete and replace.
        batch_size (`int`, *optional*): Examples that a process scores at once; the method's own number when not given.
        num_workers (`int`, defaults to 0): Loader processes, which read and decode.
    """

    tasks: dict
    method: str | None = None
    metric: str | None = None
    task: dict = field(default_factory=dict)
    batch_size: int | None = None
    num_workers: int = 0

    def __post_init__(self) -> None:
        if not self.tasks or not all(isinstance(name, str) for name in self.tasks):
            raise SettingsError(f"tasks must hold an entry for each task, by its name; got {list(self.tasks)!r:.200}.")
        shared = {name: value for name, value in (("method", self.method), ("metric", self.metric)) if value}
        self.entries: dict[str, RecipeEntry] = {}
        for name, given in self.tasks.items():
            where = f"tasks.{name}"
            values = {**shared, **given} if isinstance(given, dict) else given
            entry = build(RecipeEntry, values, where)
            entry = replace(entry, task={**self.task, **entry.task})
            if entry.method not in METHODS:
                allowed = ", ".join(sorted(METHODS))
                raise SettingsError(f"{where}: unknown method {entry.method!r}; allowed: {allowed}.")
            build(DataSource, entry.data, f"{where}.data")
            with _naming(name):
                check_sections(*METHODS[entry.method], entry.task, {})
            self.entries[name] = entry


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Says of which task an error is."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"task {name!r}: {error}") from error


def evaluate_all(
    source: str,
    config: Path,
    overrides: list[str] | None = None,
    output: Path | None = None,
    only: str | None = None,
    against: Path | None = None,
) -> dict[str, Any]:
    """
    Evaluates every task of a merge as a recipe says, on the GPU if there is one. The processes of `accelerate launch`
    share the examples.

    Args:
        source (`str`): A merge with tasks, folder or `org/name[@revision]`; the YAML file of a merge, for the models
            that it merges, each on its own task; or any other model, which answers for all tasks.
        config (`Path`): The recipe.
        overrides (`list[str]`, *optional*): `--field value` words.
        output (`Path`, *optional*): Where to write the result, which is there from the first task on; with `against`
            a picture beside it.
        only (`str`, *optional*): One task instead of all.
        against (`Path`, *optional*): Result of the individual models, which scores are put in relation to.

    Returns:
        `dict`: `results` as in `eval.json`, each with its `merged_task`; `tasks`, the table's row of each; `mean`.

    Raises:
        ValueError: A key of the recipe, data or a checkpoint cannot be used, or the tasks are not those of the recipe.
    """
    ranks = Ranks()
    if output is not None and against is not None and output.resolve() == against.resolve():
        raise ValueError(f"{output} holds the individual models' result: name another file for this one.")
    if output is not None and output.suffix == ".png":
        raise ValueError(f"{output}: the result is JSON, and its picture lies beside it as a .png; name it .json.")
    recipe = read_recipe(config, overrides or [])
    chosen = ranks.ask_first(lambda: choose_tasks(source, recipe, config, only))
    entries = {name: recipe.entries[name] for name in chosen}
    from .evaluation import evaluate, write_results
    from .provenance import published_name
    from .sources import match_classes, open_source

    with ranks.first_before_others():
        tasks = {name: _build_evaluation(name, entry) for name, entry in entries.items()}
        sources = {name: build(DataSource, entry.data) for name, entry in entries.items()}
        data = {name: open_source(found, f"tasks.{name}.data") for name, found in sources.items()}
    known = {} if against is None else read_individual(against, tasks, entries, sources)
    result: dict[str, Any] = {"model": published_name(source), "results": [], "tasks": {}, "mean": {}}
    options: dict[str, Any] = {"batch_size": recipe.batch_size, "num_workers": recipe.num_workers}
    for name, (checkpoint, merged_task) in chosen.items():
        task, metric = tasks[name], _headline(tasks[name], entries[name])
        with _naming(name):
            with ranks.first_before_others():
                model = _load(task, checkpoint, merged_task).to(ranks.own_device())
            scores = evaluate(task, model, match_classes(data[name], task), **options)
            if metric not in scores:
                raise ValueError(f"this model gives {', '.join(scores)}, not {metric}: set another metric.")
        # The next one needs its memory.
        del model
        measured = write_results(None, task, scores, {"": sources[name]})["results"]
        result["results"] += [
            {**row, **_identify(name, sources[name]), "revision": _commit(checkpoint)} for row in measured
        ]
        result["tasks"][name] = _relate(metric, task.metric_names[metric], scores[metric], known.get(name))
        result["mean"] = _average(result["tasks"])
        if output is not None and ranks.index == 0:
            write_json(output, result)
    if output is not None and against is not None and ranks.index == 0:
        picture = output.with_suffix(".png")
        if can_draw(picture.name):
            _draw_scores(result, picture)
    return result


def read_recipe(config: Path, overrides: list[str]) -> Recipe:
    """A recipe with the values that replace those in the file."""
    mapping = apply_overrides(read_yaml(config), overrides)
    if "tasks" not in mapping:
        raise ValueError(f"{config} has no section tasks: name a recipe, such as those in examples/emr/paper.")
    return build(Recipe, mapping)


def choose_tasks(source: str, recipe: Recipe, config: Path, only: str | None) -> dict[str, tuple[str, str | None]]:
    """The tasks that are evaluated, with their checkpoints; each must be in the recipe."""
    found = find_checkpoints(source, list(recipe.entries))
    if only is not None and only not in found:
        raise ValueError(f"there is no task {only!r} of {source}; choose one of {', '.join(found)}.")
    chosen = {name: checkpoint for name, checkpoint in found.items() if only in (None, name)}
    if absent := [name for name in chosen if name not in recipe.entries]:
        raise ValueError(
            f"{config} says nothing of {', '.join(absent)}: add them to its section tasks. {source} has the tasks "
            f"{', '.join(found)}."
        )
    return chosen


def find_checkpoints(source: str, names: list[str]) -> dict[str, tuple[str, str | None]]:
    """For each task a checkpoint, pinned to a commit, and its name in the merge where it is one."""
    from hf_ext.emr.artifact import read_tasks
    from hf_ext.merging.configuration import MergeConfig

    from .models import pin_revision

    if source.endswith((".yaml", ".yml")):
        return {name: (pin_revision(spec), None) for name, spec in MergeConfig.from_yaml(source).tasks.items()}
    pinned = pin_revision(source)
    merged = read_tasks(pinned)
    return {name: (pinned, None if merged is None else name) for name in merged or names}


def read_individual(
    path: Path, tasks: dict[str, Any], entries: dict[str, RecipeEntry], sources: dict[str, DataSource]
) -> dict[str, float]:
    """The score of each task in an earlier result, which must have been measured in the same way."""
    from .provenance import published_name

    content = read_json(path)
    rows = content.get("results") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "merged_task" in row for row in rows):
        raise ValueError(f"{path} is no result of hf-ext evaluate --all-tasks --output {path}.")
    found = {}
    for name, task in tasks.items():
        metric = _headline(task, entries[name])
        row = next((row for row in rows if (row["merged_task"], row.get("metric")) == (name, metric)), None)
        if row is None or not isinstance(row.get("value"), int | float):
            raise ValueError(f"{path} has no {metric} of task {name!r}: evaluate it with the same recipe.")
        here = {
            "dataset": published_name(sources[name].path),
            "split": sources[name].split,
            **_identify(name, sources[name]),
            "arguments": task.describe(),
        }
        if different := [key for key, value in here.items() if row.get(key) != value]:
            key = different[0]
            raise ValueError(
                f"{path}: task {name!r} was measured with {key} {row.get(key)!r:.200}, this recipe has "
                f"{here[key]!r:.200}; evaluate both with one recipe."
            )
        found[name] = float(row["value"])
    return found


def _build_evaluation(name: str, entry: RecipeEntry) -> Any:
    with _naming(name):
        task: Any = build(find_task(entry.method, METHODS), entry.task, "task")
        _headline(task, entry)
    return task


def _headline(task: Any, entry: RecipeEntry) -> str:
    """The metric of the table."""
    metric: str = entry.metric or next(iter(task.metric_names))
    if metric not in task.metric_names:
        raise ValueError(f"{entry.method} has no metric {metric!r}; allowed: {', '.join(task.metric_names)}.")
    return metric


def _load(task: Any, checkpoint: str, merged_task: str | None) -> Any:
    from hf_ext.emr.weights import task_checkpoint

    from .models import load_trained

    with task_checkpoint(checkpoint, merged_task) as place:
        return load_trained(task, place)


def _relate(metric: str, name: str, value: float, individual: float | None) -> dict[str, Any]:
    """A row of the table."""
    row: dict[str, Any] = {"metric": metric, "name": name, "value": value}
    if individual is not None:
        row |= {"individual": individual, "of_individual": value / individual if individual > 0 else None}
    return row


def _average(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Means over the tasks, of what all have."""
    found = {}
    for key in ("value", "individual", "of_individual"):
        values = [value for row in rows.values() if (value := row.get(key)) is not None]
        if len(values) == len(rows):
            found[key] = sum(values) / len(values)
    return found


def _identify(name: str, source: DataSource) -> dict[str, str | None]:
    """What of a row tells two tasks of one data set apart."""
    return {"merged_task": name, "config": source.name}


def _commit(checkpoint: str) -> str | None:
    return None if Path(checkpoint).expanduser().exists() else checkpoint.partition("@")[2] or None


def _draw_scores(result: Mapping[str, Any], path: Path) -> None:
    """Draws the scores as shares of the individual models' scores: a bar for each task and one for their mean."""
    mean = {"of_individual": result["mean"].get("of_individual"), "value": result["mean"]["value"]}
    rows = {**result["tasks"], "mean": mean}
    known = [row.get("of_individual") for row in rows.values()]
    # Below zero, as a correlation may be, there is no bar.
    shares = [max(share or 0.0, 0.0) for share in known]
    told = ["no share" if share is None else f"{share:.1%}" for share in known]
    told = [f"{share}  ({row['value']:.4f})" for share, row in zip(told, rows.values(), strict=True)]
    figure = new_figure(7, 0.9 + 0.27 * len(rows))
    axis = figure.subplots()
    bars = axis.barh(range(len(rows)), shares, color=["#0072b2"] * len(result["tasks"]) + ["#e69f00"])
    axis.bar_label(bars, told, padding=3, fontsize=8)
    axis.axvline(1, color="#d55e00", linewidth=0.8)
    axis.set_yticks(range(len(rows)), [name.replace("$", r"\$") for name in rows], fontsize=8)
    axis.set(xlim=(0, 1.35 * max(1.0, *shares)), title="score, as a share of the individual model's")
    axis.invert_yaxis()
    save_figure(figure, path)
