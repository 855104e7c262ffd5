"""Batches for the training loop, in an order that is a function of (seed, rank, step)."""

# Map-style data: batch `b` of rank `r` holds the positions `(b · world + r) · B + j` of an endless sequence in which
# epoch `e` is a permutation drawn from `(seed, e)`; example and augmentation depend on the position alone. Where
# examples belong to groups, such as sizes of images, epoch `e` is a permutation of batches of one group each.
# Streams: each worker yields whole batches with its own reading state, which a resumed loader hands back to it.

import contextlib
import copy
import hashlib
import itertools
import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, cast

import datasets
import numpy as np
import torch
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from ..data.bad_examples import BadExamples, decode_row, describe_bad, find_example_file, name_bad, read_example
from ..data.files import UNUSABLE
from ..errors import DataError, MissingColumn, UsageError
from .arguments import DataSource
from .classes import name_unlabelled
from .loader_processes import ignore_signals, read_all

# (example, generator) → tensors of one training sample.
Transform = Callable[[dict[str, Any], np.random.Generator], dict[str, Any]]
# Lines of `bad_examples.jsonl`.
BadRows = list[dict[str, str]]
# Steps of a stream whose states of `datasets` are exact; what is not listed is read again.
_EXACT = {
    *("ExamplesIterable", "ArrowExamplesIterable", "RebatchedArrowExamplesIterable", "SelectColumnsIterable"),
    *("FormattedExamplesIterable", "MappedExamplesIterable", "RandomlyCyclingMultiSourcesExamplesIterable"),
    "VerticallyConcatenatedMultiSourcesExamplesIterable",
}


def count_positions(examples: int, groups: np.ndarray | None, batch_size: int) -> int:
    """The length of an epoch; the last batch of each group is a full one too."""
    if groups is None:
        return examples
    counts = np.unique(groups, return_counts=True)[1]
    return int((-(-counts // batch_size) * batch_size).sum())


def describe_small_groups(groups: np.ndarray | None, batch_size: int) -> Iterator[str]:
    """A warning of groups that fill no batch, where there are any."""
    counts = np.unique([] if groups is None else groups, return_counts=True)[1]
    if (small := counts[counts < batch_size]).size:
        yield (
            f"{len(small)} of {len(counts)} groups of examples, such as sizes of pictures, have fewer than a batch of "
            f"{batch_size}: their {small.sum()} examples are repeated in every epoch to fill a batch"
        )


@dataclass(eq=False)
class IndexedSamples(Dataset):
    """Training samples addressed by their position in the endless shuffled sequence, each with what it replaces."""

    source: datasets.Dataset
    transform: Transform
    seed: int
    groups: np.ndarray | None = None
    batch_size: int = 1
    bad_allowed: int = 0

    def __post_init__(self) -> None:
        self.epoch_length = count_positions(len(self.source), self.groups, self.batch_size)
        # Without groups, batches may go over the end of an epoch.
        self._batch = 1 if self.groups is None else self.batch_size
        self._members = np.zeros(len(self.source), dtype=np.int64) if self.groups is None else self.groups
        self._orders: dict[int, np.ndarray] = {}

    def _order(self, epoch: int) -> np.ndarray:
        generator = np.random.default_rng((self.seed, epoch))
        if self._batch == 1:
            return generator.permutation(len(self.source))
        batches = []
        for group in np.unique(self._members):
            members = generator.permutation(np.flatnonzero(self._members == group))
            # The last batch of a group is filled up from its first.
            whole = -(-len(members) // self._batch) * self._batch
            batches.append(np.resize(members, whole).reshape(-1, self._batch))
        return generator.permutation(np.concatenate(batches)).reshape(-1)

    def __getitem__(self, position: int) -> tuple[dict[str, Any], BadRows]:
        epoch, offset = divmod(position, self.epoch_length)
        if epoch not in self._orders:
            # Neighbouring epochs meet in one batch, so two orders are kept.
            self._orders = {key: order for key, order in self._orders.items() if key == epoch - 1}
            self._orders[epoch] = self._order(epoch)
        order, bad = self._orders[epoch], dict[int, dict[str, str]]()
        index = int(order[offset])
        while True:
            generator = np.random.default_rng((self.seed, 1, position))
            try:
                return self.transform(read_example(self.source, index), generator), [*bad.values()]
            except UNUSABLE as error:
                bad[index] = name_bad(str(index), find_example_file(self.source, index), error)
                if not self.bad_allowed and not isinstance(error, OSError | UsageError | MissingColumn):
                    raise DataError(describe_bad(bad[index])) from error
                # One more than allowed is returned: the training process, which counts all of them, ends the run.
                if len(bad) > self.bad_allowed + 1 or not self.bad_allowed:
                    raise
                others = (int(other) for other in self._stand_ins(order, offset) if other not in bad)
                if (found := next(others, None)) is None:
                    raise
                index = found

    def _stand_ins(self, order: np.ndarray, offset: int) -> np.ndarray:
        """Replacement examples for an offset, nearest first: those of its batch, of its group, and the others."""
        batch, place = divmod(offset, self._batch)
        batches = np.roll(order.reshape(-1, self._batch), (-batch, -place), (0, 1))
        # Group after group: where none of a group can be used, all samples of the batch come to the same next one.
        groups = self._members[batches[:, 0]]
        distances = (groups - groups[0]) % (self._members.max() + 1)
        return cast(np.ndarray, batches[np.argsort(distances, kind="stable")].reshape(-1))


def collate_samples(samples: list[tuple[dict[str, Any], BadRows]]) -> tuple[dict[str, Any], BadRows]:
    return default_collate([sample for sample, _ in samples]), [row for _, bad in samples for row in bad]


@dataclass(eq=False)
class StreamBatches(IterableDataset):
    """Batches of a stream with the reading state after each; `states` holds one entry for each worker."""

    # How a stream resumes. A worker cannot jump to batch b: it has to know where it stopped reading. So every batch
    # comes with the state of the worker that made it (epoch, examples consumed and made, and the place in the shards
    # as `datasets` tells it), the training saves the last state of each worker, and a resumed loader starts every
    # worker from its own. Where `datasets` finds the place again (`_EXACT`), the place in the shards is enough.
    # Elsewhere (`replay`), as after a shuffle buffer, whose contents are in no state, the epoch is read again, up to
    # the example where it stopped, without transforming. tests/training/test_resume.py compares all weights of
    # interrupted and uninterrupted runs bit by bit, test_streams.py all batches of every kind of stream.

    stream: datasets.IterableDataset
    transform: Transform
    seed: int
    batch_size: int
    replay: bool
    rank: int
    first_batch: int
    states: list[dict[str, Any] | None]
    bad: BadExamples

    def __post_init__(self) -> None:
        # A digest of the random states from which a stream draws its order; of most streams those of no state.
        drawn = [step.generator for step in list_steps(self.stream) if hasattr(step, "generator")]
        states = [generator.bit_generator.state for generator in drawn]
        self.order = hashlib.sha256(repr(states).encode()).hexdigest()[:16]
        # Decoded here, after reading: a picture that cannot be decoded would end the stream inside of `datasets`.
        self.features = self.stream.features
        self.stream = self.stream if self.features is None else self.stream.decode(False)
        if any(state is not None and state["order"] != self.order for state in self.states):
            told = "the training stream is shuffled in another order than the run began with"
            raise ValueError(f"{told}: give its shuffle() a seed, or start a new run in another output_dir.")

    def __iter__(self) -> Iterator[tuple[dict[str, Any], BadRows, int, dict[str, Any]] | None]:
        worker = get_worker_info()
        identity, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        # The DataLoader asks worker 0 first. A run that stopped after a number of batches that the workers do not
        # divide goes on with another one: those before it hand out a blank, which the reader drops.
        if identity < self.first_batch % workers:
            yield None
        # The epoch number of a stream lives in memory that all workers share; each needs its own.
        stream = copy.deepcopy(self.stream)
        batch: list[dict[str, Any]] = []
        bad: BadRows = []
        for example, state in self._examples(stream, self.states[identity]):
            # One generator for each sample, distinct over ranks, workers and time, so that resuming restores it.
            generator = np.random.default_rng((self.seed, 2, self.rank, identity, state["samples"]))
            try:
                batch.append(self.transform(decode_row(self.features, example), generator))
            except UNUSABLE as error:
                place = f"{state['consumed']} of epoch {state['epoch']}, process {self.rank}, worker {identity}"
                bad.append(name_bad(place, example, error))
                if len(bad) > self.bad.count_allowed(state["samples"]):
                    raise (OSError if isinstance(error, OSError) else ValueError)(describe_bad(bad[-1])) from error
            if len(batch) == self.batch_size:
                yield default_collate(batch), bad, identity, {**state, "dataset": stream.state_dict()}
                batch, bad = [], []

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
                yield example, {"epoch": epoch, "consumed": consumed, "samples": samples, "order": self.order}
            if consumed == 0:
                raise ValueError("the training stream is empty for this worker: use fewer workers or more shards.")
            epoch, consumed = epoch + 1, 0


def list_steps(stream: datasets.IterableDataset) -> Iterator[Any]:
    """The steps of `datasets` that a stream is made of: buffers, maps, mixtures, and last the readers of shards."""
    left = [stream._ex_iterable]
    while left:
        step = left.pop()
        yield step
        left += [step.ex_iterable] if hasattr(step, "ex_iterable") else getattr(step, "ex_iterables", [])


def check_workers(data: datasets.Dataset | datasets.IterableDataset, num_workers: int, world_size: int) -> None:
    """Refuses more loader processes than this machine can run, or than a process has shards of a stream."""
    if num_workers > (most := 4 * (cores := os.cpu_count() or 1)):
        # They compete for cores and exhaust memory.
        raise ValueError(f"data.num_workers is {num_workers}; this machine has {cores} cores: use at most {most}.")
    if not isinstance(data, datasets.IterableDataset):
        return
    shards = data.num_shards // world_size if data.num_shards % world_size == 0 else data.num_shards
    if num_workers > shards:
        raise UsageError(
            f"data.num_workers is {num_workers}, but a process has only {shards} shard(s) of the stream "
            f"({data.num_shards} in all, {world_size} process(es)): use at most {shards} workers, or more shards."
        )


class TrainingLoader:
    """
    Endless training batches of one process, resumable after `first_batch` batches and, of a stream, from the
    `stream_states` of then. The examples of a batch have one number in `groups`.
    """

    def __init__(
        self,
        data: datasets.Dataset | datasets.IterableDataset,
        source: DataSource | None,
        transform: Transform,
        seed: int,
        batch_size: int,
        num_workers: int,
        rank: int,
        world_size: int,
        first_batch: int = 0,
        stream_states: list[dict[str, Any] | None] | None = None,
        groups: np.ndarray | None = None,
        bad: BadExamples | None = None,
    ):
        pinned = torch.cuda.is_available()
        options: Any = {"num_workers": num_workers, "pin_memory": pinned, "worker_init_fn": ignore_signals}
        self.stream_states: list[dict[str, Any] | None] | None = None
        self.source, self.bad = source, bad or BadExamples()
        self.samples_read, self.batch_size = first_batch * batch_size, batch_size
        if isinstance(data, datasets.IterableDataset):
            if source is not None and source.shuffle_buffer:
                # Filling the buffer from several shards at once uses threads, which hang in forked loader processes.
                data = data.shuffle(seed=seed, buffer_size=source.shuffle_buffer, max_buffer_input_shards=1)
            stream = split_dataset_by_node(data, rank=rank, world_size=world_size)
            self.stream_states = stream_states or [None] * max(1, num_workers)
            # A list of sources is shared out to the workers source by source, and a worker's state is first loaded
            # into the whole list, which has other entries.
            exact = _EXACT if num_workers < 2 else _EXACT - {"VerticallyConcatenatedMultiSourcesExamplesIterable"}
            replay = not {type(step).__name__ for step in list_steps(stream)} <= exact
            states = list(self.stream_states)
            batches = StreamBatches(stream, transform, seed, batch_size, replay, rank, first_batch, states, self.bad)
            self.loader = _QuietLoader(batches, batch_size=None, **options)
        else:
            starts = itertools.count((first_batch * world_size + rank) * batch_size, world_size * batch_size)
            positions = ([*range(start, start + batch_size)] for start in starts)
            samples = IndexedSamples(data, transform, seed, groups, batch_size, self.bad.count_allowed(0))
            self.loader = _QuietLoader(samples, batch_sampler=positions, collate_fn=collate_samples, **options)

    def __iter__(self) -> Generator[dict[str, Any], None, None]:
        # Closed by name: the traceback of an error would keep the loader processes alive.
        with name_unlabelled(self.source), contextlib.closing(read_all(self.loader)) as items:
            for item in items:
                if item is None:
                    continue
                batch, bad, *place = item
                if self.stream_states is not None:
                    self.stream_states[place[0]] = place[1]
                self.samples_read += self.batch_size
                self.bad.add(bad, self.samples_read)
                yield batch


class _QuietLoader(DataLoader):
    """A loader that may have more processes than there are cores, of which torch warns twice."""

    # A recipe is made for other machines than this one, a few processes more do no harm, and of a stream their number
    # decides the order.
    def check_worker_number_rationality(self) -> None:
        """Replaces a check of torch that only warns."""
