"""Generation for prompts of several tasks, one task after the other. A mixed forward restores the weights of every
task at every step, so from some twenty tokens on it takes longer than to switch the model once for each task.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from transformers import GenerationConfig

from ..errors import UsageError
from .batches import repeat_rows, require_tasks, rows_of, take_rows
from .many_tasks import ManyTasks


def generate(emr: ManyTasks, task_ids: Sequence[str], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Generates each row with its task, in the order of the rows; with a single task, returns the result of its
    `generate`."""
    sizes = require_tasks(task_ids, emr.tasks, (arguments, options))
    if sizes != {len(task_ids)}:
        raise UsageError(f"task_ids names {len(task_ids)} tasks for {sorted(sizes)} prompts; give one for each")
    if len(set(task_ids)) == 1:
        with emr.task(task_ids[0]) as model:
            return model.generate(*arguments, **options)
    return _generate_in_turn(emr, task_ids, (arguments, options))


def switch_settings(emr: ManyTasks, task: str, kept: dict[str, GenerationConfig]) -> None:
    """Gives the model a task's settings of generation; what a user set in another's is there again with it."""
    own, before = emr.generation_config(task), emr.generation_config(str(emr.current))
    if own == before:
        return
    model: Any = emr.model
    kept[str(before)] = model.generation_config
    if str(own) not in kept:
        # Without a file of its own it is what from_pretrained takes from the model's configuration.
        new = GenerationConfig.from_dict(own) if own else GenerationConfig.from_model_config(model.config)
        kept[str(own)] = new
    model.generation_config = kept[str(own)]


def _generate_in_turn(emr: ManyTasks, task_ids: Sequence[str], given: Any) -> torch.Tensor:
    """Token ids of each row. Each task draws as it would alone: with the random state of the call."""
    sequences: dict[int, torch.Tensor] = {}
    rows, state, fill = rows_of(task_ids), _random_state(emr.device), 0
    # The current task first, which is there already.
    for task in sorted(rows, key=lambda task: task != emr.current):
        own = rows[task]
        few, many = take_rows(given, own, len(task_ids))
        if (allowed := many.get("prefix_allowed_tokens_fn")) is not None:
            many["prefix_allowed_tokens_fn"] = functools.partial(_ask_for_row, allowed, own.tolist())
        _set_random_state(emr.device, state)
        with emr.task(task) as model:
            found = model.generate(*few, **many)
            fill = _find_padding(model, many, fill)
        if not isinstance(found, torch.Tensor) or len(found) % len(own):
            raise UsageError(
                f"generation for several tasks, here {list(rows)}, returns token ids only: leave out "
                "return_dict_in_generate, or run one task at a time"
            )
        sequences |= dict(zip(repeat_rows(own, len(found) // len(own)).tolist(), found, strict=True))
    ordered = [sequences[row] for row in sorted(sequences)]
    return torch.nn.utils.rnn.pad_sequence(ordered, batch_first=True, padding_value=fill)


def _ask_for_row(
    allowed: Callable[[int, torch.Tensor], list[int]], rows: list[int], row: int, tokens: Any
) -> list[int]:
    """The tokens allowed next in a row of one task; the function asked knows the row by its number among all."""
    return allowed(rows[row], tokens)


def _find_padding(model: Any, options: dict[str, Any], otherwise: int) -> int:
    """The token that the `generate` of a task pads with: the end where nothing is said."""
    places = [options.get("generation_config"), model.generation_config]
    for key in ("pad_token_id", "eos_token_id"):
        for found in (options.get(key), *(getattr(place, key, None) for place in places)):
            if found is not None:
                return int(torch.as_tensor(found).flatten()[0])
    return otherwise


def _random_state(device: torch.device) -> torch.Tensor:
    found = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return cast(torch.Tensor, found)


def _set_random_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
