"""A run that was interrupted and continued equals the one that was not, bit for bit.

Weights are compared, but what they are computed from has to be equal too. It is: in both runs torch itself made all
memory that a kernel reads, aligned to 64 bytes (what is loaded is copied into the parameters that are there), and the
threads are as many, so that each kernel adds in the same order. A model whose weights are views of a file may differ.
"""

import json
import random

import numpy as np
import pytest
import torch
from accelerate.utils import set_seed

from hf_ext.training.processes import seed_step

from .launching import fork_two, launch_two
from .tiny import TinyTask, contents, make_arguments, run, run_interrupted
from .two_processes import STOPS, sources

KINDS = ["map", "stream", "buffer"]


def assert_exact(tmp_path, kind, workers, **changes):
    data = {"train": sources(tmp_path)[kind], "eval": {"path": str(tmp_path / "examples")}, "num_workers": workers}
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    metrics = run(TinyTask(), make_arguments(whole, data, **changes))
    for step in STOPS:
        run_interrupted(make_arguments(pieces, data, **changes), step)
    assert run(TinyTask(), make_arguments(pieces, data, **changes)) == metrics
    expected = contents(whole)
    # Model, optimizer, and what is registered: a digest for each is compared.
    assert {"state/step-7/model.safetensors", "state/step-7/optimizer.bin", "state/step-7/custom_checkpoint_1.pkl"} < {
        *expected
    }
    assert contents(pieces) == expected


WHOLE_BATCHES = {"ema_decay": 0.0, "gradient_accumulation_steps": 1, "max_grad_norm": 0.0}


@pytest.mark.parametrize(
    ("kind", "workers", "changes"),
    [
        ("map", 0, WHOLE_BATCHES),
        ("map", 1, {"mixed_precision": "bf16", "lr_scheduler_type": "linear"}),
        ("stream", 0, {"seed": 5, "model": {"batch_norm": False}, "per_device_train_batch_size": 5}),
        ("buffer", 1, {}),
        # Two processes run streams too.
        *(pytest.param(kind, workers, {}, marks=pytest.mark.slow) for kind in KINDS[:2] for workers in (0, 2)),
        *(pytest.param("buffer", workers, {}, marks=pytest.mark.slow) for workers in (0, 2)),
    ],
)
def test_one_process(tmp_path, examples, shards, kind, workers, changes):
    assert_exact(tmp_path, kind, workers, **changes)


def check_two_processes(tmp_path, cases, start):
    start("tests.training.two_processes", str(tmp_path), *cases)
    results = json.loads((tmp_path / "results.json").read_text())
    assert [*results] == cases
    for case, result in results.items():
        assert result["processes"] == 2, case
        assert ("state/step-7/stream-1.json" in result["names"]) == case.startswith(("stream", "buffer")), case
        assert result["differing"] == [], case
        # Each of the nine examples was evaluated exactly once.
        assert (result["metrics"]["examples"], result["metrics"]["indices"]) == (9, 36)


def test_two_processes(tmp_path, examples, shards):
    check_two_processes(tmp_path, ["stream-0-damage"], fork_two)


@pytest.mark.slow
def test_two_processes_with_all_data_and_workers(tmp_path, examples, shards):
    check_two_processes(
        tmp_path, [*(f"{kind}-{workers}" for kind in KINDS for workers in (0, 2)), "map-2-damage"], launch_two
    )


def test_a_step_is_seeded_to_the_states_of_accelerate():
    found = []
    for seed in (set_seed, lambda number: seed_step(number, torch.device("cpu"))):
        seed(2**32 - 5)
        found.append((random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()))
    assert found[0] == found[1]


def test_the_comparison_notices_a_difference(tmp_path, examples):
    """Guards the tests above: another seed changes weights, averages and rows."""
    for seed in (0, 1):
        run(TinyTask(), make_arguments(tmp_path / str(seed), examples, seed=seed))
    first, second = contents(tmp_path / "0"), contents(tmp_path / "1")
    differing = {name for name in first if first[name] != second[name]}
    assert differing >= {
        "metrics 0",
        "snapshot/model.safetensors",
        "state/step-7/model.safetensors",
        "state/step-7/optimizer.bin",
        "state/step-7/custom_checkpoint_2.pkl",
    }
