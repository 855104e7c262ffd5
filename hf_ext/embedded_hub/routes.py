"""Endpoints of the embedded Hub: a table of methods, paths, functions and required rights."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from starlette.responses import Response

from . import administration, descriptions, downloads, pages, uploads
from .errors import HubError, entry_not_found
from .names import check_file_path, check_sha256
from .repository import Repository
from .storage import Blob
from .transport import Request, json_response, parse_object, text, unquote_part

_TREE_PAGE, _EXPANDED_TREE_PAGE, _COMMITS_PAGE, _PULLS_PAGE = 1000, 50, 100, 10


def repository_info(request: Request, repository: Repository, revision: str = "main") -> Response:
    """Describe a repository at a revision."""
    commit = repository.resolve(revision)
    blobs = request.store.blobs
    return json_response(descriptions.describe_repository(repository, commit, blobs, request.flag("blobs")))


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
        # The next page belongs to the same commit, even if the branch changes.
        base = descriptions.repository_api_url(repository, request.base_url)
        query = f"recursive={recursive}&expand={expand}&limit={limit}&cursor={start + limit}"
        headers["Link"] = f'<{base}/tree/{commit}/{quote(path, safe="")}?{query}>; rel="next"'
    return json_response(
        [descriptions.describe_entry(snapshot, child, last.get(child)) for child in page], headers=headers
    )


def paths_info(request: Request, repository: Repository, revision: str) -> Response:
    """The files and folders among some paths; what does not exist is left out."""
    body = request.read_body()
    # huggingface_hub sends a form, the client in JavaScript JSON.
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


def create_tag(request: Request, repository: Repository, revision: str) -> Response:
    """Tag a revision."""
    repository.create_ref("refs/tags", text(request.json(), "tag"), revision)
    return json_response({})


def delete_ref(request: Request, repository: Repository, kind_of_ref: str, name: str) -> Response:
    """Delete a branch or a tag."""
    repository.delete_ref("refs/heads" if kind_of_ref == "branch" else "refs/tags", name)
    return json_response({})


def preupload(request: Request, repository: Repository, revision: str) -> Response:
    """Say how each file of a coming commit is to be sent."""
    snapshot = repository.snapshot(repository.resolve(revision))
    return json_response({"files": uploads.plan_uploads(request.json(), snapshot, request.store.blobs)})


def lfs_batch(request: Request, repository: Repository) -> Response:
    """Say where to send large files that are not there yet."""
    href = f"{request.base_url}/lfs/upload"
    plan = uploads.plan_lfs(request.json(), request.store.blobs, request.tickets, href)
    return json_response(plan, headers={"Content-Type": "application/vnd.git-lfs+json"})


def lfs_upload(request: Request, oid: str) -> Response:
    """Receive a large file; the signature in the URL is the permission."""
    blob = Blob(check_sha256(oid), request.number("size", 0, 10**18))
    request.tickets.check(blob, request.parameter("expires"), request.parameter("signature"))
    request.body.set_limit(min(blob.size, uploads.MAXIMUM_FILE_BYTES))
    with request.store.blobs.batch() as batch:
        batch.add(request.body, blob)
    return Response()


def commit(request: Request, repository: Repository, revision: str) -> Response:
    """Commit to a branch or pull request, or open a pull request with the commit."""
    # The whole of a commit is bounded as one file is; each regular file in it is bounded by its line.
    request.body.set_limit(uploads.MAXIMUM_FILE_BYTES)
    repository.resolve(revision)
    change = uploads.read_change(request.body, request.store.blobs)
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
    wanted = {"open": ("open", "draft"), "closed": ("closed", "merged")}.get(status)
    pulls = [pull for pull in reversed(repository.pulls) if wanted is None or pull["status"] in wanted]
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
        raise HubError(400, "this Hub supports pull requests, but no other discussions")
    # It is one line of the commit that merges.
    if not (title := " ".join(text(payload, "title").split())):
        raise HubError(400, "the title of a pull request must not be empty")
    pull = repository.open_pull("main", title, text(payload, "description", ""), None)
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
    raise HubError(404, "this Hub has no Xet storage: set HF_HUB_DISABLE_XET=1 in the client's environment")


_KIND = r"/api/(?P<kind>models|datasets|spaces)"
_OWNER = "(?P<owner>[^/]+)"
# What stands for `owner/name`, and for `name` alone.
_ID = "<id>"
_TWO_PARTS, _ONE_PART = rf"{_OWNER}/(?P<repository>[^/]+)", "(?P<repository>[^/]+)"
_API = rf"{_KIND}/{_ID}"
_WEB = rf"/(?:(?P<kind>datasets|spaces)/)?{_ID}"
_REVISION, _NAME, _NUMBER = "(?P<revision>[^/]+)", "(?P<name>[^/]+)", r"(?P<number>\d{1,9})"

# Method, path, function, and whether only who holds the token may use it (else: whoever may see the repository).
_TABLE: list[tuple[str, str, Callable[..., Response], bool]] = [
    ("GET", "/api/whoami-v2", administration.whoami, False),
    ("POST", "/api/validate-yaml", administration.validate_yaml, False),
    ("POST", "/api/repos/create", administration.create_repository, True),
    ("DELETE", "/api/repos/delete", administration.delete_repository, True),
    ("POST", "/api/repos/move", administration.move_repository, True),
    ("GET", _KIND, administration.list_repositories, False),
    ("GET", _API, repository_info, False),
    ("GET", f"{_API}/revision/{_REVISION}", repository_info, False),
    ("GET", f"{_API}/auth-check", repository_info, False),
    ("PUT", f"{_API}/settings", administration.update_settings, True),
    ("GET", f"{_API}/tree/{_REVISION}(?:/(?P<path>.*))?", list_tree, False),
    ("POST", f"{_API}/paths-info/{_REVISION}", paths_info, False),
    ("GET", f"{_API}/refs", list_refs, False),
    ("GET", f"{_API}/commits/{_REVISION}", list_commits, False),
    ("POST", f"{_API}/branch/{_NAME}", create_branch, True),
    ("POST", f"{_API}/tag/{_REVISION}", create_tag, True),
    ("DELETE", f"{_API}/(?P<kind_of_ref>branch|tag)/{_NAME}", delete_ref, True),
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
    ("GET", f"{_WEB}/raw/{_REVISION}/(?P<path>.+)", downloads.show_text, False),
    ("GET", "/", pages.show_repositories, False),
    ("GET", f"(?!/(?:api|lfs)/){_WEB}", pages.show_repository, False),
]
# An id of one part is tried last: `/api/models/me/refs` is a model if there is one, else the refs of `me`.
ROUTES = [
    (method, re.compile(path.replace(_ID, parts)), function, guarded)
    for parts in (_TWO_PARTS, _ONE_PART)
    for method, path, function, guarded in _TABLE
    if parts == _TWO_PARTS or _ID in path
]


def dispatch(request: Request) -> Response:
    """Find the route of a request, check who asks, and answer."""
    known = False
    refusal: HubError | None = None
    for allowed, pattern, function, guarded in ROUTES:
        match = pattern.fullmatch(request.path)
        if match is None:
            continue
        known = True
        if request.method != allowed and (request.method, allowed) != ("HEAD", "GET"):
            continue
        if guarded and not request.trusted:
            raise HubError(401, "Invalid username or password.")
        values = {name: unquote_part(value) for name, value in match.groupdict().items() if value is not None}
        if "repository" not in values:
            return function(request, **values)
        # Models have no prefix in the URLs of files.
        kind, parts = values.pop("kind", "models"), (values.pop("owner", None), values.pop("repository"))
        repository_id = "/".join(part for part in parts if part)
        try:
            repository = administration.find_repository(request, kind, repository_id)
        except HubError as error:
            moved = administration.find_moved(request, kind, repository_id)
            if moved is not None:
                start = match.start("owner" if parts[0] else "repository")
                raise _redirect(request, start, match.end("repository"), moved) from error
            if refusal is None or error.code:
                refusal = error
            continue
        return function(request, repository, **values)
    raise refusal or HubError(405 if known else 404, f"this Hub has no {request.method} {request.path}")


def _redirect(request: Request, start: int, end: int, repository_id: str) -> HubError:
    """The answer for a repository that has another id now, which stands between two places of the path."""
    # A relative address, because a proxy may add a path before ours.
    place = f"{urlsplit(request.base_url).path}{request.path[:start]}{repository_id}{request.path[end:]}"
    query = f"?{urlencode(request.query, doseq=True)}" if request.query else ""
    return HubError(307, f"this repository is called {repository_id} now", headers={"Location": place + query})
