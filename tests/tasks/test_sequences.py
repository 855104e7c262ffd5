"""MRConv in the training loop: every recipe trains, samples are what the recipes say, groups, rates, errors."""

from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import transformers
from make_listops import ListOps
from PIL import Image
from torch.utils.data import default_collate
from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoModelForAudioClassification, AutoTokenizer

import hf_ext  # noqa: F401
from hf_ext.errors import DataError
from hf_ext.tasks.sequences import draw_confusion
from hf_ext.tasks.signals import AudioTask, ImageTask, PixelTask, random_box
from hf_ext.tasks.texts import LanguageModelTask, ListOpsTask, MaskedLanguageModelTask, TextTask
from hf_ext.training import build_task, evaluate_checkpoint
from tests.kit.models import assert_same_answers, assert_same_weights
from tests.kit.recipes import read_recipe, read_short
from tests.kit.refusals import refused
from tests.training import tiny

from .diffusion_testing import losses

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "mrconv"
TEXTS = ["a good film", "bad", "a very good film indeed", "really bad"]
TINY = {"hidden_size": 4, "num_hidden_layers": 1, "kernel_size": 4}


def pictures(side: int, mode: str = "RGB") -> list[Image.Image]:
    pixels = np.random.default_rng(0).integers(256, size=(4, side, side, 3), dtype=np.uint8)
    return [Image.fromarray(picture).convert(mode) for picture in pixels]


def recordings() -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(-9000, 9000, length).tolist() for length in (30, 64, 21, 90)]


# Of sequences of numbers.
LENGTHS = (20, 32, 21, 40)
WAVES = [[("none", "P", "T")[place % 3] for place in range(length)] for length in LENGTHS]


def measurements(*channels: str) -> dict[str, list[list[float]]]:
    generator = np.random.default_rng(0)
    return {name: [generator.normal(10, 2, length).tolist() for length in LENGTHS] for name in channels}


def listops() -> dict[str, list]:
    rows = [ListOps(0, 63, 100).example(index) for index in range(4)]
    return {"text": [row[0] for row in rows], "label": [row[1] for row in rows]}


def of_rows(data: dict[str, list], length: int, kind: str = "SequenceClassification") -> tuple:
    return data, [f"--task.max_length={length}"], kind


def of_sounds(labels: list[int]) -> tuple:
    return of_rows({"audio": recordings(), "label": labels}, 64, "AudioClassification")


def of_pixels(side: int, labels: list[int], mode: str = "RGB") -> tuple:
    return {"image": pictures(side, mode), "label": labels}, [f"--task.image_size={side}"], "SequenceClassification"


def of_images(labels: list[int]) -> tuple:
    words = ["--task.image_size=16", "--model={hidden_sizes: [4, 4], depths: [1, 1], kernel_size: 4}"]
    return {"image": pictures(20), "label": labels}, words, "ImageClassification"


# Recipe: a slice of data like its own, overrides that make it tiny, and the class that loads the result.
SLICES = {
    "listops": of_rows(listops(), 32),
    "listops_short": of_rows(listops(), 32),
    "listops_small": of_rows(listops(), 32),
    "text": of_rows({"text": TEXTS, "label": [1, 0, 1, 0]}, 16),
    "retrieval": of_rows({"text1": TEXTS, "text2": TEXTS[::-1], "label": [1, 0, 0, 1]}, 16, "NextSentencePrediction"),
    "image": of_pixels(6, [0, 1, 2, 9]),
    "scifar": of_pixels(6, [0, 1, 2, 9]),
    "pathfinder": of_pixels(6, [0, 1, 1, 0], "L"),
    "pathx": of_pixels(8, [0, 1, 1, 0], "L"),
    "speech_commands": of_sounds([0, 34, 2, 1]),
    "study-digits": of_sounds([0, 9, 2, 1]),
    "study-scifar": of_pixels(6, [0, 1, 2, 9]),
    "study-images": of_images([0, 1, 2, 9]),
    "imagenet": of_images([0, 1, 2, 999]),
    "lm": of_rows({"text": TEXTS}, 16, "CausalLM"),
    "masked_lm": of_rows({"text": TEXTS}, 16, "MaskedLM"),
    "sensors": of_rows({**measurements(*"xyz"), "label": ["worn", "loose", "sound", "sound"]}, 32),
    "positions": of_rows({**measurements("lead1", "lead2"), "label": WAVES}, 32, "TokenClassification"),
}
IMAGE_NETWORKS = ("imagenet", "study-images")
# Those that go the way of another recipe are slow.
ALIKE = ("listops_short", "listops_small", "pathx", "scifar", "study-digits", "study-scifar", "study-images")
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in SLICES]


def write_slice(folder: Path, name: str) -> Path:
    """The slice of a recipe as parquet."""
    folder.mkdir(parents=True, exist_ok=True)
    data = datasets.Dataset.from_dict(SLICES[name][0])
    datasets.disable_progress_bars()
    data.to_parquet(folder / "data.parquet")
    return folder / "data.parquet"


def run_recipe(tmp_path: Path, name: str, *overrides: str, folder: str = "run") -> dict[str, float]:
    """Two steps of a recipe on its slice."""
    data = write_slice(tmp_path / "data", name)
    words = [] if name in IMAGE_NETWORKS else [f"--model.{key}={value}" for key, value in TINY.items()]
    words += ["--warmup_steps=0", "--gradient_accumulation_steps=1", "--logging_steps=1", "--init_from=null"]
    words += [*SLICES[name][1], *overrides]
    arguments = read_short(RECIPES / f"{name}.yaml", tmp_path / folder, data, *words, batch=3)
    return tiny.run(build_task(arguments), arguments)


def test_every_recipe_has_a_slice():
    # The quickstart, which a test runs, trains its own.
    assert {path.stem for path in RECIPES.glob("*.yaml")} == {*SLICES, "quickstart"}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_trains_from_end_to_end(name, tmp_path):
    metrics = run_recipe(tmp_path, name)
    assert np.isfinite(losses(tmp_path / "run")).all()
    snapshot = tmp_path / "run" / "snapshot"
    kind = getattr(transformers, f"AutoModelFor{SLICES[name][2]}")
    model, report = kind.from_pretrained(snapshot, output_loading_info=True)
    assert not any(report.values()), report
    # What is published scores what was said, and its processor makes of an example what the task does.
    task = build_task(read_recipe(RECIPES / f"{name}.yaml", SLICES[name][1]))
    if isinstance(task, AudioTask):
        assert AutoFeatureExtractor.from_pretrained(snapshot).sampling_rate == task.sampling_rate
    elif isinstance(task, ListOpsTask):
        text, tokenizer = listops()["text"][0], AutoTokenizer.from_pretrained(snapshot)
        assert tokenizer(text)["input_ids"] == task.tokenizer(text)["input_ids"]
    elif isinstance(task, PixelTask):
        picture, processor = SLICES[name][0]["image"][0], AutoImageProcessor.from_pretrained(snapshot)
        picture = picture.convert("RGB" if len(task.mean) == 3 else "L")
        pixels = processor(picture, return_tensors="pt")["pixel_values"].flatten(2).transpose(1, 2)[0]
        torch.testing.assert_close(pixels, task.encode({"image": picture, "label": 0})["input_values"])
    examples = list(datasets.Dataset.from_dict(SLICES[name][0]))
    with torch.no_grad():
        again = task.summarize(task.evaluate_batch(model.eval(), examples, list(range(4))))
    assert again == pytest.approx(metrics, rel=1e-5)
    pictures = list((tmp_path / "run" / "samples").glob("*.png"))
    assert bool(pictures) == (name not in ("lm", "masked_lm"))


@pytest.mark.parametrize("name", NAMES)
def test_each_recipe_takes_the_kernels_of_the_papers_tables(name):
    readme = (RECIPES / "README.md").read_text()
    rest = set()
    for kernel in ("dilated", "fourier", "fourier_sparse"):
        words = [] if kernel == "fourier" else [f"--model.kernel_type={kernel}"]
        assert not words or f"--model.kernel_type {kernel}`" in readme
        # One layer of its width and length is as good as six.
        words += [] if name in IMAGE_NETWORKS else ["--model.num_hidden_layers=1"]
        arguments = read_recipe(RECIPES / f"{name}.yaml", words)
        with torch.device("meta"):
            model = build_task(arguments).build_model(arguments.model, None)
        assert model.config.kernel_type == kernel
        kernels = set(model.kernel_parameters())
        assert kernels
        rest.add(sum(value.numel() for key, value in model.named_parameters() if key not in kernels))
    # Only the kernels differ.
    assert len(rest) == 1


# peft still asks for the name that transformers deprecates.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_last_evaluation_of_an_adapters_run_is_that_of_its_snapshot(tmp_path):
    """`hf-ext train --init_from --peft`, then `hf-ext evaluate` of what it wrote."""
    run_recipe(tmp_path, "listops", "--max_steps=6", folder="base")
    words = ["--max_steps=12", "--learning_rate=0.03", f"--init_from={tmp_path / 'base' / 'snapshot'}"]
    words += ["--peft={peft_type: LORA, target_modules: [pointwise], modules_to_save: [classifier]}"]
    metrics = run_recipe(tmp_path, "listops", *words, folder="tuned")
    words = [f"--data={{eval: {{path: {tmp_path / 'data' / 'data.parquet'}}}}}", *SLICES["listops"][1]]
    report = evaluate_checkpoint(str(tmp_path / "tuned" / "snapshot"), RECIPES / "listops.yaml", words)
    found = {result["metric"]: result["value"] for result in report["results"]}
    assert found == pytest.approx(metrics, abs=1e-5)


def test_expressions_become_tokens_as_in_the_published_recipes():
    task = ListOpsTask(max_length=16)
    names = task.tokenizer.convert_ids_to_tokens(task.tokenizer("( ( [MAX 2 ) ( [SM 9 7 ] ) ] )")["input_ids"])
    assert names == ["[MAX", "2", "[SM", "9", "7", "X", "X", "<eos>"]
    assert len(task.tokenizer) == 18
    short = task.encode({"text": "[MIN 1 2 ]", "label": 1})
    assert short["attention_mask"].tolist() == [1] * 5 + [0] * 11
    # A text that is cut ends with <eos> too.
    long = task.encode({"text": "[MIN " + "1 " * 30 + "]", "label": 1})
    assert int(long["input_ids"][-1]) == task.tokenizer.eos_token_id and long["attention_mask"].all()
    # Other texts are their bytes.
    tokenizer, text = TextTask(max_length=64).tokenizer, "naïve “quotes”, \t tabs\n and 東京 <eos"
    ids = tokenizer(text)["input_ids"]
    assert len(tokenizer) == 258 and len(ids) == len(text.encode()) + 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("kind", [LanguageModelTask, MaskedLanguageModelTask])
def test_windows_of_a_text_are_its_bytes_to_its_end(kind):
    task, example = kind(max_length=6), {"text": "hello world"}
    ids = [*task.tokenizer("hello world")["input_ids"], task.tokenizer.eos_token_id]
    starts = {task.choose_start(example, np.random.default_rng(seed)) for seed in range(60)}
    assert starts == {*range(7)}
    for start in starts:
        assert task.read_window(example, start)["input_ids"].tolist() == ids[start : start + 6]
    short = task.encode({"text": "hi"})
    assert short["labels"].tolist() == [*short["input_ids"].tolist()[:3], *[-100] * 3]
    assert short["input_ids"].tolist()[2] == task.tokenizer.eos_token_id
    # What a text spells is no special token.
    found = task.read_window({"text": "<mask>" * 3}, 13)["input_ids"]
    assert task.tokenizer.decode(found) == "mask><eos>"
    for value in (3, None):
        with refused(DataError, "task.text_column"):
            task.training_sample({"text": value}, np.random.default_rng(0))


def test_bits_per_byte_are_those_of_a_known_model():
    task = LanguageModelTask(max_length=8)
    model = task.build_model(TINY, None).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        rows = task.evaluate_batch(model, [{"text": "abc"}, {"text": "abcdefgh"}], [0, 1])
    # All tokens are equally likely; the first of a text is not predicted.
    assert [row["bytes"] for row in rows] == [3, 7]
    assert task.summarize(rows)["bits_per_byte"] == pytest.approx(np.log2(258))


def test_accuracy_and_confusions():
    task = TextTask(num_labels=3)
    pairs = [(0, 0), (1, 1), (2, 1), (1, 1)]
    rows = [{"label": float(label), "prediction": float(guess), "loss": 1.0 * guess} for label, guess in pairs]
    assert task.summarize(rows) == {"accuracy": 0.75, "loss": 0.75}
    assert task.confusion.tolist() == [[1, 0, 0], [0, 2, 0], [0, 1, 0]]
    assert task.sample_picture(None, []).size[0] > 100
    # Darker where there are more.
    table = np.diag([8, 8, 8])
    table[2, 0] = 8
    full, empty = (np.asarray(draw_confusion(values, ["a", "b", "c"]).convert("L")) for values in (table, 0 * table))
    assert full.mean() < empty.mean() - 10
    assert draw_confusion(np.eye(50, dtype=int), []).size[0] > 500


def test_kernels_have_a_rate_of_their_own_and_only_matrices_decay():
    task = AudioTask(max_length=64, kernel_learning_rate=0.003)
    model = task.build_model({**TINY, "kernel_type": "fourier_sparse", "bidirectional": True}, None)
    decayed, plain, kernels = task.parameter_groups(model, 0.1)
    names = {id(value): name for name, value in model.named_parameters()}
    found = [sorted(names[id(value)] for value in group["params"]) for group in (decayed, plain, kernels)]
    assert sum(map(len, found)) == len(names)
    assert found[0] == ["classifier.weight", "model.embedding.weight", "model.layers.0.pointwise.weight"]
    assert found[2] == sorted(model.kernel_parameters()) and len(found[2]) > 3
    assert {"model.layers.0.convolution.alpha", "model.layers.0.norm.weight"} < set(found[1])
    assert (decayed["weight_decay"], plain["weight_decay"], kernels["weight_decay"]) == (0.1, 0.0, 0.0)
    assert kernels["lr"] == 0.003 and "lr" not in plain | decayed
    model.reparameterize()
    assert len(task.parameter_groups(model, 0.1)) == 2


def test_an_image_is_trained_on_by_parts_that_lie_in_it():
    generator = np.random.default_rng(0)
    left, top, right, bottom = np.array([random_box(40, 20, 0.1, generator) for _ in range(300)]).T
    assert (left >= 0).all() and (top >= 0).all() and (right <= 40).all() and (bottom <= 20).all()
    shares = (right - left) * (bottom - top) / 800
    assert shares.min() > 0.08 and shares.max() <= 1 and shares.std() > 0.1
    task, example = ImageTask(image_size=8, num_labels=2), {"image": pictures(20)[0], "label": 1}
    samples = [task.training_sample(example, np.random.default_rng(seed)) for seed in (1, 1, 2)]
    first, again, other = (sample["pixel_values"] for sample in samples)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.shape == task.encode(example)["pixel_values"].shape == (3, 8, 8)


def test_half_the_rate_is_every_second_sample_and_kernels_that_fit(tmp_path):
    run_recipe(tmp_path, "study-digits", "--model.bidirectional=true", "--task.sampling_rate=8000")
    snapshot = str(tmp_path / "run" / "snapshot")
    task = AudioTask(sampling_rate=8000, max_length=64, decimation=2)
    model = task.build_model({}, snapshot)
    assert (model.config.sampling_rate, model.config.rate_factor, model.config.longest_input) == (4000, 2.0, 32)
    # As `datasets` decodes it.
    assert task.encode({"audio": RECORDING, "label": 0})["attention_mask"].tolist() == [1, 1] + [0] * 30
    recording = recordings()[1]
    sample = task.encode({"audio": recording, "label": 1})
    expected = AutoFeatureExtractor.from_pretrained(snapshot).normalize(np.array(recording[::2]) / 32768)
    np.testing.assert_allclose(sample["input_values"], expected, rtol=1e-5)
    reference = AutoModelForAudioClassification.from_pretrained(snapshot).change_rate(2).eval()
    with torch.no_grad():
        inputs = task.batch(model, [{"audio": recording, "label": 1}])
        assert_same_weights(model, reference)
        assert_same_answers(model.eval()(**inputs).logits, reference(**inputs).logits)
    with refused(DataError, "task.decimation"):
        task.build_model(TINY, None)


def test_smoothed_labels_are_learned_and_scores_stay_and_classes_may_be_names():
    named = TextTask(num_labels=2, label_names=["no", "yes"])
    assert int(named.label({"label": "yes"})) == int(named.label({"label": 1})) == 1
    assert named.build_model(TINY, None).config.id2label == {0: "no", 1: "yes"}
    plain, smooth = TextTask(num_labels=3, max_length=6), TextTask(num_labels=3, max_length=6, label_smoothing=0.3)
    model = plain.build_model(TINY, None).eval()
    batch = plain.batch(model, [{"text": "ab", "label": 0}, {"text": "cde", "label": 2}])
    logits = model(**{name: values for name, values in batch.items() if name != "labels"}).logits.log_softmax(-1)
    own = -logits.gather(1, batch["labels"][:, None]).mean()
    torch.testing.assert_close(plain.loss(model, batch, 0), own)
    torch.testing.assert_close(smooth.loss(model, batch, 0), 0.7 * own - 0.3 * logits.mean())
    assert smooth.describe() == plain.describe()


def test_a_checkpoint_for_other_data_and_wrong_models_are_refused(tmp_path):
    run_recipe(tmp_path, "text")
    snapshot = str(tmp_path / "run" / "snapshot")
    with refused(DataError, "vocab_size", "258"):
        ListOpsTask(max_length=16).build_model({}, snapshot)
    for kind, model, fact in (
        *[(TextTask, {"hidden_sise": 3}, "hidden_size"), (TextTask, {"vocab_size": 3}, "vocab_size")],
        (ImageTask, {"preset": "huge"}, "tiny, small, base"),
    ):
        with refused(ValueError, fact):
            kind().build_model(model, None)
    # Another number of classes is another head on the same data.
    assert TextTask(max_length=16, num_labels=5).build_model({}, snapshot).config.num_labels == 5


RECORDING, SOUNDS = {"array": np.float32([0.5, -0.5, 0.25]), "sampling_rate": 8000}, AudioTask(sampling_rate=8000)
FAST = {**RECORDING, "sampling_rate": 9000}


@pytest.mark.parametrize(
    ("task", "example", "facts"),
    [
        (PixelTask(), {"image": pictures(5)[0], "label": 0}, ["5 x 5 pixels", "task.image_size", "says 32"]),
        (PixelTask(), {"photo": pictures(5)[0], "label": 0}, ["label", "photo", "image"]),
        (TextTask(), {"text": 3, "label": 0}, ["expected", "text"]),
        (TextTask(num_labels=2, label_names=["no", "yes"]), {"text": "a", "label": "maybe"}, ["maybe"]),
        (TextTask(num_labels=2), {"text": "a", "label": 2}, ["holds 2", "0 to 1"]),
        (LanguageModelTask(), {"text": ""}, ["empty", "text"]),
        (SOUNDS, {"audio": FAST, "label": 0}, ["9000 samples", "task.sampling_rate", "says 8000"]),
        *((SOUNDS, {"audio": wrong, "label": 0}, ["audio"]) for wrong in (None, "a", 3.0, {"array": [0.0]})),
        (SOUNDS, {"audio": np.zeros((9, 2)), "label": 0}, ["(9, 2)"]),
    ],
)
def test_data_that_do_not_fit_are_named(task, example, facts):
    with refused(DataError, *facts):
        task.encode(example)


@pytest.mark.parametrize("kind", [LanguageModelTask, MaskedLanguageModelTask])
def test_packed_texts_train_as_padded_ones(kind):
    texts = ["a", "longer than the window of the model", "ab", "two words"]
    found = []
    for packed in (False, True):
        task = kind(max_length=16, packed=packed)
        torch.manual_seed(0)
        fields = {**TINY, "num_hidden_layers": 2, "bidirectional": kind is not LanguageModelTask}
        model = task.build_model(fields, None).double()
        generators = map(np.random.default_rng, range(4))
        batch = default_collate([task.training_sample({"text": text}, next(generators)) for text in texts])
        assert len({int(length) for length in batch["attention_mask"].sum(1)}) == 4
        loss = task.loss(model, batch, 0)
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    # The loss of a causal model is summed in single precision.
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)
