"""Forward time and memory against length: MRConv beside S4D, attention and Mamba 2 of equal width.

    OMP_NUM_THREADS=1 python examples/benchmarks/mrconv_inference.py

Two groups, each compared with merged MRConv in the same process. Layers mix over time only: merged MRConv (one cached
spectrum), MRConv with branches, whose merged kernel is kept from the first call on, and the bare irfft(rfft(u) K).
Blocks have their projections: MRConv block, S4D (which makes its kernel in each call, as published), attention by
scaled_dot_product_attention, the Mamba 2 mixer of transformers (its plain PyTorch path where mamba-ssm is not
installed). All causal, kernels as long as the input, gradients off. Within a round every entry runs once, in an order
that turns from round to round; a ratio is the median over the rounds. Time is processor time. What takes longer than a
quarter of a minute runs once, and not at greater lengths. Memory is the most that a call holds in tensors at once,
beyond weights and input; what libraries such as MKL take for themselves is not in it.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import Content, compare, markdown_table, run
from torch import nn
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from hf_ext.mrconv import MRConvConfig, MRConvLayer
from hf_ext.mrconv.modeling_layers_mrconv import MRConvBlock
from hf_ext.mrconv.ops_mrconv import fft_size

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mrconv"))

from peers import PeerConfig, S4DBlock

Entry = Callable[[], torch.Tensor]
GROUPS = {
    "layers": ["MRConv merged", "MRConv branches", "bare FFT"],
    "blocks": ["MRConv merged", "MRConv branches", "S4D", "SDPA attention", "Mamba 2"],
}
# State and chunk of Mamba 2 are smaller than its defaults (128, 256): its plain path would need 17 GB at 64k.
MAMBA_STATE, MAMBA_CHUNK, HEAD = 64, 64, 64
S4D_STATE = 64
# Seconds after which an entry is not measured again.
PATIENCE = 15.0


class Attention(nn.Module):
    """x + W SDPA(Q, K, V) of LN(x), causal."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = self.query_key_value(self.norm(hidden)).unflatten(-1, (3, -1, HEAD))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return hidden + self.projection(mixed.transpose(1, 2).flatten(2))


class Mamba2(nn.Module):
    """x + mixer(LN(x)) with the mixer of transformers."""

    def __init__(self, width: int):
        super().__init__()
        config = Mamba2Config(
            hidden_size=width,
            num_heads=2 * width // HEAD,
            head_dim=HEAD,
            state_size=MAMBA_STATE,
            chunk_size=MAMBA_CHUNK,
            n_groups=1,
        )
        self.norm = nn.LayerNorm(width)
        self.mixer = Mamba2Mixer(config, layer_idx=0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.mixer(self.norm(hidden))


def mrconv_config(width: int, length: int) -> MRConvConfig:
    return MRConvConfig(hidden_size=width, kernel_size=16, max_position_embeddings=length, norm="layer")


def make_layers(width: int, length: int, u: torch.Tensor) -> dict[str, Entry]:
    """Mixers over time, of u [batch, width, length]."""
    place = {"device": u.device, "dtype": u.dtype}
    branches = MRConvLayer(mrconv_config(width, length)).to(**place).eval()
    merged = MRConvLayer(mrconv_config(width, length)).to(**place).eval()
    merged.load_state_dict(branches.state_dict())
    merged.reparameterize()
    n = fft_size(2 * length - 1)
    spectrum = torch.fft.rfft(merged.merged_kernel, n=n)
    return {
        "MRConv merged": lambda: merged(u),
        "MRConv branches": lambda: branches(u),
        "bare FFT": lambda: torch.fft.irfft(torch.fft.rfft(u.float(), n=n) * spectrum, n=n)[..., :length],
    }


def make_blocks(width: int, length: int, hidden: torch.Tensor) -> dict[str, Entry]:
    """Blocks with projections and residual connection, of hidden [batch, length, width]."""
    branches = MRConvBlock(mrconv_config(width, length), 0)
    merged = MRConvBlock(mrconv_config(width, length), 0)
    merged.load_state_dict(branches.state_dict())
    merged.convolution.reparameterize()
    modules: dict[str, nn.Module] = {"MRConv merged": merged, "MRConv branches": branches}
    s4d, valid = S4DBlock(PeerConfig(hidden_size=width, state_size=S4D_STATE)), hidden.new_ones(1, 1, 1)
    modules |= {"S4D": s4d, "SDPA attention": Attention(width), "Mamba 2": Mamba2(width)}
    for module in modules.values():
        module.to(device=hidden.device, dtype=hidden.dtype).eval()
    s4d.kernel.float()
    entries: dict[str, Entry] = {name: lambda module=module: module(hidden) for name, module in modules.items()}
    return entries | {"S4D": lambda: s4d(hidden, valid)}


def peak_bytes(entry: Entry) -> int:
    """The most that a call holds at once, in tensors that it makes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        entry()
    held = peak = 0
    # In the order in which they happened: bytes taken, and with a minus given back.
    for event in watched.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def measure(words: argparse.Namespace) -> Iterator[Content]:
    """All lengths."""
    results: dict[str, dict[int, dict[str, dict[str, Any]]]] = {group: {} for group in GROUPS}
    dropped: set[tuple[str, str]] = set()
    for length in tqdm(words.lengths, "lengths"):
        hidden = torch.randn(1, length, words.width)
        for group, make in (("layers", make_layers), ("blocks", make_blocks)):
            given = hidden.transpose(1, 2).contiguous() if group == "layers" else hidden
            with torch.no_grad():
                entries = {
                    name: entry
                    for name, entry in make(words.width, length, given).items()
                    if (group, name) not in dropped
                }
                rows = results[group][length] = compare(entries, words.rounds, patience=PATIENCE)
                for name, entry in entries.items():
                    rows[name]["bytes"] = peak_bytes(entry)
            dropped |= {(group, name) for name, row in rows.items() if row["seconds"] > PATIENCE}
    sizes = {"width": words.width, "l_0": 16, "head": HEAD, "s4d_state": S4D_STATE}
    yield {"results": results, "sizes": sizes | {"mamba_state": MAMBA_STATE, "mamba_chunk": MAMBA_CHUNK}}


def markdown(content: Content) -> str:
    """A table for each group: milliseconds, in brackets the multiple of merged MRConv, and megabytes."""
    tables = []
    for group, lengths in content["results"].items():
        names = [name for name in GROUPS[group] if any(name in rows for rows in lengths.values())]
        lines = []
        for length, rows in lengths.items():
            cells = [
                f"{1000 * row['seconds']:.2f} ({row['ratio']:.2f}), {row['bytes'] / 1e6:.1f} MB"
                if (row := rows.get(name))
                else "not run"
                for name in names
            ]
            lines.append([str(length), *cells])
        tables.append(markdown_table([f"{group}, length", *names], lines))
    return "\n".join(tables)


if __name__ == "__main__":
    lengths = [2**power for power in range(10, 17)]
    run("mrconv_inference", __doc__, measure, markdown, width=64, lengths=lengths, rounds=9)
