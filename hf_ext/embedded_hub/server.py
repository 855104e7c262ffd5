"""The embedded Hub: a Hugging Face Hub in one process and one folder, for the quickstart, tests and air-gapped labs.

`huggingface_hub`, transformers, diffusers and datasets use it unchanged with `HF_ENDPOINT` set to its URL, and
`HF_HUB_DISABLE_XET=1` for pushing. It has models, datasets and spaces with branches, tags and pull requests; one user;
no Xet storage, discussions, collections or inference. Blobs of deleted repositories stay on disk.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from .routes import dispatch
from .store import HubStore
from .transport import HubRequestHandler, Request, Response
from .uploads import UploadTickets

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 10.0

__all__ = ["EmbeddedHub", "serve"]


class HubHTTPServer(ThreadingHTTPServer):
    """The listening socket, a thread for each connection, and what all of them share."""

    # Threads are joined when the server stops: a commit that has begun ends.
    daemon_threads = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], family: int, store: HubStore, token: str | None, max_file_bytes: int):
        self.address_family = family
        self.store = store
        self.token = token
        self.max_file_bytes = max_file_bytes
        self.tickets = UploadTickets(secrets.token_bytes(32))
        self.connections: set[socket.socket] = set()
        self.allowed_hosts: frozenset[str] = frozenset()
        super().__init__(address, HubRequestHandler)

    def server_bind(self) -> None:
        """Bind without the name look-up of `http.server`, which can block where there is no DNS."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def route(self, method: str, request: Request) -> Response:
        """Answer a request that passed the checks of the connection."""
        return dispatch(method, request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what a connection died of, instead of printing it; clients that vanish are ordinary."""
        vanished = isinstance(sys.exc_info()[1], ConnectionError)
        logger.log(logging.DEBUG if vanished else logging.ERROR, "connection of %s", client_address, exc_info=True)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Remember a new connection, so that `finish_connections` can end it."""
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection that has ended."""
        self.connections.discard(request)
        super().shutdown_request(request)

    def finish_connections(self) -> None:
        """Take no further requests; let running answers end for some seconds, then cut them."""
        deadline = time.monotonic() + _GRACE_SECONDS
        _shut_down(self.connections, socket.SHUT_RD)
        while self.connections and time.monotonic() < deadline:
            time.sleep(0.01)
        _shut_down(self.connections, socket.SHUT_RDWR)


class EmbeddedHub:
    """
    A Hub that serves one folder.

    Without a token it answers on loopback only, and to every local user: all may write, and private repositories are
    visible. With a token, writing and reading private repositories need it. There is no encryption: where the network
    is not trusted, listen on loopback and let clients come through an SSH tunnel to the same port.

    Args:
        root (`str` or `Path`):
            Folder with the repositories: new, empty, or of an embedded Hub. What clients were told is committed is on
            disk, and a crash at any moment leaves the folder whole.
        host (`str`, *optional*, defaults to `"127.0.0.1"`):
            Address or name to listen on.
        port (`int`, *optional*, defaults to 0):
            TCP port; 0 takes a free one.
        token (`str`, *optional*):
            What clients send as `HF_TOKEN`.
        max_file_bytes (`int`, *optional*, defaults to 50 GiB):
            Largest file, and largest commit of regular files, in bytes.

    Raises:
        ValueError: when the host is not loopback and there is no token, the token is empty, or the folder is not
            usable.

    Example:

    ```python
    >>> with EmbeddedHub("/data/hub") as hub:
    ...     HfApi(endpoint=hub.url).create_repo("me/model")
    ```
    """

    def __init__(
        self,
        root: str | Path,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        max_file_bytes: int = 50 << 30,
    ):
        if token is not None and (not token or not token.isascii() or any(letter.isspace() for letter in token)):
            raise ValueError("token must be ASCII letters, digits and signs without spaces, got an empty or other one")
        if max_file_bytes < 1:
            raise ValueError(f"max_file_bytes must be at least 1, got {max_file_bytes}")
        self.root = Path(root)
        self._host = host
        self._port = port
        self._token = token
        self._max_file_bytes = max_file_bytes
        self._family, self._address = _resolve(host, port)
        if token is None and not ipaddress.ip_address(self._address).is_loopback:
            raise ValueError(f"host {host!r} is not loopback: set a token, or listen on 127.0.0.1")
        self._server: HubHTTPServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """`str`: What to set `HF_ENDPOINT` to; known once the Hub has started."""
        if self._server is None:
            raise ValueError("the Hub has no URL before start()")
        host = "127.0.0.1" if ipaddress.ip_address(self._address).is_unspecified else self._host
        return f"http://{_bracketed(host)}:{self._server.server_port}"

    @property
    def store(self) -> HubStore:
        """[`HubStore`]: The folder while it is served."""
        if self._server is None:
            raise ValueError("the Hub has no store before start()")
        return self._server.store

    def start(self) -> EmbeddedHub:
        """
        Serve in a background thread.

        Returns:
            [`EmbeddedHub`]: itself; `url` is known, and requests are answered.
        """
        server = self._bind()
        self._thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="embedded-hub", daemon=True)
        self._thread.start()
        return self

    def serve_forever(self, ready: Callable[[EmbeddedHub], None] | None = None) -> None:
        """
        Serve until interrupted (`KeyboardInterrupt` is passed on).

        Args:
            ready (`Callable`, *optional*):
                Called once with this Hub when connections are accepted.
        """
        with self:
            if ready is not None:
                ready(self)
            thread = self._thread
            while thread is not None and thread.is_alive():
                thread.join(1.0)

    def stop(self) -> None:
        """End all connections, wait for requests that are being answered, and release the folder."""
        if self._server is None:
            return
        server, self._server = self._server, None
        if self._thread is not None:
            server.shutdown()
            self._thread.join()
            self._thread = None
        server.finish_connections()
        server.server_close()
        server.store.close()

    def __enter__(self) -> EmbeddedHub:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _bind(self) -> HubHTTPServer:
        """Open the folder and the socket."""
        if self._server is not None:
            raise ValueError("the Hub is already started")
        store = HubStore(self.root)
        try:
            server = HubHTTPServer((self._address, self._port), self._family, store, self._token, self._max_file_bytes)
        except BaseException:
            store.close()
            raise
        names = {"localhost", "127.0.0.1", "[::1]", _bracketed(self._host.lower())}
        hosts = {f"{name}:{server.server_port}" for name in names}
        # Clients leave out the port that is the default of http.
        server.allowed_hosts = frozenset(hosts | (names if server.server_port == 80 else set()))
        self._server = server
        return server


def serve(
    root: str | Path,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    ready: Callable[[EmbeddedHub], None] | None = None,
) -> None:
    """
    Serve a folder until interrupted. See [`EmbeddedHub`].

    Args:
        root (`str` or `Path`):
            Folder with the repositories.
        host (`str`, *optional*, defaults to `"127.0.0.1"`):
            Address or name to listen on.
        port (`int`, *optional*, defaults to 0):
            TCP port; 0 takes a free one.
        token (`str`, *optional*):
            What clients send as `HF_TOKEN`; required when the host is not loopback.
        ready (`Callable`, *optional*):
            Called once with the [`EmbeddedHub`] when connections are accepted: the place to print its `url`.

    Raises:
        ValueError: when the host is not loopback and there is no token, or the folder is not usable.
        OSError: when the port is taken.
    """
    EmbeddedHub(root, host, port, token).serve_forever(ready)


def _shut_down(connections: set[socket.socket], how: int) -> None:
    """Shut down all connections that are still there."""
    for connection in list(connections):
        # One that its client has ended already is not connected any more.
        with contextlib.suppress(OSError):
            connection.shutdown(how)


def _resolve(host: str, port: int) -> tuple[int, str]:
    """Address family and numeric address to listen on."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, OverflowError, UnicodeError) as error:
        raise ValueError(f"cannot listen on host {host!r}, port {port!r}: {error}") from error
    family, _, _, _, address = found[0]
    return family, str(address[0])


def _bracketed(host: str) -> str:
    """A host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host
