"""SemanIR's network with the blocks of Swin2SR from transformers in place of its own, trained by the same task.

accelerate launch examples/semanir/peers.py swin2sr examples/semanir/study.yaml [--field value]
Extractor, resampling, skips and head stay; every stage becomes a stage of Swin2SR of the same width, depth, heads and
window: dense window attention, after which transformers adds a convolution of 1 x 1.
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import Swin2SRConfig
from transformers.models.swin2sr.modeling_swin2sr import Swin2SRStage

from hf_ext.semanir import SemanIRForImageRestoration
from hf_ext.semanir.modeling_semanir import SemanIRStage
from hf_ext.tasks.restoration import SemanIRTask
from hf_ext.training import TrainingArguments, build_task, main
from hf_ext.training.arguments import build
from hf_ext.training.models import initialize_from

# Stages are built for an image larger than any window, so that every second layer is shifted.
GRID = 1024


class Swin2SRBlocks(nn.Module):
    """A stage of Swin2SR on feature maps."""

    def __init__(self, dim: int, depth: int, heads: int, window_size: int, mlp_ratio: float):
        super().__init__()
        config = Swin2SRConfig(
            image_size=GRID,
            patch_size=1,
            embed_dim=dim,
            depths=[depth],
            num_heads=[heads],
            window_size=window_size,
            mlp_ratio=mlp_ratio,
            drop_path_rate=0.0,
        )
        self.stage = Swin2SRStage(config, dim, (GRID, GRID), depth, heads, drop_path=[0.0] * depth)

    def forward(self, features: torch.Tensor, top_k: int, memory: int | None = None) -> torch.Tensor:
        """[batch, channels, height, width] to the same; there is no dictionary."""
        tokens = self.stage(features.flatten(2).transpose(1, 2), features.shape[-2:])[0]
        return tokens.transpose(1, 2).unflatten(2, features.shape[-2:]).contiguous(memory_format=torch.channels_last)


def use_swin2sr(model: SemanIRForImageRestoration) -> None:
    """Puts a stage of Swin2SR with fresh weights in the place of each stage."""
    config = model.config
    for name, module in list(model.named_modules()):
        if isinstance(module, SemanIRStage):
            dim, heads = module.convolution.in_channels, module.layers[0].attention.num_heads
            blocks = Swin2SRBlocks(dim, len(module.layers), heads, config.window_size, config.mlp_ratio)
            # Linear layers, convolutions and norms start as SemanIR's; Swin2SR sets its temperatures itself.
            blocks.apply(model._init_weights)
            model.set_submodule(name, blocks)


@strict
@dataclass
class Swin2SRTask(SemanIRTask):
    """SemanIR's task with the peer."""

    def build_model(self, config: dict[str, Any], init_from: str | None) -> SemanIRForImageRestoration:
        """The network of the `model` section with other blocks; weights of such a network, where given."""
        model = super().build_model(config, None)
        use_swin2sr(model)
        if init_from:
            initialize_from(model, init_from)
        return model


def make_task(arguments: TrainingArguments, peer: str | None) -> SemanIRTask:
    """The task of a run, of SemanIR or of the peer."""
    if peer is None:
        return build_task(arguments)
    return build(Swin2SRTask, arguments.task, "task")


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] != "swin2sr":
        sys.exit(__doc__)
    sys.exit(main(sys.argv[2:], partial(make_task, peer=sys.argv[1])))
