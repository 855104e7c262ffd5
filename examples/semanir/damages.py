"""Deblurring, weather, demosaicking and fourfold enlargement: a short training of each recipe, and what it restores.

python examples/semanir/damages.py DATA WORK   trains what is missing, and writes the table and the picture
python examples/semanir/damages.py             writes the table again, from results/steps alone
DATA holds the folders bsds500 (train, test) and set5. Pairs are made by `make_pairs.py`. Trained is on the 200
photographs of `train`, tested on sixteen of `test` that no released model has trained on. Each run leaves a file in
examples/semanir/results/steps and is skipped where that is there.
"""

import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from make_pairs import convolve, make_pairs
from measuring import EXAMPLES, draw_middles

from hf_ext.data.opening import open_source
from hf_ext.files import read_json, whole_folder
from hf_ext.metrics.psnr import psnr
from hf_ext.tasks.degradations import matlab_bicubic, unpack_mosaic
from hf_ext.training import build_task
from hf_ext.training.arguments import DataSource

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import keep, prepare_process, read_arguments, table, train_run, write_blocks

RESULTS = EXAMPLES / "results"

TESTED = 16
SHORT = {
    "mixed_precision": "no",
    "data.num_workers": 0,
    "per_device_train_batch_size": 4,
    "task.patch_size": 64,
    "max_steps": 250,
    "warmup_steps": 20,
    "ema_decay": 0.99,
    "eval_steps": 1_000_000,
    "save_steps": 200,
    "seed": 0,
}


class Damage(NamedTuple):
    """A recipe, its folders in WORK/data, its shortening beside `SHORT`, and how the damaged picture is shown."""

    recipe: str
    train: str
    test: str
    values: dict[str, Any]
    shown: str


# Where a released model has the network, training starts from it, as a user's would.
FROM_DENOISER = {"model": {}, "init_from": "denoise-color", "learning_rate": 5e-4}
DEMOSAICKING = {"preset": "columnar-tiny", "num_channels": 4, "num_channels_out": 3, "scale": 2}
# The perceptual recipe, and the same steps without its loss.
PERCEPTUAL = {"task.patch_size": 32, "learning_rate": 2e-4, "max_steps": 200, "model": {}}
DAMAGES = {
    "deblurring": Damage("deblur", "train/deblur", "test/deblur", FROM_DENOISER, "blurred"),
    "weather": Damage("weather", "train/weather", "test/weather", FROM_DENOISER, "rain, snow, drops"),
    "demosaicking": Damage(
        "demosaick",
        "train/photos",
        "test/photos",
        # From nothing: longer than the others.
        {"task.patch_size": 32, "model": DEMOSAICKING, "learning_rate": 1e-3, "max_steps": 1500},
        "bilinear",
    ),
    "× 4": Damage(
        "super_resolution_x4",
        "train/photos",
        "set5",
        {"task.patch_size": 32, "model": {"scale": 4}, "init_from": "super-resolution-x2", "learning_rate": 1e-3},
        "bicubic",
    ),
    "× 2, trained on": Damage(
        "perceptual", "train/photos", "set5", {**PERCEPTUAL, "task.perceptual_model": None}, "bicubic"
    ),
    "× 2, with a perceptual loss": Damage("perceptual", "train/photos", "set5", PERCEPTUAL, "bicubic"),
}


def prepare(source: Path, data: Path) -> None:
    """Photographs and the pairs made of them, once."""
    photos = {part: sorted((source / "bsds500" / part).glob("*.jpg")) for part in ("train", "test")}
    # Every third is kept for tables by examples/released/data.py.
    photos["test"] = photos["test"][::3][:TESTED]
    for part, files in photos.items():
        if not (data / part).is_dir():
            with whole_folder(data / part) as folder:
                (folder / "photos").mkdir()
                for file in files:
                    shutil.copy(file, folder / "photos")
                make_pairs(files, folder, seed=("train", "test").index(part))
    if not (data / "set5").is_dir():
        with whole_folder(data / "set5") as folder:
            shutil.copytree(source / "set5", folder, dirs_exist_ok=True)


def interpolate_mosaic(packed: np.ndarray) -> np.ndarray:
    """Bilinear: each colour that a pixel has not is the mean of its neighbours that have it."""
    raw = unpack_mosaic(packed)
    rows, columns = np.indices(raw.shape[:2]) % 2
    seen = np.stack([(rows == 0) & (columns == 0), rows != columns, (rows == 1) & (columns == 1)], axis=-1)
    kernel = np.outer([1.0, 2.0, 1.0], [1.0, 2.0, 1.0])
    measured = raw.astype(np.float64)
    return np.where(seen, measured, convolve(measured * seen, kernel) / convolve(seen.astype(np.float64), kernel))


def show_damaged(task: Any, degraded: np.ndarray, scale: int) -> np.ndarray:
    """The damaged picture at the size of the restored one."""
    if task.config.demosaicks:
        return interpolate_mosaic(degraded)
    return matlab_bicubic(degraded, scale) if scale > 1 else degraded


def measure_sharpness(image: np.ndarray) -> float:
    """The root mean square of the differences of neighbouring pixels, over both directions."""
    return float(np.sqrt(np.mean([np.mean(np.diff(image, axis=axis) ** 2) for axis in (0, 1)])))


def restore_pictures(run: Path, values: dict[str, Any], recipe: Path) -> tuple[Any, list[list[np.ndarray]]]:
    """The run's task, and damaged, restored and clean test pictures."""
    arguments = read_arguments(recipe, values)
    task = build_task(arguments)
    model = task.build_model({}, str(run / "snapshot")).eval()
    pictures = []
    for index, example in enumerate(open_source(DataSource(**values["data"]["eval"]))):
        degraded, clean = task.degraded_example(example, index)
        pictures.append([show_damaged(task, degraded, task.config.scale), task.restore(model, degraded), clean])
    return task, pictures


def train(run: Path, values: dict[str, Any], recipe: Path) -> dict[str, Any]:
    """Trains; PSNR and sharpness before and after, and the processor time of it all."""
    before = time.process_time()
    row = train_run(run, recipe, values)
    used = time.process_time() - before
    task, pictures = restore_pictures(run, values, recipe)
    channel, border = ("y", task.config.scale) if task.trained[0].kind == "bicubic" else ("rgb", 0)
    clean = np.mean([measure_sharpness(row[2]) for row in pictures])
    found: dict[str, Any] = {"core_minutes": round(used / 60, 1), **{key: row[key] for key in ("steps", "samples")}}
    for place, name in enumerate(("damaged", "restored")):
        scores = [psnr(row[place], row[2], channel=channel, border=border, data_range=1.0) for row in pictures]
        sharpness = np.mean([measure_sharpness(np.clip(row[place], 0, 1)) for row in pictures]) / clean
        found[name] = {"psnr": round(float(np.mean(scores)), 3), "sharpness": round(float(sharpness), 3)}
    return found


def find_recipe(name: str) -> Path:
    """The YAML file of a run."""
    return EXAMPLES / f"{DAMAGES[name].recipe}.yaml"


def find_values(name: str, data: Path) -> dict[str, Any]:
    """Fields that differ from the recipe."""
    damage = DAMAGES[name]
    places = {"train": damage.train, "eval": damage.test}
    sources = {name: {"path": str(data / place), "split": "train"} for name, place in places.items()}
    return {**SHORT, **damage.values, "data": sources}


def compute(source: Path, work: Path, results: Path = RESULTS) -> None:
    """Runs that are missing, and a row of the picture for each that is here."""
    data, runs = work / "data", {}
    prepare(source, data)
    for index, name in enumerate(DAMAGES):
        runs[name] = work / "runs" / f"damage-{index}"
        compute_one = partial(train, runs[name], find_values(name, data), find_recipe(name))
        keep(results / "steps" / f"damage-{index}.json", compute_one)
    draw_pictures({name: run for name, run in runs.items() if run.is_dir()}, data, results / "damages.png")


def draw_pictures(runs: dict[str, Path], data: Path, path: Path) -> None:
    """The middle of the first test picture of each task: damaged, restored, clean."""
    rows = []
    for name, run in runs.items():
        _, pictures = restore_pictures(run, find_values(name, data), find_recipe(name))
        rows.append(dict(zip((DAMAGES[name].shown, name, "clean"), pictures[0], strict=True)))
    if rows:
        draw_middles(rows, path)


def make_table(results: Path = RESULTS) -> str:
    """A row for each run."""
    rows = []
    for index, (name, damage) in enumerate(DAMAGES.items()):
        row = read_json(results / "steps" / f"damage-{index}.json")["result"]
        scores = [f"{row[part]['psnr']:.2f}" for part in ("damaged", "restored")]
        sharpness = [f"{100 * row[part]['sharpness']:.0f}" for part in ("damaged", "restored")]
        begun = read_arguments(find_recipe(name), damage.values).init_from or "nothing"
        rows.append([name, begun, damage.shown, *scores, *sharpness, f"{row['core_minutes']:.0f}"])
    header = ["", "trained from", "input", "its PSNR, dB", "restored, dB", "its sharpness, %", "restored, %"]
    return table([*header, "core minutes"], rows)


if __name__ == "__main__":
    if len(sys.argv) not in (1, 3):
        sys.exit(__doc__)
    if len(sys.argv) == 3:
        prepare_process()
        compute(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
    write_blocks({"damages": make_table()}, EXAMPLES / "README.md")
