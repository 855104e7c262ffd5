# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""The diffusers pipeline of Disentangled DiT (Berrada Ifriqi et al., NeurIPS 2024, arXiv 2411.03177).

Guidance has two strengths, of the class or text s and of the controls c (sizes, crop, flip; 0 is "dropped"):
    out = lambda [beta out(c, s) + (1 - beta) out(0, s)] + (1 - lambda) out(0, 0)
One self-contained file: diffusers downloads it alone. Whatever a call uses of this file's own is an attribute of the
class, because a second version of the file, loaded as remote code, replaces the names of this module.
Shapes: images B, branches of the guidance G, latents [B, channels, height, width], context [., L, width].
"""

import contextlib
import difflib
import hashlib
import inspect
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    ImagePipelineOutput,
    ModelMixin,
    SchedulerMixin,
)
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback
from diffusers.image_processor import PipelineImageInput, VaeImageProcessor
from diffusers.loaders import CogVideoXLoraLoaderMixin
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase


# The mixin loads, saves, fuses LoRA layers of a `transformer` and nothing else; no part of it is CogVideoX's.
class DisentangledDiTPipeline(DiffusionPipeline, CogVideoXLoraLoaderMixin):
    """
    Pictures of a class or a text by a Disentangled DiT (arXiv 2411.03177), in latents or pixels.

    The model says which: `num_classes` makes it a class model, `joint_attention_dim` a text model. Without `vae` its
    values are pixels in [-1, 1], grey where it has one channel. Every part may be left out: text encoder and tokenizer
    encode texts alone, and the others make pictures of them later.

    Args:
        transformer ([`DisentangledDiTTransformer2DModel`]): The network.
        scheduler (`SchedulerMixin`): Of the DDPM family (DDIM, DPM++, UniPC, Euler and others), or flow matching, with
            the prediction that the network was trained for.
        vae (`ModelMixin`, *optional*): Any autoencoder of diffusers for pictures.
        text_encoder (`PreTrainedModel`, *optional*): Any encoder of transformers with a `last_hidden_state`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Its tokenizer.
        id2label (`dict[int, str]`, *optional*): Names of the classes; several names of one class are separated by
            commas. Saved with the pipeline.
        text_padding (`str`, defaults to `"noisy_replicate"`): What follows a short text, see `pad_text`.
        text_padding_noise (`float`, defaults to 0.02): Strength of the noise in it.
        max_text_length (`int`, defaults to 77): Tokens of a text, padding included.
        prediction_type (`str`, *optional*): `"epsilon"`, `"v_prediction"`, `"sample"` or `"flow_prediction"`: what the
            network predicts. Defaults to what the scheduler says, and is saved: schedulers that read the output as
            something else are refused.
    """

    # Any: of these diffusers' types know a dictionary without attributes, and None.
    config: Any
    model_cpu_offload_seq: Any = "text_encoder->transformer->vae"
    _optional_components = ["vae", "text_encoder", "tokenizer"]
    _callback_tensor_inputs = ["latents", "noise_pred", "prompt_embeds"]

    _FLOW_MATCH = (FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler)
    _PADDINGS = ("zeros", "replicate", "noisy_replicate")
    _OUTPUT_TYPES = ("pil", "np", "pt", "latent")
    # What a caller gives for each control, how many numbers that is, and the largest; crop and flip may be 0.
    _CONTROLS = {
        "original_size": ("(height, width) in pixels", 2, 1e9),
        "crop": ("(top, left) in pixels", 2, 1e9),
        "target_size": ("(height, width) in pixels", 2, 1e9),
        "flip": ("True or False", 1, 1),
        "aspect_ratio": ("width over height", 1, 1e9),
    }
    # Rows of adaLN numbers that are computed ahead: 100 MB for the largest preset in bfloat16.
    TABLE_ROWS = 128
    # Where diffusers looks for a component's code, in a repository and among its own pipelines.
    _COMPONENT = ["disentangled_dit", "DisentangledDiTTransformer2DModel"]
    # Read now: a later version of this file would take the place of the one that this class was made from.
    _CODE = Path(__file__).read_text(encoding="utf-8")

    @dataclass
    class Conditions:
        """The different inputs of adaLN, S of them: most pictures and branches of the guidance share theirs."""

        # Numbers of each control [S, numbers]; False where they are dropped [S]; for each branch the input of every
        # picture; classes [S] of the baseline that has them in adaLN.
        controls: dict[str, Tensor]
        mask: Tensor
        rows: dict[str, list[int]]
        class_labels: Tensor | None = None

    def __init__(
        self,
        transformer: ModelMixin | None,
        scheduler: SchedulerMixin | None,
        vae: ModelMixin | None,
        text_encoder: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase | None,
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
        # JSON turns the keys into text; written so at once, what is saved again is the same.
        names = None if id2label is None else {str(number): name for number, name in id2label.items()}
        self.register_to_config(
            id2label=names,
            text_padding=text_padding,
            text_padding_noise=text_padding_noise,
            max_text_length=max_text_length,
            prediction_type=prediction_type,
        )
        self._check_scheduler()
        self.labels = {name.strip(): int(number) for number, text in (names or {}).items() for name in text.split(",")}
        # sizes are checked here, not rounded there
        self.image_processor = VaeImageProcessor(vae_scale_factor=1)
        binary = {"do_normalize": False, "do_binarize": True, "do_convert_grayscale": True}
        self.mask_processor = VaeImageProcessor(vae_scale_factor=1, **binary)

    @property
    def vae_scale_factor(self) -> int:
        """How many pixels a latent of the present `vae` is wide; 1 without one."""
        return 1 if self.vae is None else self.scale_factor_of(self.vae)

    @property
    def guidance_scale(self) -> float:
        """Strength lambda of the class or text; 1 or less is off. A callback may set `_guidance_scale`."""
        return self._guidance_scale

    @property
    def control_guidance_scale(self) -> float:
        """Strength beta of the controls; 1 is plain guidance. A callback may set `_control_guidance_scale`."""
        return self._control_guidance_scale

    @property
    def do_classifier_free_guidance(self) -> bool:
        """Whether the next step has the null branch."""
        return self._guidance_scale > 1

    @property
    def num_timesteps(self) -> int:
        """Steps of the schedule of the last call."""
        return self._num_timesteps

    @property
    def current_timestep(self) -> Tensor:
        """Timestep of the step that is computed, for caches."""
        return self._current_timestep

    @property
    def interrupt(self) -> bool:
        """Set `_interrupt` in a callback to leave the remaining steps out."""
        return self._interrupt

    # Labels and texts

    def get_label_ids(self, label: str | list[str]) -> list[int]:
        """
        Numbers of classes, for `class_labels` of a call.

        Args:
            label (`str` or `list[str]`): One name of `id2label`, or several.
        """
        names = [label] if isinstance(label, str) else list(label)
        for name in names:
            if name not in self.labels:
                similar = difflib.get_close_matches(str(name), self.labels, n=5, cutoff=0.4) or list(self.labels)[:5]
                known = f"of the {len(self.labels)} names, similar or first are: {', '.join(similar)}."
                none = "this pipeline knows none; give the number of the class, or make the pipeline with id2label."
                raise ValueError(f"There is no class {name!r}; {known if self.labels else none}")
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

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: `prompt_embeds` and `negative_prompt_embeds` of shape
            `(texts, max_text_length, joint_attention_dim)`; `None` where not wanted.
        """
        if prompt_embeds is None and prompt is not None:
            prompt_embeds = self._encode_texts(prompt, device)
        given: Any = prompt_embeds  # not None below
        if given is not None and negative_prompt_embeds is None and do_classifier_free_guidance:
            negative_prompt_embeds = self._encode_texts(negative_prompt or "", device)
        if given is not None and negative_prompt_embeds is not None:
            if len(negative_prompt_embeds) == 1:
                negative_prompt_embeds = negative_prompt_embeds.expand(len(given), -1, -1)
            if negative_prompt_embeds.shape != given.shape:
                raise ValueError(
                    f"The negative text has the shape {tuple(negative_prompt_embeds.shape)} and the text "
                    f"{tuple(given.shape)}; they must be equal, or the negative text one row."
                )
            negative_prompt_embeds = negative_prompt_embeds.repeat_interleave(num_images_per_prompt, dim=0)
        prompt_embeds = None if given is None else given.repeat_interleave(num_images_per_prompt, dim=0)
        # one return, and of these names: diffusers' tests read them from the code
        return prompt_embeds, negative_prompt_embeds

    def _encode_texts(self, texts: str | list[str], device: torch.device | str | None) -> Tensor:
        """Padded tokens [texts, max_text_length, width]."""
        if self.text_encoder is None or self.tokenizer is None:
            raise ValueError(
                "There is no text_encoder and tokenizer; load the pipeline with them, or give prompt_embeds and, with "
                "guidance, negative_prompt_embeds."
            )
        texts = [texts] if isinstance(texts, str) else list(texts)
        if not texts:
            raise ValueError("There are no texts in an empty list; give at least one.")
        options = {"padding": "max_length", "padding_side": "right", "max_length": self.config.max_text_length}
        tokens = self.tokenizer(texts, truncation=True, return_tensors="pt", **options)
        tokens = tokens.to(device or self._execution_device)
        states = self.text_encoder(tokens.input_ids, attention_mask=tokens.attention_mask).last_hidden_state
        # 63 bits: a torch seed is a signed number
        seeds = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1 for text in texts]
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

        Args:
            tokens (`torch.Tensor` of shape `(texts, T, width)`): What the encoder gave.
            lengths (`torch.Tensor` of shape `(texts,)`): Real tokens of each text, special ones included. A text
                without any keeps the encoder's first token.
            mode (`str`): `"zeros"`; `"replicate"`, copies of the real tokens; or `"noisy_replicate"`.
            noise (`float`): Strength of the noise.
            generator (`torch.Generator` or a list of one for each text, *optional*): Source of the noise.

        Returns:
            `torch.Tensor`: Of the shape and type of `tokens`; the real tokens are as they were.
        """
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
        """How many pixels a latent of an autoencoder is wide."""
        if (ratio := getattr(vae, "spatial_compression_ratio", None)) is not None:
            return int(ratio)
        for name in ("block_out_channels", "down_block_out_channels", "encoder_block_out_channels"):
            if vae.config.get(name):
                return 2 ** (len(vae.config[name]) - 1)
        raise ValueError(
            f"{type(vae).__name__} does not say how much smaller its latents are; use an autoencoder for pictures "
            "that has block_out_channels in its configuration."
        )

    @classmethod
    def encode_image(cls, vae: ModelMixin, image: Tensor) -> Tensor:
        """
        Latents of pictures, float32, shifted and scaled as the transformer takes them; the mode of a distribution.

        Args:
            vae (`ModelMixin`): Any autoencoder of diffusers for pictures.
            image (`torch.Tensor` of shape `(images, channels, height, width)`): Values in [-1, 1], on its device.
        """
        with cls._upcast(vae):
            encoded = vae.encode(image.to(vae.dtype), return_dict=False)[0]
        latents = (encoded if isinstance(encoded, Tensor) else encoded.mode()).float()
        shift, scale = cls._latent_statistics(vae, latents)
        return (latents - shift) * scale

    @classmethod
    def decode_latents(cls, vae: ModelMixin, latents: Tensor) -> Tensor:
        """
        Pictures of latents, about [-1, 1], float32; what [`~DisentangledDiTPipeline.encode_image`] inverts.

        Args:
            vae (`ModelMixin`): Any autoencoder of diffusers for pictures.
            latents (`torch.Tensor` of shape `(images, latent_channels, height, width)`): On its device.
        """
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

    def prepare_image_latents(self, image: PipelineImageInput | Tensor, count: int, height: int, width: int) -> Tensor:
        """Clean latents [count, channels, ., .] to start from, of pictures or latents, one or `count`."""
        channels, factor, device = self.transformer.config.in_channels, self.vae_scale_factor, self._execution_device
        colours = channels if self.vae is None else self.vae.config.get("in_channels", 3)
        if isinstance(image, Tensor) and image.shape[1] == channels != colours:
            latents = image.to(device, torch.float32)
        else:
            kinds = {"do_convert_rgb": colours == 3, "do_convert_grayscale": colours == 1}
            self.image_processor.register_to_config(**kinds)
            pixels = self.image_processor.preprocess(image, height=height, width=width).to(device, torch.float32)
            latents = pixels if self.vae is None else self.encode_image(self.vae, pixels)
        return self._for_each(latents, "image", (count, channels, height // factor, width // factor))

    def prepare_mask(self, mask_image: PipelineImageInput | Tensor, count: int, height: int, width: int) -> Tensor:
        """True for latents [count, 1, ., .] that are made anew: those of which any pixel is white."""
        factor = self.vae_scale_factor
        mask = self.mask_processor.preprocess(mask_image, height=height, width=width).to(self._execution_device)
        mask = F.max_pool2d(mask.float(), factor) > 0.5
        return self._for_each(mask, "mask_image", (count, 1, height // factor, width // factor))

    @staticmethod
    def _for_each(latents: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
        """Latents of one picture, or of each, for all of them."""
        if latents.shape[1:] != shape[1:] or shape[0] % len(latents) != 0:
            raise ValueError(
                f"{name} gives latents of shape {tuple(latents.shape)}; of shape {shape[1:]} are needed, for one of "
                f"the {shape[0]} pictures or for each of them."
            )
        return latents.repeat_interleave(shape[0] // len(latents), dim=0)

    def prepare_latents(self, count: int, height: int, width: int, generator: Any, latents: Tensor | None) -> Tensor:
        """Standard normal noise [count, channels, ., .], float32."""
        device, factor = self._execution_device, self.vae_scale_factor
        shape = (count, self.transformer.config.in_channels, height // factor, width // factor)
        if isinstance(generator, list) and len(generator) != count:
            raise ValueError(f"generator has {len(generator)} entries for {count} pictures; give one, or as many.")
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
        if isinstance(self.scheduler, self._FLOW_MATCH):
            return self.scheduler.scale_noise(image, timestep, noise)
        return self.scheduler.add_noise(image, noise, timestep)

    def retrieve_timesteps(
        self, num_inference_steps: int, timesteps: Any, sigmas: Any, strength: float | None
    ) -> tuple[Tensor, int]:
        """Timesteps that are left, and how many steps of the schedule they are; a strength leaves the first out."""
        scheduler, device, begin = self.scheduler, self._execution_device, 0
        num_inference_steps = self._count("num_inference_steps", num_inference_steps)
        schedules = {"timesteps": timesteps, "sigmas": sigmas}
        given: dict[str, Any] = {name: list(value) for name, value in schedules.items() if value is not None}
        if not given.keys() <= inspect.signature(scheduler.set_timesteps).parameters.keys() or len(given) > 1:
            raise ValueError(f"{type(scheduler).__name__} does not take {' and '.join(given)}; leave one or both out.")
        total = len(*given.values()) if given else num_inference_steps
        scheduler.set_timesteps(**(given or {"num_inference_steps": total}), device=device)
        steps = total if strength is None else min(int(total * strength), total)
        if strength is not None:
            if steps < 1 or strength > 1:
                raise ValueError(f"strength is {strength} for {total} steps; it must be at most 1, and leave a step.")
            begin = (total - steps) * scheduler.order
            if hasattr(scheduler, "set_begin_index"):
                scheduler.set_begin_index(begin)
        left, kept = scheduler.timesteps[begin:], getattr(scheduler, "alphas_cumprod", None)
        # x0 = (x - sqrt(1 - a) e) / sqrt(a) has no value where a, the kept part of the picture, is 0
        blind = kept is not None and not kept[left.long().to(kept.device)].all()
        if blind and self.config.prediction_type == "epsilon":
            raise ValueError(
                f"{type(scheduler).__name__} starts from noise alone (zero-terminal SNR), of which predicted noise "
                "makes no picture; set rescale_betas_zero_snr=False, or timestep_spacing='leading'."
            )
        return left, steps

    def prepare_extra_step_kwargs(self, generator: Any, eta: float) -> dict[str, Any]:
        """What the scheduler's step takes of these; where it clips the picture, its noise has to follow."""
        accepted = inspect.signature(self.scheduler.step).parameters
        clips = any(self.scheduler.config.get(name, False) for name in ("clip_sample", "thresholding"))
        if eta != 0 and "eta" not in accepted:
            raise ValueError(f"eta={eta} means nothing to {type(self.scheduler).__name__}; leave it at 0 or use DDIM.")
        offered = {"eta": eta, "generator": generator, "use_clipped_model_output": clips}
        return {name: value for name, value in offered.items() if name in accepted}

    # Schedulers

    def _check_scheduler(self) -> None:
        """Refuses a scheduler with which the network's output would be read as something else."""
        scheduler: Any = self.scheduler
        if scheduler is None:
            return
        flow_match, get = isinstance(scheduler, self._FLOW_MATCH), scheduler.config.get
        found = "flow_prediction" if flow_match else self._check_family(scheduler)
        if self.config.prediction_type is None:
            self.register_to_config(prediction_type=found)
        wanted = self.config.prediction_type
        problems = {
            f"reads the network's output as {found}, and this network predicts {wanted}; use a scheduler with "
            f"prediction_type={wanted!r}": found != wanted,
            "has use_dynamic_shifting=True, which needs a shift for every call; set it to False, and `shift` for the "
            "size of the pictures": flow_match and get("use_dynamic_shifting"),
            f"has variance_type={get('variance_type')!r}, and the network predicts no variance; make it with "
            "variance_type='fixed_small'": str(get("variance_type")).startswith("learned"),
        }
        if self.transformer is not None:
            count, steps = get("num_train_timesteps"), self.transformer.config.num_train_timesteps
            problems[
                f"has {count} training timesteps, and the network {steps}; make it with num_train_timesteps={steps}"
            ] = count != steps
        self._refuse(scheduler, problems)

    @classmethod
    def _check_family(cls, scheduler: Any) -> str:
        """What a scheduler of the DDPM family reads the network's output as; others are refused."""
        options = inspect.signature(type(scheduler).__init__).parameters
        # IPNDM takes betas, and has a schedule of its own all the same; ScoreSde has two kinds of steps
        known = "trained_betas" in options and all(hasattr(scheduler, name) for name in ("alphas_cumprod", "step"))
        step: Any = inspect.signature(scheduler.step).parameters if known else {}
        needed = {name for name, option in step.items() if option.default is option.empty}
        times, get = getattr(scheduler, "timesteps", None), scheduler.config.get
        prediction, flow = str(get("prediction_type", "epsilon")), bool(get("use_flow_sigmas"))
        problems = {
            "is neither of the DDPM family (DDIM, DPM++, UniPC, Euler ...) nor FlowMatchEulerDiscreteScheduler or "
            "FlowMatchHeunDiscreteScheduler; use one of these": (
                not known or not needed <= {"model_output", "timestep", "sample"}
            ),
            "goes from pictures to noise; use the one that it is the inverse of": (
                times is not None and len(times) > 1 and bool(times[0] < times[-1])
            ),
            f"has prediction_type={prediction!r} and use_flow_sigmas={flow}; 'flow_prediction' needs True, all others "
            "False": flow != (prediction == "flow_prediction"),
            "has timestep_type='continuous', numbers that the network has not seen; make it with 'discrete'": (
                get("timestep_type") == "continuous"
            ),
        }
        cls._refuse(scheduler, problems)
        return prediction

    @staticmethod
    def _refuse(scheduler: Any, problems: dict[str, bool]) -> None:
        for problem, found in problems.items():
            if found:
                raise ValueError(f"{type(scheduler).__name__} {problem}.")

    # Conditions

    @classmethod
    def _plain(cls, value: Any) -> Any:
        """Python's numbers, and lists of them, from those of NumPy and torch, from tuples and lists."""
        if hasattr(value, "tolist"):
            return value.tolist()
        return [cls._plain(item) for item in value] if isinstance(value, list | tuple) else value

    @classmethod
    def _count(cls, name: str, value: Any) -> int:
        """A number of steps, pictures or pixels."""
        number = cls._plain(value)
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} is {value!r}; a whole number of at least 1 is needed.")
        return number

    def image_size(self, height: Any = None, width: Any = None, latents: Tensor | None = None) -> tuple[int, int]:
        """Height and width of the pictures in pixels: as given, or those of `latents` or of the model."""
        factor, patch = self.vae_scale_factor, self.transformer.config.patch_size
        usual = self.transformer.config.sample_size if latents is None else latents.shape[-2:]
        usual = (usual, usual) if isinstance(usual, int) else usual
        given = (self._plain(height), self._plain(width))
        size = tuple(side * factor if wish is None else wish for side, wish in zip(usual, given, strict=True))
        for name, side in zip(("height", "width"), size, strict=True):
            if isinstance(side, bool) or not isinstance(side, int) or side < 1 or side % (factor * patch) != 0:
                raise ValueError(
                    f"{name} is {side!r}; it must be a positive multiple of {factor * patch} pixels ({patch} for the "
                    f"transformer's patches, times {factor} for the autoencoder)."
                )
        return size

    def _check_labels(self, labels: Any, name: str) -> list[int]:
        """Numbers of classes from numbers, names, a tensor of numbers, or a list."""
        classes, labels = self.transformer.config.num_classes, self._plain(labels)
        if labels == []:
            raise ValueError(f"{name} is an empty list; give at least one class.")
        labels = labels if isinstance(labels, list) else [labels]
        numbers = [self.get_label_ids(label)[0] if isinstance(label, str) else label for label in labels]
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= classes:
                raise ValueError(
                    f"{name} has {number!r}; allowed are whole numbers from 0 to {classes - 1}, {classes} for no "
                    "class, and names of id2label."
                )
        return numbers

    def _encode_conditions(
        self, classes: tuple[Any, ...], texts: tuple[Any, ...], guided: bool, images: int
    ) -> tuple[Tensor, list[tuple[int, int]]]:
        """Context of the null branch, then of the others [2 B or B, L, D]; for each picture both labels, or 0."""
        inputs: dict[str, Tensor]
        if (null := self.transformer.config.num_classes) is not None:
            given = self._check_labels(classes[0], "class_labels")
            negative = self._check_labels(null if classes[1] is None else classes[1], "negative_class_labels")
            if len(negative) not in (1, len(given)):
                found = f"{len(negative)} negative_class_labels for {len(given)} class_labels"
                raise ValueError(f"{found}; give one, or as many.")
            negative = negative * (len(given) // len(negative))
            inputs = {"class_labels": torch.tensor([*negative, *given], device=self._execution_device)}
            labels = list(zip(negative, given, strict=True))
        else:
            prompt, negative_prompt, *embeds = texts
            tokens: Any  # check_inputs saw one of both
            tokens, others = self.encode_prompt(prompt, None, 1, guided, negative_prompt, *embeds)
            labels = [(0, 0)] * len(tokens)
            tokens = tokens if others is None else torch.cat([others.to(tokens), tokens])
            if tokens.shape[-1] != (width := self.transformer.config.joint_attention_dim):
                raise ValueError(
                    f"The tokens of the texts have {tokens.shape[-1]} numbers, and the transformer takes {width} "
                    "(joint_attention_dim); use the text encoder that it was trained with."
                )
            inputs = {"encoder_hidden_states": tokens.to(self._execution_device, self.transformer.dtype)}
        context, _ = self.transformer(**inputs, attention_kwargs=self._attention_kwargs, return_conditioning=True)
        return context.repeat_interleave(images, dim=0), [pair for pair in labels for _ in range(images)]

    def _read_control(self, name: str, value: Any, count: int, images: int) -> list[tuple[float, ...]]:
        """The numbers of a control for each of `count` pictures, of which `images` follow each other as a group."""
        words, size, most = self._CONTROLS[name]
        value = self._plain(value)
        # a list of numbers is one value where the control is a pair, and several where it is a number
        several = isinstance(value, list) and (size == 1 or any(isinstance(item, list) for item in value))
        each = value if several else [value]
        if len(each) not in (1, count // images, count):
            raise ValueError(f"{name} has {len(each)} values for {count} pictures; give one, or a list of as many.")
        zero, read = name in ("crop", "flip"), []
        for given in each:
            item = given if isinstance(given, list) else [given]
            fits = (isinstance(part, int | float) and (0 < part <= most or (zero and part == 0)) for part in item)
            if len(item) != size or not all(fits):
                raise ValueError(f"{name} has {given!r}; needed is {words}, or a list with one for each picture.")
            read.append(tuple(map(float, item)))
        return [item for item in read for _ in range(count // len(read))]

    def prepare_conditions(
        self, controls: dict[str, Any], size: tuple[int, int], labels: list[tuple[int, int]], images: int
    ) -> Conditions:
        """The inputs of adaLN for pictures with these controls, `None` for those of a whole, unmirrored picture."""
        config, count, device = self.transformer.config, len(labels), self._execution_device
        given = {name: value for name, value in controls.items() if value is not None}
        if unknown := sorted(given.keys() - config.control_alpha.keys()):
            known = ", ".join(config.control_alpha) or "none"
            raise ValueError(f"The model has no control {unknown[0]}; it was trained with {known}.")
        given = {"original_size": size, "crop": (0, 0), "target_size": size, "flip": 0} | given
        values = {name: self._read_control(name, value, count, images) for name, value in given.items()}
        ratios = values.get("aspect_ratio") or [(width / height,) for height, width in values["original_size"]]
        values["aspect_ratio"] = [(math.log(ratio),) for (ratio,) in ratios]
        full = [tuple(values[name][index] for name in config.control_alpha) for index in range(count)]
        # a class is no part of a state, except in the baseline that adds it to adaLN
        negative, positive = zip(*(labels if config.conditioning == "adaln" else [(0, 0)] * count), strict=True)
        dropped: list[Any] = [None] * count
        branches = {"null": (dropped, negative), "uncontrolled": (dropped, positive), "full": (full, positive)}
        states: dict[Any, int] = {}
        rows = {
            branch: [
                states.setdefault((given or None, label), len(states)) for given, label in zip(*both, strict=True)
            ]
            for branch, both in branches.items()
        }
        # where they are dropped any numbers will do
        numbers = [given or full[0] for given, _ in states]
        tensors = {
            name: torch.tensor([given[place] for given in numbers], device=device)
            for place, name in enumerate(config.control_alpha)
        }
        mask = torch.tensor([given is not None for given, _ in states], device=device)
        classes = torch.tensor([label for _, label in states], device=device)
        return self.Conditions(tensors, mask, rows, classes if config.conditioning == "adaln" else None)

    def modulations(self, timesteps: Tensor, conditions: Conditions) -> Iterator[Tensor]:
        """For each timestep the adaLN numbers of all conditions, [S, numbers]: they depend on no latents."""
        count, labels = len(conditions.mask), conditions.class_labels
        for block in timesteps.split(max(1, self.TABLE_ROWS // count)):
            _, table = self.transformer(
                timestep=block.repeat_interleave(count),
                class_labels=None if labels is None else labels.repeat(len(block)),
                controls={name: value.repeat(len(block), 1) for name, value in conditions.controls.items()},
                control_mask=conditions.mask.repeat(len(block)),
                attention_kwargs=self._attention_kwargs,
                return_conditioning=True,
            )
            yield from table.unflatten(0, (len(block), count))

    def guidance_weights(self, before: dict[str, float]) -> dict[str, float]:
        """Weights of the branches of the next step; the conditional one is last, as diffusers' callbacks expect."""
        config = self.transformer.config
        scale = max(self._guidance_scale, 1.0)
        control = self._control_guidance_scale if config.control_alpha else 1.0
        weights = {"null": 1 - scale, "uncontrolled": scale * (1 - control), "full": scale * control}
        weights = {name: weight for name, weight in weights.items() if weight != 0}
        if weights.keys() != before.keys():
            # a cache may keep a row for each branch that there was
            self.transformer._reset_stateful_cache()
        if "null" in weights and config.condition_dropout == 0 and not self._has_negative:
            raise ValueError(
                f"guidance_scale={self._guidance_scale} needs a network that was trained with condition_dropout, and "
                "this one was not. Set guidance_scale=1, or give a negative class or text."
            )
        if "uncontrolled" in weights and config.control_dropout == 0:
            raise ValueError(
                f"control_guidance_scale={self._control_guidance_scale} needs a network that was trained with "
                "control_dropout, and this one was not; set control_guidance_scale=1."
            )
        return weights

    @staticmethod
    def _gather_branches(
        context: Tensor, table: Tensor, weights: dict[str, float], rows: dict[str, list[int]]
    ) -> dict[str, Tensor]:
        """Context and adaLN numbers of the branches, one after the other; one row of numbers where all are equal."""
        count = len(rows["full"])
        if context.shape[0] not in (count, 2 * count) or ("null" in weights and context.shape[0] == count):
            raise ValueError(
                f"The context has {context.shape[0]} rows for {count} pictures; {2 * count} are needed with guidance, "
                f"{count} without. If a callback made it shorter, it must also set _guidance_scale to 1."
            )
        chosen = [row for branch in weights for row in rows[branch]]
        # one row for all is not only smaller: the transformer has a faster way for it
        numbers = [table[row] for row in (chosen if len(set(chosen)) > 1 else chosen[:1])]
        tokens = [context[:count] if branch == "null" else context[-count:] for branch in weights]
        return {"context": torch.cat(tokens), "modulation": torch.stack(numbers)}

    def _scale_model_input(self, latents: Tensor, timestep: Tensor) -> Tensor:
        """As the network takes them."""
        if not isinstance(self.scheduler, self._FLOW_MATCH):
            latents = self.scheduler.scale_model_input(latents, timestep)
        return latents.to(self.transformer.dtype)

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
        aspect_ratio: float | list[float] | None = None,
        num_images_per_prompt: int = 1,
        image: PipelineImageInput | None = None,
        mask_image: PipelineImageInput | None = None,
        strength: float = 0.8,
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
            negative_class_labels, negative_prompt (*optional*): What guidance leads away from; no class, or no text.
            height, width (`int`, *optional*): Size in pixels; that of `latents` or of the model if not given.
            num_inference_steps (`int`, defaults to 50): Steps of the scheduler.
            timesteps (`list[int]`, *optional*), sigmas (`list[float]`, *optional*): The scheduler's `set_timesteps`
                gets these instead, where it takes them.
            guidance_scale (`float`, defaults to 4.0): Strength lambda of the class or text; 1 or less is off.
            control_guidance_scale (`float`, defaults to 1.0): Strength beta of the controls; 0 leaves them out, and
                other values than 0 and 1 cost a third pass through the network in each step.
            original_size, target_size (`tuple[int, int]` or a list, *optional*): Height and width in pixels before
                resizing and cutting, and after; the size of the pictures if not given. A list of controls has one
                value for each picture.
            crop (`tuple[int, int]` or a list, *optional*): Top and left of the part, in pixels. Defaults to (0, 0).
            flip (`bool` or a list, *optional*): Whether left and right are exchanged. Defaults to False.
            aspect_ratio (`float` or a list, *optional*): Width over height. Defaults to that of `original_size`.
            num_images_per_prompt (`int`, defaults to 1): Pictures of each class or text.
            image (picture, `np.ndarray`, `torch.Tensor` or a list, *optional*): Start from noisy versions of these,
                resized to `height` and `width`; a tensor may hold latents.
            mask_image (picture, `np.ndarray`, `torch.Tensor` or a list, *optional*): White where `image` is made
                anew (inpainting); black parts stay as they are.
            strength (`float`, defaults to 0.8): How far from `image` to start, in (0, 1]; 1 is noise alone.
            eta (`float`, defaults to 0.0): Noise of DDIM.
            generator (`torch.Generator` or a list of one for each picture, *optional*): Source of all noise.
            latents (`torch.Tensor` of shape `(pictures, in_channels, height, width)`, *optional*): Standard normal
                noise to start from.
            prompt_embeds, negative_prompt_embeds (`torch.Tensor`, *optional*): From `encode_prompt`, instead of texts.
            output_type (`str`, defaults to `"pil"`): `"pil"`, `"np"`, `"pt"` or `"latent"`.
            return_dict (`bool`, defaults to `True`): Return an output object and not a tuple.
            attention_kwargs (`dict`, *optional*): `scale`, of the LoRA adapters.
            callback_on_step_end (*optional*): Called after each step with the pipeline, the step, the timestep and a
                dictionary of the tensors named in `callback_on_step_end_tensor_inputs`: `latents`, `noise_pred`, and
                `prompt_embeds`, the context of the null branch and then of the others. It returns what is to be
                replaced, and may set `_guidance_scale`, `_control_guidance_scale`, `_interrupt`.

        Returns:
            [`~diffusers.ImagePipelineOutput`], or a tuple with its `images`.
        """
        if isinstance(callback_on_step_end, PipelineCallback | MultiPipelineCallbacks):
            callback_on_step_end_tensor_inputs = callback_on_step_end.tensor_inputs
        classes = (class_labels, negative_class_labels)
        texts = (prompt, negative_prompt, prompt_embeds, negative_prompt_embeds)
        self.check_inputs(classes, texts, image, mask_image, output_type, callback_on_step_end_tensor_inputs)
        images_each = self._count("num_images_per_prompt", num_images_per_prompt)
        self._guidance_scale, self._control_guidance_scale = guidance_scale, control_guidance_scale
        self._attention_kwargs, self._interrupt = attention_kwargs, False
        # a callback may switch the guidance on, where there is something that encodes the null text
        guided = guidance_scale > 1 or (callback_on_step_end is not None and self.text_encoder is not None)
        prompt_embeds, labels = self._encode_conditions(classes, texts, guided, images_each)
        count, size = len(labels), self.image_size(height, width, latents)
        controls = {"original_size": original_size, "crop": crop, "target_size": target_size, "flip": flip}
        conditions = self.prepare_conditions({**controls, "aspect_ratio": aspect_ratio}, size, labels, images_each)

        part = None if image is None else strength
        times, steps = self.retrieve_timesteps(num_inference_steps, timesteps, sigmas, part)
        clean: Any = None if image is None else self.prepare_image_latents(image, count, *size)
        mask = None if mask_image is None else self.prepare_mask(mask_image, count, *size)
        noise = self.prepare_latents(count, *size, generator, latents)
        latents = self.add_noise(clean, noise, times[:1])
        extra_step_kwargs = self.prepare_extra_step_kwargs(generator, eta)

        self._num_timesteps, order = len(times), self.scheduler.order
        weights: dict[str, float] = {}
        with self.progress_bar(total=steps) as progress_bar:
            for i, (t, table) in enumerate(zip(times, self.modulations(times, conditions), strict=True)):
                if self.interrupt:
                    break
                self._current_timestep = t
                weights = self.guidance_weights(weights)
                with self.transformer.cache_context("-".join(weights)):
                    noise_pred = self.transformer(
                        hidden_states=self._scale_model_input(latents, t).repeat(len(weights), 1, 1, 1),
                        **self._gather_branches(prompt_embeds, table, weights, conditions.rows),
                        attention_kwargs=attention_kwargs,
                        return_dict=False,
                    )[0]
                parts = zip(weights.values(), noise_pred.float().chunk(len(weights)), strict=True)
                noise_pred = sum(weight * part for weight, part in parts)
                latents = self.scheduler.step(noise_pred, t, latents, return_dict=False, **extra_step_kwargs)[0]
                if mask is not None:
                    then = times[i + 1 : i + 2]
                    latents = torch.where(mask, latents, self.add_noise(clean, noise, then) if len(then) else clean)
                if callback_on_step_end is not None:
                    tensors = {"latents": latents, "noise_pred": noise_pred, "prompt_embeds": prompt_embeds}
                    tensors = {name: tensors[name] for name in callback_on_step_end_tensor_inputs}
                    changed = callback_on_step_end(self, i, t, tensors)
                    latents = changed.get("latents", latents)
                    prompt_embeds = changed.get("prompt_embeds", prompt_embeds)
                # some schedulers take several timesteps for a step, or a few more at the start
                if i + 1 == len(times) or (len(times) - i <= steps * order and (i + 1) % order == 0):
                    progress_bar.update()

        images: Any = latents
        if output_type != "latent":
            pixels = latents if self.vae is None else self.decode_latents(self.vae, latents)
            images = self.image_processor.postprocess(pixels, output_type=output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def check_inputs(
        self, classes: Any, texts: Any, image: Any, mask_image: Any, output_type: str, tensor_inputs: Any
    ) -> None:
        """Raise a ValueError for parts that are missing, and inputs that the model has no use for."""
        if missing := [name for name in ("transformer", "scheduler") if getattr(self, name) is None]:
            raise ValueError(f"There is no {' and no '.join(missing)}; load the pipeline with it to make pictures.")
        self._check_scheduler()
        if self.transformer.config.num_classes is None:
            if (texts[0] is None) == (texts[2] is None) or any(value is not None for value in classes):
                raise ValueError("This is a text model: give prompt or prompt_embeds, not both, and no class_labels.")
        elif classes[0] is None or any(value is not None for value in texts):
            raise ValueError("This is a class model: give class_labels, no prompt; numbers or names of classes.")
        if mask_image is not None and image is None:
            raise ValueError("mask_image says where image is made anew, and there is no image; give both.")
        if output_type not in self._OUTPUT_TYPES:
            raise ValueError(f"output_type is {output_type!r}; one of {', '.join(self._OUTPUT_TYPES)} is allowed.")
        if unknown := sorted(set(tensor_inputs) - set(self._callback_tensor_inputs)):
            raise ValueError(
                f"callback_on_step_end_tensor_inputs has {unknown}; of {self._callback_tensor_inputs} is allowed."
            )
        self._has_negative = any(value is not None for value in (classes[1], texts[1], texts[3]))

    # Saving

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs: Any) -> "DisentangledDiTPipeline":
        """A pipeline with the components of another, not copied; `kwargs` are used instead of them."""
        # diffusers would compare classes, and the type of the transformer is another where it is remote code
        wanted = inspect.signature(cls.__init__).parameters
        components = {name: value for name, value in pipeline.components.items() if name in wanted}
        if "dtype" not in kwargs and "torch_dtype" not in kwargs:
            kwargs["dtype"] = pipeline.dtype
        return super().from_pipe(pipeline, **{**components, **kwargs})

    def save_pretrained(self, save_directory: str | os.PathLike[str], *arguments: Any, **kwargs: Any) -> None:
        """
        Saves the pipeline and the code that loads it: `pipeline.py`, and the transformer's file beside its weights.

        The folder loads with `import hf_ext.pipelines` and `DiffusionPipeline.from_pretrained(folder)`, and without
        hf_ext by `DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)`.

        Args:
            save_directory (`str` or `os.PathLike`): The folder.
            *arguments, **kwargs: As in [`~diffusers.DiffusionPipeline.save_pretrained`].
        """
        if not hasattr(self.transformer, "_CODE"):
            kind = type(self.transformer).__name__
            raise TypeError(f"The transformer is a {kind}; only a pipeline of a {self._COMPONENT[1]} is saved.")
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
        index |= {"_class_name": ["pipeline", "DisentangledDiTPipeline"], "transformer": self._COMPONENT}
        return json.dumps(index, indent=2, sort_keys=True) + "\n"
