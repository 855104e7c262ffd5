"""AdaMerging: Yang et al., https://arxiv.org/abs/2310.02575: the weights of task arithmetic, learned without labels.

The weights are those with which each task's head is surest of its answers: the entropy of its predictions, on examples
like those it will see, falls. Base and fine-tunes are in memory; the result is a configuration of a merge.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml
from accelerate import Accelerator
from torch import nn
from torch.func import functional_call
from torch.utils.data import default_collate

from ..errors import UsageError
from ..files import require_new, whole_file
from ..progress import progress
from .configuration import MergeConfig, load_config, whole_number
from .measuring import name_as_saved, open_task
from .plan import Plan, make_plan, resolve_plan

if TYPE_CHECKING:
    import datasets

    from ..training.task import Task

Batch = dict[str, torch.Tensor]
START = 0.3


class WeightedMerge(nn.Module):
    """Models of the tasks, in the order of the plan, whose merged tensors are W_0 + Σ_t w_t τ_t, with a weight for
    each task and tensor."""

    def __init__(self, plan: Plan, models: list[nn.Module], device: torch.device | str = "cpu") -> None:
        super().__init__()
        # only the weights are parameters: the models are not registered as submodules
        self.models = [model.requires_grad_(False).eval().to(device) for model in models]
        self.rows = plan.merged_rows
        self.base, self.vectors = [], []
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

    def merge(self, task: int) -> dict[str, torch.Tensor]:
        """The merged tensors by their names in a task's model."""
        return {
            self.own_names[task][name]: base
            + sum(weight * vector for weight, vector in zip(self.weight[:, index], vectors, strict=True))
            for index, (row, base, vectors) in enumerate(zip(self.rows, self.base, self.vectors, strict=True))
            if (name := row.task_names[task]) is not None
        }

    def forward(self, batches: list[Batch]) -> torch.Tensor:
        """The sum over tasks of the mean entropy of their predictions, in nats."""
        total = self.weight.new_zeros(())
        for task, batch in enumerate(batches):
            answer = functional_call(self.models[task], self.merge(task), kwargs=batch)
            logits = getattr(answer, "logits", None)
            if logits is None or logits.ndim != 2:
                raise UsageError(
                    f"{type(self.models[task]).__name__} does not predict one class per example; AdaMerging needs "
                    "classifiers."
                )
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
        models = [parts[name][0].build_model({}, source) for name, source in config.tasks.items()]
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
    parts = {name: open_task(place, "data.eval") for name, place in configs.items()}
    learned = learn_weights(file, parts, **options)
    if Accelerator().is_main_process:
        with whole_file(out, "w") as written:
            yaml.safe_dump(learned.to_dict(), written, sort_keys=False)


def draw_batches(task: Task, data: datasets.Dataset, batch_size: int, rank: int) -> Iterator[Batch]:
    """Batches of examples without their labels, drawn anew for each."""
    random = np.random.default_rng((11, rank))
    while True:
        chosen = random.integers(len(data), size=batch_size)
        batch = default_collate([task.training_sample(data[int(index)], random) for index in chosen])
        yield {name: values for name, values in batch.items() if name != "labels"}
