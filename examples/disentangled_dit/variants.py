"""Our network with one thing made another way, for the study: class in adaLN, drawn controls, interpolated positions.

`peers.py` trains and loads them by their names, as it does diffusers' networks.
"""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor, nn

from hf_ext.pipelines.disentangled_dit import DisentangledDiTTransformer2DModel

# What our blocks are made of, so that nothing but the stream differs.
BLOCK = DisentangledDiTTransformer2DModel._block_class


class OneStreamBlock(nn.Module):
    """A block of image tokens alone: self-attention and MLP, whose norms are modulated by 6 D numbers."""

    normalize = staticmethod(BLOCK.normalize)

    def __init__(self, dim: int, heads: int, mlp_ratio: float):
        super().__init__()
        norm = BLOCK._attention_class._norm_class
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = (norm(dim // heads, eps=1e-6) for _ in range(2))
        self.ff = BLOCK._feed_forward_class(dim, inner_dim=int(dim * mlp_ratio), activation_fn="gelu-approximate")

    def attend(self, hidden_states: Tensor) -> Tensor:
        """Self-attention [B, N, D], with RMSNorm of queries and keys in each head."""
        query, key, value = (
            layer(hidden_states).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.to_q, self.to_k, self.to_v)
        )
        attended = F.scaled_dot_product_attention(self.norm_q(query), self.norm_k(key), value)
        return self.to_out(attended.transpose(1, 2).flatten(2))

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, modulation: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The context as it came, and the image tokens after the block."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation.unflatten(
            1, (6, 1, hidden_states.shape[-1])
        ).unbind(1)
        attended = self.attend(self.normalize(hidden_states, shift, scale))
        hidden_states = torch.addcmul(hidden_states, gate, attended)
        fed = self.ff(self.normalize(hidden_states, mlp_shift, mlp_scale))
        return encoder_hidden_states, torch.addcmul(hidden_states, mlp_gate, fed)


class ClassInAdaLN(DisentangledDiTTransformer2DModel):
    """The usual DiT: the class is added to the adaLN vector, and no class stands in its place in the context."""

    def forward(
        self,
        hidden_states: Tensor | None = None,
        timestep: Tensor | float | None = None,
        class_labels: Tensor | None = None,
        controls: dict[str, Tensor] | None = None,
        control_mask: Tensor | None = None,
        modulation: Tensor | None = None,
        context: Tensor | None = None,
        keep_indices: Tensor | None = None,
        return_conditioning: bool = False,
        attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[Tensor | None, ...]:
        """As our network's. What is computed ahead: the labels as context, the vector without class as modulation."""
        if class_labels is not None:
            context = class_labels.float()[:, None, None]
        if timestep is not None:
            times = torch.as_tensor(timestep, device=self.device).reshape(-1)
            modulation = self._embed(times, controls, control_mask, self.dtype)
        if return_conditioning:
            return context, modulation
        embedding = F.silu(modulation + self.class_embedder(context[:, 0, 0].long()))
        nothing = self.class_embedder.weight[-1].expand(len(hidden_states), 1, -1)
        sample = self._denoise(hidden_states, nothing, self._modulate(embedding), (keep_indices, embedding))
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)


class OneStream(ClassInAdaLN):
    """
    The class in adaLN, and no context that would be attended to: all parameters act on the image. A larger
    `attention_head_dim` makes it as large as ours.
    """

    _block_class = OneStreamBlock

    def _make_blocks(self, dim: int) -> None:
        config = self.config
        if config.num_decoder_layers:
            raise ValueError("one stream has no decoder layers: set num_decoder_layers=0.")
        self.transformer_blocks = nn.ModuleList(
            self._block_class(dim, config.num_attention_heads, config.mlp_ratio) for _ in range(config.num_layers)
        )
        sizes = [6] * config.num_layers + [2]
        self.modulations = nn.ModuleList(nn.Linear(dim, size * dim) for size in sizes)
        self.modulation_sizes, self.modulation_table = [size * dim for size in sizes], None
        # Scales are 1 + what the layer computes, as in our blocks.
        offset = torch.cat([torch.arange(size) % 3 == 1 for size in sizes]).repeat_interleave(dim)
        self.register_buffer("modulation_offset", offset.to(torch.get_default_dtype()), persistent=False)
        self.proj_out = nn.Linear(dim, config.patch_size**2 * config.in_channels)


class DrawnControls(DisentangledDiTTransformer2DModel):
    """Controls whose last layers begin with drawn weights, as all others do, and not at zero."""

    @torch.no_grad()
    def _initialize(self) -> None:
        super()._initialize()
        for embedder in self.control_embedders.values():
            nn.init.xavier_uniform_(embedder.linear_2.weight)


class BicubicPositions(DisentangledDiTTransformer2DModel):
    """Another grid than the pre-training's has its embeddings, interpolated, and not those of places between."""

    def position_embedding(self, rows: int, columns: int) -> Tensor:
        """[rows * columns, D], float32, as the network's."""
        base = self.config.pos_embed_base_size
        known = super().position_embedding(*base)
        if [rows, columns] == list(base):
            return known
        # As a picture of D channels. Where a coordinate falls on a known place the value is not the known one:
        # interpolation takes pixels as areas, so the corners of the two grids are half a step apart.
        picture = known.T.unflatten(1, list(base))[None]
        grid = F.interpolate(picture, size=(rows, columns), mode="bicubic", align_corners=False)
        return grid[0].flatten(1).T.contiguous()


VARIANTS = {"adaln": ClassInAdaLN, "drawn": DrawnControls, "bicubic": BicubicPositions, "one-stream": OneStream}
