"""TIFFs that Pillow does not write: by tifffile, and in grey of 12 bits or with white as 0 by hand."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import tifffile


def tiff(*pages: np.ndarray, planar: bool = False, **layout: Any) -> bytes:
    """Pages of grey or RGB, with alpha where the number of channels is even, as tifffile writes them."""
    file, how = io.BytesIO(), {name: layout.pop(name) for name in ("byteorder", "bigtiff") if name in layout}
    with tifffile.TiffWriter(file, **how) as writer:
        for pixels in pages:
            channels = pixels.shape[-1]
            usual = {
                "photometric": "rgb" if channels >= 3 else "minisblack",
                "planarconfig": None if channels == 1 else "separate" if planar else "contig",
                "extrasamples": ["unassalpha"] if channels % 2 == 0 else None,
                # Packing quickly and badly.
                "compressionargs": {"level": 0} if layout.get("compression") == "lzma" else None,
            }
            values = pixels[..., 0] if channels == 1 else pixels.transpose(2, 0, 1) if planar else pixels
            writer.write(values, **usual | layout)
    return file.getvalue()


def grey_tiff(
    *pages: np.ndarray, bits: int, photometric: int, order: str = "<", compression: int = 1, tags: Any = ()
) -> bytes:
    """A file of pages of one strip; 12 bits lie in it without gaps but for the last of each row."""
    file, link = bytearray((b"II*\0" if order == "<" else b"MM\0*") + bytes(4)), 4
    for pixels in pages:
        if bits == 16:
            data = pixels.astype(f"{order}u2").tobytes()
        else:
            wide = (pixels.astype(">u2")[..., None]).view(np.uint8)
            data = np.packbits(np.unpackbits(wide, axis=-1)[..., -bits:].reshape(len(pixels), -1), axis=-1).tobytes()
        data = zlib.compress(data) if compression == 8 else data
        height, width = pixels.shape
        entries = {256: width, 257: height, 258: bits, 259: compression, 262: photometric, 273: len(file), 277: 1}
        entries = dict(sorted((entries | {278: height, 279: len(data)} | dict(tags)).items()))
        file += data + bytes(len(data) % 2)
        struct.pack_into(f"{order}I", file, link, len(file))
        file += struct.pack(f"{order}H", len(entries))
        for tag, value in entries.items():
            file += struct.pack(f"{order}HHII", tag, 4, 1, value)
        link = len(file)
        file += bytes(4)
    return bytes(file)
