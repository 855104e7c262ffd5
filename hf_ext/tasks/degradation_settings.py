"""Degradation of clean images in a training of SemanIR: its settings, its draws, and patches of the result."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from huggingface_hub.dataclasses import strict

from hf_ext.semanir.image_processing_semanir import from_unit
from hf_ext.settings import SettingsError, build

from ..errors import UsageError
from .checks import require
from .degradations import BLUR_REACH, blur, gaussian_noise, jpeg, matlab_bicubic, mosaic, resize_and_back, unit_range

# JPEG codes 16 x 16 pixels together where chroma is halved; chroma is interpolated from the neighbouring ones.
JPEG_UNIT = 16
# Input pixels beyond which the kernel of the bicubic shrinking does not reach.
BICUBIC_REACH = 4
# Pixels around a patch that are degraded with it in a chain: a multiple of JPEG's unit, beyond the reach of its steps.
CHAIN_REACH = 48
# The strength of each kind that has one: its field, least and largest value, and words for titles.
STRENGTHS = {
    "gaussian_noise": ("sigma", 0, 255, "Gaussian noise σ"),
    "blur": ("sigma", 0, 8, "blur σ"),
    "jpeg": ("quality", 1, 100, "JPEG quality"),
    "resize": ("factor", 0.1, 4, "resizing by"),
}
_BY_STRENGTH = {"jpeg": jpeg, "blur": blur, "resize": resize_and_back}


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
        """The steps of a chain."""
        return [build(Degradation, step, f"steps[{place}]") for place, step in enumerate(self.steps or [])]

    def validate_steps(self) -> None:
        if (self.kind == "chain") != bool(self.links):
            raise ValueError(
                f"steps are required for kind chain and not allowed for other kinds; got {self.steps}, {self.kind}."
            )
        if self.shuffle and self.kind != "chain":
            raise ValueError(f"shuffle is only for kind chain, got it with {self.kind}.")
        if odd := [link.kind for link in self.links if link.kind not in STRENGTHS or link.weight != 1 or link.clip]:
            raise ValueError(f"a chain has steps of kind {', '.join(STRENGTHS)}, no weight and no clip; got {odd[0]}.")

    def validate_strength(self) -> None:
        """Checks the strength of the kind and its limits."""
        own, low, high, _ = STRENGTHS.get(self.kind, ("", 0, 0, ""))
        for name in ("sigma", "quality", "factor"):
            value = getattr(self, name)
            if (value is not None) != (name == own):
                kinds = " and ".join(kind for kind, strength in STRENGTHS.items() if strength[0] == name)
                raise ValueError(f"{name} belongs to kind {kinds} and is needed there; got {value} with {self.kind}.")
            if value is None:
                continue
            wanted = (int,) if name == "quality" else (int, float)
            ends = value if isinstance(value, list) else [value, value]
            are_numbers = all(isinstance(end, wanted) and not isinstance(end, bool) for end in ends)
            if len(ends) != 2 or not are_numbers or not low <= ends[0] <= ends[1] <= high or ends[1] == 0:
                what = "a whole number" if name == "quality" else "a number"
                raise ValueError(f"{name} must be {what} or a range [low, high] from {low} to {high}, got {value}.")

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
        clipped = [] if not self.clip else ["clipped"] if self.clip == 1 else [f"clipped_{self.clip:g}"]
        return "_".join([self.kind, *(link.label for link in self.links), *self._strength("_to_"), *clipped])

    @property
    def title(self) -> str:
        """The same in words: `JPEG quality 10`."""
        if self.links:
            order = "in random order" if self.shuffle else "in this order"
            return f"{', '.join(link.title for link in self.links)} {order}"
        words = {"mosaic": "RGGB mosaic", **{kind: strength[3] for kind, strength in STRENGTHS.items()}}
        chance = [] if self.chance == 1 else [f"({100 * self.chance:g} %)"]
        clipped = [] if not self.clip else ["clipped"] if self.clip == 1 else [f"clipped in {100 * self.clip:g} %"]
        return " ".join([words.get(self.kind, self.kind), *self._strength(" to "), *clipped, *chance])

    @property
    def strength(self) -> Any:
        """The sigma, quality or factor: a number, a range, or None."""
        return getattr(self, STRENGTHS[self.kind][0]) if self.kind in STRENGTHS else None

    def _strength(self, joint: str) -> list[str]:
        value = self.strength
        ends = value if isinstance(value, list) else [] if value is None else [value]
        return [joint.join(f"{end:g}" for end in ends)] if ends else []

    def drawn(self, generator: np.random.Generator) -> "Degradation":
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

    def whole(self, images: list[np.ndarray], scale: int, generator: np.random.Generator) -> list[np.ndarray]:
        """Degraded and clean image, float32 in [0, 1], of a clean one in uint8, cut to a multiple of the scale."""
        clean = images[-1]
        clean = clean[: clean.shape[0] // scale * scale, : clean.shape[1] // scale * scale]
        degraded = images[0] if self.kind == "paired" else self.drawn(generator).of(clean, scale, generator)
        return [unit_range(degraded), unit_range(clean)]

    def of(self, clean: np.ndarray, scale: int, generator: np.random.Generator) -> np.ndarray:
        """The degraded form, uint8 or float32 with white at 1, of a clean image; `self` is drawn and not `paired`."""
        if self.kind == "gaussian_noise":
            noisy = gaussian_noise(clean, self.strength, generator)
            return from_unit(noisy) if self.clip else noisy
        if self.kind in _BY_STRENGTH:
            return _BY_STRENGTH[self.kind](clean, self.strength)
        if self.kind == "chain":
            return self._through_steps(clean, generator)
        return mosaic(clean) if self.kind == "mosaic" else matlab_bicubic(clean, 1 / scale)

    def _through_steps(self, clean: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """A uint8 image through the steps of a chain, in random order if they are shuffled; uint8 after each."""
        order = generator.permutation(len(self.links)) if self.shuffle else range(len(self.links))
        image = clean
        for place in order:
            link = self.links[place]
            taken, step = generator.random() < link.chance, link.drawn(generator)
            if taken:
                image = from_unit(unit_range(step.of(image, 1, generator)))
        return image

    def patch(
        self, images: list[np.ndarray], scale: int, size: int, generator: np.random.Generator
    ) -> list[np.ndarray]:
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
        target = _turned(_cut(clean, top * scale, left * scale, size * scale), turns, mirror)
        if chosen.kind in ("gaussian_noise", "mosaic"):
            # After turning, which would change the order of a mosaic's colours.
            degraded = chosen.of(target, scale, generator)
        elif chosen.kind == "paired":
            degraded = _turned(_cut(_enlarge(images[0], size), top, left, size), turns, mirror)
        else:
            degraded = _turned(chosen._surrounded(clean, scale, top, left, size, generator), turns, mirror)
        return [unit_range(degraded), unit_range(target)]

    def _surrounded(
        self, clean: np.ndarray, scale: int, top: int, left: int, size: int, generator: np.random.Generator
    ) -> np.ndarray:
        """A patch of the degraded image, made of no more of the clean one than matters."""
        if self.kind == "bicubic":
            unit, reach = scale, BICUBIC_REACH * scale
        elif self.kind == "blur":
            unit, reach = 1, math.ceil(BLUR_REACH * self.strength)
        else:
            unit, reach = JPEG_UNIT, JPEG_UNIT if self.kind == "jpeg" else CHAIN_REACH
        starts = [max(0, place * scale // unit * unit - reach) for place in (top, left)]
        stops = [-(-(place + size) * scale // unit) * unit + reach for place in (top, left)]
        # Beyond the last whole multiple of the scale nothing is shrunk.
        stops = [min(stop, side // scale * scale) for stop, side in zip(stops, clean.shape[:2], strict=True)]
        around = self.of(clean[starts[0] : stops[0], starts[1] : stops[1]], scale, generator)
        return _cut(around, top - starts[0] // scale, left - starts[1] // scale, size)


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
    height, width = (side // block for side in image.shape[:2])
    if min(height, width) >= size:
        return image
    rows, columns = (_find_mirrored(count, size, block) for count in (height, width))
    return image[rows][:, columns]


def _find_mirrored(count: int, size: int, block: int) -> np.ndarray:
    """The places of `count` blocks of pixels and, up to `size` blocks, of those that follow in a mirror."""
    blocks = np.pad(np.arange(count), (0, max(0, size - count)), mode="reflect")
    places = blocks[:, None] * block + np.arange(block)
    # Where it runs backwards, a block is mirrored in itself too.
    backwards = np.diff(blocks, prepend=-1) < 0
    places[backwards] = places[backwards, ::-1]
    return places.reshape(-1)


def _cut(image: np.ndarray, top: int, left: int, size: int) -> np.ndarray:
    return image[top : top + size, left : left + size]


def _turned(image: np.ndarray, turns: int, mirror: bool) -> np.ndarray:
    image = np.rot90(image, turns)
    return image[:, ::-1] if mirror else image
