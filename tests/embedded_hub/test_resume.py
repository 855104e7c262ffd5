"""A download whose connection breaks goes on where it stopped, by a Range request of the client itself."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from hf_ext.embedded_hub.server import EmbeddedHub
from tests.kit.hub import commit_large, create_repository, run_python

DOWNLOAD = """
import huggingface_hub as hub
print(hub.hf_hub_download("me/model", "weights.bin"))
"""
SIZE, CUT = 22 << 20, 15 << 20
# A client asks for the file, whole or from a byte on.
QUESTION = re.compile(rb"GET /me/model/resolve/\S+/weights\.bin HTTP/1\.1\r\n(.*?)\r\n\r\n", re.DOTALL)


class CuttingProxy(socketserver.ThreadingTCPServer):
    """Passes bytes on between clients and a server; the first answer that is longer than `CUT` is cut off there."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self.server = ("", 0)
        self.cut = False
        # The first byte of each download.
        self.offsets: list[int] = []

    def finish_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        with socket.create_connection(self.server) as upstream, contextlib.suppress(OSError):
            threading.Thread(target=self.pass_questions, args=(request, upstream), daemon=True).start()
            passed = 0
            while data := upstream.recv(1 << 16):
                request.sendall(data)
                passed += len(data)
                if passed > CUT and not self.cut:
                    self.cut = True
                    return

    def pass_questions(self, client: socket.socket, upstream: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                for head in QUESTION.findall(data):
                    start = re.search(rb"(?i)range: bytes=(\d+)-", head)
                    self.offsets.append(int(start[1]) if start else 0)
                upstream.sendall(data)
            upstream.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def cutting_proxy() -> Iterator[CuttingProxy]:
    with CuttingProxy() as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()


def test_a_download_that_is_cut_off_is_continued(tmp_path: Path) -> None:
    weights = os.urandom(SIZE)
    with cutting_proxy() as proxy:
        url = f"http://127.0.0.1:{proxy.server_address[1]}"
        with EmbeddedHub(tmp_path / "hub", allowed_hosts=[urlsplit(url).netloc]) as hub:
            proxy.server = ("127.0.0.1", urlsplit(hub.url).port or 0)
            create_repository(hub.url, "me/model")
            commit_large(hub.url, {"weights.bin": weights})
            path = run_python(DOWNLOAD, url, tmp_path / "home").strip()
    assert Path(path).read_bytes() == weights
    # The client keeps whole pieces of 10 MiB: of 15 received ones, 10.
    assert proxy.cut and proxy.offsets == [0, 10 << 20]
