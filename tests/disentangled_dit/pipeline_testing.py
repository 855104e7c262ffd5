"""Pipelines of tiny models, an exact denoiser, and the sampling that the pipeline must equal, written plainly."""

from pathlib import Path
from types import SimpleNamespace

import torch
from diffusers import AutoencoderKL, CacheMixin, ConfigMixin, DDIMScheduler, ModelMixin
from diffusers.configuration_utils import register_to_config
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from hf_ext.pipelines.disentangled_dit import (
    DisentangledDiTImg2ImgPipeline,
    DisentangledDiTInpaintPipeline,
    DisentangledDiTPipeline,
)
from tests.disentangled_dit.dit_testing import generator, make_transformer

LABELS = {0: "tench, Tinca tinca", 1: "goldfish", 2: "hen", 3: "ostrich", 4: "brambling"}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "red", "green", "hen", "fish", "on", "grass"]


class GaussianDenoiser(ModelMixin, ConfigMixin, CacheMixin):
    """
    Answers of a perfect network about pictures of independent pixels, N(mean, std^2): with x = a x0 + b e and
    y = (x - a mean) / (a^2 std^2 + b^2), E[e | x] = b y and E[x0 | x] = mean + a std^2 y.
    """

    @register_to_config
    def __init__(self, prediction: str = "epsilon", std: float = 0.5, mean: float = 0.0, sample_size: int = 48):
        super().__init__()
        self.register_to_config(
            patch_size=1, in_channels=1, num_classes=1, joint_attention_dim=None,
            control_alpha={}, condition_dropout=0.1, control_dropout=0.1, num_train_timesteps=1000,
        )  # fmt: skip
        self.nothing = torch.nn.Parameter(torch.zeros(1))
        self.kept = DDIMScheduler().alphas_cumprod

    def forward(
        self, hidden_states=None, timestep=None, class_labels=None, modulation=None, context=None,
        return_conditioning=False, **unused,
    ):  # fmt: skip
        if return_conditioning:
            tokens = None if class_labels is None else torch.zeros(len(class_labels), 1, 1)
            return tokens, None if timestep is None else timestep[:, None].float()
        time = modulation[:, :, None, None]
        if self.config.prediction == "flow_prediction":
            signal, noise = 1 - time / 1000, time / 1000
        else:
            kept = self.kept[time.round().long()]
            signal, noise = kept**0.5, (1 - kept) ** 0.5
        spread, mean = self.config.std**2, self.config.mean
        known = (hidden_states - signal * mean) / (signal**2 * spread + noise**2)
        image, eps = mean + signal * spread * known, noise * known
        answers = {"epsilon": eps, "sample": image, "flow_prediction": eps - image}
        answers["v_prediction"] = signal * eps - noise * image
        return (answers[self.config.prediction],)


def quiet(pipeline: DisentangledDiTPipeline) -> DisentangledDiTPipeline:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def make_pipeline(scheduler=None, vae=None, **fields) -> DisentangledDiTPipeline:
    """A class pipeline, in pixels unless there is a `vae`."""
    transformer = make_transformer(**({"in_channels": 4} if vae is not None else {}) | fields)
    return quiet(DisentangledDiTPipeline(transformer, scheduler or DDIMScheduler(), vae, None, None, id2label=LABELS))


def from_picture(pipeline: DisentangledDiTPipeline) -> DisentangledDiTImg2ImgPipeline:
    """The same parts, and pictures to start from."""
    return quiet(DisentangledDiTImg2ImgPipeline.from_pipe(pipeline))


def within_mask(pipeline: DisentangledDiTPipeline) -> DisentangledDiTInpaintPipeline:
    """The same parts, for pictures and masks."""
    return quiet(DisentangledDiTInpaintPipeline.from_pipe(pipeline))


def make_vae() -> AutoencoderKL:
    torch.manual_seed(3)
    options = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    sizes = {"block_out_channels": [4, 8], "norm_num_groups": 2, "scaling_factor": 0.7, "shift_factor": 0.3}
    return AutoencoderKL(**options, **sizes, latent_channels=4).eval()


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def make_encoder(width: int = 8) -> BertModel:
    torch.manual_seed(4)
    sizes = {"hidden_size": width, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": width}
    return BertModel(BertConfig(vocab_size=len(WORDS), **sizes)).eval()


def write_encoder(folder: Path, width: int = 8) -> Path:
    """A text encoder and its tokenizer."""
    make_encoder(width).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_text_pipeline(**options) -> DisentangledDiTPipeline:
    encoder, tokenizer, options = make_encoder(), make_tokenizer(), {"max_text_length": 9} | options
    transformer = make_transformer(num_classes=None, joint_attention_dim=8)
    return quiet(DisentangledDiTPipeline(transformer, DDIMScheduler(), None, encoder, tokenizer, **options))


def start(pipeline: DisentangledDiTPipeline, count: int) -> torch.Tensor:
    config = pipeline.transformer.config
    return torch.randn(count, config.in_channels, *config.sample_size, generator=generator(7))


@torch.no_grad()
def sample_plainly(pipeline, latents, given, controls, scale=1.0, control_scale=1.0, null=None, steps=3):
    """Every branch by a pass of its own with all of its inputs, at every step; of classes or of encoded texts."""
    transformer, scheduler = pipeline.transformer, pipeline.scheduler
    count = len(latents)
    controls = {name: torch.tensor(value, dtype=torch.float32) for name, value in controls.items()}
    positive = torch.as_tensor(given)
    negative = torch.full_like(positive, transformer.config.num_classes) if null is None else torch.as_tensor(null)
    name = "encoder_hidden_states" if positive.is_floating_point() else "class_labels"

    def ask(sample, timestep, condition, controlled):
        inputs = {name: condition, "controls": controls, "control_mask": torch.full((count,), controlled)}
        return transformer(sample, timestep.expand(count), **inputs).sample

    # it clips the pictures
    options = {"use_clipped_model_output": True} if isinstance(scheduler, DDIMScheduler) else {}
    scheduler.set_timesteps(steps)
    latents = latents * scheduler.init_noise_sigma
    for timestep in scheduler.timesteps:
        sample = scheduler.scale_model_input(latents, timestep)
        full, bare = ask(sample, timestep, positive, True), ask(sample, timestep, positive, False)
        nothing = ask(sample, timestep, negative, False)
        guided = scale * (control_scale * full + (1 - control_scale) * bare) + (1 - scale) * nothing
        latents = scheduler.step(guided, timestep, latents, **options).prev_sample
    return latents


def record(pipeline: DisentangledDiTPipeline) -> SimpleNamespace:
    """Rows of the images, and of the tables, that the transformer is asked for from now on."""
    seen = SimpleNamespace(images=[], tables=[])

    def note(module, arguments, options):
        if "modulation" in options:
            seen.images.append(len(options["hidden_states"]))
        elif "timestep" in options:
            seen.tables.append(len(options["timestep"]))

    pipeline.transformer.register_forward_pre_hook(note, with_kwargs=True)
    return seen
