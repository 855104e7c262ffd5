"""Loader processes: start, reading, and errors. They import this file alone."""

import contextlib
import multiprocessing
import os
import re
import signal
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

import datasets
from torch.utils.data import DataLoader, Dataset

from ..data.bad_examples import read_example

# A laboratory's scheduler, a terminal that closes, Ctrl-C; SLURM's `--signal=USR1@120`. Windows has the first two.
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]
# Read by hf_ext/__init__.py.
_SETTING = "HF_EXT_REGISTER_MODELS"


def ignore_signals(worker: int = 0) -> None:
    """Leaves it to the training process to decide when a loader process ends."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@dataclass(eq=False)
class Examples(Dataset):
    data: datasets.Dataset

    def __getitem__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [read_example(self.data, index) for index in indices]


def read_batches(data: datasets.Dataset, batches: list[list[int]], num_workers: int) -> Generator[Any, None, None]:
    """The examples of each batch, read and decoded by loader processes."""
    loader: DataLoader = DataLoader(
        Examples(data),
        batch_size=None,
        sampler=batches,  # type: ignore[arg-type]
        # Examples stay pictures and texts: the task makes tensors of them.
        collate_fn=list,
        num_workers=min(num_workers, len(batches)),
        worker_init_fn=ignore_signals,
    )
    return read_all(loader, needs_models=False)


def read_all(loader: DataLoader, needs_models: bool = True) -> Generator[Any, None, None]:
    """Yields the batches of a loader; an error in one of its processes is raised as if it had happened here."""
    try:
        yield from start(loader, needs_models)
    except (OSError, ValueError, TypeError) as error:
        # From a loader process it comes with the traceback there as its text, of which the last line is ours.
        if "in DataLoader worker process" not in str(error):
            raise
        kind, _, text = str(error).strip().splitlines()[-1].partition(": ")
        # Its frames hold torch's iterator, which would keep the other loader processes alive.
        raise (OSError if isinstance(error, OSError) else ValueError)(text or kind) from error.with_traceback(None)
    except RuntimeError as error:
        if not re.match(r"DataLoader worker .*(exited unexpectedly|is killed by signal)", str(error)):
            raise
        told = f"a loader process ended ({error}), most often because memory or shared memory ran out"
        advice = "reduce data.num_workers (0 uses no loader processes), or the batch size"
        raise OSError(f"{told}: {advice}.") from error


def start(loader: DataLoader, needs_models: bool) -> Iterator[Any]:
    # Where Python starts a new interpreter for each process (macOS, Windows), it imports for seconds before it comes
    # to `ignore_signals`. A signal to the whole group in that time, such as Ctrl-C or the end of a job, ended the
    # loader process, and with it a run that was about to save. So they are born with these signals held back; here
    # those that came meanwhile arrive afterwards. Of the models of this package only those processes need any that
    # make training samples.
    with contextlib.ExitStack() as restored:
        # Windows cannot hold them back.
        if hasattr(signal, "pthread_sigmask"):
            if loader.num_workers and multiprocessing.get_start_method() != "fork":
                # Python starts its own helper with the first such process, and then lets SIGINT and SIGTERM through.
                resource_tracker.ensure_running()
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            restored.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        # What the user has set stays.
        if not needs_models and _SETTING not in os.environ:
            os.environ[_SETTING] = "0"
            restored.callback(os.environ.pop, _SETTING)
        return iter(loader)
