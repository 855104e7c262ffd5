"""What a launcher is told is honoured as a flag of ours, or refused before anything is read."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from safetensors.torch import load_file

from hf_ext.distributed import LostProcessError
from hf_ext.errors import UsageError
from hf_ext.training import launcher
from hf_ext.training.launcher import check_processes, honour_launcher, needs_processors, require_devices
from hf_ext.training.run import gather_weights, make_accelerator
from tests.kit import warm_python
from tests.kit.process_state import forget_accelerate
from tests.kit.refusals import refused

from .launching import ROOT, environment, free_port
from .tiny import TinyTask, make_arguments, run, write_text_recipe

# A YAML file of accelerate and flags of `accelerate launch`, fields of ours, and the fields that come of it; None
# where it is refused. docs/training.md has them in words.
PAIR = {"distributed_type": "MULTI_GPU", "num_processes": 2}
ACCELERATE = ROOT / "examples" / "accelerate"
FSDP2, ZERO2 = (yaml.safe_load((ACCELERATE / name).read_text()) for name in ("fsdp2.yaml", "deepspeed_zero2.yaml"))
MUCH = {**ZERO2, "deepspeed_config": {"zero_stage": 2, "gradient_clipping": "much"}}
CHECKPOINTING = {**FSDP2, "fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True}}
SIZES = {**FSDP2, "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}}
OFFLOADING = {**FSDP2, "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True}}
IGNORING = {**FSDP2, "fsdp_config": {"fsdp_version": 2, "fsdp_ignored_modules": "norm"}}
COPIES = {**FSDP2, "fsdp_config": {"fsdp_version": 2, "fsdp_sharding_strategy": "NO_SHARD"}}
ROWS = {
    "nothing": ({}, [], {}, {}),
    "precision": ({"mixed_precision": "bf16"}, [], {}, {"mixed_precision": "bf16"}),
    "precision as a flag": ({}, ["--mixed_precision", "fp16"], {}, {"mixed_precision": "fp16"}),
    "equal precision": ({"mixed_precision": "bf16"}, [], {"mixed_precision": "bf16"}, {}),
    "another precision": ({"mixed_precision": "fp16"}, [], {"mixed_precision": "bf16"}, None),
    "inductor": ({}, ["--dynamo_backend", "inductor"], {}, {"torch_compile": True}),
    "inductor of a file": ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, [], {}, {"torch_compile": True}),
    "eager": ({}, ["--dynamo_backend", "eager"], {}, None),
    "another mode": ({}, ["--dynamo_backend", "inductor", "--dynamo_mode", "max-autotune"], {}, None),
    "whole graphs": ({}, ["--dynamo_backend", "inductor", "--dynamo_use_fullgraph"], {}, None),
    "fsdp 2": (FSDP2, [], {}, {}),
    "fsdp 1": ({**FSDP2, "fsdp_config": {"fsdp_version": 1}}, [], {}, None),
    "fsdp with checkpointing": (CHECKPOINTING, [], {}, {"activation_checkpointing": True}),
    "fsdp with offloading": (OFFLOADING, [], {}, None),
    "fsdp by sizes": (SIZES, [], {}, None),
    "fsdp of groups": (FSDP2, ["--fsdp_sharding_strategy", "HYBRID_SHARD"], {}, None),
    "fsdp of copies": (COPIES, [], {}, None),
    "fsdp without modules": (IGNORING, [], {}, None),
    "offloaded activations": (CHECKPOINTING, ["--fsdp_activation_checkpointing_offload", "true"], {}, None),
    "zero 2": (ZERO2, [], {}, {}),
    "zero 3": (ZERO2, ["--zero_stage", "3"], {}, None),
    "zero 2 with offloading": (ZERO2, ["--offload_optimizer_device", "cpu"], {}, None),
    "zero 2 with offloaded weights": (ZERO2, ["--offload_param_device", "nvme"], {}, None),
    "zero 2 with experts": (ZERO2, ["--deepspeed_moe_layer_cls_names", "Block"], {}, None),
    "zero 2 with an average": (ZERO2, ["--mixed_precision", "bf16"], {"ema_decay": 0.9}, None),
    "zero 2 in bf16": (ZERO2, ["--mixed_precision", "bf16"], {}, {"mixed_precision": "bf16"}),
    "another clipping": (ZERO2, ["--gradient_clipping", "0.5"], {}, None),
    "equal clipping": (ZERO2, ["--gradient_clipping", "1"], {}, {}),
    "a clipping that is none": (MUCH, [], {}, None),
    "automatic clipping": ({**MUCH, "deepspeed_config": {"gradient_clipping": "auto"}}, [], {}, {}),
    "another accumulation": (ZERO2, ["--gradient_accumulation_steps", "4"], {}, None),
    "a file of deepspeed": ({**ZERO2, "deepspeed_config": {"deepspeed_config_file": "a.json"}}, [], {}, None),
    "several on processors": ({}, ["--cpu", "--num_processes", "2"], {}, None),
    "one on processors": ({}, ["--cpu", "--num_processes", "1"], {}, {}),
    "megatron": ({"distributed_type": "MEGATRON_LM", "num_processes": 2}, [], {}, None),
    "parallelism": ({**PAIR, "parallelism_config": {"parallelism_config_tp_size": 2}}, [], {}, None),
}
# Variables with which a run is refused; those of the first rows bring accelerate to a traceback.
FSDP = "ACCELERATE_USE_FSDP=true FSDP_VERSION=2 FSDP_"
TORCHRUN = "LOCAL_RANK=0 RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=1"
REFUSED = [
    *("ACCELERATE_USE_CPU=maybe", "ACCELERATE_USE_CPU=", "ACCELERATE_DEBUG_MODE=maybe", "ACCELERATE_DEBUG_MODE="),
    *(f"{FSDP}{name}=quark" for name in ("STATE_DICT_TYPE", "AUTO_WRAP_POLICY", "BACKWARD_PREFETCH")),
    *(f"{FSDP}{name}=quark" for name in ("RESHARD_AFTER_FORWARD", "OFFLOAD_PARAMS", "IGNORED_MODULES")),
    # To accelerate this is no FSDP, to its own launcher it is.
    "ACCELERATE_USE_FSDP=1 FSDP_VERSION=2",
    *("ACCELERATE_DYNAMO_USE_FULLGRAPH=maybe", "ACCELERATE_CPU_AFFINITY=maybe", "ACCELERATE_FP8_BACKEND=TE"),
    *("ACCELERATE_MIXED_PRECISION=fp8", f"{TORCHRUN} RANK=1", "PMI_SIZE=two", "PMI_RANK=two"),
    *("ACCELERATE_LOG_LEVEL=loud", "ACCELERATE_DYNAMO_BACKEND=quark", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4"),
    *(f"ACCELERATE_{name}=true" for name in ("IN_TPU_POD", "USE_SAGEMAKER", "USE_PARALLELISM_CONFIG")),
    "ACCELERATE_USE_DEEPSPEED=true ACCELERATE_DEEPSPEED_ZERO_STAGE=3",
    *(f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={value}" for value in ("", "auto", "-1", "²", "1.0")),
    *(f"{TORCHRUN} {name}=two" for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT")),
]
HONOURED = [
    *(TORCHRUN, "LOCAL_RANK=-1", "WORLD_SIZE=2", "PMI_SIZE=1", "ACCELERATE_USE_CPU=1 ACCELERATE_DEBUG_MODE=YES"),
    # Without FSDP these say nothing.
    "FSDP_VERSION=1 FSDP_OFFLOAD_PARAMS=true",
]
# The address at which this test's own processes meet.
INHERITED = ("MASTER_ADDR", "MASTER_PORT", "KMP_AFFINITY", "LOCAL_RANK", "WORLD_SIZE", "RANK")


def write_file(tmp_path: Path, settings: dict) -> Path:
    file = tmp_path / "accelerate" / "default_config.yaml"
    file.parent.mkdir(exist_ok=True)
    one = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "num_processes": 1, "num_machines": 1}
    file.write_text(yaml.safe_dump({**one, "machine_rank": 0, **settings}))
    return file


def hand_on(file: Path, flags: list[str]) -> dict[str, str]:
    """The environment that `accelerate launch` starts a process with."""
    words = ["--config_file", str(file), *flags, "script.py"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ""
        return prepare_deepspeed_cmd_env(arguments)[1]
    if arguments.use_fsdp or arguments.use_megatron_lm or arguments.multi_gpu:
        return prepare_multi_gpu_env(arguments)
    return prepare_simple_launcher_cmd_env(arguments)[1]


@pytest.fixture
def bare(monkeypatch):
    """An environment without words for a training."""
    for name in (*INHERITED, *[name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("row", ROWS)
def test_each_setting_of_a_launcher_is_honoured_or_refused(row, tmp_path, monkeypatch, bare):
    settings, flags, fields, changes = ROWS[row]
    # DeepSpeed is not installed where tests run; some ports may be taken.
    monkeypatch.setattr(launcher, "find_spec", lambda name: name)
    handed = hand_on(write_file(tmp_path, settings), [*flags, "--main_process_port", "0"])
    arguments = make_arguments(tmp_path / "run", {}, gradient_accumulation_steps=1, **{"ema_decay": 0.0, **fields})
    if changes is None:
        with pytest.raises(ValueError):
            honour_launcher(arguments, handed)
        return
    found, notes = honour_launcher(arguments, handed)
    assert {name: value for name, value in vars(found).items() if vars(arguments)[name] != value} == changes
    assert len(notes) == len(changes)
    # Once more, as the loop does after the launch.
    assert honour_launcher(found, handed) == (found, [])


def read_words(text: str) -> dict[str, str]:
    return dict(word.split("=") for word in text.split(" "))


@pytest.mark.parametrize("variables", [*REFUSED, *HONOURED])
def test_odd_values_of_variables_are_named(tmp_path, variables):
    arguments = make_arguments(tmp_path / "run", {}, gradient_accumulation_steps=1)
    told = read_words(variables)
    if variables in HONOURED:
        assert honour_launcher(arguments, told) == (arguments, [])
        return
    with refused(UsageError) as caught:
        honour_launcher(arguments, told)
    assert any(name in str(caught.value) for name in told)


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    for told in ("quark", "", "meta", "cuda:99"):
        with refused(UsageError, "ACCELERATE_TORCH_DEVICE"):
            require_devices({"ACCELERATE_TORCH_DEVICE": told})
    require_devices({"ACCELERATE_TORCH_DEVICE": "cpu"})
    require_devices({})
    monkeypatch.setattr(launcher, "has_devices", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    require_devices({"ACCELERATE_TORCH_DEVICE": "cuda:1"})
    # All processes of a launch would take it.
    with refused(UsageError, "ACCELERATE_TORCH_DEVICE"):
        require_devices({"ACCELERATE_TORCH_DEVICE": "cuda:1", **read_words(f"{TORCHRUN} WORLD_SIZE=2")})


@pytest.mark.parametrize("devices", [False, True])
def test_sharding_without_gpus_is_refused_and_processes_on_processors_are_found(monkeypatch, devices):
    monkeypatch.setattr(launcher, "has_devices", lambda: devices)
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        with pytest.raises(ValueError):
            require_devices({name: "true", "ACCELERATE_USE_CPU": "true"})
        if devices:
            require_devices({name: "true"})
    # Of MPI or a cluster. On processors accelerate finds them, once it is told to; on GPUs it knows nothing of them.
    cluster = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for told in ({"OMPI_COMM_WORLD_SIZE": "2"}, cluster, {"LOCAL_RANK": "0"}):
        assert needs_processors(told) == (not devices)
    for told in ({"OMPI_COMM_WORLD_SIZE": "2"}, cluster):
        check_processes(2, told)
        with refused(UsageError, "2"):
            check_processes(1, told)
    assert not needs_processors({})
    check_processes(1, {"WORLD_SIZE": "2"})


def test_deepspeed_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(launcher, "find_spec", lambda name: None)
    with refused(UsageError, "deepspeed"):
        honour_launcher(make_arguments(Path("run"), {}), {"ACCELERATE_USE_DEEPSPEED": "true"})


def test_what_a_launcher_says_is_the_run(tmp_path, examples, monkeypatch):
    launched = make_arguments(tmp_path / "launched", examples, max_steps=2)
    with monkeypatch.context() as patch:
        patch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        run(TinyTask(), launched)
    run(TinyTask(), make_arguments(tmp_path / "flag", examples, max_steps=2, mixed_precision="bf16"))
    folders = [tmp_path / name for name in ("launched", "flag")]
    told = [json.loads((folder / "args.json").read_text())["arguments"] for folder in folders]
    assert {**told[0], "output_dir": ""} == {**told[1], "output_dir": ""}
    first, second = ((folder / "snapshot" / "model.safetensors").read_bytes() for folder in folders)
    assert first == second
    # Without the launcher's word it would be another run.
    with pytest.raises(ValueError):
        run(TinyTask(), launched)


def test_weights_under_other_names_are_not_saved(tmp_path):
    forget_accelerate()
    accelerator, model, names = Accelerator(cpu=True), torch.nn.Linear(2, 2), ["weight", "bias"]
    assert {*gather_weights(model, accelerator, names)} == {*names}
    with pytest.raises(RuntimeError):
        gather_weights(torch.nn.Sequential(model), accelerator, names)


# How processes are started; the module and the recipe follow.
LAUNCHERS = {
    "accelerate": ["-m", "accelerate.commands.launch", "--main_process_port", "0"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    "python": [],
}


def start(
    tmp_path: Path, launcher: str, settings: dict, flags: list[str], module: str = "hf_ext.training", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Starts a small run by a launcher whose file lies in the home folder, with no word of ours but variables."""
    write_file(tmp_path, settings)
    command = [sys.executable, *LAUNCHERS[launcher], *flags, "-m", module, str(tmp_path / "config.yaml")]
    hidden = (*INHERITED, "ACCELERATE_USE_CPU")
    kept = {name: value for name, value in environment().items() if name not in hidden}
    told = {**kept, "HF_HOME": str(tmp_path), **variables}
    return subprocess.run(command, cwd=ROOT, env=told, capture_output=True, text=True, timeout=280)


# Real launches that cannot be honoured: all refused rows, and sharding on processors.
SHARDED = {"fsdp_config": {"fsdp_version": 2, "fsdp_cpu_ram_efficient_loading": True}, "mixed_precision": "fp16"}
LAUNCHES = {row: (file, flags, fields) for row, (file, flags, fields, changes) in ROWS.items() if changes is None}
LAUNCHES["cpu"] = {**FSDP2, **SHARDED}, ["--fsdp_sync_module_states", "true"], {}


@pytest.mark.parametrize("row", [pytest.param(row, marks=[pytest.mark.slow] * (row != "eager")) for row in LAUNCHES])
def test_every_refusal_in_a_real_launch(tmp_path, row):
    settings, flags, fields = LAUNCHES[row]
    if "DEEPSPEED" in str(settings) and find_spec("deepspeed") is None:
        pytest.skip("the launcher itself asks for DeepSpeed")
    write_text_recipe(tmp_path, max_steps=1, **fields)
    # What is refused is so before data is read.
    (tmp_path / "data.jsonl").unlink()
    done = start(tmp_path, "accelerate", settings, flags)
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    # Of both processes.
    assert len(told) in (1, 2) and len({*told}) == 1 and "data.jsonl" not in told[0], done.stderr
    # The launcher's own traceback tells that a process failed; none of ours does.
    assert "hf_ext/training/" not in done.stderr.replace("\\", "/"), done.stderr
    assert not (tmp_path / "run").exists()


# Starts a training in a process for each of the environments.
_EACH = """
import json, os, sys
from hf_ext.training.launch import main, read_arguments
read_arguments(sys.argv[1], [])
for told in map(json.loads, sys.argv[2:]):
    if not os.fork():
        os.environ.update(told)
        os._exit(main(sys.argv[1:2]))
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.mark.slow
def test_every_refusal_of_variables_in_a_real_process(tmp_path, bare):
    config = write_text_recipe(tmp_path, max_steps=1)
    (tmp_path / "data.jsonl").unlink()
    alone = "ACCELERATE_TORCH_DEVICE=cuda:99", "ACCELERATE_TORCH_DEVICE=quark"
    told = [read_words(row) for row in (*REFUSED, *alone)]
    # What the launcher starts with where DeepSpeed is installed.
    for settings, flags, fields in LAUNCHES.values():
        if "DEEPSPEED" in str(settings) and not fields:
            handed = hand_on(write_file(tmp_path, settings), [*flags, "--main_process_port", "0"])
            told.append({name: value for name, value in handed.items() if os.environ.get(name) != value})
    done = warm_python.run([sys.executable, "-c", _EACH, config, *map(json.dumps, told)], cwd=ROOT, env=os.environ)
    assert done.stdout.split() == ["2"] * len(told), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(told)
    for line, row in zip(lines, told, strict=True):
        assert any(name in line or name.removeprefix("ACCELERATE_").lower() in line for name in row), line
    assert not (tmp_path / "run").exists()


def test_processes_that_do_not_find_each_other_say_so(tmp_path, monkeypatch):
    port = free_port()
    told = f"RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
    for name, value in read_words(told).items():
        monkeypatch.setenv(name, value)
    forget_accelerate()
    with refused(LostProcessError, "process 1 of 2", f"127.0.0.1:{port}"):
        make_accelerator(make_arguments(tmp_path, {}, timeout_minutes=0.01), tmp_path)


# Real launches that are honoured: a launcher, its file and words, variables, and what a state tells of it.
SWITCHES = {**PAIR, "gpu_ids": "98,99", "enable_cpu_affinity": True, "debug": True}
CPU = "ACCELERATE_TORCH_DEVICE=cpu ACCELERATE_GRADIENT_ACCUMULATION_STEPS=1"
TAKEN = {
    "precision": ("accelerate", {"mixed_precision": "bf16"}, [], {}, {"mixed_precision": "bf16"}),
    "inductor": ("accelerate", {}, ["--dynamo_backend", "inductor"], {}, {"torch_compile": True}),
    "cpu": ("accelerate", {}, ["--cpu"], {}, {}),
    # They train together, not each alone, and need no word for it.
    "two": ("accelerate", PAIR, [], {}, {"processes": 2}),
    "switches": ("accelerate", SWITCHES, [], {}, {"processes": 2}),
    "torchrun": ("torchrun", {}, [], {}, {"processes": 2}),
    "no launcher": ("python", {"mixed_precision": "bf16"}, [], read_words(CPU), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", TAKEN)
def test_a_real_launch_that_is_honoured(tmp_path, row):
    launcher, settings, flags, variables, changes = TAKEN[row]
    write_text_recipe(tmp_path, max_steps=1)
    check_launched(tmp_path, start(tmp_path, launcher, settings, flags, **variables), **changes)


def check_launched(tmp_path: Path, done: subprocess.CompletedProcess[str], **changes: object) -> None:
    """The run is complete, its state tells the same settings, and its weights have the names of the model."""
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "run" / "state" / "step-1" / "manifest.json").read_text())
    told |= told["arguments"]
    usual = {"mixed_precision": "no", "torch_compile": False, "activation_checkpointing": False}
    expected = {**usual, "processes": 1, "sharding": None, **changes}
    assert {name: told[name] for name in expected} == expected
    names = load_file(tmp_path / "run" / "snapshot" / "model.safetensors").keys()
    assert "classifier.weight" in names, names


@pytest.mark.slow
@pytest.mark.parametrize("row", [FSDP2, CHECKPOINTING, ZERO2], ids=["fsdp", "checkpointing", "deepspeed"])
def test_a_real_launch_that_is_sharded(tmp_path, row):
    """On processors, by a patch of accelerate; all else is as a launcher starts it."""
    kind = row["distributed_type"]
    if kind == "DEEPSPEED":
        pytest.importorskip("deepspeed")
    write_text_recipe(tmp_path, max_steps=1)
    done = start(tmp_path, "accelerate", row, [], "tests.training.sharded", DS_ACCELERATOR="cpu")
    changes = {"activation_checkpointing": row is CHECKPOINTING, "processes": 2, "sharding": kind}
    check_launched(tmp_path, done, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"), ("RANK", "WORLD_SIZE")]
)
def test_processes_of_mpi_or_a_cluster_train_together(tmp_path, names):
    """Started without LOCAL_RANK, as mpirun does."""
    config, place = write_text_recipe(tmp_path, max_steps=1), {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    kept = {name: value for name, value in environment(**place).items() if name != "ACCELERATE_USE_CPU"}
    command = [sys.executable, "-m", "hf_ext.training", config]
    both = [
        subprocess.Popen(command, cwd=ROOT, env={**kept, **dict(zip(names, (rank, "2"), strict=True))})
        for rank in "01"
    ]
    assert [process.wait(280) for process in both] == [0, 0]
    assert json.loads((tmp_path / "run" / "args.json").read_text())["processes"] == 2
