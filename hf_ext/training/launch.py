"""Entry points of `accelerate launch -m hf_ext.training` and of `hf-ext` for runs from YAML files."""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..distributed import Ranks
from ..errors import DataError, report
from ..files import check_places
from ..system import import_undisturbed
from ..terminal import guarded_streams

# The libraries and the loop are imported where they are needed, which is after everything was read and checked.
from .arguments import TrainingArguments, apply_overrides
from .launcher import honour_launcher
from .methods import build_task, describe_fields, read_arguments

if TYPE_CHECKING:
    from .task import Task

USAGE = """usage: accelerate launch -m hf_ext.training FILE.yaml [--field value] [--section.field value] …

Trains what FILE.yaml describes; running it again continues an interrupted run.
"""


def evaluate_checkpoint(
    source: str,
    config: Path,
    overrides: list[str] | None = None,
    output: Path | None = None,
    merged_task: str | None = None,
) -> dict[str, Any]:
    """
    Evaluates a published or local model, or a peft adapter on its base model, as the YAML file's run would: on the GPU
    if there is one, in float32 unless `overrides` name `--mixed_precision`. The processes of `accelerate launch` share
    the examples.

    Args:
        source (`str`): Folder of a model or adapter, or `org/name@revision`.
        config (`Path`): The run's YAML file; `data.eval` and the `task` section are used.
        overrides (`list[str]`, *optional*): `--field value` words.
        output (`Path`, *optional*): Where to write the result as `eval.json`, whose content is returned.
        merged_task (`str`, *optional*): Of a merge, which has no model of its own: the task that is evaluated.
    """
    ranks = Ranks()
    if output is not None:
        check_places([output])
    with ranks.first_before_others():
        # The checkpoint's own configuration counts here, not the model section of the file.
        if ignored := [word for word in overrides or [] if word.startswith(("--model.", "--model="))]:
            raise ValueError(f"{ignored[0]}: the model comes with the checkpoint; only data and task may be set.")
        arguments = read_arguments(config, overrides or [], output_dir="", model={})
        sources = arguments.data_arguments.eval_sources
        if not sources:
            raise ValueError(f"{config} has no data.eval section: give its data with --data.eval.path FOLDER.")
        task = build_task(arguments)
        # That of the file is its training's; a flag asks for the numbers that such a training writes.
        precision = arguments.mixed_precision if "mixed_precision" in apply_overrides({}, overrides or []) else "no"
    from hf_ext.emr.weights import task_checkpoint

    from ..data.opening import open_source
    from .classes import match_classes
    from .evaluation import evaluate_sets, is_nan, write_results
    from .models import compute_in, load_trained, pin_revision

    pinned = ranks.ask_first(lambda: pin_revision(source))
    with ranks.first_before_others(), task_checkpoint(pinned, merged_task) as checkpoint:
        model = load_trained(task, checkpoint).to(ranks.own_device())
        data = {name: match_classes(open_source(place, "data.eval"), task) for name, place in sources.items()}
    if precision != "no":
        compute_in(precision, model)
    options = {"batch_size": arguments.per_device_eval_batch_size, "num_workers": arguments.data_arguments.num_workers}
    metrics = evaluate_sets(task, model, data, **options)
    firsts = ["_".join(filter(None, [name, *[*task.metric_names][:1]])) for name in data]
    if bad := [name for name in firsts if is_nan(metrics.get(name))]:
        told = f"{', '.join(bad)} of {source} is NaN, not a number: its weights or the data hold such values"
        raise DataError(f"{told}, or its arithmetic overflows. Check them, or evaluate without --mixed_precision.")
    revision = None if Path(source).expanduser().exists() else pinned.partition("@")[2]
    counts = {name: len(rows) for name, rows in data.items()}
    return write_results(output if ranks.index == 0 else None, task, metrics, sources, revision, counts, precision)


@guarded_streams()
def main(
    argv: list[str] | None = None, make_task: Callable[[TrainingArguments], "Task"] | None = None, usage: str = USAGE
) -> int:
    """
    Runs a training from command-line words.

    Args:
        argv (`list[str]`, *optional*): The words; those of this process when not given.
        make_task (`Callable`, *optional*): Makes the task of a script; [`build_task`] if not given.
        usage (`str`, *optional*): The answer to `--help` and to no words.

    Returns:
        `int`: 0 when the run is complete, 1 when it failed, 2 for unusable words, file, data or folder, 75 when a
        signal or `deadline_minutes` ended it and the same command resumes it, 130 after a Ctrl-C outside of the steps.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        if not words or {"-h", "--help"} & {*words}:
            sys.stdout.write(usage)
            if words and usage is USAGE:
                files = [word for word in words if word.endswith((".yaml", ".yml")) and os.path.isfile(word)]
                sys.stdout.write("\n" + describe_fields(files[0] if files else None))
            return 0 if words else 2
        arguments = read_arguments(words[0], words[1:])
        arguments.data_arguments.require_train_source()
        honour_launcher(arguments)
        with import_undisturbed():
            task = (make_task or build_task)(arguments)
            importlib.import_module(".loop", __package__)
        _run(task, arguments)
    except KeyboardInterrupt as stopped:
        # A `RunStopped` has a code; its module is not imported for a Ctrl-C before the loop, or of the command line.
        text = "Error: interrupted by SIGINT; the same command continues from the last saved state."
        text = str(stopped) if hasattr(stopped, "exit_code") else text
        sys.stderr.write(f"{text}\n" if text else "")
        return getattr(stopped, "exit_code", 130)
    except Exception as error:
        return report(error)
    return 0


def _run(task: "Task", arguments: TrainingArguments) -> None:
    import datasets
    import transformers
    from accelerate.utils.memory import should_reduce_batch_size

    from .loop import train

    # Progress bars of saved shards would break the run's own bar.
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        train(task, arguments)
    except RuntimeError as error:
        if not should_reduce_batch_size(error):
            raise
        raise MemoryError(
            f"{error}\nReduce --per_device_train_batch_size and raise --gradient_accumulation_steps by as much, set "
            "--activation_checkpointing true or --mixed_precision bf16, or train on smaller examples "
            "(--task.patch_size, --task.image_size, --task.max_length)."
        ) from error
