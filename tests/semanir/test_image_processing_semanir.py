"""SemanIRImageProcessor: every kind of picture in, 8-bit pictures out."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.modeling_outputs import ImageSuperResolutionOutput

from hf_ext.semanir import SemanIRImageProcessor
from tests.kit.pictures import noise
from tests.kit.refusals import refused

COLOUR = noise(6, 9, 3)
RGB = Image.fromarray(COLOUR)
EXPECTED = torch.from_numpy(COLOUR).permute(2, 0, 1).float()[None] / 255
KINDS = [RGB, RGB.convert("RGBA"), COLOUR, COLOUR.transpose(2, 0, 1), torch.from_numpy(COLOUR)]
KINDS += [[COLOUR], [[RGB]], COLOUR[None]]


def test_colour_images_of_every_kind_are_one_batch():
    for image in KINDS:
        pixels = SemanIRImageProcessor()(image, return_tensors="pt").pixel_values
        assert pixels.dtype == torch.float32
        torch.testing.assert_close(pixels, EXPECTED)
    floats = COLOUR.astype(np.float32) / 255
    pixels = SemanIRImageProcessor()(floats, do_rescale=False, return_tensors="pt").pixel_values
    torch.testing.assert_close(pixels, EXPECTED)
    with refused(ValueError, "floats"):
        SemanIRImageProcessor()(COLOUR.astype(np.float32), do_rescale=False)


@pytest.mark.parametrize("do_convert_rgb", [True, False])
def test_grey_has_one_channel_or_three_and_16_bits_need_no_option(do_convert_rgb):
    processor = SemanIRImageProcessor(do_convert_rgb=do_convert_rgb)
    expected = EXPECTED[:, :1].expand(-1, 3 if do_convert_rgb else 1, -1, -1)
    for image in (COLOUR, COLOUR.astype(np.uint16) * 257):
        torch.testing.assert_close(processor(image, return_tensors="pt").pixel_values, EXPECTED)
        grey = image[..., 0].copy()
        for one in (grey, Image.fromarray(grey), torch.from_numpy(grey)):
            for given in (one, [one]):
                torch.testing.assert_close(processor(given, return_tensors="pt").pixel_values, expected)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"])
def test_every_mode_becomes_colour_or_grey(mode):
    picture = RGB.convert("RGB" if mode in ("HSV", "LAB") else "RGBA")
    picture = Image.new("LAB", (9, 6), (120, 130, 140)) if mode == "LAB" else picture.convert(mode)
    pixels = SemanIRImageProcessor()(picture, return_tensors="np").pixel_values[0]
    np.testing.assert_allclose(pixels, np.asarray(picture.convert("RGB")).transpose(2, 0, 1) / 255, rtol=1e-6)
    channels = 1 if mode in ("1", "L", "LA") else 3
    assert SemanIRImageProcessor(do_convert_rgb=False)(picture, return_tensors="np").pixel_values.shape[1] == channels


def test_what_is_no_picture_of_known_range_is_refused():
    for images, words in (
        ([], ["images"]),
        (noise(5, 6, 9), ["(5, 6, 9)"]),
        (COLOUR.astype(int) - 9, ["int64", "-9"]),
        (COLOUR / 255 + 0.3, ["float64", "do_rescale"]),
        (Image.fromarray(np.zeros((4, 4), np.int32)), ["unknown"]),
        (np.full((6, 9, 3), 65535, np.int32), ["int32", "65535"]),
        (np.where(np.eye(6, 9)[..., None], np.nan, np.zeros(3)), ["infinite", "NaN"]),
        (np.full((6, 9, 3), 0.5, np.float32), ["float32", "do_rescale"]),
    ):
        with refused(ValueError, *words):
            SemanIRImageProcessor()(images, return_tensors="pt")


GREY_ALPHA, BINARY, FLAT = np.maximum(noise(6, 9, 2), 1), COLOUR // 128 * np.uint8(255), noise(3, 9, 3)


@pytest.mark.parametrize(
    ("image", "wanted", "options"),
    [
        *((image, image, {}) for image in (GREY_ALPHA, GREY_ALPHA[:2], COLOUR[:2])),
        (torch.from_numpy(GREY_ALPHA.transpose(2, 0, 1)), GREY_ALPHA, {}),
        (FLAT, FLAT, {"input_data_format": "channels_last"}),
        *((image, COLOUR[..., :1], {}) for image in (COLOUR[..., :1], COLOUR[None, ..., 0])),
        (COLOUR[..., 0] > 127, BINARY[..., :1], {}),
        (COLOUR > 127, BINARY, {}),
        (COLOUR.astype(np.int64), COLOUR, {}),
        (noise(6, 9, 4).astype(np.float32), noise(6, 9, 4), {}),
        (torch.from_numpy(COLOUR // 128 * 128).bfloat16(), COLOUR // 128 * 128, {}),
        ((COLOUR.astype(np.uint16) * 257).astype(">u2"), COLOUR * np.uint16(257), {}),
        (Image.fromarray(GREY_ALPHA, "LA"), GREY_ALPHA, {}),
        (Image.fromarray(COLOUR[..., 0] * np.uint16(257)), COLOUR[..., :1] * np.uint16(257), {}),
    ],
)
def test_arrays_of_every_shape_and_number_and_files_are_read_and_come_back(image, wanted, options, tmp_path):
    if isinstance(image, Image.Image):
        image.save(image := tmp_path / "a.png")
    for given in (image, [image, image]):
        pixels = SemanIRImageProcessor()(given, return_tensors="pt", **options).pixel_values
        assert pixels.shape[1:] == (3, *wanted.shape[:2]) and pixels.dtype == torch.float32
        outputs = ImageSuperResolutionOutput(reconstruction=pixels)
        found = SemanIRImageProcessor().post_process_image_restoration(outputs, None, "np", given, **options)[0]
        assert found.dtype == wanted.dtype and np.array_equal(np.atleast_3d(found), wanted)


def test_colours_are_taken_without_alpha_and_upright():
    picture = RGB.convert("RGBA")
    picture.putalpha(0)
    for image in (picture, np.asarray(picture)):
        torch.testing.assert_close(SemanIRImageProcessor()(image, return_tensors="pt").pixel_values, EXPECTED)
    turned = Image.fromarray(COLOUR)
    turned.getexif()[0x0112] = 6
    pixels = SemanIRImageProcessor()(turned, return_tensors="pt").pixel_values
    torch.testing.assert_close(pixels, EXPECTED.rot90(-1, (2, 3)))


def test_images_of_several_sizes_are_padded_by_reflection():
    images = [COLOUR, noise(5, 11, 3), noise(1, 1, 3)]
    # An array of 3 or 4 rows could have its channels first; a picture is clear.
    pictures = [Image.fromarray(image) for image in images]
    pixels = SemanIRImageProcessor()(pictures, return_tensors="np").pixel_values
    assert pixels.shape == (3, 3, 6, 11)
    for padded, image in zip(pixels, images, strict=True):
        height, width = image.shape[:2]
        wanted = np.pad(image, ((0, 6 - height), (0, 11 - width), (0, 0)), mode="reflect")
        np.testing.assert_allclose(padded, wanted.transpose(2, 0, 1) / 255, rtol=1e-6)
    with refused(ValueError, "sizes", "batch"):
        SemanIRImageProcessor(do_pad=False)(images[:2], return_tensors="pt")
    # A divisor pads only what is not aligned.
    for height in (5, 8):
        pixels = SemanIRImageProcessor(size_divisor=4)(noise(height, 8, 3), return_tensors="pt").pixel_values
        assert pixels.shape == (1, 3, 8, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_post_processing_clips_and_rounds(dtype):
    values = torch.tensor([-1.0, 0.0, 0.25, 0.5, 1.0, 2.0], dtype=dtype).view(1, 1, 2, 3).expand(1, 3, 2, 3)
    outputs = ImageSuperResolutionOutput(reconstruction=values)
    (image,) = SemanIRImageProcessor().post_process_image_restoration(outputs)
    assert image.mode == "RGB"
    assert np.asarray(image)[..., 1].tolist() == [[0, 0, 64], [128, 255, 255]]


def test_post_processing_undoes_processing():
    processor = SemanIRImageProcessor()
    images = [COLOUR.astype(np.uint16) * 257, noise(5, 11, 4)]
    outputs = ImageSuperResolutionOutput(reconstruction=processor(images, return_tensors="pt").pixel_values)
    arrays = processor.post_process_image_restoration(outputs, output_type="np", images=images)
    assert all(np.array_equal(array, image) for array, image in zip(arrays, images, strict=True))
    with refused(ValueError, "uint16", "3 channels"):
        processor.post_process_image_restoration(outputs, images=images)
    images = [COLOUR, noise(5, 11, 3)]
    outputs = ImageSuperResolutionOutput(reconstruction=processor(images, return_tensors="pt").pixel_values)
    sizes = [image.shape[:2] for image in images]
    for target_sizes in (sizes, torch.tensor(sizes)):
        arrays = processor.post_process_image_restoration(outputs, target_sizes, output_type="np")
        assert all(np.array_equal(array, image) for array, image in zip(arrays, images, strict=True))
        pictures = processor.post_process_image_restoration(outputs, target_sizes)
        assert all(np.array_equal(np.asarray(a), b) for a, b in zip(pictures, images, strict=True))


PALETTE = RGB.quantize(8)
PALETTE.info["transparency"] = 3
GREY = COLOUR[..., 0]
KEPT = {
    "RGB": (RGB, "RGB"),
    "RGBA": (Image.fromarray(noise(6, 9, 4)), "RGBA"),
    "L": (Image.fromarray(GREY), "L"),
    "LA": (Image.fromarray(noise(6, 9, 2), "LA"), "LA"),
    "I;16": (Image.fromarray(GREY.astype(np.uint16) * 255), "I;16"),
    "P": (RGB.quantize(8), "RGB"),
    "P-transparent": (PALETTE, "RGBA"),
    "1": (Image.fromarray(GREY > 99), "L"),
}


@pytest.mark.parametrize("kind", KEPT)
def test_pictures_keep_alpha_depth_and_grey(kind):
    processor, (picture, mode) = SemanIRImageProcessor(), KEPT[kind]
    outputs = ImageSuperResolutionOutput(reconstruction=processor(picture, return_tensors="pt").pixel_values)
    (restored,) = processor.post_process_image_restoration(outputs, images=picture)
    assert restored.mode == mode
    wanted = picture if mode == "I;16" else picture.convert(mode)
    np.testing.assert_array_equal(np.asarray(restored), np.asarray(wanted))


def test_post_processing_refuses_what_does_not_fit():
    outputs = ImageSuperResolutionOutput(reconstruction=torch.rand(2, 3, 4, 5))
    process = SemanIRImageProcessor().post_process_image_restoration
    for facts, options in (
        (["1 sizes", "2 images"], {"target_sizes": [(4, 5)]}),
        (["size 4 x 5"], {"target_sizes": [(4, 5), (5, 5)]}),
        (["pil", "np"], {"output_type": "jpeg"}),
        (["1 images", "2 images"], {"images": COLOUR}),
        (["6 x 9", "restored 4 x 5"], {"images": [COLOUR, COLOUR]}),
    ):
        with refused(ValueError, *facts):
            process(outputs, **options)
    with refused(ValueError, "reconstruction"):
        process(ImageSuperResolutionOutput())
