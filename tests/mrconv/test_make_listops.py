"""ListOps: labels equal an evaluation of the text, the grammar keeps its limits, files appear whole."""

import hashlib
import itertools
import re
from collections import Counter
from statistics import median

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from make_listops import SPLITS, ListOps

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
@given(st.integers(0, 2**32 - 1), st.integers(0, 30), st.integers(4, 8), st.integers(6, 8), st.integers(63, 70))
def test_labels_and_limits_of_short_expressions(seed, index, depth, arguments, shortest):
    task = ListOps(seed, shortest, shortest + 200, depth, arguments)
    text, label = task.example(index)
    value, deepest, most = evaluate(text)
    assert label == value
    assert shortest < len(text.split()) < shortest + 200
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


def test_examples_are_those_of_earlier_versions():
    """Data that were made before are made again."""
    digest = hashlib.sha256()
    for split in SPLITS:
        for row in itertools.islice(ListOps().examples(split), 3):
            digest.update(repr(row).encode())
    assert digest.hexdigest() == "c05c371efbdbf0ac5242b4ea9b595f2a46585114a1b141dd36bada4c9c7c0d58"


def test_no_text_comes_twice_or_in_two_splits():
    rows = [row for split in SPLITS for row in itertools.islice(ListOps(0, 63, 200).examples(split), 40)]
    assert len({text for text, _ in rows}) == len(rows)


def test_limits_that_no_tree_meets_are_named():
    with refused(ValueError, "80 tokens"):
        ListOps(0, 63, 80, max_depth=2, max_arguments=2).example(0)
