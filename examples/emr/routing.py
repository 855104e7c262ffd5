"""Which task a tweet is of, guessed by the router of an artifact, beside the oracle that is told."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import Measurement
from sklearn.metrics import f1_score
from tweets import SEED

from hf_ext import EMRModel

SAMPLES = 200


def score_router(measurement: Measurement, artifact: Path, tasks: list[str], endpoint: str) -> dict[str, Any]:
    """
    Fits the router on training tweets and routes the test tweets.

    A tweet that is sent to another task's head gets no label of its own task, so it counts as wrong.

    Returns:
        `dict`: For each task the share of tweets that find their task, and macro F1 when routed and when told.
    """
    merged = EMRModel.from_pretrained(artifact, task=tasks[0], endpoint=endpoint)
    merged.fit_router({task: training_tweets(measurement, task) for task in tasks}, save=False)
    rows: dict[str, dict[str, float]] = {}
    for task in tasks:
        examples = measurement.examples(task)
        found = np.zeros(len(examples.labels), dtype=bool)
        for indices, tokens in examples.batches():
            with torch.no_grad():
                found[indices] = [name == task for name in merged.route(**tokens)]
        merged.set_task(task)
        told = examples.predict(merged.model)
        classes = list(range(merged.model.config.num_labels))
        scores = [
            f1_score(examples.labels, predictions, labels=classes, average="macro", zero_division=0.0)
            for predictions in (np.where(found, told, -1), told)
        ]
        rows[task] = {"found": float(found.mean()), "routed": float(scores[0]), "told": float(scores[1])}
    means = {key: round(float(np.mean([row[key] for row in rows.values()])), 4) for key in ("found", "routed", "told")}
    return {"tasks": {task: {key: round(row[key], 4) for key in row} for task, row in rows.items()}, "mean": means}


def training_tweets(measurement: Measurement, task: str) -> Any:
    """A seeded choice of a task's training tweets as one padded batch."""
    examples = measurement.examples(task, "train")
    chosen = np.random.default_rng(SEED).permutation(len(examples.tokens))[:SAMPLES]
    return measurement.tokenizer.pad({"input_ids": [examples.tokens[index] for index in chosen]}, return_tensors="pt")
