# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""The network of Disentangled DiT (Berrada Ifriqi et al., NeurIPS 2024, arXiv 2411.03177).

A two-stream diffusion transformer in which a class or a text acts through attention only, and the adaptive layer
norms (adaLN) see only the timestep and the control conditions c (sizes, crop, flip):
    e = t_emb(t) + sum_c gamma_c(t) E_c(c)                     (eq. 1, the weights gamma of section 2)
One self-contained file: diffusers downloads it alone. Whatever `forward` uses of this file's own is an attribute of a
class, because a second version of the file, loaded as remote code, replaces the names of this module.
Shapes: batch B, image tokens N, context tokens L, width D, heads H; latents [B, channels, height, width].
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.attention import AttentionMixin, AttentionModuleMixin, FeedForward
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.cache_utils import CacheMixin
from diffusers.models.embeddings import TimestepEmbedding, Timesteps
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn


class DisentangledDiTRMSNorm(nn.RMSNorm):
    """RMSNorm whose weight follows its input: under autocast the two would differ, and no fused kernel run."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class DisentangledDiTAttnProcessor:
    """Joint attention over image and context tokens, computed by the attention backend that diffusers has active."""

    _attention_backend = None

    def __call__(self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None) -> Any:
        query, key, value = attn.project(hidden_states, attn.to_q, attn.to_k, attn.to_v)
        query, key = attn.norm_q(query), attn.norm_k(key)
        kind: dict[str, Any] = {"backend": self._attention_backend}
        if encoder_hidden_states is None:
            return attn.to_out[0](dispatch_attention_fn(query, key, value, **kind).flatten(2))
        added_key, added_value = attn.project(encoder_hidden_states, attn.add_k_proj, attn.add_v_proj)
        key, value = torch.cat([key, attn.norm_added_k(added_key)], dim=1), torch.cat([value, added_value], dim=1)
        if attn.add_q_proj is not None and attn.norm_added_q is not None:
            (added_query,) = attn.project(encoder_hidden_states, attn.add_q_proj)
            query = torch.cat([query, attn.norm_added_q(added_query)], dim=1)
        attended = dispatch_attention_fn(query, key, value, **kind).flatten(2)
        if attn.to_add_out is None:
            # No context tokens, and not None: caches keep tensors.
            return attn.to_out[0](attended), attended[:, :0]
        # A linear layer adds its bias within the product if its input is contiguous, afterwards if it is not.
        image, context = (part.contiguous() for part in attended.tensor_split(hidden_states.shape[1:2], dim=1))
        return attn.to_out[0](image), attn.to_add_out(context)


class DisentangledDiTAttention(nn.Module, AttentionModuleMixin):
    """Projections of the streams, with RMSNorm of queries and keys in each head (equation of the block, below)."""

    # Any: diffusers' types know its own processors only.
    processor: Any
    _default_processor_cls: Any = DisentangledDiTAttnProcessor
    _available_processors = [DisentangledDiTAttnProcessor]
    _norm_class = DisentangledDiTRMSNorm
    _supports_qkv_fusion = False

    def __init__(self, dim: int, heads: int, context_pre_only: bool, shared_stream: bool = False):
        super().__init__()
        self.head_dim = head_dim = dim // heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        # The context of the last block is only attended to: it asks nothing.
        asks = not (shared_stream or context_pre_only)
        self.add_q_proj = nn.Linear(dim, dim) if asks else None
        self.add_k_proj, self.add_v_proj = (None if shared_stream else nn.Linear(dim, dim) for _ in range(2))
        self.norm_q, self.norm_k = (self._norm_class(head_dim, eps=1e-6) for _ in range(2))
        self.norm_added_k = None if shared_stream else self._norm_class(head_dim, eps=1e-6)
        self.norm_added_q = self._norm_class(head_dim, eps=1e-6) if asks else None
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])
        self.to_add_out = nn.Linear(dim, dim) if asks else None
        self.set_processor(self._default_processor_cls())

    def project(self, hidden_states: Tensor, *layers: nn.Module) -> list[Tensor]:
        """Each layer's output for the tokens, in heads: [B, tokens, H, D / H]."""
        return [layer(hidden_states).unflatten(-1, (-1, self.head_dim)) for layer in layers]

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None) -> Any:
        return self.processor(self, hidden_states, encoder_hidden_states)


class DisentangledDiTBlock(nn.Module):
    """
    One block, for each stream z with weights of its own (image, context):
        u_z = LN(x_z) scale1_z + shift1_z
        x_z += gate1_z attention(u)_z
        x_z += gate2_z MLP_z(LN(x_z) scale2_z + shift2_z)
    With `shared_stream` image and context are one stream with one set of weights and of modulation.
    """

    _attention_class = DisentangledDiTAttention
    _feed_forward_class = FeedForward

    def __init__(self, dim: int, heads: int, mlp_ratio: float, context_pre_only: bool, shared_stream: bool = False):
        super().__init__()
        self.shared_stream = shared_stream
        self.attn = self._attention_class(dim, heads, context_pre_only, shared_stream)
        kind: dict[str, Any] = {"inner_dim": int(dim * mlp_ratio), "activation_fn": "gelu-approximate"}
        self.ff = self._feed_forward_class(dim, **kind)
        alone = context_pre_only or shared_stream
        self.ff_context = None if alone else self._feed_forward_class(dim, **kind)

    @staticmethod
    def normalize(hidden_states: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """LN(x) scale + shift, for shift and scale of [B or 1, 1, D]."""
        width = hidden_states.shape[-1:]
        if scale.shape[0] == 1:
            # What the whole batch shares is the affine map of the norm itself: one operation.
            return F.layer_norm(hidden_states, width, scale.flatten(), shift.flatten(), 1e-6)
        return torch.addcmul(shift, F.layer_norm(hidden_states, width, eps=1e-6), scale)

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, modulation: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Context and image tokens after the block; `modulation` is [B or 1, 12 D] (last block 8 D, shared 6 D)."""
        numbers = modulation.unflatten(1, (-1, 1, hidden_states.shape[-1])).unbind(1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate, *rest = numbers
        if self.shared_stream:
            tokens = encoder_hidden_states.shape[1], hidden_states.shape[1]
            hidden_states = torch.cat([encoder_hidden_states, hidden_states], dim=1)
            attended = self.attn(self.normalize(hidden_states, shift, scale))
        else:
            context = self.normalize(encoder_hidden_states, *rest[:2])
            attended, attended_context = self.attn(self.normalize(hidden_states, shift, scale), context)
        hidden_states = torch.addcmul(hidden_states, gate, attended)
        fed = self.ff(self.normalize(hidden_states, mlp_shift, mlp_scale))
        hidden_states = torch.addcmul(hidden_states, mlp_gate, fed)
        if self.shared_stream:
            encoder_hidden_states, hidden_states = hidden_states.split(tokens, dim=1)
        if self.ff_context is not None:
            gate, mlp_shift, mlp_scale, mlp_gate = rest[2:]
            encoder_hidden_states = torch.addcmul(encoder_hidden_states, gate, attended_context)
            fed = self.ff_context(self.normalize(encoder_hidden_states, mlp_shift, mlp_scale))
            encoder_hidden_states = torch.addcmul(encoder_hidden_states, mlp_gate, fed)
        return encoder_hidden_states, hidden_states


# Private: the table in which diffusers' block caches look up what a block returns. They do without where it moves.
with contextlib.suppress(ImportError):
    from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry

    TransformerBlockRegistry.register(
        DisentangledDiTBlock,
        TransformerBlockMetadata(return_hidden_states_index=1, return_encoder_hidden_states_index=0),
    )


class DisentangledDiTTransformer2DModel(ModelMixin, AttentionMixin, ConfigMixin, PeftAdapterMixin, CacheMixin):
    """
    Diffusion transformer whose class or text acts through attention, and whose controls fade in with the timestep.

    Of diffusers' caches, all approximations, FirstBlock, Mag, TaylorSeer and PyramidAttentionBroadcast were tried.

    Args:
        sample_size (`int` or `list[int]`, defaults to 32): Height and width of the latents (or pixels) that the
            model is meant for; any size divisible by `patch_size` can be given.
        patch_size (`int`, defaults to 2): Side of a patch, in latent pixels.
        in_channels (`int`, defaults to 4): Channels of the latents, and of the output.
        num_layers (`int`, defaults to 28): Number of blocks.
        num_attention_heads (`int`, defaults to 16): Heads of a block.
        attention_head_dim (`int`, defaults to 72): Width of a head; the model's width D is heads times this.
        mlp_ratio (`float`, defaults to 4.0): Hidden width of the MLPs over D.
        num_classes (`int`, *optional*, defaults to 1000): Number of classes; the label `num_classes` is the null
            class. Exactly one of this and `joint_attention_dim`.
        joint_attention_dim (`int`, *optional*): Width of the text encoder's tokens, for a text model.
        shared_stream (`bool`, defaults to `False`): Image and context share the blocks' weights and modulation.
        modulation (`str`, defaults to `"per_block"`): Or `"shared"`: one layer computes the modulation of all blocks,
            and each adds a table of its own (adaLN-single of PixArt).
        control_alpha (`dict[str, float]`, *optional*): The controls that the model has, of `CONTROL_SIZES`, and the
            exponent alpha of each one's weight ((1 + cos(pi t/T)) / 2)^alpha; 0 is a constant weight. Not given: all
            five, 8 for the two sizes of images and 0 for the others. `{}`: none.
        pos_embed_base_size (`int` or `list[int]`, *optional*): Grid of patches of the pre-training, whose
            coordinates other grids resample; `sample_size // patch_size` if not given. It is saved.
        num_train_timesteps (`int`, defaults to 1000): T, the timestep of pure noise.
        condition_dropout (`float`, defaults to 0.1): Share of training samples without class, text and controls.
        control_dropout (`float`, defaults to 0.1): Share of the others without controls. Guidance needs both above 0.
    """

    # Numbers of each control: (height, width), (top, left), (height, width), 0 or 1, log(width / height).
    CONTROL_SIZES = {"original_size": 2, "crop": 2, "target_size": 2, "flip": 1, "aspect_ratio": 1}
    CONTROL_ALPHA = {"original_size": 8.0, "crop": 0.0, "target_size": 8.0, "flip": 0.0, "aspect_ratio": 0.0}
    PRESETS = {
        "tiny": {"num_layers": 4, "num_attention_heads": 4, "attention_head_dim": 16, "patch_size": 2},
        "S": {"num_layers": 12, "num_attention_heads": 6, "attention_head_dim": 64, "patch_size": 2},
        "B": {"num_layers": 12, "num_attention_heads": 12, "attention_head_dim": 64, "patch_size": 2},
        "L": {"num_layers": 24, "num_attention_heads": 16, "attention_head_dim": 64, "patch_size": 2},
        "XL": {"num_layers": 28, "num_attention_heads": 16, "attention_head_dim": 72, "patch_size": 2},
    }
    _COUNTS = ("patch_size", "in_channels", "num_layers", "num_attention_heads", "attention_head_dim",
               "num_train_timesteps")  # fmt: skip
    # No network has MOST weights or positions; a block counts as LEAST, since each costs a millisecond to build.
    _REAL: Any = Real
    MOST, LEAST = 10**10, 10**7
    # Features of a scalar; grids whose positions are kept.
    SINUSOIDS = 256
    GRIDS = 32

    # Any: of these diffusers' types know a dictionary without attributes, two names, and None.
    config: Any
    config_name: Any
    _no_split_modules: Any = ["DisentangledDiTBlock"]
    _skip_layerwise_casting_patterns: Any = ["patch_embed", "norm", "modulation"]
    _repeated_blocks = ["DisentangledDiTBlock"]
    _supports_gradient_checkpointing = True
    _block_class = DisentangledDiTBlock
    # The pipeline saves it beside the weights. Read now: a later version of this file would take its place.
    _CODE = Path(__file__).read_text(encoding="utf-8")

    @register_to_config
    def __init__(
        self,
        sample_size: int | list[int] = 32,
        patch_size: int = 2,
        in_channels: int = 4,
        num_layers: int = 28,
        num_attention_heads: int = 16,
        attention_head_dim: int = 72,
        mlp_ratio: float = 4.0,
        num_classes: int | None = 1000,
        joint_attention_dim: int | None = None,
        control_alpha: dict[str, float] | None = None,
        pos_embed_base_size: int | list[int] | None = None,
        num_train_timesteps: int = 1000,
        condition_dropout: float = 0.1,
        control_dropout: float = 0.1,
        shared_stream: bool = False,
        modulation: str = "per_block",
    ):
        super().__init__()
        # NumPy's numbers could not be saved.
        self.register_to_config(**{name: x.tolist() for name, x in self.config.items() if hasattr(x, "tolist")})
        self._check_config()
        self.grid = [side // self.config.patch_size for side in self._pair(self.config.sample_size)]
        base = self._pair(self.config.pos_embed_base_size or self.grid)
        control_alpha = dict(self.CONTROL_ALPHA if self.config.control_alpha is None else self.config.control_alpha)
        # What was derived is saved: a later size keeps the grid of the pre-training, and a later release the weights.
        self.register_to_config(pos_embed_base_size=base, control_alpha=control_alpha)
        self.inner_dim = self.config.num_attention_heads * self.config.attention_head_dim
        self.gradient_checkpointing = False
        self.register_buffer("positions", self.position_embedding(self.grid[0], self.grid[1]), persistent=False)
        self._other_positions: dict[tuple[int, int, torch.device], Tensor] = {}
        self._make_embedders(self.inner_dim)
        self._make_blocks(self.inner_dim)
        self._initialize()

    def _make_embedders(self, dim: int) -> None:
        config = self.config
        self.patch_embed = nn.Linear(config.in_channels * config.patch_size**2, dim)
        self.time_proj = Timesteps(self.SINUSOIDS, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.timestep_embedder = TimestepEmbedding(self.SINUSOIDS, dim)
        sizes = {name: size for name, size in self.CONTROL_SIZES.items() if name in config.control_alpha}
        embedders = {name: TimestepEmbedding(self.SINUSOIDS * size, dim) for name, size in sizes.items()}
        self.control_embedders = nn.ModuleDict(embedders)
        if config.num_classes is None:
            self.context_embedder = nn.Linear(config.joint_attention_dim, dim)
            return
        self.class_embedder = nn.Embedding(config.num_classes + 1, dim)

    def _make_blocks(self, dim: int) -> None:
        config = self.config
        last = config.num_layers - 1
        kind = (dim, config.num_attention_heads, config.mlp_ratio)
        blocks = (self._block_class(*kind, index == last, config.shared_stream) for index in range(last + 1))
        self.transformer_blocks = nn.ModuleList(blocks)
        # Beside the blocks, not in them: all of a sampling run's numbers are computed at once.
        sizes = [6] * config.num_layers + [2] if config.shared_stream else [12] * last + [8, 2]
        shared = config.modulation == "shared"
        self.modulations = nn.ModuleList(nn.Linear(dim, size * dim) for size in (sizes[:1] if shared else sizes))
        self.modulation_sizes = [size * dim for size in sizes]
        self.modulation_table = nn.Parameter(torch.zeros(sum(self.modulation_sizes))) if shared else None
        # Scales are 1 + what the layer computes: numbers 1, 4, 7, 10 of a block, 1 of the final layer.
        offset = torch.cat([torch.arange(size) % 3 == 1 for size in sizes]).repeat_interleave(dim)
        self.register_buffer("modulation_offset", offset.to(torch.get_default_dtype()), persistent=False)
        self.proj_out = nn.Linear(dim, config.patch_size**2 * config.in_channels)

    @classmethod
    def _pair(cls, size: Any) -> list[int]:
        """[height, width] of a size that may be one number; nothing of what is no size."""
        pair = [size, size] if isinstance(size, int) else size if isinstance(size, list | tuple) else []
        fits = len(pair) == 2 and all(isinstance(x, cls._REAL) and 1 <= x <= 1e9 and x % 1 == 0 for x in pair)
        return [int(side) for side in pair] if fits else []

    def _check_config(self) -> None:
        """Raise a ValueError for a configuration that means nothing, or that nothing could hold; nothing is built."""
        config, shared = self.config, self.config.shared_stream
        given = [name for name in ("num_classes", "joint_attention_dim") if config[name] is not None]
        counts = {name: config[name] for name in (*self._COUNTS, *given)}
        if wrong := {name: x for name, x in counts.items() if type(x) is not int or not 1 <= x <= 10**9}:
            raise ValueError(f"{type(self).__name__}: {wrong} must be whole numbers from 1 to 10^9.")
        patch, width = config.patch_size, config.num_attention_heads * config.attention_head_dim
        dropouts, ratio = [config.condition_dropout, config.control_dropout], config.mlp_ratio
        are_shares = all(isinstance(x, self._REAL) and 0 <= x < 1 for x in dropouts)
        alphas = self.CONTROL_ALPHA if config.control_alpha is None else config.control_alpha
        known = isinstance(alphas, dict) and alphas.keys() <= self.CONTROL_SIZES.keys()
        wild = not known or not all(isinstance(x, self._REAL) and 0 <= x <= 1e6 for x in alphas.values())
        grid, base = self._pair(config.sample_size), config.pos_embed_base_size
        misfit = not grid or any(side % patch for side in grid) or not (base is None or self._pair(base))
        hidden = int(width * ratio) if isinstance(ratio, self._REAL) and 0 <= ratio <= 1e6 else 0
        layers = config.num_layers * max(width * max(4 * width, hidden), self.LEAST)
        size = max(layers, width * max(patch**2 * config.in_channels, math.prod(grid) // patch**2, *counts.values()))
        problems = {
            "give one of num_classes (class model) and joint_attention_dim (text model), not both": len(given) != 1,
            f"modulation is 'per_block' or 'shared', not {config.modulation!r}": config.modulation
            not in ("per_block", "shared"),
            f"shared_stream is true or false, not {shared!r}": shared not in (True, False, None),
            f"control_alpha has numbers from 0 to 1e6 for some of {list(self.CONTROL_SIZES)}, not {alphas}": wild,
            f"the dropouts are in [0, 1), not {dropouts}": not are_shares,
            f"mlp_ratio is a number up to 1e6 that gives a hidden unit, not {ratio!r}": hidden < 1,
            f"the width, num_attention_heads * attention_head_dim, is divisible by 4, unlike {width}": width % 4 != 0,
            f"sample_size {config.sample_size} and pos_embed_base_size {base} are one positive number or two, the "
            f"first divisible by patch_size {patch}": misfit,
            f"{counts}, sample_size {config.sample_size} and mlp_ratio {ratio} are of no network": size > self.MOST,
        }
        if found := [problem for problem, is_there in problems.items() if is_there]:
            raise ValueError(f"DisentangledDiTTransformer2DModel: {found[0]}.")

    @torch.no_grad()
    def _initialize(self) -> None:
        """Initial weights: each block is the identity (adaLN-Zero), the controls and the output are zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        # Labels keep PyTorch's deviation of 1: with 0.02 they are lost beside the timestep where both are added.
        controls = (embedder.linear_2 for embedder in self.control_embedders.values())
        for layer in (*self.modulations, self.proj_out, *controls):
            nn.init.zeros_(layer.weight)

    def control_weight(self, timestep: Tensor, alpha: float) -> Tensor:
        """gamma(t) = ((1 + cos(pi t/T)) / 2)^alpha of timesteps [N], weight of a control: 1 at t = 0, 0 at t = T."""
        timestep = timestep.to(torch.promote_types(timestep.dtype, torch.float32))
        tau = (timestep / self.config.num_train_timesteps).clamp(0, 1)
        return ((1 + torch.cos(math.pi * tau)) / 2) ** alpha

    def _embed_controls(
        self, timestep: Tensor, controls: dict[str, Tensor], control_mask: Tensor | None, dtype: torch.dtype
    ) -> Tensor | float:
        """sum_c gamma_c(t) E_c(c), [B, D]; zero where the mask is False."""
        if unknown := [name for name in controls if name not in self.control_embedders]:
            raise ValueError(f"The model has no controls {unknown}; it has {list(self.control_embedders)}.")
        total: Tensor | float = 0.0
        for name, embedder in self.control_embedders.items():
            if name in controls:
                values = controls[name]
                if values.ndim != 2 or values.shape[1] != self.CONTROL_SIZES[name]:
                    wanted = f"must have shape (batch, {self.CONTROL_SIZES[name]})"
                    raise ValueError(f"Control {name!r} {wanted}, got {tuple(values.shape)}.")
                if 1 != len(values) != len(timestep) != 1:
                    told = f"Control {name!r} has {len(values)} rows, and the batch {len(timestep)}: give one a sample"
                    raise ValueError(f"{told}. A cache that halves the batch, as FasterCache, knows no controls.")
                features = self.time_proj(values.flatten()).unflatten(0, values.shape).flatten(1)
                weight = self.control_weight(timestep, self.config.control_alpha[name])
                total = total + weight[:, None].to(dtype) * embedder(features.to(dtype))
        if control_mask is not None:
            total = total * control_mask[:, None].to(dtype)
        return total

    def _embed_context(self, class_labels: Tensor | None, encoder_hidden_states: Tensor | None) -> Tensor | None:
        """Context tokens [B, L, D] of labels or of a text; None if there is neither."""
        if self.config.num_classes is None:
            if class_labels is not None:
                raise ValueError("This is a text model: give `encoder_hidden_states`, not `class_labels`.")
            return None if encoder_hidden_states is None else self.context_embedder(encoder_hidden_states)
        if encoder_hidden_states is not None:
            raise ValueError("This is a class model: give `class_labels`, not `encoder_hidden_states`.")
        if class_labels is None:
            return None
        if class_labels.ndim != 1 or class_labels.is_floating_point():
            wanted = f"must be integers of shape (batch,), from 0 to {self.config.num_classes} (no class)"
            raise ValueError(f"`class_labels` {wanted}, got {class_labels.dtype} of {[*class_labels.shape]}.")
        return self.class_embedder(class_labels)[:, None]

    def _embed(
        self, timestep: Tensor, controls: dict[str, Tensor] | None, control_mask: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """The adaLN vector e, [B or 1, D]."""
        embedding = self.timestep_embedder(self.time_proj(timestep).to(dtype))
        if controls:
            embedding = embedding + self._embed_controls(timestep, controls, control_mask, dtype)
        return embedding

    def _modulate(self, embedding: Tensor) -> Tensor:
        """The modulation [B or 1, numbers] of all blocks from SiLU(e)."""
        numbers = [layer(embedding) for layer in self.modulations]
        if self.modulation_table is not None:
            # the last block and the final layer take fewer
            numbers = [numbers[0][:, :size] for size in self.modulation_sizes]
        modulation = torch.cat(numbers, dim=-1) + self.modulation_offset
        return modulation if self.modulation_table is None else modulation + self.modulation_table

    def _positions_of(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """Position embedding of a grid on a device, computed once: buckets and samplers ask for few grids, often."""
        if [rows, columns] == self.grid:
            return self.positions
        if torch.compiler.is_compiling():
            # a graph keeps no tensors, and would go to the processor for these
            return self.position_embedding(rows, columns, device)
        key = (rows, columns, device)
        if key not in self._other_positions:
            if len(self._other_positions) >= self.GRIDS:
                self._other_positions.clear()
            self._other_positions[key] = self.position_embedding(rows, columns).to(device)
        return self._other_positions[key]

    def position_embedding(self, rows: int, columns: int, device: torch.device | None = None) -> Tensor:
        """Sines and cosines of y = i base_rows / rows, then of x = j base_columns / columns, [rows * columns, D],
        float32: any grid of patches lies on the coordinates of the pre-training's, `pos_embed_base_size`."""
        quarter = self.inner_dim // 4
        kind: dict[str, Any] = {"dtype": torch.float64, "device": device}
        frequencies = 10000.0 ** (-torch.arange(quarter, **kind) / quarter)
        sizes = zip((rows, columns), self.config.pos_embed_base_size, strict=True)
        angles = [torch.arange(count, **kind)[:, None] * (base / count) * frequencies for count, base in sizes]
        vertical, horizontal = (torch.cat([angle.sin(), angle.cos()], dim=-1).float() for angle in angles)
        return torch.cat([vertical.repeat_interleave(columns, dim=0), horizontal.repeat(rows, 1)], dim=-1)

    def _scale_lora(self, scale: float, names: list[str] | None = None) -> list[tuple[Any, ...]]:
        """Multiplies the weights of LoRA layers that are not fused; these weights, each beside a copy from before."""
        # peft's `scale_layer` leaves out embeddings, and its `unscale_layer` makes 1 of whatever was scaled by 0
        layers: list[Any] = [] if scale == 1 else [*self.modules()]
        layers = [layer for layer in layers if isinstance(getattr(layer, "scaling", None), dict)]
        found: list[tuple[Any, ...]] = [(layer.scaling, dict(layer.scaling)) for layer in layers]
        for layer in layers:
            for name in layer.scaling.keys() & set(names or layer.active_adapters) - set(layer.merged_adapters):
                layer.scaling[name] *= scale
        return found

    @contextlib.contextmanager
    def _scaled_lora(self, attention_kwargs: dict[str, Any] | None) -> Iterator[None]:
        """LoRA layers times `scale`, for a call."""
        options: Any = attention_kwargs or {}
        scale = options.get("scale", 1.0) if isinstance(options, dict) and not options.keys() - {"scale"} else None
        if not isinstance(scale, int | float) or not math.isfinite(scale):
            raise ValueError(f"`attention_kwargs` takes a finite `scale` only, got {attention_kwargs}.")
        before = self._scale_lora(scale)
        try:
            yield
        finally:
            for weights, earlier in before:
                weights.update(earlier)

    def fuse_lora(self, lora_scale: float = 1.0, safe_fusing: bool = False, adapter_names: Any = None) -> None:
        """Adds LoRA layers, times `lora_scale`, to the weights. The scale stays after `unfuse_lora`, as usual."""
        self._scale_lora(lora_scale, adapter_names)
        super().fuse_lora(1.0, safe_fusing, adapter_names)

    def forward(
        self,
        hidden_states: Tensor | None = None,
        timestep: Tensor | float | None = None,
        class_labels: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        controls: dict[str, Tensor] | None = None,
        control_mask: Tensor | None = None,
        modulation: Tensor | None = None,
        context: Tensor | None = None,
        return_conditioning: bool = False,
        attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[Tensor | None, ...]:
        """
        Predict noise, velocity or image from noisy latents.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch_size, in_channels, height, width)`): Noisy latents.
            timestep (`torch.Tensor` of shape `(batch_size,)`, or a number): Timesteps; 0 is the clean end. A number
                (or one element) for the whole batch is cheaper than equal ones.
            class_labels (`torch.Tensor` of shape `(batch_size,)`, *optional*): Labels of a class model; the null
                class is `config.num_classes`.
            encoder_hidden_states (`torch.Tensor` of shape `(batch_size, length, joint_attention_dim)`, *optional*):
                Tokens of a text model.
            controls (`dict[str, torch.Tensor]`, *optional*): For each control a tensor of shape
                `(batch_size, CONTROL_SIZES[name])`: sizes and crop in pixels, flip 0 or 1, aspect ratio
                log(width / height). What is absent adds nothing.
            control_mask (`torch.Tensor` of shape `(batch_size,)`, *optional*): False for a zero control vector.
            modulation (`torch.Tensor` of shape `(batch_size or 1, numbers)`, *optional*), context (`torch.Tensor` of
                shape `(batch_size or 1, length, width)`, *optional*): What `return_conditioning` gave, instead of
                timestep and controls, and of labels or text.
            return_conditioning (`bool`, defaults to `False`): Return only `(context, modulation)`, None without input.
            attention_kwargs (`dict`, *optional*): `scale`, of the LoRA adapters.
            return_dict (`bool`, defaults to `True`): Return an output object and not a tuple.

        Returns:
            [`~diffusers.models.modeling_outputs.Transformer2DModelOutput`], or a tuple with its sample.

        Raises:
            ValueError: An input is missing, is not for this model, or its shape or type does not fit.

        Example:
            >>> import torch
            >>> from hf_ext.pipelines.disentangled_dit import DisentangledDiTTransformer2DModel
            >>> model = DisentangledDiTTransformer2DModel(num_layers=2, num_attention_heads=2, attention_head_dim=8)
            >>> model(torch.randn(2, 4, 32, 32), timestep=500, class_labels=torch.tensor([3, 7])).sample.shape
            torch.Size([2, 4, 32, 32])
        """
        with self._scaled_lora(attention_kwargs):
            if context is None:
                context = self._embed_context(class_labels, encoder_hidden_states)
            if modulation is None and timestep is not None:
                if not isinstance(timestep, Tensor):
                    timestep = torch.tensor(timestep, device=self.device)
                dtype = self.dtype if hidden_states is None else hidden_states.dtype
                modulation = self._modulate(F.silu(self._embed(timestep.reshape(-1), controls, control_mask, dtype)))
            if return_conditioning:
                return context, modulation
            if hidden_states is None or modulation is None or context is None:
                needed = "`timestep` or `modulation`; and `class_labels`, `encoder_hidden_states` or `context`"
                raise ValueError(f"`forward` needs `hidden_states`; {needed}.")
            self._check_inputs(hidden_states, context, modulation)
            sample = self._denoise(hidden_states, context, modulation)
            return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def _check_inputs(self, hidden_states: Tensor, context: Tensor, modulation: Tensor) -> None:
        """Raise a ValueError for inputs that the blocks could not take; looks at shapes only."""
        patch, channels = self.config.patch_size, self.config.in_channels
        shape = tuple(hidden_states.shape)
        if len(shape) != 4 or shape[1] != channels or shape[2] % patch or shape[3] % patch or 0 in shape:
            told = f"(batch, {channels}, height, width), height and width divisible by the patch size {patch}"
            raise ValueError(f"`hidden_states` must have shape {told}, got {shape}.")
        inputs = {"modulation": (modulation, sum(self.modulation_sizes)), "context": (context, self.inner_dim)}
        for name, (value, width) in inputs.items():
            if value.shape[0] not in (1, shape[0]) or value.shape[-1] != width:
                told = f"{shape[0]} rows, like `hidden_states`, or one, and {width} numbers"
                raise ValueError(f"{name}, or what it is made of, must have {told}, got {tuple(value.shape)}.")

    def _denoise(self, hidden_states: Tensor, context: Tensor, modulation: Tensor) -> Tensor:
        """The output [B, in_channels, height, width] for context [B or 1, L, D] and modulation [B or 1, numbers]."""
        patch = self.config.patch_size
        rows, columns = hidden_states.shape[2] // patch, hidden_states.shape[3] // patch
        position = self._positions_of(rows, columns, hidden_states.device).to(hidden_states.dtype)
        # [B, C, rows, patch, columns, patch] -> [B, N, C * patch * patch]
        cells = hidden_states.unflatten(3, (columns, patch)).unflatten(2, (rows, patch))
        tokens = self.patch_embed(cells.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)) + position
        *numbers, last = modulation.split(self.modulation_sizes, dim=-1)
        tokens, _ = self._run(self.transformer_blocks, tokens, context.expand(tokens.shape[0], -1, -1), numbers)
        shift, scale = last.unflatten(1, (2, 1, -1)).unbind(1)
        output = self.proj_out(self._block_class.normalize(tokens, shift, scale))
        # [B, rows, columns, C, patch, patch] -> [B, C, rows * patch, columns * patch]
        cells = output.unflatten(1, (rows, columns)).unflatten(3, (self.config.in_channels, patch, patch))
        return cells.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)

    def _run(
        self, blocks: nn.ModuleList, tokens: Tensor, context: Tensor, modulations: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Image tokens [B, N, D] and context after blocks, each with its modulation."""
        for block, numbers in zip(blocks, modulations, strict=True):
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                context, tokens = self._gradient_checkpointing_func(block, tokens, context, numbers)
            else:
                context, tokens = block(hidden_states=tokens, encoder_hidden_states=context, modulation=numbers)
        return tokens, context
