"""Linear layers and embeddings for rows of several tasks, without a weight of any task as a whole in memory.

Most of a model's weights are in these. A linear layer's are restored a block at a time, for one task after the other:
the block of the base and of the merged model stays in the second-level cache for all tasks, and the restored one until
it is multiplied. Of an embedding, the rows that are looked up are restored. Both have the bits of whole weights, but
for the order of sums.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from .arithmetic import DTYPES, find_kernels, pack_mask
from .weights import Parts, TaskWeights

# Elements of a block: from 2^14 to all weights, 2^17 were the fastest.
_BLOCK = 2**17
_FORWARDS: dict[Any, str] = {
    torch.nn.Linear.forward: "linear",
    Conv1D.forward: "transposed",
    torch.nn.Embedding.forward: "embedding",
}


class TaskLayers:
    """The linear layers and embeddings of a model, on the CPU."""

    def __init__(self, weights: TaskWeights) -> None:
        self._weights = weights
        self._parts: dict[tuple[str, str, torch.dtype], Parts | None] = {}
        self._memory: Tensor | None = None

    def find_kind(self, forward: Callable[..., Any], x: Any) -> str | None:
        """The kind of layer of a `forward`: `linear`, `transposed`, `embedding`, or none of them."""
        kind, layer = _FORWARDS.get(getattr(forward, "__func__", None)), getattr(forward, "__self__", None)
        if kind is None or not isinstance(x, Tensor) or torch.is_autocast_enabled("cpu"):
            return None
        weight: Tensor = layer.weight  # type: ignore[union-attr]
        plain = weight.device.type == "cpu" and weight.dtype in DTYPES and getattr(layer, "max_norm", None) is None
        return kind if plain and x.dtype in (weight.dtype, torch.int64, torch.int32) else None

    def find_all(self, name: str, weight: Tensor, tasks: list[str]) -> dict[str, Parts] | None:
        """The sources of a weight of some tasks, which have one base; `None` where one cannot be had as it is."""
        found = {task: parts for task in tasks if (parts := self._find_parts(task, name, weight)) is not None}
        places = {parts.base.data_ptr() for parts in found.values()}
        return found if len(found) == len(tasks) and len(places) <= 1 else None

    def _find_parts(self, task: str, name: str, weight: Tensor) -> Parts | None:
        key = (task, name, weight.dtype)
        if key not in self._parts:
            parts = self._weights.find_parts(task, name, weight.device)
            if parts is not None:
                by_mask = parts.base.dtype in DTYPES and not self._weights.manifest.deltas
                # Masks read from mapped files took 1.6 times as long as from memory; base and unified model 1.1 times.
                fits = len(parts.base) == weight.numel() and parts.unified.dtype == weight.dtype
                parts = parts._replace(mask=parts.mask.clone()) if by_mask and fits else None
            self._parts[key] = parts
        return self._parts[key]

    def multiply(
        self, x: list[Tensor], weight: Tensor, parts: list[Parts | None], biases: list[Tensor | None], transposed: bool
    ) -> list[Tensor]:
        """Multiplies rows of each task by its weight, `[out, in]` or `[in, out]` if `transposed`, and adds its bias.
        The parts of a task whose weight the layer holds are `None`."""
        lines, columns = weight.shape
        outs = [own.new_empty(len(own), columns if transposed else lines) for own in x]
        others = [found for found in parts if found is not None]
        # Products of blocks of a transposed weight are added up, and in half precision each sum would be rounded.
        whole = transposed and weight.dtype != torch.float32
        step = lines if whole else min(lines, max(8, _BLOCK // columns // 8 * 8))
        count = len(others) * step * columns
        if self._memory is None or self._memory.dtype != weight.dtype or len(self._memory) < count:
            # It is kept: to get new pages costs more than to fill them.
            self._memory = torch.empty(count, dtype=weight.dtype)
        memory = self._memory[:count].view(len(others), step, columns)
        for top in range(0, lines, step):
            here = slice(top, min(top + step, lines))
            blocks = memory[:, : here.stop - top]
            part = slice(top * columns, here.stop * columns)
            masks = [found.mask[part.start // 8 : -(-part.stop // 8)] for found in others]
            sources, scales = (others[0].base[part], others[0].unified[part]), [found.scale for found in others]
            find_kernels("cpu").restore(*sources, masks, scales, [block.view(-1) for block in blocks])
            restored = iter(blocks)
            for own, out, found, bias in zip(x, outs, parts, biases, strict=True):
                block = weight[here] if found is None else next(restored)
                if transposed:
                    _add_product(out if top else bias, own[:, here], block, out)
                else:
                    _add_product(None if bias is None else bias[here], own, block.t(), out[:, here])
        return outs

    def look_up(self, ids: Tensor, weight: Tensor, parts: Parts | None) -> Tensor:
        """The rows of a task's embedding for some tokens."""
        if parts is None:
            return F.embedding(ids, weight)
        wanted, columns = ids.reshape(-1), weight.shape[1]
        base, unified = parts.base.view(weight.shape)[wanted], parts.unified.view(weight.shape)[wanted]
        bits = (wanted[:, None] * columns + torch.arange(columns)).view(-1)
        mask = pack_mask((parts.mask[bits >> 3] >> (bits & 7).to(torch.uint8)) & 1)
        rows = torch.empty_like(unified)
        find_kernels("cpu").restore(base.view(-1), unified.view(-1), [mask], [parts.scale], [rows.view(-1)])
        return rows.view(*ids.shape, columns)


def _add_product(begun: Tensor | None, x: Tensor, weights: Tensor, out: Tensor) -> None:
    if begun is None:
        torch.mm(x, weights, out=out)
    else:
        torch.addmm(begun, x, weights, out=out)
