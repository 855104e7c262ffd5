"""Words of a stream of sound: pieces of any shape, and samples that are no numbers."""

import copy

import numpy as np
import pytest

import hf_ext
from hf_ext.audio_stream import Listener, Stream


@pytest.fixture(scope="module")
def listener() -> Listener:
    return Listener(hf_ext.released("spoken-digits"))


def make_words() -> np.ndarray:
    """Two hums of different height, with pauses."""
    time = np.arange(4000) / 8000
    hums = [0.5 * np.sin(2 * np.pi * pitch * time) * np.hanning(4000) for pitch in (200, 900)]
    pause = np.zeros(3200)
    return np.concatenate([pause, hums[0], pause, hums[1], pause]).astype(np.float32)


def test_channels_are_averaged(listener):
    sound = make_words()
    heard = Stream(copy.deepcopy(listener), 8000).hear(sound)
    assert len(heard) == 2
    for columns in ([sound], [sound + 0.25, sound - 0.25]):
        stream, words = Stream(copy.deepcopy(listener), 8000), []
        for piece in np.array_split(np.stack(columns, 1), 7):
            words += stream.hear(piece)
        assert words == heard


def test_samples_that_are_no_numbers_are_silence(listener):
    """In steps, as `examples/mrconv/listen.py` gives them."""
    heard, sound = [], make_words()[:9600]
    for value in (0.0, np.nan, -np.inf):
        own, broken = copy.deepcopy(listener), sound.copy()
        # In a pause, and within a word.
        broken[[100, 5000]] = value
        heard.append([own.hear(step) for step in broken.reshape(-1, 80)])
        assert np.isfinite(own.power) and np.isfinite(own.loudest)
    assert all(words == heard[0] for words in heard) and any(word is not None for word in heard[0])
