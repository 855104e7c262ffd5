"""Settings of `accelerate launch`, its file, `ACCELERATE_*` and torchrun, applied like our own flags or refused."""

# A launcher hands its settings on in the environment. accelerate itself reads some, ignores some, and turns some into
# other things without a word. Here each is read once, before any data: what the loop can do becomes the field of
# `TrainingArguments` that says the same, so that args.json and the check of a continued run know it; what it cannot
# do is refused. docs/training.md has the table, tests/training/test_launcher.py a test a row.

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from ..errors import UsageError
from .arguments import TrainingArguments

# Variables with the number of processes of MPI and similar launchers.
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_RANKS = tuple(name.replace("SIZE", "RANK") for name in _SIZES)
_NUMBERS = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", *_SIZES, *_RANKS)
_ON, _OFF = ("true", "1", "yes", "y", "on", "t"), ("false", "0", "no", "n", "off", "f")
_FSDP, _DEEPSPEED, _COMPILING = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DYNAMO_BACKEND"
# Allowed values of variables, the default first; with a switch before them they count only where that is on. On others
# accelerate fails, ignores them, or does with them what the loop cannot: other kinds of sharding, other compilers.
_ALLOWED: list[tuple[str, str, tuple[str, ...]]] = [
    ("", "ACCELERATE_USE_CPU ACCELERATE_DEBUG_MODE ACCELERATE_CPU_AFFINITY FORK_LAUNCHED", (*_OFF, *_ON)),
    ("", "ACCELERATE_USE_MEGATRON_LM ACCELERATE_USE_PARALLELISM_CONFIG ACCELERATE_USE_SAGEMAKER", _OFF),
    ("", "ACCELERATE_IN_TPU_POD ACCELERATE_DYNAMO_USE_FULLGRAPH ACCELERATE_DYNAMO_USE_DYNAMIC", _OFF),
    ("", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", _OFF),
    ("", f"{_FSDP} {_DEEPSPEED}", ("false", "true")),
    ("", "ACCELERATE_MIXED_PRECISION", ("no", "", "bf16", "fp16")),
    ("", "ACCELERATE_FP8_BACKEND", ("no",)),
    ("", _COMPILING, ("no", "", "inductor")),
    ("", "ACCELERATE_DYNAMO_MODE", ("default",)),
    ("", "ACCELERATE_LOG_LEVEL", ("warning", "debug", "info", "error", "critical")),
    (_FSDP, "FSDP_VERSION", ("2",)),
    (_FSDP, "FSDP_OFFLOAD_PARAMS FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", _OFF),
    (_FSDP, "FSDP_ACTIVATION_CHECKPOINTING", (*_OFF, *_ON)),
    (_FSDP, "FSDP_RESHARD_AFTER_FORWARD", (*_ON, *_OFF)),
    # Of the first version; the second shards everything, whatever it says.
    (_FSDP, "FSDP_SHARDING_STRATEGY", ("full_shard", "1")),
    (_FSDP, "FSDP_STATE_DICT_TYPE", ("sharded_state_dict", "full_state_dict")),
    (_FSDP, "FSDP_AUTO_WRAP_POLICY", ("transformer_based_wrap", "no_wrap")),
    (_FSDP, "FSDP_BACKWARD_PREFETCH", ("backward_pre", "backward_post", "no_prefetch")),
    (_FSDP, "FSDP_IGNORED_MODULES", ("none",)),
    (_DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE", ("2", "1")),
    (_DEEPSPEED, "ACCELERATE_DEEPSPEED_CONFIG_FILE ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", ("none",)),
    (_DEEPSPEED, "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", ("none",)),
    (_DEEPSPEED, "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", ("",)),
]


def honour_launcher(
    arguments: TrainingArguments, environment: Mapping[str, str] = os.environ
) -> tuple[TrainingArguments, list[str]]:
    """The run with the launcher's settings, and a sentence for each; a `UsageError` where one cannot be honoured."""
    # Without a version accelerate takes the first.
    given = {"FSDP_VERSION": "1", **environment}
    for switch, names, words in _ALLOWED:
        for name in names.split() if not switch or _is_on(environment, switch) else ():
            if (value := given.get(name, words[0])).lower() not in words:
                # A file of accelerate has the same names, in small letters.
                setting, known = name.removeprefix("ACCELERATE_").lower(), ", ".join(filter(None, words))
                raise UsageError(f"accelerate is configured with {setting} {value!r} ({name}); allowed: {known}.")
    _refuse_lost_processes(environment)
    # Without a setting of its own the launcher says "no".
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "").lower()
    checkpoints = _is_on(environment, _FSDP) and _is_on(environment, "FSDP_ACTIVATION_CHECKPOINTING")
    told: dict[str, Any] = {
        "mixed_precision": arguments.mixed_precision if precision in ("", "no") else precision,
        "torch_compile": arguments.torch_compile or environment.get(_COMPILING, "").lower() == "inductor",
        "activation_checkpointing": arguments.activation_checkpointing or checkpoints,
    }
    passes, name = arguments.gradient_accumulation_steps, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    same: list[tuple[str, Any, str]] = [("gradient_accumulation_steps", _read_number(environment, name, passes), name)]
    if arguments.mixed_precision != "no":
        same.append(("mixed_precision", told["mixed_precision"], "ACCELERATE_MIXED_PRECISION"))
    clipping: Any = environment.get("ACCELERATE_GRADIENT_CLIPPING", "auto").lower()
    if _is_on(environment, _DEEPSPEED) and clipping != "auto":
        with contextlib.suppress(ValueError):
            clipping = float(clipping)
        same.append(("max_grad_norm", clipping, "gradient_clipping"))
    for field, value, name in same:
        if (own := getattr(arguments, field)) != value:
            raise UsageError(f"{field} is {own} in the recipe, {value} for accelerate ({name}): set the same in both.")
    changed = replace(arguments, **told)
    if _is_on(environment, _DEEPSPEED) and find_spec("deepspeed") is None:
        raise UsageError("accelerate is configured for DeepSpeed, which is not installed: pip install deepspeed.")
    if _is_on(environment, _DEEPSPEED) and changed.ema_decay and changed.mixed_precision != "no":
        # It keeps the model itself in 16 bits, in which an average that moves little does not move at all.
        text = f"DeepSpeed with mixed_precision {changed.mixed_precision} keeps no weights in 32 bits for the average"
        raise UsageError(f"{text}: set ema_decay to 0 or mixed_precision to 'no', or use FSDP2.")
    differ = [name for name, value in told.items() if getattr(arguments, name) != value]
    return changed, [f"{name}: {told[name]}, set by the launcher" for name in differ]


def has_devices() -> bool:
    import torch

    return torch.accelerator.is_available()


def needs_processors(environment: Mapping[str, str] = os.environ) -> bool:
    """True if accelerate must be set to CPUs for the processes of this launch."""
    # It notices by itself in a launch of one process. Of several, each would train alone, as if it were the first.
    return ("LOCAL_RANK" in environment or _count_started(environment) > 1) and not has_devices()


def require_devices(environment: Mapping[str, str] = os.environ) -> None:
    """Refuses sharding without GPUs, a device that this machine lacks, and one that several processes would share."""
    import torch

    is_sharded = _is_on(environment, _FSDP) or _is_on(environment, _DEEPSPEED)
    if is_sharded and (_is_on(environment, "ACCELERATE_USE_CPU") or not has_devices()):
        # accelerate would fall back to plain copies, or end with a traceback.
        text = "accelerate is configured for FSDP or DeepSpeed, which need GPUs, and this machine has none"
        raise UsageError(f"{text}: give another --config_file, or use hf-ext train.")
    allowed = ["cpu"]
    if has_devices() and (kind := torch.accelerator.current_accelerator()) is not None:
        numbered = [f"{kind.type}:{index}" for index in range(torch.accelerator.device_count())]
        allowed = ["cpu", kind.type, *numbered] if _count_started(environment) == 1 else []
    if (told := environment.get("ACCELERATE_TORCH_DEVICE")) is not None and told not in allowed:
        raise UsageError(f"ACCELERATE_TORCH_DEVICE is {told!r}; allowed: {', '.join(allowed) or 'none'}. Unset it.")


def check_processes(found: int, environment: Mapping[str, str] = os.environ) -> None:
    """Refuses a launch whose processes did not all find each other."""
    if found != (told := _count_started(environment)):
        advice = "use accelerate launch or torchrun, and a script that does not initialise accelerate itself"
        raise UsageError(f"the launcher started {told} processes, and this one found {found}: {advice}.")


def _count_started(environment: Mapping[str, str]) -> int:
    """The number of processes that a launcher started, this one among them."""
    # A container of a cluster may have WORLD_SIZE alone, and nobody to wait for.
    if "LOCAL_RANK" in environment or {"RANK", "MASTER_ADDR"} <= environment.keys():
        return _read_number(environment, "WORLD_SIZE", 1)
    return max(_read_number(environment, name, 1) for name in _SIZES)


def _is_on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").lower() in _ON


def _read_number(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name, str(default))
    if not (value.isascii() and value.isdigit()):
        raise UsageError(f"{name} is {value!r} in the environment; allowed: a whole number.")
    return int(value)


def _refuse_lost_processes(environment: Mapping[str, str]) -> None:
    """Refuses `accelerate launch --cpu --num_processes 2`, which starts one process and says nothing."""
    numbers = {name: _read_number(environment, name, 0) for name in _NUMBERS if environment.get(name) != "-1"}
    if "RANK" in environment and numbers["RANK"] >= (started := _count_started(environment)):
        raise UsageError(f"RANK is {numbers['RANK']} in the environment; allowed: less than WORLD_SIZE, {started}.")
    # All that is left of the number is the address at which the processes would have met.
    alone = "LOCAL_RANK" not in environment and max(numbers[name] for name in ("WORLD_SIZE", *_SIZES)) < 2
    if alone and _is_on(environment, "ACCELERATE_USE_CPU") and {"KMP_AFFINITY", "MASTER_PORT"} <= environment.keys():
        raise UsageError(
            "accelerate launch was given several processes on CPUs (MASTER_PORT is set) and started one: use "
            "--config_file examples/accelerate/ddp_2_cpu.yaml, or for one process, unset MASTER_PORT."
        )
