"""The picture of a report."""

import json

import pytest
from PIL import Image

from hf_ext import figures
from hf_ext.merging.report_picture import draw_report
from tests.merging.merged_sums import Merge, fine_tunes


@pytest.fixture(scope="module")
def report():
    return json.loads(json.dumps(Merge(*fine_tunes()).report()))


def test_the_picture_is_a_png_that_grows_with_the_tasks_and_nothing_else_is_left(report, tmp_path):
    draw_report(report, tmp_path / "some.png")
    draw_report(Merge(*fine_tunes(20)).report(), tmp_path / "many.png")
    with Image.open(tmp_path / "some.png") as small, Image.open(tmp_path / "many.png") as large:
        small.load()
        assert small.format == "PNG" and large.width > small.width >= 1200 and large.height > small.height
        # Heat maps, bars and letters: many colours, and not one that covers nearly everything but white.
        assert len(small.convert("RGB").getcolors(1 << 20)) > 500
    assert len(list(tmp_path.iterdir())) == 2


def test_odd_names_parts_of_no_bytes_and_errors_of_any_size_are_drawn(report, tmp_path):
    """Heads of tiny tasks are less than a pixel wide, and a merge had failed for its picture."""
    base, tasks = fine_tunes(1)
    same = Merge(base, [[tensor.clone() for tensor in base]] * 2, method="average").report(
        tasks=["x" * 64, "same"], names=[f"$a_{index}$.{index}.$\\frac$" for index in range(6)]
    )
    draw_report(same, tmp_path / "same.png")
    report["sizes"] = dict.fromkeys(report["sizes"], 0) | {"extras": 1}
    for entry, value in zip(report["tasks"], (None, 0.0, 1e9), strict=False):
        entry["error"] = dict.fromkeys(entry["error"], value)
    report["cosines"] = [[None for _ in row] for row in report["cosines"]]
    for layer in report["layers"]:
        layer["conflict"] = [None for _ in layer["conflict"]]
    draw_report(report, tmp_path / "odd.png")
    with Image.open(tmp_path / "odd.png") as image:
        assert image.width >= 1200


def test_without_matplotlib_a_warning_names_what_is_not_drawn(monkeypatch, caplog):
    assert figures.can_draw("report.png") and not caplog.records
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    assert not figures.can_draw("report.png")
    (record,) = caplog.records
    assert "report.png" in record.getMessage() and "hf-ext[plots]" in record.getMessage()
