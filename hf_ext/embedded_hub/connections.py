"""One connection to the embedded Hub: HTTP by h11 on a blocking socket, time limits, files sent by the kernel."""

from __future__ import annotations

import io
import logging
import re
import secrets
import socket
import time
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Any
from wsgiref.headers import Headers

import h11

from .errors import HubError
from .transport import MAXIMUM_JSON_BYTES, Response, error_response

logger = logging.getLogger(__name__)

# A client that sends a byte a minute never stalls, and yet holds a thread for ever: so besides each wait the whole is
# bounded. A head has a time for all of it. Bodies and answers have a mean speed, counted from a first minute that
# everybody has, and of a body only the time that we wait for the client counts, not that of our disk.
#
# A kept connection may be silent for so long; from its first byte on, the head of a request has less.
IDLE_SECONDS = 60.0
HEADER_SECONDS = 20.0
# Bodies and answers: so long without a byte, and on average no slower than this.
STALL_SECONDS = 60.0
SLOWEST_BYTES_A_SECOND = 8 << 10
_MAXIMUM_HEADER_BYTES = 64 << 10
_PIECE_BYTES = 256 << 10
_FILE_PIECE_BYTES = 8 << 20
_LINGER_SECONDS = 5.0
_LINGER_BYTES = 64 << 20
_IDENTIFIER = re.compile(r"[\w.=;:-]{1,100}", re.ASCII)


class Connection:
    """A client's connection, served by a thread of its own."""

    def __init__(self, stream: socket.socket, address: Any, answer: Callable[..., Response]):
        self.stream = stream
        self.address = address
        self._answer = answer
        self._protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAXIMUM_HEADER_BYTES)
        # Whether it has a request, or waits for one, and since when.
        self.answering = False
        self.since = time.monotonic()
        # A client that has shown a token or a ticket is never cut off to make room for others.
        self.trusted = False
        # Whether it was cut off already.
        self.ended = False

    def serve(self) -> None:
        """Answer requests until the client leaves, stalls or breaks the rules of HTTP."""
        try:
            while self._serve_request():
                self._protocol.start_next_cycle()
                self._wait()
        except (ConnectionError, TimeoutError) as error:
            logger.debug("%s: %s", self.address, error)

    def end(self, at_once: bool) -> None:
        """Take no further bytes from the client, or have nothing more to do with it; called by another thread."""
        self.ended = True
        try:
            # What waits for the socket wakes up.
            self.stream.shutdown(socket.SHUT_RDWR if at_once else socket.SHUT_RD)
        except OSError as error:
            # Its client has ended it already.
            logger.debug("%s: %s", self.address, error)

    def receive(self, seconds: float, most: int = _PIECE_BYTES) -> None:
        """Wait for bytes, or the end of them, and give them to the protocol."""
        if seconds <= 0:
            raise TimeoutError("the client sends too slowly")
        self.stream.settimeout(seconds)
        self._protocol.receive_data(self.stream.recv(most))

    def next_event(self) -> Any:
        """The next part of the request that has arrived."""
        return self._protocol.next_event()

    def send_continue(self) -> None:
        """Tell a client that waits before it sends its body to go on."""
        if self._protocol.they_are_waiting_for_100_continue:
            self._write(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))

    def _wait(self) -> None:
        """From now on, nothing is owed to the client."""
        self.answering, self.since, self.trusted = False, time.monotonic(), False

    def _serve_request(self) -> bool:
        """Read and answer one request; whether another one may follow."""
        request, body, identifier = None, None, secrets.token_hex(8)
        try:
            request = self._read_head()
            if request is None:
                return False
            self.answering, self.since = True, time.monotonic()
            headers = Headers([(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers])
            if _IDENTIFIER.fullmatch(headers.get("X-Amzn-Trace-Id", "")):
                # huggingface_hub names its requests.
                identifier = headers.get("X-Amzn-Trace-Id", "")
            if "Content-Length" in headers and "Transfer-Encoding" in headers:
                # Which of them a proxy believed is not known: what follows could be somebody else's request.
                raise HubError(400, "a request may have Content-Length or Transfer-Encoding, not both")
            body = BodyReader(self, headers)
            method, target = request.method.decode("ascii"), request.target.decode("latin-1")
            logger.debug("%s: request %s: %s %s", self.address, identifier, method, target)
            response = self._answer(method, target, headers, body, self.stream.getsockname())
        except Exception as error:
            response = _response_to(error, identifier)
        # Clients show it with an error, and the log names it.
        response.headers["X-Request-Id"] = identifier
        keep = body is not None and body.finished and self._protocol.their_state is h11.DONE
        try:
            self._send(response, keep, with_body=request is None or request.method != b"HEAD")
        finally:
            if response.file is not None:
                response.file.close()
        if body is None or not body.finished:
            self._linger()
        return keep and self._protocol.our_state is h11.DONE

    def _read_head(self) -> h11.Request | None:
        """The head of the next request; None when the client has left, or sends none."""
        begun = bool(self._protocol.trailing_data[0])
        deadline = time.monotonic() + (HEADER_SECONDS if begun else IDLE_SECONDS)
        while (event := self.next_event()) is h11.NEED_DATA:
            try:
                # In small pieces: h11 measures a head only while it is not complete.
                self.receive(deadline - time.monotonic(), _MAXIMUM_HEADER_BYTES // 4)
            except TimeoutError:
                if not begun:
                    return None
                raise HubError(408, f"the head of a request must arrive in {HEADER_SECONDS:g} seconds") from None
            if not begun:
                begun, deadline = True, time.monotonic() + HEADER_SECONDS
        if isinstance(event, h11.Request) and event.http_version not in (b"1.0", b"1.1"):
            raise HubError(505, "this server speaks HTTP/1.1")
        return event if isinstance(event, h11.Request) else None

    def _send(self, response: Response, keep: bool, with_body: bool) -> None:
        """Write an answer; a file goes from the disk to the socket in the kernel."""
        length = response.length if response.file is not None else len(response.body)
        headers = {"Server": "hf-ext-hub", "Date": formatdate(usegmt=True), "Content-Length": str(length)}
        headers |= response.headers | ({} if keep else {"Connection": "close"})
        reason = HTTPStatus(response.status).phrase.encode()
        head = h11.Response(status_code=response.status, headers=list(headers.items()), reason=reason)
        if response.file is not None and with_body and length:
            self._write(head)
            self._write_file(response)
        elif with_body and length:
            self._write(head, h11.Data(data=response.body))
        else:
            self._write(head)
        self._write(h11.EndOfMessage())

    def _write(self, *events: Any) -> None:
        """Send parts of an answer that are in memory."""
        data = b"".join(self._protocol.send(event) or b"" for event in events)
        if data:
            self.stream.settimeout(STALL_SECONDS + len(data) / SLOWEST_BYTES_A_SECOND)
            self.stream.sendall(data)

    def _write_file(self, response: Response) -> None:
        """Send a part of a file; h11 counts its bytes without seeing them."""
        self._protocol.send_with_data_passthrough(h11.Data(data=range(response.length)))  # type: ignore[arg-type]
        assert response.file is not None
        started, sent = time.monotonic(), 0
        while sent < response.length:
            self.stream.settimeout(STALL_SECONDS)
            piece = min(response.length - sent, _FILE_PIECE_BYTES)
            if self.stream.sendfile(response.file, response.offset + sent, piece) != piece:
                # The promised length cannot be kept: the client must see a broken connection.
                raise ConnectionError("the file became shorter while it was sent")
            sent += piece
            if time.monotonic() - started > STALL_SECONDS + sent / SLOWEST_BYTES_A_SECOND:
                raise TimeoutError("the client reads too slowly")

    def _linger(self) -> None:
        """Let a client that is still sending read the refusal: closing at once would reset the connection."""
        self._wait()
        self.stream.shutdown(socket.SHUT_WR)
        deadline, received = time.monotonic() + _LINGER_SECONDS, 0
        while received < _LINGER_BYTES and (left := deadline - time.monotonic()) > 0:
            self.stream.settimeout(left)
            chunk = self.stream.recv(_PIECE_BYTES)
            received += len(chunk)
            if not chunk:
                return


class BodyReader(io.RawIOBase):
    """The body of a request, which never yields more than its limit, nor waits for ever."""

    # The time limit counts only the time that the client lets us wait, so that a slow disk cuts nobody off.

    def __init__(self, connection: Connection, headers: Headers):
        self._connection = connection
        # h11 has checked that it is one number.
        self._announced = int(headers.get("Content-Length", "0").partition(",")[0])
        self._pending = memoryview(b"")
        self._received = 0
        self._waited = 0.0
        self.limit = MAXIMUM_JSON_BYTES
        self.finished = False
        if not self._announced and "Transfer-Encoding" not in headers:
            self._next()

    def readable(self) -> bool:
        """Reading is what it is for."""
        return True

    def trust_sender(self) -> None:
        """Never cut off this request to make room for other clients."""
        self._connection.trusted = True

    def set_limit(self, limit: int) -> None:
        """Allow bodies up to `limit` bytes; a longer `Content-Length` is refused before anything is read."""
        self.limit = limit
        if self._announced > limit:
            self._refuse()

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with what has arrived, without waiting for more than one byte; `read` goes through it."""
        if not self._pending and not self.finished:
            self._connection.send_continue()
        while not self._pending and not self.finished:
            self._next()
        count = min(len(buffer), len(self._pending))
        buffer[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        return count

    def _next(self) -> None:
        """Take the next part of the body from the connection."""
        try:
            event = self._connection.next_event()
            if event is h11.NEED_DATA:
                started = time.monotonic()
                self._connection.receive(
                    min(STALL_SECONDS, STALL_SECONDS + self._received / SLOWEST_BYTES_A_SECOND - self._waited)
                )
                self._waited += time.monotonic() - started
            elif isinstance(event, h11.Data):
                self._pending = memoryview(event.data)
                self._received += len(self._pending)
                if self._received > self.limit:
                    self._refuse()
            else:
                self.finished = True
        except h11.RemoteProtocolError as error:
            raise HubError(400, f"malformed request body: {error}") from error
        except TimeoutError as error:
            raise HubError(408, "the request body arrives too slowly") from error

    def _refuse(self) -> None:
        raise HubError(413, "the request body is larger than this server allows")


def _response_to(error: Exception, identifier: str) -> Response:
    """What to answer to a request that failed; what nobody foresaw is logged with its traceback."""
    if isinstance(error, HubError):
        return error_response(error)
    if isinstance(error, h11.RemoteProtocolError):
        too_large = error.error_status_hint == 431
        return error_response(HubError(431 if too_large else 400, f"malformed request: {error}"))
    if isinstance(error, (ConnectionError, TimeoutError)):
        raise error
    if isinstance(error, OSError):
        logger.error("request %s: storage failed: %s", identifier, error)
        return error_response(HubError(507, f"the server cannot read or write its files: {error.strerror}"))
    logger.error("request %s failed", identifier, exc_info=error)
    return error_response(HubError(500, f"this server failed with {type(error).__name__}: its log says where"))
