"""Disentangled DiT on a device: sampling and a training step beside SD3's mmDiT, DiT and PixArt of equal width.

The networks, the pipeline and the plain loop are those of disentangled_dit.py. A sampling row is a whole call
of `steps` steps with guidance; a training step is forward and backward under autocast.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import disentangled_dit as plain
import torch
from diffusers import ModelMixin, PixArtTransformer2DModel
from parts import Case, Values, in_turns, read_words, run_part
from timing import training_step

NAMES = ("ours", "SD3", "DiT, equal width", "PixArt")
STEPS = 20


def make_pixart(sizes: dict[str, int], side: int) -> PixArtTransformer2DModel:
    width = sizes["num_attention_heads"] * sizes["attention_head_dim"]
    channels = dict.fromkeys(("in_channels", "out_channels"), plain.CHANNELS)
    widths = dict.fromkeys(("cross_attention_dim", "caption_channels"), width)
    return PixArtTransformer2DModel(sample_size=side, use_additional_conditions=False, **channels, **widths, **sizes)


def make_network(name: str, side: int, words: Any, dtype: str, compiled: bool) -> ModelMixin:
    """The network of an entry on the device, with its blocks compiled where asked for."""
    preset = "tiny" if words.tiny else "S"
    if name == "PixArt":
        torch.manual_seed(0)
        network = plain.ready(make_pixart(dict(plain.DisentangledDiTTransformer2DModel.PRESETS[preset]), side))
    else:
        network = plain.make_network(name, preset, side)
    network.to(words.device, getattr(torch, dtype))
    if compiled:
        network.compile()
    return network


def context_inputs(network: ModelMixin, rows: int, device: Any, dtype: torch.dtype) -> dict[str, Any]:
    """One context token for each image, as ours."""
    width = network.config.num_attention_heads * network.config.attention_head_dim
    context = torch.randn(rows, 1, width, device=device, dtype=dtype)
    if isinstance(network, PixArtTransformer2DModel):
        sizes = {"resolution": None, "aspect_ratio": None}
        return {"encoder_hidden_states": context, "added_cond_kwargs": sizes}
    return {"encoder_hidden_states": context, "pooled_projections": torch.zeros(rows, width, device=device).to(dtype)}


def make_entry(name: str, network: ModelMixin, batch: int, side: int, steps: int) -> Callable[[], Any]:
    if name != "PixArt":
        return plain.make_entry(name, network, batch, side, steps)
    noise = torch.randn(batch, plain.CHANNELS, side, side).to(network.device, network.dtype)
    inputs = context_inputs(network, 2 * batch, noise.device, noise.dtype)

    def predict(latents: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return network(latents.to(noise.dtype), timestep=timestep, **inputs).sample

    return lambda: plain.plain_loop(predict, noise, steps)


def sample(tokens: int, batch: int, dtype: str, compiled: bool, words: Any) -> dict[str, Values]:
    side, steps = plain.PATCH * round(tokens**0.5), 2 if words.tiny else STEPS
    networks = {name: make_network(name, side, words, dtype, compiled) for name in NAMES}
    calls = {name: make_entry(name, network, batch, side, steps) for name, network in networks.items()}
    sizes = {"tokens": tokens, "batch": batch, "steps": steps}
    rows = in_turns(calls, words, dtype=dtype, sizes=sizes)
    for name, network in networks.items():
        rows[name]["parameters"] = network.num_parameters()
    return rows


def training_inputs(name: str, network: ModelMixin, batch: int, side: int, device: str) -> dict[str, Any]:
    noisy = torch.randn(batch, plain.CHANNELS, side, side, device=device)
    timestep = torch.randint(1000, (batch,), device=device)
    inputs: dict[str, Any] = {"hidden_states": noisy, "timestep": timestep}
    if name in ("SD3", "PixArt"):
        return inputs | context_inputs(network, batch, device, torch.float32)
    inputs["class_labels"] = torch.arange(batch, device=device) % plain.CLASSES
    if name == "ours":
        sizes = network.CONTROL_SIZES
        inputs["controls"] = {control: torch.rand(batch, size, device=device) for control, size in sizes.items()}
        inputs["control_mask"] = torch.ones(batch, dtype=torch.bool, device=device)
    return inputs


def train(tokens: int, batch: int, dtype: str, compiled: bool, words: Any) -> dict[str, Values]:
    """Weights in float32, forward under autocast."""
    side = plain.PATCH * round(tokens**0.5)
    calls = {}
    for name in NAMES:
        network = make_network(name, side, words, "float32", compiled).requires_grad_(True).train()
        forward = partial(network, **training_inputs(name, network, batch, side, words.device))
        if dtype != "float32":
            forward = torch.autocast(words.device, getattr(torch, dtype))(forward)
        calls[name] = training_step(network, lambda forward=forward: forward().sample.float().square().mean())
    return in_turns(calls, words, dtype=dtype, sizes={"tokens": tokens, "batch": batch})


def make_cases(words: Any) -> dict[str, Case]:
    """The rehearsal compiles nothing: inductor takes minutes there."""
    diffusers.utils.logging.set_verbosity_error()
    cases: dict[str, Case] = {}
    for compiled in (False,) if words.tiny else (False, True):
        for tokens in (16,) if words.tiny else (256, 1024):
            for dtype in ("bfloat16",) if words.tiny or compiled else ("bfloat16", "float32"):
                what = f"{tokens} tokens, {dtype}{', compiled' if compiled else ''}"
                for batch in (1,) if words.tiny else (16,) if compiled else (1, 16):
                    cases[f"sampling, batch {batch}, {what}"] = partial(sample, tokens, batch, dtype, compiled, words)
                batch = 2 if words.tiny else 32
                cases[f"training, batch {batch}, {what}"] = partial(train, tokens, batch, dtype, compiled, words)
    return cases


if __name__ == "__main__":
    given_words = read_words()
    run_part(given_words, make_cases(given_words))
