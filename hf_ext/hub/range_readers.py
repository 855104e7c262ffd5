"""Byte ranges of files: on this disk, or on a Hub over HTTP Range requests pinned to one commit."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import httpx2
from huggingface_hub import HfApi, constants, get_session, hf_hub_url
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers

from ..system import read_at
from .header_format import CheckpointError

# A range is asked for at most this often; each retry resumes at the byte that was reached.
_ATTEMPTS = 5
_FIRST_WAIT_SECONDS = 0.25
_COMMIT_HEADER = constants.HUGGINGFACE_HEADER_X_REPO_COMMIT
_RETRIED_STATUS = (408, 429, 500, 502, 503, 504)
_FAULTS = {
    **dict.fromkeys((401, 403), "access denied; pass a token that may read the repository"),
    404: "no such file at this commit (HTTP 404); check the repository and the revision",
    416: "the file is shorter than the Hub lists it (HTTP 416); open the checkpoint again",
}


class LocalFile:
    """Reads ranges of a file on disk; it is kept open, so that replacing it does not mix two versions."""

    # Plain reads and no memory map: a file that another process cuts must be an error, not a crash.

    # Of the length and the JSON of a safetensors file, once read; `sha256` is of the whole, where a Hub lists it.
    header_sha256 = ""

    def __init__(self, path: Path, name: str, sha256: str | None = None) -> None:
        # To open a pipe would wait for whoever writes into it.
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path}: not a regular file; give a folder, a .safetensors file or org/name.")
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by close())
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened ({error.strerror}); check the path.") from error
        self._name, self.sha256 = name, sha256
        self.path: Path | None = path
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
                told = f"short read, {done} of {len(buffer)} bytes from byte {start}"
                raise CheckpointError(f"{self._name}: {told}; the file was cut meanwhile: save or fetch it again.")
            done += count

    def will_need(self, start: int, length: int) -> None:
        """Lets the system read these bytes ahead, where it can."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), start, length, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        self.descriptor = None
        self._file.close()


class RemoteFile:
    """Reads ranges of one file of a Hub repository at one commit."""

    # Ranges that are fetched over minutes must be of the same bytes. So the URL names the commit, and of every answer
    # are compared: the commit, the ETag with the first one's, and Content-Range with what was asked and listed. An
    # answer that is cut goes on at the byte that was reached. Of redirects, the client drops the token for good as
    # soon as one leaves the Hub's origin (scheme, host and port).

    path: Path | None = None
    descriptor: int | None = None
    header_sha256 = ""

    def __init__(self, api: HfApi, repo_id: str, name: str, commit: str, size: int, sha256: str | None = None) -> None:
        self.size, self.sha256, self._commit = size, sha256, commit
        self._where = f"{repo_id}@{commit[:12]}/{name}"
        self._url = hf_hub_url(repo_id, name, revision=commit, endpoint=api.endpoint)
        # compression would change the bytes that a range means
        self._headers = build_hf_headers(token=api.token) | {"Accept-Encoding": "identity"}
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
            except (httpx2.TooManyRedirects, httpx2.UnsupportedProtocol) as error:
                raise self._error(f"the Hub redirects to where nothing can be read ({error})") from error
            except (httpx2.TransportError, _TryAgain) as error:
                problem = error
            except OfflineModeIsEnabled as error:
                raise self._error("it is not in the cache, and offline mode is on; unset HF_HUB_OFFLINE") from error
            if done == len(buffer):
                return
        told = f"short read, {done} of {len(buffer)} bytes from byte {start} after {_ATTEMPTS} attempts"
        why = problem or "the connection was closed early"
        raise self._error(f"{told} ({why}); check the connection and try again") from problem

    def will_need(self, start: int, length: int) -> None:
        """Nothing to do: a range is fetched when it is read."""

    def close(self) -> None:
        """Nothing to release: connections belong to the session of `huggingface_hub`."""

    def _stream(self, start: int, stop: int) -> Iterator[bytes]:
        """Yields the bytes of [start, stop) as they arrive, after the answer has been verified."""
        headers = self._headers | {"Range": f"bytes={start}-{stop - 1}"}
        options: Any = {"headers": headers, "follow_redirects": True, "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT}
        with get_session().stream("GET", self._url, **options) as response:
            if fault := self._find_fault(response, start, stop):
                raise self._error(fault)
            yield from response.iter_raw()

    def _find_fault(self, response: httpx2.Response, start: int, stop: int) -> str | None:
        """The reason for which an answer cannot be the bytes of this commit, or None."""
        status, chain = response.status_code, [*response.history, response]
        if status in _RETRIED_STATUS:
            raise _TryAgain(f"HTTP {status}")
        if status >= 400:
            return _FAULTS.get(status, f"the Hub answered HTTP {status}; try again later")
        if chain[0].url.scheme == "https" and any(each.url.scheme != "https" for each in chain):
            return "the Hub redirects from https to http, which is not secure; report it to its owner"
        # Only the Hub itself can say which commit this is, not the storage that it redirects to.
        own = [each.headers for each in chain if _origin(each.url) == _origin(chain[0].url)]
        told = next((headers for headers in reversed(own) if _COMMIT_HEADER in headers), httpx2.Headers())
        commit, etag = told.get(_COMMIT_HEADER), told.get(constants.HUGGINGFACE_HEADER_X_LINKED_ETAG, told.get("ETag"))
        if commit != self._commit:
            return f"the Hub answered for commit {commit}; open the checkpoint again"
        if etag is None or (self._etag is not None and etag != self._etag):
            return f"the ETag was {self._etag}, now it is {etag}: the file changed; open the checkpoint again"
        self._etag = etag
        # A server that ignores Range is right when the whole file was asked for.
        if status == 200 and (start, stop) == (0, self.size):
            return None
        if status != 206:
            return f"HTTP {status} instead of 206 for a range; download the repository and open the folder"
        expected, found = f"bytes {start}-{stop - 1}/{self.size}", response.headers.get("Content-Range")
        if found is not None and found.strip() == expected:
            return None
        return f"Content-Range is {found!r}, expected {expected}: the file changed; open the checkpoint again"

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: {what}.")


# A file of known length whose bytes can be read from any place, by several threads at once.
RangeReader: TypeAlias = LocalFile | RemoteFile


class _TryAgain(Exception):
    """An answer that another attempt may better."""


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port
