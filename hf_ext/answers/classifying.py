"""Answers of a trained model to sounds, pictures, texts, also in pairs, and series: classes and values."""

import io
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd
import torch
from PIL import Image, ImageOps
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModelForAudioClassification,
    AutoModelForImageClassification,
    AutoModelForNextSentencePrediction,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)
from transformers.utils import logging

from hf_ext.data import sequence_files as sequences
from hf_ext.data.about import METADATA, find_about
from hf_ext.data.cells import class_name
from hf_ext.data.files import AUDIO_SUFFIXES, UNDECODABLE, read_recording
from hf_ext.data.opening import open_source
from hf_ext.data.roles import Hints, find_joined, find_roles, order_rows, step_columns
from hf_ext.data.source import DataSource
from hf_ext.data.tables import read_table
from hf_ext.hub.checkpoints import split_revision
from hf_ext.mrconv.streaming_mrconv import MRConvCache
from hf_ext.restoration.jobs import find_files, picture_endings, read_list
from hf_ext.tasks.pictures import in_colours
from hf_ext.tasks.series import read_columns
from hf_ext.tasks.texts import read_text
from hf_ext.training.models import adapter_base, load_adapter

from ..errors import DataError, UsageError

logger = logging.get_logger(__name__)

# Files of series; of the last two each row is one.
INPUTS = (*sequences.SUFFIXES, ".jsonl", ".json")
# What series and pairs of texts are read from.
FILES = {"series": INPUTS, "pairs": (".csv", ".tsv", ".parquet", ".jsonl", ".json")}
# The rows of the file that positions are, beside the columns of a series.
ROWS = "the rows of the file"
# Rows of a long file that a causal model takes at once.
_ROWS = 4096


class Kind(NamedTuple):
    """A kind of input: the Auto classes of model and reader, and how transformers' pipelines call both."""

    task: str
    model: Any
    reader: Any
    argument: str


KINDS = {
    "sounds": Kind("audio-classification", AutoModelForAudioClassification, AutoFeatureExtractor, "feature_extractor"),
    "pictures": Kind("image-classification", AutoModelForImageClassification, AutoImageProcessor, "image_processor"),
    "texts": Kind("text-classification", AutoModelForSequenceClassification, AutoTokenizer, "tokenizer"),
}


class Input(NamedTuple):
    """An input to classify: its name in answers, a text, a file or its content, and why it cannot be read."""

    name: str
    value: str | Path | bytes
    reason: str | None = None


class Classifier:
    """A classifier with what reads its inputs; a checkpoint that is none is refused by a [`DataError`]."""

    def __init__(self, source: str, device: str | None = None):
        # What an adapter was put on says the head, and has the reader.
        base = adapter_base(source) or source
        self.kind, self.answer = find_kind(source, load_reader(AutoConfig, base))
        if self.kind == "series":
            positions = self.answer == "positions"
            head = AutoModelForTokenClassification if positions else AutoModelForSequenceClassification
            self.model = load_head(head, source, device)
            return
        if self.kind == "pairs":
            self.model = load_head(AutoModelForNextSentencePrediction, source, device)
            self.reader = load_reader(AutoTokenizer, base)
            return
        about = KINDS[self.kind]
        self.model, self.reader = load_head(about.model, source, device), load_reader(about.reader, base)
        words = {about.argument: self.reader, "device": self.model.device}
        self._pipeline = cast(Any, pipeline)(about.task, model=self.model, **words)

    def find_inputs(self, inputs: list[str]) -> Iterator[Input]:
        """The inputs that the words of a command name: texts themselves; files of folders, patterns and lists."""
        endings = {"sounds": AUDIO_SUFFIXES, "pictures": picture_endings(), **FILES}.get(self.kind, ())
        for word in inputs:
            if self.kind == "texts":
                # A text, that of standard input, or those of a list, one a line.
                given = [sys.stdin.read().removesuffix("\n")] if word == "-" else [word]
                yield from (Input(text, text) for text in (read_list(word) if word.startswith("@") else given))
                continue
            found = [*find_files(word, None, frozenset(endings))]
            sources = [each.source for each in found]
            alone = sources == [Path(os.path.expanduser(word))]
            about = _find_tables(sources) if self.kind == "series" and not alone else set()
            for source, _, _, reason in (each for each in found if each.source not in about):
                yield Input("standard input" if isinstance(source, bytes) else str(source), source, reason)

    def classify(
        self, given: Input, top_k: int = 1, columns: list[str] | None = None, hints: Hints | None = None
    ) -> dict[str, list[dict[str, Any]]]:
        """
        The likeliest classes of an input, each `{"label", "score"}`, by its name; of series also values, and classes
        of positions, as `answer` says; of pairs of texts those of each row. A [`DataError`]: it cannot be read, or
        does not fit the model.
        """
        if given.reason is not None:
            raise DataError(given.reason)
        if self.kind not in FILES:
            found = {given.name: self._classify_whole(given, top_k)}
        elif isinstance(given.value, bytes):
            raise DataError(f"{self.kind} are read from a file of type {', '.join(FILES[self.kind])}: give one.")
        elif self.kind == "pairs":
            found = answer_pairs(self.model, self.reader, Path(given.value), top_k, columns)
        else:
            found = answer_series(self.model, Path(given.value), self.answer, top_k, columns, hints)
        numbers = [float(item.get("score", item.get("value", 0))) for items in found.values() for item in items]
        if not np.isfinite(numbers).all():
            raise DataError(f"the model answers {given.name} with numbers that are not finite.")
        return found

    def _classify_whole(self, given: Input, top_k: int) -> list[dict[str, Any]]:
        options: dict[str, Any] = {"top_k": top_k}
        value: Any = given.value
        if self.kind == "pictures":
            grey = getattr(self.model.config, "num_channels", 3) == 1
            value = read_picture(given.value, "L" if grey else "RGB")
        elif self.kind == "sounds" and self.model.config.model_type != "mrconv":
            # transformers reads files by ffmpeg alone.
            rate, held = self.reader.sampling_rate, isinstance(value, bytes)
            file = {"path": None if held else str(value), "bytes": value if held else None}
            value = {"raw": read_recording(file, rate), "sampling_rate": rate}
        elif self.kind == "texts":
            options |= cut_options(f"{value!s:.60}", str(value), self.reader, self.model)
        return [{"label": item["label"], "score": item["score"]} for item in self._pipeline(value, **options)]


def _find_tables(sources: list[Path | bytes]) -> set[Path | None]:
    """The tables that say what is known of the other files, as trainings find them: they are no series."""
    files = [source for source in sources if isinstance(source, Path)]
    found: set[Path | None] = {file for file in files if file.name in METADATA}
    for folder in {file.parent for file in files} - {file.parent for file in found if file is not None}:
        found.add(find_about(folder, [file for file in files if folder in file.parents]))
    return found


def cut_options(name: str, text: str, tokenizer: Any, model: Any) -> dict[str, Any]:
    """Options by which a tokenizer cuts a text to what its model takes; it is told where it is cut."""
    require_unicode(text)
    config = model.config
    # Some tokenizers do not know how many tokens their model takes.
    known = getattr(config, "longest_input", None) or getattr(config, "max_position_embeddings", None) or 0
    known -= find_first_position(model)
    longest = known if known and 0 < known < tokenizer.model_max_length else tokenizer.model_max_length
    count = len(tokenizer(text, verbose=False)["input_ids"])
    if count > longest:
        kept = "last" if tokenizer.truncation_side == "left" else "first"
        logger.warning(f"{name} has {count} tokens: only the {kept} {longest} are used.")
    return {"truncation": True, "max_length": longest} if count > longest else {}


def find_first_position(model: Any) -> int:
    """The number of a model's first position: RoBERTa and its heirs count from the one behind that of the padding."""
    tables = (part for name, part in model.named_modules() if name.rpartition(".")[2] == "position_embeddings")
    return next((table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None) is not None), 0)


def require_unicode(text: str) -> None:
    """Refuses half a surrogate pair, which JSON and a command line can hold and no tokenizer takes."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise DataError("the text contains half a surrogate pair; give valid Unicode")


def load_head(kind: Any, source: str, device: str | None = None) -> Any:
    """A model, of a peft adapter with its base, on the device, or the GPU; one that lacks tensors is refused."""
    base = adapter_base(source)
    name, revision = split_revision(base or source)
    model, report = kind.from_pretrained(name, revision=revision, output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        told = f"{source} has no {', '.join(missing[:3])} for {type(model).__name__}"
        raise DataError(f"{told}: give a checkpoint that was fine-tuned for the task.")
    if base is not None:
        model = load_adapter(model, source).merge_and_unload()
    try:
        if device == "meta":
            raise RuntimeError("it computes nothing")
        return model.eval().to(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {device} cannot be used: {error}") from error


def load_reader(kind: Any, source: str) -> Any:
    """The configuration, tokenizer, feature extractor or image processor of a checkpoint."""
    name, revision = split_revision(source)
    return kind.from_pretrained(name, revision=revision)


def find_kind(source: str, config: Any) -> tuple[str, str]:
    """The kind of input of a checkpoint, and its answer: `classes`; of series also `values` and `positions`."""
    head = (getattr(config, "architectures", None) or ["no class named"])[0]
    if config.model_type == "mrconv" and config.vocab_size is None:
        # One head of ours classifies tokens and numbers.
        if "ForTokenClassification" in head:
            return "series", "positions"
        if "ForSequenceClassification" in head:
            return "series", "values" if config.problem_type == "regression" else "classes"
    if config.model_type == "mrconv" and "ForRetrieval" in head:
        return "pairs", "classes"
    kind = next((kind for kind, of in KINDS.items() if of.model.__name__.removeprefix("AutoModel") in head), None)
    if kind == "texts" and hears(config):
        kind = "sounds"
    if kind is None or config.problem_type == "regression" or config.num_labels == 1:
        what = "tells values" if kind else f"is no classifier ({head})"
        takes = "classifiers, also of pairs of texts, and models of values or positions of series"
        raise DataError(f"{source} {what}: classify takes {takes}. `hf-ext generate` continues a text.")
    return kind, "classes"


def hears(config: Any) -> bool:
    """True of wav2vec 2.0 and its family, who give their heads of sounds the name of those of texts."""
    return type(config) not in AutoModelForSequenceClassification._model_mapping


def read_picture(value: str | Path | bytes, mode: str = "RGB") -> Image.Image:
    """A picture of a file, or what is in one, in colours or grey."""
    try:
        with Image.open(io.BytesIO(value) if isinstance(value, bytes) else value) as picture:
            # As a camera was held, as `datasets` turns the pictures of a training.
            ImageOps.exif_transpose(picture, in_place=True)
            return in_colours(picture, mode)
    except UNDECODABLE as error:
        name = "standard input" if isinstance(value, bytes) else value
        raise DataError(f"{name} is not a readable picture: {error}") from error


@torch.no_grad()
def answer_series(
    model: Any, path: Path, answer: str, top_k: int = 1, columns: list[str] | None = None, hints: Hints | None = None
) -> dict[str, list[dict[str, Any]]]:
    """
    The answers to a file as trainings read it, by the name of each series in it: `label` and `score` of each class,
    with its `position`, the row in the file, where each has one; `label` and `value` of each value. The `columns` are
    the channels in the order of the training: those of the training by name, or all of numbers, when not given.
    """
    config, found = model.config, {}
    channels, classes = columns or config.input_columns, config.id2label.values()
    for name, example in read_examples(path, channels, config.input_size, hints, classes).items():
        values = read_channels(path, example, channels, config.input_size)
        found[name] = _answer(model, name, values, answer, top_k)
        for row in (row for row in found[name] if "position" in row):
            row["position"] = int(example[ROWS][row["position"]])
    return found


def _answer(model: Any, name: str, values: np.ndarray, answer: str, top_k: int) -> list[dict[str, Any]]:
    """The answer to the numbers of one series, `[length, channels]`."""
    config = model.config
    step, more = len(values), {}
    streams = not config.bidirectional and config.input_delta_std is None and config.branch_norm != "layer"
    if step > config.longest_input and answer == "positions" and streams:
        # Part by part, with the state between them.
        step, more = _ROWS, {"cache": MRConvCache(config)}
    elif step > config.longest_input:
        logger.warning(f"{name} has {step} positions: only the first {config.longest_input} are used.")
        values = values[: config.longest_input]
    parts = torch.split(torch.from_numpy(values).float()[None].to(model.device), step, 1)
    # What is missing takes the mean of its channel.
    found = [model(input_values=part, observed_mask=~part.isnan(), **more).logits.float() for part in parts]
    logits, names = torch.cat(found, 1), config.id2label
    if answer == "values":
        return [{"label": names[place], "value": value} for place, value in enumerate(logits[0].tolist())]
    rows = _rank(logits[0], config, top_k)
    if answer == "classes":
        return rows[0]
    return [{"position": position, **item} for position, row in enumerate(rows) for item in row]


def _rank(logits: torch.Tensor, config: Any, top_k: int) -> list[list[dict[str, Any]]]:
    """The likeliest classes of each row of logits."""
    several, names = config.problem_type == "multi_label_classification", config.id2label
    chances = logits.sigmoid() if several else logits.softmax(-1)
    scores, places = (part.reshape(-1, part.shape[-1]).tolist() for part in chances.topk(min(top_k, len(names))))
    return [
        [{"label": names[place], "score": score} for place, score in zip(*row, strict=True)]
        for row in zip(places, scores, strict=True)
    ]


@torch.no_grad()
def answer_pairs(
    model: Any, tokenizer: Any, path: Path, top_k: int = 1, columns: list[str] | None = None
) -> dict[str, list[dict[str, Any]]]:
    """The likeliest classes of each row of a table with two columns of texts, those of the training unless given."""
    chosen, found = columns or model.config.input_columns or [], {}
    if len(chosen) != 2:
        raise DataError(f"a pair has two texts, got {len(chosen)} columns: name two, --columns premise,hypothesis.")
    for place, example in enumerate(open_source(DataSource(str(path), split="train")), 1):
        inputs: dict[str, torch.Tensor] = {}
        for ending, name in zip(("", "_2"), chosen, strict=True):
            if name not in example:
                told = f"{path} has no column {name}; it has {', '.join(example)!s:.300}"
                raise DataError(f"{told}: name both texts in the order of the training: --columns a,b.")
            text = read_text(example, name, "text_column")
            options = cut_options(f"{path}, row {place}, {name}", text, tokenizer, model)
            tokens = tokenizer(text, return_tensors="pt", **options)
            inputs |= {f"{key}{ending}": tokens[key].to(model.device) for key in ("input_ids", "attention_mask")}
        found[f"{path}, row {place}"] = _rank(model(**inputs).logits.float(), model.config, top_k)[0]
    return found


def read_examples(
    path: Path, columns: list[str] | None, channels: int, hints: Hints | None = None, classes: Iterable[str] = ()
) -> dict[str, dict[str, Any]]:
    """The series of a file by their names: their columns, and the row of the file that each position is."""
    ending = path.suffix.lower()
    if ending not in INPUTS:
        raise DataError(f"{path} is not a file of a sequence; allowed: {', '.join(INPUTS)}.")
    if ending in sequences.ARRAYS:
        arrays = sequences.read_file(path)
        given = [array for name, array in arrays.items() if name in (columns or arrays)]
        if any(array.ndim > 2 or (array.ndim == 2 and channels == 1 < array.shape[1]) for array in given):
            return _count(path, [dict(zip(arrays, row, strict=True)) for row in zip(*arrays.values(), strict=True)])
        return {str(path): {**arrays, ROWS: np.arange(len(next(iter(arrays.values()))))}}
    if ending == sequences.TS:
        return _count(path, [{sequences.ARRAY_COLUMN: series} for series in sequences.read_ts(path)[0]])
    if ending not in sequences.SUFFIXES or (ending == ".parquet" and sequences.holds_lists(path)):
        return _count(path, list(open_source(DataSource(str(path), split="train")).with_format("numpy")))
    table, values = read_table(path), sequences.ARRAY_COLUMN
    frame, wide = table.frame, columns == [values] and values not in table.frame
    # Columns of texts, which may be several things, are not asked for.
    numbers = [name for name in frame if pd.api.types.is_numeric_dtype(frame[name].dtype)]
    steps, inputs = step_columns(numbers) if wide else [], () if wide else tuple(columns or numbers)
    if not steps:
        try:
            chosen = tuple(name for name in inputs if name in numbers)
            roles = find_roles(table, replace(hints or Hints(), inputs=chosen))
        except DataError as error:
            told = str(error).replace("--inputs", "--columns")
            raise DataError(f"{path}: {told}; leave out what the model does not need.") from error
        steps = roles.inputs if wide and roles.layout == "series" else []
    ends = [steps[0], steps[-1]] if steps and table.nameless else []
    for label in [name for name in ends if {*map(class_name, frame[name])} <= {*classes}][:1]:
        logger.warning(f"{path}: column {label} holds classes of the model, and is left out.")
        steps = [name for name in steps if name != label]
    if steps:
        if table.nameless:
            logger.warning(f"{path}: {'; '.join(table.notes)}.")
        series = map(sequences.trim, frame[steps].to_numpy(dtype=np.float64))
        return _count(path, [{values: row} for row in series])
    if notes := [*table.notes, *roles.notes]:
        logger.warning(f"{path}: {'; '.join(notes)}.")
    if roles.problems:
        logger.warning(f"{path} is read as it is written: {'; '.join(roles.problems)}.")
    elif (joined := find_joined(frame, roles)) is not None:
        logger.warning(f"{path} is read as one series, though {joined}.")
    named = roles.series if roles.series not in inputs else None
    parts = order_rows(frame, named, None if roles.problems else roles.time)
    arrays = {name: sequences.plain_column(values) for name, values in frame.items()}
    found = {}
    for name, rows in parts.items():
        told = str(path) if named is None else f"{path}, {named} {class_name(name)}"
        found[told] = {**{column: cells[rows] for column, cells in arrays.items()}, ROWS: rows}
    return found


def _count(path: Path, examples: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Examples by the number of their row."""
    return {f"{path}, row {place}": {**example, ROWS: range(1 << 40)} for place, example in enumerate(examples, 1)}


def read_channels(path: Path, table: dict[str, Any], columns: list[str] | None, channels: int) -> np.ndarray:
    """The numbers of a series, `[length, channels]`."""
    table = {name: column for name, column in table.items() if name != ROWS}
    chosen = columns or [name for name, column in table.items() if np.asarray(column).dtype.kind in "iuf"]
    if absent := [name for name in chosen if name not in table]:
        told = f"{', '.join(absent)}; it has {', '.join(table)!s:.300}"
        raise DataError(f"{path} has no column {told}: list those for {', '.join(chosen)} in order: --columns a,b.")
    example = {**table, "file": {"path": str(path), "bytes": None}}
    values = read_columns(example, chosen, "--columns") if chosen else np.empty((0, 0))
    if values.shape[1] != channels:
        told = f"{values.shape[1]} channels in {', '.join(chosen) or 'no column'}"
        raise DataError(f"{path} has {told}, the model takes {channels}: list its own, in their order: --columns a,b.")
    return values
