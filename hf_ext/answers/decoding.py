"""Pictures of strangers, decoded in a process of their own, which ends with the request.

A decoder does what a file says: ninety bytes may name two billion frames, and a JPEG of 260 KB may draw the same
picture a thousand times. No thread can be stopped from outside, but a process can, and the system bounds its memory.
On Linux it is a fork of this one, so nothing is imported again; it runs no torch, and none of our other threads. A lock
that one of them held at that moment could stop it for ever: then it ends with the request's time, as after any file.
tests/emr/test_serve_example.py has files that take too long and too much, and a decoder that ends its process.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..errors import DataError
from ..restoration.camera import Source
from ..restoration.encoding import Picture
from ..restoration.files import read_image

# Seconds between two looks at the request.
_PAUSE = 0.05


def decode(source: Source, megapixels: float, gigabytes: float, check: Callable[[], None]) -> Picture:
    """[`read_image`] within memory; `check` is called again and again, and ends the work if it raises."""
    if sys.platform != "linux":
        return read_image(source, megapixels)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_picture, args=(theirs, source, megapixels, gigabytes), daemon=True)
    with warnings.catch_warnings():
        # Of threads, which the process does not need.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    with ours:
        try:
            while not ours.poll(_PAUSE):
                check()
            return _receive_picture(ours)
        except EOFError:
            name = "the picture" if isinstance(source, bytes) else str(source)
            raise DataError(f"{name} is broken: its decoder crashed") from None
        finally:
            process.kill()
            process.join()


def _send_picture(pipe: Connection, source: Source, megapixels: float, gigabytes: float) -> None:
    try:
        _bound_memory(gigabytes)
        pixels, exif, *others = read_image(source, megapixels)
    except Exception as error:
        kind = "memory" if isinstance(error, MemoryError) else "system" if isinstance(error, OSError) else "data"
        pipe.send_bytes(json.dumps({"kind": kind, "error": str(error)}).encode())
        return
    icc_profile, dpi, chunks = others
    beside = (exif.tobytes() if exif else b"", icc_profile or b"", chunks)
    about = {"shape": pixels.shape, "dtype": str(pixels.dtype), "dpi": dpi and [*map(float, dpi)]}
    for part in (json.dumps(about).encode(), memoryview(np.ascontiguousarray(pixels)).cast("B"), *beside):
        pipe.send_bytes(part)


def _receive_picture(pipe: Connection) -> Picture:
    about: dict[str, Any] = json.loads(pipe.recv_bytes())
    if kind := about.get("kind"):
        raise {"memory": MemoryError, "system": OSError, "data": DataError}[kind](about["error"])
    pixels = np.empty(about["shape"], about["dtype"])
    pipe.recv_bytes_into(memoryview(pixels).cast("B"))
    tags, icc_profile, chunks = (pipe.recv_bytes() for _ in range(3))
    exif = Image.Exif()
    exif.load(tags)
    return Picture(pixels, exif if tags else None, icc_profile or None, about["dpi"] and (*about["dpi"],), chunks)


def _bound_memory(gigabytes: float) -> None:
    """Lets the process take as much more memory than it has."""
    import resource

    with suppress(ValueError, OverflowError):
        present = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (present + int(gigabytes * 1e9), hard))
