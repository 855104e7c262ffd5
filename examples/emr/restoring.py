"""The study's second half: four restorers of our own, merged into one artifact that restores four degradations."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from restorers import BASE_STEPS, CONFIG, JPEG_QUALITY, NOISE, RESTORERS, STEPS, train_restorer, write_photos

from hf_ext import EMRModel, SemanIRForImageRestoration
from hf_ext.metrics.psnr import psnr
from hf_ext.tasks.restoration import SemanIRTask
from hf_ext.training.arguments import DataSource, read_yaml
from hf_ext.training.sources import open_source

if TYPE_CHECKING:
    from study import Study

BASE_NAME = "restorer-base"
EMR_MODES = ("global", "official", "tensor", "l2", "tensor_l2", "none")
# Pixels of a test picture that are scored: one thread needs seconds for a whole one.
SIDE = 128


def degradation(name: str) -> SemanIRTask:
    """The task that a restorer was trained for, in colour."""
    return SemanIRTask(
        {"kind": "paired"} if name == "jpeg" else {"kind": "gaussian_noise", "sigma": float(NOISE[name])}
    )


def test_data(name: str, work: Path) -> Any:
    """Its test pictures."""
    if name == "jpeg":
        return open_source(DataSource(str(work / "jpeg-test")))
    return open_source(DataSource(str(work / "photos"), split="test"))


def decibels(model: torch.nn.Module | None, name: str, work: Path) -> float:
    """Mean PSNR of a model on one degradation; without a model, of the degraded pictures themselves."""
    task, scores = degradation(name), []
    for index, example in enumerate(test_data(name, work)):
        middle = {column: crop_middle(image) for column, image in example.items() if isinstance(image, Image.Image)}
        degraded, clean = task.degraded_example(middle, index)
        restored = degraded if model is None else task.restore(model.eval(), degraded)
        scores.append(psnr(restored, clean, channel="rgb", data_range=1.0))
    return float(np.mean(scores))


def crop_middle(image: Image.Image) -> Image.Image:
    """The middle of a test picture."""
    left, top = ((length - SIDE) // 2 for length in image.size)
    return image.crop((left, top, left + SIDE, top + SIDE))


def table_row(score: Callable[[str], float]) -> dict[str, Any]:
    """PSNR of each degradation with its mean."""
    scores = {name: round(score(name), 3) for name in RESTORERS}
    return {"scores": scores, "mean": round(float(np.mean(list(scores.values()))), 3)}


def study_restorers(study: "Study", bsds: Path) -> tuple[dict[str, Any], dict[str, Path]]:
    """Trains, publishes, merges and scores; the rows, and the snapshots by name."""
    work = study.work
    write_photos(bsds, work)
    snapshots = {BASE_NAME: train_restorer(None, work)}
    snapshots |= {name: train_restorer(name, work) for name in RESTORERS}
    for name, folder in snapshots.items():
        study.publish(name, folder)
    config = study.config(BASE_NAME, list(RESTORERS))

    def load(folder: Path) -> SemanIRForImageRestoration:
        return SemanIRForImageRestoration.from_pretrained(folder)

    def of_base() -> dict[str, Any]:
        base = load(snapshots[BASE_NAME])
        return table_row(lambda name: decibels(base, name, work))

    def merged(method: str, **changes: Any) -> dict[str, Any]:
        out, cost = study.merge(f"restorer-{method}", {**config, "method": method, **changes})
        model = load(out)
        row = {**table_row(lambda name: decibels(model, name, work)), **cost}
        shutil.rmtree(out)
        return row

    def emr(mode: str) -> dict[str, Any]:
        out, cost = study.artifact("restorer-emr", config)
        model = EMRModel.from_pretrained(out, task=RESTORERS[0], rescale=mode, endpoint=study.url)

        def score(name: str) -> float:
            model.set_task(name)
            return decibels(model.model, name, work)

        return {**table_row(score), **cost}

    settings = {
        "config": config,
        "quality": JPEG_QUALITY,
        "side": SIDE,
        "steps": [BASE_STEPS, STEPS],
        "yaml": read_yaml(CONFIG),
    }
    computations: dict[str, Callable[[], dict[str, Any]]] = {
        "degraded": lambda: table_row(lambda name: decibels(None, name, work)),
        "base (σ 25)": of_base,
        "individual": lambda: table_row(lambda name: decibels(load(snapshots[name]), name, work)),
        "average": lambda: merged("average"),
        "task_arithmetic": lambda: merged("task_arithmetic", weight=0.3),
        "ties": lambda: merged("ties", weight=1.0),
        "elect": lambda: merged("elect"),
        **{f"emr {mode}": (lambda mode=mode: emr(mode)) for mode in EMR_MODES},
    }
    rows = {
        name: study.step(f"restorer {name}", {**settings, "row": name}, compute)
        for name, compute in computations.items()
    }
    sizes = {name: (folder / "model.safetensors").stat().st_size for name, folder in snapshots.items()}
    return {"rows": rows, "checkpoint_bytes": sizes}, snapshots
