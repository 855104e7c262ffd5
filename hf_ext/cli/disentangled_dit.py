"""hf-ext sample and hf-ext dit: pictures of a Disentangled DiT, and latents before its training."""

import inspect
import math
from functools import partial
from pathlib import Path
from typing import Any

import click

from .errors import Failed, Unusable, loads
from .groups import Group
from .output import print_json, print_rows
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
@click.option("--split", default="train", show_default=True, help="Of the data.")
@click.option("--name", help="Configuration of the data set, where it has several.")
@click.option("--views", type=click.IntRange(min=1), default=1, show_default=True, help="Latents of each picture.")
@click.option("--max-ratio", type=float, default=1.0, show_default=True, help="Above 1: buckets of aspect ratios.")
@click.option("--bucket-step", type=int, default=64, show_default=True, help="Their sides are multiples of it.")
@click.option("--flip", type=float, default=0.5, show_default=True, help="Probability of mirroring.")
@click.option("--local-prob", type=float, default=0.0, show_default=True, help="Probability of a local crop.")
@click.option("--local-size", type=int, help="Short side of pictures from which local crops are cut.")
@click.option("--centre", is_flag=True, help="Cut the middle instead of a random place; for test data.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Another seed, other places.")
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Encoded at once.")
@click.option("--shard-size", type=click.IntRange(min=1), default=1000, show_default=True, help="Rows of a file.")
@click.option("--image-column", default="image", show_default=True, help="Column of the pictures.")
@click.option("--posterior", is_flag=True, help="Write the spread of each latent too, for task.posterior.")
@click.option("--text-encoder", help="Of transformers: folder or org/name[@revision]; its tokens are written too.")
@click.option(
    "--text-column", multiple=True, help="Its column of captions; may be given several times.  [default: text]"
)
@click.option(
    "--max-text-length", type=click.IntRange(min=1), default=77, show_default=True, help="Tokens of a caption."
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Of the autoencoder.",
)
@click.option("--workers", type=click.IntRange(min=1), default=4, show_default=True, help="Threads that decode.")
@click.option(
    "--max-bad-examples",
    type=click.FloatRange(0, 1),
    default=0.001,
    show_default=True,
    help="Share of the pictures that may be left out, and are listed.",
)
@click.option("--device", help="cpu, cuda, cuda:1, ...; the GPU if there is one.")
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

    Place and mirroring are drawn before a picture is encoded, and written beside its latent as the controls that the
    model is trained with. The other columns, such as label or text, are kept. Unfinished work lies in OUT.partial; the
    same command goes on with it, and makes only those files anew whose pictures changed. bad_examples.jsonl lists the
    pictures that cannot be used; transparent ones are put on white. Processes of `accelerate launch -m
    hf_ext_cli.main dit precompute ...` share the files of OUT.

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


@dit.command()
@click.argument("pictures", metavar="PICTURES")
@click.argument("reference", metavar="REFERENCE")
@click.option(
    "--network",
    required=True,
    help="Of the features: the Inception network, a TorchScript file or org/name/file.pt; or any classifier.",
)
@click.option("--split", default="train", show_default=True, help="Of the reference.")
@click.option("--kernel", is_flag=True, help="Measure the kernel distance (KID) too.")
@click.option(
    "--keep", type=click.Path(dir_okay=False, path_type=Path), help="Write the reference's statistics, .npz."
)
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True, help="Pictures at once.")
@click.option("--device", help="cpu, cuda, cuda:1, ...; the GPU if there is one.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def score(pictures: str, reference: str, as_json: bool, **options: Any) -> None:
    """Measure how far PICTURES are from those of REFERENCE: FID, or the same distance by another classifier.

    Both are a folder, a file or a Hub id; REFERENCE may also be statistics, as --keep writes them. Values of unequal
    numbers of pictures cannot be compared. Processes of `accelerate launch -m hf_ext_cli.main dit score ...` share
    the pictures.

    \b
    Examples:
      hf-ext dit score pictures data/cifar10 --network inception-2015-12-05.pt --keep cifar10.npz --kernel
      hf-ext dit score pictures cifar10.npz --network inception-2015-12-05.pt --json
    """
    from hf_ext.distributed import Ranks
    from hf_ext.tasks.picture_scores import score as measure

    if options["keep"] is not None and options["keep"].suffix != ".npz":
        raise click.BadParameter(f"{options['keep']} does not end with .npz.", param_hint="--keep")
    found = measure(pictures, reference, **options)
    if Ranks().index == 0:
        print_json(found) if as_json else print_rows(list(found.items()))


@click.command()
@click.argument("source", metavar="MODEL", type=Model())
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="A PNG: the grid. Another name: a folder of numbered pictures.",
)
@click.option(
    "--class-labels",
    help="Names or numbers of classes with commas between them. Without it a folder has all in turn, a grid ten.",
)
@click.option("--prompt", "prompts", multiple=True, help="A text, of a text model; may be given several times.")
@click.option(
    "--prompts",
    "prompt_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with a text in each line.",
)
@click.option("--count", type=click.IntRange(min=1), help="Pictures: of each row of a grid (4), of a folder in all.")
@click.option("--size", metavar="HEIGHT,WIDTH", help="In pixels; the model's own if not given.")
@click.option("--original-size", metavar="HEIGHT,WIDTH", help="The control of that name: sharpness.")
@click.option("--target-size", metavar="HEIGHT,WIDTH", help="The control of that name.")
@click.option("--crop", metavar="TOP,LEFT", help="The control of that name: which part is seen; 0,0 if not given.")
@click.option("--flip", is_flag=True, help="The control of that name: mirrored.")
@click.option("--steps", type=click.IntRange(min=1), default=50, show_default=True, help="Of the scheduler.")
@click.option("--guidance-scale", type=float, default=4.0, show_default=True, help="1 is off.")
@click.option("--control-guidance-scale", type=float, default=1.0, show_default=True, help="Of the controls alone.")
@click.option("--negative", help="Class or text that guidance leads away from; none if not given.")
@click.option(
    "--scheduler", help="A class of diffusers, such as DPMSolverMultistepScheduler; the model's own if not given."
)
@click.option("--image", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A picture to start from.")
@click.option("--strength", type=float, help="How much of --image is made anew, 0 to 1.  [default: 0.8]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Another seed, other pictures.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Drawn at once; half a million pixels if not given.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Of the weights and the work.",
)
@click.option("--device", help="cpu, cuda, cuda:1, ...; the GPU if there is one.")
def sample(
    source: str,
    out: Path,
    class_labels: str | None,
    prompts: tuple[str, ...],
    prompt_file: Path | None,
    count: int | None,
    scheduler: str | None,
    image: Path | None,
    strength: float | None,
    seed: int,
    batch_size: int | None,
    dtype: str,
    device: str | None,
    **asked: Any,
) -> None:
    """Draw pictures of MODEL, a folder or org/name[@revision], into one labelled grid or a folder.

    A grid has a row for each class or text; picture n of every row starts from the same noise, whatever the batch
    size. In a folder classes or texts come in turn, and each picture is a function of --seed and its number: the same
    command goes on after a kill, a larger --count adds pictures, and processes of `accelerate launch -m
    hf_ext_cli.main sample ...` share the work.

    \b
    Examples:
      hf-ext sample runs/dit-cifar10/snapshot --class-labels cat,dog --out grid.png
      hf-ext sample org/name --prompt "a red bicycle" --prompt "a blue boat" --out grid.png --steps 30
      hf-ext sample org/name --class-labels cat --image dog.png --strength 0.6 --negative dog --out grid.png
      hf-ext sample org/name --count 50000 --out pictures --dtype bfloat16
    """
    from accelerate.utils.memory import should_reduce_batch_size
    from diffusers import AutoPipelineForImage2Image

    from hf_ext.answers.classifying import read_picture
    from hf_ext.distributed import Ranks
    from hf_ext.progress import progress
    from hf_ext.tasks.diffusion_grids import draw_grid, sample_rows, write_picture
    from hf_ext.tasks.diffusion_samples import sample_folder

    is_grid = out.suffix.lower() == ".png"
    ranks = Ranks()
    _check_out(out, is_grid, count, ranks.count)
    _check_guidance(asked["guidance_scale"], asked["control_guidance_scale"], asked["negative"])
    if strength is not None and image is None:
        raise click.UsageError("--strength says how much of --image is made anew: give --image too, or leave it out.")
    with ranks.first_before_others():
        pipeline = load_pipeline(source, device if ranks.count == 1 else ranks.own_device(device), dtype)
    if scheduler is not None:
        pipeline.scheduler = _other_scheduler(pipeline.scheduler, scheduler)
    prompts += _read_prompts(prompt_file)
    conditions, names = _conditions(pipeline, class_labels, prompts, 10 if is_grid else None)
    options = _call_options(pipeline, asked)
    if image is not None:
        pipeline = AutoPipelineForImage2Image.from_pipe(pipeline)  # type: ignore[no-untyped-call]
        options |= {"image": read_picture(image), "strength": 0.8 if strength is None else strength}
    # Of a folder the pictures are counted.
    pipeline.progress_bar = partial(progress, unit=" steps", shown=is_grid)
    try:
        if not is_grid and count is not None:
            made = sample_folder(pipeline, conditions, count, out, ranks, seed=seed, batch_size=batch_size, **options)
        else:
            rows = sample_rows(pipeline, conditions, count or 4, seed, batch_size, **options)
            made = write_picture(draw_grid(rows, names), out)
    except RuntimeError as error:
        if not should_reduce_batch_size(error):
            raise
        raise Failed(
            f"there is no memory for a single picture ({error}); try --dtype bfloat16 or a smaller --size."
        ) from error
    if ranks.index == 0:
        click.echo(made)


def _read_prompts(path: Path | None) -> tuple[str, ...]:
    """The lines of a file that are not empty."""
    if path is None:
        return ()
    return tuple(line for line in path.read_text(encoding="utf-8").splitlines() if line.strip())


def _check_out(out: Path, is_grid: bool, count: int | None, processes: int) -> None:
    """Refuses a place that is none for a grid, or for a folder."""
    from PIL import Image

    if is_grid and processes > 1:
        raise click.UsageError("a grid is drawn by one process: name a folder with --out, or leave `accelerate` out.")
    if is_grid and out.is_dir():
        raise click.BadParameter(f"{out} is a folder.", param_hint="--out")
    if not is_grid and (out.suffix.lower() in Image.registered_extensions() or out.is_file()):
        raise click.BadParameter(f"{out} does not end with .png, and is no folder.", param_hint="--out")
    if not is_grid and count is None:
        raise click.UsageError(f"{out} does not end with .png: for a folder of pictures, say how many with --count.")


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


def _conditions(
    pipeline: Any, class_labels: str | None, prompts: tuple[str, ...], most: int | None
) -> tuple[list[Any], list[str]]:
    """The classes, or the texts, and what to write beside them; of a class model the first ones if none is named."""
    count = pipeline.transformer.config.num_classes
    if (count is None) != bool(prompts) or (prompts and class_labels):
        wanted = "--prompt" if count is None else "--class-labels"
        raise click.UsageError(f"the model takes {wanted}, and nothing else.")
    if prompts:
        return list(prompts), list(prompts)
    words = class_labels.split(",") if class_labels else [str(number) for number in range(count)][:most]
    labels = [int(word) if word.strip().isdecimal() else pipeline.get_label_ids(word.strip())[0] for word in words]
    known = pipeline.config.id2label or {}
    return labels, [known.get(str(label), str(label)) for label in labels]


def _call_options(pipeline: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Options of the command line as a call of the pipeline takes them."""
    options = {name: asked[name] for name in ("guidance_scale", "control_guidance_scale")}
    options["num_inference_steps"] = asked["steps"]
    if asked["size"] is not None:
        options["height"], options["width"] = _pair(asked["size"], "--size")
    pairs = {name: asked[name] for name in ("original_size", "target_size", "crop") if asked[name] is not None}
    options |= {name: _pair(text, f"--{name.replace('_', '-')}") for name, text in pairs.items()}
    options |= {"flip": True} if asked["flip"] else {}
    negative = asked["negative"]
    if negative is None:
        return options
    if pipeline.transformer.config.num_classes is None:
        return {**options, "negative_prompt": negative}
    number = int(negative) if negative.isdecimal() else pipeline.get_label_ids(negative)[0]
    return {**options, "negative_class_labels": number}


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
