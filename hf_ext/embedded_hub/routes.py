"""The endpoints of the embedded Hub: one table of methods, paths and functions, and who may use each."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, quote

from . import descriptions, downloads, uploads
from .errors import HubError, entry_not_found
from .front_matter import front_matter, read_front_matter
from .names import check_file_path, check_sha256
from .objects import OWNER, Operation
from .repository import Repository
from .storage import Blob
from .store import KINDS
from .transport import Request, Response, json_response, parse_object, text, unquoted

_TREE_PAGE, _EXPANDED_TREE_PAGE, _COMMITS_PAGE = 1000, 50, 100
_PULLS_PAGE = 10
_STRANGERS_CARD_CHARACTERS = 64 << 10
_PULL_STATUSES = ("open", "draft", "closed", "merged")
_NO_XET = "this Hub has no Xet storage: set HF_HUB_DISABLE_XET=1 for the client"


def whoami(request: Request) -> Response:
    """Who holds the token."""
    if not request.may_read:
        raise HubError(401, "Invalid username or password.")
    role = "write" if request.may_write else "read"
    token = {"type": "access_token", "accessToken": {"displayName": OWNER, "role": role}}
    return json_response({"type": "user", "id": OWNER, "name": OWNER, "fullname": OWNER, "orgs": [], "auth": token})


def validate_yaml(request: Request) -> Response:
    """Check the metadata of a model or dataset card."""
    card = text(request.json(), "content")
    if not request.may_read and len(front_matter(card)) > _STRANGERS_CARD_CHARACTERS:
        # Reading YAML takes time. Clients send the token with the commit of the card, and then it is read.
        told = f"metadata of more than {_STRANGERS_CARD_CHARACTERS} characters is not checked without the token"
        return json_response({"errors": [], "warnings": [{"message": told}]})
    try:
        metadata = read_front_matter(card)
    except ValueError as error:
        return json_response({"errors": [{"message": str(error)}], "warnings": []}, 400)
    warnings = [] if metadata else [{"message": "empty or missing yaml metadata in repo card"}]
    return json_response({"errors": [], "warnings": warnings})


def create_repository(request: Request) -> Response:
    """Create a repository with a first commit; status 409 and its URL when it exists."""
    payload = request.json()
    kind, repository_id = _named_repository(payload)
    private = payload.get("visibility") == "private" or payload.get("private") is True
    store = request.server.store
    attributes = uploads.store_regular(uploads.DEFAULT_GITATTRIBUTES.encode(), store.blobs)
    first = [Operation(".gitattributes", attributes)]
    try:
        repository = store.create(kind, repository_id, private, first)
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
    request.server.store.delete(kind, find_repository(request, kind, repository_id))
    return json_response({})


def list_repositories(request: Request, kind: str) -> Response:
    """All repositories that the client may see, filtered by author and a part of the id."""
    author, part = request.parameter("author"), request.parameter("search").lower()
    listed = [
        {"id": repository.id, "private": repository.private, "createdAt": repository.created}
        for repository in request.server.store.repositories(kind)
        if (request.may_read or not repository.private)
        and part in repository.id.lower()
        and author in ("", repository.id.partition("/")[0])
    ]
    return json_response(listed)


def update_settings(request: Request, repository: Repository) -> Response:
    """Make a repository private or public."""
    payload = request.json()
    visibility = payload.get("visibility", "private" if payload.get("private") else "public")
    if visibility not in ("private", "public") or set(payload) - {"visibility", "private"}:
        raise HubError(400, "only the visibility, 'private' or 'public', can be set")
    repository.set_private(visibility == "private")
    return json_response({})


def repository_info(request: Request, repository: Repository, revision: str = "main") -> Response:
    """What a repository holds at a revision."""
    commit = repository.resolve(revision)
    blobs = request.server.store.blobs
    return json_response(descriptions.describe_repository(repository, commit, blobs, request.flag("blobs")))


def auth_check(request: Request, repository: Repository) -> Response:
    """Says that the client may read the repository: dispatch has looked."""
    return json_response({})


def list_tree(request: Request, repository: Repository, revision: str, path: str = "") -> Response:
    """Files and folders of a folder, by pages."""
    commit = repository.resolve(revision)
    snapshot = repository.snapshot(commit)
    path = check_file_path(path.strip("/")) if path.strip("/") else ""
    if path not in snapshot.folders:
        raise entry_not_found(f"{path!r} is not a folder of {repository.id!r} at {revision!r}", commit)
    recursive, expand = request.flag("recursive"), request.flag("expand")
    maximum = _EXPANDED_TREE_PAGE if expand else _TREE_PAGE
    start, limit = request.number("cursor", 0, 10**9), max(request.number("limit", maximum, maximum), 1)
    children = snapshot.children(path, recursive)
    page = children[start : start + limit]
    last = repository.last_changes(commit, page) if expand else {}
    headers = {}
    if start + limit < len(children):
        # The next page is of the same commit, whatever happens to the branch.
        base = descriptions.repository_api_url(repository, request.base_url)
        query = f"recursive={recursive}&expand={expand}&limit={limit}&cursor={start + limit}"
        headers["Link"] = f'<{base}/tree/{commit}/{quote(path, safe="")}?{query}>; rel="next"'
    return json_response(
        [descriptions.describe_entry(snapshot, child, last.get(child)) for child in page], headers=headers
    )


def paths_info(request: Request, repository: Repository, revision: str) -> Response:
    """The files and folders among some paths; what does not exist is left out."""
    body = request.read_body()
    if "json" in request.headers.get("Content-Type", ""):
        payload = parse_object(body)
        paths, expand = payload.get("paths"), payload.get("expand") is True
    else:
        fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
        paths, expand = fields.get("paths"), fields.get("expand", ["false"])[0].lower() == "true"
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise HubError(400, "field 'paths' must be a list of strings")
    commit = repository.resolve(revision)
    snapshot = repository.snapshot(commit)
    present = [path for path in dict.fromkeys(path.strip("/") for path in paths) if path and snapshot.id_of(path)]
    last = repository.last_changes(commit, present) if expand else {}
    return json_response([descriptions.describe_entry(snapshot, path, last.get(path)) for path in present])


def list_refs(request: Request, repository: Repository) -> Response:
    """Branches, tags and pull requests with their commits."""
    return json_response(descriptions.describe_refs(repository, request.flag("include_prs")))


def list_commits(request: Request, repository: Repository, revision: str) -> Response:
    """Commits that a revision can reach, latest first, by pages."""
    head = repository.resolve(revision)
    page, limit = request.number("p", 0, 10**6), max(request.number("limit", _COMMITS_PAGE, _COMMITS_PAGE), 1)
    formatted = "formatted" in (*request.query.get("expand[]", ()), *request.query.get("expand", ()))
    history = list(repository.history(head))
    headers = {"X-Total-Count": str(len(history))}
    if (page + 1) * limit < len(history):
        base = descriptions.repository_api_url(repository, request.base_url)
        expand = "&expand[]=formatted" if formatted else ""
        headers["Link"] = f'<{base}/commits/{head}?p={page + 1}&limit={limit}{expand}>; rel="next"'
    shown = history[page * limit : (page + 1) * limit]
    return json_response([descriptions.describe_commit(commit, formatted) for commit in shown], headers=headers)


def create_branch(request: Request, repository: Repository, name: str) -> Response:
    """Create a branch at `startingPoint`, or at `main`."""
    repository.create_ref("refs/heads", name, text(request.json(), "startingPoint", "main"))
    return json_response({})


def delete_branch(request: Request, repository: Repository, name: str) -> Response:
    """Delete a branch."""
    repository.delete_ref("refs/heads", name)
    return json_response({})


def create_tag(request: Request, repository: Repository, revision: str) -> Response:
    """Tag a revision."""
    repository.create_ref("refs/tags", text(request.json(), "tag"), revision)
    return json_response({})


def delete_tag(request: Request, repository: Repository, name: str) -> Response:
    """Delete a tag."""
    repository.delete_ref("refs/tags", name)
    return json_response({})


def preupload(request: Request, repository: Repository, revision: str) -> Response:
    """Say how each file of a coming commit is to be sent."""
    snapshot = repository.snapshot(repository.resolve(revision))
    return json_response({"files": uploads.plan_uploads(request.json(), snapshot, request.server.store.blobs)})


def lfs_batch(request: Request, repository: Repository) -> Response:
    """Say where to send large files that are not there yet."""
    server = request.server
    href = f"{request.base_url}/lfs/upload"
    plan = uploads.plan_lfs(request.json(), server.store.blobs, server.tickets, href, server.max_file_bytes)
    return json_response(plan, headers={"Content-Type": "application/vnd.git-lfs+json"})


def lfs_upload(request: Request, oid: str) -> Response:
    """Receive a large file; the signature in the URL is the permission."""
    blob = Blob(check_sha256(oid), request.number("size", 0, 10**18))
    request.server.tickets.check(blob, request.parameter("expires"), request.parameter("signature"))
    request.body.trust_sender()
    request.body.set_limit(min(blob.size, request.server.max_file_bytes))
    request.server.store.blobs.receive(request.body, blob)
    return Response()


def commit(request: Request, repository: Repository, revision: str) -> Response:
    """Commit to a branch or pull request, or open a pull request with the commit."""
    # The whole of a commit is bounded as one file is; each regular file in it is bounded by its line.
    request.body.set_limit(request.server.max_file_bytes)
    repository.resolve(revision)
    change = uploads.read_change(request.body, request.server.store.blobs)
    url = descriptions.repository_url(repository, request.base_url)
    answer: dict[str, Any] = {"success": True, "hookOutput": ""}
    if request.flag("create_pr"):
        pull = repository.open_pull(revision, change.title, change.description, change)
        oid = repository.resolve(f"refs/pr/{pull['num']}")
        answer["pullRequestUrl"] = f"{url}/discussions/{pull['num']}"
    else:
        oid = repository.append(revision, change).oid
    return json_response({**answer, "commitOid": oid, "commitUrl": f"{url}/commit/{oid}"})


def list_pulls(request: Request, repository: Repository) -> Response:
    """Pull requests, latest first, by pages."""
    status, start = request.parameter("status"), request.number("p", 0, 10**6) * _PULLS_PAGE
    # A draft is open, and a merged one is closed, as on the Hub.
    wanted = {"open": ("open", "draft"), "closed": ("closed", "merged")}.get(status, _PULL_STATUSES)
    pulls = [pull for pull in reversed(repository.pulls) if pull["status"] in wanted]
    pulls = pulls if request.parameter("type") != "discussion" else []
    shown = [descriptions.describe_pull(repository, pull) for pull in pulls[start : start + _PULLS_PAGE]]
    return json_response({"count": len(pulls), "start": start, "discussions": shown})


def show_pull(request: Request, repository: Repository, number: str) -> Response:
    """One pull request."""
    return json_response(descriptions.describe_pull(repository, repository.pull(int(number))))


def create_pull(request: Request, repository: Repository) -> Response:
    """Open a pull request without a commit yet."""
    payload = request.json()
    if payload.get("pullRequest") is not True:
        raise HubError(400, "this Hub keeps pull requests, but no other discussions")
    pull = repository.open_pull("main", text(payload, "title").strip(), text(payload, "description", ""), None)
    return json_response(descriptions.describe_pull(repository, pull))


def merge_pull(request: Request, repository: Repository, number: str) -> Response:
    """Merge a pull request."""
    return json_response({"mergeCommitId": repository.merge_pull(int(number)).oid})


def set_pull_status(request: Request, repository: Repository, number: str) -> Response:
    """Close or reopen a pull request."""
    repository.set_pull_status(int(number), text(request.json(), "status"))
    described = descriptions.describe_pull(repository, repository.pull(int(number)))
    return json_response({"newStatus": described["events"][-1]})


def refuse_xet(request: Request, repository: Repository, revision: str) -> Response:
    """Tell a client that insists on Xet what to do."""
    raise HubError(404, _NO_XET)


def find_repository(request: Request, kind: str, repository_id: str) -> Repository:
    """The repository, if it exists and the client may see it; the refusal is the same for both."""
    repository = request.server.store.repository(kind, repository_id)
    if repository is None or (repository.private and not request.may_read):
        raise HubError(404 if request.may_read else 401, f"Repository not found: {repository_id!r}", "RepoNotFound")
    return repository


def _named_repository(payload: dict[str, Any]) -> tuple[str, str]:
    """Kind and id of the repository that a JSON body names."""
    kinds = {name: kind for kind, name in KINDS.items()}
    kind = kinds.get(text(payload, "type", "model"))
    if kind is None:
        raise HubError(400, f"field 'type' must be one of {sorted(kinds)}, got {payload['type']!r}")
    owner = text(payload, "organization", "") or OWNER
    return kind, f"{owner}/{text(payload, 'name')}"


_KIND = r"/api/(?P<kind>models|datasets|spaces)"
_API = rf"{_KIND}/(?P<owner>[^/]+)/(?P<repository>[^/]+)"
_WEB = r"/(?:(?P<kind>datasets|spaces)/)?(?P<owner>[^/]+)/(?P<repository>[^/]+)"
_REVISION, _NAME, _NUMBER = "(?P<revision>[^/]+)", "(?P<name>[^/]+)", r"(?P<number>\d{1,9})"

# Method, path, function, and whether only who holds the token may use it (else: whoever may see the repository).
_TABLE: list[tuple[str, str, Callable[..., Response], bool]] = [
    ("GET", "/api/whoami-v2", whoami, False),
    ("POST", "/api/validate-yaml", validate_yaml, False),
    ("POST", "/api/repos/create", create_repository, True),
    ("DELETE", "/api/repos/delete", delete_repository, True),
    ("GET", _KIND, list_repositories, False),
    ("GET", _API, repository_info, False),
    ("GET", f"{_API}/revision/{_REVISION}", repository_info, False),
    ("GET", f"{_API}/auth-check", auth_check, False),
    ("PUT", f"{_API}/settings", update_settings, True),
    ("GET", f"{_API}/tree/{_REVISION}(?:/(?P<path>.*))?", list_tree, False),
    ("POST", f"{_API}/paths-info/{_REVISION}", paths_info, False),
    ("GET", f"{_API}/refs", list_refs, False),
    ("GET", f"{_API}/commits/{_REVISION}", list_commits, False),
    ("POST", f"{_API}/branch/{_NAME}", create_branch, True),
    ("DELETE", f"{_API}/branch/{_NAME}", delete_branch, True),
    ("POST", f"{_API}/tag/{_REVISION}", create_tag, True),
    ("DELETE", f"{_API}/tag/{_NAME}", delete_tag, True),
    ("POST", f"{_API}/preupload/{_REVISION}", preupload, True),
    ("POST", f"{_API}/commit/{_REVISION}", commit, True),
    ("GET", f"{_API}/discussions", list_pulls, False),
    ("POST", f"{_API}/discussions", create_pull, True),
    ("GET", f"{_API}/discussions/{_NUMBER}", show_pull, False),
    ("POST", f"{_API}/discussions/{_NUMBER}/merge", merge_pull, True),
    ("POST", f"{_API}/discussions/{_NUMBER}/status", set_pull_status, True),
    ("GET", f"{_API}/xet-(?:read|write)-token/{_REVISION}", refuse_xet, False),
    ("POST", rf"{_WEB}\.git/info/lfs/objects/batch", lfs_batch, True),
    ("PUT", "/lfs/upload/(?P<oid>[^/]+)", lfs_upload, False),
    ("GET", f"{_WEB}/resolve/{_REVISION}/(?P<path>.+)", downloads.resolve, False),
]
ROUTES = [(method, re.compile(path), function, guarded) for method, path, function, guarded in _TABLE]


def dispatch(method: str, request: Request) -> Response:
    """Find the route of a request, check who asks, and answer."""
    known = False
    for allowed, pattern, function, guarded in ROUTES:
        match = pattern.fullmatch(request.path)
        if match is None:
            continue
        known = True
        if method != allowed and (method, allowed) != ("HEAD", "GET"):
            continue
        if guarded and not request.may_write:
            if request.may_read:
                raise HubError(403, "this token may read only: use the token that may write")
            raise HubError(401, "Invalid username or password.")
        values = {name: unquoted(value) for name, value in match.groupdict().items() if value is not None}
        if "repository" in values:
            # Models have no prefix in the URLs of files.
            kind, owner = values.pop("kind", "models"), values.pop("owner")
            return function(request, find_repository(request, kind, f"{owner}/{values.pop('repository')}"), **values)
        return function(request, **values)
    raise HubError(405 if known else 404, f"this Hub has no {method} {request.path}")
