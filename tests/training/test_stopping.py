"""Signals and the clock: a state within a step, in all processes; the run goes on as if nothing had happened."""

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import string
import subprocess
import sys
import time
from ast import literal_eval
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file

from hf_ext.errors import UsageError
from hf_ext.training import main as program
from hf_ext.training.launcher import require_devices
from hf_ext.training.state import RunFolder
from hf_ext.training.stopping import EXIT_CODE, SIGNALS, RunStopped, Stopping
from tests.kit.own_data import write_files
from tests.kit.process_state import forget_accelerate
from tests.kit.refusals import refused

from .launching import ROOT, environment
from .stoppable import finish, start
from .test_control import Word
from .test_launcher import hand_on
from .tiny import TinyTask, contents, evaluated, make_arguments, make_task, run, write_config, write_text_recipe

STEPS = 30


def steps_done(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    rows = file.read_text().splitlines() if file.exists() else []
    return json.loads(rows[-1])["step"] if rows and rows[-1].endswith("}") else 0


def saved_steps(folder: Path) -> list[int]:
    return RunFolder(folder).saved_steps()


def outcome(found: dict, steps: int) -> dict:
    """What a run leaves but its rows, of which a stop adds one, and earlier states."""
    last = f"state/step-{steps}/"
    found = {name: value for name, value in found.items() if not name.startswith("metrics")}
    return {name: value for name, value in found.items() if not name.startswith("state/") or name.startswith(last)}


def stop_at_a_random_moment(started: list, folder: Path, number: int, rng: random.Random) -> int:
    """Signals one process after its run has taken a step; the step after which it was sent."""
    before, end = steps_done(folder), time.monotonic() + 120
    while steps_done(folder) == before and started[0].is_alive():
        assert time.monotonic() < end
        time.sleep(0.001)
    time.sleep(rng.random() * 0.05)
    known = steps_done(folder)
    process = rng.choice(started)
    if process.is_alive():
        os.kill(process.pid, number)
    return known


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: signal.Signals(number).name)
def test_a_signal_saves_within_a_step_and_the_run_goes_on(tmp_path, examples, alone, number, processes):
    whole, stopped, rng = tmp_path / "whole", tmp_path / "stopped", random.Random(int(number))
    finish(start(whole, examples, processes, max_steps=STEPS))
    for _ in range(20):
        started = start(stopped, examples, processes, max_steps=STEPS)
        known = stop_at_a_random_moment(started, stopped, number, rng)
        if (code := finish(started, 0, EXIT_CODE)) == EXIT_CODE:
            break
        # A machine that is busy elsewhere signalled too late: anew, until there is something to continue.
        shutil.rmtree(stopped)
    assert code == EXIT_CODE
    # Every step that was known to be done is in the state.
    assert saved_steps(stopped)[-1] == steps_done(stopped) >= known
    finish(start(stopped, examples, processes, max_steps=STEPS))
    assert outcome(contents(stopped), STEPS) == outcome(contents(whole), STEPS)


def test_the_clock_ends_a_run_and_saves_between(tmp_path, examples):
    def arguments(**changes):
        return make_arguments(tmp_path / "run", examples, max_steps=4, save_steps=100, save_total_limit=9, **changes)

    with refused(RunStopped, "deadline_minutes", "1e-09", "step 1"):
        run(TinyTask(), arguments(deadline_minutes=1e-9))
    assert saved_steps(tmp_path / "run") == [1]
    # Of a program, with a code of its own.
    words = [write_config(tmp_path, examples, output_dir=str(tmp_path / "other")), "--deadline_minutes=1e-9"]
    forget_accelerate()
    assert program(words, make_task) == EXIT_CODE and saved_steps(tmp_path / "other") == [1]
    run(TinyTask(), arguments(save_minutes=1e-9))
    assert saved_steps(tmp_path / "run") == [1, 2, 3, 4]


def test_two_processes_save_once_for_one_interval(monkeypatch):
    """Answers are one step old: the question of the next step is asked before the state is saved."""
    now = 0.0
    monkeypatch.setattr("hf_ext.training.stopping.time.monotonic", lambda: now)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: SimpleNamespace(wait=lambda: None))
    stopping = Stopping(SimpleNamespace(count=2, index=0, group=None), save_minutes=1, deadline_minutes=0)
    answers = {}
    for now in (10.0, 61.0, 62.0, 63.0, 64.0, 123.0, 124.0, 125.0):
        answers[now] = stopping.ask()
    assert [*answers.values()] == [0, 0, 1, 0, 0, 0, 1, 0]


class SignalledTask(TinyTask):
    """Gets a signal in the second batch of an evaluation, or in a step."""

    def __init__(self, stop_in: int = 0, stop_at: int = -1, number: int = signal.SIGTERM):
        super().__init__()
        self.stop_in, self.stop_at, self.number, self.scored = stop_in, stop_at, number, []

    def loss(self, model, batch, step):
        if step == self.stop_at:
            os.kill(os.getpid(), self.number)
        return super().loss(model, batch, step)

    def evaluate_batch(self, model, examples, indices):
        self.scored.append(indices[0])
        if self.scored.count(2) == self.stop_in and indices[0] == 2:
            os.kill(os.getpid(), self.number)
        return super().evaluate_batch(model, examples, indices)


# The evaluation with the signal, or none, and the step that is saved.
@pytest.mark.parametrize(("evaluation", "step"), [pytest.param(1, 3, marks=pytest.mark.slow), (3, 7), (0, 5)])
def test_a_signal_saves_within_a_step_or_a_batch_of_an_evaluation(tmp_path, examples, evaluation, step):
    def train_in(name, task):
        data = {**evaluated(examples), "num_workers": 1}
        run(task, make_arguments(tmp_path / name, data, save_total_limit=9))
        return contents(tmp_path / name)

    whole, task = train_in("whole", TinyTask()), SignalledTask(evaluation, -1 if evaluation else step - 1)
    with refused(RunStopped, "SIGTERM", f"step {step}"):
        train_in("stopped", task)
    assert not evaluation or task.scored[-1] == 2
    assert saved_steps(tmp_path / "stopped")[-1] == step and not multiprocessing.active_children()
    rows = RunFolder(tmp_path / "stopped").read_metrics()
    assert not [row for row in rows if row["step"] == step and "loss" not in row]
    if not evaluation:
        # A stop adds a row and a state to those of a run that was not stopped.
        assert outcome(train_in("stopped", TinyTask()), 7) == outcome(whole, 7)
        return
    # As if the state, whose evaluation was done, had been saved and the row written, but not yet the state after it.
    with (tmp_path / "stopped" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "eval_mse": -1.0}) + "\n")
    stopped = train_in("stopped", TinyTask())
    # A stop saves a state more.
    assert {name: stopped[name] for name in whole} == whole


@pytest.mark.parametrize(("first", "asking"), [(2, []), (90, [Word("evaluate", 1)])])
def test_an_interrupted_evaluation_is_done_whatever_its_steps_are_then(tmp_path, examples, first, asking):
    changes, data = {"max_steps": 4, "save_steps": 90, "logging_steps": 1}, evaluated(examples)
    with refused(RunStopped, "step 2"):
        run(SignalledTask(1), make_arguments(tmp_path / "run", data, eval_steps=first, **changes), None, None, asking)
    run(TinyTask(), make_arguments(tmp_path / "run", data, eval_steps=90, **changes))
    assert [row["step"] for row in RunFolder(tmp_path / "run").read_metrics() if "eval_mse" in row] == [2, 4]


def test_signals_are_left_as_they_were(tmp_path, examples):
    # As `nohup` does.
    kept = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run(SignalledTask(0, 0, signal.SIGHUP), make_arguments(tmp_path / "ignored", examples, max_steps=2))
    finally:
        signal.signal(signal.SIGHUP, kept)
    before = [signal.getsignal(number) for number in SIGNALS]
    run(TinyTask(), make_arguments(tmp_path / "run", examples, max_steps=1))
    assert [signal.getsignal(number) for number in SIGNALS] == before


# What stands in for srun: one process for the port, else one for each task, numbered within its node.
SRUN = """#!/bin/bash
tasks=$SLURM_NTASKS
while [[ $1 = --* ]]; do [[ $1 = --ntasks=1 ]] && tasks=1; shift; done
for ((task = 0; task < tasks; task++)); do
  SLURM_PROCID=$task SLURM_LOCALID=$((task % SLURM_NTASKS_PER_NODE)) "$@" & waited+=($!)
done
code=0
for process in "${waited[@]}"; do wait "$process" || code=$?; done
exit $code
"""


@pytest.fixture
def slurm(tmp_path):
    """A function that runs the job of examples/accelerate with commands that stand in for SLURM's."""
    if sys.platform == "win32":
        pytest.skip("a script of bash")
    told = f'#!/bin/bash\necho "$@" >> {tmp_path}/said\n[ $1 = requeue ] || printf "localhost\\nother\\n"\n'
    commands = {"python": f'#!/bin/bash\nexec {sys.executable} "$@"\n', "srun": SRUN, "scontrol": told}
    for name, script in commands.items():
        write_files(tmp_path / "bin", {name: script})
        (tmp_path / "bin" / name).chmod(0o755)
    # Gradients that are zero but for their rounding become no steps of full size.
    recipe = write_text_recipe(tmp_path, max_steps=3, optim_args={"eps": 1e-3}, weight_decay=0.0)
    rows = [json.dumps({"text": word * 3, "label": number % 2}) for number, word in enumerate(string.ascii_letters)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))

    def job(tasks: int, a_node: int, *flags: str, **more: str) -> subprocess.CompletedProcess:
        of_slurm = {"NTASKS": str(tasks), "NTASKS_PER_NODE": str(a_node), "JOB_NODELIST": "node", "JOB_ID": "7"}
        variables = {f"SLURM_{name}": value for name, value in of_slurm.items()} | more
        words = ["bash", str(ROOT / "examples/accelerate/slurm.sh"), recipe, *flags]
        variables = environment(PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}", **variables)
        # Other tests of this process may have left some.
        variables = {
            name: value for name, value in variables.items() if not name.startswith(("FSDP_", "ACCELERATE_USE_FSDP"))
        }
        return subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=280)

    return job


@pytest.mark.slow
@pytest.mark.parametrize(("tasks", "a_node"), [(1, 1), (4, 2)])
def test_a_job_of_slurm_that_was_stopped_is_queued_again(tmp_path, slurm, tasks, a_node):
    """Alone, and as four processes of two nodes, which are one run."""
    stopped = slurm(tasks, a_node, "--deadline_minutes=1e-9")
    assert stopped.returncode == EXIT_CODE, stopped.stderr
    assert " of 3 is saved, and the same command resumes" in stopped.stderr
    assert (tmp_path / "said").read_text().splitlines()[-1] == "requeue 7"
    assert slurm(tasks, a_node).returncode == 0
    assert saved_steps(tmp_path / "run")[-1] == 3
    assert (tmp_path / "said").read_text().count("requeue") == 1
    told = json.loads((tmp_path / "run" / "snapshot" / "training.json").read_text(encoding="utf-8"))
    assert told["samples"] == 3 * tasks * 2 and told["hardware"].startswith(f"{tasks} process")


def test_another_program_of_a_job_goes_on_after_the_signal(tmp_path, slurm):
    program = "import os, sys\nprint(os.environ['RANK'], *sys.argv[1:], flush=True)\n"
    (tmp_path / "program.py").write_text(program + "'last' in sys.argv or os.kill(os.getpid(), 10)")
    stopped = slurm(1, 1, "a  b", PROGRAM="python program.py")
    assert stopped.returncode == 138 and stopped.stdout == f"0 {tmp_path / 'config.yaml'} a  b\n"
    assert (tmp_path / "said").read_text().splitlines()[-1] == "requeue 7"
    done = slurm(2, 1, "last", PROGRAM="python program.py")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2
    assert (tmp_path / "said").read_text().count("requeue") == 1


@pytest.mark.slow
def test_a_sharded_job_goes_on_in_fewer_processes(tmp_path, slurm):
    """With the patch of accelerate that shards on processors."""
    sharded = {"SHARDED": "1", "PROGRAM": "python -m tests.training.sharded", "PYTHONPATH": str(ROOT)}
    stopped = slurm(4, 2, "--deadline_minutes=1e-9", **sharded)
    assert stopped.returncode == EXIT_CODE, stopped.stderr
    done = slurm(2, 1, "--per_device_train_batch_size=4", **sharded)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "run" / "state" / "step-3" / "manifest.json").read_text())
    assert (told["processes"], told["sharding"]) == (2, "FSDP")
    whole = tmp_path / "whole"
    assert slurm(1, 1, "--per_device_train_batch_size=8", f"--output_dir={whole}").returncode == 0
    found, expected = (load_file(run / "snapshot" / "model.safetensors") for run in (tmp_path / "run", whole))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_each_process_of_a_job_knows_its_place_and_sees_the_devices_of_its_node(tmp_path, slurm):
    kinds = ("ACCELERATE_USE_FSDP", "FSDP_", "MASTER_", "CUDA_", "RANK", "LOCAL_", "WORLD_")
    told = f"{{name: os.environ[name] for name in os.environ if name.startswith({kinds})}}"
    # In one piece.
    program = f"import os, socket\nos.write(1, ascii({told}).encode() + b'\\n')\n"
    # The port is free.
    program += "os.environ['RANK'] != '0' or socket.socket().bind(('', int(os.environ['MASTER_PORT'])))"
    (tmp_path / "program.py").write_text(program)
    handed = hand_on(ROOT / "examples/accelerate/fsdp2.yaml", ["--main_process_port", "0"])
    for sharded in ("", "1"):
        done = slurm(4, 2, SHARDED=sharded, PROGRAM="python program.py", CUDA_VISIBLE_DEVICES="0,1")
        assert done.returncode == 0, done.stderr
        told = sorted(map(literal_eval, done.stdout.splitlines()), key=lambda each: each["RANK"])
        assert [(each["RANK"], each["LOCAL_RANK"]) for each in told] == [*zip("0123", "0101", strict=True)]
        (place,) = {(each["MASTER_ADDR"], each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"]) for each in told}
        assert place == ("localhost", "4", "2") and len({each["MASTER_PORT"] for each in told}) == 1
        assert {each["CUDA_VISIBLE_DEVICES"] for each in told} == {"0,1"}
        # What the launcher makes of the file, and without GPUs refused.
        said = {name: value.lower() for name, value in told[0].items() if name.startswith(kinds[:2])}
        assert said.keys() >= {"FSDP_VERSION"} if sharded else not said
        assert said == {name: handed[name].lower() for name in said}
        with pytest.raises(UsageError) if sharded else nullcontext():
            require_devices({**said, "ACCELERATE_USE_CPU": "true"})
    lines = re.findall("#SBATCH --(.*?)=(.*)", (ROOT / "examples/accelerate/slurm.sh").read_text())
    asked = {name: number for name, number in lines if "nodes" in name or "gpu" in name or "tasks" in name}
    assert asked == {"nodes": "2", "ntasks-per-node": "8", "gpus-per-node": "8"}


@pytest.mark.slow
def test_loader_processes_leave_the_decision_to_the_training(tmp_path, examples, alone):
    """A terminal and a scheduler signal all processes of a group."""
    (process,) = start(tmp_path / "run", examples, 1, num_workers=2)
    # Both have given a batch.
    while steps_done(tmp_path / "run") < 3:
        time.sleep(0.001)
    family = psutil.Process(process.pid)
    loaders = family.children()
    assert loaders
    for member in (*loaders, family):
        member.send_signal(signal.SIGTERM)
    finish([process], EXIT_CODE)


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
