"""Captions for the training of a text-to-image Disentangled DiT, through a frozen transformers encoder."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForTextEncoding, AutoTokenizer, PreTrainedTokenizerBase

from hf_ext.pipelines.disentangled_dit.pipeline import DisentangledDiTPipeline
from hf_ext.training.models import pipeline_index, split_revision


class Captions:
    """A tokenizer and a frozen text encoder, whose padding the pipeline's `pad_text` fills."""

    def __init__(self, source: str, max_length: int, padding: str, noise: float):
        name, revision = split_revision(source)
        folders = ("text_encoder", "tokenizer") if pipeline_index(source) else ("", "")
        # A PreTrainedModel; mypy does not see that its `to`, which transformers wraps, is a method.
        self.encoder: Any = AutoModelForTextEncoding.from_pretrained(name, revision=revision, subfolder=folders[0])
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name, revision=revision, subfolder=folders[1]
        )
        self.encoder.requires_grad_(False).eval()
        self.max_length = max_length
        self.padding = padding
        self.noise = noise

    def tokens(self, caption: str) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask` [max_length] of a caption, padded on the right, cut where it is longer."""
        found = self.tokenizer(
            caption,
            max_length=self.max_length,
            padding="max_length",
            truncation=True,
            padding_side="right",
            return_tensors="pt",
        )
        return {name: found[name][0] for name in ("input_ids", "attention_mask")}

    @cached_property
    def null_tokens(self) -> dict[str, Tensor]:
        """The tokens of no text, which stand for a caption that was dropped."""
        return self.tokens("")

    def drop(self, batch: dict[str, Any], dropped: Tensor) -> dict[str, Tensor]:
        """Replaces the captions of a batch where `dropped` [B] says so."""
        null = {name: value.to(dropped.device) for name, value in self.null_tokens.items()}
        return {name: torch.where(dropped[:, None], null[name], batch[name]) for name in null}

    @torch.no_grad()
    def encode(
        self, tokens: dict[str, Tensor], generator: torch.Generator | list[torch.Generator] | None = None
    ) -> Tensor:
        """What the network attends to, [B, max_length, width]; fresh noise in the padding without a generator."""
        mask = tokens["attention_mask"]
        if self.encoder.device != mask.device:
            self.encoder.to(mask.device)
        states = self.encoder(input_ids=tokens["input_ids"], attention_mask=mask).last_hidden_state
        return DisentangledDiTPipeline.pad_text(states, mask.sum(1), self.padding, self.noise, generator)
