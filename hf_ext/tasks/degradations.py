"""Degradations of clean images, as the published numbers of image restoration are made: functions, and settings of a
training of SemanIR with its draws and patches. Never shipped with models.

Images are numpy arrays `[height, width, channels]`, uint8, or floating with white at 1. All randomness comes from a
generator that is passed in.
"""

import io
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from huggingface_hub.dataclasses import strict
from numpy.random import Generator
from PIL import Image

from hf_ext.semanir.image_processing_semanir import from_unit
from hf_ext.settings import SettingsError, build

from ..errors import UsageError
from .checks import require

# Red, green, green and blue sites of the 2 x 2 cell, as (row, column): the channel order of a packed mosaic.
_RGGB = ((0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 2))
# Standard deviations after which a Gaussian is cut off.
BLUR_REACH = 4
# JPEG codes 16 x 16 pixels together where chroma is halved; chroma is interpolated from the neighbouring ones.
JPEG_UNIT = 16
# Input pixels beyond which the kernel of the bicubic shrinking does not reach.
BICUBIC_REACH = 4
# Pixels around a patch that are degraded with it in a chain: a multiple of JPEG's unit, beyond the reach of its steps.
CHAIN_REACH = 48


def matlab_bicubic(image: np.ndarray, scale: float) -> np.ndarray:
    """
    Resizes an image as MATLAB's `imresize(image, scale, "bicubic")` does, which super-resolution numbers rest on.

    Output pixel `x` (from 0) lies at `u = (x + 1/2) / scale - 1/2` of the input and is the sum over input pixels `i`
    of `h(u - i)`, normalised. `h` is the cubic kernel of Keys with `a = -1/2`; where the image shrinks, it is `scale
    h(scale t)`, so wide that nothing aliases. Beyond its edge the image is mirrored, the edge pixel doubled.
    """
    _check(image)
    result = _filter(image, [_contributions(length, scale) for length in image.shape[:2]])
    if image.dtype == np.uint8:
        # MATLAB rounds halves up, numpy to even.
        return np.clip(np.floor(result + 0.5), 0, 255).astype(np.uint8)
    return result.astype(image.dtype)


def _filter(image: np.ndarray, taps: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """The image, in float64, of which each row and then each column is a sum of others: weights and sources of both,
    [output, taps]. Beyond its edge it is mirrored, the edge pixel doubled."""
    result = image.astype(np.float64)
    for axis, (weights, sources) in enumerate(taps):
        lines, length = np.moveaxis(result, axis, 0), image.shape[axis]
        sources = sources % (2 * length)
        sources = np.where(sources < length, sources, 2 * length - 1 - sources)
        # One tap at a time: a dense matrix would multiply by zeros, a gather would copy the image for every tap.
        total = np.zeros((len(sources), *lines.shape[1:]))
        for tap in range(sources.shape[1]):
            total += weights[:, tap].reshape(-1, *[1] * (lines.ndim - 1)) * lines[sources[:, tap]]
        result = np.moveaxis(total, 0, axis)
    return result


def _contributions(length: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Weights and source pixels of every output pixel along one axis, both [ceil(length * scale), taps]."""
    shrinking = min(scale, 1.0)
    width = 4.0 / shrinking
    # 1e-9: a factor such as 1 / 3 is not exact, and 9 * (1 / 3) pixels are no four.
    places = (np.arange(math.ceil(length * scale - 1e-9)) + 0.5) / scale - 0.5
    sources = np.floor(places - width / 2)[:, None].astype(np.int64) + np.arange(math.ceil(width) + 2)
    x = np.abs((places[:, None] - sources) * shrinking)
    near, far = (1.5 * x - 2.5) * x**2 + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    weights = np.where(x <= 1, near, np.where(x <= 2, far, 0.0))
    return weights / weights.sum(axis=1, keepdims=True), sources


def blur(image: np.ndarray, sigma: float) -> np.ndarray:
    """Blurs an image with a Gaussian of this standard deviation in pixels; uint8 is rounded."""
    _check(image)
    reach = math.ceil(BLUR_REACH * sigma)
    if reach == 0:
        return image
    offsets = np.arange(-reach, reach + 1)
    weights = np.exp(-0.5 * (offsets / sigma) ** 2)[None]
    taps = [(weights / weights.sum(), np.arange(length)[:, None] + offsets) for length in image.shape[:2]]
    result = _filter(image, taps)
    return np.rint(result).astype(np.uint8) if image.dtype == np.uint8 else result.astype(image.dtype)


def resize_and_back(image: np.ndarray, factor: float) -> np.ndarray:
    """Resizes a uint8 image by a factor and back to its size, as pictures that were passed on: Pillow's bicubic."""
    picture = _picture(image)
    size = [max(1, round(side * factor)) for side in picture.size]
    smaller = picture.resize(size, Image.Resampling.BICUBIC)
    return np.asarray(smaller.resize(picture.size, Image.Resampling.BICUBIC)).reshape(image.shape)


def gaussian_noise(image: np.ndarray, sigma: float, generator: Generator) -> np.ndarray:
    """Adds white Gaussian noise, independent for each channel. The result is neither clipped nor rounded."""
    clean = unit_range(image)
    return clean + np.float32(sigma / 255) * generator.standard_normal(clean.shape, dtype=np.float32)


def jpeg(image: np.ndarray, quality: int) -> np.ndarray:
    """Compresses an image as JPEG, of colour 4:2:0 as published numbers have it, and decodes it with Pillow again."""
    buffer = io.BytesIO()
    _picture(image).save(buffer, "JPEG", quality=int(quality), subsampling="4:2:0")
    return np.asarray(Image.open(buffer)).reshape(image.shape)


def _picture(image: np.ndarray) -> Image.Image:
    _check(image, eight_bits=True)
    return Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)


def matlab_luma(image: np.ndarray) -> np.ndarray:
    """
    Y of a colour image as MATLAB's `rgb2ycbcr` makes it of 8 bits, which published numbers of grey JPEG rest on: `16 +
    (65.481 R + 128.553 G + 24.966 B) / 255`, rounded, from 16 (black) to 235 (white). Computed in whole numbers: the
    coefficients are 0.219 times 299, 587 and 114, and 0.219 / 255 is 73 / 85000. Halves are rounded up.
    """
    _check(image, eight_bits=True)
    weighted = image.astype(np.int64) @ np.array([[299], [587], [114]])
    return (16 + (73 * weighted + 42500) // 85000).astype(np.uint8)


def mosaic(image: np.ndarray) -> np.ndarray:
    """Picture of a sensor behind an RGGB Bayer filter: one colour per pixel, packed to [h / 2, w / 2, 4]."""
    return np.stack([image[row::2, column::2, channel] for row, column, channel in _RGGB], axis=-1)


def unpack_mosaic(packed: np.ndarray) -> np.ndarray:
    """The inverse of [`mosaic`] where there is one: an RGB image that is black where nothing was measured."""
    image = np.zeros((2 * packed.shape[0], 2 * packed.shape[1], 3), packed.dtype)
    for index, (row, column, channel) in enumerate(_RGGB):
        image[row::2, column::2, channel] = packed[..., index]
    return image


def unit_range(image: np.ndarray) -> np.ndarray:
    """An image as float32 with white at 1."""
    _check(image)
    return image.astype(np.float32) / 255 if image.dtype == np.uint8 else image.astype(np.float32)


def _check(image: np.ndarray, eight_bits: bool = False) -> None:
    """Refuses values whose range is unknown; strengths are checked where the settings are read."""
    if image.dtype != np.uint8 and (eight_bits or not np.issubdtype(image.dtype, np.floating)):
        allowed = "uint8" if eight_bits else "uint8, or floats with white at 1"
        raise TypeError(f"the image has {image.dtype}; {allowed} is needed.")


# The strength of each kind that has one: its field, least and largest value, words for titles, and the function.
STRENGTHS: dict[str, tuple[str, float, float, str, Any]] = {
    "gaussian_noise": ("sigma", 0, 255, "Gaussian noise σ", gaussian_noise),
    "blur": ("sigma", 0, 8, "blur σ", blur),
    "jpeg": ("quality", 1, 100, "JPEG quality", jpeg),
    "resize": ("factor", 0.1, 4, "resizing by", resize_and_back),
}


@strict
@dataclass
class Degradation:
    """
    One degradation of a task.

    Args:
        kind (`str`): `"gaussian_noise"`; `"jpeg"`, compression of the whole image (colour 4:2:0); `"blur"`, Gaussian;
            `"resize"`, by a factor and back, as in forwarded pictures; `"bicubic"`, MATLAB's reduction by the model's
            scale, rounded to 8 bits; `"mosaic"`, a packed RGGB Bayer mosaic; `"paired"`, degraded images of `lq`/`hq`
            pairs; `"chain"`, several in sequence.
        sigma (`float` or `[low, high]`, *optional*): Standard deviation: of noise in 8-bit levels, of a blur in
            pixels. From a range, each sample draws a value uniformly (blind).
        quality (`int` or `[low, high]`, *optional*): JPEG quality, 1 to 100; drawn uniformly from a range.
        factor (`float` or `[low, high]`, *optional*): Factor of a resize, 0.1 to 4.
        clip (`float`, defaults to 0.0): For noise: probability of clipping and rounding the noisy picture to 8 bits,
            as in files.
        steps (`list[dict]`, *optional*): For a chain: noise, blur, resize and jpeg, each with its strength. Each step
            ends with rounding to 8 bits.
        shuffle (`bool`, defaults to `False`): For a chain: apply its steps in random order.
        chance (`float`, defaults to 1.0): For a step of a chain: probability of the step.
        weight (`float`, defaults to 1.0): Relative frequency in training, among the degradations of a list.
    """

    kind: Literal["gaussian_noise", "jpeg", "blur", "resize", "bicubic", "mosaic", "paired", "chain"]
    sigma: float | list | None = None
    quality: int | list | None = None
    factor: float | list | None = None
    clip: float = 0.0
    steps: list | None = None
    shuffle: bool = False
    chance: float = 1.0
    weight: float = 1.0

    @cached_property
    def links(self) -> list["Degradation"]:
        return [build(Degradation, step, f"steps[{place}]") for place, step in enumerate(self.steps or [])]

    def validate_steps(self) -> None:
        if (self.kind == "chain") != bool(self.links):
            told = "steps are required for kind chain and not allowed for other kinds"
            raise ValueError(f"{told}; got {self.steps}, {self.kind}.")
        if self.shuffle and self.kind != "chain":
            raise ValueError(f"shuffle is only for kind chain, got it with {self.kind}.")
        if odd := [link.kind for link in self.links if link.kind not in STRENGTHS or link.weight != 1 or link.clip]:
            raise ValueError(f"a chain has steps of kind {', '.join(STRENGTHS)}, no weight and no clip; got {odd[0]}.")

    def validate_strength(self) -> None:
        own, low, high, *_ = STRENGTHS.get(self.kind, ("", 0, 0, "", None))
        for name in ("sigma", "quality", "factor"):
            if ((value := getattr(self, name)) is not None) != (name == own):
                kinds = " and ".join(kind for kind, strength in STRENGTHS.items() if strength[0] == name)
                raise ValueError(f"{name} belongs to kind {kinds} and is needed there; got {value} with {self.kind}.")
        if not own:
            return
        value = self.strength
        ends = value if isinstance(value, list) else [value, value]
        wanted, what = ((int,), "a whole number") if own == "quality" else ((int, float), "a number")
        are_numbers = all(isinstance(end, wanted) and not isinstance(end, bool) for end in ends)
        if len(ends) != 2 or not are_numbers or not low <= ends[0] <= ends[1] <= high or ends[1] == 0:
            raise ValueError(f"{own} must be {what} or a range [low, high] from {low} to {high}, got {value}.")

    def validate_weight(self) -> None:
        require(
            self,
            ("weight", 0 < self.weight < math.inf, "more than 0 (remove a degradation that is never drawn)"),
            ("chance", 0 < self.chance <= 1, "more than 0 and at most 1"),
        )
        if not 0 <= self.clip <= 1 or (self.clip and self.kind != "gaussian_noise"):
            raise ValueError(f"clip belongs to kind gaussian_noise, from 0 to 1; got {self.clip} with {self.kind}.")

    @property
    def label(self) -> str:
        """Part of a metric's name: `jpeg_10`, `gaussian_noise_5_to_50`, `chain_blur_1_jpeg_60`."""
        details = self._details("_to_", f"clipped_{self.clip:g}")
        return "_".join([self.kind, *(link.label for link in self.links), *details])

    @property
    def title(self) -> str:
        """The same in words: `JPEG quality 10`."""
        if self.links:
            order = "in random order" if self.shuffle else "in this order"
            return f"{', '.join(link.title for link in self.links)} {order}"
        words = {"mosaic": "RGGB mosaic", **{kind: strength[3] for kind, strength in STRENGTHS.items()}}
        details = self._details(" to ", f"clipped in {100 * self.clip:g} %")
        chance = [] if self.chance == 1 else [f"({100 * self.chance:g} %)"]
        return " ".join([words.get(self.kind, self.kind), *details, *chance])

    @property
    def strength(self) -> Any:
        """The sigma, quality or factor: a number, a range, or None."""
        return getattr(self, STRENGTHS[self.kind][0]) if self.kind in STRENGTHS else None

    def _details(self, joint: str, sometimes_clipped: str) -> list[str]:
        value = self.strength
        ends = value if isinstance(value, list) else [] if value is None else [value]
        clipped = [] if not self.clip else ["clipped" if self.clip == 1 else sometimes_clipped]
        return [*([joint.join(f"{end:g}" for end in ends)] if ends else []), *clipped]

    def drawn(self, generator: Generator) -> "Degradation":
        """The degradation of one sample: a value drawn of each range, clipped or not; of what is fixed nothing."""
        values: dict[str, Any] = {}
        if isinstance(self.strength, list):
            low, high = self.strength
            whole = self.kind == "jpeg"
            value = int(generator.integers(low, high, endpoint=True)) if whole else float(generator.uniform(low, high))
            values[STRENGTHS[self.kind][0]] = value
        if 0 < self.clip < 1:
            values["clip"] = float(generator.random() < self.clip)
        return replace(self, **values) if values else self

    def whole(self, images: list[np.ndarray], scale: int, generator: Generator) -> list[np.ndarray]:
        """Degraded and clean image, float32 in [0, 1], of a clean one in uint8, cut to a multiple of the scale."""
        clean = images[-1]
        clean = clean[: clean.shape[0] // scale * scale, : clean.shape[1] // scale * scale]
        degraded = images[0] if self.kind == "paired" else self.drawn(generator).of(clean, scale, generator)
        return [unit_range(degraded), unit_range(clean)]

    def of(self, clean: np.ndarray, scale: int, generator: Generator) -> np.ndarray:
        """The degraded form, uint8 or float32 with white at 1, of a clean image; `self` is drawn and not `paired`."""
        if self.kind in ("mosaic", "bicubic"):
            return mosaic(clean) if self.kind == "mosaic" else matlab_bicubic(clean, 1 / scale)
        if self.kind == "gaussian_noise":
            noisy = gaussian_noise(clean, self.strength, generator)
            return from_unit(noisy) if self.clip else noisy
        if self.kind in STRENGTHS:
            degraded: np.ndarray = STRENGTHS[self.kind][4](clean, self.strength)
            return degraded
        for place in generator.permutation(len(self.links)) if self.shuffle else range(len(self.links)):
            link = self.links[place]
            taken, step = generator.random() < link.chance, link.drawn(generator)
            if taken:
                # uint8 after each step.
                clean = from_unit(unit_range(step.of(clean, 1, generator)))
        return clean

    def patch(self, images: list[np.ndarray], scale: int, size: int, generator: Generator) -> list[np.ndarray]:
        """
        A random patch, flipped and turned. JPEG, blurred and bicubic patches are those of the whole degraded image,
        yet only their surroundings are computed: what lies farther away has no influence. For a chain, and what is
        resized, the surroundings are the picture: their size is what is resized, and their pixels are given the noise.
        """
        chosen = self.drawn(generator)
        # Those of a pair are enlarged alike.
        clean = _enlarge(images[-1], size, scale) if chosen.kind == "paired" else _enlarge(images[-1], size * scale)
        top, left = (int(generator.integers(side // scale - size + 1)) for side in clean.shape[:2])
        turns, mirror = int(generator.integers(4)), bool(generator.integers(2))
        target = _turn(_cut(clean, top * scale, left * scale, size * scale), turns, mirror)
        if chosen.kind in ("gaussian_noise", "mosaic"):
            # After turning, which would change the order of a mosaic's colours.
            degraded = chosen.of(target, scale, generator)
        elif chosen.kind == "paired":
            degraded = _turn(_cut(_enlarge(images[0], size), top, left, size), turns, mirror)
        else:
            if chosen.kind == "bicubic":
                unit, reach = scale, BICUBIC_REACH * scale
            elif chosen.kind == "blur":
                unit, reach = 1, math.ceil(BLUR_REACH * chosen.strength)
            else:
                unit, reach = JPEG_UNIT, JPEG_UNIT if chosen.kind == "jpeg" else CHAIN_REACH
            starts = [max(0, place * scale // unit * unit - reach) for place in (top, left)]
            stops = [-(-(place + size) * scale // unit) * unit + reach for place in (top, left)]
            # Beyond the last whole multiple of the scale nothing is shrunk.
            stops = [min(stop, side // scale * scale) for stop, side in zip(stops, clean.shape[:2], strict=True)]
            around = chosen.of(clean[starts[0] : stops[0], starts[1] : stops[1]], scale, generator)
            patch = _cut(around, top - starts[0] // scale, left - starts[1] // scale, size)
            degraded = _turn(patch, turns, mirror)
        return [unit_range(degraded), unit_range(target)]


def read_degradations(value: Any, where: str) -> list[Degradation]:
    """Reads one degradation or a list, no two of one name; `where` is the section's name for messages."""
    listed = isinstance(value, list)
    items = {f"{where}[{index}]": item for index, item in enumerate(value)} if listed else {where: value}
    degradations = [_read_one(item, place) for place, item in items.items()]
    if any(degradation.chance != 1 for degradation in degradations):
        raise UsageError(f"{where}: chance is only for the steps of a chain; degradations of a list have a weight.")
    labels = [degradation.label for degradation in degradations]
    if not labels or len(set(labels)) < len(labels):
        raise UsageError(f"{where} must contain at least one degradation, and each only once; got {labels}.")
    return degradations


def _read_one(value: Any, where: str) -> Degradation:
    try:
        return build(Degradation, value, where)
    except SettingsError as error:
        # A step of a chain does not know where the chain stands.
        raise error if where in str(error) else SettingsError(f"{where}: {error}") from error


def _enlarge(image: np.ndarray, size: int, block: int = 1) -> np.ndarray:
    """At least `size` blocks of pixels on each side, reflected at the bottom and right block by block."""
    for axis in (0, 1):
        count = image.shape[axis] // block
        if count < size:
            blocks = np.pad(np.arange(count), (0, size - count), mode="reflect")
            places = blocks[:, None] * block + np.arange(block)
            # Where it runs backwards, a block is mirrored in itself too.
            backwards = np.diff(blocks, prepend=-1) < 0
            places[backwards] = places[backwards, ::-1]
            image = image.take(places.reshape(-1), axis)
    return image


def _cut(image: np.ndarray, top: int, left: int, size: int) -> np.ndarray:
    return image[top : top + size, left : left + size]


def _turn(image: np.ndarray, turns: int, mirror: bool) -> np.ndarray:
    image = np.rot90(image, turns)
    return image[:, ::-1] if mirror else image
