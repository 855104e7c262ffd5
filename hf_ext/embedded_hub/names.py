"""Names that the embedded Hub accepts: repositories, files, branches and tags."""

from __future__ import annotations

import re
from typing import Any

from hf_ext.hub.card_rules import is_ref_name

from .errors import HubError

# `datasets/x/y` and `api/...` are URL prefixes: an owner of that name could not be addressed.
_RESERVED_OWNERS = frozenset({"api", "datasets", "lfs", "models", "spaces"})
_MOST_BYTES, _MOST_COMPONENT_BYTES = 1024, 255
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\\]")
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
    if not separator or owner.lower() in _RESERVED_OWNERS:
        raise HubError(400, f"repository id {repository_id!r} must be 'owner/name' with an owner that is not reserved")
    return repository_id


def check_file_path(path: str) -> str:
    """Return the path of a file in a repository, or refuse one that could leave it or not be checked out."""
    components = path.lower().split("/")
    # A lone surrogate is no Unicode; "?" has as many bytes as its error.
    sizes = [len(component.encode(errors="replace")) for component in path.split("/")]
    faults = {
        "control characters and backslashes are forbidden": _FORBIDDEN.search(path),
        "it is not valid Unicode": path != path.encode(errors="replace").decode(),
        f"it is longer than {_MOST_BYTES} bytes": sum(sizes) + len(sizes) - 1 > _MOST_BYTES,
        "it must be relative, without empty, '.' or '..' components": {"", ".", ".."} & set(components),
        "'.git' is reserved": ".git" in components,
        f"a component is longer than {_MOST_COMPONENT_BYTES} bytes": max(sizes) > _MOST_COMPONENT_BYTES,
    }
    if found := [reason for reason, is_broken in faults.items() if is_broken]:
        raise HubError(400, f"file path {path!r} is not allowed: {found[0]}")
    return path


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
