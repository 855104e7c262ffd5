"""Folders of made examples that `datasets` reads: a parquet file for each split, and a README."""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import datasets
import numpy as np
from huggingface_hub.dataclasses import strict

from hf_ext.docstrings import read_entries
from hf_ext.files import require_new, whole_folder
from hf_ext.settings import build

SPLITS = ("train", "validation", "test")


@strict
@dataclass
class Made:
    """
    Examples as functions of (seed, split, index).

    Args:
        seed (`int`, defaults to 0): Another seed gives other examples.
    """

    # Columns of a file, the label last.
    features: ClassVar[datasets.Features]
    # Examples of each split where none are asked for.
    usual: ClassVar[tuple[int, int, int]]

    seed: int = 0

    def validate_seed(self) -> None:
        # A larger one is two words of the generator's seed, and would be another seed with another split.
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be 0 or more and less than 2**32, got {self.seed}.")

    def generator(self, index: int, split: str) -> np.random.Generator:
        """The random numbers of an example."""
        if split not in SPLITS or index < 0:
            raise ValueError(f"there is no example {index} of {split!r}; splits: {', '.join(SPLITS)}, from 0 on.")
        return np.random.default_rng((self.seed, SPLITS.index(split), index))

    def example(self, index: int, split: str = "train") -> tuple[Any, int]:
        """The values of an example, in the order of the columns."""
        raise NotImplementedError

    def readme(self) -> str:
        """Text about the data, with a place for their `sizes`."""
        raise NotImplementedError

    def write(self, out: str | Path, counts: dict[str, int], num_workers: int = 1) -> Path:
        """Writes the first examples of each split and a README, all or nothing; any number of processes makes the
        same."""
        out = Path(out)
        require_new(out)
        if not counts or any(split not in SPLITS or count < 1 for split, count in counts.items()):
            raise ValueError(
                f"every split of {', '.join(SPLITS)} needs at least 1 example where it is given, got {counts}."
            )
        sizes = ", ".join(f"{count:,} {split}" for split, count in counts.items())
        with whole_folder(out, replace=False) as folder, tempfile.TemporaryDirectory() as cache:
            for split, count in counts.items():
                # Of what is a list each process takes a part, in order. With a name nothing is hashed.
                data = datasets.Dataset.from_generator(
                    self.rows,
                    features=self.features,
                    cache_dir=cache,
                    gen_kwargs={"split": split, "indices": list(range(count))},
                    num_proc=num_workers if num_workers > 1 else None,
                    fingerprint=split,
                )
                data.to_parquet(str(folder / f"{split}.parquet"))
            (folder / "README.md").write_text(self.readme().format(sizes=sizes), encoding="utf-8")
        return out

    def rows(self, split: str, indices: list[int]) -> Iterator[dict[str, Any]]:
        """Examples by the names of their columns."""
        for index in indices:
            yield dict(zip(self.features, self.example(index, split), strict=True))


def main(kind: type[Made], description: str | None) -> None:
    """Writes what the command line asks for, and ends with the folder, or with one line that says what is wrong."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a new folder")
    for split, count in zip(SPLITS, kind.usual, strict=True):
        parser.add_argument(f"--{split}", type=int, default=count, help=f"examples; {count:,} when not given")
    meanings = {name: entry.meaning for entry in read_entries(kind) for name in entry.names}
    for field in fields(kind):
        words = meanings[field.name]
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default, help=words)
    parser.add_argument("--num-workers", type=int, default=1, help="processes; the examples are the same")
    given = vars(parser.parse_args())
    out, workers = given.pop("out"), max(1, given.pop("num_workers"))
    counts = {split: given.pop(split) for split in SPLITS}
    try:
        print(build(kind, given, "the command line").write(out, counts, workers))
    except datasets.exceptions.DatasetGenerationError as error:
        sys.exit(f"error: {error.__cause__ or error}")
    except ValueError as error:
        sys.exit(f"error: {error}")
