"""Folders of made examples that `datasets` reads: a parquet file for each split, and a README."""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from tqdm import tqdm

from hf_ext.files import require_new, whole_folder

SPLITS = ("train", "validation", "test")
_ROWS_AT_ONCE = 1000


def write_made_data(
    out: str | Path,
    counts: dict[str, int],
    examples: Callable[[str], Iterator[tuple[Any, ...]]],
    schema: pyarrow.Schema,
    readme: str,
    progress: bool = True,
) -> Path:
    """Writes the first examples of each split, tuples in the order of the schema, and a README; all or nothing."""
    out = Path(out)
    check_made_data(out, counts)
    sizes = ", ".join(f"{count:,} {split}" for split, count in counts.items())
    with whole_folder(out, replace=False) as folder:
        with tqdm(total=sum(counts.values()), unit=" examples", disable=not progress) as bar:
            for split, count in counts.items():
                _write_split(folder / f"{split}.parquet", examples(split), count, schema, bar)
        (folder / "README.md").write_text(readme.format(sizes=sizes), encoding="utf-8")
    return out


def check_made_data(out: Path, counts: dict[str, int]) -> None:
    """Check what is to be written before anything is begun."""
    require_new(out)
    if not counts or any(split not in SPLITS or count < 1 for split, count in counts.items()):
        raise ValueError(
            f"every split of {', '.join(SPLITS)} needs at least 1 example where it is given, got {counts}."
        )


def _write_split(
    path: Path, examples: Iterator[tuple[Any, ...]], count: int, schema: pyarrow.Schema, bar: tqdm
) -> None:
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for start in range(0, count, _ROWS_AT_ONCE):
            rows = []
            for row in itertools.islice(examples, min(_ROWS_AT_ONCE, count - start)):
                rows.append(row)
                bar.update()
            columns = dict(zip(schema.names, zip(*rows, strict=True), strict=True))
            writer.write_table(pyarrow.table(columns, schema=schema))


def add_counts(parser: argparse.ArgumentParser, *counts: int) -> None:
    """The folder, and the number of examples of each split."""
    parser.add_argument("out", type=Path, help="a new folder")
    for split, count in zip(SPLITS, counts, strict=True):
        parser.add_argument(f"--{split}", type=int, default=count, help=f"examples; {count:,} when not given")


def run(main: Callable[[], Path]) -> None:
    """Ends a program with the folder that it wrote, or with one line that says what is wrong."""
    try:
        print(main())
    except ValueError as error:
        sys.exit(f"error: {error}")
