"""Scores of classifiers that were trained elsewhere: of texts, of pictures, and of pictures by CLIP's texts."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    CLIPModel,
    CLIPVisionModel,
)

from hf_ext.hub.checkpoints import split_revision
from hf_ext.metrics.agreement import accuracy, matthews, pearson, spearman
from hf_ext.training.models import adapter_base, load_adapter
from hf_ext.training.provenance import published_name
from hf_ext.training.task import Task

from .pictures import in_colours, require_picture
from .sequences import column


def load_whole(kind: Any, source: str) -> Any:
    """A model of which the checkpoint has every tensor: a head that starts at random would be scored in silence."""
    name, revision = split_revision(source)
    model, report = kind.from_pretrained(name, revision=revision, output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{source} has no {', '.join(missing[:3])} for {type(model).__name__}: it is a model without this head. "
            "Evaluate a checkpoint that was fine-tuned for the task."
        )
    return model


def load_head(kind: Any, source: str, device: str | None = None) -> Any:
    """Such a model, of a peft adapter with its base, ready to answer: on the device, or the GPU if there is one."""
    base = adapter_base(source)
    model = load_whole(kind, base or source)
    if base is not None:
        model = load_adapter(model, source).merge_and_unload()
    try:
        return model.eval().to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device} cannot be used: {error}") from error


def load_reader(kind: Any, named: str | None, source: str) -> Any:
    """The tokenizer or image processor that a recipe names, or the checkpoint's own."""
    name, revision = split_revision(named or source)
    return kind.from_pretrained(name, revision=revision)


@strict
@dataclass
class LabelledTask(Task):
    """
    What all evaluations of a choice share.

    Args:
        label_column (`str`, defaults to `"label"`): Column of the right class.
        labels (`list`, *optional*):
            What that column holds for each output of the model, in the order of the outputs: `["1", "2"]`, or
            `[2, 0, 1]` where the model was trained with another order. Their numbers from 0 when not given.
    """

    label_column: str = "label"
    labels: list = field(default_factory=list)

    metric_names: ClassVar[dict[str, str]] = {"accuracy": "accuracy"}
    greater_is_better: ClassVar[bool] = True

    def label(self, example: dict[str, Any], count: int) -> int:
        """The number of an example's class, of so many."""
        value = column(example, self.label_column, "label_column")
        index = self.labels.index(value) if value in self.labels else value
        if (self.labels and value not in self.labels) or not isinstance(index, int) or not 0 <= index < count:
            allowed = f"one of {self.labels}" if self.labels else f"0 to {count - 1}"
            raise ValueError(
                f"column {self.label_column!r} holds {value!r}, and the model has {count} outputs; allowed: {allowed}."
                " Choose a split with labels, or set task.labels."
            )
        return index

    def describe(self) -> dict[str, Any]:
        """The options that scores depend on; folders by their last name, and of the classes, which may be thousands, a
        hash of their names in their order."""
        options = super().describe()
        classes = json.dumps([options.pop(name, None) for name in ("labels", "class_names")])
        options["classes"] = hashlib.sha256(classes.encode()).hexdigest()[:12]
        files = {name: options[name] for name in ("tokenizer", "processor", "clip") if options.get(name)}
        return options | {name: published_name(value) for name, value in files.items()}


@strict
@dataclass
class TextClassification(LabelledTask):
    """
    Texts, or pairs of texts, with `AutoModelForSequenceClassification`; a model of one output gives a score.

    Args:
        text_columns (`list[str]`, defaults to `["text"]`): Column of the text; of pairs two.
        max_length (`int`, defaults to 128): Tokens kept of a text or pair.
        tokenizer (`str`, *optional*): Folder or Hub id, where the checkpoint has none.
    """

    text_columns: list[str] = field(default_factory=lambda: ["text"])
    max_length: int = 128
    tokenizer: str | None = None

    pipeline_tag: ClassVar[str] = "text-classification"
    metric_names: ClassVar[dict[str, str]] = {
        "accuracy": "accuracy",
        "matthews": "Matthews correlation",
        "pearson_spearman": "mean of Pearson's and Spearman's correlation",
        "pearson": "Pearson's correlation",
        "spearman": "Spearman's correlation",
    }

    def validate_text_columns(self) -> None:
        if len(self.text_columns) not in (1, 2):
            raise ValueError(f"text_columns must be one or two names, got {self.text_columns!r}.")

    def build_model(self, config: dict[str, Any], init_from: str | None) -> nn.Module:
        """The classifier, and its tokenizer."""
        assert init_from is not None
        model = load_whole(AutoModelForSequenceClassification, init_from)
        self.reader = load_reader(AutoTokenizer, self.tokenizer, init_from)
        if self.reader.pad_token is None:
            # GPT-2 has none; what stands after the last token changes nothing.
            self.reader.pad_token = self.reader.eos_token
        # Decoders find the last token by this id: it must be what pads here.
        model.config.pad_token_id = self.reader.pad_token_id
        return model

    def evaluate_batch(
        self, model: nn.Module, examples: list[dict[str, Any]], indices: list[int]
    ) -> list[dict[str, float]]:
        """Prediction and truth of each text."""
        texts = [[column(example, name, "text_columns") for example in examples] for name in self.text_columns]
        tokens = self.reader(
            *texts,
            truncation=True,
            max_length=self.max_length,
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        logits = model(**tokens.to(next(model.parameters()).device)).logits.float()
        if logits.shape[1] == 1:
            truths = [float(column(example, self.label_column, "label_column")) for example in examples]
            predictions, kind = logits[:, 0].tolist(), "score"
        else:
            truths = [float(self.label(example, logits.shape[1])) for example in examples]
            predictions, kind = logits.argmax(-1).tolist(), "class"
        return [{kind: float(found), "label": truth} for found, truth in zip(predictions, truths, strict=True)]

    def summarize(self, rows: list[dict[str, float]]) -> dict[str, float]:
        """Accuracy and Matthews correlation of classes; correlations of scores."""
        kind = "score" if "score" in rows[0] else "class"
        found, truth = (np.array([row[name] for row in rows]) for name in (kind, "label"))
        if kind == "class":
            return {"accuracy": accuracy(found, truth), "matthews": matthews(found, truth)}
        linear, ranks = pearson(found, truth), spearman(found, truth)
        return {"pearson_spearman": (linear + ranks) / 2, "pearson": linear, "spearman": ranks}


@strict
@dataclass
class ImageClassification(LabelledTask):
    """
    Pictures, with `AutoModelForImageClassification`.

    Args:
        image_column (`str`, defaults to `"image"`): Column of the picture.
        processor (`str`, *optional*): Folder or Hub id of the image processor, where the checkpoint has none.
    """

    image_column: str = "image"
    processor: str | None = None

    pipeline_tag: ClassVar[str] = "image-classification"

    def build_model(self, config: dict[str, Any], init_from: str | None) -> nn.Module:
        """The classifier, and its image processor."""
        assert init_from is not None
        self.reader = load_reader(AutoImageProcessor, self.processor, init_from)
        return load_whole(AutoModelForImageClassification, init_from)

    def classify(self, model: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
        """Scores of the classes."""
        logits: torch.Tensor = model(pixel_values=pixels).logits
        return logits

    def evaluate_batch(
        self, model: nn.Module, examples: list[dict[str, Any]], indices: list[int]
    ) -> list[dict[str, float]]:
        """Whether each picture is recognised."""
        values = [column(example, self.image_column, "image_column") for example in examples]
        pictures = [in_colours(require_picture(value, self.image_column), "RGB") for value in values]
        first = next(model.parameters())
        pixels = self.reader(pictures, return_tensors="pt")["pixel_values"].to(first.device, first.dtype)
        logits = self.classify(model, pixels).float()
        truths = [self.label(example, logits.shape[1]) for example in examples]
        found = logits.argmax(-1).tolist()
        return [{"accuracy": float(one == truth)} for one, truth in zip(found, truths, strict=True)]


@strict
@dataclass
class ZeroShotImages(ImageClassification):
    """
    Pictures, by the text of which their features are nearest: the encoder of pictures of a CLIP, and a head of texts.

    Args:
        class_names (`list[str]`): The classes in words.
        templates (`list[str]`, defaults to `["a photo of a {}."]`):
            Texts with `{}` for a class; the mean of their features stands for it.
        clip (`str`, defaults to `"openai/clip-vit-base-patch32"`):
            Folder or Hub id of the CLIP that the encoder was fine-tuned from: its encoder of texts, projections,
            tokenizer and image processor are used.
    """

    class_names: list[str] = field(default_factory=list)
    templates: list[str] = field(default_factory=lambda: ["a photo of a {}."])
    clip: str = "openai/clip-vit-base-patch32"

    pipeline_tag: ClassVar[str] = "zero-shot-image-classification"

    def validate_texts(self) -> None:
        if len(set(self.class_names)) < 2 or len(set(self.class_names)) < len(self.class_names):
            raise ValueError(f"class_names must be two or more different names, got {self.class_names!r:.200}.")
        if not self.templates or not all("{}" in template for template in self.templates):
            raise ValueError(f"templates must be texts with {{}} for a class, got {self.templates!r:.200}.")

    def build_model(self, config: dict[str, Any], init_from: str | None) -> nn.Module:
        """The encoder of pictures, which also keeps the projection and the head."""
        assert init_from is not None
        encoder = load_whole(CLIPVisionModel, init_from)
        clip = load_whole(CLIPModel, self.clip).eval()
        wanted, found = clip.config.vision_config.hidden_size, encoder.config.hidden_size
        if wanted != found:
            raise ValueError(
                f"task.clip {self.clip} has pictures of {wanted} features and {init_from} of {found}: name the CLIP "
                "that it was fine-tuned from."
            )
        self.reader = load_reader(AutoImageProcessor, self.processor, self.clip)
        encoder.projection = clip.visual_projection
        encoder.register_buffer("head", self.make_head(clip, load_reader(AutoTokenizer, None, self.clip)))
        return encoder

    @torch.no_grad()
    def make_head(self, clip: Any, tokenizer: Any) -> torch.Tensor:
        """For each class the mean of the features of its texts, of length 1: `[classes, features]`."""
        rows = []
        for name in self.class_names:
            texts = [template.replace("{}", name) for template in self.templates]
            tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
            features = clip.text_projection(clip.text_model(**tokens).pooler_output)
            rows.append(F.normalize(F.normalize(features, dim=-1).mean(0), dim=-1))
        return torch.stack(rows)

    def classify(self, model: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Cosines of the pictures and the classes."""
        features = model.projection(model(pixel_values=pixels).pooler_output.to(model.head.dtype))
        cosines: torch.Tensor = F.normalize(features, dim=-1) @ model.head.T
        return cosines
