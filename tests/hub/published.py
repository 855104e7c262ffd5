"""Tiny models of each kind that can be published, and the reports that a training leaves beside them."""

import io
import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitOperationAdd, HfApi
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import BertConfig, BertModel
from transformers.dynamic_module_utils import get_relative_import_files

from hf_ext.semanir import SemanIRImageProcessor, image_processing_semanir
from tests.kit.restorers import tiny_restorer as tiny_model

# What travels: model and image processor, and the files that they import.
ROOM = Path(image_processing_semanir.__file__).parent
CLASSES = [ROOM / "modeling_semanir.py", ROOM / "image_processing_semanir.py"]
CODE = sorted({Path(file).name for path in CLASSES for file in (path, *get_relative_import_files(path))})
STAGED = sorted(["README.md", "config.json", "model.safetensors", "preprocessor_config.json", *CODE])

_PSNR = {"metric": "psnr", "name": "PSNR (RGB, border 0)", "value": 30.123456, "dataset": "org/photos"}
_SSIM = {"metric": "ssim", "name": "SSIM | RGB", "value": 0.9, "dataset": "three photographs"}
_TEST = {"split": "test", "task": "image-to-image"}
EVALUATION: dict[str, Any] = {
    "results": [{**_PSNR, **_TEST, "arguments": {"sigma": 25}}, {**_SSIM, **_TEST, "arguments": {}}],
    "revision": None,
}
TRAINING: dict[str, Any] = {
    "arguments": {
        "method": "semanir",
        "output_dir": "runs/denoise",
        "data": {"train": {"path": "/somewhere/secret/photographs", "split": "train"}, "num_workers": 0},
        "task": {"degradation": "noise", "sigma": [25]},
        "learning_rate": 2e-4,
        "init_from": "org/base@v1",
        "peft": None,
        "activation_checkpointing": False,
    },
    **{"commit": "1234abcd", "hardware": "2 CPU cores", "seconds": 3723.4, "steps": 10, "samples": 160},
    "versions": {"torch": "2.13.0"},
}


def save_snapshot(folder: Path, reports: bool = True, **options: Any) -> Path:
    """What a training leaves: model, processor, code, and its reports."""
    tiny_model(**options).save_pretrained(folder)
    SemanIRImageProcessor().save_pretrained(folder)
    if reports:
        (folder / "eval.json").write_text(json.dumps(EVALUATION))
        (folder / "training.json").write_text(json.dumps(TRAINING))
    return folder


def tiny_adapter() -> PeftModel:
    torch.manual_seed(1)
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["query_key_value"], init_lora_weights=False))
    assert isinstance(model, PeftModel)
    return model


def save_bert(folder: Path) -> Path:
    """A model that transformers knows itself."""
    torch.manual_seed(2)
    config = BertConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    BertModel(config).save_pretrained(folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def on_hub(api: HfApi, tmp_path: Path, revision: str = "main") -> dict[str, bytes]:
    """Every file of `org/model` on a Hub, but for those of git."""
    folder = tmp_path / f"there-{revision.replace('/', '-')}"
    api.snapshot_download("org/model", revision=revision, local_dir=folder)
    return {name: data for name, data in contents(folder).items() if not name.startswith((".cache/", ".git"))}


def titles(api: HfApi) -> list[str]:
    """The commits of `org/model` on a Hub, the latest first."""
    return [commit.title for commit in api.list_repo_commits("org/model")]


def edit(path: Path, **fields: Any) -> None:
    """Changes fields of a JSON file, or writes one of them."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | fields))


def commit(api: HfApi, **files: bytes) -> None:
    """Commits files to `org/model` on a Hub."""
    operations = [CommitOperationAdd(name, io.BytesIO(content)) for name, content in files.items()]
    api.create_commit("org/model", operations, commit_message="By hand")
