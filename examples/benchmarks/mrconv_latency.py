"""The time of a token at a long context: each token of an MRConv stream, recomputing, Mamba 2, attention with a cache.

    OMP_NUM_THREADS=1 python examples/benchmarks/mrconv_latency.py

Language models of equal size (parameters within 10 %) and equal depth, in one process. A token is one forward pass
and the choice of the most probable next one, called directly: `generate` adds the same overhead to all. Time is the
thread's own. As in any process in real time, Python's garbage collector need not look through what was loaded before.

- MRConv streaming: kernels as long as the context. The prompt fills them, then as many tokens again are generated, so
  that everything that comes once in a context has its share.
- MRConv recomputing: the same merged model, one forward pass over the context for each token.
- Mamba 2 of transformers: its path without kernels of mamba-ssm. The state does not grow: a short prompt serves.
- Attention: Llama of transformers with SDPA and `DynamicCache`, whose keys and values are random numbers, as only
  their number matters here.
"""

import argparse
import gc
import inspect
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from timing import Content, markdown_table, run
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM, PreTrainedModel

from hf_ext.mrconv import MRConvCache, MRConvConfig, MRConvForCausalLM

VOCABULARY, LAYERS, WIDTH = 256, 6, 256
# Tokens of Mamba 2 and attention, and passes of MRConv recomputing, all of equal cost.
TOKENS, PASSES = 128, 3
QUANTILES = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9}
Step = Callable[[Tensor], Tensor]


def make_mrconv(length: int) -> MRConvForCausalLM:
    config = MRConvConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, max_position_embeddings=length
    )
    return MRConvForCausalLM(config)


def make_mamba2() -> Mamba2ForCausalLM:
    sizes = {"hidden_size": 172, "num_heads": 8, "head_dim": 43, "state_size": 28, "n_groups": 1}
    config = Mamba2Config(vocab_size=VOCABULARY, num_hidden_layers=LAYERS, tie_word_embeddings=True, **sizes)
    with warnings.catch_warnings():
        # It says once that its kernels are not installed.
        warnings.simplefilter("ignore")
        return Mamba2ForCausalLM(config)


def make_attention(length: int) -> LlamaForCausalLM:
    sizes = {"hidden_size": 144, "num_attention_heads": 4, "intermediate_size": 252, "num_hidden_layers": LAYERS}
    sizes |= {"max_position_embeddings": 2 * length, "vocab_size": VOCABULARY}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True, attn_implementation="sdpa"))


def collect_tensors(value: Any, without: Any = None) -> dict[int, Tensor]:
    """The tensors that an object of hf_ext holds, by their address, but for those of one object."""
    if isinstance(value, Tensor):
        return {value.data_ptr(): value}
    if value is without:
        return {}
    value = vars(value) if type(value).__module__.startswith("hf_ext.") else value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return {address: tensor for part in parts for address, tensor in collect_tensors(part, without).items()}


def held_bytes(cache: MRConvCache, model: MRConvForCausalLM) -> dict[str, int]:
    """Bytes of a stream's state, and of the kernels that streams share; merged kernels are the model's."""
    state = [collect_tensors(layer, layer.kernel) for layer in cache.layers]
    shared = [collect_tensors(layer.kernel) for layer in cache.layers]
    merged = {buffer.data_ptr() for buffer in model.buffers()}
    return {
        name: sum(tensor.nbytes for found in tensors for address, tensor in found.items() if address not in merged)
        for name, tensors in (("state_bytes", state), ("shared_bytes", shared))
    }


def seconds_of(step: Step, tokens: int) -> list[float]:
    """Seconds of each token, greedily chosen from the logits that `step` returns."""
    token, seconds = torch.ones(1, 1, dtype=torch.long), []
    gc.collect()
    gc.freeze()
    for _ in range(tokens):
        begin = time.thread_time()
        token = step(token)[:, -1].argmax(-1, keepdim=True)
        seconds.append(time.thread_time() - begin)
    return seconds


def stream_mrconv(model: MRConvForCausalLM, prompt: Tensor) -> tuple[list[float], dict[str, Any]]:
    """Seconds of each token after the prompt, the prompt's own, and memory."""
    # The first cache prepares the kernels.
    model(prompt, cache=MRConvCache(model.config), logits_to_keep=1)
    cache, begin = MRConvCache(model.config), time.thread_time()
    model(prompt, cache=cache, logits_to_keep=1)
    facts: dict[str, Any] = {"prompt_seconds": time.thread_time() - begin}
    seconds = seconds_of(lambda token: model(token, cache=cache).logits, prompt.shape[1])
    return seconds, facts | held_bytes(cache, model)


def state_name(model: PreTrainedModel) -> str:
    """The argument that holds a model's state: transformers 5.24 calls it `cache` everywhere."""
    names = inspect.signature(model.forward).parameters
    return next(name for name in ("cache", "cache_params", "past_key_values") if name in names)


def step_mamba2(model: Mamba2ForCausalLM) -> list[float]:
    name = state_name(model)
    state = {name: model(torch.ones(1, 64, dtype=torch.long), use_cache=True)[name]}
    return seconds_of(lambda token: model(token, **state, use_cache=True).logits, TOKENS + 8)[8:]


def step_attention(model: LlamaForCausalLM, length: int) -> list[float]:
    config, cache = model.config, DynamicCache(config=model.config)
    shape = (1, config.num_key_value_heads, length, config.hidden_size // config.num_attention_heads)
    for layer in range(LAYERS):
        cache.update(torch.randn(shape), torch.randn(shape), layer)
    state = {state_name(model): cache}
    return seconds_of(lambda token: model(token, **state).logits, TOKENS + 4)[4:]


def summarise(seconds: list[float]) -> dict[str, float]:
    """Milliseconds of a token."""
    values = 1000 * np.array(seconds)
    quantiles = {name: float(np.percentile(values, share)) for name, share in QUANTILES.items()}
    return {"tokens": len(values), "mean": float(values.mean()), **quantiles, "worst": float(values.max())}


def measure(words: argparse.Namespace) -> Iterator[Content]:
    """All contexts, and a picture of every token of the streams."""
    rows: dict[str, dict[str, Any]] = {}
    times: dict[int, list[float]] = {}
    for length in words.contexts:
        # Outside of inference mode: only the kernels of such a model are kept from one cache to the next.
        models = {"mrconv": make_mrconv(length), "mamba2": make_mamba2(), "attention": make_attention(length)}
        parameters = {name: model.num_parameters() for name, model in models.items()}
        mrconv, prompt = models["mrconv"].eval().reparameterize(), torch.randint(VOCABULARY, (1, length))
        with torch.inference_mode():
            times[length], facts = stream_mrconv(mrconv, prompt)
            whole = partial(mrconv, prompt, logits_to_keep=1)
            found = {
                "MRConv, streaming": times[length],
                "MRConv, recomputing": seconds_of(lambda token, whole=whole: whole().logits, PASSES + 1)[1:],
                "Mamba 2": step_mamba2(models["mamba2"].eval()),
                "attention (SDPA)": step_attention(models["attention"].eval(), length),
            }
        rows[str(length)] = {name: summarise(seconds) for name, seconds in found.items()}
        rows[str(length)]["MRConv, streaming"] |= facts
        # After each context: it is a long run.
        yield {"contexts": rows, "parameters": parameters, "layers": LAYERS, "width": WIDTH, "batch": 1}
        plot(times).savefig(words.output.with_suffix(".png"), dpi=110)


def markdown(content: Content) -> str:
    """Milliseconds and megabytes."""
    lines = []
    for context, rows in content["contexts"].items():
        for name, row in rows.items():
            cells = [f"{row['tokens']:,}", *(f"{row[key]:.2f}" for key in ("mean", *QUANTILES, "worst"))]
            cells += [f"{row['worst'] / row['mean']:.1f}"]
            memory = [f"{row[key] / 1e6:.1f}" if key in row else "" for key in ("state_bytes", "shared_bytes")]
            prompt = f"{1000 * row['prompt_seconds']:.0f}" if "prompt_seconds" in row else ""
            lines.append([f"{int(context):,}", name, *cells, prompt, *memory])
    head = ["context", "model", "tokens", "mean", *QUANTILES, "worst", "worst / mean", "prompt"]
    return markdown_table([*head, "state, MB", "shared, MB"], lines)


def plot(times: dict[int, list[float]]) -> Figure:
    """The latency of every token of a stream, a panel for each context."""
    figure = Figure(figsize=(11, 3 * len(times)), layout="constrained")
    panels = figure.subplots(len(times), 1, squeeze=False)[:, 0]
    for panel, (context, seconds) in zip(panels, times.items(), strict=True):
        panel.plot(1000 * np.array(seconds), linewidth=0, marker=".", markersize=2)
        panel.set(yscale="log", xlabel=f"token after a prompt of {context:,}", ylabel="ms")
        panel.grid(alpha=0.3)
    return figure


if __name__ == "__main__":
    run("mrconv_latency", __doc__, measure, markdown, contexts=[1024, 4096, 16384, 65536])
