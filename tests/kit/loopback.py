"""A server on loopback whose handler finds it as `self.hub`."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class LoopbackHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass


class LoopbackServer:
    def __init__(self, handler: type[LoopbackHandler]) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (handler,), {"hub": self}))
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def stop(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
