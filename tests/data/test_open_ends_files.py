"""Files that are cut, unread or beside others are counted, named or refused; splits at any depth go by one rule."""

import re
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
from tests.kit.own_data import write_files, write_pictures
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
    place = tmp_path / f"1.{ending}"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(place)
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


def write_kinds(folder: Path, files: dict) -> str:
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
    survey = look_at(write_kinds(tmp_path, files), restores=False)
    assert len(survey.classes) == 2 and survey.count in (16, 24)
    assert told in "; ".join(survey.left_out) if told else not survey.left_out


def test_folders_of_one_picture_each_are_classes(tmp_path):
    place = write_kinds(tmp_path, {f"{part}/1.png": ord(part) for part in "abcd"})
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
        look_at(write_kinds(tmp_path, files), restores=False)


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
    write_kinds(tmp_path, {"a.csv": texts_of("one", "ab"), "b.csv": texts_of("two", "ab")})
    (tmp_path / "b.csv").rename(tmp_path / f"b{ending}")
    assert look_at(str(tmp_path)).count == 48


def write_pairs_of(folder: Path, names: list[str]) -> None:
    for side in ("noisy", "clean"):
        write_captions_of(folder / side, names)


def test_folders_of_pairs_are_called_by_splits_with_other_words(tmp_path):
    for part in ("train_set", "val_set", "test_set"):
        write_pairs_of(tmp_path / part, [f"{n}" for n in range(4)])
    survey = look_at(str(tmp_path))
    assert survey.eval["path"] == str(tmp_path / "val_set")
    assert str(tmp_path / "test_set") in "; ".join(survey.left_out)


def test_folders_of_photographs_are_called_by_splits_with_other_words(tmp_path):
    write_pictures(tmp_path, ["train_images", "val_images"], 4)
    survey = look_at(str(tmp_path))
    assert (survey.classes, survey.count, survey.eval["split"]) == ([], 4, "validation")
    assert not survey.left_out + survey.notes
    with refused(DataError, "are splits"):
        look_at(str(tmp_path), restores=False)


def write_captions_of(folder: Path, names: list[str]) -> None:
    for name in names:
        pixels = np.random.default_rng(list(f"{folder}{name}".encode())).integers(0, 256, (24, 24, 3), dtype=np.uint8)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"what {name} shows")


def write_texts_of(folder: Path, names: list[str]) -> None:
    for place, name in enumerate(names):
        at = Path(name)
        write_files(folder, {f"{at.parent}/{'ab'[place % 2]}/{at.name}.txt": f"this is the text of {name}"})


def write_series_of(folder: Path, names: list[str]) -> None:
    for place, name in enumerate(names):
        rows = np.random.default_rng(list(name.encode())).normal(size=9)
        held = "x\n" + "".join(f"{number:.3f}\n" for number in rows)
        write_files(folder, {f"{Path(name).parent}/{'ab'[place % 2]}/{Path(name).name}.csv": held})


PLACES = [
    "{}/{n}", "data/{}/{n}", "a/b/{}/{n}", "a/{}/x/{n}", "my_{}/{n}", "{}_2/c/{n}", "{}_{n}", "x/{}_{n}", "{}/{}/{n}",
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("write", [write_texts_of, write_series_of, write_captions_of, write_pairs_of])
def test_what_is_called_test_is_trained_on_at_no_depth_and_told(tmp_path, write, place):
    counts = {"train": 12, "test": 4}
    write(tmp_path, [place.format(*[part] * 2, n=n) for part, count in counts.items() for n in range(count)])
    survey = look_at(str(tmp_path))
    assert (survey.kind == "pairs") == (write is write_pairs_of)
    parts = [open_source(DataSource(**{**survey.train, "split": part, "hold_out": 0.0})) for part in ("train", "test")]
    assert [*map(len, parts)] == [12, 4] and survey.learned < 12
    assert (survey.classes == ["a", "b"]) == (write in (write_texts_of, write_series_of))
    assert "--data.eval.split test" in "; ".join(survey.left_out)


@pytest.mark.parametrize("write", [write_texts_of, write_series_of])
def test_classes_whose_names_have_words_for_splits_are_classes(tmp_path, write):
    names = ["cycling", "strength_training", "walk_test"]
    write(tmp_path, [f"{n}" for n in range(18)])
    for place in [*tmp_path.glob("*/*")]:
        (to := tmp_path / names[int(place.stem) % 3]).mkdir(exist_ok=True)
        place.rename(to / place.name)
    for side in "ab":
        (tmp_path / side).rmdir()
    assert (survey := look_at(str(tmp_path))).classes == names and survey.count == 18


def test_a_class_of_texts_may_be_called_train(tmp_path):
    names = [f"{part}/{name}/{n}.txt" for part in ("train", "val") for name in ("bus", "train") for n in range(6)]
    write_files(tmp_path, {name: f"this is the text of {name}" for name in names})
    survey = look_at(str(tmp_path))
    assert (survey.classes, survey.count, survey.eval["split"]) == (["bus", "train"], 12, "validation")


@pytest.mark.parametrize("write", [write_captions_of, write_series_of])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_table_of_files_that_are_called_by_splits_keeps_them(tmp_path, write, reverse):
    names = [f"{part}_{n}" for part, count in {"train": 12, "test": 6}.items() for n in range(count)]
    write(tmp_path, names)
    rows = [f"{name},{'xyz'[place % 3]}" for place, name in enumerate(names)][:: -1 if reverse else 1]
    write_files(tmp_path, {"about.csv": "\n".join(["file,class", *rows])})
    survey = look_at(str(tmp_path))
    assert (survey.count, survey.classes) == (12, ["x", "y", "z"]) and "split test" in "; ".join(survey.left_out)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["train/1", "train/2", "train/val/1", "train/val/2"], "val"),
        (["p/train/1", "p/train/2", "q/train/1", "q/train/2", "p/test/1"], "several folders"),
        (["x/test/1", "x/test/2", "1", "2"], "no folder 'train'"),
        (["x/Train/1", "x/Train/2", "x/Test/1", "x/Test/2"], "small letters"),
    ],
)
@pytest.mark.parametrize("write", [write_texts_of, write_series_of, write_captions_of])
def test_what_may_belong_to_two_splits_or_to_none_is_refused(tmp_path, write, names, told):
    write(tmp_path, names)
    with refused(DataError, told):
        look_at(str(tmp_path))


@pytest.mark.parametrize("others", [["other"], ["a", "b", "c"], ["sample_submission"]])
@pytest.mark.parametrize(("make", "count"), [(texts_of, 24), (series_of, 24)])
@pytest.mark.parametrize("ends", [("train", "test"), ("Wafer_TRAIN", "Wafer_TEST")])
def test_a_table_beside_those_of_the_splits_joins_nothing(tmp_path, others, make, count, ends):
    for name in (*ends, *others):
        write_table(tmp_path / f"{name}.csv", make(name, "ab") if name in ends or make is series_of else {"n": [1, 2]})
    if make is texts_of and ends[0] != "train":
        with refused(DataError, "small letters"):
            look_at(str(tmp_path))
        return
    survey = look_at(str(tmp_path))
    assert survey.count == count and "--data.eval.split test" in "; ".join(survey.left_out)
    assert make is texts_of or f"{others[0]}.csv" in "; ".join(survey.left_out)


@pytest.mark.parametrize("names", [["tap_test_1", "a", "b"], ["test_tube", "beaker"], ["a_train", "b_test", "c", "d"]])
def test_a_word_in_a_name_alone_is_no_split(tmp_path, names):
    write_series_of(tmp_path, [f"{name}_{n}" for name in names for n in range(4)])
    assert look_at(str(tmp_path)).count == 4 * len(names)


def test_arrays_of_the_splits_are_a_file_each(tmp_path):
    counts = {"train": 20, "test": 8}
    arrays = {f"X_{part}": np.random.default_rng(count).normal(size=(count, 9, 2)) for part, count in counts.items()}
    arrays |= {f"y_{part}": np.arange(count) % 2 for part, count in counts.items()}
    np.savez(tmp_path / "all.npz", **arrays)
    with refused(DataError, "train.npz"):
        look_at(str(tmp_path / "all.npz"))
    (tmp_path / "all.npz").unlink()
    for part in counts:
        np.savez(tmp_path / f"{part}.npz", X=arrays[f"X_{part}"], y=arrays[f"y_{part}"])
    for hints in (Hints(), Hints(label="y")):
        survey = look_at(str(tmp_path), hints)
        assert survey.count == 20 and survey.columns == ["X"] and "--data.eval.split test" in survey.left_out[0]
        assert len(open_source(DataSource(**{**survey.train, "split": "test", "hold_out": 0.0}))) == 8


@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize(
    ("folders", "table", "classes"),
    [
        (["images"], "captions.csv", []),
        (["images"], "images.csv", []),
        (["images"], "text beside", []),
        (["train/images", "validation/images"], "captions.csv", []),
        (["2020", "2021"], "exif.csv", ["2020", "2021"]),
        (["2020", "2021"], "text beside", ["2020", "2021"]),
    ],
)
def test_a_table_beside_folders_says_no_class_and_one_folder_is_none(tmp_path, folders, table, classes, restores):
    for folder in folders:
        write_pictures(tmp_path, [folder], 12)
        names = [file.rename(file.with_stem(f"{folder[:4]}{file.stem}")) for file in (tmp_path / folder).iterdir()]
        if table == "text beside":
            write_files(tmp_path / folder, {f"{name.stem}.txt": f"of {name.stem}" for name in names})
        elif "/" in folder or folder == folders[-1]:
            names = names if "/" in folder else [*tmp_path.rglob("*.png")]
            rows = {"image": [name.name for name in names], "caption": [f"of {name.stem}" for name in names]}
            write_table(tmp_path / folder.rpartition("/")[0] / table, rows)
    survey = look_at(str(tmp_path), restores=restores)
    assert survey.classes == classes and survey.count == (12 if len(folders) == 1 or "/" in folders[0] else 24)
    assert survey.captions == (None if classes else "text" if table == "text beside" else "caption")
    labels = {"label": "caption"} if table != "text beside" else {}
    data = open_source(DataSource(str(tmp_path), rename_columns={"caption": "label"} if labels else None))
    assert not labels or data.features["label"].num_classes == survey.count


@pytest.mark.parametrize(
    "form",
    [
        "reviews({})",
        "reviews[{}]",
        "sst@{}",
        "reviews+{}",
        "split={}/part-0",
        "{}set",
        "{}Data",
        "{}A",
        "X{}",
        "x/{}Set1",
    ],
)
@pytest.mark.parametrize("kind", ["csv", "pictures"])
def test_splits_that_only_people_see_are_refused_and_the_advice_works(tmp_path, form, kind):
    for part in ("train", "test"):
        name = form.format(part.title() if form[0] in "Xx" else part)
        if kind == "pictures":
            write_pictures(tmp_path / name, ["a", "b"], 12 if part == "train" else 4)
        else:
            (tmp_path / f"{name}.csv").parent.mkdir(parents=True, exist_ok=True)
            write_table(tmp_path / f"{name}.csv", texts_of(part, "ab"))
    with refused(DataError, "small letters") as told:
        look_at(str(tmp_path), restores=False)
    for old, new in re.findall(r"(?:rename|,) (\S+) to (\S+?)(?=, |\.\s|\.$)", str(told.value)):
        place = next(place for place in tmp_path.rglob("*") if place.name == old)
        (place.parent / new).parent.mkdir(exist_ok=True)
        place.rename(place.parent / new)
    survey = look_at(str(tmp_path), restores=False)
    assert survey.count == 24 and survey.classes == ["a", "b"] and "split test" in "; ".join(survey.left_out)


@pytest.mark.parametrize("names", [["trainer", "tester"], ["interval", "strain"], ["b", "trainA"]])
def test_words_that_hold_a_word_for_a_split_are_classes(tmp_path, names):
    write_pictures(tmp_path, names, 8)
    assert look_at(str(tmp_path), restores=False).classes == sorted(names)


@pytest.mark.parametrize(
    "files",
    [
        {
            **IN_PARTS,
            "trainLabels.csv": "a,b\n1,2\n",
            "testLabels.csv": "a,b\n1,2\n",
            "trainModel.py": "",
            "testModel.py": "",
        },
        {f"v1.0_{name}".replace("v1.0_train", "photos.train"): content for name, content in IN_PARTS.items()},
        {
            **{f"{part}set.csv": texts_of(part, "ab") for part in ("train", "test")},
            "README.md": "---\nconfigs:\n- config_name: default\n  data_files:\n"
            + "".join(f"  - split: {part}\n    path: {part}set.csv\n" for part in ("train", "test"))
            + "---\n",
        },
    ],
    ids=["files beside", "folders with dots", "a card"],
)
def test_splits_that_are_seen_are_not_refused_for_other_files(tmp_path, files):
    place = write_kinds(tmp_path / "lot=4" / "label=2", files)
    assert len(open_source(DataSource(place))) == (24 if "README.md" in files else 16)


@pytest.mark.parametrize(("column", "refuses"), [("label", True), ("speaker", True), ("date", False)])
def test_columns_in_the_names_of_folders_are_refused_where_they_count(tmp_path, column, refuses):
    for value in "ab":
        (tmp_path / f"{column}={value}").mkdir()
        pd.DataFrame({"text": texts_of(value, "ab")["text"]}).to_parquet(tmp_path / f"{column}={value}" / "0.parquet")
    if refuses:
        with refused(DataError, f"the column {column}"):
            look_at(str(tmp_path))
    else:
        assert look_at(str(tmp_path)).count == 48


def write_example(place: Path, seed: int) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    if place.suffix == ".png":
        Image.fromarray(numbers).save(place)
    elif place.suffix == ".wav":
        pytest.importorskip("soundfile").write(place, numbers.ravel() / 255, 8000)
    else:
        place.write_text(
            "\n".join(["x", *map(str, numbers.ravel())]) if place.suffix == ".csv" else f"words of {seed}"
        )


@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize("ending", ["txt", "csv", "wav", "png"])
@pytest.mark.parametrize(
    ("folders", "classes"),
    [
        (["bus", "car", "train"], 0),
        (["Set14", "Set5", "train"], 0),
        (["a/bus", "a/car", "a/train", "a/boat"], 0),
        # A split beside another, with classes in it, or beside one folder.
        (["train/bus", "train/car", "more/bus", "extra/car"], 2),
        (["train/bus", "train/car", "test/bus", "test/car"], 2),
    ],
)
def test_a_folder_train_among_classes_is_a_split_and_told(tmp_path, ending, folders, classes, restores):
    for seed, (folder, number) in enumerate((folder, number) for folder in folders for number in range(8)):
        write_example(tmp_path / folder / f"{number}.{ending}", seed)
    if not classes and ending == "csv":
        with refused(DataError, "no label"):
            look_at(str(tmp_path))
        return
    survey = look_at(str(tmp_path), restores=restores)
    assert (survey.count, len(survey.classes)) == (8 * (classes or 1), classes)
    assert ("the folder train is read as the split" in "; ".join(survey.notes)) == (not classes)
    assert survey.eval["split"] == "validation"
    assert len(open_source(DataSource(**survey.eval))) < survey.count
