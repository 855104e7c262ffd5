"""Continuation of a text by a language model, written as it comes."""

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TextStreamer, set_seed

from hf_ext.training.models import adapter_base

from ..errors import UsageError
from .classifying import load_head, load_reader, require_unicode


class Writer(TextStreamer):
    """Hands finished words to a function."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]):
        super().__init__(tokenizer, skip_special_tokens=True)
        self.write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.write(text)


def load_language_model(source: str, device: str | None = None) -> tuple[Any, Any]:
    """A causal language model, of a peft adapter with its base, and its tokenizer."""
    base = adapter_base(source) or source
    head = (load_reader(AutoConfig, base).architectures or ["no class named"])[0]
    if not head.endswith(("ForCausalLM", "LMHeadModel")):
        raise UsageError(f"{source} is not a causal language model ({head}), which generate needs.")
    return load_head(AutoModelForCausalLM, source, device), load_reader(AutoTokenizer, base)


def continue_text(
    model: Any,
    tokenizer: Any,
    text: str,
    write: Callable[[str], None],
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 1.0,
    seed: int = 0,
) -> None:
    """
    Writes a text and what a model puts after it, word by word. A temperature of 0 takes the likeliest tokens; others
    are drawn from the likeliest that have the share `top_p` together.
    """
    require_unicode(text)
    if not 0 <= temperature < math.inf:
        raise UsageError(f"temperature is {temperature}; give a number such as 0.8, or 0 for the likeliest tokens.")
    if not 0 < top_p <= 1:
        raise UsageError(f"top_p is {top_p}; give a share above 0 and at most 1, which draws from all tokens.")
    tokens = tokenizer(text, return_tensors="pt").input_ids
    if tokens.shape[1] and tokens[0, -1] == tokenizer.eos_token_id:
        # A text that has ended is not continued.
        tokens = tokens[:, :-1]
    if not (given := tokens.shape[1]):
        raise UsageError("the text has no tokens: give at least one character.")
    # An MRConv streams: its texts have any length.
    longest = None if model.config.model_type == "mrconv" else getattr(model.config, "max_position_embeddings", None)
    if longest and given + max_new_tokens > longest:
        less = f"give --max-new-tokens {longest - given} or less" if longest > given else "give a shorter text"
        asked = f"{given} tokens, and {max_new_tokens} more are requested"
        raise UsageError(f"the text has {asked}; the model takes {longest}: {less}.")
    set_seed(seed)
    # Below this, scores overflow, and the likeliest token is drawn anyway.
    chosen: dict[str, Any] = {"do_sample": temperature > 1e-30}
    if chosen["do_sample"]:
        # From all tokens: left out, transformers would take the 50 likeliest.
        chosen |= {"temperature": temperature, "top_p": top_p, "top_k": 0}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    chosen |= {"max_new_tokens": max_new_tokens, "pad_token_id": pad, "streamer": Writer(tokenizer, write)}
    tokens = tokens.to(model.device)
    model.generate(tokens, attention_mask=torch.ones_like(tokens), **chosen)
