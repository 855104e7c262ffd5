"""The study: who trains and who tests, equal sizes, peers, tables, the scripts beside it; and the benchmarks."""

import json
import re
import sys
from argparse import Namespace

import datasets
import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from torch import nn

import hf_ext
from hf_ext.mrconv import MRConvConfig, MRConvForAudioClassification
from hf_ext.tasks.signals import AudioTask, PixelTask
from hf_ext.tasks.texts import ListOpsTask
from tests.kit.refusals import refused
from tests.kit.studies import EXAMPLES, fill_readme, module_loader

STUDY = EXAMPLES / "mrconv"
load = module_loader(STUDY)
# Nothing is read where models are only built.
NOWHERE = dict.fromkeys(("digits", "scifar", "images"), "nowhere")


def test_models_of_a_comparison_have_equal_parameters(load, tmp_path):
    module = load("study")
    study = module.Study(tmp_path, NOWHERE)

    def count(run):
        arguments, task = study.open(run)
        return module.trained_parameters(task.build_model(arguments.model, None))

    for name, comparison in module.COMPARISONS.items():
        first, *others = [count(module.candidates(name, model)[0]) for model in comparison.models]
        assert all(0.9 < one / first < 1.1 for one in others), name
    counts = [count(run) for _, run in list(module.ablations(0.004))[: len(module.ABLATIONS)]]
    assert all(0.9 < one / counts[0] < 1.1 for one in counts)


TASKS = {
    "pixels": (lambda: PixelTask(image_size=8), True),
    "tokens": (lambda: ListOpsTask(max_length=32), False),
    "audio": (lambda: AudioTask(sampling_rate=8000, max_length=64), True),
}


def recur(kernel: nn.Module, which: int, inputs: torch.Tensor) -> torch.Tensor:
    """The state space step by step: x = exp(dt A) x + (exp(dt A) - 1) / A u, y = 2 Re(C x)."""
    poles = torch.complex(-kernel.log_decay.exp(), kernel.frequency)
    decay = torch.exp(poles * kernel.log_dt.exp()[:, None])
    state, outputs = torch.zeros(*inputs.shape[:2], poles.shape[-1], dtype=decay.dtype), []
    for value in inputs.unbind(-1):
        state = decay * state + (decay - 1) / poles * value[..., None]
        outputs.append(2 * (torch.view_as_complex(kernel.output[which]) * state).sum(-1).real)
    return torch.stack(outputs, -1)


@pytest.mark.parametrize("length", [1, 2, 37, 64, 300])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_s4d_is_its_recurrence(load, length, bidirectional):
    peers = load("peers")
    torch.manual_seed(0)
    block = peers.S4DBlock(peers.PeerConfig(hidden_size=3, state_size=8, bidirectional=bidirectional)).double()
    inputs = torch.randn(2, 3, length, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        # Values as training leaves them, not the first ones, where all channels have the same poles.
        for parameter in block.kernel.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    expected = recur(block.kernel, 0, inputs) + block.skip[:, None] * inputs
    if bidirectional:
        # The second kernel hears what comes after a position.
        expected = expected + nn.functional.pad(recur(block.kernel, 1, inputs.flip(-1)).flip(-1), (0, 1))[..., 1:]
    found = block.convolve(inputs)
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-10)
    weights = torch.randn_like(found)
    values = [inputs, *block.kernel.parameters()]
    gradients = [torch.autograd.grad((outputs * weights).sum(), values) for outputs in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-9, rtol=1e-8)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("peer", ["transformer", "s4d", "s4d both ways"])
def test_a_peer_learns_and_ignores_padding(load, name, peer):
    make, continuous = TASKS[name]
    task = make()
    load("peers").use_peer(task, peer.split()[0])
    model = task.build_model({"hidden_size": 24, "num_hidden_layers": 2, "bidirectional": "both" in peer}, None)
    torch.manual_seed(0)
    inputs = torch.randn(2, 20, 1) if continuous else torch.randint(3, 18, (2, 20))
    key = "input_values" if continuous else "input_ids"
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[1, 12:] = 0
    model.train()(**{key: inputs}, attention_mask=mask, labels=torch.tensor([1, 2])).loss.backward()
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    # One token of the vocabulary may be missing from the batch, but no tensor.
    assert not [name for name, value in trained if value.grad is None or not value.grad.any()]
    with torch.no_grad():
        padded = model.eval()(**{key: inputs}, attention_mask=mask).logits[1:]
        alone = model(**{key: inputs[1:, :12]}, attention_mask=mask[1:, :12]).logits
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-4)
    assert sum(len(group["params"]) for group in task.parameter_groups(model, 0.1)) == len(trained)


def write_recordings(folder, samples=900):
    """Two digits of two speakers, low and high, as many as make all three parts."""
    folder.mkdir(parents=True)
    time = np.arange(samples) / 8000
    for digit, pitch in ((0, 300), (1, 900)):
        for speaker, level in (("ann", 8000), ("bob", 16000)):
            for number in (0, 4, 5, 6, 15, 16):
                sound = level * np.sin(2 * np.pi * (pitch + number) * time)
                soundfile.write(folder / f"{digit}_{speaker}_{number}.wav", sound.astype(np.int16), 8000)


def test_official_recordings_test_and_others_choose(load, tmp_path):
    write_recordings(tmp_path / "fsdd")
    parts = load("recordings").split_digits(list((tmp_path / "fsdd").iterdir()), 10)
    numbers = {part: {file.stem.rpartition("_")[2] for file in files} for part, files in parts.items()}
    assert numbers == {"train": {"6", "16"}, "validation": {"5", "15"}, "test": {"0", "4"}}
    load("study").prepare(tmp_path, tmp_path)
    data = datasets.Dataset.from_parquet(str(tmp_path / "data/digits/test.parquet"), cache_dir=str(tmp_path / "cache"))
    assert sorted(data["label"]) == [0, 0, 0, 0, 1, 1, 1, 1]
    row = next(row for row in data if row["label"] == 1)
    # Half the samples, of the same pitch.
    spectrum = np.abs(np.fft.rfft(np.array(row["audio"], float) * np.hanning(450), 4000))
    assert len(row["audio"]) == 450 and abs(int(spectrum.argmax()) - 900) <= 6
    with pytest.raises(ValueError):
        load("study").prepare(tmp_path / "data", tmp_path / "other")


@pytest.mark.slow
def test_a_tiny_study_and_its_tables(load, monkeypatch, tmp_path):
    """Rates are compared after the first minutes, the best goes on; kernels train to their end; nothing runs twice."""
    write_recordings(tmp_path / "fsdd")
    module, tables = load("study"), load("tables")
    tiny = {"hidden_size": 8, "num_hidden_layers": 1}
    models = {
        "mrconv": module.Model((0.001, 0.01), None, {"model": {**tiny, "kernel_size": 16, "num_branches": 2}}),
        "s4d": module.peer("s4d", (0.001, 0.01), **tiny, state_size=4),
    }
    comparison = module.COMPARISONS["digits"]._replace(models=models)
    for name, value in (
        ("COMPARISONS", {"digits": comparison}),
        ("ABLATIONS", {"Fourier": models["mrconv"].values}),
        ("MINUTES", {"digits": (0.001, 0.02)}),
        ("ABLATION_STEPS", 2),
        ("SEEDS", (0, 1)),
    ):
        monkeypatch.setattr(module, name, value)
    work = tmp_path / "work"
    study = module.Study(work, module.prepare(tmp_path, work))
    rows = study.compare("digits")
    for row in rows.values():
        assert set(row["rates"]) == {"0.001", "0.01"}
        assert row["rates"][f"{row['rate']:g}"] == min(row["rates"].values())
        assert row["marks"]["0.001"]["samples"] < row["marks"]["0.02"]["samples"]
    ablation = study.ablate()
    assert [seed["samples"] for seed in ablation["Fourier"]["seeds"].values()] == [16, 16]
    monkeypatch.setattr(module, "train", lambda *words: pytest.fail("trained twice"))
    assert (study.compare("digits"), study.ablate()) == (rows, ablation)
    text = tables.comparison_table(rows)
    assert "| accuracy, % after | parameters | rate | 0.001 min | 0.02 min | samples in 0.02 min |" in text


def test_readme_holds_the_committed_results(load, tmp_path):
    tables, result = load("tables"), json.loads((STUDY / "results" / "study.json").read_text())
    assert fill_readme(tables, result, tmp_path) == (STUDY / "README.md").read_text()
    tables.draw_curves(result, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    # A budget that one of them has not reached yet is not compared.
    rows = result["comparisons"]["digits"]
    del rows["s4d"]["marks"]["8"]
    assert "8 min" not in tables.comparison_table(rows)


def write_words(path) -> list[np.ndarray]:
    """Three made words, tones that swell and fade, with pauses; the samples of each as they are heard."""
    time = np.arange(3200) / 8000
    words = [np.sin(np.pi * time / 0.4) * np.sin(2 * np.pi * pitch * time) for pitch in (200, 450, 900)]
    sound = np.concatenate([part for word in words for part in (np.zeros(4000), 0.5 * word)])
    soundfile.write(path, (32767 * sound).astype(np.int16), 8000)
    return words


@pytest.mark.slow
def test_digits_are_heard_as_they_come(load, monkeypatch, tmp_path, capsys):
    write_words(tmp_path / "a.wav")
    monkeypatch.setattr(sys, "argv", ["listen.py", str(tmp_path / "a.wav"), "--output", str(tmp_path / "a.png")])
    load("listen").main()
    *heard, summary = capsys.readouterr().out.splitlines()
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
    hook = backbone.register_forward_pre_hook(lambda _, __, told: given.append(told["input_values"]), with_kwargs=True)
    for place in range(0, 3200, 80):
        assert listener.hear(word[place : place + 80]) is None
    hook.remove()
    with torch.no_grad():
        whole = listener.model(input_values=torch.cat(given, dim=1)).logits
        streamed = listener.model.classifier(listener.total / listener.positions)
    torch.testing.assert_close(streamed, whole, atol=1e-4, rtol=1e-4)


def test_hiss_is_no_word_and_a_click_makes_nobody_deaf(load):
    hiss = np.random.default_rng(0).normal(0, 0.002, 8000)
    soft = 0.04 * np.sin(2 * np.pi * 440 * np.arange(3200) / 8000)
    # Seconds at which words end.
    for parts, ends in (([hiss], []), ([np.resize([0.99, -0.99], 80), np.zeros(16000), soft], [0.21, 2.61])):
        listener = load("listen").Listener(hf_ext.released("spoken-digits"))
        steps = np.concatenate([*parts, np.zeros(4000)]).reshape(-1, 80)
        heard = [(place + 1) / 100 for place, step in enumerate(steps) if listener.hear(step) is not None]
        assert heard == pytest.approx(ends, abs=0.02)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *(([f"{name}.wav"], f"{name}.wav cannot be read as a WAV file") for name in ("empty", "text", "missing")),
        (["a.wav", "--output", "nowhere/o.png"], "there is no folder nowhere; make it first"),
        (["a.wav", "--output", "o.sound"], "no format of pictures; give a name that ends with one of"),
        (["a.wav", "--model", "model"], "`sampling_rate` None"),
        (["a.wav", "--model", "nowhere"], "--model nowhere"),
    ],
)
def test_wrong_words_are_refused(words, said, load, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    write_words(tmp_path / "a.wav")
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "text.wav").write_text("no sound at all, but words")
    config = MRConvConfig(hidden_size=4, num_hidden_layers=1, kernel_size=4, max_position_embeddings=64)
    MRConvForAudioClassification(config).save_pretrained(tmp_path / "model")
    # A model that is nowhere is looked for on no Hub.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(sys, "argv", ["listen.py", *words])
    with pytest.raises(SystemExit) as ended:
        load("listen").main()
    assert said in f"{ended.value} {capsys.readouterr().err}"


load_module = module_loader(EXAMPLES / "benchmarks")


@pytest.fixture
def load_benchmark(load_module, monkeypatch):
    """A benchmark, which puts other examples on the path."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield load_module
    sys.modules.pop("peers", None)


def test_a_step_of_a_small_layer_has_few_calls_which_are_most_of_its_time(load_benchmark):
    benchmark = load_benchmark("mrconv_step")
    layers, u, cotangent = benchmark.make_layers((1, 32, 1024))
    for name, most in (("dilated", 324), ("Fourier", 314), ("Fourier, kernel norm", 119)):
        benchmark.step(layers[name], u, cotangent)
        with benchmark.Counted() as counted:
            benchmark.step(layers[name], u, cotangent)
        assert counted.work["calls"] <= most


def test_the_frame_reads_words_and_keeps_notes_below_a_table(load_benchmark, monkeypatch, tmp_path):
    timing = load_benchmark("timing")

    def measure(words):
        yield {"sides": words.sides, "word": words.word}

    output = tmp_path / "out" / "result.json"
    page, table = output.with_suffix(".md"), timing.markdown_table(["a"], [["1"]])
    monkeypatch.setattr(sys, "argv", ["x", "--sides", "1", "2", "--output", str(output)])
    for _ in range(2):
        timing.run("x", "Help.", measure, lambda _: table, sides=[8], word="n", rounds=3)
        content = json.loads(output.read_text())
        assert content["sides"] == [1, 2] and content["word"] == "n" and content["versions"]["torch"]
        assert page.read_text().partition("\nnote")[0] == "| a |\n|---|\n| 1 |\n"
        page.write_text(page.read_text().rstrip("\n") + "\n\nnote\n" * ("note" not in page.read_text()))
    assert page.read_text().count("note") == 1
    assert timing.apart(abs, -3) == 3


def test_two_installations_are_compared_number_by_number(load_benchmark, tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("import json, sys; open(sys.argv[-1], 'w').write(json.dumps({'rows': [{'s': 2.5, 'k': 3}]}))")
    load_benchmark("before").main(sys.executable, str(script), [])
    assert "| /rows/0/s | 1.000 | 1.000 | 1.000 |" in capsys.readouterr().out


def test_an_error_of_a_thread_that_reads_ends_the_program(load_benchmark, tmp_path):
    work = load_benchmark("emr_programs").read_write([str(tmp_path / "missing")], str(tmp_path / "out"), [1], 2)
    with refused(FileNotFoundError, "missing"):
        work()


def test_memory_is_what_a_call_holds_at_once(load_benchmark):
    peak_bytes = load_benchmark("mrconv_inference").peak_bytes

    def call():
        # Two of a megabyte at once, and after they are gone a third.
        torch.zeros(2**18) + 1
        return torch.zeros(2**18)

    torch.zeros(1)
    assert 2 * 2**20 <= peak_bytes(call) < 2.1 * 2**20


# What it compares, what its table has, and words that make it small.
BENCHMARKS = {
    "mrconv_inference": ("MRConv merged; MRConv branches; S4D; SDPA attention; Mamba 2",
     "| blocks, length | MRConv merged | MRConv branches | S4D |", {"lengths": [64, 128], "rounds": 1, "width": 64}),
    "mrconv_images": ("ConvNeXt", "| 82.1 | 1,306 |",
     {"presets": ["tiny"], "image_size": 32, "rounds": 1, "batches": [1, 2]}),
    "mrconv_latency": ("MRConv, streaming; MRConv, recomputing; Mamba 2; attention (SDPA)", "| ", {"contexts": [64]}),
    "mrconv_step": ("bare; dilated; Fourier; Fourier, kernel norm", "| layer, 1, 8, 32 | ", {"rounds": 1}),
    "mrconv_packing": ("padded; packed; packed, one group", "| ", {"batches": 1, "batch": 2}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_compares_on_a_small_case(name, load_benchmark, monkeypatch, tmp_path):
    module, (sides, line, words) = load_benchmark(name), BENCHMARKS[name]
    tiny = {"tiny": {"hidden_sizes": (8, 16, 16, 16), "depths": (1,) * 4}}
    monkeypatch.setattr(module, "SHAPES", [(1, 8, 32)], raising=False)
    monkeypatch.setattr(module, "PRESETS", tiny, raising=False)
    content = list(module.measure(Namespace(**words, output=tmp_path / "result.json")))[-1]
    text = json.dumps(content)
    assert all(f'"{side}": ' in text for side in sides.split("; "))
    numbers = [float(number) for number in re.findall(r": (-?[0-9.e+-]+)[,}]", text)]
    assert len(numbers) > len(sides.split("; ")) and min(numbers) >= 0
    assert line in module.markdown(content)


@pytest.mark.slow
def test_norms_are_compared_at_equal_steps_and_at_equal_time(load_benchmark, monkeypatch, tmp_path):
    norms = load_benchmark("mrconv_norms")
    (tmp_path / "Tiny").mkdir()
    lines = ["@problemName Tiny", "@univariate true", "@classLabel true up down", "@data"]
    for name, sign in (("up", 1), ("down", -1)):
        lines.append(",".join(str(step * sign) for step in range(16)) + f":{name}")
    for part in ("TRAIN", "TEST"):
        (tmp_path / "Tiny" / f"Tiny_{part}.ts").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(norms, "STEPS", {"Tiny": 20})
    monkeypatch.setattr(norms, "apart", lambda function, *arguments: function(*arguments))
    words = Namespace(series=str(tmp_path), digits="", images="", listops="", cases=["Tiny"], seeds=2)
    words.output = tmp_path / "norms.json"
    words.output.write_text('{"rows": [{"case": "Tiny"}, {"case": "another"}]}')
    *_, content = norms.measure(words)
    assert content["rows"].pop(0) == {"case": "another"} and len(content["rows"]) == 2 * (3 + 2)
    assert all(row["merged"] == row["accuracy"] for row in content["rows"] if row["norm"] != "layer")
    assert norms.draw(content).count("\n") == 2 + 3
