"""Writes what `emr_merge.py` measured: medians, ratios beside the targets, the table, two JSON files and a picture."""

import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from emr_measuring import RunLog
from timing import installed_versions

LABELS = {
    "merge": "hf-ext merge (EMR)",
    "merge_command": "the same, whole command",
    "in_memory": "authors' layout in memory",
    "fusion_bench": "fusion_bench EMR, nothing written",
    "average": "hf-ext average",
    "mergekit_linear": "mergekit linear",
    "ties": "hf-ext TIES",
    "mergekit_ties": "mergekit TIES",
    "read_write_2_threads": "read and write, 2 threads",
    "read_write_1_thread": "read and write, 1 thread",
    "read_write_unflushed": "the same, 2 threads, not flushed",
}
MEASURES = (
    "seconds",
    "processor_seconds",
    "import_seconds",
    "process_seconds",
    "process_processor_seconds",
    "process_peak",
    "peak_above_imports",
    "anonymous_peak_above_imports",
    "bytes_read",
    "bytes_written",
    "process_bytes_written",
    "result_bytes",
)


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of one row over its rounds."""
    summary: dict[str, Any] = {
        key: statistics.median(values) for key in MEASURES if (values := [row[key] for row in rows if key in row])
    }
    return {
        "rounds": len(rows),
        **summary,
        "every_seconds": [row.get("seconds", row["process_seconds"]) for row in rows],
    }


def targets(table: dict[str, Any], memory: list[dict[str, Any]], use: dict[str, Any] | None) -> dict[str, Any]:
    """Each target of the issue that this run can answer: (measured, allowed, met)."""

    def ratio(one: str, other: str, key: str) -> Callable[[], float]:
        return lambda: table[one][key] / table[other][key]

    peaks = [row["peak_above_imports"] for row in memory]
    wanted: dict[str, tuple[Callable[[], float], float]] = {
        "merge / authors' layout, work": (ratio("merge", "in_memory", "seconds"), 1 / 8),
        "merge / authors' layout, process": (ratio("merge_command", "in_memory", "process_seconds"), 1 / 6),
        "the same, work, processor time": (ratio("merge", "in_memory", "processor_seconds"), 1 / 8),
        "the same, process, processor time": (ratio("merge_command", "in_memory", "process_processor_seconds"), 1 / 6),
        "merge / mergekit linear, work": (ratio("merge", "mergekit_linear", "seconds"), 1 / 2),
        "merge / mergekit linear, process": (ratio("merge", "mergekit_linear", "process_seconds"), 1 / 2),
        "merge / reading and writing, 2 threads": (ratio("merge", "read_write_2_threads", "seconds"), 3),
        "merge / reading and writing, 1 thread": (ratio("merge", "read_write_1_thread", "seconds"), 3),
        "peak above imports, bytes": (lambda: table["merge"]["peak_above_imports"], 200e6),
        "bytes written": (lambda: table["merge"]["bytes_written"], 0.63e9),
        "memory curve, largest / smallest peak": (lambda: max(peaks) / min(peaks), 1.2),
        "switch / copy": (lambda: (use or {})["switch_over_copy"], 2),
    }
    answers = {}
    for name, (measure, allowed) in wanted.items():
        try:
            value = measure()
        except (KeyError, ValueError):
            # A row that was not run.
            continue
        answers[name] = {"measured": value, "allowed": allowed, "met": value <= allowed}
    return answers


def use_summary(row: dict[str, Any]) -> dict[str, Any]:
    times = row["result"]
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = [one / other for one, other in zip(times["switch"], times["copy"], strict=True)]
    return {
        "switch_seconds": medians["switch"],
        "copy_seconds": medians["copy"],
        "switch_over_copy": statistics.median(ratios),
        "turns": len(ratios),
        "files": row["files"],
    }


def machine(cores: list[int]) -> dict[str, Any]:
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    return {
        "processor": model.partition(": ")[2],
        "cores_used": len(cores),
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "versions": installed_versions("torch", "numpy", "numba", "safetensors", "transformers", "hf-ext"),
    }


def print_table(table: dict[str, Any], answers: dict[str, Any]) -> None:
    print(f"\n{'':36}{'work s':>8}{'process s':>11}{'peak MB':>9}{'written GB':>12}")
    for name, row in table.items():
        work = f"{row['seconds']:8.2f}" if "seconds" in row else f"{'':8}"
        peak = row.get("peak_above_imports", row["process_peak"]) / 1e6
        written = row.get("bytes_written", row["process_bytes_written"]) / 1e9
        print(f"{LABELS[name]:36}{work}{row['process_seconds']:11.2f}{peak:9.0f}{written:12.3f}")
    for name, answer in answers.items():
        print(f"{name:44}{answer['measured']:14.6g} of {answer['allowed']:<12g}{'met' if answer['met'] else 'MISSED'}")


def write_results(folder: Path, log: RunLog, settings: dict[str, Any], cores: list[int]) -> None:
    table = {name: summarise(rows) for name in LABELS if (rows := log.named(name))}
    memory = [row for key, row in log.rows.items() if key.startswith("memory_")]
    uses = log.named("use")
    use = use_summary(uses[0]) if uses else None
    answers = targets(table, memory, use)
    load = [row["load_average"] for row in log.rows.values()]
    head = {"settings": settings, "machine": machine(cores), "load_average": {"least": min(load), "most": max(load)}}
    folder.mkdir(parents=True, exist_ok=True)
    content = {**head, "targets": answers, "rows": table, "use": use}
    (folder / "emr_merge.json").write_text(json.dumps(content, indent=2) + "\n")
    keys = ("size", "tasks", "parameters", *MEASURES)
    curve = [{key: row[key] for key in keys if key in row} for row in memory]
    (folder / "emr_memory.json").write_text(json.dumps({**head, "curve": curve}, indent=2) + "\n")
    print_table(table, answers)
    print(f"\nwritten: {folder}/emr_merge.json, emr_memory.json")
