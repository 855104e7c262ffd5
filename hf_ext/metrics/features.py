"""Networks that see pictures for scores: a classifier of transformers, Inception as TorchScript, CLIP."""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import hf_hub_download
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification, CLIPModel, CLIPProcessor

from hf_ext.files import hash_file
from hf_ext.hub.checkpoints import split_revision

from .images import check_images

INCEPTION_DIMENSIONS = 2048


def as_rgb(images: Sequence[Any] | np.ndarray) -> list[np.ndarray]:
    """PIL images of mode RGB or L and uint8 arrays, [h, w(, 1 or 3)], as uint8 arrays [h, w, 3]."""
    flat = [x[:, :, 0] if isinstance(x, np.ndarray) and x.ndim == 3 and x.shape[2] == 1 else x for x in images]
    check_images(flat, "images")
    if not flat:
        raise ValueError("images are missing: give at least one")
    arrays = map(np.asarray, flat)
    return [np.broadcast_to(x if x.ndim == 3 else x[:, :, None], (*x.shape[:2], 3)) for x in arrays]


def _batches(images: list[np.ndarray], batch_size: int) -> Iterator[list[np.ndarray]]:
    return (images[start : start + batch_size] for start in range(0, len(images), batch_size))


class ClassifierFeatures:
    """
    Features before the last layer of an image classifier of transformers, a folder or `org/name[@revision]`, for
    `batch_size` images at once.
    """

    def __init__(self, source: str, device: str = "cpu", batch_size: int = 64):
        name, revision = split_revision(source)
        self.model = AutoModelForImageClassification.from_pretrained(name, revision=revision).to(device).eval()
        self.processor = AutoImageProcessor.from_pretrained(name, revision=revision)
        self.batch_size = batch_size
        self._pooled: torch.Tensor | None = None
        if self.model.base_model is self.model:
            raise ValueError(f"{source} is a {type(self.model).__name__}, which has no base model to take features of")
        self.model.base_model.register_forward_hook(self._keep)

    def _keep(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._pooled = getattr(output, "pooler_output", None)

    @torch.no_grad()
    def classify(self, images: Sequence[Any] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Features [images, dimensions] in float32, and the most probable class of each image."""
        features, classes = [], []
        for batch in _batches(as_rgb(images), self.batch_size):
            inputs = self.processor(batch, return_tensors="pt").to(self.model.device)
            logits = self.model(**inputs).logits
            if self._pooled is None:
                raise ValueError(f"{type(self.model).__name__} returns no pooler_output: choose another classifier")
            features.append(self._pooled.flatten(1).float().cpu())
            classes.append(logits.argmax(-1).cpu())
        return torch.cat(features).numpy(), torch.cat(classes).numpy()

    def __call__(self, images: Sequence[Any] | np.ndarray) -> np.ndarray:
        return self.classify(images)[0]


class InceptionFeatures:
    """
    The Inception network of FID and KID, from a TorchScript file that the user provides: a path, or
    `org/name/file.pt[@revision]` on the Hub; `#sha256=…` at its end is the hash that the file must have.

    The file is the one that NVIDIA publishes with StyleGAN 2 and 3, `inception-2015-12-05.pt`: a translation of the
    original network that takes uint8 RGB images `[batch, 3, height, width]` of any size, resizes them itself, and
    returns `[batch, 2048]` when called with `return_features=True`. Other translations or other weights give other
    numbers. A TorchScript file is a program: use one that you trust. It gets `batch_size` images of one size at once.
    """

    def __init__(self, source: str, device: str = "cpu", batch_size: int = 64):
        source, _, wanted = source.partition("#sha256=")
        path, revision = split_revision(source)
        if not Path(path).is_file():
            parts = path.split("/", 2)
            if len(parts) != 3 or Path(path).is_absolute():
                advice = "give the TorchScript file inception-2015-12-05.pt, or a classifier of your own"
                raise ValueError(f"{source!r} is no file and no `org/name/file.pt` of the Hub: {advice}.")
            path = hf_hub_download("/".join(parts[:2]), parts[2], revision=revision)
        self.digest = hash_file(path)
        if wanted and self.digest != wanted.lower():
            raise ValueError(f"{source} has the SHA-256 {self.digest}, not {wanted}: fetch the file again")
        with warnings.catch_warnings():
            # TorchScript is deprecated, but the published file is one. The warning has another class since torch 2.15.
            warnings.filterwarnings("ignore", message=".*torch.jit")
            try:
                self.network = torch.jit.load(path, map_location=device).eval()
            except (RuntimeError, ValueError) as error:
                raise ValueError(f"{source} is no TorchScript file that can be read on {device}: {error}") from error
        self.device = device
        self.batch_size = batch_size

    @torch.no_grad()
    def __call__(self, images: Sequence[Any] | np.ndarray) -> np.ndarray:
        features = []
        for batch in _batches(as_rgb(images), self.batch_size):
            if len({image.shape for image in batch}) != 1:
                raise ValueError("images must have one size: resize them before, by one method for both sets")
            pixels = torch.from_numpy(np.stack(batch)).permute(0, 3, 1, 2).to(self.device)
            values = self.network(pixels, return_features=True)
            if values.shape != (len(batch), INCEPTION_DIMENSIONS):
                told = f"{list(values.shape)} for {len(batch)} images, not {INCEPTION_DIMENSIONS} numbers for each"
                raise ValueError(f"the network returns {told}: it is not the Inception network of FID")
            features.append(values.float().cpu())
        return torch.cat(features).numpy()


class CLIPScores:
    """
    CLIP scores: how well images fit their texts, `100 max(cos(image, text), 0)` of their projected embeddings.

    Hessel, Holtzman, Forbes, Le Bras and Choi, "CLIPScore: a reference-free evaluation metric for image captioning",
    EMNLP 2021; with the factor 100, as text-to-image papers report it, in place of that paper's 2.5. Texts are cut to
    the model's longest. Values depend on the model, a folder or `org/name[@revision]`: name it beside them.
    """

    def __init__(self, source: str, device: str = "cpu"):
        name, revision = split_revision(source)
        kind = AutoConfig.from_pretrained(name, revision=revision).model_type
        if kind != "clip":
            # Its weights would be read in part, and drawn at random for the rest.
            raise ValueError(f"{source} is a model of the kind {kind!r}, not CLIP: give a CLIP model")
        network: Any = CLIPModel.from_pretrained(name, revision=revision)
        self.model = network.to(device).eval()
        self.processor = CLIPProcessor.from_pretrained(name, revision=revision)

    @torch.no_grad()
    def __call__(self, images: Sequence[Any] | np.ndarray, texts: Sequence[str]) -> np.ndarray:
        """Scores [pairs], float64, of images and the text of each."""
        pictures = as_rgb(images)
        if isinstance(texts, str) or len(texts) != len(pictures):
            raise ValueError(f"texts must be a list, one for each of the {len(pictures)} images, got {texts!r:.80}")
        pixels = self.processor(images=pictures, return_tensors="pt")
        tokens = self.processor(text=list(texts), return_tensors="pt", padding=True, truncation=True)
        device = self.model.device
        seen = self.model.get_image_features(**pixels.to(device)).pooler_output.double()
        read = self.model.get_text_features(**tokens.to(device)).pooler_output.double()
        if not all(bool(part.isfinite().all() and part.any(dim=1).all()) for part in (seen, read)):
            raise ValueError("an embedding is zero or not finite: check images, texts and model")
        scores: np.ndarray = (100 * torch.cosine_similarity(seen, read).clamp(min=0)).cpu().numpy()
        return scores
