"""Merging checkpoints: one streaming pass over all of them, into a folder that appears complete or not at all.

The work is done in `.NAME.partial/` beside the result (see `journal`): `result/` grows in place, `journal/` tells what
is finished, `merge.json` what is merged. A merge that was interrupted goes on where it stopped, with the same bits.
"""

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..distributed import Ranks
from ..errors import DataError, OtherRun, UsageError
from ..files import (
    carry_over,
    copy_into,
    find_others,
    follow_link,
    read_json,
    remove_leftovers,
    replace_folder,
    sync,
    write_json,
)
from ..progress import progress
from ..system import count_cores, free_bytes
from .configuration import MergeConfig
from .engine import Engine, add_up, make_units
from .finishing import finish
from .journal import FULL, PASSES, Journal, Outputs, find_own, lock_partial, read_passes, require_target
from .methods import MethodError
from .plan import Plan, make_plan, resolve_plan
from .vectors import NotFiniteError, TaskVectors

# Seconds between flushes to the disk.
_FLUSH_SECONDS = 0.25


@dataclass(frozen=True)
class MergeResult:
    """Output of a merge."""

    path: Path  # the folder
    report: dict[str, Any]  # the content of its `report.json`


def merge_checkpoints(
    config: MergeConfig | Mapping[str, Any] | str | Path,
    out: str | Path,
    *,
    token: str | bool | None = None,
    endpoint: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
    show: Callable[[Plan], None] | None = None,
    check: Callable[[Path], None] | None = None,
) -> MergeResult:
    """
    Merges fine-tunes of one model into one model and a 1-bit mask for each task (EMR-Merging, arXiv 2405.17461), or by
    one of the usual methods into one model.

    The checkpoints are read once, block by block, from local files or by ranges from a Hub; they are never held whole
    in memory or copied to the disk. The same call resumes an interrupted merge (a kill, a full disk, a lost
    connection), with the same result bit for bit. Under `accelerate launch` the processes share the work.

    Args:
        config ([`MergeConfig`], `Mapping`, `str` or `Path`): The configuration, or the path of its YAML file.
        out (`str` or `Path`): The folder to write. It appears complete, or not at all.
        token (`str` or `bool`, *optional*): Token of the Hub, as in `huggingface_hub`.
        endpoint (`str`, *optional*): Address of the Hub. Defaults to `HF_ENDPOINT`.
        overwrite (`bool`, *optional*, defaults to `False`): Replace `out` when it holds an earlier merge, but for
            what you put there.
        progress (`bool`, *optional*, defaults to `True`): Show a progress bar in a terminal.
        show (`Callable[[Plan], None]`, *optional*):
            Called with the plan before any weight is read; an error that it raises ends the merge.
        check (`Callable[[Path], None]`, *optional*):
            Called with the complete folder before it appears at `out`; a [`DataError`] that it raises discards it.

    Returns:
        [`MergeResult`]: The folder and the report.

    Raises:
        TakenError: `out` holds something, and `overwrite` is off or it is no merge.
        ValueError: `out` cannot be written; or models do not fit together, contain NaN or infinity, or changed since
            the interruption. The message names the remedy.
        OSError: The disk is full; the same call resumes the merge when there is space.

    Example:
        >>> import torch
        >>> from pathlib import Path
        >>> from safetensors.torch import load_file, save_file
        >>> from hf_ext import merge_checkpoints
        >>> for name, value in {"base": 0.0, "a": 1.0, "b": 3.0}.items():
        ...     Path(name).mkdir()
        ...     save_file({"weight": torch.full((2,), value)}, f"{name}/model.safetensors")
        >>> config = {"base": "base", "tasks": {"a": "a", "b": "b"}, "method": "average"}
        >>> result = merge_checkpoints(config, "merged")
        >>> load_file(result.path / "model.safetensors")
        {'weight': tensor([2., 2.])}
    """
    out = follow_link(Path(os.path.abspath(Path(out).expanduser())))
    ranks = Ranks()
    with contextlib.ExitStack() as stack:
        with ranks.together():
            if ranks.index == 0:
                require_target(out, overwrite)
            plan = stack.enter_context(make_plan(config, token=token, endpoint=endpoint))
            _require_sources(plan, out)
            if ranks.index == 0 and show is not None:
                show(plan)
            plan = resolve_plan(plan)
        run = _Run(plan, out, ranks, progress, stack)
        with run.step():
            if ranks.index == 0:
                run.prepare()
        with run.step():
            run.open()
        try:
            run.count()
            with run.step():
                run.merge()
            for name, module in plan.modules.items():
                merge_checkpoints(module, run.module_folder(name), overwrite=True, progress=False)
            with run.step():
                report = run.complete(check) if ranks.index == 0 else {}
        except (NotFiniteError, MethodError):
            # nothing to go on from
            shutil.rmtree(run.partial, ignore_errors=True)
            raise
    return MergeResult(out, ranks.of_first(report))


def _require_sources(plan: Plan, out: Path) -> None:
    """Refuses to replace a folder that holds a task, or the base that the tasks are restored from."""
    masks, target = plan.config.with_masks, out.resolve()
    for source in plan.sources:
        is_base, place = source is plan.base, Path(source.spec).expanduser().resolve()
        inside = target in place.parents or (is_base and masks and place == target)
        if inside and source.repo_id is None and not (is_base and plan.config.include_base):
            stored = ", or set include_base (--include-base)" if is_base and masks else ""
            raise UsageError(f"{source.title} lies in {out}, which would be replaced: copy it elsewhere{stored}.")


class _Run:
    """One merge by this process, from the plan to the result."""

    def __init__(self, plan: Plan, out: Path, ranks: Ranks, progress: bool, stack: contextlib.ExitStack) -> None:
        self.plan, self.out, self.ranks, self.identity, self.stack = plan, out, ranks, _identity(plan), stack
        self.partial = out.with_name(f".{out.name}.partial")
        self.known, self.result, self.noted = (self.partial / name for name in ("merge.json", "result", "journal"))
        self.progress = progress and ranks.index == 0
        self.vectors = TaskVectors(plan.config)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A step of all processes. A full disk is explained: space needed, and how to resume."""
        with self.ranks.together():
            try:
                yield
            except OSError as error:
                if error.errno not in FULL:
                    raise
                raise OSError(
                    error.errno,
                    f"not enough disk space for the merge ({os.strerror(error.errno)}): the weights of the result "
                    f"need {self.plan.sizes.written:,} bytes in all, {free_bytes(self.out.parent):,} are free on that "
                    f"disk; make room and run the same command again, which resumes from {self.partial}",
                ) from error

    def module_folder(self, name: str) -> Path:
        return self.partial / "modules" / Path(name).parent

    def prepare(self) -> None:
        """Creates the partial folder, or checks that an existing one belongs to this merge; reserves all files."""
        # only masks need this very base again, and a copy of it is hashed by itself
        hashed = self.plan.config.with_masks and not self.plan.config.include_base
        self.base_identity = _start_beside(lambda: self.plan.base.identity(hash_files=hashed))
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.partial.mkdir(exist_ok=True)
        self.stack.enter_context(lock_partial(self.partial))
        begun = self.known.is_file() and Journal.has_begun(self.noted)
        if begun and (changed := _differences(read_json(self.known), self.identity)):
            raise OtherRun(
                f"{self.partial} holds an interrupted merge of something else",
                changed,
                "Undo these changes to resume it, or remove that folder to start again.",
            )
        if not begun:
            shutil.rmtree(self.result, ignore_errors=True)
            shutil.rmtree(self.noted, ignore_errors=True)
            write_json(self.known, self.identity, indent=1)
        # reserved once, so that the others find the files
        Outputs(self.result, self.plan, resume=begun).close(sync=False)

    def open(self) -> None:
        """Opens the files and the journal in every process."""
        if changed := _differences(read_json(self.known), self.identity):
            raise ValueError(f"the processes do not see the same checkpoints: {'; '.join(changed[:5])}; run it again.")
        config = self.plan.config
        self.outputs = Outputs(self.result, self.plan, resume=True)
        self.stack.callback(self.outputs.close, sync=False)
        self.journal = Journal(self.noted)
        self.stack.callback(self.journal.close)
        workers = config.workers or max(1, count_cores() // self.ranks.local_count)
        self.engine = Engine(self.plan, self.outputs, self.vectors, workers, config.memory_bytes)
        self.stack.callback(self.engine.close)
        self.units = make_units(self.plan.merged_rows, self.outputs.copies, whole=config.merge_method.whole)
        if self.vectors.passes and (counted := read_passes(self.noted)):
            self.vectors.load_state(counted)

    def count(self) -> None:
        """The passes that count magnitudes, each over all of the data; those that are finished are kept."""
        for index in range(self.vectors.passes_done, self.vectors.passes):
            with self.step():
                counts = self.engine.count(index, self.ranks.share([*enumerate(self.units)]))
            self.vectors.close_pass(index, np.sum(self.ranks.gather(counts), axis=0))
            with self.step():
                if self.ranks.index == 0:
                    write_json(self.noted / PASSES, self.vectors.state(), indent=None)

    def merge(self) -> None:
        """Does this process's share of the units that are not finished."""
        todo = [(number, unit) for number, unit in enumerate(self.units) if number not in self.journal.finished]
        sizes = [self.engine.bytes_read(unit) for unit in self.units]
        total, left = sum(sizes), sum(sizes[number] for number, _ in todo)
        lock = threading.Lock()
        with (
            _flush_beside(self.outputs, self.journal),
            progress(total=total, initial=total - left, unit="B", unit_scale=True, shown=self.progress) as bar,
        ):

            def done(number: int, sums: np.ndarray) -> None:
                self.journal.add(number, sums)
                with lock:
                    # the other processes are as fast as this one
                    bar.update(min(sizes[number] * self.ranks.count, total - bar.n))

            self.engine.run(self.ranks.share(todo), done)
        if self.ranks.index > 0:
            self.outputs.close()

    # What is written after the weights is written anew after a kill, from the sums of the journal, and therefore needs
    # no journal of its own. Before the rename, the only step that a reader sees, everything is flushed to the disk and
    # the journal is deleted: were it deleted after, a kill between the two would leave a journal without its result.
    def complete(self, check: Callable[[Path], None] | None) -> dict[str, Any]:
        """Writes scales, manifest, report and card when all units are finished, then renames the folder."""
        if changed := _differences(self.identity, _identity(self.plan)):
            shutil.rmtree(self.partial)
            raise DataError(f"a checkpoint changed while it was merged: {'; '.join(changed[:5])}; merge again.")
        folder = self.result
        sums = add_up(self.plan.merged_rows, len(self.plan.tasks), self.units, self.journal.read(len(self.units)))
        base = self.base_identity.result()
        self.plan.warnings.extend(self.vectors.warn_of_equals([task.label for task in self.plan.tasks]))
        if (self.out / "eval.json").is_file():
            self.plan.warnings.append("eval.json was kept, and tells of the earlier merge: evaluate again")
        closed = _start_beside(self.outputs.close)
        try:
            copy_into({name: self.module_folder(name) / Path(name).name for name in self.plan.modules}, folder)
            report = finish(folder, self.plan, sums, base, out=self.out)
        finally:
            closed.result()
        try:
            if check is not None:
                check(folder)
        except DataError:
            shutil.rmtree(self.partial)
            raise
        is_ours = find_own(self.out)
        if not is_ours("README.md"):
            (folder / "README.md").unlink()
        find_others(self.out, folder, is_ours)
        # what an earlier process was writing when it was killed
        remove_leftovers(folder)
        sync(folder)
        # without its journal the folder is never taken for an interrupted merge
        self.journal.close()
        shutil.rmtree(self.noted)
        # no sooner: a merge that resumes would take them for its own
        carry_over(self.out, folder, is_ours)
        sync(folder)
        replace_folder(folder, self.out)
        # not the lock, where a file that is open cannot be deleted
        shutil.rmtree(self.partial, ignore_errors=True)
        return report


def _start_beside(function: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _identity(plan: Plan) -> dict[str, Any]:
    """The settings and sources that must be the same when the merge resumes."""
    from .. import __version__

    values = plan.config.to_dict() | plan.config.arguments
    return {
        "hf_ext_version": __version__,
        "config": {key: value for key, value in values.items() if key not in ("memory", "workers")},
        # the journal has the sums of the tasks in their order
        "order": list(plan.config.tasks),
        "checkpoints": {source.label: source.fingerprint() for source in plan.sources},
    }


def _differences(before: Any, now: Any, where: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [*before, *(key for key in now if key not in before)]
        found = [_differences(before.get(key), now.get(key), f"{where}.{key}" if where else key) for key in keys]
        return [difference for part in found for difference in part]
    return [] if before == now else [f"{where} was {before!r:.80}, is {now!r:.80}"]


@contextlib.contextmanager
def _flush_beside(outputs: Outputs, journal: Journal) -> Iterator[None]:
    """Flushes results during the merge, and records the units that are safe from a loss of power."""
    ended = threading.Event()

    def flush() -> None:
        while not ended.wait(_FLUSH_SECONDS):
            lines = journal.lines
            outputs.flush()
            journal.confirm(lines)

    flushing = _start_beside(flush)
    try:
        yield
    finally:
        ended.set()
        wait([flushing])
    flushing.result()
