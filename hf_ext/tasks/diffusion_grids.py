"""Pictures of many pictures: a row for each class or text, its name at the left."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from PIL import Image, ImageDraw, ImageFont

from hf_ext.files import whole_file
from hf_ext.pipelines.disentangled_dit.pipeline import DisentangledDiTPipeline

# Pixels between the pictures, and of a picture at least, so that small ones can be seen.
GAP, LEAST = 2, 64
# Pixels that are drawn at once unless a caller says otherwise: two pictures of 512 x 512, 512 of 32 x 32.
PIXELS = 2 * 512 * 512


def draw_grid(rows: list[list[Image.Image]], names: list[str], least: int = LEAST) -> Image.Image:
    """Draws rows of pictures with their names, each enlarged to at least so many pixels."""
    width, height = rows[0][0].size
    factor = max(1, -(-least // max(width, height)))
    width, height = factor * width, factor * height
    font = ImageFont.load_default()
    margin = max(int(font.getlength(_short(name))) for name in names) + 3 * GAP
    sheet = Image.new("RGB", (margin + len(rows[0]) * (width + GAP), len(rows) * (height + GAP)), "white")
    draw = ImageDraw.Draw(sheet)
    for row, (pictures, name) in enumerate(zip(rows, names, strict=True)):
        top = row * (height + GAP)
        draw.text((GAP, top + height // 2), _short(name), fill="black", font=font, anchor="lm")
        for column, picture in enumerate(pictures):
            enlarged = picture.convert("RGB").resize((width, height), Image.Resampling.NEAREST)
            sheet.paste(enlarged, (margin + column * (width + GAP), top))
    return sheet


def _short(name: str) -> str:
    """At most 24 characters that the built-in font has."""
    plain = name.encode("latin-1", "replace").decode("latin-1").splitlines() or [""]
    return plain[0] if len(plain[0]) <= 24 else plain[0][:23] + "."


def sample_rows(
    pipeline: DisentangledDiTPipeline,
    conditions: list[Any],
    columns: int,
    seed: int,
    batch_size: int | None = None,
    **options: Any,
) -> list[list[Image.Image]]:
    """Samples in rows; those of a column start from the same noise."""
    wanted = [condition for condition in conditions for _ in range(columns)]
    # torch takes 64 bits.
    seeds = [(seed * 100_003 + column) % 2**63 for column in range(columns)] * len(conditions)
    size = batch_size or default_batch_size(pipeline, options)
    pictures = list(draw_pictures(pipeline, wanted, seeds, size, **options))
    return [pictures[start : start + columns] for start in range(0, len(pictures), columns)]


def default_batch_size(pipeline: DisentangledDiTPipeline, options: dict[str, Any]) -> int:
    """Pictures of the asked size that have about half a million pixels."""
    height, width = pipeline.image_size(options.get("height"), options.get("width"))
    return max(1, PIXELS // (height * width))


@torch.no_grad()
def draw_pictures(
    pipeline: DisentangledDiTPipeline, conditions: list[Any], seeds: list[int], batch_size: int, **options: Any
) -> Iterator[Image.Image]:
    """Draws a picture of each class or text, from the noise of its seed: in batches, and in smaller ones where memory
    is short. They do not change a picture (but for the last bits of sums)."""
    key = "prompt" if pipeline.transformer.config.num_classes is None else "class_labels"
    done = 0
    while part := conditions[done : done + batch_size]:
        noise = [torch.Generator().manual_seed(seed) for seed in seeds[done : done + batch_size]]
        try:
            with decode_in_slices(pipeline.vae):
                output: Any = pipeline(generator=noise, **{key: part, **options})
        except RuntimeError as error:
            if len(part) == 1 or not should_reduce_batch_size(error):
                raise
            batch_size = len(part) // 2
            clear_device_cache(garbage_collection=True)
        else:
            done += len(part)
            yield from output.images


@contextlib.contextmanager
def decode_in_slices(vae: Any) -> Iterator[None]:
    """One picture at a time through an autoencoder that can do so: decoding takes the most memory of all steps."""
    was_sliced = getattr(vae, "use_slicing", None)
    if was_sliced is not None:
        vae.use_slicing = True
    try:
        yield
    finally:
        # A training encodes whole batches with the same one.
        if was_sliced is not None:
            vae.use_slicing = was_sliced


def write_picture(picture: Image.Image, path: Path) -> Path:
    """Writes a PNG that is whole or absent."""
    with whole_file(path) as file:
        picture.save(file, format="png")
    return path
