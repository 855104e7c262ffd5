"""hf-ext sample and hf-ext dit: generate pictures, encode data sets and compute scores."""

import inspect
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from .errors import Failed, Unusable, loading
from .groups import Group
from .options import (
    AT_LEAST_1,
    DEVICE,
    DTYPE,
    FILE,
    JSON,
    MODEL,
    NEW_FILE,
    Place,
    options_of,
    shown,
    split_names,
    value_type,
)
from .output import print_json, print_rows, say

PAIR = value_type(
    "HEIGHT,WIDTH",
    lambda text: tuple(map(int, text.split(","))),
    "not a pair of whole numbers such as 32,32",
    lambda pair: len(pair) == 2 and min(pair) >= 0,
)


@click.group(cls=Group)
def dit() -> None:
    """Disentangled DiT: encode a data set to latents, and score pictures. See also `hf-ext train` and `hf-ext
    sample`."""


class PrecomputeCommand(click.Command):
    """A command with an option for each field of [`Precompute`], made when it runs or shows its help."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        from hf_ext.tasks.precompute_settings import Precompute

        fields = options_of(Precompute, {"image_size": "--size"}, but=("data", "crops"))
        for field in fields:
            field.required = field.name in ("vae", "image_size")
        own = super().get_params(ctx)
        return [*own[:2], *fields, *own[2:]]


@dit.command(cls=PrecomputeCommand)
@click.argument("data", metavar="DATA")
@click.argument("out", metavar="OUT", type=Place(path_type=Path))
@shown("--split", default="train", help="Split of the data.")
@click.option("--name", help="Configuration of the data set, if it has several.")
@click.option("--flip", type=float, help="Probability of a horizontal flip.  [default: 0.5; 0 with --centre]")
@shown("--local-prob", type=float, default=0.0, help="Probability of a local crop.")
@click.option("--local-size", type=int, help="Shorter side of a picture before a local crop is cut.")
@click.option("--centre", is_flag=True, help="Crop the centre instead of a random place; for test data.")
@DEVICE
def precompute(data: str, out: Path, device: str | None, **given: Any) -> None:
    """Encode the pictures of DATA (folder, file, "shards/*.tar" or Hub id) to latents, and write them to folder OUT.

    Each picture is cropped and flipped at random before it is encoded. Crop and flip are stored with its latent, as
    controls for the training. Other columns, such as label or text, are kept. Transparent pictures get a white
    background. bad_examples.jsonl lists unreadable pictures. Local tar files, and tar and parquet files of the Hub,
    are streamed, not copied, and each gives one file. Unfinished
    work is kept in OUT.partial. The same command resumes it, and encodes again only files with changed pictures.
    Processes of `accelerate launch -m hf_ext_cli.main dit precompute ...` share the files of OUT.

    \b
    Examples:
      hf-ext dit precompute data/imagenet latents --vae org/autoencoder --size 256
      hf-ext dit precompute data/photos latents --vae vae --size 512 --max-ratio 2 --posterior
      hf-ext dit precompute "cc12m/*.tar" latents --vae vae --size 256 --format tar
      hf-ext dit precompute org/photos latents --vae vae --size 256
      hf-ext dit precompute data/captioned latents --vae vae --size 256 --text-encoder org/t5 --text-column caption
    """
    import datasets

    from hf_ext.distributed import Ranks
    from hf_ext.settings import build
    from hf_ext.tasks.precompute import precompute as encode
    from hf_ext.tasks.precompute_settings import Precompute

    centre, flip = given.pop("centre"), given.pop("flip")
    flip = (0.0 if centre else 0.5) if flip is None else flip
    crops = {"random": not centre, "flip": flip, **{name: given.pop(name) for name in ("local_prob", "local_size")}}
    source = {"path": data, "split": given.pop("split"), "name": given.pop("name")}
    settings = {name: value for name, value in given.items() if value is not None} | {"data": source, "crops": crops}
    # The bars of single shards would break our progress bar.
    datasets.disable_progress_bars()
    folder = encode(build(Precompute, settings, "precompute"), out, device)
    if Ranks().index == 0:
        say(folder)


@dit.command()
@click.argument("pictures", metavar="PICTURES")
@click.argument("reference", metavar="[REFERENCE]", required=False)
@click.option(
    "--network",
    type=Place(),
    metavar="TEXT",
    help="Network that computes the features: Inception as a TorchScript file or org/name/file.pt (append "
    "#sha256=HASH to check it), or any classifier.",
)
@click.option(
    "--clip",
    type=Place(),
    metavar="TEXT",
    help="CLIP model for the score between pictures and texts: folder or org/name[@revision].",
)
@shown("--split", default="train", help="Split of the reference.")
@click.option("--size", type=AT_LEAST_1, help="Crop the reference to centred squares of this side first.")
@shown(
    "--max-bad-examples",
    type=click.FloatRange(0, 1),
    default=0.001,
    help="Share of the reference that may be unusable.",
)
@click.option("--kernel", is_flag=True, help="Also compute the kernel distance (KID).")
@click.option("--keep", type=NEW_FILE, help="Write the statistics of the reference to this .npz file.")
@shown("--batch-size", type=AT_LEAST_1, default=64, help="Pictures per batch.")
@DEVICE
@JSON
def score(pictures: str, reference: str | None, as_json: bool, **options: Any) -> None:
    """Compute the FID, KID or CLIP score of PICTURES.

    FID and KID compare PICTURES with REFERENCE, by the features of --network; a classifier other than Inception gives
    the same distance of its own features. Each is a folder, a file or a Hub id, streamed as by `dit precompute`;
    REFERENCE alone can also be statistics that --keep wrote with the same network. --clip compares pictures with the
    texts of their column `text`, which `hf-ext sample` writes. Values from different numbers of pictures are not
    comparable. Processes of `accelerate launch -m hf_ext_cli.main dit score ...` share the pictures, or the tar files.

    \b
    Examples:
      hf-ext dit score pictures data/cifar10 --network inception-2015-12-05.pt --keep cifar10.npz --kernel
      hf-ext dit score pictures cifar10.npz --network inception-2015-12-05.pt --json
      hf-ext dit score pictures --clip openai/clip-vit-base-patch16
    """
    from hf_ext.distributed import Ranks
    from hf_ext.tasks.picture_scores import score as measure

    found = measure(pictures, reference, **options)
    if Ranks().index == 0:
        print_json(found) if as_json else print_rows(list(found.items()))


@click.command()
@MODEL
@click.option("--out", type=Place(path_type=Path), required=True, help="PNG file of a grid, or a folder.")
@click.option(
    "--class-labels",
    help="Names or numbers of classes, separated by commas; a name with a comma in double quotes.  [default: the "
    "first ten in a grid, all in a folder]",
)
@click.option("--prompt", "prompts", multiple=True, help="Text, for a text model. Repeatable.")
@click.option("--prompts", "prompt_file", type=FILE, help="File with one text per line.")
@click.option("--count", type=AT_LEAST_1, help="Pictures per row of a grid (default 4), or in the folder.")
@click.option("--shard-size", type=AT_LEAST_1, help="Pictures per tar file.  [default: no tar files]")
@click.option("--size", type=PAIR, help="Size in pixels.  [default: the model's]")
@click.option("--original-size", type=PAIR, help="Control: original size, which sets the sharpness.")
@click.option("--target-size", type=PAIR, help="Control: target size.")
@click.option("--crop", type=PAIR, metavar="TOP,LEFT", help="Control: crop.  [default: 0,0]")
@click.option("--flip", is_flag=True, help="Control: horizontal flip.")
@shown("--steps", "num_inference_steps", type=AT_LEAST_1, default=50, help="Steps of the scheduler.")
@shown("--guidance-scale", type=float, default=4.0, help="Class or text guidance; 1 is off.")
@shown("--control-guidance-scale", type=float, default=1.0, help="Guidance by the controls; 1 is off.")
@click.option("--negative", help="Class or text to steer away from.  [default: none]")
@click.option("--scheduler", help="diffusers scheduler, such as DPMSolverMultistepScheduler.  [default: the model's]")
@click.option("--image", type=FILE, help="Picture to start from.")
@click.option("--strength", type=float, help="Share of --image that is replaced, 0 to 1.  [default: 0.8]")
@shown("--seed", type=click.IntRange(min=0), default=0, help="Seed of the noise.")
@click.option("--batch-size", type=AT_LEAST_1, help="Pictures per batch.  [default: half a million pixels]")
@shown("--dtype", type=DTYPE, default="float32", help="Precision of the model.")
@DEVICE
def sample(source: str, out: Path, count: int | None, image: Path | None, device: str | None, **asked: Any) -> None:
    """Generate pictures with MODEL, as one labelled grid or as a folder.

    MODEL is a folder or org/name[@revision], of a pipeline or of a peft adapter, which is put on its base model.

    A grid has a row for each class or text. Picture n of every row starts from the same noise, for any batch size. In
    a folder the classes or texts alternate. Each picture depends only on --seed and its number: the same command
    resumes after an interruption, and a larger --count adds pictures. Processes of `accelerate launch -m
    hf_ext_cli.main sample ...` share the work.

    \b
    Examples:
      hf-ext sample runs/dit-cifar10/snapshot --class-labels cat,dog --out grid.png
      hf-ext sample org/name --prompt "a red bicycle" --prompt "a blue boat" --out grid.png --steps 30
      hf-ext sample org/name --class-labels cat --image dog.png --strength 0.6 --negative dog --out grid.png
      hf-ext sample org/name --count 50000 --out pictures --dtype bfloat16
      hf-ext sample org/name --count 50000 --out tars --shard-size 1000
    """
    from accelerate.utils.memory import should_reduce_batch_size

    from hf_ext.answers.classifying import read_picture
    from hf_ext.distributed import Ranks, require_device
    from hf_ext.files import check_places
    from hf_ext.pipelines.disentangled_dit import DisentangledDiTImg2ImgPipeline
    from hf_ext.progress import progress
    from hf_ext.tasks.diffusion_grids import draw_grid, sample_rows, write_picture
    from hf_ext.tasks.diffusion_samples import sample_folder

    is_grid = out.suffix.lower() == ".png"
    ranks = Ranks()
    _check_out(out, is_grid, count, asked["shard_size"], ranks.count)
    check_places([out] * is_grid, [image, asked["prompt_file"]])
    if asked["negative"] is not None and asked["guidance_scale"] <= 1:
        raise click.UsageError("--negative needs guidance: give a --guidance-scale above 1, or leave out --negative.")
    if asked["strength"] is not None and image is None:
        raise click.UsageError("--strength is the share of --image that is replaced: give both, or neither.")
    with ranks.first_before_others(), loading(source):
        pipeline = load_pipeline(source, require_device(ranks.own_device(device)), asked["dtype"])
    if asked["scheduler"] is not None:
        pipeline.scheduler = _other_scheduler(pipeline.scheduler, asked["scheduler"])
    prompts = asked["prompts"] + _read_prompts(asked["prompt_file"])
    conditions, names = _conditions(pipeline, asked["class_labels"], prompts, 10 if is_grid else None)
    options = _call_options(pipeline, asked)
    if image is not None:
        pipeline = DisentangledDiTImg2ImgPipeline.from_pipe(pipeline)
        strength = 0.8 if asked["strength"] is None else asked["strength"]
        options |= {"image": read_picture(image), "strength": strength}
    # With a folder, the progress bar counts pictures instead.
    pipeline.progress_bar = partial(progress, unit=" steps", shown=is_grid)
    try:
        if not is_grid and count is not None:
            options |= {name: asked[name] for name in ("seed", "batch_size", "shard_size")}
            made = sample_folder(pipeline, conditions, count, out, ranks, **options)
        else:
            rows = sample_rows(pipeline, conditions, count or 4, asked["seed"], asked["batch_size"], **options)
            made = write_picture(draw_grid(rows, names), out)
    except RuntimeError as error:
        if not should_reduce_batch_size(error):
            raise
        told = f"a single picture does not fit in memory ({error})"
        raise Failed(f"{told}; try --dtype bfloat16, or a smaller --size.") from error
    if ranks.index == 0:
        say(made)


def _read_prompts(path: Path | None) -> tuple[str, ...]:
    """The lines of a file that are not empty; a text may hold other breaks, such as U+2028."""
    if path is None:
        return ()
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise click.BadParameter(f"{path} is not UTF-8: {error}", param_hint="--prompts") from error
    if not any(map(str.strip, lines)):
        raise click.BadParameter(f"{path} contains no text.", param_hint="--prompts")
    return tuple(line for line in lines if line.strip())


def _check_out(out: Path, is_grid: bool, count: int | None, shard_size: int | None, processes: int) -> None:
    from PIL import Image

    is_file = out.is_file() or out.suffix.lower() in {".tar", ".zip", *Image.registered_extensions()}
    grid = {
        "--shard-size is for the tar files of a folder: give a folder with --out.": shard_size is not None,
        f"a grid is generated by one process, not {processes}: give a folder with --out, or run without `accelerate "
        "launch`.": processes > 1,
        f"--out {out} is an existing folder; a grid is one PNG file.": out.is_dir(),
    }
    folder = {
        f"--out {out} must be a .png file for a grid, or a folder; --shard-size writes tar files into one.": is_file,
        f"folder {out} needs --count, the number of pictures; for a grid, give a .png file.": count is None,
    }
    for problem, is_there in (grid if is_grid else folder).items():
        if is_there:
            raise click.UsageError(problem)


def load_pipeline(source: str, device: str, dtype: str) -> Any:
    import torch
    from diffusers import DiffusionPipeline
    from huggingface_hub.errors import HFValidationError

    from hf_ext.files import read_json_object
    from hf_ext.hub.checkpoints import split_revision
    from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline
    from hf_ext.training.models import adapter_base, load_adapter, pipeline_index

    index = pipeline_index(source)
    base = None
    if index is None:
        # A mistyped folder, or a name that no Hub can be asked about.
        with suppress(OSError, HFValidationError):
            base = adapter_base(source)
    if base is not None:
        pipeline = load_pipeline(base, device, dtype)
        pipeline.transformer = load_adapter(pipeline.transformer, source).merge_and_unload()
        return pipeline
    # A list names the file of the class too.
    if index is None or not isinstance(read_json_object(index).get("_class_name"), str | list):
        raise Unusable(f"{source} is no diffusers pipeline: it needs a model_index.json that names a _class_name.")
    name, revision = split_revision(source)
    pipeline = DiffusionPipeline.from_pretrained(name, revision=revision, dtype=getattr(torch, dtype))
    if not isinstance(pipeline, DisentangledDiTPipeline):
        raise Unusable(f"{source} contains a {type(pipeline).__name__}; sample needs a DisentangledDiTPipeline.")
    return pipeline.to(device)


def _class_number(pipeline: Any, word: str) -> int:
    """The class of a name, or of a number where no name is this number."""
    if not word.isdecimal() or word in pipeline.labels:
        return int(pipeline.get_label_ids(word)[0])
    # The pipeline takes one more, for no class.
    if int(word) >= (count := pipeline.transformer.config.num_classes):
        raise click.UsageError(f"there is no class {word}; allowed are 0 to {count - 1}, and names.")
    return int(word)


def _conditions(
    pipeline: Any, class_labels: str | None, prompts: tuple[str, ...], most: int | None
) -> tuple[list[Any], list[str]]:
    """The classes or texts to generate, and their names; the first `most` classes if none is named."""
    count = pipeline.transformer.config.num_classes
    if (count is None) != bool(prompts) or (prompts and class_labels):
        wanted = "--prompt" if count is None else "--class-labels"
        raise click.UsageError(f"this model takes {wanted} only.")
    if prompts:
        return list(prompts), list(prompts)
    labels = [_class_number(pipeline, word) for word in split_names(class_labels)] or [*range(count)][:most]
    known = pipeline.config.id2label or {}
    return labels, [known.get(str(label), str(label)) for label in labels]


def _call_options(pipeline: Any, asked: dict[str, Any]) -> dict[str, Any]:
    options = {name: asked[name] for name in ("guidance_scale", "control_guidance_scale", "num_inference_steps")}
    options |= {name: asked[name] for name in ("original_size", "target_size", "crop", "flip") if asked[name]}
    if asked["size"] is not None:
        options["height"], options["width"] = asked["size"]
    if (negative := asked["negative"]) is None:
        return options
    if pipeline.transformer.config.num_classes is None:
        return {**options, "negative_prompt": negative}
    return {**options, "negative_class_labels": _class_number(pipeline, negative)}


def _other_scheduler(before: Any, name: str) -> Any:
    """Creates a scheduler of diffusers with the model's schedule."""
    import diffusers
    from diffusers import SchedulerMixin

    kind = getattr(diffusers, name, None) if name.endswith("Scheduler") else None
    if missing := [library for library in getattr(kind, "_backends", ()) if find_spec(library) is None]:
        # diffusers has a stand-in of this name where a library is absent.
        raise click.BadParameter(f"{name} needs {missing[0]}: install it.", param_hint="--scheduler")
    if not (isinstance(kind, type) and issubclass(kind, SchedulerMixin) and hasattr(kind, "from_config")):
        told = f"diffusers has no scheduler {name!r}; for instance DDIMScheduler or DPMSolverMultistepScheduler."
        raise click.BadParameter(told, param_hint="--scheduler")
    config, accepted = before.config, inspect.signature(kind).parameters
    flow: dict[str, Any] = {}
    if "shift" in config and "use_flow_sigmas" in accepted:
        # Solvers made for diffusion have other names for the settings of flow matching.
        flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": config["shift"]}
    try:
        return kind.from_config(config, **flow)
    except (NotImplementedError, TypeError) as error:
        told = f"{name} does not take the model's schedule: {error}."
        raise click.BadParameter(told, param_hint="--scheduler") from error
