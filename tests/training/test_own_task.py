"""A task of one's own, written with the public names: it trains, goes on, and is used."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from huggingface_hub.dataclasses import strict
from transformers import AutoModelForSequenceClassification, DistilBertConfig, DistilBertForSequenceClassification

from hf_ext.data.opening import open_source
from hf_ext.training import DataSource, Task, TrainingArguments, evaluate
from tests.kit.own_data import write_files
from tests.kit.process_state import forget_accelerate

from .tiny import evaluated, run

SIZES = {"vocab_size": 20, "dim": 16, "n_heads": 2, "n_layers": 1, "hidden_dim": 32, "num_labels": 3}


class PlainTask(Task):
    """As little as a task can be: the loss is the model's, and its mean is what is evaluated."""

    def build_model(self, config, init_from):
        return DistilBertForSequenceClassification(DistilBertConfig(**SIZES, **config))

    def training_sample(self, example, generator):
        numbers = torch.tensor([example["first"], example["second"]])
        return {"input_ids": numbers, "labels": numbers.sum() % 3}


@strict
@dataclass
class SumTask(PlainTask):
    """Predicts the sum of two numbers modulo 3; some inputs are hidden, at random."""

    hidden: float = 0.1

    metric_names = {"accuracy": "accuracy"}
    greater_is_better = True

    def training_sample(self, example, generator):
        numbers = torch.tensor([example["first"], example["second"]])
        kept = torch.from_numpy(generator.random(2) > self.hidden)
        return {"input_ids": torch.where(kept, numbers, 19), "labels": numbers.sum() % 3}

    def evaluate_batch(self, model, examples, indices):
        numbers = torch.tensor([[example["first"], example["second"]] for example in examples])
        right = model(numbers).logits.argmax(-1) == numbers.sum(1) % 3
        return [{"accuracy": float(value)} for value in right]


@pytest.fixture
def data(tmp_path):
    rows = [{"first": first, "second": second} for first in range(4) for second in range(5)]
    return write_files(tmp_path, {"sums.jsonl": "\n".join(map(json.dumps, rows))}) / "sums.jsonl"


def make_arguments(output, data, **changes):
    fields = {"max_steps": 6, "save_steps": 2, "eval_steps": 3, "logging_steps": 3, "ema_decay": 0.9, **changes}
    return TrainingArguments("sums", str(output), evaluated(data), report_to="none", **fields)


def test_a_task_of_ones_own_goes_on_and_is_used(tmp_path, data):
    """The second part of the run has the samples of the first one behind it."""
    metrics, _, found = (
        run(SumTask(), make_arguments(tmp_path / name, data, lr_scheduler_type="constant", max_steps=steps))
        for name, steps in (("whole", 6), ("pieces", 4), ("pieces", 6))
    )
    assert found == metrics
    whole, pieces = ((tmp_path / name / "snapshot/model.safetensors").read_bytes() for name in ("whole", "pieces"))
    assert whole == pieces
    (row,) = json.loads((tmp_path / "pieces" / "snapshot" / "eval.json").read_text())["results"]
    assert (row["metric"], row["value"], row["task"]) == ("accuracy", metrics["accuracy"], "other")
    assert row["arguments"] == {"hidden": 0.1}
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole" / "snapshot")
    forget_accelerate()
    assert evaluate(SumTask(), model, open_source(DataSource(str(data)))) == metrics


def test_two_methods_are_enough(tmp_path, data):
    metrics = run(PlainTask(), make_arguments(tmp_path / "run", data, model={"dropout": 0.0}))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "snapshot").eval()
    samples = [PlainTask().training_sample(json.loads(row), None) for row in data.read_text().splitlines()]
    with torch.no_grad():
        losses = [float(model(**{name: value[None] for name, value in row.items()}).loss) for row in samples]
    assert metrics == {"loss": pytest.approx(np.mean(losses), rel=1e-6)}
    groups = PlainTask().parameter_groups(model, 0.1)
    assert sum(len(group["params"]) for group in groups) == len([*model.parameters()])
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
