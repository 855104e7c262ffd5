"""Key-semantic attention of SemanIR on a device: time and memory of every form against windows and k.

One attention of the paper's S model (6 heads of 30 channels): `dense` is scaled_dot_product_attention with the
position bias of every pair and no dictionary; `sdpa` and `eager` have the dictionary as a mask; `gather` copies the
chosen keys and values of each token, in torch; `triton` is the fused form. Inference is forward without gradients; a
training step is forward and backward with gradients of queries, keys, values, temperature and bias table. The
dictionary is built once, outside; its own time has a row. `difference` is the largest from float32.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from parts import Case, Values, in_turns, read_words, run_part

from hf_ext.semanir.ops_semanir import (
    Dictionary,
    build_dictionary,
    key_semantic_attention,
    relative_offsets,
    unpack_keys,
)

HEADS, HEAD_DIM = 6, 30
FORMS = ("dense", "sdpa", "triton", "eager", "gather")
KEYS = {8: (16, 64), 16: (64, 128, 256), 32: (64, 256, 512, 1024)}


class Problem:
    """The arguments of one attention, and the indices of the chosen keys that `gather` needs."""

    def __init__(self, window: int, top_k: int, tokens: int, dtype: str, device: str):
        generator, kind = torch.Generator().manual_seed(0), getattr(torch, dtype)
        strip = torch.randn(1, window, tokens // window, HEADS * HEAD_DIM, generator=generator).to(device, kind)
        self.build = lambda: build_dictionary(strip, window, False, top_k)
        self.dictionary = self.build()
        if self.dictionary.bits is None:
            self.indices = torch.arange(window**2, device=device).expand(tokens // window**2, window**2, -1)
        else:
            chosen = unpack_keys(self.dictionary.bits, window**2)
            self.indices = chosen.to(torch.uint8).topk(top_k).indices  # [W, N, k]
        drawn = torch.randn(tokens // window**2, window**2, 3, HEADS, HEAD_DIM, generator=generator)
        query, key, value = drawn.to(device, kind).permute(2, 0, 3, 1, 4)
        table = torch.randn(HEADS, (2 * window - 1) ** 2, generator=generator).to(device)
        temperature = torch.full((HEADS,), 10.0, device=device)
        self.tensors = [x.detach() for x in (query, key, value, temperature, table)]


def gather(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    temperature: torch.Tensor,
    table: torch.Tensor,
    dictionary: Dictionary,
    indices: torch.Tensor,
) -> torch.Tensor:
    windows, tokens, top_k = indices.shape
    places = indices[:, None].expand(-1, HEADS, -1, -1)  # [W, heads, N, k]
    flat = places.flatten(2)[..., None].expand(-1, -1, -1, HEAD_DIM)
    query = F.normalize(query, dim=-1) * temperature[:, None, None].to(query.dtype)
    keys, values = (
        x.gather(2, flat).unflatten(2, (tokens, top_k)) for x in (F.normalize(key, dim=-1), value)
    )  # [W, heads, N, k, head_dim]
    offsets = relative_offsets(dictionary.window, dictionary.window_size, query.device).expand(windows, -1, -1)
    bias = table[:, offsets.gather(2, indices)].transpose(0, 1)  # [W, heads, N, k]
    logits = torch.einsum("whnd,whnkd->whnk", query, keys).float() + bias
    return torch.einsum("whnk,whnkd->whnd", logits.softmax(-1).to(values.dtype), values)


def attend(form: str, problem: Problem, tensors: list[torch.Tensor]) -> torch.Tensor:
    dictionary = problem.dictionary
    if form == "gather":
        return gather(*tensors, dictionary, problem.indices)
    if form == "dense":
        return key_semantic_attention(*tensors, dictionary._replace(bits=None), "sdpa")
    return key_semantic_attention(*tensors, dictionary, form)


def train(form: str, problem: Problem) -> None:
    leaves = [x.requires_grad_() for x in (y.detach() for y in problem.tensors)]
    out = attend(form, problem, leaves)
    torch.autograd.grad(out, leaves, torch.ones_like(out))


@torch.no_grad()
def difference(form: str, problem: Problem) -> float:
    exact = [x.float() for x in problem.tensors]
    expected = attend("sdpa" if form != "dense" else form, problem, exact)
    return (attend(form, problem, problem.tensors).float() - expected).abs().max().item()


def attention(form: str, window: int, top_k: int, dtype: str, words: Any) -> dict[str, Values]:
    """A form alone, so that one that fails takes no other with it."""
    tokens = 2 * window**2 if words.tiny else 2**17
    problem = Problem(window, top_k, tokens, dtype, words.device)
    facts = {"dtype": dtype, "sizes": {"tokens": tokens, "heads": HEADS, "head_dim": HEAD_DIM}}
    inference = torch.no_grad()(partial(attend, form, problem, problem.tensors))
    calls = {"inference": inference, "training": partial(train, form, problem)}
    rows = in_turns(calls, words, **facts)
    if "out_of_memory" not in rows["inference"]:
        rows["inference"]["difference"] = difference(form, problem)
    return rows


def dictionary(window: int, top_k: int, words: Any) -> dict[str, Values]:
    tokens = 2 * window**2 if words.tiny else 2**17
    problem = Problem(window, top_k, tokens, "bfloat16", words.device)
    return in_turns({"": problem.build}, words, dtype="bfloat16", sizes={"tokens": tokens})


def make_cases(words: Any) -> dict[str, Case]:
    # Triton has no kernels for a CPU.
    forms = [form for form in FORMS if form != "triton" or words.device == "cuda"]
    cases: dict[str, Case] = {}
    for window in (8,) if words.tiny else KEYS:
        for top_k in KEYS[window]:
            for form in forms:
                name = f"window {window}, k {top_k}, {form}"
                cases[name] = partial(attention, form, window, top_k, "bfloat16", words)
            cases[f"window {window}, k {top_k}, dictionary"] = partial(dictionary, window, top_k, words)
    return cases


if __name__ == "__main__":
    given_words = read_words()
    run_part(given_words, make_cases(given_words))
