"""`pipeline("image-restoration", model=...)` where hf_ext is installed: tiles, turns, files of all kinds."""
# transformers' base class annotates its hooks more narrowly than its own pipelines use them.
# mypy: disable-error-code="override"

from typing import Any

import numpy as np
from transformers import AutoModelForImageToImage
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.utils import logging

from hf_ext.semanir.image_processing_semanir import from_unit
from hf_ext.semanir.modeling_semanir import SemanIRForImageRestoration
from hf_ext.semanir.pipeline_semanir import ImageRestorationPipeline as PlainPipeline

from . import opened  # noqa: F401 (it enters itself: pictures of data sets are read by Pillow)

logger = logging.get_logger(__name__)


class ImageRestorationPipeline(PlainPipeline):
    """
    Restore pictures with a [`SemanIRForImageRestoration`].

    Each picture is restored by itself at its own size, so `batch_size` changes nothing. Grey stays grey, alpha is
    kept, pictures stand upright.
    """

    model: SemanIRForImageRestoration

    _options = (("max_megapixels",), ("tile", "self_ensemble", "top_k", "strength", "wrap"), ("output_type",))

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """
        Restore one picture or several.

        Args:
            inputs (`str`, `Path`, `PIL.Image.Image`, `np.ndarray`, or a list, data set or generator of these):
                A file, an address, an image, or an array of shape `(height, width)` or `(height, width, channels)`, 1
                to 4 of them (grey, grey and alpha, RGB, RGBA): uint8, uint16, bool (black and white), or floats in
                [0, 1].
            tile, self_ensemble, top_k, strength, wrap (*optional*): As of [`~restoration.tiles.restore_image`].
            output_type (`str`, *optional*, defaults to `"pil"`): `"pil"`, or `"np"` for arrays of shape `(height,
                width, channels)`, with 16 bits where the input has them. PIL images of several channels have 8 bits.
            max_megapixels (`float`, *optional*, defaults to 200): Larger files are refused before they are decoded.

        Returns:
            `PIL.Image.Image` or `np.ndarray`: The restored picture; a list for a list.
        """
        return super().__call__(inputs, **kwargs)

    # What reads files and restores in tiles is imported when it is needed: `import hf_ext` imports this file.
    def read_file(self, source: str | bytes, max_megapixels: float = 200.0) -> np.ndarray:
        """Pixels of a picture file, or of what is in one, with all its bits."""
        from .files import read_frames, require_unturned

        if self.model.config.demosaicks:
            require_unturned(source)
        frames = read_frames(source, max_megapixels, several=False)
        for line in frames.lost:
            logger.warning(line if isinstance(source, bytes) else f"{source}: {line}")
        return frames.pictures[0].pixels

    def _forward(self, model_inputs: dict[str, np.ndarray], **options: Any) -> dict[str, np.ndarray]:
        from .tiles import restore_image

        restored = restore_image(self.model, model_inputs["pixels"], **options)
        # Floats come out as a picture too.
        return {"pixels": from_unit(restored) if np.issubdtype(restored.dtype, np.floating) else restored}


PIPELINE_REGISTRY.register_pipeline(
    "image-restoration", ImageRestorationPipeline, pt_model=AutoModelForImageToImage, type="image"
)
# By this mark transformers would save this file beside the weights. What travels is the plain pipeline, which the
# model itself saves and names in `config.json`.
del ImageRestorationPipeline._registered_impl  # type: ignore[attr-defined]
