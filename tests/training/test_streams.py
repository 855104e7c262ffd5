"""Every kind of training data × workers × processes goes on exactly, wherever it was cut, or is refused beforehand."""

import json
from pathlib import Path
from typing import Any

import pytest

from hf_ext.data.opening import open_source
from hf_ext.errors import UsageError
from hf_ext.tasks.diffusion_data import write_tar
from hf_ext.training.arguments import DataSource
from hf_ext.training.data import TrainingLoader, check_workers
from tests.kit.refusals import refused

from .tiny import SIDE, TinyTask, make_arguments, run, write_hollow, write_images, write_shards

BATCHES = 9


def open_kind(root: Path, kind: str) -> tuple[Any, DataSource | None]:
    """Data of a kind, and the source that names it; none of what is given in Python."""
    a, b, c, empty, hollow = (str(root / name) for name in ("a", "b", "c", "empty", "hollow"))
    paths: dict[str, Any] = {
        "one": a,
        "list": [a, b],
        # Of unequal lengths, the last one shorter than a batch of all.
        "three": [a, b, c],
        "mixture": [
            {"path": a, "weight": 3},
            {"path": b},
            {"path": c, "weight": 0.5},
        ],
        "empty shard": empty,
        "empty parquet": hollow,
        "list with empty parquet": [hollow, b],
        "pictures": str(root / "pictures"),
        "tars": str(root / "tars" / "*.tar"),
    }
    if kind.startswith("python"):
        data = open_source(DataSource(a, streaming=kind != "python map"))
        shuffled = {"python own shuffle": {"seed": 3, "buffer_size": 5}}
        mapped = kind == "python batched map"
        data = data.map(lambda rows: rows, batched=True, batch_size=4) if mapped else data
        data = data.filter(lambda row: row["pixels"][0] < 0.2) if kind == "python filter" else data
        return (data.shuffle(**shuffled[kind]) if kind in shuffled else data), None
    name, _, buffer = kind.partition(" with ")
    values = {"streaming": not kind.endswith("map"), "shuffle_buffer": 5 if buffer == "buffer" else 0}
    rename = {"image.png": "image"} if name.startswith("tars") else None
    source = DataSource(paths[name.removesuffix(" map")], rename_columns=rename, **values)
    return open_source(source), source


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, shards, rows in (("a", 4, 22), ("b", 4, 9), ("c", 4, 5)):
        write_shards(tmp_path / name, shards, rows)
    (tmp_path / "empty").mkdir()
    for number in range(4):
        rows = [{"pixels": [number / 9 + row / 99] * SIDE**2} for row in range(3) if number != 2]
        (tmp_path / "empty" / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_hollow(tmp_path / "hollow")
    pictures = write_images(tmp_path / "pictures", 9)
    held = [(path.stem, {"image.png": path.read_bytes()}) for path in sorted(pictures.iterdir())]
    for number in range(4):
        write_tar(tmp_path / "tars" / f"{number}.tar", held)
    return tmp_path


KINDS = [
    *("one", "one with buffer", "list", "list with buffer", "three", "three with buffer", "mixture"),
    *("mixture with buffer", "pictures", "tars", "tars with buffer", "one map", "list map", "mixture map"),
    *("pictures map", "tars map", "python map", "python stream", "python own shuffle"),
    *("python batched map", "python filter"),
]


class Cut:
    """A loader at a batch, with the states of its workers there."""

    def __init__(self, root: Path, kind: str, workers: int, rank: int, world: int) -> None:
        self.data, self.source = open_kind(root, kind)
        self.rest = (workers, rank, world)

    def open(self, first: int = 0, states: list | None = None) -> TrainingLoader:
        transform = TinyTask().training_sample
        return TrainingLoader(self.data, self.source, transform, 7, 2, *self.rest, first, states)

    def read(self, count: int, first: int = 0, states: list | None = None) -> tuple[list[list[float]], list[list]]:
        """A number for each example of each batch, and the states after each batch."""
        loader, found, after = self.open(first, states), [], []
        batches = iter(loader)
        for _ in range(count):
            # Example, flip and noise have all left their mark in the sum.
            found.append([float(noisy.double().sum()) for noisy in next(batches)["pixel_values"]])
            # As a state holds them.
            after.append(json.loads(json.dumps(loader.stream_states)))
        batches.close()
        return found, after


READERS = [(0, 2), (1, 1), (1, 2), (2, 1), (2, 2)]
SHARDS = [(f"empty {kind}", workers) for kind in ("shard", "parquet") for workers in (0, 2)]
SHARDS += [("empty parquet map", 0), ("empty parquet with buffer", 0), ("list with empty parquet", 2)]


@pytest.mark.parametrize(
    ("kind", "workers", "world", "cuts"),
    [
        *((kind, 0, 1, [1, 6]) for kind in KINDS),
        *((kind, 2, 1, [1, 4]) for kind in ("list", "tars", "python own shuffle")),
        # A shard without rows is no end.
        *((kind, workers, 1, [1, 3]) for kind, workers in SHARDS),
        *(pytest.param(kind, *read, [1, 2, 5, 8], marks=pytest.mark.slow) for kind in KINDS for read in READERS),
    ],
)
def test_data_of_each_kind_go_on_wherever_they_were_cut(root, kind, workers, world, cuts):
    if kind == "pictures" and workers > 1:
        # A folder of so few pictures is one shard, which has no place for two readers.
        with refused(UsageError, "num_workers", "1 shard"):
            check_workers(open_kind(root, kind)[0], workers, world)
        return
    for rank in range(world):
        expected, states = Cut(root, kind, workers, rank, world).read(BATCHES)
        assert len({number for batch in expected for number in batch}) > BATCHES
        # Opened anew, as another process does it.
        again = Cut(root, kind, workers, rank, world)
        for place in cuts:
            before = states[place - 1]
            found, _ = again.read(BATCHES - place, place, before if before and any(before) else None)
            assert found == expected[place:], (rank, place)


def test_a_worker_whose_shards_are_all_empty_is_refused_in_words(root):
    with pytest.raises(ValueError):
        Cut(root, "empty shard", 4, 0, 1).read(4)


def test_a_shuffle_without_a_seed_is_not_gone_on_with(root):
    first, second = (Cut(root, "python stream", 0, 0, 1) for _ in range(2))
    for cut in (first, second):
        cut.data = cut.data.shuffle(buffer_size=5)
    expected, states = first.read(6)
    assert first.read(3, 3, states[2])[0] == expected[3:]
    with pytest.raises(ValueError):
        second.open(3, states[2])
    # Of a run, before a step.
    changes = {"save_steps": 2, "lr_scheduler_type": "constant"}
    run(TinyTask(), make_arguments(root / "run", {}, max_steps=2, **changes), first.data)
    with pytest.raises(ValueError):
        run(TinyTask(), make_arguments(root / "run", {}, max_steps=4, **changes), second.data)
