"""MRConv (arXiv 2408.09453) in the shared training loop: what its tasks have in common, and classification.

The tasks themselves are in `texts` and `signals`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import datasets
import numpy as np
import peft
import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from PIL import Image
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.data import default_collate
from transformers import PreTrainedConfig, PreTrainedModel

import hf_ext.fast.mrconv_gradients  # noqa: F401 (it enters itself: a training imports no more than its task)
from hf_ext.data.cells import class_name
from hf_ext.data.opening import class_names
from hf_ext.figures import new_figure, picture_of
from hf_ext.hub.checkpoints import split_revision
from hf_ext.mrconv.configuration_mrconv import MRConvConfig
from hf_ext.mrconv.modeling_layers_mrconv import MRConvPreTrainedModel
from hf_ext.mrconv.modeling_mrconv import MRConvForSequenceClassification
from hf_ext.training.classes import number_classes
from hf_ext.training.models import initialize_from, read_model_section, refuse_adapter
from hf_ext.training.task import Task

from ..errors import DataError
from .checks import Scores, all_or_none, column, require

Batch = dict[str, torch.Tensor]


@strict
@dataclass
class MRConvTask(Task):
    """
    Base of the MRConv tasks: building, parameter groups, batches.

    Args:
        kernel_learning_rate (`float`, *optional*):
            Peak learning rate of the kernels' parameters, which have no weight decay; the run's when not given.
    """

    kernel_learning_rate: float | None = None

    # Replaced on an instance, other models train on the same data: examples/mrconv/peers.py.
    config_class: ClassVar[type[PreTrainedConfig]] = MRConvConfig
    model_class: ClassVar[Callable[..., PreTrainedModel]]
    greater_is_better: ClassVar[bool] = True

    def __post_init__(self) -> None:
        # Fields of the configuration that `read_data` measured; a checkpoint brings its own.
        self.learned: dict[str, Any] = {}

    def validate_kernel_learning_rate(self) -> None:
        rate = self.kernel_learning_rate
        require(self, ("kernel_learning_rate", rate is None or 0 < rate < float("inf"), "a number above 0"))

    def model_fields(self) -> dict[str, Any]:
        """Fields of the configuration that the task decides, such as the number of tokens."""
        raise NotImplementedError

    def label_fields(self) -> dict[str, Any]:
        """Fields of the configuration that describe the answer; they replace those of a checkpoint."""
        return {}

    def encode(self, example: dict[str, Any]) -> Batch:
        """One example as tensors of fixed shapes: padded on the right, with a mask where lengths differ."""
        raise NotImplementedError

    def build_model(self, config: dict[str, Any], init_from: str | None) -> PreTrainedModel:
        decided = self.model_fields()
        names = {item.name for item in fields(self.config_class)} & set(self.config_class.__annotations__)
        preset, changes = read_model_section(config, names, init_from, self.presets, decided)
        changes = {**preset, **changes}
        if init_from is None:
            return self.model_class(self.config_class(**decided, **self.label_fields(), **self.learned, **changes))
        refuse_adapter(init_from)
        name, revision = split_revision(init_from)
        stored = self.config_class.from_pretrained(name, revision=revision)
        answer = {"problem_type": None, **self.label_fields()}
        settings = self.config_class.from_pretrained(name, revision=revision, **{**answer, **changes})
        other = (stored.problem_type, stored.id2label) != (settings.problem_type, settings.id2label)
        # Means and spreads that a checkpoint lacks, or has of another answer, become those of the data.
        for name in ("input_mean", "input_std", "target_mean", "target_std"):
            is_absent = getattr(settings, name, None) is None
            if name in self.learned if is_absent else other and name.startswith("target"):
                setattr(settings, name, self.learned.get(name))
        # What was set after the making is checked here, not first where the model is saved.
        settings.validate()
        different = {key: getattr(settings, key) for key, value in decided.items() if getattr(settings, key) != value}
        if different:
            told = f"{init_from} was made for other data: it has {different}, the section 'task' asks for"
            wanted = {key: decided[key] for key in different}
            raise DataError(f"{told} {wanted}. Change the section, or choose another checkpoint.")
        model = self.model_class(settings)
        initialize_from(model, init_from)
        return model

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        """Matrices decay; kernels have a learning rate of their own; alpha, norms and biases do not decay."""
        base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
        kernels: set[int] = set()
        if isinstance(base, MRConvPreTrainedModel) and not base.config.reparameterized:
            kernels = {id(base.get_parameter(name)) for name in base.kernel_parameters()}
        kinds = (nn.Linear, nn.Embedding, _ConvNd)
        matrices = {id(module.weight) for module in model.modules() if isinstance(module, kinds)}
        trained = [value for value in model.parameters() if value.requires_grad]
        rate = {} if self.kernel_learning_rate is None else {"lr": self.kernel_learning_rate}
        groups: list[dict[str, Any]] = [
            {"params": [value for value in trained if id(value) in matrices], "weight_decay": weight_decay},
            {"params": [value for value in trained if id(value) not in matrices | kernels], "weight_decay": 0.0},
            {"params": [value for value in trained if id(value) in kernels], "weight_decay": 0.0, **rate},
        ]
        return [group for group in groups if group["params"]]

    def training_sample(self, example: dict[str, Any], generator: np.random.Generator) -> Batch:
        return self.encode(example)

    def loss(self, model: nn.Module, batch: dict[str, Any], step: int) -> torch.Tensor:
        return super().loss(model, cut_padding(batch), step)

    def batch(self, model: nn.Module, examples: list[dict[str, Any]]) -> Batch:
        """Encoded examples as one batch on the model's device."""
        return join_samples(model, [self.encode(example) for example in examples])

    def save_model(self, model: nn.Module, state_dict: Batch, folder: Path) -> None:
        super().save_model(model, state_dict, folder)
        if (processor := self.processor()) is not None:
            processor.save_pretrained(folder)

    def processor(self) -> Any:
        """The tokenizer or the like that turns raw input into the model's; `None` where the model takes that."""
        return None

    def describe(self) -> dict[str, Any]:
        """The options of the task that change what a score means."""
        options = super().describe()
        left_out = ("kernel_learning_rate", "label_names", "label_smoothing")
        return {name: options[name] for name in options if name not in left_out}


def join_samples(model: nn.Module, samples: list[Batch]) -> Batch:
    """Samples as one batch on the model's device."""
    device = next(model.parameters()).device
    return {name: values.to(device) for name, values in cut_padding(default_collate(samples)).items()}


def cut_padding(batch: Batch) -> Batch:
    """Cuts a batch to its longest sample: examples are padded to one length, so that the loop can stack them."""
    # Names of a second document end in `_2`. Without masks nothing is cut.
    result = dict(batch)
    for suffix in ("", "_2"):
        if (mask := batch.get(f"attention_mask{suffix}")) is None:
            continue
        length = int(mask.sum(1).max())
        named = ("attention_mask", "input_ids", "input_values", "observed_mask", "labels")
        for name in (f"{name}{suffix}" for name in named):
            if name in batch and batch[name].shape[:2] == mask.shape:
                result[name] = batch[name][:, :length]
    return result


def predict(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's logits for a batch, in single precision, and the labels."""
    inputs = {name: values for name, values in batch.items() if name != "labels"}
    return model(**inputs).logits.float(), batch["labels"]


def sum_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each example, summed over its positions that have a label."""
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1)


def make_rows(**columns: torch.Tensor) -> Scores:
    """The scores of each example, of tensors with a value for each."""
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in values]


def number_names(names: list[str]) -> dict[str, Any]:
    return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}


@strict
@dataclass
class ClassificationTask(MRConvTask):
    """
    Classification of sequences of any kind.

    Args:
        num_labels (`int`, defaults to 10): Number of classes.
        label_names (`list[str]`, *optional*): Names of the classes, in the order of their numbers.
        label_column (`str`, defaults to `"label"`): Column of the class: its number, or one of the names.
        label_smoothing (`float`, defaults to 0.0): Share of each label that training spreads evenly over all classes.
    """

    num_labels: int = 10
    label_names: list[str] = field(default_factory=list)
    label_column: str = "label"
    label_smoothing: float | int = 0.0

    model_class: ClassVar[Callable[..., PreTrainedModel]] = MRConvForSequenceClassification
    metric_names: ClassVar[dict[str, str]] = {"accuracy": "accuracy", "loss": "cross entropy (nats)"}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.confusion: np.ndarray | None = None
        # The names by which data are matched, in the order of the numbers: training/classes.py.
        self.known_classes: list[str] = list(self.label_names)

    def loss(self, model: nn.Module, batch: dict[str, Any], step: int) -> torch.Tensor:
        """The model's own loss, or cross entropy with smoothed labels."""
        if not self.label_smoothing:
            return super().loss(model, batch, step)
        logits, labels = predict(model, cut_padding(batch))
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=self.label_smoothing)

    def validate_labels(self) -> None:
        are_names = len(set(self.label_names)) in (0, self.num_labels)
        require(
            self,
            ("label_smoothing", 0 <= self.label_smoothing < 1, "from 0 to below 1"),
            ("num_labels", self.num_labels >= 2, "at least 2"),
            ("label_names", are_names, f"{self.num_labels} (num_labels) different names"),
        )

    def label_fields(self) -> dict[str, Any]:
        if not (names := self.label_names or self.known_classes):
            return {"num_labels": self.num_labels}
        unnamed = (f"LABEL_{number}" for number in range(len(names), self.num_labels))
        return number_names([*names, *unnamed][: self.num_labels])

    def read_data(self, data: datasets.Dataset | datasets.IterableDataset) -> np.ndarray | None:
        """Names of the classes, where the data has them: evaluation data may have other numbers for them."""
        self.known_classes = class_names((data.features or {}).get(self.label_column)) or self.known_classes
        return super().read_data(data)

    def label(self, example: dict[str, Any]) -> torch.Tensor:
        return torch.tensor(self.read_class(column(example, self.label_column, "label_column")))

    def read_class(self, value: Any) -> int:
        """The number of a class that data name by its number or name."""
        value = value.item() if isinstance(value, np.generic) else value
        name = class_name(value)
        known = [number_classes(tuple(names)) for names in (self.label_names, self.known_classes)]
        # Classes that are called 1, 2, 3 are not those of these places.
        are_numbers = any(by_number for _, by_number in known)
        index: Any = next((places[name] for places, _ in known if name in places), None if are_numbers else value)
        is_decimal = isinstance(index, str) and not self.label_names and index.isdecimal()
        # A table with an empty cell, or of an array, has whole numbers as floats.
        if is_decimal or (isinstance(index, float) and index.is_integer()):
            index = int(index)
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < self.num_labels:
            names = ", ".join(self.label_names or self.known_classes)
            places = [] if are_numbers else [f"0 to {self.num_labels - 1}"]
            allowed = ", or ".join([*places, *[f"one of {names}"] * bool(names)])
            told = f"column {self.label_column!r} holds {value!r}; allowed: {allowed}"
            raise DataError(f"{told}. {self._advise(value)}.")
        return index

    def _advise(self, value: Any) -> str:
        if class_name(value) is None:
            return "Fill in the missing labels, or remove these examples"
        if isinstance(value, str | bool) or (isinstance(value, int) and value < 0):
            wanted = "List all names in" if self.label_names or self.known_classes else "Set task.num_labels and"
            return f"{wanted} task.label_names, such as ['{class_name(value)}', …]"
        if isinstance(value, int):
            return "Set task.num_labels to the number of classes"
        return "A label is a whole number or a name; use method mrconv-regression for fractions"

    def evaluate_batch(self, model: nn.Module, examples: list[dict[str, Any]], indices: list[int]) -> Scores:
        logits, labels = predict(model, self.batch(model, examples))
        losses = F.cross_entropy(logits, labels, reduction="none")
        return make_rows(prediction=logits.argmax(-1), label=labels, loss=losses)

    def summarize(self, rows: Scores) -> dict[str, float]:
        """Accuracy and mean cross entropy; the confusions are kept for the picture."""
        predictions, labels = (np.array([int(row[name]) for row in rows]) for name in ("prediction", "label"))
        self.confusion = np.zeros((self.num_labels, self.num_labels), dtype=np.int64)
        np.add.at(self.confusion, (labels, predictions), 1)
        accuracy = float(np.mean(predictions == labels))
        return all_or_none({"accuracy": accuracy, "loss": super().summarize(rows)["loss"]})

    def sample_picture(self, model: nn.Module, examples: list[dict[str, Any]]) -> Image.Image | None:
        return None if self.confusion is None else draw_confusion(self.confusion, self.label_names)


def draw_confusion(confusion: np.ndarray, names: list[str]) -> Image.Image:
    count = len(confusion)
    side = min(9.0, 2.5 + 0.45 * count)
    figure = new_figure(side, side)
    axis = figure.subplots()
    shares = confusion / np.maximum(1, confusion.sum(1, keepdims=True))
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axis.set(xlabel="predicted", ylabel="true")
    if count <= 40:
        labels = names or [str(index) for index in range(count)]
        axis.set_xticks(range(count), labels, rotation=90, fontsize=8)
        axis.set_yticks(range(count), labels, fontsize=8)
    if count <= 20:
        for row, column in zip(*np.nonzero(confusion), strict=True):
            shade = "white" if shares[row, column] > 0.5 else "black"
            axis.text(column, row, confusion[row, column], ha="center", va="center", color=shade, fontsize=7)
    return picture_of(figure)
