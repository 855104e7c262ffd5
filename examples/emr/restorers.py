"""Four SemanIR restorers from one base: Gaussian noise of σ 15, 25 and 50, and JPEG artefacts.

Tiles of the training photographs, and the middle of seeded test photographs, are written once.
"""

import io
import sys
from pathlib import Path

import numpy as np
from finetunes import EXAMPLES
from PIL import Image
from tweets import SEED

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies import launch  # noqa: E402  found through the line above

TILE, TRAIN_TILES, TEST_PHOTOS, TEST_SIDE = 128, 400, 16, 256
JPEG_QUALITY = 10
CONFIG = EXAMPLES / "restorer.yaml"
SCRIPT = EXAMPLES.parent / "semanir" / "train.py"
# Short enough for the budget, and far from the thousands of steps that a published restorer gets.
BASE_STEPS, STEPS = 1000, 250
NOISE = {"sigma15": 15, "sigma25": 25, "sigma50": 50}
RESTORERS = (*NOISE, "jpeg")


def crop(path: Path, side: int, generator: np.random.Generator | None) -> Image.Image:
    """A random square of a photograph, or its middle."""
    with Image.open(path) as image:
        photo = image.convert("RGB")
    room = [length - side for length in photo.size]
    left, top = (generator.integers(length + 1) if generator else length // 2 for length in room)
    return photo.crop((int(left), int(top), int(left) + side, int(top) + side))


def as_jpeg(image: Image.Image) -> Image.Image:
    """The image after JPEG at a low quality."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=JPEG_QUALITY)
    return Image.open(io.BytesIO(buffer.getvalue())).convert("RGB")


def write_photos(bsds: Path, work: Path) -> None:
    """photos/{train,test} for noise, and jpeg-{train,test}/{lq,hq} with the same pictures."""
    generator = np.random.default_rng(SEED)
    sources = {part: sorted((bsds / part).glob("*.jpg")) for part in ("train", "test")}
    missing = [part for part, paths in sources.items() if not paths]
    if missing:
        raise FileNotFoundError(f"no *.jpg in {bsds / missing[0]}: give the folder of BSDS500 with train/ and test/.")
    chosen = {
        "train": [sources["train"][index % len(sources["train"])] for index in range(TRAIN_TILES)],
        "test": [sources["test"][index] for index in generator.permutation(len(sources["test"]))[:TEST_PHOTOS]],
    }
    for part, paths in chosen.items():
        folders = [work / "photos" / part, work / f"jpeg-{part}" / "lq", work / f"jpeg-{part}" / "hq"]
        if len(list(folders[-1].glob("*.png"))) == len(paths):
            continue
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        for index, path in enumerate(paths):
            clean = crop(path, TILE, generator) if part == "train" else crop(path, TEST_SIDE, None)
            for folder, image in zip(folders, (clean, as_jpeg(clean), clean), strict=True):
                image.save(folder / f"{index:03}.png")


def data_flags(name: str, work: Path) -> dict[str, object]:
    """Where a restorer's data is, and its degradation."""
    if name == "jpeg":
        parts = {f"data.{use}.path": work / f"jpeg-{part}" for use, part in (("train", "train"), ("eval", "test"))}
        return {**parts, "data.eval.split": "train", "task.degradation": "{kind: paired}"}
    paths = {"data.train.path": work / "photos", "data.eval.path": work / "photos"}
    return {**paths, "task.degradation.sigma": NOISE[name]}


def train_restorer(name: str | None, work: Path) -> Path:
    """Trains the base (no name) at σ 25, or fine-tunes it for one degradation; the snapshot."""
    values = {"seed": SEED, **data_flags(name or "sigma25", work)}
    if name is None:
        values["max_steps"] = BASE_STEPS
    else:
        base = work / "runs" / "restorer-base" / "snapshot"
        values |= {"init_from": base, "max_steps": STEPS, "learning_rate": 5e-4, "warmup_steps": 20}
    run = work / "runs" / f"restorer-{name or 'base'}"
    launch(run, [SCRIPT], CONFIG, values)
    return run / "snapshot"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("python examples/emr/restorers.py BSDS500 WORK")
    photographs, folder = (Path(word).resolve() for word in sys.argv[1:])
    write_photos(photographs, folder)
    for restorer in (None, *RESTORERS):
        train_restorer(restorer, folder)
