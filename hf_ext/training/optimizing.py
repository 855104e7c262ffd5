"""Optimizer, schedule and parameter groups of a run."""

import functools
import inspect
import math
import re
from typing import Any

import accelerate.optimizer
import datasets
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from ..errors import UsageError
from ..settings import refuse_unknown
from .arguments import ParameterRule, TrainingArguments
from .data import count_positions
from .task import Task

# These need a closure, another kind of gradients, or steps of their own.
_OTHER_STEPS = {"LBFGS", "SparseAdam", "Optimizer"}
# At each step accelerate asks twice whether Lomo is installed, an optimizer that is not offered here; to answer, it
# looks through every folder of packages, on a cluster over the network. The answer stays the same: it is kept.
accelerate.optimizer.is_lomo_available = functools.cache(accelerate.optimizer.is_lomo_available)
# Where every process has all of every weight.
_WHOLE_WEIGHTS = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}
# One kernel for all parameters, on processors too, where the plain loop over them is several times slower. Not in
# fp16: the kernel leaves out a step with infinite gradients by itself, and accelerate takes it for one that was made.
_FUSED = {"AdamW", "Adam", "SGD"}


def read_optimizer(arguments: TrainingArguments) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class of a run's optimizer, and its arguments."""
    found = {
        name: kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in _OTHER_STEPS
    }
    if arguments.optim not in found:
        raise UsageError(f"optim must be one of {', '.join(sorted(found))}; got {arguments.optim!r}.")
    kind = found[arguments.optim]
    known = inspect.signature(kind).parameters
    options: dict[str, Any] = {"lr": arguments.learning_rate, "weight_decay": arguments.weight_decay}
    options = {name: value for name, value in options.items() if name in known}
    # `foreach` is another way to make a step.
    if arguments.optim in _FUSED and "foreach" not in arguments.optim_args:
        options["fused"] = arguments.mixed_precision != "fp16"
    if arguments.mixed_precision == "fp16" and arguments.optim_args.get("fused"):
        raise UsageError("optim_args fused hides the steps that fp16 skips: remove fused, or use bf16.")
    # The run has fields of its own for these; a differentiable step is none of a training.
    allowed = [name for name in known if name not in ("params", "lr", "weight_decay", "differentiable")]
    refuse_unknown(arguments.optim_args, allowed, f" in optim_args of {arguments.optim}")
    for field in ("optim_args", "lr_scheduler_kwargs"):
        for name, value in getattr(arguments, field).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{field}.{name} is {value}; allowed: a finite number.")
    return kind, {**options, **arguments.optim_args}


def build_optimizer(task: Task, module: torch.nn.Module, arguments: TrainingArguments) -> torch.optim.Optimizer:
    """An optimizer of torch over the task's groups of parameters, as the run's rules change them."""
    kind, options = read_optimizer(arguments)
    groups = apply_rules(module, task.parameter_groups(module, arguments.weight_decay), arguments.rules)
    try:
        return kind(groups, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"optim {arguments.optim} with optim_args {arguments.optim_args}: {error}") from error


def clip_gradients(accelerator: Accelerator, weights: list[torch.nn.Parameter], norm: float) -> torch.Tensor | None:
    """Clips the common norm of all gradients; the norm before."""
    if accelerator.distributed_type not in _WHOLE_WEIGHTS:
        found: torch.Tensor | None = accelerator.clip_grad_norm_(weights, norm)
        return found
    # As accelerate does for whole weights, but it first reads torch's version and looks at each gradient.
    accelerator.unscale_gradients()
    return torch.nn.utils.clip_grad_norm_(weights, norm)


def clear_gradients(optimizer: AcceleratedOptimizer) -> None:
    """Forgets the gradients of the step that was taken."""
    # To call torch's `zero_grad`, accelerate reads the signature of it each time; DeepSpeed's clears by itself.
    (optimizer.optimizer if type(optimizer) is AcceleratedOptimizer else optimizer).zero_grad()


def apply_rules(
    module: torch.nn.Module, groups: list[dict[str, Any]], rules: list[ParameterRule]
) -> list[dict[str, Any]]:
    """Splits groups by the first rule whose pattern a parameter's name holds; takes frozen parameters out."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    rule_of = {
        parameter: next((rule for rule in rules if re.search(rule.pattern, name)), None)
        for parameter, name in names.items()
    }
    for place, unused in enumerate(rules):
        if unused not in rule_of.values():
            raise UsageError(
                f"parameter_rules[{place}]: no parameter is left for {unused.pattern!r}; names are, for instance, "
                f"{', '.join(list(names.values())[:3])}."
            )
    found = []
    for group in groups:
        for rule in (None, *rules):
            members = [parameter for parameter in group["params"] if rule_of.get(parameter) is rule]
            if rule is not None and rule.freeze:
                for parameter in members:
                    parameter.requires_grad_(False)
            elif members:
                found.append({**group, "params": members, **({} if rule is None else rule.settings)})
    if not found:
        raise UsageError("parameter_rules freeze every parameter: nothing would be trained.")
    return found


def count_steps(
    arguments: TrainingArguments,
    data: datasets.Dataset | datasets.IterableDataset,
    examples_a_step: int,
    groups: np.ndarray | None = None,
) -> int:
    """The steps of `num_train_epochs`."""
    if arguments.num_train_epochs is None:
        return arguments.max_steps
    if isinstance(data, datasets.IterableDataset):
        raise UsageError("num_train_epochs needs the number of examples, unknown for a stream: set max_steps.")
    positions = count_positions(len(data), groups, arguments.per_device_train_batch_size)
    return math.ceil(arguments.num_train_epochs * positions / examples_a_step)


def build_schedule(optimizer: torch.optim.Optimizer, arguments: TrainingArguments) -> LRScheduler:
    """The learning rate of each step; refused where it is less than 0, or more than `learning_rate`."""
    try:
        schedule: LRScheduler = get_scheduler(
            arguments.lr_scheduler_type,
            optimizer,
            num_warmup_steps=arguments.warmup_steps,
            num_training_steps=arguments.max_steps,
            scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
        )
        # All of transformers' are functions of the step, parts of the peak.
        functions = getattr(schedule, "lr_lambdas", [])
        shares = [
            function(int(step)) for function in functions[:1] for step in np.linspace(0, arguments.max_steps, 64)
        ]
        if wrong := [share for share in shares if not 0 <= share <= 1 + 1e-9]:
            raise ValueError(f"the learning rate would become {wrong[0] * arguments.learning_rate:.3g}")
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UsageError(
            f"lr_scheduler_kwargs {arguments.lr_scheduler_kwargs} do not fit {arguments.lr_scheduler_type}: {error}"
        ) from error
    return schedule


def describe_warm_up(arguments: TrainingArguments) -> list[str]:
    """A warning if the warm-up ends after the run, which is right only for a short trial."""
    if arguments.warmup_steps <= arguments.max_steps or arguments.lr_scheduler_type == "constant":
        return []
    peak = arguments.learning_rate * arguments.max_steps / arguments.warmup_steps
    return [
        f"warmup_steps is {arguments.warmup_steps}, max_steps {arguments.max_steps}: the learning rate rises to "
        f"{peak:.3g} and never reaches {arguments.learning_rate:.3g}. For a short run, reduce warmup_steps as well"
    ]
