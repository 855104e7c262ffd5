"""Options without effect are refused, and bits that Pillow drops are told."""

import numpy as np
import pytest
import tifffile
from numpngw import write_png
from PIL import Image

from hf_ext.restoration.pipeline import ImageRestorationPipeline
from hf_ext.semanir import SemanIRImageProcessor
from hf_ext.semanir.pipeline_semanir import ImageRestorationPipeline as PlainPipeline
from tests.kit.command_line import run
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
