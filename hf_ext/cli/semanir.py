"""hf-ext restore and hf-ext semanir: SemanIR models on pictures."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hf_ext.system import import_undisturbed
from hf_ext.terminal import count_of, is_quiet

from .errors import Failed, Unusable, loads
from .groups import Group
from .library import import_without_models
from .sources import Model
from .terminal import say

FORMATS = ("png", "jpg", "webp", "tif", "gif")


class Parsed(click.ParamType):  # type: ignore[type-arg]
    """
    A value that a function reads from text.

    Args:
        name (`str`): Its kind, for the help.
        read (`Callable[[str], Any]`): Raises a `ValueError` for other texts.
        wrong (`str`): What another text is.
    """

    def __init__(self, name: str, read: Callable[[str], Any], wrong: str) -> None:
        self.name, self.read, self.wrong = name, read, wrong

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.read(value) if isinstance(value, str) else value
        except ValueError:
            self.fail(f"{value!r} is {self.wrong}.", param, ctx)


def _read_strength(text: str) -> float | str:
    if text != "auto" and not 0 <= float(text) <= 1:
        raise ValueError(text)
    return text if text == "auto" else float(text)


def _read_colour(text: str) -> tuple[int, ...]:
    from PIL import ImageColor

    # Pillow lets values above 255 pass, which are a ValueError here. What is behind a picture lets nothing through.
    colour = tuple(bytes(ImageColor.getrgb(text)))
    if colour[3:] not in ((), (255,)):
        raise ValueError(text)
    return colour[:3]


def _read_megapixels(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise ValueError(text)
    return float(text)


TILE = Parsed(
    "PIXELS|auto", lambda text: text if text == "auto" else int(text), "neither a number of pixels nor 'auto'"
)
STRENGTH = Parsed("0..1|auto", _read_strength, "neither a number from 0 to 1 nor 'auto'")
COLOUR = Parsed("COLOUR", _read_colour, "not an opaque colour; give one such as white or #ffcc00")
MEGAPIXELS = Parsed("MEGAPIXELS", _read_megapixels, "not a number above 0")
NUMBERS = Parsed("N,N", lambda text: [*map(int, text.split(","))], "not a list of whole numbers such as 16,64")


@loads
def load_model(source: str, device: str | None, dtype: str | None, task: str | None = None) -> Any:
    """Loads the model of a folder or org/name[@revision], or of one task of a merge, on the GPU if there is one."""
    from hf_ext.restoration.restorer import load_model as run

    return run(source, task, device, dtype)


@click.command()
@click.argument("source", metavar="MODEL", type=Model())
@click.argument("inputs", metavar="IN...", nargs=-1, required=True)
@click.option("--task", metavar="NAME", help="Task of a merge.")
@click.option("--out", required=True, help="Folder for restored pictures, or a file or - for one.")
@click.option("--tile", type=TILE, help="Side of tiles in pixels; auto uses tiles if memory is short.")
@click.option("--self-ensemble", is_flag=True, help="Average over 8 flips and rotations: better, 8 times the time.")
@click.option("--top-k", type=click.IntRange(min=1), help="Number of keys that each token attends to.")
@click.option(
    "--strength",
    type=STRENGTH,
    help="Blend of input and result: 0 keeps the input, 1 is the result; auto: by the noise and JPEG in a picture.  "
    "[default: 1; photo: auto]",
)
@click.option("--wrap", is_flag=True, help="Treat opposite edges as neighbours: seamless textures stay seamless.")
@click.option(
    "--compare",
    is_flag=True,
    help="Also write pictures and crops before and after: OUT/comparison.png, and comparison.html with sliders.",
)
@click.option("--format", "kind", type=click.Choice(FORMATS), help="Format of results.  [default: that of the input]")
@click.option("--quality", type=click.IntRange(1, 100), help="Quality of JPEG and WebP.  [default: 95]")
@click.option("--lossless", is_flag=True, help="Write lossless WebP; lossless inputs stay lossless without it.")
@click.option(
    "--background",
    type=COLOUR,
    default="white",
    show_default=True,
    help="Colour behind transparency in JPEG and BMP.",
)
@click.option("--suffix", help="Suffix of the results' names, such as _restored: a.png becomes a_restored.png.")
@click.option(
    "--name",
    "template",
    help="Template of the results' names, such as {stem}-{ext}; {stem} and {ext} come from the input.",
)
@click.option("--overwrite", is_flag=True, help="Replace existing files that have the name of a result.")
@click.option(
    "--max-megapixels",
    type=MEGAPIXELS,
    default=200.0,
    show_default=True,
    help="Largest picture; larger ones are reported and not decoded.",
)
@click.option("--device", help="cpu, cuda, cuda:1, ...  [default: the GPU if there is one]")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Precision of the model.")
def restore(
    source: str,
    inputs: tuple[str, ...],
    task: str | None,
    out: str,
    compare: bool,
    kind: str | None,
    quality: int | None,
    lossless: bool,
    background: tuple[int, int, int],
    suffix: str | None,
    template: str | None,
    overwrite: bool,
    max_megapixels: float,
    device: str | None,
    dtype: str | None,
    **options: Any,
) -> None:
    """Restore pictures with MODEL, a folder or org/name[@revision].

    IN is a picture, a folder (with its subfolders, whose paths are kept), a pattern, - for a picture on standard
    input, or @FILE for a list of names, one per line (@- reads the list from standard input). Results keep
    transparency, 16 bits, EXIF data, colour profile and resolution. Every frame of an animated GIF, PNG or WebP and
    every page of a TIFF is restored. Unreadable pictures are reported, and so are pictures whose result would
    overwrite another result; the others are restored, and the exit code is 1. HEIC and RAW need the extra
    hf-ext[images].

    OUT is a folder, or the name of one result; its ending says the format.
    OUT/.hf-ext-restored.jsonl records the picture, model and options of each result. An existing result is kept if all
    three are the same, and made again otherwise. Files that this command did not write are kept and reported.

    \b
    Examples:
      hf-ext restore runs/denoise/snapshot noisy.png --out restored
      hf-ext restore org/name photos/ "scans/**/*.tif" --out restored --compare
      hf-ext restore org/name portrait.jpg --out restored --strength auto
      hf-ext restore merged old.jpg --task jpeg --out restored
      hf-ext restore org/name huge.png --out restored --tile auto --dtype bfloat16
      curl -s https://example.org/a.jpg | hf-ext restore org/name - --out - > restored.jpg
      hf-ext restore org/name photos/ --out photos --suffix _restored
      find photos -newer last | hf-ext restore org/name @- --out restored
    """
    # The model is loaded later, and only if there is work to do.
    import_without_models()
    from hf_ext.distributed import Ranks
    from hf_ext.restoration.jobs import plan_jobs

    name = _check_options(quality, lossless, suffix, template)
    place, folder = _place_of_results(out, compare, kind or suffix or template)
    sheet = folder / "comparison.png" if folder is not None and compare else None
    encoding = {"quality": quality, "lossless": lossless, "background": background}
    # The others are those of `restore_image`.
    ranks, made_with = Ranks(), {**options, **encoding, "task": task, "dtype": dtype}
    # One process plans: the others would see results of processes that started earlier, and standard input is read
    # once.
    plan, to_do = ranks.ask_first(
        lambda: _plan(
            plan_jobs(list(inputs), place, f".{kind}" if kind else None, name, sheet),
            _records(source, folder, made_with),
            sheet,
            overwrite,
            encoding,
        )
    )
    failed, parts, replaced = len(plan.refused), [f"0 restored to {out}"], 0
    if to_do:
        with import_undisturbed(), ranks.first_before_others():
            model = load_model(source, ranks.own_device(device), dtype, task) if ranks.share(to_do) else None
        records = _records(source, folder, made_with)
        given = {**options, "max_megapixels": max_megapixels, "compare": sheet, "records": records}
        report, speed = _restore(model, to_do, ranks, encoding, given)
        failed += len(report.failed)
        parts = [f"{len(report.restored)} restored to {out}", speed]
        replaced = sum(job.replace and not overwrite and job.name not in report.failed for job in to_do)
    if ranks.index > 0:
        # Only the first process prints.
        return
    if folder is not None:
        say(out if is_quiet() else "; ".join([*parts, *_count_others(plan, len(to_do), replaced)]))
    if failed:
        raise Failed(f"{failed} of {count_of(len(plan.jobs) + len(plan.refused), 'picture')} could not be restored.")


def _count_others(plan: Any, to_do: int, replaced: int) -> list[str]:
    """Parts of the summary about pictures that were done before, replaced or skipped."""
    counted = {
        "already restored (--overwrite restores them again)": len(plan.jobs) - to_do,
        "of them replace results of another picture, model or options, or damaged results": replaced,
        "skipped because a library is missing": len(plan.skipped),
    }
    return [f"{count} {what}" for what, count in counted.items() if count]


def _check_options(quality: int | None, lossless: bool, suffix: str | None, template: str | None) -> str:
    """The template of the results' names."""
    if quality is not None and lossless:
        raise click.UsageError("--quality applies to lossy compression and contradicts --lossless; give one of them.")
    if suffix is not None and template is not None:
        raise click.UsageError("--suffix SUFFIX means --name '{stem}SUFFIX'; give either --suffix or --name.")
    # Escape braces in a suffix.
    return template or "{stem}" + (suffix or "").replace("{", "{{").replace("}", "}}")


def _records(source: str, folder: Path | None, made_with: dict[str, Any]) -> Any:
    """The records of the results in a folder."""
    from hf_ext.restoration.records import Records, identify_model

    return None if folder is None else Records(folder, identify_model(source), made_with)


def _plan(
    plan: Any, records: Any, sheet: Path | None, overwrite: bool, encoding: dict[str, Any]
) -> tuple[Any, list[Any]]:
    """The plan and its unfinished jobs; prints the pictures that cannot be restored."""
    from hf_ext.files import remove_leftovers_of
    from hf_ext.restoration.jobs import check_places
    from hf_ext.restoration.records import choose_jobs

    for option, endings in (("quality", (".jpg", ".jpeg", ".webp")), ("lossless", (".webp",))):
        if plan.jobs and encoding[option] and not any(job.ending.lower() in endings for job in plan.jobs):
            raise Unusable(f"--{option} is for {' and '.join(endings)}, but no result has this format; see --format.")
    plan, to_do = choose_jobs(plan, records, overwrite)
    for text in [*plan.skipped.values(), *plan.refused.values()]:
        say(text, to_stderr=True)
    if not plan.jobs:
        raise Unusable(f"none of {count_of(len(plan.skipped) + len(plan.refused), 'picture')} can be restored.")
    drawn = [] if sheet is None else [sheet, sheet.with_suffix(".html")]
    if to_do and not overwrite and (there := [str(path) for path in drawn if path.exists()]):
        raise Failed(f"{' and '.join(there)} would be replaced; give --overwrite, or move them.")
    if not to_do and not all(path.exists() for path in drawn):
        say("nothing is left to restore, so --compare drew nothing; --overwrite restores all again.", to_stderr=True)
    check_places(to_do)
    remove_leftovers_of(job.out for job in to_do if job.out is not None)
    return plan, to_do


def _place_of_results(out: str, compare: bool, named: str | None) -> tuple[Path | None, Path | None]:
    """The file or folder that --out names, and the folder of the results; None for standard output."""
    from hf_ext.restoration.jobs import is_one_result

    if not out:
        raise click.UsageError("--out is empty; give a folder (. is this one), the name of a picture, or -.")
    if out == "-":
        if compare:
            raise click.UsageError("--compare needs a folder for its files: give --out DIR instead of -.")
        return None, None
    place = Path(out)
    if not is_one_result(place):
        if place.exists() and not place.is_dir():
            raise click.UsageError(f"--out {out} is a file; give a folder, or the name of a picture.")
        return place, place
    if named:
        raise click.UsageError(f"--out {out} names the result already: leave out --format, --suffix and --name.")
    return place, place.parent


def _restore(
    model: Any, jobs: list[Any], ranks: Any, encoding: dict[str, Any], options: dict[str, Any]
) -> tuple[Any, str]:
    """Restores the pictures; returns the report and the speed."""
    from hf_ext.progress import progress
    from hf_ext.restoration.encoding import Encoding
    from hf_ext.restoration.jobs import megapixels_of
    from hf_ext.restoration.run import restore_files

    started = time.monotonic()
    # The sizes are known only after opening all files, so this is done only for a visible bar, which assumes that the
    # other processes are as fast as this one.
    shown = ranks.index == 0 and not is_quiet()
    total = round(ranks.count * sum(map(megapixels_of, ranks.share(jobs))), 6) if shown else 0.0
    with progress(total=total, unit="MP", shown=shown, bar_format=_FORMAT, smoothing=0.1) as bar:

        def tell(text: str) -> None:
            bar.clear()
            say(text, to_stderr=True)

        report = restore_files(
            model,
            jobs,
            encoding=Encoding(**encoding),
            progress=lambda megapixels: bar.update(megapixels * ranks.count),
            say=tell,
            **options,
        )
    seconds = time.monotonic() - started
    return report, f"{report.megapixels:.2f} megapixels in {seconds:.1f} s, {report.megapixels / seconds:.3f} MP/s"


_FORMAT = "{percentage:3.0f} %|{bar}| {n:.2f} of {total:.2f} MP [{elapsed}, {remaining} left, {rate_fmt}]"


@click.group(cls=Group)
def semanir() -> None:
    """SemanIR: draw what a model attends to. `hf-ext train` trains a model, `hf-ext restore` uses it."""


@semanir.command()
@click.argument("source", metavar="MODEL", type=Model())
@click.argument("image", metavar="IMAGE", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", metavar="OUT.png", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--at", type=NUMBERS, metavar="X,Y", help="Position of the patch in pixels.  [default: the middle]")
@click.option("--stage", type=click.IntRange(min=1), default=1, show_default=True, help="Number of the stage.")
@click.option("--top-k", type=NUMBERS, help="Numbers of keys.  [default: 1/16 to 1/2 of a window]")
def explain(source: str, image: Path, out: Path, at: list[int] | None, stage: int, top_k: list[int] | None) -> None:
    """Draw the key-semantic neighbours of a patch of IMAGE for several k, and write OUT.png.

    The neighbours of a patch are the k most similar tokens of its window, which it attends to in a stage of MODEL, a
    folder or org/name[@revision].

    \b
    Examples:
      hf-ext semanir explain runs/denoise/snapshot photo.png neighbours.png
      hf-ext semanir explain org/name photo.png neighbours.png --at 120,80 --stage 2 --top-k 16,64,256
    """
    import numpy as np

    from hf_ext.restoration.attention import explain as draw
    from hf_ext.restoration.encoding import Picture
    from hf_ext.restoration.files import read_image, write_image

    if at is not None and len(at) != 2:
        raise click.BadParameter("give two numbers, column and row, such as 120,80.", param_hint="--at")
    if out.suffix.lower() != ".png":
        raise click.BadParameter(f"{out} does not end with .png.", param_hint="OUT.png")
    if out.exists() and out.samefile(image):
        raise click.BadParameter(f"{out} is the picture itself, which would be replaced.", param_hint="OUT.png")
    pixels = read_image(image).pixels
    drawing = draw(load_model(source, None, None), pixels, None if at is None else (at[0], at[1]), stage, top_k)
    say(write_image(out, Picture(np.asarray(drawing)), overwrite=True))
