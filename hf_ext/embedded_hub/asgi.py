"""ASGI application of the embedded Hub, which answers each request in a thread."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .access import Access, UploadTickets
from .errors import HubError
from .routes import dispatch
from .store import HubStore
from .transport import Body, Request, error_response

logger = logging.getLogger(__name__)


class HubApplication:
    """All that the requests to one server share."""

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
        response = await asyncio.to_thread(self._answer, scope, headers, body, identifier)
        if response is not None:
            # Clients show it with an error, and the log names it.
            response.headers["X-Request-Id"] = identifier
            await response(scope, receive, send)

    def _answer(self, scope: Scope, headers: Headers, body: Body, identifier: str) -> Response | None:
        """The response of a route, or for its error; unexpected errors are logged with their traceback."""
        try:
            return dispatch(self._read_request(scope, headers, body))
        except ClientDisconnect:
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
            method=scope["method"],
            path=path,
            query=fields,
            headers=headers,
            body=body,
            base_url=base_url,
            trusted=self._access.is_trusted(headers),
            store=self.store,
            tickets=self._tickets,
        )
