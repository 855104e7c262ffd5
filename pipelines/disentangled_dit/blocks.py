# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""The pipeline as blocks of diffusers' modular pipelines: texts to tokens, conditions to latents, latents to pictures.

Each block runs the pipeline with the components that it names and without the others. So it has no loop of its own,
and gives what that part of the pipeline gives. Blocks may be run apart, on several machines, and others put between.
"""

import inspect
from typing import Any

import torch
from diffusers import SchedulerMixin
from diffusers.modular_pipelines import ModularPipelineBlocks, PipelineState, SequentialPipelineBlocks
from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec, ConfigSpec, InputParam, OutputParam
from torch import Tensor

from .pipeline import DisentangledDiTPipeline
from .transformer_disentangled_dit import DisentangledDiTTransformer2DModel

COMPONENTS = {"transformer": DisentangledDiTTransformer2DModel, "scheduler": SchedulerMixin}
PARTS = (*COMPONENTS, "vae", "text_encoder", "tokenizer")
PREPARED = ("prompt_embeds", "negative_prompt_embeds")
# What other blocks do, and a modular pipeline has no callbacks.
NOT_DENOISING = {"self", "prompt", "negative_prompt", "output_type", "return_dict"}


class _PipelineBlock(ModularPipelineBlocks):  # type: ignore[misc]  # diffusers has no types
    """A part of the pipeline, with the components that it needs."""

    model_name: Any = "disentangled-dit"
    parts: tuple[str, ...] = ()

    @property
    def expected_components(self) -> list[ComponentSpec]:
        """Its components, from the folder or repository of a pipeline."""
        return [ComponentSpec(name, COMPONENTS.get(name)) for name in self.parts]

    @property
    def expected_configs(self) -> list[ConfigSpec]:
        """The pipeline's own settings, which `model_index.json` has."""
        options = inspect.signature(DisentangledDiTPipeline.__init__).parameters.values()
        return [ConfigSpec(option.name, option.default) for option in options if option.default is not option.empty]

    def make_pipeline(self, components: Any) -> DisentangledDiTPipeline:
        """The pipeline of the present components, which it shares."""
        parts: dict[str, Any] = {name: getattr(components, name) if name in self.parts else None for name in PARTS}
        settings = {spec.name: components.config[spec.name] for spec in self.expected_configs}
        return DisentangledDiTPipeline(**parts, **settings)


class DisentangledDiTTextEncoderStep(_PipelineBlock):
    """Texts to padded tokens; a class model has none, and needs no text encoder."""

    parts = ("text_encoder", "tokenizer")
    description = "Encodes the texts, and pads their tokens."

    @property
    def inputs(self) -> list[InputParam]:
        """Texts, or their tokens, which stay as they are."""
        texts = [InputParam(name, type_hint=str | list[str]) for name in ("prompt", "negative_prompt")]
        embeds = [InputParam(name, type_hint=Tensor) for name in PREPARED]
        return [*texts, *embeds, InputParam("guidance_scale", default=4.0, type_hint=float)]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        """Tokens of the texts, and of what guidance leads away from."""
        return [OutputParam(name, type_hint=Tensor) for name in PREPARED]

    @torch.no_grad()
    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        """Runs the block."""
        block: Any = self.get_block_state(state)
        if block.prompt is not None or block.prompt_embeds is not None:
            block.prompt_embeds, block.negative_prompt_embeds = self.make_pipeline(components).encode_prompt(
                block.prompt,
                do_classifier_free_guidance=block.guidance_scale > 1,
                negative_prompt=block.negative_prompt,
                prompt_embeds=block.prompt_embeds,
                negative_prompt_embeds=block.negative_prompt_embeds,
            )
        self.set_block_state(state, block)
        return components, state


class DisentangledDiTDenoiseStep(_PipelineBlock):
    """Classes or tokens, and controls, to latents; with `image` and `mask_image` as the pipeline takes them."""

    # A picture to start from is encoded, and the size of pictures is that of latents times the autoencoder's factor.
    parts = ("transformer", "scheduler", "vae")
    description = "Makes latents of classes or tokens of texts, controls, and noise or a picture to start from."

    @property
    def inputs(self) -> list[InputParam]:
        """What a call of the pipeline takes, but for texts and callbacks."""
        options = inspect.signature(DisentangledDiTPipeline.__call__).parameters.values()
        names = [option for option in options if option.name not in NOT_DENOISING and "callback" not in option.name]
        return [InputParam(option.name, default=option.default) for option in names]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        """Clean latents."""
        return [OutputParam("latents", type_hint=Tensor, description="Clean latents, or pixels without a vae.")]

    @torch.no_grad()
    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        """Runs the block."""
        block: Any = self.get_block_state(state)
        given = {name: getattr(block, name) for name in self.input_names}
        block.latents = self.make_pipeline(components)(**given, output_type="latent", return_dict=False)[0]
        self.set_block_state(state, block)
        return components, state


class DisentangledDiTDecodeStep(_PipelineBlock):
    """Latents to pictures."""

    parts = ("vae",)
    description = "Decodes latents; without an autoencoder they are pixels."

    @property
    def inputs(self) -> list[InputParam]:
        """Latents, and the kind of pictures."""
        return [InputParam("latents", required=True, type_hint=Tensor), InputParam("output_type", default="pil")]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        """Pictures."""
        return [OutputParam("images")]

    @torch.no_grad()
    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        """Runs the block."""
        block: Any = self.get_block_state(state)
        pipeline, pixels = self.make_pipeline(components), block.latents
        if components.vae is not None and block.output_type != "latent":
            pixels = pipeline.decode_latents(components.vae, pixels)
        block.images = pipeline.image_processor.postprocess(pixels, output_type=block.output_type)
        self.set_block_state(state, block)
        return components, state


class DisentangledDiTBlocks(SequentialPipelineBlocks):  # type: ignore[misc]
    """
    The whole pipeline as blocks.

    Example:
        ```python
        from hf_ext.pipelines.disentangled_dit.blocks import DisentangledDiTBlocks

        dit = DisentangledDiTBlocks().init_pipeline("org/dit")
        dit.load_components()
        images = dit(class_labels=["cat", "dog"], output="images")
        ```
    """

    model_name = "disentangled-dit"
    block_classes = [DisentangledDiTTextEncoderStep, DisentangledDiTDenoiseStep, DisentangledDiTDecodeStep]
    block_names = ["text_encoder", "denoise", "decode"]
    description = "Disentangled DiT: texts to tokens, conditions to latents, latents to pictures."
