"""Time of a SemanIR stage against k, beside the same stage with dense window attention and no dictionary.

    OMP_NUM_THREADS=1 python examples/benchmarks/semanir_stage.py

The stage of the paper's S model: 6 layers, 180 channels, 6 heads, window 32 (N = 1024), MLP of twice the width, every
second layer in shifted windows. Both stages have the same weights. The dense one calls scaled_dot_product_attention on
all windows with position bias and shift mask built beforehand and not counted; SemanIR's time has its dictionaries and
its position biases. "One dictionary" is SemanIR without shift, beside a dense stage without shift. Training is
forward, backward and a step of AdamW; there the dense stage computes its biases too, as it must, and attends by matrix
products and softmax or by scaled_dot_product_attention: whichever is faster. Within a round every entry runs once, in
an order that turns from round to round; a ratio is the median over the rounds.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timing import Content, compare, markdown_table, run

from hf_ext.semanir import SemanIRConfig, SemanIRModel
from hf_ext.semanir.modeling_semanir import SemanIRAttention, SemanIRStage
from hf_ext.semanir.ops_semanir import (
    build_dictionary,
    key_regions,
    merge_windows,
    partition_windows,
    relative_offsets,
)

WINDOW, WIDTH, HEADS, LAYERS = 32, 180, 6, 6
Entry = Callable[[], Any]


def make_stage(shift_policy: str) -> SemanIRStage:
    torch.manual_seed(0)
    config = SemanIRConfig(
        embed_dim=WIDTH, depths=[LAYERS], num_heads=[HEADS], window_size=WINDOW, top_k=512, shift_policy=shift_policy
    )
    return SemanIRModel(config).body.stages[0]


class DenseStage:
    """The layers of a stage, attending to whole windows."""

    def __init__(self, stage: SemanIRStage, side: int):
        self.stage = stage
        self.size = (side, side)
        self.shifts = [(WINDOW // 2,) * 2 if shifted and side > WINDOW else (0, 0) for shifted in stage.shifted]
        self.offsets = relative_offsets((WINDOW, WINDOW), WINDOW)
        with torch.no_grad():
            attentions = [layer.attention for layer in stage.layers]
            self.biases = [self.bias(*pair) for pair in zip(attentions, self.shifts, strict=True)]

    def bias(self, attention: SemanIRAttention, shift: tuple[int, int]) -> torch.Tensor:
        """Position bias with the mask of shifted windows: [W or 1, heads, N, N]."""
        bias = attention.position_bias(torch.empty(0))[:, self.offsets][None]
        if not any(shift):
            return bias
        regions = key_regions(self.size, (WINDOW, WINDOW), shift)
        return bias.masked_fill((regions[:, :, None] != regions[:, None])[:, None], -torch.inf)

    def attend(
        self, attention: SemanIRAttention, windows: torch.Tensor, bias: torch.Tensor, fused: bool
    ) -> torch.Tensor:
        heads = attention.query_key_value(windows).unflatten(-1, (3, HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        temperature = attention.log_temperature.exp()[:, None, None]
        query = query * (query.square().sum(-1, keepdim=True).clamp_min(1e-24).rsqrt() * temperature)
        key = key * key.square().sum(-1, keepdim=True).clamp_min(1e-24).rsqrt()
        if fused:
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)
        else:
            attended = (query @ key.mT).add_(bias).softmax(-1) @ value
        return attention.projection(attended.transpose(1, 2).flatten(2))

    def __call__(self, features: torch.Tensor, fused: bool = True) -> torch.Tensor:
        tokens = features.permute(0, 2, 3, 1)
        window = (WINDOW, WINDOW)
        for layer, shift, built in zip(self.stage.layers, self.shifts, self.biases, strict=True):
            bias = self.bias(layer.attention, shift) if torch.is_grad_enabled() else built
            windows = partition_windows(tokens, window, shift)
            windows = windows + layer.attention_norm(self.attend(layer.attention, windows, bias, fused))
            windows = windows + layer.mlp_norm(layer.mlp(windows))
            tokens = merge_windows(windows, self.size, window, shift)
        return self.stage.convolution(tokens.permute(0, 3, 1, 2)) + features


def training_step(run: Callable[..., torch.Tensor], stage: SemanIRStage, features: torch.Tensor) -> Entry:
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        run(features.clone().requires_grad_()).square().mean().backward()
        optimizer.step()

    return step


def make_groups(words: argparse.Namespace) -> dict[str, dict[str, Entry]]:
    """Entries that are compared with the first of their group."""
    features = torch.randn(1, WIDTH, words.side, words.side)
    features = features.contiguous(memory_format=torch.channels_last)
    groups: dict[str, dict[str, Entry]] = {}
    for name, policy in (("two dictionaries", "layer"), ("one dictionary", "none")):
        stage = make_stage(policy).eval()
        dense = DenseStage(stage, words.side)
        entries = {"dense": torch.no_grad()(partial(dense, features))}
        entries |= {f"k = {k}": torch.no_grad()(partial(stage, features, k)) for k in (64, 128, 256, 512)}
        groups[name] = entries
        with torch.no_grad():
            # The same operation: what is compared must give the same numbers.
            torch.testing.assert_close(stage(features, WINDOW**2), dense(features), atol=1e-4, rtol=0)
    stage = make_stage("layer")
    dense = DenseStage(stage, words.side)
    groups["training step"] = {
        "dense": training_step(lambda features: dense(features, fused=False), stage, features),
        "dense, SDPA": training_step(dense, stage, features),
    }
    for k in (64, 512):
        groups["training step"][f"k = {k}"] = training_step(lambda features, k=k: stage(features, k), stage, features)
    return groups


def dictionary_bytes(side: int) -> float:
    """Bytes of one partition's dictionary for each token."""
    bits = build_dictionary(torch.randn(1, side, side, WIDTH), WINDOW, True, 512).bits
    assert bits is not None
    return bits.numel() / side**2


def markdown(content: Content) -> str:
    """A row for each entry: milliseconds, and the multiple of the dense stage's time."""
    rows = [
        [group, name, f"{1000 * row['seconds']:.0f}", f"{row['ratio']:.2f}"]
        for group, entries in content["results"].items()
        for name, row in entries.items()
    ]
    return markdown_table(["stage", "entry", "ms", "times dense"], rows)


def measure(words: argparse.Namespace) -> Iterator[Content]:
    """All groups."""
    results = {}
    for name, entries in make_groups(words).items():
        dense = sum(entry.startswith("dense") for entry in entries)
        results[name] = compare(entries, words.rounds, dense, clock=time.perf_counter)
    sizes = {"side": words.side, "window": WINDOW, "width": WIDTH, "heads": HEADS, "layers": LAYERS}
    yield {"results": results, "dictionary_bytes_per_token": dictionary_bytes(words.side), "sizes": sizes}


if __name__ == "__main__":
    run("semanir_stage", __doc__, measure, markdown, side=64, rounds=7)
