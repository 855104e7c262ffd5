"""Inputs of a merge, opened by their headers: base, tasks, and the further inputs of a method."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from ..errors import DataError
from .adapters import read_adapters
from .configuration import MergeConfig
from .sources import Source, open_weights

_OPENED_AT_ONCE = 8
STATISTICS = "statistics of "


@dataclass(frozen=True)
class Inputs:
    """Opened checkpoints of a merge. Adapters among the tasks read as the weights that are merged for them."""

    base: Source
    tasks: tuple[Source, ...]  # in the order of the configuration
    merged_model: Source | None  # the one of method `"given"`
    statistics: tuple[Source, ...]  # of the tasks' data, where the method wants them


def open_inputs(config: MergeConfig, token: str | bool | None, endpoint: str | None) -> Inputs:
    """Opens all inputs of a configuration in parallel, or none."""
    specs = {"base": config.base, **config.tasks}
    if config.merged is not None:
        specs["merged"] = config.merged
    specs |= {STATISTICS + task: config.statistics[task] for task in config.tasks if config.statistics}
    with _open_all(specs, token, endpoint) as opened:
        for source in (opened["base"], *(opened[task] for task in config.tasks)):
            if source.is_artifact:
                raise DataError(
                    f"{source.title} is a merge with masks, whose tasks are not the weights of its folder: write the "
                    "one that you mean with hf-ext emr export, and give that."
                )
        base, tasks = read_adapters(config.adapters, opened["base"], [opened[task] for task in config.tasks])
        statistics = tuple(source for label, source in opened.items() if label.startswith(STATISTICS))
        return Inputs(base, tasks, opened.get("merged"), statistics)


@contextmanager
def _open_all(specs: dict[str, str], token: str | bool | None, endpoint: str | None) -> Iterator[dict[str, Source]]:
    """The sources by their labels; they stay open unless an error is raised."""
    with ThreadPoolExecutor(_OPENED_AT_ONCE) as pool:
        futures = {
            label: pool.submit(open_weights, label, spec, token=token, endpoint=endpoint)
            for label, spec in specs.items()
        }
    with ExitStack() as stack:
        for future in futures.values():
            if future.exception() is None:
                stack.callback(future.result().close)
        yield {label: future.result() for label, future in futures.items()}
        stack.pop_all()
