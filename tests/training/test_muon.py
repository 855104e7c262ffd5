"""Muon trains matrices and kernels, AdamW the rest; each beside a plain reference, and through states of it."""

import copy
from typing import Any

import pytest
import torch

from hf_ext.errors import UsageError
from hf_ext.training.optimizers import MuonWithAdamW, list_matrices, orthogonalize
from hf_ext.training.optimizing import build_optimizer, build_schedule

from .tiny import TinyTask, make_arguments


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


@pytest.mark.parametrize(
    ("width", "options"),
    [(4, {}), *((16, {"momentum": value}) for value in (1.0, float("nan"))), (16, {"ns_steps": 5}),
     (16, {"matrices": []}), (16, {"rms": 0.0})],
)  # fmt: skip
def test_what_muon_cannot_train_is_refused(tmp_path, width, options):
    arguments = make_arguments(tmp_path, {}, optim="Muon", optim_args=options)
    model = torch.nn.ModuleList([torch.nn.Linear(width, width)])
    with pytest.raises(UsageError):
        build_optimizer(TinyTask(), model, arguments)
