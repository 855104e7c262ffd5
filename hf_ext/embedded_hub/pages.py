"""Pages for a browser: `/` lists the repositories, `/org/name` the files of one, with links to them.

What is shown is what the same client may ask the API for. Names are chosen by anybody who may push, so they are
escaped, and the policy of each page runs no script and loads nothing. Cards are shown by `/raw/`, as plain text.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from urllib.parse import quote

from starlette.responses import Response

from .descriptions import repository_url
from .repository import Repository
from .store import KINDS
from .transport import Request

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


def show_repositories(request: Request) -> Response:
    """The repositories that the client may see."""
    rows = []
    for kind in KINDS:
        for one in request.store.repositories(kind):
            if request.trusted or not one.private:
                rows.append((repository_url(one, request.base_url), one.id, "private" if one.private else ""))
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
