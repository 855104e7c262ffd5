"""The study's parts: peers of equal size, splits of the data, tables that fit the README, scripts."""

import json
import subprocess
import sys
import wave

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

import hf_ext
from hf_ext.settings import build
from hf_ext.tasks.signals import AudioTask, PixelTask
from hf_ext.tasks.texts import ListOpsTask
from hf_ext.training import TrainingArguments, build_task
from tests.study_testing import EXAMPLES, FACTS, fill_readme, made_up_run, module_loader

STUDY = EXAMPLES / "mrconv"
load = module_loader(STUDY)
# transformers says once that Mamba 2 runs without its CUDA kernels, by its logger.
TASKS = {
    "pixels": (lambda: PixelTask(image_size=8), True),
    "tokens": (lambda: ListOpsTask(max_length=32), False),
    "audio": (lambda: AudioTask(sampling_rate=8000, max_length=64), True),
}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("peer", ["transformer", "mamba2"])
def test_a_peer_has_as_many_parameters_and_ignores_padding(load, name, peer):
    peers = load("peers")
    make, continuous = TASKS[name]
    task = make()
    parameters = peers.trained_parameters(task.build_model({"hidden_size": 48, "num_hidden_layers": 2}, None))
    peers.use_peer(task, peer)
    model = task.build_model(peers.equal_sizes(task, peer, parameters, 2), None)
    assert 0.9 < peers.trained_parameters(model) / parameters < 1.1
    torch.manual_seed(0)
    inputs = torch.randn(2, 20, 1) if continuous else torch.randint(3, 18, (2, 20))
    key = "input_values" if continuous else "input_ids"
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[1, 12:] = 0
    outputs = model.train()(**{key: inputs}, attention_mask=mask, labels=torch.tensor([1, 2]))
    outputs.loss.backward()
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    # One token of the vocabulary may be missing from the batch, but no tensor.
    assert not [name for name, value in trained if value.grad is None or not value.grad.any()]
    with torch.no_grad():
        padded = model.eval()(**{key: inputs}, attention_mask=mask).logits[1:]
        alone = model(**{key: inputs[1:, :12]}, attention_mask=mask[1:, :12]).logits
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-4)
    groups = task.parameter_groups(model, 0.1)
    assert sum(len(group["params"]) for group in groups) == len(trained)


def test_kernels_of_equal_size(load):
    peers = load("peers")
    task = PixelTask(image_size=8)
    section = {"hidden_size": 16, "num_hidden_layers": 2, "kernel_size": 16}
    parameters = peers.trained_parameters(task.build_model({**section, "kernel_type": "fourier"}, None))
    for kernel in ("dilated", "sparse", "fourier_sparse"):
        size = peers.equal_kernel_size(task, {**section, "kernel_type": kernel}, parameters)
        model = task.build_model({**section, "kernel_type": kernel, "kernel_size": size}, None)
        assert 0.9 <= peers.trained_parameters(model) / parameters <= 1.1
    with pytest.raises(ValueError, match="no kernel size gives 10 parameters"):
        peers.equal_kernel_size(task, section, 10)


def test_digits_are_split_by_recording_and_by_speaker(load, tmp_path):
    fsdd = tmp_path / "fsdd"
    fsdd.mkdir()
    for speaker, level in (("george", 100), ("theo", 200)):
        for digit, number in ((3, 0), (4, 4), (5, 5), (6, 17)):
            with wave.open(str(fsdd / f"{digit}_{speaker}_{number}.wav"), "wb") as file:
                file.setparams((1, 2, 8000, 0, "NONE", ""))
                file.writeframes(np.full(9, level + number, dtype="<i2").tobytes())
    load("runs").write_digits(fsdd, tmp_path / "out")

    def rows(name):
        data = datasets.Dataset.from_parquet(str(tmp_path / "out" / name), cache_dir=str(tmp_path / "cache"))
        return sorted((row["label"], row["audio"][0], len(row["audio"])) for row in data)

    assert rows("official/test.parquet") == [(3, 100, 9), (3, 200, 9), (4, 104, 9), (4, 204, 9)]
    assert rows("official/train.parquet") == [(5, 105, 9), (5, 205, 9), (6, 117, 9), (6, 217, 9)]
    assert rows("unseen/test.parquet") == [(3, 200, 9), (4, 204, 9), (5, 205, 9), (6, 217, 9)]
    assert rows("unseen/train.parquet") == [(3, 100, 9), (4, 104, 9), (5, 105, 9), (6, 117, 9)]


def made_up_result(load):
    """A result with all parts that the study writes."""
    study, tables = load("study"), load("tables")
    run = made_up_run(scores={"accuracy": 0.625, "loss": 1.5, "bits_per_byte": 2.25})
    merged = {
        "difference": 1e-7,
        "seconds_per_recording": {"branches": 0.02, "merged": 0.01},
        "scores": {"accuracy": 0.5},
    }
    first = {**run, "decimated": {"accuracy": 0.375}, "merged": merged}
    row = {"parameters": 777, "time": run, "samples": run}
    made = {
        "texts": ["The text\nthat was made"],
        "equal": {"streaming": True},
        "seconds_per_token": {"streaming": 0.003},
        "difference": {"streaming": 1e-6, "merged": 2e-6},
    }
    assert set(study.COMPARISONS) == set(tables.TITLES) and set(study.MODELS) == set(tables.NAMES)
    return {
        **FACTS,
        "headline": dict.fromkeys(tables.SPLITS, first),
        "comparisons": {
            name: {
                model: {**row, "decimated": {"accuracy": 0.875}} if name == "digits" and model == "fourier" else row
                for model in study.MODELS
            }
            for name in study.COMPARISONS
        },
        "ablation": dict.fromkeys(study.ABLATIONS, run),
        "language_model": {**run, "generation": made},
    }


def test_tables_and_curves_of_a_result(load, tmp_path):
    tables, result = load("tables"), made_up_result(load)
    text = fill_readme(tables, result, tmp_path)
    assert "| official (recordings 0-4) | 62.5 | 37.5 | 50.0 | 20.0 | 10.0 | 1.0e-07 | 4,000 | 0.2 |" in text
    assert "| MRConv, Fourier | 777 | 62.5 | 87.5 | 4,000 | 12 | 62.5 | 4,000 | 12 |" in text
    assert "> that was made" in text and "2.250 bits per byte" in text
    assert len(tables.all_runs(result)) == 2 + 2 * 4 * 7 + len(result["ablation"]) + 1
    tables.draw_curves(result, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_readme_holds_the_committed_results(load, tmp_path):
    result = json.loads((STUDY / "results" / "study.json").read_text())
    assert fill_readme(load("tables"), result, tmp_path) == (STUDY / "README.md").read_text()


def test_documented_parameters_are_those_of_the_models(load):
    peers, result = load("peers"), json.loads((STUDY / "results" / "study.json").read_text())
    rows = {**result["headline"], **result["ablation"], "language model": result["language_model"]}
    counts = {name: (row["parameters"], row["arguments"]) for name, row in rows.items()}
    for name, models in result["comparisons"].items():
        ours = {model: row for model, row in models.items() if model not in peers.PEERS}
        counts |= {f"{name}, {model}": (row["parameters"], row["time"]["arguments"]) for model, row in ours.items()}
    assert len(counts) == 2 + 13 + 1 + 4 * 5
    for name, (count, arguments) in counts.items():
        task = build_task(build(TrainingArguments, {"output_dir": "unused", **arguments}))
        assert peers.trained_parameters(task.build_model(arguments["model"], None)) == count, name


def test_a_recording_is_classified(tmp_path):
    task = AudioTask(sampling_rate=8000, max_length=64, num_labels=2, label_names=["no", "yes"])
    model = task.build_model({"hidden_size": 4, "num_hidden_layers": 1, "kernel_size": 4}, None)
    model.save_pretrained(tmp_path / "model")
    task.processor().save_pretrained(tmp_path / "model")
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(np.arange(50, dtype="<i2").tobytes())
    command = [sys.executable, str(STUDY / "infer.py"), str(tmp_path / "model"), str(tmp_path / "a.wav"), "--merge"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("no", "yes")


def write_words(path) -> list[np.ndarray]:
    """Three made words, tones that swell and fade, with pauses; the samples of each as they are heard."""
    time = np.arange(3200) / 8000
    words = [np.sin(np.pi * time / 0.4) * np.sin(2 * np.pi * pitch * time) for pitch in (200, 450, 900)]
    pause = np.zeros(4000)
    sound = np.concatenate([part for word in words for part in (pause, 0.5 * word)])
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes((32767 * sound).astype("<i2").tobytes())
    return words


def test_digits_are_heard_as_they_come(tmp_path):
    write_words(tmp_path / "a.wav")
    command = [sys.executable, str(STUDY / "listen.py"), str(tmp_path / "a.wav"), "--output", str(tmp_path / "a.png")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *heard, summary = done.stdout.splitlines()
    seconds, digits = zip(*[line.split(" s: ") for line in heard], strict=True)
    # Each word ends 0.2 s after its last sound, at 0.9, 1.8 and 2.7 s.
    assert [float(second) for second in seconds] == pytest.approx([1.1, 2.0, 2.9], abs=0.05)
    assert all(digit in set("0123456789") for digit in digits)
    assert summary.startswith("a step of 10 ms took")
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size == (1100, 550)


def test_a_word_that_is_streamed_is_classified_as_it_would_be_whole(tmp_path, load):
    listener = load("listen").Listener(hf_ext.released("spoken-digits"))
    word, given = write_words(tmp_path / "a.wav")[1], []
    backbone = listener.model.model
    hook = backbone.register_forward_pre_hook(
        lambda _, __, words: given.append(words["input_values"]), with_kwargs=True
    )
    for place in range(0, 3200, 80):
        assert listener.hear(word[place : place + 80]) is None
    hook.remove()
    with torch.no_grad():
        whole = listener.model(input_values=torch.cat(given, dim=1)).logits
        streamed = listener.model.classifier(listener.total / listener.positions)
    torch.testing.assert_close(streamed, whole, atol=1e-4, rtol=1e-4)


def speak(listener, sound) -> list[float]:
    """Seconds at which words that a listener has heard ended."""
    ends = [place + 80 for place in range(0, len(sound), 80) if listener.hear(sound[place : place + 80]) is not None]
    return [end / 8000 for end in ends]


def test_hiss_is_no_word_and_a_click_makes_nobody_deaf(load):
    listen = load("listen")
    make = lambda: listen.Listener(hf_ext.released("spoken-digits"))  # noqa: E731
    hiss = np.random.default_rng(0).normal(0, 0.002, 8000)
    assert speak(make(), np.concatenate([hiss, np.zeros(4000)])) == []
    time = np.arange(3200) / 8000
    soft = 0.04 * np.sin(2 * np.pi * 440 * time)
    sound = np.concatenate([np.full(80, 0.99), np.zeros(16000), soft, np.zeros(4000)])
    click, word = speak(make(), sound)
    assert (click, word) == (pytest.approx(0.21, abs=0.02), pytest.approx(2.61, abs=0.02))


def listen_to(load, monkeypatch, *words) -> str:
    """What listen.py says before it ends with an error, and before it loads a model."""
    listen = load("listen")
    monkeypatch.setattr(listen, "Listener", lambda _: pytest.fail("a model was loaded"))
    monkeypatch.setattr(sys, "argv", ["listen.py", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        listen.main()
    return str(ended.value)


def test_wrong_words_are_refused_before_the_model_is_loaded(load, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    write_words(tmp_path / "a.wav")
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "text.wav").write_text("no sound at all, but words")
    for name in ("empty.wav", "text.wav", "missing.wav"):
        assert f"{name} cannot be read as a WAV file" in listen_to(load, monkeypatch, name)
    for words, message in (
        (["a.wav", "--output", "nowhere/o.png"], "there is no folder nowhere; make it first"),
        (["a.wav", "--output", "o.sound"], "no format of pictures; give a name that ends with one of"),
        (["--microphone", "0"], "--microphone 0.0: give the seconds to listen, 0.01 or more"),
        (["--microphone", "nan"], "--microphone nan: give the seconds"),
        (["a.wav", "--microphone", "1"], "give a recording or --microphone SECONDS"),
    ):
        listen_to(load, monkeypatch, *words)
        assert message in capsys.readouterr().err
    finder = type("Broken", (), {"find_spec": staticmethod(lambda name, *_: break_sounddevice(name))})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert "PortAudio library not found" in listen_to(load, monkeypatch, "--microphone", "1")


def break_sounddevice(name):
    """As that package does where the library that it is for is missing."""
    if name == "sounddevice":
        raise OSError("PortAudio library not found")


def test_a_model_that_is_none_of_sounds_is_named(load, tmp_path):
    task = AudioTask(sampling_rate=8000, max_length=64, num_labels=2)
    model = task.build_model({"hidden_size": 4, "num_hidden_layers": 1, "kernel_size": 4}, None)
    model.config.sampling_rate = None
    model.save_pretrained(tmp_path / "model")
    listen = load("listen")
    with pytest.raises(SystemExit, match="has no `sampling_rate`"):
        listen.Listener(str(tmp_path / "model"))
    with pytest.raises(SystemExit, match="--model .*nowhere"):
        listen.Listener(str(tmp_path / "nowhere"))
