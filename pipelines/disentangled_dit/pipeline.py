# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""The diffusers pipeline of Disentangled DiT (Berrada Ifriqi et al., NeurIPS 2024, arXiv 2411.03177).

Guidance has two strengths, of the class or text s and of the controls c (sizes, crop, flip; 0 is "dropped"):
    out = lambda [beta out(c, s) + (1 - beta) out(0, s)] + (1 - lambda) out(0, 0)
Three classes of one base, as diffusers has them: from noise, from a picture, within a mask.
One self-contained file: diffusers downloads it alone. Whatever a call uses of this file's own is an attribute of the
class, because a second version of the file, loaded as remote code, replaces the names of this module.
Shapes: images B, branches of the guidance G, latents [B, channels, height, width], context [., L, width]."""

import contextlib
import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline, ImagePipelineOutput, ModelMixin, SchedulerMixin
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback
from diffusers.image_processor import PipelineImageInput, VaeImageProcessor
from diffusers.loaders import CogVideoXLoraLoaderMixin
from diffusers.utils import logging
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase


# The mixin loads, saves, fuses LoRA layers of a `transformer` and nothing else; no part of it is CogVideoX's.
class DisentangledDiTPipeline(DiffusionPipeline, CogVideoXLoraLoaderMixin):
    """
    Generation of pictures of a class or a text with a Disentangled DiT (arXiv 2411.03177), in latents or pixels.
    `from_pipe` converts it to [`DisentangledDiTImg2ImgPipeline`] or [`DisentangledDiTInpaintPipeline`].

    A model with `num_classes` takes classes, one with `joint_attention_dim` texts. Without `vae` it generates pixels
    in [-1, 1], grey if it has one channel. Parts may be left out: text encoder and tokenizer alone encode texts, from
    which the others generate pictures later. Large pictures: `pipeline.vae.enable_tiling()`.

    Args:
        transformer ([`DisentangledDiTTransformer2DModel`]): The network.
        scheduler (`SchedulerMixin`): Of the DDPM family (DDIM, DPM++, UniPC, Euler and others), or flow matching, with
            the prediction that the network was trained for.
        vae (`ModelMixin`, *optional*): Any autoencoder of diffusers for pictures.
        text_encoder (`PreTrainedModel`, *optional*): Any encoder of transformers with a `last_hidden_state`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Its tokenizer.
        id2label (`dict[int, str]`, *optional*): Names of the classes, those of one class separated by commas; saved.
        text_padding (`str`, defaults to `"noisy_replicate"`): Padding of a short text, see `pad_text`.
        text_padding_noise (`float`, defaults to 0.02): Strength of the noise in the padding.
        max_text_length (`int`, defaults to 77): Tokens of a text, padding included.
        prediction_type (`str`, *optional*): `"epsilon"`, `"v_prediction"`, `"sample"` or `"flow_prediction"`: the
            target of the network. Defaults to the scheduler's, and is saved; schedulers with another one are refused.

    Example:
        >>> from diffusers import DDIMScheduler
        >>> from hf_ext.pipelines import disentangled_dit as dit
        >>> model = dit.DisentangledDiTTransformer2DModel(in_channels=3, num_layers=1, num_attention_heads=2)
        >>> pipeline = dit.DisentangledDiTPipeline(model, DDIMScheduler())
        >>> pipeline(class_labels=7, num_inference_steps=2).images[0].size
        (32, 32)
    """

    # Any: of these diffusers' types know a dictionary without attributes, and None.
    config: Any
    model_cpu_offload_seq: Any = "text_encoder->transformer->vae"
    _optional_components = ["vae", "text_encoder", "tokenizer"]
    _callback_tensor_inputs = ["latents", "noise_pred", "prompt_embeds", "negative_prompt_embeds"]

    _LOGGER = logging.get_logger("diffusers.DisentangledDiTPipeline")
    _FLOW_MATCH = (diffusers.FlowMatchEulerDiscreteScheduler, diffusers.FlowMatchHeunDiscreteScheduler)
    # LMS takes the place in the schedule for the number of steps it has seen; PNDM counts its first steps itself.
    _FROM_THE_FIRST_STEP = (diffusers.LMSDiscreteScheduler, diffusers.PNDMScheduler)
    _SPACINGS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas")
    _PADDINGS = ("zeros", "replicate", "noisy_replicate")
    # The least and the most of options of a call, and the words for it; two numbers rise.
    _NUMBERS = {
        **dict.fromkeys(("guidance_scale", "control_guidance_scale", "strength"), (-1e9, 1e9, "a finite number")),
        **dict.fromkeys(("eta", "guidance_rescale"), (0, 1, "a number from 0 to 1")),
        "guidance_interval": (0, 1, "a pair of rising numbers from 0 to 1"),
    }
    _OUTPUT_TYPES = ("pil", "np", "pt", "latent")
    # What a caller gives for each control; the last is one number, the others are pairs.
    _CONTROLS = {
        "original_size": "(height, width) in pixels",
        "crop": "(top, left) in pixels",
        "target_size": "(height, width) in pixels",
        "flip": "True or False",
    }
    # Rows of adaLN numbers that are computed ahead: 100 MB for the largest preset in bfloat16.
    TABLE_ROWS = 128
    # Where diffusers looks for a component's code, in a repository and among its own pipelines.
    _COMPONENT = ["disentangled_dit", "DisentangledDiTTransformer2DModel"]
    # Read now: a later version of this file would take the place of the one that this class was made from.
    _CODE = Path(__file__).read_text(encoding="utf-8")

    def __init__(
        self,
        transformer: ModelMixin | None,
        scheduler: SchedulerMixin | None,
        vae: ModelMixin | None = None,
        text_encoder: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        id2label: dict[int, str] | dict[str, str] | None = None,
        text_padding: str = "noisy_replicate",
        text_padding_noise: float = 0.02,
        max_text_length: int = 77,
        prediction_type: str | None = None,
    ):
        super().__init__()
        if text_padding not in self._PADDINGS:
            raise ValueError(f"text_padding is {text_padding!r}; one of {', '.join(self._PADDINGS)} is allowed.")
        self.register_modules(
            transformer=transformer, scheduler=scheduler, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer
        )
        known = {} if id2label is None else id2label
        if not isinstance(known, dict) or not all(str(n).isdecimal() and isinstance(x, str) for n, x in known.items()):
            raise ValueError(f"id2label is {id2label!r:.200}; a dictionary of numbers of classes and names is needed.")
        # JSON turns the keys into text; written so at once, what is saved again is the same.
        names = None if id2label is None else {str(number): name for number, name in id2label.items()}
        self.register_to_config(text_padding=text_padding, text_padding_noise=text_padding_noise)
        self.register_to_config(id2label=names, max_text_length=max_text_length, prediction_type=prediction_type)
        self.register_to_config(prediction_type=self._check_scheduler())
        # of whole names, and of parts between commas, those that one class alone has: it is the first and the last
        whole = [(text.strip(), int(number)) for number, text in (names or {}).items()]
        parts = [(part.strip(), number) for text, number in whole for part in text.split(",")]
        alone = [dict(some).items() & dict(some[::-1]).items() for some in (parts, whole)]
        self.labels = {name: number for some in alone for name, number in sorted(some, key=lambda pair: pair[1])}
        # sizes are checked here, not rounded there
        self.image_processor = VaeImageProcessor(vae_scale_factor=1)
        binary = {"do_normalize": False, "do_binarize": True, "do_convert_grayscale": True}
        self.mask_processor = VaeImageProcessor(vae_scale_factor=1, **binary)

    # `from_pretrained` of diffusers takes a component that it is given only where the constructor cannot do without.
    _init: Any = __init__
    _init.__signature__ = inspect.signature(__init__).replace(
        parameters=[
            each.replace(default=each.empty) if name in ("vae", "text_encoder", "tokenizer") else each
            for name, each in inspect.signature(__init__).parameters.items()
        ]
    )

    @property
    def vae_scale_factor(self) -> int:
        """Pixels that a latent of the present `vae` is wide; 1 without one."""
        return 1 if self.vae is None else self.scale_factor_of(self.vae)

    # Of the last call. A callback may set `_guidance_scale`, `_control_guidance_scale`, and `_interrupt`, which leaves
    # the remaining steps out.
    guidance_scale = property(attrgetter("_guidance_scale"), doc="Strength lambda of class or text; 1 or less is off.")
    control_guidance_scale = property(
        attrgetter("_control_guidance_scale"), doc="Strength beta of the controls; 1 is plain guidance."
    )
    interrupt = property(attrgetter("_interrupt"), doc="True if a callback ended the call.")

    @property
    def do_classifier_free_guidance(self) -> bool:
        """Tells that the next step has the null branch."""
        return self._guidance_scale > 1

    # Labels and texts

    def get_label_ids(self, label: str | list[str]) -> list[int]:
        """Numbers of the classes that `label` names, one of `id2label` or several, for `class_labels` of a call."""
        names = [label] if isinstance(label, str) else list(label)
        if unknown := [name for name in names if name not in self.labels]:
            known = ", ".join([*self.labels][:5]) or "none; give the number of the class"
            raise ValueError(f"No single class is {unknown[0]!r}; of {len(self.labels)} names the first are: {known}.")
        return [self.labels[name] for name in names]

    def encode_prompt(
        self,
        prompt: str | list[str] | None,
        device: torch.device | str | None = None,
        num_images_per_prompt: int = 1,
        do_classifier_free_guidance: bool = True,
        negative_prompt: str | list[str] | None = None,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        max_sequence_length: int | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """
        Tokens of texts as the transformer attends to them: encoded, then padded by `text_padding`. The noise of the
        padding is seeded by the text, so the same text gives the same tokens whatever else is in the batch.

        Args:
            prompt (`str` or `list[str]`): The texts; `""` is the null text.
            device (`torch.device`, *optional*): Defaults to the device that the pipeline runs on.
            num_images_per_prompt (`int`, defaults to 1): Times that each row is repeated; a call repeats them itself.
            do_classifier_free_guidance (`bool`, defaults to `True`): Whether the negative tokens are wanted.
            negative_prompt (`str` or `list[str]`, *optional*): One, or one for each; the null text if not given.
            prompt_embeds, negative_prompt_embeds (`torch.Tensor`, *optional*): Used instead of encoding these.
            max_sequence_length (`int`, *optional*): Instead of `max_text_length`; longer texts are cut with a warning.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: `prompt_embeds` and `negative_prompt_embeds` of shape
            `(texts, max_text_length, joint_attention_dim)`; `None` where not wanted.
        """
        if prompt_embeds is None and prompt is not None:
            prompt_embeds = self._encode_texts(prompt, device, max_sequence_length)
        if prompt_embeds is None:
            return None, negative_prompt_embeds
        if negative_prompt_embeds is None and do_classifier_free_guidance:
            negative = "" if negative_prompt is None else negative_prompt
            negative_prompt_embeds = self._encode_texts(negative, device, prompt_embeds.shape[1])
        if negative_prompt_embeds is not None:
            if len(negative_prompt_embeds) == 1:
                negative_prompt_embeds = negative_prompt_embeds.expand(len(prompt_embeds), -1, -1)
            if negative_prompt_embeds.shape != prompt_embeds.shape:
                shapes = f"{tuple(negative_prompt_embeds.shape)} and the text {tuple(prompt_embeds.shape)}"
                raise ValueError(f"The negative text has the shape {shapes}; give equal ones, or one negative text.")
            negative_prompt_embeds = negative_prompt_embeds.repeat_interleave(num_images_per_prompt, dim=0)
        return prompt_embeds.repeat_interleave(num_images_per_prompt, dim=0), negative_prompt_embeds

    def _encode_texts(self, texts: str | list[str] | None, device: Any, length: int | None) -> Tensor:
        """Padded tokens [texts, length, width]."""
        if self.text_encoder is None or self.tokenizer is None:
            instead = "give prompt_embeds and, with guidance, negative_prompt_embeds"
            raise ValueError(f"There is no text_encoder and tokenizer; load the pipeline with them, or {instead}.")
        texts = [texts] if isinstance(texts, str) else list(texts) if isinstance(texts, tuple) else texts
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"prompt and negative_prompt are a text or a list of texts, got {texts!r}.")
        most = getattr(self.text_encoder.config, "max_position_embeddings", None) or 10**5
        length = self._count("max_sequence_length", self.config.max_text_length if length is None else length, 1, most)
        # 63 bits: a torch seed is a signed number
        seeds = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1 for text in texts]
        for text, ids in zip(texts, self.tokenizer(texts, verbose=False).input_ids, strict=True):
            if len(ids) > length:
                self._LOGGER.warning(f"{len(ids) - length} of {len(ids)} tokens are cut from the end of {text!r}.")
        options = {"padding": "max_length", "padding_side": "right", "max_length": length, "truncation": True}
        tokens = self.tokenizer(texts, return_tensors="pt", **options).to(device or self._execution_device)
        states = self.text_encoder(tokens.input_ids, attention_mask=tokens.attention_mask).last_hidden_state
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        padding = (self.config.text_padding, self.config.text_padding_noise)
        return self.pad_text(states, tokens.attention_mask.sum(dim=1), *padding, generators)

    @staticmethod
    def pad_text(
        tokens: Tensor,
        lengths: Tensor,
        mode: str,
        noise: float,
        generator: torch.Generator | list[torch.Generator] | None = None,
    ) -> Tensor:
        """
        Fills what follows a text with what needs no mask: with n real tokens of T,
            out_i = tokens_(i mod n) + noise sqrt(ceil(T / n) - 1) std(tokens) eps,   eps ~ N(0, 1), for i >= n.

        `tokens` [texts, T, width] are the encoder's, `lengths` [texts] the real ones of each text, special ones
        included; a text without any keeps the encoder's first. Modes are `"zeros"`, `"replicate"` (without the noise)
        and `"noisy_replicate"`; a generator makes the noise, or a list of one for each text."""
        total = tokens.shape[1]
        place = torch.arange(total, device=tokens.device)
        real = lengths.to(tokens.device).clamp(1, total)[:, None]
        padding = (place >= real)[..., None]
        if mode == "zeros":
            return tokens.masked_fill(padding, 0)
        copies = tokens.gather(1, (place % real)[..., None].expand_as(tokens))
        if mode == "replicate":
            return copies
        if mode != "noisy_replicate":
            raise ValueError(f"mode is {mode!r}; one of zeros, replicate, noisy_replicate is allowed.")
        weights = (~padding).float() / real[..., None]
        values = tokens.float()
        mean = (values * weights).sum(dim=1, keepdim=True)
        deviation = ((values - mean).square() * weights).sum(dim=1, keepdim=True).sqrt()
        strength = noise * (((total + real - 1) // real) - 1).float().sqrt()[..., None]
        eps = randn_tensor(tuple(tokens.shape), generator=generator, device=tokens.device, dtype=torch.float32)
        return torch.where(padding, copies.float() + strength * deviation * eps, values).to(tokens.dtype)

    # Pictures and latents

    @staticmethod
    def scale_factor_of(vae: ModelMixin) -> int:
        """Pixels that a latent of an autoencoder is wide."""
        if (ratio := getattr(vae, "spatial_compression_ratio", None)) is not None:
            return int(ratio)
        for name in ("block_out_channels", "down_block_out_channels", "encoder_block_out_channels"):
            if vae.config.get(name):
                return 2 ** (len(vae.config[name]) - 1)
        raise ValueError(f"{type(vae).__name__} has no block_out_channels; use an autoencoder for pictures.")

    @classmethod
    def encode_image(cls, vae: ModelMixin, image: Tensor) -> Tensor:
        """Latents of pictures in [-1, 1], float32, as the transformer takes them; the mode of a distribution."""
        with cls._upcast(vae):
            encoded = vae.encode(image.to(vae.dtype), return_dict=False)[0]
        latents = (encoded if isinstance(encoded, Tensor) else encoded.mode()).float()
        shift, scale = cls._latent_statistics(vae, latents)
        return (latents - shift) * scale

    @classmethod
    def decode_latents(cls, vae: ModelMixin, latents: Tensor) -> Tensor:
        """Pictures of latents, about [-1, 1], float32; what [`~DisentangledDiTPipeline.encode_image`] inverts."""
        shift, scale = cls._latent_statistics(vae, latents)
        with cls._upcast(vae):
            return vae.decode((latents / scale + shift).to(vae.dtype), return_dict=False)[0].float()

    @staticmethod
    def _latent_statistics(vae: ModelMixin, like: Tensor) -> tuple[float | Tensor, float | Tensor]:
        """(shift, scale) with latents = (encoded - shift) scale, of all channels or of each."""
        config = vae.config
        shift, scale = config.get("shift_factor") or 0.0, config.get("scaling_factor") or 1.0
        if not config.get("latents_mean") or not config.get("latents_std"):
            return shift, scale
        mean, deviation = (like.new_tensor(config[name])[:, None, None] for name in ("latents_mean", "latents_std"))
        return mean, scale / deviation

    @staticmethod
    @contextlib.contextmanager
    def _upcast(vae: Any) -> Iterator[None]:
        """Full precision for an autoencoder whose values are too large for float16."""
        dtype = vae.dtype
        if dtype == torch.float16 and vae.config.get("force_upcast"):
            vae.to(torch.float32)
        try:
            yield
        finally:
            if vae.dtype != dtype:
                vae.to(dtype)

    @classmethod
    def _read_pictures(cls, pictures: Any, name: str) -> Any:
        """Pictures as diffusers' processors read them rightly: opaque and of 8 bits, or numbers in [0, 1]."""
        if isinstance(pictures, list | tuple) and pictures:
            read = [cls._read_pictures(picture, name) for picture in pictures]
            found = [x for some in read for x in (some if isinstance(some, list) else [some])]
            if len({isinstance(x, Image.Image) or (type(x), getattr(x, "shape", ())[-3:]) for x in found}) > 1:
                raise ValueError(f"{name} is a list of several kinds; pictures, or arrays of one shape, are needed.")
            return found
        if isinstance(pictures, Image.Image):
            if pictures.mode[0] in "IF":
                raise ValueError(f"{name} has PIL mode {pictures.mode!r}; convert it to 8 bits ('L' or 'RGB').")
            if pictures.has_transparency_data:
                cls._LOGGER.warning(f"{name} is transparent: it is put on white.")
                white = Image.new("RGBA", pictures.size, "white")
                pictures = Image.alpha_composite(white, pictures.convert("RGBA")).convert("RGB")
            return pictures
        if not isinstance(pictures, Tensor | np.ndarray) or 0 in pictures.shape:
            raise ValueError(f"{name} is a {type(pictures).__name__}; a full picture, array or tensor is needed.")
        values: Any = None
        kind = str(pictures.dtype).rpartition(".")[2]
        if most := {"bool": 1, "uint8": 255}.get(kind, "float" in kind):
            values = (pictures.float() if isinstance(pictures, Tensor) else pictures.astype(np.float32)) / most
        # floats of a resized picture go a little beyond, those from 0 to 255 far
        if values is None or not (abs(values) <= 2).all():
            wanted = "uint8, or floats from 0 to 1 (as of output_type='pt'), are needed"
            raise ValueError(f"{name} has {kind} up to {pictures.max()}; {wanted}.")
        is_batch = name == "mask_image" and isinstance(values, Tensor) and values.ndim == 4
        last = values.detach().movedim(-3, -1).cpu().numpy() if is_batch else values
        if name == "mask_image" and isinstance(last, np.ndarray) and last.ndim > 2 and last.shape[-1] in (3, 4):
            # diffusers takes an array with colours for many masks
            made = (last.clip(0, 1) * 255).round().astype(np.uint8).reshape(-1, *last.shape[-3:])
            return cls._read_pictures([Image.fromarray(one) for one in made], name)
        # diffusers takes pictures with any value below 0 for ones from -1 to 1
        return values.clip(0, 1) if -0.25 < values.min() < 0 else values

    def prepare_image_latents(self, image: Any, count: int, height: int, width: int, images: int = 1) -> Tensor:
        """Clean latents [count, channels, ., .] of pictures or latents, by channels: one, one for `images`, or all."""
        channels, factor, device = self.transformer.config.in_channels, self.vae_scale_factor, self._execution_device
        colours = channels if self.vae is None else self.vae.config.get("in_channels", 3)
        own = (channels, height // factor, width // factor)
        given = image if isinstance(image, list | tuple) else [image]
        shapes = {tuple(x.shape[-3:]) if isinstance(x, Tensor) and x.ndim in (3, 4) else () for x in given}
        alike = len(shapes) == 1 and [*shapes][0][:1] == (channels,)
        if alike and (channels != colours or (factor > 1 and shapes == {own})):
            latents = torch.cat([x if x.ndim == 4 else x[None] for x in given]).to(device, torch.float32)
        else:
            kinds = {"do_convert_rgb": colours == 3, "do_convert_grayscale": colours == 1}
            processor, pictures = VaeImageProcessor(vae_scale_factor=1, **kinds), self._read_pictures(image, "image")
            pixels = processor.preprocess(pictures, height=height, width=width).to(device, torch.float32)
            if pixels.shape[1] != colours:
                wanted = f"{colours} colours, or latents of {own},"
                raise ValueError(f"image has {pixels.shape[1]} colours; pictures of {wanted} are needed.")
            latents = pixels if self.vae is None else self.encode_image(self.vae, pixels)
        return self._for_each(latents, "image", (count, *own), images)

    def prepare_mask(self, mask_image: Any, count: int, height: int, width: int, images: int = 1) -> Tensor:
        """True for latents [count, 1, ., .] that are replaced: those with a white pixel."""
        factor, pictures = self.vae_scale_factor, self._read_pictures(mask_image, "mask_image")
        mask = self.mask_processor.preprocess(pictures, height=height, width=width).to(self._execution_device)
        mask = F.max_pool2d(mask.float(), factor) > 0.5
        if not mask.any():
            raise ValueError("mask_image has no white part (255 in uint8, True, or 1.0), so no part is replaced.")
        return self._for_each(mask, "mask_image", (count, 1, height // factor, width // factor), images)

    @classmethod
    def _for_each(cls, latents: Tensor, name: str, shape: tuple[int, ...], images: int) -> Tensor:
        """Latents of one picture, of each group or of each picture, for all of them."""
        if latents.shape[1:] != shape[1:]:
            raise ValueError(f"{name} gives latents of shape {tuple(latents.shape[1:])}; {shape[1:]} is needed.")
        return latents[cls._places(name, len(latents), shape[0], images)]

    @staticmethod
    def _places(name: str, given: int, count: int, images: int = 1) -> list[int]:
        """For each of `count` pictures the number of its value; `images` pictures follow each other as a group."""
        if given not in (1, count // images, count):
            raise ValueError(f"{name} has {given} values for {count} pictures; give one, as many, or one for a text.")
        return [picture * given // count for picture in range(count)]

    def prepare_latents(self, count: int, height: int, width: int, generator: Any, latents: Tensor | None) -> Tensor:
        """Standard normal noise [count, channels, ., .], float32."""
        device, factor = self._execution_device, self.vae_scale_factor
        shape = (count, self.transformer.config.in_channels, height // factor, width // factor)
        given = generator if isinstance(generator, list) else [generator] * count
        if len(given) != count or not all(isinstance(one, torch.Generator) for one in given if generator is not None):
            raise ValueError(f"generator is {generator!r}; one torch.Generator, or a list of {count}, is needed.")
        if latents is None:
            latents = randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)
        if tuple(latents.shape) != shape:
            raise ValueError(f"latents have the shape {tuple(latents.shape)}; {shape} is needed.")
        return latents.to(device, torch.float32)

    def add_noise(self, image: Tensor | None, noise: Tensor, timestep: Tensor) -> Tensor:
        """Latents as the scheduler has them at a timestep; noise as strong as it wants it where there is no image."""
        if image is None:
            # flow matching starts from the noise as it is
            return noise * getattr(self.scheduler, "init_noise_sigma", 1.0)
        scheduler: Any = self.scheduler
        if isinstance(scheduler, self._FLOW_MATCH):
            return scheduler.scale_noise(image, timestep, noise)
        if getattr(scheduler, "sigmas_interpol", None) is not None and not scheduler.state_in_first_order:
            # KDPM2 is between two levels of `add_noise`; its ancestral twin counts those between from the one before.
            place = scheduler.step_index - hasattr(scheduler, "sigmas_up")
            return image + noise * scheduler.sigmas_interpol[place].to(image)
        return scheduler.add_noise(image, noise, timestep)

    def retrieve_timesteps(self, call: Any) -> tuple[Tensor, int]:
        """Timesteps that are left, and how many steps of the schedule they are; a strength leaves the first out."""
        scheduler, strength, name = self.scheduler, call.strength, type(self.scheduler).__name__
        count = self._count("num_inference_steps", call.num_inference_steps)
        given = {it: value for it in ("timesteps", "sigmas") if (value := self._plain(getattr(call, it))) is not None}
        for option, value in given.items():
            real = isinstance(value, list) and all(isinstance(number, int | float) for number in value)
            # a scheduler would keep rising ones beyond this call
            if not real or not value or value != sorted(value, reverse=True):
                raise ValueError(f"{option} is {value!r}; a list of falling numbers is needed.")
            given[option] = np.array(value, float) if option == "sigmas" else value  # UniPC computes with it as it is
        if not given.keys() <= inspect.signature(scheduler.set_timesteps).parameters.keys() or len(given) > 1:
            raise ValueError(f"{name} does not take {' and '.join(given)}; leave one or both out.")
        with self._scheduler_named(len(*given.values()) if given else count):
            scheduler.set_timesteps(**(given or {"num_inference_steps": count}), device=self._execution_device)
        # some schedulers take the last noise level of `sigmas` for the end, and several timesteps for a step
        total = -(-len(scheduler.timesteps) // scheduler.order) if given else count
        steps = int(total * strength) or int(round(total * strength, 9))
        if not 0 < strength <= 1 or steps < 1:
            raise ValueError(f"strength is {strength} for {total} steps; give 1/{total}, which leaves one, to 1.")
        begin = (total - steps) * scheduler.order
        if begin and isinstance(scheduler, self._FROM_THE_FIRST_STEP):
            raise ValueError(f"{name} starts at its first step only; use another scheduler, or strength=1.")
        with self._scheduler_named(total):
            # Without it the first step is looked up by its timestep, which some schedules have several times.
            if hasattr(scheduler, "set_begin_index"):
                scheduler.set_begin_index(begin)
            levels, kept = getattr(scheduler, "sigmas", None), getattr(scheduler, "alphas_cumprod", None)
            stays, left = levels is not None and bool(levels[begin] == levels[-1]), scheduler.timesteps[begin:]
            known = bool(((left >= 0) & (left <= scheduler.config.num_train_timesteps)).all())
            clean = kept[left.long().to(kept.device)] if known and kept is not None else None
        if stays:
            raise ValueError(f"{name} ends at the noise it starts from in so few steps ({steps}); take more steps.")
        if not known:
            raise ValueError(f"{name} gives timesteps that the network has not seen: {left.tolist()}.")
        if clean is not None and steps == total and clean[0] > 0.5:
            problem = "where the network expects a picture: take more steps, or timestep_spacing='trailing'"
            self._LOGGER.warning(f"{name} starts from noise at timestep {int(left[0])}, {problem}.")
        self._check_levels(*((0.0, 0.0) if levels is None else (float(levels[0]), float(levels[begin]))), total)
        # x0 = (x - sqrt(1 - a) e) / sqrt(a) has no value where a, the kept part of the picture, is 0, or of PNDM tiny
        least = 1e-6 if isinstance(scheduler, diffusers.PNDMScheduler) else 0
        if clean is not None and (clean <= least).any() and self.config.prediction_type == "epsilon":
            advice = "set rescale_betas_zero_snr=False, or timestep_spacing='leading'"
            raise ValueError(f"{name} starts from noise alone (zero-terminal SNR), unknown to epsilon; {advice}.")
        return left, steps

    def _check_levels(self, highest: float, first: float, steps: int) -> None:
        """Refuses a spacing without steps where pictures appear, and warns of too few steps from strong noise."""
        get, name, order = self.scheduler.config.get, type(self.scheduler).__name__, self.scheduler.order
        is_beta, spaced = bool(get("use_beta_sigmas")), any(map(get, self._SPACINGS))
        if is_beta and highest > 500 or (order > 1 and "Ancestral" in name and not spaced and first > 500):
            raise ValueError(f"{name}{' with use_beta_sigmas' * is_beta} makes no picture of noise {highest:.0f}.")
        unsteady = order > 1 or "SASolver" in name or (spaced and get("solver_order", 1) > 1)  # cosine has 20,000
        enough = 50 if first > (100 if is_beta else 500 if unsteady else 1e9) else 20 * bool(spaced and first > 500)
        if steps < enough:
            self._LOGGER.warning(f"{name}: {steps} steps from noise of {first:.0f} are inaccurate; take {enough}.")

    @contextlib.contextmanager
    def _scheduler_named(self, steps: int) -> Iterator[None]:
        """Errors of a scheduler over its configuration, in a sentence; those of short memory pass as they are."""
        try:
            yield
        except Exception as error:
            if isinstance(error, MemoryError) or "memory" in str(error):
                raise
            what = f"{type(self.scheduler).__name__} cannot make {steps} steps ({type(error).__name__}: {error})"
            raise ValueError(f"{what}: take another number of them, or correct its configuration.") from error

    def prepare_extra_step_kwargs(self, generator: Any, eta: float) -> dict[str, Any]:
        """Options of these that the scheduler's step takes; where it clips the picture, its noise has to follow."""
        accepted = inspect.signature(self.scheduler.step).parameters
        clips = any(self.scheduler.config.get(name, False) for name in ("clip_sample", "thresholding"))
        if eta != 0 and "eta" not in accepted:
            raise ValueError(f"eta={eta} means nothing to {type(self.scheduler).__name__}; leave it at 0 or use DDIM.")
        offered = {"eta": eta, "generator": generator, "use_clipped_model_output": clips}
        return {name: value for name, value in offered.items() if name in accepted}

    # Schedulers

    def _check_scheduler(self) -> str | None:
        """The prediction that the scheduler reads; it is refused where the network's output is something else."""
        scheduler: Any = self.scheduler
        if scheduler is None:
            return self.config.prediction_type
        get = scheduler.config.get
        flow_match, flow = isinstance(scheduler, self._FLOW_MATCH), bool(get("use_flow_sigmas"))
        found = "flow_prediction" if flow_match else str(get("prediction_type", "epsilon"))
        count, diverging = get("num_train_timesteps"), isinstance(scheduler, diffusers.SASolverScheduler)
        spaced = [f"{name}=True" for name in self._SPACINGS if get(name) and (flow or diverging)]
        if get("interpolation_type") == "log_linear" and not any(map(get, self._SPACINGS)):
            spaced += ["interpolation_type='log_linear'"]
        spaced += ["lower_order_final=False"] if diverging and not get("lower_order_final") else []
        trained = count if self.transformer is None else self.transformer.config.num_train_timesteps
        times, problem = getattr(scheduler, "timesteps", None), None
        if not flow_match and not self._is_of_the_family(scheduler):
            problem = "is neither of the DDPM family (DDIM, DPM++, UniPC, Euler ...) nor a flow-matching Euler or Heun"
        elif get("invert_sigmas") or (not flow_match and times is not None and bool((times[:1] < times[-1:]).any())):
            problem = "goes from pictures to noise; use the one that it is the inverse of"
        elif not flow_match and flow != (found == "flow_prediction"):
            problem = f"has prediction_type={found!r} and use_flow_sigmas={flow}; 'flow_prediction' alone needs True"
        elif get("timestep_type") == "continuous":
            problem = "has timestep_type='continuous', numbers that the network has not seen; make it with 'discrete'"
        elif spaced:
            problem = f"makes no pictures with {spaced[0]}{' and use_flow_sigmas=True' if flow else ''}"
        elif found != (self.config.prediction_type or found):
            problem = f"reads the network's output as {found}, and this network predicts {self.config.prediction_type}"
        elif flow_match and get("use_dynamic_shifting"):
            problem = "has use_dynamic_shifting=True, which needs a shift for every call; set `shift` instead"
        elif str(get("variance_type")).startswith("learned"):
            problem = f"has variance_type={get('variance_type')!r}, and the network predicts no variance"
        elif count != trained:
            problem = f"has {count} training timesteps, and the network {trained}"
        if problem is not None:
            raise ValueError(f"{type(scheduler).__name__} {problem}.")
        return found

    @staticmethod
    def _is_of_the_family(scheduler: Any) -> bool:
        """True for a schedule of betas with steps that need a network's output and nothing else."""
        # IPNDM takes betas, and has a schedule of its own all the same; ScoreSde has two kinds of steps
        if not all(hasattr(scheduler, name) for name in ("alphas_cumprod", "step")):
            return False
        step = inspect.signature(scheduler.step).parameters
        needed = {name for name, option in step.items() if option.default is option.empty}
        made_of = inspect.signature(type(scheduler).__init__).parameters
        return "trained_betas" in made_of and needed <= {"model_output", "timestep", "sample"}

    # Conditions

    @classmethod
    def _plain(cls, value: Any) -> Any:
        """Python's numbers, and lists of them, from those of NumPy and torch, from tuples and lists."""
        if hasattr(value, "tolist"):
            return value.tolist()
        return [cls._plain(item) for item in value] if isinstance(value, list | tuple) else value

    @classmethod
    def _count(cls, name: str, value: Any, least: int = 1, most: int = 10**9) -> int:
        """A whole number: of steps, pictures or pixels, or of a class."""
        number = cls._plain(value)
        if type(number) is not int or not least <= number <= most:
            raise ValueError(f"{name} is {value!r}; a whole number is needed, at least {least} and at most {most}.")
        return number

    def image_size(self, height: Any = None, width: Any = None, latents: Tensor | None = None) -> tuple[int, int]:
        """Height and width of the pictures in pixels: as given, or those of `latents` or of the model."""
        factor, patch = self.vae_scale_factor, self.transformer.config.patch_size
        usual = self.transformer.config.sample_size if latents is None else latents.shape[-2:]
        usual = (usual, usual) if isinstance(usual, int) else usual
        given = {"height": (height, usual[0]), "width": (width, usual[1])}
        sides = [self._count(name, side * factor if wish is None else wish) for name, (wish, side) in given.items()]
        if any(side % (factor * patch) for side in sides):
            wanted = f"multiples of {factor * patch} pixels (patches of {patch}, times {factor} of the autoencoder)"
            raise ValueError(f"height and width are {sides}; they must be {wanted}.")
        return sides[0], sides[1]

    def _check_labels(self, labels: Any, name: str) -> list[int]:
        """Numbers of classes from numbers, names, a tensor of numbers, or a list."""
        labels = labels if isinstance(labels := self._plain(labels), list) else [labels]
        if not labels:
            raise ValueError(f"{name} is an empty list; give at least one class.")
        numbers = [self.get_label_ids(label)[0] if isinstance(label, str) else label for label in labels]
        # the number of the classes is no class
        return [self._count(name, number, 0, self.transformer.config.num_classes) for number in numbers]

    def _encode_conditions(self, call: Any, guided: bool, images: int) -> tuple[Tensor, int]:
        """Context of the null branch, then of the others [2 B or B, L, D]; and the number B of pictures."""
        if (null := self.transformer.config.num_classes) is not None:
            given, negative = self._check_labels(call.class_labels, "class_labels"), call.negative_class_labels
            negative = self._check_labels(null if negative is None else negative, "negative_class_labels")
            negative = [negative[place] for place in self._places("negative_class_labels", len(negative), len(given))]
            inputs = {"class_labels": torch.tensor([*negative, *given], device=self._execution_device)}
            count = len(given)
        else:
            embeds = (call.prompt_embeds, call.negative_prompt_embeds, call.max_sequence_length)
            tokens: Any  # check_inputs saw one of both
            tokens, others = self.encode_prompt(call.prompt, None, 1, guided, call.negative_prompt, *embeds)
            count = len(tokens)
            tokens = tokens if others is None else torch.cat([others.to(tokens), tokens])
            if tokens.shape[-1] != (width := self.transformer.config.joint_attention_dim):
                advice = f"takes {width} (joint_attention_dim); use the text encoder that it was trained with"
                raise ValueError(f"Tokens of texts have {tokens.shape[-1]} numbers, and the transformer {advice}.")
            inputs = {"encoder_hidden_states": tokens.to(self._execution_device, self.transformer.dtype)}
        context, _ = self.transformer(**inputs, attention_kwargs=call.attention_kwargs, return_conditioning=True)
        return context.repeat_interleave(images, dim=0), count * images

    def _read_control(self, name: str, value: Any, count: int, images: int) -> Tensor:
        """The numbers of a control for each of `count` pictures, float64 [count, numbers]."""
        size, most = (1, 1) if name == "flip" else (2, 1e9)
        try:
            rows = torch.tensor(self._plain(value))
        except (TypeError, ValueError, RuntimeError):
            rows = torch.empty(0, 0, 0)
        # True is no number of pixels, and half a flip is none
        fits = (rows == 0) | (rows == 1) if name == "flip" else (rows > 0) & (rows.dtype != torch.bool)
        fits, rows = (fits | (rows == 0) if name == "crop" else fits) & (rows <= most), rows.double()
        # a list of numbers is one value where the control is a pair, and several where it is a number
        rows = rows.reshape(-1, 1) if size == 1 and rows.ndim < 2 else rows[None] if rows.ndim < 2 else rows
        if rows.shape[1:] != (size,) or not fits.all():
            wanted = f"{self._CONTROLS[name]}, or a list with one for each picture"
            raise ValueError(f"{name} has {value!r}; needed is {wanted}.")
        return rows[self._places(name, len(rows), count, images)]

    def prepare_conditions(self, call: Any, size: tuple[int, int], count: int, images: int) -> None:
        """
        The S different inputs of adaLN, since most pictures and branches of the guidance share theirs: numbers of each
        control [S, numbers], False where they are dropped [S], and for each branch the input of every picture.
        """
        config, device = self.transformer.config, self._execution_device
        # not given are those of a whole, unmirrored picture
        given = {name: getattr(call, name) for name in self._CONTROLS if getattr(call, name) is not None}
        if unknown := sorted(given.keys() - config.control_alpha.keys()):
            known = ", ".join(config.control_alpha) or "none"
            raise ValueError(f"The model has no control {unknown[0]}; it was trained with {known}.")
        given = {"original_size": size, "crop": (0, 0), "target_size": size, "flip": 0} | given
        values = {name: self._read_control(name, value, count, images) for name, value in given.items()}
        height, width = values["original_size"].split(1, dim=1)
        values["aspect_ratio"] = (width / height).log()
        # a column for each number, one for "not dropped"; where controls are dropped, all are 0
        kept = torch.full((count, 1), bool(config.control_alpha)).double()
        full = torch.cat([*(values[name] for name in config.control_alpha), kept], dim=1)
        states, rows = torch.cat([0 * full, 0 * full, full]).unique(dim=0, return_inverse=True)
        states = states.to(device, torch.float32)
        *numbers, mask = states.split([*(values[name].shape[1] for name in config.control_alpha), 1], dim=1)
        call.controls, call.mask = dict(zip(config.control_alpha, numbers, strict=True)), mask[:, 0] > 0
        call.rows = dict(zip(("null", "uncontrolled", "full"), rows.unflatten(0, (3, count)).tolist(), strict=True))

    def modulations(self, call: Any, timesteps: Tensor) -> Iterator[Tensor]:
        """For each timestep the adaLN numbers of all conditions, [S, numbers]."""
        # adaLN sees timestep and controls, no class and no latents: one product makes the numbers of many steps ahead,
        # for each of the S different conditions once, whatever the batch and the branches of the guidance.
        count = len(call.mask)
        for block in timesteps.split(max(1, self.TABLE_ROWS // count)):
            _, table = self.transformer(
                timestep=block.repeat_interleave(count),
                controls={name: value.repeat(len(block), 1) for name, value in call.controls.items()},
                control_mask=call.mask.repeat(len(block)),
                attention_kwargs=call.attention_kwargs,
                return_conditioning=True,
            )
            yield from table.unflatten(0, (len(block), count))

    def guidance_weights(self, call: Any, step: int, before: dict[str, float]) -> dict[str, float]:
        """Weights of the branches of a step; the conditional one is last, as diffusers' callbacks expect."""
        config, (first, last) = self.transformer.config, call.guidance_interval
        guided = first <= step / self.num_timesteps < last
        scale = max(self._guidance_scale, 1.0) if guided else 1.0
        control = self._control_guidance_scale if config.control_alpha else 1.0
        weights = {"null": 1 - scale, "uncontrolled": scale * (1 - control), "full": scale * control}
        weights = {name: weight for name, weight in weights.items() if weight != 0}
        if weights.keys() != before.keys():
            # a cache may keep a row for each branch that there was
            self.transformer._reset_stateful_cache()
        if "null" in weights and config.condition_dropout == 0 and not call.has_negative:
            needed = "a network that was trained with condition_dropout, or a negative class or text"
            raise ValueError(f"guidance_scale={self._guidance_scale} needs {needed}.")
        if "uncontrolled" in weights and config.control_dropout == 0:
            strength = self._control_guidance_scale
            raise ValueError(f"control_guidance_scale={strength} needs control_dropout in the network's training.")
        return weights

    @staticmethod
    def _gather_branches(
        context: Tensor, table: Tensor, weights: dict[str, float], rows: dict[str, list[int]]
    ) -> dict[str, Tensor]:
        """Context and adaLN numbers of the branches, one after the other; one row of numbers where all are equal."""
        count = len(rows["full"])
        if context.shape[0] not in (count, 2 * count) or ("null" in weights and context.shape[0] == count):
            told = f"{2 * count} are needed with guidance, {count} without (a callback sets _guidance_scale to 1)"
            raise ValueError(f"The context has {context.shape[0]} rows for {count} pictures; {told}.")
        chosen = [row for branch in weights for row in rows[branch]]
        # one row for all is not only smaller: the transformer has a faster way for it
        numbers = [table[row] for row in (chosen if len(set(chosen)) > 1 else chosen[:1])]
        tokens = [context[:count] if branch == "null" else context[-count:] for branch in weights]
        return {"context": torch.cat(tokens), "modulation": torch.stack(numbers)}

    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | str | list[int] | list[str] | Tensor | None = None,
        prompt: str | list[str] | None = None,
        negative_class_labels: int | str | list[int] | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        timesteps: list[int] | None = None,
        sigmas: list[float] | None = None,
        guidance_scale: float = 4.0,
        control_guidance_scale: float = 1.0,
        original_size: tuple[int, int] | list[tuple[int, int]] | None = None,
        crop: tuple[int, int] | list[tuple[int, int]] | None = None,
        target_size: tuple[int, int] | list[tuple[int, int]] | None = None,
        flip: bool | list[bool] | None = None,
        num_images_per_prompt: int = 1,
        guidance_interval: tuple[float, float] = (0.0, 1.0),
        guidance_rescale: float = 0.0,
        max_sequence_length: int | None = None,
        eta: float = 0.0,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: Tensor | None = None,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        attention_kwargs: dict[str, Any] | None = None,
        callback_on_step_end: Callable[..., dict[str, Any]] | PipelineCallback | MultiPipelineCallbacks | None = None,
        callback_on_step_end_tensor_inputs: list[str] | tuple[str, ...] = ("latents",),
    ) -> ImagePipelineOutput | tuple[Any]:
        """
        Makes pictures.

        Args:
            class_labels (`int`, `str`, list, array or tensor, *optional*): Classes of a class model, by number or
                name; its `num_classes` is no class.
            prompt (`str` or `list[str]`, *optional*): Texts, of a text model.
            negative_class_labels, negative_prompt (*optional*): Class or text to steer away from; none by default.
            height, width (`int`, *optional*): Size in pixels; that of `latents` or of the model if not given.
            num_inference_steps (`int`, defaults to 50): Steps of the scheduler.
            timesteps (`list[int]`, *optional*), sigmas (`list[float]`, *optional*): Arguments of the scheduler's
                `set_timesteps` in place of the number of steps, if it accepts them.
            guidance_scale (`float`, defaults to 4.0): Strength lambda of the class or text; 1 or less is off.
            control_guidance_scale (`float`, defaults to 1.0): Strength beta of the controls; 0 leaves them out.
                Values other than 0 and 1 cost a third pass through the network in each step.
            original_size, target_size (`tuple[int, int]` or a list, *optional*): Height and width in pixels before
                resizing and cutting, and after; the pictures' size if not given. A list has a value for each picture.
                The control `aspect_ratio` follows from `original_size`.
            crop (`tuple[int, int]` or a list, *optional*): Top and left of the crop, in pixels. Defaults to (0, 0).
            flip (`bool` or a list, *optional*): Mirror left and right. Defaults to False.
            num_images_per_prompt (`int`, defaults to 1): Pictures of each class or text.
            guidance_interval (`tuple[float, float]`, defaults to `(0.0, 1.0)`): Part of the steps that is guided by
                class or text, as shares of all; `(0.2, 0.8)` gives truer contrast and costs less.
            guidance_rescale (`float`, defaults to 0.0): Share, in [0, 1], of rescaling a guided prediction to the
                standard deviation of the unguided one: against over-exposure, above all with zero-terminal SNR.
            max_sequence_length (`int`, *optional*): Most tokens of a text; `max_text_length` if not given.
            eta (`float`, defaults to 0.0): Noise of DDIM.
            generator (`torch.Generator` or a list of one for each picture, *optional*): Source of all noise.
            latents (`torch.Tensor` of shape `(pictures, in_channels, height, width)`, *optional*): Standard normal
                noise to start from.
            prompt_embeds, negative_prompt_embeds (`torch.Tensor`, *optional*): From `encode_prompt`, instead of texts.
            output_type (`str`, defaults to `"pil"`): `"pil"`, `"np"`, `"pt"` or `"latent"`.
            return_dict (`bool`, defaults to `True`): Return an output object and not a tuple.
            attention_kwargs (`dict`, *optional*): `scale`, of the LoRA adapters.
            callback_on_step_end (*optional*): Called after each step with the pipeline, the step, the timestep and a
                dictionary of the tensors named in `callback_on_step_end_tensor_inputs`: `latents`, `noise_pred`,
                `prompt_embeds` (context of the null branch, then of the others), `negative_prompt_embeds` (of null).
                It returns replacements, and may set `_guidance_scale`, `_control_guidance_scale`, `_interrupt`.

        Returns:
            [`~diffusers.ImagePipelineOutput`], or a tuple with its `images`.

        Raises:
            ValueError: A part is missing, an option is not for this model, or its value or size does not fit."""
        return self._generate({name: value for name, value in locals().items() if name != "self"})

    def _generate(self, options: dict[str, Any], image: Any = None, mask: Any = None, strength: Any = 1.0) -> Any:
        """A call with all of its options: from noise, from a picture, or within a mask."""
        call = SimpleNamespace(**options, strength=strength)
        call.generator = list(call.generator) if isinstance(call.generator, tuple) else call.generator
        callback = call.callback_on_step_end
        if isinstance(callback, PipelineCallback | MultiPipelineCallbacks):
            call.callback_on_step_end_tensor_inputs = callback.tensor_inputs
        self.check_inputs(call)
        # a pipeline that was never told learns its prediction from its first scheduler
        self.register_to_config(prediction_type=self._check_scheduler())
        self._guidance_scale, self._control_guidance_scale = call.guidance_scale, call.control_guidance_scale
        negatives = (call.negative_class_labels, call.negative_prompt, call.negative_prompt_embeds)
        call.has_negative, self._interrupt = any(value is not None for value in negatives), False
        images_each = self._count("num_images_per_prompt", call.num_images_per_prompt)
        # a callback may switch the guidance on, where there is something that encodes the null text
        guided = call.guidance_scale > 1 or (callback is not None and self.text_encoder is not None)
        if call.has_negative and callback is None and not guided:
            self._LOGGER.warning("guidance_scale is at most 1, which is off: nothing negative has an effect.")
        embeds, count = self._encode_conditions(call, guided, images_each)
        size = self.image_size(call.height, call.width, call.latents)
        self.prepare_conditions(call, size, count, images_each)
        times, steps = self.retrieve_timesteps(call)
        call.clean = None if image is None else self.prepare_image_latents(image, count, *size, images_each)
        call.hole = None if mask is None else self.prepare_mask(mask, count, *size, images_each)
        call.noise = self.prepare_latents(count, *size, call.generator, call.latents)
        # the first timestep of a schedule still has a part of the picture; strength 1 means none
        latents: Any = self.add_noise(None if strength == 1 else call.clean, call.noise, times[:1])
        latents = self._denoise(call, times, steps, latents, embeds)
        if call.output_type != "latent":
            latents = latents if self.vae is None else self.decode_latents(self.vae, latents)
            latents = self.image_processor.postprocess(latents, output_type=call.output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=latents) if call.return_dict else (latents,)

    def _denoise(self, call: Any, times: Tensor, steps: int, latents: Tensor, embeds: Tensor) -> Tensor:
        """The steps of the schedule; around a hole stands the clean picture with the noise of each step."""
        step_options = self.prepare_extra_step_kwargs(call.generator, call.eta)
        self.num_timesteps, order = len(times), self.scheduler.order
        scale = getattr(self.scheduler, "scale_model_input", None)  # flow matching has none
        weights: dict[str, float] = {}
        with self.progress_bar(total=steps) as progress_bar:
            for i, (t, table) in enumerate(zip(times, self.modulations(call, times), strict=True)):
                if self.interrupt:
                    break
                # for caches
                self.current_timestep = t
                weights = self.guidance_weights(call, i, weights)
                with self._scheduler_named(steps):
                    sample = latents if scale is None else scale(latents, t)
                with self.transformer.cache_context("-".join(weights)):
                    output = self.transformer(
                        hidden_states=sample.to(self.transformer.dtype).repeat(len(weights), 1, 1, 1),
                        **self._gather_branches(embeds, table, weights, call.rows),
                        attention_kwargs=call.attention_kwargs,
                        return_dict=False,
                    )[0]
                noise_pred = self._guide(output.float().chunk(len(weights)), weights, call.guidance_rescale)
                with self._scheduler_named(steps):
                    latents = self.scheduler.step(noise_pred, t, latents, return_dict=False, **step_options)[0]
                if call.hole is not None:
                    then = times[i + 1 : i + 2]
                    kept = self.add_noise(call.clean, call.noise, then) if len(then) else call.clean
                    latents = torch.where(call.hole, latents, kept)
                if call.callback_on_step_end is not None:
                    latents, embeds = self._call_back(call, i, t, latents, noise_pred, embeds)
                # some schedulers take several timesteps for a step, or a few more at the start
                if i + 1 == len(times) or (len(times) - i <= steps * order and (i + 1) % order == 0):
                    progress_bar.update()
        if not latents.isfinite().all():
            name = type(self.scheduler).__name__
            raise ValueError(f"The pictures are not finite: try other options of {name}, more steps, or bfloat16.")
        return latents

    @staticmethod
    def _guide(outputs: tuple[Tensor, ...], weights: dict[str, float], rescale: float) -> Tensor:
        """The weighted sum of the branches, with a share of the conditional one's standard deviation."""
        guided: Any = sum(weight * part for weight, part in zip(weights.values(), outputs, strict=True))
        if rescale == 0 or len(outputs) == 1:
            return guided
        spread, wanted = (value.std(dim=(1, 2, 3), correction=0, keepdim=True) for value in (guided, outputs[-1]))
        # a network that was just made predicts 0 everywhere
        return guided * (1 - rescale + rescale * wanted / spread.clamp(min=1e-12))

    def _call_back(
        self, call: Any, step: int, timestep: Tensor, latents: Tensor, noise_pred: Tensor, embeds: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Latents and context after the caller's callback."""
        count = len(latents)
        known = dict(zip(self._callback_tensor_inputs, (latents, noise_pred, embeds, embeds[:-count]), strict=True))
        tensors = {name: known[name] for name in call.callback_on_step_end_tensor_inputs}
        changed: Any = call.callback_on_step_end(self, step, timestep, tensors)
        changed = {} if changed is None else changed
        for name, value in changed.items() if isinstance(changed, Mapping) else [("", changed)]:
            # how many rows a context needs is seen where it is used
            first = int(str(name).endswith("_embeds"))
            if name not in known or not isinstance(value, Tensor) or value.shape[first:] != known[name].shape[first:]:
                shapes = {key: [*tensor.shape] for key, tensor in known.items()}
                raise ValueError(f"callback_on_step_end returned {name} {value!r:.200}; None or tensors: {shapes}.")
        changed = {name: value.to(known[name]) for name, value in changed.items()}
        embeds = changed.get("prompt_embeds", embeds)
        if "negative_prompt_embeds" in changed:
            embeds = torch.cat([changed["negative_prompt_embeds"], embeds[-count:]])
        return changed.get("latents", latents), embeds

    def check_inputs(self, call: Any) -> None:
        """Raise a ValueError for parts that are missing, and options that the model has no use for."""
        if missing := [name for name in ("transformer", "scheduler") if getattr(self, name) is None]:
            raise ValueError(f"There is no {' and no '.join(missing)}; load the pipeline with it to make pictures.")
        classes = (call.class_labels, call.negative_class_labels)
        texts = (call.prompt, call.prompt_embeds, call.negative_prompt, call.negative_prompt_embeds)
        if self.transformer.config.num_classes is None:
            if (texts[0] is None) == (texts[1] is None) or any(value is not None for value in classes):
                raise ValueError("This is a text model: give prompt or prompt_embeds, not both, and no class_labels.")
            if texts[2] is not None and texts[3] is not None:
                raise ValueError("Give negative_prompt or negative_prompt_embeds, not both.")
        elif classes[0] is None or any(value is not None for value in (*texts, call.max_sequence_length)):
            raise ValueError("This is a class model: give class_labels, numbers or names of classes, and no prompt.")
        if call.control_guidance_scale != 1 and not self.transformer.config.control_alpha:
            self._LOGGER.warning("The model has no controls: control_guidance_scale changes nothing.")
        if call.output_type not in self._OUTPUT_TYPES:
            raise ValueError(f"output_type is {call.output_type!r}; one of {', '.join(self._OUTPUT_TYPES)} fits.")
        if call.callback_on_step_end is not None and not callable(call.callback_on_step_end):
            raise ValueError(f"callback_on_step_end is {call.callback_on_step_end!r:.200}; a function is needed.")
        names, known = call.callback_on_step_end_tensor_inputs, self._callback_tensor_inputs
        if not isinstance(names, list | tuple) or not all(name in known for name in names):
            raise ValueError(f"callback_on_step_end_tensor_inputs is {names!r}; a list of names of {known} is needed.")
        for name, (least, most, wanted) in self._NUMBERS.items():
            given, count = self._plain(getattr(call, name)), 1 + (name == "guidance_interval")
            each = given if isinstance(given, list) and count == 2 else [given]
            fits = all(isinstance(number, int | float) and least <= number <= most for number in each)
            if not fits or len(each) != count or each != sorted(each):
                raise ValueError(f"{name} is {getattr(call, name)!r}; {wanted} is needed.")
        for name, axes in {"latents": 4, "prompt_embeds": 3, "negative_prompt_embeds": 3}.items():
            value = getattr(call, name)
            right = isinstance(value, Tensor) and value.ndim == axes and value.numel() and value.isfinite().all()
            if value is not None and not right:
                raise ValueError(f"{name} must be a finite tensor with {axes} axes, none of which is empty.")

    # Saving

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs: Any) -> Any:
        """A pipeline with the components of another, not copied; `kwargs` are used instead of them."""
        # diffusers would compare classes, and the type of the transformer is another where it is remote code
        wanted = inspect.signature(cls.__init__).parameters
        given = {name: value for name, value in pipeline.components.items() if name in wanted} | kwargs
        networks = {name: value for name, value in given.items() if isinstance(value, torch.nn.Module)}
        # diffusers would cast networks, which both pipelines share, to one type
        networks = {} if kwargs.get("dtype") or kwargs.get("torch_dtype") else networks
        made = super().from_pipe(pipeline, **given | dict.fromkeys(networks))
        made.register_modules(**networks)
        return made

    def save_pretrained(self, save_directory: str | os.PathLike[str], *arguments: Any, **kwargs: Any) -> None:
        """Saves the pipeline and the code that loads it: `pipeline.py`, and the transformer's file beside its weights.

        The folder loads with `import hf_ext.pipelines` and `DiffusionPipeline.from_pretrained(folder)`, and without
        hf_ext by `DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)`. Arguments are those of
        [`~diffusers.DiffusionPipeline.save_pretrained`]."""
        if found := list(getattr(self.transformer, "peft_config", ())):
            advice = "use save_lora_weights, then unload_lora_weights, and fuse_lora before it if they are to stay"
            if hasattr(self.transformer, "merge_and_unload"):
                # a model of peft, which diffusers does not unload
                advice = "save them by transformer.save_pretrained, and set transformer to its merge_and_unload()"
            raise ValueError(f"The transformer has the LoRA layers {found}, which a pipeline does not save: {advice}.")
        if not hasattr(self.transformer, "_CODE"):
            raise TypeError(f"A {type(self.transformer).__name__} is not saved; a {self._COMPONENT[1]} is needed.")
        # The code first: diffusers uploads what lies in the folder when it has written the rest.
        folder, file = Path(save_directory), f"transformer/{self._COMPONENT[0]}.py"
        for path, code in ((folder / "pipeline.py", self._CODE), (folder / file, self.transformer._CODE)):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_text(code, encoding="utf-8")
            os.replace(temporary, path)
        super().save_pretrained(str(folder), *arguments, **kwargs)

    def to_json_string(self) -> str:
        """The content of `model_index.json`."""
        # Files and classes, as diffusers finds them by trust_remote_code alone; of remote code it records lost names.
        index = json.loads(super().to_json_string())
        index |= {"_class_name": ["pipeline", type(self).__name__], "transformer": self._COMPONENT}
        return json.dumps(index, indent=2, sort_keys=True) + "\n"


class DisentangledDiTImg2ImgPipeline(DisentangledDiTPipeline):
    """Generation from a noisy version of a picture; parts as in [`DisentangledDiTPipeline`]."""

    @torch.no_grad()
    def __call__(  # type: ignore[override]  # as in all of diffusers: what a picture is made of comes first
        self,
        class_labels: Any = None,
        prompt: Any = None,
        image: PipelineImageInput | Tensor | None = None,
        strength: float = 0.8,
        **options: Any,
    ) -> ImagePipelineOutput | tuple[Any]:
        """
        Makes pictures from pictures, with results and errors of [`DisentangledDiTPipeline`].

        Args:
            class_labels, prompt, **options: As in a call of [`DisentangledDiTPipeline`].
            image (picture, `np.ndarray`, `torch.Tensor` or a list): The pictures, resized to `height` and `width`; a
                tensor may hold latents. Arrays and tensors have floats from 0 to 1, or `uint8`.
            strength (`float`, defaults to 0.8): Share of the schedule that runs, in (0, 1]; 1 ignores `image`.

        Example:
            >>> from PIL import Image
            >>> from diffusers import DDIMScheduler
            >>> from hf_ext.pipelines import disentangled_dit as dit
            >>> model = dit.DisentangledDiTTransformer2DModel(in_channels=3, num_layers=1, num_attention_heads=2)
            >>> pipeline = dit.DisentangledDiTImg2ImgPipeline(model, DDIMScheduler())
            >>> pipeline(class_labels=7, image=Image.new("RGB", (32, 32)), num_inference_steps=2).images[0].size
            (32, 32)
        """
        if image is None:
            raise ValueError(f"{type(self).__name__} starts from a picture; give `image`.")
        call = inspect.signature(super().__call__).bind(class_labels, prompt, **options)
        call.apply_defaults()
        return self._generate(call.arguments, image, None, strength)


class DisentangledDiTInpaintPipeline(DisentangledDiTPipeline):
    """Generation of the masked part of a picture; parts as in [`DisentangledDiTPipeline`]."""

    @torch.no_grad()
    def __call__(  # type: ignore[override]  # as in all of diffusers: what a picture is made of comes first
        self,
        class_labels: Any = None,
        prompt: Any = None,
        image: PipelineImageInput | Tensor | None = None,
        mask_image: PipelineImageInput | Tensor | None = None,
        strength: float = 0.8,
        **options: Any,
    ) -> ImagePipelineOutput | tuple[Any]:
        """
        Makes a part of pictures anew, with results and errors of [`DisentangledDiTPipeline`].

        Args:
            class_labels, prompt, **options: As in a call of [`DisentangledDiTPipeline`].
            image, strength: As in a call of [`DisentangledDiTImg2ImgPipeline`].
            mask_image (picture, `np.ndarray`, `torch.Tensor` or a list): White where `image` is replaced, else black.

        Example:
            >>> from PIL import Image
            >>> from diffusers import DDIMScheduler
            >>> from hf_ext.pipelines import disentangled_dit as dit
            >>> model = dit.DisentangledDiTTransformer2DModel(in_channels=3, num_layers=1, num_attention_heads=2)
            >>> pipeline = dit.DisentangledDiTInpaintPipeline(model, DDIMScheduler())
            >>> image, mask = Image.new("RGB", (32, 32)), Image.new("L", (32, 32), 255)
            >>> pipeline(class_labels=7, image=image, mask_image=mask, num_inference_steps=2).images[0].size
            (32, 32)
        """
        if image is None or mask_image is None:
            raise ValueError(f"{type(self).__name__} needs `image`, and `mask_image`, white where it is replaced.")
        call = inspect.signature(super().__call__).bind(class_labels, prompt, **options)
        call.apply_defaults()
        return self._generate(call.arguments, image, mask_image, strength)


def __dir__() -> list[str]:
    # `custom_pipeline="pipeline"` loads the one pipeline that diffusers finds listed in the file; two are an error.
    return [name for name in globals() if not name.endswith(("Img2ImgPipeline", "InpaintPipeline"))]
