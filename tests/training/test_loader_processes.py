"""Loader processes where each is a new interpreter, as on macOS and Windows: results, imports, signals."""

import multiprocessing
import os
import signal

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from hf_ext.data.opening import open_source
from hf_ext.tasks.restoration import SemanIRTask
from hf_ext.tasks.series import SeriesRegressionTask
from hf_ext.training import DataSource, loader_processes
from hf_ext.training.evaluation import evaluate
from hf_ext.training.loader_processes import SIGNALS, read_batches, start

from .worker_modules import list_modules

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
    for index, pixels in enumerate(np.random.default_rng(0).integers(256, size=(3, 20, 24, 3))):
        Image.fromarray(np.uint8(pixels)).save(folder / f"{index}.png")
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
        pytest.param(series, 1, "spawn", marks=pytest.mark.slow),
        pytest.param(picture, 2, "spawn", marks=pytest.mark.slow),
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
