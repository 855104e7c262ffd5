"""The peers of MRConv: S4D against its definition, equal sizes, padding."""

import pytest
import torch
from torch import nn

from hf_ext.tasks.signals import AudioTask, PixelTask
from hf_ext.tasks.texts import ListOpsTask
from tests.kit.studies import EXAMPLES, module_loader

load = module_loader(EXAMPLES / "mrconv")
TASKS = {
    "pixels": (lambda: PixelTask(image_size=8), True),
    "tokens": (lambda: ListOpsTask(max_length=32), False),
    "audio": (lambda: AudioTask(sampling_rate=8000, max_length=64), True),
}


@pytest.fixture
def double():
    """Modules are made in fp64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def recur(kernel: nn.Module, which: int, inputs: torch.Tensor) -> torch.Tensor:
    """The state space step by step: x = exp(dt A) x + (exp(dt A) - 1) / A u, y = 2 Re(C x)."""
    poles = torch.complex(-kernel.log_decay.exp(), kernel.frequency)
    decay = torch.exp(poles * kernel.log_dt.exp()[:, None])
    state, outputs = torch.zeros(*inputs.shape[:2], poles.shape[-1], dtype=decay.dtype), []
    for value in inputs.unbind(-1):
        state = decay * state + (decay - 1) / poles * value[..., None]
        outputs.append(2 * (torch.view_as_complex(kernel.output[which]) * state).sum(-1).real)
    return torch.stack(outputs, -1)


@pytest.mark.parametrize("length", [1, 2, 37, 64, 300])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_s4d_is_its_recurrence(load, double, length, bidirectional):
    peers = load("peers")
    torch.manual_seed(0)
    block = peers.S4DBlock(peers.PeerConfig(hidden_size=3, state_size=8, bidirectional=bidirectional))
    inputs = torch.randn(2, 3, length, requires_grad=True)
    with torch.no_grad():
        # Values as training leaves them, not the first ones, where all channels have the same poles.
        for parameter in block.kernel.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    expected = recur(block.kernel, 0, inputs) + block.skip[:, None] * inputs
    if bidirectional:
        # The second kernel hears what comes after a position.
        ahead = recur(block.kernel, 1, inputs.flip(-1)).flip(-1)
        expected = expected + nn.functional.pad(ahead, (0, 1))[..., 1:]
    found = block.convolve(inputs)
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-10)
    weights = torch.randn_like(found)
    values = [inputs, *block.kernel.parameters()]
    for ours, slow in zip(
        torch.autograd.grad((found * weights).sum(), values),
        torch.autograd.grad((expected * weights).sum(), values),
        strict=True,
    ):
        torch.testing.assert_close(ours, slow, atol=1e-9, rtol=1e-8)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("peer", ["transformer", "s4d", "s4d both ways"])
def test_a_peer_learns_and_ignores_padding(load, name, peer):
    make, continuous = TASKS[name]
    task = make()
    load("peers").use_peer(task, peer.split()[0])
    model = task.build_model({"hidden_size": 24, "num_hidden_layers": 2, "bidirectional": "both" in peer}, None)
    torch.manual_seed(0)
    inputs = torch.randn(2, 20, 1) if continuous else torch.randint(3, 18, (2, 20))
    key = "input_values" if continuous else "input_ids"
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[1, 12:] = 0
    outputs = model.train()(**{key: inputs}, attention_mask=mask, labels=torch.tensor([1, 2]))
    outputs.loss.backward()
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    # One token of the vocabulary may be missing from the batch, but no tensor.
    assert not [name for name, value in trained if value.grad is None or not value.grad.any()]
    with torch.no_grad():
        padded = model.eval()(**{key: inputs}, attention_mask=mask).logits[1:]
        alone = model(**{key: inputs[1:, :12]}, attention_mask=mask[1:, :12]).logits
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-4)
    groups = task.parameter_groups(model, 0.1)
    assert sum(len(group["params"]) for group in groups) == len(trained)
