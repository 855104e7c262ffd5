"""Checks and actions that training processes share."""

import contextlib
import os
import random
import re
import sys
import threading
import time
from collections.abc import Collection, Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration, convert_outputs_to_fp32
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from ..distributed import FailedElsewhereError, LostProcessError, Ranks
from ..errors import UsageError
from ..files import read_json, write_json
from .arguments import TrainingArguments
from .launcher import check_processes, needs_processors, require_devices, require_own_device
from .optimizing import own_part
from .state import RunFolder


def check_trackers(names: list[str]) -> None:
    """Refuses a tracker that is not installed, for which accelerate would only warn."""
    trackers = [str(tracker) for tracker in get_available_trackers()]
    if missing := [name for name in names if name not in trackers]:
        raise UsageError(
            f"report_to is {missing[0]!r}; installed here are: none, {', '.join(trackers)}. Install it, or use these."
        )


def make_accelerator(arguments: TrainingArguments, folder: Path) -> Accelerator:
    """Creates the accelerator, which connects the processes of this launch."""
    require_devices()
    require_own_device()
    # Each process makes the whole model from the seed or a file. With FSDP accelerate's launcher asks by default that
    # only the first one does, which fails for models with buffers.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    with _meeting():
        accelerator = Accelerator(
            cpu=needs_processors(),
            mixed_precision=arguments.mixed_precision,
            gradient_accumulation_steps=arguments.gradient_accumulation_steps,
            log_with=arguments.trackers or None,
            project_config=ProjectConfiguration(str(folder), str(folder / "tensorboard")),
            # It would wrap the model, which renames its weights: `torch_compile` compiles it in place.
            dynamo_backend="no",
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(minutes=arguments.timeout_minutes))],
        )
    check_processes(accelerator.num_processes)
    if arguments.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise ValueError("mixed_precision fp16 needs a GPU: use bf16 or 'no' on a CPU.")
    return accelerator


@contextlib.contextmanager
def _meeting() -> Iterator[None]:
    """The time in which the processes of a launch find each other: a long wait and a failure are named."""
    address, port = (os.environ.get(f"MASTER_{name}", "?") for name in ("ADDR", "PORT"))
    text = f"process {os.environ.get('RANK', '?')} of {os.environ.get('WORLD_SIZE', '?')}, at {address}:{port},"
    waiting = threading.Timer(60, lambda: sys.stderr.write(f"{text} waits for the others.\n"))
    waiting.daemon = True
    waiting.start()
    try:
        yield
    except torch.distributed.DistError as error:
        reason = str(error).partition("\n")[0]
        raise LostProcessError(
            f"{text} did not find the others ({reason:.200}): start all of them, with one address and a free port."
        ) from error
    finally:
        waiting.cancel()


# Errors of exchanges between processes, in the words of gloo, NCCL and torch.
_LOST = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|pair closure|broken pipe|process group|timed out", re.IGNORECASE
)


@contextlib.contextmanager
def name_failures(ranks: Ranks, note: Path) -> Iterator[None]:
    """Reports a failure: the failed process prints its error, and the others name that process, in one line each."""
    # The one that fails leaves a note in the run folder before it ends; the others meet the end of a connection, which
    # tells nothing. A process that was killed leaves no note.
    try:
        yield
    except Exception as error:
        if ranks.count == 1:
            raise
        is_lost = isinstance(error, LostProcessError) or (isinstance(error, RuntimeError) and _LOST.search(str(error)))
        if not is_lost:
            with contextlib.suppress(OSError):
                write_json(note, {"process": ranks.index, "error": f"{type(error).__name__}: {error}"})
            raise
        end = time.monotonic() + 5
        while not note.exists() and time.monotonic() < end:
            time.sleep(0.1)
        if note.exists():
            told = read_json(note)
            text = f"process {told['process']} of {ranks.count} failed: {told['error']}"
            sys.stderr.write(f"{text}\n")
            raise FailedElsewhereError(text) from None
        reason = str(error).partition("\n")[0]
        raise LostProcessError(
            f"another process of the {ranks.count} was killed, for instance for want of memory, or busy longer than "
            f"timeout_minutes ({reason:.200}). The same command resumes from the last state."
        ) from None


def prepare_sharding(module: torch.nn.Module, accelerator: Accelerator) -> None:
    """Lets a model whose weights FSDP2 will shard compute in the run's precision as a whole one does."""
    # By itself accelerate has FSDP2 cast all weights and inputs to bf16, which keeps 8 bits: timesteps above 256 and
    # sizes of pictures would be rounded, and what meets buffers in float32 fails. Here weights are gathered as they
    # are, twice the bytes, and the forward pass runs under autocast, which chooses what is computed how.
    accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy()
    # What accelerate would wrap for it gets other names; the model does it in place.
    accelerator.state.fsdp_plugin.activation_checkpointing = False
    if accelerator.native_amp:
        module.forward = convert_outputs_to_fp32(accelerator.autocast()(module.forward))  # type: ignore[method-assign]


def gather_weights(
    model: torch.nn.Module, accelerator: Accelerator, names: Collection[str]
) -> dict[str, torch.Tensor]:
    """All weights by the bare model's names, for the main process; what is tied is one tensor."""
    # Gathered from several processes, a weight with two names comes as two tensors; a file holds it once.
    weights: dict[str, torch.Tensor] = accelerator.get_state_dict(model)
    first: dict[torch.Tensor, str] = {}
    for name, parameter in accelerator.unwrap_model(model).named_parameters(remove_duplicate=False):
        if name in weights:
            weights[name] = weights[first.setdefault(parameter, name)]
    if accelerator.is_main_process and (strange := sorted({*weights} ^ {*names})):
        # A model that is loaded from such a file would begin at random, and nobody would be told.
        raise RuntimeError(f"weights would be saved under other names than the model's own: {strange[:4]}.")
    return weights


@contextlib.contextmanager
def plain_class(model: torch.nn.Module) -> Iterator[None]:
    """Gives a model that FSDP2 shards its own class back for a `with` block."""
    # FSDP2 puts a class of torch's over it, whose name and source files would be saved as the model's own.
    kind: type[torch.nn.Module] = type(model)
    if isinstance(model, FSDPModule):
        model.__class__ = next(base for base in kind.__mro__ if not issubclass(base, FSDPModule))  # type: ignore[assignment]
    try:
        yield
    finally:
        model.__class__ = kind


def check_weights(model: torch.nn.Module, accelerator: Accelerator, run: RunFolder, step: int) -> None:
    """Refuses to save weights that are not finite: a gradient may overflow in a step whose loss was still finite."""
    bad = torch.zeros((), device=accelerator.device)
    for parameter in model.parameters():
        bad += (~own_part(parameter).isfinite()).sum()
    if accelerator.reduce(bad) > 0:
        raise FloatingPointError(describe_divergence(run, step))


def describe_divergence(run: RunFolder, step: int, what: str = "weights are no longer finite after step") -> str:
    """A sentence on weights or a loss that are not finite."""
    return (
        f"{what} {step}; {run.last_good}. Lower learning_rate or max_grad_norm, lengthen warmup_steps, use "
        "mixed_precision: bf16 or 'no', and check the data for NaN."
    )


def seed_step(seed: int, device: torch.device) -> None:
    """Seeds what draws random numbers in a step: Python, numpy, torch, and torch on the training's own device."""
    # To the same states as accelerate's `set_seed`, which takes up to a millisecond: for every kind of device that is
    # not there, or not used yet, torch writes down who called, and keeps that for ever.
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def weigh_batches(found: list[torch.Tensor | None], accelerator: Accelerator) -> torch.Tensor | None:
    """The weight of each batch's mean loss in the mean of the step; None if all weigh the same."""
    # Accelerate takes the mean over the passes, DDP that over the processes. A mean of means is the mean of all values
    # only where each was taken of equally many: n_i values of N in all are worth n_i / N in place of 1 in passes ·
    # processes. All worths together are the number of batches.
    counts = [count for count in found if count is not None]
    if len(counts) < len(found):
        return None
    mine = torch.stack(counts).to(accelerator.device, torch.float32)
    total = accelerator.reduce(mine.sum(), reduction="sum")
    return mine * (len(found) * accelerator.num_processes) / total.clamp_min(1)
