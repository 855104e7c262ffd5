"""Readers of Pillow whose copies know what the file says of its grey; `datasets` hands out copies of some pictures."""

from typing import Any

from PIL import Image, PngImagePlugin, TiffImagePlugin


class _Tiff(TiffImagePlugin.TiffImageFile):
    """A TIFF of which copies have the tags that `spread_grey` reads: the bits, and whether white is 0."""

    def load(self) -> Any:
        if self.mode.startswith("I;16"):
            self.info["tag_v2"] = {tag: self.tag_v2[tag] for tag in (258, 262) if tag in self.tag_v2}
        return super().load()


class _Png(PngImagePlugin.PngImageFile):
    """A PNG of 2 or 4 bits whose transparent value is spread to 8 with the pixels, which Pillow does not do."""

    def load(self) -> Any:
        if self.info.get("transparency") in range(16) and self.tell() == 0 and self.tile:
            self.info["transparency"] *= {"L;2": 85, "L;4": 17}.get(str(self.tile[0].args), 1)
        return super().load()


for _format, _reader in (("TIFF", _Tiff), ("PNG", _Png)):
    Image.register_open(_format, _reader, Image.OPEN[_format][1])
