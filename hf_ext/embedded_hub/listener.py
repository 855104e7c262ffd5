"""The listening socket of the embedded Hub: a thread for each connection, a cap on them, who gives way at it."""

from __future__ import annotations

import ipaddress
import logging
import secrets
import socket
import socketserver
import sys
import threading
import time
from typing import Any
from urllib.parse import parse_qs, urlsplit
from wsgiref.headers import Headers

from .access import Access
from .connections import BodyReader, Connection
from .errors import HubError
from .routes import dispatch
from .store import HubStore
from .transport import Request, Response, error_response
from .uploads import UploadTickets

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 10.0
_BUSY = error_response(HubError(503, "this server answers as many clients as it may: try again in some seconds"))
_BUSY_ANSWER = (
    f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(_BUSY.body)}\r\n"
    "Retry-After: 5\r\nConnection: close\r\n\r\n"
).encode() + _BUSY.body


class HubListener(socketserver.ThreadingTCPServer):
    """The listening socket, and what all connections share."""

    # Every connection is a thread and a file descriptor, so there is a cap. At the cap a new client is let in, and
    # another one gives way: the one that has waited longest without a whole request, else the one that reads or sends
    # longest without the token. Who holds the token is never cut off; when only such are left, a new client gets 503.
    # So nobody keeps others out by holding connections open. Beyond loopback, one address may have half of the cap.

    # Threads are joined when the server stops: a commit that has begun ends.
    daemon_threads = False
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        family: int,
        store: HubStore,
        access: Access,
        max_file_bytes: int,
        max_connections: int,
    ):
        self.address_family = family
        self.store = store
        self.access = access
        self.max_file_bytes = max_file_bytes
        self.max_connections = max_connections
        self.tickets = UploadTickets(secrets.token_bytes(32))
        self._connections: dict[socket.socket, Connection] = {}
        self._lock = threading.Lock()
        super().__init__(address, socketserver.BaseRequestHandler)

    @property
    def port(self) -> int:
        """TCP port that it listens on."""
        return int(self.server_address[1])

    def answer(self, method: str, target: str, headers: Headers, body: BodyReader, local: Any) -> Response:
        """Check who asks, then let the route answer."""
        base_url = self.access.base_url(headers, local)
        try:
            split = urlsplit(target)
            query = parse_qs(split.query, keep_blank_values=True, errors="strict", max_num_fields=1000)
        except ValueError as error:
            raise HubError(400, f"malformed request target: {error}") from error
        if not split.path.startswith("/") or split.netloc:
            raise HubError(400, "the request target must be an absolute path")
        may_read, may_write = self.access.permissions(headers)
        request = Request(split.path, query, headers, body, base_url, may_read, may_write, self)
        if may_read:
            body.trust_sender()
        return dispatch(method, request)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a new connection a thread, if it may have one."""
        request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        with self._lock:
            room = self._make_room(client_address[0])
            if room:
                self._connections[request] = Connection(request, client_address, self.answer)
        if room:
            super().process_request(request, client_address)
        else:
            request.settimeout(1.0)
            request.sendall(_BUSY_ANSWER)
            self.shutdown_request(request)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection, in its thread."""
        self._connections[request].serve()

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection that has ended."""
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what a connection died of, instead of printing it; clients that vanish are ordinary."""
        vanished = isinstance(sys.exc_info()[1], OSError)
        logger.log(logging.DEBUG if vanished else logging.ERROR, "connection of %s", client_address, exc_info=True)

    def end_connections(self) -> None:
        """Take no further requests; let running answers end for some seconds, then cut them off."""
        deadline = time.monotonic() + _GRACE_SECONDS
        self._end_all(at_once=False)
        while self._connections and time.monotonic() < deadline:
            time.sleep(0.01)
        self._end_all(at_once=True)

    def _make_room(self, host: str) -> bool:
        """Whether one more connection of this address may be; at the cap, another one is ended for it."""
        present = [connection for connection in self._connections.values() if not connection.ended]
        own = [connection for connection in present if connection.address[0] == host]
        if not is_loopback(host) and len(own) >= max(self.max_connections // 2, 1):
            return _end_longest(own)
        return len(present) < self.max_connections or _end_longest(present)

    def _end_all(self, at_once: bool) -> None:
        """Shut down all connections that are still there."""
        with self._lock:
            for connection in self._connections.values():
                connection.end(at_once)


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine; a proxy, too, is there."""
    # A socket of both families shows IPv4 addresses as IPv6, and local addresses with their interface.
    return ipaddress.ip_address(host.removeprefix("::ffff:").partition("%")[0]).is_loopback


def _end_longest(connections: list[Connection]) -> bool:
    """End the connection that has gone on longest of those that may be ended; whether there was one."""
    doomed = [connection for connection in connections if not connection.trusted]
    if doomed:
        longest = min(doomed, key=lambda connection: (connection.answering, connection.since))
        # A request that arrives whole at this moment is still answered.
        longest.end(at_once=longest.answering)
    return bool(doomed)
