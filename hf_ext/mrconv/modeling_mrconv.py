# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""MRConv models (Cunningham et al., NeurIPS 2024, arXiv 2408.09453): reparameterized multi-resolution convolutions.

Shapes: batch B, length L, channels D; hidden states [B, L, D].
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from .configuration_mrconv import MRConvConfig
from .kernels_mrconv import precise
from .modeling_layers_mrconv import MRConvBlock, MRConvPreTrainedModel, make_norm, make_units, refuse_unknown

# Where the sequences of packed rows begin, in the three forms of transformers' collators. Only the first is read.
_PACKING = ("position_ids", "cu_seq_lens_q", "seq_idx")
_SEVERAL = "Where rows hold several sequences, say where they begin by `position_ids`."


def read_mask(attention_mask: Tensor | None, inputs: Tensor, cache: Any | None = None) -> Tensor | None:
    """The mask of inputs `(B, L, ...)` as booleans, None if there is none. With a cache it covers that too."""
    if attention_mask is None:
        return None
    seen = 0 if cache is None else cache.get_seq_length()
    expected = (inputs.shape[0], seen + inputs.shape[1])
    if attention_mask.shape != expected:
        got = tuple(attention_mask.shape)
        raise ValueError(f"`attention_mask` has shape {got}; expected {expected}, cached positions included.")
    valid = as_booleans("attention_mask", attention_mask)
    if cache is not None:
        told = "`attention_mask` has padding after a valid position; a sequence that goes on is padded on the left"
        advice = "Set `tokenizer.padding_side = 'left'`"
        require_all(valid[:, 1:] >= valid[:, :-1], f"{told}. {advice}.")
    return valid[:, seen:]


def as_booleans(name: str, mask: Tensor) -> Tensor:
    """A mask of ones and zeros as booleans. An additive one, 0 where others are 1, would be read the wrong way round,
    and one that numbers the sequences of a row would join them."""
    found = mask != 0
    if not torch.compiler.is_compiling():
        require_all(mask == found, f"`{name}` has other numbers than 1, valid, and 0. {_SEVERAL}")
    return found


def valid_range(valid: Tensor | None, streaming: bool) -> tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]:
    """First valid position of each sample, first after the last, and the mask as booleans; None where all are valid.
    They are one run. When streaming, a sample may have none in this chunk."""
    checked = not torch.compiler.is_compiling() and not torch.jit.is_tracing()
    # On a CPU it costs nothing to look.
    if valid is None or (checked and valid.device.type == "cpu" and bool(valid.all())):
        return None, None, None
    if checked:
        runs = valid[:, 0] + (valid[:, 1:] & ~valid[:, :-1]).sum(1)
        message = "`attention_mask` needs one run of ones per row: at least one position, padding left or right only."
        require_all(runs <= 1 if streaming else runs == 1, f"{message} {_SEVERAL}")
    start = valid.to(torch.int8).argmax(1)
    return start, start + valid.sum(1), valid


def require_all(holds: Tensor, message: str) -> None:
    """Raise a `ValueError` unless all holds. To ask a GPU would wait for all that it has to do: it checks by itself
    while the program goes on, and a later operation raises a `RuntimeError`, as for a token outside of the vocabulary.
    """
    if holds.is_cuda:
        torch._assert_async(holds.all(), message)
    elif not holds.is_meta and not bool(holds.all()):
        raise ValueError(message)


def only_cache(cache: Any | None, past_key_values: Any | None) -> Any | None:
    """The cache that is given by one of its two names."""
    if cache is not None and past_key_values is not None:
        raise ValueError("`cache` and `past_key_values` are two names of one argument; give `cache` only.")
    return past_key_values if cache is None else cache


def refuse_packing(arguments: dict[str, Any], reason: str = "this head makes one answer of each row") -> None:
    """Refuse packed sequences, and the state after the beginning of one, where a row must be one sequence."""
    for name in (*_PACKING, "cache", "past_key_values"):
        if arguments.get(name) is not None:
            advice = "Give each sequence its own row, and an attention mask if they are padded"
            raise ValueError(f"`{name}` is not an input here: {reason}. {advice}.")


def zero_padding(values: Tensor, valid: Tensor | None) -> Tensor:
    """Values `(B, L, C)` with zeros at padding.
    Later layers leave padding out, but a NaN there would reach every weight all the same: the gradient of the
    embedding is a product with its input, and zero times NaN is NaN."""
    return values if valid is None else values.masked_fill(~valid[..., None], 0)


def delta_features(values: Tensor, valid: Tensor | None, observed: Tensor | None) -> Tensor:
    """Change of each channel of values `(B, L, C)` from the position before; 0 where one of the two is not known."""
    known = torch.ones_like(values, dtype=torch.bool) if observed is None else observed != 0
    if valid is not None:
        known = known & (valid[..., None] != 0)
    known = known[:, 1:] & known[:, :-1]
    return F.pad(torch.where(known, values[:, 1:] - values[:, :-1], 0), (0, 0, 1, 0))


def masked_mean(hidden: Tensor, valid: Tensor | None) -> Tensor:
    """Mean over the valid positions of hidden states `(B, L, D)`, summed in float32 at least."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    if valid is None:
        return hidden.mean(1, dtype=dtype).to(hidden.dtype)
    total = torch.where(valid[..., None], hidden, 0).sum(1, dtype=dtype)
    return (total / valid.sum(1, keepdim=True)).to(hidden.dtype)


class MRConvModel(MRConvPreTrainedModel):
    """MRConv without a head: tokens or a continuous input in, hidden states out."""

    def __init__(self, config: MRConvConfig):
        super().__init__(config)
        if config.vocab_size is None:
            channels = config.input_size * (1 if config.input_delta_std is None else 2)
            self.embedding: nn.Module = nn.Linear(channels, config.hidden_size)
        else:
            # Of torch, -1 is the last token, which would learn nothing.
            pad = config.pad_token_id if config.pad_token_id in range(config.vocab_size) else None
            self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, pad)
        self.units = make_units(config.input_mean, config.input_std)
        self.delta_units = make_units(None if config.input_delta_std is None else [0.0], config.input_delta_std)
        self.layers = nn.ModuleList(MRConvBlock(config, index) for index in range(config.num_hidden_layers))
        self.final_norm = make_norm(config) if config.prenorm else None
        self.post_init()

    @staticmethod
    def read_packing(hidden: Tensor, valid: Tensor | None, position_ids: Tensor | None) -> Any:
        """The packing of rows. `modeling_positions_mrconv` enters it, which does not travel with other heads."""
        reason = "the code that reads packed rows is missing from this checkpoint"
        refuse_packing({"position_ids": position_ids}, reason)

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        input_values: Tensor | None = None,
        cache: Any | None = None,
        position_ids: Tensor | None = None,
        observed_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, length)`, *optional*):
                Tokens, for a model with a vocabulary.
            attention_mask (`torch.Tensor` of shape `(batch_size, length)`, *optional*):
                1 at valid positions, one run in each row; 0 at padding on the left or right, which changes no result.
                With a cache the mask covers the cached positions too, and padding is on the left.
            inputs_embeds (`torch.Tensor` of shape `(batch_size, length, hidden_size)`, *optional*):
                Embedded input, instead of `input_ids` or `input_values`.
            input_values (`torch.Tensor` of shape `(batch_size, length, input_size)`, *optional*):
                Continuous input, for a model without vocabulary; `(batch_size, length)` if `input_size` is 1. In the
                units of the data if the configuration has `input_mean` and `input_std`.
            cache ([`~hf_ext.mrconv.streaming_mrconv.MRConvCache`], *optional*): State after the earlier part of the
                sequence; the mask covers it too. Also accepted as `past_key_values`.
            position_ids (`torch.LongTensor` of shape `(batch_size, length)`, *optional*):
                Packed sequences, as `DataCollatorWithFlattening` makes them: 0, 1, 2, ..., from 0 again at the
                beginning of each sequence of a row. Results, gradients and statistics equal those of one row per
                sequence. The attention mask may then have padding between sequences. Other forms of their bounds,
                `cu_seq_lens_q` and `seq_idx`, are allowed beside it and not read.
            observed_mask (`torch.Tensor` of shape `(batch_size, length, input_size)`, *optional*):
                0 where a number of `input_values` is missing (its value, also NaN, is ignored); `(batch_size, length)`
                if `input_size` is 1. The model takes the channel's `input_mean`, or 0, in its place.

        Returns:
            [`~transformers.modeling_outputs.BaseModelOutput`]: `last_hidden_state` of shape `(batch_size, length,
            hidden_size)`; with `output_hidden_states=True` the embedded input and the output of each block.

        Raises:
            ValueError: Not exactly one input is given, or the shape of an input, mask or cache does not fit.
            TypeError: `input_values` are no floats, `cache` is of another class, or an argument is unknown.

        Example:
            >>> import torch
            >>> from hf_ext import MRConvConfig, MRConvModel
            >>> model = MRConvModel(MRConvConfig(input_size=3, hidden_size=16, num_hidden_layers=2))
            >>> model(input_values=torch.rand(2, 50, 3)).last_hidden_state.shape
            torch.Size([2, 50, 16])
        """
        cache, segments = only_cache(cache, kwargs.pop("past_key_values", None)), kwargs.pop("token_type_ids", None)
        if segments is not None and not torch.compiler.is_compiling():
            # A tokenizer of BERT gives them with one text too.
            why = "there are no segments: MRConvForRetrieval takes two documents as `input_ids`, `input_ids_2`"
            require_all(segments == 0, f"`token_type_ids` has other numbers than 0, but {why}.")
        refuse_unknown({name: value for name, value in kwargs.items() if name not in _PACKING})
        if position_ids is None:
            refuse_packing(kwargs, "the sequences of a row are told apart by `position_ids`, which are missing")
        if self.delta_units is not None and (cache is not None or position_ids is not None):
            raise ValueError("A model with `input_delta_std` takes whole sequences: no cache, and one in each row.")
        if cache is not None:
            reason = "the cache of a row is that of one sequence, whose positions follow one another"
            refuse_packing({"position_ids": position_ids}, reason)
            self._check_cache(cache)
        given = [value for value in (input_ids, inputs_embeds, input_values) if value is not None and value.ndim > 1]
        valid = read_mask(attention_mask, given[0], cache) if given else None
        hidden = self.embed(input_ids, inputs_embeds, input_values, valid, observed_mask)
        packing = self.read_packing(hidden, valid, position_ids)
        longest = hidden.shape[1] if packing is None else packing.longest
        if cache is None and longest > self.config.longest_input:
            told = f"The input has {longest} positions; the model takes at most {self.config.longest_input}"
            advice = "Shorten it; causal models with an output for each position take more with a cache"
            raise ValueError(f"{told} (`max_position_embeddings`, its longest kernel). {advice}.")
        start, stop, valid = (None, None, valid) if packing else valid_range(valid, cache is not None)
        # Tokens, numbers and embeddings of one text agree there too.
        hidden = zero_padding(hidden, valid)
        for layer in self.layers:
            hidden = layer(hidden, start, stop, valid, cache, packing)
        if self.final_norm is not None:
            hidden = self.final_norm(hidden, valid)
        return BaseModelOutput(last_hidden_state=hidden)

    def _check_cache(self, cache: Any) -> None:
        """Check that a cache has the blocks of the model, all of which have seen as much, and that none is trained."""
        if not hasattr(cache, "convolve"):
            raise TypeError(f"`cache` is a {type(cache).__name__}; MRConv needs an `MRConvCache(model.config)`.")
        if len(cache.layers) != len(self.layers):
            told = f"This cache is for {len(cache.layers)} layers, the model has {len(self.layers)}"
            raise ValueError(f"{told}: make one with `MRConvCache(model.config)`.")
        seen = {layer.get_seq_length() for layer in cache.layers}
        if len(seen) > 1:
            told = f"The blocks of this cache have seen {min(seen)} to {max(seen)} positions: a call was interrupted"
            raise ValueError(f"{told}. Start a new cache, or `reset()` this one.")
        if self.training:
            told = "Got a cache in training mode: a streamed convolution has no batch statistics and no gradient"
            advice = "Call `model.eval()` to generate or stream, or leave `use_cache` and `cache` out to train"
            raise ValueError(f"{told}. {advice}.")

    def embed(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        input_values: Tensor | None = None,
        valid: Tensor | None = None,
        observed_mask: Tensor | None = None,
    ) -> Tensor:
        """Embed the one input that is given: what the first block gets, (B, L, D)."""
        config, size = self.config, f"`vocab_size` is {self.config.vocab_size}"
        given = [value for value in (input_ids, inputs_embeds, input_values) if value is not None]
        if len(given) != 1 or not given[0].numel():
            raise ValueError(
                f"Got {len(given)} inputs{' without a position' if len(given) == 1 else ''}; give exactly one of "
                "`input_ids`, `inputs_embeds` and `input_values`, of at least one position."
            )
        (values,), shape = given, tuple(given[0].shape)
        if observed_mask is not None and input_values is None:
            raise ValueError("`observed_mask` says which of `input_values` are missing; give these.")
        if inputs_embeds is not None:
            if len(shape) != 3 or shape[2] != config.hidden_size:
                expected = f"(batch_size, length, {config.hidden_size})"
                raise ValueError(f"`inputs_embeds` has shape {shape}; expected {expected}.")
            return inputs_embeds
        if input_ids is not None:
            if config.vocab_size is None or len(shape) != 2:
                told = f"`input_ids` has shape {shape} and {size}; expected tokens (batch_size, length)"
                raise ValueError(f"{told} for a model with a vocabulary. Without one, give `input_values`.")
        else:
            values = values[..., None] if values.ndim == 2 else values
            if config.vocab_size is not None or values.ndim != 3 or values.shape[2] != config.input_size:
                expected = f"(batch_size, length, {config.input_size}) for a model without vocabulary"
                raise ValueError(f"`input_values` has shape {shape} and {size}; expected {expected}.")
            if not values.is_floating_point():
                raise TypeError(f"`input_values` is {values.dtype}; give floats, or tokens as `input_ids`.")
            raw = precise(values)
            values = (values if self.units is None else self.units.normalize(values)).to(self.dtype)
            if observed_mask is not None:
                observed_mask = observed_mask[..., None] if observed_mask.ndim == 2 else observed_mask
                if observed_mask.shape != values.shape:
                    got = tuple(observed_mask.shape)
                    raise ValueError(f"`observed_mask` has shape {got}; expected {shape}, as `input_values`.")
                observed_mask = as_booleans("observed_mask", observed_mask)
                values = values.masked_fill(~observed_mask, 0)
            values = zero_padding(values, valid)
            if self.delta_units is not None:
                changes = delta_features(raw, valid, observed_mask) / config.rate_factor
                values = torch.cat([values, self.delta_units.normalize(changes).to(values.dtype)], -1)
        embedded: Tensor = self.embedding(values)
        return embedded


class MRConvForSequenceClassification(MRConvPreTrainedModel):
    """MRConv with a linear classifier on the mean of the last hidden state, for tokens or a continuous input."""

    def __init__(self, config: MRConvConfig):
        super().__init__(config)
        self.num_labels = config.num_labels or 0
        # The names of subclasses do not say it.
        self.loss_type = "ForSequenceClassification"
        self.model = MRConvModel(config)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.target_units = make_units(config.target_mean, config.target_std)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        input_values: Tensor | None = None,
        labels: Tensor | None = None,
        observed_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """
        Args:
            input_ids, attention_mask, inputs_embeds, input_values, observed_mask:
                As in [`MRConvModel`]. The mean is taken over the valid positions.
            labels (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
                Classes from 0; or float targets of shape `(batch_size, num_labels)`, by `config.problem_type`. With
                `config.target_std`, targets and logits are in the targets' units; the loss normalises both.

        Returns:
            [`~transformers.modeling_outputs.SequenceClassifierOutput`]: `logits` of shape `(batch_size, num_labels)`;
            `loss` when labels are given; `hidden_states` when asked for.

        Raises:
            ValueError, TypeError: As in [`MRConvModel`]; or rows are packed, or labels do not fit the problem type.

        Example:
            >>> import torch
            >>> from hf_ext import MRConvConfig, MRConvForSequenceClassification
            >>> config = MRConvConfig(hidden_size=16, num_hidden_layers=2, num_labels=10)
            >>> MRConvForSequenceClassification(config)(input_values=torch.rand(2, 100, 1)).logits.shape
            torch.Size([2, 10])
        """
        refuse_packing(kwargs)
        kwargs |= {"observed_mask": observed_mask}
        outputs = self.model(input_ids, attention_mask, inputs_embeds, input_values, **kwargs)
        valid = None if attention_mask is None else attention_mask != 0
        return self.answer(masked_mean(outputs.last_hidden_state, valid), labels, outputs)

    def answer(self, features: Tensor, labels: Tensor | None, outputs: BaseModelOutput) -> SequenceClassifierOutput:
        """Logits, in the targets' units, and loss of one vector a sequence, [B, D]."""
        logits, units = self.classifier(features), self.target_units
        loss: Tensor | None = None
        if labels is not None:
            if units is not None and self.config.problem_type is None:
                self.config.problem_type = "regression"
            labels = self.fit_labels(labels, logits)
            labels = labels if units is None else units.normalize(labels)
            loss = self.loss_function(labels, logits.float(), self.config)
        logits = logits if units is None else units.restore(logits)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class MRConvForAudioClassification(MRConvForSequenceClassification):
    """MRConv on raw waveforms, with a linear classifier on the mean of the last hidden state."""

    main_input_name = "input_values"
    input_modalities = ["audio"]

    @can_return_tuple
    def forward(
        self,
        input_values: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        observed_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """
        Args:
            input_values (`torch.Tensor` of shape `(batch_size, samples)`):
                Waveforms as the feature extractor returns them, at `config.sampling_rate`.
            attention_mask (`torch.Tensor` of shape `(batch_size, samples)`, *optional*):
                1 at valid samples, one run in each row.
            labels, observed_mask: As in [`MRConvForSequenceClassification`], whose outputs and errors these are too.

        Example:
            >>> import torch
            >>> from hf_ext import MRConvConfig, MRConvForAudioClassification
            >>> config = MRConvConfig(hidden_size=16, num_hidden_layers=2, num_labels=10, sampling_rate=8000)
            >>> MRConvForAudioClassification(config)(torch.rand(2, 800)).logits.shape
            torch.Size([2, 10])
        """
        kwargs |= {"attention_mask": attention_mask, "observed_mask": observed_mask}
        return super().forward(input_values=input_values, labels=labels, **kwargs)


class MRConvForImageClassification(MRConvForSequenceClassification):
    """[`MRConvForSequenceClassification`] on the outputs of image processors, with the same weights."""

    main_input_name = "pixel_values"
    input_modalities = ["image"]

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_values: Tensor | None = None,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        observed_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """
        Args:
            pixel_values (`torch.Tensor` of shape `(batch_size, input_size, height, width)`, *optional*):
                Images as the image processor returns them.
            input_values (`torch.Tensor` of shape `(batch_size, height * width, input_size)`, *optional*):
                The same as sequences, instead of `pixel_values`.
            labels, attention_mask, observed_mask:
                As in [`MRConvForSequenceClassification`], whose outputs these are too.

        Raises:
            ValueError, TypeError: As there; or both inputs are given, or the shape of `pixel_values` does not fit.

        Example:
            >>> import torch
            >>> from hf_ext import MRConvConfig, MRConvForImageClassification
            >>> config = MRConvConfig(input_size=3, hidden_size=16, num_hidden_layers=2, num_labels=10)
            >>> MRConvForImageClassification(config)(torch.rand(2, 3, 32, 32)).logits.shape
            torch.Size([2, 10])
        """
        if pixel_values is not None:
            if input_values is not None or pixel_values.ndim != 4 or pixel_values.shape[1] != self.config.input_size:
                raise ValueError(
                    f"`pixel_values` has shape {tuple(pixel_values.shape)}; expected images as "
                    f"(batch_size, {self.config.input_size}, height, width), and no `input_values` beside it."
                )
            input_values = pixel_values.flatten(2).transpose(1, 2)
        kwargs |= {"attention_mask": attention_mask, "observed_mask": observed_mask}
        return super().forward(input_values=input_values, labels=labels, **kwargs)


def _join(documents: list[Tensor], masks: list[Tensor | None]) -> tuple[Tensor, Tensor]:
    """Batches of embedded documents as one, padded on the right to one length, and their mask."""
    length, joined = max(document.shape[1] for document in documents), []
    for document, mask in zip(documents, masks, strict=True):
        valid = read_mask(mask, document)
        valid = torch.ones_like(document[..., 0], dtype=torch.bool) if valid is None else valid
        right = length - document.shape[1]
        joined.append((F.pad(document, (0, 0, 0, right)), F.pad(valid, (0, right))))
    texts, masks_of_all = zip(*joined, strict=True)
    return torch.cat(texts), torch.cat(masks_of_all)


class MRConvForRetrieval(MRConvForSequenceClassification):
    """MRConv that compares two documents: one encoder for both, a head on [a, b, a - b, a * b] of their means."""

    def __init__(self, config: MRConvConfig):
        super().__init__(config)
        self.comparison = nn.Linear(4 * config.hidden_size, config.hidden_size)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        input_ids_2: torch.LongTensor | None = None,
        attention_mask_2: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """
        Args:
            input_ids, input_ids_2 (`torch.LongTensor` of shape `(batch_size, length)`):
                First and second document of each pair, of lengths of their own.
            attention_mask, attention_mask_2 (`torch.Tensor` of the shapes of the documents, *optional*):
                1 at valid positions, one run in each row.
            labels: As in [`MRConvForSequenceClassification`], whose outputs these are too; `hidden_states` are those
                of both documents, one after the other.

        Raises:
            ValueError, TypeError: As there; or there are not as many first as second documents.

        Example:
            >>> import torch
            >>> from hf_ext import MRConvConfig, MRConvForRetrieval
            >>> model = MRConvForRetrieval(MRConvConfig(vocab_size=100, hidden_size=16, num_hidden_layers=2))
            >>> model(torch.randint(100, (4, 30)), input_ids_2=torch.randint(100, (4, 50))).logits.shape
            torch.Size([4, 2])
        """
        refuse_packing(kwargs)
        first, second = self.model.embed(input_ids), self.model.embed(input_ids_2)
        if len(first) != len(second):
            raise ValueError(f"There are {len(first)} first and {len(second)} second documents; give as many of each.")
        # One pass for both, so batch statistics include all documents and are updated once.
        documents, mask = _join([first, second], [attention_mask, attention_mask_2])
        outputs = self.model(inputs_embeds=documents, attention_mask=mask, **kwargs)
        a, b = masked_mean(outputs.last_hidden_state, mask).chunk(2)
        return self.answer(F.relu(self.comparison(torch.cat([a, b, a - b, a * b], dim=-1))), labels, outputs)
