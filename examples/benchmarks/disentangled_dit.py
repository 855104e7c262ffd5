"""Disentangled DiT beside diffusers' mmDiT and DiT, each in a process that is new in each round, by processor time.

    OMP_NUM_THREADS=1 python examples/benchmarks/disentangled_dit.py

Networks of equal width, depth and patches with random weights, class-conditional latents, DDIM, guidance; decoding is
left out. `ours` is [`DisentangledDiTPipeline`] with all five controls, also with one stream of weights for image and
class (`shared_stream`), one modulation for all blocks (`modulation="shared"`), or both. `SD3` is
`SD3Transformer2DModel` of equal context length, its pooled input zero, in a plain loop: both branches of the guidance
in one batch, the scheduler on the images alone. `DiT, equal width` is `DiTPipeline`, which has one stream and no
context. A process measures one of them: for each number of tokens a call of the network alone (a picture and its null
branch, or eight pictures with theirs), then sampling. They take turns, in an order that turns from round to round. A
ratio is that of two processes of a round: their time over ours.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import diffusers
import torch
from diffusers import ConfigMixin, DDIMScheduler, DiTPipeline, DiTTransformer2DModel, ModelMixin, SD3Transformer2DModel
from diffusers.configuration_utils import register_to_config
from diffusers.models.autoencoders.vae import DecoderOutput
from timing import Content, apart, in_turns, markdown_table, run, time_of
from torch import Tensor

from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline, DisentangledDiTTransformer2DModel

Entry = Callable[[], Tensor]
Predict = Callable[[Tensor, Tensor], Tensor]
# DiTPipeline has the null class of ImageNet built in.
CLASSES, CHANNELS, PATCH, GUIDANCE = 1000, 4, 2, 4.0
OURS = "ours"
SHARING: dict[str, dict[str, Any]] = {
    OURS: {},
    "ours, one stream": {"shared_stream": True},
    "ours, one modulation": {"modulation": "shared"},
    "ours, both": {"shared_stream": True, "modulation": "shared"},
}
NETWORKS = [*SHARING, "SD3", "DiT, equal width"]
# Network alone or sampling, tokens, pictures, timed calls. The first call is not counted.
CASES = [
    ("network", 64, 1, 5),
    ("sampling", 64, 1, 1),
    ("network", 64, 8, 2),
    ("network", 256, 1, 3),
    ("sampling", 256, 1, 1),
    ("network", 1024, 1, 2),
]


class NoDecoder(ModelMixin, ConfigMixin):
    """In place of an autoencoder, which DiTPipeline always calls: returns the latents."""

    @register_to_config
    def __init__(self, scaling_factor: float = 1.0):
        super().__init__()
        # A pipeline asks its parts for their device.
        self.nothing = torch.nn.Parameter(torch.zeros(1))

    def decode(self, latents: Tensor) -> DecoderOutput:
        """The latents as they are."""
        return DecoderOutput(sample=latents)


def make_scheduler() -> DDIMScheduler:
    betas = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    return DDIMScheduler(**betas, clip_sample=False, timestep_spacing="trailing")


def ready(network: ModelMixin) -> ModelMixin:
    """Random weights, also where training starts from zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in network.parameters():
            value += 0.02 * torch.randn(value.shape, generator=generator)
    return network.eval().requires_grad_(False)


def make_network(name: str, preset: str, side: int) -> ModelMixin:
    """The network of an entry."""
    sizes = {"sample_size": side, "in_channels": CHANNELS, **DisentangledDiTTransformer2DModel.PRESETS[preset]}
    torch.manual_seed(0)
    if name in SHARING:
        return ready(DisentangledDiTTransformer2DModel(num_classes=CLASSES, **SHARING[name], **sizes))
    if name != "SD3":
        return ready(DiTTransformer2DModel(out_channels=CHANNELS, num_embeds_ada_norm=CLASSES, **sizes))
    width = sizes["num_attention_heads"] * sizes["attention_head_dim"]
    widths = dict.fromkeys(("joint_attention_dim", "caption_projection_dim", "pooled_projection_dim"), width)
    return ready(
        SD3Transformer2DModel(
            out_channels=CHANNELS, pos_embed_max_size=side // PATCH, qk_norm="rms_norm", **widths, **sizes
        )
    )


@torch.no_grad()
def plain_loop(predict: Predict, latents: Tensor, steps: int) -> Tensor:
    """Guided sampling as one writes it by hand; `predict` gets both branches, the null branch first."""
    scheduler = make_scheduler()
    scheduler.set_timesteps(steps, device=latents.device)
    latents = latents.float()
    for timestep in scheduler.timesteps:
        inputs = scheduler.scale_model_input(torch.cat([latents, latents]), timestep)
        null, given = predict(inputs, timestep.expand(len(inputs))).float().chunk(2)
        latents = scheduler.step(null + GUIDANCE * (given - null), timestep, latents).prev_sample
    return latents


def make_prediction(name: str, network: ModelMixin, noise: Tensor, labels: list[int]) -> Predict:
    """A call of the network for both branches: the class with all five controls, or one context token as SD3's."""
    options: dict[str, Any] = {}
    both = torch.tensor([CLASSES] * len(labels) + labels, device=noise.device)
    if name in SHARING:
        size = [float(noise.shape[-2]), float(noise.shape[-1])]
        values = {"original_size": size, "crop": [0.0, 0.0], "target_size": size, "flip": [0.0], "aspect_ratio": [0.0]}
        controls = {key: torch.tensor([value] * len(both), device=noise.device) for key, value in values.items()}
        options = {"controls": controls, "control_mask": both < CLASSES}
    if name != "SD3":
        return lambda inputs, timestep: (
            network(inputs.to(noise.dtype), timestep=timestep, class_labels=both, **options).sample
        )
    width = network.config.caption_projection_dim
    context = torch.randn(len(both), 1, width, device=noise.device, dtype=noise.dtype)
    pooled = context.new_zeros(len(both), width)
    return lambda inputs, timestep: network(inputs.to(noise.dtype), context, pooled, timestep).sample


def make_entry(name: str, network: ModelMixin, batch: int, side: int, steps: int) -> Entry:
    """Sampling in so many steps, with 0 a call of the network alone; equal noise and labels where they are taken."""
    noise = torch.randn(batch, CHANNELS, side, side, generator=torch.Generator().manual_seed(0))
    noise = noise.to(network.device, network.dtype)
    labels = [(7 * index) % CLASSES for index in range(batch)]
    options: dict[str, Any] = {"num_inference_steps": steps, "guidance_scale": GUIDANCE}
    if steps and name != "SD3":
        if name in SHARING:
            pipeline = DisentangledDiTPipeline(network, make_scheduler(), None, None, None)
            options |= {"latents": noise.float(), "output_type": "latent"}
        else:
            # It draws its own noise.
            pipeline = DiTPipeline(network, NoDecoder().to(network.device, network.dtype), make_scheduler())
            options |= {"output_type": "pt"}
        pipeline.set_progress_bar_config(disable=True)
        return lambda: pipeline(class_labels=labels, **options).images
    predict = make_prediction(name, network, noise, labels)
    if steps:
        return lambda: plain_loop(predict, noise, steps)
    timestep = torch.full((2 * batch,), 500.0, device=noise.device)
    return torch.no_grad()(lambda: predict(torch.cat([noise, noise]), timestep))


def measure_network(name: str, preset: str, sampling_steps: int) -> tuple[list[float], int]:
    """The process of a contender: median processor seconds of each case, and its parameters."""
    torch.set_num_threads(1)
    # Every `.to` of a model would say that it keeps nothing in float32.
    diffusers.utils.logging.set_verbosity_error()
    seconds, networks = [], {}
    for kind, tokens, batch, calls in CASES:
        side = PATCH * round(tokens**0.5)
        if side not in networks:
            networks = {side: make_network(name, preset, side)}
        steps = sampling_steps if kind == "sampling" else 0
        # A step is enough to call everything once.
        make_entry(name, networks[side], batch, side, min(steps, 1))()
        entry = make_entry(name, networks[side], batch, side, steps)
        seconds.append(statistics.median(time_of(entry) for _ in range(calls)))
    return seconds, networks[side].num_parameters()


def summarise(rounds: dict[str, list[list[float]]]) -> list[dict[str, Any]]:
    """A row for each case: median seconds, and the ratios to ours: median, least, largest, of each round."""
    rows = []
    for index, (kind, tokens, batch, _) in enumerate(CASES):
        row: dict[str, Any] = {"kind": kind, "tokens": tokens, "batch": batch, "entries": {}}
        for name, taken in rounds.items():
            ratios = [one[index] / ours[index] for one, ours in zip(taken, rounds[OURS], strict=True)]
            seconds = statistics.median(one[index] for one in taken)
            spread = {"times_ours": statistics.median(ratios), "least": min(ratios), "largest": max(ratios)}
            row["entries"][name] = {"processor_seconds": seconds, **spread}
        rows.append(row)
    return rows


def markdown(content: Content) -> str:
    """Processor seconds of ours; of the others their ratio to it, with the least and the largest of the rounds."""
    lines = []
    for row in content["results"]:
        entries = row["entries"]
        cells = [
            f"{entry['times_ours']:.2f} ({entry['least']:.2f} to {entry['largest']:.2f})"
            for entry in (entries[name] for name in NETWORKS[1:])
        ]
        seconds = f"{entries[OURS]['processor_seconds']:.3f}"
        lines.append([row["kind"], f"{row['tokens']}, {row['batch']}", seconds, *cells])
    counts = [f"{content['parameters'][name] / 1e6:.0f}" for name in NETWORKS]
    lines.append(["million parameters", "", *counts])
    return markdown_table(["what", "tokens, pictures", "ours, s", *NETWORKS[1:]], lines)


def measure(words: argparse.Namespace) -> Iterator[Content]:
    """All rounds."""
    found = in_turns(NETWORKS, words.rounds, lambda name: apart(measure_network, name, words.preset, words.steps))
    rounds = {name: [seconds for seconds, _ in taken] for name, taken in found.items()}
    sizes = {"preset": words.preset, "steps": words.steps, "dtype": "float32"}
    counts = {name: taken[0][1] for name, taken in found.items()}
    yield {"results": summarise(rounds), "rounds": rounds, "parameters": counts, "sizes": sizes}


if __name__ == "__main__":
    run("disentangled_dit_processes", __doc__, measure, markdown, preset="S", steps=10, rounds=5)
