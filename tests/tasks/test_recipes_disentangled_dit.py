"""Every recipe of the Disentangled DiT trains from end to end on a tiny slice."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file

import hf_ext.pipelines  # noqa: F401  registers the pipeline with diffusers
from hf_ext.settings import build
from hf_ext.tasks.precompute import Precompute, precompute
from hf_ext.training import build_task, train
from hf_ext.training.arguments import read_yaml
from tests.kit.recipes import read_short

from .diffusion_testing import CLASSES, make_arguments, run, write_pictures, write_table

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples" / "disentangled_dit"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
# Recipe, and what of the command line makes it tiny.
SLICES = {
    "cifar10": ["--task.image_size=8", "--model.preset=tiny", "--model.num_layers=2", "--model.num_classes=3"],
    "cifar10_16": ["--task.image_size=8", "--model.num_layers=2", "--model.num_classes=3"],
    "study": ["--task.image_size=8", "--model.num_layers=2", "--model.num_classes=3"],
    "transfer_16_to_32": ["--task.image_size=16"],
    "quickstart": ["--model.num_classes=3", "--model.num_layers=2"],
    "imagenet_256": ["--model.preset=tiny", "--model.sample_size=8", "--model.num_classes=3"],
    "imagenet_512": ["--model={sample_size: 8, in_channels: 4, num_classes: 3}"],
    "imagenet22k_256": ["--model.preset=tiny", "--model.sample_size=8", "--model.num_classes=3"],
    "text_to_image": ["--task.image_size=8", "--model.num_layers=2", "--model.joint_attention_dim=8"],
    "class_to_text": ["--task.image_size=8"],
    "cc12m_256": ["--model.preset=tiny", "--model.sample_size=8", "--model.joint_attention_dim=8"],
    "cc12m_512": ["--model={sample_size: 8, in_channels: 4}"],
}
# Those of latents, with what is precomputed beside them, and their columns of pictures, classes and captions.
LATENTS = dict.fromkeys(("imagenet_256", "imagenet_512"), ("image", "label", "text"))
LATENTS |= dict.fromkeys(("cc12m_256", "cc12m_512"), ("jpg", "label", "txt"))
LATENTS["imagenet22k_256"] = ("jpg", "cls", "text")
# Those that go the way of another recipe.
ALIKE = ("cifar10_16", "study", "imagenet_256", "imagenet_512", "imagenet22k_256", "cc12m_256")
# Those that begin with a model of half the size, or of classes, and its objective.
BEGUN = {"transfer_16_to_32": "v_prediction", "imagenet_512": "epsilon", "cc12m_512": "flow"}
BEGUN["class_to_text"] = "v_prediction"


def test_every_recipe_has_a_slice():
    written = {path.stem for path in RECIPES.glob("*.yaml") if read_yaml(path).get("method") == "disentangled-dit"}
    assert written == set(SLICES)


def prepare(name: str, folder: Path, vae: Path, encoder: Path) -> tuple[Path, list[str]]:
    """What a recipe reads, as its first lines say, of tiny parts; and the words that name them."""
    sizes, captions = [(12, 10), (16, 8), (8, 16), (12, 12)], ["a red hen", "green fish", "fish on grass", "a hen"]
    pictures = write_pictures(folder / "pictures", 4, side_column=sizes)
    image, label, text = LATENTS.get(name, ("image", "label", "text"))
    columns = {label: [0, 1, 2, 0], text: captions, "short": ["a hen"] * 4, "long": ["a red hen on grass"] * 4}
    data = write_table(folder / "data", sizes, CLASSES if label == "label" else None, image, **columns)
    more, texts, latents = [], {}, {}
    task = read_yaml(RECIPES / f"{name}.yaml")["task"]
    if "text_encoder" in task:
        texts = {"text_encoder": str(encoder), "max_text_length": 8}
        more += [f"--task.{option}={value}" for option, value in texts.items()]
    if name in LATENTS:
        latents = {"vae": str(vae)}
        values = {"data": {"path": str(data)}, **latents, **texts, "text_column": [text]}
        values |= {"image_size": 16, "image_column": image, "posterior": task.get("posterior", False)}
        # The buckets of the recipe's own command.
        command = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
        values |= {"max_ratio": 2.0, "bucket_step": 4} if "--max-ratio 2" in command else {}
        data = precompute(build(Precompute, values), folder / "latents")
        more.append(f"--task.vae={vae}")
    if name in BEGUN:
        half = {"image_size": 8, "objective": BEGUN[name], **latents, **({} if name == "class_to_text" else texts)}
        run(make_arguments(folder / "base", pictures, max_steps=1, task=half))
        more.append(f"--init_from={folder / 'base' / 'snapshot'}")
    return data, more


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in SLICES])
def test_a_recipe_trains_from_end_to_end(name, tmp_path, vae, encoder):
    data, more = prepare(name, tmp_path, vae, encoder)
    words = [*SLICES[name], "--task.sample_steps=1", "--task.samples_per_class=1", *more]
    arguments = read_short(RECIPES / f"{name}.yaml", tmp_path / "run", data, *words)
    task = build_task(arguments)
    metrics = train(task, arguments)
    assert list(metrics) == ["loss"] and 0 < metrics["loss"] < 5
    snapshot = tmp_path / "run" / "snapshot"
    results = json.loads((snapshot / "eval.json").read_text())["results"]
    assert {result["metric"]: result["value"] for result in results} == metrics
    pipeline = DiffusionPipeline.from_pretrained(snapshot)
    config = pipeline.transformer.config
    if name in BEGUN and name != "class_to_text":
        # Patches of 2: the grid of the pre-training, for twice its size; the noise has four times the power.
        assert config.sample_size == [2 * 2 * side for side in config.pos_embed_base_size]
        before = DiffusionPipeline.from_pretrained(tmp_path / "base" / "snapshot")
        if BEGUN[name] == "flow":
            assert pipeline.scheduler.config.shift == 2 * before.scheduler.config.shift
        else:
            old, new = (made.scheduler.alphas_cumprod.double() for made in (before, pipeline))
            torch.testing.assert_close((1 - new) / new, 4 * (1 - old) / old, rtol=1e-3, atol=1e-6)
        assert task.cut.local_prob == 0
    if name == "class_to_text":
        before, after = (load_file(folder / WEIGHTS) for folder in (tmp_path / "base" / "snapshot", snapshot))
        same = [layer for layer in after if layer in before and after[layer].shape == before[layer].shape]
        # All but the table of classes goes on; two steps change little.
        assert {layer.split(".")[0] for layer in after.keys() - {*same}} == {"context_embedder"}
        far = max(float((after[layer] - before[layer]).abs().max()) for layer in same)
        assert far < 2 * arguments.learning_rate and config.num_classes is None
    assert (pipeline.text_encoder is not None) == (arguments.task.get("text_encoder") is not None)
    assert (tmp_path / "run" / "samples" / "step-2.png").stat().st_size > 0


@pytest.mark.slow
def test_the_commands_of_the_readme_work_without_evaluation_data(tmp_path):
    block = re.search(r"```bash\n(.*?)```", (RECIPES / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    train_words, infer_words = (shlex.split(line) for line in block[1].splitlines())
    assert train_words[:2] == ["accelerate", "launch"] and infer_words[0] == "hf-ext"
    # A stranger has the examples, and pictures to train on.
    (tmp_path / "examples").symlink_to(RECIPES.parent, target_is_directory=True)
    write_pictures(tmp_path / "cifar10", 4)
    tiny = [*SLICES["cifar10"], "--max_steps=2", "--per_device_train_batch_size=2", "--report_to=none"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    infer_words[infer_words.index("dog")] = CLASSES[0]
    for words in (
        [sys.executable, "-m", "accelerate.commands.launch", *train_words[2:], *tiny],
        [sys.executable, "-m", "hf_ext_cli.main", *infer_words[1:]],
    ):
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert (tmp_path / infer_words[-1]).stat().st_size > 0
