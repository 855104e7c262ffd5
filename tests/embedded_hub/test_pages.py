"""The pages of the embedded Hub: what they list, for whom, and that nothing in a name or a card runs."""

import json
import re
from html.parser import HTMLParser

from hf_ext.embedded_hub.server import EmbeddedHub
from tests.kit.hub import CONTENT, ask, commit_body, create_repository

from .conftest import BEARER


class Links(HTMLParser):
    """Elements of a page, and the addresses of its links by their text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.found: dict[str, str] = {}
        self._address = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._address = dict(attrs).get("href") or ""
        assert not [name for name, _ in attrs if name.startswith("on")], attrs

    def handle_data(self, data: str) -> None:
        if self._address:
            self.found[data] = self._address
            self._address = ""


def test_repositories_and_files_are_listed_with_links(url: str) -> None:
    assert create_repository(url, "me/data", type="dataset").status == 200
    card = b"---\nlicense: mit\n---\n# <script>alert(1)</script>"
    evil = "a&<script>alert(1)<script>.txt"
    body = commit_body({"README.md": card, evil: CONTENT})
    assert ask(url, "POST", "/api/models/me/model/commit/main", body).status == 200
    home = ask(url, "GET", "/")
    assert home.status == 200 and home.headers["Content-Type"] == "text/html; charset=utf-8"
    links = Links(home.body.decode()).found
    assert links["me/model"] == f"{url}/me/model" and links["me/data"] == f"{url}/datasets/me/data"
    assert ask(url, "GET", "/datasets/me/data").status == 200
    answer = ask(url, "GET", "/me/model")
    assert ask(url, "GET", "/me/model/").body == answer.body and ask(url, "GET", "/datasets/me/data/").status == 200
    page = Links(answer.body.decode())
    assert not {"script", "iframe", "style", "link"} & page.tags and f"{len(CONTENT):,} bytes" in answer.body.decode()
    commit = json.loads(ask(url, "GET", "/api/models/me/model").body)["sha"]
    assert page.found["file.bin"] == f"{url}/me/model/resolve/{commit}/file.bin"
    for name, content in (("file.bin", CONTENT), (evil, CONTENT), ("README.md", card)):
        assert ask(url, "GET", page.found[name].removeprefix(url)).body == content
    # The text of a card is text, whatever it holds.
    assert ask(url, "GET", page.found["README.md"].removeprefix(url)).headers["Content-Type"].startswith("text/plain")
    assert ask(url, "GET", "/model").status == 404 and ask(url, "HEAD", "/me/model").body == b""


def test_each_page_says_that_no_script_may_run(steady: str) -> None:
    for path in ("/", "/me/model"):
        headers = ask(steady, "GET", path).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "sandbox" in policy and "frame-ancestors 'none'" in policy
        assert not re.search("script-src|allow-scripts|unsafe-inline", policy)
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"


def test_what_is_private_is_shown_with_the_token_alone(locked: EmbeddedHub) -> None:
    home, seen = ask(locked.url, "GET", "/").body, ask(locked.url, "GET", "/", headers=BEARER).body
    assert b"me/public" in home and b"private" not in home
    assert b"me/private" in seen and b"</a> private" in seen
    refused = ask(locked.url, "GET", "/me/private")
    assert refused.status == 401 and b"README.md" not in refused.body
    # As for one that does not exist.
    missing = ask(locked.url, "GET", "/me/missing")
    assert (missing.status, missing.headers["X-Error-Code"]) == (401, refused.headers["X-Error-Code"])
    assert b"README.md" in ask(locked.url, "GET", "/me/private", headers=BEARER).body
    assert b"README.md" in ask(locked.url, "GET", "/me/public").body
    assert ask(locked.url, "GET", "/", headers={"Authorization": "Bearer wrong"}).status == 401
    assert ask(locked.url, "GET", "/me/public", headers={"Host": "evil.example"}).status == 403


def test_the_api_keeps_its_answers_for_browsers(steady: str) -> None:
    for path in ("/api/models", "/api/models/me/model", "/api/models/me/model/tree/main"):
        assert ask(steady, "GET", path, headers={"Accept": "text/html"}).headers["Content-Type"] == "application/json"
    unknown = {f"GET {path}": 404 for path in ("/nothing", "/api/nothing", "/lfs/x")}
    for words, status in (unknown | {"POST /me/model": 405, "DELETE /api/models": 405}).items():
        assert ask(steady, *words.split(), b"").status == status, words
    xet = ask(steady, "GET", "/api/models/me/model/xet-write-token/main")
    assert xet.status == 404 and "HF_HUB_DISABLE_XET=1" in xet.headers["X-Error-Message"]
