"""Latents ahead of time: of rows, tar files and a Hub, going on after a kill, bad pictures, training from them."""

import json
import os
import shutil
import sys
import tarfile
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from huggingface_hub import HfApi
from PIL import Image
from pyarrow.parquet import read_table

from hf_ext.data.opening import open_source
from hf_ext.data.source import DataSource
from hf_ext.distributed import Ranks
from hf_ext.embedded_hub.server import EmbeddedHub
from hf_ext.errors import DataError, MissingColumn, OtherRun, UsageError
from hf_ext.files import TakenError
from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline
from hf_ext.settings import SettingsError
from hf_ext.tasks import precompute as module
from hf_ext.tasks import precompute_sources as sources
from hf_ext.tasks.diffusion_data import Crops, cut_view, load_autoencoder, read_row, to_pixels, unpack_row, write_tar
from hf_ext.tasks.precompute import precompute
from tests.disentangled_dit.pipeline_testing import make_vae
from tests.kit.hub import run_python
from tests.kit.killing import killed
from tests.kit.models import assert_same_answers
from tests.kit.refusals import refused

from .diffusion_testing import (
    MODEL,
    losses,
    make_arguments,
    nothing_copied,
    pack_tars,
    rows_of,
    run,
    settings,
    write_pictures,
)
from .test_precompute_campaign import BAD, encode, png

# Tall, square and wide, several of each.
SIZES = [(24, 12), (16, 16), (12, 24), (30, 15), (20, 20), (16, 32), (18, 18)]


@pytest.fixture
def pictures(tmp_path):
    return write_pictures(tmp_path / "pictures", side_column=SIZES)


def test_rows_are_the_encoded_parts_with_their_controls(tmp_path, pictures, vae, monkeypatch):
    decoded, plain = [], sources.read_example
    monkeypatch.setattr(sources, "read_example", lambda data, number: decoded.append(number) or plain(data, number))
    out = precompute(settings(pictures, vae, seed=1), tmp_path / "out")
    names = sorted(path.name.rpartition("-")[0] for path in out.glob("*.parquet"))
    assert names == [f"train-{shard:05d}-of-00002" for shard in range(2)]
    rows, source, autoencoder = rows_of(out), rows_of(pictures), load_autoencoder(str(vae))
    assert len(rows) == 7 and rows.features["label"] == source.features["label"]
    digests = sources.hash_rows(source, "image")
    assert len(set(digests)) == 7
    order = [number for part in range(2) for number in range(7) if int(digests[number][:15], 16) % 2 == part]
    for number in (0, 3, 6):
        example = source[order[number]]
        seed = (1, 6, 0, int(digests[order[number]][:15], 16))
        view = cut_view(example["image"], (16, 16), 3, Crops(), np.random.default_rng(seed))
        latent, controls = read_row(rows[number])
        with torch.no_grad():
            expected = DisentangledDiTPipeline.encode_image(autoencoder, to_pixels([view]))[0]
        torch.testing.assert_close(latent, expected, atol=2e-3, rtol=2e-3)
        assert all(np.array_equal(controls[name], value) for name, value in view.controls.items())
        assert (rows[number]["label"], rows[number]["text"]) == (example["label"], example["text"])
    assert 0 < sum(rows["flip"]) < 7
    assert len(decoded) == 7


def test_buckets_follow_the_pictures_and_are_not_streamed(tmp_path, pictures, vae):
    chosen = settings(pictures, vae, max_ratio=2.0, bucket_step=4)
    out = precompute(chosen, tmp_path / "out")
    rows = rows_of(out)
    assert sorted(rows["original_size"]) == sorted(list(size) for size in SIZES)
    for row in rows:
        height, width = row["original_size"]
        assert np.sign(row["target_size"][0] - row["target_size"][1]) == np.sign(height - width)
        assert row["latent_shape"] == [4, row["target_size"][0] // 2, row["target_size"][1] // 2]
    # Latents of one shape may be streamed, those of buckets not.
    with refused(ValueError, "stream"):
        run(make_arguments(tmp_path / "stream", out, True, task={"image_size": 16, "vae": str(vae)}))


@pytest.mark.parametrize("call", [(module, "cut_view", 5), (module.os, "replace", 3)], ids=["shard", "rename"])
def test_work_goes_on_after_a_kill_and_ends_with_the_same_files(tmp_path, pictures, vae, monkeypatch, call):
    whole = precompute(settings(pictures, vae), tmp_path / "whole")
    with killed(call[:2], after=call[2]):
        precompute(settings(pictures, vae), tmp_path / "killed")
    partial = tmp_path / "killed.partial"
    assert not (tmp_path / "killed").exists() and len([*partial.glob("*.parquet")]) == 1
    done = {path.name: path.stat().st_mtime_ns for path in partial.glob("*.parquet")}
    with pytest.raises(OtherRun):
        precompute(settings(pictures, vae, seed=1), tmp_path / "killed")
    with monkeypatch.context() as patch, pytest.raises(OtherRun):
        patch.setattr(module, "weights_hash", lambda network: "others")
        precompute(settings(pictures, vae), tmp_path / "killed")
    out = precompute(settings(pictures, vae), tmp_path / "killed")
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in whole.iterdir())
    for path in whole.iterdir():
        if path.suffix != ".parquet":
            assert (out / path.name).read_bytes() == path.read_bytes(), path.name
            continue
        rows, expected = (read_table(folder / path.name).to_pylist() for folder in (out, whole))
        for row, wanted in zip(rows, expected, strict=True):
            # Encoded by another copy of the autoencoder, and kept in half precision.
            latents, theirs = read_row(row)[0], read_row(wanted)[0]
            assert_same_answers(latents.half(), theirs.half())
            assert {**row, "latent": None} == {**wanted, "latent": None}
    # What was there is not encoded again.
    assert all((out / name).stat().st_mtime_ns == time for name, time in done.items())
    assert not partial.exists()


def test_work_of_exchanged_pictures_is_made_anew(tmp_path, pictures, vae):
    with killed((module, "cut_view"), after=5):
        precompute(settings(pictures, vae), tmp_path / "out")
    # As many pictures, of other sizes.
    shutil.rmtree(pictures)
    write_pictures(pictures, side_column=SIZES[::-1])
    out, whole = (precompute(settings(pictures, vae), tmp_path / name) for name in ("out", "whole"))
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in whole.iterdir())
    assert sorted(rows_of(out)["original_size"]) == sorted(list(size) for size in SIZES)


@pytest.mark.parametrize("changes", [{"bucket_step": 0}, {"max_ratio": float("nan")}, {"max_ratio": float("inf")}])
def test_buckets_that_do_not_exist_leave_no_folder(tmp_path, pictures, vae, changes):
    with pytest.raises((SettingsError, UsageError)):
        precompute(settings(pictures, vae, **{"max_ratio": 2.0, "bucket_step": 8, **changes}), tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_what_does_not_fit_is_refused(tmp_path, pictures, vae):
    (tmp_path / "there").mkdir()
    for kind, out, changes, facts, fields in (
        (TakenError, tmp_path / "there", {}, [], {"path": tmp_path / "there"}),
        (UsageError, pictures / "deep" / "out", {}, [pictures, pictures / "deep"], {}),
        (UsageError, tmp_path / "a", {"image_size": 15}, ["15 x 15 pixels"], {}),
        (MissingColumn, tmp_path / "b", {"image_column": "photo"}, ["image", "label"], {"column": "photo"}),
        (DataError, tmp_path / "b", {"image_column": "label"}, ["'label'", "image"], {}),
    ):
        with refused(kind, *facts, **fields):
            precompute(settings(pictures, vae, **changes), out)
    out = precompute(settings(pictures, vae), tmp_path / "c")
    with refused(DataError, "4 channels", "takes 3"):
        run(make_arguments(tmp_path / "run", out, task={"image_size": 16}, model=MODEL))


def test_a_process_takes_the_next_part_that_no_other_has(tmp_path, pictures, vae, monkeypatch):
    class FirstOfTwo(Ranks):
        """The first of two processes, whose words come back as they are."""

        def __init__(self):
            super().__init__()
            self.count = 2

        def gather(self, value):
            return [value, value]

        def of_first(self, value):
            return value

    written = []

    def write(work, part, advance):
        written.append(part)
        if len(written) == 3:
            # The second process is done with its first part before this one with three.
            parts = sorted(range(7), key=lambda part: -work.source.weights[part])
            assert work.take(parts[4]) and not work.take(parts[4])

    monkeypatch.setattr(module, "Ranks", FirstOfTwo)
    monkeypatch.setattr(module._Work, "write", write)
    out = precompute(settings(pictures, vae, shard_size=1), tmp_path / "out")
    # The largest first; the second is dealt to the second process.
    source = sources.Rows(rows_of(pictures))
    source.deal(7, "image")
    order = sorted(range(7), key=lambda part: -source.weights[part])
    assert max(source.weights) > 1 and written == [order[0], order[2], order[3], *order[5:]]
    assert [path.name for path in out.iterdir()] == ["precompute.json"]


# Pictures that cannot be used


def write_folder(folder, count=24, every=6):
    """Picture files, one of six of them bad, or of another number; the kinds of the bad ones by their names."""
    folder.mkdir(parents=True)
    generator, bad = np.random.default_rng(0), {"ink.jpg": "CMYK"}
    for number in range(count):
        pixels, name = generator.integers(256, size=(20, 16, 3), dtype=np.uint8), f"{number:03d}.png"
        if number % every == 3:
            bad[name] = ["truncated", "16 bits", "long", "small"][number // every % 4]
        (folder / name).write_bytes((BAD[bad[name]] if name in bad else png)(pixels))
    (folder / "ink.jpg").write_bytes(BAD["CMYK"](pixels))
    return bad


# Pillow leaves the file of a picture open that nobody closes where the reading ends as by a kill.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("form", ["files", "tars"])
def test_a_campaign_that_is_killed_leaves_out_the_bad_pictures_and_no_other(tmp_path, vae, form):
    photos = tmp_path / "photos"
    bad = write_folder(photos)
    source = photos if form == "files" else pack_tars(photos, tmp_path / "tars", 5)
    chosen = settings(source, vae, max_bad_examples=0.3, shard_size=5, workers=3, format="tar")
    for after in (1, 5, 3, 2, 4):
        with killed((module, "cut_view"), after=after):
            precompute(chosen, tmp_path / "out")
        if after == 5:
            # Of a picture that is taken away only its own file is made again.
            before = {path.name for path in (tmp_path / "out.partial").glob("*.tar")}
            (photos / "000.png").unlink()
            if form == "tars":
                pack_tars(photos, source, 5)
    out = precompute(chosen, tmp_path / "out")
    rows, listed = rows_of(out), [json.loads(line) for line in (out / "bad_examples.jsonl").read_text().splitlines()]
    assert len(rows) == 25 - 1 - len(bad)
    names = {os.path.splitext(row["file"].replace("::", "/").rpartition("/")[2])[0] for row in listed}
    assert names == {os.path.splitext(name)[0] for name in bad} and all(row["reason"] for row in listed)
    assert (before or form == "files") and len(before - {path.name for path in out.glob("*.tar")}) <= 1
    assert not [*out.glob("read-*.json"), *out.glob("taken-*")]


def test_latents_that_are_not_finite_are_refused_with_their_file(tmp_path, pictures, vae):
    autoencoder = make_vae()
    with torch.no_grad():
        autoencoder.encoder.conv_in.weight.fill_(1e30)
    autoencoder.save_pretrained(tmp_path / "vae")
    write_folder(tmp_path / "photos", 3)
    with pytest.raises(ValueError, match="beyond float16.*00.*png"):
        precompute(settings(tmp_path / "photos", tmp_path / "vae", max_bad_examples=1.0), tmp_path / "out")
    # The advice is followed: nothing of the other autoencoder is there.
    precompute(settings(tmp_path / "photos", vae, max_bad_examples=1.0), tmp_path / "out")
    for path in (tmp_path / "photos").iterdir():
        path.write_bytes(b"no picture")
    with refused(DataError, "photos"):
        precompute(settings(tmp_path / "photos", vae, max_bad_examples=1.0), tmp_path / "none")


def test_an_autoencoder_in_bfloat16_gives_nearly_the_same_and_parts_may_have_no_picture(tmp_path, pictures, vae):
    out = precompute(settings(pictures, vae, shard_size=1), tmp_path / "float32")
    counts = [read_table(path).num_rows for path in out.glob("*.parquet")]
    assert len(counts) == 7 and 0 in counts
    # A tar file is never empty.
    tars = precompute(settings(pictures, vae, shard_size=1, format="tar"), tmp_path / "tar")
    assert len([*tars.glob("*.tar")]) < 7
    # A whole pipeline lends its autoencoder.
    half = precompute(settings(pictures, vae.parent, dtype="bfloat16", shard_size=1), tmp_path / "bfloat16")
    full, half, packed = map(rows_of, (out, half, tars))
    assert len(full) == len(packed) == 7
    for one, other in zip(full, half, strict=True):
        latents, theirs = read_row(one)[0], read_row(other)[0]
        assert 0 < float((latents - theirs).norm() / latents.norm()) < 0.05


@pytest.mark.parametrize("form", ["tar", "jsonl"])
def test_an_example_without_a_class_is_listed_and_left_out(tmp_path, vae, form):
    place = tmp_path / "data"
    place.mkdir()
    pictures = np.random.default_rng(0).integers(256, size=(8, 16, 16, 3), dtype=np.uint8)
    if form == "tar":
        parts = [{"png": png(pixels), "cls": b"1"} for pixels in pictures]
        del parts[6]["cls"]
        write_tar(place / "0.tar", ((f"{number:03d}", part) for number, part in enumerate(parts)))
    else:
        for number, pixels in enumerate(pictures):
            (place / f"{number:03d}.png").write_bytes(png(pixels))
        rows = [{"file_name": f"{number:03d}.png", "label": None if number == 6 else 1} for number in range(8)]
        (place / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = precompute(settings(place, vae, max_bad_examples=0.5), tmp_path / "out")
    assert len(rows_of(out)) == 7
    (listed,) = map(json.loads, (out / "bad_examples.jsonl").read_text().splitlines())
    assert "006" in listed["file"] and "class" in listed["reason"]


# Tar files


def test_tar_files_are_streamed_and_their_latents_are_those_of_the_rows(tmp_path, pictures, vae):
    """The same pictures, as tar files and as rows: nothing is copied, and the order is that of the tar files."""
    tars = pack_tars(pictures, tmp_path / "tars", 3)
    middle = {"crops": {"random": False, "flip": 0.0}, "max_ratio": 2.0, "bucket_step": 4}
    rows = rows_of(precompute(settings(pictures, vae, **middle), tmp_path / "rows"))
    known = {tuple(row["original_size"]): row for row in rows}
    for place in (tars, tars / "*.tar"):
        with nothing_copied():
            out = precompute(settings(place, vae, **middle), tmp_path / f"out-{place.name.strip('*.')}")
        assert len([*out.glob("train-*.parquet")]) == 3
        found = rows_of(out)
        assert [tuple(row["original_size"]) for row in found] == SIZES
        for row in found:
            wanted = known[tuple(row["original_size"])]
            assert_same_answers(*(read_row(each)[0].half() for each in (row, wanted)))
            assert (row["cls"], row["txt"]) == (wanted["label"], wanted["text"])
        assert "__url__" not in found.column_names
    # Of a folder with several splits the one that is asked for.
    for number, split in enumerate(["train", "test", "train"]):
        (tars / f"{number:05d}.tar").rename(tars / f"photos-{split}-{number}.tar")
    found = rows_of(precompute(settings(tars, vae, **middle), tmp_path / "split"))
    assert [tuple(row["original_size"]) for row in found] == SIZES[:3] + SIZES[6:]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_training_on_tar_files_of_latents_is_that_on_parquet(tmp_path, pictures, vae, encoder, streaming):
    texts = {"text_encoder": str(encoder), "max_text_length": 8}
    sizes = {} if streaming else {"max_ratio": 2.0, "bucket_step": 4}
    runs = {}
    for format in ("parquet", "tar"):
        out = precompute(settings(pictures, vae, posterior=True, format=format, **texts, **sizes), tmp_path / format)
        task = {"image_size": 16, "vae": str(vae), "posterior": True}
        for kind, changes in (("classes", {}), ("texts", texts)):
            place, model = tmp_path / f"{format}-{kind}", MODEL if changes else {**MODEL, "num_classes": 3}
            run(make_arguments(place, out, streaming, max_steps=4, task={**task, **changes}, model=model))
            runs[format, kind] = losses(place)
    for kind in ("classes", "texts"):
        assert runs["tar", kind] == runs["parquet", kind] and len(runs["tar", kind]) == 4
    packed, plain = (rows_of(tmp_path / format) for format in ("tar", "parquet"))
    for row, wanted in zip(packed, plain, strict=True):
        found = unpack_row(row)
        assert [found[name] or None for name in wanted] == [value or None for value in wanted.values()]


# Files that cannot be read, or are absent, of examples that come early or late in a tar file.
ODD = [
    {"cls": b"cat"},
    {"txt": b"\xff"},
    {"json": b"{"},
    {"png": b"second"},
    {"cls": None},
    {"png": None},
    {"cls": b""},
]
# What JSON of one tar file may hold; it stays as it is written.
TOLD = ['{"n":  null}', '{"n": 1.50}', '["\\ud83d"]', '"00123"']
TOLD += ["1e-12", "0.1234567890123456", str(2**70), "null", "NaN"]


@pytest.mark.parametrize("endings", ["jjjjjjp", "pjjjjjj", "ppppppjw", "wjpppppp", "JJJJJJp", "jJJpJJJ"])
def test_a_picture_of_another_ending_is_read_where_that_is_no_column(tmp_path, vae, endings):
    """The columns are the endings that most have."""
    names = {"j": "jpg", "p": "png", "w": "webp", "J": "JPG"}
    pixels = np.random.default_rng(0).integers(256, size=(len(endings), 16, 16, 3), dtype=np.uint8)
    rows = []
    for number, ending in enumerate(endings):
        content = encode(Image.fromarray(pixels[number]), {"j": "JPEG", "p": "PNG", "w": "WEBP"}[ending.lower()])
        rows.append((f"{number:03d}", {names[ending]: content, "cls": b"1"}))
    write_tar(tmp_path / "tars" / "0.tar", rows)
    assert len(rows_of(precompute(settings(tmp_path / "tars", vae), tmp_path / "out"))) == len(endings)


@pytest.mark.parametrize(("first", "form"), [(0, "parquet"), (9, "tar")])
def test_examples_of_a_tar_file_that_cannot_be_read_are_named_and_left_out(tmp_path, vae, first, form):
    pictures = np.random.default_rng(0).integers(256, size=(18, 20, 16, 3), dtype=np.uint8)
    told, ending = [TOLD[number % len(TOLD)] for number in range(18)], "json" if form == "tar" else "meta.JSN"

    def encode(name, changes):
        # Notes in front are an example without a picture.
        rows: list = [("README", {"md": b"photos"})] if changes else []
        for number, pixels in enumerate(pictures):
            row = {"png": png(pixels), "cls": b"1", "txt": b"a hen", ending: told[number].encode()}
            change = changes.get(number, {})
            # A second file of the same name is a neighbour of the first.
            each = [row, change] if change.get("png") else [row | change]
            rows += [(f"{number:03d}", {end: held for end, held in part.items() if held is not None}) for part in each]
        write_tar(tmp_path / name / "0.tar", rows)
        chosen = settings(tmp_path / name, vae, max_bad_examples=0.5, format=form)
        rows = [*open_source(DataSource(str(precompute(chosen, tmp_path / f"out-{name}") / f"*.{form}")))]
        return {int(row["__key__"]): row for row in map(unpack_row, rows)}

    odd = dict(enumerate(ODD, first))
    found, whole = encode("odd", odd), encode("whole", {})
    assert {*found} == {*whole} - {*odd} and len(whole) == 18
    for number, row in found.items():
        assert row["crop"] == whole[number]["crop"] and row[ending] == told[number] and row["cls"] == 1
    listed = [json.loads(row) for row in (tmp_path / "out-odd" / "bad_examples.jsonl").read_text().splitlines()]
    assert [row["file"].removesuffix(".png") for row in listed] == [
        "0.tar::README",
        *(f"0.tar::{number:03d}" for number in odd),
    ]
    assert "b'cat'" in listed[1]["reason"] and "'png'" in listed[4]["reason"]
    # None that could be read: the first reason is told.
    with refused(DataError, ".cls", "'cat'"):
        encode("none", dict.fromkeys(range(18), ODD[0]))


@pytest.mark.parametrize("format", ["parquet", "tar"])
def test_parts_that_were_cut_on_their_way_are_made_again(tmp_path, pictures, vae, format):
    chosen = settings(pictures, vae, shard_size=2, format=format)
    with killed((module._Work, "finish"), after=0):
        precompute(chosen, tmp_path / "out")
    first, second, *_ = sorted((tmp_path / "out.partial").glob("train-*"))
    first.write_bytes(first.read_bytes()[:-600])
    second.with_name(f"read-{second.stem.removeprefix('train-')}.json").write_text("[")
    assert len(rows_of(precompute(chosen, tmp_path / "out"))) == 7


def test_tar_files_that_do_not_fit_are_refused(tmp_path, pictures, vae):
    for name in ("00000.tar", "00001.tar", "00002.tar"):
        # Of the first one `datasets` learns the columns, before anything is counted.
        with tarfile.open(pack_tars(pictures, tmp_path / "tars", 3) / name) as tar:
            second = tar.getmembers()[1].offset
        # Empty; cut in a picture, in a header, and between two files, where it looks whole.
        for length in (0, 700, second + 100, second):
            tars = pack_tars(pictures, tmp_path / "tars", 3)
            (tars / name).write_bytes((tars / name).read_bytes()[:length])
            for place in (tars, tars / "*.tar"):
                # As for a training and for scores, which copy them.
                with refused(DataError, name, "whole"):
                    open_source(DataSource(str(place)))
                with refused(DataError, name, "whole"):
                    precompute(settings(place, vae), tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()
    both = rows_of(pictures)
    both = both.add_column("second", both.with_format("arrow")[:]["image"].to_pylist())
    (tmp_path / "both").mkdir()
    both.cast_column("second", datasets.Image()).to_parquet(str(tmp_path / "both" / "train.parquet"))
    with refused(UsageError, "second", "parquet"):
        precompute(settings(tmp_path / "both", vae, format="tar"), tmp_path / "other")


# Pictures of the Hub

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from tests.tasks.test_precompute import main; main()"


def write_rows(photos: Path, folder: Path, files: int) -> Path:
    """The pictures of a folder in parquet files."""
    paths = sorted(photos.iterdir())
    columns = {"image": [{"path": path.name, "bytes": path.read_bytes()} for path in paths]}
    rows = datasets.Dataset.from_dict(columns, features=datasets.Features({"image": datasets.Image(decode=False)}))
    rows = rows.cast_column("image", datasets.Image())
    for number in range(files):
        rows.shard(files, number).to_parquet(folder / f"train-{number:05d}-of-{files:05d}.parquet")
    return folder


def main() -> None:
    """In a process whose Hub is the embedded one: each kind of files, whole, interrupted, and changed on the way."""
    root, form, api = Path(sys.argv[1]), sys.argv[2], HfApi()
    bad = write_folder(root / "photos")
    folder = root / form
    folder.mkdir()
    pack_tars(root / "photos", folder, 5) if form == "tars" else write_rows(root / "photos", folder, 5)
    make_vae().save_pretrained(root / "vae")
    api.create_repo("me/photos", repo_type="dataset")
    api.upload_folder(folder_path=folder, repo_id="me/photos", repo_type="dataset")
    options = {"max_bad_examples": 0.3, "workers": 1, "batch_size": 1}
    here = rows_of(precompute(settings(folder, root / "vae", **options), root / "here"))
    there = settings(Path("me/photos"), root / "vae", **options)
    with nothing_copied():
        whole = precompute(there, root / "whole")
        with killed((module, "cut_view"), after=12):
            precompute(there, root / "out")
        kept = {path.name: path.stat().st_mtime_ns for path in (root / "out.partial").glob("*.parquet")}
        assert 0 < len(kept) < len([*whole.glob("*.parquet")])
        # Another commit, of the same files.
        api.upload_file(repo_id="me/photos", path_or_fileobj=b"words", path_in_repo="README.md", repo_type="dataset")
        out = precompute(there, root / "out")
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in whole.iterdir())
    assert all((out / name).stat().st_mtime_ns == time for name, time in kept.items())
    listed = (out / "bad_examples.jsonl").read_text()
    assert listed.count("\n") == len(bad) and all(Path(name).stem in listed for name in bad)

    def places(rows):
        return sorted([*row["crop"], row["flip"]] for row in rows)

    found, wanted = (rows_of(place) for place in (out, whole))
    for row, other in zip(found, wanted, strict=True):
        assert_same_answers(read_row(row)[0].half(), read_row(other)[0].half())
    # The place and the mirroring of a picture follow from its content, wherever it is.
    assert len(found) == 25 - len(bad) and places(found) == places(here)


@pytest.mark.parametrize("form", ["tars", "rows"])
def test_pictures_of_the_hub_are_encoded_without_a_copy_and_go_on_after_a_kill(tmp_path, form):
    with EmbeddedHub(tmp_path / "hub") as hub:
        run_python(SCRIPT, hub.url, tmp_path / "home", str(ROOT), str(tmp_path), form)
