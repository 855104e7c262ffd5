"""Local tar files as webdataset has them: found, counted, and refused by name where their end is missing."""

import itertools
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path

from datasets.packaged_modules.webdataset.webdataset import base_plus_ext

from ..errors import DataError
from .walking import list_files

# Two blocks of zeros end a tar file.
_END = bytes(2 * tarfile.BLOCKSIZE)


def find_tars(found: list[str]) -> list[Path]:
    """Tar files among files, or in a folder; the first files are enough for a folder of a million pictures."""
    return sorted(file for file in itertools.islice(list_files(*found), 10_000) if file.suffix.lower() == ".tar")


def refuse_cut_tars(files: Iterable[Path]) -> None:
    """
    Raises a DataError that names the first file without its end: `datasets` names none of several, and takes one that
    is cut between two examples for a whole one.
    """
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(tarfile.BLOCKSIZE)
            file.seek(max(0, size - len(_END)))
            # Of a compressed one its own end says whether it is whole.
            if not start or (start[257:262] == b"ustar" and file.read() != _END):
                raise DataError(f"{path} is no whole tar file, its end is missing: fetch or write it again.")


def count_examples(file: Path) -> int:
    """The number of examples of a tar file, from its headers alone."""
    try:
        with tarfile.open(file) as tar:
            names = [member.name for member in tar if member.isreg()]
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{file} is no whole tar file ({error}): fetch or write it again.") from error
    # As `datasets` reads them: neighbours of one name are an example, hidden files none.
    known = [name for name in names if not os.path.basename(name).startswith((".", "__"))]
    keys = filter(None, (base_plus_ext(name)[0] for name in known))
    return sum(1 for _ in itertools.groupby(keys))
