"""HTTP of the embedded Hub: bounded request bodies, answers that stream files, who may ask, and the dispatch."""

from __future__ import annotations

import hmac
import io
import json
import logging
import os
import re
import socket
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import parse_qs, unquote, urlsplit

from .errors import HubError

if TYPE_CHECKING:
    from .server import HubHTTPServer

logger = logging.getLogger(__name__)

MAXIMUM_JSON_BYTES = 16 << 20
_LINGER_SECONDS = 5.0
_LINGER_BYTES = 64 << 20
_TRUE = frozenset({"1", "true", "True"})
_LENGTH = re.compile(r"[0-9]{1,18}")
_CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")


class BodyReader(io.RawIOBase):
    """The body of a request, by `Content-Length` or in chunks, which never yields more than its limit.

    Args:
        stream (`io.BufferedIOBase`):
            The connection, at the first byte of the body.
        length (`int` or `None`):
            `Content-Length`, or None for a chunked body.
    """

    def __init__(self, stream: io.BufferedIOBase, length: int | None):
        self._stream = stream
        self._chunked = length is None
        # Bytes left in the body, or in the current chunk of a chunked one.
        self._left = length or 0
        self._first_chunk = True
        self.limit = MAXIMUM_JSON_BYTES
        self.finished = length == 0

    def readable(self) -> bool:
        """Reading is what it is for."""
        return True

    def set_limit(self, limit: int) -> None:
        """Allow bodies up to `limit` bytes; a longer `Content-Length` is refused before anything is read."""
        self.limit = limit
        if not self._chunked and self._left > limit:
            self._refuse()

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes of the body."""
        if self._chunked and not self._left and not self.finished:
            self._next_chunk()
        if self.finished:
            return 0
        view = memoryview(buffer)[: self._left]
        count = self._stream.readinto1(view)
        if not count:
            raise HubError(400, "the connection ended in the middle of the request body")
        self.limit -= count
        if self.limit < 0:
            self._refuse()
        self._left -= count
        if not self._chunked:
            self.finished = not self._left
        return count

    def _next_chunk(self) -> None:
        """Read the size line of the next chunk."""
        if not self._first_chunk and self._stream.readline(3) != b"\r\n":
            raise HubError(400, "malformed chunk in the request body")
        self._first_chunk = False
        line = self._stream.readline(64)
        match = _CHUNK_SIZE.fullmatch(line)
        if match is None:
            raise HubError(400, "malformed chunk size in the request body")
        self._left = int(match[1], 16)
        if self._left == 0:
            while self._stream.readline(1024) not in (b"\r\n", b"\n", b""):
                pass
            self.finished = True

    def _refuse(self) -> None:
        raise HubError(413, "the request body is larger than this server allows")


@dataclass
class Response:
    """An answer: bytes, or `length` bytes of an open file from `offset`."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    file: BinaryIO | None = None
    offset: int = 0
    length: int = 0


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer that is JSON."""
    body = json.dumps(data, default=str).encode()
    return Response(status, body, {"Content-Type": "application/json", **(headers or {})})


@dataclass
class Request:
    """What a route sees of a request.

    Args:
        path (`str`):
            Path as it was sent, still quoted.
        query (`dict[str, list[str]]`):
            Values of each query parameter.
        headers (`Any`):
            Headers, by case-insensitive names.
        body ([`BodyReader`]):
            The body, not read yet.
        base_url (`str`):
            The server as the client reached it.
        authorised (`bool`):
            Whether the client may write and see private repositories.
        server ([`HubHTTPServer`]):
            The server, with the store and the settings.
    """

    path: str
    query: dict[str, list[str]]
    headers: Any
    body: BodyReader
    base_url: str
    authorised: bool
    server: HubHTTPServer

    def parameter(self, name: str, default: str = "") -> str:
        """The first value of a query parameter."""
        return self.query.get(name, [default])[0]

    def flag(self, name: str) -> bool:
        """A query parameter that is true or false."""
        return self.parameter(name) in _TRUE

    def number(self, name: str, default: int, maximum: int) -> int:
        """A query parameter that is an integer between 0 and a maximum."""
        value = self.parameter(name, str(default))
        if not _LENGTH.fullmatch(value):
            raise HubError(400, f"query parameter {name!r} must be a non-negative integer, got {value!r}")
        return min(int(value), maximum)

    def read_body(self, limit: int = MAXIMUM_JSON_BYTES) -> bytes:
        """All of a small body."""
        self.body.set_limit(limit)
        return self.body.read() or b""

    def json(self) -> dict[str, Any]:
        """The body as a JSON object."""
        return parse_object(self.read_body() or b"{}")


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object from a client."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise HubError(400, f"the request body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise HubError(400, f"the request body must be a JSON object, got {type(value).__name__}")
    return value


def text(payload: dict[str, Any], key: str, default: str | None = None) -> str:
    """A string field of a JSON object; required unless there is a default."""
    value = payload.get(key, default)
    if value is None and default is not None:
        value = default
    if not isinstance(value, str):
        raise HubError(400, f"field {key!r} must be a string, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise HubError(400, f"field {key!r} is not valid Unicode") from error
    return value


def whole_number(payload: dict[str, Any], key: str) -> int:
    """A required field of a JSON object that is a non-negative integer."""
    value = payload.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise HubError(400, f"field {key!r} must be a non-negative integer, got {value!r}")
    return value


class HubRequestHandler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    server_version = "hf-ext-hub"
    sys_version = ""
    disable_nagle_algorithm = True
    timeout = 60
    server: HubHTTPServer

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are logged at DEBUG; no header is, since one may hold the token."""
        logger.debug(format, *arguments)

    def do_GET(self) -> None:
        """Answer a request of any method."""
        body = None
        try:
            body = self._body()
            response = self._answer(body)
        except HubError as error:
            response = _error_response(error)
        except OSError as error:
            if isinstance(error, (ConnectionError, TimeoutError)):
                self.close_connection = True
                return
            logger.error("storage failed: %s", error)
            response = _error_response(HubError(507, f"the server cannot read or write its files: {error.strerror}"))
        self.close_connection = self.close_connection or body is None or not body.finished
        try:
            self._send(response)
            if body is None or not body.finished:
                self._linger()
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        finally:
            if response.file is not None:
                response.file.close()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def _body(self) -> BodyReader:
        """The reader of this request's body."""
        lengths, encoding = self.headers.get_all("Content-Length", []), self.headers.get("Transfer-Encoding")
        if encoding is not None:
            if lengths or encoding.strip().lower() != "chunked":
                raise HubError(400, f"Transfer-Encoding {encoding!r} is not supported: send one 'chunked' body")
            return BodyReader(self.rfile, None)
        if len(lengths) > 1 or not all(_LENGTH.fullmatch(value) for value in lengths):
            raise HubError(400, "Content-Length must be one non-negative integer")
        return BodyReader(self.rfile, int(lengths[0]) if lengths else 0)

    def _answer(self, body: BodyReader) -> Response:
        """Check who asks, then let the route answer."""
        host = self._check_origin()
        try:
            split = urlsplit(self.path)
            query = parse_qs(split.query, keep_blank_values=True, errors="strict", max_num_fields=1000)
        except ValueError as error:
            raise HubError(400, f"malformed request target: {error}") from error
        if not split.path.startswith("/") or split.netloc:
            raise HubError(400, "the request target must be an absolute path")
        request = Request(split.path, query, self.headers, body, f"http://{host}", self._is_authorised(), self.server)
        return self.server.route(self.command, request)

    def _check_origin(self) -> str:
        """Refuse other hosts (DNS rebinding) and pages of other origins; returns the host that the client used."""
        hosts = self.headers.get_all("Host", [])
        allowed = self.server.allowed_hosts | {_authority(self.connection.getsockname())}
        if len(hosts) != 1 or hosts[0].lower() not in allowed:
            raise HubError(403, f"Host {hosts!r} is not a name of this server: {sorted(allowed)}")
        if self.headers.get("Origin", f"http://{hosts[0]}").lower() != f"http://{hosts[0]}".lower():
            raise HubError(403, "requests of web pages of another origin are refused")
        return str(hosts[0])

    def _is_authorised(self) -> bool:
        """Whether the client holds the token, or none is set; a wrong one is an error."""
        token, sent = self.server.token, self.headers.get("Authorization")
        if token is None:
            return True
        if sent is None:
            return False
        # http.server decodes headers as Latin-1.
        if hmac.compare_digest(sent.encode("latin-1"), b"Bearer " + token.encode()):
            return True
        raise HubError(401, "Invalid credentials in Authorization header")

    def _send(self, response: Response) -> None:
        """Write an answer; a file goes from the disk to the socket in the kernel."""
        self.send_response(response.status)
        length = response.length if response.file is not None else len(response.body)
        for name, value in {"Content-Length": str(length), **response.headers}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "HEAD":
            return
        if response.file is None:
            self.wfile.write(response.body)
        elif length and self.connection.sendfile(response.file, response.offset, length) != length:
            # The promised length cannot be kept: the client must see a broken connection.
            raise ConnectionError("the file became shorter while it was sent")

    def _linger(self) -> None:
        """Let a client that is still sending read the refusal: closing at once would reset the connection."""
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(_LINGER_SECONDS)
        deadline, received = time.monotonic() + _LINGER_SECONDS, 0
        while time.monotonic() < deadline and received < _LINGER_BYTES:
            chunk = self.connection.recv(1 << 16)
            received += len(chunk)
            if not chunk:
                return


def _authority(address: Any) -> str:
    """`host:port` of a socket address."""
    # A socket of both families shows IPv4 addresses as IPv6.
    name = address[0].removeprefix("::ffff:")
    host = f"[{name}]" if ":" in name else name
    return f"{host}:{address[1]}"


def _error_response(error: HubError) -> Response:
    """The answer that `huggingface_hub` turns into an exception."""
    # A header must be one line of ASCII, and the message quotes what the client sent.
    message = "".join(letter if " " <= letter <= "~" else "?" for letter in error.message)[:1000]
    headers = {"X-Error-Message": message, **error.headers}
    if error.code:
        headers["X-Error-Code"] = error.code
    return json_response({"error": error.message}, error.status, headers)


def unquoted(value: str) -> str:
    """Undo the percent-encoding of one part of a path, once."""
    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError as error:
        raise HubError(400, "the path is not valid UTF-8") from error


def file_size(file: BinaryIO) -> int:
    """Length in bytes of an open file."""
    return os.fstat(file.fileno()).st_size
