"""Sounds of strangers: files that are measured before they are read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import DataError
from ..extras import import_extra
from ..hub.disclosure import last_name
from .limits import Limits

# Samples a second that a header may claim.
RATES = (1000, 768_000)


@contextlib.contextmanager
def open_sound(path: str, wanted: int, limits: Limits, whole: bool = False) -> Iterator[Any]:
    """
    Opens a sound file with soundfile.

    Args:
        path (`str`): The file.
        wanted (`int`): The rate that the model takes.
        limits ([`Limits`]): The memory that its samples may take.
        whole (`bool`, *optional*, defaults to `False`): It is read at once, not in pieces of a second at most.

    Raises:
        DataError: If it is no sound file, has no samples, or a rate that no sound has.
    """
    soundfile = import_extra("soundfile")
    try:
        with soundfile.SoundFile(path) as file:
            if not file.frames:
                raise DataError("The sound has no samples: record or choose one that has.")
            if not RATES[0] <= file.samplerate <= RATES[1]:
                least, most = RATES
                raise DataError(
                    f"{last_name(path)} has {file.samplerate} samples a second; give a sound of {least} to {most}."
                )
            count = file.frames if whole else min(file.frames, file.samplerate)
            limits.check_sound(file.channels, count, file.samplerate, wanted)
            yield file
    except soundfile.SoundFileError as error:
        raise DataError(f"{last_name(path)} is not a readable sound file: {error}") from error


def read_sound(path: str, wanted: int, limits: Limits) -> np.ndarray:
    """The samples of a sound file at a rate, as one channel."""
    with open_sound(path, wanted, limits, whole=True) as file:
        samples, rate = file.read(dtype="float32"), file.samplerate
    mono = samples if samples.ndim == 1 else samples.mean(1)
    found: np.ndarray = mono if rate == wanted else import_extra("soxr").resample(mono, rate, wanted)
    return found


def read_piece(path: str, limits: Limits) -> tuple[int, np.ndarray]:
    """Rate and 16-bit samples of a piece of a microphone's sound."""
    with open_sound(path, RATES[1], limits, whole=True) as file:
        return file.samplerate, file.read(dtype="int16")
