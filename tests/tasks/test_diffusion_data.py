"""Crops, mirroring and their controls; buckets; batches of one group each."""

import math

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from hf_ext.errors import DataError, UsageError
from hf_ext.tasks.diffusion_data import Crops, bucket_sizes, cut_view, nearest_bucket
from hf_ext.tasks.diffusion_latents import read_row, to_pixels, write_row
from hf_ext.training.data import IndexedSamples
from tests.kit.refusals import refused


def ramp(height, width):
    """Red tells the column, green the row."""
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[..., 0], pixels[..., 1] = np.arange(width)[None], np.arange(height)[:, None]
    return Image.fromarray(pixels)


@pytest.mark.parametrize("seed", range(12))
def test_controls_say_where_the_part_was(seed):
    """A picture that need not be resized: the part is found again at the place that the controls name."""
    height, width, size = 40, 64, (40, 24)
    view = cut_view(ramp(height, width), size, 3, Crops(flip=0.5), np.random.default_rng(seed))
    top, left = view.crop
    whole = np.asarray(ramp(height, width))
    # Crop coordinates are those of the picture after mirroring: left' = W - (left + W_crop).
    shown = whole[:, ::-1] if view.flip else whole
    np.testing.assert_array_equal(view.pixels, shown[top : top + 40, left : left + 24])
    controls = {name: value.tolist() for name, value in view.controls.items()}
    assert controls == {
        "original_size": [40, 64],
        "crop": [top, left],
        "target_size": [40, 24],
        "flip": [float(view.flip)],
        "aspect_ratio": [pytest.approx(math.log(64 / 40))],
    }


def test_places_and_mirroring_are_drawn_and_the_middle_is_not():
    views = [cut_view(ramp(40, 64), (40, 24), 3, Crops(), np.random.default_rng(seed)) for seed in range(200)]
    assert {view.crop[1] for view in views} == set(range(41))
    assert 70 < sum(view.flip for view in views) < 130
    never = [cut_view(ramp(40, 64), (40, 24), 3, Crops(False, 0.0), np.random.default_rng(seed)) for seed in range(9)]
    assert {(view.crop, view.flip) for view in never} == {((0, 20), False)}
    middle = cut_view(ramp(40, 64), (40, 24), 3, Crops(), None)
    np.testing.assert_array_equal(middle.pixels, never[0].pixels)


def test_global_crops_see_the_whole_short_side_and_local_ones_keep_the_scale():
    crops = Crops(flip=0.0, local_prob=0.5, local_size=64)
    views = [cut_view(ramp(128, 200), (32, 32), 3, crops, np.random.default_rng(seed)) for seed in range(300)]
    # A picture of 128 x 200 is resized to 32 x 50 for a global crop, and to 64 x 100 for a local one.
    spans = [(int(view.pixels[..., 1].max()) - int(view.pixels[..., 1].min())) for view in views]
    is_local = [span < 80 for span in spans]
    assert 110 < sum(is_local) < 190
    for view, local in zip(views, is_local, strict=True):
        assert view.crop[0] <= (32 if local else 0) and view.crop[1] <= (68 if local else 18)
        assert view.original_size == (128, 200) and view.target_size == (32, 32)
    assert max(view.crop[1] for view in views) > 60


def test_smaller_originals_are_told_and_lack_what_is_fine():
    noise = Image.fromarray(np.random.default_rng(0).integers(256, size=(32, 48, 3), dtype=np.uint8))
    crops = Crops(flip=0.0, shrink_prob=0.5, shrink_size=8)
    views = [cut_view(noise, (32, 32), 3, crops, np.random.default_rng(seed)) for seed in range(300)]
    sides = np.array([view.original_size[0] for view in views])
    assert set(sides) == set(range(8, 33)) and 110 < (sides < 32).sum() < 180
    for view in views:
        assert view.original_size[1] == round(1.5 * view.original_size[0]) and view.pixels.shape == (32, 32, 3)
        assert view.crop[0] == 0 and view.crop[1] <= 17
    fine = [np.diff(view.pixels.astype(float), axis=1) for view in views]
    energies = np.array([np.square(steps).mean() for steps in fine])
    assert energies[sides <= 16].max() < 0.2 * energies[sides == 32].min()
    again = cut_view(noise, (32, 32), 3, crops, np.random.default_rng(7))
    np.testing.assert_array_equal(again.pixels, views[7].pixels)
    # A place in the picture of the later training, whatever the original; no picture is made larger for it.
    local = Crops(flip=0.0, local_prob=1.0, local_size=48, shrink_prob=1.0, shrink_size=8)
    crops_seen = {cut_view(noise, (32, 32), 3, local, np.random.default_rng(seed)).crop for seed in range(200)}
    assert {top for top, _ in crops_seen} == set(range(17)) and max(left for _, left in crops_seen) > 36
    assert cut_view(Image.new("L", (7, 5)), (16, 16), 1, local, np.random.default_rng(0)).original_size == (5, 7)
    assert cut_view(noise, (32, 32), 3, local, None).original_size == (32, 48)


def test_small_and_grey_pictures_are_enlarged():
    view = cut_view(Image.new("L", (7, 5), 200), (16, 16), 1, Crops(), np.random.default_rng(0))
    assert view.pixels.shape == (16, 16, 1) and view.original_size == (5, 7) and set(view.pixels.flat) == {200}
    assert cut_view(Image.new("L", (7, 5)), (16, 16), 3, Crops(), None).pixels.shape == (16, 16, 3)
    pixels = to_pixels([view])
    assert pixels.shape == (1, 1, 16, 16) and torch.allclose(pixels, torch.full_like(pixels, 200 / 127.5 - 1))
    with refused(DataError, "8 bits"):
        cut_view(Image.fromarray(np.zeros((9, 9), np.uint16)), (4, 4), 1, Crops(), None)
    # A transparent picture is cut on white.
    colours = np.full((8, 8, 4), (255, 0, 255, 0), dtype=np.uint8)
    colours[4:] = (0, 128, 0, 255)
    view = cut_view(Image.fromarray(colours), (8, 8), 3, Crops(), None)
    assert (view.pixels[:4] == 255).all() and (view.pixels[4:] == (0, 128, 0)).all()


@pytest.mark.parametrize(("side", "step", "ratio"), [(512, 64, 2.0), (256, 16, 3.0), (64, 8, 1.0)])
def test_buckets_have_about_one_area(side, step, ratio):
    buckets = bucket_sizes(side, step, ratio)
    assert (side, side) in buckets and len(set(buckets)) == len(buckets)
    assert {(width, height) for height, width in buckets} == set(buckets)
    for height, width in buckets:
        assert height % step == width % step == 0
        assert side * side * 0.7 < height * width <= side * side
        assert max(height / width, width / height) <= ratio
    ratios = [width / height for height, width in buckets]
    assert ratios == sorted(ratios)
    # A picture of a bucket's own shape goes there, whatever its size.
    assert all(nearest_bucket((2 * height, 2 * width), buckets) == (height, width) for height, width in buckets)
    with refused(UsageError, "multiple"):
        bucket_sizes(100, 64, 2.0)


def test_a_latent_survives_its_row():
    view = cut_view(ramp(30, 50), (16, 24), 3, Crops(flip=1.0), np.random.default_rng(1))
    latent = torch.randn(4, 2, 3)
    again, controls = read_row({**write_row(latent, view), "label": 3})
    assert torch.equal(again, latent.half().float())
    assert all(np.array_equal(controls[name], value) for name, value in view.controls.items())
    with refused(DataError, "crop"):
        read_row({name: value for name, value in write_row(latent, view).items() if name != "crop"})
    for name, value in (("original_size", [0, 5]), ("original_size", [5]), ("crop", [])):
        with refused(DataError, name):
            read_row({**write_row(latent, view), name: value})


class Rows(list):
    """Stands for a data set: rows by number."""


def test_batches_are_of_one_group_and_every_example_comes_once_an_epoch():
    groups = np.array([0] * 7 + [1] * 4 + [2] * 1)
    samples = IndexedSamples(Rows(range(12)), lambda row, generator: row, 3, groups, 3)
    # 7 in three batches, 4 in two, 1 in one.
    assert samples.epoch_length == 18
    epochs = [[samples[epoch * 18 + offset][0] for offset in range(18)] for epoch in range(4)]
    for epoch in epochs:
        assert set(epoch) == set(range(12))
        assert all(len({groups[row] for row in epoch[start : start + 3]}) == 1 for start in range(0, 18, 3))
    assert len({tuple(epoch) for epoch in epochs}) == 4
    # Read from the middle, the order is the same.
    again = IndexedSamples(Rows(range(12)), lambda row, generator: row, 3, groups, 3)
    assert [again[20 + offset][0] for offset in range(9)] == [samples[20 + offset][0] for offset in range(9)]


def test_batches_stay_of_one_group_where_examples_are_bad():
    groups = np.array([0] * 5 + [1] * 2 + [2] * 1)
    data = datasets.Dataset.from_dict({"row": range(8)})
    # All of group 1, the only one of group 2, and so much of group 0 that whole batches are bad.
    broken = {1, 2, 3, 5, 6, 7}

    def transform(example, generator):
        if example["row"] in broken:
            raise ValueError("broken")
        return example["row"]

    samples = IndexedSamples(data, transform, 3, groups, 2, bad_allowed=100)
    for position in range(0, 40, 2):
        batch = [samples[position], samples[position + 1]]
        assert {row for row, _ in batch} <= {0, 4}
        # An example is counted once, however often it fills its batch.
        assert all(len({row["example"] for row in bad}) == len(bad) for _, bad in batch)
    broken |= {0, 4}
    with refused(ValueError, "broken"):
        samples[0]
