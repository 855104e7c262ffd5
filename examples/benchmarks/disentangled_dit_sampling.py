"""Sampling time of Disentangled DiT beside diffusers' own mmDiT and DiT.

    OMP_NUM_THREADS=1 python examples/benchmarks/disentangled_dit_sampling.py
    OMP_NUM_THREADS=1 python examples/benchmarks/disentangled_dit_sampling.py --network
    python examples/benchmarks/disentangled_dit_sampling.py --device cuda --dtype bfloat16 --compile

Class-conditional latents, DDIM, guidance; random weights. Entries, each compared with the first:
- ours: [`DisentangledDiTPipeline`], with all five controls;
- ours, plain loop: the same network without what the pipeline computes once per call; it must give the same latents;
- SD3: `SD3Transformer2DModel` of equal width, depth, patches and context length, its pooled input zero, in the plain
  loop: both guidance branches in one batch, the scheduler on the images alone;
- DiT, equal width: `DiTPipeline` of equal width and depth, which has one stream and no context;
- DiT, equal parameters: the same of equal depth and heads, as wide as the number of parameters asks for.
With `--network` a call of ours, SD3's and the DiT of equal width alone: both guidance branches in one batch, timestep
and controls for each row, and nothing computed ahead.
Decoding is left out. Every entry has a process of its own, as where it is used: in one process what an entry leaves of
the heap decides whether the next one's large tensors are new to the system, which is up to a tenth of the time. Within
a round every entry runs once, in an order that turns from round to round; a ratio is the median over the rounds, of
wall and of processor time: the latter is steadier on a busy machine. `--compile` compiles every network; the first
calls, which compile, are not counted.
"""

import argparse
import json
import multiprocessing
import os
import platform
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
from torch import Tensor
from tqdm import tqdm
from versions import installed_versions

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


def ready(network: ModelMixin, words: argparse.Namespace) -> ModelMixin:
    """Random weights, also where training starts from zero, on the device and in its type; compiled if asked for."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in network.parameters():
            value += 0.02 * torch.randn(value.shape, generator=generator)
    network = network.to(words.device, getattr(torch, words.dtype)).eval().requires_grad_(False)
    if words.compile:
        # In place; the entries call it with few kinds of input.
        network.compile()
    return network


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


def make_network(name: str, words: argparse.Namespace, side: int) -> ModelMixin:
    """The network of an entry."""
    sizes = dict(DisentangledDiTTransformer2DModel.PRESETS[words.preset])
    torch.manual_seed(0)
    ours = partial(
        DisentangledDiTTransformer2DModel, sample_size=side, in_channels=CHANNELS, num_classes=CLASSES, **sizes
    )
    if name.startswith(OURS):
        return ready(ours(), words)
    if name == "SD3":
        return ready(make_sd3(sizes, side), words)
    if name == "DiT, equal width":
        return ready(make_dit(sizes, side), words)
    with torch.device("meta"):
        parameters = ours().num_parameters()
    return ready(make_dit(wider_dit(sizes, parameters, side), side), words)


def make_entry(name: str, network: ModelMixin, batch: int, side: int, words: argparse.Namespace) -> Entry:
    """Sampling with a network, from the same noise and labels in every entry that takes them."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(batch, CHANNELS, side, side, generator=generator)
    noise = noise.to(words.device, getattr(torch, words.dtype))
    labels = [(7 * index) % CLASSES for index in range(batch)]
    if not words.network and name == OURS:
        return our_entry(network, noise, labels, words.steps)
    if not words.network and name.startswith("DiT"):
        return dit_entry(network, labels, words.steps)
    if name.startswith(OURS):
        predict = our_prediction(network, noise, labels)
    elif name == "SD3":
        predict = sd3_prediction(network, noise)
    else:
        predict = dit_prediction(network, noise, labels)
    if words.network:
        return lambda: one_call(predict, noise)
    return lambda: plain_loop(predict, make_scheduler(), noise, words.steps)


def seconds(entry: Entry, device: str) -> tuple[float, float]:
    """Wall and processor time of a call."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter(), time.process_time()
    entry()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start[0], time.process_time() - start[1]


def peak_memory(entry: Entry, device: str) -> int | None:
    """Bytes on the GPU above what the network takes."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    entry()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def serve(connection: Connection, name: str, batch: int, side: int, words: argparse.Namespace) -> None:
    """The process of an entry: what it has to say of itself, then the time of a call whenever it is asked."""
    prepare(words)
    network = make_network(name, words, side)
    entry = make_entry(name, network, batch, side, words)
    # The first call compiles, and fills what is kept.
    latents = entry().float().cpu().numpy()
    connection.send((latents, network.num_parameters(), peak_memory(entry, words.device)))
    while connection.recv():
        connection.send(seconds(entry, words.device))


def prepare(words: argparse.Namespace) -> None:
    if words.device == "cpu":
        torch.set_num_threads(words.threads)
    # Every `.to` of a model would say that it keeps nothing in float32.
    diffusers.utils.logging.set_verbosity_error()


class Entries:
    """Processes of all entries."""

    def __init__(self, batch: int, side: int, words: argparse.Namespace):
        context = multiprocessing.get_context("spawn")
        self.names = NETWORKS if words.network else NAMES
        self.connections: dict[str, Connection] = {}
        for name in self.names:
            self.connections[name], other = context.Pipe()
            arguments = (other, name, batch, side, words)
            context.Process(target=serve, args=arguments, daemon=True).start()
            other.close()
        # The latents of the first call, the number of parameters, the memory of a call.
        self.facts = {name: connection.recv() for name, connection in self.connections.items()}

    def seconds(self, name: str) -> tuple[float, float]:
        """Of a call, while the others wait."""
        self.connections[name].send(True)
        return self.connections[name].recv()

    def close(self) -> None:
        for connection in self.connections.values():
            connection.send(False)


def check_same(entries: Entries, dtype: str) -> None:
    """What the pipeline computes once must change nothing."""
    ours, plain = (torch.from_numpy(entries.facts[name][0]) for name in NAMES[:2])
    tolerance = {"float32": 1e-3, "bfloat16": 0.1}[dtype]
    error = float((ours - plain).abs().max() / plain.abs().max())
    if not error < tolerance:
        raise ValueError(f"the pipeline's latents differ from the plain loop's by {error:.2g} of their largest value.")


def measure(entries: Entries, words: argparse.Namespace) -> tuple[dict[str, dict[str, Any]], int]:
    """Median seconds of each entry, and the median ratio to ours within a round; and the number of rounds."""
    names = entries.names
    taken_once = sum(entries.seconds(name)[0] for name in names)
    rounds = min(words.rounds, max(3, int(words.budget / taken_once)))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in tqdm(range(rounds), "rounds", leave=False):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(entries.seconds(name))
    results: dict[str, dict[str, Any]] = {}
    for name, taken in times.items():
        ratios = [
            [theirs[kind] / ours[kind] for theirs, ours in zip(taken, times[OURS], strict=True)] for kind in (0, 1)
        ]
        results[name] = {
            "seconds": statistics.median(wall for wall, _ in taken),
            "times_ours": statistics.median(ratios[0]),
            "processor_times_ours": statistics.median(ratios[1]),
            "peak_bytes": entries.facts[name][2],
        }
    return results, rounds


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
            parameters = {name: count for name, (_, count, _) in entries.facts.items()}
            if not words.network:
                check_same(entries, words.dtype)
            rows, rounds = measure(entries, words)
            entries.close()
            steps = 1 if words.network else words.steps
            case = {"tokens": tokens, "batch": batch, "steps": steps, "rounds": rounds}
            results.append({**case, "entries": rows})
    return results, parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", action="store_true", help="a call of the networks alone")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--preset", default="S", choices=list(DisentangledDiTTransformer2DModel.PRESETS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for a case; 3 rounds at least")
    parser.add_argument("--threads", type=int, default=1, help="on the CPU")
    folder = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, help="results/disentangled_dit_sampling.json, or ..._network.json")
    words = parser.parse_args()
    words.output = words.output or folder / f"disentangled_dit_{'network' if words.network else 'sampling'}.json"
    load_before = os.getloadavg()
    results, parameters = run(words)
    device = torch.cuda.get_device_name() if words.device == "cuda" else f"CPU ({platform.machine()})"
    content = {
        "results": results,
        "parameters": parameters,
        "sizes": {"preset": words.preset, "patch": PATCH, "channels": CHANNELS, "classes": CLASSES}
        | {"context_tokens": 1, "guidance": GUIDANCE, "scheduler": "DDIM", "dtype": words.dtype},
        "compiled": words.compile,
        "device": device,
        "threads": words.threads,
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "versions": installed_versions("torch", "diffusers", "hf-ext"),
    }
    words.output.parent.mkdir(exist_ok=True)
    words.output.write_text(json.dumps(content, indent=2) + "\n")
    table = markdown(results, parameters)
    words.output.with_suffix(".md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
