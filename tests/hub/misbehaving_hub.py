"""A loopback Hub with one model, which a test can tell to cut, redirect, lie or forget."""

from __future__ import annotations

import json
import re

from tests.kit.loopback import LoopbackHandler, LoopbackServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Handler(LoopbackHandler):
    hub: MisbehavingHub

    def do_GET(self) -> None:
        self.hub.requests.append((self.path, self.headers.get("Range"), self.headers.get("Authorization")))
        if re.fullmatch(r"/api/models/org/name(/revision/\w+)?", self.path):
            self.send_json({"id": "org/name", "sha": COMMIT, "siblings": []})
        elif self.path.startswith(f"/api/models/org/name/tree/{COMMIT}"):
            self.send_json(
                [
                    {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                    for name, content in self.hub.files.items()
                ]
            )
        elif self.path.startswith("/org/name/resolve/"):
            self.hub.resolve(self, self.path.rsplit("/", 1)[1])
        else:
            self.send_json({"error": "no such repository"}, status=404, headers={"X-Error-Code": "RepoNotFound"})

    def send_json(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send(status, json.dumps(value).encode(), headers or {})

    def send(self, status: int, body: bytes, headers: dict[str, str], length: int | None = None) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body) if length is None else length)} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def send_file(self, name: str, keep: int | None = None, status: int = 206, **changes: str | None) -> None:
        """The requested range, cut after `keep` bytes, with some headers changed or left out."""
        content = self.hub.files[name]
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = map(int, asked.groups()) if asked else (0, len(content) - 1)
        status = status if asked else 200
        part = content[start : stop + 1] if status == 206 else content
        headers = {
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{name}"',
            "Content-Range": f"bytes {start}-{stop}/{len(content)}",
        }
        headers |= {key.replace("_", "-"): value for key, value in changes.items()}
        kept = {key: value for key, value in headers.items() if value is not None}
        self.send(status, part if keep is None else part[:keep], kept, len(part))
        if keep is not None:
            self.close_connection = True


class MisbehavingHub(LoopbackServer):
    """Serves `org/name` at `COMMIT`; `resolve` answers a request for a file and may be replaced by a test."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None, str | None]] = []
        self.resolve = lambda handler, name: handler.send_file(name)
        super().__init__(Handler)

    def ranges(self) -> list[tuple[str, str]]:
        return [(path.rsplit("/", 1)[1], asked) for path, asked, _ in self.requests if asked]
