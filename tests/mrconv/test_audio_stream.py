"""Words of a stream of sound: pieces of any shape, and samples that are no numbers."""

import numpy as np
import pytest

import hf_ext
from hf_ext.audio_stream import Listener, Stream


@pytest.fixture(scope="module")
def source() -> str:
    return str(hf_ext.released("spoken-digits"))


def make_words() -> np.ndarray:
    """Two hums of different height, with pauses."""
    time = np.arange(4000) / 8000
    hums = [0.5 * np.sin(2 * np.pi * pitch * time) * np.hanning(4000) for pitch in (200, 900)]
    pause = np.zeros(3200)
    return np.concatenate([pause, hums[0], pause, hums[1], pause]).astype(np.float32)


def test_channels_are_averaged(source):
    sound = make_words()
    heard = Stream(Listener(source), 8000).hear(sound)
    assert len(heard) == 2
    for columns in ([sound], [sound + 0.25, sound - 0.25]):
        stream, words = Stream(Listener(source), 8000), []
        for piece in np.array_split(np.stack(columns, 1), 7):
            words += stream.hear(piece)
        assert words == heard


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_samples_that_are_no_numbers_are_silence(source, value):
    sound = make_words()
    broken, silent = sound.copy(), sound.copy()
    # In a pause, and within a word.
    for place in (100, 5000):
        broken[place], silent[place] = value, 0
    stream = Stream(Listener(source), 8000)
    assert stream.hear(broken) == Stream(Listener(source), 8000).hear(silent)
    assert np.isfinite(stream.listener.power) and np.isfinite(stream.listener.loudest)


def test_a_listener_that_is_given_steps_outlives_such_samples_too(source):
    """As `examples/mrconv/listen.py` gives them."""
    sound, heard = make_words(), []
    for value in (0.0, np.nan):
        listener, broken = Listener(source), sound.copy()
        broken[5000] = value
        heard.append([listener.hear(step) for step in broken[: len(broken) // 80 * 80].reshape(-1, 80)])
        assert np.isfinite(listener.power)
    assert heard[0] == heard[1] and any(word is not None for word in heard[0])
