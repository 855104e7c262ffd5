"""Hashes of an artifact's files and of its base: damage is found, and what was read once is not read again."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
from pathlib import Path

import pytest

from hf_ext.emr import EMRModel
from hf_ext.emr.artifact import verify_artifact
from hf_ext.emr.manifest import Manifest
from hf_ext.emr.weights import TaskWeights
from hf_ext.hub.header_format import CheckpointError
from tests.emr.use_testing import merge_berts
from tests.kit.refusals import refused

LONG_AGO = 10**18


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge_berts(tmp_path_factory.mktemp("files"))


@pytest.fixture
def artifact(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made.parent / "base", tmp_path / "base")
    return Path(shutil.copytree(made, tmp_path / "merged"))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read through."""
    names: list[str] = []
    digest = hashlib.file_digest

    def noted(file, kind):
        names.append(Path(file.name).name)
        return digest(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    return names


def flip(path: Path, place: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def make_old(folder: Path) -> None:
    for path in folder.rglob("*"):
        os.utime(path, ns=(LONG_AGO, LONG_AGO))


DAMAGED = ("model.safetensors", "tasks/two/mask.safetensors", "tasks/two/extra.safetensors")


@pytest.mark.parametrize("name", DAMAGED)
def test_one_flipped_bit_is_found_on_loading(artifact: Path, tmp_path: Path, name: str):
    flip(artifact / name)
    with refused(CheckpointError, name):
        TaskWeights(artifact).export("two", tmp_path / "out")
    with refused(CheckpointError, "merge", "wrote"):
        EMRModel.from_pretrained(artifact, "two")
    assert not (tmp_path / "out").exists()
    # Other tasks do not need the files of this one.
    if name.startswith("tasks"):
        TaskWeights(artifact).export("five", tmp_path / "out")


def test_a_manifest_names_every_file_that_the_merge_wrote(artifact: Path):
    manifest = Manifest.read(artifact)
    names = {path.relative_to(artifact).as_posix() for path in artifact.rglob("*") if path.is_file()}
    assert names - manifest.files.keys() == {"emr.json", "README.md", "report.json", "report.png"}
    assert manifest.files.keys() <= names
    for name, about in manifest.files.items():
        data = (artifact / name).read_bytes()
        assert about == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}, name
    found = verify_artifact(artifact)
    assert (found.wrong, found.notes) == ([], [])
    assert found.files == len(manifest.files) + 1  # with the base


def test_everything_that_is_not_as_it_was_is_named(artifact: Path):
    flip(artifact / "tasks" / "five" / "mask.safetensors")
    flip(artifact / "tasks" / "two" / "config.json", 3)
    (artifact / "tokenizer.json").unlink()
    (artifact / "tasks" / "plain" / "sums.safetensors").write_bytes(b"short")
    (artifact / "mine.txt").write_text("a note")
    found = verify_artifact(artifact)
    assert sorted(line.partition(":")[0] for line in found.wrong) == [
        "tasks/five/mask.safetensors",
        "tasks/plain/sums.safetensors",
        "tasks/two/config.json",
        "tokenizer.json",
    ]
    text = "\n".join(found.wrong)
    assert "tokenizer.json: missing" in text and "5 bytes, expected" in text and "its SHA-256 differs" in text
    assert found.notes == ["mine.txt: not compared, since it is not a file of the merge."]


def test_the_base_is_verified_where_it_is(artifact: Path, tmp_path: Path):
    manifest, base = Manifest.read(artifact), tmp_path / "base"
    dataclasses.replace(manifest, base=dataclasses.replace(manifest.base, source=str(base))).write(artifact)
    flip(base / "model.safetensors")
    assert [line.partition(":")[0] for line in verify_artifact(artifact).wrong] == [str(base / "model.safetensors")]
    shutil.rmtree(base)
    found = verify_artifact(artifact)
    assert found.wrong == [] and "was not read: it is not at the path" in found.notes[0]


def test_what_was_read_once_is_not_read_again(artifact: Path, tmp_path: Path, read: list[str]):
    make_old(artifact), make_old(tmp_path / "base")
    base = tmp_path / "base"
    TaskWeights(artifact, base=base).entries("two")
    # The root, the base, and the task's own two files.
    assert sorted(read) == ["extra.safetensors", "mask.safetensors", "model.safetensors", "model.safetensors"]
    read.clear()
    TaskWeights(artifact, base=base).entries("two")
    assert read == []
    # What changed is read again, even where its length did not.
    flip(base / "model.safetensors")
    with refused(CheckpointError, "merge", "base"):
        TaskWeights(artifact, base=base)
    assert read == ["model.safetensors"]
    # `verify` believes no cache.
    read.clear()
    verify_artifact(artifact)
    assert len(read) == len(Manifest.read(artifact).files) + 1
