"""Limits of one request to a server: pixels, memory, seconds; sounds of strangers, measured before they are read."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image
from torch.overrides import TorchFunctionMode

from ..data.files import read_recording
from ..errors import DataError, UsageError
from ..extras import import_extra
from ..hub.disclosure import last_name
from ..restoration.camera import Picture, Source
from ..restoration.encoding import to_8_bits
from ..restoration.files import read_image
from ..restoration.tiles import bytes_needed, restore_image
from ..semanir import SemanIRForImageRestoration
from ..semanir.image_processing_semanir import pixels_to_image
from ..system import end_with_parent

# Seconds between two looks at the memory of the process.
_PAUSE = 0.1
# Bytes of memory for a sample of a sound: its number when read, of one channel, resampled, and as a tensor.
_SAMPLE = 16
# Samples a second that a header may claim.
RATES = (1000, 768_000)


class TookTooLong(UsageError):
    """A request that was not done in its time."""


class TookTooMuch(UsageError):
    """A request that needed more memory than allowed."""


class ClientLeft(Exception):
    """A request whose client has closed its connection."""


class Clock(TorchFunctionMode):
    """
    The time of one request: `with clock:` ends what is computed inside once it is over.

    It ends too if the memory of the process grows by more than `gigabytes`, where Linux tells it, or if `left` tells
    that the client has left. `work` counts the numbers that torch has computed so far, a measure of how much is done;
    `watch` is called ten times a second at most.
    """

    # No thread can be stopped from outside. But every call of torch in this thread, and in no other, goes through
    # here, and a model makes thousands of them: the next one after the end raises.

    running = threading.local()

    def __init__(self, seconds: float, gigabytes: float = math.inf, left: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self.seconds, self.end, self.gigabytes, self.left = seconds, time.monotonic() + seconds, gigabytes, left
        self._before, self._next = resident_bytes(), 0.0
        self.work = 0
        self.watch: Callable[[], None] = lambda: None

    def __enter__(self) -> Clock:
        Clock.running.clock = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        Clock.running.clock = None

    def check(self) -> None:
        """Raises an error if the time is over, the memory used up, or the client gone."""
        now = time.monotonic()
        if now > self.end:
            raise TookTooLong(f"not done after {self.seconds:g} s, the time limit of a request; request less.")
        if self.left():
            raise ClientLeft("the client has disconnected")
        if now >= self._next:
            self._next = now + _PAUSE
            self.watch()
            if (resident_bytes() - self._before) / 1e9 > self.gigabytes:
                raise TookTooMuch(f"the request needs more than {self.gigabytes:g} GB of memory; request less.")

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A graph that is being compiled has no time: what runs it goes through here again.
        if not torch.compiler.is_compiling():
            self.check()
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.work += result.numel()
        return result


def resident_bytes() -> int:
    """Memory that this process holds."""
    return int(psutil.Process().memory_info().rss)


@dataclass(frozen=True)
class Limits:
    """
    The most that a request may take: megapixels of a picture, which is refused before it is decoded; gigabytes of
    memory, by an estimate for a picture or a sound and in any request by the growth of the process; seconds.
    """

    megapixels: float = 50.0
    gigabytes: float = 8.0
    seconds: float = 600.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise UsageError(f"{name} must be above 0, got {value:g}.")

    def clock(self, left: Callable[[], bool] = lambda: False) -> Clock:
        """The time of a request that begins now; `left` tells that its client has left."""
        return Clock(self.seconds, self.gigabytes, left)

    def read(self, source: Source) -> Picture:
        """A picture that is not larger than allowed, decoded within the time of this thread's request."""
        # Ninety bytes may name two billion frames, and 260 KB of JPEG may draw a picture a thousand times. No thread
        # can be stopped from outside, but a process can, and the system bounds its memory. On Linux it is a fork
        # without torch; a lock that was held then ends it with the request. See tests/emr/test_serve_example.py.
        if sys.platform != "linux":
            return read_image(source, self.megapixels, "Raise megapixels")
        clock = getattr(Clock.running, "clock", None) or self.clock()
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_send_picture, args=(theirs, source, self, os.getpid()), daemon=True)
        with warnings.catch_warnings():
            # Of threads, which the process does not need.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        try:
            while not ours.poll(_PAUSE):
                clock.check()
            return _receive_picture(ours)
        except EOFError:
            name = "the picture" if isinstance(source, bytes) else str(source)
            raise DataError(f"{name} is broken: its decoder crashed") from None
        finally:
            ours.close()
            process.kill()
            process.join()

    def read_8_bits(self, source: Source) -> Image.Image:
        """The same with 8 bits, as classifiers take it."""
        return pixels_to_image(to_8_bits(self.read(source).pixels))

    def check_memory(self, what: str, needed: float) -> None:
        """Refuses what needs more gigabytes than allowed."""
        if needed > self.gigabytes:
            may = f"a request may take {self.gigabytes:g} GB; send less."
            raise TookTooMuch(f"{what} needs about {needed:.3g} GB of memory, and {may}")

    def restore(self, model: SemanIRForImageRestoration, pixels: np.ndarray, **options: Any) -> np.ndarray:
        """[`restore_image`] of what does not need more memory than allowed."""
        height, width = pixels.shape[:2]
        needed = bytes_needed(model, height, width) / 1e9
        self.check_memory(f"with this model a picture of {width} x {height} pixels", needed)
        return restore_image(model, pixels, tile="auto", **options)


def _send_picture(pipe: Connection, source: Source, limits: Limits, server: int) -> None:
    """Work of the process: a line about a picture and its parts, or one about an error. It ends with the server."""
    import resource

    end_with_parent(server)
    try:
        present = psutil.Process().memory_info().vms
        with suppress(ValueError, OverflowError):
            most = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (present + int(limits.gigabytes * 1e9), most))
        pixels, exif, icc_profile, dpi, chunks = read_image(source, limits.megapixels, "Raise megapixels")
    except Exception as error:
        too_much = f"the picture needs more than {limits.gigabytes:g} GB to be decoded."
        told = ("TookTooMuch", too_much) if isinstance(error, MemoryError) else ("DataError", str(error))
        pipe.send_bytes(json.dumps(told).encode())
        return
    pipe.send_bytes(json.dumps([pixels.shape, str(pixels.dtype), dpi and [*map(float, dpi)]]).encode())
    pipe.send_bytes(np.ascontiguousarray(pixels).data.cast("B"))
    for part in (exif.tobytes() if exif else b"", icc_profile or b"", chunks):
        pipe.send_bytes(part)


def _receive_picture(pipe: Connection) -> Picture:
    first, second, *others = json.loads(pipe.recv_bytes())
    if not others:
        raise {"TookTooMuch": TookTooMuch, "DataError": DataError}[first](second)
    pixels, exif = np.empty(first, second), Image.Exif()
    pipe.recv_bytes_into(pixels.data.cast("B"))
    tags, icc_profile, chunks = (pipe.recv_bytes() for _ in range(3))
    exif.load(tags)
    return Picture(pixels, exif if tags else None, icc_profile or None, others[0] and tuple(others[0]), chunks)


@contextmanager
def open_sound(path: str, wanted: int, limits: Limits, whole: bool = False) -> Iterator[Any]:
    """Opens a sound file for a model that takes the rate `wanted`; `whole` tells that it is read at once."""
    soundfile = import_extra("soundfile")
    try:
        with soundfile.SoundFile(path) as file:
            rate, (least, most) = file.samplerate, RATES
            if not file.frames:
                raise DataError("The sound has no samples: record or choose one that has.")
            if not least <= rate <= most:
                raise DataError(f"{last_name(path)} has {rate} samples a second; give a sound of {least} to {most}.")
            # A header may claim any rate, and a few bytes of FLAC hold minutes of silence.
            samples = file.frames if whole else min(file.frames, rate)
            needed = samples * (4 * file.channels + _SAMPLE * max(1.0, wanted / rate)) / 1e9
            limits.check_memory(f"a sound of {samples / rate:.0f} s with {file.channels} channels", needed)
            yield file
    except soundfile.SoundFileError as error:
        raise DataError(f"{last_name(path)} is not a readable sound file: {error}") from error


def read_sound(path: str, wanted: int, limits: Limits) -> np.ndarray:
    """The samples of a sound file at a rate, as one channel."""
    with open_sound(path, wanted, limits, whole=True):
        return read_recording({"path": path, "bytes": None}, wanted)


def read_piece(path: str, limits: Limits) -> tuple[int, np.ndarray]:
    """Rate and 16-bit samples of a piece of a microphone's sound."""
    with open_sound(path, RATES[1], limits, whole=True) as file:
        return file.samplerate, file.read(dtype="int16")
