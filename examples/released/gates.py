"""Gates of a restorer that keeps the size or demosaicks: what it must not harm, its speed, its dB on test pictures.

python examples/released/gates.py MODEL [--work WORK] [--only GATE...]
MODEL is a folder or the name of a released model. WORK, as train.py made it, has the photographs; without it dB are
left out. A gate that is missed is marked, and the command ends with 1.
"""

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import skimage.data
import torch
from PIL import Image, ImageDraw, ImageFont
from releases import RELEASES
from runs import RECIPES

from hf_ext.hub.released import find_model
from hf_ext.restoration.tiles import restore_image
from hf_ext.semanir import SemanIRForImageRestoration
from hf_ext.semanir.image_processing_semanir import from_unit
from hf_ext.tasks.degradations import Degradation, gaussian_noise, jpeg, mosaic
from hf_ext.training import evaluate_checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import flags

LEVELS = (0, 64, 128, 191, 255)
TEXT = "The quick brown fox jumps over the lazy dog, 0123456789"


def restore(model: SemanIRForImageRestoration, clean: np.ndarray) -> np.ndarray:
    """Restores a picture of 8 bits that has nothing wrong with it, or its mosaic."""
    given = mosaic(clean) if model.config.demosaicks else clean
    return restore_image(model, given / np.float32(255))


def count_colours(model: SemanIRForImageRestoration) -> int:
    """Channels of a picture."""
    return model.config.num_channels_out or model.config.num_channels


def check_flat(model: SemanIRForImageRestoration) -> list[tuple[str, float, float]]:
    """Flat colours, a grid of five levels a channel, come back as they were."""
    means, pixels = [], []
    for colour in itertools.product(LEVELS, repeat=count_colours(model)):
        clean = np.full((48, 48, len(colour)), colour, np.uint8)
        error = restore(model, clean) * 255 - clean
        means.append(np.abs(error.mean((0, 1))).max())
        pixels.append(np.abs(error).max())
    return [("flat colours, worst mean error", max(means), 2), ("flat colours, worst pixel", max(pixels), 2)]


def check_text(model: SemanIRForImageRestoration) -> list[tuple[str, float, float]]:
    """Small and large text, and a coloured box, without noise: dB, negative so that a limit is an upper one."""
    picture = Image.new("RGB", (320, 160), "white")
    pen = ImageDraw.Draw(picture)
    pen.rectangle((8, 96, 120, 150), (0, 0, 255))
    for top, size in ((4, 10), (20, 13), (40, 18), (66, 24)):
        pen.text((4, top), TEXT, "black", ImageFont.load_default(size))
    pen.text((12, 100), "Magenta", (255, 0, 255), ImageFont.load_default(20))
    clean = np.asarray(picture.convert("RGB" if count_colours(model) == 3 else "L")).reshape(160, 320, -1)
    error = restore(model, clean).clip(0, 1) - clean / 255
    return [("text, -dB", 10 * np.log10(np.mean(error**2)), -38)]


def check_clipped(model: SemanIRForImageRestoration) -> list[tuple[str, float, float]]:
    """The mean of nearly black and nearly white flats under noise of 25 that was clipped, as in files."""
    rows, noise = [], Degradation("gaussian_noise", sigma=25.0, clip=1.0)
    for level in (5, 250):
        clean = np.full((128, 128, model.config.num_channels), level, np.uint8)
        degraded, _ = noise.whole([clean], 1, np.random.default_rng(0))
        error = abs(255 * float(restore_image(model, degraded).mean()) - level)
        rows.append((f"{level} under clipped noise of 25, mean error", error, 2))
    return rows


def check_harm(model: SemanIRForImageRestoration) -> list[tuple[str, float, float]]:
    """Photographs that are nearly clean, and have no grid of JPEG, as they are halved: the worst of five."""
    damages = {
        "clean": lambda clean: clean,
        **{f"JPEG {quality}": lambda clean, quality=quality: jpeg(clean, quality) for quality in (85, 95)},
        "noise of 2": lambda clean: from_unit(gaussian_noise(clean, 2, np.random.default_rng(0))),
    }
    rows = []
    for words, degrade in damages.items():
        for strength in (1.0, "auto"):
            losses = [_loss(model, clean, degrade(clean), strength) for clean in _photographs(count_colours(model))]
            limit = -46 if words == "clean" else 0.1
            rows.append(
                (f"{words}, strength {strength}, {'-dB' if words == 'clean' else 'dB lost'}", max(losses), limit)
            )
    return rows


def _photographs(channels: int) -> Iterator[np.ndarray]:
    for name in ("astronaut", "chelsea", "coffee", "brick", "cell"):
        whole = Image.fromarray(getattr(skimage.data, name)()).convert("RGB" if channels == 3 else "L")
        half = whole.resize((whole.width // 2, whole.height // 2), Image.Resampling.LANCZOS)
        yield np.atleast_3d(np.asarray(half))


def _loss(model: SemanIRForImageRestoration, clean: np.ndarray, given: np.ndarray, strength: float | str) -> float:
    """The dB that a restoration loses against its input; of a clean one the negative dB to it."""
    restored = restore_image(model, given, strength=strength)
    before, after = (np.mean((clean.astype(float) - pixels) ** 2) for pixels in (given, restored))
    if not before:
        return float(10 * np.log10(max(after, 1e-9) / 255**2))
    return float(10 * np.log10(after / before))


def check_speed(model: SemanIRForImageRestoration) -> list[tuple[str, float, float]]:
    """Processor time of a restored megapixel, the second time."""
    picture = np.random.default_rng(0).random((1024, 1024, model.config.num_channels), dtype=np.float32)
    restore_image(model, picture[:256, :256])
    began = time.process_time()
    height, width = restore_image(model, picture).shape[:2]
    return [("processor seconds a megapixel", 1e6 * (time.process_time() - began) / (height * width), 6)]


GATES: dict[str, Callable[[SemanIRForImageRestoration], list[tuple[str, float, float]]]] = {
    "flat": check_flat,
    "text": check_text,
    "clipped": check_clipped,
    "harm": check_harm,
    "speed": check_speed,
}
OF_PICTURES = ("clipped", "harm")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--only", metavar="GATE", nargs="+", choices=list(GATES), default=list(GATES))
    options = parser.parse_args()
    folder = str(Path(find_model(options.model)).resolve())
    model, missed = SemanIRForImageRestoration.from_pretrained(folder).eval(), 0
    torch.set_num_threads(1)
    for gate in options.only:
        if model.config.demosaicks and gate in OF_PICTURES:
            print(f"{gate}: not measured, a mosaic has no noise and is no picture")
            continue
        for words, value, limit in GATES[gate](model):
            missed += value > limit
            print(f"{words}: {value:.2f}, at most {limit}{' MISSED' if value > limit else ''}", flush=True)
    if options.work:
        with contextlib.chdir(options.work):
            # PSNR of the test sets of a release, with the noise of its card.
            colours = "denoise-color" if count_colours(model) == 3 else "denoise-gray"
            name = "demosaick" if model.config.demosaicks else colours
            for title, overrides in RELEASES[name].tests.items():
                for row in evaluate_checkpoint(folder, RECIPES / f"{name}.yaml", flags(overrides))["results"]:
                    if row["metric"].startswith("psnr"):
                        print(f"{title}, {row['name']}: {row['value']:.2f}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
