"""Files of an artifact: damage of them and of the base is found, read once, given by a Hub, rescaled anew."""

import contextlib
import hashlib
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file

from hf_ext.emr import EMRModel, emr_loader
from hf_ext.emr.artifact import verify_artifact
from hf_ext.emr.manifest import Manifest
from hf_ext.emr.weights import TaskWeights
from hf_ext.errors import UsageError
from hf_ext.files import copy_into
from hf_ext.hub.header_format import CheckpointError
from tests.emr.emr_testing import push_folder, tiny_bert
from tests.emr.use_testing import edit_manifest, equal, flip, merge, merge_berts, restored
from tests.kit.refusals import refused

LONG_AGO = 10**18


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge_berts(tmp_path_factory.mktemp("files"))


@pytest.fixture
def artifact(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made.parent / "base", tmp_path / "base")
    return Path(shutil.copytree(made, tmp_path / "merged"))


DAMAGED = ("model.safetensors", "tasks/two/mask.safetensors", "tasks/two/extra.safetensors")
DAMAGES = [*itertools.product(DAMAGED, (flip, Path.unlink)), ("tasks/two/config.json", Path.unlink)]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_flipped_bit_and_a_lost_file_are_found_on_loading(artifact: Path, tmp_path: Path, name: str, damage: Any):
    """No head at random, and no configuration of the root in place of the task's."""
    damage(artifact / name)
    for use in (
        lambda: TaskWeights(artifact).export("two", tmp_path / "out"),
        lambda: EMRModel.from_pretrained(artifact),
    ):
        with refused(CheckpointError, name):
            use()
    with refused(ValueError, name) if name in DAMAGED else contextlib.nullcontext():
        emr_loader.restore(artifact, "two")
    assert not (tmp_path / "out").exists()
    # Other tasks do not need the files of this one.
    if name.startswith("tasks"):
        TaskWeights(artifact).export("five", tmp_path / "out")


def test_of_a_hub_a_root_in_shards_is_read_and_copied_whole(made: Path, tmp_path: Path, monkeypatch: Any):
    base = made.parent / "base"
    artifact = merge(base, {"two": made.parent / "two"}, tmp_path / "merged", max_shard_size="4KB")

    def download(api: HfApi, name: str, *, revision: str, allow_patterns: Any, ignore_patterns: Any) -> str:
        names = [path.relative_to(artifact).as_posix() for path in artifact.rglob("*") if path.is_file()]
        chosen = filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        copy_into({name: artifact / name for name in chosen}, tmp_path / "cache")
        return str(tmp_path / "cache")

    monkeypatch.setattr(HfApi, "snapshot_download", download)
    monkeypatch.setattr(TaskWeights, "_resolve", lambda *_: ("me/merged", "0" * 40))
    weights = TaskWeights("me/merged", base=base)
    assert weights.restore("two", "classifier.bias").shape == (2,)
    assert verify_artifact(weights.copy_artifact(tmp_path / "copy")).wrong == []
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    weights.export("two", ".")
    assert (tmp_path / "empty" / "config.json").is_file()


def test_a_manifest_names_every_file_that_the_merge_wrote(artifact: Path):
    manifest = Manifest.read(artifact)
    names = {path.relative_to(artifact).as_posix() for path in artifact.rglob("*") if path.is_file()}
    assert names - manifest.files.keys() == {"emr.json", "README.md", "report.json"}
    assert manifest.files.keys() <= names
    for name, about in manifest.files.items():
        data = (artifact / name).read_bytes()
        assert about == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}, name
    found = verify_artifact(artifact)
    assert (found.wrong, found.notes) == ([], [])
    assert found.files == len(manifest.files) + 1  # with the base
    # Everything that is not as it was is named.
    flip(artifact / "tasks" / "five" / "mask.safetensors")
    flip(artifact / "tasks" / "two" / "config.json", 3)
    (artifact / "tokenizer.json").unlink()
    (artifact / "tasks" / "plain" / "sums.safetensors").write_bytes(b"short")
    (artifact / "mine.txt").write_text("a note")
    found = verify_artifact(artifact)
    damaged = [
        "tasks/five/mask.safetensors",
        "tasks/plain/sums.safetensors",
        "tasks/two/config.json",
        "tokenizer.json",
    ]
    assert sorted(line.partition(":")[0] for line in found.wrong) == damaged
    text = "\n".join(found.wrong)
    assert "tokenizer.json: missing" in text and "5 bytes, expected" in text and "its SHA-256 differs" in text
    assert found.notes == ["mine.txt: not compared, since it is not a file of the merge."]


def test_the_base_is_verified_where_it_is(artifact: Path, tmp_path: Path):
    base = tmp_path / "base"
    edit_manifest(artifact, lambda manifest: manifest["base"].update(source=str(base)))
    flip(base / "model.safetensors")
    assert [line.partition(":")[0] for line in verify_artifact(artifact).wrong] == [str(base / "model.safetensors")]
    shutil.rmtree(base)
    found = verify_artifact(artifact)
    assert found.wrong == [] and "was not read: it is not at the path" in found.notes[0]


def test_what_was_read_once_is_not_read_again(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    base, read, digest = tmp_path / "base", [], hashlib.file_digest

    def noted(file: Any, kind: str) -> Any:
        read.append(Path(file.name).name)
        return digest(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    for path in (*artifact.rglob("*"), *base.rglob("*")):
        os.utime(path, ns=(LONG_AGO, LONG_AGO))
    TaskWeights(artifact, base=base).entries("two")
    # The root, the base, and the task's own two files.
    assert sorted(read) == ["extra.safetensors", "mask.safetensors", "model.safetensors", "model.safetensors"]
    read.clear()
    TaskWeights(artifact, base=base).entries("two")
    assert read == []
    # `verify` believes no cache.
    verify_artifact(artifact)
    assert len(read) == len(Manifest.read(artifact).files) + 1


@pytest.mark.parametrize("mode", ["official", "tensor", "l2", "tensor_l2", "none"])
def test_rescaled_anew_is_merged_with_that_mode(mode: str, made: Path, tmp_path: Path):
    with refused(UsageError, "best"):
        EMRModel.from_pretrained(made, rescale="best")
    tasks = {name: made.parent / name for name in ("two", "five", "plain")}
    merged = TaskWeights(merge(made.parent / "base", tasks, tmp_path / "out", rescale=mode))
    anew, given = TaskWeights(made, rescale=mode), TaskWeights(made)
    for task in tasks:
        assert equal(restored(anew, task), restored(merged, task))
        assert not equal(restored(anew, task), restored(given, task))


def test_the_base_is_verified(made: Path, tmp_path: Path):
    merged = shutil.copytree(made, tmp_path / "merged")
    moved = shutil.copytree(made.parent / "base", tmp_path / "moved")
    edit_manifest(merged, lambda manifest: manifest["base"].update(source=str(tmp_path / "gone")))
    with refused(CheckpointError, "base"):
        EMRModel.from_pretrained(merged)
    assert EMRModel.from_pretrained(merged, base=moved).current == "two"
    other = shutil.copytree(moved, tmp_path / "other")
    flip(other / "model.safetensors")
    with refused(CheckpointError, "SHA-256", "base"):
        EMRModel.from_pretrained(merged, base=other)
    with refused(CheckpointError, "expected", "bytes"):
        EMRModel.from_pretrained(merged, base=tiny_bert(tmp_path / "larger", hidden_size=32))
    with refused(CheckpointError, "org/name"):
        EMRModel.from_pretrained(merged, base="nowhere")


def test_an_export_that_fails_leaves_nothing(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    restore, written = TaskWeights.restore_into, []

    def fail(*given: Any) -> None:
        written.append(given)
        if len(written) == 5:
            raise OSError("no room")
        restore(*given)

    monkeypatch.setattr(TaskWeights, "restore_into", fail)
    with refused(OSError, "room"):
        TaskWeights(made).export("two", tmp_path / "out")
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
def test_a_hub_gives_only_what_is_needed(made: Path, hub, run_client, tmp_path: Path):
    commit = push_folder(hub.url, "me/base", made.parent / "base")
    # The same bytes as the base of the merge, so the manifest may name the Hub's copy.
    folder = shutil.copytree(made, tmp_path / "merged")
    edit_manifest(folder, lambda manifest: manifest["base"].update(source="me/base", revision=commit))
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
    assert equal(exported, dict(EMRModel.from_pretrained(made, "five").model.state_dict()))


def test_an_export_leaves_an_interrupted_merge_of_its_name_and_belongs_to_no_task(artifact: Path):
    kept = artifact / ".exported.partial" / "journal" / "x.jsonl"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    TaskWeights(artifact).export("two", artifact / "exported")
    assert kept.is_file() and (artifact / "exported" / "config.json").is_file()
    assert not [name for name in TaskWeights(artifact).small_files("five") if name.startswith("exported")]
