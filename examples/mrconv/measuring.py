"""Scores of what the runs of the study had reached."""

from pathlib import Path

from runs import MARKS, Run, candidates, find_mark, open_run

from hf_ext.files import read_json, write_json
from hf_ext.training import evaluate
from hf_ext.training.sources import open_source


def score(study: Path, data: dict[str, str], run: Run, minutes: int, split: str) -> dict[str, float]:
    """Scores of what a run had reached at a mark, computed once."""
    mark = find_mark(study, run, minutes)
    path = mark / f"scores-{split}.json"
    if not path.is_file():
        arguments, task = open_run(run, data, split)
        model = task.model_class.from_pretrained(mark)
        write_json(path, evaluate(task, model, open_source(arguments.data_arguments.eval_sources[""])))
    return dict(read_json(path))


def choose_rate(study: Path, data: dict[str, str], comparison: str, name: str) -> Run:
    """The candidate with the lowest loss at the first mark, on examples that neither train nor test."""
    first = MARKS[comparison][0]
    return min(candidates(comparison, name), key=lambda run: score(study, data, run, first, "validation")["loss"])
