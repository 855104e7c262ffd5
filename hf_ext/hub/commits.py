"""Upload of a folder to a branch of a Hub in one commit, and verification of the result.

A Hub may leave out files (`.gitignore`), somebody else may commit at the same time, and an answer may get lost. So the
Hub is asked before anything is sent, and its files are compared with the folder's after the commit.
"""

from __future__ import annotations

import base64
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeAlias
from urllib.parse import quote

import httpx2
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_session
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RevisionNotFoundError
from huggingface_hub.file_download import hf_hub_url
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status
from huggingface_hub.utils.sha import git_hash

from ..errors import NotPublished, UsageError
from ..progress import waiting
from ..terminal import log_level
from .checkpoints import list_files
from .file_hashes import file_sha256

# Number of retries after concurrent commits.
_TRIES = 5
# Seconds between two looks at what a Hub holds, which may show a commit a little later than it confirms it.
_WAITS = (0.5, 2.0, 5.0)
_FILES_A_QUESTION = 256
_SAMPLE_BYTES = 512

# It warns of nothing but that open files are not sent by Xet, which is why they are opened.
_LOGGER = "huggingface_hub._commit_api"

Tree: TypeAlias = dict[str, RepoFile]


class NotOnHub(ConnectionError):
    """The Hub does not hold what a push was to put there: `files` says why, for each file; `advice`, what to do."""

    def __init__(self, repo_id: str, files: dict[str, str], advice: str):
        named = "; ".join(f"{name}: {reason}" for name, reason in sorted(files.items()))
        super().__init__(f"{repo_id} does not hold what was pushed. {named}. {advice}")
        self.repo_id, self.files, self.advice = repo_id, files, advice


class NoHub(ConnectionError):
    """An answer of `endpoint` that is none of a Hub: a login page, the error of a proxy, or half of one."""

    def __init__(self, endpoint: str, reason: str):
        advice = "correct HF_ENDPOINT, log in if a page asks for it, and push again"
        told = " ".join(reason.split())[:500]
        super().__init__(f"{endpoint} gave a response that is not one of a Hub ({told}): {advice}")
        self.endpoint = endpoint


@contextmanager
def read_answers(api: HfApi) -> Iterator[None]:
    """Converts errors of huggingface_hub for unreadable responses, which it does not check, into [`NoHub`]."""
    try:
        yield
    except (NotPublished, UsageError, HFValidationError, HfHubHTTPError):
        # among the last is a refusal with its reason, which is a ValueError too
        raise
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Of a Hub too, if large files have no room: then the reason is the Hub's.
        raise NoHub(api.endpoint, str(error)) from error


def commit_folder(
    api: HfApi,
    folder: Path,
    repo_id: str,
    branch: str,
    *,
    create_pr: bool,
    message: str,
    find_stale: Callable[[Tree], list[str]],
    settle: Callable[[str, Tree], list[str]] = lambda commit, files: [],
    tell: Callable[[list[str], list[str], list[str]], str] | None = None,
) -> CommitInfo:
    """
    Commits all files of a folder to a branch, or as a pull request against it, deletes those of the repository's
    files that `find_stale` chooses and the folder lacks, and compares the result with the folder: a difference is a
    [`NotOnHub`]. Where the branch holds the folder already, its last commit is returned. Before anything is
    sent, `settle` may change files of the folder by those of the repository; `tell` is given what it returned, the
    files that are deleted and those that are left alone, and returns the commit's description.
    """
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    _refuse_ignored(api, repo_id, branch, paths, create_pr)
    as_files = lacks_xet(api, repo_id, branch)
    size = sum(path.stat().st_size for path in paths.values())
    parent, tree = look(api, repo_id, branch)
    for attempt in range(_TRIES):
        stale = [name for name in find_stale(tree) if name not in paths]
        left = sorted(tree.keys() - paths.keys() - set(stale))
        _refuse_shadows(repo_id, paths, left)
        description = None if tell is None else tell(settle(parent, tree), stale, left)
        try:
            sending = f"sending {len(paths)} files, {size / 1e6:,.1f} MB"
            with ExitStack() as stack, waiting(sending), read_answers(api), log_level(_LOGGER, logging.ERROR):
                operations: list[CommitOperationAdd | CommitOperationDelete] = [*map(CommitOperationDelete, stale)]
                for name, path in paths.items():
                    # huggingface_hub sends open files by LFS even where hf_xet is installed.
                    opened = as_files and path.suffix == ".safetensors"
                    content: BinaryIO | Path = stack.enter_context(open(path, "rb")) if opened else path
                    operations.append(CommitOperationAdd(name, content))
                options: Any = {"revision": branch, "create_pr": create_pr, "parent_commit": parent}
                options |= {"commit_message": message, "commit_description": description}
                commit: CommitInfo = api.create_commit(repo_id, operations, **options)
        except RuntimeError as error:
            if (told := _explain_upload(repo_id, error)) is None:
                raise
            raise told from error
        except (HfHubHTTPError, httpx2.TransportError, NoHub) as error:
            if create_pr and not _is_conflict(error):
                # A second try might open a second pull request.
                raise
            before, (head, now) = tree, look(api, repo_id, branch)
            if head == parent:
                if not _is_conflict(error):
                    raise
                # The commit that ours collides with is shown a little later.
                time.sleep(_WAITS[min(attempt, len(_WAITS) - 1)])
            # Somebody else committed. Or this commit was made and its answer lost, which the next try finds.
            _refuse_collisions(repo_id, before, now, paths, set(stale) | set(find_stale(now)))
            parent, tree = head, now
        else:
            _verify(api, repo_id, branch, commit, paths, stale)
            return commit
    raise NotOnHub(repo_id, {branch: f"the Hub refused {_TRIES} times: it changed meanwhile"}, "Push again later")


def _explain_upload(repo_id: str, error: RuntimeError) -> NotOnHub | None:
    """Names a large file that did not arrive, and why, without its signed address; none for other errors."""
    cause, name = error.__cause__, re.search(r"'(.+)'", str(error))
    if name is None or not isinstance(cause, HfHubHTTPError | httpx2.TransportError):
        return None
    told = str(cause).rstrip(".")
    if isinstance(cause, HfHubHTTPError):
        told = f"its upload was answered with {cause.response.status_code}"
    return NotOnHub(repo_id, {name[1]: told}, "Nothing was committed. Push again, or contact the operators of the Hub")


def _refuse_ignored(api: HfApi, repo_id: str, branch: str, paths: dict[str, Path], create_pr: bool) -> None:
    """Refuses files that the Hub would silently drop because of its .gitignore."""
    # Who may not write to a repository may ask all the same, for a pull request.
    url = f"{api.endpoint}/api/models/{repo_id}/preupload/{quote(branch, safe='')}{'?create_pr=1' * bool(create_pr)}"
    headers = build_hf_headers(token=api.token)
    ignored, files = list[str](), []
    for name, path in paths.items():
        with open(path, "rb") as file:
            sample = base64.b64encode(file.read(_SAMPLE_BYTES)).decode()
        files.append({"path": name, "sample": sample, "size": path.stat().st_size})
    for start in range(0, len(files), _FILES_A_QUESTION):
        answer = get_session().post(url, json={"files": files[start : start + _FILES_A_QUESTION]}, headers=headers)
        hf_raise_for_status(answer)
        ignored += [file["path"] for file in answer.json()["files"] if file["shouldIgnore"]]
    if ignored:
        told = dict.fromkeys(ignored, "the .gitignore of the repository excludes it")
        raise NotOnHub(repo_id, told, "Nothing was uploaded. Remove the names from .gitignore, and push again")


def _refuse_shadows(repo_id: str, paths: dict[str, Path], left: list[str]) -> None:
    """Refuses a folder where the repository has a file that stays there, and a file where it has a folder."""
    above = {name: {str(folder) for folder in PurePosixPath(name).parents} for name in (*paths, *left)}
    folders = set[str]().union(*(above[name] for name in paths))
    if shadows := [name for name in left if name in folders or above[name] & paths.keys()]:
        told = dict.fromkeys(shadows, "a file there is a folder here, or its folder there is a file here")
        raise NotOnHub(repo_id, told, "Nothing was uploaded. Delete or rename them on the Hub, and push again")


def lacks_xet(api: HfApi, repo_id: str, branch: str) -> bool:
    """Tells if the Hub has no Xet storage, as the embedded one; uploads through hf_xet would fail there."""
    if constants.HF_HUB_DISABLE_XET:
        return False
    url = f"{api.endpoint}/api/models/{repo_id}/xet-write-token/{quote(branch, safe='')}"
    headers = build_hf_headers(token=api.token)
    return get_session().get(url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT).status_code == 404


def look(api: HfApi, repo_id: str, revision: str | None) -> tuple[str, Tree]:
    """The commit of a revision, and its files."""
    commit = str(api.repo_info(repo_id, revision=revision).sha)
    return commit, list_files(api, repo_id, commit, recursive=True)


def read_text(api: HfApi, repo_id: str, commit: str, file: RepoFile) -> str:
    """The text of a file of a commit; a ValueError if it is none."""
    url = hf_hub_url(repo_id, file.path, revision=commit, endpoint=api.endpoint)
    answer = get_session().get(url, headers=build_hf_headers(token=api.token))
    hf_raise_for_status(answer)
    if len(answer.content) != file.size:
        raise NoHub(api.endpoint, f"{len(answer.content)} bytes of {file.path}, which has {file.size}")
    return answer.content.decode("utf-8")


def _is_conflict(error: Exception) -> bool:
    return isinstance(error, HfHubHTTPError) and error.response is not None and error.response.status_code == 412


def _refuse_collisions(repo_id: str, before: Tree, now: Tree, paths: dict[str, Path], stale: set[str]) -> None:
    """Refuses to replace or delete what somebody else committed since the first look."""
    changed = {name for name, item in now.items() if name not in before or before[name].blob_id != item.blob_id}
    collisions = {name for name in changed & paths.keys() if difference(now[name], paths[name]) is not None}
    if collisions := collisions | (changed & (stale - paths.keys())):
        told = dict.fromkeys(collisions, "it was changed by another commit meanwhile")
        raise NotOnHub(repo_id, told, "Check the files on the Hub, and push again to replace them")


def _verify(
    api: HfApi, repo_id: str, branch: str, commit: CommitInfo, paths: dict[str, Path], stale: list[str]
) -> None:
    """Compares what a commit holds with the folder, and asks if the branch has the commit."""
    where = commit.pr_revision or branch
    for wait in (0.0, *_WAITS):
        time.sleep(wait)
        wrong = dict(_find_differences(api, repo_id, where, commit.oid, paths, stale))
        if not wrong:
            return
    advice = f"Commit {commit.oid[:12]} was made: push again, or contact the operators of the Hub"
    raise NotOnHub(repo_id, wrong, advice)


def _find_differences(
    api: HfApi, repo_id: str, branch: str, commit: str, paths: dict[str, Path], stale: list[str]
) -> Iterator[tuple[str, str]]:
    try:
        _, tree = look(api, repo_id, commit)
        # Somebody else's commit may already be the last one.
        if api.repo_info(repo_id, revision=branch).sha != commit and commit not in {
            each.commit_id for each in api.list_repo_commits(repo_id, revision=branch)
        }:
            yield branch, f"it lacks commit {commit[:12]}, which the Hub confirmed"
    except RevisionNotFoundError:
        yield branch, f"commit {commit[:12]} is missing, which the Hub confirmed"
        return
    for name, path in paths.items():
        if name not in tree:
            yield name, "it is missing"
        elif (found := difference(tree[name], path)) is not None:
            yield name, found
    for name in stale:
        if name in tree:
            yield name, "it belongs to an earlier push and was not deleted"


def difference(there: RepoFile, path: Path) -> str | None:
    """The difference between a file of the Hub and one of the folder, if there is one."""
    size = path.stat().st_size
    if there.size != size:
        return f"it has {there.size:,} bytes there, and {size:,} here"
    # A file that is not large is one of at most some megabytes.
    ours, theirs = (file_sha256(path), there.lfs.sha256) if there.lfs else (git_hash(path.read_bytes()), there.blob_id)
    return None if ours == theirs else "it has different content there"
