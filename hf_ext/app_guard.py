"""Middleware of the app: accepts only names of this machine, hides the server's folders, and fetches nothing."""

from __future__ import annotations

import json
import posixpath
import re
import secrets
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from gradio.utils import get_upload_folder
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hf_ext.embedded_hub.access import Access
from hf_ext.embedded_hub.errors import HubError

OWN_NAMES = ("127.0.0.1", "localhost", "[::1]")
# Bytes of all that a browser sends but uploads, which gradio bounds.
MAX_BODY = 4 * 2**20
# What has text in it; pictures and sounds go through as they are.
_TEXTS = ("application/json", "text/")
# What the page and clients of its API call. gradio's other routes fetch addresses, write files that stay, start
# programs. `run` answers for what has no queue alone: the examples.
_API = re.compile(
    r"/gradio_api/(?:app_id|call|cancel|heartbeat|info|login_check|openapi\.json|queue|reset|run|startup-events"
    r"|stream|theme\.css|upload|upload_progress|user|file=.*)(?:/.*)?",
    re.DOTALL,
)
_OTHERS = re.compile(r"/(?:gradio_api|monitoring|custom_component|runs|proxy|dev)(?:[/=].*)?", re.DOTALL)


class Guard:
    """
    An application behind the rules of the embedded Hub for names and origins. gradio names files by their path on the
    server; on the way out the folder of the cache gets another name of the same length, and on the way in its own.

    `names` are further names of the server, `None` where everybody may call it.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str] | None) -> None:
        self._app = app
        self._access = None if names is None else Access(allowed_hosts=[*OWN_NAMES, *names])
        folder = get_upload_folder()
        self._folder, self._alias = folder.encode(), f"/{secrets.token_hex(len(folder))[: len(folder) - 1]}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            # The page uses none.
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                self._check_names(headers, scope["server"])
                path = self._find_path(scope["path"])
                if not headers.get("Content-Type", "").lower().startswith("multipart/"):
                    receive = await self._read(receive)
            except HubError as error:
                await PlainTextResponse(error.message, error.status)(scope, receive, send)
                return
            scope, send = {**scope, "path": path, "raw_path": quote(path).encode()}, self._hide(send)
        await self._app(scope, receive, send)

    def _check_names(self, headers: Headers, server: Any) -> None:
        """Refuses other names of the server, also of a proxy before it, and other sites' pages."""
        if self._access is None:
            return
        self._access.base_url(headers, server)
        for host in headers.getlist("X-Forwarded-Host"):
            self._access.base_url(Headers({"Host": host}), server)
        # Browsers say so of pictures and scripts too, for which they send no Origin. A link may lead here.
        other = headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
        if other and headers.get("Sec-Fetch-Dest") != "document":
            raise HubError(403, "requests of web pages of another origin are refused")

    def _find_path(self, path: str) -> str:
        """The path of the application for one of a browser."""
        folder, alias = self._folder.decode(), self._alias.decode()
        if _OTHERS.fullmatch(path) and not _API.fullmatch(path):
            raise HubError(404, "the app does not have this address")
        before, file, name = path.partition("/gradio_api/file=")
        if not file:
            return path
        if not name.startswith(f"{alias}/") or posixpath.normpath(name) != name:
            raise HubError(403, "not a file of this page; only files that it shows or received are sent")
        return f"{before}{file}{name.replace(alias, folder, 1)}"

    async def _read(self, receive: Receive) -> Receive:
        """The whole body, so that no name is cut in two, as the only message."""
        message, body = await receive(), bytearray()
        while message["type"] == "http.request":
            body += message.get("body", b"")
            if len(body) > MAX_BODY:
                raise HubError(413, f"a request of this kind may have {MAX_BODY / 2**20:g} MB; send less")
            if not message.get("more_body"):
                break
            message = await receive()
        try:
            fetches = _names_address(json.loads(body or b"null"))
        except (ValueError, RecursionError) as error:
            raise HubError(400, "the body is not valid JSON") from error
        if fetches:
            raise HubError(400, "files of other addresses are not fetched: upload them")
        waiting = [{**message, "body": bytes(body).replace(self._alias, self._folder)}]

        async def give() -> Message:
            return waiting.pop() if waiting else await receive()

        return give

    def _hide(self, send: Send) -> Send:
        """The way out; an event or an answer of JSON is one piece."""
        text = False

        async def give(message: Message) -> None:
            nonlocal text
            if message["type"] == "http.response.start":
                text = Headers(raw=message["headers"]).get("Content-Type", "").startswith(_TEXTS)
            elif text and "body" in message:
                message = {**message, "body": message["body"].replace(self._folder, self._alias)}
            await send(message)

        return give


def _names_address(value: Any) -> bool:
    """Tells if a file of a request is an address, which gradio would fetch."""
    if isinstance(value, list):
        return any(map(_names_address, value))
    if not isinstance(value, dict):
        return False
    path = value.get("path")
    return isinstance(path, str) and "://" in path or any(map(_names_address, value.values()))
