"""Sampling time of Disentangled DiT beside diffusers' own mmDiT and DiT.

    OMP_NUM_THREADS=1 python examples/benchmarks/disentangled_dit_sampling.py

Class-conditional latents, DDIM, guidance; random weights. Entries, each compared with the first:
- ours: [`DisentangledDiTPipeline`], with all five controls;
- ours, plain loop: the same network without what the pipeline computes once per call; it must give the same latents;
- SD3: `SD3Transformer2DModel` of equal width, depth, patches and context length, its pooled input zero, in the plain
  loop: both guidance branches in one batch, the scheduler on the images alone;
- DiT, equal width: `DiTPipeline` of equal width and depth, which has one stream and no context;
- DiT, equal parameters: the same of equal depth and heads, as wide as the number of parameters asks for.
Decoding is left out. Every entry has a process of its own, as where it is used: in one process what an entry leaves of
the heap decides whether the next one's large tensors are new to the system, which is up to a tenth of the time. Within
a round every entry runs once, in an order that turns from round to round; a ratio is the median over the rounds, of
wall and of processor time: the latter is steadier on a busy machine.
The networks alone are compared by disentangled_dit_processes.py.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import ConfigMixin, DDIMScheduler, DiTPipeline, DiTTransformer2DModel, ModelMixin, SD3Transformer2DModel
from diffusers.configuration_utils import register_to_config
from diffusers.models.autoencoders.vae import DecoderOutput
from timing import describe_machine, in_turns, median_ratio, write_result
from torch import Tensor

from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline, DisentangledDiTTransformer2DModel

Entry = Callable[[], Tensor]
# DiTPipeline has the null class of ImageNet built in.
CLASSES, CHANNELS, PATCH, GUIDANCE = 1000, 4, 2, 4.0
OURS = "ours"
NAMES = [OURS, "ours, plain loop", "SD3", "DiT, equal width", "DiT, equal parameters"]
NETWORKS = [OURS, "SD3", "DiT, equal width"]
Predict = Callable[[Tensor, Tensor], Tensor]


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
    return DDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        clip_sample=False,
        timestep_spacing="trailing",
    )


def ready(network: ModelMixin) -> ModelMixin:
    """Random weights, also where training starts from zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in network.parameters():
            value += 0.02 * torch.randn(value.shape, generator=generator)
    return network.eval().requires_grad_(False)


def make_sd3(sizes: dict[str, int], side: int) -> SD3Transformer2DModel:
    width = sizes["num_attention_heads"] * sizes["attention_head_dim"]
    return SD3Transformer2DModel(
        sample_size=side,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        joint_attention_dim=width,
        caption_projection_dim=width,
        pooled_projection_dim=width,
        pos_embed_max_size=side // PATCH,
        qk_norm="rms_norm",
        **sizes,
    )


def make_dit(sizes: dict[str, int], side: int) -> DiTTransformer2DModel:
    return DiTTransformer2DModel(
        sample_size=side, in_channels=CHANNELS, out_channels=CHANNELS, num_embeds_ada_norm=CLASSES, **sizes
    )


def wider_dit(sizes: dict[str, int], parameters: int, side: int) -> dict[str, int]:
    """Sizes of the DiT with the number of parameters nearest to a given one; depth and heads stay."""
    counts = {}
    for head_dim in range(16, 257, 4):
        chosen = {**sizes, "attention_head_dim": head_dim}
        with torch.device("meta"):
            counts[head_dim] = make_dit(chosen, side).num_parameters()
        if counts[head_dim] > parameters:
            break
    best = min(counts, key=lambda head_dim: abs(counts[head_dim] - parameters))
    return {**sizes, "attention_head_dim": best}


@torch.no_grad()
def plain_loop(predict: Predict, scheduler: DDIMScheduler, latents: Tensor, steps: int) -> Tensor:
    """Guided sampling as one writes it by hand; `predict` gets both branches, the null branch first."""
    scheduler.set_timesteps(steps, device=latents.device)
    latents = latents.float()
    for timestep in scheduler.timesteps:
        inputs = scheduler.scale_model_input(torch.cat([latents, latents]), timestep)
        null, given = predict(inputs, timestep.expand(len(inputs))).float().chunk(2)
        guided = null + GUIDANCE * (given - null)
        latents = scheduler.step(guided, timestep, latents).prev_sample
    return latents


def our_prediction(network: ModelMixin, noise: Tensor, labels: list[int]) -> Predict:
    """All five controls in the branch of the class, none in the null branch."""
    both = torch.tensor([CLASSES] * len(labels) + labels, device=noise.device)
    size = [float(noise.shape[-2]), float(noise.shape[-1])]
    values = {"original_size": size, "crop": [0.0, 0.0], "target_size": size, "flip": [0.0], "aspect_ratio": [0.0]}
    controls = {name: torch.tensor([value] * len(both), device=noise.device) for name, value in values.items()}
    options = {"class_labels": both, "controls": controls, "control_mask": both < CLASSES}
    return lambda inputs, timestep: network(inputs.to(noise.dtype), timestep, **options).sample


def sd3_prediction(network: ModelMixin, noise: Tensor) -> Predict:
    """One context token for each image, as ours."""
    width, rows = network.config.caption_projection_dim, 2 * len(noise)
    context = torch.randn(rows, 1, width, device=noise.device, dtype=noise.dtype)
    pooled = torch.zeros(rows, width, device=noise.device, dtype=noise.dtype)
    return lambda inputs, timestep: network(inputs.to(noise.dtype), context, pooled, timestep).sample


def dit_prediction(network: ModelMixin, noise: Tensor, labels: list[int]) -> Predict:
    both = torch.tensor([CLASSES] * len(labels) + labels, device=noise.device)
    return lambda inputs, timestep: network(inputs.to(noise.dtype), timestep, both).sample


@torch.no_grad()
def one_call(predict: Predict, noise: Tensor) -> Tensor:
    """A network alone."""
    return predict(torch.cat([noise, noise]), torch.full((2 * len(noise),), 500.0, device=noise.device))


def our_entry(network: ModelMixin, noise: Tensor, labels: list[int], steps: int) -> Entry:
    """Our pipeline."""
    pipeline = DisentangledDiTPipeline(network, make_scheduler(), None, None, None)
    pipeline.set_progress_bar_config(disable=True)
    options = {"num_inference_steps": steps, "guidance_scale": GUIDANCE, "output_type": "latent"}
    return lambda: pipeline(labels, latents=noise.float(), **options).images


def dit_entry(network: ModelMixin, labels: list[int], steps: int) -> Entry:
    """DiTPipeline draws its own noise."""
    pipeline = DiTPipeline(network, NoDecoder().to(network.device, network.dtype), make_scheduler())
    pipeline.set_progress_bar_config(disable=True)
    options = {"num_inference_steps": steps, "guidance_scale": GUIDANCE, "output_type": "pt"}
    return lambda: pipeline(class_labels=labels, **options).images


def make_network(name: str, preset: str, side: int) -> ModelMixin:
    """The network of an entry."""
    sizes = dict(DisentangledDiTTransformer2DModel.PRESETS[preset])
    torch.manual_seed(0)
    ours = partial(
        DisentangledDiTTransformer2DModel, sample_size=side, in_channels=CHANNELS, num_classes=CLASSES, **sizes
    )
    if name.startswith(OURS):
        return ready(ours())
    if name == "SD3":
        return ready(make_sd3(sizes, side))
    if name == "DiT, equal width":
        return ready(make_dit(sizes, side))
    with torch.device("meta"):
        parameters = ours().num_parameters()
    return ready(make_dit(wider_dit(sizes, parameters, side), side))


def make_entry(name: str, network: ModelMixin, batch: int, side: int, steps: int) -> Entry:
    """Sampling in so many steps, with 0 a call of the network alone; equal noise and labels where they are taken."""
    noise = torch.randn(batch, CHANNELS, side, side, generator=torch.Generator().manual_seed(0))
    labels = [(7 * index) % CLASSES for index in range(batch)]
    if steps and name == OURS:
        return our_entry(network, noise, labels, steps)
    if steps and name.startswith("DiT"):
        return dit_entry(network, labels, steps)
    if name.startswith(OURS):
        predict = our_prediction(network, noise, labels)
    elif name == "SD3":
        predict = sd3_prediction(network, noise)
    else:
        predict = dit_prediction(network, noise, labels)
    if not steps:
        return lambda: one_call(predict, noise)
    return lambda: plain_loop(predict, make_scheduler(), noise, steps)


def seconds(entry: Entry) -> tuple[float, float]:
    """Wall and processor time of a call."""
    start = time.perf_counter(), time.process_time()
    entry()
    return time.perf_counter() - start[0], time.process_time() - start[1]


def serve(connection: Connection, name: str, batch: int, side: int, words: argparse.Namespace) -> None:
    """The process of an entry: what it has to say of itself, then the time of a call whenever it is asked."""
    prepare()
    network = make_network(name, words.preset, side)
    entry = make_entry(name, network, batch, side, words.steps)
    # The first call fills what is kept.
    connection.send((entry().numpy(), network.num_parameters()))
    while connection.recv():
        connection.send(seconds(entry))


def prepare() -> None:
    """One thread, and no advice."""
    torch.set_num_threads(1)
    # Every `.to` of a model would say that it keeps nothing in float32.
    diffusers.utils.logging.set_verbosity_error()


class Entries:
    """Processes of all entries."""

    def __init__(self, batch: int, side: int, words: argparse.Namespace):
        context = multiprocessing.get_context("spawn")
        self.connections: dict[str, Connection] = {}
        for name in NAMES:
            self.connections[name], other = context.Pipe()
            arguments = (other, name, batch, side, words)
            context.Process(target=serve, args=arguments, daemon=True).start()
            other.close()
        # The latents of the first call, and the number of parameters.
        self.facts = {name: connection.recv() for name, connection in self.connections.items()}

    def seconds(self, name: str) -> tuple[float, float]:
        """Of a call, while the others wait."""
        self.connections[name].send(True)
        return self.connections[name].recv()

    def close(self) -> None:
        for connection in self.connections.values():
            connection.send(False)


def check_same(entries: Entries) -> None:
    """Refuses a pipeline whose latents are not those of the plain loop."""
    ours, plain = (torch.from_numpy(entries.facts[name][0]) for name in NAMES[:2])
    error = float((ours - plain).abs().max() / plain.abs().max())
    if not error < 1e-3:
        raise ValueError(f"the pipeline's latents differ from the plain loop's by {error:.2g} of their largest value.")


def measure(entries: Entries, rounds: int) -> dict[str, dict[str, Any]]:
    """Median seconds of each entry, and the median ratio to ours within a round."""
    times = in_turns(NAMES, rounds, entries.seconds)
    results: dict[str, dict[str, Any]] = {}
    for name, taken in times.items():
        wall, processor = (
            median_ratio([one[kind] for one in taken], [one[kind] for one in times[OURS]]) for kind in (0, 1)
        )
        median = statistics.median(one[0] for one in taken)
        results[name] = {"seconds": median, "times_ours": wall, "processor_times_ours": processor}
    return results


def markdown(results: list[dict[str, Any]], parameters: dict[str, int]) -> str:
    """A row for each batch and number of tokens: milliseconds per image and step; of our time, of the processor's."""
    names = list(results[0]["entries"])
    lines = ["| tokens, batch | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines.append("| parameters | " + " | ".join(f"{count / 1e6:.1f} M" for count in parameters.values()) + " |")
    for result in results:
        scale = 1000 / result["batch"] / result["steps"]
        cells = [
            f"{scale * row['seconds']:.2f} ({row['times_ours']:.2f}, {row['processor_times_ours']:.2f})"
            for row in result["entries"].values()
        ]
        lines.append(f"| {result['tokens']}, {result['batch']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def run(words: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, int]]:
    results, parameters = [], {}
    for tokens in words.tokens:
        side = PATCH * round(tokens**0.5)
        if (side // PATCH) ** 2 != tokens:
            raise SystemExit(f"--tokens must be square numbers, got {tokens}")
        for batch in words.batches:
            entries = Entries(batch, side, words)
            parameters = {name: count for name, (_, count) in entries.facts.items()}
            check_same(entries)
            rows = measure(entries, words.rounds)
            entries.close()
            case = {"tokens": tokens, "batch": batch, "steps": words.steps, "rounds": words.rounds}
            results.append({**case, "entries": rows})
    return results, parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="S", choices=list(DisentangledDiTTransformer2DModel.PRESETS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    default = Path(__file__).parent / "results" / "disentangled_dit_sampling.json"
    parser.add_argument("--output", type=Path, default=default)
    words = parser.parse_args()
    prepare()
    results, parameters = run(words)
    content = {
        "results": results,
        "parameters": parameters,
        "sizes": {"preset": words.preset, "patch": PATCH, "channels": CHANNELS, "classes": CLASSES}
        | {"context_tokens": 1, "guidance": GUIDANCE, "scheduler": "DDIM", "dtype": "float32"},
        **describe_machine("torch", "diffusers", "hf-ext"),
    }
    write_result(words.output, content, markdown(results, parameters))


if __name__ == "__main__":
    main()
