"""Names that the embedded Hub accepts: repositories, files, branches and tags."""

from __future__ import annotations

import re
from typing import Any

from hf_ext.hub.ref_names import is_ref_name

from .errors import HubError

# `datasets/x/y` and `api/...` are URL prefixes: an owner of that name could not be addressed.
RESERVED_OWNERS = frozenset({"api", "datasets", "lfs", "models", "spaces"})
MAXIMUM_PATH_BYTES = 1024
MAXIMUM_COMPONENT_BYTES = 255
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_repository_id(repository_id: str) -> str:
    """Return `owner/name`, or refuse it by the rule of the Hub (`huggingface_hub.utils.validate_repo_id`)."""
    # Imported on first use, because it takes longer than the rest of the start.
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository_id)
    except HFValidationError as error:
        raise HubError(400, str(error)) from error
    owner, separator, _ = repository_id.partition("/")
    if not separator or owner.lower() in RESERVED_OWNERS:
        raise HubError(400, f"repository id {repository_id!r} must be 'owner/name' with an owner that is not reserved")
    return repository_id


def check_file_path(path: str) -> str:
    """Return the path of a file in a repository, or refuse one that could leave it or not be checked out."""
    reason = _fault_of_path(path)
    if reason:
        raise HubError(400, f"file path {path!r} is not allowed: {reason}")
    return path


def _fault_of_path(path: str) -> str | None:
    """The reason for refusing a file path, or None."""
    if _CONTROL.search(path) or "\\" in path:
        return "control characters and backslashes are forbidden"
    try:
        length = len(path.encode())
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    if length > MAXIMUM_PATH_BYTES:
        return f"it is longer than {MAXIMUM_PATH_BYTES} bytes"
    for component in path.split("/"):
        if component in ("", ".", ".."):
            return "it must be relative, without empty, '.' or '..' components"
        if component.lower() == ".git":
            return "'.git' is reserved"
        if len(component.encode()) > MAXIMUM_COMPONENT_BYTES:
            return f"a component is longer than {MAXIMUM_COMPONENT_BYTES} bytes"
    return None


def check_ref_name(name: str) -> str:
    """Return the name of a branch or tag, or refuse it by git's rules for refs."""
    if not is_ref_name(name):
        raise HubError(400, f"{name!r} is not a valid name for a branch or tag (git's rules, and not a commit hash)")
    return name


def check_sha256(digest: Any) -> str:
    """Return a lower-case hexadecimal SHA-256, or refuse it: it becomes a file name."""
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise HubError(400, f"oid must be the 64 lower-case hexadecimal digits of a SHA-256, got {digest!r}")
    return digest
