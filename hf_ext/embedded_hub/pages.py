"""Pages for a browser: `/` lists repositories, `/org/name` shows the card, results and files of one.

What is shown is what the same client may ask the API for. Cards are written by anybody who may push: their HTML is
shown as text, links lead to http, https and mailto alone, and the policy that goes with each page runs no script and
loads nothing from elsewhere.
"""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urljoin, urlsplit

from markdown_it import MarkdownIt
from starlette.responses import Response

from hf_ext.hub.card_rules import read_results
from hf_ext.hub.front_matter import front_matter

from .descriptions import read_metadata, repository_url
from .store import KINDS
from .transport import Request

if TYPE_CHECKING:
    from jinja2 import Template

    from .repository import Repository

# Limits for cards, repositories, files and results, which bound the cost of a page for every client.
_CARD_BYTES, _ROWS = 200_000, 1000
# The parser compares each of these marks with many earlier ones.
_MARKS, _MOST_MARKS = "*_[`", 4000
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse}td,th{border-bottom:1px solid #ddd;padding:.2rem .8rem;text-align:left}"
    "pre,code{background:#f4f4f4;font:14px/1.4 ui-monospace,monospace}pre{padding:.8rem;overflow:auto}"
    "img{max-width:100%}a{color:#05a}.small{color:#666}"
    "article{border:1px solid #ddd;overflow-x:auto;padding:0 1.5rem;margin:1rem 0}"
)
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title><style>{{ style }}</style></head><body>
<p><a href="{{ home }}/">All repositories</a></p><h1>{{ title }}</h1>
{% for name, heads, rows in tables %}<h2>{{ name }}</h2>{% if rows %}<table>
{% if heads %}<tr>{% for head in heads %}<th>{{ head }}</th>{% endfor %}</tr>{% endif %}
{% for row in rows %}<tr>{% for cell in row %}<td>
{%- if cell is string %}{{ cell }}{% else %}<a href="{{ cell[1] }}">{{ cell[0] }}</a>{% endif %}</td>{% endfor %}</tr>
{% endfor %}</table>{% else %}<p class="small">None.</p>{% endif %}{% endfor %}
{% if card is not none %}<h2>Card</h2><article>{{ card }}</article>{% endif %}</body></html>
"""
# A text, or a text with a link.
_Cell = str | tuple[str, str]
# A title, what heads the columns, and rows.
_Table = tuple[str, tuple[str, ...], list[list[_Cell]]]
# Marker above cards that hf-ext writes.
_COMMENT = re.compile(r"\s*<!--.*?-->", re.DOTALL)


def show_repositories(request: Request) -> Response:
    """The repositories that the client may see."""
    tables: list[_Table] = []
    for kind in KINDS:
        seen = [one for one in request.store.repositories(kind) if request.may_read or not one.private]
        rows: list[list[_Cell]] = [
            [(one.id, repository_url(one, request.base_url)), "private" if one.private else ""] for one in seen[:_ROWS]
        ]
        tables.append((kind.capitalize(), (), _cut(rows, len(seen))))
    return _page(request, "Embedded Hub", tables, None)


def show_repository(request: Request, repository: Repository) -> Response:
    """The card, evaluation results and files of a repository at `main`."""
    commit = repository.resolve("main")
    files, url = repository.snapshot(commit).files, repository_url(repository, request.base_url)
    entry = files.get("README.md")
    blobs = request.store.blobs
    base = f"{url}/resolve/{commit}/"
    card, results = _read_card(blobs.path(entry.sha256), base) if entry and entry.size <= _CARD_BYTES else (None, [])
    rows: list[list[_Cell]] = [
        [(path, f"{base}{quote(path)}"), f"{files[path].size:,} bytes"] for path in sorted(files)[:_ROWS]
    ]
    tables: list[_Table] = [
        ("Evaluation results", ("task", "data set", "metric", "value"), _cut(results[:_ROWS], len(results))),
        ("Files", ("file", "size"), _cut(rows, len(files))),
    ]
    if entry and card is None:
        told = f"README.md has {entry.size:,} bytes: too large to be shown, or not UTF-8."
        tables.insert(0, ("Card", (), [[told]]))
    return _page(request, repository.id, tables, card)


def _cut(rows: list[list[_Cell]], count: int) -> list[list[_Cell]]:
    """Rows of a table, and how many more there are."""
    return rows if count <= len(rows) else [*rows, [f"and {count - len(rows):,} more"]]


def _page(request: Request, title: str, tables: list[_Table], card: str | None) -> Response:
    """Builds a page whose policy forbids all scripts."""
    from markupsafe import Markup

    body = _template().render(
        title=title,
        tables=tables,
        home=request.base_url,
        style=Markup(_STYLE),  # noqa: S704  a constant
        card=None if card is None else Markup(card),  # noqa: S704  of markdown-it, which has escaped it
    )
    digest = b64encode(sha256(_STYLE.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; sandbox allow-top-navigation-by-user-activation allow-downloads"
    )
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        # No caching, so private data are not stored and a push is visible at once.
        "Cache-Control": "no-store",
    }
    return Response(body, headers=headers)


@cache
def _template() -> Template:
    """The page; jinja2 escapes what is put into it. Imported when a browser asks: the API needs none of it."""
    from jinja2 import Environment

    return Environment(autoescape=True).from_string(_PAGE)


@lru_cache(maxsize=64)
def _read_card(path: Path, base: str) -> tuple[str | None, list[list[_Cell]]]:
    """The card as HTML and its results. A blob's name is its content, so it is read once for each commit."""
    try:
        text = path.read_text(encoding="utf-8")
    except ValueError:
        return None, []
    try:
        results = _read_results(read_metadata(text))
    except ValueError:
        results = []
    matter = front_matter(text)
    body = text[text.index(matter) + len(matter) :].partition("---")[2] if matter else text
    return _render(_COMMENT.sub("", body, 1) if _COMMENT.match(body) else body, base), results


def _render(markdown: str, base: str) -> str:
    """Markdown as HTML; HTML inside of it is shown as text. Links that name no server are below `base`."""
    if sum(map(markdown.count, _MARKS)) > _MOST_MARKS:
        return "<p>It has too many links and words in bold to be shown.</p>"
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.validateLink = _may_lead  # type: ignore[method-assign]
    normalize = parser.normalizeLink
    # What may not lead anywhere is refused afterwards.
    parser.normalizeLink = lambda url: normalize(urljoin(base, url)) if _may_lead(url) else url  # type: ignore[method-assign]
    return str(parser.render(markdown))


def _may_lead(url: str) -> bool:
    """Tell if a link leads where one may; markdown-it's own rule lets any scheme and pictures in data: through."""
    try:
        return urlsplit(url).scheme in ("", "http", "https", "mailto")
    except ValueError:
        # Brackets that hold no address, as in http://[x.
        return False


def _read_results(metadata: dict[str, Any]) -> list[list[_Cell]]:
    """Task, data set, metric and value of each result in the metadata of a card."""
    rows: list[list[_Cell]] = []
    for task, dataset, metric in read_results(metadata):
        value = metric.get("value")
        number = f"{value:.6g}" if isinstance(value, float) else str(value)[:100]
        rows.append([_name(task), _name(dataset), _name(metric), number])
    return rows


def _name(value: dict[str, Any]) -> str:
    """The name of a task, data set or metric, or its type."""
    return str(value.get("name") or value.get("type") or "")[:200]
