"""The claims of Disentangled DiT on real images: judge, claim, weight of the controls, transfer.

python examples/disentangled_dit/study.py DATA WORK [CLAIM...]    all claims or some, the most telling ones first
python examples/disentangled_dit/study.py                         only writes the tables of what is measured
DATA holds the folders cifar10 and bsds500, WORK keeps data, runs and models. Each run and each measurement leaves a
file in results/steps, which is committed, and is skipped where that is there: the same command goes on after a stop,
and a deleted file is computed again. Tables and curves are written after each claim.
"""

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import classifier
import diffusers
import peers
from measuring import Judge, keep_judge, measure_classes, measure_control, measure_samples, real_sizes, right_shares
from peers import OURS
from sets import folders, prepare
from tables import blocks, draw_convergence

from hf_ext.files import read_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import count_parameters, count_seconds, keep, prepare_process, train_run, write_blocks

EXAMPLES = Path(__file__).resolve().parent
RESULTS = EXAMPLES / "results"
# Steps of each run, of 32 pictures.
CLAIM_STEPS, TRANSFER_STEPS = 500, 300
SEEDS = (0, 1, 2)
# Generated images of each class: at each size of the size control, at each point of a curve.
PER_SIZE, PER_POINT = 5, 20
# Steps of DDIM for the pictures of a curve, which the training waits for.
POINT_STEPS = 10
# Sides of the originals that the size control asks for. What is generated has 16: larger ones had no more detail.
SIZES = [6, 8, 12, 16]
# The claim's four corners: the way of the class, and the weight of the controls. Small networks, for many runs.
CONSTANT = dict.fromkeys(("original_size", "crop", "target_size", "flip", "aspect_ratio"), 0.0)
TOKEN = {"model.num_layers": 4, "model.num_classes": 11}
# The class in adaLN has a network of one stream, as large: a second one would have nothing to say.
ADALN = {**TOKEN, "model.shared_stream": True, "model.attention_head_dim": 41}
VARIANTS: dict[str, dict[str, Any]] = {
    "token-weighted": TOKEN,
    "token-constant": {**TOKEN, "model.control_alpha": CONSTANT},
    "adaln-weighted": ADALN,
    "adaln-constant": {**ADALN, "model.control_alpha": CONSTANT},
}
# The networks of variants.py that train in place of ours.
KINDS = {"adaln-weighted": "one-stream", "adaln-constant": "one-stream"}
# Exponents of the weight of both sizes; those of VARIANTS, 8 and 0, stand beside them in the table.
ALPHAS, ALPHA_SEEDS = (1, 2, 4), (0, 1)
TRANSFERS = {
    "positions and schedule": {"positions": True, "schedule": True},
    "positions only": {"positions": True, "schedule": False},
    "schedule only": {"positions": False, "schedule": True},
    "neither": {"positions": False, "schedule": False},
    "bicubic positions and schedule": {"positions": True, "schedule": True},
}
# The weights from which the transfers begin: hours of training at 16 x 16, of the released model.
PRETRAINED = EXAMPLES.parent / "released" / "reached" / "cifar10-16"
# Generated images of each class, of a finished model; as many real test pictures are kept apart from the judge's
# reference.
MEASURED = 30
OTHERS = 10 * MEASURED
# Points of a curve.
POINTS = 4
CLASSIFIER = "classifier"
# Test pictures for the loss, and for that of the judge, which is longer and is looked at on its way.
TESTED, JUDGED = "test[:250]", "test[:1000]"


class Study:
    """
    Runs and measurements, each in a file of `results/steps`; data, runs and models are in `work`. Without the folder
    of the data sets a missing file is a `FileNotFoundError`.
    """

    def __init__(self, data: Path | None, work: Path, results: Path = RESULTS):
        self.data, self.work, self.results = data, work, results
        self.sets = folders(work) if data is None else prepare(data, work)
        self.judges: dict[str, Judge] = {}
        # The training of each run, for a model that a measurement needs and that is not here.
        self.trainings: dict[str, Callable[[], Any]] = {}

    def keep(self, name: str, compute: Callable[[], Any]) -> Any:
        """A result by its name."""
        path = self.results / "steps" / f"{name}.json"
        return read_json(path)["result"] if self.data is None else keep(path, compute)

    def judge(self, name: str) -> Judge:
        """The judge of pictures of a set, made once."""
        if name not in self.judges:
            judge(self)
            self.judges[name] = Judge(self.results / "judge", self.sets[name], OTHERS)
        return self.judges[name]

    def values(self, name: str, **changes: Any) -> dict[str, Any]:
        """Settings of a run: a set, and what differs from the recipe."""
        path = str(self.sets[name])
        return {"data": {"train": {"path": path}, "eval": {"path": path, "split": TESTED}}, "seed": 0, **changes}

    def run(self, name: str, values: dict[str, Any], steps: int | None, kind: str = OURS) -> dict[str, Any]:
        """A training of so many steps, its warm-up a twentieth of them, or as its recipe says."""
        if steps is not None:
            values = {**values, "max_steps": steps, "warmup_steps": steps // 20}
        if steps is not None and "task.samples_per_class" in values:
            values["eval_steps"] = -(-steps // POINTS)
        recipe, make_task = EXAMPLES / "study.yaml", partial(peers.make_task, peer=kind)
        if kind == CLASSIFIER:
            recipe, make_task = EXAMPLES / "classifier.yaml", classifier.make_task

        def compute() -> dict[str, Any]:
            row = train_run(self.work / "runs" / name, recipe, values, make_task)
            del row["losses"]
            return {**row, "parameters": count_parameters(self.work / "runs" / name / "snapshot")}

        self.trainings[name] = compute
        return dict(self.keep(f"run-{name}", compute))

    def measure(self, name: str, judged: str, compute: Callable[..., Any], *given: Any, part: str = "") -> Any:
        """A measurement of a run's model by the judge of a set."""
        return self.keep(f"measure-{name}{part}", lambda: compute(self.model(name), self.judge(judged), *given))

    def model(self, name: str) -> Path:
        """The model of a run, which is trained again where another machine trained it."""
        snapshot = self.work / "runs" / name / "snapshot"
        if not snapshot.is_dir():
            self.trainings[name]()
        return snapshot


def judge(study: Study) -> dict[str, Any]:
    """The judge: its weights are kept in 16 bits and measured on all real test pictures."""

    def compute() -> dict[str, Any]:
        values = study.values("32")
        values["data"]["eval"]["split"] = JUDGED
        row = study.run(CLASSIFIER, values, None, CLASSIFIER)
        folder = study.results / "judge"
        keep_judge(study.model(CLASSIFIER), folder)
        accuracy = right_shares(folder, {side: study.sets[side] for side in ("32", "16")})
        real = {side: Judge(folder, study.sets[side], OTHERS).real() for side in ("32", "16")}
        return {**row, "accuracy": accuracy, "real": real}

    return dict(study.keep("judge", compute))


def claim_rows(study: Study, variants: dict[str, dict[str, Any]], seeds: tuple[int, ...]) -> dict[str, list[Any]]:
    """Runs on pictures with originals of many sizes: the images of each, and what the size control does."""

    def row(variant: str, seed: int) -> dict[str, Any]:
        name, values = f"claim-{variant}-{seed}", {**study.values("varied", **variants[variant]), "seed": seed}
        trained = study.run(name, values, CLAIM_STEPS, KINDS.get(variant, OURS))
        measures = {
            "measured": study.measure(name, "16", measure_classes, MEASURED),
            "control": study.measure(name, "16", measure_control, SIZES, PER_SIZE, part="-control"),
        }
        return {**trained, **measures}

    return {variant: [row(variant, seed) for seed in seeds] for variant in variants}


def claim(study: Study) -> dict[str, Any]:
    """Class as a token or in adaLN, controls weighted or constant, over the seeds."""
    real = study.keep("real-sizes", lambda: real_sizes(study.judge("16"), SIZES))
    return {"real": real, "rows": claim_rows(study, VARIANTS, SEEDS)}


def alpha(study: Study) -> dict[str, Any]:
    """Weights of the sizes between a constant one and that of the claim."""
    between = {}
    for a in ALPHAS:
        weights = {**CONSTANT, "original_size": float(a), "target_size": float(a)}
        between[f"alpha-{a}"] = {**TOKEN, "model.control_alpha": weights}
    ends = claim_rows(study, {name: VARIANTS[name] for name in ("token-constant", "token-weighted")}, ALPHA_SEEDS)
    rows = claim_rows(study, between, ALPHA_SEEDS)
    return {"constant": ends["token-constant"], **rows, "alpha-8": ends["token-weighted"]}


def transfer(study: Study) -> dict[str, Any]:
    """From 16 to 32 pixels, with and without what should help: the curves of what the runs drew on their way."""
    rows = {}
    drawn = {"task.samples_per_class": PER_POINT, "task.sample_steps": POINT_STEPS, "init_from": str(PRETRAINED)}
    for index, (title, how) in enumerate(TRANSFERS.items()):
        name, kind = f"transfer-{index}", "bicubic" if title.startswith("bicubic") else OURS
        more = {"task.image_size": 32, "learning_rate": 1e-3, "task.transfer": how, **drawn}
        row = study.run(name, study.values("32", **more), TRANSFER_STEPS, kind)
        batch_size = row["arguments"]["per_device_train_batch_size"]
        curve = study.measure(name, "32", measure_samples, 32, PER_POINT, batch_size, part="-curve")
        rows[title] = {**row, "curve": curve}
    return rows


# In this order: the most telling first.
CLAIMS: dict[str, Callable[[Study], Any]] = {"judge": judge, "claim": claim, "alpha": alpha, "transfer": transfer}


def collect(work: Path, results: Path = RESULTS) -> dict[str, Any]:
    """All claims that are measured."""
    study, result = Study(None, work, results), {"seconds": count_seconds(results / "steps")}
    for name, compute in CLAIMS.items():
        with contextlib.suppress(FileNotFoundError):
            result[name] = compute(study)
    return result


def write(work: Path, results: Path = RESULTS, readme: Path = EXAMPLES / "README.md") -> None:
    """Tables and curves of all claims that are measured."""
    result = collect(work, results)
    write_blocks(blocks(result), readme)
    if "transfer" in result:
        draw_convergence(result["transfer"], results / "transfer.png")


def main(words: list[str]) -> None:
    """The claims, and the tables after each."""
    prepare_process()
    diffusers.utils.logging.disable_progress_bar()
    if not words:
        return write(Path("unused"))
    study = Study(Path(words[0]).resolve(), Path(words[1]).resolve())
    for name in words[2:] or CLAIMS:
        CLAIMS[name](study)
        write(study.work)


if __name__ == "__main__":
    if len(sys.argv) == 2 or set(sys.argv[3:]) - set(CLAIMS):
        sys.exit(f"{__doc__}CLAIM is one of {', '.join(CLAIMS)}.")
    main(sys.argv[1:])
