"""Pictures of a trained Disentangled DiT, large enough to see: its classes, and sliders of size, crop and flip.

python examples/disentangled_dit/pictures.py MODEL OUT [CLASS]
MODEL is a folder or org/name of a pipeline. OUT gets classes.png, a row for each class, and sliders.png, of CLASS (a
name or number): all pictures of a column begin with the same noise, and in each row one control has another value.
A pixel of a small picture is drawn as a square of several.
"""

import sys
from pathlib import Path
from typing import Any

from PIL import Image

from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline
from hf_ext.tasks.diffusion_grids import draw_grid, sample_rows, write_picture

# Sides of the pictures as they are shown, at least.
SHOWN, COLUMNS, CLASSES = 128, 8, 10
SAMPLING: dict[str, Any] = {"num_inference_steps": 50, "guidance_scale": 3.0}


def draw_classes(pipeline: DisentangledDiTPipeline, **options: Any) -> Image.Image:
    """A row for each of the first classes."""
    count = min(CLASSES, pipeline.transformer.config.num_classes)
    known = pipeline.config.get("id2label") or {}
    names = [str(known.get(str(label), label)) for label in range(count)]
    rows = sample_rows(pipeline, list(range(count)), COLUMNS, 0, **{**SAMPLING, **options})
    return draw_grid(rows, names, SHOWN)


def slider_rows(side: int) -> dict[str, dict[str, Any]]:
    """Controls of the rows: a picture as it is by default, then each control on its own."""
    rows: dict[str, dict[str, Any]] = {"as it is": {}}
    rows |= {f"size {size}": {"original_size": (size, size)} for size in (side // 4, side // 2, 2 * side, 4 * side)}
    rows |= {f"top {place}": {"crop": (place, 0)} for place in (side // 4, side // 2)}
    rows |= {f"left {place}": {"crop": (0, place)} for place in (side // 4, side // 2)}
    return {**rows, "flip": {"flip": True}}


def draw_sliders(
    pipeline: DisentangledDiTPipeline,
    label: int | str,
    choices: dict[str, dict[str, Any]] | None = None,
    **options: Any,
) -> Image.Image:
    """A row for each value of a control, of the same class and noise."""
    choices, options = choices or slider_rows(min(pipeline.image_size(None, None))), {**SAMPLING, **options}
    rows = [sample_rows(pipeline, [label], COLUMNS, 0, **options, **asked)[0] for asked in choices.values()]
    return draw_grid(rows, list(choices), SHOWN)


def main(source: str, out: Path, label: int | str) -> None:
    """Both pictures."""
    pipeline = DisentangledDiTPipeline.from_pretrained(source)
    pipeline.set_progress_bar_config(disable=True)
    out.mkdir(parents=True, exist_ok=True)
    print(write_picture(draw_classes(pipeline), out / "classes.png"))
    print(write_picture(draw_sliders(pipeline, label), out / "sliders.png"))


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    word = sys.argv[3] if len(sys.argv) == 4 else "0"
    main(sys.argv[1], Path(sys.argv[2]), int(word) if word.isdigit() else word)
