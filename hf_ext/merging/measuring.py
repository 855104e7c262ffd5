"""Statistics of the tasks' data for merge methods: a safetensors file for each task.

`fisher`: for each tensor of the task's model the mean squared gradient, in its shape. `gram`: for each weight of a
linear layer the mean over examples of XᵀX, `[inputs, inputs]`. `__metadata__` tells the kind, and in `inputs_first`
which weights are `[inputs, outputs]`, as those of GPT-2 are. A plan checks the files, the engine reads them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from safetensors.torch import save
from torch import nn
from torch.utils.data import default_collate
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from ..distributed import Ranks
from ..files import require_new, whole_file
from ..progress import progress
from .configuration import whole_number

if TYPE_CHECKING:
    from ..training.task import Task

Statistics = dict[str, torch.Tensor]


def write_statistics(
    source: str, config: Path, kind: str, out: Path, *, examples: int = 256, overrides: list[str] | None = None
) -> dict[str, Any]:
    """Measures a fine-tune on `data.train` of the YAML file of its training, and writes what `statistics` of a merge
    reads. `kind` is `"fisher"` or `"gram"`, `overrides` are `--field value` words."""
    task, data = open_task(config, "data.train", overrides or [])
    return save_statistics(task, source, data, kind, out, examples=examples)


def open_task(config: Path, part: str, overrides: Sequence[str] = ()) -> tuple[Task, Any]:
    """The task of the YAML file of a training, and a part of its data: `data.train`, or the first of `data.eval`."""
    from ..data.opening import open_source
    from ..training.methods import build_task, read_arguments

    arguments = read_arguments(config, list(overrides), output_dir="")
    data = arguments.data_arguments
    if part == "data.eval" and not data.eval_sources:
        raise ValueError(f"{config} has no data.eval section: add one with the examples to learn from.")
    source = next(iter(data.eval_sources.values())) if part == "data.eval" else data.require_train_source()
    return build_task(arguments), open_source(source, part)


def save_statistics(
    task: Task, source: str, data: Any, kind: str, out: Path, *, examples: int = 256
) -> dict[str, Any]:
    """[`write_statistics`] with a task of one's own and its training data."""
    from ..training.models import adapter_base, build_model, pin_revision

    examples = whole_number("examples", examples)
    require_new(out)
    pinned = pin_revision(source)
    if adapter_base(pinned) is not None:
        raise ValueError(f"{source} is an adapter; statistics are of full weights: merge it into its base first.")
    model = build_model(task, {}, pinned).to(Ranks().own_device())
    samples = read_samples(task, data, examples)
    found, count = measure(task, model, progress(samples, "measuring", total=examples, leave=False), kind)
    conv = {f"{name}.weight": module.weight for name, module in model.named_modules() if isinstance(module, Conv1D)}
    found, transposed = name_as_saved(model, found), [*name_as_saved(model, conv)]
    metadata = {"kind": kind, "examples": str(count), "inputs_first": json.dumps(transposed if kind == "gram" else [])}
    with whole_file(out) as file:
        file.write(save(found, metadata))
    return {"path": str(out), "kind": kind, "examples": count, "tensors": len(found)}


def name_as_saved(model: nn.Module, tensors: Statistics) -> Statistics:
    """Tensors by the names that a checkpoint has: transformers renames those of a ViT, for instance, on loading."""
    return revert_weight_conversion(model, tensors) if isinstance(model, PreTrainedModel) else tensors


def read_samples(task: Task, data: Any, examples: int) -> Iterator[dict[str, Any]]:
    """Samples of examples that are drawn without repetition; the first ones of a stream."""
    if hasattr(data, "__len__"):
        data = data.select(np.random.default_rng(0).permutation(len(data))[:examples])
    for index, example in enumerate(data.take(examples)):
        yield task.training_sample(example, np.random.default_rng((7, index)))


def measure(
    task: Task, model: nn.Module, samples: Iterable[dict[str, Any]], kind: str
) -> tuple[dict[str, torch.Tensor], int]:
    """The statistics of a model on samples, on the CPU in float32, and of how many samples."""
    model.eval()
    device, count = next(model.parameters()).device, 0
    measuring = _square_gradients if kind == "fisher" else _sum_grams
    # fixes random draws of the loss, such as time steps
    with torch.random.fork_rng(), measuring(model) as (found, after):
        for sample in samples:
            count += 1
            torch.manual_seed(count)
            with torch.set_grad_enabled(kind == "fisher"):
                loss = task.loss(model, send_to_device(default_collate([sample]), device), 0)
            after(loss)
    if count == 0:
        raise ValueError("the training data is empty: check data.train.path and data.train.split.")
    return {name: (values / count).cpu().contiguous() for name, values in found.items()}, count


@contextlib.contextmanager
def _square_gradients(model: nn.Module) -> Iterator[tuple[Statistics, Any]]:
    """Sums of squared gradients by the names of a checkpoint; of what has no gradient they stay 0."""
    # with the names of tied tensors: which one a checkpoint has is not known here
    named = model.state_dict(keep_vars=True)
    found = {
        name: torch.zeros_like(value, dtype=torch.float32)
        for name, value in named.items()
        if value.is_floating_point()
    }

    def after(loss: torch.Tensor) -> None:
        model.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        for name, values in found.items():
            if named[name].grad is not None:
                values += named[name].grad.float() ** 2

    yield found, after
    model.zero_grad(set_to_none=True)


@contextlib.contextmanager
def _sum_grams(model: nn.Module) -> Iterator[tuple[Statistics, Any]]:
    """Sums of XᵀX by the names of the weights of linear layers."""
    linear = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D)}
    found: Statistics = {}
    with contextlib.ExitStack() as hooks:
        for name, module in linear.items():
            size = module.in_features if isinstance(module, nn.Linear) else module.weight.shape[0]
            found[f"{name}.weight"] = total = torch.zeros(size, size, device=module.weight.device)

            def add(module: nn.Module, inputs: tuple[torch.Tensor, ...], total: torch.Tensor = total) -> None:
                rows = inputs[0].detach().float().flatten(0, -2)
                total.addmm_(rows.T, rows)

            hooks.enter_context(module.register_forward_pre_hook(add))
        yield found, lambda loss: None
