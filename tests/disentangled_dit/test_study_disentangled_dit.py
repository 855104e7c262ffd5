"""The study's parts: its settings are valid, sets and captions are what they say, steps and tables fit each other."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from hf_ext.data.opening import open_source
from hf_ext.metrics import ClassifierFeatures
from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline, DisentangledDiTTransformer2DModel
from hf_ext.tasks.diffusion_grids import draw_grid
from hf_ext.training import TrainingArguments, evaluate
from hf_ext.training.arguments import DataSource, read_yaml
from tests.kit.studies import EXAMPLES, fill_readme, module_loader

from . import reference_transformer as reference
from .dit_testing import SIZES, make_inputs, make_transformer, shake

STUDY = EXAMPLES / "disentangled_dit"
load = module_loader(STUDY)
NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
SMALL = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8, "patch_size": 2, "num_classes": 3}


@pytest.fixture
def data(tmp_path) -> Path:
    """The data folder, with forty pictures sorted by class in each split, and two photographs."""
    generator = np.random.default_rng(0)
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)})
    folder = tmp_path / "data"
    (folder / "cifar10").mkdir(parents=True)
    for split in ("train", "test"):
        pictures = [Image.fromarray(generator.integers(256, size=(32, 32, 3), dtype=np.uint8)) for _ in range(40)]
        columns = {"image": pictures, "label": np.repeat(np.arange(10), 4)}
        datasets.Dataset.from_dict(columns, features=kinds).to_parquet(str(folder / "cifar10" / f"{split}.parquet"))
        (folder / "bsds500" / split).mkdir(parents=True)
        pixels = generator.integers(256, size=(40, 60, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "bsds500" / split / "photo.png")
    return folder


def test_sets_are_mixed_and_say_their_original_sizes(load, data, tmp_path):
    sets = load("sets")
    folders = sets.prepare(data, tmp_path / "work")
    read = {name: datasets.load_dataset(str(folder)) for name, folder in folders.items()}
    for name, side in (("32", 32), ("16", 16)):
        for split in ("train", "test"):
            rows = read[name][split]
            assert {picture.size for picture in rows["image"]} == {(side, side)}
            assert sorted(rows["label"]) == sorted(list(range(10)) * 4) and len(set(rows["label"][:8])) > 3
    whole = datasets.load_dataset(str(data / "cifar10"), split="test")
    first = np.asarray(read["32"]["test"][0]["image"])
    assert any(np.array_equal(first, np.asarray(picture)) for picture in whole["image"])
    varied = read["varied"]["train"]
    sides = np.array([picture.size for picture in varied["image"]])
    labels = np.array(varied["label"])
    assert (sides[:, 0] == sides[:, 1]).all() and sides.min() >= sets.SMALLEST and sides[labels < 10].max() <= 32
    assert len(set(sides[:, 0])) > 8 and (labels == 10).sum() == 4 and sides[labels == 10].max() <= 40
    assert varied.features["label"].names == [*NAMES, "photograph"]
    before = (folders["16"] / "train.parquet").stat().st_mtime_ns
    sets.prepare(data, tmp_path / "work")
    assert (folders["16"] / "train.parquet").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="must hold the folders train and test"):
        list(sets.photograph_rows(tmp_path / "nothing", 1, 10))


def test_every_run_has_valid_settings_and_equal_parameters(load, tmp_path):
    study, experiments = load("study"), load("experiments")
    made = study.Study(None, tmp_path / "work")

    def count(values, kind=study.OURS):
        arguments = experiments.read_arguments(STUDY / "study.yaml", values)
        with torch.device("meta"):
            model = load("peers").make_task(arguments, kind).build_model(arguments.model, None)
        return sum(value.numel() for value in model.parameters())

    claims = {
        name: count(made.values("varied", **changes), study.KINDS.get(name, study.OURS))
        for name, changes in study.VARIANTS.items()
    }
    assert all(claims[f"{place}-weighted"] == claims[f"{place}-constant"] for place in ("token", "adaln"))
    assert claims["adaln-weighted"] / claims["token-weighted"] == pytest.approx(1, abs=0.02)


def test_variants_of_our_network_differ_in_one_thing(load):
    variants, small = load("variants").VARIANTS, {**SMALL, "in_channels": 3}
    ours = DisentangledDiTTransformer2DModel(**small, sample_size=8)
    drawn = variants["drawn"](**small, sample_size=8)
    for name, embedder in drawn.control_embedders.items():
        assert embedder.linear_2.weight.std() > 0.1 and not ours.control_embedders[name].linear_2.weight.any()
    assert not drawn.proj_out.weight.any() and not drawn.modulations[0].weight.any()
    one = variants["one-stream"](**small, sample_size=8, shared_stream=True)
    assert not [name for name, _ in one.named_parameters() if "add_" in name or "context" in name]
    assert one.modulation_sizes == [6 * 16, 6 * 16, 2 * 16]
    for value in one.parameters():
        nn.init.normal_(value, std=0.2)
    picture, times = torch.randn(2, 3, 8, 8), torch.tensor([10, 500])
    first, second, other = (
        one(picture, times, class_labels=torch.tensor(labels)).sample for labels in ([0, 1], [0, 1], [2, 1])
    )
    # The class acts, and each picture's own alone.
    assert torch.equal(first, second) and not torch.allclose(first[0], other[0]) and torch.equal(first[1], other[1])
    bicubic = variants["bicubic"](**small, sample_size=16, pos_embed_base_size=4)
    # The grid of the pre-training is known; a larger one follows the resampled places, but for the borders.
    assert torch.equal(bicubic.position_embedding(4, 4), ours.position_embedding(4, 4))
    found, places = bicubic.position_embedding(8, 8), ours.position_embedding(8, 8)
    assert found.shape == places.shape == (64, 16) and not torch.equal(found, places)
    rows = [torch.corrcoef(torch.stack([one, other]))[0, 1] for one, other in zip(found, places, strict=True)]
    assert min(rows) > 0.5


@pytest.mark.parametrize("fields", [{}, {"shared_stream": True}, {"modulation": "shared"}])
@pytest.mark.parametrize("name", ["adaln", "mdt"])
def test_a_class_in_adaln_and_hidden_tokens_equal_the_reference(load, name, fields):
    torch.manual_seed(0)
    network = load("variants").VARIANTS[name](**{**SIZES, **fields})
    shake(network)
    network = network.double().eval()
    inputs = make_inputs(network, batch=2, dtype=torch.float64)
    kept = {} if name == "adaln" else {"keep_indices": torch.tensor([[0, 3, 6, 9, 12], [8, 4, 7, 6, 5]])}
    for more in ({}, kept):
        wanted = reference.predict(dict(network.named_parameters()), network.config, **inputs, **more, in_adaln=True)
        torch.testing.assert_close(network(**inputs, **more).sample, wanted, atol=1e-9, rtol=1e-9)
    # What a pipeline computes ahead.
    latents, labels = inputs.pop("hidden_states"), inputs.pop("class_labels")
    context, _ = network(class_labels=labels, return_conditioning=True)
    _, modulation = network(**inputs, return_conditioning=True)
    found = network(latents, context=context, modulation=modulation).sample
    torch.testing.assert_close(found, network(latents, **inputs, class_labels=labels).sample)


def test_a_second_pass_hides_equally_many_tokens_of_each_picture(load):
    peers, variants = load("peers"), load("variants")
    kept = variants.random_keep_indices(64, 10, 0.3, torch.device("cpu")).tolist()
    assert all(len(row) == 7 and row == sorted(set(row)) and set(row) <= set(range(10)) for row in kept)
    assert len({tuple(row) for row in kept}) > 30
    arguments = TrainingArguments(method="disentangled-dit", output_dir="x", task={"image_size": 8, "mask_ratio": 0.5})
    task = peers.make_task(arguments, "mdt")
    model, seen = task.build_model(SMALL, None), []
    model.register_forward_pre_hook(lambda _, __, told: seen.append(told.get("keep_indices")), with_kwargs=True)
    labels = torch.zeros(2, dtype=torch.long)
    task.loss(model, {"pixels": torch.zeros(2, 3, 8, 8), "label": labels, "controls": {}}, 0).backward()
    assert seen[0] is None and seen[1].shape == (2, 8)
    assert model.side_modulation.weight.grad is not None


def test_the_judge_is_kept_in_16_bits_and_answers_the_same(load, data, tmp_path):
    study, measuring, sets = load("study"), load("measuring"), load("sets").prepare(data, tmp_path / "work")
    train, _ = trained_without_training(load)
    values = {"data": {"eval": {"path": str(sets["32"]), "split": "test[:4]"}}, "max_steps": 2}
    train(tmp_path / "run", STUDY / "classifier.yaml", values, study.classifier.make_task)
    snapshot = tmp_path / "run" / "snapshot"
    measuring.keep_judge(snapshot, tmp_path / "judge")
    weights = load_file(tmp_path / "judge" / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.float16, torch.int64}
    images = np.random.default_rng(0).integers(256, size=(6, 32, 32, 3), dtype=np.uint8)
    whole, kept = (ClassifierFeatures(str(folder)) for folder in (snapshot, tmp_path / "judge"))
    assert kept.model.dtype == torch.float32
    np.testing.assert_allclose(kept(images), whole(images), rtol=0.02, atol=0.02)
    assert 0 <= measuring.right_shares(tmp_path / "judge", {"32": sets["32"]})["32"] <= 1
    judge = measuring.Judge(tmp_path / "judge", sets["32"], 10)
    assert judge.others.shape == (10, 32, 32, 3) and judge.reference.shape == (30, 192)


def test_images_are_cut_out_of_a_sheet_to_the_bit(load, tmp_path):
    measuring = load("measuring")
    images = np.random.default_rng(0).integers(256, size=(3, 4, 32, 32, 3), dtype=np.uint8)
    rows = [[Image.fromarray(image) for image in line] for line in images]
    draw_grid(rows, ["a", "long name", "b"]).save(tmp_path / "step-5.png")
    assert np.array_equal(measuring.cut_grid(tmp_path / "step-5.png", 32, 4), images)


def shrink(load, monkeypatch, folder: Path) -> None:
    """Networks, numbers of pictures and sampling that cost nothing."""
    study, measuring = load("study"), load("measuring")
    recipe = read_yaml(STUDY / "study.yaml")
    recipe["model"] |= {"num_layers": 3, "attention_head_dim": 24}
    (folder / "study.yaml").write_text(json.dumps(recipe))
    (folder / "classifier.yaml").write_text((STUDY / "classifier.yaml").read_text())
    monkeypatch.setattr(study, "EXAMPLES", folder)
    for name, value in (("num_inference_steps", 1), ("guidance_scale", 1.0)):
        monkeypatch.setitem(measuring.SAMPLING, name, value)
    small = {"MEASURED": 1, "OTHERS": 10, "PER_SIZE": 1, "PER_POINT": 1, "TESTED": "test[:4]", "JUDGED": "test[:4]"}
    for name, value in small.items():
        monkeypatch.setattr(study, name, value)


def trained_without_training(load):
    """A run whose model is saved as it is initialised, with the picture that the loop would draw."""
    names, read_arguments = [], load("experiments").read_arguments

    def train(run, recipe, values, make_task):
        names.append(run.name)
        arguments = read_arguments(recipe, values)
        task = make_task(arguments)
        if recipe.stem != "classifier":
            task.read_data(open_source(arguments.data_arguments.train_source))
        torch.manual_seed(0)
        model = task.build_model(arguments.model, arguments.init_from).eval()
        task.save_model(model, model.state_dict(), run / "snapshot")
        rows = open_source(DataSource(**values["data"]["eval"]))
        if "task.samples_per_class" in values:
            (run / "samples").mkdir()
            for step in (1, values["max_steps"]):
                task.sample_picture(model, [rows[0]]).save(run / "samples" / f"step-{step}.png")
        told = {"per_device_train_batch_size": arguments.per_device_train_batch_size, "learning_rate": 0.001}
        facts = {"samples": 4000, "seconds": 12.3, "losses": [], "hardware": "CPU", "versions": {"torch": "2"}}
        return {"steps": arguments.max_steps, "arguments": told, "scores": evaluate(task, model, rows), **facts}

    return train, names


@pytest.mark.slow
def test_all_claims_fit_each_other(load, data, tmp_path, monkeypatch):
    study, tables = load("study"), load("tables")
    train, trained = trained_without_training(load)
    shrink(load, monkeypatch, tmp_path)
    monkeypatch.setattr(study, "train_run", train)
    monkeypatch.setattr(study, "PRETRAINED", tmp_path / "cifar10-16")
    sizes = {"sample_size": [16, 16], "patch_size": 4, "num_attention_heads": 4, "attention_head_dim": 24}
    start = make_transformer(**sizes, num_classes=10, mlp_ratio=4.0)
    schedule = DDIMScheduler(prediction_type="v_prediction", beta_schedule="squaredcos_cap_v2")
    DisentangledDiTPipeline(start, schedule).save_pretrained(study.PRETRAINED)
    results, readme = tmp_path / "results", tmp_path / "README.md"
    readme.write_text((STUDY / "README.md").read_text())
    made = study.Study(data, tmp_path / "work", results)
    for compute in study.CLAIMS.values():
        compute(made)
        study.write(tmp_path / "work", results, readme)
    # Each once, however many claims need it; and all that is committed.
    committed = (STUDY / "results" / "steps").glob("run-*.json")
    assert sorted(trained) == sorted(path.stem.removeprefix("run-") for path in committed)
    assert {path.name for path in results.glob("*.png")} == {"transfer.png"}
    assert set(study.collect(tmp_path / "work", results)) == {"seconds", *study.CLAIMS}
    assert list(tables.VARIANTS) == list(study.VARIANTS)
    # What is there is not computed again; a model that another machine trained is, where a measurement needs it.
    del trained[:]
    again = study.Study(data, tmp_path / "work", results)
    study.claim(again)
    shutil.rmtree(tmp_path / "work" / "runs" / "claim-adaln-constant-0")
    (results / "steps" / "measure-claim-adaln-constant-0.json").unlink()
    study.claim(again)
    assert trained == ["claim-adaln-constant-0"]


def test_readme_holds_the_committed_results(load, tmp_path):
    """Tables are written from the files that are committed, without data."""
    study, tables = load("study"), load("tables")
    result = study.collect(tmp_path / "work")
    assert set(result) == {"seconds", *study.CLAIMS}
    assert fill_readme(tables, result, tmp_path) == (STUDY / "README.md").read_text()
    tables.draw_convergence(result["transfer"], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    for path in (STUDY / "results").rglob("*.json"):
        assert str(STUDY.parents[1]) not in path.read_text() and "/root" not in path.read_text()


@pytest.mark.usefixtures("load")
def test_a_released_card_shows_a_row_for_each_class_and_control(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    drawing = runpy.run_path(str(EXAMPLES / "released" / "drawing.py"))
    names = dict(enumerate(NAMES))
    network = make_transformer(sample_size=8, num_classes=10)
    DisentangledDiTPipeline(network, DDIMScheduler(), id2label=names).save_pretrained(tmp_path)
    classes, controls = drawing["draw"](tmp_path), drawing["draw_controls"](tmp_path)
    # Pictures of 8 pixels are shown with 128.
    assert (classes.height, controls.height) == (10 * 130, len(drawing["CONTROLS"]) * 130) and classes.width > 8 * 130
