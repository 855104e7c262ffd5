"""The study of Disentangled DiT on real images: classes, the size control, another resolution, texts, other networks.

python examples/disentangled_dit/study.py DATA WORK
DATA holds the folders cifar10 and bsds500. Each step leaves its result in WORK/results and is skipped when it is there
with the same settings, so an interrupted study continues. At the end examples/disentangled_dit/results/study.json, the
curves, pictures and tables in README.md are written.
DIT_BUDGET_SCALE=0.003 makes every run that much shorter, to try the machinery; its results stay in WORK/report.
"""

import os
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import diffusers
from measuring import (
    SAMPLING,
    Judge,
    draw_classes,
    draw_sizes,
    draw_texts,
    measure_classes,
    measure_control,
    measure_samples,
    measure_texts,
    real_sizes,
)
from runs import CLASSIFIER, EXAMPLES, OURS, make_task, recipe, run_arguments, train
from sets import prepare
from tables import blocks, draw_convergence, draw_curves

from hf_ext.training.arguments import read_yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies import (  # noqa: E402  found through the line above
    Steps,
    copy_minilm,
    machine,
    measure_speed,
    prepare_process,
    write_blocks,
)

# Seconds of one core for each run. The pre-training is the headline's and the transfers' first part.
CLASSIFIER_SECONDS, PRETRAINING_SECONDS, HEADLINE_SECONDS = 600, 1200, 2400
CLAIM_SECONDS, TRANSFER_SECONDS, TEXT_SECONDS, PEER_SECONDS = 200, 200, 200, 150
# How often the speeds of a comparison are measured, each network once in a turn.
TURNS = 5
SEEDS = (0, 1, 2)
# Generated images of each class: of a finished model, at each size of the size control, at each point of a curve.
MEASURED, PER_SIZE, PER_POINT = 50, 5, 20
# Points of a curve, and steps of DDIM for their pictures, which the training waits for.
POINTS, POINT_STEPS = 4, 10
# Sides of the originals that the size control asks for. What is generated has 16: larger ones had no more detail.
SIZES = [6, 8, 12, 16]
# An average over the last thousand steps or so, of long runs.
LONG = {"ema_decay": 0.998}
# The paper's conditioning, and the usual one: the class is added to the adaLN vector, controls have a constant weight.
CONSTANT = dict.fromkeys(("original_size", "crop", "target_size", "flip", "aspect_ratio"), 0.0)
VARIANTS: dict[str, dict[str, Any]] = {
    "disentangled": {"model.num_classes": 11},
    "adaln": {"model.num_classes": 11, "model.conditioning": "adaln", "model.control_alpha": CONSTANT},
}
TRANSFERS = {
    "positions and schedule": {"positions": True, "schedule": True},
    "positions only": {"positions": True, "schedule": False},
    "schedule only": {"positions": False, "schedule": True},
    "neither": {"positions": False, "schedule": False},
}
PADDINGS = ("zeros", "replicate", "noisy_replicate")
# The recipe's learning rate was chosen for ours: in the comparison all have one that was chosen for none.
UNTUNED = {"learning_rate": 1e-3}
# Of diffusers' networks the numbers per head at which `peers.equal_sizes` finds them as large as ours.
PEERS = {"unet": 28, "dit": 44, "pixart": 48, "sd3": 32}
MASKED = {"model.num_decoder_layers": 2, "task.mask_ratio": 0.3}
SHOWN = [
    "a dark photo of a ship",
    "a bright photo of an airplane in front of something blue",
    "a horse",
    "a red truck",
]


class Study(Steps):
    """
    Steps with their results in files.

    Args:
        data (`Path`): Folder of the data sets.
        work (`Path`): Everything but the final tables is written here.
        scale (`float`): Share of every budget.
    """

    # What makes a run; anything else where the steps are tried without training.
    train = staticmethod(train)

    def __init__(self, data: Path, work: Path, scale: float):
        super().__init__(work, scale)
        self.sets = prepare(data, work, None if scale >= 0.1 else 60)
        self.judge = cache(self._judge)
        # What measured: its settings belong to those of every measurement.
        self.classifier: dict[str, Any] = {}

    def count(self, number: int) -> int:
        """Images to generate; one where the machinery is tried."""
        return number if self.scale >= 0.1 else 1

    def pictures(self) -> dict[str, int]:
        """Settings of a run that draws for a curve."""
        return {"task.samples_per_class": self.count(PER_POINT), "task.sample_steps": POINT_STEPS}

    def values(self, name: str, **changes: Any) -> dict[str, Any]:
        """Settings of a run: a set, 250 of its test pictures for the loss, and what differs from the recipe."""
        path = str(self.sets[name])
        test = "test[:250]" if self.scale >= 0.1 else "test[:4]"
        return {"data": {"train": {"path": path}, "eval": {"path": path, "split": test}}, "seed": 0, **changes}

    def speed(self, name: str, values: dict[str, Any], kind: str = OURS) -> dict[str, Any]:
        """Seconds of a training step on this machine, and the parameters."""

        def compute() -> dict[str, Any]:
            arguments = run_arguments(values, kind)
            return measure_speed(make_task(arguments, kind), arguments, 15 if self.scale >= 0.1 else 3)

        settings = {"recipe": read_yaml(recipe(kind)), "values": values, "kind": kind}
        return self.step(f"speed-{name}", settings, compute)

    def run(
        self, name: str, values: dict[str, Any], seconds: float, speed: dict[str, Any], kind: str = OURS
    ) -> dict[str, Any]:
        """A training of so many seconds, its warm-up a twentieth of its steps."""
        steps = self.steps(seconds, speed)
        values = {**values, "max_steps": steps, "warmup_steps": steps // 20}
        if "task.samples_per_class" in values:
            values["eval_steps"] = -(-steps // POINTS)
        settings = {"recipe": read_yaml(recipe(kind)), "values": values, "kind": kind}
        row = self.step(f"run-{name}", settings, lambda: self.train(self.work / "runs" / name, values, kind))
        return {**row, **speed}

    def measure(self, name: str, row: dict[str, Any], compute: Callable[[], Any], **settings: Any) -> Any:
        """What is measured of a finished run."""
        settings = {"run": row["arguments"], "classifier": self.classifier, "sampling": SAMPLING, **settings}
        return self.step(f"measure-{name}", settings, compute)

    def _judge(self, name: str) -> Judge:
        return Judge(self.snapshot(CLASSIFIER), self.sets[name], 10 * self.count(MEASURED))

    def classes(self, name: str, row: dict[str, Any], data: str, kind: str = OURS) -> dict[str, float]:
        """The images of a finished class model."""
        number = self.count(MEASURED)
        compute = partial(measure_classes, self.snapshot(name), self.judge(data), number, kind)
        return self.measure(name, row, compute, per_class=number)

    def curve(self, name: str, row: dict[str, Any]) -> list[dict[str, float]]:
        """The pictures that a run at 32 pixels drew on its way."""
        number, batch_size = self.count(PER_POINT), row["arguments"]["per_device_train_batch_size"]
        compute = partial(measure_samples, self.work / "runs" / name, self.judge("32"), 32, number, batch_size)
        return self.measure(f"{name}-curve", row, compute, per_class=number)


def classify(study: Study) -> dict[str, Any]:
    """The classifier, and what it says of real images."""
    values = study.values("32")
    row = study.run(CLASSIFIER, values, CLASSIFIER_SECONDS, study.speed(CLASSIFIER, values, CLASSIFIER), CLASSIFIER)
    study.classifier = row["arguments"]
    real = {
        name: study.measure(f"real-{name}", row, lambda name=name: study.judge(name).real()) for name in ("32", "16")
    }
    return {**row, "real": real}


def pretrain(study: Study) -> dict[str, Any]:
    """CIFAR-10 at 16 pixels, where a picture is learned four times as fast."""
    values = study.values("16", **LONG)
    row = study.run("pretraining", values, PRETRAINING_SECONDS, study.speed("pretraining", values))
    return {**row, "measured": study.classes("pretraining", row, "16")}


def enlarged(study: Study) -> dict[str, Any]:
    """Settings of a run that continues the pre-training at 32 pixels."""
    changes = {"init_from": str(study.snapshot("pretraining")), "task.image_size": 32, "learning_rate": 1e-3}
    return study.values("32", **changes, **study.pictures())


def headline(study: Study) -> dict[str, Any]:
    """CIFAR-10 in pixels, with a curve of what it draws on its way."""
    values = {**enlarged(study), **LONG}
    row = study.run("headline", values, HEADLINE_SECONDS, study.speed("headline", values))
    return {**row, "measured": study.classes("headline", row, "32"), "curve": study.curve("headline", row)}


def claim(study: Study) -> dict[str, Any]:
    """The paper's conditioning beside the usual one, on pictures of many original sizes."""
    judge, rows = study.judge("varied"), {}
    number = study.count(PER_SIZE)
    speeds = {name: study.speed(f"claim-{name}", study.values("varied", **own)) for name, own in VARIANTS.items()}
    # One speed for both, so that they have the same number of steps: what they compute is equal.
    planned = {"seconds_per_step": next(iter(speeds.values()))["seconds_per_step"]}
    for variant, changes in VARIANTS.items():
        speed, rows[variant] = {**speeds[variant], **planned}, []
        for seed in SEEDS:
            name = f"claim-{variant}-{seed}"
            values = {**study.values("varied", **changes), "seed": seed}
            row = study.run(name, values, CLAIM_SECONDS, speed)
            compute = partial(measure_control, study.snapshot(name), judge, SIZES, number)
            control = study.measure(f"{name}-control", row, compute, per_class=number, sizes=SIZES)
            rows[variant].append({**row, "measured": study.classes(name, row, "varied"), "control": control})
    settings = {"classifier": study.classifier, "sizes": SIZES, "images": len(judge.others)}
    return {"rows": rows, "real": study.step("real-sizes", settings, partial(real_sizes, judge, SIZES))}


def transfer(study: Study) -> dict[str, Any]:
    """From 16 to 32 pixels, with and without what should help."""
    after = enlarged(study)
    # One speed for the four, so that all have the same number of steps.
    speed, rows = study.speed("transfer", after), {}
    for index, (name, how) in enumerate(TRANSFERS.items()):
        row = study.run(f"transfer-{index}", {**after, "task.transfer": how}, TRANSFER_SECONDS, speed)
        rows[name] = {**row, "curve": study.curve(f"transfer-{index}", row)}
    return rows


def text_values(study: Study, padding: str) -> dict[str, Any]:
    """Settings of a run on captions."""
    return study.values(
        "captioned",
        **{
            "task.text_encoder": str(copy_minilm(study.work / "base" / "all-MiniLM-L6-v2")),
            "task.text_padding": padding,
            "task.max_text_length": 20,
            "model.num_classes": None,
            "model.joint_attention_dim": 384,
        },
    )


def texts(study: Study) -> dict[str, Any]:
    """Captions, with three kinds of padding."""
    rows, speed = {}, study.speed("text", text_values(study, PADDINGS[0]))
    data, number = study.sets["captioned"], 10 * study.count(MEASURED)
    for padding in PADDINGS:
        row = study.run(f"text-{padding}", text_values(study, padding), TEXT_SECONDS, speed)
        compute = partial(measure_texts, study.snapshot(f"text-{padding}"), study.judge("16"), data, number)
        rows[padding] = {**row, "measured": study.measure(f"text-{padding}", row, compute, images=number)}
    return rows


def peer_values(study: Study, name: str) -> dict[str, Any]:
    """Settings of a peer of our network's depth, at the width at which it is as large."""
    return study.values("16", **UNTUNED, **{"model.attention_head_dim": PEERS[name]})


def compare(study: Study) -> dict[str, Any]:
    """The paper's comparison: one recipe, one budget, diffusers' networks beside ours."""
    values = {OURS: study.values("16", **UNTUNED), "masked": study.values("16", **UNTUNED, **MASKED)}
    values |= {name: peer_values(study, name) for name in PEERS}
    kinds = {name: name if name in PEERS else OURS for name in values}
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in values}
    # In turns, and the fastest counts: what the machine does besides can only add to it.
    for turn in range(TURNS):
        for name, own in values.items():
            taken[name].append(study.speed(f"peer-{name}-{turn}", own, kinds[name]))
    speeds = {name: min(found, key=lambda row: float(row["seconds_per_step"])) for name, found in taken.items()}
    rows = {}
    for name, own in values.items():
        kind = kinds[name]
        row = study.run(f"peer-{name}", own, PEER_SECONDS, speeds[name], kind)
        rows[name] = {**row, "measured": study.classes(f"peer-{name}", row, "16", kind)}
    return rows


def compute(study: Study) -> dict[str, Any]:
    """All steps."""
    return {
        "classifier": classify(study),
        "pretraining": pretrain(study),
        "claim": claim(study),
        "transfer": transfer(study),
        "text": texts(study),
        "peers": compare(study),
        # The longest comes last.
        "headline": headline(study),
    }


def draw(study: Study, result: dict[str, Any], report: Path) -> None:
    """Curves and pictures."""
    draw_curves(result, report / "curves.png")
    draw_convergence(result, report / "transfer.png")
    draw_classes(study.snapshot("headline"), 8 if study.scale == 1 else 2, report / "classes.png")
    first = {variant: study.snapshot(f"claim-{variant}-{SEEDS[0]}") for variant in VARIANTS}
    draw_sizes(first, SIZES, report / "sizes.png")
    draw_texts(study.snapshot(f"text-{PADDINGS[-1]}"), SHOWN, 8 if study.scale == 1 else 2, report / "texts.png")


def main(data: Path, work: Path) -> None:
    """All steps, then the tables."""
    prepare_process()
    diffusers.utils.logging.disable_progress_bar()
    scale = float(os.environ.get("DIT_BUDGET_SCALE", "1"))
    study = Study(data, work, scale)
    result = {
        "what": "The last weight average is measured. Learning rate and initial weights were chosen on short runs.",
        **machine("hf-ext", "torch", "diffusers", "transformers", "accelerate"),
        **compute(study),
    }
    result["seconds"] = study.seconds()
    report = study.write_report(result, EXAMPLES / "results")
    draw(study, result, report)
    if scale == 1:
        write_blocks(blocks(result), EXAMPLES / "README.md")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*(Path(word).resolve() for word in sys.argv[1:]))
