# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Feature extractor of MRConv: raw waveforms to batches with a mask."""

import math
from typing import Any

import numpy as np
import torch
from transformers.feature_extraction_sequence_utils import SequenceFeatureExtractor
from transformers.feature_extraction_utils import BatchFeature
from transformers.utils import PaddingStrategy, TensorType

# Under the variance, as in the other audio models of transformers: silence stays silence.
_VARIANCE_EPSILON = 1e-7
# No recording has fewer samples, no sound file more channels: tells samples x channels from a batch.
_MOST_CHANNELS = 8


def as_array(audio: Any) -> np.ndarray:
    """Audio as an array in this machine's byte order; a masked sample has no value."""
    if isinstance(audio, torch.Tensor):
        # NumPy has no bfloat16.
        return (audio.float() if audio.is_floating_point() else audio).numpy(force=True)
    if isinstance(audio, np.ma.MaskedArray) and audio.mask.any():
        return np.ma.filled(audio.astype(np.float32), np.nan)
    array = np.asarray(audio)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def full_scale(array: np.ndarray) -> np.ndarray:
    """Samples as float32: whole numbers within [-1, 1], floats as they are."""
    if array.dtype in (np.int16, np.int32):
        return (array / -float(np.iinfo(array.dtype).min)).astype(np.float32)
    if not np.issubdtype(array.dtype, np.floating):
        allowed = "floats, and int16 or int32, which are scaled to [-1, 1]"
        advice = "Convert it; 8 bits without a sign are `(audio.astype(np.float32) - 128) / 128`"
        raise TypeError(f"A recording holds {array.dtype}; allowed: {allowed}. {advice}.")
    # A number that float32 does not have becomes infinite.
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def _waveform(recording: Any) -> np.ndarray:
    """One recording as float32 in [-1, 1] if it was whole numbers; floats keep their scale."""
    array = as_array(recording)
    if array.ndim != 1:
        told = f"A recording has shape {array.shape}; expected one axis of samples (mono)"
        raise ValueError(f"{told}. Average the channels first, e.g. with `audio.mean(axis=channel_axis)`.")
    array = full_scale(array)
    if not np.isfinite(array).all():
        raise ValueError("A recording holds NaN or infinite samples; repair or leave out the file.")
    return array


def _recordings(raw_speech: Any) -> list[np.ndarray]:
    """The batch as a list: one recording, a list of them, or an array of `[batch, samples]`."""
    if isinstance(raw_speech, (torch.Tensor, np.ndarray)):
        raw_speech = as_array(raw_speech)
        if raw_speech.ndim == 2 and raw_speech.shape[1] <= _MOST_CHANNELS < raw_speech.shape[0]:
            told = f"The audio has shape {raw_speech.shape}: samples x channels?"
            raise ValueError(f"{told} Give mono audio, `audio.mean(axis=1)`, or a list of recordings.")
        raw_speech = raw_speech if raw_speech.ndim > 1 else raw_speech[None]
    elif not isinstance(raw_speech, (list, tuple)):
        raise TypeError(f"The audio is a {type(raw_speech).__name__}; give an array, a tensor or a list of them.")
    elif raw_speech and isinstance(raw_speech[0], (int, float, np.number)):
        raw_speech = [raw_speech]
    return [_waveform(recording) for recording in raw_speech]


class MRConvFeatureExtractor(SequenceFeatureExtractor):
    """
    Prepare raw mono audio for [`MRConvForAudioClassification`]: check, cut, normalise, pad, mask.

    Nothing is resampled. A model after `model.change_rate(2)` takes every second sample, as in the paper's evaluation
    at half the rate: pass `audio[::2]` to a feature extractor of that rate.

    Args:
        feature_size (`int`, *optional*, defaults to 1): Values of each sample: always 1, mono.
        sampling_rate (`int`, *optional*, defaults to 16000):
            Samples per second, in hertz, that the model was trained with.
        padding_value (`float`, *optional*, defaults to 0.0):
            Value of the padding, which the mask excludes from every result.
        padding_side (`str`, *optional*, defaults to `"right"`): `"right"` or `"left"`.
        return_attention_mask (`bool`, *optional*, defaults to `True`): Return the mask.
        do_normalize (`bool`, *optional*, defaults to `True`):
            Normalise each recording, after truncation, to zero mean and unit variance.

    Example:
        >>> import numpy as np
        >>> from hf_ext import MRConvFeatureExtractor
        >>> sounds, extractor = [np.zeros(800), np.zeros(500)], MRConvFeatureExtractor(sampling_rate=8000)
        >>> extractor(sounds, sampling_rate=8000, padding=True, return_tensors="pt").attention_mask.sum(1)
        tensor([800, 500])
    """

    model_input_names = ["input_values", "attention_mask"]

    def __init__(
        self,
        feature_size: int = 1,
        sampling_rate: int = 16000,
        padding_value: float = 0.0,
        padding_side: str = "right",
        return_attention_mask: bool = True,
        do_normalize: bool = True,
        **kwargs: Any,
    ):
        if feature_size != 1:
            raise ValueError(f"`feature_size` is {feature_size}; only 1, mono audio, is supported.")
        for name, value, least in (("sampling_rate", sampling_rate, 1), ("padding_value", padding_value, -math.inf)):
            if not isinstance(value, (int, float)) or not least <= value < math.inf:
                allowed = "a number of samples per second, at least 1" if least == 1 else "a finite number"
                raise ValueError(f"`{name}` is {value!r}; give {allowed}.")
        if padding_side not in ("left", "right"):
            raise ValueError(f"`padding_side` is {padding_side!r}; allowed: 'left', 'right'.")
        super().__init__(feature_size, sampling_rate, padding_value, padding_side=padding_side, **kwargs)
        self.return_attention_mask = return_attention_mask
        self.do_normalize = do_normalize

    def __call__(
        self,
        raw_speech: np.ndarray | torch.Tensor | list[float] | list[np.ndarray] | list[torch.Tensor],
        padding: bool | str | PaddingStrategy = False,
        max_length: int | None = None,
        truncation: bool = False,
        pad_to_multiple_of: int | None = None,
        return_attention_mask: bool | None = None,
        return_tensors: str | TensorType | None = None,
        sampling_rate: int | None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """
        Prepare one recording or several.

        Args:
            raw_speech (`np.ndarray`, `torch.Tensor`, `list[float]` or a list of recordings):
                Mono audio: `(samples,)`, `(batch_size, samples)`, or a list of recordings of any lengths. Floats are
                used as they are; int16 and int32 are scaled to [-1, 1].
            padding, max_length, truncation, pad_to_multiple_of, return_attention_mask, return_tensors:
                As in every feature extractor of transformers; lengths are in samples.
            sampling_rate (`int`): Samples per second of `raw_speech`; it must be that of the feature extractor.
            kwargs: Ignored, as in every feature extractor of transformers.

        Returns:
            [`BatchFeature`]: `input_values` of shape `(batch_size, samples)`, float32, and `attention_mask` of the
            same shape, 1 for samples and 0 for padding.

        Raises:
            ValueError: Another sampling rate or none is given, or the audio is empty, not mono or not finite.
            TypeError: The audio is no array, tensor or list, or holds numbers of another type.
        """
        if sampling_rate != self.sampling_rate:
            got = "not given" if sampling_rate is None else f"{sampling_rate!r} Hz"
            told = f"`sampling_rate` is {got}; the model was trained with {self.sampling_rate} Hz"
            raise ValueError(f"{told}. Resample the audio, and pass `sampling_rate={self.sampling_rate}` to say so.")
        # Truncate before normalising, so mean and variance exclude the removed part.
        cut = [
            self._truncate({"input_values": recording}, max_length, pad_to_multiple_of, truncation)["input_values"]
            for recording in _recordings(raw_speech)
        ]
        if not cut or not all(map(len, cut)) or (max_length or 1) < 1:
            told = f"Of the audio no samples are left, `max_length` being {max_length}"
            raise ValueError(f"{told}; give at least one recording, and at least one sample of each.")
        batch = BatchFeature({"input_values": list(map(self.normalize, cut)) if self.do_normalize else cut})
        return self.pad(batch, padding, max_length, False, pad_to_multiple_of, return_attention_mask, return_tensors)

    @staticmethod
    def normalize(recording: np.ndarray) -> np.ndarray:
        """(x - mean(x)) / sqrt(var(x) + 1e-7), computed in float64."""
        precise = recording.astype(np.float64)
        normalized = (precise - precise.mean()) / np.sqrt(precise.var() + _VARIANCE_EPSILON)
        return normalized.astype(np.float32)
