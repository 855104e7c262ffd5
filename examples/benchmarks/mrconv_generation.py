"""What a token costs at a long context: MRConv streaming, MRConv recomputing, Mamba 2, and attention with its cache.

    OMP_NUM_THREADS=1 python examples/benchmarks/mrconv_generation.py

Four language models of equal size (parameters within 10 %) and equal depth, in one process. A token is one forward
pass and the choice of the most probable next token, called directly: `generate` adds the same overhead to all.

- MRConv streaming: kernels as long as the context. The prompt fills them, then as many tokens again are generated, so
  that everything that comes once in a context has its share; mrconv_latency.py says how long the worst token takes.
- MRConv recomputing: the same merged model, one forward pass over the context for each token.
- Mamba 2 of transformers: its path without kernels of mamba-ssm. The state does not grow: a short prompt serves.
- Attention: Llama of transformers with SDPA and `DynamicCache`, whose keys and values are random numbers, as only
  their number matters here.

The processor's time is the steadier one on a busy machine; on one thread and an idle machine both are the same.
"""

import argparse
import json
import math
import os
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM
from versions import installed_versions

from hf_ext.mrconv import MRConvConfig, MRConvForCausalLM
from hf_ext.mrconv.streaming_mrconv import MRConvCache

VOCABULARY, LAYERS, WIDTH = 256, 6, 256


def make_mrconv(length: int) -> MRConvForCausalLM:
    config = MRConvConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, max_position_embeddings=length
    )
    return MRConvForCausalLM(config)


def make_mamba2() -> Mamba2ForCausalLM:
    config = Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=172,
        num_hidden_layers=LAYERS,
        num_heads=8,
        head_dim=43,
        state_size=28,
        n_groups=1,
        tie_word_embeddings=True,
    )
    return Mamba2ForCausalLM(config)


def make_attention(length: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=144,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=252,
        max_position_embeddings=2 * length,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def size(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def timed(work: Callable[[], Any], device: torch.device) -> tuple[Any, dict[str, float]]:
    """Result, and wall and processor seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    wall, processor = time.perf_counter(), time.process_time()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return result, {"seconds": time.perf_counter() - wall, "processor_seconds": time.process_time() - processor}


def generate(step: Callable[[torch.Tensor], torch.Tensor], tokens: int, device: torch.device) -> dict[str, float]:
    """Mean seconds of a token, greedily chosen from the logits that `step` returns."""

    def run() -> None:
        token = torch.ones(1, 1, dtype=torch.long, device=device)
        for _ in range(tokens):
            token = step(token)[:, -1].argmax(-1, keepdim=True)

    _, seconds = timed(run, device)
    return {"tokens": tokens, **{name: value / tokens for name, value in seconds.items()}}


def stream_mrconv(model: MRConvForCausalLM, prompt: torch.Tensor, warm_up: int) -> dict[str, Any]:
    device, length = prompt.device, prompt.shape[1]
    cache = MRConvCache(model.config)
    _, seconds = timed(lambda: model(prompt, cache=cache, logits_to_keep=1), device)
    # The first prompt prepared the kernels.
    warm = MRConvCache(model.config)
    model(prompt[:, : min(length, 2 * warm_up)], cache=warm)
    generate(lambda token: model(token, cache=warm).logits, warm_up, device)
    tokens = generate(lambda token: model(token, cache=cache).logits, length, device)
    return {"prompt": seconds, "token": tokens}


def recompute_mrconv(model: MRConvForCausalLM, prompt: torch.Tensor, passes: int) -> dict[str, Any]:
    device = prompt.device
    model(prompt, logits_to_keep=1)
    return {"token": generate(lambda token: model(prompt, logits_to_keep=1).logits, passes, device)}


def step_mamba2(model: Mamba2ForCausalLM, device: torch.device, tokens: int) -> dict[str, Any]:
    cache = model(torch.ones(1, 64, dtype=torch.long, device=device), use_cache=True).cache_params

    def step(token: torch.Tensor) -> torch.Tensor:
        return model(token, cache_params=cache, use_cache=True).logits

    generate(step, 8, device)
    return {"token": generate(step, tokens, device)}


def step_attention(model: LlamaForCausalLM, device: torch.device, length: int, tokens: int) -> dict[str, Any]:
    config = model.config
    cache = DynamicCache(config=config)
    shape = (1, config.num_key_value_heads, length, config.hidden_size // config.num_attention_heads)
    for layer in range(LAYERS):
        cache.update(torch.randn(shape, device=device), torch.randn(shape, device=device), layer)

    def step(token: torch.Tensor) -> torch.Tensor:
        return model(token, past_key_values=cache).logits

    generate(step, 4, device)
    numbers = 2 * LAYERS * length * config.hidden_size
    return {"token": generate(step, tokens, device), "state_numbers": numbers}


@torch.inference_mode()
def measure(contexts: list[int], device: torch.device, tokens: int, passes: int) -> tuple[list[dict[str, Any]], dict]:
    rows, sizes = [], {}
    with warnings.catch_warnings():
        # Mamba 2 says once that its kernels are not installed.
        warnings.simplefilter("ignore")
        mamba2 = make_mamba2().to(device).eval()
    sizes["Mamba 2"] = size(mamba2)
    for length in tqdm(contexts, "contexts"):
        torch.manual_seed(0)
        prompt = torch.randint(VOCABULARY, (1, length), device=device)
        mrconv = make_mrconv(length).eval()
        attention = make_attention(length).to(device).eval()
        sizes |= {f"MRConv, {length}": size(mrconv), "attention": size(attention)}
        mrconv = mrconv.reparameterize().to(device)
        row: dict[str, Any] = {
            "context": length,
            "mrconv_streaming": stream_mrconv(mrconv, prompt, 128),
            "mrconv_recomputing": recompute_mrconv(mrconv, prompt, passes),
            "mamba2": step_mamba2(mamba2, device, tokens),
            "attention": step_attention(attention, device, length, tokens),
        }
        streaming, recomputing = (row[name]["token"] for name in ("mrconv_streaming", "mrconv_recomputing"))
        row["times_cheaper_than_recomputing"] = recomputing["processor_seconds"] / streaming["processor_seconds"]
        row["times_cheaper_than_recomputing_wall"] = recomputing["seconds"] / streaming["seconds"]
        rows.append(row)
    return rows, sizes


def growth(rows: list[dict[str, Any]], method: str) -> float:
    """Exponent p of the least-squares fit of cost = c log2(L)^p to the processor time of a token."""
    x = [math.log(math.log2(row["context"])) for row in rows]
    y = [math.log(row[method]["token"]["processor_seconds"]) for row in rows]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


METHODS = {
    "mrconv_streaming": "MRConv, streaming",
    "mrconv_recomputing": "MRConv, recomputing",
    "mamba2": "Mamba 2",
    "attention": "attention (SDPA)",
}


def table(rows: list[dict[str, Any]], name: str = "processor_seconds") -> str:
    """Markdown: milliseconds of a token, and tokens a second."""
    contexts = [row["context"] for row in rows]
    lines = ["| ms per token (tokens/s) | " + " | ".join(f"{length:,}" for length in contexts) + " |"]
    lines.append("|---" * (len(contexts) + 1) + "|")
    for method, label in METHODS.items():
        costs = [row[method]["token"][name] for row in rows]
        lines.append(f"| {label} | " + " | ".join(f"{1000 * cost:.2f} ({1 / cost:.0f})" for cost in costs) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--tokens", type=int, default=128, help="tokens of Mamba 2 and attention")
    parser.add_argument("--passes", type=int, default=3, help="full forward passes of MRConv recomputing")
    parser.add_argument("--device", default="cpu")
    default = Path(__file__).parent / "results" / "mrconv_generation.json"
    parser.add_argument("--output", type=Path, default=default)
    words = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(words.device)
    load_before = os.getloadavg()
    rows, sizes = measure(words.contexts, device, words.tokens, words.passes)
    processor = f"CPU ({platform.machine()}), {os.cpu_count()} cores"
    content = {
        "rows": rows,
        "exponent_of_log2_length": {name: growth(rows, name) for name in METHODS} if len(rows) > 1 else None,
        "parameters": sizes,
        "layers": LAYERS,
        "dtype": "float32",
        "batch": 1,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor,
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "versions": installed_versions("torch", "transformers", "hf-ext"),
    }
    words.output.parent.mkdir(exist_ok=True)
    words.output.write_text(json.dumps(content, indent=2) + "\n")
    print(table(rows, "processor_seconds" if device.type == "cpu" else "seconds"))
    for row in rows:
        print(f"{row['context']:,}: {row['times_cheaper_than_recomputing']:.0f} times cheaper than recomputing")
    print(f"exponents of log2(length): {content['exponent_of_log2_length']}\nparameters: {sizes}\n{words.output}")


if __name__ == "__main__":
    main()
