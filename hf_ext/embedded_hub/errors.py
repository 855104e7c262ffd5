"""The one exception of the embedded Hub: an HTTP status with the error code that `huggingface_hub` maps to a class."""


class HubError(Exception):
    """A request that the embedded Hub refuses."""

    def __init__(self, status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = headers or {}


def revision_not_found(revision: str) -> HubError:
    """The error that becomes `RevisionNotFoundError`."""
    return HubError(404, f"Invalid rev id: {revision!r} is no branch, tag, PR or commit", "RevisionNotFound")


def entry_not_found(message: str, commit: str | None = None) -> HubError:
    """The error that becomes `EntryNotFoundError`; the client caches the absence for `commit`."""
    return HubError(404, message, "EntryNotFound", {"X-Repo-Commit": commit} if commit else None)
