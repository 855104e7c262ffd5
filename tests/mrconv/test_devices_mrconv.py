"""What MRConv asks of a GPU, found out without one: operations of a forward and backward pass, and FSDP."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from hf_ext.mrconv import MRConvConfig, MRConvForCausalLM, MRConvForSequenceClassification
from hf_ext.mrconv.modeling_layers_mrconv import MRConvBatchNorm
from hf_ext.mrconv.modeling_mrconv import require_all
from tests.kit.refusals import refused

SIZES = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "max_position_embeddings": 64, "kernel_size": 8}
# Which wait for the device: they give a number to Python, or their shape depends on values.
WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero"}
# Which CUDA refuses in deterministic mode; the list of `torch.use_deterministic_algorithms`, as far as it may concern.
NAMES = "cumsum cumsum_ put put_ histc bincount median kthvalue nll_loss2d_forward reflection_pad1d_backward"
REFUSED = {f"aten::{name}" for name in f"{NAMES} upsample_linear1d_backward _cummax_helper".split()}


class Operations(TorchDispatchMode):
    """Names of all operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.add(function._schema.name)
        # A CPU looks for the places of a mask inside of the operation.
        if function._schema.name == "aten::index" and any(
            i is not None and i.dtype == torch.bool for i in arguments[1]
        ):
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


@pytest.fixture
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "full"])
@pytest.mark.parametrize(
    ("head", "fields"),
    [
        (MRConvForSequenceClassification, {"bidirectional": True, "num_labels": 3}),
        (MRConvForSequenceClassification, {"prenorm": True, "kernel_type": "fourier_sparse", "num_labels": 3}),
        (MRConvForSequenceClassification, {"norm": "layer", "branch_norm": "kernel", "num_labels": 3}),
        (MRConvForCausalLM, {"bidirectional": False, "kernel_type": "dilated"}),
    ],
    ids=["bidirectional", "prenorm", "kernel norm", "causal"],
)
def test_no_step_waits_for_the_device_or_is_refused_in_deterministic_mode(
    head, fields, masked, training, deterministic
):
    names = operations_of_a_step(head(MRConvConfig(**SIZES, **fields)), masked, training)
    assert not names & WAITING
    assert not names & REFUSED


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
    rows, mean, var = hidden.detach()[valid].requires_grad_(), torch.zeros(5), torch.ones(5)
    mean, var = mean.double(), var.double()
    wanted = F.batch_norm(rows, mean, var, norm.weight, norm.bias, True, 0.1, 1e-5)
    wanted_gradient = torch.autograd.grad((wanted * cotangent).sum(), rows)[0]
    compare = {"atol": 1e-12, "rtol": 0}
    torch.testing.assert_close(found, wanted, **compare)
    torch.testing.assert_close(gradient[valid], wanted_gradient, **compare)
    torch.testing.assert_close((norm.running_mean, norm.running_var), (mean, var), **compare)
    evaluated = F.batch_norm(rows, mean, var, norm.weight, norm.bias, False, 0.1, 1e-5)
    torch.testing.assert_close(norm.eval()(hidden)[valid], evaluated, **compare)


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
    for block in sharded.model.layers:
        fully_shard(block, mesh=one_process)
    fully_shard(sharded, mesh=one_process)
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
