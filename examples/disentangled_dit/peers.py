"""Networks of diffusers on Disentangled DiT's task and recipe: UNet, DiT, PixArt and the mmDiT of Stable Diffusion 3.

accelerate launch examples/disentangled_dit/peers.py sd3 examples/disentangled_dit/FILE.yaml [--field value]
accelerate launch examples/disentangled_dit/peers.py sample MODEL [options of hf-ext sample]
The section `model` then holds options of [`Peer`]. Each takes the class in its own way, or a text if it attends, and
the controls where its class in diffusers has a place for numbers, with constant weight: that is what there is to
compare with. A snapshot is a whole pipeline; where this module is imported, diffusers loads it.
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import diffusers
import torch
import variants
from diffusers import (
    ConfigMixin,
    DiffusionPipeline,
    DiTTransformer2DModel,
    ModelMixin,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
)
from diffusers.configuration_utils import register_to_config
from diffusers.models.cache_utils import CacheMixin
from diffusers.models.embeddings import LabelEmbedding, get_timestep_embedding
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline, DisentangledDiTTransformer2DModel
from hf_ext.tasks.diffusion import DisentangledDiTTask
from hf_ext.training import TrainingArguments, build_task, main
from hf_ext.training.arguments import build

# The name of our network, which is no peer.
OURS = "ours"
SINUSOIDS = 256


class Patches(nn.Module):
    """Embedded patches of any rectangle, on the coordinates of our network: the `pos_embed` of a peer."""

    position_embedding = DisentangledDiTTransformer2DModel.position_embedding

    def __init__(self, proj: nn.Conv2d, config: Any):
        super().__init__()
        self.proj, self.config, self.inner_dim = proj, config, proj.out_channels
        self.known: dict[tuple[int, int, torch.device], Tensor] = {}

    def forward(self, latents: Tensor) -> Tensor:
        tokens = self.proj(latents)
        key = (*tokens.shape[2:], tokens.device)
        if key not in self.known:
            self.known[key] = self.position_embedding(*key)
        return tokens.flatten(2).transpose(1, 2) + self.known[key].to(tokens.dtype)


class Peer(ModelMixin, ConfigMixin, CacheMixin):
    """
    A network of diffusers behind the interface of [`DisentangledDiTTransformer2DModel`], so that the same task trains
    it and the same pipeline samples from it.

    Args:
        sample_size (`int` or `list[int]`): Side, or height and width, of the images or latents.
        patch_size (`int`): Of the transformers.
        in_channels (`int`): Channels in and out.
        num_layers, num_attention_heads, attention_head_dim (`int`): As in our network. The width D is heads times
            `attention_head_dim`; the UNet has D / 2, D, D channels on three levels, and `num_layers` // 6 residual
            blocks on each.
        block_out_channels (`list[int]`, *optional*): Instead, the channels on each level of the UNet that attends.
        num_classes (`int`, *optional*): Number of classes; that label is no class.
        joint_attention_dim (`int`, *optional*): Instead, the width of a text encoder's tokens, where a peer attends.
        condition_dropout, control_dropout (`float`): As in our network.
        num_train_timesteps (`int`): Of the schedule.
        pos_embed_base_size (`list[int]`, *optional*): As in our network.
    """

    CONTROL_SIZES = DisentangledDiTTransformer2DModel.CONTROL_SIZES
    # Controls for which there is a place.
    known: ClassVar[tuple[str, ...]] = ()
    # Whether it attends to tokens, of a class or a text.
    attends: ClassVar[bool] = False
    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(
        self,
        sample_size: int | list[int] = 32,
        patch_size: int = 2,
        in_channels: int = 3,
        num_layers: int = 12,
        num_attention_heads: int = 6,
        attention_head_dim: int = 64,
        num_classes: int | None = 10,
        joint_attention_dim: int | None = None,
        condition_dropout: float = 0.1,
        control_dropout: float = 0.1,
        num_train_timesteps: int = 1000,
        pos_embed_base_size: list[int] | None = None,
        block_out_channels: list[int] | None = None,
    ):
        super().__init__()
        sides = [sample_size] * 2 if isinstance(sample_size, int) else list(sample_size)
        if (num_classes is None) == (joint_attention_dim is None):
            raise ValueError(f"give one of {num_classes=} and {joint_attention_dim=}, not both or neither.")
        if joint_attention_dim is not None and not self.attends:
            raise ValueError(f"{type(self).__name__} takes classes only: leave joint_attention_dim out.")
        # What the pipeline asks a network for.
        self.register_to_config(
            control_alpha=dict.fromkeys(self.known, 0.0),
            pos_embed_base_size=pos_embed_base_size or [side // patch_size for side in sides],
        )
        self.side, self.width = max(sides), num_attention_heads * attention_head_dim
        self.network = self.make_network()
        if hasattr(self.network, "pos_embed"):
            self.network.pos_embed = Patches(self.network.pos_embed.proj, self.config)

    # A subclass has `make_network`, which makes the network and the adapter's own layers, and `predict`: [B, C, H, W]
    # from a sample, timesteps [B], the context as it came, which is labels [B, 1, 1] or a text encoder's tokens [B, L,
    # joint_attention_dim], and the scalars of the known controls [B, n].

    def transformer_sizes(self) -> dict[str, Any]:
        """Sizes that all transformers are given."""
        config = self.config
        names = ("patch_size", "in_channels", "num_layers", "num_attention_heads", "attention_head_dim")
        sizes = {name: config[name] for name in names}
        return {**sizes, "sample_size": self.side, "out_channels": config.in_channels}

    def make_tokens(self) -> nn.Module:
        """A layer that makes tokens of a context. Classes, and no class, start at a spread of 1, as ours do."""
        if self.config.joint_attention_dim is None:
            return nn.Embedding(self.config.num_classes + 1, self.width)
        layer = nn.Linear(self.config.joint_attention_dim, self.width)
        start(layer, [])
        return layer

    def embed(self, context: Tensor) -> Tensor:
        """Tokens [B, L, width] to attend to; of a class one."""
        return self.tokens(context if self.config.num_classes is None else context[..., 0].long())

    @staticmethod
    def features(controls: Tensor) -> Tensor:
        """Sinusoids of [B, n] scalars: [B, n * SINUSOIDS]."""
        flat = get_timestep_embedding(controls.flatten(), SINUSOIDS, flip_sin_to_cos=True, downscale_freq_shift=0)
        return flat.unflatten(0, controls.shape).flatten(1)

    def pack(
        self, timestep: Tensor | float, controls: dict[str, Tensor] | None, control_mask: Tensor | None
    ) -> Tensor:
        """Timestep, and the scalars of the known controls, zero where there are none: [B, 1 + n]."""
        times = torch.as_tensor(timestep, device=self.device).reshape(-1, 1).float()
        columns = [times]
        for name in self.known:
            given = (controls or {}).get(name)
            values = times.new_zeros(1, self.CONTROL_SIZES[name]) if given is None else given
            columns.append(values if control_mask is None else values * control_mask[:, None])
        rows = max(len(column) for column in columns)
        return torch.cat([column.expand(rows, -1) for column in columns], dim=1)

    def forward(
        self,
        hidden_states: Tensor | None = None,
        timestep: Tensor | float | None = None,
        return_dict: bool = True,
        **given: Any,
    ) -> Transformer2DModelOutput | tuple[Tensor | None, ...]:
        """As our network's. Context and modulation are what came: nothing is computed ahead."""
        context, modulation = given.get("context"), given.get("modulation")
        if given.get("class_labels") is not None:
            context = given["class_labels"].float()[:, None, None]
        if given.get("encoder_hidden_states") is not None:
            context = given["encoder_hidden_states"]
        if timestep is not None:
            modulation = self.pack(timestep, given.get("controls"), given.get("control_mask"))
        if given.get("return_conditioning"):
            return context, modulation
        count = len(hidden_states)
        numbers = modulation.expand(count, -1)
        sample = self.predict(hidden_states, numbers[:, 0], context.expand(count, -1, -1), numbers[:, 1:])
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)


class CrossUNetPeer(Peer):
    """A UNet that attends to class or text; controls are added to the timestep's embedding, as in SDXL."""

    attends = True
    known = tuple(Peer.CONTROL_SIZES)

    def make_network(self) -> UNet2DConditionModel:
        config, width = self.config, self.width
        channels = config.block_out_channels or [width // 2, width, width]
        attending = len(channels) - 1
        self.register_to_config(patch_size=2**attending)
        self.tokens = self.make_tokens()
        network = UNet2DConditionModel(
            sample_size=self.side,
            in_channels=config.in_channels,
            out_channels=config.in_channels,
            block_out_channels=tuple(channels),
            down_block_types=("DownBlock2D", *["CrossAttnDownBlock2D"] * attending),
            up_block_types=(*["CrossAttnUpBlock2D"] * attending, "UpBlock2D"),
            layers_per_block=max(1, config.num_layers // 6),
            # In this class it is the number of heads.
            attention_head_dim=config.num_attention_heads
            if config.block_out_channels is None
            else tuple(count // config.attention_head_dim for count in channels),
            cross_attention_dim=width,
            norm_num_groups=8 if config.block_out_channels is None else 32,
            class_embed_type="projection",
            projection_class_embeddings_input_dim=SINUSOIDS * sum(self.CONTROL_SIZES.values()),
        )
        start(network, [])
        return network

    def predict(self, sample: Tensor, timestep: Tensor, context: Tensor, controls: Tensor) -> Tensor:
        features = self.features(controls).to(sample.dtype)
        return self.network(sample, timestep, self.embed(context), class_labels=features).sample


class DiTPeer(Peer):
    """DiT: the class is added to the adaLN vector of every block. No controls."""

    def make_network(self) -> DiTTransformer2DModel:
        network = DiTTransformer2DModel(**self.transformer_sizes(), num_embeds_ada_norm=self.config.num_classes)
        for module in network.modules():
            if isinstance(module, LabelEmbedding):
                # The task drops classes, and once for all blocks.
                module.dropout_prob = 0.0
        norms = [block.norm1.linear for block in network.transformer_blocks]
        start(network, [*norms, network.proj_out_1, network.proj_out_2])
        # The class in diffusers puts patches together to a square alone: each is an image to it.
        network.proj_out_2.register_forward_hook(lambda layer, given, tokens: tokens.flatten(0, 1)[:, None])
        return network

    def predict(self, sample: Tensor, timestep: Tensor, context: Tensor, controls: Tensor) -> Tensor:
        rows, columns = (side // self.config.patch_size for side in sample.shape[2:])
        patches = self.network(sample, timestep, context[:, 0, 0].long()).sample
        # [B, rows, columns, C, patch, patch] -> [B, C, rows * patch, columns * patch]
        return patches.unflatten(0, (-1, rows, columns)).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


class PixArtPeer(Peer):
    """PixArt-alpha: cross-attention to class or text; size and aspect ratio are added to its shared adaLN."""

    attends = True
    known = ("original_size", "aspect_ratio")

    def make_network(self) -> PixArtTransformer2DModel:
        if self.width % 3:
            raise ValueError(f"PixArt's embeddings of controls need a width divisible by 3, got {self.width}.")
        self.tokens = self.make_tokens()
        network = PixArtTransformer2DModel(
            **self.transformer_sizes(), cross_attention_dim=self.width, use_additional_conditions=True
        )
        start(network, [*(block.attn2.to_out[0] for block in network.transformer_blocks), network.proj_out])
        return network

    def predict(self, sample: Tensor, timestep: Tensor, context: Tensor, controls: Tensor) -> Tensor:
        conditions = {"resolution": controls[:, :2], "aspect_ratio": controls[:, 2:]}
        return self.network(sample, self.embed(context), timestep, added_cond_kwargs=conditions).sample


class SD3Peer(Peer):
    """The mmDiT of Stable Diffusion 3: joint attention to class or text; the place of the pooled text in adaLN takes
    the controls."""

    attends = True
    known = tuple(Peer.CONTROL_SIZES)

    def make_network(self) -> SD3Transformer2DModel:
        self.tokens = self.make_tokens()
        network = SD3Transformer2DModel(
            **self.transformer_sizes(),
            joint_attention_dim=self.width,
            caption_projection_dim=self.width,
            pooled_projection_dim=SINUSOIDS * sum(self.CONTROL_SIZES.values()),
            pos_embed_max_size=self.side // self.config.patch_size,
            qk_norm="rms_norm",
        )
        norms = [norm.linear for block in network.transformer_blocks for norm in (block.norm1, block.norm1_context)]
        start(network, [*norms, network.norm_out.linear, network.proj_out])
        return network

    def predict(self, sample: Tensor, timestep: Tensor, context: Tensor, controls: Tensor) -> Tensor:
        features = self.features(controls).to(sample.dtype)
        return self.network(sample, self.embed(context), features, timestep).sample


def start(network: nn.Module, zeros: list[nn.Module]) -> None:
    """
    Equal starts: linear layers begin as ours do, and some at zero, as the papers say. The classes of diffusers, made
    for loading weights, do neither.
    """
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for layer in zeros:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)


PEERS = {"unet-cross": CrossUNetPeer, "dit": DiTPeer, "pixart": PixArtPeer, "sd3": SD3Peer, **variants.VARIANTS}


class PeerPipeline(DisentangledDiTPipeline):
    """Our pipeline with a peer, saved by its class alone: no code of ours loads it elsewhere."""

    save_pretrained = DiffusionPipeline.save_pretrained
    to_json_string = DiffusionPipeline.to_json_string


# What diffusers looks up when it loads a folder: the pipeline's class, and the modules of its networks.
diffusers.PeerPipeline = PeerPipeline
diffusers.pipelines.peers, diffusers.pipelines.variants = sys.modules[__name__], variants


@strict
@dataclass
class PeerTask(DisentangledDiTTask):
    """The task with a peer."""

    pipeline_class = PeerPipeline


@strict
@dataclass
class MaskedTask(PeerTask):
    """
    Masked-latent training: the mean of the loss and of that with hidden image tokens.

    Args:
        mask_ratio (`float`, defaults to 0.3): Share of the image tokens that are hidden in the second pass.
    """

    mask_ratio: float = 0.3

    def error(
        self, model: nn.Module, noisy: tuple[Tensor, Tensor], conditions: dict[str, Any], *rest: Tensor
    ) -> Tensor:
        """The mean of both losses."""
        count, tokens = len(noisy[0]), noisy[0][0, 0].numel() // self.config["patch_size"] ** 2
        kept = variants.random_keep_indices(count, tokens, self.mask_ratio, noisy[0].device)
        passes = (conditions, {**conditions, "keep_indices": kept})
        return sum(super(MaskedTask, self).error(model, noisy, each, *rest) for each in passes) / 2


def make_task(arguments: TrainingArguments, peer: str) -> DisentangledDiTTask:
    """The task of a run, of our network or of a peer."""
    if peer == OURS:
        return build_task(arguments)
    task = build(MaskedTask if peer == "mdt" else PeerTask, arguments.task, "task")
    task.model_class = PEERS[peer]
    return task


def run(words: list[str]) -> int | None:
    """Trains a peer, or samples from one."""
    if words[:1] == ["sample"]:
        from hf_ext_cli.main import main as command

        return command(words, prog_name="hf-ext")
    if len(words) < 2 or words[0] not in PEERS:
        sys.exit(__doc__)
    return main(words[1:], partial(make_task, peer=words[0]))


if __name__ == "__main__":
    # By their name, and not as __main__, the classes are found again.
    import peers

    sys.exit(peers.run(sys.argv[1:]))
