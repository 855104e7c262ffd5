"""MRConvFeatureExtractor: waveforms of every kind in, padded and masked batches out."""

import numpy as np
import pytest
import torch
from transformers import AutoFeatureExtractor

from hf_ext.mrconv import MRConvFeatureExtractor
from tests.kit.refusals import refused

RATE = 8000


def make_audio(samples: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-0.9, 0.9, samples)


def extract(audio, *, sampling_rate=RATE, return_tensors="pt", do_normalize=False, padding_side="right", **options):
    extractor = MRConvFeatureExtractor(sampling_rate=RATE, do_normalize=do_normalize, padding_side=padding_side)
    return extractor(audio, sampling_rate=sampling_rate, return_tensors=return_tensors, **options)


AUDIO = make_audio(30)


ARRAYS = [AUDIO, AUDIO[None], AUDIO.astype(">f4"), np.ma.masked_array(AUDIO, AUDIO > 1), torch.from_numpy(AUDIO)]


@pytest.mark.parametrize("audio", [*ARRAYS, AUDIO.tolist(), [AUDIO], [torch.from_numpy(AUDIO).float()]])
def test_one_recording_of_every_kind_is_one_batch(audio):
    batch = extract(audio)
    assert batch.input_values.dtype == torch.float32
    torch.testing.assert_close(batch.input_values, torch.from_numpy(AUDIO).float()[None])
    assert batch.attention_mask.tolist() == [[1] * 30]


@pytest.mark.parametrize("dtype", [np.int16, np.int32])
def test_whole_numbers_are_scaled_by_their_range(dtype):
    limits = np.iinfo(dtype)
    values = extract(np.array([limits.min, limits.min // 2, 0, limits.max], dtype)).input_values
    torch.testing.assert_close(values, torch.tensor([[-1.0, -0.5, 0.0, 1.0]]), atol=1 / 32000, rtol=0)
    assert values.abs().max() <= 1


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_masked_and_leaves_the_samples(side):
    audio = [make_audio(5), make_audio(9, 1), make_audio(1, 2)]
    batch = extract(audio, padding=True, padding_side=side, pad_to_multiple_of=4)
    assert batch.input_values.shape == batch.attention_mask.shape == (3, 12)
    for values, mask, recording in zip(batch.input_values, batch.attention_mask, audio, strict=True):
        places = slice(0, len(recording)) if side == "right" else slice(12 - len(recording), 12)
        assert mask.sum() == len(recording) and mask[places].all()
        np.testing.assert_array_equal(values[places], recording.astype(np.float32))
        assert not values[mask == 0].any()


@pytest.mark.parametrize("side", ["left", "right"])
def test_each_recording_is_normalised_over_its_own_kept_samples(side):
    audio = [3 + 5 * make_audio(40), make_audio(12, 1), np.full(7, 0.25)]
    audio[0][20:] = 1000
    options = {"padding": True, "max_length": 20, "truncation": True, "padding_side": side, "do_normalize": True}
    batch = extract(audio, **options)
    for values, mask in zip(batch.input_values[:2], batch.attention_mask, strict=False):
        samples = values[mask == 1]
        assert samples.mean().abs() < 1e-6
        assert (samples.var(correction=0) - 1).abs() < 1e-5
    # What was cut has no part in it, and a constant is silence.
    alone = extract(audio[0][:20], do_normalize=True).input_values[0]
    assert torch.equal(batch.input_values[0], alone)
    assert not batch.input_values[2].any()
    assert not batch.input_values[batch.attention_mask == 0].any()


def test_lists_without_padding_keep_their_lengths():
    batch = extract([AUDIO, AUDIO[:4]], return_tensors=None)
    assert [len(values) for values in batch["input_values"]] == [30, 4]
    with refused(ValueError, "padding=True"):
        extract([AUDIO, AUDIO[:4]])


@pytest.mark.parametrize(("rate", "words"), [(None, "is not given"), (16000, "is 16000 Hz"), ("8000", "is '8000' Hz")])
def test_another_or_no_rate_is_refused(rate, words):
    with pytest.raises(ValueError, match=f"`sampling_rate` {words}; the model was trained with 8000 Hz"):
        extract(AUDIO, sampling_rate=rate)


BROKEN = AUDIO.copy()
BROKEN[3] = np.nan


@pytest.mark.parametrize(
    ("audio", "words"),
    [
        (np.zeros(0), "no samples"),
        ([AUDIO, []], "no samples"),
        ([], "empty list"),
        (BROKEN, "NaN or infinite"),
        (np.ma.masked_array(AUDIO, AUDIO > 0.5), "NaN or infinite"),
        (torch.from_numpy(BROKEN).bfloat16(), "NaN or infinite"),
        (np.zeros((100, 2)), r"shape \(100, 2\): samples x channels"),
        (np.zeros((1, 2, 100)), r"shape \(2, 100\); expected one axis"),
        (torch.tensor(0.5), r"shape \(\); expected one axis"),
        ("digits.wav", "is a str"),
        (np.zeros(4, np.int64), "holds int64; allowed: floats, and int16 or int32"),
        (["digits.wav"], "expected one axis|holds <U"),
    ],
)
def test_what_is_no_mono_audio_is_refused(audio, words):
    with pytest.raises((ValueError, TypeError), match=words):
        extract(audio)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"feature_size": 2}, "only 1, mono"),
        ({"sampling_rate": "8 kHz"}, "`sampling_rate` is '8 kHz'"),
        ({"padding_value": float("nan")}, "`padding_value` is nan"),
        ({"padding_side": "both"}, "allowed: 'left', 'right'"),
    ],
)
def test_options_that_make_no_extractor_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        MRConvFeatureExtractor(**options)


def test_options_survive_saving(tmp_path):
    options = {"sampling_rate": 4000, "padding_side": "left", "do_normalize": False, "padding_value": 0.5}
    extractor = MRConvFeatureExtractor(**options)
    extractor.save_pretrained(tmp_path)
    loaded = AutoFeatureExtractor.from_pretrained(tmp_path)
    assert type(loaded) is MRConvFeatureExtractor
    assert loaded.to_dict() == extractor.to_dict()
    assert all(getattr(loaded, name) == value for name, value in options.items())
