"""What steers a run: epochs, early stopping, optimizers, schedules, callbacks, pushing."""

import math
from decimal import Decimal
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict

from hf_ext.data.opening import open_source
from hf_ext.errors import DataError, UsageError
from hf_ext.training import Callback, DataSource, optimizers, train
from hf_ext.training.arguments import SCHEDULES
from hf_ext.training.state import RunFolder
from tests.kit.refusals import refused

from . import two_processes
from .tiny import ScoredTask, TinyConfig, TinyModel, TinyTask, contents, evaluated, make_arguments, run


def rows(folder):
    return RunFolder(folder).read_metrics()


def test_epochs_are_counted_in_steps(tmp_path, examples, capsys):
    # 9 examples, 4 a step: two and a half epochs are 6 steps.
    run(TinyTask(), make_arguments(tmp_path / "run", examples, num_train_epochs=2.5))
    assert "num_train_epochs 2.5: 6 steps, in place of max_steps." in capsys.readouterr().err
    assert rows(tmp_path / "run")[-1]["step"] == math.ceil(2.5 * 9 / 4) == 6
    run(TinyTask(), make_arguments(tmp_path / "steps", examples, max_steps=6))
    epochs, steps = contents(tmp_path / "run"), contents(tmp_path / "steps")
    assert [name for name in steps if name.startswith("snapshot/model") and steps[name] != epochs[name]] == []
    stream = {"train": {"path": str(examples), "streaming": True}}
    with refused(UsageError, "num_train_epochs"):
        run(TinyTask(), make_arguments(tmp_path / "b", stream, num_train_epochs=1))


def test_a_run_ends_when_its_score_gets_no_better(tmp_path, examples):
    options = {"max_steps": 40, "eval_steps": 2, "save_steps": 50, "early_stopping_patience": 3}
    task, arguments = ScoredTask(), make_arguments(tmp_path / "run", evaluated(examples), **options)
    task.scores = [1.0, 0.0, 1.0]
    run(task, arguments)
    # Best at step 4, then three that are no better.
    assert rows(tmp_path / "run")[-1]["step"] == 10
    assert (tmp_path / "run" / "state" / "step-10").is_dir() and (tmp_path / "run" / "snapshot").is_dir()
    before = contents(tmp_path / "run")
    run(task, arguments)
    assert contents(tmp_path / "run") == before
    with refused(UsageError, "early_stopping_patience"):
        run(TinyTask(), make_arguments(tmp_path / "other", examples, early_stopping_patience=1))


@pytest.mark.parametrize(
    ("optim", "options"),
    [
        *(("AdamW", {"betas": [0.9, 0.95], "foreach": True}), ("SGD", {"momentum": 0.9}), ("Adafactor", {})),
        *(("Muon", {}), ("OneBit", {})),
    ],
)
def test_every_optimizer_trains_and_resumes(tmp_path, examples, monkeypatch, optim, options):
    # The tiny model is less wide than the matrices that Muon takes.
    monkeypatch.setattr(optimizers, "_NARROWEST", 1)
    TinyModel(TinyConfig()).save_pretrained(tmp_path / "start")
    signs = {"init_from": str(tmp_path / "start"), "ema_decay": 0.0} if optim == "OneBit" else {}
    result = two_processes.compare(tmp_path, "map-0", optim=optim, optim_args=options, **signs)
    assert "state/step-7/optimizer.bin" in result["names"] and result["differing"] == []


def scheduled(kind: str, **options: Any) -> dict[str, Any]:
    return {"lr_scheduler_type": kind, "lr_scheduler_kwargs": options}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optim": "LBFGS"}, r"optim must be one of .*AdamW.*; got 'LBFGS'"),
        ({"optim_args": {"betas": [2, 3]}}, "optim AdamW with optim_args .*Invalid beta"),
        ({"optim_args": {"lr": 0.1}}, "unknown key 'lr' in optim_args"),
        ({"optim_args": {"eps": math.nan}}, "optim_args.eps is nan"),
        ({"optim_args": {"foreach": True, "fused": True}}, "cannot be `True` together"),
        (scheduled("cosine_with_min_lr", min_lr=1), "the learning rate would become 0"),
        (scheduled("inverse_sqrt", timescale=0), "do not fit inverse_sqrt"),
        ({"hub_model_id": "me/run"}, "hub_strategy best needs an evaluation"),
        ({"hub_model_id": "me/a run"}, "hub_model_id is 'me/a run'; allowed: org/name"),
        ({"hub_model_id": "me/run", "hub_strategy": "checkpoint"}, "set hub_private_repo to true"),
        ({"resume_from_checkpoint": "."}, r"resume_from_checkpoint is the local \."),
        ({"num_train_epochs": 1e308}, "num_train_epochs must be more than 0, below 1e6"),
        ({"num_train_epochs": 0}, "num_train_epochs must be more than 0, below 1e6; got 0"),
        ({"per_device_train_batch_size": 10**30}, "per_device_train_batch_size must be a whole number from 1 to 10 m"),
        *((scheduled(name, floor=1), f"{{'floor': 1}} do not fit {name}: ") for name in SCHEDULES),
    ],
)
def test_what_cannot_steer_is_refused_in_words_and_leaves_nothing(tmp_path, examples, changes, said):
    with pytest.raises(ValueError, match=said):
        run(TinyTask(), make_arguments(tmp_path / "run", examples, **changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("names", [(2023, 2024), (0, 1), ("a", "b")])
@pytest.mark.parametrize("in_python", [False, True])
def test_sets_may_have_numbers_for_names(tmp_path, examples, names, in_python):
    opened = dict.fromkeys(names, open_source(DataSource(str(examples)))) if in_python else None
    data = {**evaluated(examples), "eval": dict.fromkeys(names, {"path": str(examples)})}
    arguments = make_arguments(tmp_path / "run", examples if in_python else data, max_steps=1)
    assert {f"{name}_mse" for name in names} <= run(TinyTask(), arguments, None, opened).keys()
    assert (tmp_path / "run" / "best").is_dir()


@pytest.mark.parametrize("change", [lambda rows: rows.select([]), lambda rows: rows.to_iterable_dataset()])
def test_data_of_which_no_example_can_be_counted_is_refused_at_once(tmp_path, examples, change):
    with refused(DataError, "evaluation"):
        rows = change(open_source(DataSource(str(examples))))
        run(TinyTask(), make_arguments(tmp_path / "run", examples), None, {"a": rows})
    for given in ([None, [rows]], [[{"pixels": [0.0]}]], [DatasetDict({"train": rows})], [Dataset.from_dict({})]):
        with refused(ValueError, "data"):
            run(TinyTask(), make_arguments(tmp_path / "run", {} if given[0] else examples), *given)
    assert not (tmp_path / "run").exists()


def test_callbacks_hear_of_everything_in_order(tmp_path, examples):
    heard = []

    class Listener(Callback):
        def on_begin(self, step, folder, model):
            heard.append(("begin", step, folder.name))

        def on_log(self, step, values):
            heard.append(("log", step, "loss" in values))

        def on_evaluate(self, step, metrics, model):
            heard.append(("evaluate", step, *sorted(metrics)))

        def on_end(self, step):
            heard.append(("end", step))

        def on_save(self, step, folder, is_best):
            heard.append(("save", step, folder.name, is_best))
            assert (folder / "model.safetensors").is_file()

    data = open_source(DataSource(str(examples)))
    arguments = make_arguments(tmp_path / "run", {}, max_steps=3)
    run(TinyTask(), arguments, data, data, [Listener(), Callback()])
    assert heard == [
        *[("begin", 0, "run"), ("log", 2, True), ("save", 2, "snapshot", False), ("log", 3, True)],
        *[("evaluate", 3, "examples", "indices", "mse"), ("log", 3, False)],
        *[("save", 3, "best", True), ("save", 3, "snapshot", False), ("end", 3)],
    ]


class Word(Callback):
    """Says a word when it hears of a step."""

    def __init__(self, word, step):
        self.word, self.step = word, step

    def on_log(self, step, values):
        return self.word if step == self.step and "loss" in values else None


@pytest.mark.parametrize(
    ("word", "saved", "scored"),
    [("save", [4, 8], [8]), ("evaluate", [4, 8], [4, 8]), ("end", [4], [4]), (None, [8], [8])],
)
def test_a_callback_steers_a_run(tmp_path, examples, word, saved, scored):
    options = {"max_steps": 8, "logging_steps": 1, "save_steps": 90, "eval_steps": 90, "save_total_limit": 9}
    arguments = make_arguments(tmp_path / "run", evaluated(examples), **options)
    run(TinyTask(), arguments, None, None, [Word(word, 3)])
    assert sorted(int(path.name[5:]) for path in (tmp_path / "run" / "state").iterdir()) == saved
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found if "eval_mse" in row] == scored
    # A run that a callback ended is complete.
    run(TinyTask(), arguments)
    assert rows(tmp_path / "run") == found


@pytest.mark.parametrize("word", ["halt", ["end"], {"save": 1}, np.array(["end"]), True])
def test_a_word_that_no_callback_may_say_is_a_failure_of_it(tmp_path, examples, word):
    arguments = make_arguments(tmp_path / "run", examples, max_steps=2, logging_steps=1, strict_callbacks=True)
    with refused(UsageError, "callback", "'evaluate'"):
        run(TinyTask(), arguments, None, None, [Word(word, 1)])


class OddTask(TinyTask):
    """Evaluates to what a test says."""

    found: ClassVar[Any] = None

    def summarize(self, rows):
        return self.found


@pytest.mark.parametrize("value", [np.float32(1.5), torch.tensor([1.5]), Decimal("1.5"), 1.5])
def test_metrics_of_other_kinds_are_numbers(tmp_path, examples, value, monkeypatch):
    monkeypatch.setattr(OddTask, "found", {"mse": value, "count": np.int64(9)})
    found = run(OddTask(), make_arguments(tmp_path / "run", evaluated(examples), max_steps=1))
    assert found == {"mse": 1.5, "count": 9}
    # So may be the rows that its own summary reads.
    monkeypatch.setattr(OddTask, "evaluate_batch", lambda *given: [value] * len(given[-1]))
    assert run(OddTask(), make_arguments(tmp_path / "other", evaluated(examples), max_steps=1)) == found


NO_METRICS = [None, {}, {"other": 1.0}, {"mse": None}, {"mse": "low"}, {"mse": np.ones(2)}, [1.0]]


@pytest.mark.parametrize("found", NO_METRICS)
def test_what_is_no_metric_is_refused_and_the_steps_are_kept(tmp_path, examples, found, monkeypatch):
    monkeypatch.setattr(OddTask, "found", found)
    arguments = make_arguments(tmp_path / "run", evaluated(examples), max_steps=4, save_steps=9)
    with refused(UsageError, "OddTask.summarize"):
        run(OddTask(), arguments)
    monkeypatch.setattr(OddTask, "evaluate_batch", lambda *_: [])
    with refused(UsageError, "OddTask.evaluate_batch"):
        run(OddTask(), arguments)
    assert RunFolder(tmp_path / "run").saved_steps() == [3] and "mse" in run(TinyTask(), arguments)
    assert [row["step"] for row in rows(tmp_path / "run") if "eval_mse" in row] == [3, 4]


def test_one_process_trains_in_one_precision_after_the_other(tmp_path, examples):
    run(TinyTask(), make_arguments(tmp_path / "first", examples, max_steps=1))
    for precision in ("bf16", "no"):
        train(TinyTask(), make_arguments(tmp_path / precision, examples, max_steps=1, mixed_precision=precision))
    assert contents(tmp_path / "no") == contents(tmp_path / "first") != contents(tmp_path / "bf16")
