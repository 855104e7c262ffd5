"""Recognition of words in a stream of sound: segmentation by loudness, and classification."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForAudioClassification

from hf_ext.hub.checkpoints import split_revision

from .errors import UsageError
from .extras import import_extra
from .mrconv import MRConvCache
from .mrconv.feature_extraction_mrconv import as_array, full_scale

STEP = 0.01
# A word is louder than this share of the loudest step, and ends after so many quieter seconds.
QUIET, PAUSE = 0.05, 0.2
# Nothing below this share of full scale is a word, such as hiss; and in so many seconds the loudest step counts half,
# so that soft words are heard again after a click.
FLOOR, HALVED = 0.005, 1.0


class Listener:
    """Segments a stream into words by loudness, and classifies them as they come in."""

    def __init__(self, source: str | Path):
        name, revision = split_revision(str(source))
        self.model = AutoModelForAudioClassification.from_pretrained(name, revision=revision).eval()
        config = self.model.config
        self.rate: Any = getattr(config, "sampling_rate", None)
        if config.model_type != "mrconv" or not self.rate:
            said = f"`model_type` {config.model_type!r} and `sampling_rate` {self.rate}"
            raise UsageError(f"{source}: its configuration has {said}; give an MRConv model of sounds.")
        self.model.reparameterize()
        self.cache = MRConvCache(self.model.config)
        # What a first call prepares is prepared before the first sound, as if it had been a word.
        self.power, self.samples, self.loudest = 1e-4, 1, 0.0
        # The offset of a microphone is the mean of its pauses, none of which would be quiet with it.
        self.heard, self.offset = 1, 0.0
        self.begin_word()
        self.classify(np.zeros(1, np.float32))
        self.begin_word()

    def begin_word(self) -> None:
        """Forgets the sound of the word before."""
        self.cache.reset()  # type: ignore[no-untyped-call]
        self.total, self.positions, self.quiet = 0, 0, 0.0

    def hear(self, sound: np.ndarray) -> int | None:
        """The class of a word that has ended with these samples, or None; a single one has no loudness."""
        sound = read_samples(sound)
        if not len(sound):
            return None
        loudness = float(np.std(sound))
        self.loudest = max(self.loudest * 0.5 ** (len(sound) / self.rate / HALVED), loudness)
        loud = loudness > max(QUIET * self.loudest, FLOOR)
        if not loud:
            self.heard += len(sound)
            self.offset += float(np.sum(sound - self.offset)) / self.heard
        if not loud and not self.positions:
            return None
        word = self.classify(sound)
        if loud:
            # Pauses within a word belong to it, the one after it does not.
            self.word, self.quiet = word, 0.0
            return None
        self.quiet += len(sound) / self.rate
        if self.quiet < PAUSE:
            return None
        self.begin_word()
        return self.word

    @torch.inference_mode()
    def classify(self, sound: np.ndarray) -> int:
        """The class by the mean of the last hidden states of the word so far: nothing is computed twice."""
        # Whole recordings are brought to variance 1; of a stream only what was heard before is known.
        sound = sound - np.float32(self.offset)
        self.power += float(np.sum(sound**2))
        self.samples += len(sound)
        values = torch.from_numpy(sound / np.sqrt(self.power / self.samples)).float()[None]
        hidden = self.model.model(input_values=values, cache=self.cache).last_hidden_state
        self.total, self.positions = self.total + hidden.sum(1), self.positions + len(sound)
        return int(self.model.classifier(self.total / self.positions).argmax())


def read_samples(sound: np.ndarray) -> np.ndarray:
    """One channel of samples: whole numbers are scaled, up to 8 channels averaged, and NaN becomes silence."""
    # It would stay in the listener's mean for ever.
    numbers: np.ndarray = np.nan_to_num(full_scale(as_array(sound)), nan=0.0, posinf=0.0, neginf=0.0)
    return numbers.mean(int(not 0 < len(numbers) <= 8 < numbers.shape[1])) if numbers.ndim == 2 else numbers


class Stream:
    """Pieces of sound of any length, at any rate, for a [`Listener`]: it gets steps of its own length and rate."""

    def __init__(self, listener: Listener, rate: int):
        if not 0 < rate < math.inf:
            # soxr looks for a ratio to NaN for ever.
            raise UsageError(f"`rate` is {rate}; give the samples per second of the sound, above 0.")
        self.listener, self.seconds, self.rest = listener, 0.0, np.zeros(0, np.float32)
        same = rate == listener.rate
        self.resampler = None if same else import_extra("soxr").ResampleStream(rate, listener.rate, 1, dtype="float32")

    def hear(self, sound: np.ndarray, last: bool = False) -> list[tuple[float, str]]:
        """
        The words that ended in a piece of samples of full scale 1, or of rows of channels, and the seconds at which
        they did.
        """
        sound = read_samples(sound)
        if self.resampler is not None:
            sound = self.resampler.resample_chunk(sound, last=last)
            if last:
                self.resampler.clear()
        # Silence, at the offset of the microphone, ends the last word.
        size = int(1.5 * PAUSE * self.listener.rate) if last else 0
        silence = np.full(size, self.listener.offset, np.float32)
        sound, size = np.concatenate([self.rest, sound, silence]), max(1, int(STEP * self.listener.rate))
        steps, self.rest = np.split(sound, [len(sound) // size * size])
        words = []
        for step in steps.reshape(-1, size):
            self.seconds += size / self.listener.rate
            word = self.listener.hear(step)
            if word is not None:
                # Classes without a name are called LABEL_3.
                words.append((self.seconds, self.listener.model.config.id2label[word].removeprefix("LABEL_")))
        return words
