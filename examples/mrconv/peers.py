"""Other models on the inputs of MRConv's tasks: S4D (arXiv 2206.11893) and a Transformer encoder (ModernBERT).

accelerate launch examples/mrconv/peers.py s4d examples/mrconv/speech_commands.yaml [--field value]
The section `model` then holds fields of [`PeerConfig`].
"""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import (
    ConvNextConfig,
    ConvNextForImageClassification,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput

from hf_ext.training import Task, TrainingArguments, build_task, main


@strict
class PeerConfig(PreTrainedConfig):
    """
    Sizes of a peer; the first block of fields is what the tasks decide.

    Args:
        vocab_size (`int`, *optional*): Number of tokens; none for a continuous input of `input_size` channels.
        max_position_embeddings (`int`): Longest input. Neither peer has parameters for positions.
        hidden_size, num_hidden_layers (`int`): Width and depth.
        dropout (`float`): After S4D's activation, and in the Transformer's MLP.
        intermediate_size (`int`): Width of the Transformer's gated MLP.
        state_size (`int`): Of S4D: real numbers of a channel's state, half of it are kept as complex pairs.
        bidirectional (`bool`): Whether S4D has a second kernel that looks ahead.
    """

    model_type = "hf_ext_peer"

    vocab_size: int | None = None
    input_size: int = 1
    max_position_embeddings: int = 1024
    sampling_rate: int | None = None
    pad_token_id: int | None = None
    eos_token_id: int | None = None

    hidden_size: int = 64
    num_hidden_layers: int = 4
    dropout: float = 0.0
    intermediate_size: int = 128
    state_size: int = 64
    bidirectional: bool = False


class S4DKernel(nn.Module):
    """
    The convolution kernel of a diagonal state space, one for each channel.

    x' = A x + 1 u, y = 2 Re(C x) with A = diag(-exp(log_decay) + i frequency) begins as S4D-Lin: -1/2 + i pi n.
    Zero-order hold with the step dt makes k[t] = 2 Re(sum_n C_n (exp(dt A_n) - 1) / A_n * exp(dt A_n)^t), a product
    with a Vandermonde matrix.

    Args:
        channels (`int`): Channels of the sequence.
        kernels (`int`): Kernels for each of them, which share A and dt.
        pairs (`int`): Complex states; their conjugates are the factor 2 Re.
    """

    def __init__(self, channels: int, kernels: int, pairs: int):
        super().__init__()
        self.log_dt = nn.Parameter(torch.empty(channels).uniform_(math.log(0.001), math.log(0.1)))
        self.log_decay = nn.Parameter(torch.full((channels, pairs), math.log(0.5)))
        self.frequency = nn.Parameter(
            math.pi * torch.arange(pairs, dtype=torch.get_default_dtype()).repeat(channels, 1)
        )
        # Real and imaginary part, of variance 1 together.
        self.output = nn.Parameter(torch.randn(kernels, channels, pairs, 2) / math.sqrt(2))

    def forward(self, length: int) -> torch.Tensor:
        """Kernels `[kernels, channels, length]`."""
        poles = torch.complex(-self.log_decay.exp(), self.frequency)
        steps = poles * self.log_dt.exp()[:, None]
        weights = torch.view_as_complex(self.output) * torch.expm1(steps) / poles
        # exp(s (a B + b)) = exp(s a B) exp(s b): with t = a B + b, a row and a column of about sqrt(length) powers
        # make the whole Vandermonde matrix, and their product sums over the states without ever holding it. The real
        # part of a complex product is one real product of twice the inner length. A slow recurrence in fp64 agrees:
        # tests/mrconv/test_study_mrconv.py.
        size = 2 ** math.ceil(math.log2(length) / 2)
        index = torch.arange(size, device=steps.device)
        rows = weights[:, :, None] * torch.exp(steps[:, None] * (size * index[: -(-length // size), None]))
        columns = torch.exp(steps[..., None] * index)
        product = torch.cat([rows.real, -rows.imag], -1) @ torch.cat([columns.real, columns.imag], -2)
        return 2 * product.flatten(-2)[..., :length]


class S4DBlock(nn.Module):
    """x + GLU(W dropout(GELU(k * LN(x) + D LN(x)))), the convolution by FFT."""

    def __init__(self, config: PeerConfig):
        super().__init__()
        width = config.hidden_size
        self.norm = nn.LayerNorm(width)
        self.kernel = S4DKernel(width, 2 if config.bidirectional else 1, config.state_size // 2)
        self.skip = nn.Parameter(torch.randn(width))
        self.dropout = nn.Dropout(config.dropout)
        self.projection = nn.Linear(width, 2 * width)

    def convolve(self, inputs: torch.Tensor) -> torch.Tensor:
        """`inputs [batch, channels, length]` with the kernels, the second of which begins one position ahead."""
        length = inputs.shape[-1]
        kernels = self.kernel(length)
        buffer = nn.functional.pad(kernels[0], (0, length))
        if len(kernels) == 2:
            buffer = buffer + nn.functional.pad(kernels[1].flip(-1), (length, 0))
        # In the precision of the kernel, which is 32 bits where the rest has 16.
        spectrum = torch.fft.rfft(inputs.to(buffer.dtype), n=2 * length) * torch.fft.rfft(buffer)
        mixed = torch.fft.irfft(spectrum, n=2 * length)[..., :length].to(inputs.dtype)
        return mixed + self.skip[:, None] * inputs

    def forward(self, hidden: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """`hidden [batch, length, channels]`; what is not valid is 0 for the convolution."""
        mixed = self.convolve((self.norm(hidden) * valid).transpose(1, 2)).transpose(1, 2)
        mixed = self.projection(self.dropout(nn.functional.gelu(mixed)))
        return hidden + nn.functional.glu(mixed, dim=-1)


class S4DEncoder(nn.Module):
    """Blocks of S4D and a last norm."""

    def __init__(self, config: PeerConfig):
        super().__init__()
        self.blocks = nn.ModuleList(S4DBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)

    def forward(self, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor) -> BaseModelOutput:
        """Hidden states `[batch, length, channels]`."""
        hidden, valid = inputs_embeds, attention_mask[..., None].to(inputs_embeds.dtype)
        for block in self.blocks:
            hidden = block(hidden, valid)
        return BaseModelOutput(last_hidden_state=self.norm(hidden))


class PeerForSequenceClassification(PreTrainedModel):
    """Embedding, encoder and a linear classifier on the mean over the valid positions, as MRConv's."""

    config_class = PeerConfig
    main_input_name = "input_values"
    # Encoders of both kinds bring their own initial values, which they set when they are built.
    _supports_sdpa = True
    # Without an embedding of its own.
    encoder_class: Callable[[PeerConfig], nn.Module]

    def __init__(self, config: PeerConfig):
        super().__init__(config)
        if config.vocab_size is None:
            self.embedding: nn.Module = nn.Linear(config.input_size, config.hidden_size)
        else:
            self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.encoder = self.encoder_class(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Everything has its initial value already."""

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        observed_mask: torch.Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """Tokens or values `[batch, length(, channels)]` to logits; where one is missing, it is 0."""
        inputs = input_ids if input_ids is not None else input_values
        if input_ids is None and inputs.ndim == 2:
            inputs = inputs[..., None]
        if attention_mask is None:
            attention_mask = torch.ones(inputs.shape[:2], dtype=torch.int64, device=inputs.device)
        hidden = self.encoder(inputs_embeds=self.embedding(inputs), attention_mask=attention_mask).last_hidden_state
        valid = attention_mask[..., None].to(hidden.dtype)
        logits = self.classifier((hidden * valid).sum(1) / valid.sum(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class S4DForSequenceClassification(PeerForSequenceClassification):
    """S4D. As published, dt, decay and frequency learn at a small rate of their own: [`use_peer`]."""

    encoder_class = S4DEncoder


class TransformerEncoder(ModernBertModel):
    """ModernBERT's layers (rotary positions, gated MLP), every one attending to all positions."""

    def __init__(self, config: PeerConfig):
        same = ("hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
        own = ModernBertConfig(
            vocab_size=1,
            num_attention_heads=2,
            mlp_dropout=config.dropout,
            # Every layer global: the peer is full attention.
            layer_types=["full_attention"] * config.num_hidden_layers,
            **{name: getattr(config, name) for name in same},
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0),
            attn_implementation="sdpa",
        )
        super().__init__(own)
        # The only use of it would be tokens, which have their embedding outside.
        self.embeddings.tok_embeddings.requires_grad_(False)


class TransformerForSequenceClassification(PeerForSequenceClassification):
    encoder_class = TransformerEncoder


PEERS = {
    "s4d": (PeerConfig, S4DForSequenceClassification),
    "transformer": (PeerConfig, TransformerForSequenceClassification),
    "convnext": (ConvNextConfig, ConvNextForImageClassification),
}


def use_peer(task: Any, name: str) -> None:
    """Makes a task of MRConv train a peer, on the same inputs; dt, decay and frequency of S4D at a rate of 1e-3."""
    task.config_class, task.model_class = PEERS[name]
    make_groups = task.parameter_groups

    # Vectors and C are not decayed either, as the tasks of MRConv say.
    def split_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        slow = [item for key, item in model.named_parameters() if key.endswith(("log_dt", "log_decay", "frequency"))]
        rest = [
            {**group, "params": [item for item in group["params"] if all(item is not other for other in slow)]}
            for group in make_groups(model, weight_decay)
        ]
        return [*(group for group in rest if group["params"]), {"params": slow, "lr": 1e-3, "weight_decay": 0.0}]

    if name == "s4d":
        task.parameter_groups = split_groups


def trained_parameters(model: nn.Module) -> int:
    """The number of values that training changes."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def make_task(arguments: TrainingArguments, peer: str | None) -> Task:
    """The task of a run, of MRConv or of the peer."""
    if peer is None:
        return build_task(arguments)
    # The section `model` is the peer's.
    task = build_task(replace(arguments, model={}))
    use_peer(task, peer)
    return task


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in PEERS:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[2:], partial(make_task, peer=sys.argv[1])))
