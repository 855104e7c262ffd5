"""The quickstart's step with MRConv: handwritten digits as sequences of pixels, from training to a pulled classifier.

python examples/mrconv/quickstart_digits.py [FOLDER]     (FOLDER: that of examples/quickstart.py)
1. The digits that ship inside scikit-learn are written to FOLDER/digits/data, the last 500 of them as a test.
2. `accelerate launch` trains a small MRConv, whose kernels have four resolutions.
3. They are merged into one kernel a layer; the same digits are classified before and after, and timed.
4. The merged model is pushed to the Hub on this machine; a process that cannot import hf_ext pulls it and classifies
   the test digits.
"""

import json
import shutil
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import quickstart
from digits import TEST, digits, write_digits

from hf_ext import MRConvForSequenceClassification
from hf_ext.embedded_hub.server import EmbeddedHub

REPEATS = 15
REPOSITORY = "quickstart/mrconv-digits"
WANTED = 0.9


@torch.no_grad()
def classify(model: MRConvForSequenceClassification, inputs: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Logits of all inputs, and the milliseconds that one of them takes alone."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        model(input_values=inputs[:1])
        times.append(time.perf_counter() - started)
    return model(input_values=inputs).logits, 1000 * sorted(times)[REPEATS // 2]


def merge(snapshot: Path, merged: Path, pictures: np.ndarray) -> dict[str, float]:
    """Writes the merged model with its processor and reports; what changed."""
    processor = AutoImageProcessor.from_pretrained(snapshot)
    model = MRConvForSequenceClassification.from_pretrained(snapshot).eval()
    pixels = processor([Image.fromarray(picture) for picture in pictures], return_tensors="pt")["pixel_values"]
    inputs = pixels.flatten(2).transpose(1, 2)
    before, milliseconds = classify(model, inputs)
    model.reparameterize()
    after, merged_milliseconds = classify(model, inputs)
    model.save_pretrained(merged)
    processor.save_pretrained(merged)
    for name in ("eval.json", "training.json"):
        shutil.copyfile(snapshot / name, merged / name)
    difference = float((after - before).abs().max() / before.abs().max())
    return {"difference": difference, "milliseconds": milliseconds, "merged_milliseconds": merged_milliseconds}


def main(work: Path) -> None:
    """Trains, merges, pushes, pulls, and prints the accuracy."""
    started = time.monotonic()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    folder = work / "digits"
    write_digits(folder / "data")
    data = {"data.train.path": folder / "data", "data.eval.path": folder / "data"}
    quickstart.train("mrconv", {**data, "output_dir": folder / "run"})
    pictures, classes = (values[-TEST:] for values in digits())
    result = merge(folder / "run" / "snapshot", folder / "merged", pictures)
    np.save(folder / "pictures.npy", pictures)
    files = [folder / "pictures.npy", folder / "classes.npy"]
    with EmbeddedHub(work / "hub") as hub:
        quickstart.push_and_use(folder, hub, folder / "merged", REPOSITORY, "pull_and_classify.py", *files)
    result["accuracy"] = float((np.load(folder / "classes.npy") == classes).mean())
    (work / "digits.json").write_text(json.dumps(result, indent=2) + "\n")

    print(f"\nhandwritten digits, {TEST} unseen ones, pixel by pixel: {100 * result['accuracy']:.1f} % right")
    print(
        f"a digit takes {result['milliseconds']:.2f} ms with branches and {result['merged_milliseconds']:.2f} ms "
        f"merged, the logits {result['difference']:.0e} apart; {time.monotonic() - started:.0f} s"
    )
    if result["accuracy"] < WANTED:
        sys.exit(
            f"the classifier should be right for {100 * WANTED:.0f} % at least: something is wrong with this run."
        )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "quickstart"))
