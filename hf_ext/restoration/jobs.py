"""Planning of a command: its pictures and the path of each result, without torch or a model."""

import glob
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

from PIL import Image

from ..errors import DataError
from .camera import DECODER_ERRORS, RAW_ENDINGS, open_picture

logger = logging.getLogger(__name__)

# The formats of results by the ends of their names. A still GIF becomes a PNG, since a GIF has 256 colours.
FORMATS = {
    ".png": "PNG",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".webp": "WEBP",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".bmp": "BMP",
    ".gif": "GIF",
}
_STDIN = Path("stdin")
# What Pillow recognises but cannot decode by itself, or not as pixels.
_NO_PIXELS = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
# Pictures that nothing here reads.
_NOT_READ = frozenset((".exr", ".jxl", ".jxr", ".xcf"))
# What other libraries read; the ends of RAW files are in `camera`.
HEIF_ENDINGS = frozenset((".heic", ".heif", ".hif"))


class Job(NamedTuple):
    """One picture to restore: its name in messages, the file or what is in it, and where the result goes."""

    name: str
    source: Path | bytes
    # None for standard output, where the ending alone says the format.
    out: Path | None
    ending: str
    # Whether a result that is there already is to be replaced.
    replace: bool = False


class Plan(NamedTuple):
    """Jobs to do, and why the other inputs cannot have a result, by name."""

    jobs: list[Job]
    refused: dict[str, str]


class Found(NamedTuple):
    """A file, its place below the folder of results, whether it was named by itself, and why it is none."""

    source: Path | bytes
    relative: Path
    named: bool
    reason: str | None = None


def is_one_result(out: str | Path) -> bool:
    """True for the name of a picture: the result of one goes there. A folder has a slash at its end, or is there."""
    if os.path.basename(out) in ("", ".") or os.path.isdir(out):
        return False
    ending = Path(out).suffix.lower()
    if ending in picture_endings() - FORMATS.keys():
        raise ValueError(f"{out}: results can be {', '.join(FORMATS)}; a folder of that name is {out}/")
    return ending in FORMATS


def plan_jobs(
    inputs: list[str],
    out: str | Path | None,
    ending: str | None = None,
    name: str = "{stem}",
    is_result: Callable[[Path], bool] = lambda path: False,
) -> Plan:
    """
    Find the pictures and say where each goes: below `out`; or to standard output or a file, which take one.

    An input is a file; a folder, searched with all below it, whose relative paths are kept; a pattern such as
    `photos/**/*.png`; `-` for standard input; `@FILE` or `@-` for a list of names, one a line. A result ends as its
    input unless `ending` is given, or `.png` where nothing can be written so without loss: a still GIF. In `name`,
    `{stem}` and `{ext}` are the input's. An input that is refused stops no other one. A result of an earlier run, as
    `is_result` knows it, is an input only where it is named by itself.
    """
    check_template(name)
    one, root = out is not None and is_one_result(out), None if out is None else Path(out)
    found = [picture for given in inputs for picture in find_files(given, root, picture_endings())]
    fresh = [each for each in found if each.named or isinstance(each.source, bytes) or not is_result(each.source)]
    if not fresh:
        told = "only results of earlier runs" if found else "no picture"
        advice = "; name them, or give another folder with --out" if found else ""
        raise ValueError(f"{told} found in {', '.join(inputs)}{advice}.")
    found = fresh
    if (root is None or one) and len(found) > 1:
        more = f"; a folder of that name is {root}/" if one else ""
        raise ValueError(f"{root or 'standard output'} takes one picture, got {len(found)}{more}")
    if root is None:
        source, relative, _, reason = found[0]
        if reason is not None:
            raise ValueError(f"{relative}: {reason}")
        return Plan([Job(str(relative), source, None, ending or _ending_of(source, relative))], {})
    planned, refused = list[tuple[Job, bool]](), dict[str, str]()
    for source, relative, named, missing in found:
        title = "standard input" if relative == _STDIN else str(source if isinstance(source, Path) else relative)
        reason = missing or why_unreadable(relative)
        if reason is not None:
            refused[title] = f"{title}: {reason}"
            continue
        written = root.suffix.lower() if one else ending or _ending_of(source, relative)
        result = name.format(stem=relative.stem, ext=relative.suffix.removeprefix("."))
        place = root if one else root / relative.with_name(result + written)
        planned.append((Job(title, source, place, written), named))
    return Plan(_without_clashes(planned, refused, renamed=name != "{stem}"), refused)


def check_template(name: str) -> None:
    """Refuse an invalid template of names, or one without the input's name."""
    try:
        fields = {field for _, field, _, _ in Formatter().parse(name) if field is not None}
        made = name.format(stem="a", ext="b") if fields <= {"stem", "ext"} else ""
    except (ValueError, LookupError, AttributeError):
        # A format may have names in braces too.
        fields, made = set(), ""
    is_folder = not {"/", os.sep, "\0"}.isdisjoint(made)
    if not made or "stem" not in fields or is_folder or Path(made).suffix.lower() in FORMATS:
        raise ValueError(
            f"{name!r} is no template of names such as '{{stem}}_restored' or '{{stem}}-{{ext}}': {{stem}} is needed, "
            "{ext} allowed, nothing else in braces, no folder and no extension, which --format chooses."
        )


def _without_clashes(planned: list[tuple[Job, bool]], refused: dict[str, str], renamed: bool) -> list[Job]:
    """The jobs whose results have distinct names; the reasons for the others go to `refused`."""
    jobs = list[Job]()
    # The picture and its name, by the place of the result: some file systems do not tell capitals.
    places = dict[str, tuple[Path | bytes | None, str]]()
    # Links are followed once for each: of a million pictures that takes minutes. A pipe is known by its content.
    resolved = [(job, named, _resolve(job.source), _resolve(job.out)) for job, named in planned]
    sources = {source: job.name for job, _, source, _ in resolved}
    results = {result: job.name for job, _, _, result in resolved}
    for job, named, source, result in resolved:
        place = str(job.out).casefold()
        holder, holders_name = places.get(place, (None, ""))
        if holder == source:
            # Named twice, in one spelling or two, or by itself and with its folder.
            continue
        if renamed and source in results:
            # A result of an earlier run beside its input, cut off or changed since, or without a record. Whoever names
            # it is told; in a folder it is passed over.
            if not named:
                continue
            reason = f"is at the path of the result of {results[source]}; move it, or give another folder with --out."
        elif not renamed and result in sources:
            reason = f"its result would replace {sources[result]}; give another folder with --out, or a --name."
        elif holder is not None:
            told = f"would be written to {job.out}, and so would {holders_name}"
            # Of names that differ in capitals alone the endings do not tell them apart.
            alike = Path(job.name).name.casefold() == Path(holders_name).name.casefold()
            more = (
                "rename it or restore it into another folder"
                if alike
                else ("rename it, restore it into another folder, or use --name '{stem}-{ext}'")
            )
            reason = f"{told}; {more}."
        else:
            places[place] = source, job.name
            jobs.append(job)
            continue
        refused[job.name] = f"{job.name}: {reason}"
    return jobs


def why_unreadable(path: Path) -> str | None:
    """The reason why a file cannot be read by its name: a missing library, or a format that nothing reads."""
    kind = path.suffix.lower()
    if kind in _NOT_READ:
        return f"pictures of {kind} are not read: convert it to PNG or TIFF."
    for endings, module, package in ((HEIF_ENDINGS, "pillow_heif", "pillow-heif"), (RAW_ENDINGS, "rawpy", "rawpy")):
        # Of a module that was imported, `find_spec` may know nothing.
        if kind in endings and not (sys.modules[module] if module in sys.modules else find_spec(module)):
            return f'needs pip install "hf-ext[images]" ({package}).'
    return None


def picture_endings() -> frozenset[str]:
    """Ends of names of pictures that can be read, if perhaps with a library that is not installed."""
    known = Image.registered_extensions()
    pillows = {end for end, format in known.items() if format in Image.OPEN and format not in _NO_PIXELS}
    return HEIF_ENDINGS | RAW_ENDINGS | _NOT_READ | pillows


def read_list(name: str) -> list[str]:
    """The lines of `@FILE`, or for `@-` of standard input, in which something stands."""
    try:
        text = sys.stdin.read() if name == "@-" else Path(os.path.expanduser(name[1:])).read_text(encoding="utf-8")
    except (UnicodeDecodeError, FileNotFoundError) as error:
        told = f"{name} is not a UTF-8 text with one name per line: {error}."
        raise DataError(f"{told} A picture of this name is ./{name}.") from error
    # A name may hold what Unicode takes for the end of a line. `find -print0` ends names with zeros.
    lines = text.removeprefix("\ufeff").split("\0" if "\0" in text else "\n")
    return [line for line in lines if line.strip()]


def find_files(name: str, out: Path | None, endings: frozenset[str], lists: tuple[str, ...] = ()) -> Iterator[Found]:
    """Files of an input, each with its place below the folder of results; of a folder those with such endings. A name
    or pattern of nothing is one with its reason."""
    name = os.path.expanduser(name)
    if name == "-":
        data = sys.stdin.buffer.read()
        yield Found(data, _STDIN, True)
    elif name.startswith("@"):
        if name in lists:
            raise DataError(f"{name} names itself, by way of {' and '.join(lists)}.")
        for line in read_list(name):
            # Blanks are part of the name if there is such a file.
            given = line if os.path.lexists(line) else line.strip()
            yield from find_files(given, out, endings, (*lists, name))
    elif os.path.isdir(name):
        folder = Path(name)
        for path in _without_results(sorted(_walk(folder)), folder, out):
            relative = path.relative_to(folder)
            if path.suffix.lower() not in endings or any(part.startswith(".") for part in relative.parts):
                continue
            if path.is_file():
                yield Found(path, relative, False)
            elif path.is_symlink():
                logger.warning(f"{path} was left out: its link leads nowhere")
    elif os.path.exists(name):
        # A pipe, such as <(curl ...) of a shell, can be read once.
        path, once = Path(name), not os.path.isfile(name)
        yield Found(path.read_bytes() if once else path, Path(path.name), True)
    elif glob.has_magic(name):
        parts = Path(name).parts
        fixed = Path(*parts[: next(index for index, part in enumerate(parts) if glob.has_magic(part))])
        matched = sorted(glob.glob(name, recursive=True))
        if not any(map(os.path.isfile, matched)):
            inside = f"files in its folders are {name.rstrip('/')}/**/*"
            advice = inside if matched else "in a name with brackets, write [[] for ["
            yield Found(Path(name), Path(name), True, f"the pattern matches no file; {advice}.")
        for path in _without_results(map(Path, matched), fixed, out):
            if path.is_file():
                yield Found(path, path.relative_to(fixed), False)
    else:
        reason = "it does not exist; give files, folders, patterns, or - for standard input."
        yield Found(Path(name), Path(name), True, reason)


def _without_results(paths: Iterable[Path], folder: Path, out: Path | None) -> Iterator[Path]:
    """Paths found in a folder, without those in the folder of results if that is inside."""
    results = None if out is None else _resolve(out)
    if results is None or _resolve(folder).is_relative_to(results):
        return iter(paths)
    return (path for path in paths if not _resolve(path).is_relative_to(results))


def _resolve(place: Any) -> Any:
    """The path that links lead to; of a link to itself, which `Path.resolve` does not bear, the link."""
    return Path(os.path.realpath(place)) if isinstance(place, Path) else place


def _walk(folder: Path) -> Iterator[Path]:
    """All below a folder, what is linked too; of a circle of links each folder once."""
    seen, tell = set[str](), lambda error: logger.warning(f"{error.filename} was not searched: {error.strerror}")
    for place, folders, names in os.walk(folder, onerror=tell, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(real)
        yield from (Path(place, name) for name in names)


def _ending_of(source: Path | bytes, relative: Path) -> str:
    """The ending of a result: that of its input, or one that holds what is in it."""
    kind = relative.suffix
    if isinstance(source, Path) and kind.lower() != ".gif":
        return kind if kind.lower() in FORMATS else ".png"
    try:
        with open_picture(source) as image:
            moving, format = getattr(image, "is_animated", False), image.format
    except DECODER_ERRORS:
        return ".png"
    if format == "GIF":
        return (kind or ".gif") if moving else ".png"
    # A phone's JPEG of several pictures.
    format = "JPEG" if format == "MPO" else format
    return next((ending for ending, written in FORMATS.items() if written == format), ".png")
