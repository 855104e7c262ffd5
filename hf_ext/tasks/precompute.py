"""Latents of a whole data set, encoded once: place and mirroring are chosen before, and recorded with each latent.

A file holds the latents of one part of the pictures (`precompute_sources`), and its name ends in the key of their
content. So a run that was killed goes on where it stopped; where an example was removed, added or changed, its part
alone is made again, and place and mirroring of the others stay. Of the missing parts each process of `accelerate
launch` takes the next one when it is ready: who has small pictures, or a faster device, takes more of them.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from diffusers import ModelMixin
from PIL import Image
from pyarrow.parquet import read_metadata

from hf_ext.data.bad_examples import BadExamples, describe_bad
from hf_ext.data.files import UNUSABLE, refuse_cut_tars
from hf_ext.data.opening import find_files
from hf_ext.distributed import Ranks, require_device
from hf_ext.files import read_json, remove_leftovers, require_new, whole_file, write_json, write_rows
from hf_ext.pipelines.disentangled_dit.pipeline import DisentangledDiTPipeline
from hf_ext.progress import progress

from ..errors import DataError, MissingColumn, OtherRun, UsageError
from .diffusion_data import (
    COLUMNS,
    SPREAD,
    Size,
    View,
    cut_view,
    encode_posterior,
    load_autoencoder,
    nearest_bucket,
    pack_row,
    to_pixels,
    weights_hash,
    write_row,
    write_tar,
)
from .diffusion_texts import ENCODER, NULL, SHAPE, SUFFIX, TextEncoder, read_captions
from .precompute_settings import Precompute
from .precompute_sources import Rows, Streams, name_unusable, open_pictures

SETTINGS, BAD = "precompute.json", "bad_examples.jsonl"
logger = logging.getLogger(__name__)
# Settings that decide how the work is done, and no latent.
FREE = ("batch_size", "workers", "max_bad_examples")
# Columns of classes, in tables and in tar files.
_CLASSES = {"label", "cls"}
# Pictures that would be enlarged more, or of which more would be cut off, are bad ones.
MOST_ENLARGED, MOST_RATIO = 8, 8


def precompute(settings: Precompute, out: str | Path, device: str | None = None) -> Path:
    """Encodes a data set into a folder of files that the training and `datasets.load_dataset` read, and which appears
    when it is complete. Until then the work lies in `OUT.partial`, from which the same call goes on."""
    out = Path(out)
    partial = out.parent / f"{out.name}.partial"
    ranks = Ranks()
    with ranks.first_before_others():
        work = _prepare(settings, out, partial, require_device(ranks.own_device(device)), ranks.index == 0)
    missing, done = ranks.ask_first(work.clear)
    count = work.source.count
    with progress(total=count, initial=done, unit=" images", shown=ranks.index == 0, smoothing=0.05) as bar:

        def advance(made: int) -> None:
            # The other processes are as fast as this one.
            made *= ranks.count
            bar.update(made if count is None else min(made, count - bar.n))

        for place, part in enumerate(missing):
            # The first are dealt, so that each process has one.
            if place == ranks.index if place < ranks.count else work.take(part):
                work.write(part, advance)
    ranks.wait()
    with ranks.together():
        if ranks.index == 0:
            work.finish()
            os.replace(partial, out)
            for path in [*out.glob("read-*.json"), *out.glob("taken-*")]:
                path.unlink()
    return out


def _prepare(settings: Precompute, out: Path, partial: Path, device: str, tells: bool) -> "_Work":
    """Checks everything, and opens the folder of the unfinished work."""
    require_new(out)
    parts: list[Any] = settings.source.parts or [settings.source]
    for place in (place for part in parts for place in find_files(part.path)):
        if os.path.isdir(place) and partial.resolve().is_relative_to(Path(place).resolve()):
            raise UsageError(f"{out} lies in {place}, and would be read as a part of the data: give another folder.")
    source = open_pictures(settings.source)
    pictures = [name for name, kind in source.features.items() if isinstance(kind, datasets.Image)]
    if settings.image_column == "image" and "image" not in source.features and len(pictures) == 1:
        # Tar files have the ending of a file as its column.
        settings.image_column = pictures[0]
        if tells:
            logger.warning("the pictures are those of the column %r, the only one of pictures", pictures[0])
    if settings.image_column not in source.features:
        raise MissingColumn.of(settings.image_column, source.features, "image_column")
    if settings.image_column not in pictures:
        raise DataError(f"column {settings.image_column!r} holds no pictures; those that do: {pictures}.")
    if tells and source.features.keys() <= {settings.image_column, "__key__"}:
        logger.warning("beside %r the data have no class and no text: folders in tar files are not read", *pictures)
    autoencoder: Any = load_autoencoder(settings.vae)
    autoencoder.to(device)
    # diffusers warns of every cast, also of one that changes nothing
    if (dtype := getattr(torch, settings.dtype)) != autoencoder.dtype:
        autoencoder.to(dtype)
    factor = DisentangledDiTPipeline.scale_factor_of(autoencoder)
    if misfit := [size for size in settings.buckets if size[0] % factor or size[1] % factor]:
        size = f"{misfit[0][0]} x {misfit[0][1]} pixels"
        raise UsageError(f"the autoencoder needs multiples of {factor}, not {size}: change image_size or bucket_step.")
    texts = None if settings.text_encoder is None else TextEncoder(settings.text_encoder, settings.max_text_length)
    work = _Work(settings, source, autoencoder, texts, partial)
    # What cannot be encoded leaves no folder behind, whose settings the next call would have to have.
    partial.mkdir(parents=True, exist_ok=True)
    if tells and not any(partial.glob("train-*")):
        # Of a call that was refused, or killed before its first file: the next one may be told otherwise.
        (partial / SETTINGS).unlink(missing_ok=True)
    wanted = {name: value for name, value in asdict(settings).items() if name not in FREE}
    # Of the same name may be others, as after another training.
    wanted["networks"] = [weights_hash(network) for network in (autoencoder, *([texts.encoder] if texts else []))]
    refusal = f"{partial} has unfinished work with other settings"
    # The number of parts stays when examples are removed: which part an example is in depends on it.
    found = keep_settings(partial / SETTINGS, wanted, refusal, parts=source.count_parts(settings.shard_size))
    source.deal(int(found["parts"]), settings.image_column)
    return work


def keep_settings(path: Path, wanted: dict[str, Any], refusal: str, **first: Any) -> dict[str, Any]:
    """Notes the settings of work in a folder, with what the first call decides, or compares them: what is noted."""
    if not path.exists():
        write_json(path, {**wanted, **first})
    if not isinstance(found := read_json(path), dict):
        raise DataError(f"{path} holds no settings: restore the file, or remove it.")
    # What is noted and not wanted is an option that was left out.
    pairs = {name: (found.get(name), wanted.get(name)) for name in {**found, **wanted} if name not in first}
    if changed := [f"{name}: {noted!r} → {value!r}" for name, (noted, value) in pairs.items() if noted != value]:
        raise OtherRun(refusal, changed, "Use the same settings, remove it, or give another folder.")
    return found


def _check_picture(image: Image.Image, size: Size) -> None:
    pixels, (short, long) = f"{image.height} x {image.width} pixels", sorted((image.height, image.width))
    if long > MOST_RATIO * short:
        raise ValueError(f"{pixels} are more than {MOST_RATIO} times as long as wide")
    if max(size[0] / image.height, size[1] / image.width) > MOST_ENLARGED:
        raise ValueError(f"{pixels} would be enlarged more than {MOST_ENLARGED} times to {size[0]} x {size[1]}")


# An example's number, its other columns and its view; of a bad one its line in the list.
_Read = tuple[int, dict[str, Any], View] | dict[str, str]


@dataclass
class _Work:
    """The rows of the whole data set, some examples at a time."""

    settings: Precompute
    source: Rows | Streams
    autoencoder: ModelMixin
    texts: TextEncoder | None
    folder: Path

    def __post_init__(self) -> None:
        settings, texts = self.settings, self.texts
        self.columns = [] if texts is None else settings.text_column
        kept = {name: kind for name, kind in self.source.features.items() if name != settings.image_column}
        if missing := [name for name in self.columns if name not in kept]:
            raise MissingColumn.of(missing[0], kept, "text_column")
        pair, content = datasets.List(datasets.Value("int32")), datasets.Value("binary")
        added: dict[str, Any] = dict.fromkeys(COLUMNS, pair) | {"latent": content, "flip": datasets.Value("int8")}
        added |= {SPREAD: content} if settings.posterior else {}
        # Lists of a file are one array, which the short offsets of `binary` end at 2 GiB.
        states = datasets.List(datasets.Value("large_binary"))
        added |= {f"{name}{SUFFIX}": states for name in self.columns}
        added |= {SHAPE: pair, NULL: content, ENCODER: datasets.Value("string")} if self.columns else {}
        if clash := sorted(kept.keys() & added.keys()):
            raise ValueError(f"the data already have the columns {clash}, which precompute adds: remove them first.")
        media = [name for name, kind in kept.items() if isinstance(kind, datasets.Image | datasets.Audio)]
        if media and settings.format == "tar":
            raise UsageError(f"columns {media} hold pictures or sounds, which only format parquet keeps: set it.")
        self.features = datasets.Features({**kept, **added})
        self.no_text = None if texts is None else texts.pack([""], self.autoencoder.device)[0]

    def _paths(self, part: int) -> tuple[Path, Path]:
        """The file of a part, named as `datasets` names those of a split, and the record of what was read of it."""
        name = self.source.names[part]
        return self.folder / f"train-{name}.{self.settings.format}", self.folder / f"read-{name}.json"

    def clear(self) -> tuple[list[int], int]:
        """Deletes what kills and other contents left; the missing parts, and the number of examples in the others."""
        remove_leftovers(self.folder)
        counts = [self._count(part) for part in range(len(self.source.names))]
        wanted = {path for part, count in enumerate(counts) if count is not None for path in self._paths(part)}
        made = (path for path in self.folder.iterdir() if path.name.startswith(("train-", "read-", "taken-")))
        for path in (old := [path for path in made if path not in wanted]):
            path.unlink()
        if again := sum(path.name.startswith("train-") for path in old):
            logger.warning("%d files are made again: cut, of pictures that changed, or of another version", again)
        missing = [part for part, count in enumerate(counts) if count is None]
        # Whoever takes the last part keeps the others waiting: it should be a small one.
        return sorted(missing, key=lambda part: -self.source.weights[part]), sum(filter(None, counts))

    def _count(self, part: int) -> int | None:
        """The number of examples that were read of a finished part; none where a file is absent, or not whole."""
        file, record = self._paths(part)
        try:
            read: int = read_json(record)["read"]
            if self.settings.format == "parquet":
                read_metadata(file)
            else:
                refuse_cut_tars([file])
            return read
        except UNUSABLE:
            # Cut on its way from elsewhere: made again.
            return None

    def take(self, part: int) -> bool:
        """Takes a part, unless another process has it: file systems make a file for one of them."""
        try:
            (self.folder / f"taken-{part:05d}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def write(self, part: int, advance: Callable[[int], None]) -> None:
        """Encodes the pictures of a part into a whole file under its final name."""
        rows = self._rows(part, advance)
        if not rows and self.settings.format == "tar":
            # `datasets` opens no set whose first tar file is empty.
            return
        path, _ = self._paths(part)
        if self.settings.format == "parquet":
            # By columns: a part whose pictures are all bad, or to which none was dealt, has no rows. The schema
            # carries the features, such as the names of classes.
            columns = {name: [row[name] for row in rows] for name in self.features}
            with whole_file(path) as file:
                datasets.Dataset.from_dict(columns, features=self.features).to_parquet(file)
            return
        kinds = {name: getattr(kind, "feature", kind) for name, kind in self.features.items()}
        binary = [name for name, kind in kinds.items() if getattr(kind, "dtype", "") in ("binary", "large_binary")]
        write_tar(path, ((f"{part:05d}-{place:06d}", pack_row(row, binary)) for place, row in enumerate(rows)))

    def _require_few(self, ended: bool = False) -> list[dict[str, str]]:
        """The bad examples that are known; raises a ValueError where they are too many."""
        records = [read_json(path) for path in sorted(self.folder.glob("read-*.json"))]
        bad, read = [row for record in records for row in record["bad"]], sum(record["read"] for record in records)
        count = self.source.count or (read if ended else None)
        if ended and len(bad) == count:
            raise DataError(f"none of the {count} examples of {self.settings.data['path']} can be used: give others.")
        if len(bad) > BadExamples(self.settings.max_bad_examples, count).count_allowed(read):
            raise ValueError(
                f"{len(bad)} of {count or read} examples cannot be used, more than max_bad_examples "
                f"{self.settings.max_bad_examples:g} allows; one of them: {describe_bad(bad[-1])} Remove those in "
                f"{self.folder}/read-*.json from the data, or allow a larger share; finished work is kept."
            )
        return bad

    def finish(self) -> None:
        """One list of all bad examples; the records of the parts go when the folder is there."""
        if rows := self._require_few(ended=True):
            write_rows(self.folder / BAD, rows)

    def _rows(self, part: int, advance: Callable[[int], None]) -> list[dict[str, Any]]:
        """The rows of a part, in their order, with pictures of one bucket encoded together."""
        others: dict[int, dict[str, Any]] = {}
        latents: dict[int, dict[str, Any]] = {}
        # By the sizes of their views.
        waiting: dict[Size, dict[int, View]] = {}
        bad: list[dict[str, str]] = []

        def encode(batch: dict[int, View]) -> None:
            latents.update(self._encode(batch))
            advance(len(batch))

        for read in self._read_ahead(part):
            if isinstance(read, dict):
                bad.append(read)
                continue
            number, others[number], view = read
            batch = waiting.setdefault(view.target_size, {})
            batch[number] = view
            if len(batch) == self.settings.batch_size:
                encode(waiting.pop(view.target_size))
        for batch in waiting.values():
            encode(batch)
        write_json(self._paths(part)[1], {"read": len(others) + len(bad), "bad": bad})
        if bad:
            self._require_few()
        self._add_states(others)
        return [{**others[number], **latents[number]} for number in others]

    def _read_ahead(self, part: int) -> Iterator[_Read]:
        """The examples of a part, decoded by threads: a few ahead, not a whole part."""
        waiting: deque[Future[_Read]] = deque()
        with ThreadPoolExecutor(self.settings.workers) as pool:
            for example in self.source.read(part):
                waiting.append(pool.submit(self._read, *example))
                if len(waiting) > 4 * self.settings.workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _read(self, number: int, load: Callable[[], tuple[str, dict[str, Any]]]) -> _Read:
        # Grey pictures too: an autoencoder says how many channels it takes.
        channels = int(self.autoencoder.config.get("in_channels", 3))
        try:
            digest, other = load()
            image: Image.Image | None = other.pop(self.settings.image_column)
            if image is None:
                raise ValueError("it has no picture")
            size = nearest_bucket((image.height, image.width), self.settings.buckets)
            _check_picture(image, size)
            generator = np.random.default_rng((self.settings.seed, 6, 0, int(digest[:15], 16)))
            view = cut_view(image, size, channels, self.settings.how, generator)
            for name in self.columns:
                read_captions(other, name)
            for name in () if self.columns else _CLASSES & other.keys():
                if other[name] in (None, -1):
                    raise ValueError(f"it has no class in {name!r}, which others have")
        except UNUSABLE as error:
            return name_unusable(self.source, number, error)
        return number, other, view

    @torch.no_grad()
    def _encode(self, batch: dict[int, View]) -> Iterator[tuple[int, dict[str, Any]]]:
        """The columns of the latents of pictures of one size, by the numbers of their examples."""
        pixels = to_pixels([*batch.values()]).to(self.autoencoder.device)
        if self.settings.posterior:
            pairs: Any = zip(*encode_posterior(self.autoencoder, pixels), strict=True)
        else:
            pairs = ((latent, None) for latent in DisentangledDiTPipeline.encode_image(self.autoencoder, pixels))
        for (number, view), (latent, spread) in zip(batch.items(), pairs, strict=True):
            if not all(values.half().isfinite().all() for values in (latent, spread) if values is not None):
                what = f"latents beyond float16 (65,504) for example {number} ({self.source.find_file(number)})"
                raise ValueError(f"{self.settings.vae} gives {what}: choose another autoencoder or dtype.")
            yield number, write_row(latent, view, spread)

    def _add_states(self, others: dict[int, dict[str, Any]]) -> None:
        """Adds the text encoder's states of the captions, and to the first example those of an empty text."""
        if self.texts is None or self.no_text is None:
            return
        shape = [self.settings.max_text_length, self.texts.encoder.config.hidden_size]
        first: dict[str, Any] = {NULL: self.no_text, ENCODER: self.texts.source}
        # A caption, the number of its example, and the list that its states are added to.
        captions: list[tuple[str, int, list[bytes]]] = []
        for number, row in others.items():
            row |= {SHAPE: shape, **first}
            first = {NULL: None, ENCODER: None}
            for name in self.columns:
                row[f"{name}{SUFFIX}"] = states = list[bytes]()
                captions += [(text, number, states) for text in read_captions(row, name)]
        for start in range(0, len(captions), self.settings.batch_size):
            texts, owners, places = zip(*captions[start : start + self.settings.batch_size], strict=True)
            try:
                packed = self.texts.pack([*texts], self.autoencoder.device)
            except ValueError as error:
                files = [self.source.find_file(number) or str(number) for number in owners]
                raise ValueError(f"{error} The captions are those of: {', '.join(files)}.") from error
            for states, content in zip(places, packed, strict=True):
                states.append(content)
