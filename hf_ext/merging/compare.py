"""Merges side by side, by their reports; and an artifact's tasks beside the checkpoints that they came from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_ext.emr.artifact import open_masks
from hf_ext.emr.report import aligned_table, number_text
from hf_ext.emr.weights import TaskWeights

from ..hub.safetensors_headers import CheckpointError, parse_json_object
from .sources import Source, open_weights
from .updating import source_spec

REPORT = "report.json"
# Elements that are compared at once.
_PIECE = 1 << 20


def read_report(source: str | Path, *, token: str | bool | None = None, endpoint: str | None = None) -> dict[str, Any]:
    """Reads the report of a merge."""
    path = Path(source).expanduser()
    if not path.exists() and "/" in str(source):
        path = _download_report(str(source), token, endpoint)
    elif path.is_dir():
        path = path / REPORT
    if not path.is_file():
        raise CheckpointError(f"{source}: no {REPORT}; name the folder of a merge, or org/name[@revision] of one.")
    report = parse_json_object(path.read_bytes(), str(path))
    if report.get("format_version") != 1 or not _is_complete(report):
        raise CheckpointError(f"{path} is no report of a merge that this version reads; merge again.")
    return report


def _is_complete(report: Mapping[str, Any]) -> bool:
    """Whether a report has what a comparison takes of it, of the right kinds."""
    method, sizes, tasks = (report.get(name) for name in ("method", "sizes", "tasks"))
    if not (isinstance(method, dict) and isinstance(sizes, dict) and isinstance(tasks, list)):
        return False
    if not isinstance(method.get("method"), str) or not isinstance(method.get("rescale"), str | None):
        return False
    counts = (sizes.get("artifact"), sizes.get("artifact_and_base", 0))
    return "masks" in method and all(isinstance(count, int) for count in counts) and all(map(_is_entry, tasks))


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("error"), dict):
        return False
    # What is not known is None.
    numbers = (entry.get(name, "") for name in ("norm", "elements"))
    errors = (entry["error"].get(name) for name in ("one_bit", "unified", "rescaled"))
    return isinstance(entry.get("task"), str) and all(isinstance(n, int | float | None) for n in (*numbers, *errors))


def _download_report(source: str, token: str | bool | None, endpoint: str | None) -> Path:
    """The report of a repository, in the cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, _, revision = source.partition("@")
    try:
        return Path(hf_hub_download(name, REPORT, revision=revision or None, token=token, endpoint=endpoint))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise CheckpointError(
            f"{source}: its {REPORT} cannot be fetched ({str(error).splitlines()[0]}); check the name and the token."
        ) from error


def compare_merges(
    sources: Sequence[str | Path], *, token: str | bool | None = None, endpoint: str | None = None
) -> dict[str, Any]:
    """Sets merges side by side: how far each is from every task's own checkpoint, beside 1-bit deltas, and its
    size."""
    reports = [read_report(source, token=token, endpoint=endpoint) for source in sources]
    entries = [{entry["task"]: entry for entry in report["tasks"]} for report in reports]
    names = list(dict.fromkeys(task for found in entries for task in found))
    tasks: list[dict[str, Any]] = []
    for name in names:
        have = [found.get(name) for found in entries]
        own = [entry for entry in have if entry is not None]
        errors = [
            None if entry is None else entry["error"].get("rescaled" if report["method"]["masks"] else "unified")
            for entry, report in zip(have, reports, strict=True)
        ]
        tasks.append({"task": name, "errors": errors, "one_bit": own[0]["error"].get("one_bit")})
    shared = [task for task in tasks if None not in task["errors"]]
    merges = []
    for index, (source, report) in enumerate(zip(sources, reports, strict=True)):
        known = [task["errors"][index] for task in shared]
        merges.append(
            {
                "name": str(source),
                **{key: report["method"].get(key) for key in ("method", "rescale", "masks")},
                "error": sum(known) / len(known) if known else None,
                "bytes": report["sizes"]["artifact"],
                "bytes_with_base": report["sizes"].get("artifact_and_base", report["sizes"]["artifact"]),
            }
        )
    one_bit = [task["one_bit"] for task in shared if task["one_bit"] is not None]
    return {
        "merges": merges,
        "tasks": tasks,
        "one_bit": sum(one_bit) / len(one_bit) if one_bit else None,
        "warnings": _differences(sources, reports),
    }


def _differences(sources: Sequence[str | Path], reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """What makes merges hard to compare: other tasks, other checkpoints of the same name."""
    warnings = []
    first = {entry["task"]: entry for entry in reports[0]["tasks"]}
    for source, report in zip(sources[1:], reports[1:], strict=True):
        others = {entry["task"]: entry for entry in report["tasks"]}
        if others.keys() != first.keys():
            different = ", ".join(sorted(others.keys() ^ first.keys()))
            warnings.append(f"{source} and {sources[0]} differ in tasks ({different}): means are over what all have.")
        changed = [
            name
            for name in first
            if name in others
            and (
                first[name]["elements"] != others[name]["elements"]
                or not math.isclose(first[name]["norm"] or 0, others[name]["norm"] or 0, rel_tol=1e-9)
            )
        ]
        if changed:
            warnings.append(
                f"{source} and {sources[0]} differ in the task vectors of {', '.join(changed)}: they are of another "
                "checkpoint or base, or other tensors were merged."
            )
    return warnings


def comparison_lines(found: Mapping[str, Any]) -> list[str]:
    """The comparison as a table for a terminal."""
    merges = found["merges"]
    names = [Path(merge["name"]).name for merge in merges]
    if len(set(names)) < len(names):
        names = [merge["name"] for merge in merges]
    header = ["error", *names, "1-bit deltas"]
    rows = [[task["task"], *map(number_text, [*task["errors"], task["one_bit"]])] for task in found["tasks"]]
    rows.append(["mean", *map(number_text, [*(merge["error"] for merge in merges), found["one_bit"]])])
    rows.append(["method", *(merge["method"] for merge in merges), ""])
    rows.append(["rescale", *(merge["rescale"] if merge["masks"] else "-" for merge in merges), ""])
    rows.append(["bytes", *(f"{merge['bytes']:,}" for merge in merges), ""])
    rows.append(["with the base", *(f"{merge['bytes_with_base']:,}" for merge in merges), ""])
    return [*aligned_table(header, rows), *(f"warning: {text}" for text in found["warnings"])]


def compare_with_checkpoints(
    artifact: str | Path,
    *,
    tasks: Sequence[str] | None = None,
    checkpoints: Mapping[str, str] | None = None,
    base: str | Path | None = None,
    token: str | bool | None = None,
    endpoint: str | None = None,
) -> list[dict[str, Any]]:
    """Restores tasks of an artifact and measures how far each is from its own checkpoint, tensor by tensor."""
    weights = TaskWeights(artifact, base=base, token=token, endpoint=endpoint)
    report = read_report(artifact, token=token, endpoint=endpoint)
    norms = {entry["task"]: entry["norm"] for entry in report["tasks"]}
    found = []
    for task in weights.manifest.tasks if tasks is None else tasks:
        # Says which tasks there are, should this be none of them.
        entries = weights.entries(task)
        origin = weights.manifest.tasks[task].origin
        spec = (checkpoints or {}).get(task) or source_spec(origin, weights.folder)
        with (
            open_weights(task, spec, token=token, endpoint=endpoint) as source,
            open_masks(weights.folder, weights.manifest, task) as masks,
        ):
            _require_same(source, task, entries)
            measured = {name: _measure(weights, task, name, source) for name in entries}
            masked = set(masks)
        elements = sum(math.prod(shape) for _, shape in entries.values())
        distance, norm = math.fsum(measured[name].distance for name in masked), norms.get(task)
        found.append(
            {
                "task": task,
                "checkpoint": spec,
                "elements": elements,
                "different": sum(piece.different for piece in measured.values()) / max(elements, 1),
                "largest": max((piece.largest for piece in measured.values()), default=0.0),
                "error": distance / norm**2 if norm else None,
                "raw_different": [name for name in entries if name not in masked and measured[name].different],
            }
        )
    return found


class _Difference(NamedTuple):
    """Between a restored tensor and that of the checkpoint."""

    different: int
    largest: float
    distance: float


def _require_same(source: Source, task: str, entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    """The checkpoint has what is restored, in the same shapes; tied names may be only in the checkpoint."""
    for name, (_, shape) in entries.items():
        info = source.tensors.get(name)
        if info is None or info.shape != shape:
            raise CheckpointError(
                f"{source.spec} is not the checkpoint of task {task!r}: {name!r} is "
                f"{'missing' if info is None else info.shape}, expected {shape}; pass where it is in `checkpoints`."
            )


def _measure(weights: TaskWeights, task: str, name: str, source: Source) -> _Difference:
    """Compares one tensor, the original in pieces."""
    restored = weights.restore(task, name).view(-1)
    different, largest, distance = 0, 0.0, 0.0
    for start in range(0, len(restored), _PIECE):
        piece = restored[start : start + _PIECE]
        original = torch.empty(len(piece), dtype=source.tensors[name].dtype)
        source.read_into(name, start, start + len(piece), original)
        difference = original.double() - piece.double()
        different += int(difference.count_nonzero())
        largest = max(largest, float(difference.abs().max()))
        distance += float(difference.square().sum())
    return _Difference(different, largest, distance)


def checkpoint_lines(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Restored tasks beside their checkpoints, as a table for a terminal."""
    header = ["task", "error", "largest difference", "different elements", "different raw tensors"]
    rows = [
        [
            entry["task"],
            number_text(entry["error"]),
            f"{entry['largest']:.3g}",
            f"{100 * entry['different']:.1f} %",
            str(len(entry["raw_different"])),
        ]
        for entry in found
    ]
    return aligned_table(header, rows)
