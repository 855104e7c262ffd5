"""The root of a merge is no task's model: the command line and the pipelines ask for the task."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoConfig

import hf_ext  # noqa: F401  (registers the pipeline)
from hf_ext.emr import EMRModel
from hf_ext.emr.artifact import read_tasks
from hf_ext.emr.weights import task_checkpoint
from hf_ext.merging import add_task, remove_task
from tests.emr.emr_testing import push_folder, tiny_bert, tiny_semanir
from tests.emr.use_testing import merge
from tests.kit.command_line import run


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two fine-tunes that are far from each other, and a picture."""
    place = tmp_path_factory.mktemp("merged")
    base = tiny_semanir(place / "base")
    tasks = {name: tiny_semanir(place / name, seed, base=base, noise=0.3) for seed, name in enumerate("ab", 1)}
    pixels = np.random.default_rng(0).integers(0, 255, (16, 13, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(place / "photo.png")
    return merge(base, tasks, place / "merged")


def test_restore_asks_for_the_task(merged: Path, tmp_path: Path):
    photo = merged.parent / "photo.png"
    refused = run("restore", merged, photo, "--out", tmp_path / "out", code=2)
    assert "the model at its root is of no task. Name one of its tasks with --task: a, b" in refused.stderr
    assert not (tmp_path / "out").exists()
    pictures = {}
    for task in "ab":
        run("restore", merged, photo, "--task", task, "--out", tmp_path / task)
        run("emr", "export", merged, task, tmp_path / f"{task}-exported")
        run("restore", tmp_path / f"{task}-exported", photo, "--out", tmp_path / f"{task}-plain")
        pictures[task] = np.asarray(Image.open(tmp_path / task / "photo.png")).astype(int)
        plain = np.asarray(Image.open(tmp_path / f"{task}-plain" / "photo.png")).astype(int)
        assert np.abs(pictures[task] - plain).max() <= 1
    assert np.abs(pictures["a"] - pictures["b"]).max() > 10
    unknown = run("restore", merged, photo, "--task", "c", "--out", tmp_path / "c", code=2)
    assert "there is no task 'c'" in unknown.stderr and "'a', 'b'" in unknown.stderr
    plain = run("restore", merged.parent / "a", photo, "--task", "a", "--out", tmp_path / "d", code=2)
    assert "is no merge with task masks, so it has no task 'a'; leave the task out" in plain.stderr
    alone = run("restore", merged, photo, "--out", tmp_path / "e", code=2)
    assert f"hf-ext emr export {merged} a FOLDER" in alone.stderr


def test_evaluate_asks_for_the_task(merged: Path, tmp_path: Path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    Image.open(merged.parent / "photo.png").save(folder / "one.png")
    file = tmp_path / "denoise.yaml"
    source = {"path": str(folder), "split": "train"}
    task = {"degradation": {"kind": "gaussian_noise", "sigma": 25}}
    file.write_text(json.dumps({"method": "semanir", "data": {"train": source, "eval": source}, "task": task}))
    refused = run("evaluate", merged, "--config", file, code=2)
    assert "Name one of its tasks with --task: a, b" in refused.stderr
    found = {}
    for source, options in ((merged, ("--task", "a")), (merged, ("--task", "b")), (merged.parent / "base", ())):
        done = run("evaluate", source, *options, "--config", file, "--task.degradation.sigma", "30", "--json")
        found[(source.name, *options)] = json.loads(done.stdout)["results"]
    assert len({json.dumps(results) for results in found.values()}) == 3


def test_the_root_says_which_tasks_there_are(merged: Path, tmp_path: Path):
    assert AutoConfig.from_pretrained(merged).emr_tasks == ["a", "b"]
    assert not hasattr(AutoConfig.from_pretrained(merged / "tasks" / "a"), "emr_tasks")
    assert not hasattr(EMRModel.from_pretrained(merged).model.config, "emr_tasks")
    base = tiny_bert(tmp_path / "base")
    tasks = {name: tiny_bert(tmp_path / name, seed, base=base) for seed, name in enumerate("abc", 1)}
    folder = merge(base, {name: tasks[name] for name in "ab"}, tmp_path / "merged")
    add_task(folder, "c", str(tasks["c"]), frozen=True)
    assert AutoConfig.from_pretrained(folder).emr_tasks == read_tasks(folder) == ["a", "b", "c"]
    remove_task(folder, "a")
    assert AutoConfig.from_pretrained(folder).emr_tasks == read_tasks(folder) == ["b", "c"]
    # One model without masks answers for itself.
    average = merge(base, {name: tasks[name] for name in "ab"}, tmp_path / "average", method="average")
    assert read_tasks(average) is None and not hasattr(AutoConfig.from_pretrained(average), "emr_tasks")
    with task_checkpoint(str(average), None) as place:
        assert place == str(average)


@pytest.mark.slow
def test_a_merge_on_a_hub(merged: Path, tmp_path: Path, hub, run_client):
    base = merged.parent / "base"
    whole = merge(base, {name: merged.parent / name for name in "ab"}, tmp_path / "whole", include_base=False)
    commit = push_folder(hub.url, "me/merged", whole)
    push_folder(hub.url, "me/plain", base)
    script = """
        import sys
        import torch
        from hf_ext.emr.artifact import read_tasks
        from hf_ext.emr.weights import task_checkpoint
        commit, base = sys.argv[1:]
        assert read_tasks(f"me/merged@{commit}") == read_tasks("me/merged") == ["a", "b"]
        assert read_tasks("me/plain") is read_tasks("me/nothing") is read_tasks("no such folder") is None
        try:
            with task_checkpoint("me/merged", None):
                raise SystemExit("the root was given")
        except ValueError as error:
            assert "--task: a, b" in str(error)
        with task_checkpoint("me/merged", "a") as place:
            from transformers import AutoConfig
            import hf_ext
            assert AutoConfig.from_pretrained(place).model_type == "semanir"
    """
    run_client(textwrap.dedent(script), commit, str(base))
