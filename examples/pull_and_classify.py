"""Use without hf_ext: pull a classifier of pixel sequences from a Hub at a pinned commit, use it.

python examples/pull_and_classify.py ORG/NAME COMMIT PICTURES.npy CLASSES.npy
The pictures are [number, height, width], uint8; the classes come back as [number].
"""

import sys

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForSequenceClassification

# Makes sure of it where the package is installed all the same: importing hf_ext fails from here on.
sys.modules["hf_ext"] = None  # type: ignore[assignment]


def main(repo_id: str, commit: str, pictures: str, classes: str) -> None:
    """Classifies every picture."""
    transformers.utils.logging.disable_progress_bar()
    remote = {"revision": commit, "trust_remote_code": True}
    processor = AutoImageProcessor.from_pretrained(repo_id, **remote)
    model = AutoModelForSequenceClassification.from_pretrained(repo_id, **remote).eval()
    images = [Image.fromarray(picture) for picture in np.load(pictures)]
    pixels = processor(images, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        # The pixels of an image, row by row, are the positions of a sequence.
        logits = model(input_values=pixels.flatten(2).transpose(1, 2)).logits
    np.save(classes, logits.argmax(-1).numpy())


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
