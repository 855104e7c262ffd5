"""Key-semantic attention on a GPU: time and memory of every form against N and k, beside dense window attention.

    python examples/benchmarks/semanir_gpu.py --device cuda
    python examples/benchmarks/semanir_gpu.py              # a small run on the CPU, to check this file; writes nothing

One attention of the paper's S model (6 heads of 30 channels, bfloat16): `dense` is scaled_dot_product_attention with
the position bias of every pair and no dictionary; `sdpa` the same with the dictionary as a mask; `gather` copies the
chosen keys and values of each token, in torch; `flex_attention` and `triton` are the fused forms. Inference is forward
without gradients; a training step is forward and backward with gradients of queries, keys, values, temperature and
bias table. The forms take turns in one process; times are medians, memory is what a call allocates at its peak. The
dictionary is built once, outside; its own time has a column. `difference` is the largest from float32, forward.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from versions import installed_versions

from hf_ext.semanir.ops_semanir import (
    Dictionary,
    build_dictionary,
    key_semantic_attention,
    relative_offsets,
    unpack_keys,
)

HEADS, HEAD_DIM = 6, 30
FORMS = ("dense", "sdpa", "gather", "flex_attention", "triton")
# torch has no gradient of flex_attention on a CPU, and triton no kernels for it.
FORMS_CPU = ("dense", "sdpa", "gather")
Attention = Callable[..., torch.Tensor]


class Problem:
    """The arguments of one attention, and the indices of the chosen keys that `gather` needs."""

    def __init__(self, window: int, top_k: int, tokens: int, words: argparse.Namespace):
        generator = torch.Generator().manual_seed(0)
        dtype = getattr(torch, words.dtype)
        strip = torch.randn(1, window, tokens // window, HEADS * HEAD_DIM, generator=generator).to(words.device, dtype)
        self.build = lambda: build_dictionary(strip, window, False, top_k)
        self.dictionary = self.build()
        assert self.dictionary.bits is not None
        chosen = unpack_keys(self.dictionary.bits, window**2)
        self.indices = chosen.to(torch.uint8).topk(top_k).indices  # [W, N, k]
        drawn = torch.randn(tokens // window**2, window**2, 3, HEADS, HEAD_DIM, generator=generator)
        query, key, value = drawn.to(words.device, dtype).permute(2, 0, 3, 1, 4)
        table = torch.randn(HEADS, (2 * window - 1) ** 2, generator=generator).to(words.device)
        temperature = torch.full((HEADS,), 10.0, device=words.device)
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


def infer(form: str, problem: Problem) -> None:
    with torch.no_grad():
        attend(form, problem, problem.tensors)


def train(form: str, problem: Problem) -> None:
    leaves = [x.requires_grad_() for x in (y.detach() for y in problem.tensors)]
    out = attend(form, problem, leaves)
    torch.autograd.grad(out, leaves, torch.ones_like(out))


def seconds(call: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_bytes(call: Callable[[], Any], device: str) -> int | None:
    """Beyond what is allocated before; None where it is not counted."""
    if device != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def difference(form: str, problem: Problem) -> float:
    with torch.no_grad():
        exact = [x.float() for x in problem.tensors]
        expected = attend("sdpa" if form != "dense" else form, problem, exact)
        return (attend(form, problem, problem.tensors).float() - expected).abs().max().item()


def measure(problem: Problem, words: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Of each step and form: median seconds and peak bytes; None for a form that does not fit into memory."""
    forms = FORMS if words.device == "cuda" else FORMS_CPU
    result: dict[str, dict[str, Any]] = {"difference": {}, "inference": {}, "training": {}}
    for step, function in (("inference", infer), ("training", train)):
        calls = {form: lambda form=form, function=function: function(form, problem) for form in forms}
        for form in forms:
            try:
                # The first call compiles, and finds out whether the form fits.
                calls[form]()
                result[step][form] = {"bytes": peak_bytes(calls[form], words.device)}
                if step == "inference":
                    result["difference"][form] = difference(form, problem)
            except torch.OutOfMemoryError:
                del calls[form]
                result[step][form] = None
                torch.cuda.empty_cache()
        times = [{form: seconds(call, words.device) for form, call in calls.items()} for _ in range(words.rounds)]
        for form in calls:
            result[step][form]["seconds"] = statistics.median(one[form] for one in times)
    built = [seconds(problem.build, words.device) for _ in range(words.rounds)]
    result["dictionary"] = {"seconds": statistics.median(built)}
    return result


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = ["| N | k | step | " + " | ".join(FORMS) + " | dictionary |", "|---" * (len(FORMS) + 4) + "|"]
    for row in rows:
        for step in ("inference", "training"):
            cells = []
            for form in FORMS:
                found = row[step].get(form, "not run")
                if isinstance(found, dict):
                    size = "" if found["bytes"] is None else f", {found['bytes'] / 2**20:.0f} MiB"
                    cells.append(f"{1000 * found['seconds']:.2f} ms{size}")
                else:
                    cells.append(found or "out of memory")
            built = f"{1000 * row['dictionary']['seconds']:.2f} ms"
            lines.append(f"| {row['N']} | {row['k']} | {step} | " + " | ".join([*cells, built]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--windows", type=int, nargs="+", default=None)
    parser.add_argument("--tokens", type=int, default=None, help="of one call, a multiple of the largest N")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "semanir_gpu.json")
    words = parser.parse_args()
    on_gpu = words.device == "cuda"
    windows = words.windows or ([8, 16, 32] if on_gpu else [4, 8])
    tokens = words.tokens or (2**17 if on_gpu else 2**7)
    rows = []
    for window in windows:
        for part in (16, 8, 4, 2):
            problem = Problem(window, window**2 // part, tokens, words)
            rows.append({"N": window**2, "k": window**2 // part} | measure(problem, words))
    table = markdown(rows)
    print(table)
    for row in rows:
        print({"N": row["N"], "k": row["k"]} | {form: f"{value:.1e}" for form, value in row["difference"].items()})
    if not on_gpu:
        return
    content = {
        "rows": rows,
        "sizes": {"tokens": tokens, "heads": HEADS, "head_dim": HEAD_DIM, "dtype": words.dtype},
        "rounds": words.rounds,
        "device": torch.cuda.get_device_name(),
        "versions": installed_versions("torch", "triton"),
    }
    words.output.parent.mkdir(exist_ok=True)
    temporary = words.output.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    temporary.replace(words.output)
    words.output.with_suffix(".md").write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
