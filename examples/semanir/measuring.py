"""Measurements of the study: scores on other data, scores and times against k, total variation."""

import statistics
import sys
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from skimage.restoration import denoise_tv_chambolle

from hf_ext.data.opening import open_source
from hf_ext.metrics.psnr import psnr
from hf_ext.semanir import SemanIRForImageRestoration
from hf_ext.tasks.restoration import SemanIRTask
from hf_ext.training import build_task, evaluate
from hf_ext.training.arguments import DataSource

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from experiments import read_arguments, save_figure
from timing import time_of

EXAMPLES = Path(__file__).resolve().parent
RECIPE = EXAMPLES / "study.yaml"

# Weights of total variation among which the training photographs choose, and how many of them do.
WEIGHTS = np.geomspace(0.04, 0.4, 12).round(4).tolist()
TUNING_PHOTOS, TUNING_SIDE = 20, 180


run_arguments = partial(read_arguments, RECIPE)


def load(snapshot: Path, values: dict[str, Any]) -> tuple[SemanIRTask, SemanIRForImageRestoration]:
    """A run's task and its model."""
    task = build_task(run_arguments(values))
    return task, task.build_model({}, str(snapshot)).eval()


def score(snapshot: Path, values: dict[str, Any], source: dict[str, Any]) -> dict[str, float]:
    """Scores on other data."""
    task, model = load(snapshot, values)
    return evaluate(task, model, open_source(DataSource(**source)))


@torch.no_grad()
def sweep(snapshot: Path, values: dict[str, Any], keys: list[int], repeats: int = 5) -> list[dict[str, float]]:
    """PSNR on the run's test images, and seconds for the first of them, with every k."""
    task, model = load(snapshot, values)
    source = run_arguments(values).data_arguments.eval_sources[""]
    data = open_source(source)
    degraded, _ = task.degraded_example(data[0], 0)
    rows = []
    for top_k in keys:
        task.top_k = top_k
        # The first call warms up.
        _, *times = (time_of(partial(task.restore, model, degraded, top_k), perf_counter) for _ in range(repeats + 1))
        psnr_of_all = evaluate(task, model, data)["psnr"]
        rows.append({"top_k": top_k, "psnr": psnr_of_all, "seconds": statistics.median(times)})
    return rows


def smooth(noisy: np.ndarray, weight: float) -> np.ndarray:
    """The classical method to beat, of a picture [height, width, 1]."""
    return denoise_tv_chambolle(noisy[..., 0], weight=weight)[..., None]


def pairs(values: dict[str, Any], source: dict[str, Any], side: int | None = None) -> list[list[np.ndarray]]:
    """Noisy and clean pictures, as evaluation makes them; cut to their upper left corner where a side is given."""
    task, data = build_task(run_arguments(values)), open_source(DataSource(**source))
    # The number of channels is the model's to say.
    task.build_model(run_arguments(values).model, None)
    made = (task.degraded_example(example, index) for index, example in enumerate(data))
    return [[picture[:side, :side] for picture in pair] for pair in made]


def gray_psnr(restored: np.ndarray, clean: np.ndarray) -> float:
    """As the task measures it."""
    return psnr(restored, clean, channel="gray", data_range=1.0)


def total_variation(values: dict[str, Any], train: str, tests: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The best weight on training photographs, and its PSNR on each test set."""
    tuning = pairs(values, {"path": train, "split": f"train[:{TUNING_PHOTOS}]"}, TUNING_SIDE)

    def mean(weight: float, pictures: list[list[np.ndarray]]) -> float:
        return float(np.mean([gray_psnr(smooth(noisy, weight), clean) for noisy, clean in pictures]))

    weight = max(WEIGHTS, key=lambda candidate: mean(candidate, tuning))
    return {"weight": weight, **{name: mean(weight, pairs(values, source)) for name, source in tests.items()}}


def input_psnr(values: dict[str, Any]) -> float:
    """PSNR of what the model is given."""
    return float(np.mean([gray_psnr(*pair) for pair in pairs(values, values["data"]["eval"])]))


def draw_pictures(snapshot: Path, values: dict[str, Any], weight: float, indices: list[int], path: Path) -> None:
    """The middle 200 pixels of noisy, smoothed, restored and clean test pictures, with the PSNR of the whole."""
    from matplotlib import pyplot

    task, model = load(snapshot, values)
    data = open_source(run_arguments(values).data_arguments.eval_sources[""])
    shown = [index for index in indices if index < len(data)]
    figure, axes = pyplot.subplots(len(shown), 4, figsize=(13.2, 3.4 * len(shown)), squeeze=False)
    for line, index in zip(axes, shown, strict=True):
        noisy, clean = task.degraded_example(data[index], index)
        made = {"noisy": noisy, "total variation": smooth(noisy, weight), "SemanIR": task.restore(model, noisy)}
        for axis, (name, picture) in zip(line, {**made, "clean": clean}.items(), strict=True):
            top, left = ((side - 200) // 2 for side in picture.shape[:2])
            # The map of colours is for pictures of one channel.
            axis.imshow(np.clip(picture[top : top + 200, left : left + 200], 0, 1), cmap="gray", vmin=0, vmax=1)
            psnr_of_it = f", {gray_psnr(picture, clean):.2f} dB" if name in made else ""
            axis.set_title(f"{name}{psnr_of_it}", fontsize=10)
            axis.axis("off")
    save_figure(figure, path, dpi=80)
