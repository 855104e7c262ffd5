"""The models that travel with the package: their folders, how they are found, what a person sees of them."""

import json
import re
from pathlib import Path

import pytest

import hf_ext
from hf_ext.hub.released import find_model, list_released
from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration, SemanIRImageProcessor
from tests.hub.published import edit, save_snapshot
from tests.kit.command_line import run

# Megabytes of one, of the Disentangled DiT, and of all.
LIMIT, LIMITS, LIMIT_OF_ALL = 3.0, {"cifar10": 8.0}, 20.0
# Folders of people, of the superuser, of temporary files; drives of Windows.
MACHINE_PATHS = re.compile("/(home|root|tmp|work)" + "/" + r"|[A-Z]:\\")
TINY = {"architecture": "columnar", "embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 4, "top_k": 8}
SUMMARY = {"task": "removes noise", "scores": "some: 30.00", "data": "photographs", "license": "research"}

MODELS = {model.name: model for model in list_released()}


@pytest.fixture
def tiny(released_models, tmp_path, monkeypatch) -> Path:
    """A package with one small released model, `denoise-tiny`, in half precision as they all are."""
    monkeypatch.chdir(tmp_path)
    folder = released_models / "denoise-tiny"
    SemanIRForImageRestoration(SemanIRConfig(**TINY)).half().save_pretrained(folder)
    edit(folder / "config.json", dtype="float32")
    SemanIRImageProcessor().save_pretrained(folder)
    summary = {**SUMMARY, "parameters": 1000, "steps": 10, "core_hours": 0.5}
    (folder / "training.json").write_text(json.dumps({"released": summary}))
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_a_released_folder_is_small_and_complete_and_names_no_machine(name):
    assert 0 < MODELS[name].bytes <= LIMITS.get(name, LIMIT) * 1e6
    assert sum(model.bytes for model in MODELS.values()) <= LIMIT_OF_ALL * 1e6
    folder = hf_ext.released(name)
    assert {"README.md", "training.json", "eval.json"} <= {file.name for file in folder.iterdir()}
    assert not list(folder.rglob("*.py"))
    for file in [*folder.rglob("*.json"), *folder.rglob("*.md")]:
        assert not MACHINE_PATHS.search(file.read_text(encoding="utf-8")), file
    training = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    assert training["commit"] and training["hardware"] and training["released"]["core_hours"] > 0
    # The card says what was measured.
    card = (folder / "README.md").read_text(encoding="utf-8")
    for row in json.loads((folder / "eval.json").read_text(encoding="utf-8"))["results"]:
        assert f"{row['value']:.6g}" in card


def test_a_name_is_found_unless_a_folder_here_has_it(tiny, tmp_path):
    assert find_model("denoise-tiny") == str(hf_ext.released("denoise-tiny")) == str(tiny)
    assert find_model("org/denoise-tiny") == "org/denoise-tiny"
    assert find_model("unknown") == "unknown"
    (tmp_path / "denoise-tiny").mkdir()
    assert find_model("denoise-tiny") == "denoise-tiny"


@pytest.mark.usefixtures("tiny")
def test_models_are_listed_with_scores_and_licence():
    told = run("models").output
    assert all(text in told for text in ("denoise-tiny", *SUMMARY.values(), "0.5 hours of one core"))
    (entry,) = json.loads(run("models", "--json").output)
    assert entry["name"] == "denoise-tiny" and "folder" not in entry


@pytest.mark.usefixtures("released_models")
def test_without_any_model_the_list_says_so():
    assert "no released model" in run("models").output
    for command in ("info photo", "restore photo x.png --out out", "classify spoken-digits x"):
        assert "HF_EXT_WITHOUT_MODELS" in run(*command.split(), code=2).output
    with pytest.raises(ValueError):
        hf_ext.released("denoise-color")


def test_a_folder_with_the_name_of_a_released_model_is_told(released_models, tmp_path, monkeypatch):
    save_snapshot(released_models / "denoise-tiny")
    summary = {"task": "x", "scores": "x", "data": "x", "license": "x", "parameters": 1, "steps": 1, "core_hours": 1}
    edit(released_models / "denoise-tiny" / "training.json", released=summary)
    (tmp_path / "denoise-tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    for command in (["info", "denoise-tiny"], ["restore", "denoise-tiny", "a.png", "--out", "-"]):
        result = run(*command, code=2)
        assert f"not the released model {released_models / 'denoise-tiny'}; write ./denoise-tiny" in result.stderr
        assert not result.stdout
    assert "released" not in run("info", "./denoise-tiny", code=2).output
