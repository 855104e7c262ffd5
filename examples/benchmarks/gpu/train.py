"""Short real trainings on a device, which go on in every visit: denoise (SemanIR), scifar (MRConv), cifar10 (DiT).

The run is one of [`hf_ext.training.train`], with its own resume state in RESULTS/state/PART; a visit ends at a saved
state before its time is over. DATA names a folder with `bsds500/train`, `bsds500/test` and `cifar10`; without it
photographs that ship inside scikit-image and enlarged digits of scikit-learn are written, and learned from.
Rates, lengths and sizes are our choice: every file of a state stays under 16 MiB.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import torch
from parts import OK, UNFINISHED, Rows, read_words
from PIL import Image
from run import source_state
from skimage import data as photographs

sys.path.append(str(Path(__file__).resolve().parents[2]))
from digits import NAMES, TEST, digits

from hf_ext.training import TrainingArguments, build_task, train
from hf_ext.training.state import RunFolder

# Of the limit, what is left for the last evaluation and for saving.
RESERVE = 60.0
TILE = 128

RECIPES: dict[str, dict[str, Any]] = {
    "denoise": {
        "method": "semanir",
        "task": {"degradation": {"kind": "gaussian_noise", "sigma": 25}, "patch_size": 64},
        "model": {
            "architecture": "u-shaped",
            "embed_dim": 32,
            "depths": [2, 2, 4],
            "num_heads": [2, 4, 8],
            "refinement_depth": 2,
            "downsampling": "unshuffle",
            "reduce_top_skip": True,
            "mlp_ratio": 2.0,
            "window_size": 8,
            "top_k": 32,
            "reconstruction_loss": "charbonnier",
        },
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 32,
        "mixed_precision": "bf16",
    },
    "scifar": {
        "method": "mrconv-pixels",
        "task": {"mean": [0.4914, 0.4822, 0.4465], "std": [0.247, 0.243, 0.261]},
        "model": {
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "kernel_type": "fourier",
            "kernel_size": 32,
            "bidirectional": True,
            "norm": "batch",
            "prenorm": False,
            "dropout": 0.1,
        },
        "learning_rate": 5e-3,
        "weight_decay": 0.05,
        "per_device_train_batch_size": 64,
    },
    "cifar10": {
        "method": "disentangled-dit",
        "task": {"objective": "v_prediction", "noise_schedule": {"beta_schedule": "squaredcos_cap_v2"}},
        "model": {
            "num_layers": 5,
            "num_attention_heads": 4,
            "attention_head_dim": 24,
            "patch_size": 2,
            "num_classes": 10,
        },
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 128,
        "mixed_precision": "bf16",
    },
}
# What the rehearsal changes: a run of a few steps, of the same kinds.
TINY: dict[str, dict[str, Any]] = {
    "denoise": {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "refinement_depth": 1},
    "scifar": {"hidden_size": 8, "num_hidden_layers": 1},
    "cifar10": {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8},
}


class VisitOver(Exception):
    """Ends a visit between two steps, when the state of the first is on disk."""


def make_task(arguments: TrainingArguments, end: float) -> Any:
    """The method's task, which ends the visit once a state was saved and no time is left for another one."""
    task = build_task(arguments)

    class VisitingTask(type(task)):  # type: ignore[misc]
        def loss(self, model: torch.nn.Module, batch: dict[str, Any], step: int) -> torch.Tensor:
            # The loop saves at the end of a step; here the next one begins.
            if step % arguments.save_steps == 0 and step > self.first and time.monotonic() > end:
                raise VisitOver
            return super().loss(model, batch, step)

    task.__class__ = VisitingTask
    task.first = -1
    return task


def write_tiles(folder: Path) -> None:
    """Photographs: three to learn from, in tiles, and one that is never touched."""
    shown = {"coffee": photographs.coffee(), "rocket": photographs.rocket(), "cat": photographs.chelsea()}
    for part, pictures in (("train", shown), ("test", {"astronaut": photographs.astronaut()})):
        (folder / part).mkdir(parents=True)
        for name, picture in pictures.items():
            height, width = picture.shape[:2]
            for top in range(0, height - TILE + 1, TILE):
                for left in range(0, width - TILE + 1, TILE):
                    tile = Image.fromarray(picture[top : top + TILE, left : left + TILE])
                    tile.save(folder / part / f"{name}-{top}-{left}.png")


def write_large_digits(folder: Path) -> None:
    """Digits of 32 x 32 pixels in colour, in the form of CIFAR-10."""
    folder.mkdir(parents=True)
    pictures, classes = digits()
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)})
    for part, wanted in (("train", slice(0, -TEST)), ("test", slice(-TEST, None))):
        images = [Image.fromarray(picture).resize((32, 32)).convert("RGB") for picture in pictures[wanted]]
        columns = {"image": images, "label": classes[wanted]}
        datasets.Dataset.from_dict(columns, features=features).to_parquet(str(folder / f"{part}.parquet"))


def place_data(task: str, work: Path, given: str) -> dict[str, Any]:
    """Puts the data under WORK and returns the section. Relative paths: a state may move to another machine."""
    name = "bsds500" if task == "denoise" else "cifar10"
    source = Path(given) / name if given else None
    folder = work / ("data" if source else "own-data")
    if source is None:
        (write_tiles if task == "denoise" else write_large_digits)(folder)
    elif source.is_dir():
        folder.symlink_to(source)
    else:
        raise SystemExit(f"DATA={given} has no folder {name}; name a folder that has, or leave DATA out.")
    path = folder.relative_to(work)
    test = "test[:8]" if task == "denoise" else "test[:256]"
    return {"train": {"path": str(path), "split": "train"}, "eval": {"path": str(path), "split": test}}


def make_arguments(task: str, data: dict[str, Any], words: argparse.Namespace) -> TrainingArguments:
    """The run; everything in it is the same in all visits."""
    recipe = {**RECIPES[task]}
    steps = {"max_steps": 60000, "save_steps": 100, "eval_steps": 1000, "logging_steps": 50, "warmup_steps": 200}
    if words.tiny:
        recipe |= {"model": {**recipe["model"], **TINY[task]}, "per_device_train_batch_size": 2}
        recipe["mixed_precision"] = "no"
        steps = {"max_steps": 4, "save_steps": 2, "eval_steps": 4, "logging_steps": 2, "warmup_steps": 1}
        data["eval"]["split"] = "test[:4]"
        recipe["task"] = {**recipe["task"], **({"patch_size": 16} if task == "denoise" else {})}
    else:
        data["num_workers"] = 8
    constant = {"lr_scheduler_type": "constant_with_warmup", "ema_decay": 0.999, "save_total_limit": 1}
    return TrainingArguments(output_dir="run", data=data, report_to="none", **recipe, **steps, **constant)


def visit(task: str, words: argparse.Namespace, rows: Rows) -> int:
    """Trains until the time is over or the run complete, and writes the row of this visit."""
    state, begin = words.output.resolve().parent / "state" / words.output.stem, time.monotonic()
    state.mkdir(parents=True, exist_ok=True)
    given = os.environ.get("DATA", "")
    given = str(Path(given).resolve()) if given else ""
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        Path("run").symlink_to(state)
        arguments = make_arguments(task, place_data(task, Path(place), given), words)
        run = RunFolder("run")
        first = max(run.saved_steps(), default=0)
        made = make_task(arguments, begin + words.limit - RESERVE)
        made.first = first
        try:
            train(made, arguments)
        except VisitOver:
            print("the visit is over; the state is saved", flush=True)
        last = max(run.saved_steps())
        os.chdir("/")
    if last > first:
        rows.add(f"steps {first} to {last}", {"": measures(RunFolder(state), first, last, arguments, words)})
    return OK if last == arguments.max_steps else UNFINISHED


def measures(
    run: RunFolder, first: int, last: int, arguments: TrainingArguments, words: argparse.Namespace
) -> dict[str, Any]:
    """The row of a visit from the run's log: speed, first and last loss, the last scores, the commit."""
    logged = [row for row in run.read_metrics() if first < row["step"] <= last]
    losses = [row["loss"] for row in logged if "loss" in row]
    speeds = sorted(row["samples_per_second"] for row in logged if "loss" in row)
    scores = [{name: value for name, value in row.items() if name.startswith("eval_")} for row in logged]
    largest = max((path.stat().st_size for path in run.path.rglob("*") if path.is_file()), default=0)
    device = torch.cuda.get_device_name() if words.device == "cuda" else "CPU, tiny sizes"
    return {
        "dtype": arguments.mixed_precision,
        "sizes": {"batch": arguments.per_device_train_batch_size, "max_steps": arguments.max_steps},
        "samples_per_second": speeds[len(speeds) // 2],
        "slowest": speeds[0],
        "fastest": speeds[-1],
        "first_loss": losses[0],
        "last_loss": losses[-1],
        **next((found for found in reversed(scores) if found), {}),
        "largest_state_file": largest,
        "commit": source_state()["commit"][:12],
        "device": device,
    }


def main() -> int:
    """A visit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(RECIPES), required=True)
    words = read_words(parser)
    # accelerate chooses the device by itself.
    os.environ["ACCELERATE_USE_CPU"] = str(words.device == "cpu").lower()
    torch.manual_seed(0)
    return visit(words.task, words, Rows(words.output))


if __name__ == "__main__":
    sys.exit(main())
