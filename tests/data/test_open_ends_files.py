"""Files that are cut, left unread or beside others are counted, named or refused."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import ExifTags, Image

from hf_ext.data.files import is_broken_picture, read_samples
from hf_ext.data.opening import open_source
from hf_ext.data.roles import Hints
from hf_ext.data.source import DataSource
from hf_ext.data.splits import find_paths
from hf_ext.data.survey import look_at
from hf_ext.errors import DataError
from tests.kit.refusals import refused

from .odd_data import series_of, texts_of, write_table


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("ending", ["bmp", "gif", "jpg", "jp2", "png", "ppm", "tga", "tif", "webp"])
def test_cut_pictures_are_counted_and_never_measure(tmp_path, ending, pairs):
    for number, part in ((number, part) for number in range(20) for part in "ab"):
        noise = np.random.default_rng([number, ord(part)]).integers(0, 255, (32, 32, 3), dtype=np.uint8)
        (place := tmp_path / part / f"{number}.{ending}").parent.mkdir(exist_ok=True)
        Image.fromarray(noise).save(place)
        if number % 2 and part == "a":
            place.write_bytes(place.read_bytes()[: int(0.6 * place.stat().st_size)])
    survey = look_at(str(tmp_path), Hints(pairs=("a", "b")) if pairs else None, restores=pairs)
    assert f"10 of {20 if pairs else 40} examples" in survey.left_out[0]
    measured = find_paths(open_source(DataSource(**survey.eval)))
    assert len(measured) == (2 if pairs else 4)
    assert all(place.parent.name == "b" or int(place.stem) % 2 == 0 for place in measured)


@pytest.mark.parametrize("ending", ["jp2", "webp"])
def test_pictures_of_slow_formats_are_not_decoded_to_see_whether_they_are_whole(tmp_path, ending, monkeypatch):
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(
        place := tmp_path / f"1.{ending}"
    )
    values = [{"path": str(place), "bytes": None}, {"path": None, "bytes": place.read_bytes()}]
    monkeypatch.setattr(Image.Image, "draft", lambda *_: pytest.fail("decoded"))
    assert not any(map(is_broken_picture, values))


@pytest.mark.parametrize("damage", ["cut", "middle", "not finite"])
def test_damaged_sounds_are_counted_and_never_measure(tmp_path, damage):
    soundfile = pytest.importorskip("soundfile")
    for number in range(20):
        (place := tmp_path / "ab"[number % 2] / f"{number}.flac").parent.mkdir(exist_ok=True)
        soundfile.write(place, np.random.default_rng(number).normal(0, 0.1, 8000), 8000)
        held = place.read_bytes()
        if number % 4 > 1 and damage == "not finite":
            place.unlink()
            soundfile.write(place.with_suffix(".wav"), np.full(8000, np.nan), 8000, subtype="FLOAT")
        elif number % 4 > 1:
            place.write_bytes(held[:6000] + (b"" if damage == "cut" else b"\1" * 300 + held[6300:]))
    survey = look_at(str(tmp_path))
    assert "10 of 20 examples" in survey.left_out[0]
    measured = [read_samples(sound["path"])[0] for sound in open_source(DataSource(**survey.eval))["audio"]]
    assert measured and all(np.isfinite(samples).all() for samples in measured)


def write_files(folder: Path, files: dict) -> str:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, dict) and ".json" in name:
            pd.DataFrame(content).to_json(folder / name, orient="records", lines=True)
        elif isinstance(content, dict):
            write_table(folder / name, content)
        elif isinstance(content, int):
            Image.new("L", (8, 8), content).save(folder / name)
        elif name.endswith(".wav"):
            pytest.importorskip("soundfile").write(folder / name, np.zeros(800), 8000)
        else:
            (folder / name).write_text(content)
    return str(folder)


def in_folders(ending: str) -> dict:
    names = [f"{part}/{number}{ending}" for part in ("good", "bad") for number in range(8)]
    return {name: number if ending == ".png" else f"a text {number}\nof {name}" for number, name in enumerate(names)}


NOTES = {"README.txt": "about\nthis\n", "LICENSE.txt": "you\nmay\n"}
PICTURES, CLASSES, SOUNDS = in_folders(".png"), in_folders(".txt"), in_folders(".wav")
ROWS, WIDE, PARTS = texts_of("all", "ab"), series_of("all", "ab"), {"train.csv": texts_of("one", "ab")}
IN_PARTS = {f"{part}/{name}": content for part in ("train", "test") for name, content in PICTURES.items()}
CAPTIONS = {name.replace("png", "txt"): f"the caption {name}" for name in PICTURES}


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({**CLASSES, "README.txt": "about\nthis\n"}, "README.txt"),
        ({**CLASSES, "README.md": "about"}, None),
        ({**CLASSES, "LICENSE": "you may"}, None),
        ({**CLASSES, "a.feat": "9 0:1", "urls.txt": "http://a"}, "2 files"),
        ({f"train/{name}": text for name, text in CLASSES.items()} | {"train/urls.txt": "http://a"}, "train/urls.txt"),
        (
            {**PICTURES, "meta/classes.txt": "good", "README": "about", "README.txt": "about"},
            "2 files such as README.txt",
        ),
        ({**PICTURES, "boxes.xml": "<a/>"}, "boxes.xml"),
        ({**PICTURES, "test_notes.txt": "about"}, "test_notes.txt"),
        ({**IN_PARTS, "train.txt": "good/1", "test.txt": "bad/1"}, "2 files such as test.txt"),
        ({**PICTURES, **CAPTIONS}, "captions in text"),
        ({"a.csv": ROWS, "README.txt": "about\nthis\n"}, "README.txt"),
        ({"a.csv": WIDE, "README.txt": "about\nthis\n"}, "README.txt"),
        ({"a.csv": WIDE, "a.xlsx": "?"}, "a.xlsx"),
        ({**PARTS, "more.csv": {"text": ["a", "b"], "label": ["a", "b"]}}, "more.csv"),
        ({**PARTS, "more.csv": texts_of("any", "ab"), "2024.csv": texts_of("new", "ab")}, "2 files"),
        ({**PARTS, "test.csv": texts_of("any", "ab"), "extra.csv": texts_of("a longer part", "ab")}, "extra.csv"),
        ({"a.csv": ROWS, "embeddings.npy": "0" * 9999}, "embeddings.npy"),
    ],
)
def test_files_that_no_part_reads_are_named_and_change_nothing(tmp_path, files, told):
    survey = look_at(write_files(tmp_path, files), restores=False)
    assert len(survey.classes) == 2 and survey.count in (16, 24)
    assert told in "; ".join(survey.left_out) if told else not survey.left_out


def test_folders_of_one_picture_each_are_classes(tmp_path):
    place = write_files(tmp_path, {f"{part}/1.png": ord(part) for part in "abcd"})
    assert look_at(place, restores=False).classes == [*"abcd"]


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"a.csv": ROWS, **NOTES}, "a.csv"),
        ({"a.csv": WIDE, **NOTES}, "a.csv"),
        ({"a.csv": ROWS, "a.json": '{"name": "x"}', "b.json": '{"name": "y"}'}, "a.csv"),
        ({"a.csv": ROWS, "b.jsonl": texts_of("more", "ab")}, "b.jsonl"),
        ({**{f"{part}_text.txt": "a\nb\n" for part in ("train", "val")}, "train_labels.txt": "0\n1\n"}, "table"),
        ({f"{kind}/train_{part}.txt": "a\nb\n" for kind in ("hate", "irony") for part in ("text", "labels")}, "table"),
        ({**PICTURES, "validation_list.txt": "good/1", "testing_list.txt": "bad/1", "README": ""}, "testing_list.txt"),
        ({**PICTURES, "meta/train.txt": "good/1", "meta/test.txt": "bad/1"}, "meta/test.txt"),
        ({**SOUNDS, "validation_list.txt": "good/1", "README.md": ""}, "validation_list.txt"),
        ({"texts.txt": "a\nb\n", "labels.txt": "0\n1\n"}, "labels.txt"),
    ],
)
def test_files_that_no_part_reads_are_refused_where_they_hold_the_data(tmp_path, files, told):
    with refused(DataError, told):
        look_at(write_files(tmp_path, files), restores=False)


def test_pairs_of_two_formats_are_all_read_and_turned_as_they_are_read(tmp_path):
    for place in (tmp_path / part / name for part in ("lq", "hq") for name in ("1.png", "1.jpg", "2.png")):
        place.parent.mkdir(exist_ok=True)
        (picture := Image.new("L", (48, 32))).getexif()[ExifTags.Base.Orientation] = 6
        if place.parent.name == "lq":
            picture.save(place, exif=picture.getexif())
        else:
            Image.new("L", (32, 48)).save(place)
    survey = look_at(str(tmp_path))
    assert (survey.count, survey.scale) == (3, 1)
    (tmp_path / "hq" / "1.jpg").unlink()
    with refused(DataError, "1.jpg"):
        look_at(str(tmp_path))


@pytest.mark.parametrize("ending", [".Csv", ".CSV"])
def test_tables_of_any_case_beside_others_are_read(tmp_path, ending):
    write_files(tmp_path, {"a.csv": texts_of("one", "ab"), "b.csv": texts_of("two", "ab")})
    (tmp_path / "b.csv").rename(tmp_path / f"b{ending}")
    assert look_at(str(tmp_path)).count == 48
