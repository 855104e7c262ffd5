"""Pictures that `precompute` encodes, in parts that are read, and made again, one by one: rows of a data set or files.

Rows are dealt to parts by their content (file name, size, ends of the file, other columns), and the key of a part is a
hash of them all, of the times of their files and of embedded bytes: where one is removed, added or changed, its part
alone is made again. Local tar files, and tar and
parquet files of the Hub, are read from their beginning to their end, and nothing is copied: each is a part, whose key
is a hash of its name and of what changes with its content.
"""

import hashlib
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow.compute as pc
from huggingface_hub import HfApi, HfFileSystem
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

from hf_ext.data.bad_examples import decode_row, find_example_file, find_row_file, name_bad, read_example
from hf_ext.data.builders import read_tar
from hf_ext.data.camera_pictures import IMAGE_SUFFIXES
from hf_ext.data.files import UNUSABLE, count_examples, find_tars
from hf_ext.data.opening import find_files, open_source
from hf_ext.data.source import DataSource
from hf_ext.distributed import Ranks
from hf_ext.training.data import list_steps

from ..errors import DataError

# Bytes of the beginning, and of the end, of a file that its hash takes.
_ENDS = 4096
# Beginnings of BMP, PNM and TIFF, which may be without compression: edited ones have the same size and ends.
_PLAIN = (b"BM", b"P4", b"P5", b"P6", b"P7", b"II", b"MM")
# Addresses of files of the Hub, as `datasets` writes them, and how many are looked up at once.
_HUB, _LOOKED_UP = "hf://datasets/", 500
# The number of an example, and what reads it: the hash that place and mirroring follow from, and all columns.
Example = tuple[int, Callable[[], tuple[str, dict[str, Any]]]]
# Of one in the share of a process the part too, and what reads all columns.
Share = tuple[tuple[int, int], Callable[[], dict[str, Any]]]


class Rows:
    """Rows of a data set, which are read by number."""

    def __init__(self, data: datasets.Dataset):
        # Where a tar file lay when it was read is no property of the picture.
        self.data = data = data.remove_columns([name for name in data.column_names if name == "__url__"])
        self.features = data.features
        self.count: int | None = len(data)

    def count_parts(self, size: int) -> int:
        return -(-len(self.data) // size)

    def deal(self, parts: int, image_column: str) -> None:
        self.digests = hash_rows(self.data, image_column)
        self.parts: list[list[int]] = [[] for _ in range(parts)]
        for number, digest in enumerate(self.digests):
            self.parts[int(digest[:15], 16) % parts].append(number)
        keys = ["".join(self.digests[number] for number in part) for part in self.parts]
        self.names = [f"{place:05d}-of-{parts:05d}-{_short_hash(key)}" for place, key in enumerate(keys)]
        self.weights = [len(part) for part in self.parts]

    def read(self, part: int) -> Iterator[Example]:
        for number in self.parts[part]:
            yield number, partial(self._load, number)

    def _load(self, number: int) -> tuple[str, dict[str, Any]]:
        return self.digests[number], read_example(self.data, number)

    def share(self, ranks: Ranks, image_column: str) -> Iterator[Share]:
        for number in ranks.share([*range(len(self.data))]):
            yield (0, number), partial(read_example, self.data, number)

    def find_file(self, number: int) -> str:
        return find_example_file(self.data, number)


class Streams:
    """Tar files as webdataset has them, here or on the Hub, and parquet files of the Hub."""

    def __init__(self, stream: datasets.IterableDataset, files: list[str]):
        self.stream = stream
        self.files = files
        # As in `Rows`.
        kinds = {name: kind for name, kind in (stream.features or {}).items() if name != "__url__"}
        self.features = datasets.Features(kinds)
        self.unread = dict[int, str]()
        if "tar_paths" in (step := [*list_steps(stream)][-1]).kwargs:
            step.generate_examples_fn = partial(self._generate, step.generate_examples_fn)
        # To count those of the Hub, they would have to be read.
        is_here = not files[0].startswith(_HUB)
        self.count = sum(count_examples(Path(file)) for file in files) if is_here else None

    def _generate(self, read: Any, tar_paths: list[str], tar_iterators: list[Any]) -> Iterator[tuple[int, Any]]:
        """The examples of tar files, each read alone: of one that cannot be read the name, and the reason aside."""
        features = read.__self__.info.features
        for path, members in zip(tar_paths, tar_iterators, strict=True):
            # Read before: an error of the tar file itself is none of an example.
            for number, (key, files) in enumerate(read_tar(members)):
                try:
                    ((_, row),) = read(tar_paths=[path], tar_iterators=[files])
                    # Columns are the endings of the first examples; a picture may have another.
                    others = [name for name in row.keys() - features if f".{name.lower()}" in IMAGE_SUFFIXES]
                    if row[self.image_column] is None and len(others) == 1:
                        row[self.image_column] = {"path": f"{key}.{others[0]}", "bytes": row.pop(others[0])}
                    features.encode_example(row)
                except Exception as error:
                    self.unread[number] = f"{type(error).__name__}: {error}"
                    row = {**dict.fromkeys(features), "__key__": key, "__url__": path}
                yield number, row

    def count_parts(self, size: int) -> int:
        return len(self.files)

    def deal(self, parts: int, image_column: str) -> None:
        """Names the files, each by the numbers in its name, and by what changes when it is written anew."""
        self.image_column, seen, found = image_column, Counter[str](), _look_up(self.files)
        self.weights = [size for size, _ in found]
        self.names: list[str] = []
        for file, (size, version) in zip(self.files, found, strict=True):
            about = f"{Path(file).name} {size} {version}"
            seen[about] += 1
            # Words such as `test` would be the name of a split.
            hashed = _short_hash(f"{about} {seen[about]}")
            self.names.append("-".join([*re.findall(r"\d+", Path(file).stem), hashed]))

    def read(self, part: int) -> Iterator[Example]:
        """The examples of a file, in their order."""
        self.places = dict[int, str]()
        self.unread.clear()
        stream = self.stream.shard(num_shards=len(self.files), index=part).decode(False)
        try:
            for number, row in enumerate(stream):
                row.pop("__url__", None)
                inner = find_row_file(row) or row.get("__key__") or f"row {number}"
                self.places[number] = f"{Path(self.files[part]).name}::{inner}"
                yield number, partial(self._decode, row, self.unread.get(number))
        except (tarfile.TarError, *UNUSABLE) as error:
            raise DataError(f"{self.files[part]} cannot be read beyond example {len(self.places)}: {error}") from error

    def share(self, ranks: Ranks, image_column: str) -> Iterator[Share]:
        self.image_column = image_column
        for part in ranks.share([*range(len(self.files))]):
            for number, load in self.read(part):
                yield (part, number), partial(lambda read: read()[1], load)

    def _decode(self, row: dict[str, Any], problem: str | None) -> tuple[str, dict[str, Any]]:
        if problem is not None:
            raise DataError(problem)
        picture = row[self.image_column] or {"path": None, "bytes": None}
        content = picture["bytes"] or b""
        others = {name: value for name, value in row.items() if name != self.image_column}
        digest = _hash(picture["path"], len(content), content[:_ENDS], content[-_ENDS:], others)
        return digest, decode_row(self.features, row)

    def find_file(self, number: int) -> str:
        """The file, and the name in it, of an example of the part that is being read."""
        return self.places[number]


def name_unusable(source: Rows | Streams, number: int, error: Exception) -> dict[str, str]:
    """The line in the list of bad examples; what is not the picture's fault is raised: the call may go on later."""
    if isinstance(error, HfHubHTTPError) and not isinstance(error, EntryNotFoundError):
        raise error
    return name_bad(str(number), source.find_file(number), error.__cause__ or error)


def open_pictures(source: DataSource) -> Rows | Streams:
    """Opens pictures: files that can be streamed as they are, everything else as a data set that is read by number."""
    found = [] if source.parts else find_files(source.path)
    # A slice, and a part that is held out, are chosen by number.
    by_number = source.parts or "[" in source.split or source.hold_out or (found and not find_tars(found))
    try:
        stream: Any = None if by_number else open_source(replace(source, streaming=True))
    except DataError:
        if found:
            raise
        # What cannot be streamed can be copied, or is refused again.
        stream = None
    options = {} if stream is None else getattr([*list_steps(stream)][-1], "kwargs", {})
    files = options.get("tar_paths") or ([] if found else options.get("files")) or []
    # Of a folder of pictures they are no names.
    names = [name for name in files if isinstance(name, str) and name.endswith((".tar", ".parquet"))]
    fits = bool(names) and (found or all(name.startswith(_HUB) for name in names))
    if fits and len(names) == len(files) == stream.num_shards:
        return Streams(stream, files)
    return Rows(open_source(source))


def _look_up(files: list[str]) -> list[tuple[int, str]]:
    """The size of each file in bytes, and what changes when it is written anew: its time, or its hash on the Hub."""
    if not files[0].startswith(_HUB):
        return [(about.st_size, str(about.st_mtime_ns)) for about in map(os.stat, files)]
    places: list[Any] = [HfFileSystem().resolve_path(file) for file in files]
    of, paths, known = places[0], [place.path_in_repo for place in places], dict[str, Any]()
    for start in range(0, len(paths), _LOOKED_UP):
        asked = paths[start : start + _LOOKED_UP]
        found = HfApi().get_paths_info(of.repo_id, asked, revision=of.revision, repo_type=of.repo_type)
        known |= {about.path: about for about in found}
    return [(known[path].size, known[path].blob_id) for path in paths]


def hash_rows(data: datasets.Dataset, image_column: str) -> list[str]:
    """A hash of each row, of what can be read without decoding; equal rows are told apart by a count. After it stands
    what else changes with the content, which moves no picture to another part, place or mirroring."""
    found: list[str] = []
    seen: Counter[str] = Counter()
    table = data.with_format("arrow")
    for start in range(0, len(data), 1000):
        rows = table[start : start + 1000]
        pictures = rows[image_column].combine_chunks()
        paths, contents = (pc.struct_field(pictures, name) for name in ("path", "bytes"))
        sizes = pc.binary_length(contents).to_pylist()
        others = rows.drop_columns([image_column]).to_pylist()
        heads, tails = (pc.binary_slice(contents, *ends).to_pylist() for ends in ((0, _ENDS), (-_ENDS,)))
        for path, content, size, head, tail, other in zip(
            paths.to_pylist(), contents, sizes, heads, tails, others, strict=True
        ):
            version = ""
            if size is not None and head.startswith(_PLAIN):
                version = hashlib.sha256(content.as_buffer()).hexdigest()
            if size is None and path and os.path.isfile(path):
                size = os.path.getsize(path)
                with open(path, "rb") as file:
                    head = file.read(_ENDS)
                    file.seek(max(0, size - _ENDS))
                    tail = file.read()
                    file.seek(0)
                    version = hashlib.file_digest(file, "sha256").hexdigest() if head.startswith(_PLAIN) else ""
            if path and "::" in path:
                # Of an archive, that is not opened for each: another one is another picture.
                archive = os.stat(path.rpartition("::")[2])
                size = f"{path.partition('::')[0]} {archive.st_size} {archive.st_mtime_ns}"
            digest = _hash(path, size, head, tail, other)
            seen[digest] += 1
            found.append(f"{digest}{seen[digest] if seen[digest] > 1 else ''}{version and ' ' + version}")
    return found


def _hash(path: str | None, size: Any, head: bytes | None, tail: bytes | None, other: dict[str, Any]) -> str:
    about = json.dumps([os.path.basename(path or ""), size, other], default=repr, sort_keys=True)
    return hashlib.sha256(about.encode() + (head or b"") + (tail or b"")).hexdigest()


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
