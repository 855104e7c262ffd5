"""Interface between a method and the training loop."""

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import datasets
import numpy as np
import torch
from accelerate.utils import send_to_device
from PIL import Image
from torch.utils.data import default_collate
from transformers import PreTrainedModel


class Task:
    """
    Interface between a method and the training loop. A task of your own overrides `build_model` and
    `training_sample`; the other methods have defaults for transformers models that return a loss, and an evaluation
    that averages that loss.

    A task is usually a dataclass with `huggingface_hub.dataclasses.strict`: its fields are then the keys of the
    section `task` of a run's YAML file.

    Attributes:
        pipeline_tag (`str`): The Hub's name of the task, for results and cards.
        metric_names (`dict[str, str]`): Metrics of an evaluation and descriptions of their protocols; the first
            selects the best state.
        greater_is_better (`bool`): Direction of that metric.
        eval_batch_size (`int`): Number of examples per call of `evaluate_batch`.
        config_class (`type`, *optional*): The class that documents the keys of the section `model`.
        presets (`dict[str, dict]`): Values of that section by name, for `model.preset`.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch
        >>> from hf_ext import MRConvConfig, MRConvForCausalLM
        >>> from hf_ext.training import Task
        >>> @dataclass
        ... class NumbersTask(Task):
        ...     length: int = 8
        ...     def build_model(self, config, init_from):
        ...         return MRConvForCausalLM(MRConvConfig(vocab_size=10, **config))
        ...     def training_sample(self, example, generator):
        ...         tokens = torch.tensor(example["tokens"][: self.length])
        ...         return {"input_ids": tokens, "labels": tokens}
        >>> NumbersTask(length=2).training_sample({"tokens": [3, 1, 4]}, None)["input_ids"]
        tensor([3, 1])
    """

    pipeline_tag: ClassVar[str] = "other"
    metric_names: ClassVar[dict[str, str]] = {"loss": "mean loss"}
    greater_is_better: ClassVar[bool] = False
    eval_batch_size: ClassVar[int] = 32
    config_class: ClassVar[type | None] = None
    presets: ClassVar[dict[str, dict[str, Any]]] = {}

    def build_model(self, config: dict[str, Any], init_from: str | None) -> torch.nn.Module:
        """Builds the model from the `model` section and, where given, a checkpoint's weights."""
        raise NotImplementedError

    def training_sample(self, example: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        """Turns one example into tensors; all randomness comes from the generator."""
        raise NotImplementedError

    def read_data(self, data: datasets.Dataset | datasets.IterableDataset) -> np.ndarray | None:
        """
        Looks at the training data before the model is built, for instance for the names of classes.

        Returns a number for each example where a batch must not mix examples of different numbers, otherwise `None`.
        """
        return None

    def changes_beside(self, init_from: str) -> list[str]:
        """
        Changes of this training beside the configuration of the model of `init_from`, such as a schedule of noise,
        each in a few words. An adapter, which does not save them, is refused.
        """
        return []

    def parameter_groups(self, model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        """Groups for AdamW: matrices and kernels decay, biases and norms do not."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return [
            {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": weight_decay},
            {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
        ]

    def loss(self, model: torch.nn.Module, batch: dict[str, Any], step: int) -> torch.Tensor:
        """Mean loss of a batch, a scalar: the model's own."""
        return cast(torch.Tensor, model(**batch).loss)

    def count_targets(self, batch: dict[str, Any]) -> torch.Tensor | None:
        """
        The number of values that the loss of a batch averages, where batches of equal size differ in it, such as the
        predicted tokens of texts. The gradient of a step is then that of the mean over all of them, however they are
        split into processes and passes. `None`: every batch counts the same.
        """
        return None

    def evaluate_batch(
        self, model: torch.nn.Module, examples: list[dict[str, Any]], indices: list[int]
    ) -> list[dict[str, float]]:
        """Scores of each example. Randomness, such as added noise, depends on the index alone."""
        device = next(model.parameters()).device
        samples = [
            self.training_sample(example, np.random.default_rng((5, index)))
            for example, index in zip(examples, indices, strict=True)
        ]
        batches = [send_to_device(default_collate([sample]), device) for sample in samples]
        return [{"loss": float(self.loss(model, batch, 0))} for batch in batches]

    def summarize(self, rows: list[dict[str, float]]) -> dict[str, float]:
        """Metrics of the data set from the scores of its examples: their means."""
        return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}

    def sample_picture(self, model: torch.nn.Module, examples: list[dict[str, Any]]) -> Image.Image | None:
        """A picture of what the model does, or `None`."""
        return None

    def save_model(self, model: torch.nn.Module, state_dict: dict[str, torch.Tensor], folder: Path) -> None:
        """Writes a folder that `from_pretrained` loads, with processors."""
        cast(PreTrainedModel, model).save_pretrained(folder, state_dict=state_dict)

    def describe(self) -> dict[str, Any]:
        """The settings that scores depend on, such as a degradation, for results and cards: fields of a dataclass."""
        return {item.name: getattr(self, item.name) for item in fields(self)} if is_dataclass(self) else {}
