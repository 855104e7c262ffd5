"""restore_image: tiles without seams, eight turns, half precision, every kind of image, clear refusals."""

import numpy as np
import pytest
import torch
from transformers.modeling_outputs import ImageSuperResolutionOutput

from hf_ext.errors import DataError, UsageError
from hf_ext.restoration.tiles import restore_image, tile_overlap, tile_spans
from hf_ext.semanir import SemanIRForImageRestoration
from tests.kit.refusals import refused
from tests.kit.restorers import tiny_restorer

SIZES = {"columnar": {}, "u-shaped": {"architecture": "u-shaped", "depths": [2, 2], "num_heads": [2, 2]}}


def make_model(**changes) -> SemanIRForImageRestoration:
    """A model that corrects as much as a trained one: with its first weights it would return its input."""
    model = tiny_restorer(**{"depths": [2], **changes})
    with torch.no_grad():
        for parameter in model.reconstruction.parameters():
            parameter.mul_(5)
    return model


def make_image(*shape: int) -> np.ndarray:
    """Waves and noise in [0, 1]."""
    rows, columns = np.mgrid[: shape[0], : shape[1]]
    waves = 0.5 + 0.3 * np.sin(rows / 5)[..., None] * np.cos(columns / 7 + 1)[..., None]
    return (waves + 0.1 * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)


def direct(model: SemanIRForImageRestoration, image: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        result = model(torch.from_numpy(image.transpose(2, 0, 1).copy())[None]).reconstruction[0]
    return result.permute(1, 2, 0).numpy()


@pytest.mark.parametrize(("size", "scale"), [((1, 1), 1), ((3, 7), 3), ((21, 34), 2)])
def test_a_whole_image_is_one_call_of_the_model(size, scale):
    model, image = make_model(scale=scale), make_image(*size, 3)
    restored = restore_image(model, image)
    assert restored.dtype == np.float32 and restored.shape == (size[0] * scale, size[1] * scale, 3)
    np.testing.assert_allclose(restored, direct(model, image), atol=1e-6)


@pytest.mark.parametrize("scale", [1, 2, 3])
@pytest.mark.parametrize(
    ("length", "tile", "overlap"), [(5, 24, 8), (24, 24, 8), (25, 24, 8), (100, 32, 16), (99, 20, 8)]
)
def test_weights_of_tiles_add_up_to_one_on_the_grid(length, tile, overlap, scale):
    spans = tile_spans(length, tile, overlap, scale)
    total = np.zeros(length * scale)
    for span in spans:
        assert span.start % 4 == 0 and span.stop - span.start <= tile
        assert len(span.weights) == (span.stop - span.start) * scale
        total[span.start * scale : span.stop * scale] += span.weights
    np.testing.assert_allclose(total, 1, atol=1e-6)
    assert (spans[0].start, spans[-1].stop) == (0, length)
    # Each tile brings something that the one before has not.
    assert all(after.stop > before.stop for before, after in zip(spans, spans[1:], strict=False))


@pytest.mark.parametrize("architecture", SIZES)
@pytest.mark.parametrize("scale", [1, 2])
def test_tiles_leave_no_seam(architecture, scale):
    """The result is near the whole image's, and steps no more than that where tiles begin or end."""
    model = make_model(**SIZES[architecture], scale=scale)
    step, overlap = model.config.multiple_of, 16
    tile = 2 * overlap
    image = make_image(tile + overlap + 3 * step - 5, tile + 3, 3)
    whole, tiled = restore_image(model, image), restore_image(model, image, tile=tile)
    error = tiled - whole
    # Random weights look further than trained ones: what they do to the picture changes by a tenth or two.
    correction = np.abs(whole - (image if scale == 1 else whole.mean())).mean()
    assert np.abs(error).mean() < 0.15 * correction
    for axis in (0, 1):
        steps = np.abs(np.diff(error, axis=axis)).mean(axis=(1 - axis, 2))
        own = np.abs(np.diff(whole, axis=axis)).mean()
        edges = {line for span in tile_spans(image.shape[axis], tile, overlap) for line in (span.start, span.stop)}
        seams = [line * scale - 1 for line in edges if 0 < line < image.shape[axis]]
        assert len(seams) >= 2
        # Neither beside the rest of the error, nor beside the picture.
        assert steps[seams].max() < 1.5 * steps[steps > 1e-6].mean()
        assert steps[seams].max() < 0.1 * own


def test_automatic_tiles_follow_the_free_memory():
    model, image, calls = make_model(), make_image(60, 61, 3), []
    model.register_forward_pre_hook(
        lambda module, args, inputs: calls.append(tuple(inputs["pixel_values"].shape[2:])), with_kwargs=True
    )
    model.memory_budget = 2**20
    assert restore_image(model, image, tile="auto").shape == image.shape and calls == [(60, 61)]
    # Half of what is free is less than the temporary tensors alone may take.
    model.memory_budget = 2**60
    calls.clear()
    assert restore_image(model, image, tile="auto").shape == image.shape
    assert len(calls) > 1 and max(max(size) for size in calls) < 60


# As a CPU says it.
CPU_IS_FULL = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError(CPU_IS_FULL)])
def test_automatic_tiles_shrink_where_they_do_not_fit(error):
    model = make_model()

    def small_only(module, args, inputs):
        if inputs["pixel_values"].shape[-1] > 40:
            raise error

    model.register_forward_pre_hook(small_only, with_kwargs=True)
    image, seen = make_image(30, 70, 3), []
    restored = restore_image(model, image, tile="auto", progress=lambda done, total: seen.append((done, total)))
    assert restored.shape == image.shape and seen[-1] == (2100, 2100)
    with pytest.raises(type(error)):
        restore_image(model, image)
    # A bug makes no smaller tiles.
    error, seen = RuntimeError("a bug"), []
    with refused(RuntimeError, "bug"):
        restore_image(model, image, tile="auto", progress=lambda *done: seen.append(done))
    assert not seen


def test_the_ensemble_turns_with_the_image():
    """Any model becomes one for which it makes no difference how the image lies."""
    model = make_model()
    image = make_image(9, 14, 3)
    restored = restore_image(model, image, self_ensemble=True)
    assert restored.shape == image.shape
    for turn in (np.rot90, np.flipud):
        turned = restore_image(model, np.ascontiguousarray(turn(image)), self_ensemble=True)
        np.testing.assert_allclose(turned, turn(restored), atol=1e-6)
        assert np.abs(restore_image(model, np.ascontiguousarray(turn(image))) - turn(restored)).max() > 1e-5
    enlarged = restore_image(make_model(scale=2), image, self_ensemble=True)
    assert enlarged.shape == (18, 28, 3)
    for size in ((1, 1), (1, 9)):
        assert restore_image(model, np.zeros((*size, 3), np.uint8), self_ensemble=True).shape == (*size, 3)


@pytest.mark.parametrize(("channels", "taken"), [(1, 3), (2, 3), (4, 3), (1, 1), (2, 1), (3, 1), (4, 1)])
@pytest.mark.parametrize("scale", [1, 2])
def test_colours_are_matched_and_alpha_is_carried_through(channels, taken, scale):
    model = make_model(num_channels=taken, scale=scale)
    image = make_image(10, 14, channels).clip(0, 1)
    if channels % 2 == 0:
        # No pixel is hidden beside its neighbours.
        image[..., -1] = image[..., -1].clip(0.1)
    restored = restore_image(model, image)
    assert restored.shape == (10 * scale, 14 * scale, channels)
    colours = image if channels % 2 else image[..., :-1]
    if taken == 1:
        wanted = np.concatenate([direct(model, colours[..., [index]]) for index in range(colours.shape[-1])], axis=-1)
    else:
        wanted = direct(model, np.repeat(colours, 4 - colours.shape[-1], -1)[..., :3])
        wanted = wanted if colours.shape[-1] == 3 else (wanted @ np.float32([0.299, 0.587, 0.114]))[..., None]
    np.testing.assert_allclose(restored[..., : colours.shape[-1]], wanted, atol=1e-6)
    if channels % 2 == 0:
        alpha = restored[..., -1]
        assert 0 <= alpha.min() <= alpha.max() <= 1
        if scale == 1:
            np.testing.assert_array_equal(alpha, image[..., -1])


@pytest.mark.parametrize("size", [(12, 16), (11, 15)])
def test_a_mosaic_becomes_colours(size):
    model = make_model(num_channels=4, num_channels_out=3, scale=2)
    mosaic = make_image(*size, 1)
    restored = restore_image(model, mosaic)
    assert restored.shape == (*size, 3)
    if size == (12, 16):
        packed = np.concatenate([mosaic[row::2, column::2] for row in (0, 1) for column in (0, 1)], axis=-1)
        np.testing.assert_allclose(restored, restore_image(model, packed), atol=1e-5)
    for option in ("self_ensemble", "wrap"):
        with refused(UsageError, option):
            restore_image(model, mosaic, **{option: True})
    with refused(ValueError, "3 channels", "1 channel"):
        restore_image(model, make_image(8, 8, 3))
    with refused(ValueError, "4 channels"):
        restore_image(model, np.zeros((8, 8, 4), np.uint8))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_pictures_of_whole_numbers_keep_their_depth(dtype):
    white = np.iinfo(dtype).max
    pixels = np.random.default_rng(0).integers(0, white, (8, 9, 3), dtype=dtype, endpoint=True)
    model = make_model()
    restored = restore_image(model, pixels)
    assert restored.dtype == dtype
    wanted = restore_image(model, (pixels / white).astype(np.float32)).clip(0, 1) * white
    np.testing.assert_allclose(restored, wanted, atol=0.51)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_that_overflows_is_restored_again_in_float32(dtype, caplog):
    model = make_model()
    image = make_image(40, 14, 3)
    wanted = restore_image(model.to(dtype).float(), image, tile=32)
    model.to(dtype)

    def half_fails(module, inputs, outputs):
        """As an activation beyond 65504 would do: half precision gives what is no number, a black image."""
        broken = outputs.reconstruction * torch.nan
        return outputs if model.dtype == torch.float32 else ImageSuperResolutionOutput(reconstruction=broken)

    model.register_forward_hook(half_fails)
    restored = restore_image(model, image, tile=32)
    np.testing.assert_allclose(restored, wanted, atol=1e-6)
    assert model.dtype == dtype and len(caplog.messages) == 1
    assert "overflowed: restoring again in float32" in caplog.messages[0]


def test_a_broken_model_never_gives_a_black_image():
    model = make_model()
    with torch.no_grad():
        next(iter(model.parameters())).fill_(torch.nan)
    with refused(DataError, "float32"):
        restore_image(model, make_image(8, 8, 3))


REFUSED = [
    (np.zeros((8, 8, 3), np.int64), TypeError, "int64"),
    (torch.zeros(8, 8, 3), TypeError, "Tensor"),
    (np.zeros((8, 8), np.float32), ValueError, "shape (8, 8)"),
    (np.zeros((0, 8, 3), np.float32), ValueError, "at least 1"),
    (np.full((8, 8, 3), np.nan), ValueError, "NaN"),
    (np.full((8, 8, 3), np.inf), ValueError, "infinite"),
    (np.zeros((8, 8, 5), np.float32), ValueError, "channels"),
    (np.full((8, 8, 3), -255.0), ValueError, "up to 255"),
]


@pytest.mark.parametrize(("image", "error", "fact"), REFUSED)
def test_what_cannot_be_restored_is_refused(image, error, fact):
    with refused(error, fact):
        restore_image(make_model(), image)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_strength_is_the_share_of_the_change(channels):
    model, image = make_model(), make_image(9, 14, channels)
    whole = restore_image(model, image)
    np.testing.assert_array_equal(restore_image(model, image, strength=1), whole)
    np.testing.assert_array_equal(restore_image(model, image, strength=0), image)
    half = restore_image(model, image, strength=0.5)
    np.testing.assert_allclose(half, (whole + image) / 2, atol=1e-6)
    assert np.abs(half - image).max() > 0.01
    pixels = np.uint8(255 * image.clip(0, 1))
    np.testing.assert_array_equal(restore_image(model, pixels, strength=0), pixels)


NONSENSE = [
    *(({}, {"strength": value}, ["strength", value]) for value in (-0.1, 1.5, float("nan"), "much", "")),
    *(({"scale": 2}, {"strength": value}, ["enlarges"]) for value in (0.5, "auto")),
    ({"num_channels": 4, "num_channels_out": 3, "scale": 2}, {"strength": 0.5}, ["demosaicks"]),
    *(({}, {"tile": value}, ["32 up", "auto"]) for value in (0, 28, 34, 16, -32, "big", 12.5)),
]


@pytest.mark.parametrize(("changes", "options", "facts"), NONSENSE)
def test_options_that_make_no_sense_are_refused(changes, options, facts):
    with refused(UsageError, *facts):
        restore_image(make_model(**changes), make_image(8, 8, 3), **options)


WRAPPED = [(1, (24, 32), False), (2, (21, 34), False), (2, (3, 5), False), (1, (3, 5), True)]


@pytest.mark.parametrize(("scale", "size", "turns"), WRAPPED)
def test_a_wrapped_picture_goes_on_at_its_opposite_edge(scale, size, turns):
    """The reference lays the picture side by side until its middle has only itself around it."""
    model = make_model(scale=scale)
    image = make_image(*size, 3)
    wrapped = restore_image(model, image, wrap=True, self_ensemble=turns)
    assert wrapped.shape == (size[0] * scale, size[1] * scale, 3)
    margin = tile_overlap(model)
    wide = np.pad(image, ((margin, margin), (margin, margin), (0, 0)), mode="wrap")
    inner = slice(margin * scale, (margin + size[0]) * scale), slice(margin * scale, (margin + size[1]) * scale)
    np.testing.assert_allclose(wrapped, restore_image(model, wide, self_ensemble=turns)[inner], atol=1e-5)
    plain = restore_image(model, image, self_ensemble=turns)
    assert np.abs(plain - wrapped).max() > 1e-4
