"""The study: valid settings, scores of an evaluation, tables of the README; and pairs for deblurring and weather: from
a seed, damaged, and never written over others."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hf_ext.training import build_task
from tests.kit.studies import EXAMPLES, fill_readme, module_loader, write_photos

STUDY = EXAMPLES / "semanir"
load = module_loader(STUDY)
TINY = {"model.embed_dim": 8, "model.depths": [1, 2], "model.num_heads": [1, 2], "model.window_size": 4}
TINY |= {"model.top_k": 8, "task.patch_size": 16}


def test_every_run_has_valid_settings(load):
    study = load("study")
    made = study.Study(Path("data"), Path("work"))
    for changes in study.CANDIDATES.values():
        arguments = study.run_arguments(made.values(made.source("set12", "train"), **changes))
        model = build_task(arguments).build_model(arguments.model, None)
        assert sum(value.numel() for value in model.parameters()) > 50_000


def test_scores_against_k_and_classical_results(load, tmp_path):
    study, measuring = load("study"), load("measuring")
    for part in ("train", "test"):
        write_photos(tmp_path / "photos" / part, range(2), (28, 36))
    train, test = ({"path": str(tmp_path / "photos"), "split": split} for split in ("train", "test"))
    values = {"data": {"train": train, "eval": test}, **TINY}
    arguments = study.run_arguments(values)
    task = build_task(arguments)
    network = task.build_model(arguments.model, None)
    task.save_model(network, network.state_dict(), tmp_path / "snapshot")
    rows = measuring.sweep(tmp_path / "snapshot", values, [2, 16], repeats=1)
    assert [row["top_k"] for row in rows] == [2, 16]
    whole = measuring.score(tmp_path / "snapshot", {**values, "task.top_k": 16}, test)
    assert rows[1]["psnr"] == pytest.approx(whole["psnr"])
    assert measuring.input_psnr(values) == pytest.approx(20.2, abs=1)
    pairs = measuring.pairs(values, test, 20)
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


def write_scenes(folder, count=3, shape=(40, 52, 3)):
    """Pictures with a slope of light and some grain."""
    folder.mkdir(parents=True)
    for index in range(count):
        slope = np.linspace(40, 200, shape[1])[None, :, None] + np.zeros(shape)
        pixels = slope + np.random.default_rng(index).normal(0, 10, shape)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{index}.png")
    return folder


def read_pairs(folder):
    names = sorted(path.name for path in (folder / "hq").iterdir())
    return [[np.asarray(Image.open(folder / part / name)).astype(int) for part in ("lq", "hq")] for name in names]


def test_pairs_are_made_from_a_seed_and_every_damage_damages(load, tmp_path):
    make_pairs = load("make_pairs")
    photos = sorted(write_scenes(tmp_path / "photos", shape=(160, 200, 3)).iterdir())
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


def test_photographs_of_one_name_are_as_many_pairs_and_stand_upright(load, tmp_path):
    places = ("1/a.png", "2/a.png", "2/a.jpg", "2/1-a-0.png", "turned.jpg")
    (turned := Image.Exif())[0x112] = 6
    for index, name in enumerate(places):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        picture = Image.new("RGB", (40, 24), (index * 40,) * 3)
        picture.save(tmp_path / name, exif=turned if "turned" in name else Image.Exif())
    load("make_pairs").make_pairs([tmp_path / name for name in places], tmp_path / "out", 0)
    for kind in ("deblur", "weather"):
        clean = [pair[1] for pair in read_pairs(tmp_path / "out" / kind)]
        assert sorted(round(pixels.mean() / 40) for pixels in clean) == [*range(5)]
        assert [pixels.shape[:2] for pixels in clean if pixels.mean() > 140] == [(40, 24)]


def test_what_a_shaking_camera_sees(load):
    make_pairs, generator = load("make_pairs"), np.random.default_rng(0)
    even = np.full((30, 40, 3), 0.4)
    np.testing.assert_allclose(make_pairs.shake(even, generator), even, atol=1e-12)
    # One bright point becomes the path; light is neither lost nor made.
    point = np.zeros((61, 61, 1))
    point[30, 30] = 1
    seen = make_pairs.shake(point, generator) ** make_pairs.GAMMA
    assert seen.sum() == pytest.approx(1) and np.count_nonzero(seen) > 8
    rows, columns = np.nonzero(seen[..., 0])
    assert max(np.ptp(rows), np.ptp(columns)) <= 16


def test_small_kernels_are_convolved_as_defined(load):
    generator = np.random.default_rng(0)
    image, kernel = generator.random((6, 7, 2)), generator.random((3, 5))
    padded = np.pad(image, ((1, 1), (2, 2), (0, 0)), "symmetric")
    wanted = [[np.einsum("rc,rcd->d", kernel, padded[y : y + 3, x : x + 5]) for x in range(7)] for y in range(6)]
    np.testing.assert_allclose(load("make_pairs").convolve(image, kernel), wanted)


def test_pairs_are_not_made_over_others_or_of_nothing(load, monkeypatch, tmp_path, capsys):
    make_pairs, photos = load("make_pairs"), write_scenes(tmp_path / "photos", 1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.png").write_text("no picture")
    for source, out, said in (
        (photos, "out", ""),
        (photos, "out", "exist: give another OUT"),
        (tmp_path / "empty", "new", "holds no pictures"),
        (tmp_path / "text", "new", "a.png is not a picture"),
    ):
        monkeypatch.setattr(sys, "argv", ["make_pairs.py", str(source), str(tmp_path / out)])
        with pytest.raises(SystemExit) if said else nullcontext() as ended:
            make_pairs.main()
        assert said in f"{capsys.readouterr().err} {ended and ended.value}"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["deblur", "weather"]
    assert not list(tmp_path.glob("new/*"))
