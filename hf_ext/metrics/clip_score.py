"""CLIP score, how well images fit their texts, as a function of embeddings and as an `evaluate` module.

Hessel, Holtzman, Forbes, Le Bras and Choi, "CLIPScore: a reference-free evaluation metric for image captioning", EMNLP
2021; with the factor 100, as text-to-image papers report it, in place of that paper's 2.5.
"""

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate
import numpy as np
import torch
from transformers import CLIPModel, CLIPProcessor

from hf_ext.hub.checkpoints import split_revision

from .images import check_images, describe

INPUTS_DESCRIPTION = """
Args:
    predictions (`list` of `PIL.Image.Image` or `numpy.ndarray`):
        Images: PIL images of mode "RGB" or "L", or uint8 arrays `[height, width(, 3)]`.
    references (`list` of `str`):
        The text of each image.
"""


def clip_score(image_embeddings: np.ndarray, text_embeddings: np.ndarray) -> np.ndarray:
    """
    `100 max(cos(image, text), 0)` of each pair.

    Args:
        image_embeddings, text_embeddings (`numpy.ndarray` of shape `[pairs, dimensions]`, floating):
            Projected embeddings of images and their texts, of any length.

    Returns:
        `numpy.ndarray` of shape `[pairs]`, float64: From 0 to 100.
    """
    pair = [np.asarray(values, dtype=np.float64) for values in (image_embeddings, text_embeddings)]
    if pair[0].ndim != 2 or pair[0].shape != pair[1].shape:
        raise ValueError(
            f"image and text embeddings must have one shape [pairs, dimensions], got {pair[0].shape} and "
            f"{pair[1].shape}"
        )
    lengths = [np.linalg.norm(values, axis=1) for values in pair]
    if not all(np.isfinite(values).all() and values.all() for values in lengths):
        raise ValueError("an embedding is zero or not finite: check images, texts and model")
    cosines: np.ndarray = np.sum(pair[0] * pair[1], axis=1) / (lengths[0] * lengths[1])
    return 100 * np.maximum(cosines, 0.0)


class CLIPScore(evaluate.Metric):
    """
    [`clip_score`] of images and texts. `compute` returns `clip_score`, the mean, and `clip_score_per_image`. Texts are
    cut to the model's longest. Values depend on the model: name it beside them.

    Args:
        model (`str`): Folder or `org/name[@revision]` of a CLIP model with its processor, for instance
            `"openai/clip-vit-base-patch16"`.
        device (`str`, *optional*, defaults to `"cpu"`): Where it runs.
        batch_size (`int`, *optional*, defaults to 64): Pairs at once.
    """

    def __init__(self, *args: Any, model: str, device: str = "cpu", batch_size: int = 64, **kwargs: Any):
        super().__init__(*args, **kwargs)
        name, revision = split_revision(model)
        network: Any = CLIPModel.from_pretrained(name, revision=revision)
        self.model = network.to(device).eval()
        self.processor = CLIPProcessor.from_pretrained(name, revision=revision)
        self.batch_size = batch_size

    def _info(self) -> evaluate.MetricInfo:
        columns = {"predictions": datasets.Image(), "references": datasets.Value("string")}
        return describe("CLIP score of images and their texts.", INPUTS_DESCRIPTION, **columns)

    def add_batch(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> None:
        """Adds images and their texts."""
        check_images(predictions, "predictions")
        super().add_batch(predictions=predictions, references=references, **kwargs)

    def add(self, *, prediction: Any = None, reference: Any = None, **kwargs: Any) -> None:
        """Adds one image and its text."""
        self.add_batch(predictions=[prediction], references=[reference], **kwargs)

    @torch.no_grad()
    def embed(self, images: Sequence[Any], texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Projected embeddings of images and texts."""
        pixels = self.processor(images=[image.convert("RGB") for image in images], return_tensors="pt")
        tokens = self.processor(text=list(texts), return_tensors="pt", padding=True, truncation=True)
        device = self.model.device
        seen = self.model.get_image_features(**pixels.to(device)).pooler_output
        read = self.model.get_text_features(**tokens.to(device)).pooler_output
        return seen.float().cpu().numpy(), read.float().cpu().numpy()

    def _compute(self, predictions: Any, references: Any) -> dict[str, float | list[float]]:
        starts = range(0, len(predictions), self.batch_size)
        parts = [slice(start, start + self.batch_size) for start in starts]
        values = np.concatenate([clip_score(*self.embed(predictions[part], references[part])) for part in parts])
        return {self.name: float(values.mean()), f"{self.name}_per_image": values.tolist()}
