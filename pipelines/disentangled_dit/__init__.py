"""Disentangled DiT: the transformer, its diffusers pipeline, and schedules for other resolutions."""

from .pipeline import DisentangledDiTPipeline
from .scheduling import rescale_noise_schedule
from .transformer_disentangled_dit import DisentangledDiTTransformer2DModel

__all__ = ["DisentangledDiTPipeline", "DisentangledDiTTransformer2DModel", "rescale_noise_schedule"]
