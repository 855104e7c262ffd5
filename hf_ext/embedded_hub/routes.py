"""Endpoints of the embedded Hub, and the table of their methods, paths and required rights."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

from starlette.responses import Response

from hf_ext.hub.card_rules import check_card, front_matter

from . import descriptions, downloads, uploads
from .errors import HubError, entry_not_found
from .names import check_file_path, check_sha256
from .objects import OWNER, Operation, hub_time
from .repository import Repository
from .storage import Blob
from .store import KINDS
from .transport import Request, json_response, parse_object, text

_REPOSITORIES_PAGE, _TREE_PAGE, _EXPANDED_TREE_PAGE, _COMMITS_PAGE, _PULLS_PAGE = 1000, 1000, 50, 100, 10
_STRANGERS_CARD_CHARACTERS = 64 << 10
# Of a listing: its options, and the moment by which each way of sorting puts the latest first; it counts no likes.
_LISTING = """
author search filter pipeline_tag gated sort direction limit cursor full cardData config expand expand[]
"""
_SORTS: dict[str, Callable[[Repository], str] | None] = {
    **dict.fromkeys(("", "likes", "downloads", "trendingScore")),
    "createdAt": lambda repository: repository.created,
    "lastModified": lambda repository: hub_time(repository.commit(repository.resolve("main")).date),
}
_SDKS = ("gradio", "streamlit", "docker", "static")


def whoami(request: Request) -> Any:
    """Name and role of a token."""
    token = {"type": "access_token", "accessToken": {"displayName": OWNER, "role": "write"}}
    return {"type": "user", "id": OWNER, "name": OWNER, "fullname": OWNER, "orgs": [], "auth": token}


def validate_yaml(request: Request) -> Any:
    asked = request.json()
    card, kind = text(asked, "content"), text(asked, "repoType", "model")
    if not request.trusted and len(front_matter(card)) > _STRANGERS_CARD_CHARACTERS:
        # Reading YAML takes time. Clients send the token with the commit of a card, so longer cards are read then.
        told = f"metadata of more than {_STRANGERS_CARD_CHARACTERS} characters is checked only with the token"
        return {"errors": [], "warnings": [{"message": told}]}
    try:
        metadata = descriptions.read_metadata(card)
    except ValueError as error:
        return json_response({"errors": [{"message": str(error)}], "warnings": []}, 400)
    answer: dict[str, list[dict[str, str]]] = {"errors": [], "warnings": []}
    for each in check_card(card, metadata) if kind == "model" else []:
        answer["errors" if each.refused else "warnings"].append({"message": f'"{each.field}" {each.reason}'})
    if not metadata:
        answer["warnings"].append({"message": "empty or missing yaml metadata in repo card"})
    return json_response(answer, 400 if answer["errors"] else 200)


def create_repository(request: Request) -> Any:
    """Create a repository with a first commit; status 409 and its URL when it exists."""
    payload = request.json()
    kind, repository_id = _named_repository(payload)
    private = payload.get("visibility") == "private" or payload.get("private") is True
    store, sdk = request.store, text(payload, "sdk", "") if kind == "spaces" else ""
    if sdk not in ("", *_SDKS):
        raise HubError(400, f"field 'sdk' must be one of {', '.join(_SDKS)}, got {sdk!r}")
    with store.blobs.batch() as batch:
        files = {".gitattributes": uploads.DEFAULT_GITATTRIBUTES}
        # of a space it is an entry of its card
        files |= {"README.md": f"---\nsdk: {sdk}\n---\n"} if sdk else {}
        first = [Operation(name, uploads.store_regular(content.encode(), batch)) for name, content in files.items()]
    try:
        repository = store.create(kind, repository_id, private, first)
    except HubError as error:
        existing = store.repository(kind, repository_id) if error.status == 409 else None
        if existing is None:
            raise
        answer = {"error": error.message, "url": descriptions.repository_url(existing, request.base_url)}
        return json_response(answer, 409, {"X-Error-Message": error.message})
    return {"url": descriptions.repository_url(repository, request.base_url), "name": repository.id}


def delete_repository(request: Request) -> Any:
    kind, repository_id = _named_repository(request.json())
    request.store.delete(kind, find_repository(request, kind, repository_id))


def move_repository(request: Request) -> Any:
    payload = request.json()
    kind = _kind(payload)
    repository = find_repository(request, kind, text(payload, "fromRepo"))
    request.store.move(kind, repository, text(payload, "toRepo"))


def list_repositories(request: Request, kind: str) -> Any:
    """The repositories that the client may see, filtered by author, parts of the id and tags, sorted, by pages."""
    if strange := sorted(request.query.keys() - {*_LISTING.split()}):
        raise HubError(400, f"this Hub cannot list by {strange[0]!r}; it knows {_LISTING.strip()}")
    sort, author, after = (request.parameter(name) for name in ("sort", "author", "cursor"))
    if sort not in _SORTS or request.parameter("direction", "-1") != "-1":
        raise HubError(400, f"this Hub sorts by {', '.join(_SORTS)[2:]}, the latest first, got sort={sort!r}")
    moment, parts = _SORTS[sort], [part.lower() for part in request.query.get("search", ())]
    limit = request.number("limit", _REPOSITORIES_PAGE, _REPOSITORIES_PAGE)
    tags = {*request.query.get("filter", ()), *request.query.get("pipeline_tag", ())}

    def is_asked(identifier: str) -> bool:
        return all(part in identifier.lower() for part in parts) and author in ("", identifier.partition("/")[0])

    # none is gated
    found = () if request.flag("gated") else request.store.repositories(kind, is_asked)
    seen = (one for one in found if request.trusted or not one.private)
    keyed: Any = ((f"{moment(one)} {one.id}" if moment else one.id, one) for one in seen)
    keyed = sorted(keyed, key=lambda pair: pair[0], reverse=True) if moment else keyed
    rest = (pair for pair in keyed if not after or (pair[0] < after if moment else pair[0] > after))
    matching = (pair for pair in rest if not tags or tags <= set(repository_info(request, pair[1])["tags"]))
    # One more than requested tells if there is a next page.
    page = list(islice(matching, limit + 1))
    headers = {}
    if len(page) > limit:
        query = {**request.query, "limit": limit, "cursor": page[limit - 1][0] if limit else after}
        headers = _next_page(request, kind, query)
    return json_response([_describe_listed(request, kind, one) for _, one in page[:limit]], headers=headers)


def _describe_listed(request: Request, kind: str, repository: Repository) -> dict[str, Any]:
    """The entry of a repository in a listing, with what the client asks to know."""
    names = [*request.query.get("expand", ()), *request.query.get("expand[]", ())]
    if not names and not request.flag("full") and not request.flag("cardData"):
        return {"id": repository.id, "private": repository.private, "createdAt": repository.created}
    told: dict[str, Any] = repository_info(request, repository)
    if names or not request.flag("full"):
        names = names or ["private", "createdAt", "cardData"]
        return {name: told[name] for name in ("id", *names) if name in told}
    # of models, that is asked for by itself
    return {key: value for key, value in told.items() if key != "cardData" or kind != "models" or request.flag(key)}


def _next_page(request: Request, path: str, query: dict[str, Any]) -> dict[str, str]:
    return {"Link": f'<{request.base_url}/api/{path}?{urlencode(query, doseq=True)}>; rel="next"'}


def update_settings(request: Request, repository: Repository) -> Any:
    payload = request.json()
    visibility = payload.get("visibility", "private" if payload.get("private") else "public")
    if visibility not in ("private", "public") or set(payload) - {"visibility", "private"}:
        raise HubError(400, "only the visibility, 'private' or 'public', can be set")
    with repository.change_state() as state:
        state["private"] = visibility == "private"


def repository_info(request: Request, repository: Repository, revision: str = "main") -> Any:
    commit, blobs = repository.resolve(revision), request.store.blobs
    return descriptions.describe_repository(repository, commit, blobs, request.flag("blobs"))


def list_tree(request: Request, repository: Repository, revision: str, path: str = "") -> Any:
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
    last = repository.last_changes(commit) if expand else {}
    headers = {}
    if start + limit < len(children):
        # The next page belongs to the same commit, even if the branch changes.
        place = f"{repository.kind}s/{repository.id}/tree/{commit}/{quote(path, safe='')}"
        query = {"recursive": recursive, "expand": expand, "limit": limit, "cursor": start + limit}
        headers = _next_page(request, place, query)
    described = [descriptions.describe_entry(snapshot, child, last.get(child)) for child in page]
    return json_response(described, headers=headers)


def paths_info(request: Request, repository: Repository, revision: str) -> Any:
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
    last = repository.last_changes(commit, frozenset(present)) if expand else {}
    return [descriptions.describe_entry(snapshot, path, last.get(path)) for path in present]


def list_refs(request: Request, repository: Repository) -> Any:
    """All branches and tags, and pull requests if asked for."""
    lists = {"branches": "refs/heads/", "tags": "refs/tags/"}
    described: dict[str, list[dict[str, str]]] = {"converts": []}
    for name, prefix in (lists | ({"pullRequests": "refs/pr/"} if request.flag("include_prs") else {})).items():
        found = [(ref, commit) for ref, commit in sorted(repository.refs.items()) if ref.startswith(prefix)]
        described[name] = [{"name": ref[len(prefix) :], "ref": ref, "targetCommit": commit} for ref, commit in found]
    return described


def list_commits(request: Request, repository: Repository, revision: str) -> Any:
    """Commits that a revision can reach, latest first, by pages."""
    head = repository.resolve(revision)
    page, limit = request.number("p", 0, 10**6), max(request.number("limit", _COMMITS_PAGE, _COMMITS_PAGE), 1)
    formatted = "formatted" in (*request.query.get("expand[]", ()), *request.query.get("expand", ()))
    history = list(repository.history(head))
    headers = {"X-Total-Count": str(len(history))}
    if (page + 1) * limit < len(history):
        query = {"p": page + 1, "limit": limit, "expand[]": ["formatted"] if formatted else []}
        headers |= _next_page(request, f"{repository.kind}s/{repository.id}/commits/{head}", query)
    shown = history[page * limit : (page + 1) * limit]
    return json_response([descriptions.describe_commit(commit, formatted) for commit in shown], headers=headers)


def create_branch(request: Request, repository: Repository, name: str) -> Any:
    """Create a branch at `startingPoint`, or at `main`."""
    repository.create_ref("refs/heads", name, text(request.json(), "startingPoint", "main"))


def create_tag(request: Request, repository: Repository, revision: str) -> Any:
    repository.create_ref("refs/tags", text(request.json(), "tag"), revision)


def delete_ref(request: Request, repository: Repository, kind_of_ref: str, name: str) -> Any:
    repository.delete_ref("refs/heads" if kind_of_ref == "branch" else "refs/tags", name)


def preupload(request: Request, repository: Repository, revision: str) -> Any:
    """Say how each file of a coming commit is to be sent."""
    snapshot = repository.snapshot(repository.resolve(revision))
    return {"files": uploads.plan_uploads(request.json(), snapshot, request.store.blobs)}


def lfs_batch(request: Request, repository: Repository) -> Any:
    """Say where to send large files that are not there yet."""
    href = f"{request.base_url}/lfs/upload"
    plan = uploads.plan_lfs(request.json(), request.store.blobs, request.tickets, href)
    return json_response(plan, headers={"Content-Type": "application/vnd.git-lfs+json"})


def lfs_upload(request: Request, oid: str) -> Any:
    """Receive a large file; the signature in the URL is the permission."""
    blob = Blob(check_sha256(oid), request.number("size", 0, 10**18))
    request.tickets.check(blob, request.parameter("expires"), request.parameter("signature"))
    request.body.set_limit(min(blob.size, uploads.MAXIMUM_FILE_BYTES))
    with request.store.blobs.batch() as batch:
        batch.add(request.body, blob)
    return Response()


def commit(request: Request, repository: Repository, revision: str) -> Any:
    """Commit to a branch or pull request, or open a pull request with the commit."""
    # The whole of a commit is bounded as one file is; each regular file in it is bounded by its line.
    request.body.set_limit(uploads.MAXIMUM_FILE_BYTES)
    repository.resolve(revision)
    change = uploads.read_change(request.body, request.store.blobs)
    url = descriptions.repository_url(repository, request.base_url)
    answer: dict[str, Any] = {"success": True, "hookOutput": ""}
    if request.flag("create_pr"):
        number = repository.open_pull(revision, change.title, change.description, change)["num"]
        oid = repository.resolve(f"refs/pr/{number}")
        answer["pullRequestUrl"] = f"{url}/discussions/{number}"
    else:
        oid = repository.append(revision, change).oid
    return {**answer, "commitOid": oid, "commitUrl": f"{url}/commit/{oid}"}


def list_pulls(request: Request, repository: Repository) -> Any:
    """Pull requests, latest first, by pages."""
    status, start = request.parameter("status"), request.number("p", 0, 10**6) * _PULLS_PAGE
    # A draft is open, and a merged one is closed, as on the Hub.
    wanted = {"open": ("open", "draft"), "closed": ("closed", "merged")}.get(status)
    pulls = [pull for pull in reversed(repository.pulls) if wanted is None or pull["status"] in wanted]
    pulls = pulls if request.parameter("type") != "discussion" else []
    shown = [descriptions.describe_pull(repository, pull) for pull in pulls[start : start + _PULLS_PAGE]]
    return {"count": len(pulls), "start": start, "discussions": shown}


def show_pull(request: Request, repository: Repository, number: str) -> Any:
    return descriptions.describe_pull(repository, repository.pull(int(number)))


def create_pull(request: Request, repository: Repository) -> Any:
    """Open a pull request without a commit yet."""
    payload = request.json()
    if payload.get("pullRequest") is not True:
        raise HubError(400, "this Hub supports pull requests, but no other discussions")
    # It is one line of the commit that merges.
    if not (title := " ".join(text(payload, "title").split())):
        raise HubError(400, "the title of a pull request must not be empty")
    pull = repository.open_pull("main", title, text(payload, "description", ""), None)
    return descriptions.describe_pull(repository, pull)


def merge_pull(request: Request, repository: Repository, number: str) -> Any:
    return {"mergeCommitId": repository.merge_pull(int(number)).oid}


def set_pull_status(request: Request, repository: Repository, number: str) -> Any:
    repository.set_pull_status(int(number), text(request.json(), "status"))
    return {"newStatus": show_pull(request, repository, number)["events"][-1]}


def refuse_xet(request: Request, repository: Repository, revision: str) -> Any:
    """Tell a client that insists on Xet what to do."""
    raise HubError(404, "this Hub has no Xet storage: set HF_HUB_DISABLE_XET=1 in the client's environment")


def find_repository(request: Request, kind: str, repository_id: str) -> Repository:
    """The repository; refused alike if it does not exist and if the client may not see it."""
    repository = request.see(kind, _full_id(repository_id))
    if repository is None:
        raise HubError(404 if request.trusted else 401, f"Repository not found: {repository_id!r}", "RepoNotFound")
    return repository


def _full_id(repository_id: str) -> str:
    """`owner/name`: an id of one part is of our only user, as it is for who creates a repository by it."""
    return repository_id if "/" in repository_id else f"{OWNER}/{repository_id}"


def _named_repository(payload: dict[str, Any]) -> tuple[str, str]:
    owner = text(payload, "organization", "") or OWNER
    return _kind(payload), f"{owner}/{text(payload, 'name')}"


def _kind(payload: dict[str, Any]) -> str:
    kinds = {name: kind for kind, name in KINDS.items()}
    kind = kinds.get(text(payload, "type", "model"))
    if kind is None:
        raise HubError(400, f"field 'type' must be one of {sorted(kinds)}, got {payload['type']!r}")
    return kind


_KIND = r"/api/(?P<kind>models|datasets|spaces)"
# What stands for `owner/name`, and for `name` alone.
_ID = "<id>"
_TWO_PARTS, _ONE_PART = "(?P<owner>[^/]+)/(?P<repository>[^/]+)", "(?P<repository>[^/]+)"
_API = rf"{_KIND}/{_ID}"
_WEB = rf"/(?:(?P<kind>datasets|spaces)/)?{_ID}"
_REVISION, _NAME, _NUMBER = "(?P<revision>[^/]+)", "(?P<name>[^/]+)", r"(?P<number>\d{1,9})"

# Method, path, function, and whether only who holds the token may use it (else: whoever may see the repository). A
# function returns a response, or what is its JSON.
_TABLE: list[tuple[str, str, Callable[..., Any], bool]] = [
    ("GET", "/api/whoami-v2", whoami, True),
    ("POST", "/api/validate-yaml", validate_yaml, False),
    ("POST", "/api/repos/create", create_repository, True),
    ("DELETE", "/api/repos/delete", delete_repository, True),
    ("POST", "/api/repos/move", move_repository, True),
    ("GET", _KIND, list_repositories, False),
    ("GET", _API, repository_info, False),
    ("GET", f"{_API}/revision/{_REVISION}", repository_info, False),
    ("GET", f"{_API}/auth-check", repository_info, False),
    ("PUT", f"{_API}/settings", update_settings, True),
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
    ("GET", "/", downloads.show_repositories, False),
    ("GET", f"(?!/(?:api|lfs)/){_WEB}/?", downloads.show_repository, False),
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
        given = {name: value for name, value in match.groupdict().items() if value is not None}
        try:
            values: dict[str, Any] = {name: unquote(value, errors="strict") for name, value in given.items()}
        except UnicodeDecodeError as error:
            raise HubError(400, "the path is not valid UTF-8") from error
        if "repository" in values:
            # Models have no prefix in the URLs of files.
            kind, owner = values.pop("kind", "models"), values.pop("owner", None)
            repository_id = values["repository"] if owner is None else f"{owner}/{values['repository']}"
            try:
                values["repository"] = find_repository(request, kind, repository_id)
            except HubError as error:
                moved = request.store.moved(kind, _full_id(repository_id))
                if moved is not None and request.see(kind, moved):
                    raise _redirect(request, match, moved) from error
                if refusal is None or error.code:
                    refusal = error
                continue
        answer = function(request, **values)
        return answer if isinstance(answer, Response) else json_response({} if answer is None else answer)
    raise refusal or HubError(405 if known else 404, f"this Hub has no {request.method} {request.path}")


def _redirect(request: Request, match: re.Match[str], moved: str) -> HubError:
    """The answer for a repository that has another id now."""
    start, end = match.start("owner" if "owner" in match.re.groupindex else "repository"), match.end("repository")
    # A relative address, because a proxy may add a path before ours.
    place = f"{urlsplit(request.base_url).path}{request.path[:start]}{moved}{request.path[end:]}"
    query = f"?{urlencode(request.query, doseq=True)}" if request.query else ""
    return HubError(307, f"this repository is called {moved} now", headers={"Location": place + query})
