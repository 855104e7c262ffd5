"""Pictures as the Disentangled DiT is trained on them: cut, mirrored, and described by their controls.

A picture is resized, cut to the size that the model sees, and then perhaps mirrored. What was done is recorded as the
model's control conditions (arXiv 2411.03177), so that sampling can ask for a whole, unmirrored picture.
"""

import math
from dataclasses import dataclass

import numpy as np
from huggingface_hub.dataclasses import strict
from PIL import Image

from ..errors import DataError, UsageError
from .pictures import put_on_white

# Height and width in pixels.
Size = tuple[int, int]


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
        for name, about in (
            ("local", "the short side of the later training's pictures"),
            ("shrink", "the least short side of a smaller original"),
        ):
            probability, side = getattr(self, f"{name}_prob"), getattr(self, f"{name}_size")
            if (probability > 0) != (side is not None) or (side is not None and side < 1):
                raise ValueError(
                    f"crops.{name}_prob and crops.{name}_size belong together; got {probability} and {side}. "
                    f"{name}_size is {about}, in pixels."
                )


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
    values: dict[str, tuple[float, ...]] = {
        "original_size": original_size,
        "crop": crop,
        "target_size": target_size,
        "flip": (float(flip),),
        "aspect_ratio": (math.log(original_size[1] / original_size[0]),),
    }
    return {name: np.array(value, dtype=np.float32) for name, value in values.items()}


def cut_view(
    image: Image.Image, size: Size, channels: int, crops: Crops, generator: np.random.Generator | None
) -> View:
    """Cuts a picture, on white, to a size, at random or, without a generator, from its middle and unmirrored."""
    if image.mode[0] in "IF":
        raise DataError(f"a picture has PIL mode {image.mode!r}, more than 8 bits a channel: convert it to 8 bits.")
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


def _shrink(image: Image.Image, least: int, most: int, generator: np.random.Generator) -> Image.Image:
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
        raise UsageError(
            f"buckets need a side that is a multiple of {step} pixels, at least 1, and a finite ratio of at least 1; "
            f"got {side} and {max_ratio}."
        )
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
