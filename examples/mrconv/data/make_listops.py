"""ListOps as in Long Range Arena (https://arxiv.org/abs/2011.04006): nested MIN, MAX, MED and SUM_MOD of digits.

python examples/mrconv/data/make_listops.py data/listops
python examples/mrconv/data/make_listops.py data/short --train 1000 --min-length 63 --max-length 200

Writes one parquet file for each split, which `datasets` and the training read, into a new folder.

An expression is an operator with two or more arguments, which are digits or expressions: `[MAX 2 [MIN 4 7 ] 0 ]`. Its
value, a digit, is the class. Trees are drawn, measured, evaluated and written level by level, a level being an array.

No text comes twice, and none in two splits: a text has 64 or more tokens, and any given one of them comes up with a
probability below 10^-40 (at each node a choice of at most 1 in 10 for a token or 1 in 16 for two, in a text at most a
third of whose tokens are operators).
"""

from dataclasses import dataclass
from typing import NamedTuple

import datasets
import numpy as np
from huggingface_hub.dataclasses import strict
from made_data import Made, main

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
END = "]"
# Each argument is an expression with this probability, otherwise a digit; the published data use the same.
EXPRESSION_PROBABILITY = 0.25
# Levels of the tree, the outermost operator being the first, and most arguments of an operator; the fewest are 2.
MAX_DEPTH, MAX_ARGUMENTS = 10, 10
# With the default limits about one tree in ten fits.
_MOST_DRAWS = 20_000
# Tokens from which a text is never the same as another.
_LONG = 64


@strict
@dataclass
class ListOps(Made):
    """
    Examples of ListOps as functions of (seed, split, index).

    Args:
        min_length, max_length (`int`, defaults to 500 and 2000):
            An expression has more than `min_length` and fewer than `max_length` tokens: digits, operators and `]`.
    """

    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.Value("int64")})
    # As many as Long Range Arena has.
    usual = (96_000, 2_000, 2_000)

    min_length: int = 500
    max_length: int = 2000

    def validate_lengths(self) -> None:
        if not _LONG - 1 <= self.min_length <= self.max_length - 4:
            raise ValueError(
                f"min_length must be at least {_LONG - 1}, as shorter texts would come twice, and at least 4 below "
                f"max_length; got {self.min_length} and {self.max_length}."
            )

    def example(self, index: int, split: str = "train") -> tuple[str, int]:
        """One example, the expression and its value."""
        generator = self.generator(index, split)
        for _ in range(_MOST_DRAWS):
            levels = self._draw(generator)
            if levels is not None:
                return " ".join(_write(levels)), int(_evaluate(levels)[0])
        raise ValueError(
            f"{_MOST_DRAWS:,} trees held none of more than {self.min_length} and fewer than {self.max_length} tokens: "
            "widen these limits."
        )

    def readme(self) -> str:
        """The limits of the expressions."""
        return (
            f"# ListOps\n\n{{sizes}}; seed {self.seed}; more than {self.min_length} and fewer than {self.max_length} "
            f"tokens, depth up to {MAX_DEPTH}, up to {MAX_ARGUMENTS} arguments.\n"
            "No text comes twice, and none in two splits.\n"
            "Written by `examples/mrconv/data/make_listops.py` with the grammar of Long Range Arena's ListOps; the "
            "examples are its own, so scores compare with published ones only as far as two draws of one distribution "
            "do.\n"
        )

    def _draw(self, generator: np.random.Generator) -> "list[_Level] | None":
        """A tree, or nothing where it has not the wanted length. Its root is an operator, as a digit is too short."""
        levels, nodes, length = [], 1, 0
        for depth in range(1, MAX_DEPTH + 1):
            chance = 1.0 if depth == 1 else EXPRESSION_PROBABILITY if depth < MAX_DEPTH else 0.0
            is_operator = generator.random(nodes) < chance
            arguments = generator.integers(2, MAX_ARGUMENTS + 1, int(is_operator.sum()))
            # A digit is a token, an operator with its end two.
            length += nodes + len(arguments)
            if length >= self.max_length:
                return None
            levels.append((is_operator, arguments))
            nodes = int(arguments.sum())
            if nodes == 0:
                break
        if length <= self.min_length:
            return None
        return [_Level.draw(is_operator, arguments, generator) for is_operator, arguments in levels]


class _Level(NamedTuple):
    """Nodes of one depth from left to right."""

    is_operator: np.ndarray
    # Of operators alone: number of arguments, which lie one after the other in the next level, and where they begin.
    arguments: np.ndarray
    starts: np.ndarray
    # A digit, or the number of an operator.
    symbols: np.ndarray

    @classmethod
    def draw(cls, is_operator: np.ndarray, arguments: np.ndarray, generator: np.random.Generator) -> "_Level":
        symbols = generator.integers(0, np.where(is_operator, len(OPERATORS), 10))
        return cls(is_operator, arguments, np.cumsum(arguments) - arguments, symbols)


def _evaluate(levels: list[_Level]) -> np.ndarray:
    """Values of the first level, from the last one up."""
    below = np.empty(0, dtype=np.int64)
    for level in reversed(levels):
        values = level.symbols.copy()
        if len(level.arguments):
            kinds = level.symbols[level.is_operator]
            results = [
                np.minimum.reduceat(below, level.starts),
                np.maximum.reduceat(below, level.starts),
                _medians(below, level),
                np.add.reduceat(below, level.starts) % 10,
            ]
            values[level.is_operator] = np.choose(kinds, results)
        below = values
    return below


def _medians(values: np.ndarray, level: _Level) -> np.ndarray:
    """Median of each operator's arguments; of an even number the mean of the middle two, rounded down."""
    owners = np.repeat(np.arange(len(level.arguments)), level.arguments)
    ordered = values[np.lexsort((values, owners))]
    low, high = level.starts + (level.arguments - 1) // 2, level.starts + level.arguments // 2
    return (ordered[low] + ordered[high]) // 2


def _write(levels: list[_Level]) -> np.ndarray:
    """The tokens in reading order, from the length of every sub-tree and with it the place of every node."""
    sizes = [np.ones(len(level.symbols), dtype=np.int64) for level in levels]
    for level, own, below in zip(levels[-2::-1], sizes[-2::-1], sizes[:0:-1], strict=True):
        if len(level.arguments):
            own[level.is_operator] = 2 + np.add.reduceat(below, level.starts)
    tokens = np.empty(sizes[0][0], dtype="<U4")
    places = np.zeros(1, dtype=np.int64)
    digits, operators = np.array([str(digit) for digit in range(10)]), np.array(OPERATORS)
    for depth, level in enumerate(levels):
        chosen = level.is_operator
        tokens[places[~chosen]] = digits[level.symbols[~chosen]]
        tokens[places[chosen]] = operators[level.symbols[chosen]]
        tokens[places[chosen] + sizes[depth][chosen] - 1] = END
        if depth + 1 < len(levels):
            # An argument stands after its operator and the arguments before it.
            before = np.cumsum(sizes[depth + 1]) - sizes[depth + 1]
            firsts = np.repeat(before[level.starts], level.arguments)
            places = np.repeat(places[chosen], level.arguments) + 1 + before - firsts
    return tokens


if __name__ == "__main__":
    main(ListOps, __doc__)
