"""HEIC, AVIF and RAW pictures, which `datasets` does not read, decoded once: the other readers find PNG files."""

import glob
import hashlib
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import datasets
from filelock import FileLock
from tqdm.auto import tqdm
from transformers.utils import logging

from hf_ext.files import whole_folder
from hf_ext.restoration.camera import RAW_ENDINGS, MissingLibraryError

from ..errors import DataError
from ..terminal import count_of
from .about import TABLES
from .files import first_files, list_files

logger = logging.get_logger(__name__)

# Those that `datasets` and Pillow both read.
IMAGE_SUFFIXES = {
    ".apng", ".bmp", ".dib", ".gif", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".jpx", ".pbm", ".pcx", ".pgm",
    ".png", ".pnm", ".ppm", ".tga", ".tif", ".tiff", ".webp",
}  # fmt: skip
# `.raw` is the ending of other things too.
CAMERA_SUFFIXES = {".avif", ".heic", ".heif", ".hif", ".qoi", *RAW_ENDINGS} - {".raw"}
# Names of camera pictures in tables.
_NAMES = re.compile(
    rb"[^\\/,;|\t\"\r\n]+(?:%s)(?!\w)" % b"|".join(re.escape(ending.encode()) for ending in sorted(CAMERA_SUFFIXES)),
    re.IGNORECASE,
)


def find_camera_pictures(files: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """The pictures to decode, and those of them that are left out, as another of their name is taken, of RAW first."""
    files, left_out = list(files), []
    camera = [file for file in files if file.suffix.lower() in CAMERA_SUFFIXES and file.name[0] != "."]
    known = {file.with_suffix("") for file in files if file.suffix.lower() in IMAGE_SUFFIXES} if camera else set()
    for file in sorted(camera, key=lambda file: (file.suffix.lower() in RAW_ENDINGS, file)):
        left_out += [file] if file.with_suffix("") in known else []
        known.add(file.with_suffix(""))
    return camera, left_out


def tell_twins(twins: list[Path]) -> str:
    """A line about pictures that are left out."""
    kinds = ", ".join(sorted({file.suffix.lower() for file in twins}))
    return f"{count_of(len(twins), 'picture')} of {kinds}, because another of that name lies beside"


def decode_camera_pictures(found: list[str]) -> list[str]:
    """
    A copy of a folder, or of files, in which HEIC, AVIF and RAW pictures are PNG files of 8 bits.

    The copy lies in the cache of `datasets`, and other files are links in it, so that splits, classes, pairs, captions
    and tables are found as there. It is used again as long as names, sizes and times of the files are the same.
    """
    if not any(file.suffix.lower() in CAMERA_SUFFIXES for file in first_files(*found)):
        return found
    first = Path(found[0])
    if first.is_dir():
        # A table beside a folder, of its name, may describe it.
        root = first.resolve()
        tables = (file for file in root.parent.glob(f"{glob.escape(root.name)}.*") if file.is_file())
        places = {file: Path(root.name, file.relative_to(first)) for file in sorted(list_files(first))}
        places |= {file: Path(file.name) for file in tables if file.suffix.lower() in TABLES}
        return [str(_copy(places) / root.name)]
    folders = {Path(file): Path(file).resolve().parent for file in found}
    parents = sorted({*folders.values()})
    places = {file: Path(str(parents.index(folder)), folder.name, file.name) for file, folder in folders.items()}
    return sorted(map(str, _copy(places).glob("*/*/*")))


def _copy(places: dict[Path, Path]) -> Path:
    state = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in places]
    key = hashlib.sha256(repr(state).encode()).hexdigest()[:32]
    copy = Path(datasets.config.HF_DATASETS_CACHE) / "hf_ext_camera_pictures" / key
    copy.parent.mkdir(parents=True, exist_ok=True)
    # The processes of a launch open the data together: one of them decodes.
    with FileLock(f"{copy}.lock"):
        if not copy.is_dir():
            with whole_folder(copy) as folder:
                _fill(folder, places)
    return copy


def _fill(folder: Path, places: dict[Path, Path]) -> None:
    """Writes the copy: decoded pictures, tables with the new names, links to the rest."""
    # With torch, which most surveys do not need.
    from hf_ext.restoration.files import read_8_bits

    camera, twins = map(set, find_camera_pictures(places))
    beside = {file.with_suffix(""): file.name for file in places if file.suffix.lower() in IMAGE_SUFFIXES}
    names = {os.fsencode(file.name): beside.get(file.with_suffix(""), f"{file.stem}.png") for file in camera}
    broken: list[str] = []
    for file in tqdm(places, desc="decoding HEIC, AVIF, RAW", unit=" files", delay=1, leave=False):
        place = folder / places[file]
        place.parent.mkdir(parents=True, exist_ok=True)
        if file in twins:
            continue
        if file in camera:
            try:
                read_8_bits(file).save(place.with_suffix(".png"), compress_level=1)
            except MissingLibraryError:
                raise
            except DataError as error:
                broken.append(str(error))
                # Unreadable too: it is counted and left out as other broken pictures are.
                place.with_suffix(".png").touch()
        elif file.suffix.lower() in TABLES:
            named = _NAMES.sub(lambda hit: os.fsencode(names.get(hit[0], os.fsdecode(hit[0]))), file.read_bytes())
            place.write_bytes(named)
        else:
            try:
                place.symlink_to(file.resolve())
            except OSError:
                # A system without links.
                shutil.copy2(file, place)
    if broken:
        logger.warning(f"{len(broken):,} of {len(camera):,} HEIC, AVIF and RAW pictures cannot be read: {broken[0]}")
    if twins:
        logger.warning(f"left out: {tell_twins(list(twins))}")
