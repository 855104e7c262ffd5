"""Pictures of crops before and after, and of the key-semantic neighbours of a patch."""

import re
from functools import partial
from urllib.parse import unquote

import numpy as np
import pytest

from hf_ext.errors import UsageError
from hf_ext.restoration import attention
from hf_ext.restoration.attention import explain, find_neighbours
from hf_ext.restoration.comparison import compare_pictures, comparison_page, comparison_sheet
from tests.kit.pictures import noise
from tests.kit.refusals import refused
from tests.kit.restorers import tiny_restorer

make_model = partial(tiny_restorer, depths=[2, 2], num_heads=[2, 2])


@pytest.mark.parametrize(("channels", "scale"), [(1, 2), (2, 1), (3, 1), (4, 2)])
def test_a_sheet_shows_the_whole_its_middle_and_what_changed_most(channels, scale):
    before = np.full((200, 300, channels), 128, np.uint8)
    before[..., -1] = before[..., -1] if channels % 2 else 255
    after = before.repeat(scale, 0).repeat(scale, 1)
    # All of it has detail now, but for one spot it is the input's.
    before[::2, ::3, 0], after[:: 2 * scale, :: 3 * scale, 0] = 30, 30
    after[10 * scale : 30 * scale, 210 * scale : 230 * scale, 0] = noise(20 * scale, 20 * scale)
    comparison = compare_pictures("a.png", before, after)
    assert comparison.title == "a.png, 300 x 200" + (" to 600 x 400" if scale == 2 else "")
    assert comparison.before.shape == (200, 300, 3)
    assert comparison.after.shape == ((213, 320, 3) if scale == 2 else (200, 300, 3))
    middle, most = comparison.crops
    left, top, right, bottom = (part * side for part, side in zip(most.box, (300, 200) * 2, strict=True))
    assert left <= 211 and top <= 11 and right >= 229 and bottom >= 29
    side = 80 // scale
    np.testing.assert_allclose(
        middle.box, ((300 - side) / 600, (200 - side) / 400, (300 + side) / 600, (200 + side) / 400)
    )
    for crop in (middle, most):
        assert crop.before.shape == (side, side, 3)
        assert crop.after.shape == (80, 80, 3)
    sheet = comparison_sheet([comparison, comparison])
    assert sheet.mode == "RGB"
    assert sheet.size == (3 * 336 + 16, 4 * 362 + 16)
    # A crop appears as it is, each of its pixels a square: what changed most, after, of the second picture.
    panel = np.asarray(sheet)[16 + 3 * 362 + 26 : 16 + 3 * 362 + 26 + 320, 16 + 2 * 336 : 16 + 2 * 336 + 320]
    np.testing.assert_array_equal(panel[2::4, 2::4], most.after)
    # And the whole beside it, but for the frames around the crops.
    whole = np.asarray(sheet)[16 + 3 * 362 + 26 :, 16:][: comparison.after.shape[0], : comparison.after.shape[1]]
    assert (whole == comparison.after).mean() > 0.95


def test_a_page_names_its_pictures_from_where_it_lies(tmp_path):
    """Names are text, not markup; kinds that browsers do not show are left out."""
    names = ("a.png", "b c#1.JPG", '"><script>x</script>.webp', "d.tif", "e%41.gif")
    pairs = [(name, tmp_path / "in" / name, tmp_path / "out" / "deep" / name) for name in names]
    pairs.append(("f.heic", tmp_path / "in" / "f.heic", tmp_path / "out" / "f.png"))
    page = comparison_page(tmp_path / "out", pairs)
    assert page.count("<figure>") == 4 and "<script" not in page and "2 of 6" in page
    assert "Left out" not in comparison_page(tmp_path, pairs[:1])
    addresses = re.findall(r'src="([^"]*)"', page)
    kept = names[:3] + names[4:]
    found = [(tmp_path / "out" / unquote(address)).resolve() for address in addresses]
    assert found == [tmp_path / side / name for name in kept for side in ("out/deep", "in")]


@pytest.mark.parametrize("architecture", ["columnar", "u-shaped"])
@pytest.mark.parametrize("shift_policy", ["none", "stage", "layer"])
def test_neighbours_are_those_of_the_dictionary(architecture, shift_policy):
    """The k most similar tokens of the window that holds the patch, by the features of the stage's input."""
    model = make_model(architecture=architecture, shift_policy=shift_policy)
    image = noise(21, 30, 3).astype(np.float32) / 255
    for stage in (1, 2):
        found = find_neighbours(model, image, (17, 9), stage, [1, 5, 100])
        assert found.cell == (2 if architecture == "u-shaped" and stage == 2 else 1)
        top, left, bottom, right = found.window
        row, column = found.patch
        # The pixel lies in the patch, the patch in the window.
        assert top + row * found.cell <= 9 < top + (row + 1) * found.cell <= bottom
        assert left + column * found.cell <= 17 < left + (column + 1) * found.cell <= right
        assert found.keys[1].sum() == 1 and found.keys[1][row, column]
        assert found.keys[100].all()
        assert found.keys[5].sum() == 5 and found.keys[5][row, column]
        others = found.similarity[found.keys[5] & ~found.keys[1]]
        assert others.min() >= found.similarity[~found.keys[5]].max()
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("taken", [1, 3])
def test_any_picture_is_explained(channels, taken):
    drawing = explain(make_model(num_channels=taken), noise(30, 41, channels), (3, 4), stage=2, top_k=[2, 9, 16])
    # Overview, similarity and three numbers of keys, in two rows.
    assert drawing.size == (1020, 720)
    assert len(drawing.getcolors(2**20)) > 20


def test_a_large_picture_is_seen_around_the_patch_with_the_same_window(monkeypatch):
    """The network sees 768 x 768 pixels at most, cut on the grid of windows."""
    model, at, pixels, drawn = make_model(), (790, 21), noise(40, 801, 3), []
    monkeypatch.setattr(attention, "_draw", lambda *given: drawn.append(given))
    explain(model, pixels, at, top_k=[2, 16])
    ((picture, found, stage),) = drawn
    whole = find_neighbours(model, np.zeros((40, 801, 3), np.float32), at, 1, [16])
    assert (found.window, found.patch, found.cell, stage) == (whole.window, whole.patch, 1, 1)
    np.testing.assert_array_equal(picture, pixels)
    # The chosen tokens are seen as they are, the others grey.
    top, left, bottom, right = found.window
    shown, window = attention._mark_keys(picture, found, found.keys[2]), pixels[top:bottom, left:right]
    np.testing.assert_array_equal((shown == window).all(-1), found.keys[2])


def test_what_is_not_there_is_refused():
    model, pixels = make_model(), noise(20, 30, 3)
    with refused(UsageError, "stage 3", "stages 1"):
        explain(model, pixels, stage=3)
    for at in ((30, 2), (2, 20), (-1, 2)):
        with refused(UsageError, "30 x 20"):
            explain(model, pixels, at)
    with refused(UsageError, "at least 1"):
        explain(model, pixels, top_k=[0, 4])
    with refused(UsageError, "4 channels"):
        explain(make_model(num_channels=4), pixels)
