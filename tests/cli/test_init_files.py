"""hf-ext init on pictures and sounds as they lie: pairs, captions, tables beside them, archives, broken files."""

import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
import soundfile
import yaml
from PIL import Image

from hf_ext.data.opening import open_source
from hf_ext.data.roles import Hints
from hf_ext.data.source import DataSource
from hf_ext.data.survey import look_at
from hf_ext.data.writing import write_recipe
from hf_ext.errors import DataError
from tests.cli.init_testing import SHORT, measured, names_of, train
from tests.cli.init_testing import in_a_folder_of_its_own as in_a_folder_of_its_own
from tests.disentangled_dit.pipeline_testing import make_text_pipeline
from tests.kit.command_line import run
from tests.kit.own_data import write_files, write_pictures, write_sounds
from tests.kit.refusals import refused

# A tiny SemanIR.
SMALL = ["--model.depths", "[1]", "--model.num_heads", "[2]", "--model.embed_dim", "8", "--task.patch_size", "16"]


def test_pairs_are_enlarged_as_their_sizes_say():
    for side, size in (("lq", (24, 20)), ("hq", (48, 40))):
        write_pictures("pairs", [f"train/{side}", f"test/{side}"], 3, size=size)
    recipe = train("semanir", "pairs", *SMALL)
    assert recipe["model"]["scale"] == 2 and recipe["task"]["degradation"] == {"kind": "paired"}
    # What is for the test is left for the end.
    assert recipe["data"]["eval"]["path"] == "pairs/train" and measured(recipe) == 1
    Path("pairs/test").rename("pairs/val")
    assert look_at("pairs").eval == {"path": "pairs/val"}


@pytest.mark.parametrize("kind", ["txt", "csv"])
def test_pictures_are_drawn_from_captions_beside_them(kind):
    write_pictures("photos", [""], 6, size=(20, 18))
    if kind == "txt":
        write_files("photos", {f"{number}.txt": f"number {number}\n" for number in range(6)})
    else:
        rows = {"picture": range(6), "caption": [f"number {number}" for number in range(6)]}
        pd.DataFrame(rows).to_csv("photos/captions.csv", index=False, sep=";", encoding="utf-16")
    run("init", "dit", "mine", "--data", "photos")
    recipe = yaml.safe_load(Path("mine/dit.yaml").read_text())
    if kind == "csv":
        made = make_text_pipeline()
        for part in (made.text_encoder, made.tokenizer):
            part.save_pretrained("encoder")
        words = ["--task.text_encoder", "encoder", "--model.joint_attention_dim", "null"]
        run("train", "mine/dit.yaml", *SHORT, *words, "--task.samples_per_class", "1", "--task.sample_steps", "2")
    column = recipe["task"].get("text_column", "text")
    assert column == ("caption" if kind == "csv" else "text") and measured(recipe) == 1
    assert all(text.startswith("number ") for text in open_source(DataSource(**recipe["data"]["train"]))[column])


def test_a_table_beside_sounds_says_their_classes():
    write_sounds("sounds", [""], 8, 16000, 0.1)
    soundfile.write("sounds/8.wav", np.zeros((800, 2)), 8000)
    rows = {"clip": range(9), "category": ["dog", "cat"] * 4 + ["cat"], "length": range(9)}
    pd.DataFrame(rows).to_csv("sounds/about.tsv", index=False, sep="\t")
    survey = look_at("sounds")
    assert survey.classes == ["cat", "dog"] and survey.count == 9
    assert any("8000, 16000" in note for note in survey.notes)


def test_layouts_that_can_be_read_in_two_ways_are_refused():
    write_pictures("classes", ["cat/train", "cat/test", "dog/train", "dog/test"], 2)
    write_pictures("lists/images", ["cat", "dog"], 2)
    write_files("lists", {"train.txt": "cat/0\n"})
    for folder in ("classes", "lists"):
        with pytest.raises(DataError):
            look_at(folder, restores=False)


def test_an_archive_of_pictures_is_read_one_of_folders_is_to_be_unpacked():
    write_pictures("photos", [""], 6)
    shutil.make_archive("photos", "zip", "photos")
    survey = look_at("photos.zip")
    assert survey.kind == "pictures" and survey.count == 6 and survey.sides == [32] and survey.eval is not None
    write_pictures("animals", ["cat", "dog"], 3)
    archive = shutil.make_archive("archive", "gztar", "animals")
    with refused(DataError, "archive") as caught:
        look_at(Path(archive).name)
    command = str(caught.value).rpartition(": ")[2].removesuffix(".")
    subprocess.run(shlex.split(command.replace("python", sys.executable, 1)), check=True)
    assert look_at("archive").classes == ["cat", "dog"]
    with zipfile.ZipFile("nameless.zip", "w") as nameless:
        nameless.writestr("a", "words")
        nameless.filelist[0].filename = ""
    with refused(DataError, "nameless.zip"):
        look_at("nameless.zip")


# `datasets` leaves a truncated file open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_broken_files_are_counted_and_train_on_without_them():
    write_pictures("photos", [""], 12, size=(40, 36))
    for name in ("3.png", "4.png"):
        Path("photos", name).write_bytes(Path("photos", name).read_bytes()[:300])
    Path("photos/bad.jpg").write_bytes(b"no picture")
    recipe = train("semanir", "photos", "--per_device_train_batch_size", "1", "--task.patch_size", "16")
    assert "3 of 13" in look_at("photos").left_out[0] and measured(recipe) >= 1
    for seed in range(4):
        part = {**recipe["data"]["eval"], "hold_out_seed": seed}
        assert [picture.size for picture in open_source(DataSource(**part))["image"]]
        assert not {"3.png", "4.png", "bad.jpg"} & names_of(part)


def test_pictures_that_are_missing_or_too_large_do_not_hide_the_others():
    write_pictures("photos", [""], 3)
    # Twice as large as Pillow opens.
    Image.new("1", (20_000, 10_000)).save("photos/panorama.png")
    Path("photos/broken.png").write_bytes(b"no picture")
    assert look_at("photos").about == "5 pictures of 40 x 32 pixels"
    content = {"bytes": Path("photos/0.png").read_bytes(), "path": None}
    pictures = datasets.Features({"image": datasets.Image()})
    for number, values in enumerate(([None, content, None], [None, None])):
        file = f"{number}.parquet"
        datasets.Dataset.from_dict({"image": values}, features=pictures).to_parquet(file)
    assert look_at("0.parquet").about == "3 pictures of 40 x 32 pixels"
    said = run("init", "semanir", "mine", "--data", "1.parquet", code=2).stderr
    assert "none of 2 pictures can be read" in said
    write_pictures("pairs", ["lq", "hq"], 2)
    for part in ("lq", "hq"):
        shutil.copy("photos/panorama.png", f"pairs/{part}/0.png")
    survey = look_at("pairs")
    assert (survey.count, survey.sides, survey.scale) == (2, [32], 1)


@pytest.mark.parametrize("names", [("noisy", "clean"), ("A", "B")])
def test_folders_of_pairs_are_no_classes(names):
    write_pictures("pairs", [*names], 4, size=(24, 20))
    said = run("init", "semanir", "mine", "--data", "pairs").stdout
    assert f"{names[0]}/ becomes {names[1]}/" in said
    recipe = yaml.safe_load(Path("mine/semanir.yaml").read_text())
    assert recipe["task"]["degradation"] == {"kind": "paired"} and recipe["data"]["train"]["pairs"] == [*names]
    assert measured(recipe) == 1
    # Folders A and B are classes to who draws.
    code = 0 if names == ("A", "B") else 2
    refused = run("init", "dit", "drawn", "--data", "pairs", code=code).stderr
    assert (code == 0) == ("the data are pairs" not in refused)


def test_pictures_that_have_no_score_or_more_than_8_bits_are_refused():
    write_pictures("photos", [""], 4, size=(40, 15))
    with refused(DataError, "photos", "15 pixels"):
        write_recipe("semanir", Path("mine"), look_at("photos"), gpu=False)
    for kind in ("uint16", "int32", "float32"):
        Path(kind).mkdir()
        for number in range(4):
            deep = np.arange(400, dtype=kind).reshape(20, 20) + number
            Image.fromarray(deep).save(f"{kind}/{number}.tif")
        for method in ("semanir", "dit") if kind != "uint16" else ("dit",):
            with refused(DataError, kind):
                write_recipe(method, Path("mine"), look_at(kind), gpu=False)


def test_two_folders_become_pairs_by_a_flag():
    write_pictures("photos", ["night", "day"], 3)
    assert look_at("photos").classes == ["day", "night"]
    said = run("init", "semanir", "mine", "--data", "photos", "--pairs", "night,day").stdout
    assert "night/ becomes day/" in said
    assert run("init", "semanir", "other", "--data", "photos", "--pairs", "night,noon", code=2).stderr
    write_pictures("sizes", ["noisy"], 2)
    write_pictures("sizes", ["clean"], 2, size=(50, 32))
    assert "as large" in run("init", "semanir", "other", "--data", "sizes", code=2).stderr


def test_without_released_models_a_restorer_begins_anew(monkeypatch):
    write_pictures("photos", [""], 4, size=(40, 40))
    survey = look_at("photos")
    assert "\ninit_from: denoise-color\n" in write_recipe("semanir", Path("r"), survey, gpu=False)
    write_pictures("grey", [""], 4, mode="L")
    assert "\ninit_from: denoise-gray\n" in write_recipe("semanir", Path("r"), look_at("grey"), gpu=False)
    monkeypatch.setattr("hf_ext.data.writing.list_released", list)
    recipe = write_recipe("semanir", Path("r"), survey, gpu=False)
    assert "init_from" not in recipe and yaml.safe_load(recipe)["model"] == {"preset": "u-shaped-small"}


@pytest.mark.parametrize("name", ["Class Label", "what's it", "low, high", "Größe $x", "-kind"])
def test_the_options_of_an_advice_can_be_pasted(name):
    generator = np.random.default_rng(0)
    columns = {"a": generator.normal(size=40), name: generator.choice(["x", "y"], 40)}
    pd.DataFrame(columns).to_csv("table.csv", index=False)
    advice = run("init", "mrconv", "runs", "--data", "table.csv", code=2).stderr.partition("say which: ")[2]
    run("init", "mrconv", "runs", "--data", "table.csv", *shlex.split(advice.partition(" or --")[0]))
    assert yaml.safe_load(Path("runs/mrconv.yaml").read_text())["task"]["label_names"] == ["x", "y"]


def test_a_column_with_a_comma_can_be_named():
    generator = np.random.default_rng(0)
    columns = {"low, high": generator.normal(size=40), "c": generator.normal(size=40), "label": ["x", "y"] * 20}
    pd.DataFrame(columns).to_csv("table.csv", index=False)
    for number, (given, left) in enumerate({'"low, high"': "c", "c": "low, high"}.items()):
        said = run("init", "mrconv", f"runs{number}", "--data", "table.csv", "--inputs", given).output
        assert left in next(line for line in said.splitlines() if line.startswith("left out"))
    run("init", "mrconv", "runs", "--data", "table.csv", "--inputs", "'low, high'", code=2)


HELD_OUT = "train/cat train/dog train/fox/x holdout/cat holdout/dog", ["4 files such as holdout/cat/0.png", "fox"]
LAYOUTS = [
    ("cat/north cat/south dog/north dog/south", ["cat, dog above them are not"], ["north", "south"]),
    (*HELD_OUT, ["cat", "dog"]),
    ("cat dog dog/small", [], []),
]


@pytest.mark.parametrize(("folders", "told", "classes"), LAYOUTS)
def test_pictures_lie_as_people_put_them(folders, told, classes):
    write_pictures("animals", folders.split(), 2)
    if "train/fox/x" in folders:
        shutil.rmtree("animals/train/fox/x")
    for file in Path("animals").rglob("*.png"):
        Path("links", file).parent.mkdir(parents=True, exist_ok=True)
        Path("links", file).symlink_to(file.resolve())
    for place in ("links/animals", "animals"):
        survey = look_at(place, restores=False)
        assert survey.classes == classes
        assert all(words in " ".join(survey.lines) for words in (told[:1] if place != "animals" else told))
    if not classes:
        with pytest.raises(ValueError, match="different depths"):
            write_recipe("mrconv", Path("mine"), survey, gpu=False)


def test_pictures_lie_as_programs_put_them():
    write_pictures("animals", ["cat", "dog"], 3)
    datasets.load_dataset("animals", split="train").save_to_disk("saved")
    files = sorted(Path("animals").rglob("*.png"))
    rows = {"image": [file.read_bytes() for file in files], "label": [file.parent.name for file in files]}
    pd.DataFrame(rows).to_parquet("animals.parquet")
    assert all(look_at(place).classes == ["cat", "dog"] for place in ("animals.parquet", "saved"))
    # Kaggle's have a table beside their folder, whose names have no ending.
    pets = [(f"{number:03}", file) for number, file in enumerate(files)]
    write_files("pets/train", {f"{name}.png": file.read_bytes() for name, file in pets})
    table = "\n".join(["id,breed", *(f"{name},{file.parent.name}" for name, file in pets)])
    assert look_at(str(write_files("pets", {"train.csv": table})), Hints(label="breed")).classes == ["cat", "dog"]
