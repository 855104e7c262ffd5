"""Statistics of the tasks' data, as merge methods read them: a safetensors file for each task, checked by its header.

`fisher`: for each tensor of the task's model the mean squared gradient, in its shape. `gram`: for each weight of a
linear layer the mean over examples of XᵀX, `[inputs, inputs]`. `__metadata__` tells the kind, and in `inputs_first`
which weights are `[inputs, outputs]`, as those of GPT-2 are. `measuring` makes them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..errors import DataError
from .methods import Method
from .sources import Source
from .tensors import Row


def check_statistics(method: Method, rows: Sequence[Row], tasks: Sequence[Source], files: Sequence[Source]) -> None:
    """Refuses files that are not what the method needs for the merged tensors."""
    for index, (task, file) in enumerate(zip(tasks, files, strict=True)):
        advice = f"make it with hf-ext emr statistics {task.spec} --kind {method.statistics}"
        if file.metadata.get("kind") != method.statistics:
            raise ValueError(
                f"{file.title} hold kind {file.metadata.get('kind')!r}, method {method.name!r} needs "
                f"{method.statistics!r}: {advice}."
            )
        for row in rows:
            name = row.task_names[index]
            if name is None:
                continue
            found = tuple(file.tensors[name].shape) if name in file.tensors else None
            shape = tuple(task.tensors[name].shape)
            if method.statistics == "gram":
                if found is None and _has_gram(row, files):
                    raise ValueError(f"{file.title} lack {name!r}, of which another task has a gram: {advice}.")
                if found is None:
                    continue
                shape = (shape[0 if inputs_first(file, name) else -1],) * 2 if len(shape) == 2 else ()
            if found != shape:
                told = "missing" if found is None else list(found)
                raise ValueError(
                    f"{file.title}: {name!r} must be {list(shape)} and is {told}; {advice}, or exclude the tensor."
                )
    if method.statistics == "gram" and not any(_has_gram(row, files) for row in rows):
        raise ValueError(f"no merged tensor has a gram in {files[0].title}: they are of another model.")


def inputs_first(file: Source, name: str) -> bool:
    """True if the rows of a linear layer's weight are its inputs."""
    try:
        return name in list(json.loads(file.metadata.get("inputs_first", "[]")))
    except (ValueError, TypeError) as error:
        raise DataError(f"{file.title}: `inputs_first` of the metadata is no list of names; make it again.") from error


def _has_gram(row: Row, files: Sequence[Source]) -> bool:
    return any(name in file.tensors for name, file in zip(row.task_names, files, strict=True) if name is not None)
