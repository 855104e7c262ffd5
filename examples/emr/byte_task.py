"""GPT-2 on bytes in the shared training loop: the data of our language models with another model."""

from dataclasses import dataclass
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from hf_ext.tasks.texts import LanguageModelTask


@strict
@dataclass
class ByteTask(LanguageModelTask):
    """Language modelling of bytes with `GPT2LMHeadModel`, from scratch or from the model that `init_from` names."""

    def build_model(self, config: dict[str, Any], init_from: str | None) -> PreTrainedModel:
        """The model of the section `model`, or a checkpoint's."""
        if init_from is not None:
            return GPT2LMHeadModel.from_pretrained(init_from)
        end = self.tokenizer.eos_token_id
        sizes = {"vocab_size": len(self.tokenizer), "n_positions": self.max_length}
        return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=end, eos_token_id=end, **config))
