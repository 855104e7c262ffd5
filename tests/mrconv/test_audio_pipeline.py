"""Sounds in `pipeline("audio-classification")`, words of a stream, and batches that the feature extractor makes."""

import copy
import functools
import http.server
import io
import threading
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
import torch
import transformers
from transformers import pipeline

import hf_ext
from hf_ext.audio_stream import Listener, Stream
from hf_ext.errors import DataError, UsageError
from hf_ext.mrconv import MRConvConfig, MRConvFeatureExtractor, MRConvForAudioClassification
from tests.kit.refusals import refused

RATE, LONGEST = 4000, 256


@pytest.fixture(scope="module")
def classify():
    torch.manual_seed(0)
    names = {"id2label": dict(enumerate("abc")), "label2id": {name: index for index, name in enumerate("abc")}}
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "kernel_size": 16, "max_position_embeddings": LONGEST}
    model = MRConvForAudioClassification(MRConvConfig(**sizes, **names, input_size=1, sampling_rate=RATE)).eval()
    model.classifier.weight.data.mul_(50)
    extractor = MRConvFeatureExtractor(sampling_rate=RATE)
    return pipeline("audio-classification", model=model, feature_extractor=extractor, top_k=3)


def scores(found) -> dict[str, float]:
    return {item["label"]: item["score"] for item in found}


def logits(classify, samples: np.ndarray) -> torch.Tensor:
    values = classify.feature_extractor(samples, sampling_rate=RATE, return_tensors="pt")
    with torch.no_grad():
        return classify.model(**values).logits[0]


def expected(classify, samples: np.ndarray) -> dict[str, float]:
    """The mean over parts that overlap by half, part by part."""
    last = max(0, len(samples) - LONGEST)
    parts = [np.float32(samples[start : start + LONGEST]) for start in (*range(0, last, LONGEST // 2), last)]
    mean = torch.stack([logits(classify, part).softmax(-1) for part in parts]).mean(0)
    return dict(zip("abc", mean.tolist(), strict=True))


def write(samples: np.ndarray, rate: int, kind: str = "wav") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype="PCM_16" if kind in ("wav", "flac") else None)
    return file.getvalue()


STEREO = np.random.default_rng(0).uniform(-0.5, 0.5, (3000, 2)).round(3).astype(np.float32)
MONO = STEREO.mean(1)
OTHER = soxr.resample(MONO, 8000, RATE)
PCM = (STEREO * 32767).round().astype(np.int16)
PCM_MONO = PCM.mean(1) / 32768
# What is given, and the samples that the model should hear.
GIVEN = {
    "short array": (MONO[:200], MONO[:200]),
    "one more than a part": (MONO[: LONGEST + 1], MONO[: LONGEST + 1]),
    "tensor": (torch.tensor(MONO), MONO),
    "rows of channels": (STEREO, MONO),
    "channels of rows": (torch.tensor(STEREO.T), MONO),
    "int16 of two channels": (PCM, PCM_MONO),
    "int32 of two channels": (PCM.astype(np.int32) * 65536, PCM_MONO),
    "rate of NumPy": ({"raw": MONO, "sampling_rate": np.int64(RATE)}, MONO),
    "raw": ({"raw": MONO, "sampling_rate": RATE}, MONO),
    "array at another rate": ({"array": STEREO, "sampling_rate": 8000, "path": "x.wav"}, OTHER),
    "int16 at another rate": ({"array": PCM, "sampling_rate": 8000}, soxr.resample(PCM_MONO, 8000, RATE)),
    "content": (write(PCM, RATE), PCM_MONO),
    "FLAC at another rate": (write(PCM, 8000, "flac"), soxr.resample(PCM_MONO, 8000, RATE)),
    "undecoded": ({"bytes": write(PCM, RATE), "path": "x.wav"}, PCM_MONO),
    "bfloat16": (torch.tensor(STEREO).bfloat16(), torch.tensor(STEREO).bfloat16().float().mean(1).numpy()),
    "int16 in another byte order": (PCM.astype(">i2"), PCM_MONO),
}
for kind in ("float16", ">f4", "longdouble"):
    GIVEN[f"{kind} at a rate of numpy's"] = ({"raw": STEREO.astype(kind), "sampling_rate": np.int64(8000)}, OTHER)


@pytest.mark.parametrize("kind", GIVEN)
def test_a_sound_of_any_kind_is_heard(classify, kind):
    given, samples = GIVEN[kind]
    found = scores(classify(given))
    assert found == pytest.approx(expected(classify, samples), abs=2e-3)
    assert [*found.values()] == sorted(found.values(), reverse=True)


def test_files_lists_and_generators_are_heard_one_by_one(classify, tmp_path):
    (tmp_path / "a.wav").write_bytes(write(PCM, 8000))
    given = [tmp_path / "a.wav", MONO[:100], {"raw": MONO, "sampling_rate": RATE}]
    alone = [scores(classify(item)) for item in given]
    for found in (classify(given, batch_size=3), classify(item for item in given)):
        assert [scores(one) for one in found] == [pytest.approx(one) for one in alone]
    assert len(classify(MONO, top_k=1)) == 1 and classify([]) == []
    wanted = dict(zip("abc", logits(classify, MONO[:100]).tolist(), strict=True))
    assert scores(classify(MONO[:100], function_to_apply="none")) == pytest.approx(wanted, abs=1e-5)


def test_a_sound_at_an_address_is_heard(classify, tmp_path):
    (tmp_path / "a.wav").write_bytes(write(PCM, RATE))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert scores(classify(f"{address}/a.wav")) == pytest.approx(scores(classify(tmp_path / "a.wav")))
        with refused(DataError, address, "404"):
            classify(f"{address}/b.wav")
        server.shutdown()


BAD = {
    "nothing held": b"",
    "no samples": np.zeros(0, np.float32),
    "channels without samples": np.zeros((0, 2), np.float32),
    "no sound": b"text, and no sound at all",
    "no rate": {"raw": MONO},
    "nothing": {},
    "a number": 0.5,
    "three axes": np.zeros((2, 3, 40), np.float32),
    "bytes as numbers": np.full(100, 128, np.uint8),
    "truths": np.ones(100, bool),
    "no file": {"path": Path("absent.wav")},
    "a folder": {"path": "."},
    "no address": "http://127.0.0.1:9/sound.wav",
    **{f"rate {rate}": {"raw": MONO, "sampling_rate": rate} for rate in (0, -1, np.nan, np.inf, "8000", None, True)},
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_sound_is_refused(classify, kind):
    with refused(DataError):
        classify(BAD[kind])
    for silent in (np.full(100, np.nan, np.float32), np.ma.masked_less(MONO, 0), np.ma.masked_less(PCM, 0)):
        with refused(ValueError, "NaN"):
            classify(silent)


def test_two_rates_that_differ_are_refused(classify):
    model = copy.deepcopy(classify.model)
    for own, extractor in ((RATE, classify.feature_extractor), (None, classify.feature_extractor)):
        model.config.sampling_rate = own
        assert pipeline("audio-classification", model=model, feature_extractor=extractor)(MONO)
    model.config.sampling_rate = RATE // 2
    with refused(DataError, RATE, RATE // 2):
        pipeline("audio-classification", model=model, feature_extractor=classify.feature_extractor)(MONO)


def test_another_model_is_used_as_transformers_does(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    layers = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embedding_groups": 2}
    config = transformers.Wav2Vec2Config(**sizes, **layers, num_labels=3)
    model = transformers.Wav2Vec2ForSequenceClassification(config).eval()
    extractor = transformers.Wav2Vec2FeatureExtractor()
    classify = pipeline("audio-classification", model=model, feature_extractor=extractor)
    values = classify.feature_extractor(MONO, sampling_rate=16000, return_tensors="pt")
    with torch.no_grad():
        wanted = model(**values).logits[0].softmax(-1)
    assert sorted(item["score"] for item in classify(MONO)) == pytest.approx(sorted(wanted.tolist()), abs=1e-5)
    assert [len(one) for one in classify([MONO, MONO[:1500]], batch_size=2)] == [3, 3]
    with pytest.raises(ValueError, match="single channel"):
        classify(STEREO)
    # And no stream.
    model.save_pretrained(tmp_path)
    with refused(UsageError, tmp_path, "wav2vec2"):
        Listener(tmp_path)


@pytest.fixture(scope="module")
def listener() -> Listener:
    return Listener(hf_ext.released("spoken-digits"))


# Two hums of different height, with pauses.
PAUSE, TIME = np.zeros(3200, np.float32), np.arange(4000) / 8000
LOW, HIGH = (np.float32(0.5 * np.sin(2 * np.pi * pitch * TIME) * np.hanning(4000)) for pitch in (200, 900))
WORDS = np.concatenate([PAUSE, LOW, PAUSE, HIGH, PAUSE])


def hear(listener, pieces) -> list:
    """Words in pieces of a sound, each followed by a piece of nothing."""
    stream = Stream(copy.deepcopy(listener), 8000)
    words = [word for piece in pieces for part in (piece, piece[:0]) for word in stream.hear(part)]
    assert stream.listener.hear(np.zeros(0)) is None
    return words


def test_channels_are_averaged_and_whole_numbers_are_heard(listener):
    whole = (WORDS * 32767).astype(np.int16)
    heard = Stream(copy.deepcopy(listener), 8000).hear(WORDS)
    assert len(heard) == 2
    for columns in ([WORDS], [WORDS + 0.25, WORDS - 0.25]):
        assert hear(listener, np.array_split(np.stack(columns, 1), 7)) == heard
    heard = hear(listener, [whole.astype(np.float32) / 32768])
    assert hear(listener, np.array_split(whole, 5)) == heard and len(heard) == 2
    # As torch gives it, and of a microphone with an offset.
    for given in (np.stack([WORDS] * 2), WORDS[None], *(WORDS + np.float32(offset) for offset in (0.01, 0.05, -0.1))):
        assert [word for _, word in hear(listener, [given])] == [word for _, word in heard]
    stream, wide = Stream(copy.deepcopy(listener), 16000), np.repeat(WORDS, 2)
    assert [len(stream.hear(wide, last=True)) for _ in range(2)] == [2, 2]
    for rate in (0, -8000, float("nan"), float("inf")):
        with refused(UsageError, rate):
            Stream(listener, rate)


def test_samples_that_are_no_numbers_are_silence(listener):
    """In steps, as `examples/mrconv/listen.py` gives them."""
    heard, sound = [], WORDS[:9600]
    for value in (0.0, np.nan, -np.inf):
        own, broken = copy.deepcopy(listener), sound.copy()
        # In a pause, and within a word.
        broken[[100, 5000]] = value
        heard.append([own.hear(step) for step in broken.reshape(-1, 80)])
        assert np.isfinite(own.power) and np.isfinite(own.loudest)
    assert all(words == heard[0] for words in heard) and any(word is not None for word in heard[0])


def make_audio(samples: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-0.9, 0.9, samples)


def extract(audio, *, sampling_rate=8000, return_tensors="pt", do_normalize=False, padding_side="right", **options):
    extractor = MRConvFeatureExtractor(sampling_rate=8000, do_normalize=do_normalize, padding_side=padding_side)
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
        assert samples.mean().abs() < 1e-6 and (samples.var(correction=0) - 1).abs() < 1e-5
    # What was cut has no part in it, and a constant is silence.
    assert torch.equal(batch.input_values[0], extract(audio[0][:20], do_normalize=True).input_values[0])
    assert not batch.input_values[2].any() and not batch.input_values[batch.attention_mask == 0].any()


def test_lists_without_padding_keep_their_lengths():
    assert [len(values) for values in extract([AUDIO, AUDIO[:4]], return_tensors=None)["input_values"]] == [30, 4]
    with refused(ValueError, "padding=True"):
        extract([AUDIO, AUDIO[:4]])
    for length in (0, -1):
        with refused(ValueError, "max_length", length):
            extract(AUDIO, truncation=True, max_length=length, do_normalize=True)
    for rate, words in ((None, "is not given"), (16000, "is 16000 Hz"), ("8000", "is '8000' Hz")):
        with refused(ValueError, f"`sampling_rate` {words}; the model was trained with 8000 Hz"):
            extract(AUDIO, sampling_rate=rate)


BROKEN = AUDIO.copy()
BROKEN[3] = np.nan


@pytest.mark.parametrize(
    ("audio", "words"),
    [
        *((none, "no samples") for none in (np.zeros(0), [AUDIO, []], [], np.zeros((0, 100)), torch.zeros(0, 100))),
        *((bad, "NaN or infinite") for bad in (BROKEN, np.ma.masked_array(AUDIO, AUDIO > 0.5), np.array([1e300]))),
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


def test_options_survive_saving_and_those_that_make_no_extractor_are_refused(tmp_path):
    for name, value, words in (
        ("feature_size", 2, "only 1, mono"),
        ("sampling_rate", "8 kHz", "`sampling_rate` is '8 kHz'"),
        ("padding_value", float("nan"), "`padding_value` is nan"),
        ("padding_side", "both", "allowed: 'left', 'right'"),
    ):
        with refused(ValueError, words):
            MRConvFeatureExtractor(**{name: value})
    options = {"sampling_rate": 4000, "padding_side": "left", "do_normalize": False, "padding_value": 0.5}
    extractor = MRConvFeatureExtractor(**options)
    extractor.save_pretrained(tmp_path)
    loaded = transformers.AutoFeatureExtractor.from_pretrained(tmp_path)
    assert type(loaded) is MRConvFeatureExtractor
    assert loaded.to_dict() == extractor.to_dict()
    assert all(getattr(loaded, name) == value for name, value in options.items())
