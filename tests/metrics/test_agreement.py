"""Agreement of predictions with labels, against scikit-learn and SciPy."""

import evaluate
import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import matthews_corrcoef

from hf_ext.metrics import metric_path
from hf_ext.metrics.agreement import accuracy, matthews, pearson, spearman


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_classes_agree_as_scikit_learn_says(classes):
    generator = np.random.default_rng(classes)
    labels = generator.integers(0, classes, 50)
    found = np.where(generator.random(50) < 0.6, labels, generator.integers(0, classes, 50))
    assert matthews(found, labels) == pytest.approx(matthews_corrcoef(labels, found))
    assert accuracy(found, labels) == (found == labels).mean()
    assert matthews(labels, labels) == pytest.approx(1)
    assert matthews(np.zeros(50), labels) == 0 == matthews_corrcoef(labels, np.zeros(50))


def test_scores_agree_as_scipy_says():
    generator = np.random.default_rng(0)
    # STS-B's labels have many equal values.
    labels = generator.integers(0, 6, 80) / 2
    found = labels + generator.normal(0, 1, 80).round(1)
    assert pearson(found, labels) == pytest.approx(pearsonr(found, labels)[0])
    assert spearman(found, labels) == pytest.approx(spearmanr(found, labels)[0])
    assert pearson(np.ones(80), labels) == spearman(labels, np.ones(80)) == 0
    # Scores are no classes, of which a matrix would have 160 GB.
    assert matthews(*np.random.default_rng(0).normal(size=(2, 100_000))) == 0.0


def test_as_a_module_of_evaluate(tmp_path):
    metric = evaluate.load(metric_path("agreement"), cache_dir=str(tmp_path))
    found = metric.compute(predictions=[0, 1, 1, 2], references=[0, 1, 0, 2])
    assert found["accuracy"] == 0.75
    assert found["matthews"] == pytest.approx(matthews_corrcoef([0, 1, 0, 2], [0, 1, 1, 2]))
