"""Batches whose samples are of several tasks: the samples of each task, and what the tasks gave, in their order."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.cache_utils import Cache

from ..errors import DataError, UsageError

# The samples of each task.
Rows = Mapping[str, Tensor]
# Tolerance for equal values, since rounding depends on the size of a batch.
_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-4}
_HALF_TOLERANCE = 1e-2
# What a token in a sample's text stands for, and the arguments that hold it.
_MEDIA = {"image": ("pixel_values",), "video": ("pixel_values_videos",), "audio": ("input_features", "input_values")}


def rows_of(task_ids: Sequence[str], known: Sequence[str], given: Any, model: Any) -> dict[str, Tensor]:
    """The samples of each task; refuses unknown tasks, other numbers of samples, and for several tasks a cache and
    pictures whose samples are unknown."""
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
    if len(tasks) > 1:
        _require_one_each(getattr(model, "config", None), given, len(names))
    return {task: torch.tensor([i for i, name in enumerate(names) if name == task]) for task in tasks}


def _require_one_each(config: Any, given: Any, size: int) -> None:
    """Refuses pictures and sounds in the order of the tokens that stand for them, unless each sample has one."""
    arguments, named = given
    ids = named.get("input_ids", next(iter(arguments), named.get("inputs")))
    for kind, names in _MEDIA.items() if isinstance(ids, Tensor) and len(ids) == size else ():
        tokens = {getattr(config, f"{kind}_token_{end}", None) for end in ("id", "index")} - {None}
        held = {name: named[name] for name in names if isinstance(named.get(name), Tensor)} if tokens else {}
        for name, value in held.items():
            has = torch.isin(ids, torch.tensor([*tokens], device=ids.device)).any(-1)
            # Idefics 2 and Mllama have a row of pictures for each sample.
            by_sample = value.ndim == 6 or (value.ndim == 5 and "pixel_attention_mask" in named)
            if bool(has.any()) and (len(value) != size or not (by_sample or bool(has.all()))):
                raise UsageError(
                    f"{name} {list(value.shape)} cannot be divided by samples, of which {int(has.sum())} of {size} "
                    f"have {kind} tokens: samples of several tasks need one {kind} each, as one row of {name}. Run "
                    "one task at a time"
                )


@contextmanager
def explain_division(task: str, given: Any, size: int) -> Iterator[None]:
    """Tells, where a model fails inside a `with` block on what [`take_rows`] made, which tensors that has divided."""
    try:
        yield
    except (UsageError, DataError, torch.OutOfMemoryError):
        raise
    # Whatever a model raises whose arguments do not fit each other.
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        named = {**{f"argument {i}": value for i, value in enumerate(given[0], 1)}, **given[1]}
        tensors = [(name, leaf) for name, value in named.items() for leaf in leaves_of(value)[0]]
        shapes = [(name, list(leaf.shape)) for name, leaf in tensors if isinstance(leaf, Tensor)]
        divided, whole = ([f"{name} {s}" for name, s in shapes if (s[:1] == [size]) is by] for by in (True, False))
        raise UsageError(
            f"the samples of {task!r} cannot run on their own ({type(error).__name__}: {error!s:.300}). Divided by "
            f"samples: {', '.join(divided) or 'nothing'}; given whole: {', '.join(whole) or 'nothing'}. If that is "
            "not what they mean, run one task at a time"
        ) from error


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


def find_by_sample(model: Any, given: Any, part: Any, rows: Tensor, size: int) -> list[Any]:
    """
    Keys of the outputs of a model that have a row for each sample, which depends on no other sample.

    Seen, not guessed from shapes: contrastive logits of three samples have three rows, and each holds what belongs to
    the others. So the model runs on the whole batch, and what it gives for some `rows` is compared with their `part`.
    """
    whole = model(*given[0], **given[1])

    def follows(key: Any) -> bool:
        pairs = list(zip(leaves_of(whole[key])[0], leaves_of(part[key])[0], strict=True))
        return bool(pairs) and all(is_same(*pair) for pair in pairs)

    def is_same(all_rows: Any, own: Any) -> bool:
        if not (isinstance(all_rows, Tensor) and isinstance(own, Tensor) and own.shape[:1] == rows.shape):
            return False
        if all_rows.shape != (size, *own.shape[1:]):
            return False
        # while training, dropout changes values
        return model.training or are_alike([*all_rows[rows.to(all_rows.device)]], [*own])

    return [key for key in keys_of(part) if follows(key)]


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


def are_alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """True for as many tensors of the same shapes that are equal up to rounding."""
    same = [part.shape for part in some] == [part.shape for part in others]
    return same and all(map(are_close, some, others))


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
        self._rows, self._device, self._shared = rows, device, dict[str, Any]()
        self._left, self._fill = len(rows), 0

    def share(self, model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        """Keeps the options that all samples share whatever their length, such as the ends of a text, and returns the
        others: those of one dimension are shared that are no inputs of the model."""
        own = {*inspect.signature(model.forward).parameters, "decoder_start_token_id"}
        short = [name for name, value in options.items() if isinstance(value, Tensor) and value.ndim < 2]
        self._shared = {name: options[name] for name in short if name not in own}
        return {name: value for name, value in options.items() if name not in self._shared}

    def run(self, model: Any, task: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        own, options = self._rows[task].tolist(), options | self._shared
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
