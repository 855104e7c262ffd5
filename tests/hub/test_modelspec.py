"""What published weights say of themselves: modelspec beside `format`, and the same tensors."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForImageToImage

from hf_ext.hub.modelspec import add_metadata
from hf_ext.hub.publish import stage
from hf_ext.hub.safetensors_headers import CheckpointError
from hf_ext.semanir import SemanIRImageProcessor
from tests.disentangled_dit.pipeline_testing import make_pipeline

from .published import save_bert, save_snapshot, tiny_model


def metadata_of(path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def test_staged_weights_name_model_owner_and_licence(tmp_path):
    model = tiny_model()
    out = tmp_path / "out"
    folder = stage(model, out, processor=SemanIRImageProcessor(), repo_id="org/denoiser", license="mit")
    assert metadata_of(folder / "model.safetensors") == {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": "semanir",
        "modelspec.implementation": "hf-ext",
        "modelspec.title": "denoiser",
        "modelspec.author": "org",
        "modelspec.license": "mit",
    }
    loaded = AutoModelForImageToImage.from_pretrained(folder)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_a_folder_is_staged_to_the_same_bytes_again(tmp_path):
    snapshot = save_snapshot(tmp_path / "snapshot")
    first = stage(snapshot, tmp_path / "first", repo_id="org/a") / "model.safetensors"
    second = stage(first.parent, tmp_path / "second", repo_id="org/a") / "model.safetensors"
    assert first.read_bytes() == second.read_bytes()


def test_a_pipeline_says_it_of_its_transformer(tmp_path):
    folder = stage(make_pipeline(), tmp_path / "out", repo_id="pictures")
    (weights,) = (folder / "transformer").glob("*.safetensors")
    told = metadata_of(weights)
    assert told["modelspec.architecture"] == "disentangled-dit" and told["modelspec.title"] == "pictures"
    assert "modelspec.author" not in told and told["format"] == "pt"


def test_weights_of_another_library_stay_as_they_are(tmp_path):
    folder = save_bert(tmp_path / "bert")
    staged = stage(folder, tmp_path / "out")
    assert (staged / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_card_that_cannot_be_read_tells_no_licence(tmp_path):
    snapshot = save_snapshot(tmp_path / "snapshot")
    (snapshot / "README.md").write_text("---\nlicense: [mit\n---\n\nmine\n")
    staged = stage(snapshot, tmp_path / "out", repo_id="org/a")
    assert "modelspec.license" not in metadata_of(staged / "model.safetensors")


def test_a_longer_header_moves_no_tensor_and_a_damaged_file_is_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    before = load_file(path)
    add_metadata(path, {"modelspec.title": "ä" * 1001})
    after = load_file(path)
    assert metadata_of(path) == {"format": "pt", "modelspec.title": "ä" * 1001}
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="it was cut or changed"):
        add_metadata(path, {})
