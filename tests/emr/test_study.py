"""The study's parts: a tiny one runs and goes on, trainings have valid settings, the README holds its results."""

import dataclasses
import json
import statistics

import datasets
import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from hf_ext.training.arguments import read_yaml
from tests.kit.studies import EXAMPLES, fill_readme, module_loader, write_tweets

STUDY = EXAMPLES / "emr"
load = module_loader(STUDY)


@pytest.fixture
def shared(tmp_path):
    """The folder of data in small: two recordings of two digits, vehicles, and one task of tweets."""
    random = np.random.default_rng(0)
    folder = tmp_path / "shared"
    (folder / "fsdd").mkdir(parents=True)
    for digit in range(2):
        for number in (0, 5):
            samples = random.integers(-9000, 9000, 2000, dtype=np.int16)
            soundfile.write(folder / "fsdd" / f"{digit}_someone_{number}.wav", samples, 8000)
    (folder / "cifar10").mkdir()
    for part in ("train", "test"):
        pictures = [Image.fromarray(random.integers(256, size=(32, 32, 3), dtype=np.uint8)) for _ in range(10)]
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        rows = datasets.Dataset.from_dict({"image": pictures, "label": range(10)}, features=features)
        rows.to_parquet(str(folder / "cifar10" / f"{part}.parquet"))
    for task in ("irony", "emotion"):
        write_tweets(folder / "tweeteval" / task)
    return folder


def test_the_data_of_texts_and_tweets(load, shared, tmp_path):
    sets = load("sets")
    sets.write_texts(shared, tmp_path / "texts")
    for domain in sets.DOMAINS:
        assert len((tmp_path / "texts" / domain / "test.jsonl").read_text().splitlines()) == sets.TEST_TEXTS
    sums = json.loads((tmp_path / "texts" / "sums" / "train.jsonl").read_text().splitlines()[0])["text"]
    first, total = sums.splitlines()[0].split("=")
    assert sum(map(int, first.split("+"))) == int(total)
    tweets = load("tweets")
    tweets.write_task(shared / "tweeteval", "irony", tmp_path / "irony")
    counts = [len((tmp_path / "irony" / f"{part}.jsonl").read_text().splitlines()) for part in ("train", "test")]
    assert counts == [8, 4]
    assert json.loads((tmp_path / "irony" / "labels.json").read_text()) == ["calm", "loud"]


def test_every_recipe_is_valid(load):
    studies = load("study")
    for kit in studies.SETS.values():
        arguments = studies.read_arguments(kit.recipe, {"model": {}, **kit.fine_tuning})
        assert arguments.max_steps > arguments.warmup_steps
        task = studies.build(kit.task, arguments.task, "task")
        if kit.ready_base is None:
            with torch.device("meta"):
                model = task.build_model(studies.read_arguments(kit.recipe, {}).model, None)
            assert sum(parameter.numel() for parameter in model.parameters()) > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pictures", "texts"])
def test_a_tiny_study_runs_and_goes_on(load, shared, tmp_path, monkeypatch, name):
    study, sets, tables = (load(module) for module in ("study", "sets", "tables"))
    kit = study.SETS[name]
    learning = kit.learning and {**kit.learning, "steps": 2}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(read_yaml(kit.recipe) | {"max_steps": 2, "warmup_steps": 0}))
    kit = dataclasses.replace(kit, tasks=kit.tasks[-2:], learning=learning, recipe=recipe, fine_tuning={})
    monkeypatch.setitem(study.SETS, name, kit)
    sizes = {"SEEDS": (study, (0, 1)), "STATISTICS_EXAMPLES": (study, 2), "TRAIN_TEXTS": (sets, 4)}
    for constant, (module, value) in (sizes | {"TEST_TEXTS": (sets, 2)}).items():
        monkeypatch.setattr(module, constant, value)
    folder = tmp_path / "results" / name
    study.main(name, shared, tmp_path / "work", tmp_path / "results")
    result = json.loads((folder / "study.json").read_text())
    rows = result["seeds"]["1"]["rows"]
    assert rows.keys() == tables.NAMES.keys() - (set() if kit.learning else {"adamerging"})
    assert all(row["scores"].keys() == set(kit.tasks) for row in rows.values())
    assert rows["onebit"]["bytes"] < rows["emr"]["bytes"] < rows["individual"]["bytes"]
    # the base is no merge, and merges are none of the models
    assert rows["base"]["scores"] != rows["individual"]["scores"] or name == "pictures"
    measures = tables.task_measures(result, kit.tasks[0])
    assert 0 < measures["error_bit"] < 1 and 0 <= measures["conflict"] <= 1
    # Nothing is learned or measured twice.
    for called in ("learn_weights", "save_statistics"):
        monkeypatch.setattr(study, called, None)
    study.main(name, shared, tmp_path / "work", tmp_path / "results")
    assert json.loads((folder / "study.json").read_text()) == result


def test_the_committed_results_are_drawn_and_those_of_the_readme(load, tmp_path):
    tables = load("tables")
    results = tables.read_results(STUDY / "results")
    assert fill_readme(tables, results, tmp_path) == (STUDY / "README.md").read_text()
    tables.draw_scores(results, tmp_path / "scores.png")
    tables.draw_curve(results, tmp_path / "curve.png")
    for path in tmp_path.glob("*.png"):
        with Image.open(path) as picture:
            assert min(picture.size) > 200
    for name, result in results.items():
        means = [seed["rows"]["emr"]["mean"] for seed in result["seeds"].values()]
        factor = 100 if result["greater_is_better"] else 1
        wanted = (factor * statistics.mean(means), factor * statistics.stdev(means))
        found = tables.over_seeds(result, lambda seed: seed["rows"]["emr"]["mean"])
        assert len(means) == 3 and found == pytest.approx(wanted), name
