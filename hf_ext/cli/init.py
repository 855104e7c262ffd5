"""hf-ext init: a recipe for the user's data, or the file of a merge of the user's fine-tunes."""

import json
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import click

from hf_ext.terminal import count_of

from .options import Place, split_names
from .output import note, say

_quote = partial(json.dumps, ensure_ascii=False)
_MERGE = """\
# {about}. Written by `hf-ext init emr`. Show the plan, without reading weights: hf-ext merge {file} --dry-run
# Merge: hf-ext merge {file} {out} Compare with the fine-tunes: hf-ext emr compare {out}
base: {base}
# Fine-tunes by name, each a folder or org/name[@revision].
tasks:
{tasks}
# emr: one model, and one bit per weight for each task. Single models: ties, task_arithmetic, average and others.
method: emr
# Scale of each task: global (the paper), official, tensor, l2, tensor_l2, none.
rescale: global
# Regular expressions for tensors that each task keeps unmerged. Heads are kept without one.
exclude: []
"""


@click.command()
@click.argument("method", type=click.Choice(["semanir", "mrconv", "dit", "emr"]))
@click.argument("folder", metavar="DIR", type=Place(file_okay=False, path_type=Path))
@click.option("--data", metavar="PATH", required=True, help="Your data: a folder or file; for emr, of fine-tunes.")
@click.option("--label", metavar="NAME", help="Column of the class or value, in tables and arrays.")
@click.option("--time", metavar="NAME", help="Column of the time, in tables.")
@click.option("--series", metavar="NAME", help="Column that names the series of a row, in tables.")
@click.option("--inputs", metavar="A,B", help="Columns of the inputs.")
@click.option(
    "--values/--classes",
    default=None,
    help="Take the numbers of the label as values to predict, or as classes.  [default: values if they are fractions, "
    "or more than 20 whole numbers that do not count up from 0 or 1]",
)
@click.option("--pairs", metavar="A,B", help="Two folders or columns of pictures: inputs and targets.")
def init(
    method: str, folder: Path, data: str, inputs: str | None, pairs: str | None, values: bool | None, **hints: Any
) -> None:
    """Write a commented recipe for your own data into DIR.

    Sizes, classes and lengths are chosen for the data and this machine; comments explain what to change. The recipe
    runs unchanged: `hf-ext train DIR/METHOD.yaml`, or for emr `hf-ext merge DIR/merge.yaml DIR/merged`.

    \b
    semanir  a folder of pictures, or of lq/ and hq/ with pictures of the same names
    mrconv   a folder for each class of sounds or pictures, or a table beside them; texts with a label or without;
             tables and arrays of numbers
    dit      a folder for each class of pictures, or a caption for each: a .txt beside it, or a table
    emr      a folder with a folder for each model and one called base, or a file with a line NAME=MODEL for each

    \b
    Examples:
      hf-ext init semanir mine --data photos/
      hf-ext init mrconv sounds-run --data sounds/
      hf-ext init emr merge-run --data models/
      hf-ext init dit drawings --data animals/
    """
    columns, folders = (tuple(split_names(words)) for words in (inputs, pairs))
    if pairs and len(folders) != 2:
        raise click.BadParameter("give two folders, such as noisy,clean.", param_hint="--pairs")
    if method == "emr" and (any(hints.values()) or inputs or pairs or values is not None):
        raise click.UsageError("emr takes --data only: leave out what describes the data of semanir, mrconv or dit.")
    from hf_ext.files import whole_file

    file = folder / ("merge.yaml" if method == "emr" else f"{method}.yaml")
    if file.exists():
        raise click.BadParameter(f"{file} exists; give another folder, or remove the file.", param_hint="DIR")
    if method == "emr":
        text = write_merge(folder, data)
        following = ["hf-ext", "merge", str(file), str(folder / "merged")]
    else:
        place = Path(data).expanduser()
        # As the training does.
        if place.is_dir() and not (place / "lq").is_dir() and folder.resolve().is_relative_to(place.resolve()):
            raise click.BadParameter(f"{folder} is inside {data}: choose one outside.", param_hint="DIR")
        import torch

        from hf_ext.data.roles import Hints
        from hf_ext.data.survey import look_at
        from hf_ext.data.writing import write_recipe

        survey = look_at(data, Hints(**hints, inputs=columns, pairs=folders, values=values), method == "semanir")
        text = write_recipe(method, folder, survey, torch.cuda.is_available())
        following = ["hf-ext", "train", str(file)]
        for line in survey.lines:
            note(line)
    with whole_file(file, "w", encoding="utf-8") as written:
        written.write(text)
    say(file)
    note(f"next: {shlex.join(following)}")


def write_merge(folder: Path, data: str) -> str:
    """The YAML file of a merge of fine-tunes, for a folder, of those in a folder or a list; see [`_find_models`]."""
    values = {name: shlex.quote(str(folder / place)) for name, place in (("file", "merge.yaml"), ("out", "merged"))}
    models = _find_models(Path(data).expanduser())
    if (base := models.pop("base", None)) is None:
        raise click.UsageError(f"the base of {', '.join(models)} is unknown: call its folder base, or add base=ID.")
    if not models:
        raise click.UsageError(f"{data} contains only the base: add the fine-tunes.")
    return _MERGE.format(
        **values,
        about=f"{count_of(len(models), 'fine-tune')} of {' '.join(base.split())}",
        base=_quote(base),
        tasks="\n".join(f"  {_quote(name)}: {_quote(source)}" for name, source in models.items()),
    )


def _find_models(place: Path) -> dict[str, str]:
    """The models by name: the subfolders with weights, or the lines of a list."""
    found: dict[str, str] = {}
    if place.is_dir():
        weights = ("*.safetensors", "*.safetensors.index.json")
        folders = (part for part in sorted(place.iterdir()) if any(any(part.glob(kind)) for kind in weights))
        found = {part.name: str(part) for part in folders}
    elif place.is_file():
        try:
            lines = [line.strip() for line in place.read_text(encoding="utf-8-sig").splitlines()]
        except ValueError as error:
            raise click.UsageError(f"{place} is not a text file with one model per line: {error}.") from error
        for line in (line for line in lines if line and not line.startswith("#")):
            name, sign, source = map(str.strip, line.partition("="))
            if not sign or Path(line).expanduser().exists():
                source, name = line, line.partition("@")[0].rstrip("/").rpartition("/")[2]
            if not (name and source):
                raise click.UsageError(f"{place}: {line!r} lacks a name or a model; write NAME=ID.")
            if name in found:
                raise click.UsageError(f"{place}: two models are called {name!r}; write NAME=ID for one of them.")
            found[name] = source
    if not found:
        advice = "give a folder that contains a folder with safetensors files for each, or a file with a line for each"
        raise click.UsageError(f"no model in {place}: {advice}.")
    return found
