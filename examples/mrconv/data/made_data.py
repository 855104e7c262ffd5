"""Folders of made examples that `datasets` reads: a parquet file for each split, and a README."""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets

from hf_ext.files import require_new, whole_folder

SPLITS = ("train", "validation", "test")
# A function of an index and a split: the values of an example, in the order of the columns.
Example = Callable[[int, str], tuple[Any, ...]]


def write_made_data(
    out: str | Path,
    counts: dict[str, int],
    example: Example,
    features: datasets.Features,
    readme: str,
    num_workers: int = 1,
) -> Path:
    """Writes the first examples of each split and a README, all or nothing; any number of processes makes the same."""
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
            made = {"example": example, "split": split, "columns": tuple(features), "indices": list(range(count))}
            processes = num_workers if num_workers > 1 else None
            data = datasets.Dataset.from_generator(
                list_rows, features=features, cache_dir=cache, gen_kwargs=made, num_proc=processes, fingerprint=split
            )
            data.to_parquet(str(folder / f"{split}.parquet"))
        (folder / "README.md").write_text(readme.format(sizes=sizes), encoding="utf-8")
    return out


def list_rows(example: Example, split: str, columns: tuple[str, ...], indices: list[int]) -> Iterator[dict[str, Any]]:
    """Examples as rows."""
    for index in indices:
        yield dict(zip(columns, example(index, split), strict=True))


def add_counts(parser: argparse.ArgumentParser, *counts: int) -> None:
    """The folder, and the number of examples of each split."""
    parser.add_argument("out", type=Path, help="a new folder")
    for split, count in zip(SPLITS, counts, strict=True):
        parser.add_argument(f"--{split}", type=int, default=count, help=f"examples; {count:,} when not given")


def run(main: Callable[[], Path]) -> None:
    """Ends a program with the folder that it wrote, or with one line that says what is wrong."""
    try:
        print(main())
    except datasets.exceptions.DatasetGenerationError as error:
        sys.exit(f"error: {error.__cause__ or error}")
    except ValueError as error:
        sys.exit(f"error: {error}")
