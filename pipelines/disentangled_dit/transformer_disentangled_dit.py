# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""The network of Disentangled DiT (Berrada Ifriqi et al., NeurIPS 2024, arXiv 2411.03177).

A two-stream diffusion transformer in which a class or a text acts through attention only, and the adaptive layer
norms (adaLN) see only the timestep and the control conditions c (sizes, crop, flip):
    e = t_emb(t) + sum_c gamma_c(t) E_c(c)                     (eq. 1, the weights gamma of section 2)
One self-contained file: diffusers downloads it alone. Whatever `forward` uses of this file's own is an attribute of a
class, because a second version of the file, loaded as remote code, replaces the names of this module.
Shapes: batch B, image tokens N, context tokens L, width D, heads H; latents [B, channels, height, width].
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

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
from diffusers.utils import apply_lora_scale
from torch import Tensor, nn

try:
    # Private: the table in which diffusers' block caches look up what a block returns.
    from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
except ImportError:
    HAS_BLOCK_CACHES = False
else:
    HAS_BLOCK_CACHES = True


class DisentangledDiTRMSNorm(nn.RMSNorm):
    """RMSNorm whose weight follows its input: under autocast the two would differ, and no fused kernel run."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class DisentangledDiTAttnProcessor:
    """Joint attention over image and context tokens, computed by the attention backend that diffusers has active."""

    _attention_backend = None
    _parallel_config = None

    def __call__(
        self, attn: "DisentangledDiTAttention", hidden_states: Tensor, encoder_hidden_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden_states.shape[1]
        query, key, value = attn.project(hidden_states)
        added_query, added_key, added_value = attn.project_context(encoder_hidden_states)
        if added_query is not None:
            query = torch.cat([query, added_query], dim=1)
        attended = dispatch_attention_fn(
            query,
            torch.cat([key, added_key], dim=1),
            torch.cat([value, added_value], dim=1),
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        ).flatten(2)
        if attn.to_add_out is None:
            # No context tokens, and not None: caches keep tensors.
            return attn.to_out[0](attended), attended[:, :0]
        # A linear layer adds its bias within the product if its input is contiguous, afterwards if it is not.
        image, context = (part.contiguous() for part in attended.tensor_split([tokens], dim=1))
        return attn.to_out[0](image), attn.to_add_out(context)


class DisentangledDiTAttention(nn.Module, AttentionModuleMixin):
    """Projections of both streams, with RMSNorm of queries and keys in each head (equation of the block, below)."""

    # Any: diffusers' types know its own processors only.
    processor: Any
    _default_processor_cls: Any = DisentangledDiTAttnProcessor
    _available_processors = [DisentangledDiTAttnProcessor]
    _norm_class = DisentangledDiTRMSNorm

    def __init__(self, dim: int, heads: int, context_pre_only: bool):
        super().__init__()
        self.heads = heads
        # Read by `fuse_projections`.
        self.use_bias = self.added_proj_bias = True
        head_dim = dim // heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        # The context of the last block is only attended to: it asks nothing.
        self.add_q_proj = None if context_pre_only else nn.Linear(dim, dim)
        self.add_k_proj, self.add_v_proj = (nn.Linear(dim, dim) for _ in range(2))
        self.norm_q, self.norm_k, self.norm_added_k = (self._norm_class(head_dim, eps=1e-6) for _ in range(3))
        self.norm_added_q = None if context_pre_only else self._norm_class(head_dim, eps=1e-6)
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])
        self.to_add_out = None if context_pre_only else nn.Linear(dim, dim)
        self.set_processor(self._default_processor_cls())

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of the image tokens, each [B, N, H, D / H]."""
        if self.fused_projections:
            query, key, value = self.to_qkv(hidden_states).unflatten(-1, (3, self.heads, -1)).unbind(2)
        else:
            query, key, value = (
                layer(hidden_states).unflatten(-1, (self.heads, -1)) for layer in (self.to_q, self.to_k, self.to_v)
            )
        return self.norm_q(query), self.norm_k(key), value

    def project_context(self, hidden_states: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Query (None in the last block), key and value of the context tokens, each [B, L, H, D / H]."""
        if self.add_q_proj is None or self.norm_added_q is None:
            key, value = (
                layer(hidden_states).unflatten(-1, (self.heads, -1)) for layer in (self.add_k_proj, self.add_v_proj)
            )
            return None, self.norm_added_k(key), value
        if self.fused_projections:
            query, key, value = self.to_added_qkv(hidden_states).unflatten(-1, (3, self.heads, -1)).unbind(2)
        else:
            query, key, value = (
                layer(hidden_states).unflatten(-1, (self.heads, -1))
                for layer in (self.add_q_proj, self.add_k_proj, self.add_v_proj)
            )
        return self.norm_added_q(query), self.norm_added_k(key), value

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return self.processor(self, hidden_states, encoder_hidden_states)


class DisentangledDiTFeedForward(FeedForward):
    """MLP with the GELU in its tanh form, which overwrites the hidden values where no gradient needs them: on a CPU,
    a large tensor in memory that is new to the process costs as much as the function."""

    def __init__(self, dim: int, inner_dim: int):
        super().__init__(dim, activation_fn="gelu-approximate", inner_dim=inner_dim)

    def forward(self, hidden_states: Tensor) -> Tensor:
        # The GELU with its projection, a dropout of 0, the second layer; mypy does not know what a list holds.
        activation, _, output = cast("list[Any]", self.net)
        hidden_states = activation.proj(hidden_states)
        if hidden_states.requires_grad:
            hidden_states = F.gelu(hidden_states, approximate="tanh")
        else:
            torch.ops.aten.gelu_(hidden_states, approximate="tanh")
        return output(hidden_states)


class DisentangledDiTBlock(nn.Module):
    """
    One block, for each stream z with weights of its own (image, context):
        u_z = LN(x_z) scale1_z + shift1_z
        x_z += gate1_z attention(u)_z
        x_z += gate2_z MLP_z(LN(x_z) scale2_z + shift2_z)
    """

    _attention_class = DisentangledDiTAttention
    _feed_forward_class = DisentangledDiTFeedForward

    def __init__(self, dim: int, heads: int, mlp_ratio: float, context_pre_only: bool):
        super().__init__()
        inner_dim = int(dim * mlp_ratio)
        self.attn = self._attention_class(dim, heads, context_pre_only)
        self.ff = self._feed_forward_class(dim, inner_dim)
        self.ff_context = None if context_pre_only else self._feed_forward_class(dim, inner_dim)

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
        """Context and image tokens after the block; `modulation` is [B or 1, 12 D] (8 D in the last block)."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate, *rest = modulation.unflatten(
            1, (-1, 1, hidden_states.shape[-1])
        ).unbind(1)
        attended, attended_context = self.attn(
            self.normalize(hidden_states, shift, scale), self.normalize(encoder_hidden_states, *rest[:2])
        )
        hidden_states = torch.addcmul(hidden_states, gate, attended)
        fed = self.ff(self.normalize(hidden_states, mlp_shift, mlp_scale))
        hidden_states = torch.addcmul(hidden_states, mlp_gate, fed)
        if self.ff_context is not None:
            gate, mlp_shift, mlp_scale, mlp_gate = rest[2:]
            encoder_hidden_states = torch.addcmul(encoder_hidden_states, gate, attended_context)
            fed = self.ff_context(self.normalize(encoder_hidden_states, mlp_shift, mlp_scale))
            encoder_hidden_states = torch.addcmul(encoder_hidden_states, mlp_gate, fed)
        return encoder_hidden_states, hidden_states


if HAS_BLOCK_CACHES:
    TransformerBlockRegistry.register(
        DisentangledDiTBlock,
        TransformerBlockMetadata(return_hidden_states_index=1, return_encoder_hidden_states_index=0),
    )


class DisentangledDiTSamplingMixin:
    """
    What the pipeline asks a network for besides its output: the values of its controls, and the inputs of adaLN, which
    depend on no latents, in tables for many timesteps at once.
    """

    # Numbers of each control: (height, width), (top, left), (height, width), 0 or 1, log(width / height).
    CONTROL_SIZES = {"original_size": 2, "crop": 2, "target_size": 2, "flip": 1, "aspect_ratio": 1}
    # What a caller gives for them.
    CONTROL_WORDS = {
        "original_size": "(height, width) in pixels",
        "crop": "(top, left) in pixels",
        "target_size": "(height, width) in pixels",
        "flip": "True or False",
        "aspect_ratio": "width over height",
    }
    # Rows of adaLN numbers that are computed ahead: 100 MB for the largest preset in bfloat16.
    TABLE_ROWS = 128

    # Any: a mixin does not know the network that it is a part of.
    config: Any
    __call__: Any

    def read_controls(
        self, given: dict[str, Any], size: tuple[int, int], count: int, images: int
    ) -> list[tuple[tuple[float, ...], ...]]:
        """
        The values of the network's controls for pictures that are to be made.

        Args:
            given (`dict[str, Any]`): For each name of `CONTROL_SIZES` a value, or a list of one for each picture or
                group; `None` for that of a whole, unmirrored picture. Python's numbers, and lists of them; the aspect
                ratio is width / height.
            size (`tuple[int, int]`): Height and width of the pictures in pixels.
            count, images (`int`): Pictures, and how many follow each other as a group.

        Returns:
            `list[tuple[tuple[float, ...], ...]]`: For each picture the values of `config.control_alpha`, in its order,
            as `forward` takes them.

        Raises:
            ValueError: A value is none of the control, or the network has no such control.
        """
        known = self.config.control_alpha
        for name, value in given.items():
            if value is not None and name not in known:
                raise ValueError(f"The model has no control {name}; it was trained with {', '.join(known) or 'none'}.")
        usual: dict[str, Any] = {"original_size": list(size), "crop": [0, 0], "target_size": list(size), "flip": 0}
        usual |= {name: value for name, value in given.items() if value is not None}
        values = {name: self._read_control(name, value, count, images) for name, value in usual.items()}
        ratios = values.get("aspect_ratio") or [(width / height,) for height, width in values["original_size"]]
        values["aspect_ratio"] = [(math.log(ratio),) for (ratio,) in ratios]
        return [tuple(values[name][index] for name in known) for index in range(count)]

    def _read_control(self, name: str, value: Any, count: int, images: int) -> list[tuple[float, ...]]:
        """The values of a control for each of `count` pictures."""
        size = self.CONTROL_SIZES[name]
        # A list of numbers is one value where the control is a pair, and several where it is a number.
        several = isinstance(value, list) and (size == 1 or any(isinstance(item, list) for item in value))
        each = value if several else [value]
        if len(each) not in (1, count // images, count):
            raise ValueError(f"{name} has {len(each)} values for {count} pictures; give one, or a list of as many.")
        zero, most = name in ("crop", "flip"), 1 if name == "flip" else 1e9
        read = []
        for given in each:
            item = given if isinstance(given, list) else [given]
            fits = (isinstance(part, int | float) and (0 < part <= most or (zero and part == 0)) for part in item)
            if len(item) != size or not all(fits):
                raise ValueError(
                    f"{name} has {given!r}; needed is {self.CONTROL_WORDS[name]}, or a list with one for each picture."
                )
            read.append(tuple(map(float, item)))
        return [item for item in read for _ in range(count // len(read))]

    def plan_states(
        self,
        given: list[tuple[tuple[float, ...], ...]],
        labels: list[tuple[int, int]],
        null_control: bool,
        device: torch.device,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, list[int]]]:
        """
        The different inputs of adaLN in the branches of the guidance: most pictures and branches share them.

        Args:
            given (`list`): From `read_controls`, for each picture.
            labels (`list[tuple[int, int]]`): For each picture the class of the null branch and that of the others.
            null_control (`bool`): Whether the null branch keeps the controls.
            device (`torch.device`): Where the tensors lie.

        Returns:
            `tuple[dict, dict, dict]`: Controls of the states; their other inputs of `forward`; for each branch
            `"null"`, `"uncontrolled"`, `"full"` the state of each picture.
        """
        config = self.config
        # A class is none of them, except in the baseline that adds it to adaLN.
        negative, positive = zip(*(labels if config.conditioning == "adaln" else [(0, 0)] * len(given)), strict=True)
        dropped, full = [None] * len(given), [values or None for values in given]
        null = full if null_control else dropped
        inputs = {"null": (null, negative), "uncontrolled": (dropped, positive), "full": (full, positive)}
        found: dict[Any, int] = {}
        rows = {
            branch: [found.setdefault(key, len(found)) for key in zip(*columns, strict=True)]
            for branch, columns in inputs.items()
        }
        values = [given[0] if key is None else key for key, _ in found]
        controls = {
            name: torch.tensor([value[place] for value in values], device=device)
            for place, name in enumerate(config.control_alpha)
        }
        rest = {"control_mask": torch.tensor([key is not None for key, _ in found], device=device)}
        if config.conditioning == "adaln":
            rest["class_labels"] = torch.tensor([label for _, label in found], device=device)
        return controls, rest, rows

    def modulation_tables(
        self,
        timesteps: Tensor,
        controls: dict[str, Tensor],
        rest: dict[str, Tensor],
        rows: dict[str, list[int]],
        attention_kwargs: dict[str, Any] | None,
    ) -> Iterator[tuple[Tensor, bool]]:
        """
        For each timestep the adaLN numbers of all states, `(states, numbers)`, and whether the controls add nothing.

        Args:
            timesteps (`torch.Tensor` of shape `(steps,)`): Of the scheduler.
            controls, rest, rows: From `plan_states`.
            attention_kwargs (`dict`, *optional*): `scale`, of the LoRA adapters.
        """
        count = len(rest["control_mask"])
        for block in timesteps.split(max(1, self.TABLE_ROWS // count)):
            _, table = self(
                timestep=block.repeat_interleave(count),
                controls={name: value.repeat(len(block), 1) for name, value in controls.items()},
                **{name: value.repeat(len(block)) for name, value in rest.items()},
                attention_kwargs=attention_kwargs,
                return_conditioning=True,
            )
            table = table.unflatten(0, (len(block), count))
            idle = [False] * len(block)
            if self.config.control_cutoff > 0:
                idle = (table[:, rows["full"]] == table[:, rows["uncontrolled"]]).flatten(1).all(dim=1).tolist()
            yield from zip(table, idle, strict=True)


class DisentangledDiTTransformer2DModel(
    DisentangledDiTSamplingMixin, ModelMixin, AttentionMixin, ConfigMixin, PeftAdapterMixin, CacheMixin
):
    """
    Diffusion transformer whose class or text acts through attention, and whose controls fade in with the timestep
    (arXiv 2411.03177).

    Of the caches of diffusers `enable_cache` takes those that leave out blocks or attention, all of them
    approximations: `FirstBlockCacheConfig`, `MagCacheConfig`, `TaylorSeerCacheConfig`, and
    `PyramidAttentionBroadcastConfig` with the pipeline's `current_timestep`.

    Args:
        sample_size (`int` or `list[int]`, defaults to 32): Height and width of the latents (or pixels) that the
            model is meant for; any size divisible by `patch_size` can be given.
        patch_size (`int`, defaults to 2): Side of a patch, in latent pixels.
        in_channels (`int`, defaults to 4): Channels of the latents.
        out_channels (`int`, *optional*): Channels of the output, `in_channels` if not given; twice as many for a
            learned variance.
        num_layers (`int`, defaults to 28): Number of blocks.
        num_attention_heads (`int`, defaults to 16): Heads of a block.
        attention_head_dim (`int`, defaults to 72): Width of a head; the model's width D is heads times this.
        mlp_ratio (`float`, defaults to 4.0): Hidden width of the MLPs over D.
        num_classes (`int`, *optional*, defaults to 1000): Number of classes; the label `num_classes` is the null
            class. Exactly one of this and `joint_attention_dim`.
        num_class_tokens (`int`, defaults to 1): Tokens that a class becomes.
        joint_attention_dim (`int`, *optional*): Width of the text encoder's tokens, for a text model.
        conditioning (`str`, defaults to `"attention"`): `"attention"`, the paper's, or `"adaln"`, the baseline that
            adds the class to the adaLN vector and attends to the null class's token; sizes and costs are equal.
        control_alpha (`dict[str, float]`, *optional*): The controls that the model has, of `CONTROL_SIZES`, and the
            exponent alpha of each one's weight; 0 is a constant weight. Not given: all five, 8 for the two sizes of
            images and 0 for the others. `{}`: none.
        control_schedule (`str`, defaults to `"power_cosine"`): gamma = ((1 + cos(pi t/T)) / 2)^alpha, or
            `"cosine_power"`: gamma = (1 - cos(pi (1 - t/T)^alpha)) / 2.
        control_cutoff (`float`, defaults to 0.0): Weights below it are 0.
        pos_embed_base_size (`int` or `list[int]`, *optional*): Grid of patches of the pre-training, whose
            coordinates other grids resample; `sample_size // patch_size` if not given. It is saved.
        num_train_timesteps (`int`, defaults to 1000): T, the timestep of pure noise.
        condition_dropout (`float`, defaults to 0.1): Share of training samples without class, text and controls.
        control_dropout (`float`, defaults to 0.1): Share of the others without controls. Training reads both, and
            guidance needs them to be positive.
        num_decoder_layers (`int`, defaults to 0): Positive for masked-latent training: blocks after the masked
            tokens have been filled in.
    """

    PRESETS = {
        "tiny": {"num_layers": 4, "num_attention_heads": 4, "attention_head_dim": 16, "patch_size": 2},
        "S": {"num_layers": 12, "num_attention_heads": 6, "attention_head_dim": 64, "patch_size": 2},
        "B": {"num_layers": 12, "num_attention_heads": 12, "attention_head_dim": 64, "patch_size": 2},
        "L": {"num_layers": 24, "num_attention_heads": 16, "attention_head_dim": 64, "patch_size": 2},
        "XL": {"num_layers": 28, "num_attention_heads": 16, "attention_head_dim": 72, "patch_size": 2},
    }
    CONTROL_ALPHA = {"original_size": 8.0, "crop": 0.0, "target_size": 8.0, "flip": 0.0, "aspect_ratio": 0.0}
    CACHES = ("FirstBlockCache", "MagCache", "TaylorSeerCache", "PyramidAttentionBroadcast")
    # Features of a scalar; sizes whose position embedding is kept.
    SINUSOIDS, GRIDS = 256, 16

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
        out_channels: int | None = None,
        num_layers: int = 28,
        num_attention_heads: int = 16,
        attention_head_dim: int = 72,
        mlp_ratio: float = 4.0,
        num_classes: int | None = 1000,
        num_class_tokens: int = 1,
        joint_attention_dim: int | None = None,
        conditioning: str = "attention",
        control_alpha: dict[str, float] | None = None,
        control_schedule: str = "power_cosine",
        control_cutoff: float = 0.0,
        pos_embed_base_size: int | list[int] | None = None,
        num_train_timesteps: int = 1000,
        condition_dropout: float = 0.1,
        control_dropout: float = 0.1,
        num_decoder_layers: int = 0,
    ):
        super().__init__()
        if pos_embed_base_size is None:
            pos_embed_base_size = [side // patch_size for side in self._pair(sample_size)]
        control_alpha = dict(self.CONTROL_ALPHA) if control_alpha is None else dict(control_alpha)
        # What was derived is saved: a later size keeps the grid of the pre-training, and a later release the weights.
        self.register_to_config(pos_embed_base_size=self._pair(pos_embed_base_size), control_alpha=control_alpha)
        self._check_config()
        self.out_channels = in_channels if out_channels is None else out_channels
        self.inner_dim = num_attention_heads * attention_head_dim
        self.gradient_checkpointing = False
        self._grids: dict[tuple[int, int, torch.device, torch.dtype], Tensor] = {}
        self._make_embedders(self.inner_dim)
        self._make_blocks(self.inner_dim)
        self._initialize()

    def _make_embedders(self, dim: int) -> None:
        """What turns latents, timestep, controls and class or text into vectors."""
        config = self.config
        self.patch_embed = nn.Linear(config.in_channels * config.patch_size**2, dim)
        self.time_proj = Timesteps(self.SINUSOIDS, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.timestep_embedder = TimestepEmbedding(self.SINUSOIDS, dim)
        self.control_embedders = nn.ModuleDict(
            {
                name: TimestepEmbedding(self.SINUSOIDS * size, dim)
                for name, size in self.CONTROL_SIZES.items()
                if name in config.control_alpha
            }
        )
        if config.num_classes is None:
            self.context_embedder = nn.Linear(config.joint_attention_dim, dim)
            return
        self.class_embedder = nn.Embedding(config.num_classes + 1, dim)
        if config.num_class_tokens > 1:
            self.class_offsets = nn.Parameter(0.02 * torch.randn(config.num_class_tokens, dim))

    def _make_blocks(self, dim: int) -> None:
        """The blocks, the final layer, and the layers that make their modulation."""
        config = self.config
        heads, ratio, last = config.num_attention_heads, config.mlp_ratio, config.num_layers - 1
        self.transformer_blocks = nn.ModuleList(
            self._block_class(dim, heads, ratio, context_pre_only=index == last) for index in range(config.num_layers)
        )
        # Beside the blocks, not in them: all of a sampling run's numbers are computed at once.
        sizes = [12] * last + [8, 2]
        self.modulations = nn.ModuleList(nn.Linear(dim, size * dim) for size in sizes)
        self.modulation_sizes = [size * dim for size in sizes]
        # Scales are 1 + what the layer computes: numbers 1, 4, 7, 10 of a block, 1 of the final layer.
        offset = torch.cat([torch.arange(size) % 3 == 1 for size in sizes]).repeat_interleave(dim)
        self.register_buffer("modulation_offset", offset.to(torch.get_default_dtype()), persistent=False)
        self.proj_out = nn.Linear(dim, config.patch_size**2 * self.out_channels)
        if config.num_decoder_layers > 0:
            self.mask_token = nn.Parameter(0.02 * torch.randn(dim))
            self.side_interpolator = self._block_class(dim, heads, ratio, context_pre_only=True)
            self.side_modulation = nn.Linear(dim, 8 * dim)

    @staticmethod
    def _pair(size: int | list[int] | tuple[int, int]) -> list[int]:
        """[height, width] of a size that may be one number."""
        return [size, size] if isinstance(size, int) else [int(side) for side in size]

    def _check_config(self) -> None:
        """Raise a ValueError for a configuration that means nothing."""
        config = self.config
        width = config.num_attention_heads * config.attention_head_dim
        sides = [*self._pair(config.sample_size), *config.pos_embed_base_size]
        wrong = [name for name in config.control_alpha if name not in self.CONTROL_SIZES]
        problems = {
            "give one of num_classes (class model) and joint_attention_dim (text model), not both or neither": (
                (config.num_classes is None) == (config.joint_attention_dim is None)
            ),
            f"conditioning is 'attention' or 'adaln', not {config.conditioning!r}": (
                config.conditioning not in ("attention", "adaln")
            ),
            "conditioning='adaln' is of classes: give num_classes": (
                config.conditioning == "adaln" and config.num_classes is None
            ),
            f"num_classes and num_class_tokens are at least 1, not {config.num_classes}, {config.num_class_tokens}": (
                config.num_class_tokens < 1 or (config.num_classes is not None and config.num_classes < 1)
            ),
            f"control_schedule is 'power_cosine' or 'cosine_power', not {config.control_schedule!r}": (
                config.control_schedule not in ("power_cosine", "cosine_power")
            ),
            f"control_alpha has unknown controls {wrong}; there are {list(self.CONTROL_SIZES)}": bool(wrong),
            f"exponents of control_alpha are numbers from 0 to 1e6, not {config.control_alpha}": not all(
                0 <= alpha <= 1e6 for alpha in config.control_alpha.values()
            ),
            f"control_cutoff is in [0, 1), not {config.control_cutoff}": not 0 <= config.control_cutoff < 1,
            f"the dropouts are in [0, 1), not {config.condition_dropout}, {config.control_dropout}": not (
                0 <= config.condition_dropout < 1 and 0 <= config.control_dropout < 1
            ),
            f"the width, num_attention_heads * attention_head_dim, is divisible by 4, unlike {width}": width % 4 != 0,
            f"sample_size {config.sample_size} and pos_embed_base_size {config.pos_embed_base_size} are one positive "
            f"number or two, and sample_size is divisible by patch_size {config.patch_size}": (
                len(sides) != 4 or min(sides) < 1 or any(side % config.patch_size for side in sides[:2])
            ),
            f"num_decoder_layers is from 0 to num_layers - 1 = {config.num_layers - 1}, not "
            f"{config.num_decoder_layers}": not 0 <= config.num_decoder_layers < config.num_layers,
        }
        for problem, found in problems.items():
            if found:
                raise ValueError(f"DisentangledDiTTransformer2DModel: {problem}.")

    @torch.no_grad()
    def _initialize(self) -> None:
        """Initial weights: each block is the identity (adaLN-Zero), the controls and the output are zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        # Labels keep PyTorch's deviation of 1: with 0.02 they are lost beside the timestep where both are added.
        zero = [*self.modulations, self.proj_out, *(embedder.linear_2 for embedder in self.control_embedders.values())]
        if self.config.num_decoder_layers > 0:
            zero.append(self.side_modulation)
        for layer in zero:
            nn.init.zeros_(layer.weight)

    def fuse_qkv_projections(self) -> None:
        """
        Compute queries, keys and values of a stream with one matrix product, for inference, until
        `unfuse_qkv_projections`. The fused weights are copies: train, load adapters and save without them.

        Raises:
            `ValueError`: If the model has adapters, which the copies would not hold.
        """
        if self._hf_peft_config_loaded:
            raise ValueError(
                "Fused projections would leave the adapter out: fuse it (`fuse_lora`, `unload_lora`) or delete it."
            )
        super().fuse_qkv_projections()

    def add_adapter(self, *args: Any, **kwargs: Any) -> None:
        """As `add_adapter` of diffusers; a `ValueError` while projections are fused."""
        self._check_unfused()
        super().add_adapter(*args, **kwargs)

    def load_lora_adapter(self, *args: Any, **kwargs: Any) -> None:
        """As `load_lora_adapter` of diffusers; a `ValueError` while projections are fused."""
        self._check_unfused()
        super().load_lora_adapter(*args, **kwargs)

    def _check_unfused(self) -> None:
        if any(getattr(module, "fused_projections", False) for module in self.modules()):
            raise ValueError("Fused projections would leave the adapter out: call `unfuse_qkv_projections` first.")

    def enable_cache(self, config: Any) -> None:
        """
        Leave out computations that are much like those of an earlier step, until `disable_cache`.

        Args:
            config: Configuration of one of diffusers' caches, of those that the class names.

        Raises:
            `ValueError`: If it is of another cache: the others are made for videos, for text that attends to nothing,
                or for guidance branches that share no `context`.
        """
        if (name := type(config).__name__).removesuffix("Config") not in self.CACHES:
            raise ValueError(f"{name} does not fit this model; of {', '.join(self.CACHES)} is allowed.")
        super().enable_cache(config)

    def control_weight(self, timestep: Tensor, alpha: float) -> Tensor:
        """
        The weight gamma(t) of a control: 1 at the clean end t = 0, falling to 0 at t = T, so that it rises during
        sampling. gamma = ((1 + cos(pi t/T)) / 2)^alpha, or the `control_schedule` `"cosine_power"`.

        Args:
            timestep (`torch.Tensor` of shape `(N,)`): Timesteps between 0 and `num_train_timesteps`.
            alpha (`float`): Exponent; 0 gives 1 everywhere.

        Returns:
            `torch.Tensor` of shape `(N,)`, at least float32.
        """
        timestep = timestep.to(torch.promote_types(timestep.dtype, torch.float32))
        tau = (timestep / self.config.num_train_timesteps).clamp(0, 1)
        if self.config.control_schedule == "power_cosine":
            weight = ((1 + torch.cos(math.pi * tau)) / 2) ** alpha
        else:
            weight = (1 - torch.cos(math.pi * (1 - tau) ** alpha)) / 2
        return torch.where(weight < self.config.control_cutoff, 0.0, weight)

    def _embed_controls(
        self, timestep: Tensor, controls: dict[str, Tensor], control_mask: Tensor | None, dtype: torch.dtype
    ) -> Tensor | float:
        """sum_c gamma_c(t) E_c(c), [B, D]; zero where the mask is False."""
        unknown = [name for name in controls if name not in self.control_embedders]
        if unknown:
            raise ValueError(f"The model has no controls {unknown}; it has {list(self.control_embedders)}.")
        total: Tensor | float = 0.0
        for name, embedder in self.control_embedders.items():
            if name in controls:
                values = controls[name]
                if values.ndim != 2 or values.shape[1] != self.CONTROL_SIZES[name]:
                    raise ValueError(
                        f"Control {name!r} must have shape (batch, {self.CONTROL_SIZES[name]}), "
                        f"got {tuple(values.shape)}."
                    )
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
            raise ValueError(
                f"`class_labels` must be integers of shape (batch,), from 0 to {self.config.num_classes} (no class), "
                f"got {class_labels.dtype} of shape {tuple(class_labels.shape)}."
            )
        if self.config.conditioning == "adaln":
            class_labels = torch.full_like(class_labels, self.config.num_classes)
        tokens = self.class_embedder(class_labels)[:, None]
        return tokens if self.config.num_class_tokens == 1 else tokens + self.class_offsets

    def _embed(
        self,
        timestep: Tensor,
        controls: dict[str, Tensor] | None,
        control_mask: Tensor | None,
        class_labels: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """SiLU(e) of the adaLN vector e, [B or 1, D]."""
        embedding = self.timestep_embedder(self.time_proj(timestep).to(dtype))
        if controls:
            embedding = embedding + self._embed_controls(timestep, controls, control_mask, dtype)
        if self.config.conditioning == "adaln":
            if class_labels is None:
                raise ValueError("With conditioning='adaln' the modulation needs `class_labels`.")
            embedding = embedding + self.class_embedder(class_labels)
        return F.silu(embedding)

    def _grid(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """Position embedding [N, D] of a grid of patches, on the coordinates of the pre-training grid."""
        base = self.config.pos_embed_base_size
        if torch.compiler.is_compiling():
            # What a traced program computes must not be kept.
            return self.position_embedding(rows, columns, base, self.inner_dim).to(like)
        key = (rows, columns, like.device, like.dtype)
        if key not in self._grids:
            if len(self._grids) >= self.GRIDS:
                self._grids.clear()
            # A tensor made in inference mode could not take part in a later training step.
            with torch.inference_mode(False):
                self._grids[key] = self.position_embedding(rows, columns, base, self.inner_dim).to(like)
        return self._grids[key]

    @staticmethod
    def position_embedding(rows: int, columns: int, base: list[int], dim: int) -> Tensor:
        """
        Sine and cosine of the coordinates y = i base_rows / rows and x = j base_columns / columns.

        Args:
            rows, columns (`int`): The grid of patches.
            base (`list[int]`): Rows and columns of the pre-training grid.
            dim (`int`): Width D, divisible by 4: half of it for y, half for x, each sines then cosines.

        Returns:
            `torch.Tensor` of shape `(rows * columns, dim)`, float32.
        """
        frequencies = 10000.0 ** (-torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
        angles = [
            torch.arange(count, dtype=torch.float64)[:, None] * (start / count) * frequencies
            for count, start in zip((rows, columns), base, strict=True)
        ]
        vertical, horizontal = (torch.cat([angle.sin(), angle.cos()], dim=-1) for angle in angles)
        shape = (rows, columns, dim // 2)
        return (
            torch.cat([vertical[:, None].expand(shape), horizontal[None].expand(shape)], dim=-1).flatten(0, 1).float()
        )

    @apply_lora_scale("attention_kwargs")
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
        keep_indices: Tensor | None = None,
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
            control_mask (`torch.Tensor` of shape `(batch_size,)`, *optional*): False for samples without controls:
                their control vector is zero.
            modulation (`torch.Tensor` of shape `(batch_size or 1, numbers)`, *optional*): What `return_conditioning`
                gave, instead of timestep and controls.
            context (`torch.Tensor` of shape `(batch_size or 1, length, width)`, *optional*): What
                `return_conditioning` gave, instead of labels or text.
            keep_indices (`torch.Tensor` of shape `(batch_size, kept)`, *optional*): For masked-latent training: the
                numbers of the image tokens that the first blocks see, no number twice in a row.
            return_conditioning (`bool`, defaults to `False`): Return `(context, modulation)` and compute no image;
                what has no input is None.
            attention_kwargs (`dict`, *optional*): `scale`, of the LoRA adapters.
            return_dict (`bool`, defaults to `True`): Return an output object and not a tuple.

        Returns:
            [`~diffusers.models.modeling_outputs.Transformer2DModelOutput`], or a tuple with its sample.
        """
        if attention_kwargs:
            raise ValueError(f"`attention_kwargs` takes `scale` only, got {list(attention_kwargs)}.")
        if context is None:
            context = self._embed_context(class_labels, encoder_hidden_states)
        embedding = None
        if modulation is None and timestep is not None:
            if not isinstance(timestep, Tensor):
                timestep = torch.tensor(timestep, device=self.device)
            dtype = self.dtype if hidden_states is None else hidden_states.dtype
            embedding = self._embed(timestep.reshape(-1), controls, control_mask, class_labels, dtype)
            numbers = torch.cat([layer(embedding) for layer in self.modulations], dim=-1)
            modulation = numbers + self.modulation_offset
        if return_conditioning:
            return context, modulation
        if hidden_states is None or modulation is None or context is None:
            raise ValueError(
                "`forward` needs `hidden_states`; `timestep` or `modulation`; and `class_labels`, "
                "`encoder_hidden_states` or `context`."
            )
        self._check_inputs(hidden_states, modulation, context, keep_indices, embedding)
        sample = self._denoise(hidden_states, context, modulation, keep_indices, embedding)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def _check_inputs(
        self,
        hidden_states: Tensor,
        modulation: Tensor,
        context: Tensor,
        keep_indices: Tensor | None,
        embedding: Tensor | None,
    ) -> None:
        """Raise a ValueError for inputs that the blocks could not take; looks at shapes only."""
        patch, channels = self.config.patch_size, self.config.in_channels
        shape = tuple(hidden_states.shape)
        if len(shape) != 4 or shape[1] != channels or shape[2] % patch or shape[3] % patch or 0 in shape:
            raise ValueError(
                f"`hidden_states` must have shape (batch, {channels}, height, width) with height and width divisible "
                f"by the patch size {patch}, got {shape}."
            )
        for name, value, width in (
            ("modulation", modulation, sum(self.modulation_sizes)),
            ("context", context, self.inner_dim),
        ):
            if value.shape[0] not in (1, shape[0]) or value.shape[-1] != width:
                raise ValueError(
                    f"{name}, or the inputs that it is made of, must have {shape[0]} rows, like `hidden_states`, or "
                    f"one, and {width} numbers; it has shape {tuple(value.shape)}."
                )
        if keep_indices is None:
            return
        tokens = shape[2] // patch * (shape[3] // patch)
        if self.config.num_decoder_layers == 0 or embedding is None:
            raise ValueError("`keep_indices` needs a model with num_decoder_layers > 0, and `timestep`.")
        rows, kept = keep_indices.shape if keep_indices.ndim == 2 else (0, 0)
        if rows != shape[0] or not 0 < kept <= tokens or keep_indices.dtype != torch.int64:
            raise ValueError(
                f"`keep_indices` must be int64 of shape ({shape[0]}, kept) with 1 to {tokens} kept tokens, got "
                f"{keep_indices.dtype} of shape {tuple(keep_indices.shape)}."
            )

    def _denoise(
        self,
        hidden_states: Tensor,
        context: Tensor,
        modulation: Tensor,
        keep_indices: Tensor | None,
        embedding: Tensor | None,
    ) -> Tensor:
        """The output [B, out_channels, height, width] for context [B or 1, L, D] and modulation [B or 1, numbers]."""
        patch = self.config.patch_size
        rows, columns = hidden_states.shape[2] // patch, hidden_states.shape[3] // patch
        position = self._grid(rows, columns, hidden_states)
        # [B, C, rows, patch, columns, patch] -> [B, N, C * patch * patch]
        cells = hidden_states.unflatten(3, (columns, patch)).unflatten(2, (rows, patch))
        tokens = self.patch_embed(cells.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)) + position
        context = context.expand(tokens.shape[0], -1, -1)
        *blocks, last = modulation.split(self.modulation_sizes, dim=-1)
        filled_at = len(blocks) - self.config.num_decoder_layers
        if keep_indices is not None:
            # Indices, not a boolean mask: shapes are known ahead, and no device is waited for.
            tokens = tokens.gather(1, keep_indices[..., None].expand(-1, -1, tokens.shape[-1]))
        for index, (block, numbers) in enumerate(zip(self.transformer_blocks, blocks, strict=True)):
            if keep_indices is not None and embedding is not None and index == filled_at:
                tokens = self._fill(tokens, context, position, keep_indices, embedding)
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                context, tokens = self._gradient_checkpointing_func(block, tokens, context, numbers)
            else:
                context, tokens = block(hidden_states=tokens, encoder_hidden_states=context, modulation=numbers)
        shift, scale = last.unflatten(1, (2, 1, -1)).unbind(1)
        output = self.proj_out(self._block_class.normalize(tokens, shift, scale))
        # [B, rows, columns, C, patch, patch] -> [B, C, rows * patch, columns * patch]
        cells = output.unflatten(1, (rows, columns)).unflatten(3, (self.out_channels, patch, patch))
        return cells.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)

    def _fill(
        self, tokens: Tensor, context: Tensor, position: Tensor, keep_indices: Tensor, embedding: Tensor
    ) -> Tensor:
        """All image tokens [B, N, D]: the kept ones, and what the side interpolator makes of mask tokens elsewhere."""
        index = keep_indices[..., None].expand(-1, -1, tokens.shape[-1])
        full = (self.mask_token + position).to(tokens.dtype).expand(tokens.shape[0], -1, -1).scatter(1, index, tokens)
        # It is a block of the last one's kind, whose context is only attended to.
        end = -self.modulation_sizes[-1]
        offset = self.modulation_offset[end - self.modulation_sizes[-2] : end]
        _, filled = self.side_interpolator(full, context, self.side_modulation(embedding) + offset)
        return filled.to(tokens.dtype).scatter(1, index, tokens)
