"""Parameters and floating-point operations of SemanIR's recipes and released models, and the memory of attention.

    python examples/benchmarks/semanir_sizes.py

Nothing is computed: the models lie on the meta device, and torch's FlopCounterMode counts a restoration of 256 x 256
output pixels, two operations a multiplication with addition. It counts attention as the dense products that masks
need ("masked"); with the k keys of each token alone it is k/N of that ("of k keys"), which the fused kernels do. Keys
are chosen by the dictionaries. The second table is what one layer's attention holds beside its inputs, by formula: all
logits (the mask added to the bias), the gathered keys and values, or the dictionary's bits alone (fused kernels).
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from timing import Content, markdown_table, run
from torch.utils.flop_counter import FlopCounterMode

from hf_ext.hub.released import list_released
from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration
from hf_ext.semanir.configuration_semanir import PRESETS
from hf_ext.training.arguments import read_yaml

RECIPES = Path(__file__).resolve().parents[1] / "semanir"
SIDE = 256
# Of the second table: the paper's width and heads, and an image of 1024 x 1024 pixels.
WIDTH, HEADS, TOKENS_OF_IMAGE = 180, 6, 1024**2
WINDOWS = {8: (16, 32), 16: (64, 128), 32: (64, 256, 512)}


def configurations() -> dict[str, SemanIRConfig]:
    """Every recipe that builds a model, and every released restorer."""
    found = {}
    for path in sorted(RECIPES.glob("*.yaml")):
        model = read_yaml(path).get("model")
        if model:
            preset = PRESETS[model.pop("preset")] if "preset" in model else {}
            found[path.stem] = SemanIRConfig(**{**preset, **model})
    for model in list_released():
        # A pipeline and a merge have none: the one is no restorer, the other has the network of its base.
        file = model.folder / "config.json"
        config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if config.get("model_type") == "semanir" and not (model.folder / "emr.json").exists():
            found[f"released: {model.name}"] = SemanIRConfig(**config)
    return found


def count(config: SemanIRConfig) -> dict[str, Any]:
    """Parameters, and operations in units of 10^9 for one image."""
    with torch.device("meta"):
        model = SemanIRForImageRestoration(config).eval()
        pixels = torch.empty(1, config.num_channels, SIDE // config.scale, SIDE // config.scale)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(pixel_values=pixels)
    modules = {name: Counter(counts) for name, counts in counter.get_flop_counts().items()}
    products = torch.ops.aten.bmm
    masked = sum(counts[products] for name, counts in modules.items() if name.endswith(".attention"))
    total, all_products = modules["Global"].total(), modules["Global"][products]
    window, keys = config.window_size**2, min(config.top_k, config.window_size**2)
    attention = masked * keys / window
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "window": config.window_size,
        "k": keys,
        "layers_and_convolutions": (total - all_products) / 1e9,
        "dictionaries": (all_products - masked) / 1e9,
        "attention_masked": masked / 1e9,
        "attention_of_k_keys": attention / 1e9,
        "total_masked": total / 1e9,
        "total_of_k_keys": (total - masked + attention) / 1e9,
    }


def held(window: int, keys: int) -> dict[str, float]:
    """Megabytes in 16 bits that one layer holds for an image of 1024 x 1024 tokens."""
    tokens = window**2
    return {
        "logits": 2 * TOKENS_OF_IMAGE * tokens * HEADS / 1e6,
        "gathered": 2 * 2 * TOKENS_OF_IMAGE * keys * WIDTH / 1e6,
        "bits": TOKENS_OF_IMAGE * tokens / 8 / 1e6,
    }


def markdown(content: Content) -> str:
    """Both tables in Markdown."""
    rows = [
        [
            name,
            f"{row['parameters'] / 1e6:.2f}",
            f"{row['window']}, {row['k']}",
            *(f"{row[key]:.1f}" for key in ("layers_and_convolutions", "dictionaries")),
            *(f"{row[f'{kind}_masked']:.1f} / {row[f'{kind}_of_k_keys']:.1f}" for kind in ("attention", "total")),
        ]
        for name, row in content["models"].items()
    ]
    header = ["recipe", "M parameters", "window, k", "layers, convolutions", "dictionaries"]
    header += ["attention masked / of k keys", "total masked / of k keys"]
    text = f"GFLOPs for {SIDE} x {SIDE} output pixels.\n\n{markdown_table(header, rows)}\n"
    text += f"Megabytes of one layer's attention in 16 bits: {WIDTH} channels, {HEADS} heads, 1024 x 1024 tokens; by "
    text += "formula, not measured. What runs works through windows in parts, so that it never holds all of it.\n\n"
    rows = [
        [str(row["window"]), str(row["k"]), *(f"{row[key]:,.0f}" for key in ("logits", "gathered", "bits"))]
        for row in content["memory_of_a_layer"]
    ]
    header = ["window", "k", "mask on all logits", "gathered keys and values", "fused: bits alone"]
    return text + markdown_table(header, rows)


def measure(words: argparse.Namespace) -> Iterator[Content]:
    """All models and windows."""
    memory = [
        {"window": window, "k": keys, **held(window, keys)} for window, several in WINDOWS.items() for keys in several
    ]
    models = {name: count(config) for name, config in configurations().items()}
    yield {"side": SIDE, "models": models, "memory_of_a_layer": memory}


if __name__ == "__main__":
    run("semanir_sizes", __doc__, measure, markdown)
