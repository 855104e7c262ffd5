"""The study of Disentangled DiT on real images, in parts: judge, claim, controls, sizes, transfer, networks, texts.

python examples/disentangled_dit/study.py DATA WORK [PART...]     all parts or some, the most telling ones first
python examples/disentangled_dit/study.py                         only writes the tables of what is measured
DATA holds the folders cifar10 and bsds500, WORK keeps data, runs and models. Each step leaves its result in
results/steps, which is committed, and is skipped when it is there with the same settings: the study continues where it
stopped, on another machine too. Tables and pictures are written after each part.
DIT_BUDGET_SCALE=0.003 makes every run that much shorter, to try the machinery; its results stay in WORK.
"""

import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
from measuring import (
    draw_sizes,
    load,
    measure_classes,
    measure_control,
    measure_samples,
    measure_sizes,
    measure_texts,
    real_sizes,
)
from pictures import draw_sliders
from runs import EXAMPLES, OURS
from steps import MEASURED, RESULTS, NotMeasured, Study, make_judge
from tables import draw_convergence, write_tables

from hf_ext.tasks.diffusion_grids import write_picture

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies import copy_minilm, prepare_process  # noqa: E402  found through the line above

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
# What of variants.py trains, where it is not our network.
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
# Of diffusers' networks the numbers per head at which `peers.equal_sizes` finds them as large as ours.
PEERS = {"unet": 28, "dit": 44, "pixart": 48, "sd3": 32}
# Those that attend, on texts. The UNet's width goes in steps of 16: this one is 11 % larger than ours.
TEXT_PEERS = {"unet-cross": 24, "pixart": 48, "sd3": 32}
MASKED = {"model.num_decoder_layers": 2, "task.mask_ratio": 0.3}
RATES = (5e-4, 1e-3, 2e-3)
# The weights from which the transfers begin: hours of training at 16 x 16, of the released model.
PRETRAINED = EXAMPLES.parent / "released" / "reached" / "cifar10-16"


def judge(study: Study) -> dict[str, Any]:
    """The judge, and what it says of real images."""
    found: dict[str, Any] = study.step("judge", study.judge_settings(), lambda: make_judge(study))
    return found


def claim_row(study: Study, variant: str, changes: dict[str, Any], seed: int) -> dict[str, Any]:
    """A run on pictures with originals of many sizes: its images, and what the size control does."""
    name, number, kind = f"claim-{variant}-{seed}", study.count(PER_SIZE), KINDS.get(variant, OURS)
    row = study.run(name, {**study.values("varied", **changes), "seed": seed}, CLAIM_STEPS, kind)
    measured = study.classes(name, row, "16", kind)
    control = study.measure(
        f"{name}-control",
        row,
        lambda: measure_control(study.model(name), study.judge("16"), SIZES, number, kind),
        per_class=number,
        sizes=SIZES,
    )
    return {**row, "measured": measured, "control": control}


def claim_rows(
    study: Study, variants: dict[str, dict[str, Any]], seeds: tuple[int, ...]
) -> dict[str, list[dict[str, Any]]]:
    """Runs of all variants, a seed after the other."""
    rows: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
    for seed in seeds:
        for variant, changes in variants.items():
            rows[variant] += study.measured_so_far(partial(claim_row, study, variant, changes, seed))
    if not any(rows.values()):
        raise NotMeasured
    return rows


def claim(study: Study) -> dict[str, Any]:
    """Class as a token or in adaLN, controls weighted or constant, over the seeds."""
    settings = {"judge": study.judged_by(), "sizes": SIZES}
    real = study.step("real-sizes", settings, lambda: real_sizes(study.judge("16"), SIZES))
    return {"real": real, "rows": claim_rows(study, VARIANTS, SEEDS)}


def alpha(study: Study) -> dict[str, Any]:
    """How the weight of the sizes rises, between constant and that of the claim."""
    between = {f"alpha-{a}": {**TOKEN, "model.control_alpha": {**KNOWN, **sizes(a)}} for a in ALPHAS}
    rows = claim_rows(study, between, ALPHA_SEEDS)
    ends = claim_rows(study, {name: VARIANTS[name] for name in ("token-constant", "token-weighted")}, ALPHA_SEEDS)
    return {"constant": ends["token-constant"], **rows, "alpha-8": ends["token-weighted"]}


def sizes(exponent: float) -> dict[str, float]:
    """An exponent for both controls that are sizes."""
    return {"original_size": float(exponent), "target_size": float(exponent)}


def zero(study: Study) -> dict[str, Any]:
    """Controls that begin at zero, as the network's do, and drawn ones."""
    drawn = claim_rows(study, {"drawn": TOKEN}, ALPHA_SEEDS)
    return {"zero": claim_rows(study, {"token-weighted": TOKEN}, ALPHA_SEEDS)["token-weighted"], **drawn}


def cuts(study: Study) -> dict[str, Any]:
    """Training on parts of pictures, mirrored or not: with and without telling the network which."""
    rows: dict[str, Any] = {}
    for name, known in (("told", KNOWN), ("not told", UNKNOWN)):
        run, number = f"cuts-{name.replace(' ', '-')}", study.count(MEASURED)
        row = study.run(
            run, study.values("varied", **TOKEN, **{"task.crops": CUT, "model.control_alpha": known}), CLAIM_STEPS
        )
        asked: dict[str, Any] = {"original_size": (32, 32)} | ({"crop": MIDDLE} if name == "told" else {})

        def compute(run: str = run, number: int = number, asked: dict[str, Any] = asked) -> dict[str, float]:
            # Beside real pictures' middles.
            return measure_classes(study.model(run), study.judge("32", 24, 16), number, **asked)

        rows[name] = {**row, "measured": study.measure(run, row, compute, per_class=number, asked=asked)}
    return rows


def distances(study: Study) -> dict[str, Any]:
    """Distance of the images of a size to real pictures of that size, of the claim's models of the first seed."""
    found, number = {}, study.count(MEASURED)
    for variant, changes in VARIANTS.items():
        name, kind = f"claim-{variant}-{SEEDS[0]}", KINDS.get(variant, OURS)
        row = study.run(name, {**study.values("varied", **changes), "seed": SEEDS[0]}, CLAIM_STEPS, kind)

        def compute(name: str = name, kind: str = kind) -> list[float]:
            return measure_sizes(study.model(name), study.judge("16"), SIZES, number, kind)

        found[variant] = study.measure(f"{name}-distances", row, compute, per_class=number, sizes=SIZES)
    return found


def enlarged(study: Study, start: Path) -> dict[str, Any]:
    """Settings of a run that continues at 32 pixels, and draws for a curve."""
    pictures = {"task.samples_per_class": study.count(PER_POINT), "task.sample_steps": POINT_STEPS}
    changes = {"init_from": str(start), "task.image_size": 32, "learning_rate": 1e-3}
    return study.values("32", **changes, **pictures)


def transfer_row(
    study: Study, name: str, values: dict[str, Any], before: Callable[[], Any], kind: str = OURS
) -> dict[str, Any]:
    """A run at 32 pixels, with the curve of what it drew on its way."""
    row = study.run(name, values, TRANSFER_STEPS, kind, before)
    number, batch_size = study.count(PER_POINT), row["arguments"]["per_device_train_batch_size"]

    def compute() -> list[dict[str, float]]:
        return measure_samples(study.model(name).parent, study.judge("32"), 32, number, batch_size)

    return {**row, "curve": study.measure(f"{name}-curve", row, compute, per_class=number)}


def transfer(study: Study) -> dict[str, Any]:
    """From 16 to 32 pixels, with and without what should help."""
    start, rows = study.work / "base" / PRETRAINED.name, {}
    before = partial(shutil.copytree, PRETRAINED, start, dirs_exist_ok=True)
    for index, (name, how) in enumerate(TRANSFERS.items()):
        kind = "bicubic" if name.startswith("bicubic") else OURS
        values = {**enlarged(study, start), "task.transfer": how}
        rows[name] = transfer_row(study, f"transfer-{index}", values, before, kind)
    return rows


def crops(study: Study) -> dict[str, Any]:
    """Local crops in the pre-training: short ones, from nothing."""
    rows = {}
    for index, (name, how) in enumerate(CROPS.items()):
        first = f"crops-{index}-16"
        study.run(first, study.values("32", **{"task.crops": how}), CROP_STEPS)
        after = enlarged(study, study.snapshot(first))
        rows[name] = transfer_row(study, f"crops-{index}-32", after, partial(study.model, first))
    return rows


def texts(study: Study) -> dict[str, Any]:
    """Captions, with three kinds of padding."""
    rows, encoder = {}, study.work / "base" / "all-MiniLM-L6-v2"
    number = 10 * study.count(MEASURED)
    for padding in PADDINGS:
        name, values = f"text-{padding}", study.values("captioned", **text_values(encoder, padding))
        row = study.run(name, values, TEXT_STEPS, before=partial(copy_minilm, encoder))
        rows[padding] = {**row, "measured": text_images(study, name, row, number)}
    return rows


def text_images(study: Study, name: str, row: dict[str, Any], number: int, kind: str = OURS) -> dict[str, float]:
    """The images of a finished text model."""

    def compute() -> dict[str, float]:
        return measure_texts(study.model(name), study.judge("16"), study.sets["captioned"], number, kind)

    found: dict[str, float] = study.measure(name, row, compute, images=number)
    return found


def text_values(encoder: Path, padding: str) -> dict[str, Any]:
    """What a run on captions changes."""
    return {
        "task.text_encoder": str(encoder),
        "task.text_padding": padding,
        "task.max_text_length": 20,
        "model.num_classes": None,
        "model.joint_attention_dim": 384,
    }


def peer_values(study: Study, name: str) -> dict[str, Any]:
    """Settings of a network; a peer of our network's depth has the width at which it is as large."""
    changes = {OURS: {}, "masked": MASKED}.get(name)
    return study.values("16", **({"model.attention_head_dim": PEERS[name]} if changes is None else changes))


def best_rate(study: Study, run: str, values: dict[str, Any], kind: str, before: Callable[[], Any]) -> float:
    """The learning rate with the smallest loss after a short run."""

    def try_rate(rate: float) -> float:
        row = study.run(f"{run}-{rate:g}", {**values, "learning_rate": rate}, CANDIDATE_STEPS, kind, before)
        return float(row["scores"]["loss"])

    return min(RATES, key=try_rate)


def compare(study: Study) -> dict[str, Any]:
    """diffusers' networks beside ours: equal steps, each with the best of three rates by the loss of short runs."""
    rows = {}
    for name in (OURS, "masked", *PEERS):
        kind, values, run = name if name in PEERS else OURS, peer_values(study, name), f"peer-{name}"
        rate = best_rate(study, run, values, kind, lambda: None)
        row = study.run(run, {**values, "learning_rate": rate}, PEER_STEPS, kind)
        rows[name] = {**row, "measured": study.classes(run, row, "16", kind)}
    return rows


def compare_texts(study: Study) -> dict[str, Any]:
    """The same on captions, of the networks that attend."""
    rows, encoder, number = {}, study.work / "base" / "all-MiniLM-L6-v2", 10 * study.count(MEASURED)
    before = partial(copy_minilm, encoder)
    for name in (OURS, "masked", *TEXT_PEERS):
        kind, run = name if name in TEXT_PEERS else OURS, f"text-peer-{name}"
        width = {"model.attention_head_dim": TEXT_PEERS[name]} if name in TEXT_PEERS else {}
        changes = {**text_values(encoder, PADDINGS[-1]), **(MASKED if name == "masked" else width)}
        values = study.values("captioned", **changes)
        rate = best_rate(study, run, values, kind, before)
        row = study.run(run, {**values, "learning_rate": rate}, TEXT_STEPS, kind, before)
        rows[name] = {**row, "measured": text_images(study, run, row, number, kind)}
    return rows


# In this order: the most telling first.
PARTS_OF_STUDY: dict[str, Callable[[Study], Any]] = {
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


def collect(study: Study) -> dict[str, Any]:
    """What is measured."""
    result: dict[str, Any] = {"seconds": study.seconds()}
    for name, part in PARTS_OF_STUDY.items():
        found = study.measured_so_far(partial(part, study))
        if found:
            result[name] = found[0]
    return result


def write(study: Study, report: Path, readme: Path) -> None:
    """The tables and curves of what is measured."""
    result = collect(type(study)(None, study.work, study.scale))
    write_tables(result, readme)
    if "transfer" in result:
        draw_convergence(result["transfer"], report / "transfer.png")


def draw(study: Study, part: str, report: Path) -> None:
    """The pictures of a part whose models are here."""
    if part == "claim":
        first = {variant: study.snapshot(f"claim-{variant}-{SEEDS[0]}") for variant in VARIANTS}
        if all(snapshot.is_dir() for snapshot in first.values()):
            pipelines = {variant: load(snapshot, KINDS.get(variant, OURS)) for variant, snapshot in first.items()}
            draw_sizes(pipelines, SIZES, report / "sizes.png")
    if part == "cuts" and study.snapshot("cuts-told").is_dir():
        write_picture(draw_sliders(load(study.snapshot("cuts-told")), SHOWN), report / "sliders.png")


def main(data: Path | None, work: Path, names: list[str]) -> None:
    """The parts, and the tables after each."""
    prepare_process()
    diffusers.utils.logging.disable_progress_bar()
    scale = float(os.environ.get("DIT_BUDGET_SCALE", "1"))
    study = Study(data, work, scale)
    report, readme = RESULTS, EXAMPLES / "README.md"
    if scale != 1:
        report = work / "report"
        report.mkdir(parents=True, exist_ok=True)
        readme = Path(shutil.copy(readme, report))
    for name in names:
        PARTS_OF_STUDY[name](study)
        write(study, report, readme)
        draw(study, name, report)
    if not names:
        write(study, report, readme)


if __name__ == "__main__":
    words = sys.argv[1:]
    if len(words) == 1 or set(words[2:]) - set(PARTS_OF_STUDY):
        sys.exit(f"{__doc__}PART is one of {', '.join(PARTS_OF_STUDY)}.")
    if words:
        main(Path(words[0]).resolve(), Path(words[1]).resolve(), words[2:] or list(PARTS_OF_STUDY))
    else:
        main(None, Path("WORK").resolve(), [])
