"""Pictures that `precompute` encodes, in parts that are read, and made again, one by one: rows of a data set or tars.

Rows are dealt to parts by their content (file name, size, ends of the file, other columns), and the key of a part is a
hash of them all: where one is removed, added or changed, its part alone is made again. Tar files are read from their
beginning to their end, and nothing is copied: each is a part, whose key is a hash of name, size and time of the file.
"""

import hashlib
import itertools
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow.compute as pc
from datasets.packaged_modules.webdataset.webdataset import base_plus_ext

from hf_ext.data.opening import find_files, open_source
from hf_ext.data.source import DataSource
from hf_ext.training.bad_examples import UNUSABLE, decode_row, find_example_file, find_row_file, read_example

from ..errors import DataError

# Bytes of the beginning, and of the end, of a file that its hash takes.
_ENDS = 4096


@dataclass
class Example:
    """A picture with its other columns, not read yet; its place and mirroring follow from the hash."""

    number: int
    digest: str
    load: Callable[[], dict[str, Any]]


class Rows:
    """Rows of a data set, which are read by number."""

    def __init__(self, data: datasets.Dataset):
        self.data = data
        self.features = data.features
        self.count = len(data)

    def deal(self, parts: int, image_column: str) -> None:
        """Deals the rows to parts."""
        self.digests = hash_rows(self.data, image_column)
        self.parts: list[list[int]] = [[] for _ in range(parts)]
        for number, digest in enumerate(self.digests):
            self.parts[int(digest[:15], 16) % parts].append(number)
        keys = ["".join(self.digests[number] for number in part) for part in self.parts]
        self.names = [f"{place:05d}-of-{parts:05d}-{_short_hash(key)}" for place, key in enumerate(keys)]
        self.sizes = [len(part) for part in self.parts]

    def read(self, part: int) -> Iterator[Example]:
        """The examples of a part."""
        for number in self.parts[part]:
            yield Example(number, self.digests[number], partial(read_example, self.data, number))

    def find_file(self, number: int) -> str:
        """The file of an example's picture."""
        return find_example_file(self.data, number)


class Tars:
    """Tar files as webdataset has them."""

    def __init__(self, stream: datasets.IterableDataset, files: list[Path]):
        self.stream = stream
        self.files = files
        # Where the file lay when it was read is no property of the picture.
        kinds = {name: kind for name, kind in (stream.features or {}).items() if name != "__url__"}
        self.features = datasets.Features(kinds)
        self.sizes = [_count_examples(file) for file in files]
        self.count = sum(self.sizes)

    def deal(self, parts: int, image_column: str) -> None:
        """Names the files, each by the numbers in its name, and by what changes when it is written anew."""
        self.image_column, seen = image_column, Counter[str]()
        self.names: list[str] = []
        for file in self.files:
            about = f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}"
            seen[about] += 1
            # Words such as `test` would be the name of a split.
            self.names.append("-".join([*re.findall(r"\d+", file.stem), _short_hash(f"{about} {seen[about]}")]))

    def read(self, part: int) -> Iterator[Example]:
        """The examples of a file, in their order."""
        first, self.places = sum(self.sizes[:part]), dict[int, str]()
        stream = self.stream.shard(num_shards=len(self.files), index=part).decode(False)
        try:
            for number, row in enumerate(stream, first):
                row.pop("__url__", None)
                self.places[number] = f"{self.files[part].name}::{find_row_file(row) or row['__key__']}"
                picture = row[self.image_column] or {"path": None, "bytes": None}
                content = picture["bytes"] or b""
                others = {name: value for name, value in row.items() if name != self.image_column}
                digest = _hash(picture["path"], len(content), content[:_ENDS], content[-_ENDS:], others)
                yield Example(number, digest, partial(decode_row, self.features, row))
        except (tarfile.TarError, *UNUSABLE) as error:
            raise DataError(f"{self.files[part]} cannot be read beyond example {len(self.places)}: {error}") from error

    def find_file(self, number: int) -> str:
        """The tar file and the name in it of an example of the part that is being read."""
        return self.places[number]


def open_pictures(source: DataSource) -> Rows | Tars:
    """Opens pictures: local tar files as they are, everything else as a data set that is read by number."""
    found = [] if source.parts else [Path(file) for file in find_files(source.path)]
    # The first files are enough for a folder of a million pictures.
    looked_at = itertools.islice(found[0].rglob("*"), 10_000) if len(found) == 1 and found[0].is_dir() else found
    # A slice, and a part that is held out, are chosen by number.
    by_number = "[" in source.split or source.hold_out
    if not by_number and any(file.suffix == ".tar" for file in looked_at):
        stream: Any = open_source(replace(source, streaming=True))
        # The files of the split, as `datasets` found them.
        step = stream._ex_iterable
        while hasattr(step, "ex_iterable"):
            step = step.ex_iterable
        if files := [Path(file) for file in getattr(step, "kwargs", {}).get("tar_paths", [])]:
            return Tars(stream, files)
    return Rows(open_source(source))


def _count_examples(file: Path) -> int:
    """The number of examples of a tar file, from its headers alone."""
    try:
        with tarfile.open(file) as tar:
            names = [member.name for member in tar if member.isreg()]
        if file.stat().st_size % tarfile.BLOCKSIZE:
            raise tarfile.ReadError("its end is missing")
    except tarfile.TarError as error:
        raise DataError(f"{file} is no whole tar file ({error}): fetch or write it again.") from error
    # As `datasets` reads them: neighbours of one name are an example, hidden files none.
    known = [name for name in names if not os.path.basename(name).startswith((".", "__"))]
    keys = filter(None, (base_plus_ext(name)[0] for name in known))
    return sum(1 for _ in itertools.groupby(keys))


def hash_rows(data: datasets.Dataset, image_column: str) -> list[str]:
    """A hash of each row, of what can be read without decoding; equal rows are told apart by a count."""
    found: list[str] = []
    seen: Counter[str] = Counter()
    table = data.with_format("arrow")
    for start in range(0, len(data), 1000):
        rows = table[start : start + 1000]
        pictures = rows[image_column].combine_chunks()
        paths, contents = (pc.struct_field(pictures, name) for name in ("path", "bytes"))
        sizes = pc.binary_length(contents).to_pylist()
        ends = (pc.binary_slice(contents, 0, _ENDS), pc.binary_slice(contents, -_ENDS))
        others = rows.drop_columns([image_column]).to_pylist()
        heads, tails = (part.to_pylist() for part in ends)
        for path, size, head, tail, other in zip(paths.to_pylist(), sizes, heads, tails, others, strict=True):
            if size is None and path and os.path.isfile(path):
                size, head, tail = _read_ends(path)
            if path and "::" in path:
                # Of an archive, that is not opened for each: another one is another picture.
                archive = os.stat(path.rpartition("::")[2])
                size = f"{path.partition('::')[0]} {archive.st_size} {archive.st_mtime_ns}"
            digest = _hash(path, size, head, tail, other)
            seen[digest] += 1
            found.append(f"{digest}{seen[digest]}" if seen[digest] > 1 else digest)
    return found


def _hash(path: str | None, size: Any, head: bytes | None, tail: bytes | None, other: dict[str, Any]) -> str:
    about = json.dumps([os.path.basename(path or ""), size, other], default=repr, sort_keys=True)
    return hashlib.sha256(about.encode() + (head or b"") + (tail or b"")).hexdigest()


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _read_ends(path: str) -> tuple[int, bytes, bytes]:
    """Size, first and last bytes of a file: an exchanged picture without compression has the same size."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(_ENDS)
        file.seek(max(0, size - _ENDS))
        return size, head, file.read()
