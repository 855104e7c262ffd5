# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""`pipeline("image-restoration", model=...)`: pictures in, restored pictures out."""
# transformers' base class annotates its hooks more narrowly than its own pipelines use them.
# mypy: disable-error-code="assignment,override"

import io
import os
import warnings
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedModel
from transformers.pipelines.base import Pipeline

from .image_processing_semanir import as_picture, from_unit, image_to_pixels, pixels_to_image, restore_picture


class ImageRestorationPipeline(Pipeline):
    """Restore pictures with a [`SemanIRForImageRestoration`].

    Each picture is restored by itself at its own size, so `batch_size` changes nothing. Grey stays grey, alpha is
    kept, pictures stand upright. Where hf_ext is imported, `pipeline` takes a subclass of this that restores in tiles
    too, averages over turns, and reads 16 bits in colour, HEIC and RAW files."""

    # A SemanIRForImageRestoration. That class imports this file, so that the pipeline travels with every restorer.
    model: PreTrainedModel

    # Where one is not refused, transformers looks for its code in the model's folder, and asks whether to trust it.
    _load_processor = False
    _load_video_processor = False
    # The model's configuration says what this needs; a processor that is there is saved along.
    _load_image_processor = None
    _load_feature_extractor = False
    _load_tokenizer = False

    # Options by the step that takes them: reading, restoring, writing. The subclass in hf_ext has all.
    _options: tuple[tuple[str, ...], ...] = ((), ("top_k",), ("output_type",))
    _options_of_hf_ext: tuple[str, ...] = ("max_megapixels", "tile", "self_ensemble", "strength", "wrap")

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.model.config.model_type != "semanir":
            raise ValueError(f"the model is a {self.model.config.model_type!r}; this pipeline takes 'semanir' models.")
        # The root of a merge loads like a checkpoint, and restores worse than not at all.
        if tasks := getattr(self.model.config, "emr_tasks", None):
            told = (
                f"{self.model.config.name_or_path} is a merge, and the model at its root is of no task. Choose one of"
            )
            advice = f"and give its model: hf_ext.EMRModel.from_pretrained(..., task={tasks[0]!r}).model"
            raise ValueError(f"{told} {', '.join(tasks)} {advice}")
        if "strength" not in self._options[1] and getattr(self.model.config, "restoration_strength", None) is not None:
            told = "Import hf_ext, which knows the model's own strength: here clean pictures lose detail."
            warnings.warn(told, stacklevel=2)

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """Restore one picture, or each of a list, data set or generator: files, addresses, PIL images, or arrays of
        shape `(height, width)` or `(height, width, channels)`, 1 to 4 of them (grey, grey and alpha, RGB, RGBA), of
        uint8, uint16, bool (black and white), or floats in [0, 1].

        `top_k` sets the keys per token. With `output_type="np"` arrays of shape `(height, width, channels)` come out
        in place of PIL images, with 16 bits where the input has them; PIL images of several channels have 8 bits."""
        return (
            [] if isinstance(inputs, list) and not inputs else super().__call__(inputs, **{**kwargs, "batch_size": 1})
        )

    def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict[str, Any], ...]:
        allowed = [name for part in self._options for name in part]
        unknown = sorted(set(kwargs) - set(allowed))
        if missing := [name for name in unknown if name in self._options_of_hf_ext]:
            told = f"{', '.join(missing)}: these options need the package hf-ext"
            advice = "Install it and import hf_ext before `pipeline` is called"
            raise ValueError(f"{told}. {advice}; without it a picture is restored whole.")
        if unknown:
            raise ValueError(f"unknown option {', '.join(unknown)}; allowed: {', '.join(allowed)}.")
        if kwargs.get("output_type", "pil") not in ("pil", "np"):
            raise ValueError(f"`output_type` is {kwargs['output_type']!r}; allowed: 'pil', 'np'.")
        return tuple({name: kwargs[name] for name in part if name in kwargs} for part in self._options)

    def preprocess(self, image: Any, **options: Any) -> dict[str, np.ndarray]:
        """Pixels of a file, address, image or array."""
        if isinstance(image, np.ndarray):
            return {"pixels": image[..., None] if image.ndim == 2 else image}
        if isinstance(image, Image.Image):
            return {"pixels": self.read_image(image)}
        if isinstance(image, str) and image.startswith(("http://", "https://", "data:")):
            # Not by transformers' `load_image`: it makes RGB of 8 bits of everything.
            with urlopen(Request(image, headers={"User-Agent": "hf-ext"}), timeout=60) as answer:
                return {"pixels": self.read_file(answer.read(), **options)}
        if not isinstance(image, (str, os.PathLike)):
            raise TypeError(f"a picture is a {type(image).__name__}; give a file, address, PIL image or array.")
        return {"pixels": self.read_file(os.fspath(image), **options)}

    def read_file(self, source: str | bytes) -> np.ndarray:
        """Pixels of a picture file, or of what is in one, that Pillow reads."""
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            # A phone's JPEG of several is its first picture; of a drawing with layers it is the whole.
            if (count := getattr(image, "n_frames", 1)) > 1 and image.format not in ("MPO", "PSD"):
                raise ValueError(f"the file has {count} frames or pages; give one of them as an image.")
            return self.read_image(image)

    def read_image(self, image: Image.Image) -> np.ndarray:
        """Pixels of an image, upright. A mosaic is never turned, which would change the places of its colours."""
        if self.model.config.demosaicks and image.getexif().get(274, 1) != 1:
            raise ValueError("the EXIF data of this mosaic turn it; remove the orientation, and turn the result.")
        return image_to_pixels(image)

    def _forward(self, model_inputs: dict[str, np.ndarray], top_k: int | None = None) -> dict[str, np.ndarray]:
        pixels, config = as_picture(model_inputs["pixels"]), self.model.config

        def restore(images: np.ndarray) -> np.ndarray:
            values = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2))).to(self.model.device)
            restored: np.ndarray = self.model(pixel_values=values, top_k=top_k).reconstruction.float().cpu().numpy()
            if not np.isfinite(restored).all():
                raise ValueError("the model returned infinite values or NaN; load it in float32.")
            return restored.transpose(0, 2, 3, 1)

        restored = restore_picture(pixels, config, restore)
        whole = np.issubdtype(pixels.dtype, np.integer)
        return {"pixels": from_unit(restored, pixels.dtype if whole else np.uint8)}

    def postprocess(self, model_outputs: dict[str, np.ndarray], output_type: str = "pil") -> Any:
        """A PIL image or an array."""
        pixels = model_outputs["pixels"]
        if output_type == "np":
            return pixels
        if pixels.dtype == np.uint16 and pixels.shape[-1] > 1:
            pixels = np.rint(pixels / np.float32(257)).astype(np.uint8)
        return pixels_to_image(pixels)
