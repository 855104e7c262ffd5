# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""`pipeline("image-restoration", model=...)`: pictures in, restored pictures out."""
# transformers' base class annotates its hooks more narrowly than its own pipelines use them.
# mypy: disable-error-code="assignment,override"

import os
from typing import Any

import numpy as np
from PIL import Image
from transformers.image_utils import load_image
from transformers.pipelines.base import Pipeline

from .image_processing_files_semanir import read_image
from .image_processing_semanir import from_unit, image_to_pixels, pixels_to_image
from .modeling_semanir import SemanIRForImageRestoration
from .restoring_semanir import restore_image, restore_pixels


class ImageRestorationPipeline(Pipeline):
    """
    Restore pictures with a [`SemanIRForImageRestoration`].

    Each picture is restored by itself at its own size, so `batch_size` changes nothing. Grey stays grey, alpha is
    kept, pictures stand upright.

    Example:

    ```python
    >>> from transformers import pipeline

    >>> import hf_ext  # registers the task

    >>> restore = pipeline("image-restoration", model="org/name")
    >>> restore("noisy.png").save("restored.png")
    >>> restored = restore(["a.png", "b.jpg"], tile="auto", self_ensemble=True)
    ```
    """

    model: SemanIRForImageRestoration

    # Where one is not refused, transformers looks for its code in the model's folder, and asks whether to trust it.
    _load_processor = False
    _load_video_processor = False
    # The model's configuration says what this needs; a processor that is there is saved along.
    _load_image_processor = None
    _load_feature_extractor = False
    _load_tokenizer = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.model.config.model_type != "semanir":
            raise ValueError(
                f"the model is of type {self.model.config.model_type!r}; this pipeline restores with 'semanir' models."
            )
        # The root of a merge loads like a checkpoint, and restores worse than not at all.
        if tasks := getattr(self.model.config, "emr_tasks", None):
            raise ValueError(
                f"{self.model.config.name_or_path} is a merge, and the model at its root is of no task. Choose one of "
                f"{', '.join(tasks)} and give its model: hf_ext.EMRModel.from_pretrained(..., task={tasks[0]!r}).model"
            )

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """
        Restore one picture or several.

        Args:
            inputs (`str`, `Path`, `PIL.Image.Image`, `np.ndarray`, or a list, data set or generator of these):
                A file, an address, an image, or an array of shape `(height, width)` or `(height, width, channels)`:
                uint8, uint16, or floats in [0, 1].
            tile (`int` or `str`, *optional*): Side of tiles, or `"auto"`; the whole picture at once if not given.
            self_ensemble (`bool`, *optional*, defaults to `False`): Average over the eight flips and turns.
            top_k (`int`, *optional*): Keys per token; the model's own number if not given.
            output_type (`str`, *optional*, defaults to `"pil"`): `"pil"`, or `"np"` for arrays of shape `(height,
                width, channels)`, with 16 bits where the input has them. PIL images of several channels have 8 bits.
            max_megapixels (`float`, *optional*, defaults to 200): Larger files are refused before they are decoded.

        Returns:
            `PIL.Image.Image` or `np.ndarray`: The restored picture; a list for a list.

        Raises:
            ValueError: If an input is no picture, is broken, or does not fit the model.
            TypeError: If an input is of another type.
        """
        return super().__call__(inputs, **{**kwargs, "batch_size": 1})

    def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        names = (("max_megapixels",), ("tile", "self_ensemble", "top_k"), ("output_type",))
        unknown = set(kwargs) - {name for part in names for name in part}
        if unknown:
            allowed = ", ".join(name for part in names for name in part)
            raise ValueError(f"unknown option {', '.join(sorted(unknown))}; allowed: {allowed}.")
        reading, restoring, writing = ({name: kwargs[name] for name in part if name in kwargs} for part in names)
        if writing.get("output_type", "pil") not in ("pil", "np"):
            raise ValueError(f"`output_type` is {writing['output_type']!r}; allowed: 'pil', 'np'.")
        return reading, restoring, writing

    def preprocess(self, image: Any, max_megapixels: float = 200.0) -> dict[str, np.ndarray]:
        """Pixels of a file, address, image or array."""
        if isinstance(image, np.ndarray):
            return {"pixels": image[..., None] if image.ndim == 2 else image}
        if isinstance(image, Image.Image):
            return {"pixels": image_to_pixels(image)}
        if isinstance(image, str) and image.startswith(("http://", "https://", "data:")):
            return {"pixels": image_to_pixels(load_image(image))}
        if not isinstance(image, (str, os.PathLike)):
            raise TypeError(
                f"a picture is a {type(image).__name__}; give a file, an address, a PIL image or an array."
            )
        return {"pixels": read_image(os.fspath(image), max_megapixels).pixels}

    def _forward(self, model_inputs: dict[str, np.ndarray], **options: Any) -> dict[str, np.ndarray]:
        pixels = model_inputs["pixels"]
        if np.issubdtype(pixels.dtype, np.integer):
            return {"pixels": restore_pixels(self.model, pixels, **options)}
        return {"pixels": from_unit(restore_image(self.model, pixels, **options))}

    def postprocess(self, model_outputs: dict[str, np.ndarray], output_type: str = "pil") -> Any:
        """A PIL image or an array."""
        pixels = model_outputs["pixels"]
        if output_type == "np":
            return pixels
        if pixels.dtype == np.uint16 and pixels.shape[-1] > 1:
            pixels = np.rint(pixels / np.float32(257)).astype(np.uint8)
        return pixels_to_image(pixels)


__all__ = ["ImageRestorationPipeline"]
