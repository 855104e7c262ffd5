"""Pictures of 16 bits are to a classifier what those of 8 are, wherever it gets them; floats are refused."""

import io

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from hf_ext.answers.classifying import read_picture
from hf_ext.errors import DataError
from hf_ext.restoration.camera import UnreadableError
from hf_ext.restoration.encoding import Frames, Picture, encode_frames
from hf_ext.restoration.files import read_8_bits
from hf_ext.tasks.pictures import in_colours
from hf_ext.tasks.signals import ImageTask, PixelTask
from tests.kit.refusals import refused
from tests.restoration.tiff_testing import grey_tiff

# A ramp from black to white, and the same in 16 bits: as far from it as rounding allows.
RAMP = np.linspace(0, 255, 64).round().astype(np.uint8).reshape(8, 8)
DEEP = (RAMP.astype(int) * 257 + np.resize([-128, 0, 128], (8, 8))).clip(0, 65535).astype(np.uint16)
FLOATS = Image.fromarray(RAMP / np.float32(255))


def tiff_of(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "TIFF")
    return file.getvalue()


def deep_picture(mode: str) -> Image.Image:
    deep = Image.fromarray(DEEP)
    return deep if mode == "I;16" else deep.convert("I") if mode == "I" else deep.convert("I").convert(mode)


@pytest.mark.parametrize("mode", ["I;16", "I;16L", "I;16B", "I;16N", "I"])
def test_16_bits_become_8(mode):
    picture = deep_picture(mode)
    assert picture.mode == mode
    np.testing.assert_array_equal(np.asarray(in_colours(picture, "L")), RAMP)
    np.testing.assert_array_equal(np.asarray(in_colours(picture, "RGB")), np.stack([RAMP] * 3, axis=-1))


@pytest.mark.parametrize(("bits", "photometric"), [(12, 1), (16, 0), (16, 1)])
def test_16_bits_of_a_tiff_become_8_however_they_lie(bits, photometric):
    """Of a file, and of a row of data that has it."""
    values = np.rint(RAMP.astype(float) * (2**bits - 1) / 255).astype(int)
    data = grey_tiff(2**bits - 1 - values if photometric == 0 else values, bits=bits, photometric=photometric)
    np.testing.assert_array_equal(np.asarray(read_picture(data))[..., 0], RAMP)
    rows = datasets.Dataset.from_list([{"image": {"bytes": data, "path": None}}])
    example = rows.cast_column("image", datasets.Image())[0]
    np.testing.assert_array_equal(np.asarray(in_colours(example["image"], "L")), RAMP)
    np.testing.assert_array_equal(np.asarray(read_8_bits(data)), RAMP)


@pytest.mark.parametrize(
    ("picture", "said"),
    [
        (FLOATS, "PIL mode 'F' and values from 0 to 1,"),
        (Image.fromarray(np.array([[-1, 70000]], np.int32)), "PIL mode 'I' and values from -1 to 70000,"),
        (Image.fromarray(np.array([[0, 65536]], np.int32)), "PIL mode 'I' and values from 0 to 65536,"),
    ],
)
def test_what_has_no_known_range_is_refused(picture, said):
    with pytest.raises(
        ValueError, match=f"a picture has {said} and only whole .* 0 to 65535 .*: convert it to 8 bits"
    ):
        in_colours(picture, "RGB")


def read_from_file(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(read_picture(tiff_of(picture))))


def trained(task: PixelTask | ImageTask, picture: Image.Image) -> torch.Tensor:
    example = {"image": picture, "label": 0}
    samples = task.training_sample(example, np.random.default_rng(0)), task.encode(example)
    return torch.stack([sample[next(iter(sample))] for sample in samples])


PLACES = {
    "grey pixels": lambda picture: trained(PixelTask(image_size=8, num_labels=2), picture),
    "coloured pixels": lambda picture: trained(
        PixelTask(image_size=8, num_labels=2, mean=[0.5] * 3, std=[0.5] * 3), picture
    ),
    "images": lambda picture: trained(ImageTask(image_size=8, num_labels=2), picture),
    "a file": read_from_file,
}


@pytest.mark.parametrize("place", PLACES)
def test_every_place_takes_16_bits_and_refuses_floats(place):
    see = PLACES[place]
    wanted = see(Image.fromarray(RAMP))
    assert len(wanted.unique()) > 30
    for mode in ("I;16", "I"):
        torch.testing.assert_close(see(deep_picture(mode)), wanted, rtol=0, atol=0)
    with refused(DataError, "PIL", "8 bits"):
        see(FLOATS)


def test_a_server_takes_16_bits_and_says_what_else_to_send():
    colours = np.stack([RAMP, RAMP.T, 255 - RAMP], axis=-1)
    for pixels in (RAMP[..., None], colours):
        data = encode_frames(Frames([Picture(pixels.astype(np.uint16) * 257)]), "PNG")
        picture = read_8_bits(data)
        assert picture.mode == ("RGB" if pixels is colours else "L")
        np.testing.assert_array_equal(np.asarray(picture).reshape(pixels.shape), pixels)
    with refused(UnreadableError, "PIL", "8 bits"):
        read_8_bits(tiff_of(FLOATS))
