"""The embedded Hub: a Hugging Face Hub in one process and one folder, for the quickstart, tests and air-gapped labs.

`huggingface_hub`, transformers, diffusers and datasets use it unchanged with `HF_ENDPOINT` set to its URL, and
`HF_HUB_DISABLE_XET=1` for pushing. It has models, datasets and spaces with branches, tags and pull requests; one user;
no Xet storage, discussions, collections or inference. Blobs of deleted repositories stay on disk.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from .access import Access, url_host
from .listener import HubListener
from .store import HubStore


class EmbeddedHub:
    """
    A Hub that serves one folder.

    Without a token it answers on loopback only, and to every local user: all may write, and private repositories are
    visible. With a token, writing and reading private repositories need it. There is no encryption: where the network
    is not trusted, listen on loopback, and let clients come through an SSH tunnel to the same port or through a proxy
    that has a certificate, whose address is then the `public_url`.

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
        read_token (`str`, *optional*):
            A second token, which reads private repositories and cannot write.
        allowed_hosts (`Iterable[str]`, *optional*):
            Further names by which clients reach the server, `NAME` (with any port) or `NAME:PORT`. Requests to
            other names are refused: a web page could have pointed its own name here.
        public_url (`str`, *optional*):
            Where clients reach a proxy before the server. All links that they are given start with it, those that
            large files are sent to among them; its name is an allowed host.
        max_connections (`int`, *optional*, defaults to 256):
            How many connections may be open. Each is a thread, and one or two file descriptors.

    Raises:
        ValueError: when the host is not loopback and there is no token, a token is empty, a name or URL is
            malformed, or the folder is not usable.

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
        read_token: str | None = None,
        allowed_hosts: Iterable[str] = (),
        public_url: str | None = None,
        max_connections: int = 256,
    ):
        self._access = Access(token, read_token, allowed_hosts, public_url)
        for name, value in (("max_file_bytes", max_file_bytes), ("max_connections", max_connections)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.root = Path(root)
        self._host = host
        self._port = port
        self._limits = (max_file_bytes, max_connections)
        self._family, self._address = _resolve(host, port)
        if token is None and not ipaddress.ip_address(self._address).is_loopback:
            raise ValueError(f"host {host!r} is not loopback: set a token, or listen on 127.0.0.1")
        self._server: HubListener | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """`str`: What to set `HF_ENDPOINT` to; known once the Hub has started."""
        if self._server is None:
            raise ValueError("the Hub has no URL before start()")
        host = "127.0.0.1" if ipaddress.ip_address(self._address).is_unspecified else self._host
        return f"http://{url_host(host)}:{self._server.port}"

    @property
    def store(self) -> HubStore:
        """[`HubStore`]: The folder while it is served."""
        if self._server is None:
            raise ValueError("the Hub has no store before start()")
        return self._server.store

    def start(self) -> EmbeddedHub:
        """Serve in a background thread."""
        server = self._bind()
        self._thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="embedded-hub", daemon=True)
        self._thread.start()
        return self

    def serve_forever(self, ready: Callable[[EmbeddedHub], None] | None = None) -> None:
        """Serve until interrupted (`KeyboardInterrupt` is passed on)."""
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
        server.end_connections()
        server.server_close()
        server.store.close()

    def __enter__(self) -> EmbeddedHub:
        return self.start()

    def __exit__(self, *failure: object) -> None:
        self.stop()

    def _bind(self) -> HubListener:
        """Open the folder and the socket."""
        if self._server is not None:
            raise ValueError("the Hub is already started")
        store = HubStore(self.root)
        try:
            server = HubListener((self._address, self._port), self._family, store, self._access, *self._limits)
        except BaseException:
            store.close()
            raise
        self._access.add_own_names(self._host, server.port)
        self._server = server
        return server


def _resolve(host: str, port: int) -> tuple[int, str]:
    """Address family and numeric address to listen on."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, OverflowError, UnicodeError) as error:
        raise ValueError(f"cannot listen on host {host!r}, port {port!r}: {error}") from error
    family, _, _, _, address = found[0]
    return family, str(address[0])
