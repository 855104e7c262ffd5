"""One attention problem as the backends of SemanIR's attention get it, and its comparison with the reference."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from hf_ext.semanir import ops_semanir as ops
from tests.semanir import reference_ops as reference

HEADS, WINDOWS = 2, 2


class Case(NamedTuple):
    """Unit-length keys, queries of length 10, as views of one projection that are not contiguous."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    table: torch.Tensor
    dictionary: ops.Dictionary


def make_case(window: ops.Pair, largest: int, head_dim: int, top_k: int | None, dtype: torch.dtype) -> Case:
    generator = torch.Generator().manual_seed(0)
    tokens = window[0] * window[1]
    drawn = torch.randn(WINDOWS, tokens, 3, HEADS, head_dim, generator=generator)
    drawn[:, :, :2] /= drawn[:, :, :2].norm(dim=-1, keepdim=True)
    drawn[:, :, 0] *= 10
    query, key, value = drawn.to(dtype).permute(2, 0, 3, 1, 4)
    table = torch.randn(HEADS, (2 * largest - 1) ** 2, generator=generator)
    bits = None
    if top_k is not None:
        scores = torch.rand(WINDOWS, tokens, tokens, generator=generator)
        bits = ops.pack_keys(torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(top_k).indices, True))
    return Case(query, key, value, table, ops.Dictionary(window, (0, 0), largest, bits))


def assert_attention_agrees(
    backend: Callable[..., torch.Tensor], case: Case, tolerance: float, device: str = "cpu"
) -> None:
    """Output and the gradients of query, key, value and table, relative to the largest of each, with the reference."""
    given = [x.detach().to(device).requires_grad_() for x in case[:4]]
    exact = [x.detach().double().requires_grad_() for x in case[:4]]
    bits = case.dictionary.bits
    out = backend(*given, case.dictionary._replace(bits=None if bits is None else bits.to(device)))
    # The reference scales queries and keys itself: 10 is the length that they already have.
    temperature = torch.full((HEADS,), 10.0, dtype=torch.float64)
    expected = reference.key_semantic_attention(*exact[:3], temperature, exact[3], case.dictionary)
    assert out.dtype == case.value.dtype and out.shape == case.value.shape
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out.backward(direction.to(device, out.dtype))
    expected.backward(direction)
    # The reference is blind to the lengths, so its gradient has no part along a query or key; ours is cut to that.
    for index in (0, 1):
        along = exact[index].detach() / exact[index].detach().norm(dim=-1, keepdim=True)
        gradient = given[index].grad.cpu().double()
        given[index].grad = (gradient - (gradient * along).sum(-1, keepdim=True) * along).to(given[index])
    pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(given, exact, strict=True))]
    for found, wanted in pairs:
        allowed = tolerance * max(wanted.abs().max().item(), 1.0)
        torch.testing.assert_close(found.detach().cpu().double(), wanted.detach(), atol=allowed, rtol=0)
