"""Byte ranges of files: on this disk, or on a Hub over HTTP Range requests pinned to one commit."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urljoin, urlsplit

import httpx2
from huggingface_hub import constants, get_session, hf_hub_url
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers

from ..system import read_at
from .header_format import CheckpointError

# A range is asked for at most this often; each retry resumes at the byte that was reached.
_ATTEMPTS = 5
_FIRST_WAIT_SECONDS = 0.25
_MAX_REDIRECTS = 5
_COMMIT_HEADER = constants.HUGGINGFACE_HEADER_X_REPO_COMMIT
_RETRIED_STATUS = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class WeightsFile:
    """One safetensors file of a checkpoint, as far as it can be told apart from others without reading its tensors."""

    size: int
    # of its eight bytes of length and its JSON
    header_sha256: str
    # of the whole file, where a Hub lists it
    sha256: str | None
    # on this disk; `None` if it is read from a Hub
    path: Path | None


class LocalFile:
    """Reads ranges of a file on disk; it is kept open, so that replacing it does not mix two versions."""

    # Plain reads and no memory map: a file that another process cuts must be an error, not a crash.

    def __init__(self, path: Path, name: str, sha256: str | None = None) -> None:
        # To open a pipe would wait for whoever writes into it.
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path}: not a regular file; give a folder, a .safetensors file or org/name.")
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by close())
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened ({error.strerror}); check the path.") from error
        self.name = name
        self.path: Path | None = path
        self.sha256 = sha256
        # for plain reads, as long as the file is open
        self.descriptor: int | None = self._file.fileno()
        self.size = os.fstat(self._file.fileno()).st_size

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fills `buffer` with the bytes from `start` on; threads do not wait for each other."""
        done = 0
        # one call may return less than was asked for (2 GiB at most on Linux)
        while done < len(buffer):
            count = read_at(self._file.fileno(), buffer[done:], start + done)
            if not count:
                raise CheckpointError(
                    f"{self.name}: short read, {done} of {len(buffer)} bytes from byte {start}; "
                    "the file was cut while it was being read: save or fetch it again."
                )
            done += count

    def will_need(self, start: int, length: int) -> None:
        """Lets the system read these bytes ahead, where it can."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), start, length, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Closes the file."""
        self.descriptor = None
        self._file.close()


class RemoteFile:
    """Reads ranges of one file of a Hub repository at one commit."""

    # Ranges that are fetched over minutes must be of the same bytes. So the URL names the commit, and of every answer
    # are compared: the commit, the ETag with the first one's, and Content-Range with what was asked and listed. An
    # answer that is cut goes on at the byte that was reached. Redirects are followed by hand: the token goes to the
    # Hub alone, and is dropped for good as soon as one leaves its origin (scheme, host and port).

    def __init__(
        self,
        repo_id: str,
        name: str,
        commit: str,
        size: int,
        token: str | bool | None,
        endpoint: str | None,
        sha256: str | None = None,
    ) -> None:
        self.name = name
        self.size = size
        self.path: Path | None = None
        self.descriptor: int | None = None
        self.sha256 = sha256
        self._commit = commit
        self._where = f"{repo_id}@{commit[:12]}/{name}"
        self._url = hf_hub_url(repo_id, name, revision=commit, endpoint=endpoint)
        # compression would change the bytes that a range means
        self._headers = build_hf_headers(token=token) | {"Accept-Encoding": "identity"}
        self._etag: str | None = None

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fills `buffer` with the bytes from `start` on, resuming after a cut connection."""
        done = 0
        problem: Exception | None = None
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_FIRST_WAIT_SECONDS * 2 ** (attempt - 1))
            try:
                for chunk in self._stream(start + done, start + len(buffer)):
                    if done + len(chunk) > len(buffer):
                        raise self._error(f"the Hub sent more than the {len(buffer)} bytes that were asked for")
                    buffer[done : done + len(chunk)] = chunk
                    done += len(chunk)
            except (httpx2.TransportError, _TryAgain) as error:
                problem = error
            except OfflineModeIsEnabled as error:
                raise self._error(
                    "offline mode is on and the file is not in the cache; unset HF_HUB_OFFLINE"
                ) from error
            if done == len(buffer):
                return
        raise self._error(
            f"short read, {done} of {len(buffer)} bytes from byte {start} after {_ATTEMPTS} attempts "
            f"({problem or 'the connection was closed early'}); check the connection and try again"
        ) from problem

    def will_need(self, start: int, length: int) -> None:
        """Nothing to do: a range is fetched when it is read."""

    def close(self) -> None:
        """Nothing to release: connections belong to the session of `huggingface_hub`."""

    def _stream(self, start: int, stop: int) -> Iterator[bytes]:
        """Yields the bytes of [start, stop) as they arrive, after the answer has been verified."""
        url, headers = self._url, self._headers | {"Range": f"bytes={start}-{stop - 1}"}
        version = None
        for _ in range(_MAX_REDIRECTS + 1):
            with get_session().stream(
                "GET", url, headers=headers, follow_redirects=False, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
            ) as response:
                self._verify_status(response)
                # only the Hub itself can say which commit this is, not the storage that it redirects to
                if _origin(url) == _origin(self._url) and _COMMIT_HEADER in response.headers:
                    version = response.headers
                if not response.has_redirect_location:
                    self._verify_version(version)
                    self._verify_range(response, start, stop)
                    yield from response.iter_raw()
                    return
                target = urljoin(url, response.headers["Location"])
                headers = self.headers_for(target, url, headers)
                url = target
        raise self._error(f"more than {_MAX_REDIRECTS} redirects; report it to the owner of the Hub")

    def headers_for(self, target: str, url: str, headers: dict[str, str]) -> dict[str, str]:
        """Headers for a redirect of the Hub: no token to another origin, nothing from https to http."""
        scheme = urlsplit(target).scheme
        if scheme not in ("http", "https") or (urlsplit(url).scheme == "https" and scheme != "https"):
            raise self._error(f"the Hub redirects to {scheme}://, which is not secure; report it to its owner")
        if _origin(target) == _origin(url):
            return headers
        return {key: value for key, value in headers.items() if key.lower() not in ("authorization", "cookie")}

    def _verify_status(self, response: httpx2.Response) -> None:
        status = response.status_code
        if status in _RETRIED_STATUS:
            raise _TryAgain(f"HTTP {status}")
        if status in (401, 403):
            raise self._error(f"access denied (HTTP {status}); pass a token that may read the repository")
        if status == 404:
            raise self._error("no such file at this commit (HTTP 404); check the repository and the revision")
        if status == 416:
            raise self._error("the file is shorter than the Hub lists it (HTTP 416); open the checkpoint again")
        if status >= 400:
            raise self._error(f"the Hub answered HTTP {status}; try again later")

    def _verify_version(self, headers: httpx2.Headers | None) -> None:
        commit = None if headers is None else headers[_COMMIT_HEADER]
        if headers is None or commit != self._commit:
            raise self._error(f"the Hub answered for commit {commit}; open the checkpoint again")
        etag = headers.get(constants.HUGGINGFACE_HEADER_X_LINKED_ETAG) or headers.get("ETag")
        if etag is None or (self._etag is not None and etag != self._etag):
            raise self._error(
                f"the ETag was {self._etag}, now it is {etag}: the file changed; open the checkpoint again"
            )
        self._etag = etag

    def _verify_range(self, response: httpx2.Response, start: int, stop: int) -> None:
        # a server that ignores Range is right when the whole file was asked for
        if response.status_code == 200 and (start, stop) == (0, self.size):
            return
        if response.status_code != 206:
            raise self._error(
                f"HTTP {response.status_code} instead of 206 for a range; download the repository and open the folder"
            )
        expected = (start, stop - 1, self.size)
        found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", response.headers.get("Content-Range", "").strip())
        if found is None or tuple(map(int, found.groups())) != expected:
            raise self._error(
                f"Content-Range is {response.headers.get('Content-Range')!r}, expected bytes "
                f"{expected[0]}-{expected[1]}/{expected[2]}: the file has another length; open the checkpoint again"
            )

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: {what}.")


# A file of known length whose bytes can be read from any place, by several threads at once.
RangeReader: TypeAlias = LocalFile | RemoteFile


class _TryAgain(Exception):
    """An answer that another attempt may better."""


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
