"""Latents of a whole data set, encoded once: place and mirroring are chosen before, and recorded with each latent.

A file holds the latents of one part of the pictures (`precompute_sources`), and its name ends in the key of their
content. So a run that was killed goes on where it stopped; where an example was removed, added or changed, its part
alone is made again, and place and mirroring of the others stay. Of the missing parts each process of `accelerate
launch` takes the next one when it is ready: who has small pictures, or a faster device, takes more of them.
"""

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import torch
from diffusers import ModelMixin
from huggingface_hub.dataclasses import strict
from PIL import Image

from hf_ext.distributed import Ranks, require_device
from hf_ext.files import read_json, remove_leftovers, require_new, whole_file, write_json
from hf_ext.pipelines.disentangled_dit.pipeline import DisentangledDiTPipeline
from hf_ext.progress import progress
from hf_ext.settings import build
from hf_ext.training.arguments import DataSource
from hf_ext.training.bad_examples import UNUSABLE, describe_bad, name_bad

from ..errors import MissingColumn, OtherRun, UsageError
from .diffusion_data import Crops, Size, View, bucket_sizes, cut_view, nearest_bucket
from .diffusion_latents import COLUMNS, SPREAD, encode_posterior, load_autoencoder, to_pixels, write_row
from .diffusion_texts import ENCODER, NULL, SHAPE, SUFFIX, TextEncoder, read_captions
from .precompute_sources import Example, Rows, Tars, open_pictures
from .tar_files import pack_row, write_tar

SETTINGS, BAD, IMAGE = "precompute.json", "bad_examples.jsonl", "image"
logger = logging.getLogger(__name__)
# Settings that decide how the work is done, and no latent.
FREE = ("batch_size", "workers", "max_bad_examples")
# Kinds of columns that a tar file has files of.
_BINARY = ("binary", "large_binary")
# Pictures that would be enlarged more, or of which more would be cut off, are bad ones.
MOST_ENLARGED, MOST_RATIO = 8, 8


@strict
@dataclass
class Precompute:
    """
    Settings that determine the latents.

    Args:
        data (`dict`): The pictures, a [`~hf_ext.training.arguments.DataSource`]; local tar files are read as they are.
        vae (`str`): Folder or `org/name[@revision]` of a diffusers autoencoder.
        image_size (`int`): Side of the encoded square in pixels; buckets have the same area.
        crops (`dict`): See [`Crops`].
        max_ratio (`float`, defaults to 1.0): Largest ratio of the sides; above 1, pictures are sorted into buckets.
        bucket_step (`int`, defaults to 64): Number of pixels of which the sides of buckets are multiples.
        seed (`int`, defaults to 0): Seed of the crops.
        batch_size (`int`, defaults to 8): Pictures that are encoded at once.
        shard_size (`int`, defaults to 1000): Rows per file; the latents of a tar file are one file.
        format (`"parquet"` or `"tar"`, defaults to `"parquet"`): Format of the files; in the tar files of webdataset,
            classes are numbers without names.
        image_column (`str`, defaults to `"image"`): Column of the pictures, or the only one; the others are kept.
        posterior (`bool`, defaults to `False`):
            Write mean and standard deviation of each latent, in twice the space, so that a training with
            `task.posterior` draws a new one in every step.
        text_encoder (`str`, *optional*): Folder or `org/name[@revision]` of a transformers text encoder, whose hidden
            states of the captions are written; a training then does not run it.
        text_column (`str` or `list[str]`, defaults to `"text"`): Columns of captions, or of lists of captions.
        max_text_length (`int`, defaults to 77): Largest number of tokens of a caption.
        dtype (`"float32"`, `"bfloat16"` or `"float16"`, defaults to `"float32"`): Precision of the autoencoder.
        workers (`int`, defaults to 4): Threads that decode and cut pictures while others are encoded.
        max_bad_examples (`float`, defaults to 0.001):
            Largest share of unusable pictures: broken, of 16 bits, CMYK, far too small or too long. They are skipped
            and listed in `bad_examples.jsonl` with their reasons. Transparent pictures get a white background.
    """

    data: dict
    vae: str
    image_size: int
    crops: dict = field(default_factory=dict)
    max_ratio: float = 1.0
    bucket_step: int = 64
    seed: int = 0
    batch_size: int = 8
    shard_size: int = 1000
    format: Literal["parquet", "tar"] = "parquet"
    image_column: str = IMAGE
    posterior: bool = False
    text_encoder: str | None = None
    text_column: str | list[str] = "text"
    max_text_length: int = 77
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    workers: int = 4
    max_bad_examples: float = 0.001

    def __post_init__(self) -> None:
        self.source = build(DataSource, self.data, "data")
        self.how = build(Crops, self.crops, "crops")
        self.buckets: list[Size] = [(self.image_size, self.image_size)]
        if self.max_ratio != 1:
            self.buckets = bucket_sizes(self.image_size, self.bucket_step, self.max_ratio)

    def validate_counts(self) -> None:
        for name in ("image_size", "bucket_step", "batch_size", "shard_size", "max_text_length", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.seed < 0 or self.data.get("streaming"):
            raise ValueError("seed must be 0 or more, and data.streaming left out: tar files are always streamed.")
        if not 0 <= self.max_bad_examples <= 1:
            raise ValueError(f"max_bad_examples must be a share from 0 to 1, got {self.max_bad_examples}.")


def precompute(settings: Precompute, out: str | Path, device: str | None = None) -> Path:
    """
    Encodes a data set into a folder of files that the training and `datasets.load_dataset` read. Processes of
    `accelerate launch` share the work.

    Args:
        settings ([`Precompute`]): What to encode, and how.
        out (`str` or `Path`): The folder; it appears when it is complete. Until then the work lies in `OUT.partial`,
            from which the same call goes on.
        device (`str`, *optional*): Where to encode; the GPU if there is one.

    Returns:
        `Path`: The folder.

    Raises:
        OtherRun: If unfinished work of that folder has other settings or data.
        ValueError: If the folder is there already, or data and autoencoder do not fit.
    """
    out = Path(out)
    partial = out.with_name(out.name + ".partial")
    ranks = Ranks()
    with ranks.first_before_others():
        work = _prepare(settings, out, partial, require_device(ranks.own_device(device)), ranks.index == 0)
    missing = ranks.ask_first(work.clear)
    count = work.source.count
    done = count - sum(work.source.sizes[part] for part in missing)
    with progress(total=count, initial=done, unit=" images", shown=ranks.index == 0, smoothing=0.05) as bar:

        def advance(made: int) -> None:
            # The other processes are as fast as this one.
            bar.update(min(made * ranks.count, count - bar.n))

        for place, part in enumerate(missing):
            # The first are dealt, so that each process has one.
            if place == ranks.index if place < ranks.count else work.take(part):
                work.write(part, advance)
    ranks.wait()
    with ranks.together():
        if ranks.index == 0:
            work.finish()
            os.replace(partial, out)
    return out


def _prepare(settings: Precompute, out: Path, partial: Path, device: str, tells: bool) -> "_Work":
    """Checks everything, and opens the folder of the unfinished work."""
    require_new(out)
    source = open_pictures(settings.source)
    pictures = [name for name, kind in source.features.items() if isinstance(kind, datasets.Image)]
    if settings.image_column == IMAGE and IMAGE not in source.features and len(pictures) == 1:
        # Tar files have the ending of a file as its column.
        settings.image_column = pictures[0]
        if tells:
            logger.warning("the pictures are those of the column %r, the only one of pictures", pictures[0])
    if settings.image_column not in source.features:
        raise MissingColumn.of(settings.image_column, source.features, "image_column")
    autoencoder: Any = load_autoencoder(settings.vae)
    autoencoder.to(device)
    # diffusers warns of every cast, also of one that changes nothing
    if (dtype := getattr(torch, settings.dtype)) != autoencoder.dtype:
        autoencoder.to(dtype)
    _check_sizes(settings, DisentangledDiTPipeline.scale_factor_of(autoencoder))
    texts = None if settings.text_encoder is None else TextEncoder(settings.text_encoder, settings.max_text_length)
    work = _Work(settings, source, autoencoder, texts, partial)
    # What cannot be encoded leaves no folder behind, whose settings the next call would have to have.
    partial.mkdir(parents=True, exist_ok=True)
    wanted = {name: value for name, value in asdict(settings).items() if name not in FREE}
    # The number of parts stays when examples are removed: which part an example is in depends on it.
    first = {"parts": -(-source.count // settings.shard_size)}
    found = keep_settings(partial / SETTINGS, wanted, f"{partial} has unfinished work with other settings", first)
    source.deal(int(found["parts"]), settings.image_column)
    return work


def keep_settings(
    path: Path, wanted: dict[str, Any], refusal: str, first: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Notes the settings of work in a folder, with what the first call decides, or compares them: what is noted."""
    if not path.exists():
        write_json(path, {**wanted, **(first or {})})
    found: dict[str, Any] = read_json(path)
    # What is noted and not wanted is an option that was left out.
    pairs = {name: (found.get(name), wanted.get(name)) for name in {**found, **wanted} if name not in (first or {})}
    if changed := [f"{name}: {noted!r} → {value!r}" for name, (noted, value) in pairs.items() if noted != value]:
        advice = "Use the same settings, remove it, or give another folder."
        raise OtherRun(refusal, changed, advice)
    return found


def _check_picture(image: Image.Image, size: Size) -> None:
    """Raises a ValueError for a picture that no latent should be made of."""
    if image.mode == "CMYK":
        raise ValueError("it has CMYK colours: convert it to RGB with its profile")
    short, long = sorted((image.height, image.width))
    if long > MOST_RATIO * short:
        raise ValueError(f"{image.height} x {image.width} pixels are {MOST_RATIO} times as long as wide or more")
    if max(size[0] / image.height, size[1] / image.width) > MOST_ENLARGED:
        raise ValueError(
            f"{image.height} x {image.width} pixels would be enlarged more than {MOST_ENLARGED} times to {size[0]} x "
            f"{size[1]}"
        )


def _check_sizes(settings: Precompute, factor: int) -> None:
    for size in settings.buckets:
        if any(side % factor for side in size):
            raise UsageError(
                f"pictures of {size[0]} x {size[1]} pixels do not fit the autoencoder, which needs multiples of "
                f"{factor}: change image_size or bucket_step."
            )


# A picture's number, and the view of it that is encoded.
_Cut = tuple[int, View]
# The other columns of an example, its bucket and its view; of a bad one its line in the list.
_Read = tuple[dict[str, Any], Size, View] | dict[str, str]


class _Work:
    """The rows of the whole data set, some examples at a time."""

    def __init__(
        self,
        settings: Precompute,
        source: Rows | Tars,
        autoencoder: ModelMixin,
        texts: TextEncoder | None,
        folder: Path,
    ):
        self.settings = settings
        self.source = source
        self.autoencoder = autoencoder
        self.texts = texts
        self.folder = folder
        columns = [settings.text_column] if isinstance(settings.text_column, str) else settings.text_column
        self.columns = [] if texts is None else columns
        kept = {name: kind for name, kind in source.features.items() if name != settings.image_column}
        if missing := [name for name in self.columns if name not in kept]:
            raise MissingColumn.of(missing[0], kept, "text_column")
        added = self._added_features()
        if clash := sorted(kept.keys() & added.keys()):
            raise ValueError(f"the data already have the columns {clash}, which precompute adds: remove them first.")
        media = [name for name, kind in kept.items() if isinstance(kind, datasets.Image | datasets.Audio)]
        if media and settings.format == "tar":
            raise UsageError(f"columns {media} hold pictures or sounds, which only format parquet keeps: set it.")
        self.features = datasets.Features({**kept, **added})
        self.no_text = None if texts is None else texts.pack([""], autoencoder.device)[0]

    def _added_features(self) -> dict[str, Any]:
        pair, content = datasets.List(datasets.Value("int32")), datasets.Value("binary")
        latents = dict.fromkeys(COLUMNS, pair) | {"latent": content, "flip": datasets.Value("int8")}
        spread = {SPREAD: content} if self.settings.posterior else {}
        # Lists of a file are one array, which the short offsets of `binary` end at 2 GiB.
        states = {f"{name}{SUFFIX}": datasets.List(datasets.Value("large_binary")) for name in self.columns}
        about = {SHAPE: pair, NULL: content, ENCODER: datasets.Value("string")} if states else {}
        return {**latents, **spread, **states, **about}

    def _file(self, part: int) -> Path:
        """As `datasets` names the files of a split."""
        return self.folder / f"train-{self.source.names[part]}.{self.settings.format}"

    def _bad_file(self, part: int) -> Path:
        return self.folder / f"bad-{self.source.names[part]}.json"

    def clear(self) -> list[int]:
        """Deletes what killed processes and other contents left, where nobody writes yet; the missing parts."""
        remove_leftovers(self.folder)
        parts = range(len(self.source.names))
        wanted = {path for part in parts for path in (self._file(part), self._bad_file(part))}
        for path in self.folder.iterdir():
            if path.name.startswith(("train-", "bad-", "taken-")) and path not in wanted:
                path.unlink()
        return [part for part in parts if not self._file(part).exists()]

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
        with whole_file(self._file(part)) as file:
            if self.settings.format == "parquet":
                # By columns: a part whose pictures are all bad, or to which none was dealt, has no rows. The schema
                # carries the features, such as the names of classes.
                columns = {name: [row[name] for row in rows] for name in self.features}
                datasets.Dataset.from_dict(columns, features=self.features).to_parquet(file)
                return
            kinds = {name: getattr(kind, "feature", kind) for name, kind in self.features.items()}
            binary = [name for name, kind in kinds.items() if getattr(kind, "dtype", "") in _BINARY]
            write_tar(file, ((f"{part:05d}-{place:06d}", pack_row(row, binary)) for place, row in enumerate(rows)))

    def note_bad(self, part: int, rows: list[dict[str, str]]) -> None:
        """Lists the bad examples of a part; raises a ValueError where all that are known are too many."""
        if not rows:
            return
        write_json(self._bad_file(part), {"examples": rows})
        known = [row for path in sorted(self.folder.glob("bad-*.json")) for row in read_json(path)["examples"]]
        if len(known) > int(self.settings.max_bad_examples * self.source.count):
            raise ValueError(
                f"{len(known)} of {self.source.count} examples cannot be used, more than the share max_bad_examples "
                f"{self.settings.max_bad_examples:g} allows; one of them: {describe_bad(rows[-1])} "
                f"{self.folder} lists them in bad-*.json. Remove them from the data, or allow a larger share; "
                "finished work is kept."
            )

    def finish(self) -> None:
        """One list of all bad examples in place of those of the parts; nobody takes parts any more."""
        files = sorted(self.folder.glob("bad-*.json"))
        rows = [row for path in files for row in read_json(path)["examples"]]
        if rows:
            with whole_file(self.folder / BAD) as file:
                file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        for path in [*files, *self.folder.glob("taken-*")]:
            path.unlink()

    def _rows(self, part: int, advance: Callable[[int], None]) -> list[dict[str, Any]]:
        """The rows of a part, in their order, with pictures of one bucket encoded together."""
        others: dict[int, dict[str, Any]] = {}
        found: dict[int, dict[str, Any]] = {}
        for batch in self._batches(part, others):
            for (number, cut), (latent, spread) in zip(batch, self._encode(batch), strict=True):
                if not all(values.half().isfinite().all() for values in (latent, spread) if values is not None):
                    raise ValueError(
                        f"{self.settings.vae} gives latents beyond float16 (65,504) for example {number} "
                        f"({self.source.find_file(number)}): choose another autoencoder or dtype."
                    )
                found[number] = write_row(latent, cut, spread)
            advance(len(batch))
        self._add_states(others)
        return [{**others[number], **found[number]} for number in others]

    def _read(self, example: Example) -> _Read:
        """Decodes and cuts a picture."""
        # Grey pictures too: an autoencoder says how many channels it takes.
        channels = int(self.autoencoder.config.get("in_channels", 3))
        try:
            other = dict(example.load())
            image: Image.Image | None = other.pop(self.settings.image_column)
            if image is None:
                raise ValueError("it has no picture")
            size = nearest_bucket((image.height, image.width), self.settings.buckets)
            _check_picture(image, size)
            generator = np.random.default_rng((self.settings.seed, 6, 0, int(example.digest[:15], 16)))
            cut = cut_view(image, size, channels, self.settings.how, generator)
            for name in self.columns:
                read_captions(other, name)
        except UNUSABLE as error:
            return name_bad(str(example.number), self.source.find_file(example.number), error.__cause__ or error)
        return other, size, cut

    def _read_ahead(self, part: int) -> Iterator[tuple[int, _Read]]:
        """The examples of a part, decoded by threads: a few ahead, not a whole part."""
        waiting: deque[tuple[int, Future[_Read]]] = deque()
        with ThreadPoolExecutor(self.settings.workers) as pool:
            for example in self.source.read(part):
                waiting.append((example.number, pool.submit(self._read, example)))
                if len(waiting) > 4 * self.settings.workers:
                    number, job = waiting.popleft()
                    yield number, job.result()
            for number, job in waiting:
                yield number, job.result()

    def _batches(self, part: int, others: dict[int, dict[str, Any]]) -> Iterator[list[_Cut]]:
        """Cut pictures of one size; the other columns of each good example are left in `others`."""
        waiting: dict[Size, list[_Cut]] = {}
        bad = []
        for number, read in self._read_ahead(part):
            if isinstance(read, dict):
                bad.append(read)
                continue
            others[number], size, cut = read
            batch = waiting.setdefault(size, [])
            batch.append((number, cut))
            if len(batch) == self.settings.batch_size:
                yield waiting.pop(size)
        yield from waiting.values()
        self.note_bad(part, bad)

    @torch.no_grad()
    def _encode(self, batch: list[_Cut]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The latent of each, and its spread where that is wanted."""
        pixels = to_pixels([cut for _, cut in batch]).to(self.autoencoder.device)
        if self.settings.posterior:
            return list(zip(*encode_posterior(self.autoencoder, pixels), strict=True))
        return [(latent, None) for latent in DisentangledDiTPipeline.encode_image(self.autoencoder, pixels)]

    def _add_states(self, others: dict[int, dict[str, Any]]) -> None:
        """Adds the text encoder's states of the captions, and to the first example those of an empty text."""
        if self.texts is None or self.no_text is None:
            return
        captions = {(number, name): read_captions(others[number], name) for number in others for name in self.columns}
        texts, size = [text for found in captions.values() for text in found], self.settings.batch_size
        owners = [number for (number, _), found in captions.items() for _ in found]
        packed = []
        for start in range(0, len(texts), size):
            try:
                packed += self.texts.pack(texts[start : start + size], self.autoencoder.device)
            except ValueError as error:
                files = [self.source.find_file(number) or str(number) for number in owners[start : start + size]]
                raise ValueError(f"{error} The captions are those of: {', '.join(files)}.") from error
        shape = [self.settings.max_text_length, self.texts.encoder.config.hidden_size]
        for place, number in enumerate(others):
            first = {NULL: self.no_text, ENCODER: self.texts.source} if place == 0 else {NULL: None, ENCODER: None}
            others[number] |= {SHAPE: shape, **first}
        contents = iter(packed)
        for (number, name), found in captions.items():
            others[number][f"{name}{SUFFIX}"] = [next(contents) for _ in found]
