"""MRConv on a device: training of a layer beside N branches, merged layers and blocks beside bare FFT, attention and
Mamba 2, generation with and without CUDA graphs.

The layers and models are those of mrconv_layer.py, mrconv_inference.py and mrconv_latency.py, where they are
described.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import mrconv_latency
import torch
from mrconv_inference import make_blocks, make_layers
from mrconv_layer import FORMS, Layer, disagreement, draw
from parts import Case, Values, in_turns, read_words, run_part
from timing import training_step
from transformers import DynamicCache

from hf_ext.mrconv.streaming_mrconv import MRConvCache


def training(sizes: tuple[int, int, int, int], words: Any) -> dict[str, Values]:
    """Our layer and the two that compute every branch; equal outputs and gradients."""
    layers = {form: Layer(form, sizes).to(words.device) for form in FORMS}
    u, cotangent = draw(sizes, 1).to(words.device).requires_grad_(), draw(sizes, 2).to(words.device)
    calls = {
        form: training_step(layer, lambda layer=layer: (layer(u) * cotangent).sum()) for form, layer in layers.items()
    }
    facts = dict(zip(("batch", "channels", "length", "taps"), sizes, strict=True))
    rows = in_turns(calls, words, dtype="float32", sizes=facts)
    rows["exact"] |= {f"{name}_difference": value for name, value in disagreement(layers, u, cotangent).items()}
    return rows


@torch.no_grad()
def inference(group: str, length: int, dtype: str, words: Any) -> dict[str, Values]:
    batch, width = (1, 64) if words.tiny else (8, 256)
    hidden = torch.randn(batch, length, width, device=words.device, dtype=getattr(torch, dtype))
    if group == "layers":
        entries = make_layers(width, length, hidden.transpose(1, 2).contiguous())
    else:
        entries = make_blocks(width, length, hidden)
    sizes = {"batch": batch, "width": width, "length": length}
    return in_turns({name: torch.no_grad()(entry) for name, entry in entries.items()}, words, dtype=dtype, sizes=sizes)


def recorded(call: Callable[[], Any], words: Any) -> Callable[[], Any]:
    """The call as a CUDA graph; where there is none, as it is."""
    if words.device != "cuda":
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@torch.no_grad()
def whole_context(context: int, graph: bool, words: Any) -> dict[str, Values]:
    """A token by a forward pass over the context, plainly or as a CUDA graph."""
    model = mrconv_latency.make_mrconv(context).eval().reparameterize().to(words.device)
    prompt = torch.randint(mrconv_latency.VOCABULARY, (1, context), device=words.device)

    @torch.no_grad()
    def forward() -> torch.Tensor:
        return model(prompt, logits_to_keep=1, use_cache=False).logits

    call = recorded(forward, words) if graph else forward
    return in_turns({"CUDA graph" if graph else "plain": call}, words, dtype="float32", sizes={"context": context})


@torch.no_grad()
def streaming(context: int, words: Any) -> dict[str, Values]:
    """Tokens after a prompt, each a call of the model with its state. A row's time is that of `tokens` tokens."""
    device, tokens = torch.device(words.device), 8 if words.tiny else 128
    models = {
        "MRConv": mrconv_latency.make_mrconv(2 * context).eval().reparameterize().to(device),
        "Mamba 2": mrconv_latency.make_mamba2().eval().to(device),
        "attention": mrconv_latency.make_attention(2 * context).eval().to(device),
    }
    prompt = torch.randint(mrconv_latency.VOCABULARY, (1, context), device=device)

    @torch.no_grad()
    def generate(name: str) -> None:
        model, state = models[name], mrconv_latency.state_name(models[name])
        if name == "Mamba 2":
            given = {state: model(prompt[:, :64], use_cache=True)[state]}
        else:
            given = {state: MRConvCache(model.config) if name == "MRConv" else DynamicCache(config=model.config)}
            model(prompt, **given, logits_to_keep=1)
        token = prompt[:, :1]
        for _ in range(tokens):
            token = model(token, use_cache=True, **given).logits[:, -1].argmax(-1, keepdim=True)

    calls = {name: partial(generate, name) for name in models}
    return in_turns(calls, words, dtype="float32", sizes={"context": context, "tokens": tokens})


def make_cases(words: Any) -> dict[str, Case]:
    tiny, cases = words.tiny, {}
    for sizes in [(2, 8, 256, 16)] if tiny else [(8, 64, 16384, 16), (32, 64, 1024, 16), (16, 256, 16384, 16)]:
        cases[f"layer, training, {sizes}"] = partial(training, sizes, words)
    for length in (256,) if tiny else (1024, 4096, 16384, 65536):
        for group in ("layers", "blocks"):
            for dtype in ("float32",) if tiny else ("float32", "bfloat16"):
                cases[f"{group}, {length}, {dtype}"] = partial(inference, group, length, dtype, words)
    for context in (64,) if tiny else (1024, 16384, 65536):
        for graph in (False, True):
            name = f"forward for a token, {context}{', CUDA graph' if graph else ''}"
            cases[name] = partial(whole_context, context, graph, words)
        cases[f"streaming, {context}"] = partial(streaming, context, words)
    return cases


if __name__ == "__main__":
    given_words = read_words()
    run_part(given_words, make_cases(given_words))
