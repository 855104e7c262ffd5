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


def result_row(result: dict[str, Any]) -> tuple[str, str]:
    """One result of an eval.json as a row: the metric, then its value and where it was measured."""
    where = ", ".join(filter(None, (result["dataset"], result.get("split"))))
    return result.get("name") or result["metric"], f"{result['value']:.4f} on {where}"
