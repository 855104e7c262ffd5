"""Tar files as webdataset has them, written: the files of an example are neighbours of one name.

Of a row of latents, what is bytes (`latent`, `latent_spread`, states of texts) is a file of its column's name, and
everything else is in one of JSON.
"""

import io
import json
import tarfile
from collections.abc import Iterable
from typing import IO, Any

# What the name of a column of lists of bytes gets, which one file holds, for their sizes.
SIZES = "_sizes"


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
    # Arrays as lists, dates as texts.
    plain = json.dumps(told, ensure_ascii=False, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x))
    return {**parts, "json": plain.encode()}


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
