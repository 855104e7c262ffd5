"""`GET /{repo}/resolve/{revision}/{path}`: a file or a byte range of it; `/raw/`: its text; pages for a browser.

The page `/` lists the repositories, `/org/name` the files of one, with links to them. What is shown is what the same
client may ask the API for. Names are chosen by anybody who may push, so they are escaped, and the policy of each page
runs no script and loads nothing. Cards are shown by `/raw/`, as plain text.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from html import escape
from urllib.parse import quote

from starlette.responses import Response, StreamingResponse

from .descriptions import repository_url
from .errors import HubError, entry_not_found
from .names import check_file_path
from .objects import Entry
from .repository import Repository
from .storage import BlobStore, lfs_pointer
from .store import KINDS
from .transport import Request

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_PIECE_BYTES = 128 << 10
# Bounds the cost of a page for every client.
_ROWS = 1000
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "sandbox allow-top-navigation-by-user-activation allow-downloads",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # No caching, so private data are not stored and a push is visible at once.
    "Cache-Control": "no-store",
}


def resolve(request: Request, repository: Repository, revision: str, path: str) -> Response:
    commit, entry = _find_file(repository, revision, path)
    headers = {
        # Never in a form that a browser would run as a page of this server.
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
    span, status = _requested_span(request, entry.size, headers["ETag"]), 206
    if span is None:
        span, status = range(entry.size), 200
    else:
        headers["Content-Range"] = f"bytes {span.start}-{span.stop - 1}/{entry.size}"
    return _send(request, entry, span, status, headers)


def show_text(request: Request, repository: Repository, revision: str, path: str) -> Response:
    """Answer with the git content of a file: its bytes as text, or the pointer to a large file."""
    commit, entry = _find_file(repository, revision, path)
    headers = {
        "Content-Type": "text/plain; charset=utf-8",
        # A browser shows the text, and takes it for nothing else.
        "X-Content-Type-Options": "nosniff",
        "Content-Security-Policy": "default-src 'none'; sandbox",
        "ETag": f'"{entry.oid}"',
        "X-Repo-Commit": commit,
    }
    if entry.lfs:
        return Response(lfs_pointer(entry.sha256, entry.size), headers=headers)
    return _send(request, entry, range(entry.size), 200, headers)


def _find_file(repository: Repository, revision: str, path: str) -> tuple[str, Entry]:
    """The commit of a revision, and one of its files."""
    commit = repository.resolve(revision)
    entry = repository.snapshot(commit).files.get(check_file_path(path))
    if entry is None:
        raise entry_not_found(f"{path!r} is not a file of {repository.id!r} at {revision!r}", commit)
    return commit, entry


def _send(request: Request, entry: Entry, span: range, status: int, headers: dict[str, str]) -> Response:
    """An answer with some bytes of a stored file."""
    blobs = request.store.blobs
    if blobs.size(entry.sha256) != entry.size:
        raise HubError(500, f"the stored content {entry.sha256} is damaged: restore it from a backup of the folder")
    headers["Content-Length"] = str(len(span))
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers)
    return StreamingResponse(_read_pieces(blobs, entry.sha256, span), status, headers)


async def _read_pieces(blobs: BlobStore, sha256: str, span: range) -> AsyncIterator[bytes]:
    """The bytes of a file, piece by piece; a slow client occupies one piece and no thread."""
    # The loop itself reads. A thread that reads a piece costs three times the processor time of the piece, and fifty
    # of them twice the memory; the price is that all clients wait while a disk looks for 128 KiB.
    with blobs.open(sha256) as file:
        file.seek(span.start)
        left = len(span)
        while left:
            piece = file.read(min(left, _PIECE_BYTES))
            if not piece:
                # The promised length cannot be kept: the client must see a broken connection.
                raise OSError(f"{sha256} became shorter while it was sent")
            left -= len(piece)
            yield piece


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


def show_repositories(request: Request) -> Response:
    """The repositories that the client may see."""
    rows = [
        (repository_url(one, request.base_url), one.id, "private" if one.private else "")
        for kind in KINDS
        for one in request.store.repositories(kind)
        if request.trusted or not one.private
    ]
    return _page(request, "Embedded Hub", rows)


def show_repository(request: Request, repository: Repository) -> Response:
    """The files of a repository at `main`."""
    commit, url = repository.resolve("main"), repository_url(repository, request.base_url)
    rows = [
        (f"{url}/{'raw' if path.endswith('.md') else 'resolve'}/{commit}/{quote(path)}", path, f"{entry.size:,} bytes")
        for path, entry in sorted(repository.snapshot(commit).files.items())
    ]
    return _page(request, repository.id, rows)


def _page(request: Request, title: str, rows: Sequence[tuple[str, str, str]]) -> Response:
    """A page with a list of links, each with some words behind it."""
    items = [f'<li><a href="{escape(url)}">{escape(name)}</a> {told}</li>' for url, name, told in rows[:_ROWS]]
    if len(rows) > _ROWS:
        items.append(f"<li>and {len(rows) - _ROWS:,} more</li>")
    home = f'<p><a href="{escape(request.base_url)}/">All repositories</a></p>'
    body = [f"<!DOCTYPE html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>{home}"]
    body += [f"<h1>{escape(title)}</h1><ul>", *items, "</ul></html>"]
    return Response("\n".join(body), headers=_HEADERS)
