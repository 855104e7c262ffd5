"""ListOps: labels equal an evaluation of the text, the grammar keeps its limits, files appear whole."""

import hashlib
import itertools
import re
from collections import Counter
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_listops import SPLITS, ListOps, write_listops

from tests.kit.refusals import refused

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


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(0, 30), st.integers(4, 8), st.integers(3, 6), st.integers(0, 8))
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


def test_long_examples_are_those_of_earlier_versions():
    """Texts that cannot be the same are drawn as ever: data that were made before are made again."""
    for task, count, wanted in (
        (ListOps(), 3, "c05c371efbdbf0ac5242b4ea9b595f2a46585114a1b141dd36bada4c9c7c0d58"),
        (ListOps(3, 60, 200), 5, "1d70c2b0b79599c7d7f5550f3df9ec507ac0c8114eb57b0d93c6b97a7843e7cb"),
    ):
        digest = hashlib.sha256()
        for split in SPLITS:
            for row in itertools.islice(task.examples(split), count):
                digest.update(repr(row).encode())
        assert digest.hexdigest() == wanted


def texts_of(task: ListOps, counts: dict[str, int]) -> dict[str, list[str]]:
    return {split: [row[0] for row in itertools.islice(task.examples(split), counts[split])] for split in counts}


@pytest.mark.parametrize(
    "limits", [(3, 10), *(pytest.param(limits, marks=pytest.mark.slow) for limits in ((0, 7), (4, 30), (40, 90)))]
)
def test_no_text_comes_twice_or_in_two_splits(limits):
    counts = {"train": 600, "validation": 60, "test": 60} if limits[0] < 40 else dict.fromkeys(SPLITS, 30)
    parts = [texts_of(ListOps(seed, *limits), counts) for seed in (0, 1)]
    for part in parts:
        texts = sum(part.values(), [])
        assert len(set(texts)) == len(texts)
    # Not between seeds either: what one trains on another does not test.
    first, second = parts
    assert not set(first["train"]) & set(second["test"] + second["validation"])
    assert set(first["test"]) != set(second["test"])


def test_short_examples_are_functions_of_seed_split_and_index():
    """More examples begin with the same ones, whatever other splits hold."""
    task = ListOps(5, 3, 10)
    rows = list(itertools.islice(task.examples("validation"), 40))
    assert rows[:15] == list(itertools.islice(ListOps(5, 3, 10).examples("validation"), 15))
    for index in (0, 7, 39):
        assert task.example(index, "validation") == rows[index]
    list(itertools.islice(task.examples("train"), 40))
    assert list(itertools.islice(task.examples("validation"), 40)) == rows


@pytest.mark.slow
def test_short_texts_are_shared_out_by_their_hash_evenly():
    """What a split holds is a fair sample of all: eight, one and one of ten, with the same labels."""
    texts = texts_of(ListOps(0, 3, 9), {"train": 800, "validation": 100, "test": 100})
    operators = Counter(text.split()[0] for text in sum(texts.values(), []))
    assert max(operators.values()) < 1.3 * min(operators.values())
    # All 400 expressions of four tokens, by the split that can hold them.
    held = {split: set() for split in SPLITS}
    for split in SPLITS:
        with refused(ValueError, "expressions"):
            for text, _ in ListOps(1, 0, 5).examples(split):
                held[split].add(text)
    sizes = [len(held[split]) for split in SPLITS]
    assert sum(sizes) >= 390 and len(set().union(*held.values())) == sum(sizes)
    assert 290 < sizes[0] < 350 and 20 < sizes[1] < 65 and 20 < sizes[2] < 65


def test_too_few_different_texts_are_named_and_nothing_is_left(tmp_path):
    words = "more than 0 and fewer than 5 tokens: after [0-9]+ examples of 'train' no further one came up in 1,000"
    with pytest.raises(ValueError, match=words):
        write_listops(tmp_path / "new", {"train": 500, "test": 10}, ListOps(0, 0, 5), progress=False)
    assert not list(tmp_path.iterdir())


def test_the_middle_of_an_even_number_is_rounded_down():
    found = set()
    for text, label in itertools.islice(ListOps(0, 3, 8, 2, 4).examples(), 300):
        if text.startswith("[MED") and len(text.split()) == 4:
            first, second = (int(token) for token in text.split()[1:3])
            assert label == (first + second) // 2
            found.add((first + second) % 2)
    assert found == {0, 1}


def test_limits_that_no_tree_meets_are_named():
    with refused(ValueError, "40 tokens"):
        ListOps(0, 12, 40, max_depth=2, max_arguments=2).example(0)
