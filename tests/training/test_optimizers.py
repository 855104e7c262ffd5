"""Muon beside torch's, with AdamW for the rest, OneBit beside a plain reference: steps, states, a merge, refusals."""

import copy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_ext.emr.weights import task_checkpoint
from hf_ext.errors import UsageError
from hf_ext.merging import merge_checkpoints
from hf_ext.training.optimizers import MuonWithAdamW, OneBit, list_matrices, orthogonalize
from hf_ext.training.optimizing import build_optimizer, build_schedule
from tests.kit.refusals import refused

from .tiny import TinyConfig, TinyModel, TinyTask, make_arguments


class Blocks(torch.nn.Module):
    """Layers of all kinds: wide, tall, square, narrow, a kernel, one for each channel, tokens, and one not used."""

    def __init__(self, has_kernel: bool = True):
        super().__init__()
        self.enter = torch.nn.Linear(20, 20)
        shapes = [(20, 20), (20, 48), (48, 20), (20, 20)]
        self.layers = torch.nn.ModuleList(torch.nn.Linear(*shape) for shape in shapes)
        kernel = torch.nn.Conv2d(20, 20, 3, padding=1) if has_kernel else torch.nn.Identity()
        self.kernels = torch.nn.Sequential(kernel)
        self.narrow = torch.nn.Sequential(torch.nn.Linear(20, 2), torch.nn.Linear(2, 20))
        self.depthwise = torch.nn.Conv2d(20, 20, 5, padding=2, groups=20)
        self.tokens = torch.nn.Embedding(20, 20)
        self.idle = torch.nn.Sequential(torch.nn.Linear(20, 20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 20] → the same"""
        x = self.enter(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = self.depthwise(self.kernels(x[:, :, None, None]))[:, :, 0, 0]
        return self.narrow(x) @ self.tokens.weight


MATRICES = {"enter.weight", *(f"layers.{index}.weight" for index in range(4)), "kernels.0.weight", "idle.0.weight"}


def group(values: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups, as the tasks make them: of weights, which decay, and of biases, which do not."""
    weights = {"params": [value for value in values if value.ndim > 1], "weight_decay": 0.1, "betas": (0.9, 0.99)}
    return [weights, {"params": [value for value in values if value.ndim == 1], "weight_decay": 0.0}]


def make_optimizer(model: Blocks, **options: Any) -> MuonWithAdamW:
    groups = group([*model.parameters()])
    return MuonWithAdamW(groups, list_matrices(model), **{"lr": 0.01, "weight_decay": 0.0, **options})


def step(model: Blocks, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One step on random data."""
    data = torch.randn(8, 20, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    (model(data) - data.flip(1)).pow(2).mean().backward()
    optimizer.step()


def test_matrices_are_wide_weights_of_layers_that_mix_channels():
    model = Blocks()
    named = {id(value): name for name, value in model.named_parameters()}
    assert {named[id(value)] for value in list_matrices(model)} == MATRICES


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 16, 40), (1, 40, 16)])
def test_orthogonalize_moves_singular_values_alone(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    values = values / values.norm(dim=1, keepdim=True)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    wanted = left @ torch.diag_embed(values) @ right
    torch.testing.assert_close(orthogonalize(matrices), wanted, rtol=1e-9, atol=1e-9)
    # Batches and single precision change nothing but last bits; a matrix of zeros stays one.
    torch.testing.assert_close(orthogonalize(matrices.float()[:1]), wanted.float()[:1], rtol=1e-3, atol=1e-3)
    assert orthogonalize(torch.zeros(shape)).abs().max() == 0


def test_steps_equal_those_of_torch(monkeypatch):
    """Matrices as torch's Muon makes them; all other weights as AdamW makes them, bit for bit."""
    # torch's Muon computes in bf16.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    model = Blocks(has_kernel=False)
    twin = copy.deepcopy(model)
    optimizer = make_optimizer(model)
    matrices = {id(value) for value in list_matrices(twin)}
    muon = torch.optim.Muon(list_matrices(twin), lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    others = [value for value in twin.parameters() if id(value) not in matrices]
    adamw = torch.optim.AdamW(group(others), lr=0.01, foreach=True)
    data = torch.randn(8, 20, generator=torch.Generator().manual_seed(1))
    for part in (model, twin):
        (part(data) - data.flip(1)).pow(2).mean().backward()
    start = {name: value.clone() for name, value in twin.named_parameters()}
    for one in (optimizer, muon, adamw):
        one.step()
    for (name, value), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        if id(other) in matrices and other.grad is not None:
            moved = (other - start[name]).norm()
            assert moved > 0 and (value - other).norm() < 1e-3 * moved, name
        else:
            assert torch.equal(value, other), name
    assert torch.equal(model.idle[0].weight, start["idle.0.weight"])


def test_a_kernel_moves_as_the_matrix_of_its_rows():
    model = Blocks()
    kernel = model.kernels[0].weight
    optimizer = make_optimizer(model, momentum=0.0)
    before = kernel.detach().clone()
    step(model, optimizer, 0)
    assert kernel.grad is not None
    made = orthogonalize(kernel.grad.reshape(1, 20, 180)).reshape(kernel.shape)
    wanted = before * (1 - 0.01 * 0.1) - 0.01 * 0.2 * 180**0.5 * made
    torch.testing.assert_close(kernel.detach(), wanted, rtol=1e-5, atol=1e-6)


def test_a_state_goes_on_exactly(tmp_path):
    arguments = make_arguments(tmp_path, {}, learning_rate=0.01, max_steps=6, warmup_steps=2)

    def train(model: Blocks, seeds: range) -> None:
        """Steps of an optimizer and a schedule that are new but for the state, if these are no first steps."""
        optimizer = make_optimizer(model)
        parts = [optimizer, build_schedule(optimizer, arguments)]
        for part, state in zip(parts, torch.load(tmp_path / "state.pt") if seeds[0] else [], strict=False):
            part.load_state_dict(state)
        for seed in seeds:
            step(model, optimizer, seed)
            parts[1].step()
        torch.save([part.state_dict() for part in parts], tmp_path / "state.pt")

    whole = Blocks()
    pieces = copy.deepcopy(whole)
    train(whole, range(6))
    train(pieces, range(3))
    train(pieces, range(3, 6))
    for (name, value), other in zip(whole.named_parameters(), pieces.parameters(), strict=True):
        assert torch.equal(value, other), name


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


@pytest.mark.parametrize("given", [{}, {"betas": [0.5, 0.6]}, {"eps": 1e-3, "betas": [0.1, 0.2]}])
def test_arguments_of_the_optimizer_go_before_what_a_method_advises(tmp_path, given):
    arguments = make_arguments(tmp_path / "run", {}, optim_args=given)
    optimizer = build_optimizer(TinyTask(), TinyModel(TinyConfig()), arguments)
    betas = [tuple(group["betas"]) for group in optimizer.param_groups]
    assert betas == ([tuple(given["betas"])] * 2 if given else [(0.9, 0.999), (0.8, 0.9)])


# An optimizer, the width of a layer, and what it cannot do with that.
CANNOT = [
    ("Muon", 4, {}),
    *(("Muon", 16, {"optim_args": {"momentum": value}}) for value in (1.0, float("nan"))),
    *(("Muon", 16, {"optim_args": options}) for options in ({"ns_steps": 5}, {"matrices": []}, {"rms": 0.0})),
    *(("OneBit", 6, changes) for changes in ({"init_from": None}, {"ema_decay": 0.9})),
    *(("OneBit", 6, {"optim_args": options}) for options in ({"amsgrad": True}, {"betas": [1.0, 2]})),
]


@pytest.mark.parametrize(("optim", "width", "changes"), CANNOT)
def test_what_an_optimizer_cannot_train_is_refused(tmp_path, optim, width, changes):
    arguments = make_arguments(tmp_path, {}, **{"optim": optim, "init_from": "base", "ema_decay": 0.0, **changes})
    with refused(UsageError, "optim"):
        build_optimizer(TinyTask(), torch.nn.ModuleList([torch.nn.Linear(width, width)]), arguments)
