"""The study's parts: its settings are valid, scores are those of an evaluation, tables fit the README."""

import json
from pathlib import Path

import pytest

from hf_ext.training import build_task
from tests.kit.studies import EXAMPLES, fill_readme, module_loader, write_photos

STUDY = EXAMPLES / "semanir"
load = module_loader(STUDY)
TINY = {
    "model.embed_dim": 8,
    "model.depths": [1, 2],
    "model.num_heads": [1, 2],
    "model.window_size": 4,
    "model.top_k": 8,
    "task.patch_size": 16,
}


@pytest.fixture
def photos(tmp_path) -> dict[str, dict[str, str]]:
    """Data sections of a run, two pictures each."""
    for part in ("train", "test"):
        write_photos(tmp_path / "photos" / part, range(2), (28, 36))
    return {
        part: {"path": str(tmp_path / "photos"), "split": split}
        for part, split in (("train", "train"), ("eval", "test"))
    }


def test_every_run_has_valid_settings(load):
    study = load("study")
    made = study.Study(Path("data"), Path("work"))
    for changes in study.CANDIDATES.values():
        arguments = study.run_arguments(made.values(made.source("set12", "train"), **changes))
        model = build_task(arguments).build_model(arguments.model, None)
        assert sum(value.numel() for value in model.parameters()) > 50_000


def test_scores_against_k_and_classical_results(load, photos, tmp_path):
    study, measuring = load("study"), load("measuring")
    values = {"data": photos, **TINY}
    arguments = study.run_arguments(values)
    task = build_task(arguments)
    network = task.build_model(arguments.model, None)
    task.save_model(network, network.state_dict(), tmp_path / "snapshot")
    rows = measuring.sweep(tmp_path / "snapshot", values, [2, 16], repeats=1)
    assert [row["top_k"] for row in rows] == [2, 16]
    whole = measuring.score(tmp_path / "snapshot", {**values, "task.top_k": 16}, photos["eval"])
    assert rows[1]["psnr"] == pytest.approx(whole["psnr"])
    assert measuring.input_psnr(values) == pytest.approx(20.2, abs=1)
    pairs = measuring.pairs(values, photos["eval"], 20)
    assert pairs[0][0].shape == (20, 20, 1)
    assert measuring.gray_psnr(*pairs[0]) < measuring.gray_psnr(measuring.smooth(pairs[0][0], 0.01), pairs[0][1]) + 1
    measuring.draw_pictures(tmp_path / "snapshot", values, 0.1, [0, 7], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


@pytest.mark.slow
def test_all_steps_fit_each_other(load, tmp_path, monkeypatch):
    """The whole study on tiny pictures and networks, with models that are saved as they are initialised."""
    study, measuring, tables = (load(name) for name in ("study", "measuring", "tables"))
    committed = json.loads((STUDY / "results" / "study.json").read_text())
    for folder, count in (("bsds500/train", 2), ("bsds500/test", 11), ("set12", 2), ("bsd68", 2)):
        write_photos(tmp_path / "data" / folder, range(count), (28, 36, 3))
    trained = []

    def train(run, values):
        trained.append((run.name, values["max_steps"]))
        arguments = study.run_arguments(values)
        task = build_task(arguments)
        model = task.build_model(arguments.model, None)
        task.save_model(model, model.state_dict(), run / "snapshot")
        return {**committed["headline"], "steps": values["max_steps"]}

    monkeypatch.setattr(study, "train", train)
    monkeypatch.setattr(study, "CANDIDATES", {"tiny": TINY})
    monkeypatch.setattr(measuring, "TUNING_PHOTOS", 2)
    result = study.compute(study.Study(tmp_path / "data", tmp_path / "work"))
    assert trained == [("candidate-0", 116), ("headline", 8208), ("fixed-k", 313), ("random-k", 313)]
    assert [row["top_k"] for row in result["sweep"]["curves"]["random"]] == [1, 2, 4, 8, 16]
    assert result["total_variation"]["weight"] in measuring.WEIGHTS
    assert set(tables.blocks({**committed, **result})) == set(tables.blocks(committed))


def test_readme_holds_the_committed_results(load, tmp_path):
    tables, result = load("tables"), json.loads((STUDY / "results" / "study.json").read_text())
    assert fill_readme(tables, result, tmp_path) == (STUDY / "README.md").read_text()
    for draw in (tables.draw_curve, tables.draw_sweep):
        draw(result, tmp_path / "curves.png")
        assert (tmp_path / "curves.png").stat().st_size > 10_000
