"""In fp16 a step whose gradients overflow is left out of everything, with a scaler that runs on processors."""

from dataclasses import replace

import pytest
import torch

from hf_ext.training import run as run_module
from hf_ext.training.optimizing import build_optimizer
from hf_ext.training.run import make_accelerator
from hf_ext.training.state import RunFolder

from .tiny import TinyConfig, TinyModel, TinyTask, evaluated, make_arguments, run


def make_scaling(arguments, folder):
    """An accelerator that scales losses as in fp16, which accelerate itself does on GPUs alone."""
    accelerator = make_accelerator(replace(arguments, mixed_precision="no"), folder)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    accelerator.native_amp = True
    accelerator.state._mixed_precision = "fp16"
    return accelerator


def test_a_skipped_step_moves_neither_schedule_nor_average(tmp_path, examples, monkeypatch):
    monkeypatch.setattr(run_module, "make_accelerator", make_scaling)
    changes = {"mixed_precision": "fp16", "gradient_accumulation_steps": 1, "logging_steps": 1, "save_steps": 1}
    arguments = make_arguments(tmp_path / "run", examples, max_steps=4, warmup_steps=4, save_total_limit=9, **changes)
    run(TinyTask(overflow_at=2), arguments)
    states = [tmp_path / "run" / "state" / f"step-{step}" for step in range(1, 5)]
    averages = [torch.load(state / "custom_checkpoint_2.pkl")["optimization_step"] for state in states]
    assert averages == [1, 2, 2, 3]
    rates = [row["learning_rate"] for row in RunFolder(tmp_path / "run").read_metrics()]
    assert rates[2] == rates[1] < rates[3]
    weights = [(state / "model.safetensors").read_bytes() for state in states]
    assert weights[1] != weights[0] and weights[3] != weights[2]


def test_the_kernel_that_hides_skipped_steps_is_not_taken(tmp_path, examples):
    model = TinyModel(TinyConfig())
    for precision, fused in (("fp16", False), ("no", True)):
        arguments = make_arguments(tmp_path / "run", examples, mixed_precision=precision)
        assert build_optimizer(TinyTask(), model, arguments).defaults["fused"] == fused
    arguments = make_arguments(tmp_path / "run", examples, mixed_precision="fp16", optim_args={"fused": True})
    with pytest.raises(ValueError):
        build_optimizer(TinyTask(), model, arguments)


def test_all_files_of_a_run_can_be_read_by_who_can_read_the_folder(tmp_path, examples):
    run(TinyTask(), make_arguments(tmp_path / "run", evaluated(examples), max_steps=2))
    wanted = (tmp_path / "run" / "metrics.jsonl").stat().st_mode
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and not path.name.startswith(".")]
    assert {path.name for path in files} >= {"model.safetensors", "optimizer.bin", "manifest.json"}
    assert [path for path in files if path.stat().st_mode != wanted] == []
