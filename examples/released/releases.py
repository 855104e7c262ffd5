"""Names, data and tests of the released models."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from runs import RESTORE_TASKS

BSDS = "BSDS500, 324 photographs (research and education)"
MIXED = f"{BSDS}, and made pictures: flat colours, drawings, text"
PAIRS = "synthetic pairs from BSDS500, 324 photographs five times each (research and education)"
DAMAGED = "68 photographs of BSDS500's test set, with synthetic damage"
RESEARCH, TINY, SHARED = (
    "research and education, as BSDS500",
    "research, as CIFAR-10",
    "CC BY-SA 4.0, as the recordings",
)
# The same for the metadata of a card; the text is in the folder.
CARD_LICENSES = {
    RESEARCH: {"license": "other", "license_name": "bsds500-research-and-education", "license_link": "LICENSE"},
    TINY: {"license": "other", "license_name": "cifar-10-research", "license_link": "LICENSE"},
    SHARED: {"license": "cc-by-sa-4.0", "license_link": "LICENSE"},
}


@dataclass(frozen=True)
class Release:
    """
    Name and tests of a released model.

    Args:
        task (`str`): What it does.
        data (`str`): What it was trained on.
        license (`str`): What the weights may be used for.
        tests (`dict[str, dict]`): Data set: overrides of the recipe that measure on it.
        shown (`str`): The metric of the table, in the words of `eval.json`'s names.
        shown_examples (`Sequence[int]`): Of the first test set, the places of the pictures that the card shows.
        caption (`str`): The words below them.
        baseline (`str`): The name of the score beside the model's.
        share (`float`): Of the run's weights, in a mean with those that it began with.
        settings (`dict`): Of its `config.json`, those that a training does not write.
    """

    task: str
    data: str = MIXED
    license: str = RESEARCH
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    shown: tuple[str, ...] = ("psnr",)
    shown_examples: Sequence[int] = (0, 20, 40)
    caption: str = "Degraded, restored, clean: photographs chosen by their index, before any result was seen"
    baseline: str = "input"
    share: float = 1.0
    settings: dict[str, Any] = field(default_factory=dict)


def noise(*sigmas: float) -> list[dict[str, Any]]:
    """Degradations of an evaluation at several noise levels."""
    return [{"kind": "gaussian_noise", "sigma": sigma} for sigma in sigmas]


def on(path: str, **task: Any) -> dict[str, Any]:
    """Overrides that evaluate on a folder of pictures."""
    return {
        "data.eval.path": path,
        "data.eval.split": "train",
        **{f"task.{key}": value for key, value in task.items()},
    }


RELEASES = {
    "denoise-color": Release(
        "removes Gaussian noise of unknown strength, σ = 0 to 55, from colour photographs",
        tests={"68 photographs of BSDS500's test set": on("data/photos/test", eval_degradation=noise(15, 25, 50))},
        shown=("psnr_gaussian_noise_15", "psnr_gaussian_noise_25", "psnr_gaussian_noise_50"),
    ),
    "denoise-gray": Release(
        "removes Gaussian noise of unknown strength, σ = 0 to 55, from grey photographs",
        tests={
            "Set12": on("data/set12", eval_degradation=noise(15, 25, 50)),
            # Its files are called test*, which datasets takes for the name of a split.
            "BSD68": on("data/bsd68", eval_degradation=noise(15, 25, 50)) | {"data.eval.split": "test"},
        },
        shown=("psnr_gaussian_noise_25",),
        shown_examples=(0, 4, 8),
    ),
    "jpeg-color": Release(
        "removes JPEG artefacts of any quality, 5 to 95, from colour photographs",
        tests={
            "68 photographs of BSDS500's test set": on(
                "data/photos/test", eval_degradation=[{"kind": "jpeg", "quality": quality} for quality in (10, 20, 40)]
            )
        },
        shown=("psnr_jpeg_10", "psnr_jpeg_20", "psnr_jpeg_40"),
    ),
    "super-resolution-x2": Release(
        "doubles the height and width of photographs, whatever filter shrank them, also from JPEG of quality 75",
        BSDS,
        tests={
            "Set5": on("data/set5", degradation={"kind": "bicubic"}, eval_degradation={"kind": "bicubic"}),
            "68 photographs of BSDS500's test set, halved by averages, Lanczos or bicubic, half of the halves JPEG": {
                "data.eval.path": "data/halves/test",
                "task.eval_degradation": {"kind": "paired"},
            },
        },
        shown_examples=(0, 2, 4),
    ),
    "photo": Release(
        "restores photographs with blur, resizing, noise and JPEG artefacts, in any order and strength; one that is "
        "only blurred needs `--strength 1`",
        tests={
            "20 photographs of BSDS500's test set": on(
                "data/photos/test",
                eval_degradation=[
                    {
                        "kind": "chain",
                        "steps": [
                            {"kind": "blur", "sigma": 1},
                            {"kind": "gaussian_noise", "sigma": 10},
                            {"kind": "jpeg", "quality": 60},
                        ],
                    },
                    *noise(1, 15),
                    {"kind": "jpeg", "quality": 40},
                ],
            )
            | {"data.eval.split": "train[:20]"}
        },
        shown=(
            *("psnr_chain_blur_1_gaussian_noise_10_jpeg_60", "psnr_gaussian_noise_1"),
            *("psnr_gaussian_noise_15", "psnr_jpeg_40"),
        ),
        shown_examples=(0, 7, 14),
        # The run alone makes 0.2 dB worse what has noise of 2, the first one turns pure colours grey: 20 levels.
        share=0.75,
        settings={"restoration_strength": "auto"},
    ),
    "restore-tasks": Release(
        "restores pictures with strong noise, JPEG artefacts, blur or low resolution; merged from four fine-tunes of "
        "denoise-color, with one bit per weight for each",
        # Each task is measured on its own degradation.
        tests={
            task: on("data/photos/test", degradation=RESTORE_TASKS[task], eval_degradation=degradation)
            | {"data.eval.split": "train[:20]"}
            for task, degradation in {
                "noise": {"kind": "gaussian_noise", "sigma": 75},
                "jpeg": {"kind": "jpeg", "quality": 10},
                "blur": {"kind": "blur", "sigma": 1.5},
                "resize": {"kind": "resize", "factor": 0.5},
            }.items()
        },
        shown_examples=(0,),
    ),
    **{
        name: Release(task, f"{PAIRS}, and made pictures", tests={DAMAGED: on(f"data/{name}/test")})
        for name, task in {
            "deblur": "removes motion blur of up to 14 pixels; sharpens other pictures and noise too",
            "derain": "removes rain streaks and mist from colour photographs; trained on synthetic rain alone",
        }.items()
    },
    "demosaick": Release(
        "reconstructs a colour picture from an RGGB Bayer mosaic without noise",
        tests={"68 photographs of BSDS500's test set": on("data/photos/test")},
        caption="Mosaic, demosaicked, clean: photographs chosen by their index, before any result was seen",
        baseline="bilinear",
    ),
    "cifar10": Release(
        "generates pictures of ten classes, 32 × 32 pixels; the control of size changes their sharpness, that of crop "
        "moves the content a little",
        "CIFAR-10, 50,000 pictures (its authors state no licence)",
        TINY,
        caption="Eight pictures of each class, from the first eight noises; none was selected",
    ),
    "spoken-digits": Release(
        "recognises the spoken digit in a recording of 8 kHz, whole or as a stream",
        "Free Spoken Digit Dataset, 2,640 recordings of six speakers (CC BY-SA 4.0)",
        SHARED,
        {"Free Spoken Digit Dataset, 300 recordings of the official test": {"data.eval.split": "test"}},
        ("accuracy",),
        range(300),
        "True and predicted digits of the test recordings",
    ),
}
