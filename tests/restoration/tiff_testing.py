"""TIFFs in grey of 12 and 16 bits, made by hand: Pillow writes neither 12 bits nor white as 0."""

import struct
import zlib

import numpy as np


def grey_tiff(*pages: np.ndarray, bits: int, photometric: int, order: str = "<", compression: int = 1) -> bytes:
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
        tags = {256: width, 257: height, 258: bits, 259: compression, 262: photometric, 273: len(file), 277: 1}
        tags |= {278: height, 279: len(data)}
        file += data + bytes(len(data) % 2)
        struct.pack_into(f"{order}I", file, link, len(file))
        file += struct.pack(f"{order}H", len(tags))
        for tag, value in tags.items():
            file += struct.pack(f"{order}HHII", tag, 4, 1, value)
        link = len(file)
        file += bytes(4)
    return bytes(file)
