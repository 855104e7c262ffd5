"""Options without effect are refused, and bits that Pillow drops are told."""

from pathlib import Path

import numpy as np
import pytest
import tifffile
from numpngw import write_png
from PIL import Image

from hf_ext.restoration.jobs import check_template, plan_jobs
from hf_ext.restoration.pipeline import ImageRestorationPipeline
from hf_ext.semanir import SemanIRImageProcessor
from hf_ext.semanir.pipeline_semanir import ImageRestorationPipeline as PlainPipeline
from tests.kit.command_line import run
from tests.kit.refusals import refused
from tests.kit.restorers import tiny_restorer


@pytest.mark.parametrize(
    ("out", "words", "named"),
    [
        ("-", ["--name", "{stem}_x"], "--name"),
        ("-", ["--compare", "--name", "{stem}_x"], "--compare"),
        ("one.png", ["--name", "{stem}_x"], "--name"),
        ("one.png", ["--format", "png", "--compare"], "--format"),
    ],
)
def test_an_option_without_effect_is_refused(tmp_path, out, words, named):
    (tmp_path / "a.png").touch()
    told = run("restore", "nowhere", tmp_path / "a.png", "--out", out, *words, code=2).stderr
    assert named in told and "leave out" in told or "needs a folder" in told


@pytest.mark.parametrize("ending", ["png", "tif"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_bits_that_pillow_drops_are_told_once_where_they_are_lost(tmp_path, caplog, ending, dtype):
    pixels = np.full((8, 8, 3), np.iinfo(dtype).max // 3, dtype)
    path = tmp_path / f"a.{ending}"
    write_png(str(path), pixels) if ending == "png" else tifffile.imwrite(path, pixels, photometric="rgb")
    model = tiny_restorer()
    ways = {
        "a file here": lambda: ImageRestorationPipeline(model).preprocess(str(path)),
        "a file elsewhere": lambda: PlainPipeline(model).preprocess(str(path)),
        "an image": lambda: ImageRestorationPipeline(model).preprocess(Image.open(path)),
        "an image of the processor": lambda: SemanIRImageProcessor()(Image.open(path), return_tensors="pt"),
    }
    for name, read in ways.items():
        caplog.clear()
        read()
        told = [record for record in caplog.records if "16 bits" in record.getMessage()]
        assert len(told) == (dtype is np.uint16 and name != "a file here"), name


def test_a_name_of_nothing_stops_no_other_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["a.png", "b .png ", "c\u2028.png", "d\x0b.png"]
    for name in names:
        Image.new("L", (8, 8)).save(name, "PNG")
    Path("lines").write_text("\n".join([*names, "absent.png", "", "no*.png"]), encoding="utf-8")
    Path("zeros").write_text("\0".join([*names, "absent.png", ""]), encoding="utf-8")
    for given in (["@lines"], ["@zeros"], [*names, "absent.png", "no*.png"]):
        plan = plan_jobs(given, "out")
        assert [str(job.source) for job in plan.jobs] == names
        assert [*plan.refused] == ["absent.png", "no*.png"][: 1 + ("@zeros" not in given)]


@pytest.mark.parametrize("name", ["{stem.upper}", "{stem[0]}", "{0}", "{}", "{ext}", "a", "{stem", "{stem}/a"])
def test_a_template_has_stem_and_ext_alone(name):
    with refused(ValueError, "{stem}"):
        check_template(name)


@pytest.mark.parametrize("words", [["--format", "webp"], ["--name", "{stem}_one"], ["--format", "webp", "--compare"]])
def test_results_beside_their_pictures_are_found_again(tmp_path, words):
    model, photos = tmp_path / "model", tmp_path / "photos"
    tiny_restorer().save_pretrained(model)
    photos.mkdir()
    for name in "ab":
        Image.new("L", (8, 8), 90).save(photos / f"{name}.png")
    again = ["restore", model, photos, "--out", photos, *words]
    run(*again)
    (photos / "b.webp").unlink(missing_ok=True)
    (photos / "b_one.png").unlink(missing_ok=True)
    Image.new("L", (8, 8), 9).save(photos / "c.png")
    assert run(*again).stdout.startswith(f"2 restored to {photos}")
    other = ["--name", "{stem}_two", *(["--compare"] if "--compare" in words else [])]
    assert run("restore", model, photos, "--out", photos, *other).stdout.startswith(f"3 restored to {photos}")
    if "--compare" in words:
        page = photos / "comparison.html"
        page.write_text("mine")
        Image.new("L", (8, 8), 5).save(photos / "d.png")
        assert "comparison.html" in run(*again, code=1).stderr and page.read_text() == "mine"
