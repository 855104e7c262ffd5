"""The models that travel with the package: their folders, how they are found, what a person sees of them."""

import json
import re

import pytest
from click.testing import CliRunner
from transformers import AutoModelForImageToImage

import hf_ext
from hf_ext.hub.released import find_model, list_released
from hf_ext_cli.main import main

# Megabytes of one, of the Disentangled DiT, and of all.
LIMIT, LIMITS, LIMIT_OF_ALL = 3.0, {"cifar10": 8.0}, 20.0

# Folders of people, of the superuser, of temporary files; drives of Windows.
MACHINE_PATHS = re.compile("/(home|root|tmp|work)" + "/" + r"|[A-Z]:\\")

MODELS = {model.name: model for model in list_released()}


def test_released_models_are_small():
    for name, model in MODELS.items():
        assert 0 < model.bytes <= LIMITS.get(name, LIMIT) * 1e6
    assert sum(model.bytes for model in MODELS.values()) <= LIMIT_OF_ALL * 1e6


@pytest.mark.parametrize("name", MODELS)
def test_a_released_folder_is_complete_and_names_no_machine(name):
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


def test_a_name_is_found_unless_a_folder_here_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = next(iter(MODELS))
    assert find_model(name) == str(hf_ext.released(name))
    assert find_model(f"org/{name}") == f"org/{name}"
    assert find_model("unknown") == "unknown"
    (tmp_path / name).mkdir()
    assert find_model(name) == name


def test_a_mistyped_name_is_answered_with_the_nearest():
    name = next(iter(MODELS))
    with pytest.raises(ValueError, match=f"Did you mean '{name}'"):
        hf_ext.released(f"{name}s")


def test_models_are_listed_with_scores_and_licence():
    result = CliRunner().invoke(main, ["models"])
    assert result.exit_code == 0
    for model in MODELS.values():
        assert model.name in result.output and model.license in result.output and model.scores[:20] in result.output
    listed = json.loads(CliRunner().invoke(main, ["models", "--json"]).output)
    assert [entry["name"] for entry in listed] == list(MODELS)
    assert "folder" not in listed[0]


def test_a_released_model_loads_in_full_precision_by_path():
    model = AutoModelForImageToImage.from_pretrained(hf_ext.released("denoise-color"))
    assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.float32"}
