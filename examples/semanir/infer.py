"""python examples/semanir/infer.py MODEL DEGRADED.png RESTORED.png"""

import sys

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageToImage

import hf_ext  # noqa: F401  registers SemanIR with the Auto classes


def restore(model_id: str, degraded: str, restored: str) -> None:
    """Restores one image file."""
    processor = AutoImageProcessor.from_pretrained(model_id)
    model = AutoModelForImageToImage.from_pretrained(model_id).eval()
    with torch.no_grad():
        outputs = model(**processor(Image.open(degraded), return_tensors="pt"))
    processor.post_process_image_restoration(outputs)[0].save(restored)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    restore(*sys.argv[1:])
