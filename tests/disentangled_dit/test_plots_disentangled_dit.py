"""Grids of pictures: drawn in batches, each picture from noise of its own."""

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler

from hf_ext.plots import grids as plots
from tests.disentangled_dit.pipeline_testing import make_pipeline, make_text_pipeline


@pytest.fixture
def batches(monkeypatch):
    """Pictures of each call of a pipeline, and the most that it has memory for."""
    seen = []
    limit = {"pictures": 1000}

    def watch(pipeline):
        kind, call = type(pipeline), type(pipeline).__call__

        def ask(self, **options):
            count = len(options["generator"])
            seen.append(count)
            if count > limit["pictures"]:
                # what a pipeline draws of its generators before memory is short
                for generator in options["generator"]:
                    torch.randn(1, generator=generator)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
            return call(self, **options)

        monkeypatch.setattr(kind, "__call__", ask)
        return pipeline

    return watch, seen, limit


def values(rows) -> np.ndarray:
    return np.stack([[np.asarray(picture, dtype=float) for picture in row] for row in rows])


@pytest.mark.parametrize("kind", ["class", "text"])
def test_the_batches_do_not_change_the_pictures(kind, batches):
    watch, seen, _ = batches
    # DDPM draws noise at every step too
    pipeline = watch(make_pipeline(DDPMScheduler()) if kind == "class" else make_text_pipeline())
    conditions = [1, 4, 2] if kind == "class" else ["a red hen", "green fish", "a hen"]
    options = {"num_inference_steps": 3, "original_size": (12, 20)}
    whole = values(plots.sample_rows(pipeline, conditions, 3, 5, **options))
    assert whole.shape[:2] == (3, 3) and seen == [9]
    seen.clear()
    for size, calls in ((4, [4, 4, 1]), (1, [1] * 9), (100, [9])):
        rows = plots.sample_rows(pipeline, conditions, 3, 5, size, **options)
        # a grey level, where sums differ in their last bits
        np.testing.assert_allclose(values(rows), whole, atol=1)
        assert seen == calls
        seen.clear()
    # noise of a column, whatever the row
    assert np.abs(whole[:, 0] - whole[:, 1]).max() > 8 and np.abs(whole[0] - whole[1]).max() > 1
    other = values(plots.sample_rows(pipeline, conditions, 3, 6, **options))
    assert np.abs(other - whole).max() > 8


def test_large_pictures_are_drawn_a_few_at_once(batches, monkeypatch):
    watch, seen, _ = batches
    pipeline = watch(make_pipeline())
    # the model's own are of 6 x 10 pixels
    monkeypatch.setattr(plots, "PIXELS", 2 * 60 + 59)
    plots.sample_rows(pipeline, [0, 1], 2, 0, num_inference_steps=1)
    assert seen == [2, 2]
    seen.clear()
    rows = plots.sample_rows(pipeline, [0, 1], 2, 0, num_inference_steps=1, height=40, width=20)
    assert seen == [1] * 4 and rows[0][0].size == (20, 40)


def test_a_batch_that_memory_has_no_room_for_becomes_smaller(batches):
    watch, seen, limit = batches
    pipeline = watch(make_pipeline())
    whole = values(plots.sample_rows(pipeline, [0, 1, 2], 3, 0, num_inference_steps=2))
    seen.clear()
    limit["pictures"] = 5
    rows = plots.sample_rows(pipeline, [0, 1, 2], 3, 0, num_inference_steps=2)
    np.testing.assert_allclose(values(rows), whole, atol=1)
    assert seen == [9, 4, 4, 1]
    limit["pictures"] = 0
    with pytest.raises(torch.OutOfMemoryError):
        plots.sample_rows(pipeline, [0], 1, 0, num_inference_steps=1)
