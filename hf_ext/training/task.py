"""What a method tells the shared loop."""

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import datasets
import numpy as np
import torch
from PIL import Image


class Task(Protocol):
    """
    What a method tells the shared loop.

    Attributes:
        pipeline_tag (`str`): The Hub's name of the task, for results and cards.
        metric_names (`dict[str, str]`): Metrics of an evaluation with their protocol in words; the first decides which
            state is the best.
        greater_is_better (`bool`): Direction of that metric.
        eval_batch_size (`int`): Examples that `evaluate_batch` gets at once.
    """

    pipeline_tag: str
    metric_names: dict[str, str]
    greater_is_better: bool
    eval_batch_size: int

    def build_model(self, config: dict[str, Any], init_from: str | None) -> torch.nn.Module:
        """Builds the model from the `model` section and, where given, a checkpoint's weights."""

    def parameter_groups(self, model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        """Groups for AdamW, in which a method sets its own decay, learning rate or betas."""

    def training_sample(self, example: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        """Turns one example into tensors; all randomness comes from the generator."""

    def loss(self, model: torch.nn.Module, batch: dict[str, Any], step: int) -> torch.Tensor:
        """Mean loss of a batch, a scalar."""

    def evaluate_batch(
        self, model: torch.nn.Module, examples: list[dict[str, Any]], indices: list[int]
    ) -> list[dict[str, float]]:
        """Scores of each example. Randomness, such as added noise, depends on the index alone."""

    def summarize(self, rows: list[dict[str, float]]) -> dict[str, float]:
        """Metrics of the data set from the scores of its examples."""

    def sample_picture(self, model: torch.nn.Module, examples: list[dict[str, Any]]) -> Image.Image | None:
        """A picture of what the model does, or `None`."""

    def save_model(self, model: torch.nn.Module, state_dict: dict[str, torch.Tensor], folder: Path) -> None:
        """Writes a folder that `from_pretrained` loads, with processors."""

    def describe(self) -> dict[str, Any]:
        """What the scores depend on, such as a degradation; for results and cards."""


@runtime_checkable
class ReadsData(Protocol):
    """A task that looks at the training data before its model is built."""

    def read_data(self, data: datasets.Dataset | datasets.IterableDataset) -> np.ndarray | None:
        """Notes what it needs, such as names of classes. A number for each example where batches must not mix them."""
