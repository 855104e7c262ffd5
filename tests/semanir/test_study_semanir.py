"""The studies: settings are valid, the peer is of equal size and trains, tables fit; pairs; counts of a benchmark."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hf_ext.data.opening import open_source
from hf_ext.hub.released import released
from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration
from hf_ext.tasks.degradations import mosaic
from hf_ext.training import build_task, evaluate
from hf_ext.training.arguments import DataSource
from tests.kit.studies import EXAMPLES, fill_readme, module_loader, write_photos

STUDY = EXAMPLES / "semanir"
load = module_loader(STUDY)
LAYERS = {"model.embed_dim": 8, "model.depths": [1, 2], "model.num_heads": [1, 2]}
TINY = {**LAYERS, "model.window_size": 4, "model.top_k": 8, "task.patch_size": 16}


@pytest.fixture
def photos(tmp_path) -> dict[str, dict[str, str]]:
    """Data sections of a run, two pictures each."""
    for part in ("train", "test"):
        write_photos(tmp_path / "photos" / part, range(2), (28, 36))
    return {
        part: {"path": str(tmp_path / "photos"), "split": split}
        for part, split in (("train", "train"), ("eval", "test"))
    }


def every_setting(study) -> dict[str, dict]:
    """Networks and tasks of all runs."""
    made = study.Study(Path("data"), Path("work"))
    denoising = [made.values(made.source("set12", "train"), **changes) for changes in study.CANDIDATES.values()]
    mixed = {"task.degradation": [study.NOISE, study.JPEG], "task.eval_degradation": [study.NOISE, study.JPEG]}
    named = {f"candidate {index}": values for index, values in enumerate(denoising)}
    return named | {"mixed": {**denoising[0], **mixed}, "random": {**denoising[0], "model.train_top_k": [4, 8]}}


def test_every_run_has_valid_settings_and_peers_are_of_equal_size(load):
    study = load("study")
    for name, values in every_setting(study).items():
        counts = {}
        for model in study.TIMED_STEPS:
            changed, peer = study.block_values(values, model)
            arguments = study.run_arguments(changed)
            task = study.make_task(arguments, peer)
            counts[model] = sum(value.numel() for value in task.build_model(arguments.model, None).parameters())
        assert counts["dense"] == counts["semanir"] > 50_000, name
        assert 0.9 < counts["swin2sr"] / counts["semanir"] < 1.1, name


@pytest.mark.parametrize("model", ["semanir", "dense", "swin2sr"])
def test_blocks_train_on_the_same_task(load, photos, tmp_path, model):
    study = load("study")
    values, peer = study.block_values({"data": photos, **TINY, "model.depths": [2, 2]}, model)
    arguments = study.run_arguments(values)
    task = study.make_task(arguments, peer)
    torch.manual_seed(0)
    network = task.build_model(arguments.model, None)
    rng = np.random.default_rng(0)
    sample = task.training_sample(open_source(DataSource(**photos["train"]))[0], rng)
    task.loss(network, {name: value[None] for name, value in sample.items()}, 0).backward()
    assert all(value.grad is not None and value.grad.isfinite().all() for value in network.parameters())
    task.save_model(network, network.state_dict(), tmp_path / "snapshot")
    assert study.count_parameters(tmp_path / "snapshot") == sum(value.numel() for value in network.parameters())
    noisy = {"psnr": 20.2}
    found = evaluate(task, network, open_source(DataSource(**photos["eval"])))
    # At first the correction is small: nearly the noisy input comes out.
    assert found["psnr"] == pytest.approx(noisy["psnr"], abs=1)


@pytest.mark.slow
def test_all_steps_fit_each_other(load, tmp_path, monkeypatch):
    """The whole study on tiny pictures and networks, with models that are saved as they are initialised."""
    study, measuring, tables = (load(name) for name in ("study", "measuring", "tables"))
    committed = json.loads((STUDY / "results" / "study.json").read_text())
    for folder, count in (("bsds500/train", 2), ("bsds500/test", 11), ("set12", 2), ("bsd68", 2)):
        write_photos(tmp_path / "data" / folder, range(count), (28, 36, 3))
    trained = []

    def train(run, values, peer):
        trained.append((run.name, values["max_steps"]))
        arguments = study.run_arguments(values)
        task = study.make_task(arguments, peer)
        model = task.build_model(arguments.model, None)
        task.save_model(model, model.state_dict(), run / "snapshot")
        scores = {**committed["headline"]["scores"], **committed["mixed"]["both"]["scores"]}
        return {**committed["headline"], "scores": scores, "steps": values["max_steps"]}

    monkeypatch.setattr(study, "train", train)
    monkeypatch.setattr(study, "CANDIDATES", {"tiny": TINY})
    monkeypatch.setattr(measuring, "TUNING_PHOTOS", 2)
    result = study.compute(study.Study(tmp_path / "data", tmp_path / "work"))
    assert trained == [
        ("candidate-0", 116), ("denoising-semanir-time", 313), ("denoising-dense-time", 296),
        ("denoising-dense-samples", 313), ("denoising-swin2sr-time", 250), ("denoising-swin2sr-samples", 313),
        ("headline", 8208), ("random-k", 313), ("jpeg", 308), ("mixed", 332), ("mixed-long", 664),
    ]  # fmt: skip
    assert [row["top_k"] for row in result["sweep"]["curves"]["random"]] == [1, 2, 4, 8, 16]
    assert result["total_variation"]["weight"] in measuring.WEIGHTS
    assert set(tables.blocks({**committed, **result})) == set(tables.blocks(committed))


def test_readme_holds_the_committed_results(load, tmp_path):
    tables, result = load("tables"), json.loads((STUDY / "results" / "study.json").read_text())
    assert fill_readme(tables, result, tmp_path) == (STUDY / "README.md").read_text()
    for draw in (tables.draw_curves, tables.draw_sweep):
        draw(result, tmp_path / "curves.png")
        assert (tmp_path / "curves.png").stat().st_size > 10_000


load_benchmark = module_loader(EXAMPLES / "benchmarks")


def test_operations_are_those_of_the_formulas(load_benchmark):
    sizes = load_benchmark("semanir_sizes")
    config = SemanIRConfig(
        architecture="columnar", embed_dim=16, depths=[2], num_heads=[2], window_size=8, top_k=16, shift_policy="none"
    )
    row = sizes.count(config)
    tokens, window = 256**2, 64
    # 4 N² C a window and layer; the dictionary of a stage half of a layer's, by one product.
    assert row["attention_masked"] == pytest.approx(2 * 4 * window * tokens * 16 / 1e9)
    assert row["attention_of_k_keys"] == pytest.approx(row["attention_masked"] / 4)
    assert row["dictionaries"] == pytest.approx(2 * window * tokens * 16 / 1e9)
    assert row["total_masked"] - row["total_of_k_keys"] == pytest.approx(0.75 * row["attention_masked"])


def test_committed_counts_are_those_of_the_recipes_and_releases(load_benchmark):
    found = load_benchmark("semanir_sizes").configurations()
    assert {"denoise_color", "super_resolution_x4", "released: denoise-color"} <= set(found)
    kept = json.loads((EXAMPLES / "benchmarks" / "results" / "semanir_sizes.json").read_text(encoding="utf-8"))
    # As the recipe's own comment says: its preset is the U.
    assert kept["models"]["denoise_color"]["parameters"] == pytest.approx(25.8e6, rel=0.01)
    for name, config in found.items():
        with torch.device("meta"):
            model = SemanIRForImageRestoration(config)
        assert kept["models"][name]["parameters"] == sum(value.numel() for value in model.parameters()), name
        assert kept["models"][name]["window"] == config.window_size
    assert set(kept["models"]) == set(found)


def write_slopes(folder, count=3, shape=(40, 52, 3)):
    """Pictures with a slope of light and some grain."""
    folder.mkdir(parents=True)
    for index in range(count):
        slope = np.linspace(40, 200, shape[1])[None, :, None] + np.zeros(shape)
        pixels = slope + np.random.default_rng(index).normal(0, 10, shape)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{index}.png")
    return folder


def read_pairs(folder):
    return [
        [np.asarray(Image.open(folder / part / path.name)).astype(int) for part in ("lq", "hq")]
        for path in sorted((folder / "hq").iterdir())
    ]


def test_pairs_are_made_from_a_seed_and_every_damage_damages(load, tmp_path):
    make_pairs = load("make_pairs")
    photos = sorted(write_slopes(tmp_path / "photos", shape=(160, 200, 3)).iterdir())
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_pairs.make_pairs(photos, tmp_path / name, seed)
    for kind in ("deblur", "weather"):
        first, again, other = (read_pairs(tmp_path / name / kind) for name in "abc")
        assert len(first) == 3
        for one, two, three in zip(first, again, other, strict=True):
            np.testing.assert_array_equal(one, two)
            np.testing.assert_array_equal(one[1], three[1])
            assert one[0].shape == one[1].shape and (one[0] != three[0]).any()
            # Damaged, yet the same picture.
            assert 0.5 < np.abs(one[0] - one[1]).mean() < 40


def test_a_bilinear_mosaic_keeps_what_was_measured_and_is_right_on_slopes(load):
    rows, columns = np.mgrid[:12, :16]
    image = np.stack([0.01 * rows + 0.02 * columns, 0.5 - 0.01 * columns, 0.03 * rows], axis=-1)
    found = load("damages").interpolate_mosaic(mosaic(image))
    # At the edge a neighbour is missing.
    np.testing.assert_allclose(found[2:-2, 2:-2], image[2:-2, 2:-2], atol=1e-9)
    np.testing.assert_array_equal(mosaic(found), mosaic(image))


def test_every_run_of_the_short_studies_has_valid_settings(load):
    windows, damages = load("windows"), load("damages")
    counts = set()
    for task in windows.TASKS:
        for window in windows.WINDOWS:
            arguments = windows.run_arguments(windows.find_values(task, window, 0))
            model = build_task(arguments).build_model(arguments.model, None)
            counts.add(sum(value.numel() for value in model.parameters()))
            assert arguments.task["patch_size"] % window == 0
    # Equal parameters: what differs is the window alone.
    assert len(counts) == 1
    for name in damages.DAMAGES:
        values = damages.find_values(name, STUDY)
        arguments = damages.read_arguments(damages.find_recipe(name), values)
        build_task(arguments).build_model(arguments.model, arguments.init_from and str(released(arguments.init_from)))


@pytest.mark.slow
def test_all_steps_of_the_short_studies_fit_each_other(load, tmp_path, monkeypatch):
    """Both studies with trainings of two steps on tiny pictures."""
    windows, damages = load("windows"), load("damages")
    for folder, count in (("bsds500/train", 2), ("bsds500/test", 2), ("set12", 2), ("set5", 2)):
        write_slopes(tmp_path / "data" / folder, count, (64, 72, 3))
    for path in (tmp_path / "data" / "bsds500").rglob("*.png"):
        Image.open(path).save(path.with_suffix(".jpg"))
    short = {"max_steps": 2, "warmup_steps": 1, "per_device_train_batch_size": 1}
    monkeypatch.setattr(windows, "NETWORK", {**windows.NETWORK, **short, "model.embed_dim": 8})
    monkeypatch.setattr(windows, "TASKS", dict(list(windows.TASKS.items())[:1]))
    monkeypatch.setattr(windows, "SEEDS", (0,))
    windows.compute(windows.find_data(tmp_path / "data"), tmp_path / "work", tmp_path / "results")
    assert len(re.findall(r"\| \d+\.\d\d \| \d+ \|", windows.make_table(tmp_path / "results"))) == 12
    monkeypatch.setattr(damages, "SHORT", {**damages.SHORT, **short})
    names = ("demosaicking", "× 4")
    chosen = {
        name: damage._replace(values={**damage.values, **short})
        for name, damage in damages.DAMAGES.items()
        if name in names
    }
    monkeypatch.setattr(damages, "DAMAGES", chosen)
    damages.compute(tmp_path / "data", tmp_path / "work", tmp_path / "results")
    assert damages.make_table(tmp_path / "results").count("\n") == 3
    assert (tmp_path / "results" / "damages.png").stat().st_size > 10_000

    def fail(*words):
        raise AssertionError("trained twice")

    monkeypatch.setattr(damages, "train_run", fail)
    damages.compute(tmp_path / "data", tmp_path / "work", tmp_path / "results")


def test_readme_holds_the_results_of_the_short_studies(load):
    text = (STUDY / "README.md").read_text(encoding="utf-8")
    for name in ("windows", "damages"):
        assert f"<!-- {name} -->\n{load(name).make_table()}\n<!-- /{name} -->" in text
    # No folder of a machine is in what is committed.
    for path in (STUDY / "results" / "steps").glob("*.json"):
        assert not re.search(r'"/\w+', path.read_text(encoding="utf-8")), path
