"""Sounds of phones: M4A and AAC are read as WAV is."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest

from hf_ext.data.files import describe_sound, read_samples
from hf_ext.data.survey import look_at
from hf_ext.errors import DataError
from tests.cli.init_testing import in_a_folder_of_its_own as in_a_folder_of_its_own
from tests.cli.init_testing import train
from tests.kit.command_line import run
from tests.kit.refusals import refused

av = pytest.importorskip("av", reason="the extra `audio` is not installed")
soundfile = pytest.importorskip("soundfile")


def write(path: str, rate: int = 16000, channels: int = 1, seconds: float = 0.5, pitch: float = 440) -> Path:
    """A tone, encoded as the ending says."""
    place, time = Path(path), np.arange(int(rate * seconds)) / rate
    place.parent.mkdir(parents=True, exist_ok=True)
    samples, layout = 0.5 * np.sin(2 * np.pi * pitch * time), "stereo" if channels == 2 else "mono"
    samples = samples.astype(np.float32)[:, None].repeat(channels, 1)
    if place.suffix in (".wav", ".flac", ".opus", ".aiff"):
        kind = {".opus": "OGG"}.get(place.suffix)
        soundfile.write(place, samples, rate, format=kind, subtype="OPUS" if kind else None)
        return place
    with av.open(str(place), "w") as container:
        stream = container.add_stream("aac", rate=rate, layout=layout)
        stream.bit_rate = 64000
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples.T), format="fltp", layout=layout)
        frame.sample_rate = rate
        queue = av.AudioFifo()
        queue.write(frame)
        while (part := queue.read(stream.codec_context.frame_size or 1024, partial=True)) is not None:
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    return place


KINDS = [("m4a", 8000, 1), ("m4a", 44100, 2), ("aac", 16000, 1), ("aac", 48000, 2)]


@pytest.mark.parametrize(("ending", "rate", "channels"), KINDS)
@pytest.mark.parametrize("as_bytes", [False, True])
def test_samples_are_those_that_were_encoded(ending, rate, channels, as_bytes):
    path = write(f"a.{ending}", rate, channels)

    def given():
        return io.BytesIO(path.read_bytes()) if as_bytes else str(path)

    samples, found = read_samples(given())
    assert (found, samples.shape[1], samples.dtype) == (rate, channels, np.float32)
    # Encoders pad the beginning and the end; between them the tone has its loudness and pitch.
    assert abs(len(samples) / rate - 0.5) < 0.2
    middle = samples[len(samples) // 3 : 2 * len(samples) // 3, 0]
    assert np.abs(middle).max() == pytest.approx(0.5, rel=0.15)
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    assert spectrum.argmax() * rate / len(middle) == pytest.approx(440, abs=2 * rate / len(middle))
    assert describe_sound(given()) == (rate, len(samples), channels)


@pytest.mark.parametrize("ending", ["M4A", "opus", "aac"])
def test_folders_of_classes_are_read_and_train(ending):
    for number in range(12):
        path = write(f"sounds/{'ab'[number % 2]}/{number}.{ending.lower()}", pitch=200 + 20 * number)
        path.rename(path.with_suffix(f".{ending}"))
    survey = look_at("sounds")
    assert (survey.kind, survey.count, survey.classes) == ("sounds", 12, ["a", "b"]) and not survey.left_out
    assert survey.rate == 16000
    if ending == "M4A":
        train("mrconv", "sounds", "--model.hidden_size", "8", "--model.num_hidden_layers", "1")


def held(kind: str, subtype: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.random.default_rng(0).uniform(-0.5, 0.5, 2000), 8000, format=kind, subtype=subtype)
    return file.getvalue()


WHOLE = [held("WAV", "PCM_16"), held("WAVEX", "PCM_24"), held("WAV", "FLOAT"), held("AIFF", "PCM_16")]
BROKEN = [b"\0\0\0\x18ftypM4A " + b"\0" * 50, b"\xff\xf1" + b"x" * 40, b"", b"RIFF"]


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7F000000, 0x80000000, 2000 * 2 + 44])
def test_a_wav_whose_writer_knew_no_size_is_read(size):
    whole, place = WHOLE[0], WHOLE[0].index(b"data") + 4
    stream = whole[:place] + size.to_bytes(4, "little") + whole[place + 4 :]
    for sound in (whole, stream, held("RF64", "PCM_16"), held("W64", "PCM_16")):
        np.testing.assert_array_equal(read_samples(io.BytesIO(sound))[0], read_samples(io.BytesIO(whole))[0])


@pytest.mark.parametrize("content", [*BROKEN, *(whole[: len(whole) // 2] for whole in WHOLE)])
def test_broken_ones_are_refused_and_counted(content):
    for number in range(10):
        write(f"data/{'ab'[number % 2]}/{number // 2}.m4a", pitch=200 + 20 * number)
    Path("data/b/5.m4a").write_bytes(content)
    for read in (read_samples, describe_sound):
        with refused(DataError, "sound"):
            read("data/b/5.m4a")
    survey = look_at("data")
    assert survey.count == 11 and "1 of 11" in "; ".join(survey.left_out)


def test_a_film_without_sound_and_films_are_refused():
    with av.open("silent.mp4", "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")))
        container.mux(stream.encode(None))
    with refused(DataError, "sound"):
        read_samples("silent.mp4")
    Path("films").mkdir()
    Path("silent.mp4").rename("films/1.mp4")
    assert "FLAC" in run("init", "mrconv", "mine", "--data", "films", code=2).stderr


def test_without_the_library_the_extra_is_named(monkeypatch):
    path = write("a.m4a")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImportError, match="audio"):
        read_samples(str(path))
    assert read_samples(str(write("a.wav")))[1] == 16000
