# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Configuration of MRConv (Cunningham et al., NeurIPS 2024, arXiv 2408.09453), multi-resolution convolutions."""

import math
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

# The heads that answer once for a whole sequence, and those that answer at each position. What the latter need to
# stream and to take packed rows does not travel with the former.
AUTO_MAP = {
    "AutoConfig": "configuration_mrconv.MRConvConfig",
    "AutoModel": "modeling_mrconv.MRConvModel",
    "AutoModelForSequenceClassification": "modeling_mrconv.MRConvForSequenceClassification",
    # Whether two documents belong together: the Auto class of a pair of texts.
    "AutoModelForNextSentencePrediction": "modeling_mrconv.MRConvForRetrieval",
    "AutoModelForImageClassification": "modeling_mrconv.MRConvForImageClassification",
    "AutoModelForAudioClassification": "modeling_mrconv.MRConvForAudioClassification",
}
AUTO_MAP_OF_POSITIONS = {
    **AUTO_MAP,
    "AutoModelForCausalLM": "modeling_positions_mrconv.MRConvForCausalLM",
    "AutoModelForMaskedLM": "modeling_positions_mrconv.MRConvForMaskedLM",
    "AutoModelForTokenClassification": "modeling_positions_mrconv.MRConvForTokenClassification",
}

KERNEL_TYPES = ("dilated", "fourier", "sparse", "fourier_sparse")
_CHOICES = {
    "kernel_type": KERNEL_TYPES,
    "branch_norm": ("batch", "layer", "kernel", "none"),
    "norm": ("batch", "layer"),
}


def branch_lengths(kernel_size: int, length: int, num_branches: int | None = None) -> list[tuple[int, int]]:
    """Resolutions of a layer: l_i = l_0 2^i for i = 0 ... ceil(log2(L / l_0)), the last one cropped to L."""
    if kernel_size < 1 or length < 1:
        raise ValueError(f"Kernel size {kernel_size} and length {length}: both must be at least 1.")
    last = (-(-length // kernel_size) - 1).bit_length()  # ceil(log2(L / l_0)), exactly
    branches = [(2**i, min(kernel_size * 2**i, length)) for i in range(last + 1)]
    kept = len(branches) if num_branches is None else num_branches
    if not 1 <= kept <= len(branches):
        told = f"`num_branches` is {num_branches}; kernels of {kernel_size} to {length} samples have {len(branches)}"
        raise ValueError(f"{told} resolutions, give 1 to {len(branches)}, or None for all.")
    return branches[-kept:]


def changed_lengths(branches: list[tuple[int, int]], rate_factor: float) -> list[int]:
    """Lengths of the kernels where there are `rate_factor` times fewer samples per second."""
    lengths = [length / rate_factor for _, length in branches]
    if any(length < 1 or not length.is_integer() for length in lengths):
        raise ValueError(
            f"`rate_factor` is {rate_factor}; it must divide the length of every kernel into whole samples, but gives "
            f"{lengths} from {[length for _, length in branches]}. Choose another factor, such as 2 or 0.5."
        )
    return [int(length) for length in lengths]


def check_numbers(config: Any, counts: tuple[str, ...], positive: tuple[str, ...], chance: str) -> None:
    """Check fields of a configuration: `counts` are at least 1, or None, `positive` above 0, a `chance` below 1."""
    for name in counts:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"`{name}` is {value}; it must be at least 1.")
    for name in positive:
        value = getattr(config, name)
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"`{name}` is {value}; it must be positive.")
    if not 0 <= getattr(config, chance) < 1:
        raise ValueError(f"`{chance}` is {getattr(config, chance)}; it must be at least 0 and below 1.")


@strict
class MRConvConfig(PreTrainedConfig):
    """
    Configuration of the MRConv models.

    Invalid values raise `huggingface_hub.errors.StrictDataclassError`, which is no `ValueError`.

    Args:
        vocab_size (`int`, *optional*): Number of tokens. None: the input is continuous, `input_values`.
        input_size (`int`, *optional*, defaults to 1): Channels of a continuous input; not used with tokens.
        hidden_size (`int`, *optional*, defaults to 256): Channels D of every layer.
        num_hidden_layers (`int`, *optional*, defaults to 6): Number of blocks.
        kernel_type (`str`, *optional*, defaults to `"fourier"`): Parametrisation of a branch's kernel: `"dilated"`
            (eq. 8), `"fourier"` (eq. 9), `"sparse"` (eq. 10), or the scaled sum `"fourier_sparse"` (eq. 3).
        kernel_size (`int`, *optional*, defaults to 16):
            Length l_0 of the shortest kernel in samples; also the taps of each dilated or sparse branch.
        max_position_embeddings (`int`, *optional*, defaults to 1024):
            Longest input and longest kernel in samples, at the training's sampling rate.
        num_branches (`int`, *optional*):
            Number of resolutions, counted from the longest; 1 + ceil(log2(max_position_embeddings / kernel_size)) when
            not given. 1 is a single kernel of length `max_position_embeddings`.
        num_modes (`int`, *optional*): Complex Fourier modes m of each branch, the constant included; kernel_size // 2
            + 1 when not given (our choice, the paper's is not known).
        bidirectional (`bool`, *optional*, defaults to `False`):
            Let outputs depend on later inputs too, by a second kernel per branch. Such models do not generate.
        branch_norm (`str`, *optional*, defaults to `"batch"`):
            Normalisation of a branch: `"batch"` (paper), `"layer"` over the channels (ablation: slow, cannot be
            merged), `"kernel"` divides each kernel by its norm and needs no statistics, or `"none"`.
        norm (`str`, *optional*, defaults to `"batch"`): Normalisation of a block: `"batch"` or `"layer"`.
        prenorm (`bool`, *optional*, defaults to `True`):
            Normalise the input of each block and the model's last output, instead of the output of each block.
        dropout (`float`, *optional*, defaults to 0.0):
            Probability of dropping a value between activation and pointwise layer.
        tied_dropout (`bool`, *optional*, defaults to `True`): Drop whole channels of a sample, at every position.
        norm_eps (`float`, *optional*, defaults to 1e-5): Added to every variance.
        sync_batch_norm (`bool`, *optional*, defaults to `True`):
            Compute batch statistics over all processes of a training.
        sampling_rate (`int`, *optional*): Samples per second of the input, for instance of sound.
        rate_factor (`float`, *optional*, defaults to 1.0):
            Sampling rate of the training divided by that of the input; set by `change_rate`.
        reparameterized (`bool`, *optional*, defaults to `False`):
            True if each layer is merged into one kernel and one bias; set by `reparameterize`.
        pad_token_id, eos_token_id (`int`, *optional*): Special tokens; `bos_token_id` may be given too.
        tie_word_embeddings (`bool`, *optional*, defaults to `True`):
            Use the embedding as the output layer of a language model.
        initializer_range (`float`, *optional*, defaults to 0.02):
            Standard deviation of the normal that initialises embeddings.
        input_mean, input_std (`list[float]`, *optional*): Mean and standard deviation of each channel of a continuous
            input in the training data. The model normalises its inputs by them, so pass inputs in their own units.
        input_delta_std (`list[float]`, *optional*): Standard deviation of each channel's change from one position to
            the next, in the units of the input. The model then also gets these changes divided by it ("delta
            features"): twice as many channels. Such a model takes whole sequences, without a cache or packing.
        target_mean, target_std (`list[float]`, *optional*):
            Mean and standard deviation of each target of a regression; outputs are in the targets' own units.
        input_columns (`list[str]`, *optional*): Columns of a file with the channels, in their order,
            or with both texts of a pair.

    Example:
        >>> from hf_ext import MRConvConfig
        >>> MRConvConfig(kernel_size=16, max_position_embeddings=100).branches
        [(1, 16), (2, 32), (4, 64), (8, 100)]
    """

    model_type = "mrconv"
    # What generation starts without a prompt: kept when it is given.
    bos_token_id = None

    vocab_size: int | None = None
    input_size: int = 1
    hidden_size: int = 256
    num_hidden_layers: int = 6
    kernel_type: str = "fourier"
    kernel_size: int = 16
    max_position_embeddings: int = 1024
    num_branches: int | None = None
    num_modes: int | None = None
    bidirectional: bool = False
    branch_norm: str = "batch"
    norm: str = "batch"
    prenorm: bool = True
    dropout: float | int = 0.0
    tied_dropout: bool = True
    norm_eps: float = 1e-5
    sync_batch_norm: bool = True
    sampling_rate: int | None = None
    rate_factor: float | int = 1.0
    reparameterized: bool = False
    pad_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    input_mean: list[float] | None = None
    input_std: list[float] | None = None
    input_delta_std: list[float] | None = None
    target_mean: list[float] | None = None
    target_std: list[float] | None = None
    input_columns: list[str] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        # A folder that came from the Hub carries "org/name--" references; written again, it must name its own files.
        named = kwargs.get("auto_map") or AUTO_MAP_OF_POSITIONS
        kwargs["auto_map"] = {auto: path.rpartition("--")[2] for auto, path in named.items()}
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As [`~transformers.PreTrainedConfig.from_dict`]; fields of a file are checked with those in their place."""
        given = {name: kwargs.pop(name) for name in MRConvConfig.__annotations__.keys() & kwargs.keys()}
        return super().from_dict({**config_dict, **given}, **kwargs)

    @property
    def branches(self) -> list[tuple[int, int]]:
        """`list[tuple[int, int]]`: Distance of the taps and length in samples of each resolution of a layer."""
        return branch_lengths(self.kernel_size, self.max_position_embeddings, self.num_branches)

    @property
    def longest_input(self) -> int:
        """`int`: Longest input in samples, at the rate of the input."""
        return int(self.max_position_embeddings / self.rate_factor)

    def validate_choices(self) -> None:
        """Check the fields that name one of several behaviours."""
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}; allowed: {', '.join(map(repr, allowed))}.")
        if self.reparameterized and self.branch_norm == "layer":
            told = "`reparameterized` is True and `branch_norm` 'layer', which depends on each input"
            raise ValueError(f"{told} and cannot be merged. Use 'batch', 'kernel' or 'none'.")

    def validate_sizes(self) -> None:
        """Check that sizes are positive, and that branches, modes and rate fit the lengths of the kernels."""
        sizes = ("vocab_size", "input_size", "hidden_size", "num_hidden_layers", "sampling_rate", "kernel_size")
        positive = ("norm_eps", "rate_factor", "initializer_range")
        check_numbers(self, (*sizes, "max_position_embeddings"), positive, "dropout")
        longest = self.branches[0][1]
        if self.num_modes is not None and not 1 <= self.num_modes <= longest // 2 + 1:
            raise ValueError(
                f"`num_modes` is {self.num_modes}; a kernel of {longest} samples has 1 to {longest // 2 + 1} modes."
            )
        changed_lengths(self.branches, self.rate_factor)

    def validate_statistics(self) -> None:
        """Check that means and spreads come in pairs, one for each channel of the input or target."""
        deltas = self.input_delta_std
        if deltas is not None and (len(deltas) != self.input_size or not all(0 < one < math.inf for one in deltas)):
            raise ValueError(f"`input_delta_std` is {deltas}; give {self.input_size} finite numbers over 0.")
        for name, count in (("input", self.input_size), ("target", self.num_labels)):
            mean, std = getattr(self, f"{name}_mean"), getattr(self, f"{name}_std")
            if mean is None and std is None:
                continue
            sizes, pairs = {count, len(mean or ()), len(std or ())}, zip(mean or (), std or (), strict=False)
            if len(sizes) > 1 or not all(math.isfinite(center) and 0 < spread < math.inf for center, spread in pairs):
                wrong = f"`{name}_mean` is {mean} and `{name}_std` {std}"
                raise ValueError(f"{wrong}; give both, {count} finite numbers each, spreads over 0, or None for both.")
