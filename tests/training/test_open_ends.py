"""Runs that go on with the same settings in other words, or with a clock that is shorter than an evaluation."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pyarrow
import pyarrow.parquet
import pytest
import torch

from hf_ext.errors import DataError, OtherRun
from hf_ext.files import read_rows
from hf_ext.hub.cards import MARKER
from hf_ext.settings import Section, SettingsError
from hf_ext.training.arguments import TrainingArguments, apply_overrides, build, read_yaml
from hf_ext.training.changes import Changes, compare_data, compare_settings, describe_run
from hf_ext.training.methods import find_task
from hf_ext.training.models import initialize_from
from hf_ext.training.optimizing import build_optimizer
from hf_ext.training.state import RunFolder
from hf_ext.training.stopping import RunStopped
from tests.kit.refusals import refused

from .tiny import ScoredTask, TinyConfig, TinyModel, TinyTask, contents, evaluated, make_arguments, run

RUNS = {
    "semanir": {"task": {"degradation": {"kind": "noise"}}, "data": {"train": {"path": "p"}, "eval": {"path": "e"}}},
    "mrconv-text": {"model": {"num_hidden_layers": 2}, "data": {"train": {"path": ["p", {"path": "q"}]}}},
    "mrconv-lm": {"init_from": "org/base", "data": {"train": {"path": "p"}}},
}


def changed(method: str, given: dict, flags: list[str]) -> list[str]:
    first = {"method": method, "output_dir": "run", **given}
    runs = [build(TrainingArguments, apply_overrides(first, words)) for words in ([], flags)]
    before, now = (describe_run(arguments, 1, None) for arguments in runs)
    return compare_settings(before, now, Path("run"), find_task(method)).notes


@pytest.mark.parametrize(
    ("method", "flags"),
    [
        ("semanir", "--learning_rate 0.0002 --max_grad_norm 1 --optim_args {} --seed 0 --data.num_workers 0"),
        ("semanir", "--data.train.streaming false --data.train.split train --data.train.hold_out 0"),
        ("semanir", "--data.train.path [p]"),
        ("semanir", "--data.train.path [{path: p, split: train}]"),
        ("semanir", "--data.train.pairs null --data.eval.streaming false --data.eval.rows examples"),
        ("semanir", "--task.degradation.sigma null --task.patch_size 64 --task.made_pictures false"),
        ("mrconv-text", "--data.train.streaming false --model.num_hidden_layers 2 --model.initializer_range 2e-2"),
        ("mrconv-text", "--data.train.path [p,{path: q, split: train, streaming: false}]"),
    ],
)
def test_a_default_that_is_written_out_is_no_change(method, flags):
    words = [f"--{item.strip().replace(' ', '=', 1)}" for item in flags.split("--")[1:]]
    assert changed(method, RUNS[method], words) == []


@pytest.mark.parametrize(
    ("method", "flag"),
    [
        ("semanir", "--data.train.split=validation"),
        ("semanir", "--task.degradation.sigma=15"),
        ("mrconv-text", "--data.train.path=[p,{path: q, split: test}]"),
        ("mrconv-text", "--data.train.path=[p]"),
        ("mrconv-text", "--model.num_hidden_layers=3"),
        # The base has defaults of its own.
        ("mrconv-lm", "--model.hidden_dropout_prob=0.0"),
    ],
)
def test_another_value_is_another_run(method, flag):
    with refused(OtherRun, flag[2:].partition("=")[0]):
        changed(method, RUNS[method], [flag])


@pytest.mark.parametrize("value", ["[1, 2]", "{a: 1}"])
@pytest.mark.parametrize("name", ["run_name", "optim", "tracker_project"])
def test_a_list_is_no_text_in_a_file_or_a_flag(tmp_path, name, value):
    (tmp_path / "a.yaml").write_text(f"method: semanir\noutput_dir: run\n{name}: {value}\n")
    (tmp_path / "b.yaml").write_text("method: semanir\noutput_dir: run\n")
    for file, flags in (("a.yaml", []), ("b.yaml", [f"--{name}", value])):
        with refused(SettingsError, name):
            build(TrainingArguments, apply_overrides(read_yaml(tmp_path / file), flags))
    quoted = apply_overrides(read_yaml(tmp_path / "b.yaml"), [f"--{name}", f"'{value}'"])
    assert getattr(build(TrainingArguments, quoted), name) == value


def test_an_evaluation_that_is_longer_than_the_deadline_ends_with_the_same_scores(tmp_path, examples):
    def go_on(name: str, **changes: float) -> dict[str, float]:
        data = {**evaluated(examples), "eval": {"path": str(examples), "split": "train[:5]"}}
        return run(TinyTask(), make_arguments(tmp_path / name, data, max_steps=1, **changes))

    for stops in range(9):  # noqa: B007
        try:
            found = go_on("run", deadline_minutes=1e-9)
            break
        except RunStopped:
            continue
    # Two of the batches of two and one; the last one ends it.
    assert stops == 3 and found == go_on("whole")
    files, whole = contents(tmp_path / "run"), contents(tmp_path / "whole")
    assert {name: files[name] for name in whole if "metrics" not in name} == {
        name: value for name, value in whole.items() if "metrics" not in name
    }


# What lies in a model's folder when the next one is saved, and whether it stays.
FOUND = {
    **dict.fromkeys(
        ("LICENSE", "results/a/table.csv", ".git/config", "tokenizer.json", "model.fp16.safetensors"), True
    ),
    **dict.fromkeys(("model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json"), False),
    ".eval_results/hf_ext.yaml": False,
}
OFTEN = {"save_steps": 1, "eval_steps": 1, "max_steps": 2, "lr_scheduler_type": "constant"}
CARDS = [(b"# Mine\n", True), (b"\xff mine", True), (f"---\nlicense: mit\n---\n{MARKER}\n".encode(), False)]


@pytest.mark.parametrize(("card", "stays"), CARDS)
def test_what_the_owner_put_into_a_models_folder_stays(tmp_path, examples, card, stays):
    folder, task = RunFolder(tmp_path / "run"), ScoredTask()
    arguments = make_arguments(folder.path, evaluated(examples), **OFTEN)
    task.scores = [5.0]
    run(task, arguments)
    for place in (folder.snapshot, folder.best):
        for name in FOUND:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(b"mine")
        (place / "README.md").write_bytes(card)
        (place / "empty").mkdir()
        (place / "link").symlink_to("nowhere")
    task.scores = [1.0]
    run(task, replace(arguments, max_steps=3))
    for place in (folder.snapshot, folder.best):
        assert json.loads((place / "training.json").read_text())["steps"] == 3
        assert (place / "empty").is_dir() and (place / "link").is_symlink() and (place / "eval.json").is_file()
        found = {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}
        assert {name: found.get(name) == b"mine" for name in FOUND} == FOUND
        assert found.get("README.md") == (card if stays else None)
        TinyModel.from_pretrained(place)


def test_each_evaluation_is_one_of_the_weights_of_its_step(tmp_path, examples, monkeypatch):
    # What becomes better is worse here, so that nothing is saved after most of them.
    monkeypatch.setattr(TinyTask, "greater_is_better", True)
    found = {}
    for save_steps in (1, 100):
        arguments = make_arguments(
            tmp_path / str(save_steps), evaluated(examples), save_steps=save_steps, eval_steps=1
        )
        run(TinyTask(), arguments)
        rows = read_rows(tmp_path / str(save_steps) / "metrics.jsonl", "step", int)
        found[save_steps] = [row["eval_mse"] for row in rows if "eval_mse" in row]
    assert found[1] == found[100] and len({*found[1]}) == len(found[1]) > 3


@pytest.mark.parametrize("given", [{}, {"betas": [0.5, 0.6]}, {"eps": 1e-3, "betas": [0.1, 0.2]}])
def test_arguments_of_the_optimizer_go_before_what_a_method_advises(tmp_path, given):
    arguments = make_arguments(tmp_path / "run", {}, optim_args=given)
    optimizer = build_optimizer(TinyTask(), TinyModel(TinyConfig()), arguments)
    betas = [tuple(group["betas"]) for group in optimizer.param_groups]
    assert betas == ([tuple(given["betas"])] * 2 if given else [(0.9, 0.999), (0.8, 0.9)])


@pytest.mark.parametrize("value", [torch.ones(2), np.ones(2), Path("a"), {1}, b"a", TinyTask])
def test_a_task_may_hold_what_json_does_not(tmp_path, examples, value):
    class OwnTask(TinyTask):
        def describe(self) -> dict:
            return {"held": value}

    folder = RunFolder(tmp_path / "run")
    run(OwnTask(), make_arguments(folder.path, evaluated(examples), max_steps=1))
    about = [json.loads((folder.snapshot / name).read_text()) for name in ("training.json", "eval.json")]
    assert about[0]["task"]["held"] == about[1]["results"][0]["arguments"]["held"] == str(value)


@pytest.mark.parametrize(("schedule", "refuses"), [("cosine", True), ("constant", False)])
def test_epochs_of_more_examples_lengthen_a_run_only_without_an_end(tmp_path, examples, schedule, refuses):
    settings = {"num_train_epochs": 1.0, "lr_scheduler_type": schedule, "allow_other_data": True}
    first, held = tmp_path / "data" / "first.parquet", pyarrow.parquet.read_table(examples)
    first.parent.mkdir()
    pyarrow.parquet.write_table(held.slice(0, 4), first)
    arguments = make_arguments(tmp_path / "run", first, **settings)
    run(TinyTask(), arguments)
    pyarrow.parquet.write_table(held, first)
    with refused(OtherRun, "rows", schedule) if refuses else contextlib.nullcontext():
        run(TinyTask(), arguments)


@pytest.mark.parametrize(("column", "told"), [("split", ["0.2.0 → 0.3.0", "column of splits"]), ("x", ["0.2.0"])])
def test_rows_that_another_version_reads_otherwise_are_told(column, told):
    arguments = build(TrainingArguments, {"method": "mrconv-text", "output_dir": "run", **RUNS["mrconv-text"]})
    data = {"shards": None, "columns": [column], "commits": {}, "sample": ""}
    before, now = (
        {**describe_run(arguments, 1, None), "versions": {"hf-ext": version}, "data": {**data, "rows": rows}}
        for version, rows in (("0.2.0", 48), ("0.3.0", 43))
    )
    with refused(OtherRun, "48 → 43", *told) as error:
        compare_data(before, now, Path("run"), Changes())
    assert ("column of splits" in str(error.value)) == (column == "split")


def test_an_adapter_is_no_checkpoint_to_begin_with(tmp_path):
    model = peft.get_peft_model(TinyModel(TinyConfig()), peft.LoraConfig(target_modules=["enter"]))
    model.base_model.model.save_pretrained(base := tmp_path / "base")
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(tmp_path)
    with refused(DataError, "adapter", str(base), "merge_and_unload"):
        initialize_from(TinyModel(TinyConfig()), str(tmp_path))


@pytest.mark.parametrize(
    ("word", "number"),
    [("1e1", 10), ("+2E2", 200), ("1.0e+1", 10), ("1.5e1", 15), ("15e-1", None), ("1e999", None), ("1.5", None)],
)
@pytest.mark.parametrize("field", ["max_steps", "data.num_workers", "per_device_eval_batch_size"])
def test_a_whole_number_may_have_an_exponent(field, word, number):
    given = Section({"method": "semanir", "output_dir": "run", "data": Section({"train": {"path": "p"}})})
    with contextlib.nullcontext() if number else refused(SettingsError, field.rpartition(".")[2], "int"):
        built = build(TrainingArguments, apply_overrides(given, [f"--{field}", word]))
        owner = built.data_arguments if "." in field else built
        assert (found := getattr(owner, field.rpartition(".")[2])) == number and type(found) is int
