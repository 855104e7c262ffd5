"""Files of several pictures: every frame and page is read and written, with durations and the number of plays."""

import numpy as np
import pytest

from hf_ext.errors import DataError, UsageError
from hf_ext.restoration.encoding import encode_frames
from hf_ext.restoration.files import Frames, Picture, read_frames, read_image
from tests.kit.pictures import encode, make_exif, noise, write_image
from tests.kit.refusals import refused

ANIMATED = {"GIF": ".gif", "PNG": ".png", "WEBP": ".webp"}


def frames_of(*shades: int, channels: int = 3, size: tuple[int, int] = (12, 16)) -> list[np.ndarray]:
    """A square that wanders over a flat ground; beside it all is transparent if there is alpha."""
    pictures = []
    for number, shade in enumerate(shades):
        pixels = np.full((*size, channels), 40, np.uint8)
        pixels[2 + number : 8 + number, 3:9] = shade
        if channels % 2 == 0:
            pixels[..., -1] = 0
            pixels[2 + number : 8 + number, 3:9, -1] = 255
        pictures.append(pixels)
    return pictures


@pytest.mark.parametrize("plays", [0, 1, 2, 5])
@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("format", ANIMATED)
def test_an_animation_keeps_its_frames_times_and_plays(format, channels, plays, tmp_path):
    pixels = frames_of(250, 180, 90, channels=channels)
    frames = Frames([Picture(part) for part in pixels], [40.0, 120.0, 300.0], plays)
    path = write_image(tmp_path / f"a{ANIMATED[format]}", frames)
    read = read_frames(path)
    assert read.durations == frames.durations
    assert read.plays == plays
    assert len(read.pictures) == 3
    with refused(DataError, "3 frames"):
        read_image(path)


@pytest.mark.parametrize("format", [*ANIMATED, "PNG with a still"])
def test_times_and_plays_of_animations_that_pillow_wrote_are_read(format, tmp_path):
    format, _, still = format.partition(" ")
    first, *more = frames_of(250, 180, 90, 20)
    times, options = [50, 60, 70, 80][bool(still) :], {"default_image": True} if still else {}
    frames = read_frames(encode(first, format, more, duration=times, loop=3, lossless=True, **options))
    assert frames.still == bool(still) and len(frames.pictures) == 4 and frames.durations[-len(times) :] == times
    assert frames.plays == (4 if format == "GIF" else 3)
    # And written again they are the same animation.
    again = read_frames(write_image(tmp_path / "b.png", frames))
    assert (again.durations[-len(times) :], again.plays, again.still) == (times, frames.plays, frames.still)
    for first, second in zip(again.pictures, frames.pictures, strict=True):
        np.testing.assert_array_equal(first.pixels, second.pixels)


def test_pages_keep_their_size_depth_and_description(tmp_path):
    one, two, three = (make_exif({270: text}, {0xA434: f"lens of the {text}"}) for text in ("one", "two", "three"))
    pages = [
        Picture(frames_of(250)[0], one, None, (300, 300)),
        Picture(noise(9, 7, 3, dtype=np.uint16), two),
        Picture(frames_of(90, channels=1)[0], three, None, (72, 72)),
    ]
    read = read_frames(write_image(tmp_path / "a.tif", Frames(pages)))
    assert read.durations is None
    for page, wanted in zip(read.pictures, pages, strict=True):
        np.testing.assert_array_equal(page.pixels, wanted.pixels)
        assert page.exif[270] == wanted.exif[270]
        assert page.exif.get_ifd(0x8769)[0xA434] == wanted.exif.get_ifd(0x8769)[0xA434]
        assert page.dpi == wanted.dpi


def test_what_a_format_cannot_hold_is_said():
    pictures = [Picture(pixels) for pixels in frames_of(9, 99)]
    for format in ("JPEG", "BMP", "TIFF"):
        with refused(UsageError, format, "2 frames"):
            encode_frames(Frames(pictures, [10.0, 10.0]), format)
    for format in ("JPEG", "PNG", "GIF"):
        with refused(UsageError, format, "2 pages"):
            encode_frames(Frames(pictures), format)


def test_all_frames_together_are_bounded_before_they_are_decoded(tmp_path, monkeypatch):
    frames = [Picture(pixels) for pixels in frames_of(9, 99, 199, size=(100, 100))]
    moving = write_image(tmp_path / "a.gif", Frames(frames, [10.0] * 3))
    pages = write_image(tmp_path / "a.tif", Frames(frames))
    assert len(read_frames(moving, 0.03).pictures) == len(read_frames(pages, 0.03).pictures) == 3
    with refused(DataError, "3 frames", "100 x 100 pixels", "0.025 megapixels"):
        read_frames(moving, 0.025)
    with refused(DataError, "30000 pixels", "0.025 megapixels"):
        read_frames(pages, 0.025)
