"""Tiny MRConv layers and models away from their initial values: `from tests.mrconv.mrconv_testing import ...`."""

import itertools
import subprocess
import sys
from pathlib import Path

import torch

from hf_ext.mrconv import MRConvConfig, MRConvForSequenceClassification, MRConvLayer
from hf_ext.mrconv.configuration_mrconv import KERNEL_TYPES
from tests.kit.models import ModelTesterMixin

# The shortest kernel does not divide the longest, and no length is a power of two.
SIZES = {"hidden_size": 4, "num_hidden_layers": 2, "kernel_size": 5, "max_position_embeddings": 37, "num_labels": 3}
TOKENS = {**SIZES, "vocab_size": 11}
EVERY_KERNEL = list(itertools.product(KERNEL_TYPES, (False, True)))


class MRConvTester(ModelTesterMixin):
    bfloat16_tolerance = 0.05
    fields: dict

    def make_config(self):
        return MRConvConfig(**self.fields)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 11, shape, generator=generator(seed))


def shake(module: torch.nn.Module) -> None:
    """Move parameters and statistics from their initial values, where a missing term would not be seen."""
    with torch.no_grad():
        for index, value in enumerate(itertools.chain(module.parameters(), module.buffers())):
            if value.is_floating_point():
                value += 0.3 * torch.rand(value.shape, generator=generator(index)).to(value.dtype)


def make_model(model_class=MRConvForSequenceClassification, **fields):
    torch.manual_seed(0)
    model = model_class(MRConvConfig(**(fields or TOKENS)))
    shake(model)
    return model.eval()


def make_layer(layer_index: int = 0, **fields) -> MRConvLayer:
    torch.manual_seed(0)
    layer = MRConvLayer(MRConvConfig(**{**SIZES, **fields}), layer_index)
    shake(layer)
    return layer.eval()


def make_signal(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=generator(), dtype=torch.float64).to(dtype)


# One of two processes. Arguments: its rank, and a folder with what is given and where to write.
_PROCESS = """
import sys, torch
import torch.distributed as distributed
import hf_ext.mrconv
rank, folder = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
given = torch.load(f"{folder}/given.pt")
model = getattr(hf_ext.mrconv, given["head"])(hf_ext.mrconv.MRConvConfig(**given["fields"])).double().train()
model.load_state_dict(given["state"])
inputs, weights = given["shares"][rank]
outputs = model(**inputs)[0]
(outputs * weights).sum().backward()
gradients = {name: value.grad for name, value in model.named_parameters()}
for gradient in gradients.values():
    distributed.all_reduce(gradient)
buffers = dict(model.named_buffers())
torch.save({"outputs": outputs.detach(), "gradients": gradients, "buffers": buffers}, f"{folder}/{rank}.pt")
distributed.destroy_process_group()
"""
Share = tuple[dict[str, torch.Tensor], torch.Tensor]


def assert_two_processes_are_one(
    folder: Path, model_class, fields: dict, shares: list[Share], whole: Share
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """
    Two processes with their shares of the inputs have the gradients and statistics of one that has them all. Returns
    the outputs of both, and of the one. A share is inputs, and weights of the outputs, whose weighted sum is the loss.
    """
    model = make_model(model_class, **fields).double().train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    given = {"head": model_class.__name__, "fields": fields, "state": state, "shares": shares}
    torch.save(given, folder / "given.pt")
    command = [sys.executable, "-c", _PROCESS]
    processes = [subprocess.Popen([*command, str(rank), str(folder)]) for rank in range(2)]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    outputs = model(**whole[0])[0]
    (outputs * whole[1]).sum().backward()
    results = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
    for result in results:
        for name, value in model.named_parameters():
            torch.testing.assert_close(result["gradients"][name], value.grad, atol=1e-10, rtol=1e-10, msg=name)
        for name, value in model.named_buffers():
            torch.testing.assert_close(result["buffers"][name], value, atol=1e-10, rtol=0, msg=name)
    return [result["outputs"] for result in results], outputs.detach()
