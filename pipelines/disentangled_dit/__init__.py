"""Disentangled DiT: the transformer, its diffusers pipeline, and schedules for other resolutions."""

from .pipeline import DisentangledDiTImg2ImgPipeline, DisentangledDiTInpaintPipeline, DisentangledDiTPipeline
from .scheduling import rescale_noise_schedule
from .transformer_disentangled_dit import DisentangledDiTTransformer2DModel

__all__ = [
    "DisentangledDiTImg2ImgPipeline",
    "DisentangledDiTInpaintPipeline",
    "DisentangledDiTPipeline",
    "DisentangledDiTTransformer2DModel",
    "rescale_noise_schedule",
]
