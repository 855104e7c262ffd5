"""The picture of a report."""

import json
import resource

import pytest
from PIL import Image

from hf_ext import figures
from hf_ext.merging.report_picture import draw_report
from tests.kit.refusals import refused
from tests.merging.merged_sums import Merge, fine_tunes


@pytest.fixture(scope="module")
def report():
    return Merge(*fine_tunes()).report()


@pytest.fixture(scope="module")
def picture(report, tmp_path_factory):
    path = tmp_path_factory.mktemp("picture") / "report.png"
    draw_report(report, path)
    return path


def test_the_picture_is_a_png_and_nothing_else_is_left(picture):
    with Image.open(picture) as image:
        image.load()
        assert image.format == "PNG"
        assert image.width >= 1200
        # Heat maps, bars and letters: many colours, and not one that covers nearly everything but white.
        assert len(image.convert("RGB").getcolors(1 << 20)) > 500
    assert list(picture.parent.iterdir()) == [picture]


def test_the_picture_is_drawn_from_a_report_read_from_json(report, picture, tmp_path):
    draw_report(json.loads(json.dumps(report)), tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == picture.read_bytes()


def test_a_picture_that_cannot_be_written_leaves_the_old_one(report, picture, tmp_path):
    old = tmp_path / "report.png"
    old.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with refused(OSError, "File too large"):
            draw_report(report, old)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert old.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [old]


def test_pictures_of_one_task_of_many_and_of_odd_names(tmp_path):
    base, tasks = fine_tunes(1)
    draw_report(Merge(base, tasks).report(), tmp_path / "one.png")
    same = Merge(base, [[tensor.clone() for tensor in base]] * 2, method="average").report(
        tasks=["x" * 64, "same"], names=[f"$a_{index}$.{index}.$\\frac$" for index in range(6)]
    )
    draw_report(same, tmp_path / "same.png")
    base, tasks = fine_tunes(20)
    merge = Merge(base, tasks)
    draw_report(merge.report(), tmp_path / "many.png")
    with Image.open(tmp_path / "one.png") as small, Image.open(tmp_path / "many.png") as large:
        assert large.width > small.width
        assert large.height > small.height


def test_a_part_of_no_bytes_and_errors_of_any_size_are_drawn(report, tmp_path):
    """Heads of tiny tasks are less than a pixel wide, and a merge had failed for its picture."""
    odd = json.loads(json.dumps(report))
    odd["sizes"] = dict.fromkeys(odd["sizes"], 0) | {"extras": 1}
    for entry, value in zip(odd["tasks"], (None, 0.0, 1e9), strict=False):
        entry["error"] = dict.fromkeys(entry["error"], value)
    odd["cosines"] = [[None for _ in row] for row in odd["cosines"]]
    for layer in odd["layers"]:
        layer["conflict"] = [None for _ in layer["conflict"]]
    draw_report(odd, tmp_path / "odd.png")
    with Image.open(tmp_path / "odd.png") as image:
        assert image.width >= 1200


def test_without_matplotlib_a_warning_names_what_is_not_drawn(monkeypatch, caplog):
    assert figures.can_draw("report.png") and not caplog.records
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    assert not figures.can_draw("report.png")
    (record,) = caplog.records
    assert "report.png" in record.getMessage() and "hf-ext[plots]" in record.getMessage()
