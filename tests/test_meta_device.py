"""Every model class runs on the meta device with no default device: a tensor made on the CPU by mistake is an error.

The classes are those that `make gpu` compares (examples/benchmarks/gpu/correct.py).
"""

import pytest
import torch
from accelerate.utils import send_to_device
from transformers import PreTrainedModel

from hf_ext import mrconv, semanir
from tests.kit.gpu import load

correct = load("correct")


MASKED = [name for name, entry in correct.MODELS.items() if "attention_mask" in entry.inputs()]


@pytest.fixture(params=[False, True], ids=["evaluation", "training"])
def training(request: pytest.FixtureRequest) -> bool:
    return request.param


def run(name: str, training: bool, masks: bool) -> None:
    """Forward and backward of a class, all of it without values."""
    entry = correct.MODELS[name]
    inputs = {key: value for key, value in entry.arguments().items() if masks or not key.startswith("attention_mask")}
    model = entry.build().to("meta").train(training)
    output = model(**send_to_device(inputs, "meta"))
    correct.loss_of(output).backward()
    gradients = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    assert gradients and all(value.is_meta for value in gradients.values())


def test_every_class_is_here():
    known = {name.partition(",")[0] for name in correct.MODELS}
    for room in (semanir, mrconv):
        things = {name: getattr(room, name) for name in room.__all__}
        models = {name for name, it in things.items() if isinstance(it, type) and issubclass(it, PreTrainedModel)}
        assert {name for name in models if not name.endswith("PreTrainedModel")} <= known
    assert "DisentangledDiTTransformer2DModel" in known


@pytest.mark.parametrize("name", correct.MODELS)
def test_forward_and_backward(name: str, training: bool):
    run(name, training, masks=False)


@pytest.mark.parametrize("name", MASKED)
def test_with_masks(name: str, training: bool):
    """Nobody looks at the values of a mask: a GPU would have to be waited for."""
    run(name, training, masks=True)


def test_a_tensor_of_the_cpu_is_an_error():
    """What the others rely on."""
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.nn.Linear(2, 2, device="meta")(torch.rand(1, 2))
