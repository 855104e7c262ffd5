"""The weights of an artifact: from a Hub, with a verified base, rescaled anew."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_ext.emr import EMRModel
from hf_ext.emr.weights import TaskWeights
from hf_ext.errors import UsageError
from hf_ext.hub.header_format import CheckpointError
from tests.emr.emr_testing import push_folder, tiny_bert
from tests.emr.use_testing import equal, merge, merge_berts
from tests.kit.refusals import refused


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge_berts(tmp_path_factory.mktemp("bert"))


@pytest.mark.parametrize("mode", ["official", "tensor", "l2", "tensor_l2", "none"])
def test_rescaled_anew_is_merged_with_that_mode(mode: str, bert: Path, tmp_path: Path):
    tasks = {name: bert.parent / name for name in ("two", "five", "plain")}
    merged = TaskWeights(merge(bert.parent / "base", tasks, tmp_path / "out", rescale=mode))
    anew, given = TaskWeights(bert, rescale=mode), TaskWeights(bert)
    for task in tasks:
        names = anew.entries(task)
        assert all(torch.equal(anew.restore(task, name), merged.restore(task, name)) for name in names)
        assert not all(torch.equal(anew.restore(task, name), given.restore(task, name)) for name in names)


def test_an_unknown_rescale_mode_is_refused(bert: Path):
    with refused(UsageError, "best"):
        EMRModel.from_pretrained(bert, rescale="best")


def test_the_base_is_verified(bert: Path, tmp_path: Path):
    merged = shutil.copytree(bert, tmp_path / "merged")
    moved = shutil.copytree(bert.parent / "base", tmp_path / "moved")
    rewrite_source(merged, tmp_path / "gone")
    with refused(CheckpointError, "base"):
        EMRModel.from_pretrained(merged)
    assert EMRModel.from_pretrained(merged, base=moved).current == "two"
    other = shutil.copytree(moved, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["pooler.dense.bias"] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with refused(CheckpointError, "SHA-256", "base"):
        EMRModel.from_pretrained(merged, base=other)
    with refused(CheckpointError, "expected", "bytes"):
        EMRModel.from_pretrained(merged, base=tiny_bert(tmp_path / "larger", hidden_size=32))
    with refused(CheckpointError, "org/name"):
        EMRModel.from_pretrained(merged, base="nowhere")


def rewrite_source(merged: Path, source: str | Path, **others: str) -> None:
    manifest = json.loads((merged / "emr.json").read_text())
    manifest["base"] |= {"source": str(source), **others}
    (merged / "emr.json").write_text(json.dumps(manifest))


def test_an_export_that_fails_leaves_nothing(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    restore, written = TaskWeights.restore_into, []

    def fail(weights: TaskWeights, task: str, name: str, out: torch.Tensor) -> None:
        written.append(name)
        if len(written) == 5:
            raise OSError("no room")
        restore(weights, task, name, out)

    monkeypatch.setattr(TaskWeights, "restore_into", fail)
    with refused(OSError, "room"):
        TaskWeights(bert).export("two", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


HUB_SCRIPT = """
    import os
    from pathlib import Path
    from hf_ext.emr import EMRModel

    def cached():
        home = Path(os.environ["HF_HOME"], "hub")
        links = [path for path in home.rglob("*") if path.is_symlink()]
        return sorted(str(Path(*path.relative_to(home).parts[3:])) for path in links)

    emr = EMRModel.from_pretrained("me/merged", "two")
    print(cached())
    emr.set_task("five")
    print(cached())
    emr.export("five", "out")
    os.environ["HF_HUB_OFFLINE"] = "1"
    print(emr.model.config.num_labels, emr.tasks)
"""


@pytest.mark.slow
def test_a_hub_gives_only_what_is_needed(bert: Path, hub, run_client, tmp_path: Path):
    commit = push_folder(hub.url, "me/base", bert.parent / "base")
    # The same bytes as the base of the merge, so the manifest may name the Hub's copy.
    folder = shutil.copytree(bert, tmp_path / "merged")
    rewrite_source(folder, "me/base", revision=commit)
    push_folder(hub.url, "me/merged", folder)
    first, second, last = run_client(HUB_SCRIPT).strip().splitlines()[-3:]
    small = ["config.json", "emr.json", "emr_loader.py", "tokenizer.json", "tokenizer_config.json"]
    weights = ["model.safetensors", "model.safetensors"]
    kinds = ("config.json", "extra.safetensors", "mask.safetensors")
    two, five = ([f"tasks/{task}/{kind}" for kind in kinds] for task in ("two", "five"))
    assert eval(first) == sorted([*small, *weights, *two])
    assert eval(second) == sorted([*small, *weights, *two, *five])
    assert last == "5 ['two', 'five', 'plain']"
    exported = load_file(tmp_path / "home" / "out" / "model.safetensors")
    assert equal(exported, dict(EMRModel.from_pretrained(bert, "five").model.state_dict()))


def test_an_export_leaves_an_interrupted_merge_of_the_same_name(bert: Path, tmp_path: Path):
    kept = tmp_path / ".out.partial" / "journal" / "x.jsonl"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    TaskWeights(bert).export("two", tmp_path / "out")
    assert kept.is_file() and (tmp_path / "out" / "config.json").is_file()
