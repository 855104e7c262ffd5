"""Middleware of the app: accepts only names of this machine, hides the server's folders, and limits its files."""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote

from gradio.utils import get_upload_folder
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hf_ext.app_files import Files
from hf_ext.embedded_hub.access import Access
from hf_ext.embedded_hub.errors import HubError

OWN_NAMES = ("127.0.0.1", "localhost", "[::1]")
# Bytes of an upload, and of what else a browser sends.
MAX_UPLOAD, MAX_JSON = 101 * 2**20, 4 * 2**20
# What has text in it; pictures and sounds go through as they are.
_TEXTS = ("application/json", "text/")
# What the page and clients of its API call. gradio's other routes fetch addresses, write files that stay, start
# programs. `run` answers for what has no queue alone: the examples.
_API = re.compile(
    r"/gradio_api/(?:app_id|call|cancel|heartbeat|info|login_check|openapi\.json|queue|reset|run|startup-events"
    r"|stream|theme\.css|upload|upload_progress|user|file=.*)(?:/.*)?",
    re.DOTALL,
)
# Calls of programs, which have no page: their files are those of the call, until its answer is read.
_CALL = re.compile(r"/gradio_api/call/[^/]+(?:/([^/]+))?/?")
_OTHERS = re.compile(r"/(?:gradio_api|monitoring|custom_component|runs|proxy|dev)(?:[/=].*)?", re.DOTALL)


class Refused(Exception):
    """A request that is not answered: status and sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


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
        self._files = Files(Path(folder))
        self._folder, self._alias = folder.encode(), f"/{secrets.token_hex(len(folder))[: len(folder) - 1]}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            # The page uses none.
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def answer(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            headers = Headers(scope=scope)
            self._check_names(headers, scope["server"])
            path = self._find_path(scope["path"])
            is_json = headers.get("Content-Type", "").lower().startswith("application/json")
            most = MAX_JSON if is_json else MAX_UPLOAD
            receive, page, sent = self._limit_body(receive, most), None, b""
            if is_json:
                sent, receive = await self._read(receive)
                page = _find_page(sent)
            scope = {**scope, "path": path, "raw_path": quote(path).encode()}
            with self._keep_room(scope, headers, most), self._count_files(scope, page, sent) as follow:
                await self._app(scope, receive, self._hide(answer, follow))
        except Refused as error:
            if not begun:
                await PlainTextResponse(str(error), error.status)(scope, receive, send)

    def _check_names(self, headers: Headers, server: Any) -> None:
        """Refuses other names of the server, also of a proxy before it, and other sites' pages."""
        if self._access is None:
            return
        try:
            self._access.base_url(headers, server)
            for host in headers.getlist("X-Forwarded-Host"):
                self._access.base_url(Headers({"Host": host}), server)
        except HubError as error:
            raise Refused(error.status, error.message) from error
        # Browsers say so of pictures and scripts too, for which they send no Origin. A link may lead here.
        other = headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
        if other and headers.get("Sec-Fetch-Dest") != "document":
            raise Refused(403, "requests of web pages of another origin are refused")

    def _find_path(self, path: str) -> str:
        """The path of the application for one of a browser."""
        folder, alias = self._folder.decode(), self._alias.decode()
        if _OTHERS.fullmatch(path) and not _API.fullmatch(path):
            raise Refused(404, "the app does not have this address")
        before, file, name = path.partition("/gradio_api/file=")
        if not file:
            return path
        if not name.startswith(f"{alias}/") or posixpath.normpath(name) != name:
            raise Refused(403, "not a file of this page; only files that it shows or received are sent")
        return f"{before}{file}{name.replace(alias, folder, 1)}"

    def _limit_body(self, receive: Receive, most: int) -> Receive:
        """The way in, which ends when more has come than allowed."""
        size = 0

        async def give() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > most:
                raise Refused(413, f"a request of this kind may have {most / 2**20:g} MB; send less")
            return message

        return give

    @contextlib.contextmanager
    def _keep_room(self, scope: Scope, headers: Headers, most: int) -> Iterator[None]:
        """Room for the file that a request brings or whose answer is one."""
        if scope["method"] != "POST":
            yield
            return
        told = headers.get("Content-Length", "")
        with self._files.reserve(min(int(told), most) if told.isdecimal() else most) as room:
            if not room:
                raise Refused(507, "the app has no room for further files: wait a minute and try again")
            yield

    @contextlib.contextmanager
    def _count_files(self, scope: Scope, page: str | None, sent: bytes) -> Iterator[Callable[[bytes], None]]:
        """Files of the page or the call that a request belongs to; gives what is told of the answer's parts."""
        path, call = scope["path"], _CALL.fullmatch(scope["path"])
        _, beats, heart = path.partition("/gradio_api/heartbeat/")
        if page is None:
            page = parse_qs(scope["query_string"].decode("latin-1")).get("session_hash", [None])[0]

        def follow(part: bytes) -> None:
            if call and page is None and (event := _find_page(part, "event_id")):
                self._files.hold(event, sent)
            elif page is not None:
                self._files.hold(page, part)

        if page is not None:
            self._files.hold(page, sent)
        try:
            with self._files.keep_open(heart) if beats else contextlib.nullcontext():
                yield follow
        finally:
            if call and call[1]:
                self._files.release(call[1])

    async def _read(self, receive: Receive) -> tuple[bytes, Receive]:
        """The whole body, so that no name is cut in two, as the only message."""
        message, body = await receive(), bytearray()
        while message["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
            message = await receive()
        try:
            fetches = _names_address(json.loads(body or b"null"))
        except (ValueError, RecursionError) as error:
            raise Refused(400, "the body is no JSON that can be read") from error
        if fetches:
            raise Refused(400, "files of other addresses are not fetched: upload them")
        sent = bytes(body).replace(self._alias, self._folder)
        waiting = [{**message, "body": sent}]

        async def give() -> Message:
            return waiting.pop() if waiting else await receive()

        return sent, give

    def _hide(self, send: Send, follow: Callable[[bytes], None]) -> Send:
        """The way out; an event or an answer of JSON is one piece."""
        text = False

        async def give(message: Message) -> None:
            nonlocal text
            if message["type"] == "http.response.start":
                text = Headers(raw=message["headers"]).get("Content-Type", "").startswith(_TEXTS)
            elif text and "body" in message:
                follow(message["body"])
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


def _find_page(body: bytes, key: str = "session_hash") -> str | None:
    """The name that a message of JSON gives to the page that it belongs to."""
    with contextlib.suppress(ValueError):
        told = json.loads(body)
        name = told.get(key) if isinstance(told, dict) else None
        return name if isinstance(name, str) else None
    return None
