"""Answers of a trained MRConv to a series of numbers in a file: its class, its values, or a class for each row."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers.utils import logging

from hf_ext.data.labels import class_name
from hf_ext.data.opening import open_source
from hf_ext.data.roles import Hints, find_joined, find_roles, step_columns
from hf_ext.data.sequence_files import (
    ARRAY_COLUMN,
    ARRAYS,
    SUFFIXES,
    TS,
    holds_lists,
    plain_column,
    read_file,
    read_ts,
    trim,
)
from hf_ext.data.source import DataSource
from hf_ext.data.tables import read_table
from hf_ext.data.times import seconds_of
from hf_ext.mrconv.streaming_mrconv import MRConvCache
from hf_ext.tasks.series import read_columns

from ..errors import DataError

logger = logging.get_logger(__name__)

# Files of series; of the last two each row is one.
INPUTS = (*SUFFIXES, ".jsonl", ".json")
# The rows of the file that positions are, beside the columns of a series.
ROWS = "the rows of the file"
# Rows of a long file that a causal model takes at once.
_ROWS = 4096


@torch.no_grad()
def answer_series(
    model: Any,
    path: Path,
    answer: str,
    top_k: int = 1,
    columns: list[str] | None = None,
    hints: Hints | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """
    The answers to a file, by the name of each series in it. A causal model of positions streams long ones.

    Args:
        model (`PreTrainedModel`): An MRConv that takes numbers.
        path (`Path`):
            A file as trainings read it: a series, whose rows are positions, or several: a row each, named in a column,
            lists in rows, an array of three axes.
        answer (`str`): `"classes"`, `"values"` or `"positions"`: what the model was trained to tell.
        top_k (`int`, defaults to 1): Likeliest classes of a series or of each position.
        columns (`list[str]`, *optional*):
            The channels in the order of the training; when not given, those of the training by name, or all columns
            of numbers where the model has no names.
        hints ([`Hints`], *optional*): The columns of the time and of the series' names, where those are not found.

    Returns:
        `dict[str, list[dict]]`: `label` and `score` of each class, with its `position`, the row in the file, where
        each has one; `label` and `value` of each value.

    Raises:
        DataError: If the file or its columns do not fit the model.
    """
    config = model.config
    found = {}
    channels, classes = columns or config.input_columns, config.id2label.values()
    for name, example in read_examples(path, channels, config.input_size, hints, classes).items():
        values = read_channels(path, example, channels, config.input_size)
        found[name] = _answer(model, name, values, answer, top_k)
        for row in found[name]:
            if "position" in row:
                row["position"] = int(example[ROWS][row["position"]])
    return found


def _answer(model: Any, name: str, values: np.ndarray, answer: str, top_k: int) -> list[dict[str, Any]]:
    """The answer to the numbers of one series, `[length, channels]`."""
    config = model.config
    series = torch.from_numpy(values).float()[None].to(model.device)
    # What is missing takes the mean of its channel.
    observed = ~series.isnan()
    step, more = series.shape[1], {}
    if step > config.longest_input and answer == "positions" and not config.bidirectional:
        # Part by part, with the state between them.
        step, more = _ROWS, {"cache": MRConvCache(config)}
    elif step > config.longest_input:
        logger.warning(f"{name} has {step} positions: only the first {config.longest_input} are used.")
        series, observed = series[:, : config.longest_input], observed[:, : config.longest_input]
    parts = zip(torch.split(series, step, 1), torch.split(observed, step, 1), strict=True)
    found = [model(input_values=part, observed_mask=known, **more).logits.float() for part, known in parts]
    logits = torch.cat(found, 1)
    names = config.id2label
    if answer == "values":
        return [{"label": names[place], "value": value} for place, value in enumerate(logits[0].tolist())]
    several = config.problem_type == "multi_label_classification"
    chances = logits[0].sigmoid() if several else logits[0].softmax(-1)
    scores, places = (part.reshape(-1, part.shape[-1]).tolist() for part in chances.topk(min(top_k, len(names))))
    rows = [
        [{"label": names[place], "score": score} for place, score in zip(*row, strict=True)]
        for row in zip(places, scores, strict=True)
    ]
    if answer == "classes":
        return rows[0]
    return [{"position": position, **item} for position, row in enumerate(rows) for item in row]


def read_examples(
    path: Path, columns: list[str] | None, channels: int, hints: Hints | None = None, classes: Iterable[str] = ()
) -> dict[str, dict[str, Any]]:
    """
    The series of a file by their names: their columns, and the row of the file that each position is. Without names of
    columns, a first or last one that holds but classes of the model is no step.
    """
    ending = path.suffix.lower()
    if ending not in INPUTS:
        raise DataError(f"{path} is not a file of a sequence; allowed: {', '.join(INPUTS)}.")
    if ending in ARRAYS:
        arrays = read_file(path)
        given = [array for name, array in arrays.items() if name in (columns or arrays)]
        if any(array.ndim > 2 or (array.ndim == 2 and channels == 1 < array.shape[1]) for array in given):
            return _count(path, [dict(zip(arrays, row, strict=True)) for row in zip(*arrays.values(), strict=True)])
        return {str(path): _with_rows(arrays, np.arange(len(next(iter(arrays.values())))))}
    if ending == TS:
        return _count(path, [{ARRAY_COLUMN: series} for series in read_ts(path)[0]])
    if ending not in SUFFIXES or (ending == ".parquet" and holds_lists(path)):
        return _count(path, list(open_source(DataSource(str(path), split="train")).with_format("numpy")))
    table = read_table(path)
    frame, wide = table.frame, columns == [ARRAY_COLUMN] and ARRAY_COLUMN not in table.frame
    hints = hints or Hints()
    # Columns of texts, which may be several things, are not asked for.
    numbers = [str(name) for name in frame if pd.api.types.is_numeric_dtype(frame[name].dtype)]
    steps, inputs = step_columns(numbers) if wide else [], () if wide else tuple(columns or numbers)
    if not steps:
        try:
            roles = find_roles(table, replace(hints, inputs=tuple(name for name in inputs if name in numbers)))
        except DataError as error:
            raise DataError(f"{path}: {error}; leave out what the model does not need.") from error
        steps = roles.inputs if wide and roles.layout == "series" else []
    ends = [steps[0], steps[-1]] if steps and table.nameless else []
    for label in [name for name in ends if {*map(class_name, frame[name])} <= {*classes}][:1]:
        logger.warning(f"{path}: column {label} holds classes of the model, and is left out.")
        steps = [name for name in steps if name != label]
    if steps:
        return _count(path, [{ARRAY_COLUMN: trim(row)} for row in frame[steps].to_numpy(dtype=np.float64)])
    if told := [*table.notes, *roles.notes]:
        logger.warning(f"{path}: {'; '.join(told)}.")
    if roles.problems:
        logger.warning(f"{path} is read as it is written: {'; '.join(roles.problems)}.")
    elif (joined := find_joined(frame, roles)) is not None:
        logger.warning(f"{path} is read as one series, though {joined}.")
    parts = {str(path): np.arange(len(frame))}
    if roles.series is not None and roles.series not in inputs:
        groups = frame.groupby(roles.series, sort=False).indices.items()
        parts = {f"{path}, {roles.series} {class_name(name)}": np.asarray(rows) for name, rows in groups}
    if roles.time is not None and not roles.problems:
        order = seconds_of(frame[roles.time], [*parts.values()])
        parts = {name: rows[np.argsort(order[rows], kind="stable")] for name, rows in parts.items()}
    arrays = {str(name): plain_column(values) for name, values in frame.items()}
    return {name: _with_rows(arrays, rows) for name, rows in parts.items()}


def _count(path: Path, examples: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Examples by the number of their row."""
    return {f"{path}, row {place}": {**example, ROWS: range(1 << 40)} for place, example in enumerate(examples, 1)}


def _with_rows(arrays: dict[str, np.ndarray], rows: np.ndarray) -> dict[str, Any]:
    return {**{name: values[rows] for name, values in arrays.items()}, ROWS: rows}


def read_channels(path: Path, table: dict[str, Any], columns: list[str] | None, channels: int) -> np.ndarray:
    """The numbers of a series, `[length, channels]`."""
    table = {name: column for name, column in table.items() if name != ROWS}
    chosen = columns or [name for name, column in table.items() if np.asarray(column).dtype.kind in "iuf"]
    if absent := [name for name in chosen if name not in table]:
        raise DataError(
            f"{path} has no column {', '.join(absent)}; it has {', '.join(table)!s:.300}: list the columns for the "
            f"channels of the training, {', '.join(chosen)}, in this order: --columns a,b."
        )
    example = {**table, "file": {"path": str(path), "bytes": None}}
    values = read_columns(example, chosen, "--columns") if chosen else np.empty((0, 0))
    if values.shape[1] != channels:
        raise DataError(
            f"{path} has {values.shape[1]} channels in {', '.join(chosen) or 'no column'}, the model takes {channels}:"
            " list the columns that it was trained on, in their order: --columns a,b."
        )
    return values
