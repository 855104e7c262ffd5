"""hf-ext merge and hf-ext emr on real folders and a real Hub on loopback."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import click
import pytest
import yaml
from transformers import BertForSequenceClassification

from hf_ext.emr.manifest import Manifest
from hf_ext.merging.methods import METHODS, options_by_name
from hf_ext_cli.main import main
from tests.emr.emr_testing import tiny_bert
from tests.emr.use_testing import merge_berts
from tests.hub.published import contents
from tests.kit.command_line import run
from tests.training.launching import launch_two


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("models")
    base = tiny_bert(place / "base")
    for seed, name in enumerate("abc", start=1):
        tiny_bert(place / name, seed, base=base, num_labels=seed + 1)
    return place


@pytest.fixture(scope="module")
def sources(models) -> list[str]:
    """The options that name the models."""
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


@pytest.mark.parametrize("name", ["m.safetensors", "a/M.BIN", "m.gguf"])
def test_a_checkpoint_has_no_name_of_a_file(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    merge = ("merge", "--base", "denoise-color", "--task", "rain=derain")
    for words in [(*merge, name), (*merge, "--out", name), ("emr", "export", "restore-tasks", "blur", name)]:
        run(*words, code=2)
    run("emr", "extract-lora", "restore-tasks", "blur", name, "--rank", "2", code=2)
    assert not [*tmp_path.iterdir()]


def test_the_help_has_the_methods_options_with_their_defaults():
    merge = main.get_command(click.Context(main), "merge")
    options = {option.name: option for option in merge.get_params(click.Context(merge))}
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


def test_json_is_one_document(sources, tmp_path):
    found = json.loads(run("merge", *sources, "--out", tmp_path / "out", "--json", "--method", "average").stdout)
    assert found["path"] == str(tmp_path / "out")
    assert [task["task"] for task in found["report"]["tasks"]] == ["a", "b"]
    assert found["report"] == json.loads((tmp_path / "out" / "report.json").read_text())
    assert not (tmp_path / "out" / "emr.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "lots"], "memory must be a number and a unit"),
        (["--task", "x=/nowhere/at/all"], "task 'x': /nowhere/at/all"),
    ],
)
def test_what_cannot_be_merged_ends_with_2_before_anything_is_written(sources, tmp_path, options, message):
    result = run("merge", *sources, *options, "--out", tmp_path / "out", code=2)
    assert message in result.stderr and "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


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


def test_options_by_task_and_layer_on_the_command_line(sources, tmp_path):
    words = ["--method", "task_arithmetic", "--weight", "{a: 0.5, b: [0.2, 0.8]}"]
    run("merge", *sources, "--out", tmp_path / "out", *words)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["method"]["weight"] == {"a": 0.5, "b": [0.2, 0.8]}
    for weight, message in (("{a: [}", "Invalid value for '--weight'"), ("[x]", "weight must be finite; got 'x'")):
        words[-1] = weight
        assert message in run("merge", *sources, "--out", tmp_path / "other", *words, code=2).stderr


def test_info_of_an_artifact(merged):
    found = json.loads(run("info", merged, "--json").stdout)
    assert found["merge"]["method"] == "emr"
    assert list(found["merge"]["tasks"]) == ["a", "b"]
    assert found["merge"]["tasks"]["a"]["scale"] == Manifest.read(merged).tasks["a"].scale
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{x}", "five", "{x}-out", "--rank", "1", "--error", "0.1"], "Give either --rank or --error"),
        (["{x}", "{x}-out", "--rank", "1"], "Missing option --base"),
        (["{x}", "--rank", "1"], "Expected ARTIFACT TASK OUT"),
        (["nowhere/at/all", "five", "{x}-out", "--rank", "1"], "nowhere/at/all: no such folder"),
    ],
)
def test_extract_lora_refuses_in_words(berts: Path, words: list[str], message: str):
    result = run("emr", "extract-lora", *(word.format(x=berts) for word in words), code=2)
    assert message in result.stderr and "Traceback" not in result.output
    assert not berts.with_name("merged-out").exists()
