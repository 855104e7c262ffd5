"""Limits of one request to a server: pixels, memory and seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ..errors import UsageError
from ..restoration.camera import Source
from ..restoration.encoding import Picture
from ..restoration.files import read_image
from ..restoration.tiles import bytes_needed, restore_image
from ..semanir import SemanIRForImageRestoration


class TookTooLong(UsageError):
    """A request that was not done in its time."""


class Clock(TorchFunctionMode):
    """The time of one request: `with clock:` ends what is computed inside once it is over."""

    # No thread can be stopped from outside. But every call of torch in this thread, and in no other, goes through
    # here, and a model makes thousands of them: the next one after the end raises.

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.end = seconds, time.monotonic() + seconds

    def check(self) -> None:
        """Raises an error if the time is over."""
        if time.monotonic() > self.end:
            raise TookTooLong(f"not done after {self.seconds:g} s, the time limit of a request; request less.")

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A graph that is being compiled has no time: what runs it goes through here again.
        if not torch.compiler.is_compiling():
            self.check()
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Limits:
    """
    The most that a request may take.

    Args:
        megapixels (`float`): Of a picture, which is refused before it is decoded.
        gigabytes (`float`): Of memory for a picture, by the estimate that chooses tiles.
        seconds (`float`): From the beginning to the end of its computation.
    """

    megapixels: float = 50.0
    gigabytes: float = 8.0
    seconds: float = 600.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise UsageError(f"{name} must be above 0, got {value:g}.")

    def clock(self) -> Clock:
        """The time of a request that begins now."""
        return Clock(self.seconds)

    def read(self, source: Source) -> Picture:
        """A picture that is not larger than allowed."""
        return read_image(source, self.megapixels)

    def restore(self, model: SemanIRForImageRestoration, pixels: np.ndarray, **options: Any) -> np.ndarray:
        """[`restore_image`] of what does not need more memory than allowed."""
        height, width = pixels.shape[:2]
        needed = bytes_needed(model, height, width) / 1e9
        if needed > self.gigabytes:
            raise UsageError(
                f"a picture of {width} x {height} pixels needs about {needed:.3g} GB of memory with this model, and a "
                f"request may take {self.gigabytes:g} GB; send a smaller one."
            )
        return restore_image(model, pixels, tile="auto", **options)
