"""Sources of examples, and the order in which they are read."""

import io
import multiprocessing
import tarfile

import pytest

from hf_ext.data.opening import open_source
from hf_ext.errors import UsageError
from hf_ext.training.arguments import DataSource, apply_overrides
from hf_ext.training.data import TrainingLoader, check_workers
from hf_ext.training.evaluation import share_batches
from tests.kit.refusals import refused

from .tiny import TinyTask


def write_tar(path, images):
    with tarfile.open(path, "w") as archive:
        for index, file in enumerate(sorted(images.glob("*.png"))):
            content = file.read_bytes()
            member = tarfile.TarInfo(f"{index:04d}.image.png")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def make_loader(path, workers=0, first_batch=0, rank=0, world_size=1, **changes):
    source = DataSource(str(path), **changes)
    return TrainingLoader(
        open_source(source), source, TinyTask(noise=0.0).training_sample, 0, 2, workers, rank, world_size, first_batch
    )


def read(loader, batches):
    """Row numbers of the examples in reading order, whichever way they were flipped."""
    iterator = iter(loader)
    labels = [picture for _ in range(batches) for picture in next(iterator)["labels"][:, 0, 0]]
    iterator.close()
    numbers = [[round(float(row[side]) * 100, 3) for side in (0, -1)] for row in labels]
    return [next(int(number) for number in pair if number == int(number)) for pair in numbers]


def test_each_epoch_is_another_permutation(examples):
    order = read(make_loader(examples), 9)
    first, second = order[:9], order[9:]
    assert sorted(first) == sorted(second) == [*range(9)]
    assert first != second
    assert read(make_loader(examples, workers=2), 9) == order
    assert read(make_loader(examples, first_batch=4), 5) == order[8:]


def test_processes_share_an_epoch_of_indexed_data(examples):
    whole = read(make_loader(examples), 8)
    parts = [read(make_loader(examples, rank=rank, world_size=2), 4) for rank in (0, 1)]
    assert [whole[0:2], whole[2:4]] == [part[:2] for part in parts]
    assert sorted(parts[0] + parts[1]) == sorted(whole)


@pytest.mark.parametrize("buffer", [0, 5])
def test_each_epoch_of_a_stream_has_another_order_of_shards(shards, buffer):
    order = read(make_loader(shards, streaming=True, shuffle_buffer=buffer), 33)
    epochs = [order[start : start + 22] for start in (0, 22, 44)]
    assert all(sorted(epoch) == [*range(22)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    if not buffer:
        # Within a shard of five or six rows the order stays.
        assert [number for number in epochs[0] if number < 6] == [*range(6)]


def test_processes_share_a_stream(shards):
    parts = [read(make_loader(shards, rank=rank, world_size=2, streaming=True), 5) for rank in (0, 1)]
    assert not {*parts[0]} & {*parts[1]}


def test_too_many_workers_for_the_shards_of_a_stream(shards):
    with refused(UsageError, "2 shard", "2 process"):
        check_workers(open_source(DataSource(str(shards), streaming=True)), 3, 2)


def test_loader_processes_end_with_the_reading(examples):
    read(make_loader(examples, workers=2), 3)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("count", [1, 2, 5, 8, 9])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_evaluation_takes_each_example_once_in_equally_many_batches(count, processes):
    shares = [list(share_batches(count, 2, rank, processes)) for rank in range(processes)]
    assert len({len(share) for share in shares}) == 1
    taken = [index for share in shares for indices, is_repeat in share if not is_repeat for index in indices]
    assert sorted(taken) == [*range(count)]


HELD = {"hold_out": 0.1, "hold_out_seed": 3}
PARTS = {
    "share": ({"split": "train", **HELD}, {"split": "validation", **HELD}),
    "slice": ({"split": "train[:80%]"}, {"split": "train[80%:]"}),
    "slices": ({"split": "train[50:]"}, {"split": "train[:25]+train[30:50]"}),
    "split": ({"split": "train"}, {"split": "test"}),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("flags", "whole"),
    [
        ("--data.eval.path new.csv", ["eval"]),
        ("--data.train.path=new.csv --max-steps 3", ["train"]),
        ("--data.train.path a --data.eval.path b", ["train", "eval"]),
        ("--data.train.path new --data.eval.path ./new/", []),
        ("--data.eval.path ./old.csv", []),
        ("--data.eval.path new.csv --data.eval.hold-out 0.1", []),
        ("--max_steps 3", []),
    ],
)
def test_a_part_belongs_to_the_path_of_the_recipe(part, flags, whole, caplog):
    recipe = {"data": dict(zip(("train", "eval"), ({"path": "old.csv", **own} for own in PARTS[part]), strict=True))}
    data = apply_overrides(recipe, flags.split())["data"]
    for name, own in zip(("train", "eval"), PARTS[part], strict=True):
        left = {key: data[name][key] for key in ("split", *HELD) if key in data[name]}
        if name not in whole:
            assert left == {**own, **({"hold_out": 0.1} if "hold" in flags and name == "eval" else {})}
        else:
            assert left == ({} if part == "share" else {"split": "test" if own["split"] == "test" else "train"})
        # What is left out is said.
        told = f"--data.{name}.path" in caplog.text and str(own["split"]) in caplog.text
        assert told == (name in whole and part != "split")


def test_a_named_set_and_a_given_split_keep_what_is_theirs():
    sets = {name: {"path": "old", "split": "validation", **HELD} for name in ("first", "second-one")}
    flags = ["--data.eval.second-one.path", "new", "--data.eval.first.path", "x", "--data.eval.first.split", "test"]
    data = apply_overrides({"data": {"train": {"path": "old", **HELD}, "eval": sets}}, flags)["data"]
    assert data["eval"] == {"first": {"path": "x", "split": "test"}, "second-one": {"path": "new"}}
