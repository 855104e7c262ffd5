"""Multiple choice by log-likelihood, as T0 is scored: the answer that a language model finds likeliest."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from huggingface_hub.dataclasses import strict
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.modeling_outputs import BaseModelOutput

from hf_ext.hub.checkpoints import split_revision

from .classification import LabelledTask, load_reader, load_whole

# Templates may be anybody's: no attributes of Python, no silent blanks.
_JINJA = SandboxedEnvironment(undefined=StrictUndefined)


def render(template: str, example: dict[str, Any]) -> str:
    """A template with an example's columns filled in."""
    try:
        return _JINJA.from_string(template).render(example).strip()
    except TemplateError as error:
        raise ValueError(
            f"the template {template!r:.200} cannot be filled in: {error.message}. Columns: {sorted(example)}."
        ) from error


@strict
@dataclass
class MultipleChoice(LabelledTask):
    """
    Prompts with answers to choose from, with `AutoModelForSeq2SeqLM` or `AutoModelForCausalLM`.

    Args:
        prompts (`list[str]`):
            Templates (Jinja) of the question, over the columns of the data: `"{{premise}} So is {{hypothesis}}?"`.
            Each is scored by itself, and the median of the accuracies is the result.
        choices (`list[str]`): Templates of the answers, in the order of the labels.
        max_length (`int`, defaults to 512): Tokens kept of a prompt: its beginning, or its end for a causal model.
        tokenizer (`str`, *optional*): Folder or Hub id, where the checkpoint has none.
    """

    prompts: list[str] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)
    max_length: int = 512
    tokenizer: str | None = None

    pipeline_tag: ClassVar[str] = "text-generation"
    metric_names: ClassVar[dict[str, str]] = {
        "accuracy": "accuracy by log-likelihood, median of the prompts",
        "lowest": "lowest accuracy of a prompt",
        "highest": "highest accuracy of a prompt",
    }
    eval_batch_size: ClassVar[int] = 16

    def validate_templates(self) -> None:
        if not self.prompts or len(self.choices) < 2:
            raise ValueError("prompts must hold a template or more, and choices two or more.")
        for template in (*self.prompts, *self.choices):
            try:
                _JINJA.from_string(template)
            except TemplateError as error:
                raise ValueError(f"{template!r:.200} is no Jinja template: {error.message}.") from error

    def build_model(self, config: dict[str, Any], init_from: str | None) -> nn.Module:
        """The language model, and its tokenizer."""
        assert init_from is not None
        name, revision = split_revision(init_from)
        pairs = AutoConfig.from_pretrained(name, revision=revision).is_encoder_decoder
        self.reader = load_reader(AutoTokenizer, self.tokenizer, init_from)
        return load_whole(AutoModelForSeq2SeqLM if pairs else AutoModelForCausalLM, init_from)

    def evaluate_batch(
        self, model: nn.Module, examples: list[dict[str, Any]], indices: list[int]
    ) -> list[dict[str, float]]:
        """Of each example and prompt, whether the right answer is the likeliest."""
        truths = torch.tensor([self.label(example, len(self.choices)) for example in examples])
        answers = [[render(choice, example) for choice in self.choices] for example in examples]
        right = []
        for prompt in self.prompts:
            found = self.log_likelihoods(model, [render(prompt, example) for example in examples], answers)
            right.append((found.argmax(-1) == truths).tolist())
        return [{str(number): float(one) for number, one in enumerate(row)} for row in zip(*right, strict=True)]

    def summarize(self, rows: list[dict[str, float]]) -> dict[str, float]:
        """The median over prompts of the share of right answers."""
        shares = list(super().summarize(rows).values())
        return {"accuracy": float(np.median(shares)), "lowest": min(shares), "highest": max(shares)}

    def log_likelihoods(self, model: Any, prompts: list[str], answers: list[list[str]]) -> torch.Tensor:
        """
        Log-probability of every answer after its prompt, summed over its tokens.

        Args:
            model (`torch.nn.Module`): The language model, or an adapter on it.
            prompts (`list[str]`): Questions.
            answers (`list[list[str]]`): As many answers to each.

        Returns:
            `torch.Tensor` of shape `[prompts, answers]`, on the CPU.
        """
        flat = [answer for row in answers for answer in row]
        score = self._score_pairs if model.config.is_encoder_decoder else self._score_continuations
        return score(model, prompts, flat, len(answers[0])).reshape(len(prompts), -1).cpu()

    def _score_pairs(self, model: Any, prompts: list[str], answers: list[str], count: int) -> torch.Tensor:
        device = next(model.parameters()).device
        options = {"padding": True, "truncation": True, "return_tensors": "pt"}
        inputs = self.reader(prompts, max_length=self.max_length, **options).to(device)
        labels = self.reader(text_target=answers, **options).to(device)
        targets = labels["input_ids"].masked_fill(labels["attention_mask"] == 0, -100)
        # The encoder reads each prompt once, whatever the number of answers.
        states = model.get_encoder()(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])[0]
        logits = model(
            encoder_outputs=BaseModelOutput(states.repeat_interleave(count, 0)),
            attention_mask=inputs["attention_mask"].repeat_interleave(count, 0),
            labels=targets,
        ).logits
        return _sum_log_probabilities(logits, targets)

    def _score_continuations(self, model: Any, prompts: list[str], answers: list[str], count: int) -> torch.Tensor:
        device = next(model.parameters()).device
        rows, labels = [], []
        for place, answer in enumerate(answers):
            prompt = self.reader(prompts[place // count], verbose=False)["input_ids"][-self.max_length :]
            # A space stands between words, and belongs to the word after it.
            tokens = self.reader(f" {answer}", add_special_tokens=False)["input_ids"]
            rows.append(torch.tensor(prompt + tokens))
            labels.append(torch.tensor([-100] * len(prompt) + tokens))
        ids = pad_sequence(rows, batch_first=True).to(device)
        targets = pad_sequence(labels, batch_first=True, padding_value=-100).to(device)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(device)
        logits = model(input_ids=ids, attention_mask=mask).logits
        return _sum_log_probabilities(logits[:, :-1], targets[:, 1:])


def _sum_log_probabilities(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the targets, summed over each row; -100 counts nothing."""
    found = logits.float().log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return (found * (targets != -100)).sum(-1)
