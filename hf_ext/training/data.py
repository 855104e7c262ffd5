"""Data for the training loop: sources opened with `datasets`, in an order that is a function of (seed, rank, step).

Map-style data: batch `b` of rank `r` holds the positions `(b · world + r) · B + j` of an endless sequence in which
epoch `e` is a permutation drawn from `(seed, e)`; example and augmentation depend on the position alone. A loader that
starts at batch `b` is therefore the loader that ran up to it, whatever the number of workers. Where examples belong to
groups, such as sizes of images, epoch `e` is a permutation of batches of one group each.
Streams: every worker yields whole batches together with its own reading state, and a resumed loader hands each worker
its state back.
"""

import copy
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from datasets.distributed import split_dataset_by_node
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate, get_worker_info

from .arguments import DataSource
from .stopping import ignore_signals

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp"}

# (example, generator) → tensors of one training sample.
Transform = Callable[[dict[str, Any], np.random.Generator], dict[str, Any]]


def open_source(source: DataSource, section: str = "data") -> datasets.Dataset | datasets.IterableDataset:
    """Opens a data source."""
    path = Path(source.path).expanduser()
    if (path / "lq").is_dir() and (path / "hq").is_dir():
        return _paired_folder(path, source)
    if source.path.startswith((".", "/", "~")) and not path.exists():
        raise ValueError(
            f"no data at {source.path}: give a folder, a data file or a Hub data set id. {_advice(section)}"
        )
    try:
        return _load(path, source)
    # datasets raises ConnectionError, an OSError, for a Hub that it cannot reach.
    except (OSError, datasets.exceptions.DatasetsError, ValueError, TypeError) as error:
        kind = "" if path.exists() else "there is no such folder or file here, and as a data set of the Hub: "
        raise ValueError(
            f"cannot read data from {source.path!r} (split {source.split!r}): {kind}{_reasons(error)} "
            f"{_advice(section)}"
        ) from error


def _reasons(error: BaseException) -> str:
    """What an exception and its causes say."""
    # datasets writes "An error occurred" over the exception that tells which.
    texts: list[str] = []
    found: BaseException | None = error
    while found is not None:
        text = str(found).strip() or type(found).__name__
        if not any(text in known for known in texts):
            texts.append(text)
        found = found.__cause__
    return " ← ".join(text.rstrip(".") for text in texts) + "."


def _advice(section: str) -> str:
    """Names the flags that set another place."""
    if section == "data":
        return ""
    without = ", or train without an evaluation: --data.eval null" if section == "data.eval" else ""
    return f"Set --{section}.path (and --{section}.split){without}."


def _load(path: Path, source: DataSource) -> datasets.Dataset | datasets.IterableDataset:
    options: dict[str, Any] = {"split": source.split, "streaming": source.streaming}
    if path.is_file():
        builder = {".tar": "webdataset", ".jsonl": "json"}.get(path.suffix, path.suffix.lstrip("."))
        # `data_files` names the split itself, so that any split of the request is found.
        split = source.split.partition("[")[0]
        return datasets.load_dataset(builder, data_files={split: str(path)}, **options)
    if path.is_dir():
        return datasets.load_dataset(str(path), source.name, **options)
    name, _, revision = source.path.partition("@")
    return datasets.load_dataset(name, source.name, revision=revision or None, **options)


def _paired_folder(path: Path, source: DataSource) -> datasets.Dataset | datasets.IterableDataset:
    """Equally named images in `lq/` and `hq/` as columns `lq` and `hq`."""
    names = {
        side: sorted(
            str(file.relative_to(path / side))
            for file in (path / side).rglob("*")
            if file.suffix.lower() in IMAGE_SUFFIXES
        )
        for side in ("lq", "hq")
    }
    alone = sorted(set(names["lq"]) ^ set(names["hq"]))
    if alone or not names["lq"]:
        raise ValueError(
            f"{path}: lq/ and hq/ must hold the same image names, at least one; "
            f"got {len(names['lq'])} and {len(names['hq'])}, unpaired: {alone[:5]}."
        )
    columns = {side: [str(path / side / name) for name in names[side]] for side in ("lq", "hq")}
    features = datasets.Features({side: datasets.Image() for side in ("lq", "hq")})
    dataset = datasets.Dataset.from_dict(columns, features=features)
    return dataset.to_iterable_dataset(num_shards=min(64, len(dataset))) if source.streaming else dataset


class IndexedSamples(Dataset):
    """Training samples addressed by their position in the endless shuffled sequence."""

    def __init__(
        self,
        source: datasets.Dataset,
        transform: Transform,
        seed: int,
        groups: np.ndarray | None = None,
        batch_size: int = 1,
    ):
        if len(source) == 0:
            raise ValueError("the training data is empty.")
        self.source = source
        self.transform = transform
        self.seed = seed
        self.groups = np.zeros(len(source), dtype=np.int64) if groups is None else groups
        # Without groups, batches may go over the end of an epoch.
        self.batch_size = 1 if groups is None else batch_size
        self.epoch_length = len(self._order(0))
        self._orders: dict[int, np.ndarray] = {}

    def _order(self, epoch: int) -> np.ndarray:
        generator = np.random.default_rng((self.seed, epoch))
        if self.batch_size == 1:
            return generator.permutation(len(self.source))
        batches = []
        for group in np.unique(self.groups):
            members = generator.permutation(np.flatnonzero(self.groups == group))
            # The last batch of a group is filled up from its first.
            whole = -(-len(members) // self.batch_size) * self.batch_size
            batches.append(np.resize(members, whole).reshape(-1, self.batch_size))
        return generator.permutation(np.concatenate(batches)).reshape(-1)

    def __getitem__(self, position: int) -> dict[str, Any]:
        epoch, offset = divmod(position, self.epoch_length)
        if epoch not in self._orders:
            # Neighbouring epochs meet in one batch, so two orders are kept.
            self._orders = {key: order for key, order in self._orders.items() if key == epoch - 1}
            self._orders[epoch] = self._order(epoch)
        index = int(self._orders[epoch][offset])
        return self.transform(read_example(self.source, index), np.random.default_rng((self.seed, 1, position)))


def read_example(source: datasets.Dataset, index: int) -> dict[str, Any]:
    """One example; a file that vanished or cannot be decoded is named."""
    try:
        return source[index]
    # Pillow's for a broken PNG is a SyntaxError, which is no OSError.
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        files = _files_of(source, index)
        where = f" ({', '.join(files)})" if files and not any(file in str(error) for file in files) else ""
        raise OSError(
            f"example {index}{where} cannot be read: {error}. Restore the file or remove it from the data."
        ) from error


def _files_of(source: datasets.Dataset, index: int) -> list[str]:
    """Where the pictures or recordings of an example lie, or what they are called; nothing is decoded."""
    row = source.with_format("arrow")[index : index + 1].to_pylist()[0]
    return [value["path"] for value in row.values() if isinstance(value, dict) and value.get("path")]


class PositionBatches(Sampler[list[int]]):
    """Batches of positions of one rank, from `first_batch` on, without end."""

    def __init__(self, batch_size: int, rank: int, world_size: int, first_batch: int):
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.first_batch = first_batch

    def __iter__(self) -> Iterator[list[int]]:
        batch = self.first_batch
        while True:
            start = (batch * self.world_size + self.rank) * self.batch_size
            yield list(range(start, start + self.batch_size))
            batch += 1


class StreamBatches(IterableDataset):
    """Batches of a stream with the reading state after each; `states` holds one entry for each worker."""

    # How a stream resumes. A worker cannot jump to batch b: it has to know where it stopped reading. So every batch
    # comes with the state of the worker that made it (epoch, examples consumed and made, and the place in the shards
    # as `datasets` tells it), the training saves the last state of each worker, and a resumed loader starts every
    # worker from its own. Without a shuffle buffer the place in the shards is enough. What a buffer held is not in
    # that state: then (`replay`) the epoch is read again, up to the example where it stopped, without transforming.
    # tests/training/test_resume.py compares all weights of interrupted and uninterrupted runs bit by bit.

    def __init__(
        self,
        stream: datasets.IterableDataset,
        transform: Transform,
        seed: int,
        batch_size: int,
        *,
        replay: bool,
        rank: int,
        first_batch: int,
        states: list[dict[str, Any] | None],
    ):
        self.stream = stream
        self.transform = transform
        self.seed = seed
        self.batch_size = batch_size
        self.replay = replay
        self.rank = rank
        self.first_batch = first_batch
        self.states = states

    def __iter__(self) -> Iterator[tuple[dict[str, Any], int, dict[str, Any]] | None]:
        worker = get_worker_info()
        identity, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        # The DataLoader asks worker 0 first. A run that stopped after a number of batches that the workers do not
        # divide goes on with another one: those before it hand out a blank, which the reader drops.
        if identity < self.first_batch % workers:
            yield None
        # The epoch number of a stream lives in memory that all workers share; each needs its own.
        stream = copy.deepcopy(self.stream)
        batch = []
        for example, state in self._examples(stream, self.states[identity]):
            # One generator for each sample, distinct over ranks, workers and time, so that resuming restores it.
            generator = np.random.default_rng((self.seed, 2, self.rank, identity, state["samples"]))
            batch.append(self.transform(example, generator))
            if len(batch) == self.batch_size:
                yield default_collate(batch), identity, {**state, "dataset": stream.state_dict()}
                batch = []

    def _examples(
        self, stream: datasets.IterableDataset, state: dict[str, Any] | None
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        state = state or {"epoch": 0, "consumed": 0, "samples": 0, "dataset": None}
        epoch, consumed, samples = state["epoch"], state["consumed"], state["samples"]
        if state["dataset"] is not None and not self.replay:
            stream.load_state_dict(state["dataset"])
        while True:
            # `datasets` draws the order of the shards, and of a buffer, from the epoch number alone.
            stream.set_epoch(self.seed * 1_000_003 + epoch + 1)
            examples = iter(stream)
            if self.replay:
                for _ in range(consumed):
                    next(examples)
            for example in examples:
                consumed, samples = consumed + 1, samples + 1
                yield example, {"epoch": epoch, "consumed": consumed, "samples": samples}
            if consumed == 0:
                raise ValueError("the training stream is empty for this worker: use fewer workers or more shards.")
            epoch, consumed = epoch + 1, 0


class TrainingLoader:
    """Endless training batches of one process, resumable at any batch."""

    # To resume it is given the number of batches that this process consumed (`first_batch`) and, of a stream, what
    # `stream_states` was then. `groups` holds a number for each example of map-style data: the examples of a batch
    # then have the same one.

    def __init__(
        self,
        data: datasets.Dataset | datasets.IterableDataset,
        source: DataSource,
        transform: Transform,
        seed: int,
        batch_size: int,
        num_workers: int,
        rank: int,
        world_size: int,
        first_batch: int = 0,
        stream_states: list[dict[str, Any] | None] | None = None,
        groups: np.ndarray | None = None,
    ):
        _check_workers(num_workers)
        options: dict[str, Any] = {"num_workers": num_workers, "pin_memory": torch.cuda.is_available()}
        options["worker_init_fn"] = ignore_signals
        self.stream_states: list[dict[str, Any] | None] = stream_states or [None] * max(1, num_workers)
        self.is_stream = isinstance(data, datasets.IterableDataset)
        if isinstance(data, datasets.IterableDataset):
            stream = self._split_stream(data, source, seed, num_workers, rank, world_size)
            batches = StreamBatches(
                stream,
                transform,
                seed,
                batch_size,
                replay=bool(source.shuffle_buffer),
                rank=rank,
                first_batch=first_batch,
                states=list(self.stream_states),
            )
            self.loader = _QuietLoader(batches, batch_size=None, **options)
        else:
            sampler = PositionBatches(batch_size, rank, world_size, first_batch)
            samples = IndexedSamples(data, transform, seed, groups, batch_size)
            self.loader = _QuietLoader(samples, batch_sampler=sampler, **options)

    @staticmethod
    def _split_stream(
        data: datasets.IterableDataset, source: DataSource, seed: int, num_workers: int, rank: int, world_size: int
    ) -> datasets.IterableDataset:
        if source.shuffle_buffer:
            # Filling the buffer from several shards at once uses threads, which hang in forked loader processes.
            data = data.shuffle(seed=seed, buffer_size=source.shuffle_buffer, max_buffer_input_shards=1)
        shards = data.num_shards // world_size if data.num_shards % world_size == 0 else data.num_shards
        if num_workers > shards:
            raise ValueError(
                f"data.num_workers is {num_workers}, but a process has only {shards} shard(s) of the stream "
                f"({data.num_shards} in all, {world_size} process(es)): use at most {shards} workers, or more shards."
            )
        return split_dataset_by_node(data, rank=rank, world_size=world_size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for item in self._items():
            if not self.is_stream:
                yield item
            elif item is not None:
                batch, worker, state = item
                self.stream_states[worker] = state
                yield batch

    def _items(self) -> Iterator[Any]:
        try:
            yield from self.loader
        except (OSError, ValueError, TypeError) as error:
            # From a loader process it comes with the traceback there as its text, of which the last line is ours.
            if "in DataLoader worker process" not in str(error):
                raise
            kind, _, text = str(error).strip().splitlines()[-1].partition(": ")
            raise (OSError if isinstance(error, OSError) else ValueError)(text or kind) from error
        except RuntimeError as error:
            if not re.match(r"DataLoader worker .*(exited unexpectedly|is killed by signal)", str(error)):
                raise
            raise OSError(
                f"a loader process died ({error}), most often because memory or shared memory ran out: use fewer "
                f"than {self.loader.num_workers} data.num_workers, or smaller batches."
            ) from error


class _QuietLoader(DataLoader):
    """A loader that may have more processes than there are cores."""

    # torch warns twice of each such loader. A recipe is made for other machines than this one, a few processes more do
    # no harm, and of a stream their number decides the order: so it stays, up to the limit of `_check_workers`.
    def check_worker_number_rationality(self) -> None:
        """Says nothing."""


def _check_workers(num_workers: int) -> None:
    """Refuses many more loader processes than cores, which only wait for each other and exhaust memory."""
    limit = 4 * (os.cpu_count() or 1)
    if num_workers > limit:
        raise ValueError(
            f"data.num_workers is {num_workers}; this machine has {os.cpu_count()} cores: use at most {limit}."
        )
