"""Generation for prompts of several tasks: each by its own task, with that task's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from .mixed import rows_of, take_rows

if TYPE_CHECKING:
    from .model import EMRModel


def generate(
    emr: EMRModel, task_ids: Sequence[str], arguments: tuple[Any, ...], options: dict[str, Any]
) -> torch.Tensor:
    """Token ids of each row, by its own task; the tasks take turns."""
    if isinstance(task_ids, str) or not task_ids or not set(task_ids) <= set(emr.tasks):
        raise ValueError(f"task_ids is {task_ids!r:.200}; give a list of tasks, which are {emr.tasks}")
    prompts = [leaf for leaf in tree_leaves((arguments, options)) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    if any(len(leaf) != len(task_ids) for leaf in prompts) or not prompts:
        sizes = sorted({len(leaf) for leaf in prompts})
        raise ValueError(f"task_ids names {len(task_ids)} tasks for {sizes} prompts; give one for each")
    sequences: dict[int, torch.Tensor] = {}
    fill = 0
    for task, rows in rows_of(task_ids).items():
        few, many = take_rows((arguments, options), rows, len(task_ids))
        with emr.task(task) as model:
            found = model.generate(*few, **many)
            if not isinstance(found, torch.Tensor) or len(found) != len(rows):
                raise ValueError(
                    "generate for several tasks gives one sequence of token ids for each row: leave out "
                    "return_dict_in_generate and num_return_sequences, or run one task at a time"
                )
            padding = options.get("pad_token_id", model.generation_config.pad_token_id)
            fill = fill if padding is None else padding
        sequences |= dict(zip(rows.tolist(), found, strict=True))
    ordered = [sequences[row] for row in range(len(task_ids))]
    return torch.nn.utils.rnn.pad_sequence(ordered, batch_first=True, padding_value=fill)
