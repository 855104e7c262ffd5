"""python examples/disentangled_dit/infer.py MODEL CLASS PICTURE.png      (or a text instead of the class)"""

import sys

from diffusers import DiffusionPipeline

import hf_ext.pipelines  # noqa: F401  registers the pipeline with diffusers


def sample(model_id: str, condition: str, picture: str) -> None:
    """Writes one picture of a class or a text."""
    pipeline = DiffusionPipeline.from_pretrained(model_id)
    is_text = pipeline.transformer.config.num_classes is None
    made = pipeline(prompt=condition) if is_text else pipeline(class_labels=condition)
    made.images[0].save(picture)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    sample(*sys.argv[1:])
