"""SemanIR in the shared training loop: degradations, patches, scores and pictures."""

import logging
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import datasets
import numpy as np
import torch
from huggingface_hub.dataclasses import strict
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoModel, PreTrainedModel

import hf_ext.fast.semanir  # noqa: F401 (it enters itself: a training imports no more than its task)
from hf_ext.hub.checkpoints import split_revision
from hf_ext.restoration.encoding import to_8_bits
from hf_ext.restoration.tiles import restore_image
from hf_ext.semanir.configuration_semanir import PRESETS, SemanIRConfig
from hf_ext.semanir.image_processing_semanir import SemanIRImageProcessor, from_unit, pixels_to_image, to_unit
from hf_ext.semanir.modeling_semanir import SemanIRForImageRestoration
from hf_ext.training.models import initialize_from, pin_revision, read_model_section
from hf_ext.training.task import Task

from ..errors import DataError, UsageError
from .checks import Scores, is_scaled, require
from .degradations import Degradation, matlab_luma, read_degradations, unpack_mosaic
from .made_pictures import make_picture
from .pictures import deep_grey, picture_of, put_on_white

logger = logging.getLogger(__name__)

# Images of these PIL modes have no colours.
GRAY_MODES = ("1", "L", "LA")
# Steps after which a model that still returns its input is told of.
_LEARNED = 500


@strict
@dataclass
class SemanIRTask(Task):
    """
    Image restoration with [`SemanIRForImageRestoration`]: one degradation, or one model for several.

    Args:
        degradation (`dict` or `list[dict]`, defaults to `{"kind": "gaussian_noise", "sigma": 25}`):
            One [`~hf_ext.tasks.degradations.Degradation`], or a list from which each training sample draws one by
            weight. `bicubic` and `mosaic` need a model with that layout; the others can be mixed.
        eval_degradation (`dict` or `list[dict]`, *optional*):
            Degradations of the evaluation, each measured separately; `degradation` when not given. From a range, each
            image draws one value, so evaluate models for a range at fixed values.
        patch_size (`int`, defaults to 64): Side of the training inputs; the targets are `scale` times as large.
            Smaller images are padded by reflection.
        top_k (`int`, *optional*): Keys per token in evaluation; those of the model's configuration when not given.
        image_column (`str`, defaults to `"image"`): Column of the clean images. Pairs have the columns `lq` and `hq`.
        gray_from (`"luma"` or `"matlab_y"`, defaults to `"luma"`):
            Conversion of colour images for a grey model: Pillow's luma from 0 to 255, or the Y of MATLAB's `rgb2ycbcr`
            from 16 to 235, on which grey JPEG is scored in the literature. Grey images are used as they are.
        made_pictures (`float`, defaults to 0.0): Probability of a synthetic picture in place of an example: flat
            colours, ramps, drawings, text and pages as on a screen, which photographs lack.
        permute_channels (`bool`, defaults to `False`): Put red, green and blue into random order in training.
        perceptual_model (`str`, *optional*): A network whose feature maps of result and target are compared too: a
            released restorer such as `denoise-color`, a folder or `org/name[@revision]` of an image model. Details
            become sharper, and PSNR lower.
        perceptual_weight (`float`, defaults to 0.1): Weight of that loss next to the model's own.
    """

    degradation: dict | list = field(default_factory=lambda: {"kind": "gaussian_noise", "sigma": 25.0})
    eval_degradation: dict | list | None = None
    patch_size: int = 64
    top_k: int | None = None
    image_column: str = "image"
    gray_from: Literal["luma", "matlab_y"] = "luma"
    made_pictures: float = 0.0
    permute_channels: bool = False
    perceptual_model: str | None = None
    perceptual_weight: float = 0.1

    pipeline_tag: ClassVar[str] = "image-to-image"
    greater_is_better: ClassVar[bool] = True
    eval_batch_size: ClassVar[int] = 1
    config_class: ClassVar[type | None] = SemanIRConfig
    presets: ClassVar[dict[str, dict[str, Any]]] = PRESETS

    def __post_init__(self) -> None:
        self.config = SemanIRConfig()
        self.feature_loss: FeatureLoss | None = None
        self._step = 0  # of the last loss
        self.trained = read_degradations(self.degradation, "task.degradation")
        own = self.eval_degradation is None
        self.evaluated = self.trained if own else read_degradations(self.eval_degradation, "task.eval_degradation")

    def validate_sizes(self) -> None:
        is_weight = 0 < self.perceptual_weight < float("inf")
        require(
            self,
            ("patch_size", self.patch_size >= 8, "at least 8 pixels"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1, or left out for the model's own"),
            ("made_pictures", 0 <= self.made_pictures <= 1, "a share from 0 to 1"),
            ("perceptual_weight", is_weight, "a number above 0 (for no perceptual loss leave out perceptual_model)"),
        )

    @property
    def metric_names(self) -> dict[str, str]:  # type: ignore[override]
        """Metrics and how they are taken; of several degradations first the mean, then each."""
        count = len(self.evaluated)
        names = self._names(self.evaluated[0], f", mean of {count}") if count > 1 else {}
        # PSNR-B is taken of JPEG alone: there is no mean of it.
        names.pop("psnr_b", None)
        for degradation in self.evaluated:
            of = f", {degradation.title}" if count > 1 else ""
            names |= {self._key(name, degradation): words for name, words in self._names(degradation, of).items()}
        return names

    def _key(self, metric: str, degradation: Degradation) -> str:
        return metric if len(self.evaluated) == 1 else f"{metric}_{degradation.label}"

    def _names(self, degradation: Degradation, of: str = "") -> dict[str, str]:
        channel, border = self._channel.upper(), self._border
        names = {
            "psnr": f"PSNR ({channel}, border {border}, dB){of}",
            "ssim": f"SSIM ({channel}, valid region{f', border {border}' if border else ''}){of}",
        }
        return names | ({"psnr_b": f"PSNR-B ({channel}, dB){of}"} if degradation.kind == "jpeg" else {})

    @property
    def _channel(self) -> Literal["gray", "rgb", "y"]:
        return "gray" if self.config.num_channels_out == 1 else "y" if self._border else "rgb"

    @property
    def _border(self) -> int:
        """Super-resolution leaves out a border of its scale, which makes a mosaic no larger."""
        return self.config.scale if self.config.scale > 1 and not self.config.demosaicks else 0

    def read_data(self, data: datasets.Dataset | datasets.IterableDataset) -> None:
        """Loads the network of the perceptual loss, which a training needs, and an evaluation does not."""
        if self.perceptual_model is not None:
            self.feature_loss = FeatureLoss(self.perceptual_model)

    def build_model(self, config: dict[str, Any], init_from: str | None) -> SemanIRForImageRestoration:
        allowed = {item.name for item in fields(SemanIRConfig)} & set(SemanIRConfig.__annotations__)
        preset, changes = read_model_section(config, allowed, init_from, PRESETS)
        if init_from:
            name, revision = split_revision(init_from)
            self.config = SemanIRConfig.from_pretrained(name, revision=revision, **changes)
        else:
            self.config = SemanIRConfig(**{**preset, **changes})
        self._check_layout()
        model = SemanIRForImageRestoration(self.config)
        if init_from:
            initialize_from(model, init_from)
        if self.feature_loss is not None:
            self.feature_loss.check(self.patch_size * self.config.scale)
        return model

    def _check_layout(self) -> None:
        config = self.config
        if self.made_pictures and "paired" in (item.kind for item in self.trained):
            raise UsageError("task.made_pictures does not combine with the degradation paired: leave out one of them.")
        channels, channels_out, scale = config.num_channels, config.num_channels_out, config.scale
        for option, usual, needed in (("permute_channels", False, 3), ("gray_from", "luma", 1)):
            if (value := getattr(self, option)) != usual and channels_out != needed:
                told = f"task.{option} {value!r} needs a model with num_channels_out {needed}, not {channels_out}"
                raise UsageError(f"{told}: leave it out, or set model.num_channels.")
        plain, colours = channels == channels_out and channels in (1, 3), "num_channels 1 (grey) or 3 (RGB)"
        layouts = {
            "mosaic": (config.demosaicks, "num_channels 4, num_channels_out 3 and scale 2"),
            "bicubic": (plain and scale > 1, f"{colours} and scale 2, 3 or 4"),
            "paired": (plain, f"{colours} and any scale"),
        }
        for kind in {item.kind for item in (*self.trained, *self.evaluated)}:
            fits, wanted = layouts.get(kind, (plain and scale == 1, f"{colours} and scale 1"))
            if not fits:
                found = f"num_channels {channels}, num_channels_out {channels_out} and scale {scale}"
                raise UsageError(f"task.degradation {kind} needs model.{wanted}; the model has {found}.")

    def parameter_groups(self, model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        """Matrices and kernels decay; biases, norms and temperatures do not. Betas are (0.9, 0.99)."""
        groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
        for value in model.parameters():
            if value.requires_grad:
                groups[value.ndim > 1 and value.numel() > value.shape[0]].append(value)
        return [
            {"params": values, "weight_decay": weight_decay * decays, "betas": (0.9, 0.99)}
            for decays, values in groups.items()
        ]

    def training_sample(self, example: dict[str, Any], generator: np.random.Generator) -> dict[str, Tensor]:
        """A random patch, flipped and turned, with its degraded version; both [channels, height, width] in [0, 1]."""
        chosen = self.trained[0]
        if len(self.trained) > 1:
            weights = np.array([degradation.weight for degradation in self.trained])
            chosen = self.trained[int(generator.choice(len(weights), p=weights / weights.sum()))]
        if self.made_pictures and generator.random() < self.made_pictures:
            # Somewhat larger than the patch, which is cut out of it anywhere.
            picture = make_picture(self.patch_size * self.config.scale * 5 // 4, generator)
            images = [self._pixels(picture, chosen.kind)]
        else:
            images = self._images(example, chosen)
        if self.permute_channels:
            order = generator.permutation(3)
            images = [image if image.shape[-1] == 1 else image[..., order] for image in images]
        pair = self._in_colour(chosen.patch(images, self.config.scale, self.patch_size, generator))
        degraded, clean = (torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))) for image in pair)
        return {"pixel_values": degraded, "labels": clean}

    def loss(self, model: torch.nn.Module, batch: dict[str, Any], step: int) -> Tensor:
        """The model's own loss, and the perceptual one; with `train_top_k`, one k for all stages and processes."""
        # A strength that the first model had is not that of what it becomes.
        vars(self.config).pop("restoration_strength", None)
        self._step = step
        choices = self.config.train_top_k
        top_k = int(np.random.default_rng((4, step)).choice(choices)) if choices else None
        output = model(pixel_values=batch["pixel_values"], labels=batch["labels"], top_k=top_k)
        loss: Tensor = output.loss
        if self.feature_loss is not None:
            seen = self.feature_loss.to(loss.device)(output.reconstruction, batch["labels"])
            loss = loss + self.perceptual_weight * seen
        return loss

    def evaluate_batch(self, model: torch.nn.Module, examples: list[dict[str, Any]], indices: list[int]) -> Scores:
        """Scores of each whole image, one degradation after the other; the noise depends on the index alone."""
        # With `evaluate`, which takes as long to import as half of transformers; most starts of a run stop before.
        from hf_ext.metrics import psnr, psnr_b, ssim

        scores = {"psnr": psnr.psnr, "psnr_b": psnr_b.psnr_b, "ssim": ssim.ssim}
        rows: Scores = []
        for example, index in zip(examples, indices, strict=True):
            rows.append({})
            try:
                for degradation in self.evaluated:
                    degraded, clean = self.degraded_example(example, index, degradation)
                    restored = self.restore(model, degraded)
                    if index == 0 and self._step >= _LEARNED and _is_unchanged(degraded, restored, clean):
                        advice = "set a lower learning_rate, or begin with a trained model (init_from)"
                        told = "%s: the model returns its input nearly unchanged. If this stays, %s."
                        logger.warning(told, degradation.title, advice)
                    about: Any = {"channel": self._channel, "border": self._border, "data_range": 1.0}
                    for name in self._names(degradation):
                        rows[-1][self._key(name, degradation)] = scores[name](restored, clean, **about)
            except ValueError as error:
                files = ", ".join(str(value.filename) for value in example.values() if getattr(value, "filename", ""))
                told = f"example {index}{files and f' ({files})'} cannot be scored: {error}"
                if type(error) is ValueError:
                    raise DataError(told) from error
                # Its class and fields stay.
                error.args = (told,)
                raise
        return rows

    def summarize(self, rows: Scores) -> dict[str, float]:
        """Means over the images; of several degradations also the mean of each metric over them."""
        means = super().summarize(rows)
        overall = {
            name: float(np.mean([means[self._key(name, degradation)] for degradation in self.evaluated]))
            for name in ("psnr", "ssim")
        }
        return overall | means

    def degraded_example(
        self, example: dict[str, Any], index: int, degradation: Degradation | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The evaluation pair of an example."""
        chosen = degradation or self.evaluated[0]
        generator = np.random.default_rng((5, index))
        degraded, clean = self._in_colour(chosen.whole(self._images(example, chosen), self.config.scale, generator))
        return degraded, clean

    def restore(self, model: Any, degraded: np.ndarray, top_k: int | None = None) -> np.ndarray:
        """The restored image, as [`~hf_ext.restoration.tiles.restore_image`] gives it, whole; not compiled."""
        # Each size of whole images would be compiled anew, and a compiled model keeps to no budget of memory. Where
        # this part of torch was not imported, nothing is compiled, and importing it takes a second.
        is_loaded = "torch._dynamo" in sys.modules
        with torch.compiler.set_stance("force_eager") if is_loaded else nullcontext():
            return restore_image(model, degraded, top_k=top_k or self.top_k)

    def sample_picture(self, model: torch.nn.Module, examples: list[dict[str, Any]]) -> Image.Image:
        """Rows of degraded (enlarged, where the model enlarges), restored and clean middle parts."""
        rows, scale = [], self.config.scale
        for index in range(max(len(examples), len(self.evaluated))):
            place, degradation = index % len(examples), self.evaluated[index % len(self.evaluated)]
            degraded, clean = self.degraded_example(examples[place], place, degradation)
            # The middle, as far as there is one.
            size = 192 // scale
            top, left = (max(0, (side - size) // 2) for side in degraded.shape[:2])
            degraded = degraded[top : top + size, left : left + size]
            clean = clean[top * scale : (top + size) * scale, left * scale : (left + size) * scale]
            # The input at the size of the output: colours of a mosaic, pixels of a small image.
            given = unpack_mosaic(degraded) if self.config.demosaicks else degraded.repeat(scale, 0).repeat(scale, 1)
            rows.append(np.concatenate([given, self.restore(model, degraded), clean], axis=1))
        width = max(row.shape[1] for row in rows)
        sheet = np.concatenate([np.pad(row, ((0, 4), (0, width - row.shape[1]), (0, 0))) for row in rows])
        return pixels_to_image(from_unit(sheet))

    def save_model(self, model: torch.nn.Module, state_dict: dict[str, Tensor], folder: Path) -> None:
        """Model, or adapter, with the image processor that fits its channels."""
        cast(PreTrainedModel, model).save_pretrained(folder, state_dict=state_dict)
        SemanIRImageProcessor(do_convert_rgb=self.config.num_channels == 3).save_pretrained(folder)

    def describe(self) -> dict[str, Any]:
        options: dict[str, Any] = {} if self.top_k is None else {"top_k": self.top_k}
        if self.gray_from != "luma":
            options["gray_from"] = self.gray_from
        titles = {"degradation": self.trained, "evaluation": self.evaluated}
        return {name: [item.title for item in items] for name, items in titles.items()} | options

    def _images(self, example: dict[str, Any], degradation: Degradation) -> list[np.ndarray]:
        """The clean image, or degraded and clean, as [`_pixels`] gives them."""
        paired = degradation.kind == "paired"
        # Beside pairs in one list, other degradations start from the clean image of the pair.
        in_pairs = any(item.kind == "paired" for item in (*self.trained, *self.evaluated))
        columns = ["lq", "hq"] if paired else ["hq" if in_pairs else self.image_column]
        advice = ", or task.degradation: {kind: paired} for folders lq/ and hq/"
        pictures = [picture_of(example, column, "image_column", advice) for column in columns]
        images = [self._pixels(picture, degradation.kind) for picture in pictures]
        size, clean, scale = images[0].shape[:2], images[-1].shape[:2], self.config.scale
        if paired and not is_scaled(size, clean, scale):
            told = f"{size} and {clean} in pixels, not by model.scale {scale}"
            raise UsageError(f"a pair of lq and hq images differs in size: {told}; set model.scale to the ratio.")
        return [images[0], images[1][: size[0] * scale, : size[1] * scale]] if paired else images

    def _pixels(self, image: Image.Image, kind: str) -> np.ndarray:
        """
        [height, width, channels], uint8, or of grey of 16 bits float32 with white at 1, which pairs and noise keep. A
        grey image has one channel, also for a model of three, so that its noise is one; but for a mosaic.
        """
        deep = deep_grey(image)
        if deep is not None and kind in ("paired", "gaussian_noise"):
            return to_unit(deep)[..., None]
        if deep is not None:
            image = Image.fromarray(to_8_bits(deep))
        grey_model = self.config.num_channels_out == 1
        if (image.mode in GRAY_MODES and kind != "mosaic") or (grey_model and self.gray_from == "luma"):
            return np.asarray(put_on_white(image).convert("L"))[..., None]
        # What lies below transparency is seen by nobody.
        colours = np.asarray(put_on_white(image).convert("RGB"))
        return matlab_luma(colours) if grey_model else colours

    def _in_colour(self, images: list[np.ndarray]) -> list[np.ndarray]:
        """Grey images for a colour model: degraded as grey ones, with one noise, then the same in all channels."""
        channels = self.config.num_channels_out or self.config.num_channels
        return [image.repeat(channels, axis=-1) if image.shape[-1] == 1 else image for image in images]


def _is_unchanged(degraded: np.ndarray, restored: np.ndarray, clean: np.ndarray) -> bool:
    """True where the model changes its input by less than a tenth of what is wrong with it. A U that trains at too
    high a rate ends there: its features grow, and the norm behind them hands back no gradient."""
    same = degraded.shape == restored.shape == clean.shape
    return same and bool(np.abs(restored - degraded).mean() < 0.1 * np.abs(clean - degraded).mean())


class FeatureLoss(torch.nn.Module):
    """Distance of two pictures for a frozen network: the mean over its feature maps of the distance of two maps,
    relative to the size of the target's. So each map has equal weight, whatever its scale and size."""

    mean: Tensor
    std: Tensor

    def __init__(self, source: str):
        super().__init__()
        pinned = pin_revision(source)
        if pinned.startswith(f"{source}@"):
            logger.warning("task.perceptual_model is %s at present; give this name to keep the same loss.", pinned)
        name, revision = split_revision(pinned)
        config = AutoConfig.from_pretrained(name, revision=revision)
        ours = config.model_type == "semanir"
        # Ours as a whole, of which all but the last layers is taken: nothing is left over that a report names.
        kind: Any = SemanIRForImageRestoration if ours else AutoModel
        try:
            loaded = kind.from_pretrained(name, revision=revision, dtype=torch.float32)
        except RuntimeError as error:
            raise UsageError(f"task.perceptual_model {source} cannot be loaded: {error}") from error
        network = loaded.model if ours else loaded
        if network.main_input_name != "pixel_values" or getattr(config, "num_channels", 3) != 3:
            told = f"task.perceptual_model {source} ({type(network).__name__}) takes no pictures of three channels"
            raise DataError(f"{told}: give a restorer such as denoise-color, or an image model of transformers.")
        self.source, self.network = source, network.eval().requires_grad_(False)
        # Ours takes [0, 1] as it is.
        processor = None if ours else AutoImageProcessor.from_pretrained(name, revision=revision)
        normalizes = getattr(processor, "do_normalize", False)
        for buffer, usual in (("mean", [0.0] * 3), ("std", [1.0] * 3)):
            values = getattr(processor, f"image_{buffer}") if normalizes else usual
            self.register_buffer(buffer, torch.tensor(values).view(-1, 1, 1), persistent=False)

    def check(self, side: int) -> None:
        """Raises a ValueError if the network takes no pictures of this side, or gives no hidden states."""
        try:
            with torch.no_grad():
                self.features(torch.zeros(1, 3, side, side))
        # Each network has words of its own for a size that it does not take.
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            told = f"task.perceptual_model {self.source} ({type(self.network).__name__}) gives no hidden states"
            advice = "Set task.patch_size, times the scale, to a size that it takes, or give another network"
            raise DataError(f"{told} of pictures of {side} x {side} pixels: {error}. {advice}.") from error

    def forward(self, made: Tensor, wanted: Tensor) -> Tensor:
        """The distance of two batches `[batch, 1 or 3, height, width]` in [0, 1]; its gradient is that of `made`."""
        with torch.no_grad():
            targets = self.features(wanted)
        pairs = zip(self.features(made), targets, strict=True)
        distances = [(one - target).abs().mean() / target.abs().mean().clamp_min(1e-6) for one, target in pairs]
        return torch.stack(distances).mean()

    def features(self, pictures: Tensor) -> tuple[Tensor, ...]:
        colours = pictures.expand(-1, 3, -1, -1)
        maps = self.network(pixel_values=(colours - self.mean) / self.std, output_hidden_states=True).hidden_states
        if not maps:
            raise ValueError("its output has none")
        return tuple(maps)
