"""MRConv in the tools around it: torch.export, ONNX, torch.compile, offloading, FSDP; and what it asks of a GPU."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.export import Dim
from torch.utils._python_dispatch import TorchDispatchMode

from hf_ext.mrconv import MRConvConfig, MRConvForCausalLM, MRConvForSequenceClassification
from hf_ext.mrconv.modeling_layers_mrconv import MRConvBatchNorm
from hf_ext.mrconv.modeling_mrconv import require_all
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


SIZES = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "max_position_embeddings": 64, "kernel_size": 8}
# Which wait for the device: they give a number to Python, or their shape depends on values.
WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero"}
# Which CUDA refuses in deterministic mode; the list of `torch.use_deterministic_algorithms`, as far as it may concern.
NAMES = "cumsum cumsum_ put put_ histc bincount median kthvalue nll_loss2d_forward reflection_pad1d_backward"
REFUSED = {f"aten::{name}" for name in f"{NAMES} upsample_linear1d_backward _cummax_helper".split()}


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.add(function._schema.name)
        # A CPU looks for the places of a mask inside of the operation.
        indices = arguments[1] if function._schema.name == "aten::index" else []
        if any(index is not None and index.dtype == torch.bool for index in indices):
            self.names.add("aten::nonzero")
        return function(*arguments, **(options or {}))


def operations_of_a_step(model, masked: bool, training: bool) -> set[str]:
    """On the `meta` device, where nothing has a value; so that asking for one is an error, too."""
    model = model.to("meta").train(training)
    ids = torch.zeros(3, 40, dtype=torch.long, device="meta")
    mask = torch.ones_like(ids) if masked else None
    causal = isinstance(model, MRConvForCausalLM)
    with Operations() as seen, torch.set_grad_enabled(training):
        output = model(input_ids=ids, attention_mask=mask, labels=ids if causal else ids[:, 0])
        assert output.loss.is_meta
        if training:
            output.loss.backward()
            assert all(value.grad is not None for value in model.parameters())
    assert "aten::_fft_r2c" in seen.names
    return seen.names


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "full"])
@pytest.mark.parametrize(
    ("head", "fields"),
    [
        (MRConvForSequenceClassification, {"bidirectional": True}),
        (MRConvForSequenceClassification, {"prenorm": True, "kernel_type": "fourier_sparse"}),
        (MRConvForSequenceClassification, {"norm": "layer", "branch_norm": "kernel"}),
        (MRConvForCausalLM, {"bidirectional": False, "kernel_type": "dilated"}),
    ],
    ids=["bidirectional", "prenorm", "kernel norm", "causal"],
)
@pytest.mark.usefixtures("deterministic")
def test_no_step_waits_for_the_device_or_is_refused_in_deterministic_mode(head, fields, masked, training):
    names = operations_of_a_step(head(MRConvConfig(**SIZES, num_labels=3, **fields)), masked, training)
    assert not names & (WAITING | REFUSED)


def test_a_gpu_checks_masks_by_itself():
    """The host does not wait for the answer; `torch._assert_async` of a CPU answers at once."""

    def on_gpu(*values: bool) -> SimpleNamespace:
        return SimpleNamespace(is_cuda=True, all=lambda: torch.tensor(values).all())

    require_all(on_gpu(True, True), "holes")
    with refused(RuntimeError, "holes"):
        require_all(on_gpu(True, False), "holes")
    with refused(ValueError, "holes"):
        require_all(torch.tensor([True, False]), "holes")


@pytest.mark.parametrize("padding", [0.0, 1e6, None])
def test_masked_norm_is_the_norm_of_the_valid_rows(padding):
    """What stands at padding reaches neither statistics nor gradients; without a mask the norm is BatchNorm1d."""
    norm = MRConvBatchNorm(5, 1e-5, False).double()
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 11, 5, generator=generator, dtype=torch.float64) + 3
    valid = torch.arange(11) < torch.tensor([11, 4, 0] if padding is not None else [11, 11, 11])[:, None]
    hidden = torch.where(valid[..., None], hidden, padding or 0.0).requires_grad_()
    cotangent = torch.randn(int(valid.sum()), 5, generator=generator, dtype=torch.float64)
    found = norm(hidden, None if padding is None else valid)[valid]
    gradient = torch.autograd.grad((found * cotangent).sum(), hidden)[0]
    rows = hidden.detach()[valid].requires_grad_()
    mean, var = torch.zeros(5).double(), torch.ones(5).double()
    wanted = F.batch_norm(rows, mean, var, norm.weight, norm.bias, True, 0.1, 1e-5)
    wanted_gradient = torch.autograd.grad((wanted * cotangent).sum(), rows)[0]
    evaluated = F.batch_norm(rows, mean, var, norm.weight, norm.bias, False, 0.1, 1e-5)
    results = found, gradient[valid], norm.running_mean, norm.running_var, norm.eval()(hidden)[valid]
    torch.testing.assert_close(results, (wanted, wanted_gradient, mean, var, evaluated), atol=1e-12, rtol=0)


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("branch_norm", ["batch", "kernel"])
def test_sharded_model_trains_merges_and_is_saved_as_the_plain_one(branch_norm, one_process):
    torch.manual_seed(0)
    fields = {**SIZES, "num_labels": 3, "branch_norm": branch_norm, "bidirectional": True}
    plain = MRConvForSequenceClassification(MRConvConfig(**fields))
    sharded = copy.deepcopy(plain)
    for part in (*sharded.model.layers, sharded):
        fully_shard(part, mesh=one_process)
    ids, mask = torch.randint(0, 20, (2, 64)), torch.ones(2, 64, dtype=torch.long)
    mask[1, 40:] = 0
    for model in (plain, sharded):
        model.train()
        model(input_ids=ids, attention_mask=mask, labels=torch.tensor([0, 1])).loss.backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        model.eval()
    compare = {"atol": 1e-6, "rtol": 0}
    for mine, its in zip(sharded.convolutions(), plain.convolutions(), strict=True):
        assert hasattr(mine.alpha, "full_tensor")
        torch.testing.assert_close(mine.branch_kernels(), its.branch_kernels(), **compare)
        torch.testing.assert_close(mine.merged(), its.merged(), **compare)
        # What was whole for a while is a part again.
        assert hasattr(mine.alpha, "full_tensor")
    with torch.no_grad():
        expected = plain(input_ids=ids, attention_mask=mask).logits
        sharded.reparameterize()
        for _ in range(2):
            torch.testing.assert_close(sharded(input_ids=ids, attention_mask=mask).logits, expected, **compare)
    assert set(sharded.state_dict()) == set(plain.reparameterize().state_dict())
