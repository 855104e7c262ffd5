"""Sequences of numbers in the training loop: samples, units, scores beside naive ones, resuming, what is refused."""

import contextlib
import json

import datasets
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    pipeline,
)

from hf_ext.data.opening import open_source
from hf_ext.errors import DataError
from hf_ext.tasks.series import PositionsTask, SeriesClassificationTask, SeriesRegressionTask, measure
from hf_ext.tasks.texts import MaskedLanguageModelTask
from hf_ext.training import TrainingArguments, build_task
from hf_ext.training.evaluation import evaluate
from tests.kit.models import assert_same_weights
from tests.kit.recipes import read_recipe
from tests.kit.refusals import refused
from tests.kit.studies import EXAMPLES, module_loader
from tests.training import tiny

RECIPES = EXAMPLES / "mrconv"
load = module_loader(RECIPES)
TINY = {"hidden_size": 4, "num_hidden_layers": 1, "kernel_size": 4}


def knocks(count: int = 24) -> datasets.Dataset:
    """Vibrations of two channels far from zero mean; the label says which is stronger, the targets how strong."""
    generator = np.random.default_rng(0)
    rows = []
    for index in range(count):
        strength, length = generator.uniform(1, 3), int(generator.integers(20, 33))
        sides = [strength, 1.0] if index % 2 else [1.0, strength]
        values = 500 + 20 * np.sin(np.arange(length) * 0.9)[:, None] * sides
        rows.append({
            "x": values[:, 0].tolist(), "y": values[:, 1].tolist(), "label": ("right", "left")[index % 2],
            "strength": 70 + strength, "length": float(length),
        })  # fmt: skip
    return datasets.Dataset.from_list(rows)


KNOCKS = {"columns": ["x", "y"], "max_length": 32}
LABELS = {"num_labels": 2, "label_names": ["left", "right"]}


def run(task, data, folder, steps=30, **options):
    values = {"model": TINY, "max_steps": steps, "learning_rate": 0.02, "per_device_train_batch_size": 8}
    arguments = TrainingArguments("series", str(folder), {}, **{**values, "report_to": "none", **options})
    return tiny.run(task, arguments, data, data)


@pytest.mark.parametrize(
    ("offset", "spread", "refuses"), [(1.7e9, 50, 1), (1e6, 0.01, 1), (1.7e9, 0, 0), (1e6, 50, 0)]
)
def test_values_that_float32_cannot_tell_apart_are_refused(offset, spread, refuses):
    values = offset + spread * np.random.default_rng(0).random((20, 1))
    with refused(DataError, "float32", "subtract") if refuses else contextlib.nullcontext():
        found = measure("target", lambda row: np.array([row["value"]]), datasets.Dataset.from_dict({"value": values}))
        assert found["target_mean"] == pytest.approx([values.mean()])


def test_a_regression_learns_in_the_units_of_its_targets(tmp_path):
    data = knocks()
    task = SeriesRegressionTask(**KNOCKS, target_columns=["strength", "length"])
    scores = run(task, data, tmp_path / "run", steps=60)
    assert scores["mae"] < 0.7 * scores["mae_of_mean"] and scores["rmse"] > scores["mae"]
    # The folder alone gives what was scored, from numbers as they were measured; no processor lies in it.
    snapshot = tmp_path / "run" / "snapshot"
    assert not (snapshot / "preprocessor_config.json").exists()
    model = AutoModelForSequenceClassification.from_pretrained(snapshot).eval()
    assert model.config.id2label == {0: "strength", 1: "length"} and model.config.problem_type == "regression"
    truth = np.array([data["strength"], data["length"]]).T
    with torch.no_grad():
        found = [model(input_values=torch.tensor([row["x"], row["y"]]).T[None]).logits[0].numpy() for row in data]
    for name, guess in (("mae", found), ("mae_of_mean", truth.mean(0))):
        assert scores[name] == pytest.approx(np.mean(abs(guess - truth) / truth.std(0)), rel=1e-4)


def test_a_checkpoint_keeps_the_units_that_it_was_trained_in(tmp_path):
    run(SeriesClassificationTask(**KNOCKS, **LABELS), knocks(), tmp_path / "run", 2)
    task, snapshot = SeriesClassificationTask(**KNOCKS, **LABELS), str(tmp_path / "run" / "snapshot")
    task.read_data(knocks().map(lambda row: {"x": [value * 9 for value in row["x"]]}))
    kept = AutoModelForSequenceClassification.from_pretrained(snapshot)
    model = task.build_model({}, snapshot)
    assert model.config.input_mean == kept.config.input_mean and model.config.input_mean[0] < 600
    assert_same_weights(model, kept)
    assert evaluate(task, model, knocks())["accuracy"] >= 0
    with refused(DataError, "input_size"):
        SeriesClassificationTask(columns=["x"], max_length=32, num_labels=2).build_model({}, snapshot)


def test_a_checkpoint_of_another_answer_gets_its_units_and_loss(tmp_path):
    targets = {"target_columns": ["strength", "length"]}
    models, classes, values = {}, str(tmp_path / "classes"), str(tmp_path / "values")
    tasks = {classes: SeriesClassificationTask(**KNOCKS, **LABELS), values: SeriesRegressionTask(**KNOCKS, **targets)}
    for place, task in tasks.items():
        task.read_data(knocks())
        models[place] = task.build_model(TINY, None)
        models[place].save_pretrained(place)
    means = models[values].config.target_mean
    task = SeriesRegressionTask(**KNOCKS, **targets)
    task.read_data(knocks().map(lambda row: {"strength": row["strength"] * 9}))
    # Other units where the answer is another; those of the checkpoint where it is the same.
    model = task.build_model({}, classes)
    assert model.config.target_mean == task.learned["target_mean"] and model.config.problem_type == "regression"
    assert task.loss(model, task.batch(model, list(knocks())), 0) < 10_000
    assert task.build_model({}, values).config.target_mean == means
    swapped = SeriesRegressionTask(**KNOCKS, target_columns=["length", "strength"])
    swapped.read_data(knocks())
    assert swapped.build_model({}, values).config.target_mean == means[::-1]
    task = SeriesClassificationTask(**KNOCKS, **LABELS)
    model = task.build_model({}, values)
    assert model.config.problem_type is None and model.config.target_mean is None
    batch = task.batch(model, list(knocks()))
    expected = torch.nn.functional.cross_entropy(model(**batch).logits, batch["labels"])
    torch.testing.assert_close(task.loss(model, batch, 0), expected)
    # Of three targets those of two would not even be allowed.
    three = SeriesClassificationTask(**KNOCKS, num_labels=2)
    assert three.build_model({}, values).config.target_std is None


def test_means_and_spreads_are_those_of_all_positions():
    rows = knocks()
    task = SeriesClassificationTask(**KNOCKS)
    task.read_data(rows)
    stacked = np.concatenate([np.array([row["x"], row["y"]]).T for row in rows])
    np.testing.assert_allclose(task.learned["input_mean"], stacked.mean(0))
    np.testing.assert_allclose(task.learned["input_std"], stacked.std(0))
    streamed = SeriesClassificationTask(**KNOCKS)
    streamed.read_data(rows.to_iterable_dataset())
    assert streamed.learned == task.learned
    # What stands still has no spread; what cannot be read has no part.
    still = datasets.Dataset.from_list([{"values": [5.0, 5.0]}, {"values": [5.0, float("inf")]}])
    found = measure("input", SeriesClassificationTask().read_values, still)
    assert found == {"input_mean": [5.0], "input_std": [1.0]}
    # What is missing counts for nothing.
    rows = [{"x": [1.0, None, 4.0], "y": [None, None, 7.0]}, {"x": [None, 7.0], "y": [9.0, 11.0]}]
    task = SeriesClassificationTask(columns=["x", "y"])
    found = measure("input", task.read_values, datasets.Dataset.from_list(rows))
    np.testing.assert_allclose(found["input_mean"], [4, 9])
    np.testing.assert_allclose(found["input_std"], [np.std([1, 4, 7]), np.std([7, 9, 11])])


def test_missing_numbers_are_trained_on_as_the_mean_of_their_channel(tmp_path):
    rows = knocks().to_list()
    for row in rows:
        row["x"][::5] = [None] * len(row["x"][::5])
    task = SeriesClassificationTask(**KNOCKS, **LABELS)
    scores = run(task, datasets.Dataset.from_list(rows), tmp_path / "run", 4)
    assert np.isfinite(scores["loss"])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "snapshot").eval()
    batch = task.batch(model, rows[:2])
    filled = batch["input_values"].clone()
    filled[..., 0][batch["observed_mask"][..., 0] == 0] = model.config.input_mean[0]
    with torch.no_grad():
        expected = model(input_values=filled, attention_mask=batch["attention_mask"]).logits
        torch.testing.assert_close(model(**{**batch, "labels": None}).logits, expected)


def test_classes_that_are_called_numbers_are_those_of_their_names():
    task = SeriesClassificationTask(num_labels=2, label_names=["-1", "1"])
    assert [task.read_class(value) for value in (-1, 1, -1.0, "1", np.int64(1))] == [0, 1, 0, 1, 1]


def test_channels_come_in_columns_of_their_own_or_together():
    apart = SeriesClassificationTask(columns=["x", "y"], max_length=6)
    together = SeriesClassificationTask(num_channels=2, max_length=6)
    rows = {"x": [1, 2, 3], "y": [4, 5, 6], "label": 1}
    first = apart.encode(rows)
    for values in (np.array([[1, 4], [2, 5], [3, 6]]), [[1, 4], [2, 5], [3, 6]]):
        second = together.encode({"values": values, "label": np.int64(1)})
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["input_values"].shape == (6, 2) and first["attention_mask"].tolist() == [1, 1, 1, 0, 0, 0]
    # A model keeps the names of its columns.
    for task in (apart, SeriesRegressionTask(**KNOCKS), PositionsTask(**KNOCKS)):
        assert task.build_model(TINY, None).config.input_columns == ["x", "y"]
    # What is longer is cut.
    long = apart.encode({"x": list(range(9)), "y": list(range(9)), "label": 0})
    assert long["attention_mask"].tolist() == [1] * 6 and long["input_values"][:, 0].tolist() == [0, 1, 2, 3, 4, 5]


POSITIONS = {"columns": ["x"], "max_length": 5, "num_labels": 3, "label_names": ["a", "b", "c"]}


def test_positions_without_a_class_are_neither_trained_nor_scored():
    task = PositionsTask(**POSITIONS)
    labels = task.encode({"x": [1.0, 2, 3, 4], "label": ["a", "", "c", "b"]})["labels"]
    assert labels.tolist() == [0, -100, 2, 1, -100]
    assert int(task.count_targets({"labels": labels})) == 3
    numbers = {"x": [1.0, 2, 3, 4, 5, 6, 7], "label": [0.0, float("nan"), 2, 1, -100, 0, 0]}
    assert task.encode(numbers)["labels"].tolist() == [0, -100, 2, 1, -100]


def test_scores_of_positions_are_those_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    task = PositionsTask(**{**POSITIONS, "num_labels": 4, "label_names": ["a", "b", "c", "never"]})
    model = task.build_model({**TINY, "bidirectional": True}, None).eval()
    generator = np.random.default_rng(0)
    rows = [
        {"x": generator.normal(size=length).tolist(), "label": generator.choice(["a", "a", "b", "c"], length).tolist()}
        for length in (5, 3, 4, 5)
    ]
    with torch.no_grad():
        found = task.summarize(task.evaluate_batch(model, rows, list(range(4))))
        guesses = [model(input_values=torch.tensor([row["x"]])).logits[0].argmax(-1) for row in rows]
    truth = ["abc".index(name) for row in rows for name in row["label"]]
    guess = torch.cat(guesses).tolist()
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(truth, guess))
    assert found["macro_f1"] == pytest.approx(metrics.f1_score(truth, guess, average="macro"))
    assert found["accuracy_of_largest"] == pytest.approx(max(map(truth.count, range(3))) / len(truth))


# What is wrong about a label decides what helps.
WRONG_LABELS = [
    *((missing, "missing") for missing in (None, "", float("nan"), -100)),
    *((name, rf"task.label_names, such as \['{name}'") for name in (-1, True, "walk")),
    (999, "task.num_labels to"),
    *((several, "mrconv-regression") for several in (0.5, [0], {"a": 1})),
]


ONE, TARGET, PLACES = SeriesClassificationTask(), SeriesRegressionTask(), PositionsTask(**POSITIONS)
NAMED = SeriesClassificationTask(num_labels=2, label_names=["a", "b"])


@pytest.mark.parametrize(
    ("task", "example", "words"),
    [
        (ONE, {"x": [1.0]}, r"no column 'values'; it has \['x'\]. Set task.columns"),
        (ONE, {"values": [1.0, "two", 3]}, "position 1: column 'values' holds 'two'"),
        (ONE, {"values": [1.0, np.inf]}, "position 1: column 'values' contains an infinite number"),
        (ONE, {"values": [1.0, -1e39]}, "position 1: .* beyond 3.4e38"),
        (ONE, {"values": [None, None]}, "column 'values' contains no numbers"),
        (ONE, {"values": [[1.0], [1.0, 2.0]]}, "or lists of equal size"),
        *((ONE, {"values": wrong}, "expected a number for each") for wrong in (3.0, "123", b"12", {1: 2}, [10**400])),
        (ONE, {"values": []}, "one length, at least 1"),
        (ONE, {"values": [[1.0, 2.0]]}, "hold 2 channels, the model takes 1"),
        (SeriesClassificationTask(**KNOCKS), {"x": [1.0], "y": [1.0, 2.0]}, r"got \{'x': 1, 'y': 2\}"),
        *((task, {"values": [1.0, 2.0]}, "statsmodels.*sktime") for task in (ONE, TARGET, PositionsTask())),
        *((ONE, {"values": [1.0], "label": wrong}, words) for wrong, words in WRONG_LABELS),
        (NAMED, {"values": [1.0], "label": "c"}, "List all names in"),
        (TARGET, {"values": [1.0], "target": "much"}, "column 'target' holds .'much'.; a target is one"),
        *((TARGET, {"values": [1.0], "target": wrong}, "is one number") for wrong in ([1.0, 2.0], 1e39, 10**400)),
        (PLACES, {"x": [1.0, 2.0], "label": ["a"]}, r"shape \(1,\); expected a class for each of"),
        (PLACES, {"x": [1.0, 2.0], "label": ["a", "z"]}, "position 1: column 'label' holds 'z'"),
    ],
)
def test_data_that_do_not_fit_are_named_with_their_place(task, example, words):
    with pytest.raises(ValueError, match=words):
        task.encode(example)


TEXT = "the quick brown fox jumps over the lazy dog, again and again and again. " * 4


def test_bytes_are_masked_as_transformers_does():
    task = MaskedLanguageModelTask(max_length=64)
    sample = task.training_sample({"text": TEXT}, np.random.default_rng(0))
    again = task.training_sample({"text": TEXT}, np.random.default_rng(0))
    assert all(torch.equal(sample[name], again[name]) for name in sample)
    samples = [task.training_sample({"text": TEXT}, np.random.default_rng(seed)) for seed in range(60)]
    hidden = torch.stack([sample["labels"] for sample in samples]) != -100
    masked = torch.stack([sample["input_ids"] for sample in samples]) == task.tokenizer.mask_token_id
    assert hidden.shape == (60, 64) and not masked[~hidden].any()
    assert float(hidden.float().mean()) == pytest.approx(0.15, abs=0.02)
    assert float(masked[hidden].float().mean()) == pytest.approx(0.8, abs=0.05)
    # However short a text is, something is to be found.
    for seed in range(9):
        short = task.mask(task.read_window({"text": "a"}, 0), np.random.default_rng(seed))
        assert (short["labels"] != -100).any()


def test_a_masked_language_model_fills_masks_from_its_folder(tmp_path):
    data = datasets.Dataset.from_list([{"text": TEXT}] * 8)
    task = MaskedLanguageModelTask(max_length=64)
    model = {**TINY, "hidden_size": 16, "bidirectional": True}
    scores = run(task, data, tmp_path / "run", steps=40, model=model)
    assert scores["accuracy"] > scores["accuracy_of_largest"] and scores["perplexity"] > 1
    folder = tmp_path / "run" / "snapshot"
    fill = pipeline("fill-mask", model=str(folder), device="cpu")
    (best, *_) = fill("the quick brown fox jum<mask>s over the lazy dog")
    assert 0 < best["score"] <= 1 and len(best["token_str"]) == 1
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForMaskedLM.from_pretrained(folder)
    batch = DataCollatorForLanguageModeling(tokenizer, seed=0)([tokenizer(TEXT[:60]), tokenizer("short text")])
    assert model.eval()(**batch).loss.isfinite()
    assert json.loads((folder / "config.json").read_text())["bidirectional"] is True


def test_what_the_maker_writes_is_what_the_recipes_read(load, tmp_path, monkeypatch):
    maker = load("make_series")
    monkeypatch.setattr(maker, "COUNTS", {"train": 9, "test": 3})
    monkeypatch.chdir(tmp_path)
    maker.write_all(tmp_path / "data" / "series")
    values = ["--method=mrconv-regression", "--task={columns: [x, y, z], target_columns: [frequency, decay]}"]
    for name, words in (("sensors", []), ("sensors", values), ("positions", []), ("masked_lm", [])):
        arguments = read_recipe(RECIPES / f"{name}.yaml", words)
        task, sources = build_task(arguments), arguments.data_arguments
        data = open_source(sources.require_train_source())
        task.read_data(data)
        sample = task.training_sample(data[0], np.random.default_rng(0))
        assert all(torch.isfinite(value).all() for value in sample.values())
        (test,) = sources.eval_sources.values()
        assert task.training_sample(open_source(test)[0], np.random.default_rng(0)).keys() == sample.keys()
    with refused(SystemExit, "exists", "folder"):
        maker.write_all(tmp_path / "data" / "series")


def test_windows_and_changes_of_a_classification(tmp_path):
    """A crop is a window of the series, the evaluation sees all of it, and the changes have their own spread."""
    task = SeriesClassificationTask(**KNOCKS, **LABELS, deltas=True, crop=0.5)
    data = knocks()
    task.read_data(data)
    changes = np.concatenate([np.diff(np.array([row["x"], row["y"]]).T, axis=0) for row in data])
    np.testing.assert_allclose(task.learned["input_delta_std"], changes.std(0), rtol=1e-9)
    assert "input_delta_mean" not in task.learned
    generator, lengths = np.random.default_rng(3), set()
    for row in list(data) * 4:
        whole = torch.tensor([row["x"], row["y"]]).T
        sample = task.training_sample(row, generator)
        length = int(sample["attention_mask"].sum())
        lengths.add(length / len(whole))
        windows = whole.unfold(0, length, 1).transpose(1, 2)
        assert (windows == sample["input_values"][:length]).all((1, 2)).any()
        assert int(task.encode(row)["attention_mask"].sum()) == len(whole)
    assert 0.45 < min(lengths) < 0.6 and max(lengths) > 0.95
    scores = run(task, data, tmp_path / "run", steps=60)
    assert scores["accuracy"] > 0.9
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "snapshot")
    assert model.config.input_delta_std == pytest.approx(changes.std(0).tolist())
