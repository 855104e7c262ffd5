# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Restore many picture files: one failure stops nothing."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_ext.plots.comparison import Comparison, compare_pictures, comparison_sheet
from hf_ext.semanir.modeling_semanir import SemanIRForImageRestoration

from .encoding import FORMATS, Frames, Picture, encode_frames
from .files import read_frames, write_frames, write_image
from .jobs import Job
from .tiles import restore_image

# Pictures on the sheet of comparisons.
_MOST_COMPARED = 8


class Report(NamedTuple):
    """What became of the jobs: files written, what was wrong by name of the input, and megapixels of all frames."""

    restored: list[Path]
    failed: dict[str, str]
    megapixels: float


def restore_files(
    model: SemanIRForImageRestoration,
    jobs: list[Job],
    *,
    overwrite: bool = False,
    compare: Path | None = None,
    max_megapixels: float = 200.0,
    progress: Callable[[float], None] | None = None,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> Report:
    """
    Restore pictures one after the other, of animations and documents every frame and page. Each result appears when it
    is whole, with the input's EXIF data (those that describe it), colour profile and resolution. The caller has made
    sure that there is something to do and that it can be written: [`~jobs.is_done`], [`~jobs.check_places`].

    `compare` is a file for a sheet of up to 8 pictures before and after, of several frames the first. `progress` is
    called with the megapixels done since the last call, `say` with what was wrong with a picture, when it happens. The
    options are those of [`~tiles.restore_image`].
    """
    report, compared = Report([], {}, 0.0), list[Comparison]()
    for job in jobs:
        try:
            frames = read_frames(job.source, max_megapixels)
            sizes = [picture.pixels.shape[0] * picture.pixels.shape[1] / 1e6 for picture in frames.pictures]
            pictures = []
            for picture in frames.pictures:
                # To the bar all frames are as much as the first, whose size a file's header says.
                counted = None if progress is None else _Counter(progress, sizes[0] / len(sizes))
                pixels = restore_image(model, picture.pixels, progress=counted, **options)
                pictures.append(picture._replace(pixels=pixels))
            _write(job, frames._replace(pictures=pictures), overwrite)
        except (ValueError, OSError, MemoryError, torch.OutOfMemoryError) as error:
            report.failed[job.name] = _message(job, error)
            if say is not None:
                say(report.failed[job.name])
            continue
        report = report._replace(megapixels=report.megapixels + sum(sizes))
        if job.out is not None:
            report.restored.append(job.out)
        if compare is not None and len(compared) < _MOST_COMPARED:
            before, after = frames.pictures[0].pixels, pictures[0].pixels
            compared.append(compare_pictures(Path(job.name).name, before, after))
    if compare is not None and compared:
        write_image(compare, Picture(np.asarray(comparison_sheet(compared))), overwrite=overwrite)
    return report


def _write(job: Job, frames: Frames, overwrite: bool) -> None:
    if job.out is None:
        sys.stdout.buffer.write(encode_frames(frames, FORMATS[job.ending.lower()]))
        sys.stdout.buffer.flush()
        return
    job.out.parent.mkdir(parents=True, exist_ok=True)
    write_frames(job.out, frames, overwrite=overwrite)


def _message(job: Job, error: BaseException) -> str:
    """What was wrong, with the picture's name in front."""
    text = str(error) or type(error).__name__
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        text = "not enough memory; try --tile auto"
    name = "the picture" if isinstance(job.source, bytes) else str(job.source)
    return f"{job.name}: {text.removeprefix(name).strip()}"


class _Counter:
    """Turns pixels done of a picture into megapixels since the last call."""

    def __init__(self, progress: Callable[[float], None], megapixels: float):
        self.progress = progress
        self.megapixels = megapixels
        self.done = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = self.megapixels * done / total
        self.progress(now - self.done)
        self.done = now
