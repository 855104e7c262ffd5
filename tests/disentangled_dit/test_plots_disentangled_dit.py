"""Grids of pictures: drawn in batches, each picture from noise of its own."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from PIL import Image

from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline
from hf_ext.tasks import diffusion_grids as plots
from tests.disentangled_dit.pipeline_testing import make_pipeline, make_text_pipeline, quiet


class Watched(DisentangledDiTPipeline):
    """A pipeline that notes the pictures of each call, has memory for so many, and may leave them empty."""

    seen: list[int]
    limit, paints = 1000, True

    def __call__(self, **options):
        count = len(options["generator"])
        self.seen.append(count)
        if count > self.limit:
            # what a pipeline draws of its generators before memory is short
            for generator in options["generator"]:
                torch.randn(1, generator=generator)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        if not self.paints:
            return SimpleNamespace(images=[Image.new("RGB", (options["width"], options["height"]))] * count)
        return super().__call__(**options)


def watch(pipeline: DisentangledDiTPipeline) -> Watched:
    watched = quiet(Watched.from_pipe(pipeline))
    watched.seen = []
    return watched


def values(rows) -> np.ndarray:
    return np.stack([[np.asarray(picture, dtype=float) for picture in row] for row in rows])


@pytest.mark.parametrize("kind", ["class", "text"])
def test_the_batches_do_not_change_the_pictures(kind):
    # DDPM draws noise at every step too
    pipeline = watch(make_pipeline(DDPMScheduler()) if kind == "class" else make_text_pipeline())
    conditions = [1, 4, 2] if kind == "class" else ["a red hen", "green fish", "a hen"]
    options = {"num_inference_steps": 3, "original_size": (12, 20)}
    whole = values(plots.sample_rows(pipeline, conditions, 3, 5, **options))
    seen = pipeline.seen
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
    assert np.abs(values(plots.sample_rows(pipeline, conditions, 3, 6, **options)) - whole).max() > 8


def test_large_pictures_are_drawn_a_few_at_once():
    pipeline = watch(make_pipeline())
    pipeline.paints = False
    # as many as have the pixels of two of 512 x 512
    for height, width, calls in ((512, 512, [2, 2]), (384, 512, [2, 2]), (768, 512, [1] * 4), (128, 512, [4])):
        rows = plots.sample_rows(pipeline, [0, 1], 2, 0, num_inference_steps=1, height=height, width=width)
        assert pipeline.seen == calls and rows[0][0].size == (width, height)
        pipeline.seen.clear()


def test_a_batch_that_memory_has_no_room_for_becomes_smaller():
    pipeline = watch(make_pipeline())
    seen = pipeline.seen
    whole = values(plots.sample_rows(pipeline, [0, 1, 2], 3, 0, num_inference_steps=2))
    seen.clear()
    pipeline.limit = 5
    rows = plots.sample_rows(pipeline, [0, 1, 2], 3, 0, num_inference_steps=2)
    np.testing.assert_allclose(values(rows), whole, atol=1)
    assert seen == [9, 4, 4, 1]
    pipeline.limit = 0
    with pytest.raises(torch.OutOfMemoryError):
        plots.sample_rows(pipeline, [0], 1, 0, num_inference_steps=1)
