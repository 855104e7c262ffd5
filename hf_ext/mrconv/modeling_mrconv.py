# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""MRConv models (Cunningham et al., NeurIPS 2024, arXiv 2408.09453): reparameterized multi-resolution convolutions.

Shapes: batch B, length L, channels D; hidden states [B, L, D].
"""

import math
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput
from transformers.utils import can_return_tuple, logging
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_mrconv import MRConvConfig, branch_lengths, changed_lengths
from .kernels_mrconv import MRConvFourierSparseKernel, MRConvKernel
from .modeling_conversion_mrconv import register_conversion
from .modeling_layers_mrconv import MRConvBlock, MRConvLayer
from .modeling_norms_mrconv import MRConvBatchNorm, MRConvBranchLayerNorm, MRConvBranchNorm, make_norm

logger = logging.get_logger(__name__)

# Arguments of other models that MRConv has no meaning for, and why.
_REFUSED = {
    "position_ids": "a convolution takes positions from the order of its input; packed sequences are not supported",
    "cu_seq_lens_q": "packed sequences are not supported: give each sequence a row of its own and an attention mask",
    "token_type_ids": "there are no segments: MRConvForRetrieval takes two documents as `input_ids`, `input_ids_2`",
    "cache_params": "the state of a sequence is passed as `past_key_values`",
}


register_conversion("mrconv")


class MRConvPreTrainedModel(PreTrainedModel):
    """Loading, saving, initialisation, merging and change of rate shared by the MRConv models."""

    config_class = MRConvConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MRConvBlock"]
    _can_record_outputs = {"hidden_states": OutputRecorder(MRConvBlock)}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.kaiming_uniform_(module.weight, a=math.sqrt(5))
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.initializer_range)
            # A slice has no mark of having been loaded.
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, MRConvLayer):
            module.reset_parameters()
            for name in ("merged_kernel", "merged_backward_kernel", "merged_bias"):
                if getattr(module, name, None) is not None:
                    init.zeros_(getattr(module, name))
        elif isinstance(module, (MRConvKernel, MRConvFourierSparseKernel)):
            module.reset_parameters()
        elif isinstance(module, (MRConvBranchNorm, MRConvBatchNorm)):
            init.ones_(module.weight)
            init.zeros_(module.bias)
            init.zeros_(module.running_mean)
            init.ones_(module.running_var)
        elif isinstance(module, (MRConvBranchLayerNorm, nn.LayerNorm)):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    def convolutions(self) -> list[MRConvLayer]:
        """
        Returns:
            `list[MRConvLayer]`: The convolution layers, first to last.
        """
        return [module for module in self.modules() if isinstance(module, MRConvLayer)]

    def kernel_parameters(self) -> list[str]:
        """
        Names of the parameters that make the kernels, for a learning rate of their own and no weight decay: the
        branches are normalised, so that decay would do nothing but change the effective learning rate.

        Returns:
            `list[str]`: Names as in `named_parameters`.

        Raises:
            ValueError: If the model is merged and its kernels are no parameters any more.
        """
        if self.config.reparameterized:
            raise ValueError(
                "The model is merged: its kernels are buffers, which training leaves as they are. Train a checkpoint "
                "from before `reparameterize()`, or only the other parameters."
            )
        return [
            f"{prefix}.{name}"
            for prefix, module in self.named_modules()
            if isinstance(module, (MRConvKernel, MRConvFourierSparseKernel))
            for name, _ in module.named_parameters(recurse=False)
        ]

    def reparameterize(self) -> Self:
        """
        Merge every layer into one kernel and one bias, in place (eq. 7). Outputs in evaluation stay the same; it may
        be called again, and the model is saved and loaded merged. Kernels can no longer be trained.

        Returns:
            `MRConvPreTrainedModel`: The model itself.

        Raises:
            ValueError: If branches are layer-normalised, or weights are offloaded.
        """
        for layer in self.convolutions():
            layer.reparameterize()
        self.config.reparameterized = True
        return self

    def use_direct_convolution(self, direct: bool = True) -> Self:
        """
        Compute the merged convolutions as sums over the taps, `conv1d`, instead of by FFT, or by FFT again. For
        exports: every runtime has that operation, and the exported model takes any length, where an FFT has one fixed
        size. The cost is `length x taps` instead of `length x log(length)`: for some thousand taps at most.

        Args:
            direct (`bool`, *optional*, defaults to `True`): Whether to sum.

        Returns:
            `MRConvPreTrainedModel`: The model itself. The choice is not saved.

        Raises:
            ValueError: If the model is not merged.
        """
        if not self.config.reparameterized:
            raise ValueError(
                "The model still has branches, which have no one kernel. Call `reparameterize()` before "
                "`use_direct_convolution()`."
            )
        for layer in self.convolutions():
            layer.direct = direct
        return self

    def change_rate(self, factor: float) -> Self:
        """
        Make the kernels those of an input with `factor` times fewer samples per second, in place and saved in the
        configuration; 2.0 takes a model from 16 to 8 kHz, 0.5 back. Nothing is trained for it, and running statistics
        stay as they are.

        Fourier kernels keep the modes that the new rate can represent, k'[t] = factor k[factor t]; implicit ones are
        evaluated there. A tap of a dilated or sparse kernel moves to floor(lag / factor), those that meet add up:
        an approximation that aliases.

        Args:
            factor (`float`): How many times fewer samples; it divides the length of every kernel.

        Returns:
            `MRConvPreTrainedModel`: The model itself.

        Raises:
            ValueError: If the model is merged, or a length or the sampling rate is not divisible by the factor.
        """
        config = self.config
        if config.reparameterized:
            raise ValueError(
                "The model is merged: its kernels have no modes or taps left to change. Call `change_rate` before "
                "`reparameterize`."
            )
        if not (factor > 0 and math.isfinite(factor)):
            raise ValueError(f"`factor` is {factor}; give a positive number, such as 2.0 for half the sampling rate.")
        total = config.rate_factor * factor
        changed_lengths(branch_lengths(config.kernel_size, config.max_position_embeddings, config.num_branches), total)
        if config.sampling_rate is not None:
            rate = config.sampling_rate / factor
            if not rate.is_integer():
                raise ValueError(
                    f"`factor` is {factor}; {config.sampling_rate} Hz would become {rate}, not a whole number."
                )
            config.sampling_rate = int(rate)
        config.rate_factor = total
        for layer in self.convolutions():
            layer.rate_factor = float(total)
        if config.kernel_type in ("dilated", "sparse", "fourier_sparse"):
            logger.warning(
                f"`change_rate`: taps of {config.kernel_type!r} kernels move to the nearest earlier sample. Expect a "
                "loss, which Fourier kernels do not have below the new Nyquist frequency."
            )
        return self


def valid_range(
    attention_mask: torch.Tensor | None, inputs: torch.Tensor, streaming: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | tuple[None, None, None]:
    """
    First valid position of each sample, first after the last, and the mask as booleans; None where all are valid.

    Args:
        attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): 1 where valid. When streaming it may
            cover the past too, and a sample may have no valid position in this chunk.
        inputs (`torch.Tensor` of shape `(batch, length, ...)`): What the mask belongs to.
        streaming (`bool`): Whether the inputs continue a sequence.

    Raises:
        ValueError: If the mask has another shape, or the valid positions of a sample are not one run.
    """
    if attention_mask is None:
        return None, None, None
    batch, length = inputs.shape[:2]
    if (
        attention_mask.ndim != 2
        or attention_mask.shape[0] != batch
        or attention_mask.shape[1] < length
        or (attention_mask.shape[1] > length and not streaming)
    ):
        raise ValueError(
            f"`attention_mask` has shape {tuple(attention_mask.shape)}; expected ({batch}, {length}), one number for "
            "each position."
        )
    valid = attention_mask[:, attention_mask.shape[1] - length :] != 0
    count = valid.sum(1)
    start = valid.to(torch.int8).argmax(1)
    if not torch.compiler.is_compiling():
        # On a CPU it costs nothing to look.
        if valid.device.type == "cpu" and bool(valid.all()):
            return None, None, None
        runs = valid[:, 0] + (valid[:, 1:] & ~valid[:, :-1]).sum(1)
        require_all(
            runs <= 1 if streaming else runs == 1,
            "`attention_mask` must have one run of ones in each row: padding on the left or right, at least one "
            "position, no holes. Packed sequences are not supported; give each sequence a row of its own.",
        )
    return start, start + count, valid


def require_all(holds: torch.Tensor, message: str) -> None:
    """
    Check what depends on values. A GPU checks by itself while the program goes on, as it does for a token outside of
    the vocabulary: to ask it for the answer would wait for all that it has to do.

    Args:
        holds (`torch.Tensor`): What has to be True everywhere.
        message (`str`): What is wrong otherwise.

    Raises:
        ValueError: If something is False, on a CPU. On CUDA a later operation raises a `RuntimeError` instead.
    """
    if holds.is_cuda:
        torch._assert_async(holds.all(), message)
    elif not holds.is_meta and not bool(holds.all()):
        raise ValueError(message)


def masked_mean(hidden: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Mean over the valid positions of hidden states `(B, L, D)`, summed in float32 at least."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    if valid is None:
        return hidden.mean(1, dtype=dtype).to(hidden.dtype)
    total = torch.where(valid[..., None], hidden, 0).sum(1, dtype=dtype)
    return (total / valid.sum(1, keepdim=True)).to(hidden.dtype)


class MRConvModel(MRConvPreTrainedModel):
    """
    MRConv without a head: tokens or a continuous input in, hidden states out.

    Args:
        config ([`MRConvConfig`]): The model configuration.
    """

    def __init__(self, config: MRConvConfig):
        super().__init__(config)
        if config.vocab_size is None:
            self.embedding: nn.Module = nn.Linear(config.input_size, config.hidden_size)
        else:
            self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(MRConvBlock(config, index) for index in range(config.num_hidden_layers))
        self.final_norm = make_norm(config) if config.prenorm else None
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of tokens, or the linear layer that stands there for a continuous input."""
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace what [`~MRConvModel.get_input_embeddings`] returns."""
        self.embedding = value

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        past_key_values: Any | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, length)`, *optional*):
                Tokens, for a model with a vocabulary.
            attention_mask (`torch.Tensor` of shape `(batch_size, length)`, *optional*):
                1 at valid positions, which are one run in each row; 0 at padding on the left or right. Padding
                changes no result at a valid position.
            inputs_embeds (`torch.Tensor` of shape `(batch_size, length, hidden_size)`, *optional*):
                What the embedding would return, instead of `input_ids` or `input_values`.
            input_values (`torch.Tensor` of shape `(batch_size, length, input_size)`, *optional*):
                Continuous input, for a model without vocabulary; `(batch_size, length)` if `input_size` is 1.
            past_key_values ([`~hf_ext.mrconv.streaming_mrconv.MRConvCache`], *optional*):
                State after the earlier part of a sequence that this input continues. The mask may cover that part.

        Returns:
            [`~transformers.modeling_outputs.BaseModelOutput`]: `last_hidden_state` of shape `(batch_size, length,
            hidden_size)`; with `output_hidden_states=True` the embedded input and the output of each block.

        Raises:
            ValueError: If not exactly one input is given, or its shape does not fit the model, or the mask has holes,
                or the input is longer than `config.longest_input` without a state.
            TypeError: If `input_values` holds integers.
        """
        for name, reason in _REFUSED.items():
            if kwargs.get(name) is not None:
                raise ValueError(f"`{name}` is not an input of MRConv: {reason}.")
        if past_key_values is not None and self.training:
            raise ValueError(
                "A cache in training mode: a streamed convolution has no batch statistics and no gradient. Call "
                "`model.eval()` to generate or stream, or leave `use_cache` and `past_key_values` out to train."
            )
        hidden = self.embed(input_ids, inputs_embeds, input_values)
        if past_key_values is None and hidden.shape[1] > self.config.longest_input:
            raise ValueError(
                f"The input has {hidden.shape[1]} positions; the model takes at most {self.config.longest_input} "
                "(`max_position_embeddings`, its longest kernel). Shorten the input, or stream it with a cache."
            )
        start, stop, valid = valid_range(attention_mask, hidden, past_key_values is not None)
        # Fewer than there are, where the configuration says so: generation that leaves early sets it for a while.
        for layer in self.layers[: self.config.num_hidden_layers]:
            hidden = layer(hidden, start, stop, valid, past_key_values)
        if self.final_norm is not None:
            hidden = self.final_norm(hidden, valid)
        return BaseModelOutput(last_hidden_state=hidden)

    def embed(
        self,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Embed the one input that is given.

        Args:
            input_ids, inputs_embeds, input_values: As in the forward pass.

        Returns:
            `torch.Tensor` of shape `(batch_size, length, hidden_size)`: What the first block gets.

        Raises:
            ValueError, TypeError: As in the forward pass.
        """
        config = self.config
        given = [value for value in (input_ids, inputs_embeds, input_values) if value is not None]
        if len(given) != 1 or not given[0].numel():
            raise ValueError(
                f"Got {len(given)} inputs{' without a position' if len(given) == 1 else ''}; give exactly one of "
                "`input_ids`, `inputs_embeds` and `input_values`, of at least one position."
            )
        if inputs_embeds is not None:
            if inputs_embeds.ndim != 3 or inputs_embeds.shape[2] != config.hidden_size:
                raise ValueError(
                    f"`inputs_embeds` has shape {tuple(inputs_embeds.shape)}; expected (batch_size, length, "
                    f"{config.hidden_size})."
                )
            return inputs_embeds
        if input_ids is not None:
            if config.vocab_size is None or input_ids.ndim != 2:
                raise ValueError(
                    f"`input_ids` has shape {tuple(input_ids.shape)} and `vocab_size` is {config.vocab_size}; "
                    "expected tokens (batch_size, length) for a model with a vocabulary, else give `input_values`."
                )
            embedded: torch.Tensor = self.embedding(input_ids)
            return embedded
        assert input_values is not None
        values = input_values[..., None] if input_values.ndim == 2 else input_values
        if config.vocab_size is not None or values.ndim != 3 or values.shape[2] != config.input_size:
            raise ValueError(
                f"`input_values` has shape {tuple(input_values.shape)} and `vocab_size` is {config.vocab_size}; "
                f"expected (batch_size, length, {config.input_size}) for a model without vocabulary."
            )
        if not values.is_floating_point():
            raise TypeError(
                f"`input_values` is {values.dtype}; give floating-point numbers, or tokens as `input_ids`."
            )
        embedded = self.embedding(values.to(self.dtype))
        return embedded


class MRConvForSequenceClassification(MRConvPreTrainedModel):
    """
    MRConv with a linear classifier on the mean of the last hidden state, for tokens or a continuous input.

    Args:
        config ([`MRConvConfig`]): The model configuration; `num_labels` says how many classes.
    """

    # The loss is a mean over the batch: Trainer has to divide by the steps that it accumulates.
    accepts_loss_kwargs = False

    def __init__(self, config: MRConvConfig):
        super().__init__(config)
        self.num_labels = config.num_labels or 0
        self.model = MRConvModel(config)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """
        Args:
            input_ids, attention_mask, inputs_embeds, input_values:
                As in [`MRConvModel`]. The mean is taken over the valid positions.
            labels (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
                Classes from 0; or as `config.problem_type` says, float targets of shape `(batch_size, num_labels)`.

        Returns:
            [`~transformers.modeling_outputs.SequenceClassifierOutput`]: `logits` of shape `(batch_size, num_labels)`;
            `loss` when labels are given; `hidden_states` when asked for.

        Raises:
            ValueError, TypeError: If an input does not fit, as in [`MRConvModel`].

        Example:

        ```python
        >>> import torch
        >>> from hf_ext.mrconv import MRConvConfig, MRConvForSequenceClassification

        >>> config = MRConvConfig(hidden_size=16, num_hidden_layers=2, max_position_embeddings=128, num_labels=10)
        >>> model = MRConvForSequenceClassification(config).eval()
        >>> model(input_values=torch.rand(1, 100, 1)).logits.shape
        torch.Size([1, 10])
        ```
        """
        outputs = self.model(input_ids, attention_mask, inputs_embeds, input_values, **kwargs)
        hidden = outputs.last_hidden_state
        logits = self.classifier(masked_mean(hidden, None if attention_mask is None else attention_mask != 0))
        loss = None if labels is None else self.loss_function(labels, logits.float(), self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class MRConvForAudioClassification(MRConvForSequenceClassification):
    """
    MRConv on raw waveforms, with a linear classifier on the mean of the last hidden state.

    Args:
        config ([`MRConvConfig`]): The model configuration, without vocabulary and with `input_size` 1.
    """

    main_input_name = "input_values"
    input_modalities = ["audio"]

    @can_return_tuple
    def forward(  # type: ignore[override]
        self,
        input_values: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """
        Args:
            input_values (`torch.Tensor` of shape `(batch_size, samples)`):
                Waveforms as the feature extractor returns them, at `config.sampling_rate`.
            attention_mask (`torch.Tensor` of shape `(batch_size, samples)`, *optional*):
                1 at valid samples, one run in each row.
            labels (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
                Classes from 0; or as `config.problem_type` says, float targets of shape `(batch_size, num_labels)`.

        Returns:
            [`~transformers.modeling_outputs.SequenceClassifierOutput`]: `logits` of shape `(batch_size, num_labels)`;
            `loss` when labels are given; `hidden_states` when asked for.

        Raises:
            ValueError, TypeError: If an input does not fit, as in [`MRConvModel`].
        """
        return super().forward(attention_mask=attention_mask, input_values=input_values, labels=labels, **kwargs)


def _join(
    first: torch.Tensor, second: torch.Tensor, masks: tuple[torch.Tensor | None, torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two batches of embedded documents as one, padded on the right to one length, and their mask."""
    length = max(first.shape[1], second.shape[1])
    documents, joined = [], []
    for document, mask in zip((first, second), masks, strict=True):
        if mask is None:
            mask = torch.ones(document.shape[:2], dtype=torch.int64, device=document.device)
        if mask.shape != document.shape[:2]:
            raise ValueError(
                f"An attention mask has shape {tuple(mask.shape)} for documents of shape {tuple(document.shape[:2])}; "
                "give one number for each position."
            )
        right = length - document.shape[1]
        documents.append(F.pad(document, (0, 0, 0, right)))
        joined.append(F.pad(mask, (0, right)))
    return torch.cat(documents), torch.cat(joined)


class MRConvForRetrieval(MRConvPreTrainedModel):
    """
    MRConv that compares two documents: one encoder for both, a head on [a, b, a - b, a * b] of their means a and b.

    Args:
        config ([`MRConvConfig`]): The model configuration, with a vocabulary; `num_labels` says how many classes.
    """

    accepts_loss_kwargs = False

    def __init__(self, config: MRConvConfig):
        super().__init__(config)
        self.num_labels = config.num_labels or 0
        self.model = MRConvModel(config)
        # The name of the class does not say it.
        self.loss_type = "ForSequenceClassification"
        self.comparison = nn.Linear(4 * config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        input_ids_2: torch.LongTensor | None = None,
        attention_mask_2: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        inputs_embeds_2: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """
        Args:
            input_ids, input_ids_2 (`torch.LongTensor` of shape `(batch_size, length)`):
                First and second document of each pair, of lengths of their own.
            attention_mask, attention_mask_2 (`torch.Tensor` of the shapes of the documents, *optional*):
                1 at valid positions, one run in each row.
            inputs_embeds, inputs_embeds_2 (`torch.Tensor` of shape `(batch_size, length, hidden_size)`, *optional*):
                Embedded documents, instead of tokens.
            labels (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
                Classes from 0; or as `config.problem_type` says, float targets of shape `(batch_size, num_labels)`.

        Returns:
            [`~transformers.modeling_outputs.SequenceClassifierOutput`]: `logits` of shape `(batch_size, num_labels)`;
            `loss` when labels are given; `hidden_states`, of both documents one after the other, when asked for.

        Raises:
            ValueError: If a document is missing or the two batches do not belong together, and as in [`MRConvModel`].
        """
        first = self.model.embed(input_ids, inputs_embeds)
        second = self.model.embed(input_ids_2, inputs_embeds_2)
        if len(first) != len(second):
            raise ValueError(
                f"There are {len(first)} first and {len(second)} second documents; give pairs, as many of each."
            )
        # One pass for both: statistics are those of all documents, and are counted once.
        documents, mask = _join(first, second, (attention_mask, attention_mask_2))
        outputs = self.model(inputs_embeds=documents, attention_mask=mask, **kwargs)
        a, b = masked_mean(outputs.last_hidden_state, mask != 0).chunk(2)
        compared = F.relu(self.comparison(torch.cat([a, b, a - b, a * b], dim=-1)))
        logits = self.classifier(compared)
        loss = None if labels is None else self.loss_function(labels, logits.float(), self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


__all__ = [
    "MRConvForAudioClassification",
    "MRConvForRetrieval",
    "MRConvForSequenceClassification",
    "MRConvLayer",
    "MRConvModel",
    "MRConvPreTrainedModel",
]
