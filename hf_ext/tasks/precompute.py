"""Latents of a whole data set, encoded once: place and mirroring are chosen before, and recorded with each latent.

Row `view · examples + example` is a function of the settings alone, and shards are written one by one, each whole or
absent, so that a run that was killed goes on where it stopped and ends with the same files. The processes of
`accelerate launch` take turns at the shards that are missing, however many processes wrote the others.
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
from tqdm import tqdm

from hf_ext.files import read_json, remove_leftovers, whole_file, write_json
from hf_ext.pipelines.disentangled_dit.pipeline import DisentangledDiTPipeline
from hf_ext.ranks import Ranks
from hf_ext.settings import build
from hf_ext.training.arguments import DataSource
from hf_ext.training.bad_examples import read_example
from hf_ext.training.sources import open_source

from .diffusion_data import Crops, Size, View, bucket_sizes, cut_view, nearest_bucket
from .diffusion_latents import COLUMNS, load_autoencoder, to_pixels, write_row

SETTINGS = "precompute.json"


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

    def __post_init__(self) -> None:
        self.source = build(DataSource, self.data, "data")
        self.how = build(Crops, self.crops, "crops")
        self.buckets: list[Size] = [(self.image_size, self.image_size)]
        if self.max_ratio != 1:
            self.buckets = bucket_sizes(self.image_size, self.bucket_step, self.max_ratio)

    def validate_counts(self) -> None:
        for name in ("image_size", "views", "bucket_step", "batch_size", "shard_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.seed < 0 or self.data.get("streaming"):
            raise ValueError("seed must be 0 or more, and data.streaming false: rows are found by their number.")


def precompute(settings: Precompute, out: str | Path, device: str | None = None, progress: bool = True) -> Path:
    """
    Encodes a data set into a folder of parquet files that the training and `datasets.load_dataset` read. Processes of
    `accelerate launch` share the work.

    Args:
        settings ([`Precompute`]): What to encode, and how.
        out (`str` or `Path`): The folder; it appears when it is complete. Until then the work lies in `OUT.partial`,
            from which the same call goes on.
        device (`str`, *optional*): Where to encode; the GPU if there is one.
        progress (`bool`, defaults to `True`): Show a bar.

    Returns:
        `Path`: The folder.

    Raises:
        ValueError: If the folder is there already, its unfinished work has other settings, or data and autoencoder do
            not fit.
    """
    out = Path(out)
    partial = out.with_name(out.name + ".partial")
    ranks = Ranks()
    with ranks.first_before_others():
        work = _prepare(settings, out, partial, ranks.own_device(device))
    missing = ranks.ask_first(lambda: work.clear(partial))
    done = work.rows - sum(len(work.numbers(shard)) for shard in missing)
    shown = progress and ranks.index == 0
    with tqdm(total=work.rows, initial=done, unit=" images", disable=not shown, smoothing=0.05) as bar:

        def advance(count: int) -> None:
            # The other processes are as fast as this one.
            bar.update(min(count * ranks.count, work.rows - bar.n))

        for shard in ranks.share(missing):
            # A whole file under its final name; its schema carries the features, such as the names of classes.
            with whole_file(partial / work.name(shard)) as file:
                work.table(work.numbers(shard), advance).to_parquet(file)
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
    partial.mkdir(parents=True, exist_ok=True)
    _check_settings(partial / SETTINGS, settings, len(data))
    autoencoder: Any = load_autoencoder(settings.vae)
    autoencoder.to(device)
    _check_sizes(settings, DisentangledDiTPipeline.scale_factor_of(autoencoder))
    return _Work(settings, data, autoencoder)


def _check_settings(path: Path, settings: Precompute, examples: int) -> None:
    """Notes the settings, or compares them with those of the work that is continued."""
    wanted = {**asdict(settings), "examples": examples}
    if not path.exists():
        write_json(path, wanted)
        return
    found = read_json(path)
    changed = [f"{name}: {found.get(name)!r} → {wanted[name]!r}" for name in wanted if found.get(name) != wanted[name]]
    if changed:
        raise ValueError(
            f"{path.parent} holds unfinished work with other settings ({'; '.join(changed)}). Continue with the same "
            "settings, remove it, or name another folder."
        )


def _check_sizes(settings: Precompute, factor: int) -> None:
    for size in settings.buckets:
        if any(side % factor for side in size):
            raise ValueError(
                f"pictures of {size[0]} x {size[1]} pixels do not fit the autoencoder, which needs multiples of "
                f"{factor}: change image_size or bucket_step."
            )


class _Work:
    """The rows of the whole data set, a shard at a time."""

    def __init__(self, settings: Precompute, data: datasets.Dataset, autoencoder: ModelMixin):
        self.settings = settings
        self.data = data
        self.autoencoder = autoencoder
        self.rows = len(data) * settings.views
        self.shards = -(-self.rows // settings.shard_size)
        kept = {name: kind for name, kind in data.features.items() if name != settings.image_column}
        clash = sorted(set(kept) & set(COLUMNS))
        if clash:
            raise ValueError(f"the data has the column(s) {clash} already, which latents bring: remove them first.")
        pair = datasets.List(datasets.Value("int32"))
        latents = dict.fromkeys(("latent_shape", "original_size", "crop", "target_size"), pair)
        self.features = datasets.Features(
            {**kept, "latent": datasets.Value("binary"), **latents, "flip": datasets.Value("int8")}
        )

    def name(self, shard: int) -> str:
        """As `datasets` names the files of a split."""
        return f"train-{shard:05d}-of-{self.shards:05d}.parquet"

    def numbers(self, shard: int) -> range:
        """The rows of a shard."""
        start = shard * self.settings.shard_size
        return range(start, min(start + self.settings.shard_size, self.rows))

    def clear(self, folder: Path) -> list[int]:
        """Deletes what killed processes left there, where nobody writes yet; the shards that are missing."""
        remove_leftovers(folder)
        return [shard for shard in range(self.shards) if not (folder / self.name(shard)).exists()]

    def table(self, numbers: range, advance: Callable[[int], None]) -> datasets.Dataset:
        """The rows, in their order, with pictures of one bucket encoded together."""
        found: dict[int, dict[str, Any]] = {}
        for batch in self._batches(numbers):
            for (number, view, others), latent in zip(batch, self._encode(batch), strict=True):
                found[number] = {**others, **write_row(latent, view)}
            advance(len(batch))
        return datasets.Dataset.from_list([found[number] for number in numbers], features=self.features)

    def _batches(self, numbers: range) -> Iterator[list[tuple[int, View, dict[str, Any]]]]:
        waiting: dict[Size, list[tuple[int, View, dict[str, Any]]]] = {}
        for number in numbers:
            view, others = self._view(number)
            batch = waiting.setdefault(view.target_size, [])
            batch.append((number, view, others))
            if len(batch) == self.settings.batch_size:
                yield waiting.pop(view.target_size)
        yield from waiting.values()

    def _view(self, number: int) -> tuple[View, dict[str, Any]]:
        """The part of the picture that the settings draw for this row, and its other columns."""
        example = dict(read_example(self.data, number % len(self.data)))
        image: Image.Image = example.pop(self.settings.image_column)
        size = nearest_bucket((image.height, image.width), self.settings.buckets)
        generator = np.random.default_rng((self.settings.seed, 6, number))
        # Grey pictures too: an autoencoder says how many channels it takes.
        channels = int(self.autoencoder.config.get("in_channels", 3))
        return cut_view(image, size, channels, self.settings.how, generator), example

    @torch.no_grad()
    def _encode(self, batch: list[tuple[int, View, dict[str, Any]]]) -> torch.Tensor:
        pixels = to_pixels([view for _, view, _ in batch]).to(self.autoencoder.device)
        return DisentangledDiTPipeline.encode_image(self.autoencoder, pixels)
