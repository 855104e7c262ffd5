"""hf-ext recipes, and commands that take a recipe by its name."""

import json
from pathlib import Path

import pytest

from hf_ext.errors import UsageError
from hf_ext.training.methods import read_arguments
from hf_ext_cli.recipes import find_recipe, list_recipes
from tests.kit.command_line import run
from tests.kit.document_stage import draw_picture
from tests.kit.refusals import refused

ROOT = Path(__file__).resolve().parents[2]


def test_the_list_says_what_each_recipe_is_for():
    found = json.loads(run("recipes", "--json").stdout)
    assert len(found) > 40
    assert all(row["name"] and row["method"] and len(row["what"]) > 15 and row["data"] for row in found)
    assert all(not row["what"].endswith(".") for row in found)
    names = [row["name"] for row in found]
    assert {"semanir/denoise_color", "mrconv/sensors", "disentangled_dit/cifar10", "emr/merge"} < {*names}
    # What only a script in examples/ trains is no recipe of `hf-ext train`.
    assert not [name for name in names if "study" in name or name == "emr/finetune"]
    lines = run("recipes").stdout.splitlines()
    assert lines[0].split() == ["name", "method", "what"] and len(lines) == 1 + len(found)


@pytest.mark.parametrize("recipe", [one for one in list_recipes() if one.method != "emr"], ids=lambda one: one.name)
def test_each_recipe_is_one_that_can_be_trained(recipe):
    assert read_arguments(recipe.path, []).method == recipe.method


def test_a_recipe_is_printed_or_copied(tmp_path):
    text = find_recipe("mrconv/sensors").read_text()
    assert run("recipes", "mrconv/sensors").stdout == text
    out = tmp_path / "mine.yaml"
    assert run("recipes", "mrconv/sensors", "--out", out).stdout == f"{out}\n"
    assert out.read_text() == text
    assert "exists; give a new file" in run("recipes", "mrconv/sensors", "--out", out, code=2).stderr
    assert "--out copies one recipe" in run("recipes", "--out", tmp_path / "b.yaml", code=2).stderr
    assert not (tmp_path / "b.yaml").exists()


def test_commands_take_a_recipe_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for seed in range(2):
        draw_picture(seed).save(tmp_path / "photos" / f"{seed}.png")
    said = run(
        "data", "check", "--json", "semanir/denoise_color", "--data.train.path", "photos", "--task.patch_size", 16
    )
    assert json.loads(said.stdout)[0]["bad"] == []
    # A file of that name comes first.
    (tmp_path / "semanir").mkdir()
    (tmp_path / "semanir" / "denoise_color").write_text("method: nothing\n")
    assert "unknown method 'nothing'" in run("data", "check", "semanir/denoise_color", code=2).stderr


def test_the_recipe_that_was_meant_is_named():
    for words, said in (
        (("train", "semanir/denoise_colour"), "Did you mean 'semanir/denoise_color'?"),
        (("train", "sensor"), "Did you mean 'mrconv/sensors'?"),
        (("train", "emr/merge"), "describes a merge, not a training: run `hf-ext merge FILE.yaml OUT`"),
        (("recipes", "zzz"), "`hf-ext recipes` lists them"),
    ):
        assert said in run(*words, code=2).stderr
    with refused(UsageError, "recipe", "hf-ext recipes"):
        find_recipe("examples")
