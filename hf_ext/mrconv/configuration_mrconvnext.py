# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Configuration of MRConvNeXt (arXiv 2408.09453): ConvNeXt (arXiv 2201.03545) with multi-resolution convolutions."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .configuration_mrconv import MRConvConfig, check_numbers

# Every head, whichever class is saved: a folder must load through each of them without hf_ext installed.
AUTO_MAP = {
    "AutoConfig": "configuration_mrconvnext.MRConvNextConfig",
    "AutoModel": "modeling_mrconvnext.MRConvNextModel",
    "AutoModelForImageClassification": "modeling_mrconvnext.MRConvNextForImageClassification",
}

# The layouts T, S and B of ConvNeXt with its rates of stochastic depth for ImageNet.
# fmt: off
PRESETS: dict[str, dict[str, Any]] = {
    "tiny":  {"hidden_sizes": (96, 192, 384, 768),   "depths": (3, 3, 9, 3),  "drop_path_rate": 0.1},
    "small": {"hidden_sizes": (96, 192, 384, 768),   "depths": (3, 3, 27, 3), "drop_path_rate": 0.4},
    "base":  {"hidden_sizes": (128, 256, 512, 1024), "depths": (3, 3, 27, 3), "drop_path_rate": 0.5},
}
# fmt: on

# Fields that its convolutions have too.
_CONVOLUTION = ("kernel_type", "kernel_size", "num_modes", "branch_norm", "norm_eps", "sync_batch_norm")


@strict
class MRConvNextConfig(PreTrainedConfig):
    """
    Configuration of [`MRConvNextModel`] and [`MRConvNextForImageClassification`]. The default is the T model for
    ImageNet without stochastic depth; `PRESETS` holds T, S and B: `MRConvNextConfig(**PRESETS["base"])`.

    Invalid values raise `huggingface_hub.errors.StrictDataclassError`, which is no `ValueError`.

    Args:
        image_size (`int` or `list[int]`, *optional*, defaults to 224):
            Side, or height and width, in pixels of the images for which the kernels are sized: a kernel is as long as
            the flattened map of its stage. Other sizes are allowed.
        num_channels (`int`, *optional*, defaults to 3): Channels of the image.
        patch_size (`int`, *optional*, defaults to 4): Side and stride of the stem's convolution, in pixels.
        hidden_sizes (`list[int]`, *optional*, defaults to `(96, 192, 384, 768)`):
            Width of each stage. From stage to stage height and width are halved.
        depths (`list[int]`, *optional*, defaults to `(3, 3, 9, 3)`): Layers of each stage.
        kernel_type (`str`, *optional*, defaults to `"fourier"`):
            Kernel of the branches: `"dilated"`, `"fourier"`, `"sparse"` or `"fourier_sparse"`.
        kernel_size (`int`, *optional*, defaults to 16):
            Length l_0 of the shortest branch; each next one is twice as long, up to the map's length.
        num_modes (`int`, *optional*): Modes m of a Fourier kernel; `kernel_size // 2 + 1` when not given.
        branch_norm (`str`, *optional*, defaults to `"batch"`): Also `"layer"`, `"kernel"`, `"none"`.
        norm_eps (`float`, *optional*, defaults to 1e-5): Added to the variance in the normalisation of the branches.
        sync_batch_norm (`bool`, *optional*, defaults to `True`):
            Compute the branches' statistics over the batches of all processes.
        layer_norm_eps (`float`, *optional*, defaults to 1e-6): Added to the variance in every LayerNorm.
        layer_scale_init_value (`float`, *optional*, defaults to 1e-6):
            Initial factor of each channel of a layer's residual branch.
        drop_path_rate (`float`, *optional*, defaults to 0.0):
            Probability that a sample skips the last layer in training; it grows linearly from 0 at the first.
        initializer_range (`float`, *optional*, defaults to 0.02):
            Standard deviation of the truncated normal that initialises linear layers and 2-D convolutions.
        reparameterized (`bool`, *optional*, defaults to `False`):
            True if the branches are merged; set by `model.reparameterize()`.

    Example:
        >>> from hf_ext import MRConvNextConfig
        >>> MRConvNextConfig().stage_map(0, height=224, width=224)
        (56, 56)
    """

    model_type = "mrconvnext"

    image_size: int | list[int] | tuple[int, ...] = 224
    num_channels: int = 3
    patch_size: int = 4
    hidden_sizes: list[int] | tuple[int, ...] = (96, 192, 384, 768)
    depths: list[int] | tuple[int, ...] = (3, 3, 9, 3)
    kernel_type: str = "fourier"
    kernel_size: int = 16
    num_modes: int | None = None
    branch_norm: str = "batch"
    norm_eps: float = 1e-5
    sync_batch_norm: bool = True
    layer_norm_eps: float = 1e-6
    layer_scale_init_value: float | int = 1e-6
    drop_path_rate: float | int = 0.0
    initializer_range: float = 0.02
    reparameterized: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        # A folder that came from the Hub carries "org/name--" references; written again, it must name its own files.
        kwargs["auto_map"] = dict(AUTO_MAP)
        super().__post_init__(**kwargs)

    @property
    def hidden_size(self) -> int:
        """`int`: Width of the last stage, which the classifier reads."""
        return self.hidden_sizes[-1]

    @property
    def num_hidden_layers(self) -> int:
        """`int`: Stages, hence hidden states after the first."""
        return len(self.depths)

    def _image_sides(self) -> tuple[int, ...]:
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else tuple(self.image_size)

    def stage_map(self, stage: int, height: int, width: int) -> tuple[int, int]:
        """Height and width of the map that the layers of a stage see; rests at the bottom and right are left out."""
        return height // self.patch_size >> stage, width // self.patch_size >> stage

    def stage_config(self, stage: int) -> MRConvConfig:
        """Configuration of the convolutions of a stage: two-sided, as long as its flattened map."""
        height, width = self.stage_map(stage, *self._image_sides())
        own: dict[str, Any] = {"hidden_size": self.hidden_sizes[stage], "max_position_embeddings": height * width}
        own |= {"bidirectional": True, "reparameterized": self.reparameterized}
        return MRConvConfig(**own, **{name: getattr(self, name) for name in _CONVOLUTION})

    def validate_sizes(self) -> None:
        """Check that every size is positive."""
        check_numbers(self, ("num_channels", "patch_size"), ("layer_norm_eps", "initializer_range"), "drop_path_rate")

    def validate_stages(self) -> None:
        """Check that widths and depths fit each other, and the convolutions of each stage."""
        if not self.depths or len(self.depths) != len(self.hidden_sizes):
            counts = f"`depths` has {len(self.depths)} values and `hidden_sizes` {len(self.hidden_sizes)}"
            raise ValueError(f"{counts}; give one of each for every stage, and at least one.")
        for name in ("depths", "hidden_sizes"):
            if any(value < 1 for value in getattr(self, name)):
                raise ValueError(f"`{name}` is {getattr(self, name)}; each value must be at least 1.")
        size = self._image_sides()
        smallest = self.patch_size * 2 ** (len(self.depths) - 1)
        if len(size) != 2 or any(side < smallest for side in size):
            told = f"`image_size` is {self.image_size}; give a side, or height and width, of at least {smallest}"
            raise ValueError(f"{told} pixels, for patches of {self.patch_size} pixels and {len(self.depths)} stages.")
        for stage in range(len(self.depths)):
            self.stage_config(stage)
