"""Twenty thousand small pictures in tar files, two hundred of them bad, and a command that is killed five times."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline
from hf_ext.tasks import precompute as module
from hf_ext.tasks.diffusion_data import Crops, cut_view, load_autoencoder, read_row, to_pixels, unpack_row, write_tar
from hf_ext.tasks.precompute import precompute
from tests.kit.killing import killed
from tests.kit.models import assert_same_answers
from tests.kit.pictures import encode

from . import diffusion_testing as tools

COUNT, FILES, EVERY = 20_000, 40, 100
# Finished files at which the process is killed.
KILLS = (3, 11, 19, 28, 37)


def png(pixels: np.ndarray) -> bytes:
    return encode(Image.fromarray(pixels))


def pixels_of(number: int) -> np.ndarray:
    """Squares of random colours, of another size for each number, some of them transparent."""
    generator = np.random.default_rng(number)
    channels = 4 if number % 7 == 0 else 3
    colours = generator.integers(256, size=(6, 6, channels), dtype=np.uint8)
    return colours.repeat(8, axis=0).repeat(8, axis=1)[: 32 + number % 17, : 48 - number % 13]


BAD = {
    "truncated": lambda pixels: png(pixels)[:60],
    "empty": lambda pixels: b"",
    "text": lambda pixels: b"no picture at all",
    "16 bits": lambda pixels: png(pixels[..., 0].astype(np.uint16) * 250),
    "CMYK": lambda pixels: encode(Image.fromarray(pixels[..., :3]).convert("CMYK"), "JPEG"),
    "small": lambda pixels: png(pixels[:1, :1]),
    "long": lambda pixels: png(pixels[:1, :40]),
    "absent": lambda pixels: None,
}


def kind_of(number: int) -> str | None:
    """The kind of a bad picture; None for a good one."""
    return [*BAD][number // EVERY % len(BAD)] if number % EVERY == EVERY // 2 else None


def examples_of(file: int) -> Iterator[tuple[str, dict[str, bytes]]]:
    for number in range(file * COUNT // FILES, (file + 1) * COUNT // FILES):
        content = BAD.get(kind_of(number), png)(pixels_of(number))
        parts = {} if content is None else {"png": content}
        yield f"{number:06d}", {**parts, "cls": str(number % 10).encode()}


def rows_of(out: Path) -> dict[str, dict]:
    """All rows by the names of their pictures; no name twice."""
    found = {}
    for path in out.glob("train-*.tar"):
        parts: dict[str, dict] = {}
        with tarfile.open(path) as tar:
            for member in tar:
                name, _, ending = member.name.partition(".")
                content = tar.extractfile(member).read()
                parts.setdefault(name, {})[ending] = json.loads(content) if ending == "json" else content
        rows = [unpack_row(part) for part in parts.values()]
        assert not {row["__key__"] for row in rows} & found.keys()
        found |= {row["__key__"]: row for row in rows}
    return found


@pytest.mark.slow
def test_five_kills_and_two_hundred_bad_pictures_leave_the_right_latents(tmp_path, vae):
    for file in range(FILES):
        write_tar(tmp_path / "tars" / f"{file:05d}.tar", examples_of(file))
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    words = ["dit", "precompute", str(tmp_path / "tars"), str(out), "--vae", str(vae), "--size", "32", "--centre"]
    words += ["--format", "tar", "--batch-size", "64", "--workers", "1", "--max-bad-examples", "0.01"]
    command = [sys.executable, "-m", "hf_ext_cli.main", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done: dict[str, int] = {}
    for finished in KILLS:
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and len([*partial.glob("train-*.tar")]) < finished:
                time.sleep(0.05)
            process.kill()
        assert process.returncode == -signal.SIGKILL
        times = {path.name: path.stat().st_mtime_ns for path in partial.glob("train-*.tar")}
        # What was there is not made again.
        assert done.items() <= times.items() and len(times) >= finished
        done = times
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert done.items() <= {path.name: path.stat().st_mtime_ns for path in out.glob("train-*.tar")}.items()
    assert not partial.exists() and len([*out.iterdir()]) == FILES + 2

    bad = {f"{number:06d}": kind for number in range(COUNT) if (kind := kind_of(number)) is not None}
    rows = rows_of(out)
    assert len(bad) == 200 and len(rows) == 19_800
    assert rows.keys() | bad.keys() == {f"{number:06d}" for number in range(COUNT)}
    listed = [json.loads(line) for line in (out / "bad_examples.jsonl").read_text().splitlines()]
    assert sorted(row["file"].rpartition("::")[2].removesuffix(".png") for row in listed) == sorted(bad)
    assert all(row["reason"] for row in listed)

    autoencoder = load_autoencoder(str(vae))
    for name in sorted(rows)[::660]:
        view = cut_view(Image.fromarray(pixels_of(int(name))), (32, 32), 3, Crops(), None)
        with torch.no_grad():
            expected = DisentangledDiTPipeline.encode_image(autoencoder, to_pixels([view]))[0]
        latent, controls = read_row(rows[name])
        assert_same_answers(latent.half(), expected.half(), name)
        assert rows[name]["cls"] == int(name) % 10
        assert all(np.array_equal(controls[key], value) for key, value in view.controls.items())


@pytest.mark.parametrize("form", ["bmp", "ppm", "tif", "arrow"])
def test_edited_pictures_of_the_same_size_are_encoded_again_and_no_others(tmp_path, vae, form, caplog):
    """Retouched in the middle, or exchanged: of one of them the ends of the file stay."""
    pictures = np.random.default_rng(0).integers(256, size=(8, 64, 96, 3), dtype=np.uint8)
    (tmp_path / "photos").mkdir()
    ending = "bmp" if form == "arrow" else form

    def write(numbers):
        for number in numbers:
            Image.fromarray(pictures[number]).save(tmp_path / "photos" / f"{number}.{ending}")
        paths = sorted((tmp_path / "photos").iterdir())
        if form == "arrow":
            rows = {"image": [{"path": path.name, "bytes": path.read_bytes()} for path in paths], "n": [*range(8)]}
            kinds = datasets.Features({"image": datasets.Image(), "n": datasets.Value("int64")})
            datasets.Dataset.from_dict(rows, features=kinds).to_parquet(str(tmp_path / "rows.parquet"))
        return tmp_path / "rows.parquet" if form == "arrow" else tmp_path / "photos"

    def encoded(name):
        return tools.rows_of(precompute(tools.settings(place, vae, shard_size=1), tmp_path / name)).to_pandas()

    place = write(range(8))
    whole = encoded("whole")
    with killed((module._Work, "finish"), after=0):
        encoded("out")
    done = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out.partial").glob("train-*")}
    pictures[2, 24:40] = 0
    pictures[5] = 255 - pictures[5]
    write([2, 5])
    found, again = encoded("out"), encoded("again")
    pd.testing.assert_frame_equal(found, again)
    assert len(found) == 8 and "made again" in caplog.text
    kept = {path.name for path in (tmp_path / "out").glob("train-*") if done.get(path.name) == path.stat().st_mtime_ns}
    # Those in a part with an edited one are encoded too; place and mirroring stay, of the retouched one too.
    assert len(kept) >= 5
    controls = ["original_size", "target_size", "crop", "flip", "latent"]
    before, after = ({str(row[controls].tolist()) for _, row in rows.iterrows()} for rows in (whole, found))
    assert len(before & after) == 6
    places = ({str(row[controls[:-1]].tolist()) for _, row in rows.iterrows()} for rows in (whole, found))
    assert len(set.difference(*places)) <= 1


def test_a_turned_picture_goes_into_the_bucket_that_it_is_shown_in(tmp_path, vae, caplog):
    turned = Image.Exif()
    turned[274] = 6
    (tmp_path / "photos").mkdir()
    for name, exif in (("turned", turned), ("wide", Image.Exif())):
        Image.new("RGB", (32, 16)).save(tmp_path / "photos" / f"{name}.jpg", exif=exif)
    rows = tools.rows_of(
        precompute(tools.settings(tmp_path / "photos", vae, max_ratio=2.0, bucket_step=4), tmp_path / "out")
    )
    found = sorted(zip(rows["original_size"], rows["target_size"], strict=True))
    assert found == [([16, 32], [12, 20]), ([32, 16], [20, 12])] and "no class and no text" in caplog.text
