"""Agreement of predictions with labels, as GLUE measures it: accuracy, Matthews, Pearson and Spearman correlation."""

from typing import Any

import datasets
import evaluate
import numpy as np
import pandas as pd

from .images import describe


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Share of predicted classes that are right."""
    return float(np.mean(predictions == labels))


def matthews(predictions: np.ndarray, labels: np.ndarray) -> float:
    """
    Matthews correlation of classes, of two or more (Gorodkin's R_K). 0 where all predictions, or all labels, are the
    same.

    Args:
        predictions (`numpy.ndarray` of shape `[samples]`): Predicted classes.
        labels (`numpy.ndarray` of shape `[samples]`): The right ones.

    Returns:
        `float`: From -1 to 1.
    """
    classes, places = np.unique(np.concatenate([predictions, labels]), return_inverse=True)
    found, true = places[: len(predictions)], places[len(predictions) :]
    # By counts of the classes: a matrix of samples and classes would not fit where they are scores.
    of_found, of_true = (np.bincount(side, minlength=len(classes)).astype(float) for side in (found, true))
    samples = float(len(labels))
    norm = np.sqrt((samples**2 - of_found @ of_found) * (samples**2 - of_true @ of_true))
    return float((samples * np.sum(found == true) - of_found @ of_true) / norm) if norm > 0 else 0.0


def pearson(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Pearson's correlation of numbers; 0 where one side is constant."""
    first, second = predictions - np.mean(predictions), labels - np.mean(labels)
    norm = np.sqrt(np.sum(first**2) * np.sum(second**2))
    return float(np.sum(first * second) / norm) if norm > 0 else 0.0


def spearman(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Spearman's correlation: Pearson's of the ranks, equal values having their mean rank."""
    ranks = [pd.Series(values).rank().to_numpy() for values in (predictions, labels)]
    return pearson(*ranks)


class Agreement(evaluate.Metric):
    """
    Measures of numbers against numbers. `compute` returns `accuracy` and `matthews`, for classes, and `pearson` and
    `spearman`, for scores.

    ```python
    >>> metric = evaluate.load(metric_path("agreement"))
    >>> metric.compute(predictions=[0, 1, 1], references=[0, 1, 0])["accuracy"]
    0.6666666666666666
    ```
    """

    def _info(self) -> evaluate.MetricInfo:
        number = datasets.Value("float64")
        inputs = "predictions, references: classes or scores, a number for each sample."
        summary = "Accuracy, Matthews, Pearson and Spearman correlation."
        return describe(summary, inputs, predictions=number, references=number)

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        pair = np.asarray(predictions), np.asarray(references)
        return {measure.__name__: measure(*pair) for measure in (accuracy, matthews, pearson, spearman)}
