"""What a trained MRConv says of a file: its values, a class for each row, or the rows that come next."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_ext.mrconv.modeling_mrconv import (
    MRConvForSequenceClassification,
    MRConvForTimeSeriesPrediction,
    MRConvForTokenClassification,
)
from hf_ext.mrconv.streaming_mrconv import MRConvCache
from hf_ext.training.sequence_files import SUFFIXES, read_file

from .series import read_numbers

logger = logging.get_logger(__name__)

# Rows of a long file that a causal model takes at once.
_ROWS = 4096


@torch.no_grad()
def predict_file(model: PreTrainedModel, path: Path, columns: list[str] | None = None) -> pd.DataFrame:
    """
    Reads a sequence and says what a model makes of it. A causal model of positions streams, however long the file is.

    Args:
        model (`PreTrainedModel`): A model of values, positions or forecasts of numbers.
        path (`Path`): A CSV, TSV, parquet or NumPy file; each row a position.
        columns (`list[str]`, *optional*):
            The channels in the order of the training; when not given, those of the training by name, or all columns
            of numbers where the model has no names.

    Returns:
        `pandas.DataFrame`: One row for a whole sequence, one for each position, or one for each that comes next.

    Raises:
        ValueError: If the file or its columns do not fit the model.
    """
    config: Any = model.config
    if getattr(config, "vocab_size", 0) is not None:
        raise ValueError("the model reads no numbers: predict is for models of series.")
    if isinstance(model, MRConvForSequenceClassification) and config.problem_type != "regression":
        raise ValueError("the model tells the class of a whole series: say `hf-ext classify MODEL FILE`.")
    values, names = read_channels(path, columns or config.input_columns, config.input_size)
    model = model.eval()
    series = torch.from_numpy(values).float()[None]
    if isinstance(model, MRConvForTimeSeriesPrediction):
        # As it is evaluated.
        found = model(past_values=series[:, -config.context_length :]).prediction_outputs
        return pd.DataFrame(found[0].numpy(), columns=names)
    streams = isinstance(model, MRConvForTokenClassification) and not config.bidirectional
    if series.shape[1] > config.longest_input and not streams:
        logger.warning(f"{path} has {series.shape[1]} positions: the first {config.longest_input} count.")
        series = series[:, : config.longest_input]
    if isinstance(model, MRConvForTokenClassification):
        shares = torch.cat(list(_stream(model, series)), 1)[0].softmax(-1)
        return _name_classes(model, shares.numpy())
    if not isinstance(model, MRConvForSequenceClassification):
        raise ValueError(f"a {type(model).__name__} says nothing of numbers: predict is for models of series.")
    logits = model(input_values=series).logits.float()
    return pd.DataFrame(logits.numpy(), columns=list(config.id2label.values()))


def read_channels(path: Path, columns: list[str] | None, channels: int) -> tuple[np.ndarray, list[str]]:
    """The numbers of a file, `[length, channels]`, and the names of the channels."""
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
    names = [name if part.shape[1] == 1 else f"{name}{index}" for name, part in zip(chosen, parts, strict=True)
             for index in range(part.shape[1])]  # fmt: skip
    if len(names) != channels:
        raise ValueError(
            f"{path} has the channels {', '.join(names)}, the model takes {channels}: name those that it was trained "
            "on, in their order: --columns a,b."
        )
    return np.concatenate(parts, axis=1), names


def _stream(model: MRConvForTokenClassification, series: torch.Tensor) -> Iterator[torch.Tensor]:
    """Logits of all positions: of a causal model part by part, with its state between them."""
    if model.config.bidirectional or series.shape[1] <= model.config.longest_input:
        yield model(input_values=series).logits.float()
        return
    cache = MRConvCache(model.config)
    for part in series.split(_ROWS, 1):
        yield model(input_values=part, cache=cache).logits.float()


def _name_classes(model: PreTrainedModel, shares: np.ndarray) -> pd.DataFrame:
    """The most likely class of each row, and the probability of each class."""
    names = list((model.config.id2label or {}).values())
    table = pd.DataFrame(shares, columns=names)
    table.insert(0, "prediction", [names[index] for index in shares.argmax(-1)])
    return table
