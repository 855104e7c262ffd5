"""Answers of a trained classifier to sounds, pictures, texts and series of numbers."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModelForAudioClassification,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)

from hf_ext.data.about import METADATA
from hf_ext.data.broken import UNDECODABLE
from hf_ext.data.roles import Hints
from hf_ext.data.sound_files import AUDIO_SUFFIXES, read_recording
from hf_ext.hub.checkpoints import split_revision
from hf_ext.restoration.jobs import find_files, picture_endings, read_list
from hf_ext.tasks.pictures import in_colours
from hf_ext.training.models import adapter_base, load_adapter

from ..errors import DataError, UsageError
from .series import INPUTS, answer_series


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
_HEADS = {"AudioClassification": "sounds", "ImageClassification": "pictures", "SequenceClassification": "texts"}


class Input(NamedTuple):
    """An input to classify: its name in answers, and a text, a file or its content."""

    name: str
    value: str | Path | bytes


class Classifier:
    """
    A classifier with what reads its inputs.

    Args:
        source (`str`): A folder or `org/name[@revision]`; of a peft adapter the base comes with it.
        device (`str`, *optional*): Where it computes; on the GPU if there is one.

    Raises:
        DataError: If the checkpoint is no classifier.
    """

    def __init__(self, source: str, device: str | None = None):
        # What an adapter was put on says the head, and has the reader.
        base = adapter_base(source) or source
        self.kind, self.answer = find_kind(source, load_reader(AutoConfig, base))
        if self.kind == "series":
            positions = self.answer == "positions"
            head = AutoModelForTokenClassification if positions else AutoModelForSequenceClassification
            self.model = load_head(head, source, device)
            return
        about = KINDS[self.kind]
        self.model, self.reader = load_head(about.model, source, device), load_reader(about.reader, base)
        words = {about.argument: self.reader, "device": self.model.device}
        self._pipeline = cast(Any, pipeline)(about.task, model=self.model, **words)

    def find_inputs(self, inputs: list[str]) -> Iterator[Input]:
        """The inputs that the words of a command name: texts themselves; files of folders, patterns and lists."""
        if self.kind == "texts":
            for word in inputs:
                # A text, that of standard input, or those of a list, one a line.
                given = [sys.stdin.read().removesuffix("\n")] if word == "-" else [word]
                yield from (Input(text, text) for text in (read_list(word) if word.startswith("@") else given))
            return
        endings = frozenset({"sounds": AUDIO_SUFFIXES, "pictures": picture_endings(), "series": INPUTS}[self.kind])
        for word in inputs:
            for found in find_files(word, None, endings):
                # What is known of the others is no series.
                if self.kind == "series" and Path(str(found.source)).name in METADATA and found.source != Path(word):
                    continue
                yield Input("standard input" if isinstance(found.source, bytes) else str(found.source), found.source)

    def classify(
        self, given: Input, top_k: int = 1, columns: list[str] | None = None, hints: Hints | None = None
    ) -> dict[str, list[dict[str, Any]]]:
        """
        The likeliest classes of an input, each `{"label", "score"}`, by its name; of series also values, and classes
        of positions, as `answer` says. A file may hold several series; of a sound that is longer than those of the
        training the answers to its parts are averaged. Columns of times and of series' names may be given as hints.

        Raises:
            DataError: If the input cannot be read, or does not fit the model.
        """
        if self.kind != "series":
            found = {given.name: self._classify_whole(given, top_k)}
        elif isinstance(given.value, bytes):
            raise DataError(f"a series is read from a file of type {', '.join(INPUTS)}: give one.")
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
            require_unicode(str(given.value))
            # Some tokenizers do not know how many tokens their model takes.
            config = self.model.config
            longest = getattr(config, "longest_input", None) or getattr(config, "max_position_embeddings", None)
            options["truncation"] = True
            if longest and longest < self.reader.model_max_length:
                options["max_length"] = longest
        return [{"label": item["label"], "score": item["score"]} for item in self._pipeline(value, **options)]


def require_unicode(text: str) -> None:
    """Refuses half a surrogate pair, which JSON and a command line can hold and no tokenizer takes."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise DataError("the text contains half a surrogate pair; give valid Unicode")


def load_head(kind: Any, source: str, device: str | None = None) -> Any:
    """
    Loads a model, of a peft adapter with its base, ready to answer: on the device, or the GPU if there is one. Refuses
    a checkpoint that lacks tensors, such as a head that would start at random.
    """
    base = adapter_base(source)
    name, revision = split_revision(base or source)
    model, report = kind.from_pretrained(name, revision=revision, output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        raise DataError(
            f"{source} has no {', '.join(missing[:3])} for {type(model).__name__}: the checkpoint lacks this head. "
            "Give a checkpoint that was fine-tuned for the task."
        )
    if base is not None:
        model = load_adapter(model, source).merge_and_unload()
    try:
        if device == "meta":
            raise RuntimeError("it computes nothing")
        return model.eval().to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
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
    kind = next((kind for ending, kind in _HEADS.items() if f"For{ending}" in head), None)
    if kind == "texts" and type(config) not in AutoModelForSequenceClassification._model_mapping:
        # wav2vec 2.0 and its family give their heads of sounds the name of those of texts.
        kind = "sounds"
    if kind is None or config.problem_type == "regression" or config.num_labels == 1:
        what = "tells values" if kind else f"is no classifier ({head})"
        raise DataError(
            f"{source} {what}: classify takes classifiers of sounds, pictures, texts and series, and models of values "
            "and of positions of series. `hf-ext generate` continues a text."
        )
    return kind, "classes"


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
