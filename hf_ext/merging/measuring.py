"""Measurements on the tasks' data: statistics for merge methods, a safetensors file for each task, and AdaMerging.

`fisher`: for each tensor of the task's model the mean squared gradient, in its shape. `gram`: for each weight of a
linear layer the mean over examples of XᵀX, `[inputs, inputs]`. `__metadata__` tells the kind, and in `inputs_first`
which weights are `[inputs, outputs]`, as those of GPT-2 are. A plan checks the files, the engine reads them.

AdaMerging (Yang et al., https://arxiv.org/abs/2310.02575) learns the weights of task arithmetic without labels: those
with which each task's head is surest of its answers. The entropy of its predictions, on examples like those it will
see, falls. Base and fine-tunes are in memory; the result is a configuration of a merge.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import send_to_device
from safetensors.torch import save
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import default_collate
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from ..distributed import Ranks
from ..errors import UsageError
from ..files import check_places, require_new, whole_file
from ..progress import progress
from .configuration import MergeConfig, load_config, whole_number
from .plan import Plan, make_plan, resolve_plan

if TYPE_CHECKING:
    import datasets

    from ..training.task import Task

Tensors = dict[str, Tensor]
START = 0.3


def write_statistics(
    source: str, config: Path, kind: str, out: Path, *, examples: int = 256, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Measures a fine-tune on `data.train` of the YAML file of its training, and writes what `statistics` of a merge
    reads. `kind` is `"fisher"` or `"gram"`, `overrides` are `--field value` words."""
    task, data = open_task(config, "data.train", overrides)
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
    """[`write_statistics`] of a task with its training data: examples are drawn once, of a stream the first ones."""
    from ..training.classes import match_classes
    from ..training.models import adapter_base, load_trained, pin_revision

    examples = whole_number("examples", examples)
    require_new(out)
    check_places([out])
    pinned = pin_revision(source)
    if adapter_base(pinned) is not None:
        raise ValueError(f"{source} is an adapter; statistics are of full weights: merge it into its base first.")
    model = load_trained(task, pinned).to(Ranks().own_device())
    data = match_classes(data, task, "the data to measure with")
    if hasattr(data, "__len__"):
        data = data.select(np.random.default_rng(0).permutation(len(data))[:examples])
    drawn = enumerate(data.take(examples))
    samples = (task.training_sample(example, np.random.default_rng((7, index))) for index, example in drawn)
    found, count = measure(task, model, progress(samples, "measuring", total=examples, leave=False), kind)
    conv = {f"{name}.weight": module.weight for name, module in model.named_modules() if isinstance(module, Conv1D)}
    found, transposed = name_as_saved(model, found), [*name_as_saved(model, conv)]
    metadata = {"kind": kind, "examples": str(count), "inputs_first": json.dumps(transposed if kind == "gram" else [])}
    with whole_file(out) as file:
        file.write(save(found, metadata))
    return {"path": str(out), "kind": kind, "examples": count, "tensors": len(found)}


def name_as_saved(model: nn.Module, tensors: Tensors) -> Tensors:
    """Tensors by the names that a checkpoint has: transformers renames those of a ViT, for instance, on loading."""
    return revert_weight_conversion(model, tensors) if isinstance(model, PreTrainedModel) else tensors


def measure(task: Task, model: nn.Module, samples: Iterable[dict[str, Any]], kind: str) -> tuple[Tensors, int]:
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
def _square_gradients(model: nn.Module) -> Iterator[tuple[Tensors, Any]]:
    """Sums of squared gradients by the names of a checkpoint; of what has no gradient they stay 0."""
    # with the names of tied tensors: which one a checkpoint has is not known here
    named = {name: value for name, value in model.state_dict(keep_vars=True).items() if value.is_floating_point()}
    found = {name: torch.zeros_like(value, dtype=torch.float32) for name, value in named.items()}

    def after(loss: Tensor) -> None:
        model.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        for name, values in found.items():
            if named[name].grad is not None:
                values += named[name].grad.float() ** 2

    yield found, after
    model.zero_grad(set_to_none=True)


@contextlib.contextmanager
def _sum_grams(model: nn.Module) -> Iterator[tuple[Tensors, Any]]:
    """Sums of XᵀX by the names of the weights of linear layers."""
    linear = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D)}
    found: Tensors = {}
    with contextlib.ExitStack() as hooks:
        for name, module in linear.items():
            size = module.in_features if isinstance(module, nn.Linear) else module.weight.shape[0]
            found[f"{name}.weight"] = total = torch.zeros(size, size, device=module.weight.device)

            def add(module: nn.Module, inputs: tuple[Tensor, ...], total: Tensor = total) -> None:
                rows = inputs[0].detach().float().flatten(0, -2)
                total.addmm_(rows.T, rows)

            hooks.enter_context(module.register_forward_pre_hook(add))
        yield found, lambda loss: None


class WeightedMerge(nn.Module):
    """The tasks' models, whose merged tensors are W_0 + Σ_t w_t τ_t, with a weight for each task and tensor."""

    def __init__(self, plan: Plan, models: list[nn.Module], device: torch.device | str = "cpu") -> None:
        super().__init__()
        # only the weights are parameters: the models are not registered as submodules
        self.models = [model.requires_grad_(False).eval().to(device) for model in models]
        self.rows, self.base, self.vectors = plan.merged_rows, [], []
        held = [model.state_dict() for model in models]
        # the model's own name of each tensor of its checkpoint
        self.own_names = [
            {saved: own for own, value in tensors.items() for saved in name_as_saved(model, {own: value})}
            for model, tensors in zip(models, held, strict=True)
        ]
        for row in self.rows:
            base = plan.base.read(row.name).float().to(device)
            vectors = [torch.zeros_like(base) for _ in plan.tasks]
            for place, name in row.members.items():
                own = held[place].get(self.own_names[place].get(name, ""))
                if own is None or own.shape != base.shape:
                    kind = type(models[place]).__name__
                    raise ValueError(f"{kind} lacks tensor {name!r} of its checkpoint, or has it in another shape.")
                vectors[place] = plan.tasks[place].read(name).float().to(device) - base
            self.base.append(base)
            self.vectors.append(vectors)
        self.weight = nn.Parameter(torch.full((len(models), len(self.rows)), START, device=device))

    def merge(self, task: int) -> dict[str, Tensor]:
        """The merged tensors by their names in a task's model."""
        return {
            self.own_names[task][name]: base
            + sum(weight * vector for weight, vector in zip(self.weight[:, index], vectors, strict=True))
            for index, (row, base, vectors) in enumerate(zip(self.rows, self.base, self.vectors, strict=True))
            if (name := row.members.get(task)) is not None
        }

    def forward(self, batches: list[Tensors]) -> Tensor:
        """The sum over tasks of the mean entropy of their predictions, in nats."""
        total = self.weight.new_zeros(())
        for task, batch in enumerate(batches):
            answer = functional_call(self.models[task], self.merge(task), kwargs=batch)
            logits = getattr(answer, "logits", None)
            if logits is None or logits.ndim != 2:
                kind = type(self.models[task]).__name__
                raise UsageError(f"{kind} does not predict one class per example; AdaMerging needs classifiers.")
            chances = logits.float().log_softmax(-1)
            total = total - (chances.exp() * chances).sum(-1).mean()
        return total


def learn_weights(
    config: MergeConfig | Mapping[str, Any] | str | Path,
    parts: Mapping[str, tuple[Task, datasets.Dataset]],
    *,
    steps: int = 500,
    learning_rate: float = 1e-3,
    batch_size: int = 16,
    show: Callable[[int, float], None] | None = None,
) -> MergeConfig:
    """
    The same merge by task arithmetic, with learned weights of each task in each tensor.

    Its method does not count, and its heads should be excluded. `parts` has of each task how its model gets examples,
    and these; a step takes `batch_size` of each in every process of `accelerate launch`. `show` is called with the
    number of a step and its entropy.
    """
    from ..training.models import load_trained

    steps, batch_size = whole_number("steps", steps), whole_number("batch_size", batch_size)
    config = load_config(config)
    # with other methods these may be given too
    unused: dict[str, Any] = {"options": {}, "statistics": {}, "merged": None}
    unused |= {} if config.masks else {"masks": None, "rescale": "global", "include_base": False}
    config = dataclasses.replace(config, method="task_arithmetic", **unused)
    if parts.keys() != config.tasks.keys():
        raise UsageError(f"the tasks are {', '.join(config.tasks)}; got data of {', '.join(parts) or 'none'}.")
    for name, (_, data) in parts.items():
        if not hasattr(data, "__len__") or not len(data):
            raise UsageError(f"the data of {name!r} is empty or a stream, from which no examples can be drawn.")
    accelerator = Accelerator()
    with make_plan(config) as plan:
        models = [load_trained(parts[name][0], source) for name, source in config.tasks.items()]
        merge = WeightedMerge(resolve_plan(plan), models, accelerator.device)
    batches = [draw_batches(*parts[name], batch_size, accelerator.process_index) for name in config.tasks]
    model, optimizer = accelerator.prepare(merge, torch.optim.Adam(merge.parameters(), lr=learning_rate))
    for step in progress(range(steps), "learning", leave=False, shown=accelerator.is_main_process):
        given = [{name: values.to(accelerator.device) for name, values in next(part).items()} for part in batches]
        entropy = model(given)
        accelerator.backward(entropy)
        optimizer.step()
        optimizer.zero_grad()
        if show is not None:
            show(step, float(entropy.detach()))
    learned = merge.weight.detach().cpu()
    # The first text that is in a tensor's name holds, and a longer name may hold a shorter one.
    order = sorted(range(len(merge.rows)), key=lambda index: -len(merge.rows[index].name))
    weights = {
        task: [{"filter": merge.rows[index].name, "value": float(learned[place, index])} for index in order]
        for place, task in enumerate(config.tasks)
    }
    return dataclasses.replace(config, options={"weight": weights})


def write_weights(file: Path, configs: Mapping[str, Path], out: Path, **options: Any) -> None:
    """Learns the weights of the merge in a YAML file, and writes the merge with them as another. Of the YAML file of a
    task's training `data.eval` and `task` count; `options` are those of [`learn_weights`]."""
    require_new(out)
    check_places([out])
    parts = {name: open_task(place, "data.eval") for name, place in configs.items()}
    learned = learn_weights(file, parts, **options)
    if Accelerator().is_main_process:
        with whole_file(out, "w") as written:
            yaml.safe_dump(learned.to_dict(), written, sort_keys=False)


def draw_batches(task: Task, data: datasets.Dataset, batch_size: int, rank: int) -> Iterator[Tensors]:
    """Batches of examples without their labels, drawn anew for each."""
    random = np.random.default_rng((11, rank))
    while True:
        chosen = random.integers(len(data), size=batch_size)
        batch = default_collate([task.training_sample(data[int(index)], random) for index in chosen])
        yield {name: values for name, values in batch.items() if name != "labels"}
