"""Answers of a trained MRConv to a series of numbers in a file: its class, its values, or a class for each row."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from hf_ext.data.sequence_files import SUFFIXES, read_file
from hf_ext.mrconv.streaming_mrconv import MRConvCache
from hf_ext.tasks.series import read_numbers

logger = logging.get_logger(__name__)

# Rows of a long file that a causal model takes at once.
_ROWS = 4096


@torch.no_grad()
def answer_series(
    model: Any, path: Path, answer: str, top_k: int = 1, columns: list[str] | None = None
) -> list[dict[str, Any]]:
    """
    The answer to one file. A causal model of positions streams, however long the file is.

    Args:
        model (`PreTrainedModel`): An MRConv that takes numbers.
        path (`Path`): A CSV, TSV, parquet or NumPy file; each row a position.
        answer (`str`): `"classes"`, `"values"` or `"positions"`: what the model was trained to tell.
        top_k (`int`, defaults to 1): Likeliest classes of the file or of each position.
        columns (`list[str]`, *optional*):
            The channels in the order of the training; when not given, those of the training by name, or all columns
            of numbers where the model has no names.

    Returns:
        `list[dict]`: `label` and `score` of each class, with its `position` where each has one; `label` and `value`
        of each value.

    Raises:
        ValueError: If the file or its columns do not fit the model.
    """
    config = model.config
    values = read_channels(path, columns or config.input_columns, config.input_size)
    series = torch.from_numpy(values).float()[None].to(model.device)
    # What is missing takes the mean of its channel.
    observed = ~series.isnan()
    streams = answer == "positions" and not config.bidirectional
    if series.shape[1] > config.longest_input and not streams:
        logger.warning(f"{path} has {series.shape[1]} positions: the first {config.longest_input} count.")
        series, observed = series[:, : config.longest_input], observed[:, : config.longest_input]
    if streams:
        logits = torch.cat(list(_stream(model, series, observed)), 1)
    else:
        logits = model(input_values=series, observed_mask=observed).logits.float()
    names = config.id2label
    if answer == "values":
        return [{"label": names[place], "value": value} for place, value in enumerate(logits[0].tolist())]
    scores, places = logits[0].softmax(-1).topk(min(top_k, len(names)))
    if answer == "classes":
        return [{"label": names[place], "score": score} for place, score in _pairs(places, scores)]
    return [
        {"position": position, "label": names[place], "score": score}
        for position, row in enumerate(zip(places, scores, strict=True))
        for place, score in _pairs(*row)
    ]


def _pairs(places: torch.Tensor, scores: torch.Tensor) -> Iterator[tuple[int, float]]:
    return zip(places.tolist(), scores.tolist(), strict=True)


def read_channels(path: Path, columns: list[str] | None, channels: int) -> np.ndarray:
    """The numbers of a file, `[length, channels]`."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path} is no file of a sequence: allowed are {', '.join(SUFFIXES)}.")
    table = read_file(path)
    chosen = columns or [name for name, column in table.items() if column.dtype != object]
    if absent := [name for name in chosen if name not in table]:
        raise ValueError(
            f"{path} has no column {', '.join(absent)}; it has {', '.join(table)}: name those that are the channels "
            f"of the training, {', '.join(chosen)}, in their order: --columns a,b."
        )
    example = {**table, "file": {"path": str(path), "bytes": None}}
    parts = [read_numbers(example, name, "columns") for name in chosen]
    if sum(part.shape[1] for part in parts) != channels:
        found = ", ".join(
            name if part.shape[1] == 1 else f"{name} ({part.shape[1]})"
            for name, part in zip(chosen, parts, strict=True)
        )
        raise ValueError(
            f"{path} has the channels {found}, the model takes {channels}: name those that it was trained on, in "
            "their order: --columns a,b."
        )
    return np.concatenate(parts, axis=1)


def _stream(model: Any, series: torch.Tensor, observed: torch.Tensor) -> Iterator[torch.Tensor]:
    """Logits of all positions of a causal model, part by part, with its state between them."""
    if series.shape[1] <= model.config.longest_input:
        yield model(input_values=series, observed_mask=observed).logits.float()
        return
    cache = MRConvCache(model.config)
    for part, known in zip(torch.split(series, _ROWS, 1), torch.split(observed, _ROWS, 1), strict=True):
        yield model(input_values=part, observed_mask=known, cache=cache).logits.float()
