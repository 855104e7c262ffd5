"""MRConv on sequences of numbers, such as sensors: their classes and values, and classes of positions."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedModel

from hf_ext.data.cells import is_number
from hf_ext.data.files import UNUSABLE
from hf_ext.data.sequence_files import UNLABELLED
from hf_ext.mrconv.modeling_mrconv import MRConvForSequenceClassification
from hf_ext.mrconv.modeling_positions_mrconv import MRConvForTokenClassification

from ..distributed import scan_once
from ..errors import DataError
from .checks import Scores, all_or_none, column, require
from .sequences import Batch, ClassificationTask, MRConvTask, make_rows, number_names, predict, sum_losses

# Examples that means and spreads are measured on, evenly spread over the data; of a stream the first.
_MEASURED = 10_000
# Models compute in float32.
_LARGEST = float(np.finfo(np.float32).max)
# What helps where a column of labels is missing.
_ADVICE = f". {UNLABELLED.rstrip('.')}"


@strict
@dataclass
class SeriesTask(MRConvTask):
    """
    Base of tasks on sequences of numbers. The model takes the numbers in their units, and normalises each channel by
    its mean and standard deviation in the training data.

    Args:
        columns (`list[str]`, defaults to `["values"]`):
            Columns of the channels: each a list of numbers, one for each position, or of lists of the same size.
        num_channels (`int`, *optional*): Number of all channels, if a column holds several; else one per column.
        max_length (`int`, defaults to 1024): Most positions of a sequence, the rest is cut; also the longest kernel.
    """

    columns: list[str] = field(default_factory=lambda: ["values"])
    num_channels: int | None = None
    max_length: int = 1024

    def validate_columns(self) -> None:
        count = len(self.columns)
        require(
            self,
            ("max_length", self.max_length >= 1, "at least 1"),
            ("columns", 0 < count == len(set(self.columns)), "different names, at least one"),
            ("num_channels", self.channels >= count, f"no fewer than the {count} columns"),
        )

    def label_fields(self) -> dict[str, Any]:
        return {**super().label_fields(), "input_columns": self.columns}

    @property
    def channels(self) -> int:
        return len(self.columns) if self.num_channels is None else self.num_channels

    def read_data(self, data: datasets.Dataset | datasets.IterableDataset) -> np.ndarray | None:
        self.learned = measure("input", self.read_values, data)
        return super().read_data(data)

    def read_values(self, example: dict[str, Any]) -> np.ndarray:
        """The numbers of an example, float64 `[length, channels]`; NaN where one is missing."""
        values = read_columns(example, self.columns)
        if values.shape[1] != self.channels:
            raise DataError(
                f"{_place(example)}columns {', '.join(self.columns)} hold {values.shape[1]} channels, the model takes "
                f"{self.channels}: set task.columns or task.num_channels."
            )
        return values

    def model_fields(self) -> dict[str, Any]:
        return {"input_size": self.channels, "max_position_embeddings": self.max_length}

    def encode(self, example: dict[str, Any], numbers: np.ndarray | None = None) -> Batch:
        """The numbers of an example, or a window `[length, channels]` of them, with their mask and the labels."""
        numbers = self.read_values(example)[: self.max_length] if numbers is None else numbers
        observed = torch.from_numpy(~np.isnan(numbers)).long()
        values = torch.from_numpy(np.nan_to_num(numbers, nan=0.0)).float()
        missing = self.max_length - len(values)
        return {
            "input_values": F.pad(values, (0, 0, 0, missing)),
            "attention_mask": (torch.arange(self.max_length) < len(values)).long(),
            # What is missing takes the mean of its channel.
            "observed_mask": F.pad(observed, (0, 0, 0, missing)),
            "labels": self.read_labels(example),
        }

    def read_labels(self, example: dict[str, Any]) -> torch.Tensor:
        """The labels of an example; those of positions are padded to `max_length`."""
        raise NotImplementedError


@strict
@dataclass
class SeriesClassificationTask(SeriesTask, ClassificationTask):
    """
    Classification of sequences of numbers with [`MRConvForSequenceClassification`].

    Args:
        deltas (`bool`, defaults to `False`):
            Also give the model the change of each channel from step to step, which shows fine detail of smooth series.
        crop (`float`, defaults to 0.0): Largest share of a series that each training sample cuts from its ends at
            random. For series whose class does not depend on the time of an event.
    """

    deltas: bool = False
    crop: float | int = 0.0

    pipeline_tag: ClassVar[str] = "time-series-classification"

    def validate_crop(self) -> None:
        require(self, ("crop", 0 <= self.crop < 1, "at least 0 and below 1"))

    def read_data(self, data: datasets.Dataset | datasets.IterableDataset) -> None:
        super().read_data(data)
        if self.deltas:
            changes = measure("input_delta", lambda example: np.diff(self.read_values(example), axis=0), data)
            self.learned |= {name: value for name, value in changes.items() if name == "input_delta_std"}

    def training_sample(self, example: dict[str, Any], generator: np.random.Generator) -> Batch:
        numbers = self.read_values(example)
        kept = max(1, round(len(numbers) * float(generator.uniform(1 - self.crop, 1))))
        start = int(generator.integers(len(numbers) - kept + 1))
        window = numbers[start : start + kept][: self.max_length]
        # A window without any number teaches nothing.
        return self.encode(example, None if np.isnan(window).all() else window)

    def read_labels(self, example: dict[str, Any]) -> torch.Tensor:
        return torch.tensor(self.read_class(column(example, self.label_column, "label_column", _ADVICE)))


@strict
@dataclass
class SeriesRegressionTask(SeriesTask):
    """
    Regression of values, such as a rate, from sequences of numbers, with [`MRConvForSequenceClassification`]. Outputs
    are in the targets' units; errors are in standard deviations of each target in the training data.

    Args:
        target_columns (`list[str]`, defaults to `["target"]`): Columns of the values, a number for each sequence.
    """

    target_columns: list[str] = field(default_factory=lambda: ["target"])

    model_class: ClassVar[Callable[..., PreTrainedModel]] = MRConvForSequenceClassification
    pipeline_tag: ClassVar[str] = "time-series-regression"
    metric_names: ClassVar[dict[str, str]] = {
        "mae": "mean absolute error, in spreads of each target",
        "rmse": "root of the mean squared error, in spreads of each target",
        "mae_of_mean": "mean absolute error of always saying the mean of the training data",
    }
    greater_is_better: ClassVar[bool] = False

    def validate_targets(self) -> None:
        are_names = 0 < len(self.target_columns) == len(set(self.target_columns))
        require(self, ("target_columns", are_names, "different names, at least one"))

    def label_fields(self) -> dict[str, Any]:
        return {**super().label_fields(), "problem_type": "regression", **number_names(self.target_columns)}

    def read_data(self, data: datasets.Dataset | datasets.IterableDataset) -> None:
        super().read_data(data)
        self.learned |= measure("target", self.read_targets, data)

    def read_targets(self, example: dict[str, Any]) -> np.ndarray:
        """The values that are to be found, `[1, targets]`."""
        targets = []
        for name in self.target_columns:
            part = np.atleast_1d(column(example, name, "target_columns", _ADVICE))
            if part.shape != (1,) or not is_number(part[0]) or not abs(float(part[0])) <= _LARGEST:
                told = f"{_place(example)}column {name!r} holds {part.tolist()!r:.80}"
                raise DataError(f"{told}; a target is one number, at most 3.4e38. Set task.target_columns.")
            targets.append(float(part[0]))
        return np.array([targets])

    def read_labels(self, example: dict[str, Any]) -> torch.Tensor:
        return torch.from_numpy(self.read_targets(example)[0]).float()

    def evaluate_batch(self, model: nn.Module, examples: list[dict[str, Any]], indices: list[int]) -> Scores:
        """Errors of the model, and of the mean of the training data, averaged over the targets of each example."""
        logits, labels = (values.double() for values in predict(model, self.batch(model, examples)))
        config: Any = model.config
        mean, std = (labels.new_tensor(values) for values in (config.target_mean or [0.0], config.target_std or [1.0]))
        error, naive = (logits - labels) / std, (mean - labels) / std
        return make_rows(mae=error.abs().mean(1), mse=error.square().mean(1), mae_of_mean=naive.abs().mean(1))

    def summarize(self, rows: Scores) -> dict[str, float]:
        means = super().summarize(rows)
        return {"mae": means["mae"], "rmse": float(np.sqrt(means["mse"])), "mae_of_mean": means["mae_of_mean"]}


@strict
@dataclass
class PositionsTask(SeriesTask, ClassificationTask):
    """
    Classes at every position of sequences of numbers, with [`MRConvForTokenClassification`].

    Args:
        label_column (`str`, defaults to `"label"`):
            Column of the classes: numbers or names, one for each position; empty or -100 is no class.
    """

    model_class: ClassVar[Callable[..., PreTrainedModel]] = MRConvForTokenClassification
    pipeline_tag: ClassVar[str] = "token-classification"
    metric_names: ClassVar[dict[str, str]] = {
        "macro_f1": "mean F1 of the classes over all positions",
        "accuracy": "share of the positions",
        "accuracy_of_largest": "that of always saying the class that is most frequent in this data",
        "loss": "cross entropy of a position (nats)",
    }

    def read_labels(self, example: dict[str, Any]) -> torch.Tensor:
        """The class of each position, -100 at those without one and at padding."""
        given = np.asarray(column(example, self.label_column, "label_column", _ADVICE))
        count = len(self.read_values(example))
        if given.shape != (count,):
            told = f"column {self.label_column!r} has the shape {given.shape}"
            raise DataError(f"{_place(example)}{told}; expected a class for each of the {count} positions.")
        labels = torch.full((self.max_length,), -100)
        # A sequence has many positions and few classes.
        for value in set(given.tolist()):
            if value in ("", None, -100) or value != value:
                continue
            try:
                number = self.read_class(value)
            except ValueError as error:
                raise DataError(f"{_place(example, int((given == value).argmax()))}{error}") from error
            labels[: len(given)][torch.from_numpy(given == value)[: self.max_length]] = number
        return labels

    def count_targets(self, batch: dict[str, Any]) -> torch.Tensor:
        return (batch["labels"] != -100).sum()

    def evaluate_batch(self, model: nn.Module, examples: list[dict[str, Any]], indices: list[int]) -> Scores:
        """For each example how often each class was taken for each, and the summed cross entropy."""
        logits, labels = predict(model, self.batch(model, examples))
        rows = []
        for truth, found, loss in zip(labels, logits.argmax(-1), sum_losses(logits, labels).tolist(), strict=True):
            kept = truth != -100
            pairs = torch.bincount(truth[kept] * self.num_labels + found[kept], minlength=self.num_labels**2)
            rows.append({"nats": loss, **{str(pair): float(count) for pair, count in enumerate(pairs.tolist())}})
        return rows

    def summarize(self, rows: Scores) -> dict[str, float]:
        """F1 and accuracy over all positions; the confusions are kept for the picture."""
        pairs = [sum(row[str(pair)] for row in rows) for pair in range(self.num_labels**2)]
        table = np.array(pairs, dtype=np.int64).reshape(self.num_labels, self.num_labels)
        self.confusion = table
        hits, count = np.diag(table), max(1, table.sum())
        # A class that neither occurs nor is said has no F1.
        used = table.sum(0) + table.sum(1)
        scores = 2 * hits[used > 0] / used[used > 0]
        found = {
            "macro_f1": float(scores.mean()) if len(scores) else 0.0,
            "accuracy": float(hits.sum() / count),
            "accuracy_of_largest": float(table.sum(1).max() / count),
            "loss": float(sum(row["nats"] for row in rows) / count),
        }
        return all_or_none(found)


def read_columns(example: dict[str, Any], names: list[str], option: str = "task.columns") -> np.ndarray:
    """Columns of numbers, which an option names, as float64 `[length, channels]`, NaN where one is missing."""
    parts = [_read_numbers(example, name, option) for name in names]
    lengths = {name: len(part) for name, part in zip(names, parts, strict=True)}
    if len(set(lengths.values())) > 1 or not len(parts[0]):
        raise DataError(f"{_place(example)}columns must have one length, at least 1; got {lengths}.")
    values = np.concatenate(parts, axis=1)
    # A channel without any takes its mean.
    if np.isnan(values).all():
        place = f"{_place(example)}column {', '.join(map(repr, names))}"
        raise DataError(f"{place} contains no numbers: remove the sequence.")
    return values


def _read_numbers(example: dict[str, Any], name: str, option: str) -> np.ndarray:
    given = column(example, name, "columns")
    try:
        # Of lists of lists in arrow comes an array of arrays; the parts of a text are no numbers of a series.
        whole = isinstance(given, str | bytes | dict) or (isinstance(given, np.ndarray) and given.dtype != object)
        values = np.array(given if whole else list(given), dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        values = np.array(0.0)
    if values.ndim not in (1, 2):
        cells = list(given) if isinstance(given, list | np.ndarray) else []
        bad = next((place for place, cell in enumerate(cells) if np.ndim(cell) == 0 and not is_number(cell)), None)
        held = given.item() if isinstance(given, np.generic) else given if bad is None else cells[bad]
        told = f"{_place(example, bad)}column {name!r} holds {held!r:.60}; expected a number for each position"
        raise DataError(f"{told}, or lists of equal size. Correct the data, or set {option}.")
    values = values[:, None] if values.ndim == 1 else values
    large = np.abs(values) > _LARGEST
    if large.any():
        place = _place(example, int(large.any(1).argmax()))
        told = f"{place}column {name!r} contains an infinite number, or one beyond 3.4e38"
        raise DataError(f"{told}: leave the cell empty if the value is unknown.")
    return values


@scan_once
def measure(
    name: str, read: Callable[[dict[str, Any]], np.ndarray], data: datasets.Dataset | datasets.IterableDataset
) -> dict[str, Any]:
    """Mean and spread of what is read of each example, `[length, channels]`, as fields of a configuration."""
    if isinstance(data, datasets.IterableDataset):
        chosen: Iterable[dict[str, Any]] = data.take(_MEASURED)
    else:
        places = np.unique(np.linspace(0, max(0, len(data) - 1), min(_MEASURED, len(data))).astype(int))
        chosen = (data[int(place)] for place in places)
    count, mean, squares = np.zeros(1), np.zeros(1), np.zeros(1)
    for example in chosen:
        try:
            values = read(example)
        except UNUSABLE:
            # The training, which may leave some out, says which and why.
            continue
        # Sums of squares around the mean so far: exact where the mean is large. Missing numbers count for nothing.
        found = (~np.isnan(values)).sum(0)
        known = np.maximum(found, 1)
        own = np.nansum(values, 0) / known
        between = np.where(found > 0, own - mean, 0.0)
        total = np.maximum(1, count + found)
        squares = squares + np.nansum((values - own) ** 2, 0) + between**2 * count * found / total
        mean, count = mean + between * found / total, count + found
    if not count.any():
        return {}
    std = np.sqrt(squares / np.maximum(1, count))
    # What never changes has no spread.
    is_flat = std <= 1e-6 * np.abs(mean)
    if (lost := is_flat & (std > 1e-12 * np.abs(mean))).any():
        place = int(lost.argmax())
        raise DataError(
            f"{name} {place + 1} varies by {std[place]:.3g} around {mean[place]:.3g}, which float32 numbers cannot "
            "tell: subtract a constant from the column, or leave it out."
        )
    std = np.where(is_flat, 1.0, std)
    return {f"{name}_mean": mean.tolist(), f"{name}_std": std.tolist()}


def _place(example: dict[str, Any], position: int | None = None) -> str:
    """Location of an example or of a position in it: for a table, file and line."""
    file = example.get("file")
    path = file["path"] if isinstance(file, dict) else None
    if position is None:
        return "" if path is None else f"{path}: "
    row = position + int(example.get("first_row", 0))
    if path is None or not str(path).endswith((".csv", ".tsv")):
        return f"{'' if path is None else f'{path}, '}position {row}: "
    # After the line of names.
    return f"{path}, line {row + 2}: "
