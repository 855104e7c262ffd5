"""The study: who trains and who tests, equal sizes, rounds, marks and tables; and the scripts beside it."""

import json
import shutil
import subprocess
import sys
import wave

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

import hf_ext
from hf_ext.files import read_json, write_json
from hf_ext.tasks.signals import AudioTask
from hf_ext.training import main
from tests.study_testing import EXAMPLES, fill_readme, module_loader

STUDY = EXAMPLES / "mrconv"
load = module_loader(STUDY)
# Nothing is read where models are only built.
NOWHERE = dict.fromkeys(("digits", "scifar", "images"), "nowhere")


def test_models_of_a_comparison_have_equal_parameters(load):
    runs = load("runs")
    for name, comparison in runs.COMPARISONS.items():
        first, *others = [
            runs.count_parameters(runs.candidates(name, model)[0], NOWHERE) for model in comparison.models
        ]
        assert all(0.9 < count / first < 1.1 for count in others), name
    counts = [runs.count_parameters(run, NOWHERE) for _, run in list(runs.ablations(0.004))[: len(runs.ABLATIONS)]]
    assert all(0.9 < count / counts[0] < 1.1 for count in counts)


def write_recordings(folder, samples=900):
    """Two digits of two speakers, low and high, as many as make all three parts."""
    folder.mkdir(parents=True)
    time = np.arange(samples) / 8000
    for digit, pitch in ((0, 300), (1, 900)):
        for speaker, level in (("ann", 8000), ("bob", 16000)):
            for number in (0, 4, 5, 6, 15, 16):
                sound = level * np.sin(2 * np.pi * (pitch + number) * time)
                with wave.open(str(folder / f"{digit}_{speaker}_{number}.wav"), "wb") as file:
                    file.setparams((1, 2, 8000, 0, "NONE", ""))
                    file.writeframes(sound.astype("<i2").tobytes())


def test_official_recordings_test_and_others_choose(load, tmp_path):
    write_recordings(tmp_path / "fsdd")
    runs = load("runs")
    parts = runs.split_digits(list((tmp_path / "fsdd").iterdir()))
    numbers = {part: {file.stem.rpartition("_")[2] for file in files} for part, files in parts.items()}
    assert numbers == {"train": {"6", "16"}, "validation": {"5", "15"}, "test": {"0", "4"}}
    runs.prepare(tmp_path / "fsdd", tmp_path / "data/digits")
    data = datasets.Dataset.from_parquet(str(tmp_path / "data/digits/test.parquet"), cache_dir=str(tmp_path / "cache"))
    assert sorted(data["label"]) == [0, 0, 0, 0, 1, 1, 1, 1]
    row = next(row for row in data if row["label"] == 1)
    # Half the samples, of the same pitch.
    spectrum = np.abs(np.fft.rfft(np.array(row["audio"], float) * np.hanning(450), 4000))
    assert len(row["audio"]) == 450 and abs(int(spectrum.argmax()) - 900) <= 6
    with pytest.raises(ValueError, match="holds no .wav files"):
        runs.prepare(tmp_path / "data", tmp_path / "other")


def test_no_picture_trains_and_chooses(load):
    runs = load("runs")
    labels = np.repeat(np.arange(10), 5000)
    data = datasets.Dataset.from_dict({"label": labels, "index": np.arange(50000)})
    found = {}
    for part in ("train", "validation"):
        pieces = [piece.removeprefix("train[").removesuffix("]").split(":") for piece in runs.IMAGES[part].split("+")]
        found[part] = np.concatenate([data["index"][int(start) : int(stop)] for start, stop in pieces])
        assert set(np.bincount(labels[found[part]])) == {{"train": 4900, "validation": 100}[part]}
    assert not set(found["train"]) & set(found["validation"])


@pytest.fixture
def study(load, tmp_path):
    """A folder of the study with tiny models on made recordings, and its modules."""
    write_recordings(tmp_path / "fsdd")
    runs = load("runs")
    runs.prepare(tmp_path / "fsdd", tmp_path / "study" / "data" / "digits")
    tiny = {"hidden_size": 8, "num_hidden_layers": 1}
    digits = runs.COMPARISONS["digits"]
    models = {
        "mrconv": runs.Model((0.001, 0.01), None, {"model": {**tiny, "kernel_size": 16, "num_branches": 2}}),
        "s4d": runs.peer("s4d", (0.001, 0.01), **tiny, state_size=4),
    }
    runs.COMPARISONS.clear()
    runs.COMPARISONS["digits"] = digits._replace(models=models)
    kept = dict(runs.ABLATIONS)
    runs.ABLATIONS.clear()
    runs.ABLATIONS["Fourier"] = models["mrconv"].values
    yield tmp_path / "study", {"digits": str(tmp_path / "study" / "data" / "digits")}
    runs.ABLATIONS |= kept
    del sys.modules["runs"]


def train_on(words, monkeypatch, folder, steps):
    """What the background does with the words of a job: they train, from where the run was left."""
    monkeypatch.chdir(folder)
    peers = sys.modules["peers"]
    path, *rest = words
    more = [f"--max_steps={steps}", "--save_steps=1"]
    if path.endswith("train.py"):
        assert main([*rest, *more]) == 0
    else:
        assert main([*rest[1:], *more], lambda arguments: peers.make_task(arguments, rest[0])) == 0


def goes_on_elsewhere(load, folder, data, tmp_path, monkeypatch, seconds):
    """What was kept has no word of this machine, is scored alike, and trains from its state."""
    module, keeping = load("study"), load("keeping")
    write_json(folder / "core_seconds.json", seconds)
    keeping.keep(folder, data, tmp_path / "reached.zip")
    keeping.bring_back(tmp_path / "other", tmp_path / "reached.zip")
    other = tmp_path / "other"
    assert read_json(other / "core_seconds.json") == seconds
    texts = [path.read_bytes() for path in other.rglob("*") if path.is_file()]
    assert texts and not [text for text in texts if str(tmp_path).encode() in text]
    assert not module.find_jobs(other, NOWHERE, seconds)
    monkeypatch.setattr(module, "ROUNDS", [("digits", 30)])
    (job, _), (same, _) = module.find_jobs(folder, data, seconds), module.find_jobs(other, NOWHERE, seconds)
    assert job.name == same.name and job.find_words() == same.find_words()
    shutil.copytree(folder / "data", other / "data")
    for place in (folder, other):
        train_on(job.find_words(), monkeypatch, place, 30)
    weights = [place / "runs" / job.name / "snapshot" / "model.safetensors" for place in (folder, other)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    # What has begun there stays.
    write_json(other / "core_seconds.json", {})
    keeping.bring_back(other, tmp_path / "reached.zip")
    assert read_json(other / "core_seconds.json") == {}


@pytest.mark.slow
def test_rounds_of_the_study_and_its_tables(load, study, monkeypatch, tmp_path):
    folder, data = study
    module, tables, runs = load("study"), load("tables"), load("runs")
    monkeypatch.setattr(module, "ROUNDS", [("digits", 3), ("digits", 8), ("ablations", 0), ("digits", 15)])
    monkeypatch.setattr(runs, "ABLATION_STEPS", 2)
    monkeypatch.setattr(runs, "SEEDS", (0, 1))
    seconds, order = {}, []
    # Every job gets its core time at once, and two more steps.
    while jobs := module.find_jobs(folder, data, seconds):
        assert len(order) < 10
        job = jobs[0]
        order.append((job.name, job.core_seconds / 60))
        train_on(job.find_words(), monkeypatch, folder, 2 if "ablation" in job.name else 2 * len(order))
        seconds[job.name] = job.core_seconds if np.isfinite(job.core_seconds) else 100.0
    assert [name for name, minutes in order[:4]] == [
        "digits-mrconv-0.001", "digits-mrconv-0.01", "digits-s4d-0.001", "digits-s4d-0.01",
    ]  # fmt: skip
    chosen = [load("measuring").choose_rate(folder, data, "digits", name).name for name in ("mrconv", "s4d")]
    assert order[4:] == [
        (chosen[0], 8.0), (chosen[1], 8.0), ("ablation-0-0", float("inf")), ("ablation-0-1", float("inf")),
        (chosen[0], 15.0), (chosen[1], 15.0),
    ]  # fmt: skip
    result = tables.collect(folder, data, {})
    marks = result["comparisons"]["digits"]["mrconv"]["marks"]
    assert list(marks) == ["3", "8", "15"] and marks["3"]["samples"] < marks["8"]["samples"] < marks["15"]["samples"]
    assert set(result["ablation"]["Fourier"]["seeds"]) == {"0", "1"}
    # On another machine, where nothing is reached yet, nothing of the table is lost.
    write_json(tmp_path / "before.json", result)
    assert tables.collect(tmp_path / "empty", data, read_json(tmp_path / "before.json")) == result
    goes_on_elsewhere(load, folder, data, tmp_path, monkeypatch, seconds)
    text = tables.comparison_table(result["comparisons"]["digits"])
    assert "| accuracy, % after | parameters | rate | 3 min | 8 min | 15 min | samples in 15 min |" in text
    tables.draw_curves(result, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def made_up_result(load):
    """A result with all parts that the tables show."""
    runs = load("runs")
    mark = {"core_minutes": 3.1, "samples": 4000, "accuracy": 0.625, "loss": 1.5}
    model = {"parameters": 777, "rate": 0.001, "rates": {"0.001": 1.0}, "marks": {"3": mark, "8": mark}}
    seeds = {"0": {**mark, "accuracy": 0.5}, "1": {**mark, "accuracy": 0.75}}
    return {
        "device": "CPU",
        "versions": {"torch": "2"},
        "comparisons": {name: dict.fromkeys(entry.models, model) for name, entry in runs.COMPARISONS.items()},
        "ablation": {label: {"parameters": 777, "seeds": seeds} for label in runs.ABLATIONS},
    }


def test_tables_of_a_result(load, tmp_path):
    tables, result = load("tables"), made_up_result(load)
    text = fill_readme(tables, result, tmp_path)
    assert "| MRConv, Fourier | 777 | 0.001 | 62.5 | 62.5 | 4,000 |" in text
    assert "| Fourier + sparse | 777 | 62.5 ± 17.7 | 2 | 3.1 |" in text
    # A budget that one of them has not reached yet is not compared.
    del result["comparisons"]["digits"]["s4d"]
    result["comparisons"]["digits"]["s4d"] = {**result["comparisons"]["digits"]["mrconv"], "marks": {"3": {}}}
    result["comparisons"]["digits"]["s4d"]["marks"]["3"] = result["comparisons"]["digits"]["mrconv"]["marks"]["3"]
    assert "8 min" not in tables.comparison_table(result["comparisons"]["digits"])


def test_readme_holds_the_committed_results(load, tmp_path):
    result = json.loads((STUDY / "results" / "study.json").read_text())
    assert fill_readme(load("tables"), result, tmp_path) == (STUDY / "README.md").read_text()


@pytest.mark.slow
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


def test_a_model_that_is_none_of_sounds_is_named(load, tmp_path, monkeypatch):
    task = AudioTask(sampling_rate=8000, max_length=64, num_labels=2)
    model = task.build_model({"hidden_size": 4, "num_hidden_layers": 1, "kernel_size": 4}, None)
    model.config.sampling_rate = None
    model.save_pretrained(tmp_path / "model")
    listen = load("listen")
    write_words(tmp_path / "a.wav")
    for name, message in (("model", "has no `sampling_rate`"), ("nowhere", "--model .*nowhere")):
        words = ["listen.py", str(tmp_path / "a.wav"), "--model", str(tmp_path / name)]
        monkeypatch.setattr(sys, "argv", [*words, "--output", str(tmp_path / "o.png")])
        with pytest.raises(SystemExit, match=message):
            listen.main()
