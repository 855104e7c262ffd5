"""Optimizer, schedule, parameter groups and weight average of a run."""

import contextlib
import functools
import inspect
import math
from collections.abc import Iterator
from itertools import compress
from pathlib import Path
from typing import Any, cast

import accelerate.optimizer
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from ..errors import UsageError
from ..settings import refuse_unknown
from .arguments import SCHEDULES_WITHOUT_END, TrainingArguments
from .optimizers import MuonWithAdamW, OneBit, list_matrices
from .task import Task

# These need a closure, another kind of gradients, or steps of their own.
_OTHER_STEPS = {"LBFGS", "SparseAdam", "Optimizer"}
# At each step accelerate asks twice whether Lomo is installed, an optimizer that is not offered here; to answer, it
# looks through every folder of packages, on a cluster over the network. The answer stays the same: it is kept.
accelerate.optimizer.is_lomo_available = functools.cache(accelerate.optimizer.is_lomo_available)
# Where every process has all of every weight.
WHOLE_WEIGHTS = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}
# One kernel for all parameters, on processors too, where the plain loop over them is several times slower. Not in
# fp16: the kernel leaves out a step with infinite gradients by itself, and accelerate takes it for one that was made.
_FUSED = {"AdamW", "Adam", "SGD"}


def read_optimizer(arguments: TrainingArguments) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    found = {
        name: kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in _OTHER_STEPS
    }
    found |= {"Muon": MuonWithAdamW, "OneBit": OneBit}
    if arguments.optim not in found:
        raise UsageError(f"optim must be one of {', '.join(sorted(found))}; got {arguments.optim!r}.")
    kind = found[arguments.optim]
    if kind is OneBit and (arguments.init_from is None or arguments.ema_decay):
        told = "optim OneBit trains the signs of the difference from init_from, and an average has more than signs"
        raise UsageError(f"{told}: set init_from, and leave ema_decay out.")
    known = inspect.signature(kind).parameters
    options: dict[str, Any] = {"lr": arguments.learning_rate, "weight_decay": arguments.weight_decay}
    options = {name: value for name, value in options.items() if name in known}
    # `foreach` is another way to make a step.
    if arguments.optim in _FUSED and "foreach" not in arguments.optim_args:
        options["fused"] = arguments.mixed_precision != "fp16"
    if arguments.mixed_precision == "fp16" and arguments.optim_args.get("fused"):
        raise UsageError("optim_args fused hides the steps that fp16 skips: remove fused, or use bf16.")
    # The run has fields of its own for these; a differentiable step is none of a training.
    allowed = [name for name in known if name not in ("params", "matrices", "lr", "weight_decay", "differentiable")]
    refuse_unknown(arguments.optim_args, allowed, f" in optim_args of {arguments.optim}")
    for field in ("optim_args", "lr_scheduler_kwargs"):
        for name, value in getattr(arguments, field).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{field}.{name} is {value}; allowed: a finite number.")
    return kind, {**options, **arguments.optim_args}


def build_optimizer(task: Task, module: torch.nn.Module, arguments: TrainingArguments) -> torch.optim.Optimizer:
    kind, options = read_optimizer(arguments)
    groups = [group for group in task.parameter_groups(module, arguments.weight_decay) if group["params"]]
    # What the run asks for goes before what the method advises.
    groups = [{name: value for name, value in group.items() if name not in arguments.optim_args} for group in groups]
    try:
        if kind is MuonWithAdamW:
            return kind(groups, matrices=list_matrices(module), **options)
        return kind(groups, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"optim {arguments.optim} with optim_args {arguments.optim_args}: {error}") from error


def clip_gradients(accelerator: Accelerator, weights: list[torch.nn.Parameter], norm: float) -> torch.Tensor | None:
    """Clips the common norm of all gradients; the norm before."""
    if accelerator.distributed_type not in WHOLE_WEIGHTS:
        return cast(torch.Tensor | None, accelerator.clip_grad_norm_(weights, norm))
    # As accelerate does for whole weights, but it first reads torch's version and looks at each gradient.
    accelerator.unscale_gradients()
    return torch.nn.utils.clip_grad_norm_(weights, norm)


def clear_gradients(optimizer: AcceleratedOptimizer) -> None:
    # To call torch's `zero_grad`, accelerate reads the signature of it each time; DeepSpeed's clears by itself.
    (optimizer.optimizer if type(optimizer) is AcceleratedOptimizer else optimizer).zero_grad()


def build_schedule(optimizer: torch.optim.Optimizer, arguments: TrainingArguments) -> LRScheduler:
    """The learning rate of each step; refused where it is less than 0, or more than `learning_rate`."""
    try:
        if arguments.lr_scheduler_kwargs and arguments.lr_scheduler_type in SCHEDULES_WITHOUT_END[:2]:
            raise ValueError("it has none, and transformers would leave them out")
        schedule: LRScheduler = get_scheduler(
            arguments.lr_scheduler_type,
            optimizer,
            num_warmup_steps=arguments.warmup_steps,
            num_training_steps=arguments.max_steps,
            scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
        )
        # All of transformers' are functions of the step, parts of the peak.
        functions = getattr(schedule, "lr_lambdas", [])
        shares = [part(int(step)) for part in functions[:1] for step in np.linspace(0, arguments.max_steps, 64)]
        if wrong := [share for share in shares if not 0 <= share <= 1 + 1e-9]:
            raise ValueError(f"the learning rate would become {wrong[0] * arguments.learning_rate:.3g}")
    except (TypeError, ValueError, ArithmeticError) as error:
        told = f"{arguments.lr_scheduler_kwargs} do not fit {arguments.lr_scheduler_type}"
        raise UsageError(f"lr_scheduler_kwargs {told}: {error}") from error
    return schedule


def describe_warm_up(arguments: TrainingArguments) -> Iterator[str]:
    """A warning if there is no warm-up, or if it ends after the run, which is right only for a short trial."""
    warm_up, steps, rate = arguments.warmup_steps, arguments.max_steps, arguments.learning_rate
    if warm_up and arguments.lr_scheduler_type == "constant":
        yield f"lr_scheduler_type constant does not use warmup_steps {warm_up}: constant_with_warmup does"
    elif warm_up > steps:
        yield (
            f"warmup_steps is {warm_up}, max_steps {steps}: the learning rate rises to {rate * steps / warm_up:.3g} "
            f"and never reaches {rate:.3g}. For a short run, reduce warmup_steps as well"
        )


def own_part(tensor: Tensor) -> Tensor:
    """This process's part of a weight: all of it, or a part, where the weights are sharded."""
    # A tensor of its own only then, which FSDP2 may have padded since it was last asked for.
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class WeightAverage:
    """Exponential moving average of a model's parameters and saved floating-point buffers."""

    # The decay is reached from below, as (1 + t) / (10 + t), so that the first weights are soon forgotten. Statistics
    # such as those of BatchNorm belong to the averaged weights: they are averaged over the same horizon. Frozen
    # parameters and integer buffers are copied. One kernel goes over all tensors: a loop over them costs more than the
    # optimizer's step. Of a sharded model each process averages its part of every weight, and nothing is exchanged.

    def __init__(self, model: torch.nn.Module, decay: float):
        self.model = model
        self.decay = decay
        self.steps = 0
        saved = model.state_dict(keep_vars=True)
        named = dict(model.named_parameters()) | {name: part for name, part in model.named_buffers() if name in saved}
        self.names, self.tensors = [*named], [*named.values()]
        self.averages = [own_part(tensor).detach().clone() for tensor in self.tensors]
        frozen = {id(parameter) for parameter in model.parameters() if not parameter.requires_grad}
        follows = [tensor.is_floating_point() and id(tensor) not in frozen for tensor in self.tensors]
        copies = [not moves for moves in follows]
        self._averages, self._followed = (list(compress(items, follows)) for items in (self.averages, self.tensors))
        self._copies, self._copied = (list(compress(items, copies)) for items in (self.averages, self.tensors))

    @torch.no_grad()
    def step(self) -> None:
        """Takes the current weights into the average."""
        decay = min((1 + self.steps) / (10 + self.steps), self.decay) if self.steps else 0.0
        self.steps += 1
        # The parameters stay the same objects: loading and optimizers write into them, and FSDP2 replaces them before
        # the average is made.
        torch._foreach_lerp_(self._averages, [own_part(tensor) for tensor in self._followed], 1 - decay)
        if self._copies:
            torch._foreach_copy_(self._copies, [own_part(tensor) for tensor in self._copied])

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """Puts the averaged weights into the model for the duration of a `with` block."""
        kept = [own_part(tensor).detach().clone() for tensor in self.tensors]
        self._fill_model(self.averages)
        try:
            yield
        finally:
            self._fill_model(kept)

    @torch.no_grad()
    def _fill_model(self, values: list[Tensor]) -> None:
        torch._foreach_copy_([own_part(tensor) for tensor in self.tensors], values)
        # FSDP2 keeps what the last forward pass gathered of the outer modules for a backward pass, which comes at once
        # in training. After an evaluation the next step would compute with it, not with what was filled in here.
        for part in self.model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def state_dict(self) -> dict[str, Any]:
        return {"shadow_params": self.averages, "optimization_step": self.steps}

    def _list_shards(self) -> dict[str, Any]:
        """The averages by name, each as the part of a whole that this process holds; they share its memory."""
        shards = {"optimization_step": torch.tensor(self.steps)}
        for name, tensor, average in zip(self.names, self.tensors, self.averages, strict=True):
            shards[name] = average
            if isinstance(tensor, DTensor):
                mesh, places, shape = tensor.device_mesh, tensor.placements, tensor.shape
                shards[name] = DTensor.from_local(average, mesh, places, shape=shape, stride=tensor.stride())
        return shards

    def save_shards(self, folder: Path) -> None:
        checkpoint.save(self._list_shards(), storage_writer=checkpoint.FileSystemWriter(folder))

    def load_shards(self, folder: Path) -> None:
        """Restores [`~WeightAverage.save_shards`], written by any number of processes."""
        shards = self._list_shards()
        checkpoint.load(shards, storage_reader=checkpoint.FileSystemReader(folder))
        self.steps = int(shards["optimization_step"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["optimization_step"]
        for average, saved in zip(self.averages, state["shadow_params"], strict=True):
            average.copy_(saved)
