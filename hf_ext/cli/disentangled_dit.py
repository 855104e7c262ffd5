"""hf-ext sample and hf-ext dit: pictures of a Disentangled DiT, and latents before its training."""

import inspect
import math
from functools import partial
from pathlib import Path
from typing import Any

import click

from .errors import Failed, Unusable, loads
from .groups import Group
from .sources import Model


@click.group(cls=Group)
def dit() -> None:
    """Disentangled DiT: encode a data set to latents. `hf-ext train` trains a model, `hf-ext sample` draws with it."""


@dit.command()
@click.argument("data", metavar="DATA")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--vae", required=True, help="Autoencoder of diffusers: folder or org/name[@revision].")
@click.option(
    "--size", "image_size", type=click.IntRange(min=1), required=True, help="Side of the pictures in pixels."
)
@click.option("--split", default="train", show_default=True, help="Split of the data.")
@click.option("--name", help="Configuration of the data set, if it has several.")
@click.option("--views", type=click.IntRange(min=1), default=1, show_default=True, help="Latents per picture.")
@click.option(
    "--max-ratio",
    type=float,
    default=1.0,
    show_default=True,
    help="Largest aspect ratio; above 1, pictures go into buckets.",
)
@click.option("--bucket-step", type=int, default=64, show_default=True, help="Sides of buckets are multiples of it.")
@click.option("--flip", type=float, default=0.5, show_default=True, help="Probability of mirroring.")
@click.option("--local-prob", type=float, default=0.0, show_default=True, help="Probability of a local crop.")
@click.option("--local-size", type=int, help="Short side of pictures from which local crops are cut.")
@click.option("--centre", is_flag=True, help="Cut the middle instead of a random place; for test data.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the crops.")
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Pictures encoded at once."
)
@click.option("--shard-size", type=click.IntRange(min=1), default=1000, show_default=True, help="Rows per file.")
@click.option("--image-column", default="image", show_default=True, help="Column of the pictures.")
@click.option(
    "--posterior", is_flag=True, help="Also write the standard deviation of each latent, for task.posterior."
)
@click.option(
    "--text-encoder", help="Text encoder of transformers, whose states are also written: folder or org/name."
)
@click.option("--text-column", multiple=True, help="Column of captions. Repeatable.  [default: text]")
@click.option(
    "--max-text-length", type=click.IntRange(min=1), default=77, show_default=True, help="Most tokens of a caption."
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Precision of the autoencoder.",
)
@click.option("--workers", type=click.IntRange(min=1), default=4, show_default=True, help="Decoding threads.")
@click.option(
    "--max-bad-examples",
    type=click.FloatRange(0, 1),
    default=0.001,
    show_default=True,
    help="Share of pictures that may be unreadable; they are skipped and listed.",
)
@click.option("--device", help="cpu, cuda, cuda:1, ...  [default: the GPU if there is one]")
def precompute(
    data: str,
    out: Path,
    split: str,
    name: str | None,
    flip: float,
    local_prob: float,
    local_size: int | None,
    centre: bool,
    text_column: tuple[str, ...],
    device: str | None,
    **settings: Any,
) -> None:
    """Encode the pictures of DATA, a folder, file or Hub id, into the new folder OUT of parquet files.

    Crop and mirroring are drawn before a picture is encoded. They are stored with its latent, as controls for the
    training. Other columns, such as label or text, are kept. Transparent pictures are composed on white.
    bad_examples.jsonl lists unreadable pictures. Unfinished work is in OUT.partial: the same command resumes it, and
    encodes again only files with changed pictures. Processes of `accelerate launch -m hf_ext_cli.main dit precompute
    ...` share the files of OUT.

    \b
    Examples:
      hf-ext dit precompute data/imagenet latents --vae org/autoencoder --size 256
      hf-ext dit precompute data/photos latents --vae vae --size 512 --max-ratio 2 --views 2 --posterior
      hf-ext dit precompute data/captioned latents --vae vae --size 256 --text-encoder org/t5 --text-column caption
    """
    import datasets

    from hf_ext.distributed import Ranks
    from hf_ext.settings import build
    from hf_ext.tasks.precompute import Precompute
    from hf_ext.tasks.precompute import precompute as encode

    # The other options are called as the fields of Precompute.
    settings["data"] = {"path": data, "split": split, "name": name}
    settings["text_column"] = list(text_column) or "text"
    settings["crops"] = {"random": not centre, "flip": flip, "local_prob": local_prob, "local_size": local_size}
    # One bar is enough: those of every shard would tear it.
    datasets.disable_progress_bars()
    folder = encode(build(Precompute, settings, "precompute"), out, device)
    if Ranks().index == 0:
        click.echo(folder)


@click.command()
@click.argument("source", metavar="MODEL", type=Model())
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="PNG file of the grid.")
@click.option("--class-labels", help="Comma-separated names or numbers of classes.  [default: the first ten]")
@click.option("--prompt", "prompts", multiple=True, help="Text, for a text model. Repeatable.")
@click.option("--count", type=click.IntRange(min=1), default=4, show_default=True, help="Pictures per class or text.")
@click.option("--size", metavar="HEIGHT,WIDTH", help="Size in pixels.  [default: the model's]")
@click.option(
    "--original-size", metavar="HEIGHT,WIDTH", help="Control for the original size, which sets the sharpness."
)
@click.option("--target-size", metavar="HEIGHT,WIDTH", help="Control for the target size.")
@click.option("--crop", metavar="TOP,LEFT", help="Control for the crop.  [default: 0,0]")
@click.option("--flip", is_flag=True, help="Control for mirroring.")
@click.option("--steps", type=click.IntRange(min=1), default=50, show_default=True, help="Steps of the scheduler.")
@click.option(
    "--guidance-scale", type=float, default=4.0, show_default=True, help="Guidance by class or text; 1 is off."
)
@click.option(
    "--control-guidance-scale", type=float, default=1.0, show_default=True, help="Guidance by the controls; 1 is off."
)
@click.option("--negative", help="Class or text to steer away from.  [default: none]")
@click.option(
    "--scheduler", help="Scheduler of diffusers, such as DPMSolverMultistepScheduler.  [default: the model's]"
)
@click.option("--image", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Picture to start from.")
@click.option("--strength", type=float, help="Share of --image that is replaced, 0 to 1.  [default: 0.8]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the noise.")
@click.option(
    "--batch-size", type=click.IntRange(min=1), help="Pictures drawn at once.  [default: half a million pixels]"
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Precision of the model.",
)
@click.option("--device", help="cpu, cuda, cuda:1, ...  [default: the GPU if there is one]")
def sample(
    source: str,
    out: Path,
    class_labels: str | None,
    prompts: tuple[str, ...],
    count: int,
    size: str | None,
    original_size: str | None,
    target_size: str | None,
    crop: str | None,
    flip: bool,
    steps: int,
    guidance_scale: float,
    control_guidance_scale: float,
    negative: str | None,
    scheduler: str | None,
    image: Path | None,
    strength: float | None,
    seed: int,
    batch_size: int | None,
    dtype: str,
    device: str | None,
) -> None:
    """Generate pictures with MODEL, a folder or org/name[@revision], in one labelled grid.

    The grid has a row for each class or text. Picture n of every row starts from the same noise, for any batch size.

    \b
    Examples:
      hf-ext sample runs/dit-cifar10/snapshot --class-labels cat,dog --out grid.png
      hf-ext sample org/name --prompt "a red bicycle" --prompt "a blue boat" --out grid.png --steps 30
      hf-ext sample org/name --class-labels cat --image dog.png --strength 0.6 --negative dog --out grid.png
    """
    from accelerate.utils.memory import should_reduce_batch_size
    from diffusers import AutoPipelineForImage2Image

    from hf_ext.answers.classifying import read_picture
    from hf_ext.progress import progress
    from hf_ext.tasks.diffusion_grids import draw_grid, sample_rows, write_picture

    if out.suffix.lower() != ".png":
        raise click.BadParameter(f"{out} does not end with .png.", param_hint="--out")
    _check_guidance(guidance_scale, control_guidance_scale, negative)
    if strength is not None and image is None:
        raise click.UsageError("--strength says how much of --image is made anew: give --image too, or leave it out.")
    pipeline = load_pipeline(source, device, dtype)
    if scheduler is not None:
        pipeline.scheduler = _other_scheduler(pipeline.scheduler, scheduler)
    conditions, names = _conditions(pipeline, class_labels, prompts)
    options: dict[str, Any] = {"num_inference_steps": steps, "guidance_scale": guidance_scale}
    options["control_guidance_scale"] = control_guidance_scale
    if size is not None:
        options["height"], options["width"] = _pair(size, "--size")
    pairs = {"original_size": original_size, "target_size": target_size, "crop": crop}
    options |= {name: _pair(text, f"--{name.replace('_', '-')}") for name, text in pairs.items() if text is not None}
    options |= {"flip": True} if flip else {}
    options |= _negative(pipeline, negative)
    if image is not None:
        pipeline = AutoPipelineForImage2Image.from_pipe(pipeline)  # type: ignore[no-untyped-call]
        options |= {"image": read_picture(image), "strength": 0.8 if strength is None else strength}
    pipeline.progress_bar = partial(progress, unit=" steps")
    try:
        rows = sample_rows(pipeline, conditions, count, seed, batch_size, **options)
    except RuntimeError as error:
        if not should_reduce_batch_size(error):
            raise
        raise Failed(
            f"there is no memory for a single picture ({error}); try --dtype bfloat16 or a smaller --size."
        ) from error
    click.echo(write_picture(draw_grid(rows, names), out))


@loads
def load_pipeline(source: str, device: str | None, dtype: str) -> Any:
    """The pipeline of a folder or org/name[@revision], on the GPU if there is one."""
    import torch
    from diffusers import DiffusionPipeline

    from hf_ext.hub.checkpoints import split_revision
    from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline
    from hf_ext.training.models import pipeline_index

    if pipeline_index(source) is None:
        raise Unusable(f"{source} holds no diffusers pipeline (no model_index.json).")
    name, revision = split_revision(source)
    pipeline = DiffusionPipeline.from_pretrained(name, revision=revision, dtype=getattr(torch, dtype))
    if not isinstance(pipeline, DisentangledDiTPipeline):
        raise Unusable(f"{source} holds a {type(pipeline).__name__}, no DisentangledDiTPipeline.")
    try:
        return pipeline.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, AssertionError) as error:
        raise Unusable(f"device {device} cannot be used: {error}") from error


def _check_guidance(guidance_scale: float, control_guidance_scale: float, negative: str | None) -> None:
    """Refuses strengths that are none, and what they turn off."""
    for option, scale in (("--guidance-scale", guidance_scale), ("--control-guidance-scale", control_guidance_scale)):
        if not math.isfinite(scale):
            raise click.BadParameter(f"{scale} is no strength: give a number such as 4.", param_hint=option)
    if negative is not None and guidance_scale <= 1:
        raise click.UsageError(
            f"--negative is what guidance leads away from, and --guidance-scale {guidance_scale:g} turns that off: "
            "give one above 1, or leave --negative out."
        )


def _conditions(pipeline: Any, class_labels: str | None, prompts: tuple[str, ...]) -> tuple[list[Any], list[str]]:
    """A class, or a text, for each row, and what to write beside it."""
    count = pipeline.transformer.config.num_classes
    if (count is None) != bool(prompts) or (prompts and class_labels):
        wanted = "--prompt" if count is None else "--class-labels"
        raise click.UsageError(f"the model takes {wanted}, and nothing else.")
    if prompts:
        return list(prompts), list(prompts)
    words = class_labels.split(",") if class_labels else [str(number) for number in range(min(10, count))]
    labels = [int(word) if word.strip().isdecimal() else pipeline.get_label_ids(word.strip())[0] for word in words]
    known = pipeline.config.id2label or {}
    return labels, [known.get(str(label), str(label)) for label in labels]


def _negative(pipeline: Any, negative: str | None) -> dict[str, Any]:
    """The negative conditions of guidance, as the pipeline takes them."""
    if negative is None:
        return {}
    if pipeline.transformer.config.num_classes is None:
        return {"negative_prompt": negative}
    return {"negative_class_labels": int(negative) if negative.isdecimal() else pipeline.get_label_ids(negative)[0]}


def _other_scheduler(before: Any, name: str) -> Any:
    """A scheduler of diffusers with the model's schedule."""
    import diffusers
    from diffusers import SchedulerMixin

    kind = getattr(diffusers, name, None) if name.endswith("Scheduler") else None
    if not (isinstance(kind, type) and issubclass(kind, SchedulerMixin) and hasattr(kind, "from_config")):
        raise click.BadParameter(
            f"diffusers has no scheduler {name!r}; for instance DDIMScheduler, DPMSolverMultistepScheduler or "
            "FlowMatchEulerDiscreteScheduler.",
            param_hint="--scheduler",
        )
    config, accepted = before.config, inspect.signature(kind).parameters
    if asked := [option for option, about in accepted.items() if about.default is about.empty]:
        raise click.BadParameter(
            f"{name} needs {', '.join(asked)}, which no model's schedule has.", param_hint="--scheduler"
        )
    if "shift" in config and "use_flow_sigmas" in accepted:
        # Solvers that were made for diffusion have other words for flow matching.
        flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": config["shift"]}
        return kind.from_config(config, **flow)
    return kind.from_config(config)


def _pair(text: str, option: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise click.BadParameter(f"{text!r} is no height and width such as 32,32.", param_hint=option)
    return int(parts[0]), int(parts[1])
