"""Errors that broken files raise in those who decode them."""

import struct

from PIL import Image

# What Pillow makes of broken files; its error for a broken PNG is a SyntaxError, or that of the module struct.
UNREADABLE = (OSError, SyntaxError, struct.error, Image.DecompressionBombError)
# What a broken file or value makes of an example.
UNUSABLE = (*UNREADABLE, ValueError, TypeError)
# What decoders raise beside that for damaged files: of a TIFF, an AVIF, a sound.
UNDECODABLE = (*UNUSABLE, RuntimeError, LookupError, ArithmeticError, AttributeError, EOFError)
