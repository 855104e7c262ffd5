"""Sound files: those that soundfile reads, and M4A and AAC of phones, which PyAV decodes."""

import io
from typing import Any, NamedTuple

import numpy as np

from ..errors import DataError
from ..extras import import_extra
from .broken import open_bytes

AUDIO_SUFFIXES = {".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif", ".m4a", ".aac"}

SoundFile = str | io.BytesIO


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
    soundfile = import_extra("soundfile")
    try:
        about = soundfile.info(file)
    except soundfile.SoundFileError as error:
        raise DataError(f"is not a readable sound file: {error}") from error
    return SoundAbout(about.samplerate, about.frames, about.channels)


def is_broken_sound(value: dict[str, Any] | None) -> bool:
    """True if the head of an undecoded sound cannot be read, or says that it has no samples."""
    try:
        return value is None or not describe_sound(open_bytes(value)).frames
    except (DataError, OSError):
        return True


def read_samples(file: SoundFile) -> tuple[np.ndarray, int]:
    """
    Samples from -1 to 1, float32 `[frames, channels]`, and their number in a second.

    Raises:
        DataError: If it cannot be decoded; the message continues after the file's name.
    """
    if _is_from_phone(file):
        return _decode(file)
    soundfile = import_extra("soundfile")
    try:
        samples, rate = soundfile.read(file, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise DataError(f"is not a readable sound file: {error}") from error
    return samples, rate


def read_recording(value: dict[str, Any], sampling_rate: int) -> np.ndarray:
    """The samples of a sound file, which lies on disk or is given as bytes, at a rate, as one channel."""
    try:
        samples, rate = read_samples(str(value["path"]) if value["bytes"] is None else io.BytesIO(value["bytes"]))
    except (DataError, OSError) as error:
        told = error if isinstance(error, DataError) else f"cannot be read: {error.strerror}"
        raise DataError(f"{value['path'] or 'a recording'} {told}") from error
    mono: np.ndarray = samples.mean(1)
    if not np.isfinite(mono).all():
        raise DataError(f"{value['path'] or 'a recording'} holds samples that are not finite")
    return mono if rate == sampling_rate else import_extra("soxr").resample(mono, rate, sampling_rate)


def _is_from_phone(file: SoundFile) -> bool:
    """True for MPEG-4 and raw AAC, by the first bytes; PyAV would also read what is left of a broken WAV."""
    if isinstance(file, str):
        with open(file, "rb") as opened:
            head = opened.read(12)
    else:
        head = file.getvalue()[:12]
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
