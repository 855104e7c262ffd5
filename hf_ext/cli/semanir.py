"""hf-ext restore and hf-ext export: SemanIR models on pictures, and as ONNX files."""

import math
import time
from pathlib import Path
from typing import Any

import click

from hf_ext.system import import_undisturbed
from hf_ext.terminal import count_of, is_quiet

from .errors import Failed, Unusable, loading
from .options import AT_LEAST_1, DEVICE, DTYPE, MODEL, TASK, Place, shown, value_type
from .output import say

FORMATS = ("png", "jpg", "webp", "tif", "gif")


def _read_colour(text: str) -> tuple[int, ...]:
    from PIL import ImageColor

    # Pillow lets values above 255 pass, which are a ValueError here. What is behind a picture lets nothing through.
    colour = tuple(bytes(ImageColor.getrgb(text)))
    if colour[3:] not in ((), (255,)):
        raise ValueError(text)
    return colour[:3]


TILE = value_type("PIXELS|auto", int, "neither a number of pixels nor 'auto'")
STRENGTH = value_type("0..1|auto", float, "neither a number from 0 to 1 nor 'auto'", lambda share: 0 <= share <= 1)
COLOUR = value_type("COLOUR", _read_colour, "not an opaque colour; give one such as white or #ffcc00")
MEGAPIXELS = value_type("MEGAPIXELS", float, "not a number above 0", lambda size: 0 < size < math.inf)


@click.command()
@MODEL
@click.argument("inputs", metavar="IN...", nargs=-1, required=True)
@TASK
@click.option("--out", type=Place(), required=True, help="Folder for restored pictures, or a file or - for one.")
@click.option("--tile", type=TILE, help="Side of tiles in pixels; auto uses tiles if memory is short.")
@click.option("--self-ensemble", is_flag=True, help="Average over 8 flips and rotations: better, 8 times the time.")
@click.option("--top-k", type=AT_LEAST_1, help="Number of keys that each token attends to.")
@click.option(
    "--strength",
    type=STRENGTH,
    help="Blend of input and result: 0 keeps the input, 1 is the result; auto: by the noise and JPEG in a picture.  "
    "[default: 1; photo: auto]",
)
@click.option("--wrap", is_flag=True, help="Treat opposite edges as neighbours: seamless textures stay seamless.")
@click.option("--compare", is_flag=True, help="Also write OUT/comparison.html: before and after, under a slider.")
@click.option("--format", "kind", type=click.Choice(FORMATS), help="Format of results.  [default: that of the input]")
@click.option("--quality", type=click.IntRange(1, 100), help="Quality of JPEG and WebP.  [default: 95]")
@click.option("--lossless", is_flag=True, help="Write lossless WebP; lossless inputs stay lossless without it.")
@shown("--background", type=COLOUR, default="white", help="Colour behind transparency in JPEG and BMP.")
@shown("--name", "template", default="{stem}", help="Names of results, as {stem}_restored or {stem}-{ext}.")
@click.option("--overwrite", is_flag=True, help="Replace existing files that have the name of a result.")
@shown("--max-megapixels", type=MEGAPIXELS, default=200.0, help="Largest picture that is decoded.")
@DEVICE
@click.option("--dtype", type=DTYPE, help="Precision of the model.")
def restore(source: str, inputs: tuple[str, ...], task: str | None, out: str, **given: Any) -> None:
    """Restore pictures with MODEL, a folder or org/name[@revision].

    IN is a picture, a folder (with its subfolders, whose paths are kept), a pattern, - for a picture on standard
    input, or @FILE for a list of names, one per line (@- reads the list from standard input). Results keep
    transparency, 16 bits, EXIF data, colour profile and resolution. Every frame of an animated GIF, PNG or WebP and
    every page of a TIFF is restored. Unreadable pictures are reported, and so are pictures whose result would
    overwrite another result; the others are restored, and the exit code is 1. HEIC and RAW need the extra
    hf-ext[images].

    OUT is a folder, or the name of one result, whose ending says the format; with a slash at the end it is a folder.
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
      hf-ext restore org/name photos/ --out photos --name {stem}_restored
      find photos -newer last | hf-ext restore org/name @- --out restored
    """
    # The model is loaded later, and only if there is work to do.
    from hf_ext.distributed import Ranks
    from hf_ext.restoration.comparison import write_page
    from hf_ext.restoration.jobs import plan_jobs
    from hf_ext.restoration.records import Records, identify_model

    options = {name: given[name] for name in ("tile", "self_ensemble", "top_k", "strength", "wrap")}
    encoding = {name: given[name] for name in ("quality", "lossless", "background")}
    compare, template, overwrite, dtype = (given[name] for name in ("compare", "template", "overwrite", "dtype"))
    ending = f".{given['kind']}" if given["kind"] else None
    if encoding["quality"] is not None and encoding["lossless"]:
        raise click.UsageError("--quality applies to lossy compression and contradicts --lossless; give one of them.")
    folder = _folder_of_results(out, {"--compare": compare, "--name": template != "{stem}", "--format": bool(ending)})
    page = folder / "comparison.html" if folder is not None and compare else None
    ranks, made_with = Ranks(), {**options, **encoding, "task": task, "dtype": dtype}

    def find_records() -> Records | None:
        return None if folder is None else Records(folder, identify_model(source), made_with)

    def make_plan() -> tuple[Any, list[Any]]:
        records = find_records()
        ours = {} if records is None else {"is_result": records.is_result}
        plan = plan_jobs(list(inputs), None if folder is None else out, ending, template, **ours)
        return _choose(plan, records, page, overwrite, encoding)

    # One process plans: the others would see results of processes that started earlier, and standard input is read
    # once.
    plan, to_do = ranks.ask_first(make_plan)
    failed, parts, replaced, new = dict(plan.refused), [f"0 restored to {out}"], 0, 0
    if to_do:
        with import_undisturbed(), ranks.first_before_others(), loading(source):
            from hf_ext.restoration.restorer import load_model

            device = ranks.own_device(given["device"])
            model = load_model(source, task, device, dtype) if ranks.share(to_do) else None
        # The records once more: of a model that was just downloaded, the cache knows the commit by now.
        options |= {"max_megapixels": given["max_megapixels"], "records": find_records()}
        report, speed = _restore(model, to_do, ranks, encoding, options)
        failed |= report.failed
        parts, new = [f"{len(report.restored)} restored to {out}", speed], len(report.restored) + len(report.failed)
        replaced = sum(job.replace and not overwrite and job.name not in report.failed for job in to_do)
    if ranks.index > 0:
        # Only the first process prints.
        return
    done = [(job.name, job.source, job.out) for job in plan.jobs if job.name not in failed]
    if page is not None and done and (to_do or not page.exists()):
        if page.exists():
            say(f"{page} was made anew, with the pictures of this call alone", to_stderr=True)
        write_page(page, done)
    if folder is not None:
        say(out if is_quiet() else "; ".join([*parts, *_count_others(plan, new, replaced)]))
    if failed:
        raise Failed(f"{len(failed)} of {_count_all(plan)} could not be restored.")


def _count_all(plan: Any) -> str:
    return count_of(len(plan.jobs) + len(plan.refused), "picture")


def _count_others(plan: Any, new: int, replaced: int) -> list[str]:
    """Parts of the summary about pictures that were done before or replaced."""
    counted = {
        "already restored (--overwrite restores them again)": len(plan.jobs) - new,
        "of them replace results of another picture, model or options, or damaged results": replaced,
    }
    return [f"{count} {what}" for what, count in counted.items() if count]


def _choose(
    plan: Any, records: Any, page: Path | None, overwrite: bool, encoding: dict[str, Any]
) -> tuple[Any, list[Any]]:
    """The plan and its unfinished jobs; prints the pictures that cannot be restored."""
    from hf_ext.files import check_places, remove_leftovers_of
    from hf_ext.restoration.comparison import is_page
    from hf_ext.restoration.records import choose_jobs

    for option, endings in (("quality", (".jpg", ".jpeg", ".webp")), ("lossless", (".webp",))):
        if plan.jobs and encoding[option] and not any(job.ending.lower() in endings for job in plan.jobs):
            raise Unusable(f"--{option} is for {' and '.join(endings)}, but no result has this format; see --format.")
    plan, to_do = choose_jobs(plan, records, overwrite)
    say(*plan.refused.values(), to_stderr=True)
    if not plan.jobs:
        raise Unusable(f"none of {_count_all(plan)} can be restored.")
    if to_do and page is not None and page.exists() and not overwrite and not (page.is_file() and is_page(page)):
        raise Failed(f"{page} would be replaced; give --overwrite, or move it.")
    # Of a folder in a result's place its picture tells.
    check_places(job.out for job in to_do if job.out is not None and not job.out.is_dir())
    remove_leftovers_of(job.out for job in plan.jobs if job.out is not None)
    return plan, to_do


def _folder_of_results(out: str, given: dict[str, bool]) -> Path | None:
    """The folder of the results; None for standard output."""
    from hf_ext.restoration.jobs import is_one_result

    if not out:
        raise click.UsageError("--out is empty; give a folder (. is this one), the name of a picture, or -.")
    if out == "-":
        if useless := [flag for flag in given if given[flag] and flag != "--format"]:
            raise click.UsageError(f"{useless[0]} needs a folder for its page or names: give --out DIR instead of -.")
        return None
    place = Path(out)
    if not is_one_result(out):
        if place.exists() and not place.is_dir():
            raise click.UsageError(f"--out {out} is a file; give a folder, or the name of a picture.")
        return place
    if useless := [flag for flag in given if given[flag] and flag != "--compare"]:
        raise click.UsageError(f"--out {out} names the result already: leave out {' and '.join(useless)}.")
    return place.parent


def _restore(
    model: Any, jobs: list[Any], ranks: Any, encoding: dict[str, Any], options: dict[str, Any]
) -> tuple[Any, str]:
    """Restores the pictures; returns the report and the speed."""
    from hf_ext.progress import progress
    from hf_ext.restoration.encoding import Encoding
    from hf_ext.restoration.run import restore_files

    started = time.monotonic()
    form = "{percentage:3.0f} %|{bar}| {n:.1f} of {total_fmt} [{elapsed}, {remaining} left]"
    more: dict[str, Any] = {"unit": " pictures", "bar_format": form, "smoothing": 0.1}
    with progress(total=len(jobs), shown=ranks.index == 0, **more) as bar:

        def tell(text: str) -> None:
            bar.clear()
            say(text, to_stderr=True)

        def count(pictures: float) -> None:
            # The other processes are as fast as this one.
            bar.update(pictures * ranks.count - bar.n)

        report = restore_files(model, jobs, encoding=Encoding(**encoding), progress=count, say=tell, **options)
    seconds = time.monotonic() - started
    return report, f"{report.megapixels:.2f} megapixels in {seconds:.1f} s, {report.megapixels / seconds:.3f} MP/s"


@click.command()
@MODEL
@click.option("--onnx", "path", metavar="FILE", required=True, type=Place(), help="File to write.")
@TASK
def export(source: str, path: str, task: str | None) -> None:
    """Export a restorer (folder or org/name[@revision]) to an ONNX file in float32.

    The file restores batches of pictures of any size above a minimum, which its metadata contain. It is written only
    after onnxruntime has restored pictures with the same result as the model. This takes minutes and needs the extra
    hf-ext[onnx].

    \b
    Examples:
      hf-ext export denoise-color --onnx denoise.onnx
      hf-ext export merged --task jpeg --onnx jpeg.onnx
    """
    with loading(source):
        from hf_ext.restoration.restorer import load_model

        model = load_model(source, task, "cpu", "float32")
    from hf_ext.restoration.export import export_onnx

    written = export_onnx(model, path)
    say(
        f"{written.path}: {written.bytes / 1e6:.1f} MB, for pictures from {written.minimum} x {written.minimum} "
        f"pixels on; onnxruntime and the model differ by at most {written.difference:.1g}"
    )
