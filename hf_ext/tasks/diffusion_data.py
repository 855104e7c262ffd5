"""Pictures as the Disentangled DiT is trained on them: cut, mirrored, described by their controls, perhaps as latents.

A picture is resized, cut to the size that the model sees, and then perhaps mirrored. What was done is recorded as the
model's control conditions (arXiv 2411.03177), so that sampling can ask for a whole, unmirrored picture.

A row of latents has `latent` (float16 bytes), `latent_shape`, the controls `original_size`, `crop`, `target_size` and
`flip` in pixels, and what else the picture came with: `label` or `text`. Where an autoencoder gives a normal
distribution, `latent` is its mean, which is its mode, and `latent_spread` (float16 bytes) may stand beside it. In tar
files as webdataset has them, what is bytes is a file of its column's name, everything else is in one of JSON.
"""

import hashlib
import io
import json
import math
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from diffusers import AutoModel, ModelMixin
from huggingface_hub.dataclasses import strict
from numpy.random import Generator
from PIL import Image
from torch import Tensor

from hf_ext.files import whole_file
from hf_ext.hub.checkpoints import split_revision
from hf_ext.pipelines.disentangled_dit.pipeline import DisentangledDiTPipeline

from ..errors import DataError, UsageError
from .pictures import put_on_white

# Height and width in pixels.
Size = tuple[int, int]
# Columns of a row beside those that the picture came with.
COLUMNS = ("latent", "latent_shape", "original_size", "crop", "target_size", "flip")
# One more, where precompute was asked for it.
SPREAD = "latent_spread"
# What the name of a column of lists of bytes gets, which one file of a tar file holds, for their sizes.
SIZES = "_sizes"


@strict
@dataclass
class Crops:
    """
    Cropping of training pictures.

    Args:
        random (`bool`, defaults to `True`): Crop at a random place; the centre otherwise.
        flip (`float`, defaults to 0.5): Probability of mirroring left and right.
        local_prob (`float`, defaults to 0.0): Probability of a local crop: a small part of the picture, at the pixel
            scale of a later, larger training. A global crop is almost all of the picture, resized to the model's size.
        local_size (`int`, *optional*): Shorter side of the picture before a local crop is cut, in pixels.
        shrink_prob (`float`, defaults to 0.0): Probability of a smaller original: the picture is reduced, then resized
            to the model's size, and `original_size` is the reduced size. So data of one size teaches this control.
        shrink_size (`int`, *optional*): Smallest shorter side of a reduced picture; the largest is the model's own.
    """

    random: bool = True
    flip: float = 0.5
    local_prob: float = 0.0
    local_size: int | None = None
    shrink_prob: float = 0.0
    shrink_size: int | None = None

    def validate_probabilities(self) -> None:
        for name in ("flip", "local_prob", "shrink_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"crops.{name} is a probability, 0 to 1; got {getattr(self, name)}.")
        for name, probability, side in (
            ("local", self.local_prob, self.local_size),
            ("shrink", self.shrink_prob, self.shrink_size),
        ):
            if (probability > 0) != (side is not None) or (side is not None and side < 1):
                told = f"crops.{name}_prob and crops.{name}_size, a short side in pixels, belong together"
                raise ValueError(f"{told}; got {probability} and {side}.")


@dataclass(frozen=True)
class View:
    """A picture as the model sees it, and what was done to it: sizes and places in pixels."""

    # uint8 [height, width, channels].
    pixels: np.ndarray
    original_size: Size
    # Top and left of the part in the resized, and then mirrored, picture.
    crop: Size
    flip: bool

    @property
    def target_size(self) -> Size:
        return self.pixels.shape[0], self.pixels.shape[1]

    @property
    def controls(self) -> dict[str, np.ndarray]:
        return controls(self.original_size, self.crop, self.target_size, self.flip)


def controls(original_size: Size, crop: Size, target_size: Size, flip: bool) -> dict[str, np.ndarray]:
    """The scalars of each control condition, float32; `aspect_ratio` is log(width / height) of the original."""
    pairs = {"original_size": original_size, "crop": crop, "target_size": target_size}
    numbers = {"flip": (float(flip),), "aspect_ratio": (math.log(original_size[1] / original_size[0]),)}
    return {name: np.array(value, dtype=np.float32) for name, value in {**pairs, **numbers}.items()}


def cut_view(image: Image.Image, size: Size, channels: int, crops: Crops, generator: Generator | None) -> View:
    """Cuts a picture, on white, to a size, at random or, without a generator, from its middle and unmirrored."""
    if image.mode[0] in "IF":
        raise DataError(f"a picture has PIL mode {image.mode!r}, more than 8 bits a channel: convert it to 8 bits.")
    if image.mode == "CMYK":
        raise DataError("a picture has CMYK colours: convert it to RGB with its profile.")
    image = put_on_white(image)
    mode = "L" if channels == 1 else "RGB"
    # Pillow would copy a picture that has the mode already.
    image = image if image.mode == mode else image.convert(mode)
    if generator is not None and crops.shrink_size is not None and generator.random() < crops.shrink_prob:
        image = _shrink(image, crops.shrink_size, min(size), generator)
    original = (image.height, image.width)
    is_local = generator is not None and crops.local_prob > 0 and generator.random() < crops.local_prob
    # Just large enough for the part or, of a local crop, as large as the later training's.
    least = (crops.local_size or 0) / min(original) if is_local else 0
    scale = max(size[0] / original[0], size[1] / original[1], least)
    frame = tuple(max(part, round(side * scale)) for part, side in zip(size, original, strict=True))
    spare = (frame[0] - size[0], frame[1] - size[1])
    if generator is None or not crops.random:
        top, left = spare[0] // 2, spare[1] // 2
    else:
        top, left = (int(generator.integers(room + 1)) for room in spare)
    flip = generator is not None and bool(generator.random() < crops.flip)
    if frame != original:
        image = image.resize((frame[1], frame[0]), Image.Resampling.BICUBIC)
    pixels = np.asarray(image).reshape(*frame, channels)[top : top + size[0], left : left + size[1]]
    if flip:
        # Of widths W' (the resized picture) and W (the part): in the mirrored one it lies at W' - (left + W).
        pixels, left = pixels[:, ::-1], frame[1] - (left + size[1])
    return View(pixels, original, (top, left), flip)


def _shrink(image: Image.Image, least: int, most: int, generator: Generator) -> Image.Image:
    """The picture with a short side drawn from `least` to `most`, or as it is where that would enlarge it."""
    short = min(image.size)
    if least > (most := min(short, most)):
        return image
    side = int(generator.integers(least, most + 1))
    width, height = (max(1, round(length * side / short)) for length in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def bucket_sizes(side: int, step: int, max_ratio: float) -> list[Size]:
    """Sizes of about the same area, of multiples of `step`, from the tallest to the widest."""
    if not 1 <= step <= side or side % step or not 1 <= max_ratio < math.inf:
        wanted = f"a side that is a multiple of {step} pixels, at least 1, and a finite ratio of at least 1"
        raise UsageError(f"buckets need {wanted}; got {side} and {max_ratio}.")
    found = set()
    for short in range(step, side + 1, step):
        long = side * side // short // step * step
        if long / short <= max_ratio:
            found |= {(short, long), (long, short)}
    # Of those that differ in one side only, the larger.
    kept = [a for a in found if not any(b[0] >= a[0] and b[1] >= a[1] for b in found - {a})]
    return sorted(kept, key=lambda size: size[1] / size[0])


def nearest_bucket(original: Size, buckets: list[Size]) -> Size:
    """The bucket whose log(width / height) is nearest to a picture's."""
    wanted = math.log(original[1] / original[0])
    return min(buckets, key=lambda size: abs(math.log(size[1] / size[0]) - wanted))


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
    pairs = {name: list(getattr(view, name)) for name in ("original_size", "crop", "target_size")}
    given = {"latent": latent} if spread is None else {"latent": latent, SPREAD: spread}
    halves = {name: value.cpu().to(torch.float16).numpy().tobytes() for name, value in given.items()}
    return {"latent_shape": list(latent.shape), **pairs, "flip": int(view.flip), **halves}


def read_row(row: dict[str, Any], generator: Generator | None = None) -> tuple[Tensor, dict[str, np.ndarray]]:
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


def write_tar(path: Path, examples: Iterable[tuple[str, dict[str, bytes]]]) -> None:
    """Writes examples, each a name and the content of its files by their endings, as a tar file that is whole or
    absent: equal ones make equal tar files."""
    with whole_file(path) as file, tarfile.open(fileobj=file, mode="w") as tar:
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
    # Read by `datasets` alone it is no text.
    if isinstance(told, str) and '"latent_shape"' in told:
        told = json.loads(told)
    if not isinstance(told, dict) or "latent_shape" not in told:
        return row
    found = {**row, **told}
    for name in (name for name in row if f"{name}{SIZES}" in told):
        content = io.BytesIO(row[name])
        found[name] = [content.read(size) for size in told[f"{name}{SIZES}"]]
    return found
