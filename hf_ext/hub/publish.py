"""From a model or a folder to a self-loadable folder, and from there to the Hub in one commit.

What is published is what was staged: weights as safetensors, configuration, the code files of the installed package,
the image processor or tokenizer, and the card.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import uuid
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, Union
from urllib.parse import quote

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    get_session,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, validate_repo_id  # type: ignore[attr-defined]
from peft import PeftModel
from transformers import FeatureExtractionMixin, PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.image_processing_base import ImageProcessingMixin

from .cards import write_card
from .checkpoints import open_checkpoint
from .diffusers_folders import INDEX, is_pipeline, load_pipeline, save_pipeline
from .folders import replace_folder, sync_folder
from .load_check import SHIPPED_ROLES, check_loads, installed_room, refuse_kernels, room_code, room_of, verify_code
from .safetensors_headers import parse_json_object

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

# Its presence makes a folder an artifact of EMR-Merging.
MANIFEST = "emr.json"
Source: TypeAlias = Union[PreTrainedModel, PeftModel, "DiffusionPipeline", str, Path]
Processor: TypeAlias = ImageProcessingMixin | FeatureExtractionMixin

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
# What a checkpoint of another library consists of; everything else in its folder stays behind.
_COPIED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "README.md", "LICENSE*", "report.png")
# What describes a run or a merge and its results; the card is made from it.
_REPORTS = ("eval.json", "training.json", "report.json", "report.png")
# Of a model of ours that reads text; its other files are written again.
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
# What is also replaced where the earlier push was an artifact of EMR-Merging.
_OF_ARTIFACTS = ("tasks/", "base/", "sums.safetensors")
# The same, of a diffusers pipeline.
_OF_PIPELINES = (INDEX, "pipeline.py", "transformer/", "scheduler/", "vae/", "text_encoder/", "tokenizer/")
# Files of an earlier push that would be wrong beside the new ones. Other files in the repository are left alone.
_REPLACED = re.compile(
    r"(model|adapter_model|diffusion_pytorch_model)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
    rf"|({'|'.join(SHIPPED_ROLES)})_\w+\.py"
    r"|config\.json|adapter_config\.json|preprocessor_config\.json|eval\.json|training\.json"
    r"|emr\.json|emr_loader\.py|report\.(json|png)"
    r"|\.eval_results/hf_ext\.yaml"
)


def stage(
    source: Source,
    out: str | Path,
    *,
    processor: Processor | None = None,
    repo_id: str | None = None,
    license: str | None = None,
    overwrite: bool = False,
) -> Path:
    """
    Writes a folder that anyone can load with `from_pretrained`, with or without hf_ext.

    One of our models is loaded by the class of the installed package and saved again, so its code files are always the
    installed ones. A folder of another transformers model, or of a peft adapter, is copied: safetensors, JSON,
    tokenizer files, README and licence. `eval.json` and `training.json` go along as they are. Code (`*.py`) and
    pickles in such a folder are refused; whatever else lies in it (logs, resume states) stays behind. Of an artifact
    of EMR-Merging go along the tasks, the report and the installed loader, if its base is on a Hub or inside it.

    Args:
        source (`PreTrainedModel`, `PeftModel`, `DiffusionPipeline`, `str` or `Path`):
            A model, or a pipeline of ours, in memory, or a local folder.
        out (`str` or `Path`): The folder to write. It appears complete, or not at all.
        processor (`ImageProcessingMixin` or `FeatureExtractionMixin`, *optional*):
            Image processor or feature extractor to write beside a model in memory.
        repo_id (`str`, *optional*): Where it will be published, for the card. Defaults to the name of `out`.
        license (`str`, *optional*): Licence of the weights, as the Hub names it. Defaults to that of the template.
        overwrite (`bool`, *optional*, defaults to `False`): Replace `out` when it holds an earlier checkpoint.

    Returns:
        `Path`: `out`.

    Raises:
        FileExistsError: `out` holds something, and `overwrite` is off or it is no checkpoint.
        ValueError: The source is not of a supported kind, holds code or pickles, or does not load completely.
    """
    # The room of EMR-Merging reads and writes checkpoints, so it needs this one.
    from ..merging.publishing import hide_paths

    out = Path(out)
    _require_free(out, overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    # beside `out`, so that the last step is a rename
    temporary = out.with_name(f".{out.name}-{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        _write(source, temporary, processor)
        hide_paths(temporary)
        verify_code(temporary)
        write_card(temporary, repo_id=repo_id or out.name, license=license)
        sync_folder(temporary)
        replace_folder(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def push(
    source: Source,
    repo_id: str,
    *,
    processor: Processor | None = None,
    license: str | None = None,
    token: str | bool | None = None,
    endpoint: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    private: bool | None = None,
    commit_message: str = "Upload with hf-ext",
    check: bool = True,
) -> CommitInfo:
    """
    Stages, checks that the folder loads without hf_ext, and uploads it in one commit.

    The repository and the branch are created when they do not exist. Files of the same name are replaced, the card
    included. Weights, code and reports of an earlier push that the new one does not replace are deleted in the same
    commit; other files are left alone.

    Args:
        source (`PreTrainedModel`, `PeftModel`, `str` or `Path`): As in [`stage`].
        repo_id (`str`): `org/name`.
        processor (`ImageProcessingMixin` or `FeatureExtractionMixin`, *optional*): As in [`stage`].
        license (`str`, *optional*): As in [`stage`].
        token (`str` or `bool`, *optional*): Token of the Hub; `None` uses the one that was logged in with.
        endpoint (`str`, *optional*): Address of the Hub. Defaults to `HF_ENDPOINT`.
        revision (`str`, *optional*): Branch to commit to. Defaults to `main`.
        create_pr (`bool`, *optional*, defaults to `False`): Open a pull request against `main` instead.
        private (`bool`, *optional*): Visibility. When given, it must be that of a repository that exists already.
        commit_message (`str`, *optional*): First line of the commit.
        check (`bool`, *optional*, defaults to `True`): Whether to run the load check ([`check_loads`]).

    Returns:
        [`~huggingface_hub.CommitInfo`]: The commit; `pr_url` when a pull request was opened.

    Raises:
        ValueError: As in [`stage`] and [`check_loads`]; or the options contradict each other or the repository.
    """
    validate_repo_id(repo_id)
    branch = revision or constants.DEFAULT_REVISION
    if create_pr and branch != constants.DEFAULT_REVISION:
        raise ValueError(
            f"create_pr opens a pull request against main, and revision={revision!r} is another branch; give one"
        )
    with tempfile.TemporaryDirectory() as place:
        folder = stage(
            source, Path(place, repo_id.rpartition("/")[2]), processor=processor, repo_id=repo_id, license=license
        )
        if check:
            check_loads(folder, endpoint=endpoint, token=token)
        api = HfApi(endpoint=endpoint, token=token)
        _create(api, repo_id, branch, private)
        return _commit(api, folder, repo_id, branch, create_pr, commit_message)


def _write(source: Source, out: Path, processor: Processor | None) -> None:
    if isinstance(source, (str, Path)):
        if processor is not None:
            raise ValueError("processor belongs to a model in memory; put its files into the folder instead")
        _write_folder(Path(source), out)
    elif type(source).__module__.startswith("hf_ext.pipelines."):
        pipeline: Any = source
        save_pipeline(pipeline, out)
    elif type(source).__module__.startswith("hf_ext."):
        _save(source, processor, out)
    elif type(source).__module__.startswith(("transformers_modules.", "diffusers_modules.")):
        raise ValueError(
            f"{type(source).__name__} was loaded as remote code, which is not published again; "
            "import hf_ext and load the checkpoint without trust_remote_code"
        )
    elif isinstance(source, (PreTrainedModel, PeftModel)):
        with tempfile.TemporaryDirectory(dir=out.parent) as saved:
            _save(source, processor, Path(saved))
            _write_folder(Path(saved), out)
    else:
        raise TypeError(
            f"cannot stage a {type(source).__name__}; give a transformers model, a peft model, a pipeline of "
            "hf_ext.pipelines or a local folder"
        )


def _save(model: Any, processor: Processor | None, out: Path) -> None:
    room = installed_room(model.config.model_type) if isinstance(model, PreTrainedModel) else None
    if processor is None and room is not None:
        wanted = [item.__name__ for item in vars(room).values() if _is_class(item, ImageProcessingMixin)]
        if wanted and model.main_input_name == "pixel_values":
            raise ValueError(
                f"a {type(model).__name__} is published with its image processor: pass processor={wanted[0]}(...), or "
                f"save one into the folder with {wanted[0]}(...).save_pretrained(folder)"
            )
    model.save_pretrained(str(out))
    if processor is not None:
        processor.save_pretrained(str(out))
    if room is not None:
        _add_code(out, room)


def _add_code(out: Path, room: ModuleType) -> None:
    """The files of every class that is named, and what they import; transformers copies those of the saved class."""
    code = room_code(room)
    for path in (out / "config.json", out / "preprocessor_config.json"):
        named = parse_json_object(path.read_bytes(), str(path)).get("auto_map", {}) if path.is_file() else {}
        for reference in named.values():
            # what else is named is refused by the check of the folder
            first = code.get(f"{str(reference).partition('.')[0]}.py")
            for file in () if first is None else (first, *map(Path, get_relative_import_files(first))):
                shutil.copyfile(file, out / file.name)


def _write_folder(folder: Path, out: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give a local folder, or load the model first")
    if is_pipeline(folder):
        for path in folder.glob("*/config.json"):
            refuse_kernels(parse_json_object(path.read_bytes(), str(path)), path)
        save_pipeline(load_pipeline(folder), out)
        _copy_files(folder, out, (*_REPORTS, "README.md"))
        return
    # refuses pickles, and verifies every header
    with open_checkpoint(folder):
        pass
    room = room_of(folder)
    if (folder / MANIFEST).is_file():
        _write_artifact(folder, out, room)
    elif (folder / "adapter_config.json").is_file():
        if room is None:
            _refuse_files(folder, ("*.py",), "code")
        _copy(folder, out)
        if room is not None and (processor := _load_processor(folder, vars(room))) is not None:
            # written again, with the code of the installed package
            processor.save_pretrained(str(out))
    elif (folder / "config.json").is_file() and room is None:
        _refuse_files(folder, ("*.py",), "code")
        _copy(folder, out)
    elif room is not None:
        model, processor = _load(folder, vars(room))
        _save(model, processor, out)
        _copy_files(folder, out, (*_REPORTS, *_TOKENIZER, "README.md"))
    else:
        raise ValueError(f"{folder}: neither config.json nor adapter_config.json in it; is it a checkpoint?")


def _write_artifact(folder: Path, out: Path, room: ModuleType | None) -> None:
    from ..merging.publishing import LOADER, copy_artifact

    code = {} if room is None else room_code(room)
    foreign = sorted(
        name for path in folder.rglob("*.py") if (name := path.relative_to(folder).as_posix()) not in {LOADER, *code}
    )
    if foreign:
        raise ValueError(f"{folder}: {foreign[0]} is code, which is not published; take it out of the folder first")
    copy_artifact(folder, out)
    if room is not None:
        _add_code(out, room)


def _load(folder: Path, exported: dict[str, Any]) -> tuple[PreTrainedModel, Processor | None]:
    """One of our models and its processor, by the classes of the installed package only."""
    config = parse_json_object((folder / "config.json").read_bytes(), str(folder / "config.json"))
    # nothing else in the configuration makes our class run code
    refuse_kernels(config, folder / "config.json")
    heads = {name: item for name, item in exported.items() if _is_class(item, PreTrainedModel)}
    names = config.get("architectures") or [None]
    if not isinstance(names, list) or len(names) != 1 or names[0] not in heads:
        raise ValueError(f"{folder}/config.json: architectures is {names}; exactly one of {sorted(heads)} is allowed")
    loaded: Any = heads[names[0]].from_pretrained(folder, output_loading_info=True, use_safetensors=True)
    model, info = loaded
    problems = {key: sorted(map(str, value)) for key, value in info.items() if value}
    if problems:
        raise ValueError(f"{folder}: the weights do not fit {names[0]}: {problems}; fetch or save the folder again")
    return model, _load_processor(folder, exported)


def _load_processor(folder: Path, exported: dict[str, Any]) -> Processor | None:
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return None
    content = parse_json_object(path.read_bytes(), str(path))
    name = content.get("image_processor_type") or content.get("feature_extractor_type")
    classes = {
        name: item
        for name, item in exported.items()
        if _is_class(item, ImageProcessingMixin) or _is_class(item, FeatureExtractionMixin)
    }
    if name not in classes:
        raise ValueError(f"{path} names the class {name!r}; one of {sorted(classes)} is allowed")
    processor: Processor = classes[name].from_pretrained(folder)
    return processor


def _is_class(item: object, kind: type) -> bool:
    return isinstance(item, type) and issubclass(item, kind)


def _copy(folder: Path, out: Path) -> None:
    _refuse_files(folder, _PICKLES, "a pickle")
    for pattern in _COPIED:
        for path in folder.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, out / path.name)


def _copy_files(folder: Path, out: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)


def _refuse_files(folder: Path, patterns: tuple[str, ...], what: str) -> None:
    found = sorted(path.name for pattern in patterns for path in folder.glob(pattern))
    if found:
        raise ValueError(f"{folder}: {found[0]} is {what}, which is not published; take it out of the folder first")


def _require_free(out: Path, overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(f"{out} exists and is not empty; choose another place, or pass overwrite=True")
    if not any((out / name).is_file() for name in ("config.json", "adapter_config.json", INDEX)):
        raise FileExistsError(f"{out} exists and is no checkpoint, so it is not replaced; choose another place")


def _create(api: HfApi, repo_id: str, branch: str, private: bool | None) -> None:
    api.create_repo(repo_id, private=private, exist_ok=True)
    if private is not None and bool(api.repo_info(repo_id).private) != private:
        state = "public" if private else "private"
        raise ValueError(f"{repo_id} exists and is {state}, got private={private}; nothing was uploaded")
    if branch != constants.DEFAULT_REVISION:
        api.create_branch(repo_id, branch=branch, exist_ok=True)


def _commit(api: HfApi, folder: Path, repo_id: str, branch: str, create_pr: bool, message: str) -> CommitInfo:
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    parent = api.repo_info(repo_id, revision=branch).sha
    present = api.list_repo_tree(repo_id, revision=parent, recursive=True)
    files = [item.path for item in present if isinstance(item, RepoFile)]
    others = (_OF_ARTIFACTS if MANIFEST in files else ()) + (_OF_PIPELINES if INDEX in files else ())
    stale = [name for name in files if _REPLACED.fullmatch(name) or name.startswith(others)]
    with ExitStack() as stack:
        as_files = _lacks_xet(api, repo_id, branch)
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationDelete(name) for name in stale if name not in paths
        ]
        for name, path in paths.items():
            # huggingface_hub sends open files by LFS even where hf_xet is installed
            content = stack.enter_context(open(path, "rb")) if as_files and path.suffix == ".safetensors" else path
            operations.append(CommitOperationAdd(name, content))
        return api.create_commit(
            repo_id,
            operations,
            commit_message=message,
            revision=branch,
            create_pr=create_pr,
            parent_commit=parent,
        )


def _lacks_xet(api: HfApi, repo_id: str, branch: str) -> bool:
    """Whether the Hub has no Xet storage, as the embedded one; uploads through hf_xet would fail there."""
    url = f"{api.endpoint}/api/models/{repo_id}/xet-write-token/{quote(branch, safe='')}"
    headers = build_hf_headers(token=api.token)
    return get_session().get(url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT).status_code == 404
