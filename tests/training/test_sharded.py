"""FSDP2 on two processes gives what DDP gives: weights, averages, scores, pictures, files; and goes on exactly."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_ext import SemanIRConfig, SemanIRForImageRestoration
from hf_ext.training.state import RunFolder
from tests.tasks.diffusion_testing import write_table

from .launching import fork_pairs, fork_two
from .sharded import CASES, SEMANIR
from .tiny import TIMINGS, contents


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Nine rows that have something for every method, and a model for adapters."""
    audio = [*np.random.default_rng(0).normal(size=(9, 16)).astype(np.float32)]
    texts = ["a red hen", "fish", "a fish on the grass"] * 3
    write_table(tmp_path / "data", [(16, 16)] * 9, ["a", "b", "c"], label=[0, 1, 2] * 3, text=texts, audio=audio)
    SemanIRForImageRestoration(SemanIRConfig(**SEMANIR, top_k=4)).save_pretrained(tmp_path / "base")
    return tmp_path


def read_rows(run: Path) -> list[dict]:
    """Rows of metrics without times."""
    rows = RunFolder(run).read_metrics()
    return [{name: value for name, value in row.items() if name not in TIMINGS} for row in rows]


def read_weights(run: Path) -> dict[str, torch.Tensor]:
    """Tensors of all files of weights in snapshots."""
    files = [*run.glob("snapshot/**/*.safetensors"), *run.glob("best/**/*.safetensors")]
    return {f"{file.relative_to(run)} {name}": value for file in files for name, value in load_file(file).items()}


def read_others(run: Path) -> dict[str, str | bytes]:
    """What lies in the snapshot beside the weights: the same model's code and configuration."""
    found = {str(file.relative_to(run)): file for file in run.glob("snapshot/**/*") if file.is_file()}
    free = ("training.json", "eval.json", ".safetensors")
    return {name: b"" if name.endswith(free) else file.read_bytes() for name, file in found.items()}


def assert_close(found: dict, expected: dict) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def assert_same_runs(root: Path, case: str) -> None:
    whole, sharded, continued = (root / case / name for name in ("ddp", "fsdp", "continued"))
    # The snapshots hold the averages, as the states of the weights show by going on.
    assert_close(read_weights(sharded), read_weights(whole))
    for found, expected in zip(read_rows(sharded), read_rows(whole), strict=True):
        # Of the gradients' sums, in another order.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert read_others(sharded) == read_others(whole)
    pictures = {file.name: file.read_bytes() for file in whole.glob("samples/*")}
    assert pictures == {file.name: file.read_bytes() for file in sharded.glob("samples/*")}
    assert len(pictures) == (0 if case == "mrconv-lm" else 3)
    # Bit for bit.
    assert contents(continued) == contents(sharded)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_sharded_runs_are_those_of_two_whole_copies(root, case):
    fork_two("tests.training.sharded", str(root), "compare", case)
    assert_same_runs(root, case)
    if case == "mrconv-lm":
        assert {file.name for file in (root / case / "fsdp" / "state").iterdir()} == {"step-1", "step-2", "step-3"}
        names = load_file(root / case / "fsdp" / "snapshot" / "model.safetensors").keys()
        assert "model.embedding.weight" in names and "lm_head.weight" not in names
        model = AutoModelForCausalLM.from_pretrained(root / case / "fsdp" / "snapshot")
        assert model.lm_head.weight is model.model.embedding.weight
        # Weights whose first axis four does not divide among them.
        fork_pairs("tests.training.sharded", ([0] * 4, [str(root), "four", case]))
        assert_close(read_weights(root / case / "four"), read_weights(root / case / "fsdp"))


@pytest.mark.slow
def test_a_sharded_run_goes_on_after_a_kill_of_one_process(root):
    sharded, killed = root / "mrconv-lm" / "fsdp", root / "mrconv-lm" / "killed"
    with pytest.raises(AssertionError):
        fork_two("tests.training.sharded", str(root), "kill", "mrconv-lm")
    assert {file.name for file in (killed / "state").iterdir()} == {"step-1", "step-2"}
    fork_two("tests.training.sharded", str(root), "continue", "mrconv-lm")
    fork_two("tests.training.sharded", str(root), "compare", "mrconv-lm")
    assert contents(killed) == contents(sharded)
