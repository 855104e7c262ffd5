# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Restore many picture files: what is to be done is planned and refused before any work, one failure stops nothing."""

import glob
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from .image_processing_files_semanir import FORMATS, Picture, encode_image, read_image, write_image
from .modeling_semanir import SemanIRForImageRestoration
from .plots_semanir import Crop, comparison_sheet, detailed_crop
from .restoring_semanir import restore_pixels

# Rows of the sheet of comparisons.
_MOST_CROPS = 8
# What Pillow recognises but cannot decode by itself, or not as pixels.
_NO_PIXELS = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}


class Job(NamedTuple):
    """
    One picture to restore.

    Args:
        name (`str`): What messages call it.
        source (`Path` or `bytes`): The file, or what is in it.
        out (`Path`, *optional*): Where the restored picture goes; `None` for standard output.
    """

    name: str
    source: Path | bytes
    out: Path | None


class Report(NamedTuple):
    """
    What became of the jobs.

    Args:
        restored (`list[Path]`): Files written.
        skipped (`list[Path]`): Files that were there.
        failed (`dict[str, str]`): What was wrong, by name of the input.
        megapixels (`float`): Size of the inputs that were restored.
    """

    restored: list[Path]
    skipped: list[Path]
    failed: dict[str, str]
    megapixels: float


def plan_jobs(inputs: list[str], out: Path | None, ending: str | None = None) -> list[Job]:
    """
    Find the pictures and say where each goes.

    Args:
        inputs (`list[str]`): Files; folders, searched with all below them, whose relative paths are kept; patterns
            such as `photos/**/*.png`; `-` for a picture on standard input; `@FILE` for a file of names, one a line,
            and `@-` for such a list on standard input.
        out (`Path`, *optional*): Folder of the results; `None` for standard output, which takes one picture.
        ending (`str`, *optional*): Ending of the results, such as `".png"`; that of the input if not given, or `.png`
            where none can be written with that.

    Returns:
        `list[Job]`: In the order of the inputs, folders and patterns sorted.

    Raises:
        ValueError: If an input does not exist or holds no picture, two results would have one name, or a result would
            replace its input.
    """
    found = [pair for name in inputs for pair in _pictures(name, out)]
    if not found:
        raise ValueError(f"no picture in {', '.join(inputs)}.")
    if out is None:
        if len(found) > 1:
            raise ValueError(f"standard output takes one picture, got {len(found)}; name a folder with --out.")
        return [Job(str(found[0][1]), found[0][0], None)]
    jobs, places = [], dict[str, str]()
    for source, relative in found:
        written = ending or (relative.suffix if relative.suffix.lower() in FORMATS else ".png")
        job = Job(
            str(source) if isinstance(source, Path) else "standard input", source, out / relative.with_suffix(written)
        )
        # Some file systems do not tell capitals.
        place = str(job.out).casefold()
        if place in places:
            raise ValueError(
                f"{places[place]} and {job.name} would both be written to {job.out}; rename one, or restore them into "
                "different folders."
            )
        places[place] = job.name
        if isinstance(source, Path) and job.out is not None and job.out.resolve() == source.resolve():
            raise ValueError(f"{source} would be replaced by its restored version; name another folder with --out.")
        jobs.append(job)
    return jobs


def _pictures(name: str, out: Path | None) -> Iterator[tuple[Path | bytes, Path]]:
    """What an input stands for, each with its place below the folder of results."""
    if name == "-":
        data = sys.stdin.buffer.read()
        yield data, Path(f"stdin{_ending_of(data)}")
    elif name.startswith("@"):
        text = sys.stdin.read() if name == "@-" else Path(name[1:]).read_text(encoding="utf-8")
        for line in text.splitlines():
            if line.strip():
                yield from _pictures(line.strip(), out)
    elif os.path.isdir(name):
        folder = Path(name)
        readable = {
            end for end, format in Image.registered_extensions().items() if format in Image.OPEN.keys() - _NO_PIXELS
        }
        results = out.resolve() if out is not None else None
        for path in sorted(folder.rglob("*")):
            relative = path.relative_to(folder)
            hidden = any(part.startswith(".") for part in relative.parts)
            inside = results is not None and results != folder.resolve() and path.resolve().is_relative_to(results)
            if path.suffix.lower() in readable and not hidden and not inside and path.is_file():
                yield path, relative
    elif os.path.exists(name):
        yield Path(name), Path(Path(name).name)
    elif glob.has_magic(name):
        fixed = Path(*Path(name).parts[: _first_magic(name)])
        for match in sorted(glob.glob(name, recursive=True)):
            if os.path.isfile(match):
                yield Path(match), Path(match).relative_to(fixed)
    else:
        raise ValueError(f"{name} does not exist; give pictures, folders, patterns, or - for standard input.")


def _first_magic(pattern: str) -> int:
    return next(index for index, part in enumerate(Path(pattern).parts) if glob.has_magic(part))


def _ending_of(data: bytes) -> str:
    """The ending that fits what is in a file."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            format = image.format
    except (OSError, SyntaxError, Image.DecompressionBombError):
        return ".png"
    return next((ending for ending, name in FORMATS.items() if name == format), ".png")


def megapixels_of(job: Job) -> float:
    """
    Size of a picture as its header says.

    Args:
        job ([`Job`]): The job.

    Returns:
        `float`: Megapixels; 0 where the header cannot be read.
    """
    try:
        with Image.open(io.BytesIO(job.source) if isinstance(job.source, bytes) else job.source) as image:
            return image.width * image.height / 1e6
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return 0.0


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
    Restore pictures one after the other. Each result appears when it is whole, with the input's EXIF data (without the
    orientation, which is applied), colour profile and resolution.

    Args:
        model ([`SemanIRForImageRestoration`]): The model.
        jobs (`list[Job]`): From [`plan_jobs`].
        overwrite (`bool`, *optional*, defaults to `False`): Whether results that exist are made anew; skipped if not.
        compare (`Path`, *optional*): Where to write a sheet with enlarged crops before and after, of up to 8 pictures.
        max_megapixels (`float`, *optional*, defaults to 200): Larger pictures are reported, not decoded.
        tile, self_ensemble, top_k: See [`~restoring_semanir.restore_image`].
        progress (`Callable[[float], None]`, *optional*): Called with the megapixels done since the last call.
        say (`Callable[[str], None]`, *optional*): Called with what was wrong with a picture, when it happens.

    Returns:
        [`Report`]: What became of them.

    Raises:
        FileExistsError: If the sheet exists and may not be overwritten.
    """
    if compare is not None and compare.exists() and not overwrite:
        raise FileExistsError(f"{compare} exists; say --overwrite to replace it, or move it.")
    restored, skipped, failed, crops = list[Path](), list[Path](), dict[str, str](), list[Crop]()
    megapixels = 0.0
    for job in jobs:
        if job.out is not None and job.out.exists() and not overwrite:
            skipped.append(job.out)
            _advance(progress, megapixels_of(job))
            continue
        try:
            picture = read_image(job.source, max_megapixels)
            size = picture.pixels.shape[0] * picture.pixels.shape[1] / 1e6
            counted = _Counted(progress, size)
            pixels = restore_pixels(
                model, picture.pixels, tile=tile, self_ensemble=self_ensemble, top_k=top_k, progress=counted
            )
            _write(job, picture._replace(pixels=pixels), overwrite)
        except (ValueError, OSError, MemoryError, torch.OutOfMemoryError) as error:
            failed[job.name] = _said(job, error)
            if say is not None:
                say(failed[job.name])
            continue
        megapixels += size
        if job.out is not None:
            restored.append(job.out)
        if compare is not None and len(crops) < _MOST_CROPS:
            crops.append(detailed_crop(Path(job.name).name, picture.pixels, pixels))
    if compare is not None and crops:
        write_image(compare, as_picture(comparison_sheet(crops)), overwrite=overwrite)
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


def _write(job: Job, picture: Picture, overwrite: bool) -> None:
    if job.out is None:
        ending = _ending_of(job.source if isinstance(job.source, bytes) else job.source.read_bytes())
        sys.stdout.buffer.write(encode_image(picture, FORMATS[ending]))
        sys.stdout.buffer.flush()
        return
    job.out.parent.mkdir(parents=True, exist_ok=True)
    write_image(job.out, picture, overwrite=overwrite)


def _said(job: Job, error: BaseException) -> str:
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


__all__ = ["Job", "Report", "as_picture", "megapixels_of", "plan_jobs", "restore_files"]
