"""The stage for the documentation's blocks, run as written: files, and models on a Hub, by the names they use.

Networks are tiny, and the recipes that the blocks name are cut down to two steps of such a network.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import soundfile
import torch
import yaml
from diffusers import DDIMScheduler
from PIL import Image

from hf_ext.mrconv import MRConvConfig, MRConvForCausalLM
from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline
from tests.disentangled_dit.dit_testing import make_transformer
from tests.disentangled_dit.pipeline_testing import make_vae
from tests.emr.emr_testing import WORDS, push_folder, tiny_bert, tiny_semanir, write_tokenizer
from tests.emr.use_testing import merge

ROOT = Path(__file__).resolve().parents[2]
SMALL: dict[str, dict[str, Any]] = {
    "semanir": {"embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 4, "top_k": 6},
    "mrconv-listops": {"hidden_size": 8, "num_hidden_layers": 1, "kernel_size": 8},
    "mrconv-series": {"hidden_size": 8, "num_hidden_layers": 1, "kernel_size": 8},
    "disentangled-dit": {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8, "num_classes": 10},
}
CHANGES = {"max_steps": 2, "per_device_train_batch_size": 2, "warmup_steps": 0, "mixed_precision": "no"}


def shrink(recipe: Path, target: Path) -> None:
    """A recipe of the same method and data whose network and steps are tiny."""
    fields = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    fields |= CHANGES | {"model": SMALL[fields["method"]]}
    fields["data"] |= {"num_workers": 0}
    if fields["method"] == "semanir":
        fields["task"]["patch_size"] = 16
    target.write_text(yaml.safe_dump(fields), encoding="utf-8")


def draw_picture(seed: int, side: int = 40) -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC)


def write_tone(path: Path, seconds: float) -> None:
    time = np.arange(int(8000 * seconds)) / 8000
    soundfile.write(path, 0.25 * np.sin(2 * np.pi * 440 * time), 8000)


def make_files(stage: Path) -> None:
    (stage / "photos").mkdir()
    for seed in range(3):
        draw_picture(seed).save(stage / "photos" / f"{seed}.png")
    (stage / "test-photos").mkdir()
    draw_picture(4).save(stage / "test-photos" / "0.png")
    draw_picture(9, 128).save(stage / "photo.jpg")
    write_tone(stage / "digit.wav", 0.4)
    write_tone(stage / "digits.wav", 0.4)
    for label in range(10):
        (stage / "data" / "cifar10" / f"class{label}").mkdir(parents=True)
        draw_picture(label, 32).save(stage / "data" / "cifar10" / f"class{label}" / "0.png")
    for path in ROOT.glob("examples/**/*"):
        target = stage / path.relative_to(ROOT)
        if path.suffix in (".py", ".yaml") and "benchmarks" not in path.parts:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path)
    for name in ("semanir/denoise_color", "mrconv/listops", "mrconv/sensors", "disentangled_dit/cifar10"):
        recipe = stage / "examples" / f"{name}.yaml"
        recipe.unlink()
        shrink(ROOT / "examples" / f"{name}.yaml", recipe)
    rows = {"text": ["a b", "c d", "e f", "g h"] * 2, "label": [0, 1] * 4}
    datasets.Dataset.from_dict(rows).to_json(stage / "texts.jsonl")
    tasks = {task: {"data": {"path": "texts.jsonl", "split": "train"}} for task in ("a", "b")}
    recipe_of_tasks = {"method": "text-classification", "task": {"max_length": 16}, "tasks": tasks}
    (stage / "recipe.yaml").write_text(yaml.safe_dump(recipe_of_tasks))
    merged = {"base": "org/base", "tasks": {"a": "org/a", "b": "org/b"}}
    (stage / "merge.yaml").write_text(yaml.safe_dump(merged))


def make_dit(folder: Path) -> Path:
    transformer = make_transformer(sample_size=[8, 8], num_classes=2)
    pipeline = DisentangledDiTPipeline(transformer, DDIMScheduler(), None, None, None, id2label={0: "cat", 1: "dog"})
    pipeline.save_pretrained(folder)
    return folder


def make_language_model(folder: Path) -> Path:
    torch.manual_seed(0)
    config = MRConvConfig(vocab_size=len(WORDS), hidden_size=8, num_hidden_layers=1, max_position_embeddings=64)
    MRConvForCausalLM(config).save_pretrained(folder)
    return write_tokenizer(folder)


def make_models(stage: Path, models: Path, push: Callable[[str, Path], Any]) -> None:
    """`org/...` on the Hub, a snapshot of a run."""
    base = tiny_bert(models / "base")
    berts = {name: tiny_bert(models / name, seed, base=base) for seed, name in enumerate("abc", 1)}
    make_vae().save_pretrained(models / "vae")
    emotions = {"emotion": berts["a"], "irony": berts["b"]}
    made = {
        "name": tiny_semanir(models / "name"),
        "mrconv": make_language_model(models / "mrconv"),
        "dit": make_dit(models / "dit"),
        "vae": models / "vae",
        "base": base,
        **berts,
        "merged": merge(base, emotions, models / "merged", include_base=True),
    }
    tiny_semanir(stage / "runs" / "mine" / "snapshot")
    for name, folder in made.items():
        push(f"org/{name}", folder)


def make_stage(stage: Path, models: Path, url: str) -> None:
    """Everything that a block may name."""
    stage.mkdir()
    make_files(stage)
    make_models(stage, models, lambda name, folder: push_folder(url, name, folder))
