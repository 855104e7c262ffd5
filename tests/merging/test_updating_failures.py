"""Adding and removing tasks: what is refused, fails or is killed leaves the artifact as it was."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from hf_ext.emr.manifest import Manifest
from hf_ext.errors import DataError, UsageError
from hf_ext.hub.header_format import CheckpointError
from hf_ext.merging import updating
from hf_ext.merging.updating import add_task, remove_task
from tests.emr.emr_testing import write_weights
from tests.hub.published import contents
from tests.kit import warm_python
from tests.kit.refusals import refused
from tests.merging.updating_sources import CONFIG, merge, vectors, weights_of


def test_merging_again_needs_the_same_checkpoints(sources, tmp_path):
    place = Path(shutil.copytree(sources, tmp_path / "sources"))
    artifact = merge(place, "ab", tmp_path / "artifact")
    before = contents(artifact)
    shutil.rmtree(place / "b")
    with refused(ValueError, "'c'", "task 'b'", "--frozen"):
        add_task(artifact, "c", str(place / "c"))
    write_weights(place / "b", {**vectors(2), "other.weight": torch.zeros(3)}, config=CONFIG)
    with refused(DataError, "b"):
        add_task(artifact, "c", str(place / "c"))
    assert contents(artifact) == before
    assert add_task(artifact, "c", str(place / "c"), frozen=True)["how"] == "frozen"


def test_what_cannot_be_added_is_refused_and_nothing_changes(sources, artifact, tmp_path):
    before = contents(artifact)
    for name, fact in (("a", "has a task 'a'"), ("A", "has a task 'a'"), ("x/y", "'x/y' is not allowed")):
        with refused(ValueError, fact):
            add_task(artifact, name, str(sources / "c"))
    bad = vectors(3)
    bad["odd.weight"][2, 3] = float("nan")
    write_weights(tmp_path / "bad", bad, config=CONFIG)
    for frozen in (False, True):
        with refused(ValueError, "odd.weight", "NaN"):
            add_task(artifact, "c", str(tmp_path / "bad"), frozen=frozen)
    other = vectors(0)
    other["odd.weight"] += 1
    write_weights(tmp_path / "other", other, config=CONFIG)
    with refused(DataError, "sha256"):
        add_task(artifact, "c", str(sources / "c"), base=str(tmp_path / "other"))
    assert contents(artifact) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "bad", "other"]


def test_the_base_may_have_moved(sources, kept, tmp_path):
    place = Path(shutil.copytree(sources, tmp_path / "sources"))
    artifact = merge(place, "ab", tmp_path / "artifact")
    os.rename(place / "base", place / "moved")
    with refused(DataError, "base"):
        add_task(artifact, "c", str(place / "c"))
    add_task(artifact, "c", str(place / "c"), base=str(place / "moved"))
    assert weights_of(artifact) == weights_of(kept["abc"])


@pytest.mark.parametrize("step", ["merge_checkpoints", "rewrite_report", "replace_folder"])
def test_an_addition_that_fails_leaves_the_artifact_as_it_was(sources, kept, artifact, tmp_path, monkeypatch, step):
    """Right after each step, and instead of the last one."""
    before, run = contents(artifact), getattr(updating, step)

    def fail(*arguments, **options):
        if step != "replace_folder":
            run(*arguments, **options)
        raise OSError("the disk is full")

    monkeypatch.setattr(updating, step, fail)
    with refused(OSError, "disk", "full"):
        add_task(artifact, "c", str(sources / "c"), frozen=True)
    assert contents(artifact) == before
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]


@pytest.mark.slow
def test_after_a_kill_the_artifact_is_as_it_was_and_the_next_addition_succeeds(sources, kept, artifact, tmp_path):
    """Killed when everything is written and nothing yet in its place."""
    before = contents(artifact)
    script = """
        import os, signal, sys
        from hf_ext.merging import updating
        updating.replace_folder = lambda *places: os.kill(os.getpid(), signal.SIGKILL)
        updating.add_task(*sys.argv[1:], frozen=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(artifact), "c", str(sources / "c")]
    done = warm_python.run(command, env=os.environ, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert contents(artifact) == before
    assert {path.name for path in tmp_path.iterdir()} == {"artifact", ".artifact.update"}
    add_task(artifact, "c", str(sources / "c"), frozen=True)
    assert list(Manifest.read(artifact).tasks) == ["a", "b", "c"]
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]


def test_a_kill_between_two_renames_is_put_right_first(kept, artifact):
    """Where folders cannot be exchanged, there is a moment in which the artifact has another name."""
    before = contents(artifact)
    os.rename(artifact, artifact.with_name(".artifact.old"))
    remove_task(artifact, "a")
    assert set(Manifest.read(artifact).tasks) == {"b"}
    assert contents(artifact)["model.safetensors"] == before["model.safetensors"]


def test_files_are_shared_with_the_earlier_artifact_but_never_written_to(sources, kept, artifact, monkeypatch):
    """What a reader has opened, or a hard link elsewhere, keeps its content."""
    linked = artifact.with_name("linked")
    shutil.copytree(artifact, linked, copy_function=os.link)
    before = contents(linked)
    remove_task(artifact, "a")
    add_task(artifact, "a2", str(sources / "a"), frozen=True)
    assert contents(linked) == before
    assert os.stat(artifact / "emr_loader.py").st_ino == os.stat(linked / "emr_loader.py").st_ino

    def refuse(*names):
        raise OSError("no links")

    monkeypatch.setattr(updating.os, "link", refuse)
    remove_task(linked, "a")
    assert os.stat(artifact / "emr_loader.py").st_ino != os.stat(linked / "emr_loader.py").st_ino
    assert {**contents(linked)}["model.safetensors"] == before["model.safetensors"]


def test_the_cache_of_a_hub_is_not_changed(artifact, tmp_path):
    cached = tmp_path / "models--org--name" / "snapshots" / ("0" * 40)
    cached.parent.mkdir(parents=True)
    os.rename(artifact, cached)
    with refused(UsageError, "changed", "cache"):
        remove_task(cached, "a")


def test_a_result_without_masks_is_no_artifact(sources, tmp_path):
    plain = merge(sources, "ab", tmp_path / "plain", method="average", allow_missing=True)
    with refused(CheckpointError, "emr.json"):
        remove_task(plain, "a")
