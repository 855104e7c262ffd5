"""What a training run leaves of a Disentangled DiT: a pipeline that loads everywhere."""

from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor

from hf_ext.pipelines.disentangled_dit.pipeline import DisentangledDiTPipeline


def save_pipeline(
    pipeline: DisentangledDiTPipeline, model: torch.nn.Module, state_dict: dict[str, Tensor], folder: Path
) -> None:
    """
    Writes a pipeline with given weights; of an adapter only its weights, for peft and for `load_lora_weights`.

    Args:
        pipeline ([`DisentangledDiTPipeline`]): The other components.
        model (`torch.nn.Module`): The network, or the network with a peft adapter.
        state_dict (`dict[str, torch.Tensor]`): Its weights.
        folder (`Path`): Where to.
    """
    if isinstance(model, PeftModel):
        # There is no vocabulary that may have grown.
        model.save_pretrained(str(folder), state_dict=state_dict, save_embedding_layers=False)
        layers = get_peft_model_state_dict(model, state_dict=state_dict, save_embedding_layers=False)
        unwrapped = {name.removeprefix("base_model.model."): value for name, value in layers.items()}
        pipeline.save_lora_weights(folder, transformer_lora_layers=unwrapped)
        return
    components: dict[str, Any] = dict(pipeline.components)
    kind: Any = type(model)
    with torch.device("meta"):
        # No weights of its own: those of the state, which may have been gathered from several processes.
        copy: ModelMixin = kind.from_config(model.config)
    copy.load_state_dict(state_dict, assign=True)
    settings = {name: pipeline.config[name] for name in _SETTINGS}
    type(pipeline)(**{**components, "transformer": copy}, **settings).save_pretrained(folder)


_SETTINGS = ("id2label", "text_padding", "text_padding_noise", "max_text_length")
