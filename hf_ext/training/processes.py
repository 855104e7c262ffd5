"""What training processes check and do together."""

import random
from collections.abc import Callable

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import broadcast_object_list

from .arguments import TrainingArguments
from .state import RunFolder, own_part


def check_tracker(name: str) -> None:
    """Refuses a tracker that is not installed, for which accelerate would only warn."""
    trackers = [str(tracker) for tracker in get_available_trackers()]
    if name not in ("none", *trackers):
        raise ValueError(
            f"report_to is {name!r}; installed here are: none, {', '.join(trackers)}. Install the tracker that you "
            "want, or use one of these."
        )


def check_supported(arguments: TrainingArguments, accelerator: Accelerator) -> None:
    """Refuses what this machine, or the way in which it is used, cannot do."""
    if arguments.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise ValueError("mixed_precision fp16 needs a GPU: use bf16 or 'no' on a CPU.")


def run_main_first(accelerator: Accelerator, function: Callable[[], None]) -> None:
    """Calls a function on the main process, then on the others; where it fails there, it fails everywhere."""
    failure: list[str | None] = [None]
    if accelerator.is_main_process:
        try:
            function()
        except (ValueError, TypeError, OSError) as error:
            broadcast_object_list([str(error)])
            raise
    broadcast_object_list(failure)
    if failure[0] is not None:
        raise ValueError(failure[0])
    if not accelerator.is_main_process:
        function()


def check_weights(model: torch.nn.Module, accelerator: Accelerator, run: RunFolder, step: int) -> None:
    """Refuses to save weights that are not finite: a gradient may overflow in a step whose loss was still finite."""
    bad = torch.zeros((), device=accelerator.device)
    for parameter in model.parameters():
        bad += (~own_part(parameter).isfinite()).sum()
    if accelerator.reduce(bad) > 0:
        raise FloatingPointError(
            f"weights are no longer finite after step {step}; {run.last_good}. Lower learning_rate or max_grad_norm, "
            "or lengthen warmup_steps."
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
