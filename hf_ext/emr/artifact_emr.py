"""The files of an artifact, opened only where they are what the manifest says, to the hash; and the rescalers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from ..hub.checkpoints import Checkpoint, open_checkpoint
from ..hub.safetensors_headers import CheckpointError, TensorInfo
from .files_emr import require_unchanged
from .manifest_emr import RESCALES, TENSOR_RESCALES, Manifest, artifact_file
from .ops_emr import SUMS

# In artifacts of earlier versions: what was not known of older tasks once another was added from the kept state.
_MAY_BE_UNKNOWN = np.isin(SUMS, ("masked_dot", "dot", "weight_opposed"))


def mask_bytes(elements: int) -> int:
    """Length of the mask of a tensor: one bit an element, rounded up to 64 bytes."""
    return -(-elements // 512) * 64


def compute_scales(sums: np.ndarray, elements: np.ndarray, participates: np.ndarray, mode: str) -> np.ndarray:
    r"""The rescalers λ of every task, from the sums of the merge.

    With sums over the elements p of the tensors in which task t takes part:
    `global` \\(\sum|\tau_t| / \sum M_t|\tau_{uni}|\\) (the paper);
    `official` the same of the per-tensor means (the authors' code);
    `l2` \\(\langle\tau_t, M_t\tau_{uni}\rangle / \lVert M_t\tau_{uni}\rVert^2\\), the least squares;
    `tensor` and `tensor_l2` the first and the last for every tensor by itself; `none` 1.
    Where nothing is masked in, λ is 1 if the task equals the base there, and 0 if it lost every vote.
    """
    if mode not in RESCALES:
        raise ValueError(f"rescale is {mode!r}; allowed are {', '.join(RESCALES)}")
    if mode == "none":
        return np.ones(sums.shape[1])
    column = {name: sums[:, :, index] * participates for index, name in enumerate(SUMS)}
    upper, lower = column["abs"], column["masked_abs"]
    if mode in ("l2", "tensor_l2"):
        upper, lower = column["masked_dot"], column["masked_square"]
    if mode == "official":
        counts = np.maximum(elements, 1)[:, None]
        upper, lower = upper / counts, lower / counts
    lost = column["abs"] > 0
    if mode not in TENSOR_RESCALES:
        # exactly rounded, so that the order of the tensors does not matter
        upper, lower = (np.array([math.fsum(task) for task in part.T]) for part in (upper, lower))
        lost = lost.any(axis=0)
    return np.where(lower > 0, upper / np.where(lower > 0, lower, 1.0), np.where(lost, 0.0, 1.0))


def open_unified(folder: str | Path, manifest: Manifest) -> Checkpoint:
    """Opens the root weights of an artifact."""
    for name, about in manifest.unified.items():
        size = artifact_file(folder, name).stat().st_size
        _require(size == about["bytes"], f"{folder}/{name}", f"{size} bytes, the manifest says {about['bytes']}")
        require_unchanged(folder, manifest, name)
    with _close_on_error(folder) as unified:
        found = {name: (unified.info(name).shape, unified.info(name).dtype) for name in unified}
        told = {tensor.name: (tensor.shape, tensor.dtype) for tensor in manifest.tensors}
        differing = sorted(name for name in found.keys() | told.keys() if found.get(name) != told.get(name))
        _require(not differing, str(folder), f"the root weights and the manifest differ in {differing[:3]}")
    return unified


def open_masks(folder: str | Path, manifest: Manifest, task: str) -> Checkpoint:
    """Opens the masks of a task: uint8 by its names; bit i of a flat tensor is `(byte[i // 8] >> i % 8) & 1`."""
    path = _task_file(folder, manifest, task, "mask.safetensors")
    record, merged = manifest.tasks[task], manifest.merged
    with _close_on_error(path) as masks:
        for name in masks:
            base = merged.get(record.base_name(name))
            _require(base is not None, str(path), f"{name!r} is the mask of no merged tensor")
            assert base is not None
            _require_mask(masks.info(name), base.elements, path, name)
            _require(record.scale is not None or name in record.scales, str(path), f"{name!r} has no scale")
    return masks


def open_extras(folder: str | Path, manifest: Manifest, task: str) -> Checkpoint | None:
    """Opens the tensors that a task keeps as they are."""
    record, merged = manifest.tasks[task], manifest.merged
    if not record.tails and not Path(folder, "tasks", task, "extra.safetensors").exists():
        return None
    path = _task_file(folder, manifest, task, "extra.safetensors")
    with _close_on_error(path) as extras:
        for name, shape in record.tails.items():
            base = merged.get(record.base_name(name))
            _require(
                name in extras and base is not None, str(path), f"no tail of {name!r}, of which the manifest tells"
            )
            assert base is not None
            found, expected = extras.info(name).shape, (math.prod(shape) - base.elements,)
            _require(found == expected, str(path), f"the tail of {name!r} has shape {found}, expected {expected}")
    return extras


def read_sums(folder: str | Path, manifest: Manifest, task: str) -> np.ndarray:
    """Reads what the merge summed up for a task, from which every rescale mode follows: fp64 `[merged tensors, 10]`.

    Columns are `ops_emr.SUMS`; 0 where the task takes no part. NaN stands where an earlier version did not know.
    """
    path = _task_file(folder, manifest, task, "sums.safetensors")
    with open_checkpoint(path) as file:
        expected = ((len(manifest.merged), len(SUMS)), torch.float64)
        found = (file.info("sums").shape, file.info("sums").dtype) if "sums" in file else None
        _require(found == expected, str(path), f"holds {found}, expected `sums` of {expected}")
        _require(file.metadata.get("columns") == ",".join(SUMS), str(path), "has other columns")
        sums: np.ndarray = file["sums"].numpy()
    known = np.where(np.isnan(sums) & _MAY_BE_UNKNOWN, 0.0, sums)
    _require(bool(np.isfinite(known).all() and (known[:, :7] >= 0).all()), str(path), "holds impossible sums")
    return sums


def _task_file(folder: str | Path, manifest: Manifest, task: str, name: str) -> Path:
    """The path of a file of a task, which is as the merge wrote it."""
    path = artifact_file(folder, "tasks", task, name)
    require_unchanged(folder, manifest, f"tasks/{task}/{name}")
    return path


@contextmanager
def _close_on_error(source: str | Path) -> Iterator[Checkpoint]:
    """A checkpoint that stays open unless it is found wrong."""
    checkpoint = open_checkpoint(source)
    try:
        yield checkpoint
    except CheckpointError:
        checkpoint.close()
        raise


def _require_mask(info: TensorInfo, elements: int, path: Path, name: str) -> None:
    expected = ((mask_bytes(elements),), torch.uint8)
    found = (info.shape, info.dtype)
    _require(found == expected, str(path), f"{name!r} is {found}, {elements} elements need {expected}")


def _require(fits: bool, where: str, what: str) -> None:
    if not fits:
        raise CheckpointError(f"{where}: {what}; the artifact is damaged: fetch it again, or merge again.")
