"""Events of a run for callbacks."""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..errors import UsageError


class Callback:
    """
    Observer of a run, in its main process. Override the methods that you need. An error of a callback is reported and
    counted, and the run continues; with `strict_callbacks` it ends the run.

    The value that a method returns controls the run, in all processes and within two steps: `"save"` saves a state,
    `"evaluate"` evaluates and saves, `"end"` also ends the run as complete; `None` has no effect.

    Example:
        >>> from hf_ext.training import Callback
        >>> class Goal(Callback):
        ...     def on_evaluate(self, step, metrics, model):
        ...         return "end" if metrics["accuracy"] > 0.99 else None
        >>> Goal().on_evaluate(100, {"accuracy": 0.995}, None)
        'end'
    """

    def on_begin(self, step: int, folder: Path, model: torch.nn.Module) -> str | None:
        """Called before the first step of this process; `step` steps are done, and the run writes to `folder`."""

    def on_log(self, step: int, values: dict[str, Any]) -> str | None:
        """Called with each row of `metrics.jsonl`."""

    def on_evaluate(self, step: int, metrics: dict[str, float], model: torch.nn.Module) -> str | None:
        """Called after each evaluation; the model has the weights that were evaluated."""

    def on_save(self, step: int, folder: Path, is_best: bool) -> str | None:
        """Called when a model was written: `folder` is `snapshot/`, or `best/` where it is the best so far."""

    def on_end(self, step: int) -> None:
        """Called when the run is complete; not where a signal or a deadline ends it before."""


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuses what is no list of callbacks: those of other libraries have the same events, and never act here."""
    if not (isinstance(callbacks, Sequence) and all(isinstance(callback, Callback) for callback in callbacks)):
        raise UsageError(
            f"callbacks is {callbacks!r}; allowed: a list of objects derived from hf_ext.training.Callback."
        )


class Onlookers:
    """
    Observers of a run: trackers, pictures, callbacks. An error of one is reported and counted, and the run continues,
    unless it is strict.
    """

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.failures: Counter[str] = Counter()

    @contextlib.contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Catches errors of an observer inside a `with` block."""
        try:
            yield
        except Exception as error:
            if self.strict:
                raise
            self.failures[name] += 1
            if self.failures[name] == 1:
                self._warn(f"{name} failed ({type(error).__name__}: {error}); the run continues")

    def sum_up(self) -> None:
        """Reports the number of failures of each observer."""
        for name, count in self.failures.items():
            self._warn(f"{name} failed {count} time{'s' * (count > 1)}")

    @staticmethod
    def _warn(text: str) -> None:
        tqdm.write(f"warning: {text}. --strict_callbacks true ends a run at the first one.", file=sys.stderr)
