"""Merges to use, and comparison of models; import them as `from tests.emr.use_testing import ...`."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_ext.emr import EMRModel
from hf_ext.emr.weights import TaskWeights
from hf_ext.merging import merge_checkpoints
from tests.emr.emr_testing import family, tiny_bert


def merge(base: Path, tasks: dict[str, Path], out: Path, **options: object) -> Path:
    config = {"base": str(base), "tasks": {name: str(path) for name, path in tasks.items()}} | options
    return merge_checkpoints(config, out, progress=False).path


def merge_family(
    folder: Path, make: Callable[..., Path], names: Sequence[str] = "ab", *, given: Any = None, **options: Any
) -> Path:
    """A merge, with what is `given`, of fine-tunes that `make` writes with these options; they lie beside it."""
    config = family(folder, make, names, **options)
    return merge(**config, out=folder / "merged", **(given or {}))


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / "emr.json").read_text())
    change(manifest)
    (folder / "emr.json").write_text(json.dumps(manifest))


def flip(path: Path, place: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def restored(weights: TaskWeights, task: str) -> dict[str, torch.Tensor]:
    return {name: weights.restore(task, name) for name in weights.entries(task)}


def copied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    same = one.keys() == two.keys()
    return same and all(torch.equal(one[name], two[name]) and one[name].dtype == two[name].dtype for name in one)


def write_berts(place: Path, names: Sequence[str] = "abc") -> Path:
    """A folder with a base and fine-tunes of it that have 2, 3 and more labels."""
    base = tiny_bert(place / "base")
    for seed, name in enumerate(names, start=1):
        tiny_bert(place / name, seed, base=base, num_labels=seed + 1)
    return place


def merge_berts(folder: Path, **kinds: dict[str, Any]) -> Path:
    """A merge of these kinds of BERT, or of classifiers with 2 and 5 labels and of a model without a head; the
    fine-tunes lie beside it."""
    kinds = kinds or {"two": {}, "five": {"num_labels": 5}, "plain": {"task_head": False}}
    base = tiny_bert(folder / "base")
    for seed, (name, options) in enumerate(kinds.items(), 1):
        tiny_bert(folder / name, seed, base=base, **options)
    return merge(base, {name: folder / name for name in kinds}, folder / "merged")


def alone(
    emr: EMRModel, batch: dict[str, torch.Tensor], tasks: Sequence[str], key: str = "logits"
) -> list[torch.Tensor]:
    """What each task gives for its own samples, in the order of the batch."""
    results: dict[int, torch.Tensor] = {}
    for task in set(tasks):
        rows = [row for row, name in enumerate(tasks) if name == task]
        with emr.task(task), torch.no_grad():
            results |= dict(zip(rows, emr.model(**{n: v[rows] for n, v in batch.items()})[key], strict=True))
    return [results[row] for row in range(len(tasks))]


def assert_rows(found: Iterable[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Outputs for each sample are those that its task gives."""
    for row, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(row, wanted, atol=1e-5, rtol=0)
