"""Our network with one thing made another way, for the study: class in adaLN, drawn controls, interpolated positions.

`peers.py` trains and loads them by their names, as it does diffusers' networks.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor, nn

from hf_ext.pipelines.disentangled_dit import DisentangledDiTTransformer2DModel


class ClassInAdaLN(DisentangledDiTTransformer2DModel):
    """The usual DiT: the class is added to the adaLN vector, and no class stands in its place in the context."""

    null_tokens: ClassVar[int] = 1

    def forward(
        self,
        hidden_states: Tensor | None = None,
        timestep: Tensor | float | None = None,
        return_dict: bool = True,
        **given: Any,
    ) -> Transformer2DModelOutput | tuple[Tensor | None, ...]:
        """As our network's. What is computed ahead: the labels as context, the vector without class as modulation."""
        context, modulation = given.get("context"), given.get("modulation")
        if given.get("class_labels") is not None:
            context = given["class_labels"].float()[:, None, None]
        if timestep is not None:
            times = torch.as_tensor(timestep, device=self.device).reshape(-1)
            modulation = self._embed(times, given.get("controls"), given.get("control_mask"), self.dtype)
        if given.get("return_conditioning"):
            return context, modulation
        embedding = F.silu(modulation + self.class_embedder(context[:, 0, 0].long()))
        nothing = self.class_embedder.weight[-1].expand(len(hidden_states), self.null_tokens, -1)
        sample = self._denoise(hidden_states, nothing, self._modulate(embedding))
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)


class MaskedDiT(ClassInAdaLN):
    """
    mDT-v2 without its long shortcuts: the class in adaLN and, in a second pass of each training step, only some image
    tokens for the first blocks; a side interpolator makes the others, for the last seventh of the blocks.
    """

    _masking: tuple[Tensor, Tensor] | None = None

    def _make_blocks(self, dim: int) -> None:
        super()._make_blocks(dim)
        kind = (self.config.num_attention_heads, self.config.mlp_ratio, True, self.config.shared_stream)
        self.decoding = max(1, self.config.num_layers // 7)
        self.mask_token = nn.Parameter(0.02 * torch.randn(dim))
        # A block of the last one's kind, whose context is only attended to.
        self.side_interpolator = self._block_class(dim, *kind)
        self.side_modulation = nn.Linear(dim, self.modulation_sizes[-2])

    @torch.no_grad()
    def _initialize(self) -> None:
        super()._initialize()
        nn.init.zeros_(self.side_modulation.weight)

    def forward(self, hidden_states: Tensor | None = None, *given: Any, **options: Any) -> Any:
        """With `keep_indices`, numbers [B, kept] of image tokens, the first blocks see these alone."""
        if (kept := options.pop("keep_indices", None)) is None:
            return super().forward(hidden_states, *given, **options)
        rows, columns = (side // self.config.patch_size for side in hidden_states.shape[2:])
        self._masking = kept, self._positions_of(rows, columns, hidden_states.device)
        try:
            return super().forward(hidden_states, *given, **options)
        finally:
            self._masking = self._embedding = None

    def _modulate(self, embedding: Tensor) -> Tensor:
        self._embedding = embedding if self._masking else None
        return super()._modulate(embedding)

    def _run(
        self, blocks: nn.ModuleList, tokens: Tensor, context: Tensor, modulations: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        if self._masking is None:
            return super()._run(blocks, tokens, context, modulations)
        (kept, position), first = self._masking, len(blocks) - self.decoding
        index = kept[..., None].expand(-1, -1, tokens.shape[-1])
        seen, context = super()._run(blocks[:first], tokens.gather(1, index), context, modulations[:first])
        full = (self.mask_token + position).to(seen.dtype).expand(len(seen), -1, -1).scatter(1, index, seen)
        end = -self.modulation_sizes[-1]
        numbers = self.side_modulation(self._embedding) + self.modulation_offset[end - self.modulation_sizes[-2] : end]
        _, filled = self.side_interpolator(full, context, numbers)
        whole = filled.to(seen.dtype).scatter(1, index, seen)
        return super()._run(blocks[first:], whole, context, modulations[first:])


def random_keep_indices(batch: int, tokens: int, mask_ratio: float, device: torch.device) -> Tensor:
    """Numbers of the image tokens that the first blocks see, [B, kept], rising in each row."""
    kept = max(1, round((1 - mask_ratio) * tokens))
    return torch.rand(batch, tokens, device=device).argsort(1)[:, :kept].sort(1).values


class OneStream(ClassInAdaLN):
    """
    The class in adaLN, and no context that would be attended to: with `shared_stream` all parameters act on the
    image, and a larger `attention_head_dim` makes it as large as ours.
    """

    null_tokens = 0


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


VARIANTS = {
    "adaln": ClassInAdaLN,
    "mdt": MaskedDiT,
    "drawn": DrawnControls,
    "bicubic": BicubicPositions,
    "one-stream": OneStream,
}
