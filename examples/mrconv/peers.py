"""Other models on the inputs of MRConv's tasks, from transformers: a Transformer encoder (ModernBERT) and Mamba 2.

accelerate launch examples/mrconv/peers.py transformer examples/mrconv/fsdd.yaml [--field value]
The section `model` then holds fields of [`PeerConfig`].
"""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import (
    Mamba2Config,
    Mamba2Model,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_ext.training import Task, TrainingArguments, build_task, main


@strict
class PeerConfig(PreTrainedConfig):
    """
    Sizes of a peer; the first block of fields is what the tasks decide.

    Args:
        vocab_size (`int`, *optional*): Number of tokens; none for a continuous input of `input_size` channels.
        max_position_embeddings (`int`): Longest input. Neither peer has parameters for positions.
        hidden_size, num_hidden_layers (`int`): Width and depth.
        intermediate_size (`int`): Width of the Transformer's gated MLP.
        state_size (`int`): Of Mamba 2, which is twice as wide inside its layers.
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
    intermediate_size: int = 128
    state_size: int = 16


class PeerForSequenceClassification(PreTrainedModel):
    """Embedding, encoder and a linear classifier on the mean over the valid positions, as MRConv's."""

    config_class = PeerConfig
    main_input_name = "input_values"
    # Encoders of both kinds bring their own initial values, which they set when they are built.
    _supports_sdpa = True

    def __init__(self, config: PeerConfig):
        super().__init__(config)
        if config.vocab_size is None:
            self.embedding: nn.Module = nn.Linear(config.input_size, config.hidden_size)
        else:
            self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.encoder = self.make_encoder(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def make_encoder(self, config: PeerConfig) -> PreTrainedModel:
        """The encoder, without an embedding of its own."""
        raise NotImplementedError

    def _init_weights(self, module: nn.Module) -> None:
        """Everything has its initial value already."""

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """Tokens or values `[batch, length(, channels)]` to logits."""
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


class TransformerForSequenceClassification(PeerForSequenceClassification):
    """ModernBERT's layers (rotary positions, gated MLP), every one attending to all positions."""

    def make_encoder(self, config: PeerConfig) -> PreTrainedModel:
        encoder = ModernBertModel(
            ModernBertConfig(
                vocab_size=1,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_hidden_layers,
                num_attention_heads=4,
                max_position_embeddings=config.max_position_embeddings,
                # Every layer global: the peer is full attention.
                layer_types=["full_attention"] * config.num_hidden_layers,
                pad_token_id=0,
                attn_implementation="sdpa",
            )
        )
        # The only use of it would be tokens, which have their embedding outside.
        encoder.embeddings.tok_embeddings.requires_grad_(False)
        return encoder


class Mamba2ForSequenceClassification(PeerForSequenceClassification):
    """Mamba 2; without its CUDA kernels transformers runs a slow path in plain torch, and says so."""

    def make_encoder(self, config: PeerConfig) -> PreTrainedModel:
        encoder = Mamba2Model(
            Mamba2Config(
                vocab_size=1,
                hidden_size=config.hidden_size,
                num_hidden_layers=config.num_hidden_layers,
                state_size=config.state_size,
                expand=2,
                head_dim=16,
                num_heads=config.hidden_size // 8,
                n_groups=1,
                # The fastest of 16 to 128 for the slow path on one core.
                chunk_size=32,
                use_cache=False,
            )
        )
        encoder.embeddings.requires_grad_(False)
        return encoder


PEERS = {"transformer": TransformerForSequenceClassification, "mamba2": Mamba2ForSequenceClassification}


def use_peer(task: Any, name: str) -> None:
    """Makes a task of MRConv train a peer, on the same inputs."""
    task.config_class, task.model_class = PeerConfig, PEERS[name]


def trained_parameters(model: nn.Module) -> int:
    """How many values training changes."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def candidates(name: str) -> Iterator[dict[str, int]]:
    """Sizes to choose from, the depth being given."""
    for width in range(16, 257, 8):
        if name == "transformer":
            yield from ({"hidden_size": width, "intermediate_size": inner} for inner in range(width, 3 * width + 1, 8))
        else:
            yield from ({"hidden_size": width, "state_size": state} for state in range(8, 33, 4))


def equal_sizes(task: Any, name: str, parameters: int, depth: int) -> dict[str, int]:
    """
    The peer's sizes with the number of parameters nearest to a given one.

    Args:
        task ([`MRConvTask`]): After [`use_peer`].
        name (`str`): `"transformer"` or `"mamba2"`.
        parameters (`int`): Of the model to compare with.
        depth (`int`): Layers.

    Returns:
        `dict[str, int]`: The section `model`.

    Raises:
        ValueError: If no size comes within 10 %.
    """
    best: tuple[float, dict[str, int]] = (float("inf"), {})
    fields = {**task.model_fields(), **task.label_fields()}
    for sizes in candidates(name):
        section = {**sizes, "num_hidden_layers": depth}
        with torch.device("meta"):
            count = trained_parameters(PEERS[name](PeerConfig(**fields, **section)))
        best = min(best, (abs(count / parameters - 1), section), key=lambda item: item[0])
        if count > 2 * parameters:
            break
    if best[0] > 0.1:
        raise ValueError(f"no {name} of depth {depth} has {parameters} parameters within 10 %; nearest: {best[1]}.")
    return best[1]


def equal_kernel_size(task: Any, section: dict[str, Any], parameters: int) -> int:
    """
    The even l0 of an MRConv with the number of parameters nearest to a given one.

    Args:
        task ([`MRConvTask`]): The task.
        section (`dict[str, Any]`): The section `model`; its own `kernel_size` wins where it is within 10 %.
        parameters (`int`): Of the model to compare with.

    Returns:
        `int`: The length of the shortest kernel.

    Raises:
        ValueError: If none comes within 10 %.
    """
    best = (float("inf"), 0)
    for size in (section["kernel_size"], *range(2, 65, 2)):
        count = trained_parameters(task.build_model({**section, "kernel_size": size}, None))
        best = min(best, (abs(count / parameters - 1), size))
        if size == section["kernel_size"] and best[0] <= 0.1:
            break
    if best[0] > 0.1:
        raise ValueError(f"no kernel size gives {parameters} parameters within 10 % with {section}.")
    return best[1]


def make_task(arguments: TrainingArguments, peer: str | None) -> Task:
    """The task of a run, of MRConv or of the peer."""
    task = build_task(arguments)
    if peer is not None:
        use_peer(task, peer)
    return task


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in PEERS:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[2:], partial(make_task, peer=sys.argv[1])))
