"""`GET /{repo}/resolve/{revision}/{path}`: a file, or the byte range of it that was asked for."""

from __future__ import annotations

import re
from urllib.parse import quote

from .errors import HubError, entry_not_found
from .names import check_file_path
from .repository import Repository
from .transport import Request, Response, file_size

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


def resolve(request: Request, repository: Repository, revision: str, path: str) -> Response:
    """Answer with a file of a revision."""
    commit = repository.resolve(revision)
    entry = repository.snapshot(commit).files.get(check_file_path(path))
    if entry is None:
        raise entry_not_found(f"{path!r} is not a file of {repository.id!r} at {revision!r}", commit)
    headers = {
        # Never something that a browser would run as a page of this server.
        "Content-Type": "application/octet-stream",
        "X-Content-Type-Options": "nosniff",
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(path.rpartition('/')[2])}",
        "Accept-Ranges": "bytes",
        "ETag": f'"{entry.etag}"',
        "X-Repo-Commit": commit,
        "X-Linked-Size": str(entry.size),
    }
    if entry.lfs:
        headers["X-Linked-ETag"] = f'"{entry.etag}"'
    offset, length, status = 0, entry.size, 200
    span = _requested_span(request, entry.size, headers["ETag"])
    if span is not None:
        offset, length, status = span.start, len(span), 206
        headers["Content-Range"] = f"bytes {offset}-{offset + length - 1}/{entry.size}"
    file = request.server.store.blobs.open(entry.sha256)
    if file_size(file) != entry.size:
        file.close()
        raise HubError(500, f"the stored content of {path!r} is damaged: run HubStore.verify")
    return Response(status, headers=headers, file=file, offset=offset, length=length)


def _requested_span(request: Request, size: int, etag: str) -> range | None:
    """The bytes that a `Range` header asks for; None for the whole file (RFC 9110, section 14)."""
    match = _RANGE.fullmatch(request.headers.get("Range", "").replace(" ", ""))
    # Malformed and multiple ranges may be ignored, and one that was made for other content must be.
    if match is None or match[0] == "bytes=-" or request.headers.get("If-Range", etag) != etag:
        return None
    first, last = match.groups()
    if not first:
        span = range(max(size - int(last), 0), size)
    else:
        if last and int(last) < int(first):
            return None
        span = range(int(first), min(int(last) + 1, size) if last else size)
    if not span:
        raise HubError(416, f"range {match[0]!r} is outside the file", headers={"Content-Range": f"bytes */{size}"})
    return span
