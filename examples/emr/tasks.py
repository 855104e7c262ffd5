"""Tasks of one's own in the shared training loop: short texts by any encoder, pictures by a ViT, bytes by GPT-2."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from huggingface_hub.dataclasses import strict
from PIL import Image
from sklearn.metrics import accuracy_score, f1_score
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

from hf_ext.hub.checkpoints import split_revision
from hf_ext.tasks.texts import LanguageModelTask
from hf_ext.training import Task


@strict
@dataclass
class TweetTask(Task):
    """
    Text classification with `AutoModelForSequenceClassification`, from a base that `init_from` names.

    Args:
        labels (`list[str]`): Names of the classes; the column `label` counts them from 0.
        max_length (`int`, defaults to 64): Tokens kept of a text.
    """

    labels: list[str] = field(default_factory=list)
    max_length: int = 64

    pipeline_tag: ClassVar[str] = "text-classification"
    metric_names: ClassVar[dict[str, str]] = {"f1": "macro F1 over all classes", "accuracy": "accuracy"}
    greater_is_better: ClassVar[bool] = True

    def validate_labels(self) -> None:
        if len(set(self.labels)) < 2 or len(set(self.labels)) < len(self.labels):
            raise ValueError(f"task.labels must be two or more different names, got {self.labels!r}.")

    def build_model(self, config: dict[str, Any], init_from: str | None) -> PreTrainedModel:
        """The base's encoder with a new head; the base's tokenizer."""
        if init_from is None or config:
            raise ValueError("fine-tuning starts from a model: set init_from, and leave the section 'model' empty.")
        name, revision = split_revision(init_from)
        self.tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
        return AutoModelForSequenceClassification.from_pretrained(
            name,
            revision=revision,
            num_labels=len(self.labels),
            id2label=dict(enumerate(self.labels)),
            label2id={label: index for index, label in enumerate(self.labels)},
        )

    def training_sample(self, example: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        """A tweet padded to the full length, which `loss` cuts to the longest of the batch."""
        tokens = self.tokenizer(
            example["text"], truncation=True, max_length=self.max_length, padding="max_length", return_tensors="pt"
        )
        return {**{name: values[0] for name, values in tokens.items()}, "labels": torch.tensor(example["label"])}

    def loss(self, model: torch.nn.Module, batch: dict[str, Any], step: int) -> torch.Tensor:
        """Cross entropy."""
        length = int(batch["attention_mask"].sum(1).max())
        tokens = {name: values[:, :length] for name, values in batch.items() if name != "labels"}
        return model(**tokens, labels=batch["labels"]).loss

    def evaluate_batch(
        self, model: torch.nn.Module, examples: list[dict[str, Any]], indices: list[int]
    ) -> list[dict[str, float]]:
        """Prediction and truth of each tweet."""
        texts = [example["text"] for example in examples]
        tokens = self.tokenizer(texts, truncation=True, max_length=self.max_length, padding=True, return_tensors="pt")
        predictions = model(**tokens.to(next(model.parameters()).device)).logits.argmax(-1).tolist()
        return [
            {"prediction": float(prediction), "label": float(example["label"])}
            for prediction, example in zip(predictions, examples, strict=True)
        ]

    def summarize(self, rows: list[dict[str, float]]) -> dict[str, float]:
        """Macro F1 and accuracy."""
        predictions, labels = ([int(row[name]) for row in rows] for name in ("prediction", "label"))
        classes = list(range(len(self.labels)))
        return {
            "f1": float(f1_score(labels, predictions, labels=classes, average="macro", zero_division=0.0)),
            "accuracy": float(accuracy_score(labels, predictions)),
        }

    def save_model(self, model: PreTrainedModel, state_dict: dict[str, torch.Tensor], folder: Path) -> None:
        """The model with its label names, and the tokenizer."""
        super().save_model(model, state_dict, folder)
        self.tokenizer.save_pretrained(folder)

    def describe(self) -> dict[str, Any]:
        """The cut of the texts, on which scores depend."""
        return {"max_length": self.max_length}


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


@strict
@dataclass
class ByteTask(LanguageModelTask):
    """Language modelling of bytes with `GPT2LMHeadModel`, from scratch or from the model that `init_from` names."""

    def build_model(self, config: dict[str, Any], init_from: str | None) -> PreTrainedModel:
        """The model of the section `model`, or a checkpoint's."""
        if init_from is not None:
            return GPT2LMHeadModel.from_pretrained(init_from)
        end = self.tokenizer.eos_token_id
        sizes = {"vocab_size": len(self.tokenizer), "n_positions": self.max_length}
        return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=end, eos_token_id=end, **config))
