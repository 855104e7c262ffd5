"""Tiny runs of the Disentangled DiT for its training tests."""

from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import numpy as np
import torch
from PIL import Image
from transformers import ConvNextImageProcessor, RegNetConfig, RegNetForImageClassification

from hf_ext.files import same_bytes
from hf_ext.tasks.diffusion import DisentangledDiTTask
from hf_ext.tasks.diffusion_data import write_tar
from hf_ext.tasks.precompute import Precompute
from hf_ext.training import TrainingArguments
from hf_ext.training.arguments import build
from hf_ext.training.state import RunFolder
from tests.kit.killing import killed
from tests.training import tiny

MODEL = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8, "mlp_ratio": 2.0, "patch_size": 2}
CLASSES = ["cat", "dog", "emu"]


def write_table(folder: Path, sizes: list, classes: list[str] | None = None, image: str = "image", **columns) -> Path:
    """A parquet file of colour pictures of these sizes, all different, with other columns; `label` may have names."""
    generator = np.random.default_rng(0)
    pictures = [Image.fromarray(generator.integers(256, size=(*side, 3), dtype=np.uint8)) for side in sizes]
    data = datasets.Dataset.from_dict({image: pictures, **columns})
    data = data if classes is None else data.cast_column("label", datasets.ClassLabel(names=classes))
    folder.mkdir(parents=True)
    data.to_parquet(str(folder / "train.parquet"))
    return folder


def write_pictures(folder: Path, count: int = 9, size=(12, 10), side_column=None) -> Path:
    """Pictures with classes and captions."""
    sizes = [size] * count if side_column is None else side_column
    labels, texts = [index % 3 for index in range(len(sizes))], ["a red hen", "green fish", "fish on grass"]
    return write_table(folder, sizes, CLASSES, label=labels, text=[texts[label] for label in labels])


def pack_tars(pictures: Path, folder: Path, count: int) -> Path:
    """
    The pictures of a folder, or of the parquet file in it with classes and captions, in tar files of `count` numbers;
    a file that would be the same stays as it is.
    """
    if (pictures / "train.parquet").exists():
        rows = rows_of(pictures).cast_column("image", datasets.Image(decode=False))
        given = [(row["image"]["bytes"], str(row["label"]).encode(), row["text"].encode()) for row in rows]
        examples = {f"{number:03d}": {"png": a, "cls": b, "txt": c} for number, (a, b, c) in enumerate(given)}
    else:
        examples = {path.stem: {"png": path.read_bytes()} for path in sorted(pictures.iterdir())}
    groups: dict[int, list[str]] = {}
    for name in examples:
        groups.setdefault((int(name) if name.isdecimal() else 10_000) // count, []).append(name)
    for number, names in groups.items():
        path, packed = folder / f"{number:05d}.tar", folder / "packed"
        write_tar(packed, [(name, examples[name]) for name in names])
        packed.unlink() if path.exists() and same_bytes(path, packed) else packed.replace(path)
    return folder


def make_arguments(output: Path, data: Path, /, streaming: bool = False, **changes) -> TrainingArguments:
    """A run of a few steps."""
    sources = tiny.evaluated(data, streaming=streaming)
    values = {"method": "disentangled-dit", "output_dir": str(output), "data": sources, "task": {}, "model": MODEL}
    values |= {"max_steps": 2, "per_device_train_batch_size": 3, "learning_rate": 1e-2, "logging_steps": 1}
    return build(TrainingArguments, {**values, "report_to": "none", **changes})


def run(arguments: TrainingArguments, kind: type = DisentangledDiTTask, **options):
    """Trains; the task and its metrics."""
    task = build(kind, {"sample_steps": 1, "samples_per_class": 1, **arguments.task, **options}, "task")
    return task, tiny.run(task, arguments)


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in RunFolder(folder).read_metrics() if "loss" in row]


def contents(folder: Path) -> dict[str, Any]:
    """What a run left behind, without its times: rows of metrics, tensors, pictures."""
    pictures = {f"samples/{path.name}": path.read_bytes() for path in (folder / "samples").glob("*")}
    return tiny.contents(folder) | pictures


def check_resuming(folder: Path, data: Path, **changes):
    """Interrupted in its fourth step and continued, a run leaves what the whole one does, bit for bit."""
    options = {"max_steps": 4, "save_steps": 2, "eval_steps": 4, "per_device_train_batch_size": 2, **changes}
    whole = run(make_arguments(folder / "whole", data, **options))
    arguments = make_arguments(folder / "pieces", data, **options)
    with killed((DisentangledDiTTask, "loss"), after=3 * arguments.gradient_accumulation_steps):
        run(arguments)
    run(arguments)
    assert contents(folder / "pieces") == contents(folder / "whole")
    return whole


def settings(pictures: Path, vae: Path, **changes) -> Precompute:
    """Latents of 16 pixels, four to a file."""
    values = {"data": {"path": str(pictures)}, "vae": str(vae), "image_size": 16, "shard_size": 4, "batch_size": 2}
    return build(Precompute, {**values, **changes}, "precompute")


def rows_of(folder: Path) -> datasets.Dataset:
    return datasets.load_dataset(str(folder), split="train")


def nothing_copied():
    """A block in which `datasets` must not copy what it reads."""
    return mock.patch.object(datasets.DatasetBuilder, "download_and_prepare", side_effect=AssertionError("copied"))


def write_judge(folder: Path) -> str:
    """A classifier with random weights."""
    torch.manual_seed(0)
    config = RegNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], groups_width=4, num_labels=3)
    RegNetForImageClassification(config).save_pretrained(folder)
    ConvNextImageProcessor(size={"shortest_edge": 16}, crop_pct=1.0).save_pretrained(folder)
    return str(folder)
