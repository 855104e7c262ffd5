"""Data source section of a recipe."""

import math
from dataclasses import dataclass, fields
from pathlib import Path

from huggingface_hub.dataclasses import strict

from ..settings import build


@strict
@dataclass
class DataSource:
    """
    Source of examples: anything that `datasets.load_dataset` reads, or a folder of paired images.

    Args:
        path (`str` or `list`):
            A local folder (images, sound files, parquet, webdataset, … as `datasets` infers it), a folder with `lq/`
            and `hq/` sub-folders of equally named images, a data file (`.parquet`, `.jsonl`, `.csv`, `.txt`, `.tar`,
            …, also compressed; `.npy` or `.npz`, arrays whose first axis is that of the examples), a pattern such as
            `shards/*.jsonl.gz`, or a Hub id, optionally `org/name@revision`.
            Or a list of these, each a path or a mapping of these keys and `weight`; common columns are kept.
        name (`str`, *optional*): Configuration of a data set that has several.
        split (`str`, defaults to `"train"`): Split, with slices as in `"train[:10%]"` for map-style data.
        rename_columns (`dict[str, str]`, *optional*):
            New names of columns, so that training, evaluation and the parts of a list agree: `{png: image}`.
        pairs (`list[str]`, *optional*):
            Sub-folders of inputs and targets, if they are not called `lq` and `hq`: `[noisy, clean]`.
        rows (`str`, defaults to `"examples"`):
            Meaning of a row: an example, one of the `"positions"` of a sequence, or one of several `"series"`. With
            positions, each CSV, TSV, parquet or NumPy file is one example whose columns are lists; its folder (column
            `label`) or the folder's `metadata.csv` (with `file_name`) names its class, and `split: train[:80%]` of a
            single long file is its first part. With series, the numbers of a row become the list `values`, and the
            column `label` is the class.
        time (`str`, *optional*): With `rows: positions`, the column that orders the steps.
        series (`str`, *optional*):
            With `rows: positions`, the column that identifies the series of a row; each series is an example.
        hold_out (`float`, defaults to 0.0):
            Share of the examples that is held out as `split: validation`, for data without such a split; `split:
            train` is the rest. The content of an example decides, with the same share of each class. Equal examples,
            and those of one speaker, patient or other group, stay together. Where a column `split` names splits, it
            decides: its tests are in neither part, and are read by `split: test`.
        hold_out_seed (`int`, defaults to 0): Seed of the choice.
        streaming (`bool`, defaults to `False`): Read the data as a stream, without an index.
        shuffle_buffer (`int`, defaults to 0):
            Number of examples in the shuffle buffer of a stream. 0 shuffles only the order of the shards, and resumes
            at once. A buffer also resumes exactly, after reading the epoch again up to its last position.
    """

    path: str | list
    name: str | None = None
    split: str = "train"
    rename_columns: dict | None = None
    pairs: list[str] | None = None
    rows: str = "examples"
    time: str | None = None
    series: str | None = None
    hold_out: float = 0.0
    hold_out_seed: int = 0
    streaming: bool = False
    shuffle_buffer: int = 0

    @property
    def parts(self) -> "list[SourcePart]":
        """The entries of a list of sources; none of a single one."""
        if not isinstance(self.path, list):
            return []
        own = ("path", "name", "shuffle_buffer")
        shared = {item.name: getattr(self, item.name) for item in fields(DataSource) if item.name not in own}
        parts = (part if isinstance(part, dict) else {"path": part} for part in self.path)
        return [build(SourcePart, {**shared, **part}, f"path[{place}]") for place, part in enumerate(parts)]

    def validate_path(self) -> None:
        if not self.path:
            raise ValueError("path is empty: give a folder, a data file, a Hub data set id, or a list of them.")
        if self.path == "None" and not Path("None").exists():
            told = "YAML's word for nothing is null, as in data.eval: null"
            raise ValueError(f"path is the text 'None': give a folder, a data file or a Hub data set id; {told}.")
        for part in self.parts:
            if part.shuffle_buffer or part.streaming != self.streaming:
                raise ValueError("streaming and shuffle_buffer are set for the list of sources, not for its parts.")

    def validate_pairs(self) -> None:
        if self.pairs is not None and len(self.pairs) != 2:
            raise ValueError(f"pairs must contain the names of two folders, such as [noisy, clean]; got {self.pairs}.")

    def validate_rows(self) -> None:
        if self.rows not in ("examples", "positions", "series"):
            raise ValueError(f"rows is {self.rows!r}; allowed: 'examples', 'positions', 'series'.")
        if self.rows != "examples" and self.streaming:
            raise ValueError(f"rows: {self.rows} reads whole files: leave out streaming.")
        if self.rows != "positions" and (self.time or self.series):
            raise ValueError("time and series are columns of tables whose rows are positions: set rows: positions.")

    def validate_hold_out(self) -> None:
        if not 0 <= self.hold_out < 1:
            raise ValueError(f"hold_out must be a share from 0 to below 1, got {self.hold_out}.")
        if self.hold_out and self.split not in ("train", "validation", "test"):
            told = "with hold_out it is 'validation', 'test' of a column split, or 'train' for the rest"
            raise ValueError(f"split is {self.split!r}; {told}.")
        if self.hold_out and self.streaming:
            raise ValueError("hold_out needs all examples at once: leave out streaming.")

    def validate_shuffle_buffer(self) -> None:
        if self.shuffle_buffer < 0 or (self.shuffle_buffer and not self.streaming):
            told = f"{self.shuffle_buffer} with streaming: {str(self.streaming).lower()}"
            raise ValueError(f"shuffle_buffer must be 0 or, with streaming: true, a number of examples; got {told}.")

    def column_of(self, name: str) -> str:
        """The column that has a name only after `rename_columns`."""
        return next((old for old, new in self.new_names.items() if new == name), name)

    @property
    def new_names(self) -> dict[str, str]:
        """`rename_columns`, whose keys YAML may have read as numbers."""
        return {str(old): new for old, new in (self.rename_columns or {}).items()}

    def shares_with(self, other: "DataSource") -> bool:
        """True if another source holds the same examples, as far as its words say."""
        if (self.path, self.name) != (other.path, other.name):
            return False
        held_out = (self.hold_out, self.hold_out_seed) == (other.hold_out, other.hold_out_seed)
        return self.split == other.split if held_out else "train" in (self.split, other.split)


@strict
@dataclass
class SourcePart(DataSource):
    """
    One of several sources in a list.

    Args:
        weight (`float`, *optional*):
            Share of the examples relative to the other parts, 1 if only other parts have a weight. Without any weight
            the parts are concatenated.
    """

    weight: float | None = None

    def validate_weight(self) -> None:
        if self.weight is not None and not 0 < self.weight < math.inf:
            raise ValueError(f"weight must be more than 0, got {self.weight}.")
