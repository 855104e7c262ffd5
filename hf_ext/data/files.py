"""Files below folders, as people see them; pictures, sounds and tars that are broken."""

import io
import itertools
import os
import struct
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np
from PIL import Image

from ..errors import BROKEN_ARCHIVE, DataError
from ..extras import import_extra

_HIDDEN = ("__MACOSX", "Thumbs.db", "desktop.ini")
AUDIO_SUFFIXES = {".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif", ".m4a", ".aac"}
# Errors of Pillow for broken files; for a broken PNG it raises a SyntaxError or struct.error.
UNREADABLE = (OSError, SyntaxError, struct.error, Image.DecompressionBombError)
# Errors of an example with a broken file or value.
UNUSABLE = (*UNREADABLE, ValueError, TypeError)
# Further errors of decoders for damaged files: TIFF, AVIF, sounds.
UNDECODABLE = (*UNUSABLE, RuntimeError, LookupError, ArithmeticError, AttributeError, EOFError)
# The same of archives, and of kinds of files whose readers are not installed.
UNOPENABLE = (*UNDECODABLE, *BROKEN_ARCHIVE, ImportError)
# Two blocks of zeros end a tar file.
_TAR_END = bytes(2 * tarfile.BLOCKSIZE)
# Sizes that programs write to a pipe, as they know none: 2 GB and more.
_UNKNOWN = 0x7E000000

SoundFile = str | io.BytesIO


def is_seen(name: str) -> bool:
    """False for what systems and editors hide: .DS_Store, ._photo.jpg, .ipynb_checkpoints/, __MACOSX/."""
    return name[0] != "." and name not in _HIDDEN


def list_files(*places: Path | str) -> Iterator[Path]:
    """Given files, and those below given folders and below those that links lead to, without hidden ones."""
    yield from (Path(place) for place in places if os.path.isfile(place))
    for place, folders, names in (found for folder in places for found in os.walk(folder, followlinks=True)):
        folders[:] = [name for name in folders if is_seen(name) and not _leads_back(Path(place, name))]
        yield from (file for name in names if is_seen(name) and (file := Path(place, name)).is_file())


def _leads_back(folder: Path) -> bool:
    """True for a link to a folder on the way to it, also by way of other links: it would lead round and round."""
    return folder.is_symlink() and any(place.resolve().is_relative_to(folder.resolve()) for place in folder.parents)


def first_files(*places: Path | str) -> list[Path]:
    """The first files of places, which are enough for a folder of a million pictures."""
    return [*itertools.islice(list_files(*places), 10_000)]


def open_bytes(value: dict[str, Any]) -> SoundFile:
    """Bytes of an undecoded picture or sound of an archive, or the path of its file."""
    if value["bytes"]:
        return io.BytesIO(value["bytes"])
    path = str(value["path"])
    if "::" not in path or os.path.exists(path):
        return path
    with fsspec.open(path, "rb") as file:
        return io.BytesIO(file.read())


def is_broken_picture(value: dict[str, Any] | None) -> bool:
    """True if a picture cannot be decoded; of a PNG its sums are enough, of slow formats that the file is not cut."""
    if value is None:
        return True
    try:
        with Image.open(file := open_bytes(value)) as picture:
            if picture.format in ("WEBP", "JPEG2000") and _has_end(file):
                return False
            # A JPEG says the same at an eighth of its size, three times as fast; others have no draft.
            picture.draft("L", (1, 1))
            picture.verify() if picture.format == "PNG" else picture.load()
    except UNDECODABLE:
        return True
    return False


def _has_end(file: SoundFile) -> bool:
    """True for a WebP as long as its head says, and for JPEG 2000 that ends with its mark."""
    with open(file, "rb") if isinstance(file, str) else io.BytesIO(file.getvalue()) as held:
        head, length = held.read(8), held.seek(0, os.SEEK_END)
        held.seek(-2, os.SEEK_END)
        return int.from_bytes(head[4:], "little") + 8 <= length if head[:4] == b"RIFF" else held.read() == b"\xff\xd9"


class SoundAbout(NamedTuple):
    """Samples a second, number of samples of a channel, number of channels."""

    rate: int
    frames: int
    channels: int


def describe_sound(file: SoundFile) -> SoundAbout:
    """Describes a sound, from the head of its file where that suffices. Raises `DataError` as `read_samples` does."""
    if _is_from_phone(file):
        samples, rate = _decode(file)
        return SoundAbout(rate, *samples.shape)
    about = _call("info", file)
    return SoundAbout(about.samplerate, about.frames, about.channels)


def _call(function: str, file: SoundFile, **options: Any) -> Any:
    soundfile = import_extra("soundfile")
    if _is_cut(file):
        raise DataError("is no whole sound file, its head tells of more samples: fetch or write it again")
    try:
        return getattr(soundfile, function)(file, **options)
    except soundfile.SoundFileError as error:
        raise DataError(f"is not a readable sound file: {error}") from error


def is_broken_sound(value: dict[str, Any] | None) -> bool:
    """True if a sound cannot be decoded, or has no samples, or some that are not finite."""
    try:
        samples = np.zeros(0) if value is None else read_samples(open_bytes(value))[0]
        return not samples.size or not np.isfinite(samples).all()
    except UNDECODABLE:
        return True


def read_samples(file: SoundFile) -> tuple[np.ndarray, int]:
    """
    Samples from -1 to 1, float32 `[frames, channels]`, and their number in a second: soundfile reads most kinds of
    files, PyAV the M4A and AAC of phones. A [`DataError`] continues after the file's name.
    """
    return _decode(file) if _is_from_phone(file) else _call("read", file, dtype="float32", always_2d=True)


def _is_cut(file: SoundFile) -> bool:
    """True for a WAV or AIFF shorter than the samples that its head tells of: libsndfile reads what is left."""
    with open(file, "rb") if isinstance(file, str) else io.BytesIO(file.getvalue()) as held:
        head, length = held.read(12), held.seek(0, os.SEEK_END)
        held.seek(12)
        while head[:4] in (b"RIFF", b"FORM") and len(part := held.read(8)) == 8:
            size = int.from_bytes(part[4:], "little" if head[:4] == b"RIFF" else "big")
            if part[:4] in (b"data", b"SSND"):
                return length < size < _UNKNOWN
            held.seek(size + size % 2, os.SEEK_CUR)
    return False


def read_recording(value: dict[str, Any], sampling_rate: int) -> np.ndarray:
    """The samples of a sound file, which lies on disk or is given as bytes, at a rate, as one channel."""
    name = value["path"] or "a recording"
    try:
        samples, rate = read_samples(str(value["path"]) if value["bytes"] is None else io.BytesIO(value["bytes"]))
    except (DataError, OSError) as error:
        told = error if isinstance(error, DataError) else f"cannot be read: {error.strerror}"
        raise DataError(f"{name} {told}") from error
    mono: np.ndarray = samples.mean(1)
    if not np.isfinite(mono).all():
        raise DataError(f"{name} holds samples that are not finite")
    return mono if rate == sampling_rate else import_extra("soxr").resample(mono, rate, sampling_rate)


def _is_from_phone(file: SoundFile) -> bool:
    """True for MPEG-4 and raw AAC, by the first bytes; PyAV would also read what is left of a broken WAV."""
    with open(file, "rb") if isinstance(file, str) else io.BytesIO(file.getvalue()[:12]) as opened:
        head = opened.read(12)
    # AAC has the sync word of MP3, and layer 0.
    raw_aac = len(head) > 1 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0
    return head[4:8] == b"ftyp" or raw_aac


def _decode(file: SoundFile) -> tuple[np.ndarray, int]:
    av: Any = import_extra("av")
    try:
        with av.open(file) as container:
            stream, resampler = container.streams.audio[0], av.AudioResampler(format="flt")
            frames = [part for frame in container.decode(stream) for part in resampler.resample(frame)]
            parts = [part.to_ndarray().reshape(-1, len(part.layout.channels)) for part in frames]
            return np.concatenate(parts), int(stream.rate)
    # Without a stream of sound, or without a sample.
    except (av.error.FFmpegError, IndexError, ValueError) as error:
        raise DataError(f"is not a readable sound file: {error}") from error


def find_tars(found: list[str]) -> list[Path]:
    """Tar files among files, or in a folder."""
    return sorted(file for file in first_files(*found) if file.suffix.lower() == ".tar")


def refuse_cut_tars(files: Iterable[Path]) -> None:
    """Refuses a tar file without its end: `datasets` takes one that is cut between examples for a whole one."""
    for path in files:
        with path.open("rb") as file:
            start = file.read(tarfile.BLOCKSIZE)
            file.seek(max(0, path.stat().st_size - len(_TAR_END)))
            # Of a compressed one its own end says whether it is whole.
            if not start or (start[257:262] == b"ustar" and file.read() != _TAR_END):
                raise DataError(f"{path} is no whole tar file, its end is missing: fetch or write it again.")


def count_examples(file: Path) -> int:
    """The number of examples of a tar file, from its headers alone."""
    # With all of `datasets`, which other users of this module do without.
    from datasets.packaged_modules.webdataset.webdataset import base_plus_ext

    try:
        with tarfile.open(file) as tar:
            names = [member.name for member in tar if member.isreg()]
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{file} is no whole tar file ({error}): fetch or write it again.") from error
    # As `datasets` reads them: neighbours of one name are an example, hidden files none.
    known = [name for name in names if not os.path.basename(name).startswith((".", "__"))]
    keys = filter(None, (base_plus_ext(name)[0] for name in known))
    return sum(1 for _ in itertools.groupby(keys))
