"""The study of merging on real fine-tunes: three sets, three seeds, every method.

python examples/emr/study.py SET SHARED WORK
SET is tweets, pictures or texts (sets.py). SHARED holds tweeteval/, cifar10/ and fsdd/ as far as the set needs them.
Each row of a table is a file in WORK and is skipped where that is there; a training that was stopped goes on. At the
end examples/emr/results/SET/study.json is written; tables.py writes the README's tables.
"""

import re
import shutil
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from sets import EXAMPLES, SETS, Set

from hf_ext import EMRModel, merge_checkpoints
from hf_ext.data.opening import open_source
from hf_ext.files import whole_folder, write_json
from hf_ext.merging.measuring import learn_weights, save_statistics
from hf_ext.training import Task, evaluate, train
from hf_ext.training.arguments import DataSource, build

sys.path.insert(0, str(EXAMPLES.parent))

from experiments import keep, machine, prepare_process, read_arguments

SEEDS = (0, 1, 2)
# Merges into one model, each as its command does it without further options.
SINGLE = ("average", "task_arithmetic", "ties", "fisher", "regmean", "elect")
# Merges that restore a model for each task, and how they rescale.
MASKED = {"emr": ("global", "tensor", "tensor_l2"), "onebit": (None,), "ternary": (None,)}
STATISTICS = {"fisher": "fisher", "regmean": "gram"}
STATISTICS_EXAMPLES = 64


class Study:
    """
    One seed of one set: its trainings, merges and scores. The seed decides initial weights and the order of the
    examples, of the base too where it is trained here; `data/` in the folder of the set is shared by the seeds.
    """

    def __init__(self, kit: Set, seed: int, work: Path):
        self.kit, self.seed, self.work, self.data = kit, seed, work / f"seed-{seed}", work / "data"

    def data_file(self, task: str, part: str) -> Path:
        """The examples of a task."""
        (path,) = (self.data / task).glob(f"{part}.*")
        return path

    def examples(self, task: str, part: str = "test") -> Any:
        """The same, opened."""
        return open_source(DataSource(str(self.data_file(task, part)), split=part))

    def settings(self, task: str) -> dict[str, Any]:
        """Fields that a training of a task sets in its recipe."""
        labels = self.data / task / "labels.json"
        parts = {
            f"data.{use}.path": self.data_file(task, part) for use, part in (("train", "train"), ("eval", "test"))
        }
        return {**parts, "seed": self.seed, **({"task.labels": labels.read_text()} if labels.is_file() else {})}

    def task(self, name: str) -> Task:
        """The method's part of a training, of a task's classes."""
        return build(self.kit.task, read_arguments(self.kit.recipe, self.settings(name)).task, "task")

    def train(self, task: str, values: dict[str, Any]) -> Path:
        """Trains a run or goes on with it, unless it is complete; the snapshot."""
        run = self.work / "runs" / task
        values = {**self.settings(task), **values, "output_dir": run}
        train(self.task(task), read_arguments(self.kit.recipe, values))
        return run / "snapshot"

    @cached_property
    def base(self) -> Path:
        """The model that every fine-tune starts from."""
        if self.kit.ready_base is not None:
            return self.kit.ready_base(self.data.parent / "base")
        return self.train("base", {})

    @cached_property
    def fine_tunes(self) -> dict[str, Path]:
        """The model of each task."""
        start = {"init_from": self.base, "model": {}, **self.kit.fine_tuning}
        return {task: self.train(task, start) for task in self.kit.tasks}

    @cached_property
    def tasks(self) -> dict[str, Task]:
        """The method's parts, each with what it reads of its model, such as a tokenizer."""
        tasks = {name: self.task(name) for name in self.kit.tasks}
        for name, task in tasks.items():
            task.build_model({}, str(self.fine_tunes[name]))
        return tasks

    def load(self, task: str) -> Any:
        """A task's own model."""
        return self.tasks[task].build_model({}, str(self.fine_tunes[task])).eval()

    def with_weights(self, task: str, tensors: dict[str, torch.Tensor]) -> Any:
        """A task's model with other tensors, all but its head. By its files: a model's own names may be others."""
        folder, source = self.work / "with-weights", self.fine_tunes[task]
        shutil.copytree(source, folder, dirs_exist_ok=True)
        own = load_file(source / "model.safetensors")
        # a base without head has no prefix
        names = {name.removeprefix(f"{self.prefix}."): name for name in own} | {name: name for name in own}
        kept = {
            names[name]: values
            for name, values in tensors.items()
            if values.is_floating_point() and not self.is_excluded(name)
        }
        save_file({**own, **kept}, folder / "model.safetensors", {"format": "pt"})
        return self.tasks[task].build_model({}, str(folder)).eval()

    @cached_property
    def prefix(self) -> str:
        """The prefix of the names of a fine-tune's body."""
        return str(self.load(self.kit.tasks[0]).base_model_prefix)

    def is_excluded(self, name: str) -> bool:
        """True for a tensor that stays with each task."""
        return any(re.match(pattern, name) for pattern in self.kit.exclude)

    def score(self, task: str, model: Any) -> float:
        """The score of a model on the test examples of a task."""
        precision = read_arguments(self.kit.recipe, {}).mixed_precision
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            found = evaluate(self.tasks[task], model, self.examples(task))
        return round(found[self.kit.metric], 5)

    def score_all(self, model_of: Callable[[str], Any], tasks: tuple[str, ...] = ()) -> dict[str, Any]:
        """The scores of all tasks, and their mean."""
        scores = {task: self.score(task, model_of(task)) for task in tasks or self.kit.tasks}
        return {"scores": scores, "mean": float(np.mean(list(scores.values())))}

    def config(self, tasks: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
        """A merge."""
        sources = {task: str(self.fine_tunes[task]) for task in tasks or self.kit.tasks}
        return {"base": str(self.base), "tasks": sources, "exclude": list(self.kit.exclude), **changes}

    def merge(self, name: str, config: Any) -> tuple[Path, dict[str, Any]]:
        """Merges into a folder; with it the report."""
        out = self.work / "merged" / name
        return out, merge_checkpoints(config, out, overwrite=True, progress=False).report

    def find_statistics(self, method: str) -> dict[str, str]:
        """Statistics of the tasks' data that a method needs, measured on training examples."""
        files = {}
        for name, source in self.fine_tunes.items():
            kind = STATISTICS[method]
            path = self.work / "statistics" / f"{name}.{kind}.safetensors"
            if not path.is_file():
                path.parent.mkdir(exist_ok=True)
                data = self.examples(name, "train")
                save_statistics(self.tasks[name], str(source), data, kind, path, examples=STATISTICS_EXAMPLES)
            files[name] = str(path)
        return files

    def score_single(self, name: str, config: Any, tasks: tuple[str, ...] = ()) -> dict[str, Any]:
        """A merge into one model, scored with each task's own head."""
        out, _ = self.merge(name, config)
        merged = read_weights(out)
        row = {**self.score_all(lambda task: self.with_weights(task, merged), tasks), "bytes": weight_bytes(out)}
        shutil.rmtree(out)
        return row

    def single(self, method: str) -> dict[str, Any]:
        """The row of a merge into one model."""
        known = {"statistics": self.find_statistics(method)} if method in STATISTICS else {}
        row = self.score_single(method, self.config(method=method, **known))
        shutil.rmtree(self.work / "statistics", ignore_errors=True)
        return row

    def adamerging(self) -> dict[str, Any]:
        """The row of task arithmetic with weights learned from the test examples without their labels."""
        parts = {task: (self.tasks[task], self.examples(task)) for task in self.kit.tasks}
        learned = learn_weights(self.config(), parts, **(self.kit.learning or {}))
        values = [entry["value"] for entries in learned.options["weight"].values() for entry in entries]
        row = self.score_single("adamerging", learned)
        return {**row, "weights": [float(np.quantile(values, share)) for share in (0, 0.5, 1)]}

    def masked(self, method: str, tasks: tuple[str, ...] = ()) -> dict[str, Any]:
        """The rows of an artifact: one for each way to rescale."""
        out, report = self.merge(method, self.config(tasks, method=method))
        kept = ("task", "norm_to_base", "sign_conflict", "density", "cosine", "error")
        measures = [{key: entry[key] for key in kept} for entry in report["tasks"]]
        about, rows = {"bytes": weight_bytes(out), "measures": measures, "cosines": report["cosines"]}, {}
        for mode in MASKED[method]:
            model = EMRModel.from_pretrained(out, rescale=mode)
            name = method if mode in (None, "global") else f"{method} {mode}"
            rows[name] = {**self.score_all(lambda task, model=model: model.set_task(task).model, tasks), **about}
        shutil.rmtree(out)
        return rows

    def rows(self) -> dict[str, Any]:
        """All rows of the seed."""

        def row(name: str, compute: Callable[[], Any]) -> Any:
            return keep(self.work / "results" / f"{name}.json", compute)

        sizes = {task: weight_bytes(folder) for task, folder in self.fine_tunes.items()}
        base = read_weights(self.base)
        rows = {
            "individual": {**row("individual", lambda: self.score_all(self.load)), "bytes": sum(sizes.values())},
            "base": row("base", lambda: self.score_all(lambda task: self.with_weights(task, base))),
        }
        for method in SINGLE:
            rows[method] = row(method, lambda method=method: self.single(method))
        if self.kit.learning is not None:
            rows["adamerging"] = row("adamerging", self.adamerging)
        for method in MASKED:
            rows |= row(f"masked-{method}", lambda method=method: self.masked(method))
        curve = row("curve", self.curve)
        curve[str(len(self.kit.tasks))] = {name: rows[name]["mean"] for name in ("average", "emr")}
        parts = row("parts", self.parts)
        return {"rows": rows, "curve": curve, "parts": parts, "base_bytes": weight_bytes(self.base)}

    def parts(self) -> dict[str, Any]:
        """Losses by the two halves of EMR alone: elements whose sign lost, and magnitudes that are not the own."""
        out, _ = self.merge("parts", self.config(method="elect"))
        base, unified = read_weights(self.base), read_weights(out)
        shutil.rmtree(out)
        names = [name for name in unified if unified[name].is_floating_point() and not self.is_excluded(name)]
        elected = {name: unified[name] - base[name] for name in names}

        def vectors(task: str) -> dict[str, torch.Tensor]:
            own = read_weights(self.fine_tunes[task])
            return {name: own.get(name, own.get(f"{self.prefix}.{name}")) - base[name] for name in names}

        def masked(task: str) -> Any:
            kept = {name: own * (own * elected[name] > 0) for name, own in vectors(task).items()}
            return self.with_weights(task, {name: base[name] + kept[name] for name in names})

        def signed(task: str) -> Any:
            own = vectors(task)
            scale = sum(float(values.abs().sum()) for values in own.values()) / sum(
                float(values.abs().sum()) for values in elected.values()
            )
            kept = {name: scale * own[name].sign() * elected[name].abs() for name in names}
            return self.with_weights(task, {name: base[name] + kept[name] for name in names})

        return {"own magnitudes": self.score_all(masked), "own signs": self.score_all(signed)}

    def curve(self) -> dict[str, Any]:
        """Means over the first n tasks, merged alone."""
        found = {}
        for count in range(2, len(self.kit.tasks)):
            tasks = self.kit.tasks[:count]
            out, _ = self.merge("curve", self.config(tasks))
            model = EMRModel.from_pretrained(out)
            found[str(count)] = {
                "average": self.score_single("average", self.config(tasks, method="average"), tasks)["mean"],
                "emr": self.score_all(lambda task, model=model: model.set_task(task).model, tasks)["mean"],
            }
            shutil.rmtree(out)
        return found


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the weights in a folder's root."""
    return {
        name: values for path in sorted(folder.glob("model*.safetensors")) for name, values in load_file(path).items()
    }


def weight_bytes(folder: Path) -> int:
    """Size of a checkpoint's weights, or of an artifact."""
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def main(name: str, shared: Path, work: Path, results: Path = EXAMPLES / "results") -> None:
    """All seeds of a set."""
    prepare_process()
    kit, place = SETS[name], work / name
    if not (place / "data").is_dir():
        with whole_folder(place / "data") as folder:
            kit.write(shared, folder)
    studies = [Study(kit, seed, place) for seed in SEEDS]
    result = {
        "set": name,
        "metric": kit.metric,
        "greater_is_better": kit.greater_is_better,
        **machine("hf-ext", "torch", "transformers", "accelerate", "scikit-learn"),
        "seeds": {str(study.seed): study.rows() for study in studies},
    }
    write_json(results / name / "study.json", result, 1)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(sys.argv[1], *(Path(word).resolve() for word in sys.argv[2:]))
