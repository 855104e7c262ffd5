"""The study of MRConv on real data: spoken digits, sequential CIFAR-10, MRConvNeXt, and which kernel.

python examples/mrconv/study.py DATA WORK [CLAIM...]    all claims or some
DATA holds fsdd and cifar10. What a run had reached after so many minutes, or at its end, is a file in WORK/results and
is skipped where that is there; runs in WORK/runs go on where they stopped. After each claim its part of
results/study.json is replaced, and tables.py writes the tables.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import soxr
from peers import make_task, trained_parameters
from recordings import read_digit, split_digits, write_digits
from tables import EXAMPLES, RESULT, write_tables

from hf_ext.data.opening import open_source
from hf_ext.files import read_json, write_json
from hf_ext.training import Task, TrainingArguments, evaluate, train
from hf_ext.training.arguments import DataSource
from hf_ext.training.stopping import RunStopped

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import keep, machine, prepare_process, read_arguments

RATE = 4000
# No run comes to its last step: the clock ends it, and its rate does not depend on the number.
ENDLESS = 1_000_000


def prepare(source: Path, work: Path) -> dict[str, str]:
    """The data of each comparison: the spoken digits are written at half their rate, once."""
    files = list((source / "fsdd").glob("*.wav"))
    if not files:
        raise ValueError(f"{source / 'fsdd'} holds no .wav files: give the Free Spoken Digit Dataset.")
    for part, members in split_digits(files, 10).items():
        path = work / "data" / "digits" / f"{part}.parquet"
        if not path.is_file():
            rows = [read_digit(file) for file in members]
            write_digits(path, [{**row, "audio": soxr.resample(row["audio"], 2 * RATE, RATE)} for row in rows])
    images = str(source / "cifar10")
    return {"digits": str(work / "data" / "digits"), "scifar": images, "images": images}


def slice_classes(split: str, size: int, start: int, stop: int) -> str:
    """Examples `start` to `stop` of each of ten classes of `size` examples, which come one after the other."""
    return "+".join(f"{split}[{size * index + start}:{size * index + stop}]" for index in range(10))


IMAGES = {
    "train": slice_classes("train", 5000, 0, 4900),
    "validation": slice_classes("train", 5000, 4900, 5000),
    "test": slice_classes("test", 1000, 0, 200),
}
RECORDINGS = {part: part for part in ("train", "validation", "test")}


class Comparison(NamedTuple):
    """Models on one data set by one recipe, the first one ours; `validation` of the splits chooses the rates."""

    recipe: str
    splits: dict[str, str]
    models: dict[str, "Model"]


class Model(NamedTuple):
    """A model of a comparison: rates to choose from, its name in `peers.py`, and its difference from the recipe."""

    rates: tuple[float, ...]
    peer: str | None
    values: dict[str, Any]


def peer(name: str, rates: tuple[float, ...], **section: Any) -> Model:
    """Another model than ours, with the whole of its section `model`."""
    return Model(rates, name, {"model": section, "task.kernel_learning_rate": None})


# Rates to choose from.
OURS, MIDDLE, SLOW = (0.002, 0.004, 0.008), (0.001, 0.003, 0.01), (0.0003, 0.001, 0.003)
COMPARISONS = {
    "digits": Comparison(
        "study-digits",
        RECORDINGS,
        {
            "mrconv": Model(OURS, None, {}),
            "s4d": peer("s4d", MIDDLE, hidden_size=68, num_hidden_layers=4, dropout=0.1),
            "transformer": peer(
                "transformer", SLOW, hidden_size=48, intermediate_size=64, num_hidden_layers=4, dropout=0.1
            ),
        },
    ),
    "scifar": Comparison(
        "study-scifar",
        IMAGES,
        {
            "mrconv": Model(OURS, None, {}),
            "s4d": peer("s4d", MIDDLE, hidden_size=72, num_hidden_layers=4, bidirectional=True),
            "transformer": peer("transformer", SLOW, hidden_size=48, intermediate_size=104, num_hidden_layers=4),
        },
    ),
    "images": Comparison(
        "study-images",
        IMAGES,
        {
            "mrconvnext": Model(MIDDLE, None, {}),
            "convnext": peer(
                "convnext", MIDDLE, hidden_sizes=[32, 64, 128], depths=[2, 2, 2], num_stages=3, patch_size=2
            ),
        },
    ),
}
# On spoken digits at MRConv's chosen rate, each for the same number of steps.
ABLATIONS: dict[str, dict[str, Any]] = {
    "Fourier": {},
    "dilated": {"model.kernel_type": "dilated"},
    "sparse": {"model.kernel_type": "sparse"},
    "Fourier + sparse": {"model.kernel_type": "fourier_sparse", "model.kernel_size": 14},
    "Fourier, single resolution": {"model.num_branches": 1, "model.kernel_size": 256},
    "Fourier, branches not normalised": {"model.branch_norm": "none"},
}
SEEDS, ABLATION_STEPS = (0, 1, 2), 300
# Minutes of one core after which every model of a comparison is scored. After the first, only the best rate goes on.
MINUTES = {"digits": (3, 8), "scifar": (3, 8), "images": (3,)}


class Run(NamedTuple):
    """A training of the study."""

    name: str
    comparison: str
    model: Model
    rate: float
    seed: int = 0
    steps: int = ENDLESS


def candidates(comparison: str, name: str) -> list[Run]:
    """A model at each of its rates."""
    model = COMPARISONS[comparison].models[name]
    return [Run(f"{comparison}-{name}-{rate:g}", comparison, model, rate) for rate in model.rates]


def ablations(rate: float) -> Iterator[tuple[str, Run]]:
    """Each part left out or replaced, seed by seed."""
    for seed in SEEDS:
        for index, (label, values) in enumerate(ABLATIONS.items()):
            model = Model((rate,), None, values)
            yield label, Run(f"ablation-{index}-{seed}", "digits", model, rate, seed, ABLATION_STEPS)


class Study(NamedTuple):
    """Trainings and their scores: where they are kept, and the folder of each comparison's data."""

    work: Path
    data: dict[str, str]

    def open(self, run: Run, **changes: Any) -> tuple[TrainingArguments, Task]:
        """Arguments and task of a run."""
        place = {"path": self.data[run.comparison], "split": COMPARISONS[run.comparison].splits["train"]}
        told = {"data": {"train": place}, "learning_rate": run.rate, "seed": run.seed, "max_steps": run.steps}
        values = {**run.model.values, **told, "output_dir": self.work / "runs" / run.name, **changes}
        arguments = read_arguments(EXAMPLES / f"{COMPARISONS[run.comparison].recipe}.yaml", values)
        return arguments, make_task(arguments, run.model.peer)

    def train(self, run: Run, minutes: float) -> dict[str, Any]:
        """Trains until so many minutes of a run are over, with 0 until it ends; what is said of it then."""
        report = self.work / "runs" / run.name / "snapshot" / "training.json"
        before = read_json(report)["seconds"] / 60 if report.is_file() else 0.0
        arguments, task = self.open(run, deadline_minutes=max(minutes - before, 0))
        if not minutes or before < minutes:
            with contextlib.suppress(RunStopped):
                train(task, arguments)
        return dict(read_json(report))

    def reach(self, run: Run, minutes: float) -> dict[str, Any]:
        """Scores after so many minutes, or at the end, of the parts that choose and test."""

        def compute() -> dict[str, Any]:
            told = self.train(run, minutes)
            found: dict[str, Any] = {"core_minutes": round(told["seconds"] / 60, 2), "samples": told["samples"]}
            _, task = self.open(run)
            model = task.model_class.from_pretrained(self.work / "runs" / run.name / "snapshot")
            for part in ("validation", "test"):
                source = DataSource(self.data[run.comparison], split=COMPARISONS[run.comparison].splits[part])
                found[part] = evaluate(task, model, open_source(source))
            return {**found, "parameters": trained_parameters(model)}

        return dict(keep(self.work / "results" / f"{run.name}-{minutes:g}.json", compute))

    def compare(self, comparison: str) -> dict[str, Any]:
        """Each model: the losses that chose its rate, and the scores of the run that went on."""
        rows, (first, *later) = {}, MINUTES[comparison]
        for name in COMPARISONS[comparison].models:
            tried = [(self.reach(run, first), run) for run in candidates(comparison, name)]
            # By examples that neither train nor test.
            best, chosen = min(tried, key=lambda one: one[0]["validation"]["loss"])
            reached = {first: best, **{minutes: self.reach(chosen, minutes) for minutes in later}}
            rows[name] = {
                "parameters": best["parameters"],
                "rates": {f"{run.rate:g}": row["validation"]["loss"] for row, run in tried},
                "rate": chosen.rate,
                "marks": {f"{minutes:g}": describe(row) for minutes, row in reached.items()},
            }
        return rows

    def ablate(self) -> dict[str, Any]:
        """Each kernel over the seeds, at the rate that MRConv chose on the same data."""
        rows: dict[str, Any] = {}
        rate = self.compare("digits")["mrconv"]["rate"]
        for label, run in ablations(rate):
            found = self.reach(run, 0)
            row = rows.setdefault(label, {"parameters": found["parameters"], "seeds": {}})
            row["seeds"][str(run.seed)] = describe(found)
        return rows


def describe(reached: dict[str, Any]) -> dict[str, float]:
    """The part of what a run had reached that tables show."""
    return {"core_minutes": reached["core_minutes"], "samples": reached["samples"], **reached["test"]}


CLAIMS = (*COMPARISONS, "ablation")


def main(source: Path, work: Path, claims: list[str]) -> None:
    """The claims, and the tables after each."""
    prepare_process()
    study = Study(work, prepare(source, work))
    for name in claims:
        found = study.ablate() if name == "ablation" else study.compare(name)
        result = {**read_json(RESULT), **machine("hf-ext", "torch", "transformers")}
        if name == "ablation":
            result["ablation"] = found
        else:
            result["comparisons"][name] = found
        write_json(RESULT, result, 1)
        write_tables()


if __name__ == "__main__":
    if len(sys.argv) < 3 or set(sys.argv[3:]) - set(CLAIMS):
        sys.exit(f"{__doc__}CLAIM is one of {', '.join(CLAIMS)}.")
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), sys.argv[3:] or list(CLAIMS))
