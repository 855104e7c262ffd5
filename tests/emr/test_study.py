"""The study's parts: trainings have valid settings, pictures are drawn, the README holds the committed results."""

import json

import numpy as np
from PIL import Image

from tests.study_testing import EXAMPLES, fill_readme, module_loader, write_tweets

STUDY = EXAMPLES / "emr"
load = module_loader(STUDY)


def test_every_training_has_valid_settings(load, tmp_path, monkeypatch):
    finetunes, restorers, studies = (load(name) for name in ("finetunes", "restorers", "studies"))
    launched = {}

    def launch(run, script, recipe, values):
        assert script[0].is_file()
        launched[run.name] = studies.read_arguments(recipe, values)

    # Nothing is trained or downloaded, and few pictures are written.
    stand_ins = [(finetunes, "launch", launch), (finetunes, "copy_minilm", lambda folder: folder)]
    for module, name, value in [*stand_ins, (restorers, "launch", launch), (restorers, "TRAIN_TILES", 20)]:
        monkeypatch.setattr(module, name, value)
    write_tweets(tmp_path / "tweeteval" / "irony")
    assert finetunes.fine_tune("irony", tmp_path / "tweeteval", tmp_path) == tmp_path / "runs" / "irony" / "snapshot"
    irony = launched.pop("irony")
    assert irony.task["labels"] == ["calm", "loud"] and irony.max_steps == 1
    assert irony.init_from == str(tmp_path / "base" / "all-MiniLM-L6-v2")

    for part in ("train", "test"):
        (tmp_path / "bsds" / part).mkdir(parents=True)
        for index in range(restorers.TEST_PHOTOS):
            pixels = np.random.default_rng(index).integers(256, size=(260, 258, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "bsds" / part / f"{index}.jpg")
    restorers.write_photos(tmp_path / "bsds", tmp_path)
    assert len(list((tmp_path / "jpeg-train" / "lq").iterdir())) == 20
    snapshots = {name: restorers.train_restorer(name, tmp_path) for name in (None, *restorers.RESTORERS)}
    assert snapshots[None] == tmp_path / "runs" / "restorer-base" / "snapshot"
    base = launched.pop("restorer-base")
    assert base.init_from is None and base.max_steps == restorers.BASE_STEPS
    assert {name: arguments.init_from for name, arguments in launched.items()} == dict.fromkeys(
        (f"restorer-{name}" for name in restorers.RESTORERS), str(snapshots[None])
    )
    assert launched["restorer-sigma50"].task["degradation"]["sigma"] == 50
    assert launched["restorer-jpeg"].task["degradation"] == {"kind": "paired"}


def test_pictures_of_a_result(load, tmp_path):
    tables = load("tables")
    curve = {str(count): {"global": 0.5, "average": 0.4, "bytes": 1, "seconds": 1.0} for count in (2, 3)}
    tables.draw_curve(curve, {"2": 0.75, "3": 0.7}, tmp_path / "results" / "curve.png")
    places = {"individual": [[0.0, 1.0], [2.0, 3.0]], "elect": [[1.0, 0.0], [3.0, 2.0]]}
    features = {"task": "emotion", "labels": [0, 1], "places": places}
    tables.draw_features(features, tmp_path / "results" / "features.png")
    for name in ("curve", "features"):
        with Image.open(tmp_path / "results" / f"{name}.png") as picture:
            assert min(picture.size) > 300


def test_readme_holds_the_committed_results(load, tmp_path):
    result = json.loads((STUDY / "results" / "study.json").read_text())
    assert fill_readme(load("tables"), result, tmp_path) == (STUDY / "README.md").read_text()
