"""Loading of a restorer by its name: a folder, a model of a Hub, an adapter, or one task of a merge."""

import os
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.utils import logging

from hf_ext.distributed import require_device
from hf_ext.emr.weights import task_checkpoint
from hf_ext.errors import DataError
from hf_ext.hub.checkpoints import split_revision
from hf_ext.semanir import SemanIRForImageRestoration

logger = logging.get_logger(__name__)


def load_model(
    source: str, task: str | None = None, device: str | None = None, dtype: torch.dtype | str | None = None
) -> SemanIRForImageRestoration:
    """The model of a folder or org/name[@revision], an adapter with its base, or one task of a merge."""
    place = require_device(device)
    with task_checkpoint(source, task) as checkpoint:
        base = None
        if not os.path.isdir(checkpoint) or os.path.exists(os.path.join(checkpoint, "adapter_config.json")):
            # peft is imported for adapters alone.
            from hf_ext.training.models import adapter_base, load_adapter

            base = adapter_base(checkpoint)
        name, revision = split_revision(base or checkpoint)
        kind = PreTrainedConfig.get_config_dict(name, revision=revision)[0].get("model_type")
        if kind != "semanir":
            raise DataError(f"{checkpoint} contains a {kind} model, not SemanIR.")
        options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        model: Any = SemanIRForImageRestoration.from_pretrained(name, revision=revision, **options)
        if base is not None:
            model = load_adapter(model, checkpoint).merge_and_unload()
        restorer: SemanIRForImageRestoration = model.eval().to(place)
        if restorer.device.type == "cpu" and restorer.dtype == torch.float16:
            told = "float16 takes four times as long as float32 on a CPU"
            logger.warning(f"{told}; use bfloat16, which is about as fast as float32 and as small as float16.")
        return restorer
