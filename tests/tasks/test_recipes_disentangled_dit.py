"""Every recipe of the Disentangled DiT trains from end to end on a tiny slice."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from diffusers import DiffusionPipeline

import hf_ext.pipelines  # noqa: F401  registers the pipeline with diffusers
from hf_ext.settings import build
from hf_ext.tasks.precompute import Precompute, precompute
from hf_ext.training import TrainingArguments, build_task, train
from hf_ext.training.arguments import apply_overrides, read_yaml
from tests.disentangled_dit.pipeline_testing import make_text_pipeline, make_vae

from .diffusion_testing import CLASSES, make_arguments, run, write_pictures

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples" / "disentangled_dit"
# Recipe, and what of the command line makes it tiny.
SLICES = {
    "cifar10": ["--task.image_size=8", "--model.preset=tiny", "--model.num_layers=2", "--model.num_classes=3"],
    "cifar10_16": ["--task.image_size=8", "--model.num_layers=2", "--model.num_classes=3"],
    "cifar10_masked": ["--task.image_size=8", "--model.num_layers=3", "--model.num_classes=3"],
    "study": ["--task.image_size=8", "--model.num_layers=2", "--model.num_classes=3"],
    "transfer_16_to_32": ["--task.image_size=16"],
    "quickstart": ["--model.num_classes=3", "--model.num_layers=2"],
    "imagenet_256": ["--model.preset=tiny", "--model.sample_size=8", "--model.num_classes=3"],
    "imagenet_512": ["--model={sample_size: 8, in_channels: 4, num_classes: 3}"],
    "text_to_image": ["--task.image_size=8", "--model.num_layers=2", "--model.joint_attention_dim=8"],
}


def test_every_recipe_has_a_slice():
    written = {path.stem for path in RECIPES.glob("*.yaml") if read_yaml(path).get("method") == "disentangled-dit"}
    assert written == set(SLICES)


def arguments_of(name: str, folder: Path, data: Path, *more: str) -> TrainingArguments:
    source = f"{{path: {data}, split: train}}"
    words = [
        f"--output_dir={folder}",
        f"--data={{train: {source}, eval: {source}}}",
        *SLICES[name],
        "--task.sample_steps=1",
        "--task.samples_per_class=1",
        "--max_steps=2",
        "--per_device_train_batch_size=2",
        "--mixed_precision='no'",
        "--report_to=none",
        *more,
    ]
    return build(TrainingArguments, apply_overrides(read_yaml(RECIPES / f"{name}.yaml"), words))


def base_run(folder: Path, data: Path, **task) -> str:
    """The snapshot that a recipe starts from."""
    run(make_arguments(folder, data, max_steps=1, task=task))
    return str(folder / "snapshot")


@pytest.mark.parametrize("name", SLICES)
def test_a_recipe_trains_from_end_to_end(name, tmp_path):
    data, more = write_pictures(tmp_path / "pictures", 4), []
    if name == "transfer_16_to_32":
        more = [f"--init_from={base_run(tmp_path / 'base', data, image_size=8, objective='v_prediction')}"]
    elif name.startswith("imagenet"):
        make_vae().save_pretrained(tmp_path / "vae")
        values = {"data": {"path": str(data)}, "vae": str(tmp_path / "vae"), "image_size": 16}
        data = precompute(build(Precompute, values), tmp_path / "latents", progress=False)
        more = [f"--task.vae={tmp_path / 'vae'}"]
        if name == "imagenet_512":
            base = base_run(tmp_path / "base", tmp_path / "pictures", image_size=8, vae=str(tmp_path / "vae"))
            more.append(f"--init_from={base}")
    elif name == "text_to_image":
        made = make_text_pipeline()
        made.text_encoder.save_pretrained(tmp_path / "encoder")
        made.tokenizer.save_pretrained(tmp_path / "encoder")
        more = [f"--task.text_encoder={tmp_path / 'encoder'}", "--task.max_text_length=8"]
    arguments = arguments_of(name, tmp_path / "run", data, *more)
    task = build_task(arguments)
    metrics = train(task, arguments)
    assert list(metrics) == ["loss"] and 0 < metrics["loss"] < 5
    snapshot = tmp_path / "run" / "snapshot"
    results = json.loads((snapshot / "eval.json").read_text())["results"]
    assert {result["metric"]: result["value"] for result in results} == metrics
    config = DiffusionPipeline.from_pretrained(snapshot).transformer.config
    if name in ("transfer_16_to_32", "imagenet_512"):
        # Patches of 2: the grid of the pre-training, for twice its size.
        assert config.sample_size == [2 * 2 * side for side in config.pos_embed_base_size]
    assert (config.num_decoder_layers > 0) == (name == "cifar10_masked")
    assert (tmp_path / "run" / "samples" / "step-2.png").stat().st_size > 0


@pytest.mark.slow
def test_the_commands_of_the_readme_work_without_evaluation_data(tmp_path):
    block = re.search(r"```bash\n(.*?)```", (RECIPES / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    train_words, infer_words = (shlex.split(line) for line in block[1].splitlines())
    assert train_words[:2] == ["accelerate", "launch"] and infer_words[0] == "python"
    # A stranger has the examples, and pictures to train on.
    (tmp_path / "examples").symlink_to(RECIPES.parent, target_is_directory=True)
    write_pictures(tmp_path / "cifar10", 4)
    tiny = [*SLICES["cifar10"], "--max_steps=2", "--per_device_train_batch_size=2", "--report_to=none"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    infer_words[-2] = CLASSES[0]
    for words in (
        [sys.executable, "-m", "accelerate.commands.launch", *train_words[2:], *tiny],
        [sys.executable, *infer_words[1:]],
    ):
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert (tmp_path / infer_words[-1]).stat().st_size > 0
