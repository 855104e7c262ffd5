"""What a training task of SemanIR does to clean images: its settings, its draws, and patches of the result."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from huggingface_hub.dataclasses import strict

from hf_ext.settings import build

from .degradations import gaussian_noise, jpeg, matlab_bicubic, mosaic, unit_range

# JPEG codes 16 x 16 pixels together where chroma is halved; chroma is interpolated from the neighbouring ones.
JPEG_UNIT = 16
# Input pixels beyond which the kernel of the bicubic shrinking does not reach.
BICUBIC_REACH = 4


@strict
@dataclass
class Degradation:
    """
    One degradation of a task.

    Args:
        kind (`str`): `"gaussian_noise"`, neither clipped nor rounded; `"jpeg"`, the whole image compressed (colour
            4:2:0); `"bicubic"`, shrunk by the model's scale as MATLAB does and rounded to 8 bits; `"mosaic"`, a packed
            RGGB Bayer mosaic; `"paired"`, images that come as `lq`/`hq` pairs.
        sigma (`float` or `[low, high]`, *optional*):
            Standard deviation of the noise in 8-bit levels; of a range it is drawn evenly for each sample (blind).
        quality (`int` or `[low, high]`, *optional*): JPEG quality, 1 to 100; of a range it is drawn evenly.
        weight (`float`, defaults to 1.0): How often training draws it, among the others of a list.
    """

    kind: Literal["gaussian_noise", "jpeg", "bicubic", "mosaic", "paired"]
    sigma: float | list | None = None
    quality: int | list | None = None
    weight: float = 1.0

    def validate_strength(self) -> None:
        """Noise has a sigma, JPEG a quality, the others neither; both within their limits."""
        for name, kind, limits in (("sigma", "gaussian_noise", (0, 255)), ("quality", "jpeg", (1, 100))):
            value = getattr(self, name)
            if (value is not None) != (self.kind == kind):
                raise ValueError(f"{name} belongs to kind {kind} and is needed there; got {value} with {self.kind}.")
            if value is None:
                continue
            wanted = (int,) if name == "quality" else (int, float)
            ends = value if isinstance(value, list) else [value, value]
            if (
                len(ends) != 2
                or any(isinstance(end, bool) or not isinstance(end, wanted) for end in ends)
                or not limits[0] <= ends[0] <= ends[1] <= limits[1]
                or ends[1] == 0
            ):
                what = "a whole number" if name == "quality" else "a number"
                raise ValueError(
                    f"{name} must be {what} or a range [low, high] from {limits[0]} to {limits[1]}, got {value}."
                )

    def validate_weight(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight must be more than 0, got {self.weight}: leave out what is never to be drawn.")

    @property
    def label(self) -> str:
        """Part of a metric's name: `jpeg_10`, `gaussian_noise_5_to_50`."""
        return "_".join([self.kind, *self._strength("_to_")])

    @property
    def title(self) -> str:
        """The same in words: `JPEG quality 10`."""
        words = {"gaussian_noise": "Gaussian noise σ", "jpeg": "JPEG quality", "mosaic": "RGGB mosaic"}
        return " ".join([words.get(self.kind, self.kind), *self._strength(" to ")])

    def _strength(self, joint: str) -> list[str]:
        value = self.sigma if self.quality is None else self.quality
        ends = value if isinstance(value, list) else [] if value is None else [value]
        return [joint.join(f"{end:g}" for end in ends)] if ends else []

    def described(self) -> dict[str, Any]:
        """What a score depends on."""
        values = {"degradation": self.kind, "sigma": self.sigma, "quality": self.quality}
        return {name: value for name, value in values.items() if value is not None}

    def drawn(self, generator: np.random.Generator) -> "Degradation":
        """The degradation of one sample: a value drawn of each range; without ranges nothing is drawn."""
        if isinstance(self.sigma, list):
            return replace(self, sigma=float(generator.uniform(*self.sigma)))
        if isinstance(self.quality, list):
            low, high = self.quality
            return replace(self, quality=int(generator.integers(low, high, endpoint=True)))
        return self

    def whole(self, images: list[np.ndarray], scale: int, generator: np.random.Generator) -> list[np.ndarray]:
        """Degraded and clean image, float32 in [0, 1], of a clean one in uint8, cut to a multiple of the scale."""
        clean = images[-1]
        clean = clean[: clean.shape[0] // scale * scale, : clean.shape[1] // scale * scale]
        degraded = images[0] if self.kind == "paired" else self.drawn(generator).of(clean, scale, generator)
        return [unit_range(degraded), unit_range(clean)]

    def of(self, clean: np.ndarray, scale: int, generator: np.random.Generator) -> np.ndarray:
        """The degraded form, uint8 or float32 with white at 1, of a clean image; `self` is drawn and not `paired`."""
        if self.kind == "gaussian_noise":
            assert isinstance(self.sigma, (int, float))
            return gaussian_noise(clean, self.sigma, generator)
        if self.kind == "jpeg":
            assert isinstance(self.quality, int)
            return jpeg(clean, self.quality)
        return mosaic(clean) if self.kind == "mosaic" else matlab_bicubic(clean, 1 / scale)

    def patch(
        self, images: list[np.ndarray], scale: int, size: int, generator: np.random.Generator
    ) -> list[np.ndarray]:
        """
        A random patch, flipped and turned. JPEG and bicubic patches are those of the whole degraded image, yet only
        their surroundings are computed: what lies farther away has no influence.
        """
        chosen = self.drawn(generator)
        clean = _enlarged(images[-1], size * scale)
        top, left = (int(generator.integers(side // scale - size + 1)) for side in clean.shape[:2])
        turns, mirror = int(generator.integers(4)), bool(generator.integers(2))
        target = _turned(_cut(clean, top * scale, left * scale, size * scale), turns, mirror)
        if chosen.kind in ("gaussian_noise", "mosaic"):
            # After turning, which would change the order of a mosaic's colours.
            degraded = chosen.of(target, scale, generator)
        elif chosen.kind == "paired":
            degraded = _turned(_cut(_enlarged(images[0], size), top, left, size), turns, mirror)
        else:
            degraded = _turned(chosen._surrounded(clean, scale, top, left, size, generator), turns, mirror)
        return [unit_range(degraded), unit_range(target)]

    def _surrounded(
        self, clean: np.ndarray, scale: int, top: int, left: int, size: int, generator: np.random.Generator
    ) -> np.ndarray:
        """A patch of the degraded image, made of no more of the clean one than matters."""
        unit, reach = (JPEG_UNIT, JPEG_UNIT) if self.kind == "jpeg" else (scale, BICUBIC_REACH * scale)
        starts = [max(0, place * scale // unit * unit - reach) for place in (top, left)]
        stops = [-(-(place + size) * scale // unit) * unit + reach for place in (top, left)]
        # Beyond the last whole multiple of the scale nothing is shrunk.
        stops = [min(stop, side // scale * scale) for stop, side in zip(stops, clean.shape[:2], strict=True)]
        around = self.of(clean[starts[0] : stops[0], starts[1] : stops[1]], scale, generator)
        return _cut(around, top - starts[0] // scale, left - starts[1] // scale, size)


def read_degradations(value: Any, where: str) -> list[Degradation]:
    """Reads one degradation or a list, no two of one name; `where` is the section's name for messages."""
    if isinstance(value, list):
        degradations = [build(Degradation, item, f"{where}[{index}]") for index, item in enumerate(value)]
    else:
        degradations = [build(Degradation, value, where)]
    labels = [degradation.label for degradation in degradations]
    if not labels or len(set(labels)) < len(labels):
        raise ValueError(f"{where} must name at least one degradation and none twice, got {labels}.")
    return degradations


def _enlarged(image: np.ndarray, size: int) -> np.ndarray:
    """At least `size` on each side, reflected at the bottom and right."""
    height, width = image.shape[:2]
    if min(height, width) >= size:
        return image
    return np.pad(image, ((0, max(0, size - height)), (0, max(0, size - width)), (0, 0)), mode="reflect")


def _cut(image: np.ndarray, top: int, left: int, size: int) -> np.ndarray:
    return image[top : top + size, left : left + size]


def _turned(image: np.ndarray, turns: int, mirror: bool) -> np.ndarray:
    image = np.rot90(image, turns)
    return image[:, ::-1] if mirror else image
