"""Use without hf_ext: pull a restoration model from a Hub at a pinned commit, restore pictures.

python examples/pull_and_restore.py ORG/NAME COMMIT DEGRADED.npy RESTORED.npy [DEGRADED.npy RESTORED.npy …]
The arrays are [height, width, channels], float, white at 1.
"""

import sys

import numpy as np
import torch
import transformers
from transformers import AutoImageProcessor, AutoModelForImageToImage

# Makes sure of it where the package is installed all the same: importing hf_ext fails from here on.
sys.modules["hf_ext"] = None  # type: ignore[assignment]


def main(repo_id: str, commit: str, *files: str) -> None:
    """Restores every degraded array into the file after it."""
    transformers.utils.logging.disable_progress_bar()
    remote = {"revision": commit, "trust_remote_code": True}
    processor = AutoImageProcessor.from_pretrained(repo_id, **remote)
    model = AutoModelForImageToImage.from_pretrained(repo_id, **remote).eval()
    for degraded, restored in zip(files[::2], files[1::2], strict=True):
        # The noise goes beyond black and white, so the values are no 8-bit picture and are not rescaled.
        inputs = processor(np.load(degraded), do_rescale=False, do_convert_rgb=False, return_tensors="pt")
        with torch.no_grad():
            outputs = model(**inputs)
        np.save(restored, processor.post_process_image_restoration(outputs, output_type="np")[0])


if __name__ == "__main__":
    if len(sys.argv) < 5 or len(sys.argv) % 2 == 0:
        sys.exit(__doc__)
    main(*sys.argv[1:])
