# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Textbook Disentangled DiT: the prediction of a network as a function of its weights, one equation after the other.

For tests: slow, never shipped. It takes what [`DisentangledDiTTransformer2DModel`] takes and computes each block's
modulation from SiLU(e) alone, queries, keys and values one by one, and attention as a softmax.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]


def predict(
    weights: Weights,
    config: Mapping[str, Any],
    hidden_states: Tensor,
    timestep: Tensor,
    class_labels: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    controls: Mapping[str, Tensor] | None = None,
    control_mask: Tensor | None = None,
    keep_indices: Tensor | None = None,
    in_adaln: bool = False,
) -> Tensor:
    """Output of a network of these parameters and configuration, sample by sample; the rest is as in `forward`."""
    samples = []
    for row, latents in enumerate(hidden_states):
        label = None if class_labels is None else int(class_labels[row])
        chosen = {} if controls is None else {name: values[row] for name, values in controls.items()}
        if control_mask is not None and not control_mask[row]:
            chosen = {}
        e = adaln_vector(weights, config, timestep[row], chosen)
        if in_adaln:
            e, label = e + weights["class_embedder.weight"][label], config["num_classes"]
        if encoder_hidden_states is not None:
            context = linear(weights, "context_embedder", encoder_hidden_states[row])
        else:
            context = weights["class_embedder.weight"][label][None]
        keep = None if keep_indices is None else set(keep_indices[row].tolist())
        samples.append(denoise(weights, config, latents, context, F.silu(e), keep))
    return torch.stack(samples)


def adaln_vector(weights: Weights, config: Mapping[str, Any], timestep: Tensor, controls: Weights) -> Tensor:
    """e = t_emb(t) + sum_c gamma_c(t) E_c(c)."""
    e = two_layers(weights, "timestep_embedder", sinusoid(timestep))
    for name, values in controls.items():
        features = torch.cat([sinusoid(value) for value in values])
        weight = gamma(config, float(timestep), config["control_alpha"][name])
        e = e + weight * two_layers(weights, f"control_embedders.{name}", features)
    return e


def gamma(config: Mapping[str, Any], timestep: float, alpha: float) -> float:
    """Weight of a control: 1 at t = 0, 0 at t = T."""
    return math.pow((1 + math.cos(math.pi * (timestep / config["num_train_timesteps"]))) / 2, alpha)


def sinusoid(value: Tensor, channels: int = 256) -> Tensor:
    """Cosines, then sines, of a scalar at frequencies 10000^(-k/half), in float32 as diffusers has them."""
    half = channels // 2
    frequencies = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half)
    angles = value.float() * frequencies
    return torch.cat([angles.cos(), angles.sin()])


def positions(rows: int, columns: int, base: tuple[int, int], dim: int) -> Tensor:
    """Sines and cosines of y, then of x, for patch (i, j) at y = i base_rows / rows, x = j base_columns / columns."""
    quarter = dim // 4
    table = []
    for i in range(rows):
        for j in range(columns):
            point = []
            for coordinate in (i * base[0] / rows, j * base[1] / columns):
                angles = [coordinate / 10000 ** (k / quarter) for k in range(quarter)]
                point += [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
            table.append(point)
    return torch.tensor(table, dtype=torch.float32)


def denoise(
    weights: Weights, config: Mapping[str, Any], latents: Tensor, context: Tensor, activated: Tensor, keep: set | None
) -> Tensor:
    """Latents [C, height, width] through the blocks, for SiLU(e) of [D]."""
    patch, heads, layers = config["patch_size"], config["num_attention_heads"], config["num_layers"]
    height, width = latents.shape[1:]
    # Columns of unfold are patches, channel by channel.
    x = linear(weights, "patch_embed", F.unfold(latents[None], patch, stride=patch)[0].T)
    position = positions(height // patch, width // patch, config["pos_embed_base_size"], x.shape[1]).to(x)
    x = x + position
    if keep is not None:
        x = torch.stack([token for number, token in enumerate(x) if number in keep])
    for index in range(layers):
        if keep is not None and index == layers - max(1, layers // 7):
            masked = weights["mask_token"] + position
            seen = iter(x)
            full = torch.stack([next(seen) if number in keep else token for number, token in enumerate(masked)])
            numbers = linear(weights, "side_modulation", activated).view(-1, x.shape[1])
            filled, _ = block(weights, "side_interpolator", full, context, numbers, heads)
            x = torch.stack([full[number] if number in keep else new for number, new in enumerate(filled)])
        numbers = modulation(weights, config, index, activated)
        x, context = block(weights, f"transformer_blocks.{index}", x, context, numbers, heads)
    shift, scale = modulation(weights, config, layers, activated)
    return F.fold(linear(weights, "proj_out", norm(x, shift, scale)).T[None], (height, width), patch, stride=patch)[0]


def modulation(weights: Weights, config: Mapping[str, Any], index: int, activated: Tensor) -> Tensor:
    """Numbers [count, D] of a block, or of the final layer: its own, or the first of those of all plus a table."""
    full, last = (6, 6) if config["shared_stream"] else (12, 8)
    counts = [full] * (config["num_layers"] - 1) + [last, 2]
    if config["modulation"] == "per_block":
        return linear(weights, f"modulations.{index}", activated).view(counts[index], -1)
    table = weights["modulation_table"].view(sum(counts), -1).split(counts)[index]
    return linear(weights, "modulations.0", activated).view(-1, table.shape[1])[: counts[index]] + table


def block(weights: Weights, name: str, x: Tensor, c: Tensor, numbers: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """
    One block on image tokens x [N, D] and context tokens c [L, D]: with 8 numbers c is only attended to, with 6 it is
    a part of x.
    """
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate, *rest = numbers
    image = len(x)
    x = x if rest else torch.cat([x, c])
    streams = [("to_q", "to_k", "to_v", "norm_q", "norm_k", norm(x, shift, scale))]
    if rest:
        v = norm(c, *rest[:2])
        streams += [("add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k", v)]
    queries, keys, values = [], [], []
    for to_query, to_key, to_value, query_norm, key_norm, tokens in streams:
        if f"{name}.attn.{to_query}.weight" in weights:
            queries.append(rms_norm(weights, f"{name}.attn.{query_norm}", tokens, f"{name}.attn.{to_query}", heads))
        keys.append(rms_norm(weights, f"{name}.attn.{key_norm}", tokens, f"{name}.attn.{to_key}", heads))
        values.append(linear(weights, f"{name}.attn.{to_value}", tokens).unflatten(1, (heads, -1)))
    query, key, value = (torch.cat(parts).transpose(0, 1) for parts in (queries, keys, values))
    probabilities = torch.softmax(query @ key.transpose(1, 2) / math.sqrt(query.shape[-1]), dim=-1)
    attended = (probabilities @ value).transpose(0, 1).flatten(1)
    x = x + gate * linear(weights, f"{name}.attn.to_out.0", attended[: x.shape[0]])
    x = x + mlp_gate * mlp(weights, f"{name}.ff", norm(x, mlp_shift, mlp_scale))
    if len(rest) > 2:
        gate, mlp_shift, mlp_scale, mlp_gate = rest[2:]
        c = c + gate * linear(weights, f"{name}.attn.to_add_out", attended[x.shape[0] :])
        c = c + mlp_gate * mlp(weights, f"{name}.ff_context", norm(c, mlp_shift, mlp_scale))
    return (x, c) if rest else (x[:image], x[image:])


def norm(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """LN(x) (1 + scale) + shift."""
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(dim=-1, keepdim=True) + 1e-6) * (1 + scale) + shift


def rms_norm(weights: Weights, name: str, tokens: Tensor, projection: str, heads: int) -> Tensor:
    """RMSNorm, head by head, of projected tokens: [tokens, heads, D / heads]."""
    x = linear(weights, projection, tokens).unflatten(1, (heads, -1))
    return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6) * weights[f"{name}.weight"]


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """x W^T + b."""
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def two_layers(weights: Weights, name: str, features: Tensor) -> Tensor:
    """Linear, SiLU, linear."""
    features = features.to(weights[f"{name}.linear_1.weight"].dtype)
    return linear(weights, f"{name}.linear_2", F.silu(linear(weights, f"{name}.linear_1", features)))


def mlp(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Linear, GELU in its tanh form, linear."""
    return linear(weights, f"{name}.net.2", F.gelu(linear(weights, f"{name}.net.0.proj", x), approximate="tanh"))
