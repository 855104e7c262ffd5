"""A proxy before an embedded Hub, which a test can tell to drop, delay, refuse or forget."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import urlsplit


class Reply(NamedTuple):
    """The answer to a request; the connection ends after the first `sent` bytes of its body, if that is a number."""

    status: int
    body: bytes
    headers: dict[str, str] = {}
    sent: int | None = None


class Asked(NamedTuple):
    method: str
    path: str
    range: str | None
    token: str | None


# Gets method, path, body and the way to the true Hub, which takes a body; `None` is an answer that is lost.
Rule = Callable[[str, str, bytes, Callable[[bytes], Reply]], Reply | None]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: UnfaithfulHub

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        self.hub.asked.append(Asked(self.command, self.path, self.headers["Range"], self.headers["Authorization"]))
        reply = self.hub.rule(self.command, self.path, body, self.forward)
        if reply is None or reply.sent is not None:
            self.close_connection = True
        if reply is None:
            return
        self.send_response(reply.status)
        for key, value in (reply.headers | {"Content-Length": str(len(reply.body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body[: reply.sent])

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer

    def forward(self, body: bytes) -> Reply:
        connection = HTTPConnection(self.hub.address)
        skipped = ("host", "content-length", "transfer-encoding", "connection")
        headers = {key: value for key, value in self.headers.items() if key.lower() not in skipped}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        # Large files are sent to the address that an answer names.
        content = answer.read().replace(f"//{self.hub.address}/lfs".encode(), f"//{self.headers['Host']}/lfs".encode())
        connection.close()
        kept = {key: value for key, value in answer.getheaders() if key.lower() not in (*skipped, "date", "server")}
        return Reply(answer.status, content, kept)


class UnfaithfulHub:
    """Serves what an embedded Hub does, but for what `rule` makes of it; `asked`: all requests."""

    def __init__(self, url: str) -> None:
        self.asked: list[Asked] = []
        self.address = urlsplit(url).netloc
        self.rule: Rule = lambda method, path, body, forward: forward(body)
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
