"""Tar files as webdataset has them, counted and written: the files of an example are neighbours of one name.

Of a row of latents, what is bytes (`latent`, `latent_spread`, states of texts) is a file of its column's name, and
everything else is in one of JSON.
"""

import io
import itertools
import json
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from datasets.packaged_modules.webdataset.webdataset import base_plus_ext

from hf_ext.data.opening import find_files

from ..errors import DataError

# What the name of a column of lists of bytes gets, which one file holds, for their sizes.
SIZES = "_sizes"


def find_tars(path: Any) -> tuple[bool, list[Path]]:
    """True for a path or a pattern of something here, and the tar files of it."""
    found = [Path(file) for file in find_files(path)]
    # The first files are enough for a folder of a million pictures.
    looked_at = itertools.islice(found[0].rglob("*"), 10_000) if len(found) == 1 and found[0].is_dir() else found
    return bool(found), sorted(file for file in looked_at if file.suffix == ".tar")


def refuse_cut_tars(files: Iterable[Path]) -> None:
    """Names the first tar file that is not whole."""
    for file in files:
        count_examples(file)


def count_examples(file: Path) -> int:
    """The number of examples of a tar file, from its headers alone."""
    try:
        with tarfile.open(file) as tar, file.open("rb") as whole:
            names = [member.name for member in tar if member.isreg()]
            # Two blocks of zeros end a tar file; `tarfile` takes one that is cut between examples for a whole one.
            whole.seek(-2 * tarfile.BLOCKSIZE, os.SEEK_END)
            if any(whole.read()):
                raise tarfile.ReadError("its end is missing")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{file} is no whole tar file ({error}): fetch or write it again.") from error
    # As `datasets` reads them: neighbours of one name are an example, hidden files none.
    known = [name for name in names if not os.path.basename(name).startswith((".", "__"))]
    keys = filter(None, (base_plus_ext(name)[0] for name in known))
    return sum(1 for _ in itertools.groupby(keys))


def write_tar(file: IO[bytes], examples: Iterable[tuple[str, dict[str, bytes]]]) -> None:
    """Writes examples, each a name and the content of its files by their endings: equal ones make equal tar files."""
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, parts in examples:
            for ending, content in parts.items():
                about = tarfile.TarInfo(f"{name}.{ending}")
                about.size = len(content)
                tar.addfile(about, io.BytesIO(content))


def pack_row(row: dict[str, Any], binary: Iterable[str]) -> dict[str, bytes]:
    """The files of a row of latents; the columns `binary` have files in all rows, as readers expect."""
    told, parts = {name: value for name, value in row.items() if name not in binary}, dict[str, bytes]()
    for name in binary:
        value = row[name] or b""
        if isinstance(value, list):
            told[f"{name}{SIZES}"] = [len(part) for part in value]
        parts[name] = b"".join(value) if isinstance(value, list) else value
    return {**parts, "json": json.dumps(told, ensure_ascii=False, default=_plain).encode()}


def _plain(value: Any) -> Any:
    """Arrays as lists, dates as texts."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def unpack_row(row: dict[str, Any]) -> dict[str, Any]:
    """The columns that such a row was made of; any other row as it is."""
    told = row.get("json")
    if not isinstance(told, dict) or "latent_shape" not in told:
        return row
    found = {**row, **told}
    for name in (name for name in row if f"{name}{SIZES}" in told):
        content = io.BytesIO(row[name])
        found[name] = [content.read(size) for size in told[f"{name}{SIZES}"]]
    return found
