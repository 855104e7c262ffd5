"""A saved model has the results of its own step."""

import json
from dataclasses import replace

import pytest

from hf_ext.files import read_rows
from hf_ext.training import Callback

from .tiny import TinyTask, evaluated, make_arguments, run


class Watch(Callback):
    """Notes the scores that each saved model has, and asks for a save now and then."""

    def __init__(self, asks: int):
        self.asks, self.found = asks, {}

    def on_log(self, step, row):
        return "save" if step == self.asks else None

    def on_save(self, step, model, is_best):
        told = json.loads((model / "eval.json").read_text())["results"] if (model / "eval.json").exists() else [None]
        self.found[step, model.name] = told[0] and told[0]["value"]


@pytest.mark.parametrize(("saves", "asks", "stops"), [(3, -1, 6), (100, 5, 6), (3, -1, 4), (3, 5, 5), (1, -1, 6)])
def test_a_saved_model_has_results_of_its_own_step_only(tmp_path, examples, saves, asks, stops):
    often = {"save_steps": saves, "eval_steps": 2, "logging_steps": 1, "lr_scheduler_type": "constant"}
    arguments = make_arguments(tmp_path / "run", evaluated(examples), **often)
    watch = Watch(asks)
    for steps in dict.fromkeys((stops, 6)):
        run(TinyTask(), replace(arguments, max_steps=steps), None, None, [watch])
    rows = read_rows(tmp_path / "run" / "metrics.jsonl", "step", int)
    scores = {row["step"]: row["eval_mse"] for row in rows if "eval_mse" in row}
    assert watch.found == {(step, name): scores.get(step) for step, name in watch.found}
    assert None not in [value for (_, name), value in watch.found.items() if name == "best"]
    assert watch.found[6, "snapshot"] is not None and len({*watch.found.values()}) > 1
