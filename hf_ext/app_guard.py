"""Middleware of the app: accepts only names of this machine, and hides the server's folders."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from urllib.parse import quote

from gradio.utils import get_upload_folder
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hf_ext.embedded_hub.access import Access
from hf_ext.embedded_hub.errors import HubError

OWN_NAMES = ("127.0.0.1", "localhost", "[::1]")
# What has text in it; pictures and sounds go through as they are.
_TEXTS = ("application/json", "text/")


class Guard:
    """
    An application behind the rules of the embedded Hub for names and origins. gradio names files by their path on the
    server; on the way out the folder of the cache gets another name of the same length, and on the way in its own.

    Args:
        app: The application.
        names (`Iterable[str]`, *optional*): Further names of the server; `None` where everybody may call it.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str] | None) -> None:
        self._app = app
        self._access = None if names is None else Access(allowed_hosts=[*OWN_NAMES, *names])
        folder = get_upload_folder()
        self._folder, self._alias = folder.encode(), f"/{secrets.token_hex(len(folder))[: len(folder) - 1]}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            if self._access is not None:
                self._access.base_url(headers, scope["server"])
        except HubError as error:
            await PlainTextResponse(error.message, error.status)(scope, receive, send)
            return
        folder, alias = self._folder.decode(), self._alias.decode()
        path = scope["path"].replace(alias, folder)
        inside = {**scope, "path": path, "raw_path": quote(path).encode()}
        if headers.get("Content-Type", "").startswith("application/json"):
            receive = await self._read(receive)
        await self._app(inside, receive, self._hide(send))

    async def _read(self, receive: Receive) -> Receive:
        """The whole body, so that no name is cut in two, as the only message."""
        message, body = await receive(), b""
        while message["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
            message = await receive()
        waiting = [{**message, "body": body.replace(self._alias, self._folder)}]

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
