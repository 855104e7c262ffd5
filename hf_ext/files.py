"""Atomic writes of files and folders: they appear complete and on the disk, or not at all.

What is written goes to a hidden neighbour of its place, `.NAME.tmp-XXXXXXXX`, is flushed to the disk, and takes its
name in one step. A reader therefore sees what was there before or all of the new; a process that is killed leaves at
most a hidden neighbour, which nothing reads and nothing publishes.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from .errors import DataError, UsageError
from .system import sync_directory, sync_file

# Of linux/fcntl.h and linux/fs.h.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# Folder names of repositories in the cache of huggingface_hub.
_CACHED = ("models--", "datasets--", "spaces--")
# Limit for JSON files; reports of merges of many tensors are the largest.
MAX_JSON_BYTES = 100_000_000
# Marker in the names of unfinished files and folders.
_MARK = ".tmp-"


def neighbour(path: Path) -> Path:
    """A new hidden name beside a path. The name of the path is cut: file systems take 255 bytes."""
    return path.with_name(f".{path.name[:50]}{_MARK}{secrets.token_hex(4)}")


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str], mode: str = "wb", **options: Any) -> Iterator[IO[Any]]:
    """
    Opens a file that appears when the block ends without an error; its folder is made. What a link there leads to is
    replaced, and the link stays; a pipe or device is written into when the block ends.
    """
    if "b" not in mode:
        options.setdefault("encoding", "utf-8")
    if is_stream(path):
        with tempfile.TemporaryFile(mode.replace("w", "w+"), **options) as file:
            yield file
            file.flush()
            _pour(file.fileno(), path)
        return
    path = follow_file_link(Path(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = neighbour(path)
    try:
        with open(temporary, mode.replace("w", "x"), **options) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    finally:
        # Gone after the rename; after an error the part that was written.
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(path: str | os.PathLike[str], replace: bool = True) -> Iterator[Path]:
    """
    Gives a new folder to fill, which takes its place when the block ends without an error. Where it may not replace
    another one, it is a [`TakenError`] that the path exists, at the beginning or meanwhile.
    """
    path = follow_link(Path(path)) if replace else Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    recover_folder(path)
    if not replace:
        require_new(path)
    temporary = neighbour(path)
    temporary.mkdir()
    try:
        yield temporary
        open_to_readers(temporary)
        sync(temporary)
        if replace:
            replace_folder(temporary, path)
        else:
            require_new(path)
            try:
                # Safe too if something appears now: no system renames onto a file or a folder with content.
                os.rename(temporary, path)
            except OSError:
                require_new(path)
                raise
    finally:
        # Gone after the rename; after an error the part that was written.
        shutil.rmtree(temporary, ignore_errors=True)


def follow_link(path: Path) -> Path:
    """The path, or what a link or "." there leads to: that can be replaced in one step, and the link stays."""
    return path.resolve() if not path.name or (path.is_symlink() and path.exists()) else path


def follow_file_link(path: Path) -> Path:
    """The path, or what a link there leads to, be it new; not into the blobs of a cache, which nobody changes."""
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    # Folders of repositories hold the blobs, or lie beside those that all share.
    beside = (target.parents[1], *target.parents[1].glob("*--*")) if target.parent.name == "blobs" else ()
    return path if any(place.name.startswith(_CACHED) for place in beside) else target


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Tells a pipe, a device or our own standard output, which are written into; refuses disks and sockets."""
    if not os.path.exists(path):
        return False
    is_ours, mode = _own_stream(path) is not None, os.stat(path).st_mode
    if not is_ours and (stat.S_ISBLK(mode) or stat.S_ISSOCK(mode)):
        raise UsageError(f"{path} is a disk or a socket, not a file: give the name of a file or a pipe.")
    return is_ours or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _own_stream(path: str | os.PathLike[str]) -> int | None:
    """The number of our standard output or error, if this is what it goes to."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(number)):
                return number
    return None


def _pour(source: int, path: str | os.PathLike[str]) -> None:
    """Writes an open file into a pipe or device; into our own output after what was printed."""
    number = _own_stream(path)
    sys.stdout.flush()
    place = path if number is None else number
    with open(source, "rb", closefd=False) as content, open(place, "wb", closefd=number is None) as stream:
        content.seek(0)
        shutil.copyfileobj(content, stream)


def open_to_readers(folder: Path) -> None:
    """Gives the files of a new folder the mode that the user's umask gives, which the folder itself has."""
    # Some libraries write files that nobody else may read, such as safetensors; then a model in a folder of a group
    # could be opened by its maker alone. What is linked elsewhere too belongs to somebody else.
    wanted = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and wanted & ~found.st_mode:
            path.chmod(stat.S_IMODE(found.st_mode) | wanted)


def hash_file(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of what a file holds now."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_json(content: Any) -> str:
    """The SHA-256 of what JSON can hold, and of the text of anything else."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def write_json(path: str | os.PathLike[str], content: Any, indent: int | None = 2) -> None:
    """Writes what JSON can hold as a whole file that ends with a newline."""
    # Of a name that is not UTF-8 the replacement is the escape of JSON.
    with whole_file(path, "w", errors="backslashreplace") as file:
        json.dump(content, file, indent=indent, ensure_ascii=False)
        file.write("\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Reads a JSON file."""
    try:
        return json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error}): restore the file, or remove it.") from error


def read_json_object(path: str | os.PathLike[str], *, optional: bool = False) -> dict[str, Any]:
    """Reads a small file that must hold one JSON object; an optional one that is absent is an empty object."""
    path = Path(path)
    if optional and not path.is_file():
        return {}
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ValueError(f"{path}: {size:,} bytes, the limit is {MAX_JSON_BYTES:,}; check that it is the right file.")
    return parse_json_object(path.read_bytes(), str(path))


def parse_json_object(data: bytes | bytearray, name: str, error: type[ValueError] = ValueError) -> dict[str, Any]:
    """Parses bytes that must hold one JSON object in which no key comes twice."""
    repeated: list[str] = []

    def note_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(key for key, _ in pairs)
        repeated.extend(key for key, count in counts.items() if count > 1)
        return dict(pairs)

    try:
        value = json.loads(bytes(data).decode("utf-8"), object_pairs_hook=note_repeated)
    except (ValueError, RecursionError) as cause:
        raise error(f"{name}: not valid JSON ({cause}); fetch or save the file again.") from cause
    if repeated:
        raise error(f"{name}: the JSON repeats {repeated[:3]}; the file is malformed: fetch or save it again.")
    if not isinstance(value, dict):
        raise error(f"{name}: expected a JSON object, got {type(value).__name__}; fetch or save it again.")
    return value


def require_kinds(content: Any, kinds: Mapping[str, Any], path: Path, optional: bool = True) -> None:
    """Refuses a JSON object in which a value is of another kind than is read there; a truth is no number."""
    if not isinstance(content, dict):
        raise DataError(f"{path}: there must be an object with {', '.join(kinds)}, got {content!r:.80}")
    for key, kind in kinds.items():
        value = content.get(key)
        if not (optional and value is None) and (not isinstance(value, kind) or isinstance(value, bool)):
            wanted = {dict: "an object", str: "a text", list: "a list"}.get(kind, "a number")
            raise DataError(f"{path}: `{key}` must be {wanted}, got {value!r:.80}; correct the file or make it again")


def read_rows(path: Path, key: str, kind: type) -> list[dict[str, Any]]:
    """Rows of a JSON Lines file, each with a value of a kind; a last line that a crash cut off is left out."""
    content = path.read_bytes() if path.exists() else b""
    rows = []
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
            if type(row[key]) is not kind:
                raise TypeError
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise DataError(f"{path}: line {number} is not a row with {key!r}: remove the line.") from error
        rows.append(row)
    return rows


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes a JSON Lines file that is whole or absent."""
    with whole_file(path, "w") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def remove_leftovers(folder: Path) -> None:
    """Deletes unfinished files of killed writers in a folder without active writers."""
    for path in folder.glob(f".*{_MARK}????????"):
        remove(path)


def remove(path: Path) -> None:
    """Deletes a folder and all that is in it, a file or a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_leftovers_of(paths: Iterable[Path]) -> None:
    """Deletes what killed writers left of these files an hour ago or longer: what is younger may be in the making."""
    old = time.time() - 3600
    names: dict[Path, set[str]] = {}
    for path in paths:
        names.setdefault(path.parent, set()).add(f".{path.name[:50]}")
    for folder, wanted in names.items():
        for found in folder.glob(f".*{_MARK}????????"):
            if found.name.rpartition(_MARK)[0] not in wanted:
                continue
            with contextlib.suppress(OSError):
                if found.is_file() and found.stat().st_mtime < old:
                    found.unlink()


def sync(path: Path) -> None:
    """Waits until a file, or a folder and all that is in it, is on the disk."""
    for found in [*path.rglob("*"), path]:
        if found.is_dir():
            sync_directory(found)
        elif not found.is_symlink():
            sync_file(found)


def replace_folder(new: Path, out: Path) -> None:
    """Puts a finished folder in its place; an earlier one is deleted only after that."""
    # Linux exchanges two folders in one step: at every moment `out` is the whole old or the whole new folder.
    # Elsewhere there is a moment between two renames in which the old one is called `.NAME.old`. A process that is
    # killed in it leaves that name, and `recover_folder`, which the next writer calls first, takes it back.
    if not out.exists():
        os.replace(new, out)
    elif exchange_folders(new, out):
        shutil.rmtree(new)
    else:
        aside = out.with_name(f".{out.name}.old")
        os.replace(out, aside)
        try:
            os.replace(new, out)
        except OSError:
            os.replace(aside, out)
            raise
        shutil.rmtree(aside)


def check_places(results: Iterable[str | os.PathLike[str]], inputs: Iterable[Any] = ()) -> None:
    """Finds out before any work whether files can be written, and are no inputs. Nothing is left behind."""
    paths, given = [Path(result) for result in results], [os.path.realpath(place) for place in inputs if place]
    if closed := next((path for path in paths if is_stream(path) and not os.access(path, os.W_OK)), None):
        raise OSError(f"cannot write to {closed}: you may not; give another file.")
    if same := next((path for path in paths if os.path.realpath(path) in given), None):
        raise UsageError(f"{same} is an input too, and would be replaced by the result: give another file for that.")
    if taken := next((path for path in paths if path.is_dir()), None):
        raise UsageError(f"{taken} is a folder; give the name of a file.")
    for folder in sorted({follow_file_link(path).parent for path in paths if not is_stream(path)}):
        # The first that exists: what is below it will be made in it.
        place = next((parent for parent in (folder, *folder.parents) if os.path.lexists(parent)), Path())
        if not place.is_dir():
            raise OSError(f"cannot write to {folder}: {place} is not a folder.")
        try:
            with tempfile.TemporaryFile(dir=place, prefix=".hf-ext-"):
                pass
        except OSError as error:
            raise OSError(f"cannot write to {folder}: {error.strerror or error}.") from error


class TakenError(FileExistsError, ValueError):
    """Something is in the place where a file or a folder was to be written. `path` is the place."""

    def __init__(self, path: Path, text: str) -> None:
        super().__init__(text)
        self.path = path


def require_new(path: Path) -> None:
    """Refuses a path that is there, be it a link to nowhere."""
    if os.path.lexists(path):
        raise TakenError(path, f"{path} exists: give another folder, or remove it first.")


def require_free(
    out: Path, overwrite: bool = False, *, kind: str = "", is_kind: Callable[[Path], bool] | None = None
) -> None:
    """Refuses a folder that holds something, unless it may be overwritten and is of the kind that is written there."""
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        told = "exists and is not empty" if out.is_dir() else "is no folder" if out.exists() else "leads to nothing"
        raise TakenError(out, f"{out} {told}: choose another place, or remove it first.")
    if is_kind is not None and not is_kind(out):
        raise TakenError(out, f"{out} exists and is no {kind}, so it is not replaced: choose another place.")


def recover_folder(out: Path) -> None:
    """Finishes or takes back a [`replace_folder`] that was killed."""
    aside = out.with_name(f".{out.name}.old")
    if aside.is_dir() and not out.exists():
        os.replace(aside, out)
    elif aside.is_dir():
        shutil.rmtree(aside)


def exchange_folders(first: Path, second: Path) -> bool:
    """Exchanges two folders in one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    if rename is None:
        return False
    done: int = rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return done == 0


def lies_in_cache(folder: Path) -> bool:
    """True for a commit in the cache of huggingface_hub, or a folder in one, which nobody changes."""
    return bool(_find_cached(folder.resolve()))


def _find_cached(folder: Path) -> list[Path]:
    """The repositories in the cache of huggingface_hub in whose commits a folder lies."""
    commits = (place for place in (folder, *folder.parents) if place.parent.name == "snapshots")
    return [commit.parent.parent for commit in commits if commit.parent.parent.name.startswith(_CACHED)]


def stays_inside(folder: Path, path: Path) -> bool:
    """True for a path of a folder that really lies in it, and is not a link to somewhere else."""
    # The cache of huggingface_hub keeps the files of a repository in `models--org--name/blobs/`, or in a `blobs/` that
    # all repositories share; `models--org--name/snapshots/<commit>/` holds links to them. Such links stay inside,
    # however deep in the commit the folder lies. Everything that follows a path of a folder asks this function;
    # `emr_loader.py`, which travels alone, has a copy that is tested against the same cases.
    home, target = folder.resolve(), path.resolve()
    blobs = [place / "blobs" for repository in _find_cached(home) for place in (repository, repository.parent)]
    return any(target.is_relative_to(place) for place in (home, *blobs))


def same_bytes(first: Path, second: Path) -> bool:
    """True if two files have the same content."""
    return first.stat().st_size == second.stat().st_size and first.read_bytes() == second.read_bytes()


def link_file(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Gives a file, or a link as it is, another name; a copy where the file system has no such links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except (OSError, NotImplementedError):
        shutil.copy2(source, target, follow_symlinks=False)


def find_others(old: Path, new: Path, is_ours: Callable[[str], bool]) -> list[Path]:
    """Finds what a folder holds besides our own files (`is_ours`, by the path in it) and the one that is to replace it
    does not. What that has otherwise is refused: remove there first what is to give way."""
    others = []
    for found in sorted(old.rglob("*")):
        name, is_folder = found.relative_to(old).as_posix(), found.is_dir() and not found.is_symlink()
        target = new / name
        # other folders come with what is in them
        if is_ours(name) or (is_folder and (target.is_dir() or any(found.iterdir()))):
            continue
        if not os.path.lexists(target):
            others.append(found)
        elif not (found.is_file() and target.is_file() and same_bytes(found, target)):
            raise TakenError(found, f"{found} is yours, and a file of this name is written now: move it first.")
    return others


def carry_over(old: Path, new: Path, is_ours: Callable[[str], bool]) -> None:
    """Links what [`find_others`] finds into the folder that is to replace another."""
    for found in find_others(old, new, is_ours):
        target = new / found.relative_to(old)
        target.parent.mkdir(parents=True, exist_ok=True)
        if found.is_dir() and not found.is_symlink():
            target.mkdir()
        else:
            link_file(found, target)


def copy_into(files: Mapping[str, Path], folder: Path) -> None:
    """Copies files to their paths in a folder."""
    for name, path in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
