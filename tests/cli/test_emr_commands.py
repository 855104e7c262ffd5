"""hf-ext merge and hf-ext emr on real folders and a real Hub on loopback."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import click
import numpy as np
import pytest
import yaml
from PIL import Image
from transformers import AutoConfig, BertForSequenceClassification

import hf_ext  # noqa: F401  (registers the pipeline)
from hf_ext.emr import EMRModel
from hf_ext.emr.artifact import read_tasks
from hf_ext.emr.manifest import Manifest
from hf_ext.emr.weights import task_checkpoint
from hf_ext.merging import add_task, remove_task
from hf_ext.merging.methods import METHODS, options_by_name
from hf_ext_cli.main import main
from tests.emr.emr_testing import push_folder, tiny_bert, tiny_semanir
from tests.emr.use_testing import merge, merge_berts, write_berts
from tests.hub.published import contents
from tests.kit.command_line import run
from tests.kit.own_data import write_files
from tests.kit.pictures import encode, noise
from tests.training.launching import launch_two


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    return write_berts(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def sources(models) -> list[str]:
    """The options that name two of the models."""
    return ["--base", str(models / "base"), "--task", f"a={models / 'a'}", "--task", f"b={models / 'b'}"]


@pytest.fixture(scope="module")
def merged(sources, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("merged") / "merged"
    run("merge", *sources, "--out", out)
    return out


@pytest.fixture
def artifact(merged, tmp_path) -> Path:
    return Path(shutil.copytree(merged, tmp_path / "artifact"))


def test_every_command_takes_released_models_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("emr", "verify", "restore-tasks")
    assert "restore" in run("emr", "compare", "restore-tasks").output
    run("emr", "export", "restore-tasks", "blur", "exported")
    run("emr", "extract-lora", "restore-tasks", "blur", "adapter", "--rank", "2")
    run("emr", "extract-lora", "jpeg-color", "other-adapter", "--base", "denoise-color", "--rank", "2")
    Path("merge.yaml").write_text("base: denoise-color\ntasks: {rain: derain}\n")
    run("merge", "merge.yaml", "merged")
    run("emr", "add", "merged", "jpeg=jpeg-color", "--base", "denoise-color")
    assert set(Manifest.read("merged").tasks) == {"rain", "jpeg"}


def test_a_checkpoint_has_no_name_of_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    merge = "merge --base denoise-color --task rain=derain"
    exports = "emr export restore-tasks blur", "emr extract-lora restore-tasks blur --rank 2"
    for words in (merge, f"{merge} --out", *exports):
        for name in ("m.safetensors", "a/M.BIN", "m.gguf"):
            run(*words.split(), name, code=2)
    assert not [*tmp_path.iterdir()]


def test_the_help_has_the_methods_options_with_their_defaults():
    merge = main.get_command(click.Context(main), "merge")
    options = {
        option.name: option
        for option in merge.get_params(click.Context(merge, parent=click.Context(main, **main.context_settings)))
    }
    assert tuple(options["method"].type.choices) == tuple(METHODS)
    for name, holders in options_by_name().items():
        for holder, own in holders.items():
            assert f"{holder}: {str(own.default).lower()}" in options[name].help
    assert options["tie"].type.choices == ("zero", "negative")


def test_merge_shows_the_plan_then_the_report_and_where_things_are(sources, tmp_path):
    text = run("merge", *sources, "--out", tmp_path / "out").stdout
    plan, table, places = text.index("  39 tensors"), text.index("‖τ‖/‖W0‖"), text.index(f"  {tmp_path}/out\n")
    assert plan < table < places
    assert re.search(rf"^masks +{tmp_path}/out/tasks$", text, re.MULTILINE)
    assert re.search(rf"^card +{tmp_path}/out/README.md$", text, re.MULTILINE)
    assert set(Manifest.read(tmp_path / "out").tasks) == {"a", "b"}
    refused = run("merge", *sources, "--out", tmp_path / "out", code=2)
    assert "exists and is not empty" in refused.stderr
    run("merge", *sources, "--out", tmp_path / "out", "--overwrite", "--rescale", "none")
    assert Manifest.read(tmp_path / "out").method["rescale"] == "none"


def test_a_file_with_options_in_place_of_its_values(models, sources, tmp_path):
    dumped = run("merge", *sources, "--rescale", "l2", "--exclude", "x$", "--exclude", "y", "--dump-yaml").stdout
    (tmp_path / "merge.yaml").write_text(dumped)
    assert yaml.safe_load(dumped)["exclude"] == ["x$", "y"]
    changed = ["--method", "ties", "--no-masks", "--rescale", "global", "--task", f"c={models / 'c'}"]
    planned = run("merge", tmp_path / "merge.yaml", tmp_path / "out", *changed, "--dry-run", "--json").stdout
    found = json.loads(planned)
    config = found["plan"]["config"]
    assert (config["method"], config["masks"], config["rescale"]) == ("ties", False, "global")
    assert config["exclude"] == ["x$", "y"] and list(config["tasks"]) == ["c"]
    assert not (tmp_path / "out").exists()
    (tmp_path / "merge.yaml").write_text("base: a\ntasks: {b: c}\nmetod: ties\n")
    assert "metod" in run("merge", tmp_path / "merge.yaml", tmp_path / "out", code=2).stderr
    (tmp_path / "merge.yaml").write_text(dumped)
    twice = run("merge", tmp_path / "merge.yaml", tmp_path / "out", "--out", "o", code=2)
    assert "OUT is given twice" in twice.stderr


def test_what_cannot_be_merged_ends_with_2_before_anything_is_written(sources, tmp_path):
    wrong = {"memory must be": ("--memory", "lots"), "task 'x': /nowhere/at/all": ("--task", "x=/nowhere/at/all")}
    for message, option in wrong.items():
        result = run("merge", *sources, *option, "--out", tmp_path / "out", code=2)
        assert message in result.stderr and "Traceback" not in result.output and not list(tmp_path.iterdir())


def test_add_merged_again_and_frozen(models, artifact):
    done = json.loads(run("emr", "add", artifact, f"c={models / 'c'}", "--json").stdout)
    assert (done["task"], done["how"], done["path"]) == ("c", "merged again", str(artifact))
    assert "elected_from" not in Manifest.read(artifact).method
    frozen = run("emr", "add", artifact, f"d={models / 'c'}", "--frozen").stdout
    assert re.search(r"^how +frozen$", frozen, re.MULTILINE) and "why" not in frozen
    told = json.loads((artifact / "report.json").read_text())["warnings"]
    assert told and all(f"warning: {text}" in frozen for text in told) and done["warnings"]
    assert "has a task 'd'" in run("emr", "add", artifact, f"d={models / 'c'}", code=2).stderr
    assert list(Manifest.read(artifact).tasks) == ["a", "b", "c", "d"]


def test_remove_and_export(artifact, tmp_path):
    assert json.loads(run("emr", "remove", artifact, "a", "--json").stdout)["tasks"] == ["b"]
    assert "is the last task" in run("emr", "remove", artifact, "b", code=2).stderr
    assert run("emr", "export", artifact, "b", tmp_path / "b").stdout == f"{tmp_path / 'b'}\n"
    assert BertForSequenceClassification.from_pretrained(tmp_path / "b").config.id2label[0] == "seed2-0"
    assert "there is no task 'a'" in run("emr", "export", artifact, "a", tmp_path / "x", code=2).stderr


def test_compare(merged, sources, tmp_path):
    done = run("merge", *sources, "--out", tmp_path / "average", "--method", "average")
    assert "--measure" in done.stdout and "‖τ‖" not in done.stdout
    assert "--measure" in run("emr", "compare", merged, tmp_path / "average", code=2).stderr
    run("merge", *sources, "--out", tmp_path / "average", "--method", "average", "--measure", "--overwrite")
    found = json.loads(run("emr", "compare", merged, tmp_path / "average", "--json").stdout)
    assert [task["task"] for task in found["tasks"]] == ["a", "b"]
    text = run("emr", "compare", merged, tmp_path / "average").stdout
    assert "average" in text and "1-bit" in text


def test_deltas_in_every_command(models, sources, tmp_path):
    deltas = tmp_path / "deltas"
    text = run("merge", *sources, "--out", deltas, "--method", "ternary", "--density", "{a: 0.5}").stdout
    assert "no unified model" in text and "error restored" in text
    assert Manifest.read(deltas).method["density"] == {"a": 0.5}
    assert re.search(r"^task a +λ by tensor, kept 0\.5\d+, from", run("info", deltas).stdout, re.MULTILINE)
    run("emr", "add", deltas, f"c={models / 'c'}", "--frozen")
    run("emr", "remove", deltas, "a")
    run("emr", "add", deltas, f"a={models / 'a'}")
    assert list(Manifest.read(deltas).tasks) == ["b", "c", "a"]
    run("emr", "verify", deltas)
    run("emr", "export", deltas, "c", tmp_path / "c")
    assert "ternary" in run("emr", "compare", deltas).stdout


def test_options_by_task_and_layer_on_the_command_line_and_json_is_one_document(sources, tmp_path):
    words = ["merge", *sources, "--method", "task_arithmetic"]
    told = run(*words, "--out", tmp_path / "out", "--weight", "{a: 0.5, b: [0.2, 0.8]}", "--json").stdout
    found, report = json.loads(told), json.loads((tmp_path / "out" / "report.json").read_text())
    assert found["path"] == str(tmp_path / "out") and found["report"] == report
    assert [task["task"] for task in report["tasks"]] == ["a", "b"] and not (tmp_path / "out" / "emr.json").exists()
    assert report["method"]["weight"] == {"a": 0.5, "b": [0.2, 0.8]}
    for weight, message in (("{a: [}", "Invalid value for '--weight'"), ("[x]", "weight must be finite; got 'x'")):
        assert message in run(*words, "--out", tmp_path / "other", "--weight", weight, code=2).stderr


def test_info_of_an_artifact(merged):
    found = json.loads(run("info", merged, "--json").stdout)["merge"]
    assert found["method"] == "emr" and list(found["tasks"]) == ["a", "b"]
    assert found["tasks"]["a"]["scale"] == Manifest.read(merged).tasks["a"].scale
    text = run("info", merged).stdout
    assert re.search(r"^task a +λ \d\.\d{4}, mask density \d\.\d{4}, from .*/a$", text, re.MULTILINE)


@pytest.mark.slow
def test_several_processes_write_the_same_and_one_of_them_talks(sources, merged, tmp_path):
    said = launch_two("hf_ext_cli.main", "merge", *sources, "--out", str(tmp_path / "out"))
    assert len(re.findall(r"^merged +39 tensors", said, re.MULTILINE)) == said.count("‖τ‖/‖W0‖") == 1
    ours, theirs = contents(tmp_path / "out"), contents(merged)
    differing = {name for name in ours if ours[name] != theirs.get(name)}
    assert ours.keys() == theirs.keys() and differing <= {"README.md"}


def test_verify_names_what_is_damaged(artifact):
    done = run("emr", "verify", artifact)
    assert re.fullmatch(
        rf"{re.escape(str(artifact))}: \d+ files, [\d,]+ bytes, unchanged since the merge\n", done.stdout
    )
    mask = artifact / "tasks" / "a" / "mask.safetensors"
    mask.write_bytes(mask.read_bytes()[:-1] + b"\xff")
    done = run("emr", "verify", artifact, code=2)
    assert done.stdout.startswith("tasks/a/mask.safetensors: changed since the merge")
    assert f"{artifact} is damaged: 1 file differs from emr.json." in done.stderr
    found = json.loads(run("emr", "verify", artifact, "--json", code=2).stdout)
    assert [line.partition(":")[0] for line in found["wrong"]] == ["tasks/a/mask.safetensors"]
    refused = run("emr", "export", artifact, "a", artifact.parent / "out", code=2)
    assert "mask.safetensors: not as the merge wrote it" in refused.stderr


@pytest.fixture(scope="module")
def berts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge_berts(tmp_path_factory.mktemp("berts"))


def test_extract_lora_of_a_task_and_of_a_fine_tune(berts: Path, tmp_path: Path):
    text = run("emr", "extract-lora", berts, "five", tmp_path / "five", "--rank", "4").stdout
    assert "written: 13 matrices of rank 4, error 0.6" in text
    found = json.loads(run("emr", "extract-lora", berts.parent / "two", tmp_path / "two", "--base",
                           berts.parent / "base", "--error", "0.5", "--lora-only", "--json").stdout)  # fmt: skip
    assert found == {"path": str(tmp_path / "two"), **json.loads((tmp_path / "two" / "report.json").read_text())}
    assert found["error_of_matrices"] <= 0.5 < found["error"]
    text = run("emr", "extract-lora", berts, "five", tmp_path / "only", "--rank", "1", "--lora-only").stdout
    assert "left out: classifier.weight (new with the task)" in text and "more, which report.json names" in text


def test_extract_lora_refuses_in_words(berts: Path):
    for words, message in (
        (f"{berts} five {berts}-out --rank 1 --error 0.1", "Give either --rank or --error"),
        (f"{berts} {berts}-out --rank 1", "Missing option --base"),
        (f"{berts} --rank 1", "Expected ARTIFACT TASK OUT"),
        (f"nowhere/at/all five {berts}-out --rank 1", "nowhere/at/all: no such folder"),
    ):
        result = run("emr", "extract-lora", *words.split(), code=2)
        assert message in result.stderr and "Traceback" not in result.output
        assert not berts.with_name("merged-out").exists()


@pytest.fixture(scope="module")
def restorers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two fine-tunes that are far from each other, and a picture."""
    place = tmp_path_factory.mktemp("merged")
    base = tiny_semanir(place / "base")
    tasks = {name: tiny_semanir(place / name, seed, base=base, noise=0.3) for seed, name in enumerate("ab", 1)}
    (place / "photo.png").write_bytes(encode(noise(16, 13, 3)))
    return merge(base, tasks, place / "merged")


def test_restore_asks_for_the_task(restorers: Path, tmp_path: Path):
    photo = restorers.parent / "photo.png"
    refused = run("restore", restorers, photo, "--out", tmp_path / "out", code=2)
    assert "the model at its root is of no task. Name one of its tasks with --task: a, b" in refused.stderr
    assert not (tmp_path / "out").exists()
    pictures = {}
    for task in "ab":
        run("restore", restorers, photo, "--task", task, "--out", tmp_path / task)
        run("emr", "export", restorers, task, tmp_path / f"{task}-exported")
        run("restore", tmp_path / f"{task}-exported", photo, "--out", tmp_path / f"{task}-plain")
        pictures[task] = np.asarray(Image.open(tmp_path / task / "photo.png")).astype(int)
        plain = np.asarray(Image.open(tmp_path / f"{task}-plain" / "photo.png")).astype(int)
        assert np.abs(pictures[task] - plain).max() <= 1
    assert np.abs(pictures["a"] - pictures["b"]).max() > 10
    unknown = run("restore", restorers, photo, "--task", "c", "--out", tmp_path / "c", code=2)
    assert "there is no task 'c'" in unknown.stderr and "'a', 'b'" in unknown.stderr
    plain = run("restore", restorers.parent / "a", photo, "--task", "a", "--out", tmp_path / "d", code=2)
    assert "is no merge with task masks, so it has no task 'a'; leave the task out" in plain.stderr
    alone = run("restore", restorers, photo, "--out", tmp_path / "e", code=2)
    assert f"hf-ext emr export {restorers} a FOLDER" in alone.stderr


def test_evaluate_asks_for_the_task(restorers: Path, tmp_path: Path):
    write_files(tmp_path / "pictures", {"one.png": (restorers.parent / "photo.png").read_bytes()})
    file, source = tmp_path / "denoise.yaml", {"path": str(tmp_path / "pictures"), "split": "train"}
    task = {"degradation": {"kind": "gaussian_noise", "sigma": 25}}
    file.write_text(json.dumps({"method": "semanir", "data": {"train": source, "eval": source}, "task": task}))
    refused = run("evaluate", restorers, "--config", file, code=2)
    assert "Name one of its tasks with --task: a, b" in refused.stderr
    found = set()
    for words in ((restorers, "--task", "a"), (restorers, "--task", "b"), (restorers.parent / "base",)):
        done = run("evaluate", *words, "--config", file, "--task.degradation.sigma", "30", "--json")
        found.add(json.dumps(json.loads(done.stdout)["results"]))
    assert len(found) == 3


def test_the_root_says_which_tasks_there_are(restorers: Path, tmp_path: Path):
    assert AutoConfig.from_pretrained(restorers).emr_tasks == ["a", "b"]
    assert not hasattr(AutoConfig.from_pretrained(restorers / "tasks" / "a"), "emr_tasks")
    assert not hasattr(EMRModel.from_pretrained(restorers).model.config, "emr_tasks")
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
def test_a_merge_on_a_hub(restorers: Path, tmp_path: Path, hub, run_client):
    base = restorers.parent / "base"
    whole = merge(base, {name: restorers.parent / name for name in "ab"}, tmp_path / "whole", include_base=False)
    commit = push_folder(hub.url, "me/merged", whole)
    push_folder(hub.url, "me/plain", base)
    script = """
        import sys
        import torch
        from hf_ext.emr.artifact import read_tasks
        from hf_ext.emr.weights import task_checkpoint
        commit = sys.argv[1]
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
    run_client(script, commit)
