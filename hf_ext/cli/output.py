"""Output of commands: a JSON document for a program, plain lines for a pipe, tables on a terminal."""

import codecs
import json
import sys
from collections.abc import Sequence
from typing import Any

import click

from hf_ext.terminal import count_of, escape, escape_line, is_quiet


def say(*lines: object, to_stderr: bool = False) -> None:
    """Prints lines at once, for a reader that takes the first; line breaks within, as in file names, are escaped."""
    if lines:
        click.echo("\n".join(escape_line(str(line)) for line in lines), err=to_stderr)


def note(text: str, to_stderr: bool = False) -> None:
    """Prints a message that -q suppresses."""
    if not is_quiet():
        say(text, to_stderr=to_stderr)


def print_json(value: Any) -> None:
    """Prints one JSON document on standard output: null for infinities and NaN, text for other types."""
    from hf_ext.hub.card_rules import as_json

    # JSON can escape characters that the encoding lacks.
    escapes = codecs.lookup(sys.stdout.encoding or "utf-8").name != "utf-8"
    click.echo(json.dumps(as_json(value), indent=2, ensure_ascii=escapes, allow_nan=False))


def print_either(as_json: bool, value: Any, *lines: object) -> None:
    """Prints a value as JSON, or the lines that tell of it."""
    if as_json:
        print_json(value)
    else:
        say(*lines)


def print_rows(rows: list[tuple[str, Any]], to_stderr: bool = False, title: str | None = None) -> None:
    """Prints names and values in two columns, on a terminal under a title."""
    cells = [(name, str(value)) for name, value in rows]
    terminal = find_terminal(to_stderr)
    if terminal is None:
        if cells:
            click.echo("\n".join(aligned_table(cells[0], cells[1:], names=2)), err=to_stderr)
        return
    table = _new_table(title, show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    _fill(table, cells, range(2))
    terminal.print(table)


def print_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1, title: str | None = None, legend: str = ""
) -> None:
    """Prints a table whose first columns are names, the others numbers; on a terminal with title and legend."""
    terminal = find_terminal()
    if terminal is None:
        click.echo("\n".join(aligned_table(header, rows, names)))
        return
    parts = fit_columns(header, rows, names, terminal.width)
    for number, columns in enumerate(parts):
        table = _new_table(title if number == 0 else None, legend if number == len(parts) - 1 else None)
        for column in columns:
            table.add_column(escape(header[column]), justify="left" if column < names else "right", overflow="fold")
        _fill(table, rows, columns)
        terminal.print(table)


def _new_table(title: str | None, legend: str | None = None, **options: Any) -> Any:
    from rich.table import Table

    table = Table(title=title and escape(title), title_style="", title_justify="left", **options)
    table.caption, table.caption_style, table.caption_justify = legend and escape(legend), "", "left"
    return table


def _fill(table: Any, rows: Sequence[Sequence[str]], columns: Sequence[int]) -> None:
    for row in rows:
        table.add_row(*(escape_line(row[column]) for column in columns))


def fit_columns(header: Sequence[str], rows: Sequence[Sequence[str]], names: int, width: int) -> list[list[int]]:
    """Splits the columns of a table that is too wide for a terminal; every part starts with the name columns."""
    # A column has a space on both sides and a line after it; the first line adds one more.
    widths = [max(map(len, column)) + 3 for column in zip(header, *rows, strict=True)]
    parts = [list(range(names))]
    for column in range(names, len(header)):
        if sum(widths[place] for place in (*parts[-1], column)) + 1 > width and len(parts[-1]) > names:
            parts.append(list(range(names)))
        parts[-1].append(column)
    return parts


def aligned_table(header: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> list[str]:
    """A table as lines: the first columns, which are names, left-aligned, the others right-aligned."""
    columns = []
    for place, column in enumerate(zip(header, *rows, strict=True)):
        cells = [escape_line(cell) for cell in column]
        side, width = str.ljust if place < names else str.rjust, max(map(len, cells))
        columns.append([side(cell, width) for cell in cells])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def find_terminal(to_stderr: bool = False) -> Any:
    """A rich console for a terminal; None for a pipe or a file."""
    stream = sys.stderr if to_stderr else sys.stdout
    if not stream.isatty():
        return None
    from rich.console import Console

    # All styles come from this module, and all text is escaped here.
    console = Console(file=getattr(stream, "within", stream), highlight=False, markup=False, emoji=False)
    if console.width < 20:
        # Of COLUMNS=0, where rich would print nothing; a narrow terminal breaks the lines itself.
        console.width = 80
    return console


def decimals(value: float) -> str:
    """A number with four decimals, or four digits where fewer than three of them would show."""
    return f"{value:.4f}" if value == 0 or not abs(value) < 0.01 else f"{value:.4g}"


def result_row(result: dict[str, Any]) -> tuple[str, str]:
    """One result of an eval.json as a row: metric, then value and data set."""
    where = ", ".join(filter(None, (result["dataset"], result.get("split"))))
    # A model that somebody published may say anything.
    count = result.get("examples")
    told = f", {count_of(count, 'example')}" if isinstance(count, int) else ""
    return result.get("name") or result["metric"], f"{decimals(result['value'])} on {where}{told}"
