"""Generation for prompts of several tasks: the model's own `generate`, with one mixed forward pass at each step."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import Cache, GenerationConfig

from .batches import Rows, all_rows, leaves_of, rows_of, take_rows
from .mixed import FAILURES
from .units import NotByRows, patched_forwards

if TYPE_CHECKING:
    from .model import EMRModel


def generate(emr: EMRModel, task_ids: Sequence[str], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What each row's task generates: together for tasks of one network and one generation configuration."""
    if isinstance(task_ids, str) or not task_ids or not set(task_ids) <= set(emr.tasks):
        raise ValueError(f"task_ids is {task_ids!r:.200}; give a list of tasks, which are {emr.tasks}")
    prompts = [leaf for leaf in tree_leaves((arguments, options)) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    if any(len(leaf) != len(task_ids) for leaf in prompts) or not prompts:
        sizes = sorted({len(leaf) for leaf in prompts})
        raise ValueError(f"task_ids names {len(task_ids)} tasks for {sizes} prompts; give one for each")
    groups, state = _group(emr, list(dict.fromkeys(task_ids))), _random_state(emr.device)
    if len(groups) == 1:
        tasks = groups[0]
        # Weights are switched where that is needed alone: a mixed forward restores those of each task anyway.
        like_current = emr.generation_config(tasks[0]) == emr.generation_config(str(emr.current))
        with emr.task(str(emr.current) if len(tasks) > 1 and like_current else tasks[0]) as model:
            if len(tasks) == 1:
                return model.generate(*arguments, **options)
            try:
                with _mixed_forwards(emr, task_ids), _OwnDraws(emr, rows_of(task_ids)):
                    return model.generate(*arguments, **options)
            except NotByRows as error:
                emr.mixer.warn_once(error)
        groups = [[task] for task in tasks]
    return _generate_in_turn(emr, groups, task_ids, (arguments, options), state)


def switch_settings(emr: EMRModel, task: str, kept: dict[str, GenerationConfig]) -> None:
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


def _group(emr: EMRModel, tasks: list[str]) -> list[list[str]]:
    """The tasks that can generate together."""
    groups: dict[str, list[str]] = {}
    for task in tasks:
        alone = "" if emr.fits(task) else task
        groups.setdefault(f"{alone} {emr.generation_config(task)}", []).append(task)
    return list(groups.values())


def _generate_in_turn(
    emr: EMRModel, groups: list[list[str]], task_ids: Sequence[str], given: Any, state: torch.Tensor
) -> torch.Tensor:
    """Token ids of each row; the groups of tasks take turns."""
    if any(isinstance(leaf, Cache) for leaf in leaves_of(given)[0]):
        raise ValueError("past_key_values cannot be divided among tasks that take turns; run one task at a time")
    sequences: dict[int, torch.Tensor] = {}
    fill = 0
    for group in groups:
        rows = torch.tensor([row for row, task in enumerate(task_ids) if task in group])
        few, many = take_rows(given, rows, len(task_ids))
        if (allowed := many.get("prefix_allowed_tokens_fn")) is not None:
            many["prefix_allowed_tokens_fn"] = functools.partial(_ask_for_row, allowed, rows.tolist())
        _set_random_state(emr.device, state)
        found = generate(emr, [task_ids[row] for row in rows.tolist()], few, many)
        if not isinstance(found, torch.Tensor) or len(found) != len(rows):
            raise ValueError(
                f"{groups} take turns, which gives one sequence of token ids for each row: leave out "
                "return_dict_in_generate and num_return_sequences, or run one task at a time"
            )
        fill = _find_padding(emr, group[0], many, fill)
        sequences |= dict(zip(rows.tolist(), found, strict=True))
    ordered = [sequences[row] for row in range(len(task_ids))]
    return torch.nn.utils.rnn.pad_sequence(ordered, batch_first=True, padding_value=fill)


def _ask_for_row(
    allowed: Callable[[int, torch.Tensor], list[int]], rows: list[int], row: int, tokens: Any
) -> list[int]:
    """What may follow in a row of one group, which the asked function knows by its number among all."""
    return allowed(rows[row], tokens)


def _find_padding(emr: EMRModel, task: str, options: dict[str, Any], otherwise: int) -> int:
    """What the rows of a task are padded with, as its `generate` pads them: with the end where nothing is said."""
    with emr.task(task) as model:
        places = [options.get("generation_config"), model.generation_config]
    for key in ("pad_token_id", "eos_token_id"):
        for found in (options.get(key), *(getattr(place, key, None) for place in places)):
            if found is not None:
                return int(torch.as_tensor(found).flatten()[0])
    return otherwise


@contextmanager
def _mixed_forwards(emr: EMRModel, task_ids: Sequence[str]) -> Iterator[None]:
    """
    Inside, a forward pass of the model, or of its encoder, is one for samples of several tasks; raises [`NotByRows`]
    where it cannot be, and where a module with weights is used outside of such a pass.
    """
    model: Any = emr.model
    parts = [model, model.get_encoder()] if model.config.is_encoder_decoder else [model]
    entries = {name: module for name, module in model.named_modules() if any(module is part for part in parts)}
    here, running = threading.get_ident(), False
    by_count: dict[int, Rows] = {}

    def patch(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **batch: Any) -> Any:
            nonlocal running
            if running:
                return forward(*arguments, **batch)
            count, rest = divmod(_count_rows(model, arguments, batch), len(task_ids))
            if rest or not count:
                raise NotByRows(f"generate of {type(model).__name__} runs some prompts without the others")
            if count not in by_count:
                # A prompt is a row for each of its beams or samples.
                by_count[count] = rows_of([task for task in task_ids for _ in range(count)])
            running = True
            try:
                return emr.mixer.run_module(entries[name], by_count[count], arguments, batch)
            except FAILURES as error:
                raise NotByRows(str(error)) from error
            finally:
                running = False

        return call

    def refuse(module: torch.nn.Module, _: Any) -> None:
        if not running and threading.get_ident() == here:
            raise NotByRows(f"generate of {type(model).__name__} uses a {type(module).__name__} by itself")

    weighty = [module for module in model.modules() if module._parameters and module not in entries.values()]
    hooks = [module.register_forward_pre_hook(refuse) for module in weighty]
    try:
        with patched_forwards(model, entries, patch):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _count_rows(model: Any, arguments: tuple[Any, ...], batch: dict[str, Any]) -> int:
    names = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds", model.main_input_name)
    given = [batch[name] for name in names if isinstance(batch.get(name), torch.Tensor)]
    if not (given := [*given, *arguments]):
        raise NotByRows(f"generate of {type(model).__name__} gives its forward none of {', '.join(names)}")
    return len(given[0])


class _OwnDraws(TorchFunctionMode):
    """
    Inside, each task draws its tokens with a random generator of its own, which begins as that of torch is now: so it
    draws what it would alone after the same seed, whatever tasks are beside it.
    """

    def __init__(self, emr: EMRModel, rows: Rows) -> None:
        super().__init__()
        self._device, self._rows, self._size = emr.device, rows, sum(map(len, rows.values()))
        state = _random_state(emr.device)
        self._generators = {task: torch.Generator(emr.device) for task in rows}
        for generator in self._generators.values():
            generator.set_state(state)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._draw if func is torch.multinomial else func)(*args, **(kwargs or {}))

    def _draw(self, input: torch.Tensor, num_samples: int, replacement: bool = False) -> torch.Tensor:
        drawn = torch.empty(len(input), num_samples, dtype=torch.int64, device=input.device)
        for task, rows in self._rows.items():
            own, generator = all_rows(rows, len(input) // self._size, input.device), self._generators[task]
            drawn[own] = torch.multinomial(input[own], num_samples, replacement, generator=generator)
        return drawn

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        # A second call draws something else.
        _set_random_state(self._device, next(iter(self._generators.values())).get_state())


def _random_state(device: torch.device) -> torch.Tensor:
    found = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return cast(torch.Tensor, found)


def _set_random_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
