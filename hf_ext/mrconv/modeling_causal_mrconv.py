# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Causal language model on MRConv (arXiv 2408.09453), with generation that costs O(log^2 L) operations per token."""

from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple

from .configuration_mrconv import MRConvConfig
from .modeling_mrconv import MRConvModel, MRConvPreTrainedModel, require_all
from .streaming_mrconv import MRConvCache


def check_left_padding(attention_mask: torch.Tensor, positions: int) -> None:
    """
    Check that a mask fits a sequence that goes on: no padding follows a valid position.

    Args:
        attention_mask (`torch.Tensor` of shape `(batch, positions)`): 1 where valid, over all positions so far.
        positions (`int`): Positions that the cache has seen, and those of the present chunk.

    Raises:
        ValueError: If the mask has another length, or padding follows a valid position.
    """
    if attention_mask.ndim != 2 or attention_mask.shape[1] != positions:
        raise ValueError(
            f"`attention_mask` has shape {tuple(attention_mask.shape)}; with a cache it covers the positions of the "
            f"cache and the new ones, (batch_size, {positions})."
        )
    require_all(
        attention_mask[:, 1:] >= attention_mask[:, :-1],
        "`attention_mask` has padding after a valid position; a sequence that goes on must be padded on the left: "
        "set `tokenizer.padding_side = 'left'`, or call the model with `use_cache=False`.",
    )


class MRConvForCausalLM(MRConvPreTrainedModel, GenerationMixin):
    """
    Causal MRConv that predicts the next token.

    `generate` keeps an [`~hf_ext.mrconv.streaming_mrconv.MRConvCache`] under `past_key_values`: results are those of
    the full forward pass, and nothing is computed twice. Batches are padded on the left. Generation may go on beyond
    `config.longest_input`; a token then depends on that many positions before it in each layer.

    Args:
        config ([`MRConvConfig`]):
            The model configuration, with `vocab_size` and `bidirectional=False`.

    Raises:
        ValueError: If the configuration is bidirectional or has no vocabulary.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}

    def __init__(self, config: MRConvConfig):
        if config.bidirectional:
            raise ValueError(
                "`bidirectional` is True: every output would depend on the tokens that are to be predicted. Use "
                "`bidirectional=False` for a language model."
            )
        if config.vocab_size is None:
            raise ValueError("`vocab_size` is None; a language model needs the number of its tokens.")
        super().__init__(config)
        self.model = MRConvModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: MRConvCache | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, length)`, *optional*):
                Tokens; those after the cached ones when there is a cache.
            attention_mask (`torch.Tensor` of shape `(batch_size, length)`, *optional*):
                1 at valid positions, one run in each row. With a cache it covers the cached positions too, and
                padding is on the left.
            inputs_embeds (`torch.Tensor` of shape `(batch_size, length, hidden_size)`, *optional*):
                Embedded tokens, instead of `input_ids`.
            past_key_values ([`~hf_ext.mrconv.streaming_mrconv.MRConvCache`], *optional*):
                State after the earlier part of the sequence; it is updated in place.
            labels (`torch.LongTensor` of shape `(batch_size, length)`, *optional*):
                Tokens to predict, shifted inside the model: give the input itself. -100 is not predicted.
            use_cache (`bool`, *optional*):
                Whether to return a cache. Not without being asked for: a cached call has no gradient.
            logits_to_keep (`int` or `torch.Tensor`, *optional*, defaults to 0):
                How many of the last positions get logits, 0 for all; or which positions.

        Returns:
            [`~transformers.modeling_outputs.CausalLMOutputWithPast`]: `logits` of shape `(batch_size, length,
            vocab_size)`; `loss` when labels are given; `past_key_values` when there is a cache; `hidden_states` when
            asked for.

        Raises:
            ValueError: If a cache is used in training mode, or padding follows a valid position in a cached sequence,
                and as in [`MRConvModel`].
            TypeError: If the cache is not an `MRConvCache`.

        Example:

        ```python
        >>> import torch
        >>> from hf_ext.mrconv import MRConvConfig, MRConvForCausalLM

        >>> config = MRConvConfig(vocab_size=100, hidden_size=16, num_hidden_layers=2, max_position_embeddings=128)
        >>> model = MRConvForCausalLM(config).eval()
        >>> model.generate(torch.tensor([[5, 17, 3]]), max_new_tokens=20, do_sample=False).shape
        torch.Size([1, 23])
        ```
        """
        cache = self._cache(past_key_values, use_cache)
        if cache is not None and attention_mask is not None:
            given = input_ids if inputs_embeds is None else inputs_embeds
            if given is not None:
                check_left_padding(attention_mask, cache.get_seq_length() + given.shape[1])
        outputs = self.model(input_ids, attention_mask, inputs_embeds, past_key_values=cache, **kwargs)
        hidden = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=cache, hidden_states=outputs.hidden_states
        )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """
        As [`~transformers.GenerationMixin.generate`]. `assistant_early_exit=n` drafts tokens with the first n blocks.

        transformers makes the model n blocks deep for as long as it drafts, by `config.num_hidden_layers`, and leaves
        it so where drafting ends with an error or is interrupted. Here the depth is always given back.

        Raises:
            ValueError: If `assistant_early_exit` is not between 1 and the number of blocks.
        """
        depth = self.config.num_hidden_layers
        given = kwargs.get("generation_config") or self.generation_config
        early_exit = kwargs.get("assistant_early_exit", getattr(given, "assistant_early_exit", None))
        if early_exit is not None and not 1 <= early_exit <= depth:
            raise ValueError(
                f"`assistant_early_exit` is {early_exit}; the model has {depth} blocks, give 1 to {depth}."
            )
        # Untyped: transformers annotates `self` with a protocol that no model meets.
        mixin: Any = super()
        try:
            return mixin.generate(*args, **kwargs)
        finally:
            self.config.num_hidden_layers = depth

    def _cache(self, cache: MRConvCache | None, use_cache: bool | None) -> MRConvCache | None:
        """The cache of this call: the one given, a new one if asked for, or none."""
        if cache is None and not use_cache:
            return None
        if cache is None:
            return MRConvCache(self.config)
        if not isinstance(cache, MRConvCache):
            raise TypeError(
                f"`past_key_values` is a {type(cache).__name__}; MRConv has no keys and values to cache, it needs an "
                "`MRConvCache(model.config)`."
            )
        return cache

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: torch.LongTensor,
        inputs_embeds: torch.Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The inputs of the next forward pass of `generate`: after the prompt, all positions are valid."""
        # Untyped: transformers annotates `self` with a protocol that no model meets.
        mixin: Any = super()
        inputs: dict[str, Any] = mixin.prepare_inputs_for_generation(
            input_ids, inputs_embeds=inputs_embeds, is_first_iteration=is_first_iteration, **kwargs
        )
        if not is_first_iteration and inputs.get("past_key_values") is not None:
            inputs["attention_mask"] = None
        return inputs

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Gives `generate` the only kind of cache there is for a convolution."""
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"`cache_implementation` is {generation_config.cache_implementation!r}; MRConv generates with an "
                "`MRConvCache`, which is used when this is left out."
            )
        if model_kwargs.get("past_key_values") is not None:
            mixin: Any = super()
            mixin._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        elif generation_config.use_cache is not False:
            cache = MRConvCache(self.config)
            if generation_config.is_assistant:
                cache.activate_past_recording()
            model_kwargs["past_key_values"] = cache


__all__ = ["MRConvForCausalLM"]
