"""Latents of a whole data set, encoded once: place and mirroring are chosen before, and recorded with each latent.

A shard holds one view of the examples whose content (file name, size, ends of the file, other columns) hashes to its
number, and its name ends in the hash of them all. So a run that was killed goes on where it stopped; where an example
was removed, added or changed, its shard alone is made again, and place and mirroring of the others stay. Views of the
same examples are made together: each picture is decoded, and each caption encoded, once. The processes of `accelerate
launch` take turns at the missing shards, however many processes wrote the others.
"""

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
from diffusers import ModelMixin
from huggingface_hub.dataclasses import strict
from PIL import Image

from hf_ext.data.opening import open_source
from hf_ext.distributed import Ranks, require_device
from hf_ext.files import read_json, remove_leftovers, require_new, whole_file, write_json
from hf_ext.pipelines.disentangled_dit.pipeline import DisentangledDiTPipeline
from hf_ext.progress import progress
from hf_ext.settings import build
from hf_ext.training.arguments import DataSource
from hf_ext.training.bad_examples import UNUSABLE, describe_bad, find_example_file, name_bad, read_example

from ..errors import MissingColumn, OtherRun, UsageError
from .diffusion_data import Crops, Size, View, bucket_sizes, cut_view, nearest_bucket
from .diffusion_latents import COLUMNS, SPREAD, encode_posterior, load_autoencoder, to_pixels, write_row
from .diffusion_texts import ENCODER, NULL, SHAPE, SUFFIX, TextEncoder, read_captions

SETTINGS, BAD, IMAGE = "precompute.json", "bad_examples.jsonl", "image"
logger = logging.getLogger(__name__)
# Settings that decide how the work is done, and no latent.
FREE = ("batch_size", "workers", "max_bad_examples")
# Pictures that would be enlarged more, or of which more would be cut off, are bad ones.
MOST_ENLARGED, MOST_RATIO = 8, 8


@strict
@dataclass
class Precompute:
    """
    Settings that determine the latents.

    Args:
        data (`dict`): The pictures, a map-style [`~hf_ext.training.arguments.DataSource`].
        vae (`str`): Folder or `org/name[@revision]` of a diffusers autoencoder.
        image_size (`int`): Side of the encoded square in pixels; buckets have the same area.
        crops (`dict`): See [`Crops`].
        views (`int`, defaults to 1): Latents per picture, each with its own crop and mirroring.
        max_ratio (`float`, defaults to 1.0): Largest ratio of the sides; above 1, pictures are sorted into buckets.
        bucket_step (`int`, defaults to 64): Number of pixels of which the sides of buckets are multiples.
        seed (`int`, defaults to 0): Seed of the crops.
        batch_size (`int`, defaults to 8): Pictures that are encoded at once.
        shard_size (`int`, defaults to 1000): Rows per file.
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
    views: int = 1
    max_ratio: float = 1.0
    bucket_step: int = 64
    seed: int = 0
    batch_size: int = 8
    shard_size: int = 1000
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
        for name in ("image_size", "views", "bucket_step", "batch_size", "shard_size", "max_text_length", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.seed < 0 or self.data.get("streaming"):
            raise ValueError("seed must be 0 or more, and data.streaming false, because rows are read by number.")
        if not 0 <= self.max_bad_examples <= 1:
            raise ValueError(f"max_bad_examples must be a share from 0 to 1, got {self.max_bad_examples}.")


def precompute(settings: Precompute, out: str | Path, device: str | None = None) -> Path:
    """
    Encodes a data set into a folder of parquet files that the training and `datasets.load_dataset` read. Processes of
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
    done = work.rows - sum(len(work.parts[part]) * len(views) for part, views in missing)
    with progress(total=work.rows, initial=done, unit=" images", shown=ranks.index == 0, smoothing=0.05) as bar:

        def advance(count: int) -> None:
            # The other processes are as fast as this one.
            bar.update(min(count * ranks.count, work.rows - bar.n))

        for part, views in ranks.share(missing):
            for view, rows in work.rows_of(part, views, advance).items():
                # A whole file under its final name; its schema carries the features, such as the names of classes.
                with whole_file(partial / work.name(part, view)) as file:
                    # By columns: a part whose pictures are all bad, or to which none was dealt, has no rows.
                    columns = {name: [row[name] for row in rows] for name in work.features}
                    datasets.Dataset.from_dict(columns, features=work.features).to_parquet(file)
    ranks.wait()
    with ranks.together():
        if ranks.index == 0:
            work.join_bad()
            os.replace(partial, out)
    return out


def _prepare(settings: Precompute, out: Path, partial: Path, device: str, tells: bool) -> "_Work":
    """Checks everything, and opens the folder of the unfinished work."""
    require_new(out)
    data = open_source(settings.source)
    pictures = [name for name, kind in data.features.items() if isinstance(kind, datasets.Image)]
    if settings.image_column == IMAGE and IMAGE not in data.features and len(pictures) == 1:
        # Tar files have the ending of a file as its column.
        settings.image_column = pictures[0]
        if tells:
            logger.warning("the pictures are those of the column %r, the only one of pictures", pictures[0])
    if settings.image_column not in data.features:
        raise MissingColumn.of(settings.image_column, data.features, "image_column")
    autoencoder: Any = load_autoencoder(settings.vae)
    autoencoder.to(device, getattr(torch, settings.dtype))
    _check_sizes(settings, DisentangledDiTPipeline.scale_factor_of(autoencoder))
    texts = None if settings.text_encoder is None else TextEncoder(settings.text_encoder, settings.max_text_length)
    work = _Work(settings, data, autoencoder, texts, partial)
    # What cannot be encoded leaves no folder behind, whose settings the next call would have to have.
    partial.mkdir(parents=True, exist_ok=True)
    wanted = {name: value for name, value in asdict(settings).items() if name not in FREE}
    # The number of parts stays when examples are removed: which part an example is in depends on it.
    first = {"parts": -(-len(data) // settings.shard_size)}
    found = keep_settings(partial / SETTINGS, wanted, f"{partial} has unfinished work with other settings", first)
    work.deal(int(found["parts"]))
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


def _digests(data: datasets.Dataset, image_column: str) -> list[str]:
    """A hash of each example, of what can be read without decoding; equal examples are told apart by a count."""
    found: list[str] = []
    seen: Counter[str] = Counter()
    table = data.with_format("arrow")
    for start in range(0, len(data), 1000):
        rows = table[start : start + 1000]
        pictures = rows[image_column].combine_chunks()
        paths, contents = (pc.struct_field(pictures, name) for name in ("path", "bytes"))
        sizes = pc.binary_length(contents).to_pylist()
        ends = (pc.binary_slice(contents, 0, 4096), pc.binary_slice(contents, -4096))
        others = rows.drop_columns([image_column]).to_pylist()
        heads, tails = (part.to_pylist() for part in ends)
        for path, size, head, tail, other in zip(paths.to_pylist(), sizes, heads, tails, others, strict=True):
            if size is None and path and os.path.isfile(path):
                size, head, tail = _read_ends(path)
            if path and "::" in path:
                # Of an archive, that is not opened for each: another one is another picture.
                archive = os.stat(path.rpartition("::")[2])
                size = f"{path.partition('::')[0]} {archive.st_size} {archive.st_mtime_ns}"
            about = json.dumps([os.path.basename(path or ""), size, other], default=repr, sort_keys=True)
            digest = hashlib.sha256(about.encode() + (head or b"") + (tail or b"")).hexdigest()
            seen[digest] += 1
            found.append(f"{digest}{seen[digest]}" if seen[digest] > 1 else digest)
    return found


def _read_ends(path: str) -> tuple[int, bytes, bytes]:
    """Size, first and last bytes of a file: an exchanged picture without compression has the same size."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(4096)
        file.seek(max(0, size - 4096))
        return size, head, file.read()


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


# A picture's number, the view of it, and what is made of it.
_Cut = tuple[int, int, View]


class _Work:
    """The rows of the whole data set, some examples at a time."""

    def __init__(
        self,
        settings: Precompute,
        data: datasets.Dataset,
        autoencoder: ModelMixin,
        texts: TextEncoder | None,
        folder: Path,
    ):
        self.settings = settings
        self.data = data
        self.autoencoder = autoencoder
        self.texts = texts
        self.folder = folder
        self.rows = len(data) * settings.views
        columns = [settings.text_column] if isinstance(settings.text_column, str) else settings.text_column
        self.columns = [] if texts is None else columns
        kept = {name: kind for name, kind in data.features.items() if name != settings.image_column}
        if missing := [name for name in self.columns if name not in kept]:
            raise MissingColumn.of(missing[0], kept, "text_column")
        added = self._added_features()
        if clash := sorted(kept.keys() & added.keys()):
            raise ValueError(f"the data already have the columns {clash}, which precompute adds: remove them first.")
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

    def deal(self, parts: int) -> None:
        """Deals the examples to parts by their content."""
        self.digests = _digests(self.data, self.settings.image_column)
        self.parts: list[list[int]] = [[] for _ in range(parts)]
        for number, digest in enumerate(self.digests):
            self.parts[int(digest[:15], 16) % parts].append(number)
        keys = ["".join(self.digests[number] for number in part).encode() for part in self.parts]
        self.keys = [hashlib.sha256(key).hexdigest()[:12] for key in keys]

    def name(self, part: int, view: int) -> str:
        """As `datasets` names the files of a split, with the key of what is in it."""
        count = len(self.parts)
        place = f"{view * count + part:05d}-of-{self.settings.views * count:05d}"
        return f"train-{place}-{self.keys[part]}.parquet"

    def clear(self) -> list[tuple[int, list[int]]]:
        """Deletes what killed processes and other contents left, where nobody writes yet; what is missing."""
        remove_leftovers(self.folder)
        wanted = {self.name(part, view) for part in range(len(self.parts)) for view in range(self.settings.views)}
        wanted |= {self._bad_file(part).name for part in range(len(self.parts))}
        for path in [*self.folder.glob("*.parquet"), *self.folder.glob("bad-*.json")]:
            if path.name not in wanted:
                path.unlink()
        views = range(self.settings.views)
        lacking = [
            [view for view in views if not (self.folder / self.name(part, view)).exists()]
            for part in range(len(self.parts))
        ]
        return [(part, found) for part, found in enumerate(lacking) if found]

    def _bad_file(self, part: int) -> Path:
        return self.folder / f"bad-{part:05d}-{self.keys[part]}.json"

    def note_bad(self, part: int, rows: list[dict[str, str]]) -> None:
        """Lists the bad examples of a part; raises a ValueError where all that are known are too many."""
        if not rows:
            return
        write_json(self._bad_file(part), {"examples": rows})
        known = [row for path in sorted(self.folder.glob("bad-*.json")) for row in read_json(path)["examples"]]
        if len(known) > int(self.settings.max_bad_examples * len(self.data)):
            raise ValueError(
                f"{len(known)} of {len(self.data)} examples cannot be used, more than the share max_bad_examples "
                f"{self.settings.max_bad_examples:g} allows; one of them: {describe_bad(rows[-1])} "
                f"{self.folder} lists them in bad-*.json. Remove them from the data, or allow a larger share; "
                "finished work is kept."
            )

    def join_bad(self) -> None:
        """One list of all bad examples in place of those of the parts."""
        files = sorted(self.folder.glob("bad-*.json"))
        rows = [row for path in files for row in read_json(path)["examples"]]
        if rows:
            with whole_file(self.folder / BAD) as file:
                file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        for path in files:
            path.unlink()

    def rows_of(self, part: int, views: list[int], advance: Callable[[int], None]) -> dict[int, list[dict[str, Any]]]:
        """The rows of each view, in their order, with pictures of one bucket encoded together."""
        others: dict[int, dict[str, Any]] = {}
        found: dict[tuple[int, int], dict[str, Any]] = {}
        for batch in self._batches(part, views, others):
            for (number, view, cut), (latent, spread) in zip(batch, self._encode(batch), strict=True):
                if not all(values.half().isfinite().all() for values in (latent, spread) if values is not None):
                    raise ValueError(
                        f"{self.settings.vae} gives latents beyond float16 (65,504) for example {number} "
                        f"({find_example_file(self.data, number)}): choose another autoencoder or dtype."
                    )
                found[view, number] = write_row(latent, cut, spread)
            advance(len(batch))
        self._add_states(others)
        return {view: [{**others[number], **found[view, number]} for number in others] for view in views}

    def _read(self, number: int, views: list[int]) -> tuple[dict[str, Any], Size, list[View]] | dict[str, str]:
        """The other columns of an example, its bucket and its views; of a bad one its line in the list."""
        # Grey pictures too: an autoencoder says how many channels it takes.
        channels = int(self.autoencoder.config.get("in_channels", 3))
        try:
            other = dict(read_example(self.data, number))
            image: Image.Image | None = other.pop(self.settings.image_column)
            if image is None:
                raise ValueError("it has no picture")
            size = nearest_bucket((image.height, image.width), self.settings.buckets)
            _check_picture(image, size)
            seeds = [(self.settings.seed, 6, view, int(self.digests[number][:15], 16)) for view in views]
            cuts = [cut_view(image, size, channels, self.settings.how, np.random.default_rng(seed)) for seed in seeds]
            for name in self.columns:
                read_captions(other, name)
        except UNUSABLE as error:
            return name_bad(str(number), find_example_file(self.data, number), error.__cause__ or error)
        return other, size, cuts

    def _batches(self, part: int, views: list[int], others: dict[int, dict[str, Any]]) -> Iterator[list[_Cut]]:
        """Cut pictures of one size; the other columns of each good example are left in `others`."""
        waiting: dict[Size, list[_Cut]] = {}
        numbers, bad, ahead = self.parts[part], [], 4 * self.settings.workers
        with ThreadPoolExecutor(self.settings.workers) as pool:
            # A few are decoded ahead, not a whole part.
            jobs = {number: pool.submit(self._read, number, views) for number in numbers[:ahead]}
            for place, number in enumerate(numbers):
                for later in numbers[place + ahead : place + ahead + 1]:
                    jobs[later] = pool.submit(self._read, later, views)
                read = jobs.pop(number).result()
                if isinstance(read, dict):
                    bad.append(read)
                    continue
                others[number], size, cuts = read
                for view, cut in zip(views, cuts, strict=True):
                    batch = waiting.setdefault(size, [])
                    batch.append((number, view, cut))
                    if len(batch) == self.settings.batch_size:
                        yield waiting.pop(size)
        yield from waiting.values()
        self.note_bad(part, bad)

    @torch.no_grad()
    def _encode(self, batch: list[_Cut]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The latent of each, and its spread where that is wanted."""
        pixels = to_pixels([cut for _, _, cut in batch]).to(self.autoencoder.device)
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
                files = [
                    find_example_file(self.data, number) or str(number) for number in owners[start : start + size]
                ]
                raise ValueError(f"{error} The captions are those of: {', '.join(files)}.") from error
        shape = [self.settings.max_text_length, self.texts.encoder.config.hidden_size]
        for place, number in enumerate(others):
            first = {NULL: self.no_text, ENCODER: self.texts.source} if place == 0 else {NULL: None, ENCODER: None}
            others[number] |= {SHAPE: shape, **first}
        contents = iter(packed)
        for (number, name), found in captions.items():
            others[number][f"{name}{SUFFIX}"] = [next(contents) for _ in found]
