"""Examples of the app: a drawn scene, damaged in a way for each model, and four digits that espeak-ng spoke."""

from __future__ import annotations

import io
from importlib import resources
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

DAMAGES = ("noise", "jpeg", "small", "blurred")
WIDTH, HEIGHT = 240, 160
TEXT = "At last it works, and I am glad."


def draw_scene() -> Image.Image:
    """A house on a hill under the sun: edges, flat parts, ramps and text."""
    # Twice as large, so that edges are smooth when it shrinks.
    width, height = 2 * WIDTH, 2 * HEIGHT
    rows, columns = np.mgrid[:height, :width] / np.array([height, width])[:, None, None]
    sky = np.stack([90 + 120 * rows, 150 + 60 * rows, 225 - 20 * columns], -1)
    scene = Image.fromarray(sky.astype(np.uint8))
    draw = ImageDraw.Draw(scene)
    draw.ellipse((370, 30, 430, 90), fill=(250, 220, 90))
    draw.ellipse((-160, 190, 330, 560), fill=(70, 130, 60))
    draw.ellipse((190, 215, 700, 600), fill=(95, 160, 75))
    draw.polygon([(120, 150), (190, 95), (260, 150)], fill=(150, 50, 40))
    draw.rectangle((130, 150, 250, 240), fill=(225, 205, 170), outline=(110, 90, 70), width=3)
    draw.rectangle((175, 180, 205, 240), fill=(95, 60, 40))
    for left in (140, 215):
        draw.rectangle((left, 165, left + 25, 190), fill=(90, 130, 170), outline=(250, 250, 250), width=3)
    for left in range(280, 470, 14):
        draw.line((left, 225, left, 265), fill=(110, 75, 45), width=6)
    draw.line((272, 240, 474, 240), fill=(110, 75, 45), width=5)
    draw.text((18, 18), "hf-ext 2026", fill=(30, 40, 70), font_size=40)
    return scene.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)


def damage(scene: Image.Image, how: str) -> Image.Image:
    """A picture with noise, as a strong JPEG, at half its size, or blurred with a little noise."""
    if how == "jpeg":
        file = io.BytesIO()
        scene.save(file, "JPEG", quality=12)
        return Image.open(file).convert("RGB")
    if how == "small":
        return scene.resize((WIDTH // 2, HEIGHT // 2), Image.Resampling.BICUBIC)
    noise = 25.0
    if how == "blurred":
        scene, noise = scene.filter(ImageFilter.GaussianBlur(1)), 8.0
    pixels = np.asarray(scene, np.float64)
    noisy = pixels + np.random.default_rng(0).normal(0, noise, pixels.shape)
    return Image.fromarray(noisy.round().clip(0, 255).astype(np.uint8))


def write_examples(folder: Path) -> dict[str, str]:
    """Writes a picture of each damage and the sound `digits`; their paths by name."""
    scene, found = draw_scene(), {}
    for how in DAMAGES:
        found[how] = str(folder / f"{how}.png")
        damage(scene, how).save(found[how])
    found["digits"] = str(folder / "digits.flac")
    sound = resources.files("hf_ext").joinpath("app_digits.flac")
    Path(found["digits"]).write_bytes(sound.read_bytes())
    return found
