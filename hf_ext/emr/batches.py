"""Batches whose samples are of several tasks: the samples of each task, and what the tasks gave, in their order."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.cache_utils import Cache

from ..errors import UsageError

# The samples of each task.
Rows = Mapping[str, Tensor]
# Tolerance for equal values, since rounding depends on the size of a batch.
_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-4}
_HALF_TOLERANCE = 1e-2


def rows_of(task_ids: Sequence[str], known: Sequence[str], given: Any) -> dict[str, Tensor]:
    """The samples of each task; refuses unknown tasks, other numbers of samples, and a cache for several tasks."""
    ordered = isinstance(task_ids, Iterable) and not isinstance(task_ids, str | Set | Mapping)
    names = list(task_ids) if ordered else []
    if not names or not all(isinstance(name, str) and name in known for name in names):
        raise UsageError(f"task_ids is {task_ids!r:.200}; give a list of tasks, which are {list(known)}")
    leaves, tasks = leaves_of(given)[0], list(dict.fromkeys(map(str, names)))
    if len(tasks) > 1 and any(isinstance(leaf, Cache) for leaf in leaves):
        raise UsageError("past_key_values belong to one task: leave them out, or run one task at a time")
    sizes = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim}
    if len(names) not in sizes:
        raise UsageError(f"task_ids names {len(names)} tasks for {sorted(sizes)} samples; give one for each")
    return {task: torch.tensor([i for i, name in enumerate(names) if name == task]) for task in tasks}


def take_rows(given: Any, rows: Tensor, size: int) -> Any:
    """The same arguments for some of so many samples."""

    def take(leaf: Any) -> Any:
        by_row = isinstance(leaf, Tensor) and leaf.shape[:1] == (size,)
        return leaf.index_select(0, rows.to(leaf.device)) if by_row else leaf

    leaves, form = leaves_of(given)
    return tree_unflatten([take(leaf) for leaf in leaves], form)


def in_order(parts: Mapping[str, Tensor], rows: Rows) -> list[Tensor]:
    """The rows of the tasks' tensors in the order of the batch; a sample may have several."""
    samples: dict[int, Tensor] = {}
    for task, part in parts.items():
        each = part.reshape(len(rows[task]), -1, *part.shape[1:])
        samples |= dict(zip(rows[task].tolist(), each, strict=True))
    return [row for sample in sorted(samples) for row in samples[sample]]


def kind_of(model: torch.nn.Module, given: Any, size: int) -> tuple[Any, ...]:
    """The form and the options of a batch, and which tensors have a row for each sample."""
    leaves, form = leaves_of(given)
    about = ((leaf.dtype, leaf.shape[:1] == (size,)) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
    return (type(model), model.training, str(form), *about)


def find_by_sample(model: Any, given: Any, size: int) -> list[Any]:
    """
    Keys of the outputs of a model that have a row for each sample, which depends on no other sample.

    Seen, not guessed from shapes: contrastive logits of three samples have three rows, and each holds what belongs to
    the others. So the model runs on the first sample and on the first two.
    """
    firsts = (take_rows(given, torch.arange(count), size) for count in (1, 2))
    one, two = (model(*arguments, **named) for arguments, named in firsts)

    def is_first(row: Any, rows: Any) -> bool:
        if not isinstance(row, Tensor) or not isinstance(rows, Tensor) or row.shape[:1] != (1,):
            return False
        # while training, dropout changes values
        return rows.shape == (2, *row.shape[1:]) and (model.training or are_close(row, rows[:1]))

    def follows(key: Any) -> bool:
        pairs = list(zip(leaves_of(one[key])[0], leaves_of(two[key])[0], strict=True))
        return bool(pairs) and all(is_first(*pair) for pair in pairs)

    return [key for key in keys_of(one) if follows(key)]


def join_outputs(outputs: Mapping[str, Any], rows: Rows, by_sample: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The outputs that are by sample, in the order of the batch; and the keys of others, but for a task's cache."""
    first = next(iter(outputs.values()))
    common = [key for key in by_sample if all(key in keys_of(output) for output in outputs.values())]
    joined = {key: _join({task: output[key] for task, output in outputs.items()}, rows) for key in common}
    left_out = [key for key in keys_of(first) if key not in joined and not isinstance(first[key], Cache)]
    if not joined:
        shared = set.intersection(*(set(keys_of(output)) for output in outputs.values()))
        raise UsageError(
            f"of the outputs that these tasks share ({', '.join(sorted(map(str, shared))) or 'none'}), none has a row "
            "for each sample that depends on no other, so they cannot be put together; run one task at a time"
        )
    if isinstance(first, Mapping):
        return cast(Any, type(first))(**joined), left_out
    return tuple(joined.get(key) for key in keys_of(first)), left_out


def _join(parts: Mapping[str, Any], rows: Rows) -> Any:
    """Tensors, or tuples of them; a list with a tensor for each sample where the tasks' widths differ."""
    flat, joined = {task: leaves_of(part) for task, part in parts.items()}, []
    for leaves in zip(*(leaves for leaves, _ in flat.values()), strict=True):
        ordered = in_order(dict(zip(parts, leaves, strict=True)), rows)
        same = len({sample.shape for sample in ordered}) == 1
        joined.append(torch.stack(ordered) if same else ordered)
    return tree_unflatten(joined, next(iter(flat.values()))[1])


def leaves_of(tree: Any) -> tuple[list[Any], Any]:
    """The parts of arguments or outputs, a cache as a whole, and their form."""
    return tree_flatten(tree, is_leaf=lambda leaf: isinstance(leaf, Cache))


def keys_of(output: Any) -> list[Any]:
    return list(output) if isinstance(output, Mapping) else list(range(len(output)))


def are_close(one: Tensor, two: Tensor) -> bool:
    """True for two tensors of a shape that are equal up to rounding."""
    tolerance = _TOLERANCES.get(one.dtype, _HALF_TOLERANCE)
    one, two = (torch.view_as_real(values) if values.is_complex() else values for values in (one, two))
    one, two = one.detach().double(), two.detach().double()
    size = float(one[one.isfinite()].abs().max()) if bool(one.isfinite().any()) else 0.0
    return torch.allclose(one, two, rtol=tolerance, atol=tolerance * size, equal_nan=True)


class Generation:
    """Generation for rows of several tasks, in turns, each from the random state of the call, as it would alone."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        self._rows, self._device = rows, device
        self._left, self._fill = len(rows), 0

    def run(self, model: Any, task: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        own = self._rows[task].tolist()
        if (allowed := options.get("prefix_allowed_tokens_fn")) is not None:
            # The function knows a row by its number among all.
            options["prefix_allowed_tokens_fn"] = lambda row, tokens: allowed(own[row], tokens)
        self._left -= 1
        devices = [] if self._device.type == "cpu" else [self._device]
        # The last task leaves the state that it comes to.
        with torch.random.fork_rng(devices, enabled=self._left > 0, device_type=self._device.type):
            found = model.generate(*arguments, **options)
        if not isinstance(found, Tensor) or len(found) % len(own):
            raise UsageError(
                f"generation for several tasks, here {list(self._rows)}, returns token ids only: leave out "
                "return_dict_in_generate, or run one task at a time"
            )
        self._fill = _find_padding(model, options)
        return found

    def join(self, found: Mapping[str, Tensor]) -> Tensor:
        """The rows of all tasks in the order of the batch, padded to one length."""
        return torch.nn.utils.rnn.pad_sequence(in_order(found, self._rows), batch_first=True, padding_value=self._fill)


def _find_padding(model: Any, options: Mapping[str, Any]) -> int:
    """The token that the `generate` of a model pads with: the end where nothing is said."""
    places = [options.get("generation_config"), model.generation_config]
    for key in ("pad_token_id", "eos_token_id"):
        for found in (options.get(key), *(getattr(place, key, None) for place in places)):
            if found is not None:
                return int(torch.as_tensor(found).flatten()[0])
    return 0
