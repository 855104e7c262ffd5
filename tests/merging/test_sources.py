"""Opened sources: local and on a Hub by ranges, their small files, identities, and what is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_ext.hub.checkpoints import CheckpointError
from hf_ext.merging.sources import open_weights
from tests.emr.emr_testing import tiny_bert, tiny_unet, write_weights
from tests.kit.refusals import refused

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("bert") / "base", max_shard_size=9000)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_a_local_folder(bert):
    with open_weights("base", bert) as source:
        assert (source.label, source.repo_id, source.commit, source.library) == ("base", None, None, "transformers")
        assert source.architecture == "BertModel" and source.config["hidden_size"] == 16
        expected = all_tensors(bert)
        assert set(source.tensors) == set(expected) and source.nbytes == sum(t.nbytes for t in expected.values())
        for name, tensor in expected.items():
            assert source.read(name).equal(tensor)
        assert set(source.companions.files) == {"config.json", "tokenizer.json", "tokenizer_config.json"}
        assert set(source.small_files(("tokenizer.json", "vocab.txt"))) == {"tokenizer.json"}


def test_what_tells_the_files_of_a_folder_from_others(bert):
    with open_weights("base", str(bert)) as source:
        plain, hashed, times = source.identity(), source.identity(hash_files=True), source.fingerprint()
        assert plain["source"] == str(bert) and plain["revision"] is None
        assert set(plain["files"]) == {path.name for path in bert.glob("*.safetensors")} and len(plain["files"]) > 1
        for name, file in plain["files"].items():
            data = (bert / name).read_bytes()
            header = data[: 8 + int.from_bytes(data[:8], "little")]
            assert file == {"bytes": len(data), "sha256": None, "header_sha256": sha256(header)}
            assert hashed["files"][name] == file | {"sha256": sha256(data)}
            assert times["files"][name] == file | {"mtime_ns": (bert / name).stat().st_mtime_ns}
        assert times["small_files"] == {
            name: sha256(path.read_bytes()) for name, path in source.companions.files.items()
        }
        json.dumps([hashed, times])


def test_float64_is_given_as_float32(tmp_path):
    tensor = torch.randn(3, 5, dtype=torch.float64)
    write_weights(tmp_path / "w", {"w": tensor, "n": torch.arange(3)}, config={})
    with open_weights("base", tmp_path / "w") as source:
        info = source.tensors["w"]
        assert (info.dtype, info.shape, info.nbytes, source.has_float64) == (torch.float32, (3, 5), 60, True)
        assert source.read("w").equal(tensor.float()) and source.read("n").equal(torch.arange(3))
        out = torch.empty(4)
        source.read_into("w", 7, 11, out)
        assert out.equal(tensor.float().flatten()[7:11])
        assert source.nbytes == tensor.nbytes + 24


def test_a_weights_file_alone_and_a_diffusers_model(tmp_path, bert):
    write_weights(tmp_path / "w", {"w": torch.ones(3)})
    with open_weights("task", tmp_path / "w" / "model.safetensors") as source:
        assert source.config == {} and source.architecture is None and source.place == tmp_path / "w"
    with open_weights("task", tiny_unet(tmp_path / "unet")) as source:
        assert (source.library, source.architecture) == ("diffusers", "UNet2DModel")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "[1]", "expected a JSON object, got list"),
        ("config.json", "{", "not valid JSON"),
        ("adapter_config.json", "nonsense", "not valid JSON"),
        ("config.json", '{"id2label": ["a", "b"]}', "id2label must be"),
        ("config.json", '{"architectures": "BertModel"}', "architectures must be"),
        ("config.json", '{"architectures": [null]}', "architectures must be"),
        ("config.json", '{"vocab_size": "8"}', "vocab_size must be"),
        ("config.json", '{"model_type": ["bert"]}', "model_type must be"),
        ("config.json", '{"_class_name": 1}', "_class_name must be"),
        ("adapter_config.json", '{"auto_mapping": [1]}', "auto_mapping must be"),
        ("adapter_config.json", '{"peft_type": {}}', "peft_type must be"),
    ],
)
def test_a_malformed_configuration_is_refused(tmp_path, name, content, message):
    write_weights(tmp_path / "w", {"w": torch.ones(3)})
    (tmp_path / "w" / name).write_text(content)
    with pytest.raises(CheckpointError, match=f"(?s)emotion.*{message}"):
        open_weights("emotion", tmp_path / "w")


def test_messages_name_the_source_and_say_what_to_do(tmp_path, hub):
    with refused(CheckpointError, "emotion"):
        open_weights("emotion", "./nothing/here")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"x")
    with refused(CheckpointError, "pytorch_model.bin", "save_pretrained"):
        open_weights("base", tmp_path / "pickled")
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "model_index.json").write_text("{}")
    with refused(CheckpointError, "diffusers", "pipeline"):
        open_weights("base", tmp_path / "pipeline")
    with refused(CheckpointError, "org/none@main"):
        open_weights("x", "org/none", token=False, endpoint=hub.url)
