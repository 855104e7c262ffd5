"""Check of all data of a run: reads every example once and lists the unusable ones."""

from typing import Any

import datasets
import numpy as np

from ..data.bad_examples import BadExamples, decode_row, describe_bad, name_bad
from ..data.files import UNUSABLE
from ..data.opening import open_source
from ..data.splits import count_shared
from ..progress import progress
from ..terminal import count_of
from .arguments import TrainingArguments
from .classes import match_classes
from .models import build_model, pin_revision
from .task import Task


def check_data(task: Task, arguments: TrainingArguments) -> list[dict[str, Any]]:
    """Reads, decodes and prepares every example of a run; of each data set what [`describe_check`] tells."""
    data = arguments.data_arguments
    sources = {"data.train": data.require_train_source()}
    sources |= {".".join(filter(None, ["data.eval", name])): source for name, source in data.eval_sources.items()}
    opened = {section: open_source(source, section) for section, source in sources.items()}
    learned = opened["data.train"]
    task.read_data(learned)
    init_from = arguments.init_from and pin_revision(arguments.init_from)
    build_model(task, arguments.model, init_from, "adapt" if arguments.peft else "train")
    found = []
    for section, given in opened.items():
        is_training, rows = section == "data.train", match_classes(given, task, f"the data of {section}")
        count, bad = 0, []
        is_stream = isinstance(rows, datasets.IterableDataset)
        stream = rows if is_stream else rows.to_iterable_dataset()
        # Decoded one by one, as a picture that cannot be decoded would end the reading.
        features, raw = stream.features, stream if stream.features is None else stream.decode(False)
        for row in progress(raw, section, total=None if is_stream else len(rows)):
            try:
                task.training_sample(decode_row(features, row), np.random.default_rng(count))
            except UNUSABLE as error:
                bad.append(name_bad(str(count), row, error))
            count += 1
        can_share = not (is_training or is_stream or isinstance(learned, datasets.IterableDataset))
        found.append(
            {
                "section": section,
                "path": sources[section].path,
                "split": sources[section].split,
                "examples": count,
                "columns": sorted(features or []),
                "bad": bad,
                # As many a training leaves out.
                "allowed": BadExamples(data.max_bad_examples, count).count_allowed(0) if is_training else 0,
                # With the inputs of an example that is trained on.
                "shared": count_shared(learned, rows) if can_share else 0,
            }
        )
    return found


def describe_check(found: dict[str, Any]) -> str:
    """One data set of [`check_data`] in a sentence."""
    bad = [describe_bad(row) for row in found["bad"][:5]]
    more = f" … and {len(found['bad']) - 5} more." if len(found["bad"]) > 5 else ""
    columns, count = ", ".join(found["columns"]) or "as they come", len(found["bad"])
    shared = count_of(found["shared"], "is a training example", "are training examples")
    shared = f" {shared} too, which makes the scores too good." if found["shared"] else ""
    return (
        f"{found['section']}: {count_of(found['examples'], 'example')} of {found['path']!r} ({found['split']}), "
        f"columns {columns}; {count} cannot be used.{shared} {' '.join(bad)}{more}".rstrip()
    )
