"""hf-ext merge and hf-ext emr: EMR-Merging."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from hf_ext.terminal import count_of, is_quiet

from . import options, register_models
from .errors import Unusable, loading
from .groups import Group
from .options import (
    AT_LEAST_1,
    FILE,
    JSON,
    MODEL,
    MODEL_FOLDER,
    NEW_FILE,
    NEW_FOLDER,
    Place,
    find_released,
    number,
    shown,
)
from .output import note, print_either, print_json, print_rows, print_table, say

ARTIFACT = Place(exists=True, file_okay=False, path_type=Path)
BASE_OPTION = click.option("--base", metavar="ID", type=find_released, help="Base model, if not where ARTIFACT says.")
ENDPOINT_OPTION = click.option("--endpoint", help="Address of the Hub.  [default: HF_ENDPOINT]")


class MergeCommand(click.Command):
    """A command with an option for each field of [`MergeConfig`] and each option of a merge method."""

    # They are collected when the command runs or shows its help; this imports hf_ext, not torch.
    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        from hf_ext.merging.configuration import MergeConfig

        own = super().get_params(ctx)
        fields = options.options_of(MergeConfig, {"tasks": "--task"}, but=("method", "options"))
        # After FILE, OUT and --out.
        return [*own[:3], *fields[:2], *method_options(), *fields[2:], *own[3:]]


def method_options() -> list[click.Parameter]:
    """`--method`, and an option for each of the methods' options; its help names the methods that have it."""
    from hf_ext.merging.methods import METHODS, options_by_name

    labels = ", ".join(f"{name} ({method.label.partition(';')[0]})" for name, method in METHODS.items())
    found: list[click.Parameter] = [
        click.Option(["--method"], type=click.Choice([*METHODS]), help=f"Merge method: {labels}.  [default: emr]")
    ]
    for name, holders in options_by_name().items():
        option, dashed = next(iter(holders.values())), name.replace("_", "-")
        told = ", ".join(f"{holder}: {str(own.default).lower()}" for holder, own in holders.items())
        flag = option.kind is bool
        found.append(
            click.Option(
                [f"--{dashed}/--no-{dashed}" if flag else f"--{dashed}"],
                type=None if flag else click.Choice(option.choices) if option.choices else number,
                metavar=None if flag or option.choices else "FLOAT",
                default=None,
                help=f"{option.help}  [default: {told}]",
            )
        )
    return found


@click.command(cls=MergeCommand)
@click.argument("file", metavar="[FILE.yaml]", required=False, type=NEW_FILE)
@click.argument("place", metavar="[OUT]", required=False, type=NEW_FOLDER)
@click.option("--out", type=NEW_FOLDER, help="Same as OUT.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it holds an earlier merge.")
@click.option("--dry-run", is_flag=True, help="Show the plan only; no weight is read or downloaded.")
@click.option("--dump-yaml", is_flag=True, help="Print the configuration as YAML only.")
@ENDPOINT_OPTION
@JSON
def merge(
    file: Path | None,
    place: Path | None,
    out: Path | None,
    overwrite: bool,
    dry_run: bool,
    dump_yaml: bool,
    endpoint: str | None,
    as_json: bool,
    **fields: Any,
) -> None:
    """Merge fine-tunes of one model into one model and a 1-bit mask per task.

    Base and fine-tunes are folders or org/name[@revision]. Options replace values of the YAML file, which may also be
    a mergekit configuration. Everything is checked, and the plan is shown, before any weight is read. Weights are
    streamed, so a whole model is never held in memory. The same command resumes an interrupted merge, with the same
    result.

    \b
    Examples:
      hf-ext merge --base org/base --task a=org/a --task b=runs/b --out merged
      hf-ext merge --base org/base --task a=org/a --task b=org/b@v1 --method ties --out ties --dry-run
      hf-ext merge merge.yaml merged --rescale l2
      hf-ext merge merge.yaml merged --method task_arithmetic --weight '{a: 0.5, b: [0.2, 0.8]}'

    \b
    Several processes or machines that share a disk:
      accelerate launch --config_file examples/accelerate/ddp_2_cpu.yaml -m hf_ext_cli.main merge FILE.yaml OUT
    """
    from hf_ext.system import import_undisturbed

    with import_undisturbed():
        config = read_config(file, fields)
    if dump_yaml:
        import yaml

        click.echo(yaml.safe_dump(config.to_dict(), sort_keys=False), nl=False)
        return
    if place is not None and out is not None:
        raise click.UsageError(f"OUT is given twice, as '{place}' and as --out '{out}'; give it once.")
    target = place or out
    if target is None and not dry_run:
        raise click.UsageError("Missing OUT: give it after FILE.yaml, or with --out.")
    from hf_ext.merging.merge import merge_checkpoints
    from hf_ext.merging.plan import Plan, make_plan, plan_lines, plan_values

    def show(plan: Plan) -> None:
        if not as_json:
            if dry_run or not is_quiet():
                say(*plan_lines(plan))
        elif dry_run:
            print_json({"plan": plan_values(plan)})

    # Only the first process prints.
    speaks = os.environ.get("RANK", "0") == "0"
    if target is None or dry_run:
        if speaks:
            with make_plan(config, endpoint=endpoint) as plan:
                show(plan)
        return
    result = merge_checkpoints(config, target, endpoint=endpoint, overwrite=overwrite, progress=speaks, show=show)
    if speaks and as_json:
        print_json({"path": str(result.path), "report": result.report})
    elif speaks and is_quiet():
        say(result.path)
    elif speaks:
        show_report(result.path, result.report)


def read_config(file: Path | None, fields: dict[str, Any]) -> Any:
    """The configuration of the file, with values replaced by the options."""
    from hf_ext.merging.configuration import MergeConfig

    values = {name: value for name, value in fields.items() if value is not None}
    if file is not None:
        if not file.is_file():
            raise click.UsageError(f"File '{file}' does not exist; without one, give --base, --task and --out.")
        values = MergeConfig.from_yaml(file).to_dict() | values
    if missing := [name for name, field in (("--base", "base"), ("--task", "tasks")) if field not in values]:
        raise click.UsageError(f"Missing option {' and '.join(missing)}: give them, or a FILE.yaml with these values.")
    values["tasks"] = {name: find_released(source) for name, source in values["tasks"].items()}
    values["base"] = find_released(values["base"])
    return MergeConfig.from_dict(values)


def show_report(path: Path, report: dict[str, Any]) -> None:
    from hf_ext.emr.report import is_measured, report_legend, report_tables

    first, *others = report_tables(report)
    more: Any = {"title": "Tasks of the merge", "legend": report_legend(report)} if is_measured(report) else {}
    print_table(*first, **more)
    for table in others:
        click.echo()
        print_table(*table)
    if not is_measured(report):
        note(report_legend(report))
    show_warnings(report)
    shown = [("masks", path / "tasks")] if (path / "emr.json").is_file() else []
    print_rows([("model", path), *shown, ("report", path / "report.json"), ("card", path / "README.md")])


def show_warnings(found: Mapping[str, Any]) -> None:
    for text in found.get("warnings", ()):
        note(f"warning: {text}")


def show_result(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(result)
    else:
        print_rows([(key, value) for key, value in result.items() if value is not None and key != "warnings"])
        show_warnings(result)


@click.group(cls=Group)
def emr() -> None:
    """Artifacts of a merge: add, remove and export tasks, verify, compare."""


@emr.command()
@click.argument("artifact", type=ARTIFACT)
@click.argument("task", metavar="NAME=ID")
@click.option("--frozen", is_flag=True, help="Keep the merged model, and compute only the new task's mask.")
@BASE_OPTION
@ENDPOINT_OPTION
@JSON
def add(artifact: Path, task: str, frozen: bool, base: str | None, endpoint: str | None, as_json: bool) -> None:
    """Add a fine-tuned model to ARTIFACT as the task NAME.

    All tasks are merged again, from their checkpoints. With --frozen only the new task gets a mask, and the merged
    model stays as it is: the other checkpoints are not needed, but the new task is restored less accurately.

    \b
    Examples:
      hf-ext emr add merged c=org/c
      hf-ext emr add merged c=runs/c --frozen
    """
    from hf_ext.merging.updating import add_task

    name, source = options.name_and_value(task)
    added = add_task(artifact, name, find_released(source), frozen=frozen, base=base, endpoint=endpoint)
    show_result(added, as_json)


@emr.command()
@click.argument("artifact", type=ARTIFACT)
@click.argument("name")
@JSON
def remove(artifact: Path, name: str, as_json: bool) -> None:
    """Remove the task NAME from ARTIFACT; the merged model and the other tasks stay bit for bit as they are.

    \b
    Examples:
      hf-ext emr remove merged a
    """
    from hf_ext.merging.updating import remove_task

    show_result(remove_task(artifact, name), as_json)


@emr.command()
@click.argument("artifact", type=find_released)
@click.argument("task")
@click.argument("out", type=NEW_FOLDER)
@BASE_OPTION
@ENDPOINT_OPTION
def export(artifact: str, task: str, out: Path, base: str | None, endpoint: str | None) -> None:
    """Write TASK of ARTIFACT, a folder or org/name[@revision], as a plain checkpoint into OUT.

    \b
    Examples:
      hf-ext emr export merged a exported/a
      hf-ext emr export org/merged@v1 a exported/a --base models/base
    """
    from hf_ext.emr.weights import TaskWeights

    say(TaskWeights(artifact, base=base, endpoint=endpoint).export(task, out))


@emr.command()
@click.argument("artifact", type=MODEL_FOLDER)
@JSON
def verify(artifact: Path, as_json: bool) -> None:
    """Compare every file of ARTIFACT, and of its base if that is on this disk, with emr.json.

    \b
    Examples:
      hf-ext emr verify merged
    """
    from hf_ext.emr.artifact import verify_artifact

    found = verify_artifact(artifact)
    print_either(as_json, found._asdict(), *found.wrong, *(f"note: {text}" for text in found.notes))
    if found.wrong:
        differ = count_of(len(found.wrong), "file differs", "files differ")
        raise Unusable(f"{artifact} is damaged: {differ} from emr.json.")
    if not as_json:
        say(f"{artifact}: {count_of(found.files, 'file')}, {count_of(found.bytes, 'byte')}, unchanged since the merge")


@emr.command()
@click.argument("merges", metavar="MERGE...", nargs=-1, required=True, type=find_released)
@ENDPOINT_OPTION
@JSON
def compare(merges: tuple[str, ...], endpoint: str | None, as_json: bool) -> None:
    """Show the error of merges for each task, next to that of 1-bit deltas of the same size.

    A MERGE is a folder or org/name[@revision], with masks, or without if it was made with --measure. The numbers are
    read from the reports of the merges.

    \b
    Examples:
      hf-ext emr compare merged
      hf-ext emr compare merged ties org/merged@v1 --json
    """
    from hf_ext.merging.compare import compare_merges, comparison_table

    found = compare_merges(merges, endpoint=endpoint)
    if as_json:
        print_json(found)
    else:
        legend = "error: ‖τ - τ̂‖² / ‖τ‖² of a task vector τ = W - W0; 0 is the task's own model, 1 the base."
        print_table(*comparison_table(found), title="Error of each task", legend=legend)
        show_warnings(found)


@emr.command(context_settings={"ignore_unknown_options": True})
@MODEL
@click.argument("overrides", metavar="[--field VALUE]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--config", required=True, type=FILE, help="YAML file of the training: method, task and data.train.")
@click.option("--kind", required=True, type=click.Choice(["fisher", "gram"]), help="For method fisher or regmean.")
@click.option("--out", required=True, type=NEW_FILE, help=".safetensors file to write.")
@shown("--examples", default=256, type=AT_LEAST_1, help="Examples drawn from data.train.")
@JSON
def statistics(
    source: str, overrides: tuple[str, ...], config: Path, kind: str, out: Path, examples: int, as_json: bool
) -> None:
    """Compute the statistics of MODEL on its training data that `hf-ext merge --method fisher` or `regmean` needs.

    One file per task. fisher: mean squared gradients of the loss, as large as the model. gram: XᵀX of the inputs of
    linear layers. Flags after MODEL replace values of the YAML file; a dot separates section and key.

    \b
    Examples:
      hf-ext emr statistics runs/a/snapshot --config a.yaml --kind fisher --out a.safetensors
      hf-ext emr statistics org/a --config a.yaml --kind gram --out a.gram.safetensors --examples 1000
    """
    from hf_ext.merging.measuring import write_statistics

    done = write_statistics(source, config, kind, out, examples=examples, overrides=list(overrides))
    show_result(done, as_json)


@emr.command(name="learn-weights")
@click.argument("file", metavar="FILE.yaml", type=FILE)
@click.option("--config", "configs", metavar="NAME=YAML", multiple=True, help="YAML file of each task. Repeatable.")
@click.option("--out", required=True, type=NEW_FILE, help="YAML file to write.")
@shown("--steps", default=500, type=AT_LEAST_1, help="Steps of Adam.")
@shown("--learning-rate", default=1e-3, type=float, help="Learning rate of Adam.")
@shown("--batch-size", default=16, type=AT_LEAST_1, help="Examples per step.")
def learn_weights(file: Path, configs: tuple[str, ...], out: Path, **how: Any) -> None:
    """Learn the weights of task arithmetic for the classifiers of the merge FILE.yaml, without labels (AdaMerging).

    The YAML file of a task has method, task and data.eval. The weights minimise the entropy of the tasks' predictions
    on data.eval; labels are not read. OUT is the same merge with the learned weights. Exclude the heads from the
    merge. Base and fine-tunes are held in memory. Processes of accelerate launch share the work.

    \b
    Examples:
      hf-ext emr learn-weights a.yaml --config a=a.yaml --config b=a.yaml --out learned.yaml
    """
    from hf_ext.merging.measuring import write_weights

    named = {name: Path(place) for name, place in map(options.name_and_value, configs)}
    write_weights(file, named, out, **how)
    if os.environ.get("RANK", "0") == "0":
        say(out)


@emr.command("extract-lora")
@click.argument("places", metavar="(ARTIFACT TASK | FINE_TUNE) OUT", nargs=-1, required=True)
@click.option("--rank", type=AT_LEAST_1, help="Rank of every matrix.")
@click.option("--error", type=click.FloatRange(0, 1), help="Largest relative error of a matrix, in place of --rank.")
@click.option("--base", metavar="ID", type=find_released, help="Base model; FINE_TUNE needs it.")
@click.option("--lora-only", is_flag=True, help="Store matrices of linear layers only, as vLLM requires.")
@ENDPOINT_OPTION
@JSON
def extract_lora(places: tuple[str, ...], base: str | None, endpoint: str | None, as_json: bool, **how: Any) -> None:
    """Write TASK of ARTIFACT, or a FINE_TUNE of --base, as a LoRA that peft loads on the base.

    The difference from the base is approximated by a low rank, matrix by matrix; a table shows error and size of other
    ranks. Norms, embeddings and heads are stored whole, unless --lora-only leaves them out.

    \b
    Examples:
      hf-ext emr extract-lora merged a lora-a --rank 16
      hf-ext emr extract-lora runs/a lora-a --base org/base --error 0.1 --lora-only
    """
    if len(places) not in (2, 3):
        raise click.UsageError(f"Expected ARTIFACT TASK OUT, or FINE_TUNE OUT --base; got {len(places)} arguments.")
    if len(places) == 2 and base is None:
        raise click.UsageError("Missing option --base for FINE_TUNE OUT; for a merge, give ARTIFACT TASK OUT.")
    if (how["rank"] is None) == (how["error"] is None):
        raise click.UsageError("Give either --rank or --error.")
    *words, out = places
    NEW_FOLDER.convert(out, None, None)
    task = words[1] if len(words) == 2 else None
    source = find_released(words[0])
    with loading(source):
        register_models()
        from hf_ext.merging import extracting

        if task is None:
            opened = extracting.open_fine_tune(str(base), source, endpoint)
        else:
            opened = extracting.open_task(source, task, base, endpoint)
        with opened as pair:
            report = extracting.extract_lora(pair, out, **how)
    print_either(as_json, report, *extracting.report_lines(report), f"adapter: {report['path']}")
