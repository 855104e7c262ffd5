"""From a folder to a self-loadable folder, and from there to the Hub in one commit.

What is published is what was staged: weights as safetensors, configuration, the code files of the installed package,
the image processor or tokenizer, and the card.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import CommitInfo, HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id

from ..errors import DataError, NotPublished, UsageError
from ..files import require_free, whole_folder
from ..terminal import is_quiet
from .card_rules import CardRefused, check_card, is_ref_name, read_card, read_front_matter
from .cards import MARKER, PLACEHOLDER, write_card
from .commits import NoHub, Tree, commit_folder, difference, look, read_answers, read_text
from .diffusers_folders import INDEX
from .disclosure import SecretFound, clean, find_kind, find_machine_paths, refuse_secrets
from .folder_kinds import known_kinds
from .load_check import check_loads, verify_code
from .published_files import LICENCES, MODULES, Listing, copy_license, is_described, is_loaded, list_files
from .staging import MANIFEST, write_folder

# Files and folders of an artifact of EMR-Merging and of a diffusers pipeline, by the file that tells of one.
_OF_KINDS = {
    MANIFEST: ("tasks/", "base/", "mask.safetensors", "extra.safetensors", "sums.safetensors"),
    INDEX: (INDEX, "pipeline.py", "transformer/", "scheduler/", "vae/", "text_encoder/", "tokenizer/"),
}
# What these folders hold beside what loaders read and code; all else in them is the owner's.
_WITHIN = re.compile(r"(?:mask|extra|sums)\.safetensors|scheduler_config\.json|disentangled_dit\.py")
_PULL = re.compile(r"refs/pr/[1-9]\d*", re.ASCII)
# What a push writes beside the files that loaders read and those that describe a model: code, under the names that it
# has in this version and had in earlier ones, and reports.
_WRITTEN = re.compile(
    r"(?:configuration|modeling|ops|kernels|streaming|processing|image_processing|feature_extraction|restoring"
    r"|pipeline)_\w+\.py|emr\.json|emr_loader\.py|\.eval_results/hf_ext\.yaml"
)

# Weights in forms that are not published, under the names by which loaders find them: beside new weights or a new
# configuration they are of another model.
_OTHER_FORMS = re.compile(
    r"(?:(?:pytorch|tf|flax|rust|adapter|diffusion_pytorch|diffusion_flax)_model(?:\.\w+)?(?:-\d{5}-of-\d{5})?"
    r"(?:\.\w+)?\.(?:bin|h5|msgpack|ot)(?:\.index(?:\.\w+)?\.json)?)"
    r"|(?:openvino/)?openvino_(?:\w+_)?model(?:_\w+)?\.(?:xml|bin)"
    r"|(?:(?:encoder|decoder|decoder_with_past)_)?model(?:_\w+)?\.onnx(?:_data)?"
    r"|onnx/(?:\w+_)?model(?:_\w+)?\.onnx(?:_data)?"
    r"|pytorch_lora_weights\.(?:safetensors|bin)|consolidated(?:\.\d\d)?\.(?:safetensors|pth)"
)


def stage(
    source: str | Path,
    out: str | Path,
    *,
    repo_id: str | None = None,
    license: str | None = None,
    overwrite: bool = False,
) -> Path:
    """
    Writes a folder that anyone can load with `from_pretrained`, with or without hf_ext.

    A model of hf-ext is loaded by the class of the installed package and saved again. Of another model, an adapter or
    an artifact, only files with names that loaders or hf-ext know are copied. Paths of this machine are cut to their
    last name.

    Args:
        source (`str` or `Path`): A local folder, as `save_pretrained` or a merge writes it.
        out (`str` or `Path`): The folder to write. It appears complete, or not at all.
        repo_id (`str`, *optional*): Repository that the card names. Defaults to the name of `out`.
        license (`str`, *optional*): Licence of the weights, as the Hub names it. Defaults to that of the template.
        overwrite (`bool`, *optional*, defaults to `False`): Replace `out` when it holds an earlier checkpoint.

    Returns:
        `Path`: `out`.

    Raises:
        TakenError: `out` holds something, and `overwrite` is off or it is no checkpoint.
        ValueError: The folder is of no supported kind, holds code or pickles, or does not load completely; a file
            that is loaded is a link that leaves the folder; a file holds a token or a private key; an adapter's base
            is a folder.

    Example:
        >>> from hf_ext import MRConvConfig, MRConvForSequenceClassification, stage
        >>> MRConvForSequenceClassification(MRConvConfig(vocab_size=100, hidden_size=16)).save_pretrained("mine")
        >>> folder = stage("mine", "model", repo_id="org/model", license="mit")
        >>> (folder / "README.md").is_file()
        True
    """
    source, out = Path(source), Path(out)
    require_free(out, overwrite, kind="checkpoint", is_kind=_is_checkpoint)
    # What may leave this machine is decided in this order, and nothing is added after it was looked at: files of known
    # names, paths in them, code (only what equals the installed package's may the load check run), the card and the
    # licence that it names, and last of all secrets in every file. A step that refuses raises.
    with whole_folder(out) as folder, _name_source(source, folder):
        write_folder(source, folder)
        clean(folder, source)
        # Their records name the hashes of what is published.
        for kind in known_kinds():
            kind.hide_paths(folder)
        verify_code(folder)
        card = write_card(folder, repo_id=repo_id or out.name, license=license).read_text(encoding="utf-8")
        if refused := [problem for problem in check_card(card) if problem.refused]:
            raise CardRefused(refused)
        copy_license(source, folder, read_front_matter(card).get("license_link"))
        refuse_secrets(folder)
    return out


def _is_checkpoint(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json", INDEX))


def push(
    source: str | Path,
    repo_id: str,
    *,
    license: str | None = None,
    token: str | bool | None = None,
    endpoint: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    private: bool | None = None,
    commit_message: str = "Upload with hf-ext",
    check: bool = True,
    announce: Callable[[Listing], None] | None = None,
) -> CommitInfo:
    """
    Stages a folder, checks that it loads with and without hf_ext, uploads it in one commit, and compares the Hub with
    it.

    The repository and the branch are created if they do not exist. Files of an earlier model that the new push does
    not have are deleted in the same commit; its description names them, and the files that are kept. A card that
    somebody wrote on the Hub is kept, unless the folder has one that somebody wrote. If somebody else commits other
    files meanwhile, both commits are kept.

    Args:
        source (`str` or `Path`): As in [`stage`].
        repo_id (`str`): `org/name`, or `name` in the namespace of the token's owner.
        license (`str`, *optional*): As in [`stage`].
        token (`str` or `bool`, *optional*): Token of the Hub; `None` uses the one that was logged in with.
        endpoint (`str`, *optional*): Address of the Hub. Defaults to `HF_ENDPOINT`.
        revision (`str`, *optional*): Branch to commit to, or an open pull request, `refs/pr/1`. Defaults to `main`.
        create_pr (`bool`, *optional*, defaults to `False`): Open a pull request against `main` instead.
        private (`bool`, *optional*): Visibility of a new repository; it must agree with that of an existing one.
        commit_message (`str`, *optional*): First line of the commit.
        check (`bool`, *optional*, defaults to `True`): Run the load check ([`check_loads`]).
        announce (`Callable[[Listing], None]`, *optional*): Called before the upload with the files to upload and those
            that stay behind.

    Returns:
        [`~huggingface_hub.CommitInfo`]: The commit; `pr_url` when a pull request was opened.

    Raises:
        ValueError: As in [`stage`] and [`check_loads`]; or the options contradict each other or the repository.
        ConnectionError: The Hub would ignore a file, or differs from the folder after the commit; `files` names the
            files and reasons. Or somebody else committed the same files meanwhile.

    Example:
        >>> from hf_ext import MRConvConfig, MRConvForSequenceClassification, push
        >>> from hf_ext.embedded_hub.server import EmbeddedHub
        >>> MRConvForSequenceClassification(MRConvConfig(vocab_size=100, hidden_size=16)).save_pretrained("mine")
        >>> with EmbeddedHub("hub") as hub:  # a Hub on this machine
        ...     push("mine", "org/model", endpoint=hub.url, check=False).repo_url.repo_id
        'org/model'
    """
    branch = _check_options(repo_id, revision, create_pr, commit_message, token)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve() / repo_id.rpartition("/")[2]
        listing = rehearse(source, folder, repo_id=repo_id, license=license)
        if announce is not None:
            announce(listing)
        # As `HF_ENDPOINT`, it may end in a slash.
        api = HfApi(endpoint=endpoint and endpoint.rstrip("/"), token=token)
        if check:
            with _name_source(Path(source), folder):
                check_loads(folder, repo_id=repo_id, endpoint=api.endpoint, token=token)
        with read_answers(api):
            whole_id = _create(api, repo_id, branch, private)
            if whole_id != repo_id:
                write_card(folder, repo_id=whole_id, license=license)
            options: Any = {"create_pr": create_pr, "message": commit_message, "tell": _tell}
            options["find_stale"] = functools.partial(_find_stale_beside, folder)
            options["settle"] = functools.partial(_settle, api, folder, whole_id, license)
            return commit_folder(api, folder, whole_id, branch, **options)


def preview(source: str | Path, repo_id: str, *, revision: str | None, check: bool, **options: Any) -> Listing:
    """Does all that [`push`] does before the upload, and lists the files that it would upload, exclude and delete."""
    _check_options(repo_id, revision, options["create_pr"], options["commit_message"], None)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve() / repo_id.rpartition("/")[2]
        listing = rehearse(source, folder, repo_id=repo_id, license=options["license"])
        api = HfApi(endpoint=options["endpoint"] and options["endpoint"].rstrip("/"))
        if check:
            with _name_source(Path(source), folder):
                check_loads(folder, repo_id=repo_id, endpoint=api.endpoint)
        try:
            with read_answers(api):
                # A new branch begins with the files of main.
                try:
                    commit, tree = look(api, repo_id, revision)
                except RevisionNotFoundError:
                    if _PULL.fullmatch(revision or ""):
                        raise
                    commit, tree = look(api, repo_id, None)
                told = _settle(api, folder, repo_id, options["license"], commit, tree)
                deleted = tuple(sorted(set(_find_stale_beside(folder, tree)) - listing.files.keys()))
        except RepositoryNotFoundError:
            return listing
        except (NoHub, HfHubHTTPError, OfflineModeIsEnabled, httpx2.TransportError) as error:
            reason = str(error).splitlines()[0]
            told = [f"{repo_id}: the Hub does not say what the push would delete or replace ({reason})"]
            return dataclasses.replace(listing, notes=(*listing.notes, *told))
    return dataclasses.replace(listing, deleted=deleted, notes=(*listing.notes, *told))


def rehearse(source: str | Path, out: Path, *, repo_id: str | None = None, license: str | None = None) -> Listing:
    """Stages a folder, and lists the files that a push would upload and exclude."""
    stage(source, out, repo_id=repo_id, license=license)
    card = (out / "README.md").read_text(encoding="utf-8")
    notes = [f"README.md, {problem}" for problem in check_card(card)]
    if PLACEHOLDER in card:
        notes.append(f"README.md: {PLACEHOLDER} is left in the text")
    return list_files(Path(source), out, (*find_machine_paths(out), *notes))


def _check_options(repo_id: str, revision: str | None, create_pr: bool, message: str, token: str | bool | None) -> str:
    """The branch; refuses what a Hub would refuse after the work, and a secret that the history would show."""
    validate_repo_id(repo_id or "")
    branch = constants.DEFAULT_REVISION if revision is None else revision
    if create_pr and branch != constants.DEFAULT_REVISION:
        told = f"create_pr opens a pull request against main, but revision={revision!r} names another branch"
        raise UsageError(f"{told}; give one of them")
    if not is_ref_name(branch) and not _PULL.fullmatch(branch):
        raise UsageError(f"revision={branch!r} is no name for a branch, by git's rules for names")
    if not isinstance(message, str) or not message.strip() or message != message.encode(errors="ignore").decode():
        raise UsageError(f"commit_message={message!r} must be a text that is not empty")
    if (kind := find_kind(message)) is not None:
        raise SecretFound("the message of the commit", 1, kind)
    if isinstance(token, str) and not re.fullmatch(r"[!-~]+", token):
        raise UsageError("token has other characters than the letters, digits and signs of ASCII; copy it again")
    return branch


@contextmanager
def _name_source(source: Path, folder: Path) -> Iterator[None]:
    """Has errors name the source in place of the hidden copy, which is gone when they are read."""
    try:
        yield
    except ValueError as error:
        error.args = tuple(
            each.replace(str(folder), str(source)) if isinstance(each, str) else each for each in error.args
        )
        raise
    except RecursionError as error:
        raise DataError(f"{source}: one of its JSON files is nested too deeply; save the model again") from error


def _create(api: HfApi, repo_id: str, branch: str, private: bool | None) -> str:
    """Creates repository and branch where they do not exist; returns the id with the owner."""
    if _PULL.fullmatch(branch) and "/" in repo_id:
        # a pull request that is not there cannot be made by its name; of a bare id the owner is not known yet
        api.repo_info(repo_id, revision=branch)
    made = api.create_repo(repo_id, private=private, exist_ok=True)
    repo_id = repo_id if "/" in repo_id else made.repo_id
    if private is not None and bool(api.repo_info(repo_id).private) != private:
        state = "public" if private else "private"
        raise NotPublished(f"{repo_id} exists and is {state}, got private={private}; nothing was uploaded")
    if branch != constants.DEFAULT_REVISION and not _PULL.fullmatch(branch):
        if branch in {tag.name for tag in api.list_repo_refs(repo_id).tags}:
            told = f"revision={branch!r} is a tag of {repo_id}, which a branch would hide; choose another name"
            raise UsageError(told)
        api.create_branch(repo_id, branch=branch, exist_ok=True)
    return repo_id


def _find_stale_beside(folder: Path, tree: Tree) -> list[str]:
    """Finds the files of an earlier model: its exports to other forms only if weights or configuration are others."""
    stale, sure = find_stale(list(tree)), find_stale(list(tree), (_WRITTEN,))
    if len(stale) > len(sure):
        paths = [path for path in folder.rglob("*") if path.name == "config.json" or path.suffix == ".safetensors"]
        there = [tree.get(path.relative_to(folder).as_posix()) for path in paths]
        if not any(file is None or difference(file, path) for file, path in zip(there, paths, strict=True)):
            return sure
    return stale


def find_stale(files: list[str], kinds: tuple[re.Pattern[str], ...] = (_WRITTEN, _OTHER_FORMS)) -> list[str]:
    """Finds the files of a model in a repository: beside another one that lacks them, loaders would mix the two."""
    others = tuple(each for told, named in _OF_KINDS.items() if told in files for each in named)
    if MODULES in files:
        # which modules it lists, only its text says: they have the names that sentence-transformers gives
        others += tuple({found[0] for name in files if (found := re.match(r"\d+_\w+/", name))})

    def is_stale(name: str) -> bool:
        parts = name.split("/")
        inner = ["/".join(parts[place:]) for place in range(1, len(parts))] if name.startswith(others) else []
        if name in others or is_described(name) or any(map(_WITHIN.fullmatch, inner)):
            # whose licence it is, nobody can tell
            return name not in LICENCES
        return any(is_loaded(each) or any(kind.fullmatch(each) for kind in kinds) for each in (name, *inner))

    return list(filter(is_stale, files))


def _settle(api: HfApi, folder: Path, repo_id: str, license: str | None, commit: str, tree: Tree) -> list[str]:
    """Keeps the card that somebody wrote on the Hub where the folder's is a generated one; tells what is replaced."""
    card, kept = folder / "README.md", list[str]()
    if card.name in tree and difference(tree[card.name], card) and MARKER in read_card(card):
        try:
            there = read_text(api, repo_id, commit, tree[card.name])
            write_card(folder, repo_id=repo_id, license=license, there=there)
        except UsageError:
            raise
        except ValueError as error:
            advice = "correct it there, or put your own into the folder"
            raise NotPublished(f"{repo_id}: README.md on the Hub cannot be used ({error}); {advice}") from error
        if MARKER not in read_card(card):
            kept = ["README.md: the one that somebody wrote on the Hub is kept; put one into the folder to replace it"]
    names = [name for name in ({*LICENCES} if kept else {*LICENCES, card.name}) if (folder / name).is_file()]
    replaced = sorted(name for name in names if name in tree and difference(tree[name], folder / name))
    return kept + [f"{name}: the one on the Hub, which is another, is replaced" for name in replaced]


def _tell(notes: list[str], stale: list[str], left: list[str]) -> str:
    """Says what becomes of the files of the repository that the folder does not have, and of its card and licence."""
    parts = {"Deleted, as files of an earlier model": stale, "Kept": left}
    text = "\n".join([*notes, *(f"{title}: {', '.join(names)}" for title, names in parts.items() if names)])
    if text and not is_quiet():
        sys.stderr.write(f"{text}\n")
    return text
