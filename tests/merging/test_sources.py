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
from tests.emr.emr_testing import tiny_bert, write_weights
from tests.kit.refusals import refused

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("bert") / "base", max_shard_size=9000)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


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


CONFIG, ADAPTER = "config.json", "adapter_config.json"


@pytest.mark.parametrize(
    ("name", "content", "fact"),
    [
        (CONFIG, "[1]", "expected a JSON object, got list"),
        (CONFIG, "[" * 100_000, "not valid JSON"),
        (ADAPTER, "nonsense", "not valid JSON"),
        (CONFIG, '{"id2label": ["a", "b"]}', "id2label must be"),
        (CONFIG, '{"architectures": "BertModel"}', "architectures must be"),
        (CONFIG, '{"architectures": [null]}', "architectures must be"),
        (CONFIG, '{"vocab_size": "8"}', "vocab_size must be"),
        (CONFIG, '{"model_type": ["bert"]}', "model_type must be"),
        (CONFIG, '{"_class_name": 1}', "_class_name must be"),
        (ADAPTER, '{"peft_type": {}}', "peft_type must be"),
    ],
)
def test_a_malformed_configuration_is_refused(tmp_path, name, content, fact):
    write_weights(tmp_path / "w", {"w": torch.ones(3)})
    (tmp_path / "w" / name).write_text(content)
    with refused(CheckpointError, "emotion", fact):
        open_weights("emotion", tmp_path / "w")


def test_messages_name_the_source_and_say_what_to_do(tmp_path, hub):
    with refused(CheckpointError, "emotion"):
        open_weights("emotion", "./nothing/here")
    for file, facts in (
        ("pytorch_model.bin", ("pytorch_model.bin", "save_pretrained")),
        ("model_index.json", ("diffusers", "pipeline")),
    ):
        (tmp_path / facts[0]).mkdir()
        (tmp_path / facts[0] / file).write_text("{}")
        with refused(CheckpointError, *facts):
            open_weights("base", tmp_path / facts[0])
    with refused(CheckpointError, "org/none@main"):
        open_weights("x", "org/none", token=False, endpoint=hub.url)
