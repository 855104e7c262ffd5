"""OneBit trains signs and sizes of a difference: beside a plain reference, and through a merge."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_ext.emr.weights import task_checkpoint
from hf_ext.errors import UsageError
from hf_ext.merging import merge_checkpoints
from hf_ext.training.optimizers import OneBit
from hf_ext.training.optimizing import build_optimizer

from .tiny import TinyTask, make_arguments


def make_layers() -> torch.nn.ModuleList:
    """Two layers that are used, and one that is used at every second step."""
    torch.manual_seed(0)
    return torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3))


def backward(layers: torch.nn.ModuleList, step: int) -> None:
    data = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    hidden = torch.tanh(layers[1](layers[0](data)))
    (layers[2](hidden) if step % 2 else hidden).sub(data.flip(1)).square().mean().backward()


def test_steps_are_those_of_adamw_seen_through_signs():
    layers = make_layers()
    # of the reference: the network that computes, the weights that AdamW moves, and the first ones
    seen, moved, first = (copy.deepcopy(layers) for _ in range(3))
    options = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9)}
    optimizer = OneBit([{"params": [*layers.parameters()]}], **options)
    adamw = torch.optim.AdamW(moved.parameters(), foreach=True, **options)
    for step in range(7):
        for one in (layers, seen):
            one.zero_grad()
            backward(one, step)
        optimizer.step()
        for value, own in zip(seen.parameters(), moved.parameters(), strict=True):
            own.grad = value.grad
        adamw.step()
        for value, own, start in zip(seen.parameters(), moved.parameters(), first.parameters(), strict=True):
            if value.grad is not None:
                difference = own.detach() - start.detach()
                signs = torch.where(difference >= 0, 1.0, -1.0)
                value.data = start.detach() + difference.abs().mean() * signs
        for value, other in zip(layers.parameters(), seen.parameters(), strict=True):
            assert torch.equal(value, other)
    assert not torch.equal(layers[2].weight, first[2].weight)


def test_a_merge_by_onebit_keeps_the_fine_tune(tmp_path):
    layers = make_layers()
    base = {name: value.clone() for name, value in layers.state_dict().items()}
    optimizer = OneBit([{"params": [*layers.parameters()]}], lr=0.01)
    for step in range(9):
        optimizer.zero_grad()
        backward(layers, step)
        optimizer.step()
    tuned = {name: value.detach() for name, value in layers.state_dict().items()}
    for name, weights in {"base": base, "tuned": tuned}.items():
        (tmp_path / name).mkdir()
        save_file(weights, tmp_path / name / "model.safetensors")
    tasks = {"one": str(tmp_path / "tuned")}
    config = {"base": str(tmp_path / "base"), "tasks": tasks, "method": "onebit"}
    merged = merge_checkpoints(config, tmp_path / "merged", progress=False)
    with task_checkpoint(str(merged.path), "one") as folder:
        restored = load_file(f"{folder}/model.safetensors")
    for name, value in tuned.items():
        size = (value - base[name]).abs()
        assert size.min() > 0.99 * size.max() > 0
        torch.testing.assert_close(restored[name], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [{"init_from": None}, {"ema_decay": 0.9}, {"optim_args": {"amsgrad": True}}, {"optim_args": {"betas": [1.0, 2]}}],
)
def test_what_has_no_signs_is_refused(tmp_path, changes):
    arguments = make_arguments(tmp_path, {}, **{"optim": "OneBit", "init_from": "base", "ema_decay": 0.0, **changes})
    with pytest.raises(UsageError):
        build_optimizer(TinyTask(), make_layers(), arguments)
