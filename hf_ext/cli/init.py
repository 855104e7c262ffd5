"""hf-ext init: a recipe for the user's data."""

import shlex
from pathlib import Path

import click

from .library import import_without_models
from .options import split_names
from .terminal import note, say


@click.command()
@click.argument("method", type=click.Choice(["semanir", "mrconv", "dit", "emr"]))
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--data", metavar="PATH", help="Folder or file of your data; for emr, a folder or a list of fine-tunes.")
@click.option("--label", metavar="NAME", help="Column of the class or value, in tables and arrays.")
@click.option("--time", metavar="NAME", help="Column of the time, in tables.")
@click.option("--series", metavar="NAME", help="Column that names the series of a row, in tables.")
@click.option("--inputs", metavar="A,B", help="Columns of the inputs.")
@click.option("--pairs", metavar="A,B", help="Two folders of pictures: inputs and targets.")
def init(
    method: str,
    folder: Path,
    data: str | None,
    label: str | None,
    time: str | None,
    series: str | None,
    inputs: str | None,
    pairs: str | None,
) -> None:
    """Write a commented recipe for your own data into DIR.

    Sizes, classes and lengths are chosen for the data and this machine; comments explain what to change. The recipe
    runs unchanged: `hf-ext train DIR/METHOD.yaml`, or for emr `hf-ext merge DIR/merge.yaml DIR/merged`. Without --data
    it contains placeholders, and `hf-ext data check` lists what is missing.

    \b
    semanir  a folder of pictures, or of lq/ and hq/ with pictures of the same names
    mrconv   a folder for each class of sounds or pictures, or a table beside them; texts with a label or without;
             tables and arrays of numbers
    dit      a folder for each class of pictures, or a caption for each: a .txt beside it, or a table
    emr      a folder with a folder for each model, or a file with a model a line; only headers are read

    \b
    Examples:
      hf-ext init semanir mine --data photos/
      hf-ext init mrconv sounds-run --data sounds/
      hf-ext init emr merge-run --data models/
      hf-ext init dit drawings
    """
    names = {"inputs": tuple(split_names(inputs)), "pairs": tuple(split_names(pairs))}
    if pairs and len(names["pairs"]) != 2:
        raise click.BadParameter("give two folders, such as noisy,clean.", param_hint="--pairs")
    if (method == "emr" or not data) and (label or time or series or inputs or pairs):
        raise click.UsageError(
            "--label, --time, --series, --inputs and --pairs describe --data of semanir, mrconv or dit: give --data "
            "too, or leave them out."
        )
    import_without_models()
    from hf_ext.files import whole_file

    file = folder / ("merge.yaml" if method == "emr" else f"{method}.yaml")
    if file.exists():
        raise click.BadParameter(f"{file} exists; give another folder, or remove the file.", param_hint="DIR")
    if method != "emr" and data:
        _refuse_inside(folder, data)
    if method == "emr":
        from hf_ext.starting.merges import write_merge

        text = write_merge(folder, data)
        following = ["hf-ext", "merge", str(file), str(folder / "merged")]
    else:
        import torch

        from hf_ext.data.roles import Hints
        from hf_ext.data.survey import look_at
        from hf_ext.starting.writing import PLACEHOLDERS, write_recipe

        hints = Hints(label, time, series, **names)
        survey = PLACEHOLDERS[method] if data is None else look_at(data, hints, method == "semanir")
        text = write_recipe(method, folder, survey, torch.cuda.is_available())
        following = ["hf-ext", *(["train"] if data else ["data", "check"]), str(file)]
        for line in survey.lines if data else ["no --data given: the recipe contains placeholders"]:
            note(line)
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(file, "w", encoding="utf-8") as written:
        written.write(text)
    say(file)
    note(f"next: {shlex.join(following)}")


def _refuse_inside(folder: Path, data: str) -> None:
    """Refuses a folder of a run inside of its data, as the training does."""
    place = Path(data).expanduser()
    if place.is_dir() and not (place / "lq").is_dir() and folder.resolve().is_relative_to(place.resolve()):
        raise click.BadParameter(
            f"{folder} is inside the data folder {data}, so that the files of the run would be read as data: choose a "
            "folder outside.",
            param_hint="DIR",
        )
