"""MRConv in the tools around it: torch.export, ONNX, torch.compile, peft, accelerate, Trainer, remote code."""

import copy

import numpy as np
import pytest
import torch
from torch.export import Dim

from tests.kit.models import assert_same_answers, assert_same_weights
from tests.kit.refusals import refused
from tests.mrconv import mrconv_testing


def make_tokens(batch: int = 2, length: int = 24, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tokens padded at the left of the first sample, at the right of the second."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, : length // 3] = 0
    mask[1, length - length // 4 :] = 0
    return {"input_ids": mrconv_testing.make_tokens(batch, length, seed=seed), "attention_mask": mask}


def make_images(batch: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    return {"pixel_values": mrconv_testing.make_images(batch, 3, 16, 16, seed=seed)}


CASES = {"tokens": (mrconv_testing.make_model, make_tokens), "images": (mrconv_testing.make_image_model, make_images)}


def make(case: str, merged: bool):
    """The model, and what makes its inputs."""
    make_model, make_inputs = CASES[case]
    return make_model().reparameterize() if merged else make_model(), make_inputs


@torch.no_grad()
def logits(model, inputs) -> torch.Tensor:
    return model(**inputs).logits


def dynamic_shapes(inputs, length) -> dict:
    """A dynamic batch and, where `length` says so, a dynamic length."""
    return {name: {0: Dim.DYNAMIC} | ({1: length} if value.ndim == 2 else {}) for name, value in inputs.items()}


@torch.no_grad()
def export(model, inputs, length) -> torch.nn.Module:
    return torch.export.export(model, (), inputs, dynamic_shapes=dynamic_shapes(inputs, length)).module()


def test_direct_convolutions_are_those_by_fft_and_export_with_any_length():
    model = mrconv_testing.make_model(**mrconv_testing.TOKENS, bidirectional=True).reparameterize()
    inputs = [make_tokens(), make_tokens(3, 11, seed=1), make_tokens(2, 5, seed=2)]
    expected = [logits(model, batch) for batch in inputs]
    with refused(ValueError, "reparameterize()"):
        mrconv_testing.make_model().use_direct_convolution()
    model.use_direct_convolution()
    exported = export(model, make_tokens(), Dim.DYNAMIC)
    for batch, wanted in zip(inputs, expected, strict=True):
        torch.testing.assert_close(logits(model, batch), wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits(exported, batch), wanted, atol=1e-5, rtol=1e-5)
    assert_same_answers(logits(model.use_direct_convolution(False), inputs[0]), expected[0])


SLOW = [pytest.param(*row, marks=pytest.mark.slow) for row in (("tokens", True), ("images", False))]


@pytest.mark.parametrize(("case", "merged"), [("tokens", False), ("images", True), *SLOW])
def test_convolutions_by_fft_export_at_one_size(case, merged):
    model, make_inputs = make(case, merged)
    exported = export(model, make_inputs(), Dim.STATIC)
    inputs = make_inputs(3, seed=1)
    torch.testing.assert_close(logits(exported, inputs), logits(model, inputs), atol=1e-6, rtol=1e-6)


# Case, whether convolutions are direct, and whether the length may change.
ONNX = [("tokens", True, True), *((case, direct, False) for case in CASES for direct in (True, False))]


# What torch's exporter itself is warned of.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore::DeprecationWarning:onnxscript")
@pytest.mark.slow
@pytest.mark.parametrize(("case", "direct", "any_length"), ONNX)
def test_onnx_gives_the_same_numbers(case, direct, any_length, tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    model, make_inputs = make(case, True)
    inputs = make_inputs()
    others = [inputs, make_inputs(3, seed=1), *([make_tokens(2, 5, seed=2)] if any_length else [])]
    expected = [logits(model, batch).numpy() for batch in others]
    model.use_direct_convolution(direct)
    shapes = dynamic_shapes(inputs, Dim.DYNAMIC if any_length else Dim.STATIC)
    path = tmp_path / "model.onnx"
    with torch.no_grad():
        torch.onnx.export(model, (), path, kwargs=inputs, dynamic_shapes=shapes, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [item.name for item in session.get_inputs()] == list(inputs)
    for batch, wanted in zip(others, expected, strict=True):
        output = session.run(None, {name: value.numpy() for name, value in batch.items()})[0]
        np.testing.assert_allclose(output, wanted, atol=1e-5, rtol=1e-5)


def train_step(model, inputs) -> list[torch.Tensor]:
    """Loss, gradients and running statistics after one step."""
    loss = model(**inputs, labels=torch.arange(2)).loss
    loss.backward()
    return [loss, *(parameter.grad for parameter in model.parameters()), *model.buffers()]


# What torch's compiler itself is warned of in inductor, which leaves FFTs as they are.
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    "ignore:Torchinductor does not support code generation for complex operators:UserWarning",
)
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("case", CASES)
def test_compiled_by_every_backend(backend, case):
    torch._dynamo.reset()
    model, make_inputs = make(case, False)
    other = copy.deepcopy(model.train())
    results = train_step(torch.compile(other, backend=backend, fullgraph=True), make_inputs())
    torch.testing.assert_close(results, train_step(model, make_inputs()), atol=1e-5, rtol=1e-4)
    model.eval().reparameterize()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(logits(compiled, make_inputs()), logits(model, make_inputs()), atol=1e-5, rtol=1e-5)


PARTS = {
    "tokens": ["model.embedding", "model.layers.0", "model.layers.1", "model.final_norm", "classifier"],
    "images": ["model.patches", "model.patch_norm", "model.stages.0", "model.stages.1", "model.norm", "classifier"],
}


@pytest.mark.parametrize(("case", "merged"), [("tokens", False), ("images", True)])
def test_layers_may_lie_on_disk(case, merged, tmp_path):
    model, make_inputs = make(case, merged)
    inputs = make_inputs()
    model.save_pretrained(tmp_path / "model")
    devices = {part: "disk" if part.endswith(".1") else "cpu" for part in PARTS[case]}
    load = type(model).from_pretrained
    offloaded = load(tmp_path / "model", device_map=devices, offload_folder=tmp_path / "offload")
    assert {parameter.device.type for parameter in offloaded.parameters()} == {"cpu", "meta"}
    # Twice: what the first call loads, and keeps, is gone from memory in between.
    for _ in range(2):
        assert_same_answers(logits(offloaded, inputs), logits(model, inputs))
    automatic = load(tmp_path / "model", device_map="auto")
    assert_same_weights(automatic, model)
    assert_same_answers(logits(automatic, inputs), logits(model, inputs))
