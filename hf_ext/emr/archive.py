"""One file of an artifact: tar compressed with zstandard, the same bytes for the same folder.

The masks of sparse fine-tunes shrink several times, those of dense ones hardly (their bits are close to random), and
the weights of the unified model little. `tar --zstd -xf` reads the file too.
"""

from __future__ import annotations

import errno
import re
import shutil
import tarfile
from pathlib import Path
from types import ModuleType
from typing import IO, Any, cast

from ..extras import import_extra
from ..files import whole_file, whole_folder

_LEVELS = (1, 19)
_COPIED_AT_ONCE = 1 << 20
# What an archive may unpack to. Weights shrink by a third and masks at most a few times; a file of zeros shrinks some
# 30,000 times, which is how a small archive fills a disk. Below the free size nobody needs to be protected.
MAX_BYTES = 1_000_000_000_000
MAX_FILES = 10_000
MAX_RATIO = 100.0
_FREE_BYTES = 100_000_000
# Of the entries before a file that hold its long name; tarfile reads them into memory at once.
_MAX_NAME_BYTES = 65_536
# The longest header of a zstandard frame.
_FRAME_HEADER = 18
# A part of a path in an archive: nothing that some system reads as a root, a parent, a drive or a hidden file.
_PART = re.compile(r"(?!\.)[^\x00-\x1f\x7f/\\:]{1,255}")


def pack(folder: str | Path, archive: str | Path, *, level: int = 3, overwrite: bool = False) -> dict[str, Any]:
    """Writes an artifact into one file.

    Names, order, owners and times in the archive do not depend on the machine: the same folder gives the same
    bytes. A file that is a link, as in the cache of the Hub, is stored as what it points to.
    """
    zstandard = import_extra("zstandard")
    folder, archive = Path(folder), Path(archive)
    if not (folder / "emr.json").is_file():
        raise ValueError(f"{folder}: no emr.json in it, so it is no artifact of a merge; give the folder of one")
    if not _LEVELS[0] <= level <= _LEVELS[1]:
        raise ValueError(f"level must be from {_LEVELS[0]} to {_LEVELS[1]}, got {level}")
    if archive.exists() and not overwrite:
        raise FileExistsError(f"{archive} exists; choose another name, or overwrite it")
    entries = _entries(folder)
    with whole_file(archive) as target:
        # The bytes depend on the level only: with any number of threads above none they are the same.
        compressor = zstandard.ZstdCompressor(level=level, threads=-1, write_checksum=True)
        with (
            # The size is in the header of the frame, so that a file that was cut off is recognised.
            compressor.stream_writer(target, size=_length(entries), closefd=False) as stream,
            tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar,
        ):
            for entry in entries:
                with open(folder / entry.name, "rb") as file:
                    tar.addfile(entry, file)
    return {
        "path": str(archive),
        "files": len(entries),
        "bytes": sum(entry.size for entry in entries),
        "archive_bytes": archive.stat().st_size,
    }


def unpack(
    archive: str | Path,
    out: str | Path,
    *,
    max_bytes: int = MAX_BYTES,
    max_files: int = MAX_FILES,
    max_ratio: float = MAX_RATIO,
) -> Path:
    """Restores the folder from an archive.

    Only regular files with names inside the folder are taken: an archive with links, devices, absolute paths or
    `..` is refused, and nothing of it is left.
    """
    zstandard = import_extra("zstandard")
    archive, out = Path(archive), Path(out)
    if not archive.is_file():
        raise ValueError(f"{archive}: {'no regular file' if archive.exists() else 'no such file'}; give an archive")
    if out.exists():
        raise FileExistsError(f"{out} exists; choose another place")
    length = _require_length(archive, zstandard, max_bytes, max_ratio)
    with whole_folder(out) as folder:
        try:
            _extract_all(archive, folder, zstandard, length, max_files)
        except (zstandard.ZstdError, tarfile.TarError, EOFError) as error:
            raise ValueError(
                f"{archive}: not a complete archive of an artifact ({error}); fetch or pack it again"
            ) from error
        if not (folder / "emr.json").is_file():
            raise ValueError(f"{archive}: no emr.json in it, so it is no artifact of a merge, or it was cut off")
    return out


def _entries(folder: Path) -> list[tarfile.TarInfo]:
    """Every file of the folder but hidden ones, in order."""
    entries = []
    for path in sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).parts):
        parts = path.relative_to(folder).parts
        if any(part.startswith(".") for part in parts) or not path.is_file():
            continue
        entry = tarfile.TarInfo("/".join(parts))
        if not all(_PART.fullmatch(part) for part in parts):
            raise ValueError(f"{folder}: {entry.name!r} is a name that not every system can store; rename the file")
        entry.mode, entry.size = 0o644, path.stat().st_size
        entries.append(entry)
    return entries


def _length(entries: list[tarfile.TarInfo]) -> int:
    """Bytes of the tar file: headers, contents in whole blocks, the two empty blocks, all in whole records."""
    length = 2 * tarfile.BLOCKSIZE
    for entry in entries:
        length += len(entry.tobuf(tarfile.PAX_FORMAT)) + -(-entry.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    return -(-length // tarfile.RECORDSIZE) * tarfile.RECORDSIZE


class _CountingStream:
    """A stream that knows how many bytes were read from it, and ends with an error where there are too many."""

    def __init__(self, stream: IO[bytes], length: int) -> None:
        self.stream, self.count, self.length = stream, 0, length

    def read(self, size: int) -> bytes:
        data = self.stream.read(size)
        self.count += len(data)
        if self.count > self.length:
            raise EOFError(f"more than the {self.length:,} bytes that it says it has")
        return data


class _Entry(tarfile.TarInfo):
    """An entry whose name is not read into memory before its length is known."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Entry:
        entry = super().frombuf(buf, encoding, errors)
        holds_data = entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
        if not holds_data and entry.size > _MAX_NAME_BYTES:
            raise ValueError(
                f"an entry of type {entry.type!r} has {entry.size:,} bytes, at most {_MAX_NAME_BYTES:,} are allowed; "
                "do not trust this archive"
            )
        return entry


def _require_length(archive: Path, zstandard: ModuleType, max_bytes: int, max_ratio: float) -> int:
    """Bytes of the unpacked archive, as its header says; refuses one that would become larger than it may."""
    with open(archive, "rb") as source:
        try:
            length: int = zstandard.get_frame_parameters(source.read(_FRAME_HEADER)).content_size
        except zstandard.ZstdError as error:
            raise ValueError(
                f"{archive}: not a complete archive of an artifact ({error}); fetch or pack it again"
            ) from error
    if length == zstandard.CONTENTSIZE_UNKNOWN:
        raise ValueError(f"{archive}: it does not say how long it is; pack it again with hf-ext emr pack")
    size = archive.stat().st_size
    if length > max_bytes:
        raise ValueError(
            f"{archive}: {length:,} bytes would be unpacked, at most {max_bytes:,} are allowed. If you trust it, "
            "raise max_bytes (--max-bytes)"
        )
    if length > max(_FREE_BYTES, max_ratio * size):
        raise ValueError(
            f"{archive}: {size:,} bytes would become {length:,}, {length / size:,.0f} times as many; weights and "
            f"masks shrink less than {max_ratio:,.0f} times. If you trust it, raise max_ratio (--max-ratio)"
        )
    return length


def _extract_all(archive: Path, folder: Path, zstandard: ModuleType, length: int, max_files: int) -> None:
    if length > shutil.disk_usage(folder).free:
        raise OSError(errno.ENOSPC, f"{length:,} bytes are to be unpacked, and the disk has less", str(folder))
    with (
        open(archive, "rb") as source,
        zstandard.ZstdDecompressor().stream_reader(source, closefd=False) as decompressed,
    ):
        stream = _CountingStream(decompressed, length)
        with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r|", tarinfo=_Entry) as tar:
            for number, member in enumerate(tar):
                if number >= max_files:
                    raise ValueError(
                        f"{archive}: more than {max_files:,} files. If you trust it, raise max_files (--max-files)"
                    )
                _extract(tar, member, folder, archive)
        # To the end, where the checksum is.
        while stream.read(_COPIED_AT_ONCE):
            pass
    if stream.count != length:
        raise EOFError(f"{stream.count:,} of {length:,} bytes are there")


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, archive: Path) -> None:
    parts = member.name.split("/")
    # A sparse file has more bytes than the archive that holds it.
    if not member.isreg() or member.issparse() or not all(_PART.fullmatch(part) for part in parts):
        raise ValueError(
            f"{archive}: {member.name!r} is no regular file inside the folder; nothing was unpacked. Do not trust "
            "this archive"
        )
    target = folder.joinpath(*parts)
    target.parent.mkdir(parents=True, exist_ok=True)
    content: IO[bytes] | None = tar.extractfile(member)
    assert content is not None
    try:
        with open(target, "xb") as file:
            shutil.copyfileobj(content, file, _COPIED_AT_ONCE)
    except FileExistsError as error:
        raise ValueError(f"{archive}: {member.name!r} is in it twice; do not trust this archive") from error
