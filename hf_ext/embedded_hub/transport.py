"""Requests and their bodies, JSON responses, and validated JSON fields for the routes of the embedded Hub."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive

from .access import UploadTickets
from .errors import HubError
from .repository import Repository
from .store import HubStore

MAXIMUM_JSON_BYTES = 16 << 20
# Without the token: a card with its text. Parsing 16 MiB of JSON would cost ten times the memory.
_MAXIMUM_STRANGERS_JSON_BYTES = 4 << 20


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer that is JSON; what JSON cannot say (NaN, other types) is a mistake of the route."""
    # Starlette's JSONResponse fails on lone surrogates, which a card may contain.
    body = json.dumps(data, allow_nan=False).encode()
    return Response(body, status, {"Content-Type": "application/json", **(headers or {})})


def error_response(error: HubError) -> Response:
    """The answer that `huggingface_hub` turns into an exception."""
    # A header must be one line of ASCII, and the message quotes what the client sent.
    message = "".join(letter if " " <= letter <= "~" else "?" for letter in error.message)[:1000].strip()
    headers = {"X-Error-Message": message, **error.headers}
    if error.code:
        headers["X-Error-Code"] = error.code
    return json_response({"error": error.message}, error.status, headers)


class Body(io.RawIOBase):
    """The body of a request: read by the thread of a route, received by the loop, and never more than its limit."""

    def __init__(self, receive: Receive, headers: Headers):
        self._receive, self._loop = receive, asyncio.get_running_loop()
        # h11 has checked that it is one number.
        self._announced = int(headers.get("Content-Length", "0"))
        self._pending = memoryview(b"")
        self._received = 0
        self._more = True
        self.limit = MAXIMUM_JSON_BYTES

    def readable(self) -> bool:
        return True

    def set_limit(self, limit: int) -> None:
        """Allow bodies up to `limit` bytes; a longer `Content-Length` is refused before anything is read."""
        self.limit = limit
        self._check_length(self._announced)

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with what has arrived, without waiting for more than one piece; `read` goes through it."""
        while not self._pending and self._more:
            message = asyncio.run_coroutine_threadsafe(self._next_message(), self._loop).result()
            if message["type"] != "http.request":
                raise ClientDisconnect
            self._pending, self._more = memoryview(message["body"]), message["more_body"]
            self._received += len(self._pending)
            self._check_length(self._received)
        count = min(len(buffer), len(self._pending))
        buffer[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        return count

    async def _next_message(self) -> Message:
        return await self._receive()

    def _check_length(self, length: int) -> None:
        if length > self.limit:
            raise HubError(413, "the request body is larger than this server allows")


@dataclass
class Request:
    method: str
    path: str  # as it was sent, still quoted
    query: dict[str, list[str]]
    headers: Headers
    body: Body  # not read yet
    base_url: str  # of the server, as clients reach it
    trusted: bool  # may write, and see what is private
    store: HubStore
    tickets: UploadTickets

    def parameter(self, name: str, default: str = "") -> str:
        """The first value of a query parameter."""
        return self.query.get(name, [default])[0]

    def flag(self, name: str) -> bool:
        return self.parameter(name) in ("1", "true", "True")

    def number(self, name: str, default: int, maximum: int) -> int:
        """A query parameter that is an integer between 0 and a maximum."""
        value = self.parameter(name, str(default))
        if not (value.isascii() and value.isdigit() and len(value) <= 18):
            raise HubError(400, f"query parameter {name!r} must be a non-negative integer, got {value!r}")
        return min(int(value), maximum)

    def see(self, kind: str, repository_id: str) -> Repository | None:
        """The repository, or None where there is none for this client."""
        repository = self.store.repository(kind, repository_id)
        return None if repository is None or (repository.private and not self.trusted) else repository

    def read_body(self) -> bytes:
        self.body.set_limit(MAXIMUM_JSON_BYTES if self.trusted else _MAXIMUM_STRANGERS_JSON_BYTES)
        return self.body.readall()

    def json(self) -> dict[str, Any]:
        return parse_object(self.read_body() or b"{}")


def parse_object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise HubError(400, f"the request body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise HubError(400, f"the request body must be a JSON object, got {type(value).__name__}")
    return value


def text(payload: dict[str, Any], key: str, default: str | None = None) -> str:
    """A string field of a JSON object; required unless there is a default."""
    value = default if payload.get(key) is None else payload[key]
    if not isinstance(value, str):
        raise HubError(400, f"field {key!r} must be a string, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise HubError(400, f"field {key!r} is not valid Unicode") from error
    return value


def whole_number(payload: dict[str, Any], key: str) -> int:
    """A required field of a JSON object that is a non-negative integer of at most 18 digits."""
    value = payload.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 10**18:
        raise HubError(400, f"field {key!r} must be a non-negative integer below 10**18, got {type(value).__name__}")
    return value
