"""Access control of the embedded Hub: host names, origins of web pages, the token, and upload tickets."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from .errors import HubError
from .storage import Blob

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[0-9a-z_](?:[0-9a-z_.-]*[0-9a-z_.])?)(?::(?P<port>[0-9]{1,5}))?")
_TICKET_SECONDS = 6 * 3600


class Access:
    """Access control of one server; without a token, every client has all rights."""

    def __init__(self, token: str | None = None, allowed_hosts: Iterable[str] = (), public_url: str | None = None):
        if token is not None and (not token or not token.isascii() or any(letter.isspace() for letter in token)):
            raise ValueError("token must be ASCII letters, digits and signs without spaces, and may not be empty")
        self._token = token
        self.public_url = None if public_url is None else _read_url(public_url)
        # Names that are valid for every port, and names with a port.
        self._names = set[str]()
        for host in allowed_hosts:
            match = _HOST.fullmatch(host.lower())
            if match is None:
                raise ValueError(f"allowed host {host!r} must be NAME or NAME:PORT, as in hub.lab or [fd00::1]:8765")
            self._names.add(match[0])
        self._origin = None
        if self.public_url is not None:
            split = urlsplit(self.public_url)
            self._names.add(url_host(str(split.hostname)))
            self._origin = f"{split.scheme}://{split.netloc}"

    def add_own_names(self, host: str, port: int) -> None:
        """Answer to loopback names and to the name listened on, at this port."""
        for name in ("localhost", "127.0.0.1", "[::1]", url_host(host.lower())):
            # Clients leave out the port that is the default of http.
            self._names |= {f"{name}:{port}", *([name] if port == 80 else [])}

    def base_url(self, headers: Headers, local: Any) -> str:
        """Refuse other hosts (DNS rebinding) and pages of other origins; returns the server as clients reach it."""
        sent = headers.getlist("Host")
        match = _HOST.fullmatch(sent[0].lower()) if len(sent) == 1 else None
        # A socket of both families shows IPv4 addresses as IPv6.
        end = f"{url_host(local[0].removeprefix('::ffff:'))}:{local[1]}"
        if match is None or not {match["name"], match[0]} & {*self._names, end}:
            raise HubError(403, f"Host {sent!r} is not a name of this server: add it with --allowed-host")
        if headers.get("Origin", f"http://{match[0]}").lower() not in (f"http://{match[0]}", self._origin):
            raise HubError(403, "requests from web pages of another origin are refused")
        return self.public_url or f"http://{sent[0]}"

    def is_trusted(self, headers: Headers) -> bool:
        """True if a client may write and see private repositories. A wrong token is an error."""
        sent = headers.getlist("Authorization")
        if self._token is None or not sent:
            return self._token is None
        if len(sent) != 1 or not hmac.compare_digest(sent[0].encode("latin-1"), f"Bearer {self._token}".encode()):
            raise HubError(401, "Invalid credentials in Authorization header")
        return True


class UploadTickets:
    """Signed permissions to send one file. The client sends LFS content without its token, so the URL carries them."""

    # A ticket signs hash, length and time of expiry with a key of this process. Whoever sees the URL can send that one
    # content until then, and nothing else. No list is kept: after a restart clients ask again.

    def __init__(self, key: bytes):
        self._key = key

    def issue(self, blob: Blob) -> dict[str, str]:
        """Query parameters that allow to upload this content, for some hours."""
        expires = str(int(time.time()) + _TICKET_SECONDS)
        return {"size": str(blob.size), "expires": expires, "signature": self._sign(blob, expires)}

    def check(self, blob: Blob, expires: str, signature: str) -> None:
        """Refuse an invalid or expired ticket with status 403."""
        valid = hmac.compare_digest(self._sign(blob, expires).encode(), signature.encode("utf-8", "replace"))
        if not valid or int(expires) < time.time():
            raise HubError(403, "the upload URL is not valid any more: ask the LFS batch endpoint for a new one")

    def _sign(self, blob: Blob, expires: str) -> str:
        message = f"{blob.sha256}:{blob.size}:{expires}".encode("utf-8", "replace")
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()


def url_host(host: str) -> str:
    """A host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def _read_url(url: str) -> str:
    """The URL of a proxy, without a slash at its end."""
    try:
        split = urlsplit(url)
        usable = split.scheme in ("http", "https") and _HOST.fullmatch(split.netloc.lower()) is not None
    except ValueError:
        usable = False
    if not usable or split.query or split.fragment or not url.isascii() or any(letter in url for letter in ' "<>'):
        raise ValueError(f"public_url {url!r} must be http(s)://NAME[:PORT][/PATH], as in https://hub.lab.example")
    return f"{split.scheme}://{split.netloc.lower()}{split.path}".rstrip("/")
