"""Scores of what the runs of the study had reached; of the released model also at half the rate, and merged."""

import sys
from pathlib import Path
from typing import Any

import torch
from runs import EXAMPLES, MARKS, Run, candidates, find_mark, open_run

import hf_ext
from hf_ext.files import read_json, write_json
from hf_ext.mrconv import MRConvForAudioClassification
from hf_ext.training import build_task, evaluate
from hf_ext.training.sources import open_source

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies import read_arguments  # noqa: E402  found through the line above

RELEASED = EXAMPLES.parent / "released" / "spoken-digits.yaml"


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


@torch.no_grad()
def measure_released(recordings: Path) -> dict[str, Any]:
    """The released model on 8 kHz recordings: with branches, on every second sample, and merged."""
    place = {"path": str(recordings), "split": "test"}
    source = {"train": place, "eval": place}
    arguments = read_arguments(RELEASED, {"data": source})
    task, half = (
        build_task(read_arguments(RELEASED, {"data": source, **more})) for more in ({}, {"task.decimation": 2})
    )
    data = open_source(arguments.data_arguments.eval_sources[""])
    folder = str(hf_ext.released("spoken-digits"))
    model = MRConvForAudioClassification.from_pretrained(folder).eval()
    inputs = task.batch(model, [data[index] for index in range(8)])
    scores = {"8 kHz": evaluate(task, model, data), "4 kHz": evaluate(half, half.build_model({}, folder), data)}
    before = model(**inputs).logits
    model.reparameterize()
    after = model(**inputs).logits
    return {
        "recordings": len(data),
        "scores": {**scores, "merged": evaluate(task, model, data)},
        "difference": float((after - before).abs().max() / before.abs().max()),
    }
