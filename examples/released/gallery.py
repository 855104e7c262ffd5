"""Released restorers on photographs that people know, at 100 %: `python examples/released/gallery.py`.

The photographs are scikit-image's, none was trained on; parts and strengths were chosen before any result was seen.
The last but one is where a model fails: noise that was compressed is no longer the noise that it knows, and total
variation is better; the last one is the model that learned such chains. Writes gallery.jpg and gallery.json beside it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import skimage.data
from PIL import Image, ImageDraw, ImageFont
from skimage.restoration import denoise_tv_chambolle

import hf_ext
from hf_ext.files import whole_file, write_json
from hf_ext.metrics.psnr import psnr
from hf_ext.restoration.tiles import restore_image
from hf_ext.semanir import SemanIRForImageRestoration
from hf_ext.semanir.image_processing_semanir import from_unit
from hf_ext.tasks.degradations import gaussian_noise, jpeg, matlab_bicubic

HERE = Path(__file__).resolve().parent
SIZE, GAP, LINE = 256, 6, 26
WEIGHTS = (0.03, 0.05, 0.07, 0.085, 0.1, 0.12, 0.15, 0.2)


def compress(picture: np.ndarray, quality: int) -> np.ndarray:
    """A picture, of 8 bits or white at 1, as a JPEG file gives it back."""
    return jpeg(picture if picture.dtype == np.uint8 else from_unit(picture), quality).astype(np.float32) / 255


def add_noise(picture: np.ndarray) -> np.ndarray:
    """Gaussian noise with a spread of 25 of 255."""
    return gaussian_noise(picture, 25.0, np.random.default_rng(0))


def shrink(picture: np.ndarray) -> np.ndarray:
    """Half the size."""
    return matlab_bicubic(picture, 0.5).astype(np.float32) / 255


# Photograph, top and left of the part, what is done to it, in words, by whom it is restored.
ROWS: list[tuple[str, int, int, Any, str, str]] = [
    ("astronaut", 0, 96, add_noise, "noise of 25", "denoise-color"),
    ("coffee", 60, 180, lambda part: compress(part, 10), "JPEG, quality 10", "jpeg-color"),
    ("chelsea", 20, 100, shrink, "half the size", "super-resolution-x2"),
    ("rocket", 0, 200, add_noise, "noise of 25", "denoise-color"),
    ("astronaut", 0, 96, lambda part: compress(add_noise(part), 50), "noise of 25, then JPEG 50", "denoise-color"),
    ("astronaut", 0, 96, lambda part: compress(add_noise(part), 50), "noise of 25, then JPEG 50", "photo"),
]


def score(picture: np.ndarray, clean: np.ndarray) -> float:
    """PSNR of a picture, white at 1."""
    return round(psnr(255 * picture, clean, channel="rgb", data_range=255), 2)


def restore_row(photo: str, top: int, left: int, degrade: Any, what: str, name: str) -> dict[str, Any]:
    """The pictures of a row, and their scores."""
    clean = getattr(skimage.data, photo)()[top : top + SIZE, left : left + SIZE]
    degraded = degrade(clean)
    model = SemanIRForImageRestoration.from_pretrained(hf_ext.released(name)).eval()
    restored = restore_image(model, degraded)
    shown = degraded
    if degraded.shape != clean.shape:
        enlarged = Image.fromarray(from_unit(degraded)).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        shown = np.asarray(enlarged, np.float32) / 255
    row = {"photo": photo, "what": what, "model": name, "input": score(shown, clean), "psnr": score(restored, clean)}
    if "noise" in what:
        # With the weight that suits this picture best, which nobody would know.
        smoothed = (denoise_tv_chambolle(degraded, weight, channel_axis=-1) for weight in WEIGHTS)
        row["best_total_variation"] = max(score(picture, clean) for picture in smoothed)
    return {**row, "pictures": [shown, restored, clean / 255]}


def draw(rows: list[dict[str, Any]]) -> Image.Image:
    """A row for each photograph, with a line of words above it."""
    font = ImageFont.load_default(15)
    sheet = Image.new("RGB", (3 * SIZE + 2 * GAP, len(rows) * (SIZE + LINE + GAP)), "white")
    pen = ImageDraw.Draw(sheet)
    for place, row in enumerate(rows):
        top = place * (SIZE + LINE + GAP)
        words = f"{row['photo']}: {row['what']}, {row['input']:.2f} dB; {row['model']}: {row['psnr']:.2f} dB"
        if "best_total_variation" in row:
            words += f"; best total variation: {row['best_total_variation']:.2f} dB"
        pen.text((2, top + 4), words, fill="black", font=font)
        for column, picture in enumerate(row["pictures"]):
            sheet.paste(Image.fromarray(from_unit(picture)), (column * (SIZE + GAP), top + LINE))
    return sheet


def main() -> None:
    rows = [restore_row(*row) for row in ROWS]
    with whole_file(HERE / "gallery.jpg") as file:
        draw(rows).save(file, "JPEG", quality=92)
    write_json(HERE / "gallery.json", [{key: row[key] for key in row if key != "pictures"} for row in rows])


if __name__ == "__main__":
    main()
