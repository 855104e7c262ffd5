# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Restore many picture files: one failure stops nothing."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from hf_ext.plots.comparison import Comparison, compare_pictures, comparison_sheet
from hf_ext.semanir.modeling_semanir import SemanIRForImageRestoration

from .files import FORMATS, Frames, Picture, encode_frames, read_frames, write_frames, write_image
from .jobs import Job, check_places, is_done, megapixels_of
from .tiles import restore_pixels

# Pictures on the sheet of comparisons.
_MOST_COMPARED = 8


class Report(NamedTuple):
    """
    What became of the jobs.

    Args:
        restored (`list[Path]`): Files written.
        skipped (`list[Path]`): Files that were there.
        failed (`dict[str, str]`): What was wrong, by name of the input.
        megapixels (`float`): Size of what was restored, all frames.
    """

    restored: list[Path]
    skipped: list[Path]
    failed: dict[str, str]
    megapixels: float


def restore_files(
    model: SemanIRForImageRestoration,
    jobs: list[Job],
    *,
    overwrite: bool = False,
    compare: Path | None = None,
    max_megapixels: float = 200.0,
    tile: int | str | None = None,
    self_ensemble: bool = False,
    top_k: int | None = None,
    progress: Callable[[float], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> Report:
    """
    Restore pictures one after the other, of animations and documents every frame and page. Each result appears when it
    is whole, with the input's EXIF data (those that describe it), colour profile and resolution.

    Args:
        model ([`SemanIRForImageRestoration`]): The model.
        jobs (`list[Job]`): From [`~picture_jobs.plan_jobs`].
        overwrite (`bool`, *optional*, defaults to `False`): Whether results that exist are made anew; skipped if not.
        compare (`Path`, *optional*): Where to write a sheet of up to 8 pictures before and after, with crops; of
            several frames the first.
        max_megapixels (`float`, *optional*, defaults to 200): Larger pictures are reported, not decoded.
        tile, self_ensemble, top_k: See [`~tiles.restore_image`].
        progress (`Callable[[float], None]`, *optional*): Called with the megapixels done since the last call.
        say (`Callable[[str], None]`, *optional*): Called with what was wrong with a picture, when it happens.

    Returns:
        [`Report`]: What became of them.

    Raises:
        FileExistsError: If the sheet exists and may not be overwritten.
        OSError: If a folder of results cannot be written to; nothing was restored then.
    """
    if compare is not None and compare.exists() and not overwrite:
        raise FileExistsError(f"{compare} exists; say --overwrite to replace it, or move it.")
    check_places([job for job in jobs if not is_done(job, overwrite)])
    restored, skipped, failed, compared = list[Path](), list[Path](), dict[str, str](), list[Comparison]()
    megapixels = 0.0
    for job in jobs:
        if is_done(job, overwrite):
            assert job.out is not None
            skipped.append(job.out)
            _advance(progress, megapixels_of(job))
            continue
        try:
            frames = read_frames(job.source, max_megapixels)
            sizes = [picture.pixels.shape[0] * picture.pixels.shape[1] / 1e6 for picture in frames.pictures]
            pictures = []
            for picture in frames.pictures:
                # To the bar all frames are as much as the first, whose size a file's header says.
                counted = _Counted(progress, sizes[0] / len(sizes))
                pixels = restore_pixels(
                    model, picture.pixels, tile=tile, self_ensemble=self_ensemble, top_k=top_k, progress=counted
                )
                pictures.append(picture._replace(pixels=pixels))
            _write(job, frames._replace(pictures=pictures), overwrite)
        except (ValueError, OSError, MemoryError, torch.OutOfMemoryError) as error:
            failed[job.name] = _message(job, error)
            if say is not None:
                say(failed[job.name])
            continue
        megapixels += sum(sizes)
        if job.out is not None:
            restored.append(job.out)
        if compare is not None and len(compared) < _MOST_COMPARED:
            before, after = frames.pictures[0].pixels, pictures[0].pixels
            compared.append(compare_pictures(Path(job.name).name, before, after))
    if compare is not None and compared:
        write_image(compare, as_picture(comparison_sheet(compared)), overwrite=overwrite)
    return Report(restored, skipped, failed, megapixels)


def as_picture(drawing: Image.Image) -> Picture:
    """
    A drawing as what [`write_image`] takes.

    Args:
        drawing (`PIL.Image.Image`): RGB.

    Returns:
        [`Picture`]: Without metadata.
    """
    return Picture(np.asarray(drawing))


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


def _advance(progress: Callable[[float], None] | None, megapixels: float) -> None:
    if progress is not None:
        progress(megapixels)


class _Counted:
    """Turns pixels done of a picture into megapixels since the last call."""

    def __init__(self, progress: Callable[[float], None] | None, megapixels: float):
        self.progress = progress
        self.megapixels = megapixels
        self.done = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = self.megapixels * done / total
        _advance(self.progress, now - self.done)
        self.done = now


__all__ = ["Report", "as_picture", "restore_files"]
