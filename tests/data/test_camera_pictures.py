"""HEIC and RAW in all shapes of data: decoded once, and read as PNG."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hf_ext.data.opening import open_source
from hf_ext.data.source import DataSource
from hf_ext.data.survey import look_at
from hf_ext.errors import DataError
from tests.kit.camera_files import write_dng, write_heic
from tests.kit.command_line import run
from tests.kit.own_data import write_files
from tests.kit.refusals import refused

pytest.importorskip("rawpy", reason="the extra `images` is not installed")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: str, number: int = 0) -> None:
    """A flat picture of the kind that the ending says, in a grey of its number."""
    place, picture = Path(path), Image.new("RGB", (96, 64), (number * 10,) * 3)
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.suffix == ".dng":
        write_dng(place)
    else:
        write_heic(place, picture) if place.suffix.lower() in (".heic", ".heif") else picture.save(place)


def greys(data) -> list[int]:
    return sorted(round(float(np.asarray(row["image"])[..., 0].mean()) / 10) for row in data)


@pytest.mark.parametrize("ending", ["HEIC", "heif", "dng"])
def test_a_folder_is_read_and_decoded_once(ending, monkeypatch):
    for number in range(6):
        write(f"photos/{number}.{ending}", number)
    survey = look_at("photos")
    assert (survey.kind, survey.count, survey.sides) == ("pictures", 6, [64])
    assert survey.train["path"] == "photos"
    assert "6 pictures of ." in "; ".join(survey.notes) and not survey.left_out
    data = open_source(DataSource("photos"))
    assert [row["image"].size for row in data] == [(96, 64)] * 6
    # LibRaw brightens: flat pictures of a DNG are alike.
    if ending.lower() != "dng":
        assert greys(data) == [*range(6)] and survey.eval is not None
    monkeypatch.setattr("hf_ext.restoration.files.read_image", None)
    assert len(open_source(DataSource("photos"))) == 6


def test_changed_pictures_are_decoded_anew():
    write("photos/a.heic", 1)
    assert greys(open_source(DataSource("photos"))) == [1]
    write("photos/a.heic", 7)
    write("photos/b.heic", 9)
    assert greys(open_source(DataSource("photos"))) == [7, 9]


def with_table(name: str, head: list[str], row: str, ending: str = "heic") -> tuple[list[str], dict[str, str]]:
    """Names of pictures in one folder, and a table of their classes."""
    rows = [row.format(number=number, label="ab"[number % 2]) for number in range(8)]
    return [f"{number}.{ending}" for number in range(8)], {name: "\n".join(head + rows)}


IN_CLASSES = [f"{'ab'[number % 2]}/{number}.heic" for number in range(8)]
# RAW is taken last.
TWINS = [f"a/{number}.jpg" for number in range(0, 8, 2)] + [f"b/{number}.dng" for number in range(1, 9, 2)]


@pytest.mark.parametrize(
    ("names", "table"),
    [
        (IN_CLASSES, {}),
        ([f"train/{name}" for name in IN_CLASSES[:6]] + [f"validation/{name}" for name in IN_CLASSES[6:]], {}),
        (IN_CLASSES + TWINS, {}),
        with_table("labels.csv", ["photo,label"], "{number}.HEIC,{label}", "HEIC"),
        with_table("about.tsv", ["photo\tlabel"], "{number}\t{label}"),
        with_table("metadata.jsonl", [], '{{"file_name": "{number}.heic", "label": "{label}"}}'),
        with_table("labels.csv", ["photo,label"], "{number}.avif,{label}", "avif"),
        with_table("labels.csv", ["file,label"], "{number}.jfif,{label}", "jfif"),
    ],
)
def test_classes_are_found_in_every_shape(names, table):
    for name in names:
        write(f"data/{name}", int(Path(name).stem))
    write_files("data", table)
    survey = look_at("data")
    assert survey.classes == ["a", "b"] and survey.kind == "pictures" and survey.broken == 0
    data = open_source(DataSource(**survey.train))
    assert survey.count == (6 if "train" in names[0] else 8)
    for row in data:
        label = survey.classes[row["label"]] if survey.named else row["label"]
        assert label == "ab"[greys([row])[0] % 2]
    assert ("another of that name" in "; ".join(survey.left_out)) == (len(names) > 8)


def test_the_one_at_another_depth_is_named():
    for name in ("0.heic", "a/1.heic", "a/2.heic"):
        write(f"data/{name}")
    assert look_at("data").advice.endswith("0.png")


def test_captions_and_pairs():
    for number in range(6):
        write(f"shots/{number}.heic", number)
        write_files("shots", {f"{number}.txt": f"a picture of number {number}"})
        write(f"pairs/noisy/{number}.{'heic' if number % 2 else 'jp2'}", number)
        write(f"pairs/clean/{number}.png", number)
    assert look_at("shots").captions == "text"
    survey = look_at("pairs")
    assert survey.kind == "pairs" and survey.roles == ["noisy/ becomes clean/"]
    assert "3 pictures of .heic" in "; ".join(survey.notes)
    rows = list(open_source(DataSource(**survey.train)))
    assert all(greys([{"image": row["lq"]}]) == greys([{"image": row["hq"]}]) for row in rows) and rows


def test_patterns_streams_and_folders_of_several_kinds():
    for number in range(4):
        write(f"data/one/{number}.heic", number)
        write(f"data/two/{number}.heic", number + 4)
        write(f"data/two/p{number}.png", number + 8)
    assert greys(open_source(DataSource("data/*/*.heic"))) == [*range(8)]
    assert greys(open_source(DataSource("data/two/*"))) == [*range(4, 12)]
    assert greys(open_source(DataSource("data", streaming=True))) == [*range(12)]


def test_broken_ones_are_counted_and_left_out():
    for number in range(5):
        write(f"data/{number}.heic", number)
    Path("data/5.heic").write_bytes(Path("data/4.heic").read_bytes()[:60])
    Path("data/6.nef").write_bytes(b"no RAW file at all" * 9)
    survey = look_at("data")
    assert survey.count == 7 and "2 of 7" in "; ".join(survey.left_out)
    write_files("phone", {"a.HEIC": b"phone"})
    assert "none of 1 picture " in run("init", "semanir", "mine", "--data", "phone", code=2).stderr


def test_without_the_library_the_command_that_installs_it_is_said(monkeypatch):
    for path in ("data/a.heic", "more/a.png", "more/b.heic"):
        write(path)
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    for folder, name in (("data", "a.heic"), ("more", "b.heic")):
        with refused(DataError, "images", name):
            look_at(folder)
    assert not any(Path("cache").rglob("*.png"))


@pytest.mark.parametrize("kind", ["zip", "gztar"])
def test_an_archive_of_them_says_that_it_is_unpacked_first(kind):
    for number in range(3):
        write(f"data/{number}.heic", number)
    name = shutil.make_archive("photos", kind, "data")
    with refused(DataError, ".heic", "unpack"):
        look_at(Path(name).name)
