"""Latents of a diffusers autoencoder: made from pictures, and as rows of a data set with what was done to the picture.

A row has `latent` (float16 bytes), `latent_shape`, the controls `original_size`, `crop`, `target_size` and `flip` in
the units of `diffusion_data`, and what else the picture came with: `label` or `text`. Where an autoencoder gives a
normal distribution, `latent` is its mean, which is its mode, and `latent_spread` (float16 bytes) may stand beside it.

In tar files as webdataset has them, what is bytes is a file of its column's name, everything else is in one of JSON.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable
from typing import IO, Any, cast

import numpy as np
import torch
from diffusers import AutoModel, ModelMixin
from torch import Tensor

from hf_ext.hub.checkpoints import split_revision
from hf_ext.pipelines.disentangled_dit.pipeline import DisentangledDiTPipeline

from ..errors import DataError, UsageError
from .diffusion_data import View, controls

# Columns of a row beside those that the picture came with.
COLUMNS = ("latent", "latent_shape", "original_size", "crop", "target_size", "flip")
# One more, where precompute was asked for it.
SPREAD = "latent_spread"
# What the name of a column of lists of bytes gets, which one file of a tar file holds, for their sizes.
SIZES = "_sizes"


def load_autoencoder(source: str) -> ModelMixin:
    """A frozen autoencoder of diffusers, from its own folder or repository or that of a pipeline."""
    name, revision = split_revision(source)
    try:
        model = AutoModel.from_pretrained(name, revision=revision)
    except OSError:
        # A whole pipeline keeps it in a folder of its own.
        model = AutoModel.from_pretrained(name, revision=revision, subfolder="vae")
    if not callable(getattr(model, "encode", None)):
        raise ValueError(f"{source} is a {type(model).__name__}, which does not encode images: give an autoencoder.")
    model.requires_grad_(False)
    return model.eval()


def weights_hash(model: torch.nn.Module) -> str:
    """A hash of the weights: a folder of a training may hold others tomorrow."""
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def to_pixels(views: list[View]) -> Tensor:
    """Pictures of one size as the network sees them: [batch, channels, height, width] in [-1, 1]."""
    # In NumPy, whose operations on small arrays cost a fraction of torch's.
    stacked = np.stack([view.pixels.transpose(2, 0, 1) for view in views])
    return torch.from_numpy(stacked / np.float32(127.5) - 1)


def encode_posterior(vae: ModelMixin, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and spread of the latents of pictures [B, C, H, W], float32, as the transformer takes them."""
    pipeline, autoencoder = DisentangledDiTPipeline, cast(Any, vae)
    with pipeline._upcast(autoencoder):
        found = autoencoder.encode(pixels.to(autoencoder.dtype), return_dict=False)[0]
    if not (hasattr(found, "mean") and hasattr(found, "std")) or isinstance(found, Tensor):
        raise UsageError(f"{type(vae).__name__} gives a latent and no distribution: leave out posterior.")
    shift, scale = pipeline._latent_statistics(vae, found.mean.float())
    return (found.mean.float() - shift) * scale, found.std.float() * scale


def write_row(latent: Tensor, view: View, spread: Tensor | None = None) -> dict[str, Any]:
    """The columns of a latent [channels, height, width]: a value for each of `COLUMNS`, and one of its spread."""
    given = {"latent": latent, SPREAD: spread}
    halves = {name: value.cpu().to(torch.float16) for name, value in given.items() if value is not None}
    return {
        "latent_shape": list(latent.shape),
        "original_size": list(view.original_size),
        "crop": list(view.crop),
        "target_size": list(view.target_size),
        "flip": int(view.flip),
        **{name: value.numpy().tobytes() for name, value in halves.items()},
    }


def read_row(
    row: dict[str, Any], generator: np.random.Generator | None = None
) -> tuple[Tensor, dict[str, np.ndarray]]:
    """The latent of a row, float32 [channels, height, width], and each control; a generator draws it."""
    wanted = COLUMNS if generator is None else (*COLUMNS, SPREAD)
    if missing := [name for name in wanted if name not in row]:
        how = " --posterior, or set task.posterior to false" if missing == [SPREAD] else ""
        raise DataError(f"latents without the column(s) {missing}: write them with `hf-ext dit precompute`{how}.")
    latent = _unpack(row, "latent")
    if generator is not None:
        latent = latent + _unpack(row, SPREAD) * generator.standard_normal(latent.shape, dtype=np.float32)
    sizes: Any = [tuple(row[name]) for name in ("original_size", "crop", "target_size")]
    if any(len(pair) != 2 for pair in sizes) or min(sizes[0]) <= 0:
        raise DataError(f"a row of latents has the original_size, crop and target_size {sizes}: precompute it again.")
    original, crop, target = sizes
    return torch.from_numpy(latent), controls(original, crop, target, bool(row["flip"]))


def _unpack(row: dict[str, Any], column: str) -> np.ndarray:
    values, shape = np.frombuffer(row[column], dtype=np.float16), tuple(row["latent_shape"])
    if values.size != np.prod(shape):
        raise ValueError(f"{column} of {values.size} values has latent_shape {shape}: precompute the data again.")
    return values.astype(np.float32).reshape(shape)


def write_tar(file: IO[bytes], examples: Iterable[tuple[str, dict[str, bytes]]]) -> None:
    """Writes examples, each a name and the content of its files by their endings: equal ones make equal tar files."""
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, parts in examples:
            for ending, content in parts.items():
                about = tarfile.TarInfo(f"{name}.{ending}")
                about.size = len(content)
                tar.addfile(about, io.BytesIO(content))


def pack_row(row: dict[str, Any], binary: Iterable[str]) -> dict[str, bytes]:
    """The files of a row of latents; the columns `binary` have files in all rows, as readers expect."""
    told, parts = {name: value for name, value in row.items() if name not in binary}, dict[str, bytes]()
    for name in binary:
        parts[name] = value = row[name] or b""
        if isinstance(value, list):
            told[f"{name}{SIZES}"] = [len(part) for part in value]
            parts[name] = b"".join(value)
    # Arrays as lists, dates as texts.
    plain = json.dumps(told, ensure_ascii=False, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x))
    return {**parts, "json": plain.encode()}


def unpack_row(row: dict[str, Any]) -> dict[str, Any]:
    """The columns that such a row was made of; any other row as it is."""
    told = row.get("json")
    if not isinstance(told, dict) or "latent_shape" not in told:
        return row
    found = {**row, **told}
    for name in (name for name in row if f"{name}{SIZES}" in told):
        content = io.BytesIO(row[name])
        found[name] = [content.read(size) for size in told[f"{name}{SIZES}"]]
    return found
