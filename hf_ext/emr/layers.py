"""Common layers for samples of several tasks, without a weight of any task as a whole in memory.

A linear layer's weights are restored piece by piece and multiplied while they lie in the caches; of an embedding only
the rows that are looked up are restored, with the bits of the whole. A norm is one pass, scaled by sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from .arithmetic import DTYPES, find_kernels
from .ops import pack_mask, restore_block

if TYPE_CHECKING:
    from .model import EMRModel
    from .weights import Parts

_FORWARDS: dict[Any, str] = {
    torch.nn.Linear.forward: "linear",
    Conv1D.forward: "conv1d",
    torch.nn.Embedding.forward: "embedding",
    torch.nn.LayerNorm.forward: "norm",
}


def layer_kind(forward: Callable[..., Any]) -> str | None:
    """Which layer a `forward` is of: `linear`, `conv1d`, `embedding`, `norm`, or none that is known."""
    kind, layer = _FORWARDS.get(getattr(forward, "__func__", forward)), getattr(forward, "__self__", None)
    if kind is None or getattr(layer, "max_norm", None) is not None:
        return None
    weight = getattr(layer, "weight", None)
    return kind if weight is not None and weight.device.type == "cpu" else None


class TaskRows:
    """Whose the rows of a batch are: for each task, the numbers of its rows."""

    def __init__(self, rows: Mapping[str, Tensor]) -> None:
        self.names = list(rows)
        self.order = torch.cat(list(rows.values()))  # numbers of the rows, task by task
        self.edges = [0, *np.cumsum([len(own) for own in rows.values()]).tolist()]  # of each task's rows in `order`
        self.inverse = self.order.argsort()
        counts = torch.tensor([len(own) for own in rows.values()])
        self.tasks = torch.repeat_interleave(torch.arange(len(rows)), counts)[self.inverse]  # task of each row
        self._repeated: dict[int, TaskRows] = {1: self}

    def repeat(self, count: int) -> TaskRows:
        """The same where each row is `count` rows."""
        if count not in self._repeated:
            own = (self.order[start:stop] for start, stop in itertools.pairwise(self.edges))
            rows = ((index[:, None] * count + torch.arange(count)).view(-1) for index in own)
            self._repeated[count] = TaskRows(dict(zip(self.names, rows, strict=True)))
        return self._repeated[count]

    @cached_property
    def runs(self) -> list[list[slice]]:
        """The rows of each task as few slices as possible."""
        found = []
        for start, stop in itertools.pairwise(self.edges):
            own = self.order[start:stop]
            cuts = [0, *((own.diff() != 1).nonzero().view(-1) + 1).tolist(), len(own)]
            found.append([slice(int(own[i]), int(own[j - 1]) + 1) for i, j in itertools.pairwise(cuts)])
        return found

    @cached_property
    def edges_array(self) -> Any:
        """`edges` for a kernel."""
        return np.array(self.edges)


class TaskLayers:
    """The layers of a model that are computed for several tasks at once."""

    def __init__(self, emr: EMRModel) -> None:
        self._emr = emr
        self._parts: dict[tuple[str, str], Parts | None] = {}
        self._vectors: dict[Any, Tensor] = {}
        self._restored: dict[int, tuple[Tensor, int]] = {}

    def run(self, kind: str, layer: Any, names: Mapping[str, str], x: Tensor, rows: TaskRows) -> Any:
        """
        What a layer gives for samples of several tasks; `None` where the weights of some do not allow it.

        Args:
            names: Under which name the tasks' checkpoints have its parameters, those that they have.
        """
        if torch.is_autocast_enabled("cpu") or rows.names == [self._emr.current]:
            return None
        if kind == "norm":
            return self._normalise(layer, names, x, rows)
        weight, multiply = layer.weight, find_kernels("cpu").multiply_tasks
        found = [self._find_parts(task, names["weight"], weight) for task in rows.names]
        if any(parts is None and task != self._emr.current for task, parts in zip(rows.names, found, strict=True)):
            return None
        if kind == "embedding":
            return self._look_up(layer, found, x, rows)
        first = next(parts for parts in found if parts is not None)
        same = all(parts is None or parts.base.data_ptr() == first.base.data_ptr() for parts in found)
        if multiply is None or not same or x.dtype != weight.dtype:
            return None
        bias = getattr(layer, "bias", None)
        flat = x.reshape(-1, x.shape[-1])
        y = multiply(
            flat,
            rows.repeat(len(flat) // len(rows.tasks)),
            first.base.view(weight.shape),
            first.unified.view(weight.shape),
            weight.detach(),
            rows.names.index(self._emr.current) if self._emr.current in rows.names else -1,
            [None if parts is None else parts.mask for parts in found],
            [1.0 if parts is None else parts.scale for parts in found],
            None if bias is None else self._stack(rows, names.get("bias"), bias),
            kind == "conv1d",
        )
        return y.view(*x.shape[:-1], y.shape[-1])

    def note_restored(self, model: torch.nn.Module) -> None:
        """Remembers that the model's weights are those of its task, until something changes them."""
        self._restored = {id(weight): (weight, weight._version) for weight in model.parameters()}

    def vector(self, task: str, name: str, held: Tensor) -> Tensor:
        """A task's values for a small tensor of the model, which are kept."""
        if task == self._emr.current:
            return held.detach()
        key = (task, name, held.dtype, held.device)
        if key not in self._vectors:
            self._vectors[key] = self._emr.weights.restore(task, name, device=held.device, dtype=held.dtype)
        return self._vectors[key]

    def _find_parts(self, task: str, name: str, weight: Tensor) -> Parts | None:
        """What a task's weight is restored from; `None` where something must be added, converted or left as it is."""
        if task == self._emr.current:
            held, version = self._restored.get(id(weight), (None, None))
            if held is not weight or version != weight._version:
                return None
        if (task, name) not in self._parts:
            parts = self._emr.weights.find_parts(task, name, torch.device("cpu"))
            # Masks read from mapped files took 1.6 times as long as from memory; base and unified model 1.1 times.
            self._parts[task, name] = None if parts is None else parts._replace(mask=parts.mask.clone())
        parts = self._parts[task, name]
        if parts is None or len(parts.base) != weight.numel() or parts.base.dtype not in DTYPES:
            return None
        return parts if parts.unified.dtype == weight.dtype else None

    def _stack(self, rows: TaskRows, name: str | None, held: Tensor) -> Tensor:
        """A vector of each task; where the tasks have none of their own, that of the model."""
        return torch.stack([held.detach() if name is None else self.vector(task, name, held) for task in rows.names])

    def _normalise(self, layer: torch.nn.LayerNorm, names: Mapping[str, str], x: Tensor, rows: TaskRows) -> Any:
        if layer.weight.ndim != 1 or x.dtype != layer.weight.dtype:
            return None
        y = F.layer_norm(x.float(), layer.normalized_shape, None, None, layer.eps)
        own = rows.repeat(len(x) // len(rows.tasks)).tasks
        shape = (len(x), *[1] * (x.ndim - 2), x.shape[-1])
        y *= self._stack(rows, names.get("weight"), layer.weight)[own].view(shape)
        if layer.bias is not None:
            y += self._stack(rows, names.get("bias"), layer.bias)[own].view(shape)
        return y.to(x.dtype)

    def _look_up(self, layer: torch.nn.Embedding, found: list[Parts | None], ids: Tensor, rows: TaskRows) -> Any:
        shape = layer.weight.shape
        y = layer.weight.new_empty(*ids.shape, shape[1])
        samples = rows.repeat(len(ids) // len(rows.tasks))
        for parts, start, stop in zip(found, samples.edges[:-1], samples.edges[1:], strict=True):
            here = samples.order[start:stop]
            wanted = ids[here].view(-1)
            values = layer.weight.detach()[wanted] if parts is None else _restore_rows(wanted, parts, shape)
            y[here] = values.view(stop - start, *y.shape[1:])
        return y


def _restore_rows(wanted: Tensor, parts: Parts, shape: torch.Size) -> Tensor:
    """Some rows of a matrix."""
    base, unified = parts.base.view(shape)[wanted], parts.unified.view(shape)[wanted]
    bits = (wanted[:, None] * shape[1] + torch.arange(shape[1])).view(-1)
    mask = (parts.mask[bits >> 3] >> (bits & 7).to(torch.uint8)) & 1
    rows = torch.empty_like(unified)
    restore_block(base, unified, pack_mask(mask), parts.scale, rows)
    return rows
