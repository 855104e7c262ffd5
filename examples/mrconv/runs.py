"""Data and runs of the study: which models train on what, with which rates, and how long."""

import functools
import math
import shutil
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import soxr
from peers import S4D_RULES, make_task

from hf_ext.files import read_json, whole_folder, write_json
from hf_ext.training import Task, TrainingArguments

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from background import Job  # noqa: E402  found through the line above
from studies import flags, read_arguments  # noqa: E402  found above

EXAMPLES = Path(__file__).resolve().parent
DIGITS = datasets.Features({"audio": datasets.List(datasets.Value("int16")), "label": datasets.Value("int64")})
RATE = 4000
# No run comes to its last step: its core time ends it, and its rate does not depend on the number.
ENDLESS = 1_000_000


def read_digit(path: Path) -> dict[str, Any]:
    """The samples of a recording `{digit}_{speaker}_{number}.wav`, 16 bits, and its digit."""
    with wave.open(str(path)) as file:
        if (file.getsampwidth(), file.getnchannels(), file.getframerate()) != (2, 1, 8000):
            raise ValueError(f"{path} must be 16-bit mono of 8000 Hz, it has {file.getparams()}.")
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
    return {"audio": samples, "label": int(path.stem.partition("_")[0])}


def write_digits(path: Path, rows: list[dict[str, Any]]) -> None:
    """Recordings as one parquet file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    datasets.Dataset.from_list(rows, features=DIGITS).to_parquet(temporary)
    temporary.rename(path)


def split_digits(files: list[Path]) -> dict[str, list[Path]]:
    """The official test, recordings 0 to 4 of each digit and speaker; every tenth of the others chooses."""
    parts: dict[str, list[Path]] = {"train": [], "validation": [], "test": []}
    for file in sorted(files):
        number = int(file.stem.rpartition("_")[2])
        parts["test" if number < 5 else "validation" if number % 10 == 5 else "train"].append(file)
    return parts


def prepare(fsdd: Path, data: Path) -> None:
    """Writes the spoken digits at half their rate, once."""
    files = list(fsdd.glob("*.wav"))
    if not files:
        raise ValueError(f"{fsdd} holds no .wav files: give the folder of the Free Spoken Digit Dataset.")
    for part, members in split_digits(files).items():
        path = data / f"{part}.parquet"
        if not path.is_file():
            rows = [read_digit(file) for file in members]
            write_digits(path, [{**row, "audio": soxr.resample(row["audio"], 2 * RATE, RATE)} for row in rows])


def slice_classes(split: str, size: int, start: int, stop: int) -> str:
    """Examples `start` to `stop` of each of ten classes of `size` examples, which come one after the other."""
    return "+".join(f"{split}[{size * index + start}:{size * index + stop}]" for index in range(10))


IMAGES = {
    "train": slice_classes("train", 5000, 0, 4900),
    "validation": slice_classes("train", 5000, 4900, 5000),
    "test": slice_classes("test", 1000, 0, 200),
}
RECORDINGS = {part: part for part in ("train", "validation", "test")}


# In the study's folder: no word of a run says where that is, so it goes on on another machine.
PLACES = {"digits": "data/digits", "scifar": "data/cifar10", "images": "data/cifar10"}


class Comparison(NamedTuple):
    """
    Models of equal size on one data set.

    Args:
        recipe (`str`): YAML file: the task, the batch, and the first model's sizes.
        splits (`dict[str, str]`): `train`, `validation` for choosing the rates, and `test`.
        models (`dict[str, Model]`): The first one is ours.
    """

    recipe: str
    splits: dict[str, str]
    models: dict[str, "Model"]


class Model(NamedTuple):
    """
    A model of a comparison.

    Args:
        rates (`tuple[float, ...]`): Learning rates to choose from.
        peer (`str`, *optional*): Its name in `peers.py`; ours otherwise.
        values (`dict[str, Any]`): What differs from the recipe.
    """

    rates: tuple[float, ...]
    peer: str | None
    values: dict[str, Any]


def peer(name: str, rates: tuple[float, ...], **section: Any) -> Model:
    """Another model than ours, with the whole of its section `model`."""
    values: dict[str, Any] = {"model": section, "task.kernel_learning_rate": None}
    return Model(rates, name, {**values, "parameter_rules": S4D_RULES} if name == "s4d" else values)


COMPARISONS = {
    "digits": Comparison(
        "study-digits",
        RECORDINGS,
        {
            "mrconv": Model((0.002, 0.004, 0.008), None, {}),
            "s4d": peer("s4d", (0.001, 0.003, 0.01), hidden_size=68, num_hidden_layers=4, dropout=0.1),
            "transformer": peer(
                "transformer",
                (0.0003, 0.001, 0.003),
                hidden_size=48,
                intermediate_size=64,
                num_hidden_layers=4,
                dropout=0.1,
            ),
        },
    ),
    "scifar": Comparison(
        "study-scifar",
        IMAGES,
        {
            "mrconv": Model((0.002, 0.004, 0.008), None, {}),
            "s4d": peer("s4d", (0.001, 0.003, 0.01), hidden_size=72, num_hidden_layers=4, bidirectional=True),
            "transformer": peer(
                "transformer",
                (0.0003, 0.001, 0.003),
                hidden_size=48,
                intermediate_size=104,
                num_hidden_layers=4,
            ),
        },
    ),
    "images": Comparison(
        "study-images",
        IMAGES,
        {
            "mrconvnext": Model((0.001, 0.003, 0.01), None, {}),
            "convnext": peer(
                "convnext",
                (0.001, 0.003, 0.01),
                hidden_sizes=[32, 64, 128],
                depths=[2, 2, 2],
                num_stages=3,
                patch_size=2,
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
# Core minutes after which every model of a comparison is looked at, before any goes on. After the first, only the best
# rate goes on.
MARKS = {"digits": (3, 8, 15, 30, 60, 120), "scifar": (3, 8, 15, 30, 60, 120), "images": (3, 15, 30)}


class Run(NamedTuple):
    """
    A training of the study.

    Args:
        name (`str`): Of its folder.
        comparison (`str`): Its data.
        model (`Model`): What trains.
        rate (`float`): Its learning rate.
        seed (`int`): Of weights and order.
        steps (`int`): After which it ends by itself.
    """

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


def run_values(run: Run, data: dict[str, str], split: str = "train") -> dict[str, Any]:
    """What differs from the recipe; scores are of a split."""
    splits = COMPARISONS[run.comparison].splits
    place = {"path": data[run.comparison]}
    sources = {"train": {**place, "split": splits["train"]}}
    if split != "train":
        sources["eval"] = {**place, "split": splits[split]}
    return {
        "data": sources,
        **run.model.values,
        "learning_rate": run.rate,
        "seed": run.seed,
        "max_steps": run.steps,
        "output_dir": f"runs/{run.name}",
    }


def find_recipe(run: Run) -> Path:
    """The YAML file of a run."""
    return EXAMPLES / f"{COMPARISONS[run.comparison].recipe}.yaml"


def find_words(run: Run) -> list[str]:
    """The command of a run in the study's folder, after `python`."""
    script = ["train.py"] if run.model.peer is None else ["peers.py", run.model.peer]
    words = flags(run_values(run, PLACES))
    return [str(EXAMPLES / script[0]), *script[1:], str(find_recipe(run)), *words]


def make_job(run: Run, minutes: float) -> Job:
    """A run until it has used so many core minutes, or with 0 minutes until it ends by itself."""
    return Job(run.name, functools.partial(find_words, run), 60 * minutes or math.inf)


def steps_taken(study: Path, run: Run) -> int:
    """Steps that a run had behind it when it saved last."""
    report = study / "runs" / run.name / "snapshot" / "training.json"
    return int(read_json(report)["steps"]) if report.is_file() else 0


def open_run(run: Run, data: dict[str, str], split: str = "train") -> tuple[TrainingArguments, Task]:
    """Arguments and task of a run; scores are of a split."""
    values = run_values(run, data, split)
    arguments = read_arguments(find_recipe(run), values)
    return arguments, make_task(arguments, run.model.peer)


def find_mark(study: Path, run: Run, minutes: int) -> Path:
    """The folder of what a run had reached at a mark."""
    return study / "marks" / run.name / str(minutes)


def keep_mark(study: Path, run: Run, minutes: int, core_seconds: float) -> None:
    """Copies what a run has reached."""
    with whole_folder(find_mark(study, run, minutes)) as mark:
        shutil.copytree(study / "runs" / run.name / "snapshot", mark, dirs_exist_ok=True)
        write_json(mark / "mark.json", {"core_seconds": core_seconds})


def count_parameters(run: Run, data: dict[str, str]) -> int:
    """How many values training changes."""
    arguments, task = open_run(run, data)
    model = task.build_model(arguments.model, None)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
