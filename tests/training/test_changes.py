"""What may change between two parts of a run: each change with what is promised of it, refusals with their words."""

import json
import random
import shutil
import sys
from contextlib import nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from accelerate import PartialState
from safetensors.torch import load_file

from hf_ext.errors import DataError, OtherRun
from hf_ext.training.arguments import TrainingArguments, apply_overrides, build
from hf_ext.training.changes import OTHER, SAME, compare_settings, describe_run
from hf_ext.training.methods import find_task
from hf_ext.training.state import RunFolder, read_manifest, write_manifest
from tests.kit.refusals import refused

from . import tiny
from .launching import ROOT, fork_two
from .test_damage import DAMAGES
from .tiny import Interrupted, TinyTask, contents, make_arguments, run, run_interrupted, write_images, write_shards


def weights(folder):
    """What a run ends with, without rows and evaluations: weights, optimizer, schedule, average."""
    found = contents(folder)
    names = ("model.safetensors", "optimizer.bin", "custom_checkpoint_1.pkl", "custom_checkpoint_2.pkl")
    return {name: found[name] for name in ("snapshot/model.safetensors", *(f"state/step-7/{name}" for name in names))}


def change(tmp_path, capsys, before, after, **changes):
    """Continues a run with something else; what was said, and whether it ends as a run that never stopped."""
    run(TinyTask(), make_arguments(tmp_path / "whole", before))
    run_interrupted(make_arguments(tmp_path / "run", before), 5)
    capsys.readouterr()
    run(TinyTask(), make_arguments(tmp_path / "run", after, **changes))
    return capsys.readouterr().err, weights(tmp_path / "run") == weights(tmp_path / "whole")


def refuse(folder, data, match, **changes):
    kept = contents(folder)
    with pytest.raises(ValueError, match=match):
        run(TinyTask(), make_arguments(folder, data, **changes))
    assert contents(folder) == kept


@pytest.mark.parametrize("workers", [0, 2])
def test_what_no_step_reads_changes_nothing(tmp_path, capsys, examples, shards, workers):
    before = {**tiny.evaluated(examples), "num_workers": workers}
    after = {**before, "eval": {"path": str(shards)}, "num_workers": 2 - workers}
    changes = {"logging_steps": 1, "save_steps": 3, "eval_steps": 2, "save_total_limit": 5}
    said, is_equal = change(tmp_path, capsys, before, after, **changes)
    assert f"data.num_workers: {workers} → {2 - workers}: {SAME}" in said and is_equal
    assert all(f"{name}: " in said for name in changes)
    assert "data.eval.path: " in said and "the best state, which starts again" in said
    # Best is what was evaluated on the new data, and no score of the old data is published as theirs.
    run_interrupted(make_arguments(tmp_path / "cut", {**before, "num_workers": 0}, eval_steps=2), 3)
    run_interrupted(make_arguments(tmp_path / "cut", {**after, "num_workers": 0}, eval_steps=9, save_steps=1), 4)
    assert not (tmp_path / "cut" / "snapshot" / "eval.json").exists()
    progress = torch.load(tmp_path / "run" / "state" / "step-7" / "custom_checkpoint_0.pkl")
    assert progress["best_step"] in (6, 7)


@pytest.mark.parametrize("kind", ["images", "list", "buffer", pytest.param("pairs", marks=pytest.mark.slow)])
def test_data_may_move(tmp_path, capsys, monkeypatch, kind):
    source, here, there = {}, tmp_path / "here" / "data", tmp_path / "there" / "data"
    if kind == "buffer":
        write_shards(here, shards=4, examples=22)
        source = {"streaming": True, "shuffle_buffer": 5}
    for side in {"images": ("",), "list": ("",), "pairs": ("lq", "hq")}.get(kind, ()):
        write_images(here / side, 9)
    shutil.copytree(here, there)
    monkeypatch.chdir(there.parent)
    moved = ["data"] if kind == "list" else "data"
    before, after = ({"train": {"path": path, **source}} for path in (str(here), moved))
    said, is_equal = change(tmp_path, capsys, before, after)
    assert f"data.train.path: {here} → data: of equal fingerprint, {SAME}" in said and is_equal


def rewrite(folder, kind):
    """Other data at the same place."""
    files = sorted(folder.iterdir())
    if kind == "fewer":
        files[-1].unlink()
    elif kind == "sorted otherwise":
        files[0].rename(folder / "kept")
        files[-1].rename(files[0])
        (folder / "kept").rename(files[-1])
    else:
        shutil.rmtree(folder)
        write_images(folder, 9, seed=1)


@pytest.mark.parametrize(
    ("kind", "source", "changes"),
    [
        ("fewer", {}, ["rows: 22 → 17"]),
        ("sorted otherwise", {"streaming": True}, ["the compared rows have other contents"]),
        ("pictures", {}, ["rows: 22 → 9", "columns: ['pixels'] → ['image']"]),
    ],
)
def test_other_data_is_refused_or_allowed(tmp_path, capsys, shards, kind, source, changes):
    data = {"train": {"path": str(shards), **source}}
    run_interrupted(make_arguments(tmp_path / "run", data), 5)
    rewrite(shards, kind)
    before = contents(tmp_path / "run")
    with refused(OtherRun, "--allow_other_data", changes=changes):
        run(TinyTask(), make_arguments(tmp_path / "run", data))
    assert contents(tmp_path / "run") == before
    # Once allowed it is the data of the run.
    for allowed in (True, False):
        capsys.readouterr()
        run(TinyTask(), make_arguments(tmp_path / "run", data, allow_other_data=allowed))
        assert (OTHER in capsys.readouterr().err) == allowed


def test_a_run_is_made_longer(tmp_path, capsys, examples):
    settings = {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 3}
    for name, steps in (("whole", 7), ("run", 5), ("run", 7)):
        run(TinyTask(), make_arguments(tmp_path / name, examples, **settings, max_steps=steps))
    assert f"max_steps: 5 → 7: {SAME}" in capsys.readouterr().err
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_another_run_is_refused(tmp_path, halfway):
    other = {"model": {"width": 8}, "task": {"noise": 0.1}}
    for changes, words in (
        ({"max_steps": 9}, r"max_steps: 7 → 9 \(the schedule cosine depends on it: .*--init_from"),
        ({"learning_rate": 0.5}, "learning_rate: 0.01 → 0.5"),
        (other, "model.width: None → 8; task.noise: None → 0.1|task.noise"),
        ({"per_device_train_batch_size": 4}, "2 → 1 × 4 × 2 .each step had 4 examples and would have 8: choose"),
    ):
        refuse(tmp_path / "run", halfway, words, **changes)


def test_workers_of_a_stream_are_refused(tmp_path, shards):
    train = {"train": {"path": str(shards), "streaming": True}}
    words = r"data.num_workers: 2 → 0 \(a stream is divided among the processes"
    run_interrupted(make_arguments(tmp_path / "run", {**train, "num_workers": 2}), 5)
    refuse(tmp_path / "run", {**train, "num_workers": 0}, words)


class NotingTask(TinyTask):
    """Writes down the samples of each step by a mark."""

    folder: Path

    def loss(self, model: torch.nn.Module, batch: dict[str, Any], step: int) -> torch.Tensor:
        loss = super().loss(model, batch, step)
        with (self.folder / f"samples-{PartialState().process_index}.txt").open("a") as file:
            # Example, flip and noise have all left their mark in the sum.
            file.writelines(f"{step} {float(noisy.double().sum())}\n" for noisy in batch["pixel_values"])
        return loss


def read_samples(folder: Path) -> list[list[str]]:
    """Step and mark of every sample, in no particular order within a step."""
    lines = [line for path in folder.glob("samples-*.txt") for line in path.read_text().splitlines()]
    return sorted(line.split() for line in lines)


def train_until(step: int, output: Path, data: Path, source: dict[str, Any] | None = None, **changes: Any) -> None:
    """Trains as far as a step, without dropout and statistics of batches, which depend on how a batch is split."""
    task, still = NotingTask(interrupt_at=step), {"dropout": 0.0, "batch_norm": False}
    task.folder = output.parent
    task.folder.mkdir(exist_ok=True)
    with suppress(Interrupted):
        run(task, make_arguments(output, tiny.evaluated(data, **(source or {})), model=still, **changes))


@pytest.mark.parametrize("source", [pytest.param({}, marks=pytest.mark.slow), {"streaming": True}])
def test_batches_are_split_otherwise(tmp_path, capsys, shards, source):
    """1 × 4 × 1, 1 × 2 × 2, 1 × 1 × 4: the same samples in every step."""
    for name, batch, step in (("whole", 4, -1), ("parts", 2, 2), ("parts", 1, 4), ("parts", 4, -1)):
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 4 // batch}
        train_until(step, tmp_path / name / "run", shards, source, **sizes)
    said = capsys.readouterr().err
    assert "1 × 2 × 2 → 1 × 1 × 4: every step has the same examples, " in said and OTHER in said
    compare_parts(tmp_path)


def compare_parts(tmp_path):
    """The same samples in every step, and weights that differ by rounding."""
    assert read_samples(tmp_path / "parts") == read_samples(tmp_path / "whole")
    parts, whole = (load_file(tmp_path / name / "run/snapshot/model.safetensors") for name in ("parts", "whole"))
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [[(2, 5)], [(2, 4), (1, 6)]])
def test_processes_come_and_go(tmp_path, examples, parts):
    """One process with batches of 4, two with batches of 2, or of 1 in two passes, one again."""
    four = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "save_steps": 1}
    train_until(-1, tmp_path / "whole" / "run", examples, **four)
    output = tmp_path / "parts" / "run"
    train_until(2, output, examples, **four)
    for batch, step in parts:
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 2 // batch, "save_steps": 1}
        fork_two("tests.training.test_changes", str(step), str(output), str(examples), json.dumps(sizes))
        assert read_manifest(RunFolder(output).state(step))["processes"] == 2
    train_until(-1, output, examples, **four)
    compare_parts(tmp_path)


def main() -> None:
    """A part of a run in one of two processes, under `fork_two`."""
    step, output, data, changes = sys.argv[1:]
    PartialState.destroy_process_group = lambda self, group=None: None
    train_until(int(step), Path(output), Path(data), **json.loads(changes))
    torch.distributed.destroy_process_group()


def test_the_batch_of_groups_is_refused(tmp_path, examples, monkeypatch):
    # Batches are of examples of one group only.
    monkeypatch.setattr(TinyTask, "read_data", lambda task, data: np.arange(len(data)) % 2)
    settings = {"lr_scheduler_type": "constant", "max_steps": 3}
    run(TinyTask(), make_arguments(tmp_path / "run", examples, **settings))
    split = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    with refused(DataError, "per_device_train_batch_size"):
        run(TinyTask(), make_arguments(tmp_path / "run", examples, **settings, **split))


def test_states_of_sharded_weights_fit_no_others(tmp_path, examples):
    two = make_arguments(tmp_path, examples, gradient_accumulation_steps=1)
    one = make_arguments(tmp_path, examples, gradient_accumulation_steps=2)
    for sharding in ("FSDP", "DEEPSPEED"):
        before = describe_run(two, 2, sharding)
        compare_settings(before, describe_run(two, 2, sharding), tmp_path)
        with refused(OtherRun, "sharding"):
            compare_settings(before, describe_run(two, 2, None), tmp_path)
    compare_settings(describe_run(two, 2, "FSDP"), describe_run(one, 1, "FSDP"), tmp_path)
    with refused(OtherRun, "DeepSpeed"):
        compare_settings(before, describe_run(one, 1, "DEEPSPEED"), tmp_path)


def test_versions_are_said(tmp_path, capsys, halfway):
    state = RunFolder(tmp_path / "run").state(4)
    manifest = read_manifest(state)
    installed = version("torch")
    assert manifest["versions"]["torch"] == installed
    write_manifest(state, {**manifest, "versions": {**manifest["versions"], "torch": "1.0"}})
    capsys.readouterr()
    run(TinyTask(), make_arguments(tmp_path / "run", halfway))
    assert f"torch 1.0 → {installed}: perhaps {OTHER}" in capsys.readouterr().err


@pytest.mark.parametrize("names", [["sharding"], ["classes"], ["versions", "data"]])
def test_a_state_of_a_version_that_stored_less_is_refused_in_words(tmp_path, halfway, names):
    state = RunFolder(tmp_path / "run").state(4)
    write_manifest(state, {name: value for name, value in read_manifest(state).items() if name not in names})
    with refused(OtherRun, min(names), "output_dir"):
        run(TinyTask(), make_arguments(tmp_path / "run", halfway))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["table", "stream"])
def test_random_parts(tmp_path, kind):
    """Runs of several parts, between which data moves, workers come and go, intervals change and states break."""
    rng, is_stream = random.Random(kind), kind == "stream"
    places = [write_shards(tmp_path / name, shards=4, examples=22) for name in ("here", "there")]

    def arguments(output):
        train = {"path": str(rng.choice(places)), "streaming": is_stream}
        data = {"train": train, "num_workers": rng.choice((0, 1) if is_stream else (0, 1, 2))}
        intervals = {"logging_steps": rng.randint(1, 4), "save_steps": rng.randint(1, 2), "save_total_limit": 3}
        return make_arguments(output, data, **intervals)

    run(TinyTask(), arguments(tmp_path / "whole"))
    for number in range(25):
        output = tmp_path / str(number)
        for step in sorted(rng.sample(range(1, 7), 3)):
            run_interrupted(arguments(output), step)
            steps = RunFolder(output).saved_steps()
            if len(steps) > 1 and rng.random() < 0.5:
                victim = rng.choice(sorted(RunFolder(output).state(steps[-1]).iterdir()))
                DAMAGES[rng.choice([*DAMAGES])](victim, rng)
        run(TinyTask(), arguments(output))
        assert weights(output) == weights(tmp_path / "whole"), number


ON_A_HUB = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv.pop(1))
from huggingface_hub import HfApi
from tests.training.tiny import TinyTask, make_arguments, run, run_interrupted
output, first, second = map(Path, sys.argv[1:])
HfApi().create_repo("me/rows", repo_type="dataset")
def upload(folder):
    return HfApi().upload_folder(folder_path=folder, repo_id="me/rows", repo_type="dataset", delete_patterns="*").oid
commit = upload(first)
source = {"path": "me/rows", "streaming": True}
def arguments(source):
    # The loader processes are forks of one that has read from the Hub.
    return make_arguments(output, {"train": source, "num_workers": 2})
run_interrupted(arguments(source), 5)
moved = upload(second)
try:
    run(TinyTask(), arguments(source))
except ValueError as error:
    assert f"commit of me/rows: {commit} → {moved}" in str(error), error
else:
    raise AssertionError("other data was not noticed")
run(TinyTask(), arguments({**source, "path": f"me/rows@{commit}"}))
"""


@pytest.mark.slow
def test_data_of_a_hub_that_moved_on_is_refused_and_its_commit_goes_on(tmp_path, shards, run_client):
    other = write_shards(tmp_path / "other", shards=4, examples=23)
    data = {"train": {"path": str(shards), "streaming": True}, "num_workers": 2}
    run(TinyTask(), make_arguments(tmp_path / "whole", data))
    run_client(ON_A_HUB, str(ROOT), str(tmp_path / "run"), str(shards), str(other))
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


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


@pytest.mark.parametrize(("schedule", "refuses"), [("cosine", True), ("constant", False)])
def test_epochs_of_more_examples_lengthen_a_run_only_without_an_end(tmp_path, examples, schedule, refuses):
    settings = {"num_train_epochs": 1.0, "lr_scheduler_type": schedule, "allow_other_data": True}
    first, held = tmp_path / "data" / "first.parquet", pyarrow.parquet.read_table(examples)
    first.parent.mkdir()
    pyarrow.parquet.write_table(held.slice(0, 4), first)
    arguments = make_arguments(tmp_path / "run", first, **settings)
    run(TinyTask(), arguments)
    pyarrow.parquet.write_table(held, first)
    with refused(OtherRun, "rows", schedule) if refuses else nullcontext():
        run(TinyTask(), arguments)
