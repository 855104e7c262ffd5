"""Our network with one thing made another way, for the study: drawn controls, interpolated positions.

`peers.py` trains and loads them by their names, as it does diffusers' networks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_ext.pipelines.disentangled_dit import DisentangledDiTTransformer2DModel


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


VARIANTS = {"drawn": DrawnControls, "bicubic": BicubicPositions}
