# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Configuration of SemanIR (Ren et al., NeurIPS 2024, arXiv 2405.20008): both architectures and their presets."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

# Every head, whichever class is saved: a folder must load through each of them without hf_ext installed.
AUTO_MAP = {
    "AutoConfig": "configuration_semanir.SemanIRConfig",
    "AutoModel": "modeling_semanir.SemanIRModel",
    "AutoModelForImageToImage": "modeling_semanir.SemanIRForImageRestoration",
}

# The layouts of the paper (S, B: calibrated on the published counts; denoiser: on 25.82 M) and three small ones.
# fmt: off
PRESETS: dict[str, dict[str, Any]] = {
    "columnar-s":    {"architecture": "columnar", "embed_dim": 180, "depths": (6,) * 6, "num_heads": (6,) * 6,
                      "mlp_ratio": 2.0, "window_size": 32, "top_k": 512, "train_top_k": (64, 128, 192, 256, 384, 512)},
    "columnar-b":    {"architecture": "columnar", "embed_dim": 180, "depths": (8,) * 8, "num_heads": (6,) * 8,
                      "mlp_ratio": 2.0, "window_size": 32, "top_k": 512, "train_top_k": (64, 128, 192, 256, 384, 512)},
    "columnar-tiny": {"architecture": "columnar", "embed_dim": 48,  "depths": (4,) * 3, "num_heads": (4,) * 3,
                      "mlp_ratio": 2.0, "window_size": 8,  "top_k": 32,  "train_top_k": (4, 8, 12, 16, 24, 32)},
    "columnar-half": {"architecture": "columnar", "embed_dim": 48,  "depths": (3,) * 2, "num_heads": (4,) * 2,
                      "mlp_ratio": 2.0, "window_size": 16, "top_k": 64,  "train_top_k": (16, 32, 64, 128),
                      "stem_scale": 2},
    "u-shaped":      {"architecture": "u-shaped", "embed_dim": 48,  "depths": (6,) * 4, "num_heads": (1, 3, 6, 12),
                      "mlp_ratio": 4.0, "window_size": 32, "top_k": 512, "train_top_k": (64, 128, 192, 256, 384, 512),
                      "refinement_depth": 6, "downsampling": "strided", "reduce_top_skip": False},
    "u-shaped-small": {"architecture": "u-shaped", "embed_dim": 48, "depths": (4,) * 3, "num_heads": (3, 6, 12),
                      "mlp_ratio": 2.0, "window_size": 8,  "top_k": 32,  "train_top_k": (4, 8, 12, 16, 24, 32),
                      "refinement_depth": 4, "downsampling": "unshuffle", "reduce_top_skip": True},
}
# fmt: on
_CHOICES: dict[str, tuple[Any, ...]] = {
    "architecture": ("columnar", "u-shaped"),
    "downsampling": ("strided", "unshuffle"),
    "similarity": ("dot", "cosine"),
    "shift_policy": ("none", "stage", "layer"),
    "upsampler": ("pixelshuffle", "direct"),
    "reconstruction_loss": ("l1", "charbonnier"),
    "scale": (1, 2, 3, 4),
    "stem_scale": (1, 2),
}


@strict
class SemanIRConfig(PreTrainedConfig):
    """
    Configuration of [`SemanIRModel`] and [`SemanIRForImageRestoration`]. The default is the columnar S model of the
    paper without upscaling; `PRESETS` holds the named layouts: `SemanIRConfig(**PRESETS["u-shaped"])`.

    Invalid values raise `huggingface_hub.errors.StrictDataclassError`, which is no `ValueError`.

    Args:
        num_channels (`int`, *optional*, defaults to 3):
            Channels of the input image: 3 for RGB, 1 for grey. With 4, `num_channels_out=3` and `scale=2` the input is
            an RGGB Bayer mosaic packed as (red, green, green, blue) at half its resolution: demosaicking.
        num_channels_out (`int`, *optional*): Channels of the restored image; `num_channels` when not given.
        architecture (`str`, *optional*, defaults to `"columnar"`):
            `"columnar"` keeps one resolution and width (super-resolution in the paper); `"u-shaped"` halves the
            resolution and doubles the width at each level (every other task).
        embed_dim (`int`, *optional*, defaults to 180): Width C of the stages; of the first level in the U.
        depths (`list[int]`, *optional*, defaults to six stages of 6):
            Layers of each stage (columnar), or of each level on the way down, mirrored on the way up (U-shaped).
        num_heads (`list[int]`, *optional*, defaults to 6 in each stage):
            Attention heads of each stage (columnar) or level (U-shaped); each divides the width of its level.
        refinement_depth (`int`, *optional*, defaults to 0): Layers of the final stage of the U, at full resolution.
        downsampling (`str`, *optional*, defaults to `"strided"`):
            How the U halves the resolution: `"strided"` convolution, or convolution and pixel `"unshuffle"`.
        reduce_top_skip (`bool`, *optional*, defaults to `True`): Reduce the last, full-resolution concatenation of the
            U to `embed_dim`. Otherwise the stages after it are `2 * embed_dim` wide.
        mlp_ratio (`float`, *optional*, defaults to 2.0):
            Width of the MLP hidden layer as a multiple of the stage's width.
        window_size (`int`, *optional*, defaults to 32):
            Side w of the attention window in features; a window holds N = w * w tokens.
        top_k (`int`, *optional*, defaults to 512):
            Keys k that each token attends to, unless a call passes another k. From N on, attention is dense.
        train_top_k (`list[int]`, *optional*, defaults to `()`):
            Values from which training draws one k per optimizer step. Empty: training uses `top_k`.
        similarity (`str`, *optional*, defaults to `"dot"`):
            Similarity that selects the keys: `"dot"` (paper) or `"cosine"`.
        include_self (`bool`, *optional*, defaults to `True`): Make every token one of its own k keys.
        shift_policy (`str`, *optional*, defaults to `"layer"`):
            Windows that are shifted by half: `"none"`, those of every second `"stage"` (one dictionary per stage), or
            of every second `"layer"` (two dictionaries per stage, one for each partition).
        stem_scale (`int`, *optional*, defaults to 1): Side in pixels of the cell that becomes one token. 1 is the
            paper's. With 2, the stem turns cells of 2 x 2 pixels into channels and the head turns them back (pixel
            unshuffle and shuffle): a quarter of the tokens, and a window of w tokens sees 2 w pixels.
        scale (`int`, *optional*, defaults to 1): Upscaling factor: 1, 2, 3 or 4.
        upsampler (`str`, *optional*, defaults to `"pixelshuffle"`):
            Head for `scale` above 1: `"pixelshuffle"` (64 channels, steps of 2 or 3) or one `"direct"` step.
        image_mean (`list[float]`, *optional*):
            Mean of each input channel, subtracted from the input and added to the output; zero when not given.
        interpolated_base (`bool`, *optional*, defaults to `False`): Predict a correction of the bicubic interpolation
            in super-resolution. By default, as in the paper, the output is added to `image_mean`.
        reconstruction_loss (`str`, *optional*, defaults to `"l1"`):
            Loss of the restored images when labels are given: `"l1"` or `"charbonnier"` (epsilon 1e-3).
        initializer_range (`float`, *optional*, defaults to 0.02):
            Standard deviation of the truncated normal that initialises linear layers.

    Example:
        >>> from hf_ext import SemanIRConfig
        >>> config = SemanIRConfig(scale=2, window_size=8, top_k=32)
        >>> config.multiple_of, config.tile_overlap
        (8, 16)
    """

    model_type = "semanir"
    attribute_map = {"hidden_size": "embed_dim"}

    num_channels: int = 3
    num_channels_out: int | None = None
    architecture: str = "columnar"
    embed_dim: int = 180
    depths: list[int] | tuple[int, ...] = (6, 6, 6, 6, 6, 6)
    num_heads: list[int] | tuple[int, ...] = (6, 6, 6, 6, 6, 6)
    refinement_depth: int = 0
    downsampling: str = "strided"
    reduce_top_skip: bool = True
    mlp_ratio: float = 2.0
    window_size: int = 32
    top_k: int = 512
    train_top_k: list[int] | tuple[int, ...] = ()
    similarity: str = "dot"
    include_self: bool = True
    shift_policy: str = "layer"
    stem_scale: int = 1
    scale: int = 1
    upsampler: str = "pixelshuffle"
    image_mean: list[float] | tuple[float, ...] | None = None
    interpolated_base: bool = False
    reconstruction_loss: str = "l1"
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_channels_out is None:
            self.num_channels_out = self.num_channels
        # A folder that came from the Hub carries "org/name--" references; written again, it must name its own files.
        kwargs["auto_map"] = dict(AUTO_MAP)
        # With this entry `pipeline(...)` runs the code in the folder, after asking for trust. The installed package
        # has registered the same task; its models write the entry again when they are saved.
        if not __name__.startswith("transformers_modules."):
            kwargs.pop("custom_pipelines", None)
        super().__post_init__(**kwargs)

    @property
    def num_hidden_layers(self) -> int:
        """`int`: Stages, hence hidden states after the first."""
        if self.architecture == "columnar":
            return len(self.depths)
        return 2 * len(self.depths) - 1 + (self.refinement_depth > 0)

    @property
    def levels(self) -> int:
        """`int`: Resolutions that the body works at."""
        return len(self.depths) if self.architecture == "u-shaped" else 1

    @property
    def demosaicks(self) -> bool:
        """`bool`: Whether the input is a packed Bayer mosaic and the output an RGB image of its full resolution."""
        return (self.num_channels, self.num_channels_out, self.scale) == (4, 3, 2)

    @property
    def multiple_of(self) -> int:
        """`int`: Heights and widths that are multiples of this are not padded, and tiles on such a grid cut no window.
        All others, from 1 up, work as well."""
        return self.stem_scale * self.window_size * 2 ** (self.levels - 1)

    @property
    def tile_overlap(self) -> int:
        """`int`: Overlap of tiles in pixels, two windows of the coarsest level. Use tiles only if the feature maps do
        not fit: the model bounds its own temporary memory, without seams."""
        return 2 * self.multiple_of

    @property
    def top_k_range(self) -> tuple[int, int]:
        """`tuple[int, int]`: Smallest and largest k that training sees."""
        values = self.train_top_k or (self.top_k,)
        return min(values), max(values)

    def validate_choices(self) -> None:
        """Check the fields that name one of several behaviours."""
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}; allowed: {', '.join(map(repr, allowed))}.")

    def validate_sizes(self) -> None:
        """Check that every size is positive."""
        least = dict.fromkeys(("num_channels", "num_channels_out", "embed_dim", "window_size", "top_k"), 1)
        least |= dict.fromkeys(("depths", "num_heads", "train_top_k"), 1) | {"refinement_depth": 0}
        for name, allowed in least.items():
            values = getattr(self, name)
            if any(value < allowed for value in (values if isinstance(values, (list, tuple)) else [values])):
                raise ValueError(f"`{name}` is {values}; each value must be at least {allowed}.")
        for name in ("mlp_ratio", "initializer_range"):
            if getattr(self, name) <= 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be positive.")

    def validate_stages(self) -> None:
        """Check that depths, heads and widths fit each other and the architecture."""
        if not self.depths or len(self.depths) != len(self.num_heads):
            counts = f"`depths` has {len(self.depths)} values and `num_heads` {len(self.num_heads)}"
            raise ValueError(f"{counts}; give one of each for every stage or level, and at least one.")
        doubling = 2 if self.architecture == "u-shaped" else 1
        for level, heads in enumerate(self.num_heads):
            width = self.embed_dim * doubling**level
            if width % heads:
                raise ValueError(f"`num_heads[{level}]` is {heads}; it must divide the width {width} of that stage.")
        if self.architecture == "columnar" and self.refinement_depth:
            told = f"`refinement_depth` is {self.refinement_depth}; a columnar model has no refinement stage"
            raise ValueError(f"{told}, give 0.")
        if self.architecture == "u-shaped" and len(self.depths) < 2:
            raise ValueError(f"`depths` is {self.depths}; a u-shaped model needs at least two levels.")
        if self.architecture == "u-shaped" and self.embed_dim % 2:
            raise ValueError(f"`embed_dim` is {self.embed_dim}; a u-shaped model needs an even width.")

    def validate_base(self) -> None:
        """Check that the mean fits the input, and the corrected image the output."""
        if self.image_mean is not None and len(self.image_mean) != self.num_channels:
            told = f"`image_mean` has {len(self.image_mean)} values"
            raise ValueError(f"{told}; give one for each of {self.num_channels} channels.")
        for name in ("image_mean", "interpolated_base"):
            if getattr(self, name) and self.num_channels_out != self.num_channels:
                counts = f"got {self.num_channels_out} and {self.num_channels}"
                raise ValueError(f"`{name}` needs as many output as input channels, {counts}; leave it out.")
        if self.interpolated_base and self.scale == 1:
            raise ValueError("`interpolated_base` needs a `scale` above 1, got 1; leave it out.")
