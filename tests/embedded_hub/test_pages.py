"""The pages of the embedded Hub: what they show, to whom, and that nothing in a card runs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from hf_ext.embedded_hub.server import EmbeddedHub
from tests.kit.hub import CONTENT, ask, commit_body, create_repository

CARD = """---
license: mit
model-index:
- name: m
  results:
  - task: {type: image-to-image, name: Denoising}
    dataset: {type: bsd68, name: "BSD68 <b>"}
    metrics: [{type: psnr, name: PSNR, value: 28.610004321}]
  - nonsense
---

<!-- Written by a program. -->

# A title

| a | b |
|---|---|
| 1 | 2 |

**bold** and [a link](https://example.org/x) and [here](file.bin)
![picture](figures/a.png) [other](/me/b) [there](#use)
"""
ATTACKS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[x](JaVaScRiPt:alert(1))",
    "[x](java&#115;cript:alert(1))",
    "[x](data:text/html;base64,PHNjcmlwdD4=)",
    "![x](data:image/svg+xml;base64,PHN2Zz4=)",
    "<javascript:alert(1)>",
    '[x](https://a.example "\\" onmouseover=alert(1) x=\\"")',
    "```html\n</code></pre><script>alert(1)</script>\n```",
    "</article><style>*{display:none}</style><iframe src=//evil.example></iframe>",
    "[r]: javascript:alert(1)\n\n[r]",
    "[x](http://[x) ![x](//[::1) <http://[x>",
]


class Tags(HTMLParser):
    """Elements of a page with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def push(url: str, card: str | bytes) -> None:
    body = commit_body({"README.md": card.encode() if isinstance(card, str) else card})
    assert ask(url, "POST", "/api/models/me/model/commit/main", body).status == 200


def test_repositories_are_listed_and_shown(url: str) -> None:
    push(url, CARD)
    home = ask(url, "GET", "/")
    assert home.status == 200 and home.headers["Content-Type"] == "text/html; charset=utf-8"
    link = f'<a href="{url}/me/model">me/model</a>'
    assert link in home.body.decode()
    page = ask(url, "GET", "/me/model").body.decode()
    assert "<h1>A title</h1>" in page and "<strong>bold</strong>" in page and "<td>1</td>" in page
    assert '<a href="https://example.org/x">a link</a>' in page and "license: mit" not in page
    # What names no server is a file of the commit.
    commit = json.loads(ask(url, "GET", "/api/models/me/model").body)["sha"]
    assert f'<a href="{url}/me/model/resolve/{commit}/file.bin">here</a>' in page
    assert f'<img src="{url}/me/model/resolve/{commit}/figures/a.png" alt="picture" />' in page
    assert f'<a href="{url}/me/b">other</a>' in page
    assert re.search(r"<td>Denoising</td><td>BSD68 &lt;b&gt;</td><td>PSNR</td><td>28.61</td>", page)
    assert "<th>metric</th><th>value</th>" in page and "Written by" not in page
    assert f"{len(CONTENT):,} bytes" in page
    file = next(
        attributes["href"] for tag, attributes in Tags(page).found if "/resolve/" in (attributes.get("href") or "")
    )
    assert file and ask(url, "GET", file.removeprefix(url)).status == 200
    assert ask(url, "GET", "/model").status == 404 and ask(url, "HEAD", "/me/model").body == b""


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_in_a_card_runs(steady: str, attack: str) -> None:
    push(steady, f"before\n\n{attack}\n\nafter")
    answer = ask(steady, "GET", "/me/model")
    page = Tags(answer.body.decode())
    assert answer.status == 200 and b"before" in answer.body and b"after" in answer.body
    assert not {"script", "iframe", "object", "svg", "form", "base", "link"} & {tag for tag, _ in page.found}
    assert sum(tag == "style" for tag, _ in page.found) == 1
    for _, attributes in page.found:
        assert not [name for name in attributes if name.startswith("on")], attributes
        for name in ("href", "src"):
            assert re.match(r"https?://|mailto:|[^:]*$", attributes.get(name) or ""), attributes


def test_metadata_and_names_are_escaped_too(steady: str) -> None:
    evil = "<script>alert(1)</script>"
    index = {"model-index": [{"results": [{"task": {"name": evil}, "dataset": [], "metrics": [{"value": evil}]}]}]}
    push(steady, f"---\n{json.dumps(index)}\n---\ntext")
    body = commit_body({f"a{evil.replace('/', '')}.txt": CONTENT})
    assert ask(steady, "POST", "/api/models/me/model/commit/main", body).status == 200
    page = ask(steady, "GET", "/me/model").body.decode()
    assert "<script" not in page and page.count("&lt;script&gt;") >= 3


def test_each_page_says_that_no_script_may_run(steady: str) -> None:
    for path in ("/", "/me/model"):
        headers = ask(steady, "GET", path).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "sandbox" in policy and "frame-ancestors 'none'" in policy
        assert "script-src" not in policy and "allow-scripts" not in policy and "unsafe-inline" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize("token", ["correct-horse", "reader"])
def test_what_is_private_is_shown_with_a_token_alone(readable: EmbeddedHub, token: str) -> None:
    bearer = {"Authorization": f"Bearer {token}"}
    home, seen = ask(readable.url, "GET", "/").body, ask(readable.url, "GET", "/", headers=bearer).body
    assert b"me/public" in home and b"private" not in home
    assert b"me/private" in seen and b"<td>private</td>" in seen
    refused = ask(readable.url, "GET", "/me/private")
    assert refused.status == 401 and b"card" not in refused.body
    # As for one that does not exist.
    missing = ask(readable.url, "GET", "/me/missing")
    assert (missing.status, missing.headers["X-Error-Code"]) == (401, refused.headers["X-Error-Code"])
    assert b"The card of what is private" in ask(readable.url, "GET", "/me/private", headers=bearer).body
    assert b"The card of what is public" in ask(readable.url, "GET", "/me/public").body
    assert ask(readable.url, "GET", "/", headers={"Authorization": "Bearer wrong"}).status == 401
    assert ask(readable.url, "GET", "/me/public", headers={"Host": "evil.example"}).status == 403


def test_other_kinds_have_pages_and_the_api_keeps_its_answers(url: str) -> None:
    assert create_repository(url, "me/data", type="dataset").status == 200
    assert b"/datasets/me/data" in ask(url, "GET", "/").body
    assert ask(url, "GET", "/datasets/me/data").status == 200
    for path in ("/api/models", "/api/models/me/model", "/api/models/me/model/tree/main"):
        assert ask(url, "GET", path, headers={"Accept": "text/html"}).headers["Content-Type"] == "application/json"
    for method, path, status in (("GET", "/api/nothing", 404), ("GET", "/lfs/x", 404), ("POST", "/me/model", 405)):
        assert ask(url, method, path, b"").status == status, path


@pytest.mark.parametrize("card", [b"\xff\xfe\x00 no text", b"x" * 200_001, b"---\na: [\n---\ntext", b"", b"---\n---"])
def test_a_card_that_cannot_be_read_costs_little_and_no_page(steady: str, card: bytes) -> None:
    push(steady, card)
    page = ask(steady, "GET", "/me/model")
    assert page.status == 200 and b"README.md" in page.body and len(page.body) < 20_000


def test_a_table_that_would_fill_the_memory_is_cut(steady):
    """Its rows are short, and it has as many cells in each as in its head, written or not."""
    push(steady, "# A title\n\n" + "|" * 2000 + "\n" + "|-" * 1999 + "|\n" + "|\n" * 2000)
    assert len(ask(steady, "GET", "/me/model").body) < 2_000_000


def test_marks_that_would_be_compared_for_minutes_are_not_shown(steady):
    push(steady, "# A title\n\n" + "*a_b" * 40_000)
    assert "too many links and words in bold" in ask(steady, "GET", "/me/model").body.decode()
