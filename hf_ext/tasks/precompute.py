"""Latents of a whole data set, encoded once: place and mirroring are chosen before, and recorded with each latent.

Row `view · examples + example` is a function of the settings alone, and shards are written one by one, each whole or
absent, so that a run that was killed goes on where it stopped and ends with the same files. A shard holds one view of
some examples; the views of the same examples are made together, so that each picture is decoded, and each caption
encoded, once. The processes of `accelerate launch` take turns at the examples whose shards are missing, however many
processes wrote the others.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from diffusers import ModelMixin
from huggingface_hub.dataclasses import strict
from PIL import Image

from hf_ext.data.opening import open_source
from hf_ext.distributed import Ranks
from hf_ext.files import read_json, remove_leftovers, whole_file, write_json
from hf_ext.pipelines.disentangled_dit.pipeline import DisentangledDiTPipeline
from hf_ext.progress import progress
from hf_ext.settings import build
from hf_ext.training.arguments import DataSource
from hf_ext.training.bad_examples import read_example
from hf_ext.training.fingerprint import compare_fingerprints, fingerprint

from .diffusion_data import Crops, Size, View, bucket_sizes, cut_view, nearest_bucket
from .diffusion_latents import COLUMNS, SPREAD, encode_posterior, load_autoencoder, to_pixels, write_row
from .diffusion_texts import ENCODER, NULL, SHAPE, SUFFIX, TextEncoder, read_captions

SETTINGS, FINGERPRINT = "precompute.json", "fingerprint"


@strict
@dataclass
class Precompute:
    """
    What decides the latents.

    Args:
        data (`dict`): The pictures, a map-style [`~hf_ext.training.arguments.DataSource`].
        vae (`str`): Folder or `org/name[@revision]` of a diffusers autoencoder.
        image_size (`int`): Side of the square that is encoded, in pixels; with buckets that of equal area.
        crops (`dict`): See [`Crops`].
        views (`int`, defaults to 1): Latents of each picture, each with its own place and mirroring.
        max_ratio (`float`, defaults to 1.0): Largest ratio of the sides; above 1 pictures are sorted into buckets.
        bucket_step (`int`, defaults to 64): Sides of buckets are multiples of it, in pixels.
        seed (`int`, defaults to 0): Another seed, other places.
        batch_size (`int`, defaults to 8): Pictures that are encoded at once.
        shard_size (`int`, defaults to 1000): Rows of a file.
        image_column (`str`, defaults to `"image"`): Column of the pictures; the others are kept.
        posterior (`bool`, defaults to `False`):
            Write the spread of each latent beside its mean, twice the room, so that a training with `task.posterior`
            draws a fresh one in every step.
        text_encoder (`str`, *optional*): Folder or `org/name[@revision]` of a transformers text encoder: what it says
            of the captions is written, and no training step runs it.
        text_column (`str` or `list[str]`, defaults to `"text"`): Its columns, of captions or of lists of captions.
        max_text_length (`int`, defaults to 77): Tokens of a caption.
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
    image_column: str = "image"
    posterior: bool = False
    text_encoder: str | None = None
    text_column: str | list[str] = "text"
    max_text_length: int = 77

    def __post_init__(self) -> None:
        self.source = build(DataSource, self.data, "data")
        self.how = build(Crops, self.crops, "crops")
        self.buckets: list[Size] = [(self.image_size, self.image_size)]
        if self.max_ratio != 1:
            self.buckets = bucket_sizes(self.image_size, self.bucket_step, self.max_ratio)

    def validate_counts(self) -> None:
        for name in ("image_size", "views", "bucket_step", "batch_size", "shard_size", "max_text_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.seed < 0 or self.data.get("streaming"):
            raise ValueError("seed must be 0 or more, and data.streaming false: rows are found by their number.")


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
        ValueError: If the folder is there already, its unfinished work has other settings or data, or data and
            autoencoder do not fit.
    """
    out = Path(out)
    partial = out.with_name(out.name + ".partial")
    ranks = Ranks()
    with ranks.first_before_others():
        work = _prepare(settings, out, partial, ranks.own_device(device))
    missing = ranks.ask_first(lambda: work.clear(partial))
    done = work.rows - sum(len(work.examples(part)) * len(views) for part, views in missing)
    shown = ranks.index == 0
    with progress(total=work.rows, initial=done, unit=" images", shown=shown, smoothing=0.05) as bar:

        def advance(count: int) -> None:
            # The other processes are as fast as this one.
            bar.update(min(count * ranks.count, work.rows - bar.n))

        for part, views in ranks.share(missing):
            for view, rows in work.rows_of(part, views, advance).items():
                # A whole file under its final name; its schema carries the features, such as the names of classes.
                with whole_file(partial / work.name(part, view)) as file:
                    datasets.Dataset.from_list(rows, features=work.features).to_parquet(file)
    ranks.wait()
    with ranks.together():
        if ranks.index == 0:
            os.replace(partial, out)
    return out


def _prepare(settings: Precompute, out: Path, partial: Path, device: str) -> "_Work":
    """Checks everything, and opens the folder of the unfinished work."""
    if out.exists():
        raise ValueError(f"{out} exists: name another folder, or remove it first.")
    data = open_source(settings.source)
    if settings.image_column not in data.features:
        raise ValueError(f"the data has no column {settings.image_column!r}; it has {sorted(data.features)}.")
    autoencoder: Any = load_autoencoder(settings.vae)
    autoencoder.to(device)
    _check_sizes(settings, DisentangledDiTPipeline.scale_factor_of(autoencoder))
    texts = None if settings.text_encoder is None else TextEncoder(settings.text_encoder, settings.max_text_length)
    work = _Work(settings, data, autoencoder, texts)
    # What cannot be encoded leaves no folder behind, whose settings the next call would have to have.
    partial.mkdir(parents=True, exist_ok=True)
    _check_settings(partial / SETTINGS, settings, data)
    return work


def _check_settings(path: Path, settings: Precompute, data: datasets.Dataset) -> None:
    """Notes the settings and what tells the data from others, or compares them with those of the work that goes on."""
    wanted, now = {**asdict(settings), "examples": len(data)}, fingerprint(data, settings.data)
    if not path.exists():
        write_json(path, {**wanted, FINGERPRINT: now})
        return
    found = read_json(path)
    changed = [f"{name}: {found.get(name)!r} → {wanted[name]!r}" for name in wanted if found.get(name) != wanted[name]]
    if changed:
        raise ValueError(
            f"{path.parent} holds unfinished work with other settings ({'; '.join(changed)}). Continue with the same "
            "settings, remove it, or name another folder."
        )
    if different := compare_fingerprints(found[FINGERPRINT], now):
        raise ValueError(
            f"{path.parent} holds unfinished work of other data ({'; '.join(different)}), and latents of both would "
            "be mixed. Put the data back as they were, remove it, or name another folder."
        )


def _check_sizes(settings: Precompute, factor: int) -> None:
    for size in settings.buckets:
        if any(side % factor for side in size):
            raise ValueError(
                f"pictures of {size[0]} x {size[1]} pixels do not fit the autoencoder, which needs multiples of "
                f"{factor}: change image_size or bucket_step."
            )


# A picture's number, the view of it, and what is made of it.
_Cut = tuple[int, int, View]


class _Work:
    """The rows of the whole data set, some examples at a time."""

    def __init__(
        self, settings: Precompute, data: datasets.Dataset, autoencoder: ModelMixin, texts: TextEncoder | None
    ):
        self.settings = settings
        self.data = data
        self.autoencoder = autoencoder
        self.texts = texts
        self.rows = len(data) * settings.views
        self.parts = -(-len(data) // settings.shard_size)
        columns = [settings.text_column] if isinstance(settings.text_column, str) else settings.text_column
        self.columns = [] if texts is None else columns
        kept = {name: kind for name, kind in data.features.items() if name != settings.image_column}
        if missing := [name for name in self.columns if name not in kept]:
            raise ValueError(f"the data has no column(s) {missing}; it has {sorted(kept)}. Set text_column.")
        added = self._added_features()
        clash = sorted(kept.keys() & added.keys())
        if clash:
            raise ValueError(f"the data has the column(s) {clash} already, which latents bring: remove them first.")
        self.features = datasets.Features({**kept, **added})
        self.no_text = None if texts is None else texts.pack([""], autoencoder.device)[0]

    def _added_features(self) -> dict[str, Any]:
        """The columns that are made here."""
        pair, content = datasets.List(datasets.Value("int32")), datasets.Value("binary")
        latents = dict.fromkeys(COLUMNS, pair) | {"latent": content, "flip": datasets.Value("int8")}
        spread = {SPREAD: content} if self.settings.posterior else {}
        # Lists of a file are one array, which the short offsets of `binary` end at 2 GiB.
        states = {f"{name}{SUFFIX}": datasets.List(datasets.Value("large_binary")) for name in self.columns}
        about = {SHAPE: pair, NULL: content, ENCODER: datasets.Value("string")} if states else {}
        return {**latents, **spread, **states, **about}

    def name(self, part: int, view: int) -> str:
        """As `datasets` names the files of a split."""
        return f"train-{view * self.parts + part:05d}-of-{self.settings.views * self.parts:05d}.parquet"

    def examples(self, part: int) -> range:
        """The examples of a part."""
        start = part * self.settings.shard_size
        return range(start, min(start + self.settings.shard_size, len(self.data)))

    def clear(self, folder: Path) -> list[tuple[int, list[int]]]:
        """Deletes what killed processes left there, where nobody writes yet; the parts with views that are missing."""
        remove_leftovers(folder)
        views = range(self.settings.views)
        lacking = [
            [view for view in views if not (folder / self.name(part, view)).exists()] for part in range(self.parts)
        ]
        return [(part, found) for part, found in enumerate(lacking) if found]

    def rows_of(self, part: int, views: list[int], advance: Callable[[int], None]) -> dict[int, list[dict[str, Any]]]:
        """The rows of each view, in their order, with pictures of one bucket encoded together."""
        others: dict[int, dict[str, Any]] = {}
        found: dict[tuple[int, int], dict[str, Any]] = {}
        for batch in self._batches(part, views, others):
            for (number, view, cut), (latent, spread) in zip(batch, self._encode(batch), strict=True):
                found[view, number] = write_row(latent, cut, spread)
            advance(len(batch))
        self._add_states(others)
        return {view: [{**others[number], **found[view, number]} for number in self.examples(part)] for view in views}

    def _batches(self, part: int, views: list[int], others: dict[int, dict[str, Any]]) -> Iterator[list[_Cut]]:
        """Cut pictures of one size; the other columns of each example are left in `others`."""
        waiting: dict[Size, list[_Cut]] = {}
        # Grey pictures too: an autoencoder says how many channels it takes.
        channels = int(self.autoencoder.config.get("in_channels", 3))
        for number in self.examples(part):
            others[number] = dict(read_example(self.data, number))
            image: Image.Image = others[number].pop(self.settings.image_column)
            size = nearest_bucket((image.height, image.width), self.settings.buckets)
            for view in views:
                generator = np.random.default_rng((self.settings.seed, 6, view * len(self.data) + number))
                cut = cut_view(image, size, channels, self.settings.how, generator)
                batch = waiting.setdefault(size, [])
                batch.append((number, view, cut))
                if len(batch) == self.settings.batch_size:
                    yield waiting.pop(size)
        yield from waiting.values()

    @torch.no_grad()
    def _encode(self, batch: list[_Cut]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The latent of each, and its spread where that is wanted."""
        pixels = to_pixels([cut for _, _, cut in batch]).to(self.autoencoder.device)
        if self.settings.posterior:
            return list(zip(*encode_posterior(self.autoencoder, pixels), strict=True))
        return [(latent, None) for latent in DisentangledDiTPipeline.encode_image(self.autoencoder, pixels)]

    def _add_states(self, others: dict[int, dict[str, Any]]) -> None:
        """What the text encoder says of the captions of these examples, and in the first one of no text."""
        if self.texts is None or self.no_text is None:
            return
        captions = {(number, name): read_captions(others[number], name) for number in others for name in self.columns}
        texts, size = [text for found in captions.values() for text in found], self.settings.batch_size
        packed = [
            content
            for start in range(0, len(texts), size)
            for content in self.texts.pack(texts[start : start + size], self.autoencoder.device)
        ]
        shape = [self.settings.max_text_length, self.texts.encoder.config.hidden_size]
        for place, number in enumerate(others):
            first = {NULL: self.no_text, ENCODER: self.texts.source} if place == 0 else {NULL: None, ENCODER: None}
            others[number] |= {SHAPE: shape, **first}
        contents = iter(packed)
        for (number, name), found in captions.items():
            others[number][f"{name}{SUFFIX}"] = [next(contents) for _ in found]
