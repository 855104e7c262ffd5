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

from hf_ext.training.loop import seed_step

from .launching import fork_pairs, fork_two, launch_two
from .tiny import write_shards
from .two_processes import CountedTask, compare, series

KINDS = ["map", "stream", "buffer"]


WHOLE_BATCHES = {"ema_decay": 0.0, "gradient_accumulation_steps": 1, "max_grad_norm": 0.0}


@pytest.mark.parametrize(
    ("kind", "workers", "changes"),
    [
        ("map", 0, WHOLE_BATCHES),
        ("map", 1, {"mixed_precision": "bf16", "lr_scheduler_type": "linear"}),
        ("stream", 0, {"seed": 5, "model": {"batch_norm": False}, "per_device_train_batch_size": 5}),
        ("buffer", 1, {}),
        # Two processes run streams too.
        *(pytest.param(kind, workers, {}, marks=pytest.mark.slow) for kind in KINDS for workers in (0, 2)),
    ],
)
def test_one_process(tmp_path, examples, shards, kind, workers, changes):
    result = compare(tmp_path, f"{kind}-{workers}", **changes)
    # Model, optimizer, and what is registered: a digest for each is compared.
    names = {"state/step-7/model.safetensors", "state/step-7/optimizer.bin", "state/step-7/custom_checkpoint_1.pkl"}
    assert names < {*result["names"]} and result["differing"] == []


def check_two_processes(folder, cases):
    results = json.loads((folder / "results.json").read_text())
    assert [*results] == cases
    for case, result in results.items():
        assert result["processes"] == 2, case
        assert ("state/step-7/stream-1.json" in result["names"]) == case.startswith(("stream", "buffer")), case
        assert result["differing"] == [], case
        # Each of the nine examples was evaluated exactly once.
        assert (result["metrics"]["examples"], result["metrics"]["indices"]) == (9, 36)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder of two runs of two processes, the second of which fails."""
    root = tmp_path_factory.mktemp("two")
    write_shards(root / "examples", shards=2, examples=9)
    write_shards(root / "shards", shards=4, examples=22)
    fork_pairs("tests.training.two_processes", *(([0, 0], [str(root), case]) for case in ("stream-0-damage", "error")))
    return root


def test_two_processes(two):
    check_two_processes(two, ["stream-0-damage"])


def test_one_of_two_processes_scans_the_data_for_both(tmp_path):
    fork_two("tests.training.two_processes", str(tmp_path), "scan")
    alone = CountedTask(max_length=8)
    alone.read_data(series())
    found = [json.loads((tmp_path / f"scans-{rank}.json").read_text()) for rank in (0, 1)]
    assert found == [{**alone.learned, "reads": reads} for reads in (len(series()), 0)]


def test_a_process_that_fails_is_named_by_the_others(two):
    found = [json.loads((two / f"ended-{rank}.json").read_text()) for rank in (0, 1)]
    assert [ending["kind"] for ending in found] == ["FailedElsewhereError", "ValueError"]
    lines = [line for line in found[0]["said"].splitlines() if "process 1 of 2" in line]
    assert len(lines) == 1 and "its disk is gone" in lines[0]
    # The note of that failure is not one of the next.
    assert not [*(two / "run" / "state").glob("*.json")]


@pytest.mark.slow
def test_two_processes_with_all_data_and_workers(tmp_path, examples, shards):
    cases = [*(f"{kind}-{workers}" for kind in KINDS for workers in (0, 2)), "map-2-damage"]
    launch_two("tests.training.two_processes", str(tmp_path), *cases)
    check_two_processes(tmp_path, cases)


def test_a_step_is_seeded_to_the_states_of_accelerate():
    found = []
    for seed in (set_seed, lambda number: seed_step(number, torch.device("cpu"))):
        seed(2**32 - 5)
        found.append((random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()))
    assert found[0] == found[1]
