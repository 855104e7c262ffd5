"""Endpoints of the embedded Hub for whole repositories: create, list, move, delete."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from starlette.responses import Response

from hf_ext.hub.card_rules import check_card
from hf_ext.hub.front_matter import front_matter

from . import descriptions, uploads
from .errors import HubError
from .objects import OWNER, Operation
from .repository import Repository
from .store import KINDS
from .transport import Request, json_response, text

_REPOSITORIES_PAGE = 1000
_STRANGERS_CARD_CHARACTERS = 64 << 10


def whoami(request: Request) -> Response:
    """Name and role of a token."""
    if not request.trusted:
        raise HubError(401, "Invalid username or password.")
    token = {"type": "access_token", "accessToken": {"displayName": OWNER, "role": "write"}}
    return json_response({"type": "user", "id": OWNER, "name": OWNER, "fullname": OWNER, "orgs": [], "auth": token})


def validate_yaml(request: Request) -> Response:
    """Check the metadata of a model or dataset card."""
    asked = request.json()
    card, kind = text(asked, "content"), text(asked, "repoType", "model")
    if not request.trusted and len(front_matter(card)) > _STRANGERS_CARD_CHARACTERS:
        # Reading YAML takes time. Clients send the token with the commit of a card, so longer cards are read then.
        told = f"metadata of more than {_STRANGERS_CARD_CHARACTERS} characters is checked only with the token"
        return json_response({"errors": [], "warnings": [{"message": told}]})
    try:
        metadata = descriptions.read_metadata(card)
    except ValueError as error:
        return json_response({"errors": [{"message": str(error)}], "warnings": []}, 400)
    problems = check_card(card, metadata) if kind == "model" else []
    errors = [{"message": f'"{each.field}" {each.reason}'} for each in problems if each.refused]
    warnings = [{"message": f'"{each.field}" {each.reason}'} for each in problems if not each.refused]
    if not metadata:
        warnings.append({"message": "empty or missing yaml metadata in repo card"})
    return json_response({"errors": errors, "warnings": warnings}, 400 if errors else 200)


def create_repository(request: Request) -> Response:
    """Create a repository with a first commit; status 409 and its URL when it exists."""
    payload = request.json()
    kind, repository_id = _named_repository(payload)
    private = payload.get("visibility") == "private" or payload.get("private") is True
    store = request.store
    with store.blobs.batch() as batch:
        attributes = uploads.store_regular(uploads.DEFAULT_GITATTRIBUTES.encode(), batch)
    try:
        repository = store.create(kind, repository_id, private, [Operation(".gitattributes", attributes)])
    except HubError as error:
        existing = store.repository(kind, repository_id) if error.status == 409 else None
        if existing is None:
            raise
        answer = {"error": error.message, "url": descriptions.repository_url(existing, request.base_url)}
        return json_response(answer, 409, {"X-Error-Message": error.message})
    return json_response({"url": descriptions.repository_url(repository, request.base_url), "name": repository.id})


def delete_repository(request: Request) -> Response:
    """Delete a repository."""
    kind, repository_id = _named_repository(request.json())
    request.store.delete(kind, find_repository(request, kind, repository_id))
    return json_response({})


def move_repository(request: Request) -> Response:
    """Give a repository another id."""
    payload = request.json()
    kind = _kind(payload)
    repository = find_repository(request, kind, text(payload, "fromRepo"))
    request.store.move(kind, repository, text(payload, "toRepo"))
    return json_response({})


def list_repositories(request: Request, kind: str) -> Response:
    """The repositories that the client may see, filtered by author, a part of the id and tags, by pages."""
    author, part = request.parameter("author"), request.parameter("search").lower()
    limit, after = request.number("limit", _REPOSITORIES_PAGE, _REPOSITORIES_PAGE), request.parameter("cursor")
    tags = {*request.query.get("filter", ()), *request.query.get("pipeline_tag", ())}
    page: list[dict[str, Any]] = []
    headers = {}
    for identifier in request.store.identifiers(kind):
        owner = identifier.partition("/")[0]
        if identifier <= after or part not in identifier.lower() or author not in ("", owner):
            continue
        repository = _see(request, kind, identifier)
        if repository is None or (tags and tags - set(_describe(request, repository)["tags"])):
            continue
        if len(page) == limit:
            # One more than requested exists.
            query = {"limit": limit, "cursor": page[-1]["id"] if page else after, "author": author, "search": part}
            asked = urlencode({**query, "filter": sorted(tags)}, doseq=True)
            headers["Link"] = f'<{request.base_url}/api/{kind}?{asked}>; rel="next"'
            break
        page.append({"id": repository.id, "private": repository.private, "createdAt": repository.created})
    return json_response(page, headers=headers)


def _describe(request: Request, repository: Repository) -> dict[str, Any]:
    return descriptions.describe_repository(repository, repository.resolve("main"), request.store.blobs, False)


def update_settings(request: Request, repository: Repository) -> Response:
    """Make a repository private or public."""
    payload = request.json()
    visibility = payload.get("visibility", "private" if payload.get("private") else "public")
    if visibility not in ("private", "public") or set(payload) - {"visibility", "private"}:
        raise HubError(400, "only the visibility, 'private' or 'public', can be set")
    repository.set_private(visibility == "private")
    return json_response({})


def find_repository(request: Request, kind: str, repository_id: str) -> Repository:
    """The repository; refused alike if it does not exist and if the client may not see it."""
    repository = _see(request, kind, _full_id(repository_id))
    if repository is None:
        raise HubError(404 if request.trusted else 401, f"Repository not found: {repository_id!r}", "RepoNotFound")
    return repository


def find_moved(request: Request, kind: str, repository_id: str) -> str | None:
    """The new id of a repository that was moved, if the client may see it there."""
    moved = request.store.moved(kind, _full_id(repository_id))
    return moved if moved is not None and _see(request, kind, moved) else None


def _see(request: Request, kind: str, repository_id: str) -> Repository | None:
    """The repository, or None where there is none for this client."""
    repository = request.store.repository(kind, repository_id)
    return None if repository is None or (repository.private and not request.trusted) else repository


def _full_id(repository_id: str) -> str:
    """`owner/name`: an id of one part is of our only user, as it is for who creates a repository by it."""
    return repository_id if "/" in repository_id else f"{OWNER}/{repository_id}"


def _named_repository(payload: dict[str, Any]) -> tuple[str, str]:
    """Kind and id of the repository that a JSON body names."""
    owner = text(payload, "organization", "") or OWNER
    return _kind(payload), f"{owner}/{text(payload, 'name')}"


def _kind(payload: dict[str, Any]) -> str:
    """Kind of the repository that a JSON body names."""
    kinds = {name: kind for kind, name in KINDS.items()}
    kind = kinds.get(text(payload, "type", "model"))
    if kind is None:
        raise HubError(400, f"field 'type' must be one of {sorted(kinds)}, got {payload['type']!r}")
    return kind
