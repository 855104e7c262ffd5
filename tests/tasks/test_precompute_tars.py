"""Latents of tar files and in tar files: streamed, in their order, and trained on as those of parquet."""

import tarfile

import datasets
import pytest
from PIL import Image

from hf_ext.errors import DataError, UsageError
from hf_ext.tasks.diffusion_latents import read_row
from hf_ext.tasks.precompute import precompute
from hf_ext.tasks.tar_files import unpack_row
from tests.kit.models import assert_same_answers
from tests.kit.refusals import refused

from .diffusion_testing import MODEL, losses, make_arguments, pack_tars, rows_of, run, settings, write_pictures

SIZES = [(24, 12), (16, 16), (12, 24), (30, 15), (20, 20), (16, 32), (18, 18)]


@pytest.fixture
def pictures(tmp_path):
    return write_pictures(tmp_path / "pictures", side_column=SIZES)


def test_tar_files_are_streamed_and_their_latents_are_those_of_the_rows(tmp_path, pictures, vae, monkeypatch):
    """The same pictures, as tar files and as rows: nothing is copied, and the order is that of the tar files."""

    def refuse(*_, **__):
        raise AssertionError("the pictures are copied")

    tars = pack_tars(pictures, tmp_path / "tars", 3)
    middle = {"crops": {"random": False, "flip": 0.0}, "max_ratio": 2.0, "bucket_step": 4}
    rows = rows_of(precompute(settings(pictures, vae, **middle), tmp_path / "rows"))
    known = {tuple(row["original_size"]): row for row in rows}
    for place in (tars, tars / "*.tar"):
        with monkeypatch.context() as patch:
            patch.setattr(datasets.DatasetBuilder, "download_and_prepare", refuse)
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
            model = MODEL if changes else {**MODEL, "num_classes": 3}
            arguments = make_arguments(
                tmp_path / f"{format}-{kind}", out, streaming, max_steps=4, task={**task, **changes}, model=model
            )
            run(arguments)
            runs[format, kind] = losses(tmp_path / f"{format}-{kind}")
    for kind in ("classes", "texts"):
        assert runs["tar", kind] == runs["parquet", kind] and len(runs["tar", kind]) == 4
    packed, plain = (rows_of(tmp_path / format) for format in ("tar", "parquet"))
    for row, wanted in zip(packed, plain, strict=True):
        found = unpack_row(row)
        assert [found[name] or None for name in wanted] == [value or None for value in wanted.values()]


def test_tar_files_that_do_not_fit_are_refused(tmp_path, pictures, vae):
    for number, name in enumerate(["00000.tar", "00001.tar", "00002.tar"]):
        # Of the first one `datasets` learns the columns, before anything is counted.
        with tarfile.open(pack_tars(pictures, tmp_path / "tars", 3) / name) as tar:
            second = tar.getmembers()[1].offset
        # Empty; cut in a picture, in a header, and between two files, where it looks whole.
        for length in (0, 700, second + 100, second):
            tars = pack_tars(pictures, tmp_path / "tars", 3)
            (tars / name).write_bytes((tars / name).read_bytes()[:length])
            for place in (tars, tars / "*.tar") if number < 2 else (tars,):
                with refused(DataError, name, "whole"):
                    precompute(settings(place, vae), tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()
    both = datasets.load_dataset(str(pictures), split="train")
    both = both.add_column("second", both.with_format("arrow")[:]["image"].to_pylist()).cast_column(
        "second", datasets.Image()
    )
    (tmp_path / "both").mkdir()
    both.to_parquet(str(tmp_path / "both" / "train.parquet"))
    with refused(UsageError, "second", "parquet"):
        precompute(settings(tmp_path / "both", vae, format="tar"), tmp_path / "other")


def test_a_part_without_a_usable_picture_is_no_tar_file(tmp_path, pictures, vae):
    out = precompute(settings(pictures, vae, shard_size=1, format="tar"), tmp_path / "out")
    assert len(rows_of(out)) == 7 and len([*out.glob("*.tar")]) < 7


def test_a_turned_picture_goes_into_the_bucket_that_it_is_shown_in(tmp_path, vae):
    turned = Image.Exif()
    turned[274] = 6
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (32, 16)).save(tmp_path / "photos" / "turned.jpg", exif=turned)
    Image.new("RGB", (32, 16)).save(tmp_path / "photos" / "wide.jpg")
    out = precompute(settings(tmp_path / "photos", vae, max_ratio=2.0, bucket_step=4), tmp_path / "out")
    assert sorted(rows_of(out)["original_size"]) == [[16, 32], [32, 16]]
    assert sorted(rows_of(out)["target_size"]) == [[12, 20], [20, 12]]
