"""Latents of a diffusers autoencoder: made from pictures, and as rows of a data set with what was done to the picture.

A row has `latent` (float16 bytes), `latent_shape`, the controls `original_size`, `crop`, `target_size` and `flip` in
the units of `diffusion_data`, and what else the picture came with: `label` or `text`.
"""

from typing import Any

import numpy as np
import torch
from diffusers import AutoModel, ModelMixin
from torch import Tensor

from hf_ext.training.models import split_revision

from .diffusion_data import View, controls

# Columns of a row beside those that the picture came with.
COLUMNS = ("latent", "latent_shape", "original_size", "crop", "target_size", "flip")


def load_autoencoder(source: str) -> ModelMixin:
    """A frozen autoencoder of diffusers, from its own folder or repository or that of a pipeline."""
    name, revision = split_revision(source)
    try:
        model = AutoModel.from_pretrained(name, revision=revision)
    except OSError:
        # A whole pipeline keeps it in a folder of its own.
        model = AutoModel.from_pretrained(name, revision=revision, subfolder="vae")
    if not callable(getattr(model, "encode", None)):
        raise ValueError(f"{source} holds a {type(model).__name__}, which encodes no images: name an autoencoder.")
    model.requires_grad_(False)
    return model.eval()


def to_pixels(views: list[View]) -> Tensor:
    """Pictures of one size as the network sees them: [batch, channels, height, width] in [-1, 1]."""
    # In NumPy, whose operations on small arrays cost a fraction of torch's.
    stacked = np.stack([view.pixels.transpose(2, 0, 1) for view in views])
    return torch.from_numpy(stacked / np.float32(127.5) - 1)


def write_row(latent: Tensor, view: View) -> dict[str, Any]:
    """The columns of a latent [channels, height, width]: a value for each of `COLUMNS`."""
    return {
        "latent": latent.cpu().to(torch.float16).contiguous().numpy().tobytes(),
        "latent_shape": list(latent.shape),
        "original_size": list(view.original_size),
        "crop": list(view.crop),
        "target_size": list(view.target_size),
        "flip": int(view.flip),
    }


def read_row(row: dict[str, Any]) -> tuple[Tensor, dict[str, np.ndarray]]:
    """The latent of a row, float32 [channels, height, width], and each control."""
    missing = [name for name in COLUMNS if name not in row]
    if missing:
        raise ValueError(f"latents without the column(s) {missing}: write them with `hf-ext dit precompute`.")
    values, shape = np.frombuffer(row["latent"], dtype=np.float16), tuple(row["latent_shape"])
    if values.size != np.prod(shape):
        raise ValueError(f"a latent of {values.size} values has latent_shape {shape}: precompute the data again.")
    latent = torch.from_numpy(values.astype(np.float32).reshape(shape))
    described = controls(tuple(row["original_size"]), tuple(row["crop"]), tuple(row["target_size"]), bool(row["flip"]))
    return latent, described
