"""Classification of small pictures in the shared training loop, by a Vision Transformer of transformers."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from huggingface_hub.dataclasses import strict
from PIL import Image
from transformers import PreTrainedModel, ViTConfig, ViTForImageClassification

from hf_ext.training import Task


def read_pixels(image: Image.Image) -> torch.Tensor:
    """A picture as `[3, height, width]` in [-1, 1]."""
    return torch.from_numpy(np.asarray(image.convert("RGB"), np.float32).transpose(2, 0, 1) / 127.5 - 1)


@strict
@dataclass
class PictureTask(Task):
    """
    Classification with `ViTForImageClassification`, from scratch or from the model that `init_from` names.

    Args:
        labels (`list[str]`): Names of the classes; the column `label` counts them from 0.
    """

    labels: list[str] = field(default_factory=list)

    pipeline_tag: ClassVar[str] = "image-classification"
    metric_names: ClassVar[dict[str, str]] = {"accuracy": "accuracy"}
    greater_is_better: ClassVar[bool] = True
    eval_batch_size: ClassVar[int] = 100

    def build_model(self, config: dict[str, Any], init_from: str | None) -> PreTrainedModel:
        """The model of the section `model`, or a checkpoint's with a head for these classes."""
        names = dict(enumerate(self.labels))
        settings = {"id2label": names, "label2id": {name: index for index, name in names.items()}}
        if init_from is None:
            return ViTForImageClassification(ViTConfig(**config, **settings))
        return ViTForImageClassification.from_pretrained(init_from, ignore_mismatched_sizes=True, **settings)

    def training_sample(self, example: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        """Pixels and class."""
        return {"pixel_values": read_pixels(example["image"]), "labels": torch.tensor(example["label"])}

    def evaluate_batch(
        self, model: torch.nn.Module, examples: list[dict[str, Any]], indices: list[int]
    ) -> list[dict[str, float]]:
        """True for each picture that was recognised."""
        pixels = torch.stack([read_pixels(example["image"]) for example in examples])
        found = model(pixel_values=pixels.to(next(model.parameters()).device)).logits.argmax(-1).tolist()
        return [{"accuracy": float(guess == example["label"])} for guess, example in zip(found, examples, strict=True)]
