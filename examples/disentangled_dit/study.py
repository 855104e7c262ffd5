"""The claims of Disentangled DiT on real images: judge, claim, controls, sizes, transfer, networks, texts.

python examples/disentangled_dit/study.py DATA WORK [CLAIM...]    all claims or some, the most telling ones first
python examples/disentangled_dit/study.py                         only writes the tables of what is measured
DATA holds the folders cifar10 and bsds500, WORK keeps data, runs and models. Each run and each measurement leaves a
file in results/steps, which is committed, and is skipped where that is there: the same command goes on after a stop,
and a deleted file is computed again. Tables and pictures are written after each claim.
"""

import contextlib
import sys
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import classifier
import diffusers
import peers
from measuring import (
    Judge,
    draw_sizes,
    keep_judge,
    load,
    measure_classes,
    measure_control,
    measure_samples,
    measure_sizes,
    measure_texts,
    real_sizes,
    right_shares,
)
from peers import OURS
from pictures import draw_sliders
from sets import folders, prepare
from tables import blocks, draw_convergence

from hf_ext.files import read_json
from hf_ext.tasks.diffusion_grids import write_picture

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import copy_minilm, count_parameters, count_seconds, keep, prepare_process, train_run, write_blocks

EXAMPLES = Path(__file__).resolve().parent
RESULTS = EXAMPLES / "results"
# Steps of each run, of 32 pictures.
CLAIM_STEPS, CROP_STEPS, TRANSFER_STEPS, TEXT_STEPS, PEER_STEPS, CANDIDATE_STEPS = 500, 500, 300, 400, 500, 150
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
ADALN = {**TOKEN, "model.conditioning": "adaln", "model.attention_head_dim": 41}
VARIANTS: dict[str, dict[str, Any]] = {
    "token-weighted": TOKEN,
    "token-constant": {**TOKEN, "model.control_alpha": CONSTANT},
    "adaln-weighted": ADALN,
    "adaln-constant": {**ADALN, "model.control_alpha": CONSTANT},
}
# The networks of variants.py that train in place of ours.
KINDS = {"adaln-weighted": "one-stream", "adaln-constant": "one-stream", "drawn": "drawn"}
# Exponents of the weight of both sizes; those of VARIANTS, 8 and 0, stand beside them in the table.
ALPHAS, ALPHA_SEEDS = (1, 2, 4), (0, 1)
# Training pictures, of many sizes, are cut at random to a part of two thirds of the side; the middle is asked for.
CUT, MIDDLE = {"local_prob": 1.0, "local_size": 24}, (4, 4)
# The class of the picture of sliders: an automobile.
SHOWN = 1
KNOWN = {**CONSTANT, "original_size": 8.0, "target_size": 8.0}
UNKNOWN = {name: alpha for name, alpha in KNOWN.items() if name not in ("crop", "flip")}
TRANSFERS = {
    "positions and schedule": {"positions": True, "schedule": True},
    "positions only": {"positions": True, "schedule": False},
    "schedule only": {"positions": False, "schedule": True},
    "neither": {"positions": False, "schedule": False},
    "bicubic positions and schedule": {"positions": True, "schedule": True},
}
# A pre-training at 16 that sees whole pictures, or half of them at the scale of 32 and in parts.
CROPS = {"global": {}, "global and local": {"local_prob": 0.5, "local_size": 32}}
PADDINGS = ("zeros", "replicate", "noisy_replicate")
# Of diffusers' networks the numbers per head at which they are as large as ours.
PEERS = {"unet": 28, "dit": 44, "pixart": 48, "sd3": 32}
# Those that attend, on texts. The UNet's width goes in steps of 16: this one is 11 % larger than ours.
TEXT_PEERS = {"unet-cross": 24, "pixart": 48, "sd3": 32}
MASKED = {"model.num_decoder_layers": 2, "task.mask_ratio": 0.3}
RATES = (5e-4, 1e-3, 2e-3)
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
        self.judges: dict[tuple[Any, ...], Judge] = {}
        # The training of each run, for a model that a measurement needs and that is not here.
        self.trainings: dict[str, Callable[[], Any]] = {}

    def keep(self, name: str, compute: Callable[[], Any]) -> Any:
        """A result by its name."""
        path = self.results / "steps" / f"{name}.json"
        return read_json(path)["result"] if self.data is None else keep(path, compute)

    def judge(self, name: str, side: int | None = None, middle: int | None = None) -> Judge:
        """The judge of pictures of a set, made once."""
        key = (name, side, middle)
        if key not in self.judges:
            judge(self)
            self.judges[key] = Judge(self.results / "judge", self.sets[name], OTHERS, side, middle)
        return self.judges[key]

    @cached_property
    def encoder(self) -> Path:
        """MiniLM, which reads the captions."""
        folder = self.work / "base" / "all-MiniLM-L6-v2"
        return folder if self.data is None else copy_minilm(folder)

    def values(self, name: str, **changes: Any) -> dict[str, Any]:
        """Settings of a run: a set, and what differs from the recipe."""
        path = str(self.sets[name])
        return {"data": {"train": {"path": path}, "eval": {"path": path, "split": TESTED}}, "seed": 0, **changes}

    def run(
        self, name: str, values: dict[str, Any], steps: int | None, kind: str = OURS, start: str = ""
    ) -> dict[str, Any]:
        """
        A training of so many steps, its warm-up a twentieth of them, or as its recipe says; `start` is the run that it
        begins with.
        """
        if steps is not None:
            values = {**values, "max_steps": steps, "warmup_steps": steps // 20}
        if steps is not None and "task.samples_per_class" in values:
            values["eval_steps"] = -(-steps // POINTS)
        recipe, make_task = EXAMPLES / "study.yaml", partial(peers.make_task, peer=kind)
        if kind == CLASSIFIER:
            recipe, make_task = EXAMPLES / "classifier.yaml", classifier.make_task

        def compute() -> dict[str, Any]:
            begun = {"init_from": str(self.model(start))} if start else {}
            row = train_run(self.work / "runs" / name, recipe, {**values, **begun}, make_task)
            del row["losses"]
            return {**row, "parameters": count_parameters(self.work / "runs" / name / "snapshot")}

        self.trainings[name] = compute
        return dict(self.keep(f"run-{name}", compute))

    def model(self, name: str) -> Path:
        """The model of a run, which is trained again where another machine trained it."""
        snapshot = self.work / "runs" / name / "snapshot"
        if not snapshot.is_dir():
            self.trainings[name]()
        return snapshot

    def classes(self, name: str, row: dict[str, Any], data: str) -> dict[str, Any]:
        """The row of a class model, with its images measured."""
        measured = self.keep(f"measure-{name}", lambda: measure_classes(self.model(name), self.judge(data), MEASURED))
        return {**row, "measured": measured}


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


def claim_row(study: Study, variant: str, changes: dict[str, Any], seed: int) -> dict[str, Any]:
    """A run on pictures with originals of many sizes: its images, and what the size control does."""
    name, kind = f"claim-{variant}-{seed}", KINDS.get(variant, OURS)
    row = study.run(name, {**study.values("varied", **changes), "seed": seed}, CLAIM_STEPS, kind)
    row = study.classes(name, row, "16")
    control = study.keep(
        f"measure-{name}-control",
        lambda: measure_control(study.model(name), study.judge("16"), SIZES, PER_SIZE),
    )
    return {**row, "control": control}


def claim_rows(
    study: Study, variants: dict[str, dict[str, Any]], seeds: tuple[int, ...]
) -> dict[str, list[dict[str, Any]]]:
    """Runs of all variants over the seeds."""
    return {name: [claim_row(study, name, changes, seed) for seed in seeds] for name, changes in variants.items()}


def claim(study: Study) -> dict[str, Any]:
    """Class as a token or in adaLN, controls weighted or constant, over the seeds."""
    real = study.keep("real-sizes", lambda: real_sizes(study.judge("16"), SIZES))
    return {"real": real, "rows": claim_rows(study, VARIANTS, SEEDS)}


def alpha(study: Study) -> dict[str, Any]:
    """Weights of the sizes between a constant one and that of the claim."""
    between = {
        f"alpha-{a}": {**TOKEN, "model.control_alpha": {**KNOWN, "original_size": float(a), "target_size": float(a)}}
        for a in ALPHAS
    }
    ends = claim_rows(study, {name: VARIANTS[name] for name in ("token-constant", "token-weighted")}, ALPHA_SEEDS)
    rows = claim_rows(study, between, ALPHA_SEEDS)
    return {"constant": ends["token-constant"], **rows, "alpha-8": ends["token-weighted"]}


def zero(study: Study) -> dict[str, Any]:
    """Controls that begin at zero, as the network's do, and drawn ones."""
    rows = claim_rows(study, {"token-weighted": TOKEN, "drawn": TOKEN}, ALPHA_SEEDS)
    return {"zero": rows["token-weighted"], "drawn": rows["drawn"]}


def cuts(study: Study) -> dict[str, Any]:
    """Training on parts of pictures, mirrored or not: with and without telling the network which."""
    rows: dict[str, Any] = {}
    for name, known, place in (("told", KNOWN, {"crop": MIDDLE}), ("not told", UNKNOWN, {})):
        run = f"cuts-{name.replace(' ', '-')}"
        values = study.values("varied", **TOKEN, **{"task.crops": CUT, "model.control_alpha": known})
        row = study.run(run, values, CLAIM_STEPS)

        def compute(run: str = run, asked: dict[str, Any] = place) -> dict[str, float]:
            # Beside real pictures' middles.
            judge = study.judge("32", 24, 16)
            return measure_classes(study.model(run), judge, MEASURED, original_size=(32, 32), **asked)

        rows[name] = {**row, "measured": study.keep(f"measure-{run}", compute)}
    return rows


def distances(study: Study) -> dict[str, Any]:
    """Distance of the images of a size to real pictures of that size, of the claim's models of the first seed."""
    found = {}
    for variant, changes in VARIANTS.items():
        name = f"claim-{variant}-{SEEDS[0]}"
        claim_row(study, variant, changes, SEEDS[0])

        def compute(name: str = name) -> list[float]:
            return measure_sizes(study.model(name), study.judge("16"), SIZES, MEASURED)

        found[variant] = study.keep(f"measure-{name}-distances", compute)
    return found


def continued(study: Study, name: str, kind: str = OURS, start: str = "", **changes: Any) -> dict[str, Any]:
    """A run that continues at 32 pixels, with the curve of what it drew on its way."""
    drawn = {"task.samples_per_class": PER_POINT, "task.sample_steps": POINT_STEPS}
    values = study.values("32", **{"task.image_size": 32, "learning_rate": 1e-3, **drawn, **changes})
    row = study.run(name, values, TRANSFER_STEPS, kind, start)
    batch_size = row["arguments"]["per_device_train_batch_size"]
    curve = study.keep(
        f"measure-{name}-curve",
        lambda: measure_samples(study.model(name).parent, study.judge("32"), 32, PER_POINT, batch_size),
    )
    return {**row, "curve": curve}


def transfer(study: Study) -> dict[str, Any]:
    """From 16 to 32 pixels, with and without what should help."""
    rows = {}
    for index, (name, how) in enumerate(TRANSFERS.items()):
        kind = "bicubic" if name.startswith("bicubic") else OURS
        changes = {"init_from": str(PRETRAINED), "task.transfer": how}
        rows[name] = continued(study, f"transfer-{index}", kind, **changes)
    return rows


def crops(study: Study) -> dict[str, Any]:
    """Local crops in the pre-training: short ones, from nothing."""
    rows = {}
    for index, (name, how) in enumerate(CROPS.items()):
        study.run(f"crops-{index}-16", study.values("32", **{"task.crops": how}), CROP_STEPS)
        rows[name] = continued(study, f"crops-{index}-32", start=f"crops-{index}-16")
    return rows


def best_rate(study: Study, run: str, values: dict[str, Any], kind: str) -> dict[str, Any]:
    """The settings with the learning rate that has the smallest loss after a short run."""
    rated = [{**values, "learning_rate": rate} for rate in RATES]
    losses = [
        study.run(f"{run}-{one['learning_rate']:g}", one, CANDIDATE_STEPS, kind)["scores"]["loss"] for one in rated
    ]
    return rated[losses.index(min(losses))]


def compare(study: Study) -> dict[str, Any]:
    """diffusers' networks beside ours: equal steps, each with the best of three rates by the loss of short runs."""
    rows = {}
    for name in (OURS, "masked", *PEERS):
        kind, run = name if name in PEERS else OURS, f"peer-{name}"
        values = best_rate(study, run, study.values("16", **network_values(name, PEERS)), kind)
        rows[name] = study.classes(run, study.run(run, values, PEER_STEPS, kind), "16")
    return rows


def network_values(name: str, widths: dict[str, int]) -> dict[str, Any]:
    """Settings of a network; a peer of our network's depth has the width at which it is as large."""
    if name == "masked":
        return MASKED
    return {"model.attention_head_dim": widths[name]} if name in widths else {}


def text_row(study: Study, run: str, values: dict[str, Any], kind: str = OURS) -> dict[str, Any]:
    """A run on captions, with its images."""
    row = study.run(run, values, TEXT_STEPS, kind)

    def compute() -> dict[str, float]:
        return measure_texts(study.model(run), study.judge("16"), study.sets["captioned"], 10 * MEASURED)

    return {**row, "measured": study.keep(f"measure-{run}", compute)}


def text_values(study: Study, padding: str, **changes: Any) -> dict[str, Any]:
    """Settings of a run on captions."""
    words = {"task.text_encoder": str(study.encoder), "task.text_padding": padding, "task.max_text_length": 20}
    model = {"model.num_classes": None, "model.joint_attention_dim": 384}
    return study.values("captioned", **words, **model, **changes)


def texts(study: Study) -> dict[str, Any]:
    """Captions, with three kinds of padding."""
    return {padding: text_row(study, f"text-{padding}", text_values(study, padding)) for padding in PADDINGS}


def compare_texts(study: Study) -> dict[str, Any]:
    """The same networks on captions, those that attend."""
    rows = {}
    for name in (OURS, "masked", *TEXT_PEERS):
        kind, run = name if name in TEXT_PEERS else OURS, f"text-peer-{name}"
        values = text_values(study, PADDINGS[-1], **network_values(name, TEXT_PEERS))
        rows[name] = text_row(study, run, best_rate(study, run, values, kind), kind)
    return rows


# In this order: the most telling first.
CLAIMS: dict[str, Callable[[Study], Any]] = {
    "judge": judge,
    "claim": claim,
    "alpha": alpha,
    "zero": zero,
    "cuts": cuts,
    "distances": distances,
    "transfer": transfer,
    "crops": crops,
    "peers": compare,
    "text": texts,
    "text-peers": compare_texts,
}


def collect(work: Path, results: Path = RESULTS) -> dict[str, Any]:
    """All claims that are measured."""
    study, result = Study(None, work, results), {"seconds": count_seconds(results / "steps")}
    for name, compute in CLAIMS.items():
        with contextlib.suppress(FileNotFoundError):
            result[name] = compute(study)
    return result


def draw(study: Study, name: str) -> None:
    """The pictures of a claim whose models are here."""
    runs = {variant: study.work / "runs" / f"claim-{variant}-{SEEDS[0]}" / "snapshot" for variant in VARIANTS}
    if name == "claim" and all(run.is_dir() for run in runs.values()):
        pipelines = {variant: load(run) for variant, run in runs.items()}
        draw_sizes(pipelines, SIZES, study.results / "sizes.png")
    told = study.work / "runs" / "cuts-told" / "snapshot"
    if name == "cuts" and told.is_dir():
        write_picture(draw_sliders(load(told), SHOWN), study.results / "sliders.png")


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
        draw(study, name)
        write(study.work)


if __name__ == "__main__":
    if len(sys.argv) == 2 or set(sys.argv[3:]) - set(CLAIMS):
        sys.exit(f"{__doc__}CLAIM is one of {', '.join(CLAIMS)}.")
    main(sys.argv[1:])
