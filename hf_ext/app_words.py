"""Sentences of the app: the purpose of a model, the progress of a request, and the result."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hf_ext.answers.limits import Clock
from hf_ext.hub.released import list_released

# Limits of the models of each tab, from their cards.
LIMITS = {
    "restore": (
        "It does not detect what is wrong with a picture. Details that it draws where information was lost are "
        "plausible, not true: do not judge faces, text, number plates, medical or forensic pictures by its results."
    ),
    "draw": "Its pictures are invented: they show no real events and must not be presented as photographs.",
    "listen": "It knows the words of its training alone, and takes each other sound for one of them.",
    "merge": "A task answers each input, also one of a kind that it was not trained on.",
}
# Seconds before the time that is left can be told.
_SETTLED = 1.0


def describe_model(tab: str, name: str, source: str) -> str:
    """The purpose of a model and its limits, as Markdown."""
    for model in list_released():
        if str(model.folder) == source:
            return f"**{name}**: {model.task}. {LIMITS[tab]} Its weights may be used for: {model.license}."
    return f"**{name}**: given to the command; its card says what it was trained for. {LIMITS[tab]}"


class Progress:
    """
    The share of a request that is done, and the time left, shown by a bar.

    Args:
        bar (`Callable`): The bar of gradio: called with the share and `desc`.
    """

    def __init__(self, bar: Callable[..., Any]) -> None:
        self._bar, self._begun, self._share = bar, time.monotonic(), 0.0

    def show(self, share: float) -> None:
        """Shows a share, which never falls."""
        self._share = share = max(self._share, min(share, 1.0))
        passed = time.monotonic() - self._begun
        left = f"about {passed * (1 - share) / share:.0f} s left" if share > 0 and passed > _SETTLED else "just begun"
        self._bar(share, desc=left)

    def follow(self, clock: Clock, expected: float) -> Callable[[int, int], None]:
        """
        Shows the work that torch does under a clock as a share of what is expected. Returns what takes note of exact
        numbers, done and to do, where there are some.
        """
        before, expected = clock.work, max(1.0, expected)

        def look() -> None:
            self.show(min((clock.work - before) / expected, 0.99))

        def correct(done: int, total: int) -> None:
            nonlocal expected
            expected = max(1.0, (clock.work - before) * total / max(1, done))
            self.show(done / total)

        clock.watch = look
        return correct


def say_size(pixels: np.ndarray) -> str:
    """Width and height of a picture."""
    return f"{pixels.shape[1]} × {pixels.shape[0]} pixels"


def describe_restoration(name: str, before: np.ndarray, after: np.ndarray, strength: float, seconds: float) -> str:
    """The result of a restoration: model, size, strength, time, and what was changed or left out."""
    if before.shape[:2] == after.shape[:2]:
        most = np.iinfo(after.dtype).max
        change = np.abs(before.astype(np.float32) - after.astype(np.float32)).mean() * 255 / most
        done = (
            f"**{name}** restored {say_size(before)} at strength {strength:g} in {seconds:.1f} s. A value changed by "
            f"{change:.2g} of 255 on average."
        )
    else:
        done = f"**{name}** enlarged {say_size(before)} to {say_size(after)} in {seconds:.1f} s."
    if before.dtype != np.uint8:
        done += " The picture has 16 bits a channel; the page shows 8."
    if before.shape[2] in (2, 4):
        done += " Its transparency is not shown."
    return done


def describe_sound(name: str, words: int, sound: float, seconds: float) -> str:
    """The result of a sound."""
    heard = f"{words} word{'' if words == 1 else 's'}" if words else "no word"
    return f"**{name}** heard {heard} in {sound:.1f} s of sound, in {seconds:.1f} s."
