"""Disentangled DiT (arXiv 2411.03177) in the shared training loop: samples, loss, scores, pictures of its own.

The loss is the squared error of the predicted noise, velocity or flow. With probability `condition_dropout` a sample
loses class or text and controls, else with `control_dropout` its controls only: the states that guidance with two
strengths combines.
"""

import inspect
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import datasets
import numpy as np
import peft
import torch
from accelerate.utils import send_to_device
from diffusers import ModelMixin
from huggingface_hub.dataclasses import strict
from PIL import Image
from torch import Generator, Tensor, nn
from torch.utils.data import default_collate

from hf_ext.data.opening import class_names
from hf_ext.pipelines.disentangled_dit.pipeline import DisentangledDiTPipeline
from hf_ext.pipelines.disentangled_dit.transformer_disentangled_dit import DisentangledDiTTransformer2DModel
from hf_ext.settings import build
from hf_ext.tasks.diffusion_grids import draw_grid, sample_rows
from hf_ext.training.models import initialize_from, read_model_section
from hf_ext.training.task import Task

from ..distributed import scan_once
from ..errors import DataError, UsageError
from .checks import Scores, column, require
from .diffusion_data import Crops, Size, cut_view, encode_posterior, load_autoencoder, read_row, to_pixels, unpack_row
from .diffusion_noise import Timesteps, make_scheduler, noise_shares, noisy_samples, objective_of, weighted_error
from .diffusion_texts import Captions, weigh_columns
from .diffusion_transfer import Checkpoint, Transfer, is_part_of, open_pipeline, transfer
from .pictures import picture_of

logger = logging.getLogger(__name__)

# Inputs of the network, a sample or a batch of them.
Batch = dict[str, Any]


@strict
@dataclass
class DisentangledDiTTask(Task):
    """
    Image generation with [`DisentangledDiTTransformer2DModel`], from classes or captions, in pixels or latents.

    A row has an image, or its latent from `hf-ext dit precompute`, and a class or a caption.

    Args:
        image_size (`int` or `list[int]`, defaults to 32): Side, or height and width, of the model's pictures in
            pixels. All pictures are cropped to it; latents have the shapes of `hf-ext dit precompute --max-ratio`.
        objective (`"epsilon"`, `"v_prediction"` or `"flow"`, defaults to `"epsilon"`): Target of the prediction.
        noise_schedule (`dict`):
            Settings of diffusers' `DDIMScheduler` or, for flow, `FlowMatchEulerDiscreteScheduler`; those of latent
            diffusion where not given. With `init_from`, the checkpoint's schedule is used.
        timesteps (`dict`): Distribution of the timesteps, and weights of their errors,
            [`~hf_ext.tasks.diffusion_noise.Timesteps`].
        crops (`dict`): Cropping of training pictures, [`~hf_ext.tasks.diffusion_data.Crops`].
        transfer (`dict`): Changes for another size than that of `init_from`,
            [`~hf_ext.tasks.diffusion_transfer.Transfer`].
        vae (`str`, *optional*): Folder or `org/name[@revision]` of a diffusers autoencoder; without it, pixels.
        posterior (`bool`, defaults to `False`):
            Draw each latent anew in every step from the autoencoder's distribution; precomputed latents need
            `precompute --posterior`. By default its mode is used, which takes half the space.
        text_encoder (`str`, *optional*): Folder or `org/name[@revision]` of a transformers text encoder; without it,
            classes.
        text_padding (`str`, defaults to `"noisy_replicate"`): Padding of a short caption.
        max_text_length (`int`, defaults to 77): Largest number of tokens of a caption.
        sample_steps (`int`, defaults to 20): Sampling steps of the sample pictures in the run folder.
        sample_guidance (`float`, defaults to 4.0): Guidance of the sample pictures.
        samples_per_class (`int`, defaults to 4): Sample pictures for each class or caption.
        image_column (`str`, defaults to `"image"`): Column of the pictures.
        label_column (`str`, defaults to `"label"`): Column of the classes.
        text_column (`str` or `dict[str, float]`, defaults to `"text"`):
            Column of the captions, or several with weights, of which each step draws one: `{short: 1, long: 3}`. From
            a column of lists, each step draws one caption.
    """

    image_size: int | list[int] = 32
    objective: Literal["epsilon", "v_prediction", "flow"] = "epsilon"
    noise_schedule: dict = field(default_factory=dict)
    timesteps: dict = field(default_factory=dict)
    crops: dict = field(default_factory=dict)
    transfer: dict = field(default_factory=dict)
    vae: str | None = None
    posterior: bool = False
    text_encoder: str | None = None
    text_padding: Literal["zeros", "replicate", "noisy_replicate"] = "noisy_replicate"
    max_text_length: int = 77
    sample_steps: int = 20
    sample_guidance: float = 4.0
    samples_per_class: int = 4
    image_column: str = "image"
    label_column: str = "label"
    text_column: str | dict = "text"

    # Strength of the padding's noise; timesteps at which an evaluation scores each image.
    text_padding_noise: ClassVar[float] = 0.02
    eval_timesteps: ClassVar[int] = 4
    # Replaced in a subclass, other networks train on the same data: examples/disentangled_dit/peers.py.
    model_class: ClassVar[Callable[..., ModelMixin]] = DisentangledDiTTransformer2DModel
    pipeline_class: ClassVar[type[DisentangledDiTPipeline]] = DisentangledDiTPipeline
    config_class: ClassVar[type | None] = DisentangledDiTTransformer2DModel
    presets: ClassVar[dict[str, dict[str, Any]]] = DisentangledDiTTransformer2DModel.PRESETS

    def __post_init__(self) -> None:
        sides = [self.image_size] * 2 if isinstance(self.image_size, int) else self.image_size
        self.size = cast(Size, tuple(sides))
        self.cut = build(Crops, self.crops, "task.crops")
        self.places = build(Timesteps, self.timesteps, "task.timesteps")
        # Any: diffusers' types do not know that schedulers have a configuration.
        self.scheduler: Any = make_scheduler(self.objective, self.noise_schedule, self.vae is None)
        self.id2label: dict[int, str] | None = None
        self.config: Any = None
        self._streams = False
        # Of the training data's latents, where they are known.
        self._areas: list[int] = []
        self._base: Checkpoint | None = None
        self._transfer = build(Transfer, self.transfer, "task.transfer")

    def validate_numbers(self) -> None:
        counts = ("max_text_length", "sample_steps", "samples_per_class")
        is_size = len(self.size) == 2 and min(self.size) > 0
        # Said here and not in the evaluation that draws the first pictures.
        most = math.inf if self.objective == "flow" else self.scheduler.config.num_train_timesteps
        require(
            self,
            ("image_size", is_size, "a side or [height, width] in pixels"),
            ("sample_steps", self.sample_steps <= most, f"at most {most}, the timesteps of the schedule"),
            ("sample_guidance", math.isfinite(self.sample_guidance), "a finite number"),
            *((name, getattr(self, name) > 0, "at least 1") for name in counts),
        )
        if self.posterior and self.vae is None:
            raise ValueError("posterior needs an autoencoder: set task.vae, or leave out posterior.")
        weigh_columns(self.text_column)

    @property
    def pipeline_tag(self) -> str:  # type: ignore[override]
        return "unconditional-image-generation" if self.text_encoder is None else "text-to-image"

    @property
    def metric_names(self) -> dict[str, str]:  # type: ignore[override]
        of = f"{self.objective}, {self.eval_timesteps} fixed timesteps and noises of each image"
        return {"loss": f"denoising loss ({of})"}

    @property
    def known_classes(self) -> list[str] | None:
        """The names by which data are matched, in the order of the numbers; `None` with texts in place of classes."""
        names = self.id2label or {}
        are_all = sorted(names) == [*range(len(names))]
        return None if self.text_encoder is not None else [names[number] for number in sorted(names) if are_all]

    @known_classes.setter
    def known_classes(self, names: list[str]) -> None:
        self.id2label = dict(enumerate(names)) if names else None

    @property
    def num_labels(self) -> int:
        """Number of the network's classes, 0 before it is built."""
        return 0 if self.config is None else self.config["num_classes"] or 0

    def read_data(self, data: datasets.Dataset | datasets.IterableDataset) -> np.ndarray | None:
        """Names of the classes, states of no text; what has different sizes is kept apart."""
        features = data.features or {}
        if self.text_encoder is not None:
            self.captions.read_data(data)
        elif names := class_names(features.get(self.label_column)):
            self.known_classes = names
        self._streams = isinstance(data, datasets.IterableDataset)
        # Tar files have it among their JSON.
        column = next((name for name in ("latent_shape", "json") if name in features and "latent" in features), None)
        if column is None or isinstance(data, datasets.IterableDataset):
            return None
        self._areas, groups = _group_shapes(data, column)
        return groups

    def model_fields(self) -> dict[str, Any]:
        """The network's settings that follow from the schedule: the number of timesteps."""
        return {"num_train_timesteps": self.scheduler.config.num_train_timesteps}

    def build_model(self, config: dict[str, Any], init_from: str | None) -> ModelMixin:
        options, decided = set(inspect.signature(self.model_class).parameters), self.model_fields()
        settings, changes = read_model_section(config, options, init_from, self.presets, decided)
        settings |= self._shape(changes)
        changes.pop("sample_size", None)
        checkpoint = self._base = None if init_from is None else open_pipeline(init_from)
        if checkpoint is not None:
            if (found := objective_of(checkpoint.scheduler)) != (wanted := self.objective):
                raise UsageError(f"{init_from} predicts {found}, but task.objective is {wanted}: set it to {found}.")
            height, width = settings.pop("sample_size")
            before, self.scheduler, self.cut = transfer(checkpoint, (height, width), self._transfer, self.cut)
            settings = {**{name: value for name, value in before.items() if name in options}, **settings}
            known = checkpoint.id2label or {}
            if self.text_encoder is None and changes.get("num_classes", len(known)) == len(known):
                # Other numbers are other classes.
                self.id2label = self.id2label or checkpoint.id2label
        settings = {**settings, **self._conditions_of_model(changes, settings), **changes, **self.model_fields()}
        model = self.model_class(**settings)
        self.config = model.config
        if checkpoint is not None:
            initialize_from(model, str(checkpoint.folder), ("class_embedder", "context_embedder"))
        return model

    def changes_beside(self, init_from: str) -> list[str]:
        """The schedule, settings of texts, and frozen parts of other weights than in the pipeline of `init_from`."""
        base, parts = cast(Checkpoint, self._base), {"vae": self.autoencoder}
        same = self.scheduler is base.scheduler
        found = [] if same else ["the noise schedule (false in task.transfer.schedule keeps it)"]
        if self.text_encoder is not None:
            parts["text_encoder"] = self.captions.encoder
            for name in ("text_padding", "text_padding_noise", "max_text_length"):
                if (before := base.index.get(name)) not in (None, now := getattr(self, name)):
                    found.append(f"{name} ({before} → {now})")
        given = [(name, part, str(getattr(self, name))) for name, part in parts.items() if part is not None]
        other = [name for name, part, source in given if not is_part_of(init_from, name, part, source)]
        return [*found, *(f"the weights of {name}" for name in other)]

    def _shape(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Size and channels of what the network is given, from the autoencoder where the section leaves them out."""
        shape: dict[str, Any] = {"sample_size": list(self.size), "in_channels": 3}
        autoencoder = None if shape.keys() <= changes.keys() else self.autoencoder
        if autoencoder is not None:
            factor = DisentangledDiTPipeline.scale_factor_of(autoencoder)
            if any(side % factor for side in self.size):
                raise ValueError(f"image_size is {self.image_size}; the autoencoder needs multiples of {factor}.")
            shape["sample_size"] = [side // factor for side in self.size]
            shape["in_channels"] = autoencoder.config["latent_channels"]
        shape |= {name: changes[name] for name in shape if name in changes}
        side = shape["sample_size"]
        return {**shape, "sample_size": [side, side] if isinstance(side, int) else list(side)}

    def _conditions_of_model(self, changes: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        """Number of classes, or width of the text encoder."""
        if self.text_encoder is not None:
            name, found, what = "joint_attention_dim", self.captions.width, "numbers for a token"
        else:
            name, found, what = "num_classes", None if self.id2label is None else len(self.id2label), "classes"
        value = changes.get(name) or found
        if found not in (None, value):
            raise UsageError(f"model.{name} is {value}, but the data has {found} {what}: leave it out.")
        if value is None and self.text_encoder is not None:
            value = self.captions.encoder.config.hidden_size
        elif value is None and (value := settings.get(name)) is None:
            raise DataError("the data have no class names: set model.num_classes.")
        return {"num_classes": None, "joint_attention_dim": None, name: value}

    @cached_property
    def autoencoder(self) -> ModelMixin | None:
        """The autoencoder, loaded when it is first needed; `None` for a model of pixels."""
        return None if self.vae is None else load_autoencoder(self.vae)

    @cached_property
    def captions(self) -> Captions:
        noise = self.text_padding_noise
        return Captions(str(self.text_encoder), self.max_text_length, self.text_padding, noise, self.text_column)

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        """Matrices decay, where anything does. Betas are (0.9, 0.95)."""
        return [{**group, "betas": (0.9, 0.95)} for group in super().parameter_groups(model, weight_decay)]

    def training_sample(self, example: dict[str, Any], generator: np.random.Generator | None) -> dict[str, Any]:
        """Image or latent, controls, class or caption. Without generator the middle of the image, unmirrored."""
        example = unpack_row(example)
        if "latent" in example:
            latents, controls = read_row(example, generator if self.posterior else None)
            (channels, *size), wanted = latents.shape, self.config["in_channels"]
            if channels != wanted:
                told = f"the data has latents of {channels} channels, the model takes {wanted}"
                raise DataError(f"{told}: precompute with the autoencoder that task.vae names.")
            own = self.config["sample_size"]
            # Buckets have about the area of the square; of several sizes one has to be the model's.
            if not any(0.5 < area / math.prod(own) < 2 for area in (math.prod(size), *self._areas)):
                told = f"the data has latents of {size}, the model takes {own} (model.sample_size or task.image_size)"
                side = round(math.sqrt(math.prod(own)))
                wanted = f"a --size that makes latents of about {side} × {side}"
                raise DataError(f"{told}: precompute with {wanted}, or change the model's.")
            if self._streams and generator is not None and size != own:
                told = f"a stream, not sorted by size, has a latent of {size}, the model {own}"
                raise ValueError(f"{told}: set data.train.streaming to false, or precompute one size.")
            sample: Batch = {"latents": latents}
        else:
            autoencoder = self.autoencoder
            channels = (self.config if autoencoder is None else autoencoder.config)["in_channels"]
            image = picture_of(example, self.image_column, "image_column")
            if generator is None and image.mode == "CMYK":
                # A training leaves it out; an evaluation skips nothing, and FID reads it so too.
                image = image.convert("RGB")
            view = cut_view(image, self.size, channels, self.cut, generator)
            sample, controls = {"pixels": to_pixels([view])[0]}, view.controls
        sample["controls"] = {name: torch.from_numpy(values) for name, values in controls.items()}
        if self.text_encoder is not None:
            return {**sample, **self.captions.sample(example, generator)}
        return {**sample, "label": torch.tensor(self.read_class(column(example, self.label_column, "label_column")))}

    def read_class(self, label: Any) -> int:
        """The number of a class that data name by its number."""
        if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < self.num_labels:
            raise DataError(f"column {self.label_column!r} holds {label!r}; allowed: 0 to {self.num_labels - 1}.")
        return label

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Tensor:
        """Mean squared error, weighted by the place on the schedule."""
        clean = self._clean(batch, self.posterior)
        count, device = clean.shape[0], clean.device
        places, noise = self.places.draw(count, device), torch.randn_like(clean)
        noisy, timesteps, target = noisy_samples(self.scheduler, clean, noise, places)
        _, *shares = noise_shares(self.scheduler, places)
        weights = self.places.weigh(self.objective, *shares)
        without_both = torch.rand(count, device=device) < self.config["condition_dropout"]
        without_controls = torch.rand(count, device=device) < self.config["control_dropout"]
        conditions = self._conditions(batch, without_both, without_both | without_controls)
        return self.error(model, (noisy, timesteps), conditions, target, weights)

    def error(
        self, model: nn.Module, noisy: tuple[Tensor, Tensor], conditions: Batch, target: Tensor, weights: Tensor
    ) -> Tensor:
        return weighted_error(model(*noisy, **conditions).sample, target, weights)

    def _clean(self, batch: Batch, draw: bool) -> Tensor:
        """The target of the network: pixels, or latents (the mode of a picture's distribution, or a draw from it)."""
        if "latents" in batch:
            return batch["latents"]
        if self.autoencoder is None:
            return batch["pixels"]
        with torch.no_grad():
            self.autoencoder.to(batch["pixels"].device)
            if not draw:
                return DisentangledDiTPipeline.encode_image(self.autoencoder, batch["pixels"])
            mean, spread = encode_posterior(self.autoencoder, batch["pixels"])
            return mean + spread * torch.randn_like(mean)

    def _conditions(
        self, batch: Batch, without_both: Tensor, without_controls: Tensor, generators: list[Generator] | None = None
    ) -> Batch:
        """The network's other inputs; the two masks of shape [batch] say which samples lack what."""
        known = self.config.get("control_alpha", batch["controls"])
        controls = {name: values for name, values in batch["controls"].items() if name in known}
        conditions = {"controls": controls, "control_mask": ~without_controls}
        if self.text_encoder is None:
            null = self.config["num_classes"]
            return {**conditions, "class_labels": batch["label"].masked_fill(without_both, null)}
        tokens = self.captions.drop(batch, without_both)
        return {**conditions, "encoder_hidden_states": self.captions.encode(tokens, generators)}

    def evaluate_batch(self, model: nn.Module, examples: list[dict[str, Any]], indices: list[int]) -> Scores:
        """The loss of each image, with its class or caption and controls; timesteps and noise depend on the index."""
        samples = [self.training_sample(example, None) for example in examples]
        shapes = [next(iter(sample.values())).shape for sample in samples]
        rows: Scores = [{} for _ in samples]
        for shape in dict.fromkeys(shapes):
            members = [place for place, found in enumerate(shapes) if found == shape]
            losses = self._losses(model, [samples[place] for place in members], [indices[place] for place in members])
            for place, loss in zip(members, losses, strict=True):
                rows[place]["loss"] = loss
        return rows

    def _losses(self, model: nn.Module, samples: list[Batch], indices: list[int]) -> list[float]:
        device, count = next(model.parameters()).device, self.eval_timesteps
        batch = send_to_device(default_collate(samples), device)
        clean, nothing = self._clean(batch, False), torch.zeros(len(samples), dtype=torch.bool, device=device)
        generators = [Generator().manual_seed(index) for index in indices]
        conditions = self._conditions(batch, nothing, nothing, generators)
        errors = torch.zeros(len(samples), device=device)
        draws = [np.random.default_rng((8, index)) for index in indices]
        for part in range(count):
            # One timestep in each part of the schedule.
            places = torch.tensor([(part + draw.random()) / count for draw in draws], device=device)
            normal = np.stack([draw.standard_normal(clean.shape[1:], dtype=np.float32) for draw in draws])
            noise = torch.from_numpy(normal).to(device)
            noisy, timesteps, target = noisy_samples(self.scheduler, clean, noise, places)
            prediction = model(noisy, timesteps, **conditions).sample.float()
            errors += (prediction - target).square().mean((1, 2, 3)) / count
        return [float(error) for error in errors.tolist()]

    def pipeline(self, model: nn.Module) -> DisentangledDiTPipeline:
        """The pipeline of a network, or of one with an adapter, on its device; it shares the weights."""
        base: Any = model.get_base_model() if isinstance(model, peft.PeftModel) else model
        device = next(base.parameters()).device
        parts: list[Any] = [self.autoencoder and self.autoencoder.to(device), None, None]
        if self.text_encoder is not None:
            parts[1:] = self.captions.encoder.to(device), self.captions.tokenizer
        about = ("id2label", "text_padding", "text_padding_noise", "max_text_length")
        settings: dict[str, Any] = {name: getattr(self, name) for name in about}
        return self.pipeline_class(base, self.scheduler, *parts, **settings)

    def sample_picture(self, model: nn.Module, examples: list[dict[str, Any]]) -> Image.Image:
        """Samples of the first ten classes, or of the examples' captions, from noise that is always the same."""
        shown = map(unpack_row, examples)
        conditions: list[Any] = [self.captions.draw(row, None)[0] for row in shown if self.text_encoder]
        conditions = conditions or list(range(min(10, self.config["num_classes"])))
        names = [str(item if self.text_encoder else (self.id2label or {}).get(item, item)) for item in conditions]
        pipeline = self.pipeline(model)
        pipeline.set_progress_bar_config(disable=True)
        guidance = self.sample_guidance if self.config["condition_dropout"] > 0 else 1.0
        options: dict[str, Any] = {"num_inference_steps": self.sample_steps, "guidance_scale": guidance}
        rows = sample_rows(pipeline, conditions, self.samples_per_class, 0, **options)
        if self.text_encoder is not None and self.captions.null is not None:
            # The training reads what the encoder says, and has better uses for the memory of its device.
            self.captions.encoder.to("cpu")
        return draw_grid(rows, names)

    def save_model(self, model: nn.Module, state_dict: dict[str, Tensor], folder: Path) -> None:
        """The whole pipeline; of an adapter its weights only, for peft and, of LoRA, for `load_lora_weights`."""
        pipeline = self.pipeline(model)
        if isinstance(model, peft.PeftModel):
            # There is no vocabulary that may have grown.
            model.save_pretrained(str(folder), state_dict=state_dict, save_embedding_layers=False)
            layers = peft.get_peft_model_state_dict(model, state_dict=state_dict, save_embedding_layers=False)
            unwrapped = {name.removeprefix("base_model.model."): value for name, value in layers.items()}
            settings = model.active_peft_config.to_dict()
            if settings["peft_type"] != "LORA" or not all("lora" in name for name in unwrapped):
                told = "load_lora_weights of diffusers takes LORA layers alone, no modules_to_save and no bias"
                way = "pipeline.transformer = peft.PeftModel.from_pretrained(pipeline.transformer, FOLDER)"
                logger.warning(f"{told}; the adapter is saved for peft only: {way}.")
                return
            # Sets have no order, and the bytes of a file should have one.
            settings = {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}
            # Without them diffusers takes every scale for 1.
            options: Any = {"transformer_lora_adapter_metadata": settings}
            pipeline.save_lora_weights(folder, transformer_lora_layers=unwrapped, **options)
            return
        kind: Any = type(model)
        with torch.device("meta"):
            # No weights of its own: those of the state, which may have been gathered from several processes.
            copy: ModelMixin = kind.from_config(model.config)
        copy.load_state_dict(state_dict, assign=True)
        pipeline.transformer = copy
        pipeline.save_pretrained(folder)

    def describe(self) -> dict[str, Any]:
        return {"objective": self.objective, "image_size": list(self.size), "eval_timesteps": self.eval_timesteps}


@scan_once
def _group_shapes(data: datasets.Dataset, column: str) -> tuple[list[int], np.ndarray | None]:
    """The areas of latents, and a number for each of them by its shape, if there are several."""
    told = data.select_columns([column])[:][column]
    shapes = np.array([unpack_row({column: row})["latent_shape"] for row in told])
    groups: np.ndarray = np.unique(shapes, axis=0, return_inverse=True)[1].reshape(-1)
    return np.unique(shapes[..., -2:].prod(-1)).tolist(), groups if groups.any() else None
