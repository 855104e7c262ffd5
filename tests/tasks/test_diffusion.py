"""The Disentangled DiT in training: samples, dropped conditions, objectives, scores, snapshots, resuming."""

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import pytest
import torch
from accelerate import PartialState
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file
from transformers import BertModel

import hf_ext.pipelines  # noqa: F401  registers the pipeline with diffusers
from hf_ext.errors import DataError, MissingColumn, UsageError
from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline
from hf_ext.settings import build
from hf_ext.tasks import diffusion
from hf_ext.tasks.diffusion import DisentangledDiTTask
from hf_ext.tasks.diffusion_data import load_autoencoder
from hf_ext.tasks.diffusion_noise import make_scheduler, noisy_samples, objective_of
from hf_ext.tasks.precompute import precompute
from hf_ext.training import evaluate_checkpoint
from hf_ext.training.models import refuse_lost_fields
from tests.kit.models import assert_same_weights
from tests.kit.process_state import forget_accelerate
from tests.kit.refusals import refused
from tests.training.launching import launch_two

from .diffusion_testing import MODEL, check_resuming, contents, losses, make_arguments, run, settings, write_pictures


@pytest.fixture
def pictures(tmp_path):
    return write_pictures(tmp_path / "pictures")


SMALL = {"image_size": 8}


def test_a_run_leaves_a_pipeline_that_scores_what_was_said(tmp_path, pictures):
    task, metrics = run(make_arguments(tmp_path / "run", pictures, ema_decay=0.9, task=SMALL))
    snapshot = tmp_path / "run" / "snapshot"
    pipeline = DiffusionPipeline.from_pretrained(snapshot)
    assert isinstance(pipeline, DisentangledDiTPipeline) and isinstance(pipeline.scheduler, diffusers.DDIMScheduler)
    assert pipeline.config.id2label == {"0": "cat", "1": "dog", "2": "emu"}
    assert pipeline.transformer.config.sample_size == [8, 8] and pipeline.transformer.config.num_classes == 3
    # The published weights are the averaged ones, which were scored.
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps({"method": "disentangled-dit", "data": {"train": {"path": str(pictures)}}}))
    words = [f"--data.eval.path={pictures}", "--task.image_size=8"]
    results = evaluate_checkpoint(str(snapshot), config, words)["results"]
    assert {row["metric"]: row["value"] for row in results} == pytest.approx(metrics, rel=1e-6)
    saved = json.loads((snapshot / "eval.json").read_text())["results"]
    assert {row["metric"]: row["value"] for row in saved} == metrics
    assert saved[0]["name"] == "denoising loss (epsilon, 4 fixed timesteps and noises of each image)"
    # A row for each class, enlarged so that it can be seen.
    with Image.open(tmp_path / "run" / "samples" / "step-2.png") as picture:
        assert picture.height == 3 * (64 + 2)
    made = pipeline(class_labels="emu", num_inference_steps=1, generator=torch.Generator().manual_seed(0)).images[0]
    assert made.size == (8, 8)


def test_an_interrupted_run_ends_as_the_whole_one(tmp_path, pictures):
    crops = {"local_prob": 0.3, "local_size": 12, "shrink_prob": 0.5, "shrink_size": 4}
    options = {"task": {**SMALL, "crops": crops}, "ema_decay": 0.9, "save_steps": 2, "eval_steps": 3}
    options |= {"gradient_accumulation_steps": 2, "max_steps": 4, "per_device_train_batch_size": 2}
    check_resuming(tmp_path, pictures, **options)
    whole = contents(tmp_path / "whole")
    assert {"state/step-4/optimizer.bin", "snapshot/transformer/diffusion_pytorch_model.safetensors"} < {*whole}
    run(make_arguments(tmp_path / "other", pictures, **options, seed=1))
    assert contents(tmp_path / "other")["metrics 0"] != whole["metrics 0"]


class Recording(torch.nn.Module):
    """Notes what it is given, and predicts nothing."""

    def __init__(self):
        super().__init__()
        self.weight, self.calls = torch.nn.Parameter(torch.zeros(())), []

    def forward(self, noisy, timesteps, **conditions):
        self.calls.append((noisy, timesteps, conditions))
        return SimpleNamespace(sample=torch.zeros_like(noisy) + self.weight)


def built(**options):
    model = options.pop("model", MODEL)
    task = build(DisentangledDiTTask, {**SMALL, **options}, "task")
    task.build_model({"num_classes": 3, **model}, None)
    return task


def test_both_are_dropped_or_the_controls_alone():
    task = built(model={**MODEL, "condition_dropout": 0.2, "control_dropout": 0.3})
    count, recording = 4000, Recording()
    controls = {"flip": torch.ones(count, 1)}
    batch = {"pixels": torch.zeros(count, 3, 2, 2), "label": torch.ones(count, dtype=torch.long), "controls": controls}
    torch.manual_seed(0)
    task.loss(recording, batch, 0)
    _, timesteps, conditions = recording.calls[0]
    nothing = conditions["class_labels"] == 3
    controlled = conditions["control_mask"]
    # (c, 0) is never trained: guidance does not combine it.
    assert not (nothing & controlled).any()
    assert abs(nothing.float().mean() - 0.2) < 0.02
    assert abs((~nothing & ~controlled).float().mean() - 0.8 * 0.3) < 0.02
    assert set(conditions["class_labels"].tolist()) == {1, 3} and conditions["controls"] == controls
    # Uniform over the schedule.
    assert timesteps.min() < 5 and timesteps.max() > 994 and abs(timesteps.float().mean() - 499.5) < 15


def test_flow_targets_follow_the_shift():
    clean, noise, places = torch.randn(4, 1, 2, 2), torch.randn(4, 1, 2, 2), torch.tensor([0.0, 0.25, 0.5, 1.0])
    for shift in (1.0, 3.0):
        scheduler = make_scheduler("flow", {"shift": shift}, False)
        assert isinstance(scheduler, diffusers.FlowMatchEulerDiscreteScheduler)
        noisy, timesteps, target = noisy_samples(scheduler, clean, noise, places)
        sigma = shift * places / (1 + (shift - 1) * places)
        torch.testing.assert_close(timesteps, sigma * 1000)
        torch.testing.assert_close(noisy - sigma[:, None, None, None] * target, clean)
        # The sampler's own levels are among them.
        third = scheduler.sigmas[500]
        torch.testing.assert_close(third, shift * torch.tensor(0.5) / (1 + (shift - 1) * 0.5))


OWN = {objective: make_scheduler(objective, {}, False) for objective in ("epsilon", "v_prediction")}
DIFFUSION = (diffusers.DDPMScheduler, diffusers.EulerDiscreteScheduler, diffusers.DPMSolverMultistepScheduler)
SAMPLERS = [(name, kind.from_config(own.config)) for name, own in OWN.items() for kind in DIFFUSION]
OWN["flow"] = make_scheduler("flow", {"shift": 3.0}, False)
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
SAMPLERS += [("flow", diffusers.FlowMatchHeunDiscreteScheduler(shift=3.0)), ("flow", DIFFUSION[2](**FLOW))]


@pytest.mark.parametrize(("objective", "other"), SAMPLERS)
def test_any_sampler_of_a_checkpoint_trains_as_its_own_does(objective, other):
    own, pair, places = OWN[objective], torch.randn(2, 3, 1, 2, 2), torch.tensor([0.0, 0.3, 0.99])
    noisy, times, target = noisy_samples(own, *pair, places)
    assert objective_of(other) == objective
    torch.testing.assert_close(noisy_samples(other, *pair, places), (noisy, times, target))
    if objective != "flow":
        assert times.tolist() == [0, 300, 990]
        torch.testing.assert_close(noisy, own.add_noise(*pair, times))
    if objective == "v_prediction":
        torch.testing.assert_close(target, own.get_velocity(*pair, times))
    elif objective == "epsilon":
        assert torch.equal(target, pair[1])


def test_scores_depend_on_the_index_alone():
    task, model = built(), Recording()
    images = np.random.default_rng(0).integers(256, size=(2, 8, 8, 3), dtype=np.uint8)
    examples = [{"image": Image.fromarray(image), "label": 2 * number} for number, image in enumerate(images)]
    both = task.evaluate_batch(model, examples, [4, 5])
    assert task.evaluate_batch(model, examples[1:], [5])[0] == pytest.approx(both[1], rel=1e-5)
    assert task.evaluate_batch(model, examples[1:], [6])[0] != pytest.approx(both[1], rel=1e-5)
    # One timestep in each quarter, with the class and all controls.
    for part, (_, timesteps, conditions) in enumerate(model.calls[:4]):
        assert ((timesteps >= 250 * part) & (timesteps < 250 * (part + 1))).all()
        assert conditions["class_labels"].tolist() == [0, 2] and conditions["control_mask"].all()
        assert set(conditions["controls"]) == {"original_size", "crop", "target_size", "flip", "aspect_ratio"}
    # What predicts zero is wrong by the noise.
    assert abs(both[0]["loss"] - 1) < 0.2


@pytest.mark.parametrize("objective", ["v_prediction", "flow"])
def test_captions_train_through_a_frozen_encoder(tmp_path, pictures, encoder, objective):
    options = {**SMALL, "text_encoder": str(encoder), "max_text_length": 8, "objective": objective}
    task, metrics = run(make_arguments(tmp_path / "run", pictures, task=options))
    assert np.isfinite(metrics["loss"]) and task.pipeline_tag == "text-to-image"
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "run" / "snapshot")
    assert_same_weights(pipeline.text_encoder, BertModel.from_pretrained(encoder))
    assert pipeline.config.max_text_length == 8 and pipeline.transformer.config.num_classes is None
    # In training the padding's noise is fresh, in evaluation and in the pipeline it is not.
    tokens = task.captions.tokens("a red hen")
    batch = {name: value[None] for name, value in tokens.items()}
    assert not torch.equal(task.captions.encode(batch), task.captions.encode(batch))
    real = int(tokens["attention_mask"].sum())
    ours, theirs = task.captions.encode(batch)[:, :real], pipeline.encode_prompt("a red hen")[0][:, :real]
    torch.testing.assert_close(ours, theirs)
    twice = {name: value.repeat(2, 1) for name, value in batch.items()}
    dropped = task.captions.drop(twice, torch.tensor([True, False]))
    assert dropped["input_ids"][0].tolist() == task.captions.tokens("")["input_ids"].tolist()
    assert dropped["input_ids"][1].tolist() == tokens["input_ids"].tolist()
    assert losses(tmp_path / "run")


@pytest.mark.parametrize("alpha", [{}, {"crop": 2.0}])
def test_pictures_are_encoded_in_the_step_and_few_controls_are_enough(tmp_path, pictures, vae, alpha):
    model, options = {**MODEL, "control_alpha": alpha}, {"image_size": 8, "vae": str(vae)}
    task, _ = run(make_arguments(tmp_path / "run", pictures, task=options, model=model))
    config = load_autoencoder(str(vae)).config
    assert task.config["sample_size"] == [8 // 2 ** (len(config.block_out_channels) - 1)] * 2
    assert task.config["in_channels"] == config.latent_channels
    assert task.config["control_alpha"] == alpha and losses(tmp_path / "run")
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "run" / "snapshot")
    assert pipeline(class_labels=1, num_inference_steps=1).images[0].size == (8, 8)


def test_an_adapter_loads_into_the_pipeline(tmp_path, pictures):
    run(make_arguments(tmp_path / "base", pictures, task=SMALL))
    base = tmp_path / "base" / "snapshot"
    section = {"peft_type": "LORA", "r": 2, "target_modules": ["to_q", "to_v", "add_k_proj"]}
    changes = {"model": {}, "init_from": str(base), "peft": section, "learning_rate": 0.3}
    run(make_arguments(tmp_path / "run", pictures, task=SMALL, **changes))
    pipeline = DiffusionPipeline.from_pretrained(base)
    pipeline.set_progress_bar_config(disable=True)

    def picture():
        generator = torch.Generator().manual_seed(0)
        return pipeline(class_labels=1, num_inference_steps=2, output_type="pt", generator=generator).images

    changes = {"condition_dropout": 0.3, "sample_size": 8}
    task = build(DisentangledDiTTask, SMALL, "task")
    kept = DisentangledDiTTask.model_class.CONTROL_ALPHA
    for section in ({}, MODEL, {**changes, "control_alpha": kept}):
        refuse_lost_fields(task.build_model(section, str(base)), section, str(base))
    # Of the same tensors, with other exponents.
    changes["control_alpha"] = {**kept, "crop": 2.0}
    with refused(DataError, "control_alpha", "crop", "0.0"):
        refuse_lost_fields(task.build_model(changes, str(base)), changes, str(base))

    before = picture()
    pipeline.load_lora_weights(tmp_path / "run" / "snapshot", adapter_name="ours")
    assert pipeline.get_list_adapters() == {"transformer": ["ours"]}
    assert (picture() - before).abs().max() > 1e-3


def test_the_model_and_the_data_must_fit():
    for model, facts in (({"preset": "XXL"}, ["XXL", "tiny, S, B, L, XL"]), ({"depth": 3}, ["depth", "model"])):
        with refused(UsageError, *facts):
            built(model={**MODEL, **model})
    # A schedule that ends in noise alone is for velocities.
    blind = {"noise_schedule": {"rescale_betas_zero_snr": True}}
    assert built(objective="v_prediction", **blind).scheduler.alphas_cumprod[-1] == 0
    with refused(DataError, "rescale_betas_zero_snr", "v_prediction"):
        built(objective="epsilon", **blind)
    betas = [{"trained_betas": [0.1, 0.2]}, {"trained_betas": 0.5}, {"beta_end": float("nan")}, {"beta_end": 9}]
    for schedule in (*betas, *({"shift": shift} for shift in (0.0, -0.5, float("inf")))):
        with refused(DataError, "task.noise_schedule", "1000 timesteps"):
            built(objective="flow" if "shift" in schedule else "epsilon", noise_schedule=schedule)
    task = built()
    with refused(MissingColumn, "label", column="image", option="task.image_column"):
        task.training_sample({"label": 1}, np.random.default_rng(0))
    with refused(DataError, "label"):
        task.training_sample({"image": Image.new("RGB", (8, 8)), "label": 3}, np.random.default_rng(0))
    unnamed = build(DisentangledDiTTask, SMALL, "task")
    with refused(DataError, "model.num_classes"):
        unnamed.build_model({}, None)
    unnamed.id2label = {0: "a", 1: "b"}
    with refused(UsageError, "num_classes", "2 classes"):
        unnamed.build_model({"num_classes": 3}, None)


STEPS = 4


class Watched(DisentangledDiTTask):
    """Keeps the network that it trains."""

    def loss(self, model, batch, step):
        self.network = model
        return super().loss(model, batch, step)


def train_on(data: Path, out: Path, batch: int, task: dict[str, Any], passes: int = 1) -> str:
    """Trains on all that is random by rank made a function of each picture; a digest of the network's weights."""

    def made_noisy(scheduler, clean, noise, places):
        noise = (clean.flip(-1) * 1e3).sin() * 2**0.5
        return noisy_samples(scheduler, clean, noise, clean.mean((1, 2, 3)).mul(1e3).sin().abs() * 0.99)

    changes = {"max_steps": STEPS, "per_device_train_batch_size": batch, "gradient_accumulation_steps": passes}
    model = {**MODEL, "condition_dropout": 0.0, "control_dropout": 0.0}
    with mock.patch.object(diffusion, "noisy_samples", made_noisy):
        arguments = make_arguments(out, data, task=task, model=model, learning_rate=1e-3, **changes)
        watched, _ = run(arguments, Watched)
    weights = torch.cat([value.detach().flatten() for value in watched.network.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "batch", "passes"), [("one", 6, 1), ("one", 3, 2), ("several", 3, 2)])
def test_two_processes_train_as_one_on_the_joined_batches(tmp_path, vae, sizes, batch, passes):
    task = {"image_size": 8}
    data = write_pictures(tmp_path / "pictures", side_column=[(12, 10), (20, 10), (12, 10)] * 4)
    if sizes == "several":
        task = {"image_size": 16, "vae": str(vae)}
        data = precompute(settings(data, vae, max_ratio=2.0, bucket_step=4), tmp_path / "latents")
    launch_two("tests.tasks.test_diffusion", str(data), str(tmp_path / "two"), "3", json.dumps(task))
    first, second = ((tmp_path / f"two-{rank}-of-2").read_text() for rank in (0, 1))
    assert first == second
    train_on(data, tmp_path / "one", batch, task, passes)
    forget_accelerate()
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    assert len(losses(tmp_path / "two")) == STEPS
    weights = "snapshot/transformer/diffusion_pytorch_model.safetensors"
    found, expected = (load_file(tmp_path / name / weights) for name in ("two", "one"))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def main() -> None:
    data, out, batch, task = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    digest = train_on(data, out, batch, task)
    state = PartialState()
    out.with_name(f"{out.name}-{state.process_index}-of-{state.num_processes}").write_text(digest)


if __name__ == "__main__":
    main()
