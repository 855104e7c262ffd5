"""Sources of examples, the order in which they are read, and loader processes that are new interpreters."""

import multiprocessing
import os
import signal

import datasets
import numpy as np
import pytest
import torch

from hf_ext.data.opening import open_source
from hf_ext.errors import UsageError
from hf_ext.tasks.restoration import SemanIRTask
from hf_ext.tasks.series import SeriesRegressionTask
from hf_ext.training import loader_processes
from hf_ext.training.arguments import DataSource, apply_overrides
from hf_ext.training.data import TrainingLoader, check_workers
from hf_ext.training.evaluation import evaluate, share_batches
from hf_ext.training.loader_processes import SIGNALS, read_batches, start
from tests.kit.refusals import refused
from tests.kit.studies import write_photos

from .tiny import TinyTask
from .worker_modules import list_modules


def read(path, batches, workers=0, first_batch=0, rank=0, world_size=1, **changes):
    """Row numbers of the examples in reading order, whichever way they were flipped."""
    source, sample = DataSource(str(path), **changes), TinyTask(noise=0.0).training_sample
    iterator = iter(TrainingLoader(open_source(source), source, sample, 0, 2, workers, rank, world_size, first_batch))
    labels = [picture for _ in range(batches) for picture in next(iterator)["labels"][:, 0, 0]]
    iterator.close()
    numbers = [[round(float(row[side]) * 100, 3) for side in (0, -1)] for row in labels]
    return [next(int(number) for number in pair if number == int(number)) for pair in numbers]


def test_each_epoch_is_another_permutation(examples):
    order = read(examples, 9)
    first, second = order[:9], order[9:]
    assert sorted(first) == sorted(second) == [*range(9)] and first != second
    assert read(examples, 9, workers=2) == order
    # Loader processes end with the reading.
    assert not multiprocessing.active_children()
    assert read(examples, 5, first_batch=4) == order[8:]


def test_processes_share_an_epoch_of_indexed_data(examples):
    whole = read(examples, 8)
    parts = [read(examples, 4, rank=rank, world_size=2) for rank in (0, 1)]
    assert [whole[0:2], whole[2:4]] == [part[:2] for part in parts]
    assert sorted(parts[0] + parts[1]) == sorted(whole)


@pytest.mark.parametrize("buffer", [0, 5])
def test_each_epoch_of_a_stream_has_another_order_of_shards(shards, buffer):
    order = read(shards, 33, streaming=True, shuffle_buffer=buffer)
    epochs = [order[start : start + 22] for start in (0, 22, 44)]
    assert all(sorted(epoch) == [*range(22)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    if not buffer:
        # Within a shard of five or six rows the order stays.
        assert [number for number in epochs[0] if number < 6] == [*range(6)]


def test_processes_share_a_stream_of_shards_enough(shards):
    parts = [read(shards, 5, rank=rank, world_size=2, streaming=True) for rank in (0, 1)]
    assert not {*parts[0]} & {*parts[1]}
    with refused(UsageError, "2 shard", "2 process"):
        check_workers(open_source(DataSource(str(shards), streaming=True)), 3, 2)


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


TINY = {"hidden_size": 4, "num_hidden_layers": 1, "kernel_size": 4}
SMALL = {"embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 4, "top_k": 8, "train_top_k": []}


@pytest.fixture
def spawn():
    """Processes are new interpreters, not forks."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def picture(folder):
    folder = write_photos(folder / "photos", range(3), (20, 24, 3))
    task = SemanIRTask({"kind": "gaussian_noise", "sigma": 25}, patch_size=8)
    return task, task.build_model(SMALL, None), open_source(DataSource(str(folder)))


def series(folder):
    values = np.random.default_rng(0).normal(size=(5, 12))
    data = datasets.Dataset.from_list([{"x": row.tolist(), "strength": float(row.std())} for row in values])
    task = SeriesRegressionTask(columns=["x"], max_length=12, target_columns=["strength"])
    task.read_data(data)
    return task, task.build_model(TINY, None), data


@pytest.mark.parametrize(
    ("kind", "workers", "way"),
    [
        (series, 1, "fork"),
        *(pytest.param(*case, "spawn", marks=pytest.mark.slow) for case in ((series, 1), (picture, 2))),
    ],
)
def test_an_evaluation_is_the_same_in_loader_processes(kind, workers, way, tmp_path, request):
    if way == "spawn":
        request.getfixturevalue("spawn")
    torch.manual_seed(0)
    task, model, data = kind(tmp_path)
    alone, shared = (evaluate(task, model, data, batch_size=2, num_workers=count) for count in (0, workers))
    assert alone == shared


def test_a_loader_process_imports_what_a_dataset_needs_and_bears_signals_meanwhile(spawn, monkeypatch):
    """A signal to the whole group may come while it starts."""
    # Windows cannot hold signals back.
    numbers = SIGNALS if hasattr(signal, "pthread_sigmask") else []

    def start_under_signals(*words):
        batches = start(*words)
        (worker,) = batches._workers
        for number in numbers:
            os.kill(worker.pid, number)
        return batches

    monkeypatch.setattr(loader_processes, "start", start_under_signals)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, []) if numbers else None
    data = datasets.Dataset.from_dict({"index": [0]}).with_transform(list_modules)
    ((row,),) = read_batches(data, [[0]], 1)
    assert not {"transformers", "accelerate", "diffusers", "peft", "hf_ext.mrconv"} & {*row["modules"]}
    assert "hf_ext.training.loader_processes" in row["modules"] and "HF_EXT_REGISTER_MODELS" not in os.environ
    assert not numbers or signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
