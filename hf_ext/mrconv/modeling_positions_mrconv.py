# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""MRConv models that answer at each position (arXiv 2408.09453): next tokens, masked tokens, classes.

Shapes: batch B, length L, channels D; hidden states [B, L, D].
"""

from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast, MaskedLMOutput, TokenClassifierOutput
from transformers.modeling_utils import slice_logits_to_keep
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple

from .configuration_mrconv import AUTO_MAP_OF_POSITIONS, MRConvConfig
from .modeling_layers_mrconv import MRConvPreTrainedModel
from .modeling_mrconv import MRConvModel, only_cache
from .packing_mrconv import find_starts, read_packing
from .streaming_mrconv import MRConvCache

# The name of the cache in outputs and in `generate`: `past_key_values` up to transformers 5.23, `cache` since then.
_CACHE = fields(CausalLMOutputWithPast)[2].name

# Trainer smooths the labels of next tokens only for classes that are named here: the Auto class does not enter them.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["mrconv"] = "MRConvForCausalLM"
MRConvModel.read_packing = staticmethod(read_packing)  # type: ignore[method-assign]


def fit_positions(labels: Tensor, logits: Tensor) -> Any:
    """Labels of each position of logits `(B, L, N)`, as the loss takes them; refuses others, of which the loss would
    take the label of one position for that of another."""
    expected, whole = tuple(logits.shape[:2]), not labels.is_floating_point() and labels.dtype != torch.bool
    if labels.shape != expected or not whole:
        raise ValueError(
            f"`labels` have shape {tuple(labels.shape)} and type {labels.dtype}; expected {expected} and whole "
            "numbers, one for each position that has logits, -100 where there is none."
        )
    return labels.to(logits.device, torch.long).contiguous()


class MRConvLanguageModel(MRConvPreTrainedModel):
    """Base of the language models: a body, and an output layer that may be its embedding."""

    code_beside, accepts_loss_kwargs = AUTO_MAP_OF_POSITIONS, True
    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}
    looks_ahead: ClassVar[bool]

    def __init__(self, config: MRConvConfig):
        if config.bidirectional != self.looks_ahead:
            other, why = "MRConvForCausalLM", "a masked token would be predicted from the tokens before it only"
            if config.bidirectional:
                other, why = "MRConvForMaskedLM", "every output would depend on the tokens that are to be predicted"
            advice = f"Use `bidirectional={self.looks_ahead}` or {other}"
            raise ValueError(f"`bidirectional` is {config.bidirectional}: {why}. {advice}.")
        if config.vocab_size is None:
            raise ValueError("`vocab_size` is None; a language model needs the number of its tokens.")
        super().__init__(config)
        self.model = MRConvModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class MRConvForCausalLM(MRConvLanguageModel, GenerationMixin):
    """Causal MRConv that predicts the next token.

    `generate` keeps an [`~hf_ext.mrconv.streaming_mrconv.MRConvCache`] under `cache`: results equal those of the full
    forward pass, and nothing is computed twice. Batches are padded on the left. Generation may exceed
    `config.longest_input`; in each layer, a token then depends on that many positions before it."""

    looks_ahead = False
    # A stream takes nothing back: transformers refuses assisted generation.
    _is_stateful = True

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: MRConvCache | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: MRConvCache | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """
        Args:
            input_ids, attention_mask, inputs_embeds, cache: As in [`MRConvModel`]; the cache is updated in place.
            labels (`torch.LongTensor` of shape `(batch_size, length)`, *optional*):
                Tokens to predict, shifted inside the model: pass the input itself. -100 is not predicted.
            use_cache (`bool`, *optional*): Return a cache; off by default, because a cached call has no gradient.
            logits_to_keep (`int` or `torch.Tensor`, *optional*, defaults to 0):
                Number of last positions that get logits, 0 for all; or the positions.
            past_key_values: The name of `cache` up to transformers 5.23.
            position_ids: Packed sequences, as in [`MRConvModel`]. The first token of a sequence is not predicted from
                the one before it.

        Returns:
            [`~transformers.modeling_outputs.CausalLMOutputWithPast`]: `logits` of shape `(batch_size, length,
            vocab_size)`; `loss` with labels; `cache` (transformers 5.23: `past_key_values`), `hidden_states` if asked.

        Raises:
            ValueError, TypeError: As in [`MRConvModel`]; or the cache holds other samples or another model's kernels.

        Example:
            >>> import torch
            >>> from hf_ext import MRConvConfig, MRConvForCausalLM
            >>> model = MRConvForCausalLM(MRConvConfig(vocab_size=100, hidden_size=16, num_hidden_layers=2)).eval()
            >>> model.generate(torch.tensor([[5, 17, 3]]), max_new_tokens=20, do_sample=False).shape
            torch.Size([1, 23])
        """
        cache = only_cache(cache, past_key_values)
        if cache is None and use_cache:
            cache = MRConvCache(self.config)
        outputs = self.model(input_ids, attention_mask, inputs_embeds, None, cache, position_ids, **kwargs)
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            labels = fit_positions(labels, logits)
            valid = None if attention_mask is None else attention_mask != 0
            starts = find_starts((labels.shape[0], labels.shape[1]), valid, position_ids)
            if starts is not None:
                labels = labels.masked_fill(starts, -100)  # type: ignore[assignment]
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss, logits, cache, outputs.hidden_states)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As [`~transformers.GenerationMixin.generate`], with either name of the cache."""
        past = only_cache(kwargs.pop("cache", None), kwargs.pop("past_key_values", None))
        return super().generate(*args, **kwargs, **({} if past is None else {_CACHE: past}))

    def _prepare_position_ids_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """Gives `generate` no positions: those of a stream follow one another."""

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Gives `generate` the only kind of cache there is for a convolution."""
        if generation_config.cache_implementation not in (None, "dynamic"):
            wrong = f"`cache_implementation` is {generation_config.cache_implementation!r}"
            raise ValueError(f"{wrong}; leave it out: MRConv generates with an `MRConvCache`.")
        if model_kwargs.get(_CACHE) is not None:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        elif generation_config.use_cache is not False:
            model_kwargs[_CACHE] = MRConvCache(self.config)


class MRConvForMaskedLM(MRConvLanguageModel):
    """Bidirectional MRConv that predicts masked tokens."""

    looks_ahead = True

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: torch.LongTensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """
        Args:
            input_ids, attention_mask, inputs_embeds, position_ids: As in [`MRConvModel`].
            labels (`torch.LongTensor` of shape `(batch_size, length)`, *optional*):
                The tokens at masked positions, -100 elsewhere, as `DataCollatorForLanguageModeling` makes them.

        Returns:
            [`~transformers.modeling_outputs.MaskedLMOutput`]: `logits` of shape `(batch_size, length, vocab_size)`;
            `loss` when labels are given; `hidden_states` when asked for. Errors: see [`MRConvModel`].

        Example:
            >>> import torch
            >>> from hf_ext import MRConvConfig, MRConvForMaskedLM
            >>> config = MRConvConfig(vocab_size=100, hidden_size=16, num_hidden_layers=2, bidirectional=True)
            >>> MRConvForMaskedLM(config)(torch.tensor([[5, 17, 3]])).logits.shape
            torch.Size([1, 3, 100])
        """
        count = kwargs.pop("num_items_in_batch", None)
        outputs = self.model(input_ids, attention_mask, inputs_embeds, position_ids=position_ids, **kwargs)
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            labels = fit_positions(labels, logits)
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, num_items_in_batch=count)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class MRConvForTokenClassification(MRConvPreTrainedModel):
    """MRConv with a class at every position, for tokens or a continuous input; a causal one streams."""

    code_beside, accepts_loss_kwargs = AUTO_MAP_OF_POSITIONS, True

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
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        input_values: Tensor | None = None,
        labels: torch.LongTensor | None = None,
        position_ids: Tensor | None = None,
        observed_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """
        Args:
            input_ids, attention_mask, inputs_embeds, input_values, cache, position_ids, observed_mask:
                As in [`MRConvModel`].
            labels (`torch.LongTensor` of shape `(batch_size, length)`, *optional*):
                The class of each position; -100 where there is none, as at padding.

        Returns:
            [`~transformers.modeling_outputs.TokenClassifierOutput`]: `logits` of shape `(batch_size, length,
            num_labels)`; `loss` when labels are given; `hidden_states` when asked for. Errors: see [`MRConvModel`].

        Example:
            >>> import torch
            >>> from hf_ext import MRConvConfig, MRConvForTokenClassification
            >>> config = MRConvConfig(vocab_size=100, hidden_size=16, num_hidden_layers=2, num_labels=5)
            >>> MRConvForTokenClassification(config)(torch.tensor([[5, 17, 3]])).logits.shape
            torch.Size([1, 3, 5])
        """
        count = kwargs.pop("num_items_in_batch", None)
        kwargs |= {"position_ids": position_ids, "observed_mask": observed_mask}
        outputs = self.model(input_ids, attention_mask, inputs_embeds, input_values, **kwargs)
        logits = self.classifier(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            labels = fit_positions(labels, logits)
            # A batch in which no position has a class has the loss 0.
            count = torch.as_tensor((labels != -100).sum() if count is None else count).clamp_min(1)
            loss = self.loss_function(logits.float(), labels, self.config, num_items_in_batch=count)
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)
