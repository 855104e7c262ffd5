"""What commands print: one JSON document for a machine, aligned lines for a person."""

import json
import math
from typing import Any

import click


def finite(value: Any) -> Any:
    """The value with null for infinities and NaN, and texts for keys and values, such as dates, that JSON has not."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [finite(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else str(value)


def print_json(value: Any) -> None:
    """Prints one JSON document on standard output."""
    click.echo(json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False))


def print_rows(rows: list[tuple[str, Any]], to_stderr: bool = False) -> None:
    """Prints names and values in two columns."""
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        click.echo(f"{name:<{width}}  {value}".rstrip(), err=to_stderr)


def print_table(rows: list[tuple[str, ...]]) -> None:
    """Prints rows in columns: the first two are names, the others numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row[:2], widths, strict=False)]
        cells += [f"{cell:>{width}}" for cell, width in zip(row[2:], widths[2:], strict=True)]
        click.echo("  ".join(cells).rstrip())


def task_table(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of a result of all tasks: scores, and those of the individual models where they are known."""
    rows = [*result["tasks"].items(), ("mean", {"metric": "", **result["mean"]})]
    known = any("individual" in row for _, row in rows)
    table: list[tuple[str, ...]] = [("task", "metric", "score", *(("individual", "of it") if known else ()))]
    for name, row in rows:
        cells = [f"{row['value']:.4f}"]
        if known:
            share = row.get("of_individual")
            cells += [f"{row['individual']:.4f}", "" if share is None else f"{100 * share:.1f} %"]
        table.append((name, row["metric"], *cells))
    return table


def result_row(result: dict[str, Any]) -> tuple[str, str]:
    """One result of an eval.json as a row: the metric, then its value and where it was measured."""
    where = ", ".join(filter(None, (result["dataset"], result.get("split"))))
    return result.get("name") or result["metric"], f"{result['value']:.4f} on {where}"
