"""The quickstart's step with Disentangled DiT: handwritten digits drawn by class, before and after the Hub.

python examples/disentangled_dit/quickstart_samples.py [FOLDER]     (FOLDER: that of examples/quickstart.py)
1. The digits that ship inside scikit-learn are written to FOLDER/digits/data.
2. `accelerate launch` trains a tiny class-conditional diffusion transformer on them.
3. It draws a row for each class, FOLDER/samples.png.
4. The pipeline is pushed to the Hub on this machine; a process that cannot import hf_ext pulls it and draws the same
   pictures. The weights are the same bit for bit; a pixel may be one of 256 grey levels apart, as processors add in
   another order where the weights lie at another address, and a value between two levels is rounded the other way.
5. The nearest of the real digits says which digit each drawing shows.
"""

import json
import sys
import time
from pathlib import Path

import datasets
import numpy as np
from diffusers import DiffusionPipeline
from diffusers.utils.logging import disable_progress_bar
from PIL import Image
from safetensors.numpy import load_file
from sklearn.neighbors import KNeighborsClassifier

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import quickstart
from digits import NAMES, TEST, digits, write_digits
from pull_and_sample import draw

from hf_ext.embedded_hub.server import EmbeddedHub
from hf_ext.tasks.diffusion_grids import draw_grid, write_picture

COLUMNS = 10
REPOSITORY = "quickstart/dit-digits"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
WANTED = 0.8


def have_same_weights(first: Path, second: Path) -> bool:
    """True for two files with the same tensors, bit for bit; the header of a published one says more."""
    files = [load_file(path).items() for path in (first, second)]
    one, other = ({name: (value.dtype, value.tobytes()) for name, value in file} for file in files)
    return one == other


def recognised(pictures: np.ndarray, classes: np.ndarray) -> float:
    """The share of pictures whose nearest real digit, of those that were learned from, is of the class asked for."""
    known, shown = (values[:-TEST] for values in digits())
    judge = KNeighborsClassifier(n_neighbors=1).fit(known.reshape(len(known), -1), shown)
    return float(judge.score(pictures.reshape(len(pictures), -1), classes))


def main(work: Path) -> None:
    """Trains, draws, pushes, pulls, draws again, and prints what came of it."""
    started = time.monotonic()
    datasets.disable_progress_bars()
    disable_progress_bar()
    data, folder = write_digits(work / "digits" / "data"), work / "samples"
    source = {"data.train.path": data, "data.eval.path": data}
    quickstart.train("disentangled_dit", {**source, "output_dir": folder / "run"})
    pictures = draw(DiffusionPipeline.from_pretrained(folder / "run" / "snapshot"), COLUMNS)
    rows = [[Image.fromarray(picture) for picture in row] for row in np.split(pictures, len(NAMES))]
    write_picture(draw_grid(rows, NAMES), work / "samples.png")
    with EmbeddedHub(work / "hub") as hub:
        words = ("pull_and_sample.py", str(COLUMNS), folder / "pulled.npy")
        commit = quickstart.push_and_use(folder, hub, folder / "run" / "snapshot", REPOSITORY, *words)
    pulled = np.load(folder / "pulled.npy")
    cache = folder / "hf-home" / "hub" / f"models--{REPOSITORY.replace('/', '--')}" / "snapshots" / commit
    result = {
        "recognised": recognised(pictures, np.repeat(np.arange(len(NAMES)), COLUMNS)),
        "real": recognised(*(values[-TEST:] for values in digits())),
        "same_weights": have_same_weights(cache / WEIGHTS, folder / "run" / "snapshot" / WEIGHTS),
        "grey_levels_apart": int(np.abs(pulled.astype(int) - pictures).max()),
    }
    (work / "samples.json").write_text(json.dumps(result, indent=2) + "\n")

    print(
        f"\n{len(pictures)} digits drawn: {100 * result['recognised']:.0f} % show the class that was asked for (real "
        f"digits of other writers: {100 * result['real']:.0f} %); {time.monotonic() - started:.0f} s"
    )
    same = result["same_weights"] and result["grey_levels_apart"] <= 1
    print(
        f"pulled and drawn again without hf_ext: weights bit for bit the same: {result['same_weights']}; pixels at "
        f"most {result['grey_levels_apart']} of 256 grey levels apart"
    )
    print(f"picture: {work / 'samples.png'}")
    if not same or result["recognised"] < WANTED:
        sys.exit(
            f"the same weights, pixels at most 1 grey level apart and {100 * WANTED:.0f} % at least were expected: "
            "something is wrong with this run."
        )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "quickstart"))
