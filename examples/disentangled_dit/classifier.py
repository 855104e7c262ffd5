"""Trains the classifier whose features and answers measure generated images: a small RegNet from transformers.

accelerate launch examples/disentangled_dit/classifier.py examples/disentangled_dit/classifier.yaml [--field value]
Its snapshot is what [`~hf_ext.metrics.ClassifierFeatures`] loads.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from huggingface_hub.dataclasses import strict
from PIL import Image
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    RegNetConfig,
    RegNetForImageClassification,
    ViTImageProcessor,
)

from hf_ext.tasks.sequences import Batch, ClassificationTask, column
from hf_ext.training import TrainingArguments, main
from hf_ext.training.arguments import build


@strict
@dataclass
class ClassifierTask(ClassificationTask):
    """
    Classification of small images.

    Args:
        image_size (`int`, defaults to 32): Side of the square that the network sees, in pixels.
        shift (`int`, defaults to 4): Training moves images by up to so many pixels, and mirrors every other one.
        smallest (`int`, defaults to 8): Training makes every other image smaller, down to this side, and enlarges it
            again: what is generated lacks detail too.
        image_column (`str`, defaults to `"image"`): Column of the images.
    """

    image_size: int = 32
    shift: int = 4
    smallest: int = 8
    image_column: str = "image"

    config_class: ClassVar[type[PreTrainedConfig]] = RegNetConfig
    model_class: ClassVar[Callable[..., PreTrainedModel]] = RegNetForImageClassification
    pipeline_tag: ClassVar[str] = "image-classification"
    eval_batch_size: ClassVar[int] = 250

    def validate_sizes(self) -> None:
        if self.image_size < 8 or not 0 <= self.shift < self.image_size:
            raise ValueError(
                f"image_size must be at least 8 and shift less than it; got {self.image_size}, {self.shift}."
            )
        if not 1 <= self.smallest <= self.image_size:
            raise ValueError(f"smallest must be from 1 to image_size, {self.image_size}; got {self.smallest}.")

    def model_fields(self) -> dict[str, Any]:
        """Nothing: the network takes any size."""
        return {}

    def processor(self) -> ViTImageProcessor:
        """Resizes to the square, and scales to [-1, 1]."""
        return ViTImageProcessor(
            size={"height": self.image_size, "width": self.image_size},
            resample=Image.Resampling.BICUBIC,
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
        )

    def encode(self, example: dict[str, Any]) -> Batch:
        """As the processor does, without its cost for each image."""
        return {"pixel_values": _scale(self._square(example)), "labels": self.label(example)}

    def training_sample(self, example: dict[str, Any], generator: np.random.Generator) -> Batch:
        """Blurred, moved and mirrored; what comes in from outside is the image's mirror image."""
        pixels = self._square(example)
        if generator.integers(2):
            side = int(generator.integers(self.smallest, self.image_size + 1))
            small = Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC)
            pixels = np.asarray(small.resize((self.image_size, self.image_size), Image.Resampling.BICUBIC))
        top, left = generator.integers(2 * self.shift + 1, size=2)
        around = np.pad(pixels, ((self.shift,) * 2, (self.shift,) * 2, (0, 0)), mode="reflect")
        part = around[top : top + self.image_size, left : left + self.image_size]
        if generator.integers(2):
            part = part[:, ::-1]
        return {"pixel_values": _scale(part), "labels": self.label(example)}

    def _square(self, example: dict[str, Any]) -> np.ndarray:
        image: Image.Image = column(example, self.image_column, "image_column").convert("RGB")
        if image.size != (self.image_size, self.image_size):
            image = image.resize((self.image_size, self.image_size), Image.Resampling.BICUBIC)
        return np.asarray(image)


def _scale(pixels: np.ndarray) -> torch.Tensor:
    """uint8 [height, width, 3] to [3, height, width] in [-1, 1]."""
    return torch.from_numpy(pixels.astype(np.float32).transpose(2, 0, 1) / 127.5 - 1)


def make_task(arguments: TrainingArguments) -> ClassifierTask:
    """The task of a run."""
    return build(ClassifierTask, arguments.task, "task")


if __name__ == "__main__":
    sys.exit(main(make_task=make_task, usage=__doc__))
