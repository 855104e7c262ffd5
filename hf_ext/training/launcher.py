"""Settings of `accelerate launch`, its file, `ACCELERATE_*` and torchrun: honoured as our own flags, or refused."""

# A launcher hands its settings on in the environment. accelerate itself reads some, ignores some, and turns some into
# other things without a word. Here each is read once, before any data: what the loop can do becomes the field of
# `TrainingArguments` that says the same, so that args.json and the check of a continued run know it; what it cannot
# do is refused. docs/training.md has the table, tests/training/test_launcher.py a test a row.

import os
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from .arguments import TrainingArguments

# Ways to share a model out that the loop does not know, by what tells them.
_OTHER_WAYS = {
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
    "ACCELERATE_USE_SAGEMAKER": "SageMaker",
    "ACCELERATE_IN_TPU_POD": "a TPU pod",
}
_RANKS = ("LOCAL_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def honour_launcher(
    arguments: TrainingArguments, environment: Mapping[str, str] = os.environ
) -> tuple[TrainingArguments, list[str]]:
    """
    Reads what a launcher asks for.

    Args:
        arguments ([`TrainingArguments`]): The run, as its file and flags describe it.
        environment (`Mapping[str, str]`): The variables of this process.

    Returns:
        `tuple[TrainingArguments, list[str]]`: The run with the launcher's settings, and a sentence for each.

    Raises:
        ValueError: If a setting contradicts the run's, or is none that the loop can honour.
    """
    _refuse_other_ways(environment)
    _refuse_lost_processes(environment)
    changes = {**_read_precision(arguments, environment), **_read_compiling(arguments, environment)}
    if _is_on(environment, "ACCELERATE_USE_FSDP"):
        changes |= _read_fsdp(arguments, environment)
    if _is_on(environment, "ACCELERATE_USE_DEEPSPEED"):
        _check_deepspeed(arguments, environment)
    _check_accumulation(arguments, environment)
    notes = [f"{name}: {value}, as the launcher says" for name, value in changes.items()]
    return replace(arguments, **changes), notes


def has_devices() -> bool:
    """Tells whether torch can compute on something other than processors."""
    import torch

    return torch.accelerator.is_available()


def needs_processors(environment: Mapping[str, str] = os.environ) -> bool:
    """Tells whether accelerate has to be told that the processes of this launch compute on processors."""
    # It notices by itself in a launch of one process. Of several, each would train alone, as if it were the first.
    return "LOCAL_RANK" in environment and not has_devices()


def require_devices(environment: Mapping[str, str] = os.environ) -> None:
    """Refuses sharding where there is no GPU: accelerate would fall back to plain copies, or end with a traceback."""
    for name, what in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")):
        if _is_on(environment, name) and (_is_on(environment, "ACCELERATE_USE_CPU") or not has_devices()):
            raise ValueError(
                f"accelerate is told to use {what}, which needs GPUs, and this run has none: give another file with "
                "--config_file, such as examples/accelerate/ddp_2_cpu.yaml, or start it with hf-ext train."
            )


def check_processes(found: int, environment: Mapping[str, str] = os.environ) -> None:
    """Refuses a launch whose processes did not all find each other."""
    told = _read_number(environment, "WORLD_SIZE", 1) if "LOCAL_RANK" in environment else 1
    if found != told:
        raise ValueError(
            f"the launcher started {told} processes, and this one found {found}: accelerate was set up before the "
            "training, without the others. Take that out of the script."
        )


def _is_on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").lower() in ("1", "true", "yes", "y", "on", "t")


def _read_number(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name, str(default))
    if not value.strip().isdigit():
        raise ValueError(f"{name} is {value!r} in the environment; allowed: a whole number.")
    return int(value)


def _refuse_other_ways(environment: Mapping[str, str]) -> None:
    for name, what in _OTHER_WAYS.items():
        if _is_on(environment, name):
            raise ValueError(
                f"accelerate is told to use {what} ({name}), which this training does not know; allowed: one process, "
                "DDP, FSDP2, and DeepSpeed with zero_stage 1 or 2."
            )


def _refuse_lost_processes(environment: Mapping[str, str]) -> None:
    """Refuses `accelerate launch --cpu --num_processes 2`, which starts one process and says nothing."""
    # All that is left of the number is the address at which the processes would have met.
    alone = not any(name in environment for name in _RANKS) and _read_number(environment, "WORLD_SIZE", 1) == 1
    if alone and _is_on(environment, "ACCELERATE_USE_CPU") and {"KMP_AFFINITY", "MASTER_PORT"} <= environment.keys():
        raise ValueError(
            "accelerate launch was given several processes on CPUs (MASTER_PORT is set) and started one. Take "
            "--config_file examples/accelerate/ddp_2_cpu.yaml, which starts as many as it says; for one process unset "
            "MASTER_PORT."
        )


def _read_precision(arguments: TrainingArguments, environment: Mapping[str, str]) -> dict[str, Any]:
    # Without a setting of its own the launcher says "no".
    told = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if told in ("", "no", arguments.mixed_precision):
        return {}
    if told not in ("bf16", "fp16"):
        raise ValueError(f"accelerate is told mixed_precision {told!r}; allowed: 'no', 'bf16', 'fp16'.")
    if arguments.mixed_precision != "no":
        raise ValueError(
            f"mixed_precision is {arguments.mixed_precision} in the recipe and {told} in the configuration of "
            "accelerate (ACCELERATE_MIXED_PRECISION): say the same in both, or 'no' there."
        )
    return {"mixed_precision": told}


def _read_compiling(arguments: TrainingArguments, environment: Mapping[str, str]) -> dict[str, Any]:
    told = environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if told in ("", "no"):
        return {}
    mode = environment.get("ACCELERATE_DYNAMO_MODE", "default")
    switches = [f"use_{name}" for name in ("fullgraph", "dynamic", "regional_compilation")]
    others = [name for name in switches if _is_on(environment, f"ACCELERATE_DYNAMO_{name.upper()}")]
    others += [] if mode == "default" else [f"mode {mode}"]
    if told != "inductor" or others:
        raise ValueError(
            f"accelerate is told to compile with dynamo_backend {told}{''.join(f', {name}' for name in others)}; "
            "allowed: 'inductor' in its default mode, which is --torch_compile true, or 'no'."
        )
    return {} if arguments.torch_compile else {"torch_compile": True}


def _read_fsdp(arguments: TrainingArguments, environment: Mapping[str, str]) -> dict[str, Any]:
    if (version := environment.get("FSDP_VERSION", "1")) != "2":
        raise ValueError(
            f"FSDP {version} is not supported: set fsdp_version: 2 in the file of accelerate, as in "
            "examples/accelerate/fsdp2.yaml."
        )
    if _is_on(environment, "FSDP_OFFLOAD_PARAMS"):
        raise ValueError("fsdp_offload_params is not supported: set it to false in the file of accelerate.")
    wanted = _is_on(environment, "FSDP_ACTIVATION_CHECKPOINTING") and not arguments.activation_checkpointing
    return {"activation_checkpointing": True} if wanted else {}


def _check_deepspeed(arguments: TrainingArguments, environment: Mapping[str, str]) -> None:
    if find_spec("deepspeed") is None:
        raise ValueError("accelerate is told to use DeepSpeed, which is not installed: pip install deepspeed.")
    if (file := environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")).lower() != "none":
        raise ValueError(
            f"deepspeed_config_file {file} is not supported, as it repeats what the recipe says: write zero_stage "
            "into the file of accelerate, as in examples/accelerate/deepspeed_zero2.yaml."
        )
    stage = _read_number(environment, "ACCELERATE_DEEPSPEED_ZERO_STAGE", 2)
    if stage not in (1, 2):
        raise ValueError(f"DeepSpeed's zero_stage {stage} is not supported: set it to 1 or 2, or use FSDP2.")
    clipping = environment.get("ACCELERATE_GRADIENT_CLIPPING", "none").lower()
    if clipping != "none" and float(clipping) != arguments.max_grad_norm:
        raise ValueError(
            f"max_grad_norm is {arguments.max_grad_norm} in the recipe and gradient_clipping {clipping} in the "
            "configuration of accelerate: say the same in both."
        )
    precision = _read_precision(arguments, environment).get("mixed_precision", arguments.mixed_precision)
    if arguments.ema_decay and precision != "no":
        # It keeps the model itself in 16 bits, in which an average that moves little does not move at all.
        raise ValueError(
            f"DeepSpeed with mixed_precision {precision} has no weights in 32 bits to average: set ema_decay to 0 or "
            "mixed_precision to 'no', or use FSDP2."
        )


def _check_accumulation(arguments: TrainingArguments, environment: Mapping[str, str]) -> None:
    """Refuses a launcher that was told another number of passes, which would go before the recipe's."""
    wanted = arguments.gradient_accumulation_steps
    told = _read_number(environment, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", wanted)
    if told != wanted:
        raise ValueError(
            f"gradient_accumulation_steps is {wanted} in the recipe and {told} in the configuration of accelerate "
            "(ACCELERATE_GRADIENT_ACCUMULATION_STEPS): take it out there, or say the same number."
        )
