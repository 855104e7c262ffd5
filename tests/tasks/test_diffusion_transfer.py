"""Places of the schedule that a training sees, and the way from one resolution, or data set, to another."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler, DiffusionPipeline

import hf_ext.pipelines  # noqa: F401  registers the pipeline with diffusers
from hf_ext.embedded_hub.server import EmbeddedHub
from hf_ext.errors import DataError, UsageError
from hf_ext.tasks.diffusion_data import Crops
from hf_ext.tasks.diffusion_noise import Timesteps, make_scheduler, noise_shares, noisy_samples, weighted_error
from hf_ext.tasks.diffusion_transfer import Checkpoint, Transfer, open_pipeline, transfer
from tests.emr.emr_testing import tiny_semanir
from tests.kit.hub import run_python
from tests.kit.refusals import refused

from .diffusion_testing import CLASSES, losses, make_arguments, run, write_pictures, write_table


@pytest.fixture
def base(tmp_path):
    """A model of 8 x 8 pixels, trained on local crops."""
    pictures = write_pictures(tmp_path / "pictures", size=(20, 18))
    task = {"image_size": 8, "crops": {"local_prob": 1.0, "local_size": 16}}
    run(make_arguments(tmp_path / "base", pictures, task=task))
    return tmp_path / "base" / "snapshot"


def test_everything_changes_in_one_place_and_each_part_can_be_left_out(tmp_path, base):
    checkpoint = open_pipeline(str(base))
    config, scheduler, crops = transfer(checkpoint, (16, 24), Transfer(False, False), Crops())
    assert config["pos_embed_base_size"] == [8, 12] and scheduler is checkpoint.scheduler and crops == Crops()
    config, _, _ = transfer(checkpoint, (16, 24), Transfer(), Crops())
    assert config["pos_embed_base_size"] == [4, 4] and config["sample_size"] == [16, 24]
    task = {"image_size": 16, "crops": {"flip": 0.25, "local_prob": 1.0, "local_size": 16}}
    changes = {"model": {}, "init_from": str(base), "task": task}
    task, _ = run(make_arguments(tmp_path / "run", tmp_path / "pictures", **changes))
    assert task.config["sample_size"] == [16, 16] and task.config["pos_embed_base_size"] == [4, 4]
    assert task.cut == Crops(flip=0.25)
    before, after = (DiffusionPipeline.from_pretrained(path) for path in (base, tmp_path / "run" / "snapshot"))
    kept = before.scheduler.alphas_cumprod.double()
    expected = kept / (4 + kept * (1 - 4))
    torch.testing.assert_close(after.scheduler.alphas_cumprod.double(), expected, atol=1e-6, rtol=1e-5)
    assert after.config.id2label == before.config.id2label
    # At equal positions of the picture the embedding is the same: even places of the finer grid.
    fine = after.transformer.position_embedding(8, 8)
    coarse = before.transformer.position_embedding(4, 4)
    torch.testing.assert_close(fine.view(8, 8, 16)[::2, ::2], coarse.view(4, 4, 16))
    # A run that goes on from here, at the same size, changes nothing again.
    again = open_pipeline(str(tmp_path / "run" / "snapshot"))
    config, scheduler, _ = transfer(again, (16, 16), Transfer(), Crops())
    assert config["pos_embed_base_size"] == [4, 4]
    assert torch.equal(scheduler.alphas_cumprod, after.scheduler.alphas_cumprod)


SHIFTS = [("epsilon", {}), ("v_prediction", {}), *(("flow", {"shift": shift}) for shift in (1.0, 1.5, 3.0))]


@pytest.mark.parametrize(("objective", "changes"), SHIFTS)
@pytest.mark.parametrize("size", [(16, 16), (32, 32), (12, 8), (4, 4)])
def test_at_equal_places_a_patch_is_as_uncertain_as_before(objective, changes, size):
    """
    The squared ratio of picture to noise falls by the ratio of the areas, by which the mean over what shows one pixel
    of the smaller picture raises it. With flow matching the network's t is the share of noise in its input, in
    training as in sampling: at an equal t the input is what it was. With diffusion t stays.
    """
    before = make_scheduler(objective, changes, False)
    config = {"sample_size": 8, "patch_size": 2, "pos_embed_base_size": [4, 4]}
    _, after, _ = transfer(Checkpoint(Path(), config, before, None), size, Transfer(), Crops())
    places = torch.linspace(0.01, 0.99, 50, dtype=torch.float64)
    ones, ratios, told = torch.ones(50, 1, 1, 1, dtype=torch.float64), [], []
    for scheduler in (before, after):
        picture, timesteps, _ = noisy_samples(scheduler, ones, 0 * ones, places)
        noise, _, _ = noisy_samples(scheduler, 0 * ones, ones, places)
        torch.testing.assert_close(picture + noise, noisy_samples(scheduler, ones, ones, places)[0])
        ratios.append((picture / noise).square().flatten())
        told.append(timesteps)
        if objective == "flow":
            torch.testing.assert_close(timesteps, 1000 * noise.flatten())
    expected = torch.full_like(places, size[0] * size[1] / 64)
    torch.testing.assert_close(ratios[0] / ratios[1], expected, rtol=1e-7 if objective == "flow" else 2e-3, atol=0)
    if objective == "flow":
        after.set_timesteps(10)
        torch.testing.assert_close(after.timesteps, 1000 * after.sigmas[:-1])
    else:
        assert torch.equal(*told)


# Classes without names do not have those of the checkpoint's, unless they are as many.
NAMES = [("xy", {}, "xy"), (None, {"num_classes": 2}, None), (None, {"num_classes": 3}, CLASSES), (None, {}, CLASSES)]


@pytest.mark.parametrize(("classes", "model", "names"), NAMES)
def test_another_data_set_brings_its_own_classes(tmp_path, base, classes, model, names):
    other = write_table(tmp_path / "other", [(20, 18)] * 4, classes and [*classes], label=[0, 1, 0, 1])
    changes = {"model": model, "init_from": str(base), "task": {"image_size": 8}, "max_steps": 1}
    task, _ = run(make_arguments(tmp_path / "run", other, **changes))
    assert task.id2label == (names and dict(enumerate(names))) and task.config["num_classes"] == len(names or "xy")
    assert len(losses(tmp_path / "run")) == 1


# Runs in its own process, as libraries read the Hub's address when they are imported.
FROM_A_HUB = """
import sys, torch
from huggingface_hub import HfApi
from hf_ext.tasks.diffusion import DisentangledDiTTask
from hf_ext.tasks.restoration import SemanIRTask
from hf_ext.training.models import pin_revision

for task, folder in zip((DisentangledDiTTask(image_size=8), SemanIRTask()), sys.argv[1:], strict=True):
    name = f"me/{type(task).__name__}"
    HfApi().create_repo(name)
    commit = HfApi().upload_folder(repo_id=name, folder_path=folder)
    pinned = pin_revision(name)
    assert pinned == f"{name}@{commit.oid}", pinned
    models = [task.build_model({}, source) for source in (pinned, folder)]
    pairs = zip(*(model.parameters() for model in models), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)
"""


@pytest.mark.slow
def test_weights_come_from_a_hub(tmp_path, base):
    restorer = tiny_semanir(tmp_path / "restorer")
    with EmbeddedHub(tmp_path / "hub") as hub:
        run_python(FROM_A_HUB, hub.url, tmp_path / "home", str(base), str(restorer), token="x")


def test_what_does_not_fit_is_refused(tmp_path, base):
    blind = shutil.copytree(base, tmp_path / "blind")
    DDIMScheduler(rescale_betas_zero_snr=True).save_pretrained(blind / "scheduler")
    for kind, facts, changes in (
        (UsageError, ["task.objective"], {"task": {"image_size": 8, "objective": "flow"}}),
        (UsageError, ["init_from"], {"model": {"preset": "S"}}),
        (DataError, ["diffusers", "pipeline"], {"init_from": str(base / "transformer")}),
        (DataError, ["schedule", "blind"], {"init_from": str(blind)}),
    ):
        changes = {"model": {}, "init_from": str(base), **changes}
        with refused(kind, *facts):
            run(make_arguments(tmp_path / "run", tmp_path / "pictures", **changes))
    DDIMScheduler(beta_schedule="linear").save_pretrained(blind / "scheduler")
    settings = blind / "scheduler" / "scheduler_config.json"
    settings.write_text(settings.read_text().replace("linear", "unheard-of"))
    with refused(DataError, "schedule", "blind", "unheard-of"):
        open_pipeline(str(blind))
    index = json.loads((base / "model_index.json").read_text())
    for wrong in (None, [None, None], ["diffusers", "NoScheduler"], ["diffusers", "__version__"], 5):
        (blind / "model_index.json").write_text(json.dumps(index | {"scheduler": wrong}))
        with refused(DataError, "blind", "scheduler"):
            open_pipeline(str(blind))
    (blind / "model_index.json").write_text(json.dumps(index | {"id2label": ["a"]}))
    with pytest.raises(ValueError):
        open_pipeline(str(blind))
    (blind / "model_index.json").write_text(json.dumps(index))
    (blind / "transformer" / "config.json").write_text("{}")
    with refused(DataError, "blind", "patch_size, sample_size"):
        open_pipeline(str(blind))


PLACES = torch.tensor([0.0, 0.02, 0.3, 0.7, 0.98])


def draw(**changes) -> torch.Tensor:
    torch.manual_seed(0)
    places = Timesteps(**changes).draw(40_000, torch.device("cpu"))
    assert places.min() >= 0 and places.max() < 1
    return places.double()


def test_places_follow_their_distribution():
    assert torch.equal(draw(), torch.rand(40_000, generator=torch.Generator().manual_seed(0)).double())
    logits = torch.logit(draw(distribution="logit_normal"))
    assert float(logits.mean()) == pytest.approx(0, abs=0.03) and float(logits.std()) == pytest.approx(1, abs=0.03)
    # Half of the places of a flow schedule of shift 2 are above 2/3: more noise.
    shifted = noise_shares(make_scheduler("flow", {"shift": 2.0}, False), draw())[2]
    assert torch.quantile(shifted, 0.5) == pytest.approx(2 / 3, abs=0.01)


@pytest.mark.parametrize("objective", ["epsilon", "v_prediction", "flow"])
def test_a_weight_is_that_of_the_picture_that_the_output_means(objective):
    """An error of the output is turned into that of the picture by what the sample is made of."""
    scheduler = make_scheduler(objective, {}, False)
    generator = torch.Generator().manual_seed(0)
    clean, noise, error = (torch.randn(5, 2, 4, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    noisy, _, target = noisy_samples(scheduler, clean, noise, PLACES.double())
    _, signal, rest = noise_shares(scheduler, PLACES.double())
    a, b = (share[:, None, None, None] for share in (signal, rest))
    found = target + error
    pictures = {"epsilon": (noisy - b * found) / a, "v_prediction": a * noisy - b * found, "flow": noisy - b * found}
    snr, plain = (signal / rest).square(), error.square().mean((1, 2, 3))
    of_pictures = (pictures[objective] - clean).square().mean((1, 2, 3)) * snr.clamp(max=3.0)
    for kind, wanted in {"equal": plain, "min_snr": of_pictures}.items():
        weights = Timesteps(loss_weight=kind, gamma=3.0).weigh(objective, signal, rest)
        assert weights.isfinite().all()
        # At the clean end of flow matching there is no noise to divide by.
        some = slice(1, None) if objective == "flow" else slice(None)
        torch.testing.assert_close((plain * weights)[some], wanted[some])
        torch.testing.assert_close(weighted_error(found, target, weights), (plain * weights).mean())
    if objective == "v_prediction":
        weights = Timesteps(loss_weight="min_snr").weigh(objective, signal, rest)
        torch.testing.assert_close(weights, snr.clamp(max=5.0) / (snr + 1))


def test_another_shape_of_equal_area_keeps_the_schedule():
    scheduler = make_scheduler("epsilon", {}, False)
    config = {"sample_size": 32, "patch_size": 2, "pos_embed_base_size": [16, 16]}
    checkpoint = Checkpoint(Path(), config, scheduler, None)
    for size, is_kept in (((16, 64), True), ((32, 64), False)):
        found, after, _ = transfer(checkpoint, size, Transfer(), Crops())
        assert found["sample_size"] == list(size) and (after is scheduler) == is_kept
