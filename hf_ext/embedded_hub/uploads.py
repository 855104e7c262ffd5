"""Decisions about an upload to the embedded Hub: regular file or LFS, ignored or not, and where to send it.

The rules are those of `.gitattributes` (only `filter=lfs`) and `.gitignore`.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase, translate
from typing import Any

from .access import UploadTickets
from .errors import HubError
from .names import check_file_path, check_sha256
from .objects import Entry, Operation, Snapshot
from .repository import Change
from .storage import Blob, BlobBatch, BlobStore, git_oid
from .transport import Body, parse_object, text, whole_number

# The largest file, and the largest commit of regular files.
MAXIMUM_FILE_BYTES = 50 << 30
# Larger files always go through LFS, as on the Hub.
MAXIMUM_REGULAR_BYTES = 10 << 20
# A line of a commit holds one such file in base64, and its path.
_MAXIMUM_LINE_BYTES = MAXIMUM_REGULAR_BYTES * 4 // 3 + (64 << 10)
_MAXIMUM_OPERATIONS = 100_000
_MAXIMUM_RULES_BYTES = 1 << 20
_MAXIMUM_IGNORE_CHARACTERS = 64 << 10
_TRAILING = re.compile(r"(?<!\\) +$")

DEFAULT_GITATTRIBUTES = "".join(
    f"*.{suffix} filter=lfs diff=lfs merge=lfs -text\n"
    for suffix in ("7z", "arrow", "bin", "ckpt", "gz", "h5", "msgpack", "npy", "npz", "onnx", "parquet", "pt", "pth")
    + ("safetensors", "tar", "tgz", "xz", "zip", "zst")
)


def read_change(body: Body, blobs: BlobStore) -> Change:
    """Read a commit, a JSON object a line, and store the regular files in it as they come."""
    # Contents without a commit stay invisible, so the contents of a refused commit are not served.
    header: dict[str, Any] | None = None
    operations: list[Operation] = []
    with blobs.batch() as batch:
        for line in _lines(body):
            item = parse_object(line)
            key, value = text(item, "key"), item.get("value")
            if not isinstance(value, dict):
                raise HubError(400, f"field 'value' of a {key!r} line must be an object, got {type(value).__name__}")
            if key == "header":
                header = value
            else:
                operations.append(_read_operation(key, value, blobs, batch))
            if len(operations) > _MAXIMUM_OPERATIONS:
                raise HubError(413, f"a commit may have at most {_MAXIMUM_OPERATIONS} operations")
    if header is None:
        raise HubError(400, "a commit must have a 'header' line")
    # The title of a commit is one line.
    title, _, rest = text(header, "summary").strip().partition("\n")
    if not title.strip():
        raise HubError(400, "the summary of a commit must not be empty")
    description = "\n".join(part for part in (rest.strip(), text(header, "description", "").strip()) if part)
    return Change(title.strip(), description, operations, text(header, "parentCommit", "") or None)


def _lines(body: Body) -> Iterator[bytes]:
    """Lines of a body that are not empty, each of bounded length."""
    reader = io.BufferedReader(body, 1 << 16)
    while line := reader.readline(_MAXIMUM_LINE_BYTES):
        if len(line) == _MAXIMUM_LINE_BYTES:
            raise HubError(413, f"a regular file may have at most {MAXIMUM_REGULAR_BYTES} bytes: use LFS")
        if line.strip():
            yield line


def _read_operation(key: str, value: dict[str, Any], blobs: BlobStore, batch: BlobBatch) -> Operation:
    if key == "deletedFolder":
        return Operation(check_file_path(text(value, "path").rstrip("/")), None, folder=True)
    path = check_file_path(text(value, "path"))
    if key == "deletedFile":
        return Operation(path, None)
    if key == "file":
        return Operation(path, store_regular(_decode(path, value), batch))
    if key == "lfsFile":
        sha256 = check_sha256(value.get("oid"))
        size = blobs.size(sha256)
        if size is None or value.get("size", size) != size:
            raise HubError(400, f"{path!r} points to an LFS object that was not uploaded: {sha256} of that size")
        return Operation(path, Entry.of_lfs(Blob(sha256, size)))
    raise HubError(400, f"unknown operation {key!r}: use file, lfsFile, deletedFile or deletedFolder")


def _decode(path: str, value: dict[str, Any]) -> bytes:
    content, encoding = text(value, "content"), text(value, "encoding", "utf-8")
    if encoding not in ("base64", "utf-8"):
        raise HubError(400, f"encoding of {path!r} must be 'base64' or 'utf-8', got {encoding!r}")
    data = _from_base64(content, f"the content of {path!r}") if encoding == "base64" else content.encode()
    if len(data) > MAXIMUM_REGULAR_BYTES:
        raise HubError(413, f"a regular file may have at most {MAXIMUM_REGULAR_BYTES} bytes: use LFS")
    return data


def _from_base64(content: str, what: str) -> bytes:
    try:
        return base64.b64decode(content, validate=True)
    except ValueError as error:
        raise HubError(400, f"{what} is not valid base64: {error}") from error


def store_regular(data: bytes, batch: BlobBatch) -> Entry:
    """Store a small file; its id is that of git's blob."""
    blob = batch.add(io.BytesIO(data))
    return Entry(git_oid("blob", data), blob.size, blob.sha256, lfs=False)


def _objects(payload: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = payload.get(key)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise HubError(400, f"field {key!r} must be a list of objects")
    return found


def plan_uploads(payload: dict[str, Any], snapshot: Snapshot, blobs: BlobStore) -> list[dict[str, Any]]:
    """Answer a preupload request: upload mode of each file, ignored files, and present files."""
    files = _objects(payload, "files")
    attributes = _rules(snapshot, ".gitattributes", blobs)
    patterns = [line.split()[0] for line in attributes.splitlines() if "filter=lfs" in line.split()[1:]]
    ignored = IgnoreRules(text(payload, "gitIgnore", "") or _rules(snapshot, ".gitignore", blobs))
    planned = []
    for file in files:
        path, size, sample = check_file_path(text(file, "path")), whole_number(file, "size"), text(file, "sample", "")
        name, present = path.rpartition("/")[2], snapshot.files.get(path)
        matches = any(fnmatchcase(path if "/" in pattern else name, pattern) for pattern in patterns)
        large = size > MAXIMUM_REGULAR_BYTES or matches
        # To git a file is binary if it has a NUL.
        mode = "lfs" if size and (large or b"\0" in _from_base64(sample, "field 'sample'")) else "regular"
        oid = present.etag if present else None
        planned.append({"path": path, "uploadMode": mode, "shouldIgnore": ignored.match(path), "oid": oid})
    return planned


def _rules(snapshot: Snapshot, path: str, blobs: BlobStore) -> str:
    """Text of a rules file of git in a snapshot; empty when there is none."""
    entry = snapshot.files.get(path)
    if entry is None or entry.size > _MAXIMUM_RULES_BYTES:
        return ""
    with blobs.open(entry.sha256) as file:
        return file.read().decode(errors="replace")


def plan_lfs(payload: dict[str, Any], blobs: BlobStore, tickets: UploadTickets, href: str) -> dict[str, Any]:
    """Answer an LFS batch request: where to send the objects that are not there yet."""
    if payload.get("operation") != "upload" or payload.get("hash_algo", "sha256") != "sha256":
        raise HubError(400, "only LFS uploads with hash_algo 'sha256' are supported")
    planned = []
    for each in _objects(payload, "objects"):
        wanted = Blob(check_sha256(each.get("oid")), whole_number(each, "size"))
        plan: dict[str, Any] = {"oid": wanted.sha256, "size": wanted.size}
        present = blobs.size(wanted.sha256)
        if wanted.size > MAXIMUM_FILE_BYTES:
            told = f"{wanted.size} bytes are more than this server allows: {MAXIMUM_FILE_BYTES}"
            plan["error"] = {"code": 413, "message": told}
        elif present is None:
            query = "&".join(f"{key}={value}" for key, value in tickets.issue(wanted).items())
            plan["actions"] = {"upload": {"href": f"{href}/{wanted.sha256}?{query}"}}
        elif present != wanted.size:
            plan["error"] = {"code": 422, "message": f"the stored object has {present} bytes, not {wanted.size}"}
        planned.append(plan)
    return {"transfer": "basic", "objects": planned}


class IgnoreRules:
    """The patterns of a `.gitignore`: the last one that matches decides, and an ignored folder hides all below it."""

    def __init__(self, content: str):
        if len(content) > _MAXIMUM_IGNORE_CHARACTERS:
            raise HubError(400, f".gitignore may have at most {_MAXIMUM_IGNORE_CHARACTERS} characters")
        self._folders: dict[str, bool] = {}
        # Parts of a path, of which None is `**`; if only a folder is meant; if it is ignored. The last line first.
        self._patterns: list[tuple[list[re.Pattern[str] | None], bool, bool]] = []
        for line in reversed(content.split("\n")):
            pattern = _TRAILING.sub("", line.rstrip("\r"))
            if not pattern or pattern.startswith("#"):
                continue
            ignores, pattern = not pattern.startswith("!"), pattern.removeprefix("!")
            only_folders, pattern = pattern.endswith("/"), pattern.removesuffix("/")
            # A name without a slash is one of every folder.
            parts = pattern.removeprefix("/").split("/") if "/" in pattern else ["**", pattern]
            compiled = [None if part == "**" else re.compile(translate(_as_glob(part))) for part in parts]
            self._patterns.append((compiled, only_folders, ignores))

    def match(self, path: str, is_folder: bool = False) -> bool:
        """Tell if a file or a folder is ignored; below an ignored folder no rule includes one again."""
        above = path.rpartition("/")[0]
        if above and above not in self._folders:
            self._folders[above] = self.match(above, is_folder=True)
        if above and self._folders[above]:
            return True
        for parts, only_folders, ignores in self._patterns:
            if (is_folder or not only_folders) and _matches(parts, path.split("/")):
                return ignores
        return False


def _matches(parts: list[re.Pattern[str] | None], names: list[str]) -> bool:
    """Tell if the parts of a pattern are the names of a path, in time that both lengths bound."""
    # All places that a part may end at are kept together: with one after the other, many `**` would take for ever.
    places = {0}
    for number, part in enumerate(parts):
        if part is not None:
            places = {place + 1 for place in places if place < len(names) and part.match(names[place])}
        elif places and number == len(parts) - 1:
            # At the end it is all that is inside of a folder.
            return min(places) < len(names)
        elif places:
            places = set(range(min(places), len(names) + 1))
    return len(names) in places


def _as_glob(part: str) -> str:
    """A part of a pattern of git for `fnmatch`, whose expressions do not go back: escapes and `[^` differ."""
    part = re.sub(r"\\(.)", lambda found: f"[{found[1]}]" if found[1] in "*?[" else found[1], part)
    return part.replace("[^", "[!")
