"""SemanIR in the shared training loop: degradations, patches, scores and pictures."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from huggingface_hub.dataclasses import strict
from PIL import Image
from transformers import PreTrainedModel

from hf_ext.metrics.psnr import psnr
from hf_ext.metrics.ssim import ssim
from hf_ext.training.models import initialize_from, split_revision

from .configuration_semanir import PRESETS, SemanIRConfig
from .image_processing_semanir import SemanIRImageProcessor
from .modeling_semanir import SemanIRForImageRestoration


@strict
@dataclass
class SemanIRTask:
    """
    Image restoration with [`SemanIRForImageRestoration`].

    Args:
        degradation (`"gaussian_noise"` or `"paired"`, defaults to `"gaussian_noise"`):
            Noise added on the fly to clean images, or images that come as `lq`/`hq` pairs of equal size.
        sigma (`float`, defaults to 25.0):
            Standard deviation of the noise in 8-bit levels. The noisy image is neither clipped nor rounded.
        patch_size (`int`, defaults to 64): Side of the training patches in pixels; smaller images are reflected.
        image_column (`str`, defaults to `"image"`): Column of the clean images.
    """

    degradation: Literal["gaussian_noise", "paired"] = "gaussian_noise"
    sigma: float = 25.0
    patch_size: int = 64
    image_column: str = "image"

    pipeline_tag: ClassVar[str] = "image-to-image"
    greater_is_better: ClassVar[bool] = True
    eval_batch_size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        self.config = SemanIRConfig()

    def validate_sizes(self) -> None:
        if not 0 < self.sigma <= 255:
            raise ValueError(f"sigma must be in (0, 255], in 8-bit levels; got {self.sigma}.")
        if self.patch_size < 8:
            raise ValueError(f"patch_size must be at least 8 pixels, got {self.patch_size}.")

    @property
    def metric_names(self) -> dict[str, str]:
        """Metrics and how they are taken."""
        channel = self._channel.upper()
        return {"psnr": f"PSNR ({channel}, border 0, dB)", "ssim": f"SSIM ({channel}, valid region)"}

    @property
    def _channel(self) -> Literal["gray", "rgb"]:
        return "gray" if self.config.num_channels == 1 else "rgb"

    def build_model(self, config: dict[str, Any], init_from: str | None) -> SemanIRForImageRestoration:
        """
        Builds the model of the `model` section: a preset, a checkpoint's configuration, or the defaults, with changes.

        Args:
            config (`dict[str, Any]`): Fields of [`SemanIRConfig`], and `preset`, a key of `PRESETS`.
            init_from (`str`, *optional*): Folder or `org/name@revision` of the initial weights.

        Returns:
            [`SemanIRForImageRestoration`]: The model.

        Raises:
            ValueError: If a key or value is not allowed.
        """
        changes = dict(config)
        preset = changes.pop("preset", None)
        allowed = {item.name for item in fields(SemanIRConfig)} & set(SemanIRConfig.__annotations__)
        unknown = sorted(set(changes) - allowed)
        if unknown:
            raise ValueError(
                f"unknown key(s) {unknown} in section 'model'. Allowed: preset, {', '.join(sorted(allowed))}."
            )
        if preset is not None and (preset not in PRESETS or init_from):
            raise ValueError(
                f"model.preset is {preset!r} with init_from {init_from!r}; allowed: one of {', '.join(PRESETS)}, and "
                "none with init_from, which brings its own sizes."
            )
        if init_from:
            name, revision = split_revision(init_from)
            self.config = SemanIRConfig.from_pretrained(name, revision=revision, **changes)
        else:
            self.config = SemanIRConfig(**{**PRESETS.get(preset, {}), **changes})
        if self.config.scale != 1 or self.config.num_channels not in (1, 3):
            raise ValueError(
                f"this task restores grey (1) or RGB (3) images at their size; model.scale is {self.config.scale}, "
                f"model.num_channels {self.config.num_channels}."
            )
        model = SemanIRForImageRestoration(self.config)
        if init_from:
            initialize_from(model, init_from)
        return model

    def parameter_groups(self, model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        """Matrices and kernels decay; biases, norms and temperatures do not. Betas are (0.9, 0.99)."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        matrices = [
            parameter for parameter in trained if parameter.ndim > 1 and parameter.numel() > parameter.shape[0]
        ]
        chosen = {id(parameter) for parameter in matrices}
        others = [parameter for parameter in trained if id(parameter) not in chosen]
        return [
            {"params": matrices, "weight_decay": weight_decay, "betas": (0.9, 0.99)},
            {"params": others, "weight_decay": 0.0, "betas": (0.9, 0.99)},
        ]

    def training_sample(self, example: dict[str, Any], generator: np.random.Generator) -> dict[str, torch.Tensor]:
        """A random patch, flipped and turned, with its degraded version; both [channels, size, size] in [0, 1]."""
        images = self._images(example)
        size = self.patch_size
        height, width = images[-1].shape[:2]
        if min(height, width) < size:
            margins = ((0, max(0, size - height)), (0, max(0, size - width)), (0, 0))
            images = [np.pad(image, margins, mode="reflect") for image in images]
            height, width = images[-1].shape[:2]
        top, left = generator.integers(height - size + 1), generator.integers(width - size + 1)
        turns, mirror = int(generator.integers(4)), generator.integers(2)
        images = [np.rot90(image[top : top + size, left : left + size], turns) for image in images]
        images = [image[:, ::-1] if mirror else image for image in images]
        noisy, clean = self._degrade(images, generator)
        return {"pixel_values": _tensor(noisy), "labels": _tensor(clean)}

    def loss(self, model: torch.nn.Module, batch: dict[str, Any], step: int) -> torch.Tensor:
        """The model's own loss; with `train_top_k`, one k for all stages and processes of a step."""
        choices = self.config.train_top_k
        top_k = int(np.random.default_rng((4, step)).choice(choices)) if choices else None
        return model(pixel_values=batch["pixel_values"], labels=batch["labels"], top_k=top_k).loss

    def evaluate_batch(
        self, model: torch.nn.Module, examples: list[dict[str, Any]], indices: list[int]
    ) -> list[dict[str, float]]:
        """PSNR and SSIM of each whole image; its noise depends on its index alone."""
        rows = []
        for example, index in zip(examples, indices, strict=True):
            noisy, clean = self.degraded_example(example, index)
            restored = self.restore(model, noisy)
            channel = self._channel
            rows.append(
                {
                    "psnr": psnr(restored, clean, channel=channel, data_range=1.0),
                    "ssim": ssim(restored, clean, channel=channel, data_range=1.0),
                }
            )
        return rows

    def summarize(self, rows: list[dict[str, float]]) -> dict[str, float]:
        """Means over the images."""
        return {name: float(np.mean([row[name] for row in rows])) for name in self.metric_names}

    def degraded_example(self, example: dict[str, Any], index: int) -> tuple[np.ndarray, np.ndarray]:
        """
        The evaluation pair of an example.

        Args:
            example (`dict`): With the task's image columns.
            index (`int`): Its place in the data, which decides the noise.

        Returns:
            `tuple[numpy.ndarray, numpy.ndarray]`: Degraded and clean image, `[height, width, channels]` in [0, 1].
        """
        return self._degrade(self._images(example), np.random.default_rng((5, index)))

    @staticmethod
    def restore(model: torch.nn.Module, degraded: np.ndarray) -> np.ndarray:
        """
        Restores one image.

        Args:
            model (`torch.nn.Module`): The restoration model.
            degraded (`numpy.ndarray` of shape `[height, width, channels]`): In [0, 1].

        Returns:
            `numpy.ndarray`: The restored image of the same shape, not clipped.
        """
        device = next(model.parameters()).device
        with torch.no_grad():
            restored = model(pixel_values=_tensor(degraded)[None].to(device)).reconstruction
        return restored[0].float().permute(1, 2, 0).cpu().numpy()

    def sample_picture(self, model: torch.nn.Module, examples: list[dict[str, Any]]) -> Image.Image:
        """Rows of degraded, restored and clean middle parts."""
        rows = []
        for index, example in enumerate(examples):
            degraded, clean = (_middle(image, 192) for image in self.degraded_example(example, index))
            panels = [degraded, self.restore(model, degraded), clean]
            rows.append(np.concatenate([np.clip(panel, 0, 1) for panel in panels], axis=1))
        width = max(row.shape[1] for row in rows)
        sheet = np.concatenate([np.pad(row, ((0, 4), (0, width - row.shape[1]), (0, 0))) for row in rows])
        pixels = np.rint(sheet * 255).astype(np.uint8)
        return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)

    def save_model(self, model: torch.nn.Module, state_dict: dict[str, torch.Tensor], folder: Path) -> None:
        """Model, or adapter, with the image processor that fits its channels."""
        cast(PreTrainedModel, model).save_pretrained(folder, state_dict=state_dict)
        SemanIRImageProcessor(do_convert_rgb=self.config.num_channels == 3).save_pretrained(folder)

    def describe(self) -> dict[str, Any]:
        """The degradation, which is what a score depends on."""
        noise = {"sigma": self.sigma} if self.degradation == "gaussian_noise" else {}
        return {"degradation": self.degradation, **noise}

    def _images(self, example: dict[str, Any]) -> list[np.ndarray]:
        """The clean image, or degraded and clean, as float arrays [height, width, channels] in [0, 1]."""
        columns = ["lq", "hq"] if self.degradation == "paired" else [self.image_column]
        missing = [column for column in columns if column not in example]
        if missing:
            raise ValueError(
                f"the data has no column {missing[0]!r}; it has {sorted(example)}. Set task.image_column, or "
                "task.degradation: paired for folders lq/ and hq/."
            )
        mode = "L" if self.config.num_channels == 1 else "RGB"
        images = [np.asarray(example[column].convert(mode), dtype=np.float32) / 255 for column in columns]
        if images[0].shape != images[-1].shape:
            raise ValueError(f"a pair of lq and hq images differs in size: {images[0].shape} and {images[-1].shape}.")
        return [image[..., None] if image.ndim == 2 else image for image in images]

    def _degrade(self, images: list[np.ndarray], generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        clean = images[-1]
        if self.degradation == "paired":
            return images[0], clean
        noise = generator.standard_normal(clean.shape, dtype=np.float32)
        return clean + np.float32(self.sigma / 255) * noise, clean


def _tensor(image: np.ndarray) -> torch.Tensor:
    """[height, width, channels] → [channels, height, width]"""
    return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))


def _middle(image: np.ndarray, size: int) -> np.ndarray:
    top, left = (max(0, (side - size) // 2) for side in image.shape[:2])
    return image[top : top + size, left : left + size]
