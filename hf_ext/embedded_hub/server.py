"""The embedded Hub: a Hugging Face Hub in one process and one folder, for the quickstart, tests and air-gapped labs.

`huggingface_hub`, transformers, diffusers and datasets use it unchanged with `HF_ENDPOINT` set to its URL, and
`HF_HUB_DISABLE_XET=1` for pushing. It has models, datasets and spaces with branches, tags and pull requests; one user;
no Xet storage, discussions, collections or inference. Blobs of deleted repositories stay on disk.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from urllib.parse import parse_qs

import uvicorn
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .access import Access, UploadTickets, url_host
from .errors import HubError
from .routes import dispatch
from .store import HubStore
from .transport import Body, Request, error_response

logger = logging.getLogger(__name__)
# Seconds that a kept-alive connection may be idle between two requests.
_IDLE_SECONDS = 60
# Seconds for running responses to end when the server stops.
_GRACE_SECONDS = 10
_MAXIMUM_HEADER_BYTES = 64 << 10


class HubApplication:
    """ASGI application that answers each request in a thread, and all that the requests to one server share."""

    def __init__(self, store: HubStore, access: Access):
        self.store = store
        self._access = access
        self._tickets = UploadTickets(secrets.token_bytes(32))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = Headers(scope=scope)
        # huggingface_hub names its requests, and looks for the name in the answer.
        identifier = headers.get("X-Amzn-Trace-Id", "")
        if not re.fullmatch(r"[\w.=;:-]{1,100}", identifier, re.ASCII):
            identifier = secrets.token_hex(8)
        body = Body(receive, headers)
        # Routes read and write files, and wait for the body. The loop of uvicorn only passes bytes on.
        try:
            response = await asyncio.to_thread(self._answer, scope, headers, body, identifier)
        except asyncio.CancelledError:
            response = error_response(HubError(503, "the server stops, and no longer waits for this request"))
        if response is not None:
            # Clients show it with an error, and the log names it.
            response.headers["X-Request-Id"] = identifier
            await response(scope, receive, send)

    def _answer(self, scope: Scope, headers: Headers, body: Body, identifier: str) -> Response | None:
        """The response of a route, or for its error; unexpected errors are logged with their traceback."""
        try:
            return dispatch(self._read_request(scope, headers, body))
        except (ClientDisconnect, CancelledError):
            return None
        except HubError as error:
            return error_response(error)
        except OSError as error:
            logger.error("request %s: storage failed: %s", identifier, error)
            return error_response(HubError(507, f"the server cannot read or write its files: {error.strerror}"))
        except Exception as error:
            logger.error("request %s failed", identifier, exc_info=error)
            return error_response(HubError(500, f"this server failed with {type(error).__name__}; see its log"))

    def _read_request(self, scope: Scope, headers: Headers, body: Body) -> Request:
        """Validate the request line and the headers, and find the rights of the client."""
        if "Content-Length" in headers and "Transfer-Encoding" in headers:
            # A proxy may have used either of them, so the following bytes could belong to another client's request.
            raise HubError(400, "a body has one length", headers={"Connection": "close"})
        if scope["http_version"] not in ("1.0", "1.1"):
            raise HubError(505, "this server speaks HTTP/1.1", headers={"Connection": "close"})
        base_url = self._access.base_url(headers, scope["server"])
        path, query = scope["raw_path"].decode("ascii"), scope["query_string"].decode("ascii")
        # Clients that were given an address with a slash at its end send two.
        path = re.sub("^//+", "/", path)
        if not path.startswith("/"):
            raise HubError(400, "the request target must be an absolute path")
        try:
            fields = parse_qs(query, keep_blank_values=True, errors="strict", max_num_fields=1000)
        except ValueError as error:
            raise HubError(400, f"malformed request target: {error}") from error
        return Request(
            method=scope["method"], path=path, query=fields, headers=headers, body=body, base_url=base_url,
            trusted=self._access.is_trusted(headers), store=self.store, tickets=self._tickets,
        )  # fmt: skip


class EmbeddedHub:
    """
    A Hub that serves one folder.

    Without a token it listens on loopback only; every local user may write, and private repositories are visible. With
    a token, writing and reading private repositories need it. There is no encryption: in an untrusted network, listen
    on loopback behind a proxy with a certificate, whose address is the `public_url`.

    Args:
        root (`str` or `Path`): Folder with the repositories: new, empty, or of an embedded Hub. A confirmed commit is
            on disk, and a crash at any moment leaves the folder consistent.
        host (`str`, *optional*, defaults to `"127.0.0.1"`): Address or name to listen on.
        port (`int`, *optional*, defaults to 0): TCP port; 0 takes a free one.
        token (`str`, *optional*): Token that clients send as `HF_TOKEN`.
        allowed_hosts (`Iterable[str]`, *optional*): Further host names of the server, `NAME` (with any port) or
            `NAME:PORT`. Requests to other names are refused, because a web page could point its own name here.
        public_url (`str`, *optional*): Address of a proxy in front of the server. All links of the server start with
            it, also those for uploads of large files; its name is an allowed host.
        max_connections (`int`, *optional*, defaults to 256):
            Largest number of simultaneous connections; requests on further ones get status 503.

    Raises:
        ValueError: when the host is not loopback and there is no token, a token is empty, a name or URL is
            malformed, or the folder is not usable.

    Example:
        >>> from huggingface_hub import HfApi
        >>> from hf_ext.embedded_hub.server import EmbeddedHub
        >>> with EmbeddedHub("hub") as hub:
        ...     HfApi(endpoint=hub.url).create_repo("me/model").repo_id
        'me/model'
    """

    def __init__(
        self,
        root: str | Path,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        allowed_hosts: Iterable[str] = (),
        public_url: str | None = None,
        max_connections: int = 256,
    ):
        self._access = Access(token, allowed_hosts, public_url)
        self.root, self._host, self._port = Path(root), host, port
        self._max_connections = max_connections
        self._family, self._address = _resolve(host, port)
        if token is None and not ipaddress.ip_address(self._address).is_loopback:
            raise ValueError(f"host {host!r} is not loopback: set a token, or listen on 127.0.0.1")
        self._store: HubStore | None = None
        self._server: uvicorn.Server | None = None

    @property
    def url(self) -> str:
        """`str`: What to set `HF_ENDPOINT` to; known once the Hub has started."""
        if self._store is None:
            raise ValueError("the URL is known after start(); call it first")
        host = "127.0.0.1" if ipaddress.ip_address(self._address).is_unspecified else self._host
        return f"http://{url_host(host)}:{self._listening_port}"

    @property
    def store(self) -> HubStore:
        """[`HubStore`]: The folder while it is served."""
        if self._store is None:
            raise ValueError("the store is open after start(); call it first")
        return self._store

    def start(self) -> EmbeddedHub:
        """Serve in a background thread."""
        if self._store is not None:
            raise ValueError("the Hub is already started")
        store = HubStore(self.root)
        both = self._family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        try:
            listening = socket.create_server((self._address, self._port), family=self._family, dualstack_ipv6=both)
        except BaseException:
            store.close()
            raise
        self._store = store
        self._listening_port = int(listening.getsockname()[1])
        self._access.add_own_names(self._host, self._listening_port)
        # Its own HTTP parser, error logs only, and our limits.
        configuration = uvicorn.Config(
            HubApplication(store, self._access),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.ERROR,
            access_log=False,
            # Behind a proxy links are made from the public_url alone.
            proxy_headers=False,
            headers=[("Server", "hf-ext-hub")],
            # It refuses from this number on.
            limit_concurrency=self._max_connections + 1,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            h11_max_incomplete_event_size=_MAXIMUM_HEADER_BYTES,
        )
        self._server = uvicorn.Server(configuration)
        # The thread itself does not tell: a join that a signal interrupts marks it as ended, though it lives.
        self._ended = threading.Event()
        try:
            threading.Thread(target=self._run, args=(self._server, listening), daemon=True).start()
        except BaseException:
            self._ended.set()
            self.stop()
            listening.close()
            raise
        return self

    def serve_forever(self, ready: Callable[[EmbeddedHub], None] | None = None) -> None:
        """Serve until interrupted (`KeyboardInterrupt` is passed on)."""
        with self:
            if ready is not None:
                ready(self)
            while not self._ended.wait(1.0):
                pass

    def stop(self) -> None:
        """End all connections, wait for requests that are being answered, and release the folder."""
        if self._store is None or self._server is None:
            return
        self._server.should_exit = True
        self._ended.wait()
        self._store.close()
        self._store = self._server = None

    def __enter__(self) -> EmbeddedHub:
        return self.start()

    def __exit__(self, *failure: object) -> None:
        self.stop()

    def _run(self, server: uvicorn.Server, listening: socket.socket) -> None:
        try:
            asyncio.run(self._serve(server, listening))
        finally:
            self._ended.set()

    async def _serve(self, server: uvicorn.Server, listening: socket.socket) -> None:
        """Run uvicorn until it is told to stop, then wait for the threads of routes: a commit that has begun ends."""
        # A thread for each connection: clients that are silent in the middle of a body keep no other one waiting.
        threads = ThreadPoolExecutor(self._max_connections, "embedded-hub")
        # Whoever runs the loop waits for the threads of its default executor before it closes the loop.
        asyncio.get_running_loop().set_default_executor(threads)
        await server.serve(sockets=[listening])


def _resolve(host: str, port: int) -> tuple[int, str]:
    """Address family and numeric address to listen on."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, OverflowError, UnicodeError) as error:
        raise ValueError(f"cannot listen on host {host!r}, port {port!r}: {error}") from error
    family, _, _, _, address = found[0]
    return family, str(address[0])
