"""What a file holds beside its pixels is kept or told; two results of one name, and threads."""

import io
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tifffile
from PIL import Image
from PIL.PngImagePlugin import putchunk

from hf_ext.restoration.camera import open_picture
from hf_ext.restoration.containers import has_other_light
from hf_ext.restoration.encoding import encode_frames
from hf_ext.restoration.files import read_frames
from hf_ext.restoration.jobs import plan_jobs

_PARTS = {
    "gain map": b'hdrgm:Version="1.0"><Container:Directory><rdf:Seq/></Container:Directory><a',
    "video": b"GCamera:MotionPhoto='1' GCamera:MotionPhotoVersion=\"1\"",
    "old video": b"><GCamera:MicroVideo>1</GCamera:MicroVideo><a",
    "long XMP": b'xmpNote:HasExtendedXMP="AB"',
}


@pytest.mark.parametrize("part", _PARTS)
def test_parts_of_a_jpeg_that_are_lost_are_told_and_no_longer_announced(part):
    file, xmp = io.BytesIO(), b'<rdf:Description dc:title="mine" %b/>' % _PARTS[part]
    extra = b""
    if part == "long XMP":
        name = b"http://ns.adobe.com/xmp/extension/\0"
        extra = b"\xff\xe1" + struct.pack(">H", 2 + len(name)) + name
    Image.new("RGB", (16, 16)).save(file, "JPEG", xmp=xmp, extra=extra + b"\xff\xeb\0\4JP\xff\xed\0\x0aAdobe_CM")
    behind = b"SEFH" + bytes([1]) * 59 + b"SEFT" if extra else file.getvalue()[:400]
    frames = read_frames(file.getvalue() + behind)
    told = [f"segments of the JPEG were left out: APP11{', XMP extension' if extra else ''}"]
    told += ["what lies behind the picture in the JPEG, such as a video or gain map, was left out: 400 bytes"][
        : not extra
    ]
    assert [*frames.lost] == told
    written = Image.open(io.BytesIO(encode_frames(frames, "JPEG"))).info["xmp"]
    assert b'dc:title="mine"' in written and not any(
        word in written for word in (b"hdrgm", b"Camera", b"xmpNote", b"Dir")
    )


def test_chunks_of_a_png_are_kept_or_told():
    file, content = io.BytesIO(), io.BytesIO()
    Image.new("L", (16, 16)).save(file, "PNG", dpi=(90, 90), icc_profile=b"x", transparency=3, optimize=True)
    for kind, data in (
        (b"caBX", b"jumb"),
        (b"bKGD", b"\0\1"),
        (b"iDOT", bytes(28)),
        (b"tIME", bytes(7)),
        (b"gAMA", bytes(4)),
    ):
        putchunk(content, kind, data)
    frames = read_frames(file.getvalue()[:33] + content.getvalue() + file.getvalue()[33:])
    assert frames.lost == ("chunks of the PNG were left out: caBX",)
    assert b"gAMA" in encode_frames(frames, "PNG")


_PROFILE = bytes(16) + b"RGB " + bytes(108)


def _with_colours(kind: str) -> bytes:
    """A picture whose file says its colours in one of many ways."""
    file, image = io.BytesIO(), Image.linear_gradient("L").resize((16, 16)).convert("RGB")
    if kind in ("avif", "heic"):
        if kind == "heic":
            heif = pytest.importorskip("pillow_heif").from_bytes(mode="RGB", size=(16, 16), data=image.tobytes())
            heif.save(file, color_primaries=9, transfer_characteristics=16, matrix_coefficients=9, full_range_flag=1)
            return file.getvalue()
        image.save(file, "AVIF")
        data = bytearray(file.getvalue())
        place = data.index(b"colrnclx") + 8
        data[place : place + 4] = struct.pack(">HH", 9, 16)
        return bytes(data)
    if kind == "jp2":
        image.save(file, "JPEG2000")
        data = bytearray(file.getvalue())
        box, header = data.index(b"colr") - 4, data.index(b"jp2h") - 4
        new = struct.pack(">I", 11 + len(_PROFILE)) + b"colr\2\0\0" + _PROFILE
        data[header : header + 4] = (int.from_bytes(data[header : header + 4]) + len(new) - data[box + 3]).to_bytes(4)
        data[box : box + data[box + 3]] = new
        return bytes(data)
    if kind == "bmp":
        image.save(file, "BMP")
        head = struct.pack("<I", 124) + file.getvalue()[18:54] + bytes(16) + b"DEBM" + bytes(52)
        head += struct.pack("<III", 124 + 768, len(_PROFILE), 0)
        return file.getvalue()[:10] + struct.pack("<I", 138) + head.ljust(124, b"\0") + file.getvalue()[54:] + _PROFILE
    exif = Image.Exif()
    exif[271] = "a"
    exif.get_ifd(0x8769).update({0x9000: b"0230", 0xA005: {1: "R03", 2: b"0100"}})
    image.save(file, "PNG" if kind == "png" else "JPEG", exif=exif)
    return encode_frames(read_frames(file.getvalue()), "TIFF") if kind == "tif" else file.getvalue()


@pytest.mark.parametrize("kind", ["avif", "heic", "jp2", "bmp", "jpg", "tif", "png"])
def test_what_a_file_says_of_its_colours_is_kept_or_told(kind):
    told, frames = [], read_frames(_with_colours(kind))
    encode_frames(frames, "BMP", say=told.append)
    if kind in ("avif", "heic"):
        assert b"cICP\x09\x10\x00\x01" in encode_frames(frames, "PNG") and "colour space of the picture" in " ".join(
            told
        )
    elif kind in ("jp2", "bmp"):
        assert frames.pictures[0].icc_profile == _PROFILE and "colour profile" in " ".join(told)
    else:
        for format in ("JPEG", "TIFF", "PNG", "WEBP"):
            with Image.open(io.BytesIO(encode_frames(frames, format))) as image:
                assert image.getexif().get_ifd(0xA005)[1].strip("\0") == "R03", format


@pytest.mark.parametrize(
    ("chunks", "other"),
    [({}, False), ({"gAMA": [45455]}, False), ({"gAMA": [100000]}, True), ({"cICP": [0x010D0001]}, False)]
    + [
        ({"cHRM": places, **more}, red == 68000 and "sRGB" not in more)
        for red in (64000, 68000)
        for places in [[31270, 32900, red, 33000, 30000, 60000, 15000, 6000]]
        for more in ({}, {"gAMA": [45455]}, {"sRGB": [0]})
    ],
)
def test_colours_of_a_png_other_than_srgb_are_told(chunks, other):
    file = io.BytesIO(bytes(33))
    file.seek(33)
    for kind, values in chunks.items():
        putchunk(file, kind.encode(), struct.pack(f">{len(values)}I", *values))
    assert has_other_light(file.getvalue()[33:]) == other


@pytest.mark.parametrize("layout", ["pixels", "planes", "grey and alpha"])
def test_tags_of_a_tiff_are_told_whoever_reads_it(tmp_path, layout):
    geo = [(33550, "d", 3, (1.0, 1.0, 0.0), False), (318, 5, 2, (3457, 10000, 3585, 10000), False)]
    geo.append((319, 5, 6, (64, 100, 33, 100, 3, 10, 6, 10, 15, 100, 6, 100), False))
    shape = {"pixels": (8, 8, 3), "planes": (3, 8, 8), "grey and alpha": (8, 8, 2)}[layout]
    how = {"photometric": "minisblack", "extrasamples": ["unassalpha"]} if shape[-1] == 2 else {"photometric": "rgb"}
    config = "separate" if layout == "planes" else "contig"
    tifffile.imwrite(
        tmp_path / "a.tif",
        np.zeros(shape, np.uint16),
        planarconfig=config,
        extratags=geo,
        subfiletype=1,
        metadata=None,
        **how,
    )
    lost = " ".join(read_frames(tmp_path / "a.tif").lost)
    assert all(word in lost for word in ("33550 (ModelPixelScale", "318 (WhitePoint", "smaller copy"))
    # The primaries of sRGB say nothing.
    assert "319" not in lost


@pytest.mark.parametrize("profile", [None, b"CMYK"])
def test_a_profile_is_dropped_where_there_is_one(tmp_path, profile):
    Image.new("CMYK", (8, 8)).save(tmp_path / "a.jpg", icc_profile=profile)
    dropped = ", and its colour profile was dropped" if profile else ""
    assert read_frames(tmp_path / "a.jpg").lost == (f"CMYK was converted to RGB{dropped}",)


@pytest.mark.parametrize("names", [("IMG.JPG", "img.jpg"), ("a.png", "a.jpg")])
def test_the_advice_for_two_pictures_with_one_result_helps(tmp_path, names):
    for name in names:
        Image.new("L", (8, 8)).save(tmp_path / name)
    if len([*tmp_path.iterdir()]) < 2:
        pytest.skip("the file system tells no capitals")
    plan = plan_jobs([str(tmp_path)], tmp_path / "out", ending=".png")
    (reason,) = plan.refused.values()
    again = plan_jobs([str(tmp_path)], tmp_path / "out", ending=".png", name="{stem}-{ext}")
    assert ("--name" in reason) == (not again.refused) and "rename it" in reason


def test_threads_leave_the_bound_of_pillow_as_it_was(tmp_path):
    Image.new("L", (900, 900)).save(tmp_path / "a.png")
    before = Image.MAX_IMAGE_PIXELS
    with ThreadPoolExecutor(4) as pool:
        [*pool.map(lambda most: read_frames(tmp_path / "a.png", most), [200, 300, 200, 400] * 4)]
    assert before == Image.MAX_IMAGE_PIXELS
    with open_picture(tmp_path / "a.png", 10**6), open_picture(tmp_path / "a.png"):
        assert Image.MAX_IMAGE_PIXELS is None
    assert before == Image.MAX_IMAGE_PIXELS
