"""Use without hf_ext: pull a diffusion pipeline from a Hub at a pinned commit, draw with it.

python examples/pull_and_sample.py ORG/NAME COMMIT COLUMNS PICTURES.npy
The pictures come as [classes * columns, height, width], uint8 and grey, those of a class after each other.
"""

import sys

import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.utils.logging import disable_progress_bar


def draw(pipeline: DiffusionPipeline, columns: int) -> np.ndarray:
    """So many pictures of every class; those of a column start from the same noise."""
    pipeline.set_progress_bar_config(disable=True)
    classes = range(pipeline.transformer.config.num_classes)
    labels = [label for label in classes for _ in range(columns)]
    generators = [torch.Generator().manual_seed(column) for _ in classes for column in range(columns)]
    made = pipeline(class_labels=labels, generator=generators, num_inference_steps=20, guidance_scale=3.0).images
    return np.stack([np.asarray(picture.convert("L")) for picture in made])


def main(repo_id: str, commit: str, columns: str, pictures: str) -> None:
    """Pulls the pipeline and draws."""
    disable_progress_bar()
    remote = {"revision": commit, "trust_remote_code": True}
    np.save(pictures, draw(DiffusionPipeline.from_pretrained(repo_id, **remote), int(columns)))


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    # Makes sure of it where the package is installed all the same: importing hf_ext fails from here on.
    sys.modules["hf_ext"] = None  # type: ignore[assignment]
    main(*sys.argv[1:])
