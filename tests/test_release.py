"""The making of released models: training, testing, and the end of a run."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from hf_ext import EMRModel
from hf_ext.emr.artifact import verify_artifact
from hf_ext.files import write_json
from hf_ext.hub import released
from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration
from hf_ext.training import TrainingArguments, train
from hf_ext.training.methods import build_task, read_arguments
from tests.kit.studies import EXAMPLES, module_loader, write_photos

load = module_loader(EXAMPLES / "released")
SCRIPTS = [path for path in (EXAMPLES / "released").iterdir() if path.suffix in (".py", ".yaml")]
FIRST = EXAMPLES / "released" / "reached" / "denoise-color-first"
# Of the step that denoise-color goes on from.
HOURS = json.loads((FIRST / "training.json").read_text())["released"]["core_hours"]
MODEL = {"architecture": "columnar", "embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 4, "top_k": 8}


def run_of(name: str, steps: int = 1) -> dict:
    recipe = {"method": "semanir", "output_dir": f"runs/{name}", "data": {"train": {"path": "data/photos/train"}}}
    recipe |= {"task": {"patch_size": 8}, "model": MODEL, "max_steps": steps, "per_device_train_batch_size": 1}
    return {**recipe, "report_to": "none"}


def test_no_photograph_is_in_two_sets_and_no_recording_of_the_official_test_trains(load):
    data = load("data")
    train, test = ([Path(f"{part}/{number}.jpg") for number in range(200)] for part in ("train", "test"))
    sets = data.split_photos(train, test)
    assert sets == data.split_photos(train[::-1], test[::-1])
    assert sorted(file for part in sets.values() for file in part) == sorted([*train, *test])
    assert len(sets["validation"]) == 8 and len(sets["test"]) == 68 and not set(sets["test"]) & set(train)
    files = [Path(f"{digit}_ann_{number}.wav") for digit in range(10) for number in range(50)]
    sets = data.split_digits(files, 50)
    assert {name: len(part) for name, part in sets.items()} == {"train": 440, "validation": 10, "test": 50}
    assert {file.stem.rpartition("_")[2] for file in sets["test"]} == set("01234")


def test_halves_match_their_pictures(load, tmp_path):
    pixels = np.random.default_rng(0).integers(256, size=(33, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    load("data").halve_pictures([tmp_path / "a.png"], tmp_path, range(12))
    for path in (tmp_path / "hq").iterdir():
        with Image.open(path) as whole, Image.open(tmp_path / "lq" / path.name) as half:
            assert whole.size == (40, 32) and half.size == (20, 16)
            # The odd row is the first or the last.
            assert any(np.array_equal(np.asarray(whole), part) for part in (pixels[:-1], pixels[1:]))
            means = np.asarray(whole, float).mean((0, 1)) - np.asarray(half, float).mean((0, 1))
            assert abs(means).max() < 8
    assert len([*(tmp_path / "lq").iterdir()]) == 12


@pytest.mark.parametrize("run", ["deblur", "derain"])
@pytest.mark.parametrize("begun", [False, True])
def test_a_committed_step_begins_a_run(load, run, begun, tmp_path):
    """Also beside a run of the step's own name, which has no snapshot yet."""
    runs = load("runs")
    (tmp_path / "runs" / (f"{run}-first" if begun else "denoise-color")).mkdir(parents=True)
    (step,) = (word for word in runs.find_words(tmp_path, run) if word.startswith("--init_from="))
    assert step == f"--init_from={runs.REACHED / f'{run}-first'}"
    assert (runs.REACHED / f"{run}-first" / "model.safetensors").is_file()
    assert runs.count_core_hours(tmp_path, run) > 1
    assert begun or not any("init_from" in word for word in runs.find_words(tmp_path, "restore-tasks-jpeg"))


def test_every_recipe_has_a_run(load):
    runs = load("runs")
    recipes = {path.stem for path in (EXAMPLES / "released").glob("*.yaml")}
    assert {runs.find_recipe(run)[0].stem for run in runs.RUNS} == recipes
    # The source of a run is an earlier run, or a committed step.
    names = list(runs.RUNS)
    steps = [path.name for path in runs.REACHED.iterdir()]
    for name, source in runs.RUNS.items():
        assert source is None or source in steps or source in names[: names.index(name)], name


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    """The leavings of train.py: photographs for testing, and a run that has taken a step."""
    for part, count in (("train", 2), ("validation", 1), ("test", 3)):
        write_photos(tmp_path / "data" / "photos" / part, range(count), (16, 20, 3))
    monkeypatch.chdir(tmp_path)
    arguments = TrainingArguments(**run_of("denoise-color"))
    train(build_task(arguments), arguments)
    set_hours(tmp_path, "denoise-color", 1.5)
    return tmp_path


def set_hours(work, name, hours):
    """Lets a run of a moment have taken hours."""
    path = work / "runs" / name / "snapshot" / "training.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "seconds": 3600 * hours}))


@pytest.fixture
def load_copy(load, tmp_path, monkeypatch):
    """The same scripts in a tree of their own, into which they write what is committed."""
    folder = tmp_path / "examples" / "released"
    folder.mkdir(parents=True)
    for path in SCRIPTS:
        shutil.copy(path, folder)
    shutil.copytree(FIRST, folder / "reached" / FIRST.name)
    shutil.copy(EXAMPLES / "experiments.py", tmp_path / "examples")
    monkeypatch.syspath_prepend(folder)
    (tmp_path / "model_cards").mkdir()
    return load


def test_a_run_becomes_a_folder_that_says_what_it_measured(load_copy, work, released_models):
    release = load_copy("release")
    release.RELEASES["denoise-color"] = dataclasses.replace(
        release.RELEASES["denoise-color"], shown_examples=(0, 1, 2)
    )
    folder = release.make("denoise-color", work)
    wanted = {"README.md", "before_after.png", "config.json", "eval.json", "model.safetensors", "training.json"}
    assert wanted <= {path.name for path in folder.iterdir()} and not [*folder.rglob("*.py")]
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.float16}
    assert folder.parent == released_models
    (model,) = released.list_released()
    assert model.name == "denoise-color"
    loaded = SemanIRForImageRestoration.from_pretrained(folder)
    assert loaded.dtype == torch.float32 and loaded.config.embed_dim == SemanIRConfig(**MODEL).embed_dim
    training = json.loads((folder / "training.json").read_text())
    assert training["check"]["psnr"] == pytest.approx(release.restore_cat(folder), abs=0.01)
    told = training["released"]
    results = json.loads((folder / "eval.json").read_text())["results"]
    shown = {row["metric"]: row["value"] for row in results}
    assert told["core_hours"] == pytest.approx(1.5 + HOURS)
    assert f"{shown['psnr_gaussian_noise_25']:.2f}" in told["scores"]
    assert "(input " in told["scores"] and told["parameters"] == sum(map(torch.numel, loaded.state_dict().values()))
    assert f"{shown['psnr_gaussian_noise_25']:.2f}" in (folder / "README.md").read_text()
    # Without the run the released weights are measured anew.
    before = (folder / "model.safetensors").read_bytes()
    shutil.rmtree(work / "runs" / "denoise-color")
    assert release.make("denoise-color", work) == folder
    assert (folder / "model.safetensors").read_bytes() == before
    assert json.loads((folder / "training.json").read_text())["released"] == told


def test_a_run_starts_from_the_run_before_it_or_from_what_was_released(load, work):
    runs, name = load("runs"), "restore-tasks-jpeg"
    recipe, words = runs.find_recipe(name)
    assert runs.find_words(work, name) == [str(recipe), *words] and runs.count_core_hours(work, name) == 1.5 + HOURS
    (elsewhere := work / "elsewhere").mkdir()
    start = runs.RELEASED / "denoise-color"
    assert runs.find_words(elsewhere, name) == [str(recipe), *words, f"--init_from={start}"]
    told = json.loads((start / "training.json").read_text())["released"]
    assert runs.count_core_hours(elsewhere, name) == told["core_hours"]


def test_training_goes_on_where_it_stopped(load, work, monkeypatch, capfd):
    """One run after the other; minutes that are over, a run that waits, one that fails, a signal."""
    train, runs = load("train"), load("runs")
    (recipes := work / "recipes").mkdir()
    for name, steps in (("first", 9), ("second", 2), ("third", 1)):
        write_json(recipes / f"{name}.yaml", run_of(name, steps))
    monkeypatch.setattr(runs, "RECIPES", recipes)
    for module in (runs, train):
        monkeypatch.setattr(module, "RUNS", {"first": None, "second": None, "third": "first"})
    # The first uses up its minutes, and the third waits for it.
    assert train.work_through(work, ["first", "third"], 1e-9) == 0
    reached = runs.read_report(work, "first")["steps"]
    assert 1 <= reached < 9 and "third waits for first" in capfd.readouterr().out
    assert train.work_through(work, ["first"], 1e-9) == 0 and reached < runs.read_report(work, "first")["steps"] < 9
    # Enough for the rest.
    assert train.work_through(work, ["first", "second", "third"], 0) == 0
    assert all(runs.is_done(work, name) for name in train.RUNS)
    # A signal ends all; a failure only its own run.
    codes = iter([75, 2, 0])
    monkeypatch.setattr(train, "is_done", lambda work, name: False)
    monkeypatch.setattr(train, "train", lambda words: next(codes))
    assert train.work_through(work, ["second", "first"], 0) == 75
    assert train.work_through(work, ["second", "first"], 0) == 1 and next(codes, None) is None


def test_the_fine_tunes_of_restore_tasks_become_one_merge_beside_its_base(load_copy, work, released_models):
    runs, release = load_copy("runs"), load_copy("release")
    release.RELEASES["denoise-color"] = dataclasses.replace(
        release.RELEASES["denoise-color"],
        shown_examples=(0,),
        tests={"3 pictures": load_copy("releases").on("data/photos/test")},
    )
    base = release.make("denoise-color", work)
    for task in runs.RESTORE_TASKS:
        recipe, *words = runs.find_words(work, f"restore-tasks-{task}")
        short = ["--max_steps=1", "--task.patch_size=8", "--per_device_train_batch_size=1", f"--init_from={base}"]
        arguments = read_arguments(recipe, [*words, *short, "--data.eval=null"])
        train(build_task(arguments), arguments)
        set_hours(work, f"restore-tasks-{task}", 0.1)
    folder = release.make("restore-tasks", work)
    told = json.loads((folder / "training.json").read_text())["released"]
    assert told["core_hours"] == pytest.approx(1.9 + HOURS)
    assert told["steps"] == 4 and told["scores"].count("fine-tune") == 4
    assert {model.name for model in released.list_released()} == {"denoise-color", "restore-tasks"}
    # It finds its base beside it, wherever both lie.
    shutil.copytree(released_models, moved := work / "moved")
    assert not [*moved.rglob("*.py")] and not verify_artifact(moved / "restore-tasks").wrong
    for task in runs.RESTORE_TASKS:
        with torch.no_grad():
            model = EMRModel.from_pretrained(moved / "restore-tasks", task)
            assert torch.isfinite(model(pixel_values=torch.rand(1, 3, 8, 8)).reconstruction).all()
    assert load_copy("release").restore_cat(moved / "restore-tasks", "noise") == pytest.approx(
        json.loads((folder / "training.json").read_text())["check"]["psnr"], abs=0.01
    )


NAMES = [model.name for model in released.list_released()]


# Drawing takes as long as all restorers together.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "cifar10" else name for name in NAMES]
)
def test_a_released_model_answers_as_it_did_when_it_was_released(load, name):
    folder = released.released(name)
    told = json.loads((folder / "training.json").read_text(encoding="utf-8"))["check"]
    if "psnr" in told:
        assert load("release").restore_cat(folder, told.get("task")) == pytest.approx(told["psnr"], abs=0.05)
    elif "means" in told:
        # In a process of its own: it imports modules of the DiT's study by their bare names.
        code = "import sys, json, pathlib, drawing; print(json.dumps(drawing.draw_again(pathlib.Path(sys.argv[1]))))"
        printed = subprocess.check_output([sys.executable, "-c", code, folder], cwd=EXAMPLES / "released", text=True)
        assert json.loads(printed.splitlines()[-1]) == pytest.approx(told["means"], abs=0.02)
    else:
        assert load("release").hear_tones(folder) == pytest.approx(told["logits"], abs=0.05)


@pytest.mark.parametrize("channels", [1, 3])
def test_gates_tell_what_a_restorer_harms(load, channels, monkeypatch):
    gates = load("gates")
    monkeypatch.setattr(gates, "LEVELS", (0, 128, 255))
    model = SemanIRForImageRestoration(SemanIRConfig(**MODEL, num_channels=channels)).eval()
    head = [module for module in model.modules() if isinstance(module, torch.nn.Conv2d)][-1]
    torch.nn.init.zeros_(head.weight)
    # What changes nothing leaves clipped blacks lifted.
    for bias, missed in ((0, {"clipped"}), (3, {"flat", "clipped"}), (20, {"flat", "text", "clipped"})):
        torch.nn.init.constant_(head.bias, bias / 255)
        rows = [(name, *row) for name in ("flat", "text", "clipped") for row in gates.GATES[name](model)]
        assert all(np.isfinite(value) for _, _, value, _ in rows)
        assert {name for name, _, value, limit in rows if value > limit} == missed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["denoise-gray", "denoise-color", "jpeg-color", "derain", "deblur"])
def test_released_restorers_keep_text_flat_colours_and_clipped_blacks(load, name):
    """The worst single pixel of a flat colour misses its gate; docs/benchmarks.md says by how much."""
    model, gates = SemanIRForImageRestoration.from_pretrained(released.released(name)).eval(), load("gates")
    is_grey = name == "denoise-gray"
    rows = [row for gate in ("flat", "text", *(["clipped"] if is_grey else [])) for row in gates.GATES[gate](model)]
    missed = {words for words, value, limit in rows if value > limit}
    assert missed <= (set() if is_grey else {"flat colours, worst pixel"})


@pytest.mark.parametrize("row", [0, 4, 5])
def test_the_gallery_shows_what_the_models_do(load, row):
    gallery = load("gallery")
    told = json.loads((gallery.HERE / "gallery.json").read_text(encoding="utf-8"))[row]
    found = gallery.restore_row(*gallery.ROWS[row])
    pictures = found.pop("pictures")
    words = [{name: value for name, value in one.items() if not isinstance(value, float)} for one in (found, told)]
    assert words[0] == words[1]
    for name in ("input", "psnr", "best_total_variation"):
        assert found[name] == pytest.approx(told[name], abs=0.05), name
    assert gallery.draw([{**found, "pictures": pictures}]).size == (780, 288)


def test_the_figure_of_the_readme_has_the_numbers_of_the_study_and_a_panel_for_each_method(load):
    front = load("front")
    rows = {name: score for name, score, _ in front.read_merges()}
    documentation = (EXAMPLES.parent / "docs" / "emr.md").read_text(encoding="utf-8")
    assert f"{rows['six fine-tunes'] - rows['EMR-Merging']:.1f} points on six picture tasks" in documentation
    panels = front.draw().subfigs
    told = "\n".join(panel.get_suptitle() for panel in panels)
    methods = ("SemanIR", "EMR-Merging", "Disentangled DiT", "MRConv")
    assert len(panels) == 4 and all(method in told for method in methods)
    # The branches that are drawn add up to the merged kernel.
    lines = [{axis.get_label(): axis.get_ydata() for axis in panel.get_lines()} for panel in panels[3].axes]
    total = np.zeros(len(lines[1]["merged"]))
    for values in lines[0].values():
        total[: len(values)] += values
    np.testing.assert_allclose(total, lines[1]["merged"], atol=1e-6)


def test_pairs_are_made_for_the_runs_that_read_them(load, tmp_path):
    data = load("data")
    photos = {part: [tmp_path / f"{part}.png"] for part in ("train", "validation", "test")}
    for number, (file,) in enumerate(photos.values()):
        Image.fromarray(np.full((24, 32, 3), 60 * number + 40, np.uint8)).save(file)
    data.prepare_pairs(photos, tmp_path / "data", ["cifar10"])
    assert not (tmp_path / "data").exists()
    data.MADE = 2
    data.prepare_pairs(photos, tmp_path / "data", ["derain"])
    count = {part: len(list((tmp_path / "data" / "derain" / part / "lq").iterdir())) for part in photos}
    assert count == {"train": 3 * data.REPEATS, "validation": 1, "test": 1}
    # Each repeat has other rain, and all have the same clean picture.
    files = sorted((tmp_path / "data" / "derain" / "train").glob("*/train-*.png"))
    content = {side: {file.read_bytes() for file in files if file.parent.name == side} for side in ("lq", "hq")}
    assert (len(content["lq"]), len(content["hq"])) == (data.REPEATS, 1)
    assert not (tmp_path / "data" / "deblur").exists()
