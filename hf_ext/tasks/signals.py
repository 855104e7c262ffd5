"""MRConv on signals: images as sequences of pixels, raw audio, and images with MRConvNeXt."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from huggingface_hub.dataclasses import strict
from PIL import Image
from transformers import PreTrainedConfig, PreTrainedModel

from hf_ext.data.files import read_recording
from hf_ext.mrconv.configuration_mrconvnext import PRESETS, MRConvNextConfig
from hf_ext.mrconv.feature_extraction_mrconv import MRConvFeatureExtractor
from hf_ext.mrconv.image_processing_mrconvnext import MRConvNextImageProcessor
from hf_ext.mrconv.modeling_layers_mrconv import MRConvPreTrainedModel
from hf_ext.mrconv.modeling_mrconv import MRConvForAudioClassification, MRConvForImageClassification
from hf_ext.mrconv.modeling_mrconvnext import MRConvNextForImageClassification

from ..errors import DataError
from .checks import column, require
from .pictures import in_colours, picture_of
from .sequences import Batch, ClassificationTask


@strict
@dataclass
class PixelTask(ClassificationTask):
    """
    Images as sequences of pixels, row by row, with [`MRConvForImageClassification`].

    Args:
        image_size (`int`, defaults to 32): Side of the images, which must have that size.
        mean, std (`list[float]`): Mean and standard deviation of each channel, in [0, 1]; one value for grey images,
            three for colour. Default: those of the Image task of Long Range Arena, grey CIFAR-10.
        image_column (`str`, defaults to `"image"`): Column of the images.
    """

    image_size: int = 32
    mean: list[float] = field(default_factory=lambda: [122.6 / 255])
    std: list[float] = field(default_factory=lambda: [61.0 / 255])
    image_column: str = "image"

    model_class: ClassVar[Callable[..., PreTrainedModel]] = MRConvForImageClassification
    pipeline_tag: ClassVar[str] = "image-classification"

    def validate_channels(self) -> None:
        are_numbers = all(map(math.isfinite, (*self.mean, *self.std)))
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3) or not are_numbers or min(self.std) <= 0:
            wanted = "one value each (grey) or three (colour), std above 0"
            raise ValueError(f"mean and std must have {wanted}; got {self.mean} and {self.std}.")
        require(self, ("image_size", self.image_size >= 2, "at least 2 pixels"))

    def model_fields(self) -> dict[str, Any]:
        return {"input_size": len(self.mean), "max_position_embeddings": self.image_size**2}

    def encode(self, example: dict[str, Any]) -> Batch:
        """Normalised pixels [pixels, channels] and the class."""
        picture = picture_of(example, self.image_column, "image_column")
        image = in_colours(picture, "L" if len(self.mean) == 1 else "RGB")
        if image.size != (self.image_size, self.image_size):
            told = f"an image has {image.size[0]} x {image.size[1]} pixels, task.image_size says {self.image_size}"
            raise DataError(f"{told}: set it, or resize the images first.")
        pixels = np.asarray(image, dtype=np.float32).reshape(self.image_size**2, len(self.mean)) / 255
        mean, std = np.array([self.mean, self.std], dtype=np.float32)
        return {"input_values": torch.from_numpy((pixels - mean) / std), "labels": self.label(example)}

    def processor(self) -> MRConvNextImageProcessor:
        # transformers declares the options of its own processors only.
        return MRConvNextImageProcessor(  # type: ignore[call-arg]
            size={"shortest_edge": self.image_size},
            crop_pct=1.0,
            do_convert_rgb=len(self.mean) == 3,
            image_mean=list(self.mean),
            image_std=list(self.std),
        )


@strict
@dataclass
class AudioTask(ClassificationTask):
    """
    Classification of raw audio with [`MRConvForAudioClassification`].

    Args:
        sampling_rate (`int`, defaults to 16000): Samples per second of the data.
        max_length (`int`, defaults to 16000):
            Longest recording in samples at that rate, the rest is cut; also the longest kernel.
        decimation (`int`, defaults to 1):
            Evaluate a trained model on every n-th sample, without a filter, with kernels adapted by `change_rate`.
        audio_column (`str`, defaults to `"audio"`):
            Column of the recordings: sound files (WAV, FLAC, M4A, …; several channels averaged, other
            rates resampled), lists of samples, floats or 16-bit, or what `datasets.Audio` decodes.
    """

    sampling_rate: int = 16000
    max_length: int = 16000
    decimation: int = 1
    audio_column: str = "audio"

    model_class: ClassVar[Callable[..., PreTrainedModel]] = MRConvForAudioClassification
    pipeline_tag: ClassVar[str] = "audio-classification"

    def validate_rates(self) -> None:
        if min(self.sampling_rate, self.max_length, self.decimation) < 1 or self.sampling_rate % self.decimation:
            wanted = "at least 1, and the rate a multiple of decimation"
            found = f"{self.sampling_rate}, {self.max_length} and {self.decimation}"
            raise ValueError(f"sampling_rate, max_length and decimation must be {wanted}; got {found}.")

    def model_fields(self) -> dict[str, Any]:
        return {"sampling_rate": self.sampling_rate, "max_position_embeddings": self.max_length}

    def build_model(self, config: dict[str, Any], init_from: str | None) -> PreTrainedModel:
        """As [`MRConvTask`] does; a checkpoint is moved to the decimated rate."""
        if self.decimation > 1 and init_from is None:
            told = f"task.decimation {self.decimation} evaluates a trained model at a lower rate"
            raise DataError(f"{told}: use it with `hf-ext evaluate` or init_from, or resample the data to train.")
        model = super().build_model(config, init_from)
        if self.decimation > 1 and isinstance(model, MRConvPreTrainedModel):
            model.change_rate(self.decimation)
        return model

    def encode(self, example: dict[str, Any]) -> Batch:
        recording = np.asarray(self._samples(example))[: self.max_length : self.decimation]
        processor, length = self.processor(), -(-self.max_length // self.decimation)
        options: Any = {"sampling_rate": processor.sampling_rate, "padding": "max_length", "max_length": length}
        inputs = processor(recording, return_tensors="pt", **options)
        return {**{name: values[0] for name, values in inputs.items()}, "labels": self.label(example)}

    def _samples(self, example: dict[str, Any]) -> Any:
        value = column(example, self.audio_column, "audio_column")
        if isinstance(value, dict) and "bytes" in value:
            return read_recording(value, self.sampling_rate)
        if not isinstance(value, list | np.ndarray):
            # A decoder of torchcodec or a dictionary: both have these keys.
            try:
                rate, value = value["sampling_rate"], value["array"]
            except (TypeError, LookupError) as error:
                told = f"column {self.audio_column!r} holds {value!r:.60}; expected a recording"
                raise DataError(f"{told}: fill it in, remove the example, or set task.audio_column.") from error
            if rate != self.sampling_rate:
                told = f"a recording has {rate} samples per second, task.sampling_rate says {self.sampling_rate}"
                raise DataError(f"{told}: set it, or resample the data, e.g. by casting to datasets.Audio.")
        samples = np.asarray(value)
        if samples.ndim != 1:
            raise DataError(f"a recording has the shape {samples.shape}; expected samples of one channel: average it.")
        # A column of whole numbers comes back as 64-bit ones.
        is_short = samples.dtype == np.int64 and abs(samples).max(initial=0) <= 32768
        return samples.astype(np.int16) if is_short else samples

    def processor(self) -> MRConvFeatureExtractor:
        return MRConvFeatureExtractor(sampling_rate=self.sampling_rate // self.decimation)


@strict
@dataclass
class ImageTask(ClassificationTask):
    """
    Image classification with [`MRConvNextForImageClassification`].

    Args:
        image_size (`int`, defaults to 224): Side of the square that the model sees, in pixels.
        min_scale (`float`, defaults to 0.08):
            Smallest share of the image's area that training crops at random. Half of the crops are mirrored.
        image_column (`str`, defaults to `"image"`): Column of the images.
    """

    image_size: int = 224
    min_scale: float = 0.08
    image_column: str = "image"

    config_class: ClassVar[type[PreTrainedConfig]] = MRConvNextConfig
    presets: ClassVar[dict[str, dict[str, Any]]] = PRESETS
    model_class: ClassVar[Callable[..., PreTrainedModel]] = MRConvNextForImageClassification
    pipeline_tag: ClassVar[str] = "image-classification"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._processor = MRConvNextImageProcessor(size={"shortest_edge": self.image_size})

    def validate_crops(self) -> None:
        sizes = ("image_size", self.image_size >= 1, "at least 1"), ("min_scale", 0 < self.min_scale <= 1, "in (0, 1]")
        require(self, *sizes)

    def model_fields(self) -> dict[str, Any]:
        return {"image_size": self.image_size}

    def encode(self, example: dict[str, Any]) -> Batch:
        return self._pixels(self._processor(self._image(example), return_tensors="pt"), example)

    def training_sample(self, example: dict[str, Any], generator: np.random.Generator) -> Batch:
        """A random rectangle as a square, mirrored or not."""
        image = self._image(example)
        box = random_box(image.width, image.height, self.min_scale, generator)
        square = image.resize((self.image_size, self.image_size), Image.Resampling.BICUBIC, box=box)
        if generator.integers(2):
            square = square.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return self._pixels(self._processor(square, do_resize=False, return_tensors="pt"), example)

    def _image(self, example: dict[str, Any]) -> Image.Image:
        return in_colours(picture_of(example, self.image_column, "image_column"), "RGB")

    def _pixels(self, inputs: Any, example: dict[str, Any]) -> Batch:
        return {"pixel_values": inputs["pixel_values"][0], "labels": self.label(example)}

    def processor(self) -> MRConvNextImageProcessor:
        return self._processor


def random_box(width: int, height: int, min_scale: float, generator: np.random.Generator) -> tuple[int, int, int, int]:
    """A random rectangle of an image, as ImageNet models are trained on."""
    for _ in range(10):
        area = width * height * generator.uniform(min_scale, 1)
        ratio = math.exp(generator.uniform(math.log(3 / 4), math.log(4 / 3)))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left = int(generator.integers(width - box_width + 1))
            top = int(generator.integers(height - box_height + 1))
            return left, top, left + box_width, top + box_height
    return 0, 0, width, height
