"""The sums of a merge on disk, from which scales and report follow again without the checkpoints.

Those of a task are in `tasks/ID/sums.safetensors` (read by `artifact_emr.read_sums`), those of all in
`sums.safetensors` at the root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from ..hub.checkpoints import open_checkpoint
from ..hub.safetensors_headers import CheckpointError
from ..hub.safetensors_writer import SafetensorsWriter
from .manifest_emr import Manifest, artifact_file
from .ops_emr import SUMS, TOTALS

FILE = "sums.safetensors"


def write_sums(folder: Path, task: str, sums: np.ndarray) -> None:
    """Writes the sums of a task."""
    _write(folder / "tasks" / task / FILE, {"sums": sums}, SUMS)


def write_totals(folder: Path, totals: np.ndarray, gram: np.ndarray) -> None:
    """Writes the sums that belong to no task alone."""
    _write(folder / FILE, {"totals": totals, "gram": gram}, TOTALS)


def read_totals(folder: Path, manifest: Manifest) -> tuple[np.ndarray, np.ndarray]:
    """Reads what [`write_totals`] wrote: totals `[merged tensors, 4]` and sampled inner products `[N, N]`."""
    path = artifact_file(folder, FILE)
    tasks = len(manifest.tasks)
    expected = {"totals": (len(manifest.merged), len(TOTALS)), "gram": (tasks, tasks)}
    with open_checkpoint(path) as file:
        found = {name: file.info(name).shape for name in file}
        if found != expected or any(file.info(name).dtype != torch.float64 for name in file):
            raise CheckpointError(f"{path}: holds {found}, expected {expected}; the artifact is damaged: merge again.")
        return file["totals"].numpy(), file["gram"].numpy()


def _write(path: Path, arrays: Mapping[str, np.ndarray], columns: Sequence[str]) -> None:
    # a new file: the one that is there may be shared with an artifact that is being replaced
    path.unlink(missing_ok=True)
    described = {name: (torch.float64, array.shape) for name, array in arrays.items()}
    writer = SafetensorsWriter(path, described, {"columns": ",".join(columns)})
    for name, array in arrays.items():
        writer.write(name, 0, torch.from_numpy(np.ascontiguousarray(array)))
    writer.close(sync=False)
