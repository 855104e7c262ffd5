"""Runs whose states are on a Hub: `main FOLDER`, in a process whose Hub is the embedded one; prints what it found."""

import json
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub import HfApi

from hf_ext.hub import publish
from hf_ext.training.state import RunFolder

from . import tiny
from .tiny import TinyTask, contents, find_differences, make_arguments, run, run_interrupted

REPO = "me/run"
STATE = "last-checkpoint/state/step-4"
# Of the form of a token, and none.
SECRET = "hf_" + "aBcDeFgHiJ" * 3 + "qRsT"


class Code:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return Path.touch, (self.file,)


def make_repository(folder: Path, repo_id: str, *, private: bool, commit_message: str) -> Any:
    """What is left of `push` where the model is of no class that is published."""
    assert (folder / "model.safetensors").is_file()
    url = HfApi().create_repo(repo_id, private=private, exist_ok=True)
    return SimpleNamespace(commit_url=url, repo_url=url)


def list_errors(run: Path) -> list[str]:
    return [row["push_error"] for row in RunFolder(run).read_metrics() if "push_error" in row]


def main() -> None:
    root, api = Path(sys.argv[1]), HfApi()
    publish.push = make_repository
    data = {name: {"path": str(tiny.write_shards(root / name, 2, 9))} for name in ("train", "eval")}
    run(TinyTask(), make_arguments(root / "whole", data))
    pushing = {"hub_model_id": REPO, "hub_private_repo": True, "hub_strategy": "checkpoint"}
    run_interrupted(make_arguments(root / "cut", data, **pushing), step=5)
    while [*(root / "cut" / ".push").glob("step-*")]:
        time.sleep(0.01)
    errors = list_errors(root / "cut")
    shutil.rmtree(root / "cut")
    api.create_repo("me/ignored")
    api.upload_file(repo_id="me/ignored", path_or_fileobj=b"*.bin\n", path_in_repo=".gitignore")
    api.create_repo("me/hollow", repo_type="dataset")
    folder = tiny.write_hollow(root / "hollow")
    commit = api.upload_folder(folder_path=folder, repo_id="me/hollow", repo_type="dataset").oid
    part = {"path": f"me/hollow@{commit}", "split": "train[:80%]"}
    hollow = {"train": {"path": "me/hollow", "streaming": True}}
    kept = {
        "ignored": {"hub_model_id": "me/ignored", "data": hollow},
        "secret": {"hub_model_id": "me/secret", "run_name": SECRET, "data": {"train": part}},
    }
    for name, changes in kept.items():
        run(TinyTask(), make_arguments(root / name, **pushing | changes, max_steps=2))
    found: dict[str, Any] = {name: list_errors(root / name) for name in kept}
    found["kept"] = [name for kind in kept for name in api.list_repo_files(f"me/{kind}") if name.startswith("last")]
    found |= {"push errors": errors, "files": api.list_repo_files(REPO)}
    run(TinyTask(), make_arguments(root / "bare", data, **pushing | {"hub_model_id": "bare"}, max_steps=2))
    # Without a token one is `local` there.
    files = api.list_repo_files("local/bare")
    found["bare"] = [*list_errors(root / "bare"), *{name.partition("/")[0] for name in files}]
    good = api.repo_info(REPO).sha

    def resume(name: str, source: str) -> dict[str, Any]:
        run(TinyTask(), make_arguments(root / name, data, resume_from_checkpoint=source, **pushing))
        return contents(root / name)

    found["differences"] = find_differences(contents(root / "whole"), resume("moved", f"{REPO}@{good}"))
    # What is in the folder goes before what is on the Hub.
    found["again"] = find_differences(contents(root / "moved"), resume("moved", "me/absent"))
    torch.save({"step": 4, "code": Code(root / "ran")}, root / "code.pkl")
    changes = {"code": ("custom_checkpoint_0.pkl", "code.pkl"), "name": ("other.pkl", "code.pkl")}
    sources = {"absent": "me/absent", "revision": f"{REPO}@none", "empty": "me/empty", "taken": f"{REPO}@{good}"}
    for name, (file, content) in changes.items():
        api.create_branch(REPO, branch=name, revision=good)
        path = f"{STATE}/{file}"
        api.upload_file(repo_id=REPO, path_or_fileobj=root / content, path_in_repo=path, revision=name)
        sources[name] = f"{REPO}@{name}"
    api.create_repo("me/empty")
    (root / "taken").mkdir()
    (root / "taken" / "notes.txt").touch()
    found["refused"] = {}
    for name, source in sources.items():
        try:
            resume(name, source)
        except ValueError as error:
            found["refused"][name] = [type(error).__name__, str(error)]
    left = [*(root / name / "args.json" for name in sources), root / "ran"]
    found["left"] = [str(file) for file in left if file.exists()]
    print(json.dumps(found))
