"""A tiny real task for the tests of the training engine: denoising 8×8 images, with dropout and BatchNorm."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml
from huggingface_hub.dataclasses import strict
from PIL import Image
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from hf_ext.training import Task, TrainingArguments, build_task, train
from hf_ext.training.arguments import build
from hf_ext.training.changes import describe_run
from hf_ext.training.launch import main
from hf_ext.training.models import initialize_from
from hf_ext.training.state import RunFolder
from tests.kit.process_state import forget_accelerate

SIDE = 8
# Columns of `Clock.row`, which differ between equal runs.
TIMINGS = ("samples_per_second", "data_share", "compute_share", "overhead_share", "memory_gb", "minutes_left")


class TinyConfig(PreTrainedConfig):
    """Configuration of [`TinyModel`]."""

    model_type = "hf_ext_tiny"
    width: int = 4
    dropout: float = 0.3
    batch_norm: bool = True


class TinyModel(PreTrainedModel):
    """Two convolutions. It has a constant that is not saved and holds -inf, as attention masks do."""

    config_class = TinyConfig
    main_input_name = "pixel_values"

    def __init__(self, config: TinyConfig):
        super().__init__(config)
        self.enter = torch.nn.Conv2d(1, config.width, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(config.width) if config.batch_norm else torch.nn.Identity()
        self.dropout = torch.nn.Dropout(config.dropout)
        self.leave = torch.nn.Conv2d(config.width, 1, 3, padding=1)
        self.register_buffer("mask", self._mask(), persistent=False)
        self.post_init()

    @staticmethod
    def _mask() -> torch.Tensor:
        return torch.tensor([0.0, float("-inf")])

    def _init_weights(self, module: torch.nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, TinyModel):
            init.copy_(module.mask, self._mask())

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """[batch, 1, 8, 8] → the same"""
        hidden = self.dropout(torch.relu(self.norm(self.enter(pixel_values))))
        # The constant decides nothing as long as it is what it was: softmax of (0, -inf) is (1, 0).
        return self.leave(hidden) * self.mask.softmax(0)[0]


class Interrupted(Exception):
    """Stands for whatever ends a process in the middle of a step."""


@strict
@dataclass
class TinyTask(Task):
    """Denoising with [`TinyModel`]."""

    # Standard deviation of the added noise.
    noise: float = 0.3
    # The step in which the loss raises [`Interrupted`], whose loss is not finite, whose gradients alone are not.
    interrupt_at: int = -1
    nan_at: int = -1
    overflow_at: int = -1

    pipeline_tag: ClassVar[str] = "image-to-image"
    metric_names: ClassVar[dict[str, str]] = {"mse": "MSE", "examples": "examples", "indices": "sum of their indices"}
    greater_is_better: ClassVar[bool] = False
    eval_batch_size: ClassVar[int] = 2

    def build_model(self, config: dict[str, Any], init_from: str | None) -> TinyModel:
        model = TinyModel(TinyConfig(**config))
        if init_from:
            initialize_from(model, init_from)
        return model

    def parameter_groups(self, model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        matrices, others = super().parameter_groups(model, weight_decay)
        return [matrices, {**others, "betas": (0.8, 0.9)}]

    def training_sample(self, example: dict[str, Any], generator: np.random.Generator) -> dict[str, torch.Tensor]:
        clean = pixels(example)
        clean = clean[:, ::-1] if generator.integers(2) else clean
        noisy = clean + np.float32(self.noise) * generator.standard_normal(clean.shape, dtype=np.float32)
        return {"pixel_values": torch.from_numpy(noisy[None]), "labels": torch.from_numpy(clean[None].copy())}

    def loss(self, model: torch.nn.Module, batch: dict[str, Any], step: int) -> torch.Tensor:
        if step == self.interrupt_at:
            raise Interrupted
        loss = torch.nn.functional.mse_loss(model(batch["pixel_values"]), batch["labels"])
        if step == self.overflow_at:
            loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss * float("nan") if step == self.nan_at else loss

    def evaluate_batch(
        self, model: torch.nn.Module, examples: list[dict[str, Any]], indices: list[int]
    ) -> list[dict[str, float]]:
        clean = torch.from_numpy(np.stack([pixels(example) for example in examples]))[:, None]
        errors = (model(clean) - clean).square().mean((1, 2, 3))
        return [{"mse": float(error), "index": index} for error, index in zip(errors, indices, strict=True)]

    def summarize(self, rows: list[dict[str, float]]) -> dict[str, float]:
        mean = float(np.mean([row["mse"] for row in rows]))
        return {"mse": mean, "examples": len(rows), "indices": sum(row["index"] for row in rows)}

    def sample_picture(self, model: torch.nn.Module, examples: list[dict[str, Any]]) -> Image.Image | None:
        return Image.fromarray(np.uint8(pixels(examples[0]) * 255))

    def describe(self) -> dict[str, Any]:
        return {"noise": self.noise}


class ScoredTask(TinyTask):
    """Evaluations with given scores, the last one again and again."""

    scores: ClassVar[list[float]] = []

    def summarize(self, rows: list[dict[str, float]]) -> dict[str, float]:
        score = self.scores.pop(0) if len(self.scores) > 1 else self.scores[0]
        return {**super().summarize(rows), "mse": score}


def pixels(example: dict[str, Any]) -> np.ndarray:
    """[8, 8] in [0, 1], from a column of numbers or of pictures."""
    picture = example.get("image") or example.get("hq")
    if picture is not None:
        return np.asarray(picture.convert("L"), dtype=np.float32) / 255
    return np.asarray(example["pixels"], dtype=np.float32).reshape(SIDE, SIDE)


def write_shards(folder: Path, shards: int, examples: int) -> Path:
    """A folder of parquet files with `examples` rows in all; row `i` starts with the pixel i / 100."""
    folder.mkdir(parents=True)
    rows = np.random.default_rng(0).random((examples, SIDE * SIDE), dtype=np.float32)
    rows[:, 0] = np.arange(examples) / 100
    for shard, part in enumerate(np.array_split(rows, shards)):
        table = pyarrow.table({"pixels": list(part)})
        pyarrow.parquet.write_table(table, folder / f"train-{shard:05d}-of-{shards:05d}.parquet")
    return folder


def write_hollow(folder: Path) -> Path:
    """Parquet files of which one has no rows: a table of no rows has a group of no rows."""
    (file, *_) = write_shards(folder, shards=4, examples=9).glob("*-00002-*")
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(file)[:0], file)
    return folder


def write_images(folder: Path, count: int, seed: int = 0) -> Path:
    """A folder of PNG pictures."""
    folder.mkdir(parents=True)
    for index, picture in enumerate(np.random.default_rng(seed).integers(256, size=(count, SIDE, SIDE))):
        Image.fromarray(np.uint8(picture)).save(folder / f"{index:03d}.png")
    return folder


def evaluated(path: Path, **source: Any) -> dict[str, Any]:
    """Data to train and to be evaluated on."""
    return {"train": {"path": str(path), **source}, "eval": {"path": str(path)}}


def make_arguments(output: Path, data: dict[str, Any] | Path, **changes: Any) -> TrainingArguments:
    """A run of seven steps that uses what can make resuming inexact; a path is of training data."""
    data = {"train": {"path": str(data)}} if isinstance(data, Path) else data
    values: dict[str, Any] = {"method": "tiny", "output_dir": str(output), "data": data, "report_to": "none"}
    values |= {"max_steps": 7, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    values |= {"learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 2, "ema_decay": 0.9}
    values |= {"logging_steps": 3, "eval_steps": 3, "save_steps": 2}
    return build(TrainingArguments, {**values, **changes})


def make_task(arguments: TrainingArguments) -> Task:
    """[`build_task`], which knows the method `tiny` too."""
    return build(TinyTask, arguments.task, "task") if arguments.method == "tiny" else build_task(arguments)


def write_config(folder: Path, data: dict[str, Any] | Path, **changes: Any) -> str:
    """The YAML file of a short run."""
    data = {"train": {"path": str(data)}} if isinstance(data, Path) else data
    values = {"method": "tiny", "output_dir": str(folder / "run"), "data": data, "report_to": "none"}
    values |= {"max_steps": 4, "per_device_train_batch_size": 2, "save_steps": 2}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**values, **changes}))
    return str(path)


def write_text_recipe(folder: Path, **changes: Any) -> str:
    """The YAML file of a run of an MRConv that classifies texts."""
    (folder / "data.jsonl").write_text('{"text": "ab", "label": 0}\n{"text": "cd", "label": 1}\n' * 4)
    sizes = {"model": {"hidden_size": 8, "num_hidden_layers": 1}, "task": {"max_length": 16, "num_labels": 2}}
    return write_config(folder, folder / "data.jsonl", **{"method": "mrconv-text", **sizes, **changes})


def fails(capsys: Any, code: int, *words: str, make_task: Any = make_task) -> str:
    """The message of a training that ends with this exit code."""
    forget_accelerate()
    assert main(list(words), make_task) == code
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return next(line for line in error.splitlines() if line.startswith("Error: "))


def run(task: Task, arguments: TrainingArguments, *data: Any) -> dict[str, float]:
    """[`train`], as the first thing that a process does with accelerate."""
    forget_accelerate()
    return train(task, arguments, *data)


def prepare(folder: RunFolder, arguments: TrainingArguments) -> None:
    """What [`train`] does to a run folder before it trains."""
    folder.check(arguments, describe_run(arguments, 1, None))
    folder.prepare()


def run_interrupted(arguments: TrainingArguments, step: int) -> None:
    """Runs until the middle of a step."""
    with pytest.raises(Interrupted):
        run(TinyTask(interrupt_at=step), arguments)


def contents(folder: Path) -> dict[str, Any]:
    """What a run left behind, without its times: rows of metrics, and a digest of every tensor of every folder."""
    found: dict[str, Any] = {}
    for number, line in enumerate((folder / "metrics.jsonl").read_text().splitlines()):
        found[f"metrics {number}"] = {name: value for name, value in json.loads(line).items() if name not in TIMINGS}
    files = [path for part in ("state", "snapshot", "best") for path in (folder / part).glob("**/*") if path.is_file()]
    for path in sorted(files):
        name = str(path.relative_to(folder))
        if path.suffix in (".bin", ".pkl"):
            state = torch.load(path, weights_only=False)
            # Seconds that the run took so far.
            found[name] = digest({key: value for key, value in state.items() if key != "seconds"})
        # Names that torch gives its files are in the last.
        elif path.name not in ("training.json", "manifest.json", ".metadata"):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def find_differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))


def digest(value: Any) -> str:
    """A hash that changes with any bit of any tensor in nested lists and dictionaries."""
    if isinstance(value, dict):
        text = repr([(key, digest(item)) for key, item in value.items()])
    elif isinstance(value, (list, tuple)):
        text = repr([digest(item) for item in value])
    elif isinstance(value, torch.Tensor):
        text = repr((value.dtype, value.shape, value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()))
    else:
        text = repr(value)
    return hashlib.sha256(text.encode()).hexdigest()
