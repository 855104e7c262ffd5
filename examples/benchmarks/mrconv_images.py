"""MRConvNeXt beside ConvNeXt of transformers: pictures a second, training steps and parameters of T, S and B.

    OMP_NUM_THREADS=1 python examples/benchmarks/mrconv_images.py

Random weights, float32, 224 x 224, one thread, processor time. Within a round every model runs once, in an order that
turns from round to round; a ratio is the median over the rounds, and those are what counts: times of a busy machine
move together. The published accuracies are those that the specification of the paper confirms; nothing here can check
them. examples/mrconv/README.md compares small models of both kinds that were trained.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from timing import Content, compare, markdown_table, run, training_step
from torch import nn
from transformers import ConvNextConfig, ConvNextForImageClassification

from hf_ext.mrconv import MRConvNextConfig, MRConvNextForImageClassification
from hf_ext.mrconv.configuration_mrconvnext import PRESETS

# Top-1 on ImageNet and images a second on an unnamed GPU with torch's FFT, as the poster of the paper draws them.
PUBLISHED = {
    "tiny": {"ConvNeXt": (82.1, 1306), "MRConvNeXt": (82.2, 820)},
    "small": {"ConvNeXt": (83.1, 903), "MRConvNeXt": (83.4, 500)},
    "base": {"ConvNeXt": (83.8, 461), "MRConvNeXt": (83.9, 330)},
}
PATIENCE = 60.0
MODELS = ("ConvNeXt", "MRConvNeXt merged", "MRConvNeXt with branches")


def make_models(preset: str, image_size: int) -> dict[str, nn.Module]:
    """Of equal widths and depths; both MRConvNeXt have the same weights."""
    sizes = {name: PRESETS[preset][name] for name in ("hidden_sizes", "depths")}
    torch.manual_seed(0)
    branches = MRConvNextForImageClassification(MRConvNextConfig(**sizes, image_size=image_size, num_labels=1000))
    merged = MRConvNextForImageClassification(MRConvNextConfig(**sizes, image_size=image_size, num_labels=1000))
    merged.load_state_dict(branches.state_dict())
    merged.reparameterize()
    peer = ConvNextForImageClassification(ConvNextConfig(**sizes, image_size=image_size, num_labels=1000))
    return {name: model.eval() for name, model in zip(MODELS, (peer, merged, branches), strict=True)}


def measure_preset(preset: str, words: argparse.Namespace) -> dict[str, Any]:
    """Rows of inference for each batch, of training, and parameters."""
    models = make_models(preset, words.image_size)
    result: dict[str, Any] = {"inference": {}}
    for batch in words.batches:
        pixels = torch.randn(batch, 3, words.image_size, words.image_size)
        with torch.no_grad():
            entries = {name: partial(model, pixel_values=pixels) for name, model in models.items()}
            result["inference"][batch] = compare(entries, words.rounds, patience=PATIENCE)
    trained = [name for name in MODELS if name != "MRConvNeXt merged"]
    result["parameters"] = {name: sum(value.numel() for value in models[name].parameters()) for name in trained}
    pixels, labels = torch.randn(2, 3, words.image_size, words.image_size), torch.tensor([0, 1])
    losses = {name: partial(models[name].train(), pixel_values=pixels, labels=labels) for name in trained}
    # The optimizer's step is the same for both.
    steps = {name: training_step(models[name], lambda loss=loss: loss().loss) for name, loss in losses.items()}
    result["training"] = compare(steps, words.rounds, patience=PATIENCE)
    return result


def markdown(content: Content) -> str:
    """Pictures a second, and in brackets the share of ConvNeXt's; the published numbers beside them."""
    results = content["results"]
    batches = list(next(iter(results.values()))["inference"])
    header = ["model", "parameters, M", *(f"images/s, batch {batch}" for batch in batches)]
    header += ["training step, ConvNeXt = 1", "published top-1, %", "published images/s"]
    lines = []
    for preset, result in results.items():
        for name in MODELS:
            rows = [result["inference"][batch][name] for batch in batches]
            cells = [
                f"{int(batch) / row['seconds']:.2f} ({1 / row['ratio']:.2f})"
                for batch, row in zip(batches, rows, strict=True)
            ]
            count, step = result["parameters"].get(name), result["training"].get(name)
            accuracy, speed = PUBLISHED[preset][name.split()[0]]
            told = ["", ""] if name == "MRConvNeXt with branches" else [f"{accuracy}", f"{speed:,}"]
            numbers = [f"{count / 1e6:.1f}" if count else "", *cells, f"{step['ratio']:.2f}" if step else "", *told]
            lines.append([f"{name}, {preset}", *numbers])
    return markdown_table(header, lines)


def measure(words: argparse.Namespace) -> Iterator[Content]:
    """All sizes of the models."""
    results = {preset: measure_preset(preset, words) for preset in words.presets}
    yield {"results": results, "sizes": {"image_size": words.image_size, "training_batch": 2}, "rounds": words.rounds}


if __name__ == "__main__":
    run("mrconv_images", __doc__, measure, markdown, presets=[*PRESETS], batches=[1, 8], image_size=224, rounds=5)
