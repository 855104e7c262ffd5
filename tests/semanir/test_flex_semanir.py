"""Attention through torch's flex_attention: its plain and its fused form on a CPU, gradients of the changed scores."""

import pytest
import torch

from hf_ext.errors import UsageError
from hf_ext.fast import semanir_flex as kernels
from tests.kit.refusals import refused
from tests.semanir.attention_testing import Case, assert_attention_agrees, make_case


def plain_form(query, key, value, table, dictionary):
    """The result of flex_attention, from the same function of scores: torch has no gradient of it on a CPU."""
    change = kernels.score_change(table, dictionary)
    for dimensions in ((0, None, None, None, 0), (0, None, None, 0, None), (0, None, 0, None, None)):
        change = torch.vmap(change, in_dims=dimensions)
    change = torch.vmap(change, in_dims=(0, 0, None, None, None))
    windows, heads, tokens = query.shape[:3]
    logits = change(query @ key.mT, *(torch.arange(count) for count in (windows, heads, tokens, tokens)))
    return logits.softmax(-1) @ value


def without_gradient(case: Case) -> torch.Tensor:
    with torch.no_grad():
        return plain_form(*(x.double() for x in case[:4]), case.dictionary)


@pytest.mark.parametrize("top_k", [1, 5, None])
def test_changed_scores_have_the_values_and_gradients_of_the_reference(top_k):
    case = make_case((3, 5), 5, 7, top_k, torch.float64)
    assert_attention_agrees(plain_form, case, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plain_form_equals_the_reference(dtype):
    for window, largest, top_k in (((3, 5), 5, 4), ((2, 2), 4, None)):
        case = make_case(window, largest, 5, top_k, dtype)
        found = kernels.flex_attention_(*case)
        tolerance = 1e-5 if dtype is torch.float32 else 4e-2
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), without_gradient(case), atol=tolerance, rtol=0)


# torch's own compiler uses what torch deprecates.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.slow
def test_fused_form_equals_the_reference():
    """The CPU's counterpart of the kernel for GPUs. Once: torch makes faulty C++ when a second case follows."""
    case = make_case((8, 8), 8, 16, 9, torch.float32)
    with torch.no_grad():
        found = kernels.compile_attention()(*case[:3], kernels.score_change(case.table, case.dictionary), scale=1.0)
    torch.testing.assert_close(found.double(), without_gradient(case), atol=1e-5, rtol=0)


def test_what_torch_does_not_do_is_refused():
    case = make_case((2, 3), 3, 4, 2, torch.float32)
    with refused(UsageError, "CPU"):
        kernels.flex_attention_(*case._replace(table=case.table.requires_grad_()))


# Warnings of torch 2.11 of its own doing while it compiles: `.grad` of inner tensors, `torch.jit.script_method`.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_device_equals_the_reference(dtype):
    for window, head_dim, top_k in (((16, 16), 30, 64), ((8, 8), 5, None), ((8, 9), 64, 9)):
        case = make_case(window, 16, head_dim, top_k, dtype)
        assert_attention_agrees(kernels.flex_attention_, case, 1e-4 if dtype is torch.float32 else 4e-2, "cuda")
