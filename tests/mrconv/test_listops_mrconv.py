"""ListOps: labels equal an evaluation of the text, the grammar keeps its limits, files appear whole."""

import re
from collections import Counter
from statistics import median

import datasets
import numpy as np
import pytest
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ext.mrconv.listops_mrconv import ListOps, write_listops

FUNCTIONS = {"[MIN": min, "[MAX": max, "[MED": lambda values: int(median(values)), "[SM": lambda v: sum(v) % 10}


def evaluate(text):
    """Value, depth and largest number of arguments, read from the text alone."""
    stack, most, deepest = [[]], 0, 0
    for token in text.split(" "):
        if token in FUNCTIONS:
            stack.append([token])
            # Its arguments lie a level deeper than the operator.
            deepest = max(deepest, len(stack))
        elif token == "]":
            name, *arguments = stack.pop()
            assert len(arguments) >= 2
            most = max(most, len(arguments))
            stack[-1].append(FUNCTIONS[name](arguments))
        else:
            assert re.fullmatch("[0-9]", token)
            stack[-1].append(int(token))
    ((value,),) = stack
    return value, deepest, most


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 10**6), st.integers(4, 8), st.integers(3, 6), st.integers(0, 8))
def test_labels_and_limits_of_short_expressions(seed, index, depth, arguments, shortest):
    task = ListOps(seed, shortest, shortest + 25, depth, arguments)
    text, label = task.example(index)
    value, deepest, most = evaluate(text)
    assert label == value
    assert shortest < len(text.split()) < shortest + 25
    assert deepest <= depth
    assert most <= arguments


def test_examples_as_in_long_range_arena():
    task = ListOps()
    examples = [task.example(index) for index in range(60)]
    read = [evaluate(text) for text, _ in examples]
    assert [label for _, label in examples] == [value for value, _, _ in read]
    lengths = [len(text.split()) for text, _ in examples]
    assert min(lengths) > 500 and max(lengths) < 2000
    # A tree of that size hardly misses the largest depth and number of arguments.
    assert max(depth for _, depth, _ in read) == 10
    assert max(most for _, _, most in read) == 10
    assert len({label for _, label in examples}) > 5
    counts = Counter(token for text, _ in examples for token in text.split())
    operators = np.array([counts[name] for name in FUNCTIONS])
    digits = np.array([counts[str(digit)] for digit in range(10)])
    assert counts["]"] == operators.sum()
    # Uniform: within 5 standard deviations of a binomial share.
    for group in (operators, digits):
        share = 1 / len(group)
        assert np.all(np.abs(group - group.sum() * share) < 5 * np.sqrt(group.sum() * share))


def test_an_example_depends_on_seed_split_and_index_alone():
    task = ListOps(seed=3)
    assert task.example(5) == ListOps(seed=3).example(5)
    others = [task.example(6), task.example(5, "test"), task.example(5, "validation"), ListOps(seed=4).example(5)]
    assert len({text for text, _ in [task.example(5), *others]}) == 5


def test_the_middle_of_an_even_number_is_rounded_down():
    found = set()
    for index in range(300):
        text, label = ListOps(0, 3, 8, 2, 4).example(index)
        if text.startswith("[MED") and len(text.split()) == 4:
            first, second = (int(token) for token in text.split()[1:3])
            assert label == (first + second) // 2
            found.add((first + second) % 2)
    assert found == {0, 1}


def test_a_folder_is_read_by_datasets(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    task = ListOps(1, 5, 30)
    folder = write_listops(tmp_path / "listops", {"train": 1003, "validation": 3, "test": 2}, task, progress=False)
    data = datasets.load_dataset(str(folder))
    assert {name: len(part) for name, part in data.items()} == {"train": 1003, "validation": 3, "test": 2}
    for name, part in data.items():
        for index in (0, len(part) - 1):
            text, label = task.example(index, name)
            assert part[index] == {"text": text, "label": label}
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "test.parquet",
        "train.parquet",
        "validation.parquet",
    ]


def test_nothing_is_overwritten_or_left_half_written(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="there exists: name another folder"):
        write_listops(tmp_path / "there", {"train": 1}, ListOps())
    with pytest.raises(ValueError, match="at least 1 example"):
        write_listops(tmp_path / "new", {"train": 0}, ListOps())
    with pytest.raises(ValueError, match="there is no example 0 of 'dev'; splits: train, validation, test"):
        ListOps().example(0, "dev")

    def fail(self, index, split):
        raise OSError("the disk is full")

    monkeypatch.setattr(ListOps, "example", fail)
    with pytest.raises(OSError, match="disk is full"):
        write_listops(tmp_path / "new", {"train": 1}, ListOps(), progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_arguments": 1}, "at least 2, got 10 and 1"),
        ({"min_length": 1997}, "at least 4 below max_length"),
        ({"seed": -1}, "seed must be 0 or more"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(values, words):
    with pytest.raises(StrictDataclassError) as error:
        ListOps(**values)
    assert words in str(error.value.__cause__ or error.value)


def test_limits_that_no_tree_meets_are_named():
    with pytest.raises(ValueError, match="none of more than 12 and fewer than 40 tokens: widen these limits"):
        ListOps(0, 12, 40, max_depth=2, max_arguments=2).example(0)
