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
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    DDPMScheduler,
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
    values are pixels in [-1, 1], grey where it has one channel. Every part may be left out: with `text_encoder` and
    `tokenizer` alone it encodes texts, and makes pictures of them once it is loaded without these.

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

    Raises:
        ValueError: `text_padding` is none of the modes, or the scheduler does not fit.
    """

    # Any: of these diffusers' types know a dictionary without attributes, and None.
    config: Any
    model_cpu_offload_seq: Any = "text_encoder->transformer->vae"
    _optional_components = ["vae", "text_encoder", "tokenizer"]
    _callback_tensor_inputs = ["latents", "noise_pred", "prompt_embeds"]

    _PADDINGS = ("zeros", "replicate", "noisy_replicate")
    _OUTPUT_TYPES = ("pil", "np", "pt", "latent")
    # Where diffusers looks for a component's code, in a repository and among its own pipelines.
    _COMPONENT = ["disentangled_dit", "DisentangledDiTTransformer2DModel"]
    # Read now: a later version of this file would take the place of the one that this class was made from.
    _CODE = Path(__file__).read_text(encoding="utf-8")

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

    @property
    def vae_scale_factor(self) -> int:
        """How many pixels a latent of the present `vae` is wide; 1 without one."""
        return 1 if self.vae is None else self._scale_factor(self.vae)

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
        """Whether the next step needs the null branch."""
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
        Numbers of classes.

        Args:
            label (`str` or `list[str]`): One name of `id2label`, or several.

        Returns:
            `list[int]`: For `class_labels` of a call.

        Raises:
            ValueError: There is no such name; the message lists similar ones.
        """
        numbers = []
        for name in [label] if isinstance(label, str) else list(label):
            if not self.labels:
                raise ValueError(
                    f"The label {name!r} is a name, and this pipeline knows none; give the number of the class, or "
                    "make the pipeline with id2label."
                )
            if name not in self.labels:
                similar = difflib.get_close_matches(str(name), self.labels, n=5, cutoff=0.4) or list(self.labels)[:5]
                raise ValueError(
                    f"There is no class {name!r}; of the {len(self.labels)} names, similar or first are: "
                    f"{', '.join(similar)}."
                )
            numbers.append(self.labels[name])
        return numbers

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
        Tokens of texts as the transformer attends to them: encoded, then padded by `text_padding`.

        The noise of the padding is seeded by the text itself: the same text gives the same tokens, whatever else is in
        the batch and whatever the seed of the pictures, so they can be kept and given to a call. Neither transformer
        nor scheduler is needed.

        Args:
            prompt (`str` or `list[str]`): The texts; `""` is the null text, and `None` none (of a class model).
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
        padding = {"padding": "max_length", "padding_side": "right", "max_length": self.config.max_text_length}
        tokens = self.tokenizer(texts, truncation=True, return_tensors="pt", **padding)
        tokens = tokens.to(device or self._execution_device)
        states = self.text_encoder(tokens.input_ids, attention_mask=tokens.attention_mask).last_hidden_state
        # 63 bits: a torch seed is a signed number
        seeds = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1 for text in texts]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        mode, noise = self.config.text_padding, self.config.text_padding_noise
        return self.pad_text(states, tokens.attention_mask.sum(dim=1), mode, noise, generators)

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
            mode (`str`): `"zeros"`; `"replicate"`: copies of the real tokens; `"noisy_replicate"`: copies with noise,
                in proportion to the standard deviation of each number over the real tokens.
            noise (`float`): Its strength.
            generator (`torch.Generator` or a list of one for each text, *optional*): Source of the noise.

        Returns:
            `torch.Tensor`: Of the shape and type of `tokens`; the real tokens are as they were.

        Raises:
            ValueError: `mode` is none of the three.
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
    def _scale_factor(vae: ModelMixin) -> int:
        """How many pixels a latent is wide."""
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
        Latents of pictures, shifted and scaled as the transformer takes them; the mode where they are a distribution.

        Args:
            vae (`ModelMixin`): Any autoencoder of diffusers for pictures.
            image (`torch.Tensor` of shape `(images, channels, height, width)`): Values in [-1, 1], on the device that
                the autoencoder runs on.

        Returns:
            `torch.Tensor` of shape `(images, latent_channels, height / factor, width / factor)`, float32.
        """
        with cls._upcast(vae):
            encoded = vae.encode(image.to(vae.dtype), return_dict=False)[0]
        latents = (encoded if isinstance(encoded, Tensor) else encoded.mode()).float()
        shift, scale = cls._latent_statistics(vae, latents)
        return (latents - shift) * scale

    @classmethod
    def decode_latents(cls, vae: ModelMixin, latents: Tensor) -> Tensor:
        """
        Pictures of latents; the inverse of [`~DisentangledDiTPipeline.encode_image`], as far as the autoencoder goes.

        Args:
            vae (`ModelMixin`): Any autoencoder of diffusers for pictures.
            latents (`torch.Tensor` of shape `(images, latent_channels, height, width)`): On the device that the
                autoencoder runs on.

        Returns:
            `torch.Tensor` of shape `(images, channels, factor * height, factor * width)`, about [-1, 1], float32.
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
        yield
        if vae.dtype != dtype:
            vae.to(dtype)

    def _prepare_image(self, image: PipelineImageInput | Tensor, size: tuple[int, int], count: int) -> Tensor:
        """Clean latents [count, channels, height, width] to start from, of pictures or latents, one or `count`."""
        channels, factor, device = self.transformer.config.in_channels, self.vae_scale_factor, self._execution_device
        colours = channels if self.vae is None else self.vae.config.get("in_channels", 3)
        if isinstance(image, Tensor) and image.shape[1] == channels != colours:
            latents = image.to(device, torch.float32)
        else:
            kinds = {"do_convert_rgb": colours == 3, "do_convert_grayscale": colours == 1}
            self.image_processor.register_to_config(**kinds)
            pixels = self.image_processor.preprocess(image, height=size[0], width=size[1]).to(device, torch.float32)
            latents = pixels if self.vae is None else self.encode_image(self.vae, pixels)
        shape = (channels, size[0] // factor, size[1] // factor)
        if tuple(latents.shape[1:]) != shape or count % latents.shape[0] != 0:
            raise ValueError(
                f"image gives latents of shape {tuple(latents.shape)}; of shape {shape} are needed, for one of the "
                f"{count} pictures or for each of them."
            )
        return latents.repeat_interleave(count // latents.shape[0], dim=0)

    def _prepare_latents(
        self,
        count: int,
        size: tuple[int, int],
        generator: torch.Generator | list[torch.Generator] | None,
        latents: Tensor | None,
        image: Tensor | None,
        timesteps: Tensor,
    ) -> Tensor:
        """What sampling starts from, float32: noise as strong as the scheduler wants it, or a noisy image."""
        device, factor = self._execution_device, self.vae_scale_factor
        shape = (count, self.transformer.config.in_channels, size[0] // factor, size[1] // factor)
        if isinstance(generator, list) and len(generator) != count:
            raise ValueError(f"generator has {len(generator)} entries for {count} pictures; give one, or as many.")
        if latents is None:
            latents = randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)
        if tuple(latents.shape) != shape:
            raise ValueError(f"latents have the shape {tuple(latents.shape)}; {shape} is needed.")
        noise = latents.to(device, torch.float32)
        if image is None:
            # flow matching starts from the noise as it is
            return noise * getattr(self.scheduler, "init_noise_sigma", 1.0)
        if self._is_flow_match(self.scheduler):
            return self.scheduler.scale_noise(image, timesteps[:1], noise)
        return self.scheduler.add_noise(image, noise, timesteps[:1])

    def _start(self, num_inference_steps: int, strength: float | None) -> tuple[Tensor, int]:
        """Timesteps that are left, and how many steps of the schedule they are; a strength leaves the first out."""
        scheduler, steps, begin = self.scheduler, num_inference_steps, 0
        scheduler.set_timesteps(num_inference_steps, device=self._execution_device)
        if strength is not None:
            steps = min(int(num_inference_steps * strength), num_inference_steps)
            if steps < 1 or strength > 1:
                raise ValueError(
                    f"strength is {strength} for {num_inference_steps} steps; it must be at most 1, and leave one of "
                    "them."
                )
            begin = (num_inference_steps - steps) * scheduler.order
            if hasattr(scheduler, "set_begin_index"):
                scheduler.set_begin_index(begin)
        timesteps, kept = scheduler.timesteps[begin:], getattr(scheduler, "alphas_cumprod", None)
        # x0 = (x - sqrt(1 - a) e) / sqrt(a) has no value where a, the kept part of the picture, is 0
        blind = kept is not None and not kept[timesteps.long().to(kept.device)].all()
        if blind and self.config.prediction_type == "epsilon":
            raise ValueError(
                f"{type(scheduler).__name__} starts from noise alone (zero-terminal SNR), of which predicted noise "
                "makes no picture; set rescale_betas_zero_snr=False, or timestep_spacing='leading'."
            )
        return timesteps, steps

    # Schedulers

    @staticmethod
    def _is_flow_match(scheduler: SchedulerMixin) -> bool:
        return isinstance(scheduler, FlowMatchEulerDiscreteScheduler | FlowMatchHeunDiscreteScheduler)

    @classmethod
    def _prediction_of(cls, scheduler: Any) -> str:
        """What a scheduler reads the network's output as."""
        if cls._is_flow_match(scheduler):
            return "flow_prediction"
        step, options = (inspect.signature(part).parameters for part in (scheduler.step, type(scheduler).__init__))
        needed = {name for name, option in step.items() if option.default is option.empty}
        # IPNDM takes betas, and has a schedule of its own all the same
        known = "trained_betas" in options and hasattr(scheduler, "alphas_cumprod")
        times, get = getattr(scheduler, "timesteps", None), scheduler.config.get
        prediction, flow = str(get("prediction_type", "epsilon")), bool(get("use_flow_sigmas"))
        cls._refuse(
            scheduler,
            {
                "is neither of the DDPM family (DDIM, DPM++, UniPC, Euler ...) nor FlowMatchEulerDiscreteScheduler or "
                "FlowMatchHeunDiscreteScheduler; use one of these": (
                    not known or not needed <= {"model_output", "timestep", "sample"}
                ),
                "goes from pictures to noise; use the one that it is the inverse of": (
                    times is not None and len(times) > 1 and bool(times[0] < times[-1])
                ),
                f"has prediction_type={prediction!r} and use_flow_sigmas={flow}; 'flow_prediction' needs True, all "
                "others False": flow != (prediction == "flow_prediction"),
                "has timestep_type='continuous', numbers that the network has not seen; make it with 'discrete'": (
                    get("timestep_type") == "continuous"
                ),
            },
        )
        return prediction

    @staticmethod
    def _refuse(scheduler: Any, problems: dict[str, bool]) -> None:
        for problem, found in problems.items():
            if found:
                raise ValueError(f"{type(scheduler).__name__} {problem}.")

    def _check_scheduler(self) -> None:
        """Refuses a scheduler with which the network's output would be read as something else."""
        if self.scheduler is None:
            return
        config, found = self.scheduler.config, self._prediction_of(self.scheduler)
        if self.config.prediction_type is None:
            self.register_to_config(prediction_type=found)
        wanted = self.config.prediction_type
        other = ", or FlowMatchEulerDiscreteScheduler" if "flow" in wanted else ""
        problems = {
            f"reads the network's output as {found}, and this network predicts {wanted}; use a scheduler with "
            f"prediction_type={wanted!r}{other}": found != wanted,
            "has use_dynamic_shifting=True, which needs a shift for every call; set it to False, and `shift` for the "
            "size of the pictures": self._is_flow_match(self.scheduler) and config.get("use_dynamic_shifting"),
        }
        if self.transformer is not None:
            network, ddpm = self.transformer.config, isinstance(self.scheduler, DDPMScheduler)
            steps, variance = network.num_train_timesteps, config.get("variance_type")
            learned = str(variance).startswith("learned")
            problems |= {
                f"has {config.num_train_timesteps} training timesteps, and the network {steps}; make it with "
                f"num_train_timesteps={steps}": config.num_train_timesteps != steps,
                f"has variance_type={variance!r}; only DDPMScheduler takes a learned variance here, and only of a "
                "network with twice as many output channels. Make it with variance_type="
                + ("'fixed_small'" if ddpm else "None"): (
                    learned and not (ddpm and network.out_channels == 2 * network.in_channels)
                ),
            }
        self._refuse(self.scheduler, problems)

    # Conditions

    @classmethod
    def _plain(cls, value: Any) -> Any:
        """Python's numbers, and lists of them, from those of NumPy and torch, from tuples and lists."""
        if hasattr(value, "tolist"):
            return value.tolist()
        return [cls._plain(item) for item in value] if isinstance(value, list | tuple) else value

    def _count(self, name: str, value: Any) -> int:
        """A number of steps or pictures."""
        number = self._plain(value)
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} is {value!r}; a whole number of at least 1 is needed.")
        return number

    def _check_labels(self, labels: Any, name: str) -> list[int]:
        """Numbers of classes from numbers, names, a tensor of numbers, or a list."""
        classes = self.transformer.config.num_classes
        labels, numbers = self._plain(labels), []
        if labels == []:
            raise ValueError(f"{name} is an empty list; give at least one class.")
        for label in labels if isinstance(labels, list) else [labels]:
            number = self.get_label_ids(label)[0] if isinstance(label, str) else label
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= classes:
                raise ValueError(
                    f"{name} has {label!r}; allowed are whole numbers from 0 to {classes - 1}, {classes} for no "
                    "class, and names of id2label."
                )
            numbers.append(number)
        return numbers

    def _encode_classes(self, labels: Any, negative: Any) -> list[int]:
        """Labels of the null branch, then of the others."""
        if labels is None:
            raise ValueError("This is a class model: give class_labels, numbers or names of classes.")
        given = self._check_labels(labels, "class_labels")
        null = self.transformer.config.num_classes if negative is None else negative
        null = self._check_labels(null, "negative_class_labels")
        if len(null) not in (1, len(given)):
            raise ValueError(f"{len(null)} negative_class_labels for {len(given)} class_labels; give one, or as many.")
        return [*null * (len(given) // len(null)), *given]

    def _encode_conditions(
        self, classes: tuple[Any, ...], texts: tuple[Any, ...], images: int
    ) -> tuple[Tensor, list[tuple[int, int]]]:
        """Context of the null branch, then of the others [2 B or B, L, width]; for each picture both labels, or 0."""
        is_class_model = self.transformer.config.num_classes is not None
        self._has_negative = any(item is not None for item in (classes[1], texts[1], texts[3]))
        if any(value is not None for value in (texts if is_class_model else classes)):
            kind, use = ("class", "class_labels, no prompt") if is_class_model else ("text", "prompt, no class_labels")
            raise ValueError(f"This is a {kind} model: give {use}.")
        options = {"attention_kwargs": self._attention_kwargs, "return_conditioning": True}
        if is_class_model:
            labels = self._encode_classes(*classes)
            numbers = torch.tensor(labels, device=self._execution_device)
            context, _ = self.transformer(class_labels=numbers, **options)
            pairs = list(zip(labels[: len(labels) // 2], labels[len(labels) // 2 :], strict=True))
        else:
            prompt, negative_prompt, *embeds = texts
            if (prompt is None) == (embeds[0] is None):
                raise ValueError("This is a text model: give prompt or prompt_embeds, not both, and no class_labels.")
            given: Any  # one of both is there
            given, negative = self.encode_prompt(prompt, None, 1, self._may_guide, negative_prompt, *embeds)
            tokens = given if negative is None else torch.cat([negative.to(given), given])
            if tokens.shape[-1] != (width := self.transformer.config.joint_attention_dim):
                raise ValueError(
                    f"The tokens of the texts have {tokens.shape[-1]} numbers, and the transformer takes {width} "
                    "(joint_attention_dim); use the text encoder that it was trained with."
                )
            tokens = tokens.to(self._execution_device, self.transformer.dtype)
            context, _ = self.transformer(encoder_hidden_states=tokens, **options)
            pairs = [(0, 0)] * len(given)
        return context.repeat_interleave(images, dim=0), [pair for pair in pairs for _ in range(images)]

    def _check_size(self, height: int | None, width: int | None, latents: Tensor | None) -> tuple[int, int]:
        """Height and width of the pictures in pixels."""
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

    # Guidance

    def _branches(self, idle: bool) -> dict[str, float]:
        """Weights of the branches that this step needs; `idle`: the controls add nothing at this timestep."""
        config = self.transformer.config
        scale = max(self._guidance_scale, 1.0)
        control = 1.0 if idle or not config.control_alpha else self._control_guidance_scale
        # in the batch the conditional branch comes last, as diffusers' callbacks expect
        weights = {"null": 1 - scale, "uncontrolled": scale * (1 - control), "full": scale * control}
        weights = {name: weight for name, weight in weights.items() if weight != 0}
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

    def _predict(
        self,
        latents: Tensor,
        timestep: Tensor,
        weights: dict[str, float],
        table: Tensor,
        rows: dict[str, list[int]],
        context: Tensor,
    ) -> Tensor:
        """The guided output of the network for [B, ...] latents; a learned variance is the conditional branch's."""
        count = latents.shape[0]
        if context.shape[0] not in (count, 2 * count) or ("null" in weights and context.shape[0] == count):
            raise ValueError(
                f"The context has {context.shape[0]} rows for {count} pictures; {2 * count} are needed with guidance, "
                f"{count} without. If a callback made it shorter, it must also set _guidance_scale to 1."
            )
        negative, given = context[:count], context[-count:]
        inputs = latents
        if not self._is_flow_match(self.scheduler):
            inputs = self.scheduler.scale_model_input(latents, timestep)
        chosen = [index for branch in weights for index in rows[branch]]
        # one row for all is not only smaller: the transformer has a faster way for it
        modulation = torch.stack([table[index] for index in (chosen if len(set(chosen)) > 1 else chosen[:1])])
        with self.transformer.cache_context("-".join(weights)):
            output = self.transformer(
                hidden_states=inputs.to(self.transformer.dtype).repeat(len(weights), 1, 1, 1),
                context=torch.cat([negative if branch == "null" else given for branch in weights]),
                modulation=modulation,
                attention_kwargs=self._attention_kwargs,
                return_dict=False,
            )[0]
        parts = output.to(latents.dtype).unflatten(0, (len(weights), count)).unbind(0)
        channels = latents.shape[1]
        guided = sum(weight * part[:, :channels] for weight, part in zip(weights.values(), parts, strict=True))
        if str(self.scheduler.config.get("variance_type")).startswith("learned"):
            guided = torch.cat([guided, parts[-1][:, channels:]], dim=1)
        return guided

    def _denoise(
        self,
        latents: Tensor,
        timesteps: Tensor,
        steps: int,
        prompt_embeds: Tensor,
        states: tuple[dict[str, Tensor], dict[str, Tensor], dict[str, list[int]]],
        step_options: dict[str, Any],
        callback: Callable[..., dict[str, Any]] | PipelineCallback | MultiPipelineCallbacks | None,
        callback_inputs: list[str] | tuple[str, ...],
    ) -> Tensor:
        """All steps of the scheduler, on the latents of the pictures alone."""
        self._num_timesteps = len(timesteps)
        order = self.scheduler.order
        weights: dict[str, float] = {}
        with self.progress_bar(total=steps) as progress:
            tables = self.transformer.modulation_tables(timesteps, *states, self._attention_kwargs)
            for index, (table, idle) in enumerate(tables):
                if self._interrupt:
                    break
                self._current_timestep = timestep = timesteps[index]
                before, weights = weights, self._branches(idle)
                if before.keys() != weights.keys():
                    # a cache may keep a row for each branch that there was
                    self.transformer._reset_stateful_cache()
                noise_pred = self._predict(latents, timestep, weights, table, states[-1], prompt_embeds)
                latents = self.scheduler.step(noise_pred, timestep, latents, return_dict=False, **step_options)[0]
                if callback is not None:
                    tensors = {"latents": latents, "noise_pred": noise_pred, "prompt_embeds": prompt_embeds}
                    changed = callback(self, index, timestep, {name: tensors[name] for name in callback_inputs})
                    latents = changed.get("latents", latents)
                    prompt_embeds = changed.get("prompt_embeds", prompt_embeds)
                # some schedulers take several timesteps for a step, or a few more at the start
                left = len(timesteps) - 1 - index
                if left == 0 or (left < steps * order and (index + 1) % order == 0):
                    progress.update()
        return latents

    def _step_options(self, eta: float, generator: Any) -> dict[str, Any]:
        """What the scheduler's step takes of these; where it clips the picture, its noise has to follow."""
        accepted = inspect.signature(self.scheduler.step).parameters
        clips = any(self.scheduler.config.get(name, False) for name in ("clip_sample", "thresholding"))
        if eta != 0 and "eta" not in accepted:
            raise ValueError(f"eta={eta} means nothing to {type(self.scheduler).__name__}; leave it at 0 or use DDIM.")
        offered = {"eta": eta, "generator": generator, "use_clipped_model_output": clips}
        return {name: value for name, value in offered.items() if name in accepted}

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
        guidance_scale: float = 4.0,
        control_guidance_scale: float = 1.0,
        guidance_null_control: bool = False,
        original_size: tuple[int, int] | list[tuple[int, int]] | None = None,
        crop: tuple[int, int] | list[tuple[int, int]] | None = None,
        target_size: tuple[int, int] | list[tuple[int, int]] | None = None,
        flip: bool | list[bool] | None = None,
        aspect_ratio: float | list[float] | None = None,
        num_images_per_prompt: int = 1,
        image: PipelineImageInput | None = None,
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
            negative_class_labels, negative_prompt (*optional*): What guidance leads away from, one or one for each; no
                class or the empty text if not given.
            height, width (`int`, *optional*): Size in pixels; that of `latents` or of the model if not given.
            num_inference_steps (`int`, defaults to 50): Steps of the scheduler.
            guidance_scale (`float`, defaults to 4.0): Strength lambda of the class or text; 1 or less is off.
            control_guidance_scale (`float`, defaults to 1.0): Strength beta of the controls; 0 leaves them out, and
                other values than 0 and 1 cost a third pass through the network in each step.
            guidance_null_control (`bool`, defaults to `False`): Keep the controls in the null branch.
            original_size, target_size (`tuple[int, int]` or a list, *optional*): Height and width in pixels of the
                picture before it was resized and cut, and after. Default to the size of the pictures. A list of
                controls has one value for each picture.
            crop (`tuple[int, int]` or a list, *optional*): Top and left of the part, in pixels. Defaults to (0, 0).
            flip (`bool` or a list, *optional*): Whether left and right are exchanged. Defaults to False.
            aspect_ratio (`float` or a list, *optional*): Width over height. Defaults to that of `original_size`.
            num_images_per_prompt (`int`, defaults to 1): Pictures of each class or text.
            image (picture, `np.ndarray`, `torch.Tensor` or a list, *optional*): Start from noisy versions of these,
                resized to `height` and `width`; a tensor may hold latents.
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
                `prompt_embeds`, the context of the null branch and then of the others. The first and the last are
                replaced by what it returns; it may set `_guidance_scale`, `_control_guidance_scale`, `_interrupt`.

        Returns:
            [`~diffusers.ImagePipelineOutput`], or a tuple with its `images`.

        Raises:
            ValueError: An input that the model or the scheduler has no use for; the message says what to do.
        """
        if isinstance(callback_on_step_end, PipelineCallback | MultiPipelineCallbacks):
            callback_on_step_end_tensor_inputs = callback_on_step_end.tensor_inputs
        self._check_options(output_type, callback_on_step_end_tensor_inputs)
        num_inference_steps = self._count("num_inference_steps", num_inference_steps)
        images_each = self._count("num_images_per_prompt", num_images_per_prompt)
        self._guidance_scale, self._control_guidance_scale = guidance_scale, control_guidance_scale
        self._attention_kwargs, self._interrupt = attention_kwargs, False
        # a callback may switch the guidance on, where there is something that encodes the null text
        self._may_guide = guidance_scale > 1 or (callback_on_step_end is not None and self.text_encoder is not None)

        texts = (prompt, negative_prompt, prompt_embeds, negative_prompt_embeds)
        context, labels = self._encode_conditions((class_labels, negative_class_labels), texts, images_each)
        count = len(labels)
        size = self._check_size(height, width, latents)
        controls = {"original_size": original_size, "crop": crop, "target_size": target_size, "flip": flip}
        given = {name: self._plain(value) for name, value in {**controls, "aspect_ratio": aspect_ratio}.items()}
        values = self.transformer.read_controls(given, size, count, images_each)
        states = self.transformer.plan_states(values, labels, guidance_null_control, self._execution_device)
        timesteps, steps = self._start(num_inference_steps, None if image is None else strength)
        clean = None if image is None else self._prepare_image(image, size, count)
        latents = self._prepare_latents(count, size, generator, latents, clean, timesteps)
        options = self._step_options(eta, generator)
        callback = (callback_on_step_end, callback_on_step_end_tensor_inputs)
        latents = self._denoise(latents, timesteps, steps, context, states, options, *callback)
        images = self._finish(latents, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _check_options(self, output_type: str, callback_inputs: Any) -> None:
        if missing := [name for name in ("transformer", "scheduler") if getattr(self, name) is None]:
            raise ValueError(f"There is no {' and no '.join(missing)}; load the pipeline with it to make pictures.")
        self._check_scheduler()
        if output_type not in self._OUTPUT_TYPES:
            raise ValueError(f"output_type is {output_type!r}; one of {', '.join(self._OUTPUT_TYPES)} is allowed.")
        if unknown := sorted(set(callback_inputs) - set(self._callback_tensor_inputs)):
            raise ValueError(
                f"callback_on_step_end_tensor_inputs has {unknown}; of {self._callback_tensor_inputs} is allowed."
            )

    def _finish(self, latents: Tensor, output_type: str) -> Any:
        """Pictures of clean latents."""
        if output_type == "latent":
            return latents
        images = latents if self.vae is None else self.decode_latents(self.vae, latents)
        return self.image_processor.postprocess(images, output_type=output_type)

    # Saving

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs: Any) -> "DisentangledDiTPipeline":
        """
        A pipeline with the components of another, not copied.

        Args:
            pipeline (`DiffusionPipeline`): Where they come from.
            **kwargs: Components and options to use instead, and `dtype`; by default that of `pipeline`.
        """
        # diffusers would compare classes, and the type of the transformer is another where it is remote code
        wanted = inspect.signature(cls.__init__).parameters
        components = {name: value for name, value in pipeline.components.items() if name in wanted}
        if "dtype" not in kwargs and "torch_dtype" not in kwargs:
            kwargs["dtype"] = pipeline.dtype
        return super().from_pipe(pipeline, **{**components, **kwargs})

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        safe_serialization: bool = True,
        variant: str | None = None,
        max_shard_size: int | str | None = None,
        push_to_hub: bool = False,
        use_flashpack: bool = False,
        **kwargs: Any,
    ) -> None:
        """
        Saves the pipeline and the code that loads it: `pipeline.py`, and the transformer's file beside its weights.

        The folder loads with `import hf_ext.pipelines` and `DiffusionPipeline.from_pretrained(folder)`, and without
        hf_ext by `DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)`.

        Args:
            save_directory (`str` or `os.PathLike`): The folder.
            safe_serialization, variant, max_shard_size, push_to_hub, use_flashpack, **kwargs: As in
                [`~diffusers.DiffusionPipeline.save_pretrained`].

        Raises:
            TypeError: The transformer is of another class.
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
        options = (safe_serialization, variant, max_shard_size, push_to_hub, use_flashpack)
        super().save_pretrained(str(folder), *options, **kwargs)

    def to_json_string(self) -> str:
        """The content of `model_index.json`."""
        # Files and classes, as diffusers finds them by trust_remote_code alone; of remote code it records lost names.
        index = json.loads(super().to_json_string())
        index |= {"_class_name": ["pipeline", "DisentangledDiTPipeline"], "transformer": self._COMPONENT}
        return json.dumps(index, indent=2, sort_keys=True) + "\n"
