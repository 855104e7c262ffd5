"""Preparation of a run: processes, folder, data, model, optimizer and loader, from a state or from the seed."""

import contextlib
import math
import os
import random
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import psutil
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, InitProcessGroupKwargs, ProjectConfiguration, convert_outputs_to_fp32
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from tqdm import tqdm

from hf_ext.extras import check_installed

from ..data.bad_examples import BadExamples
from ..data.opening import describe_memory, name_sets, open_source
from ..distributed import FailedElsewhereError, LostProcessError, Ranks
from ..errors import DataError, UsageError
from ..files import read_json, write_json
from ..terminal import is_quiet
from .arguments import TrainingArguments
from .callbacks import Callback
from .changes import Changes, describe_run, fingerprint
from .classes import check_labels, match_classes
from .data import TrainingLoader, check_workers, count_positions, describe_small_groups
from .evaluation import require_examples
from .launcher import check_processes, needs_processors, require_devices
from .models import add_adapter, build_model, enable_activation_checkpointing, pin_revision, refuse_lost_fields
from .optimizing import WHOLE_WEIGHTS, WeightAverage, build_optimizer, build_schedule, describe_warm_up, read_optimizer
from .pushing import PushModels, fetch_run
from .state import Progress, RunFolder, load_state, use_plain_names
from .task import Task


def make_accelerator(arguments: TrainingArguments, folder: Path) -> Accelerator:
    # For one that is not installed accelerate would only warn.
    trackers = [str(tracker) for tracker in get_available_trackers()]
    if missing := [name for name in arguments.trackers if name not in trackers]:
        raise UsageError(
            f"report_to is {missing[0]!r}; installed here are: none, {', '.join(trackers)}. Install it, or use these."
        )
    require_devices()
    # Each process makes the whole model from the seed or a file. With FSDP accelerate's launcher asks by default that
    # only the first one does, which fails for models with buffers.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    # Of an earlier run in this process; accelerate changes no precision.
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != arguments.mixed_precision:
        AcceleratorState._reset_state()
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
        told = f"{text} did not find the others ({reason:.200})"
        raise LostProcessError(f"{told}: start all of them, with one address and a free port.") from error
    finally:
        waiting.cancel()


# Errors of exchanges between processes, in the words of gloo, NCCL and torch.
_LOST = re.compile(r"(?i)gloo|nccl|connection (closed|reset|refused)|pair closure|broken pipe|process group|timed out")


# Where numbers of processes are those of the same ones: a machine, or a container on it.
_SPACE = Path("/proc/self/ns/pid")
_PLACE = f"{socket.gethostname()} {os.readlink(_SPACE) if _SPACE.exists() else ''}"


def _is_running(place: str, number: int) -> bool:
    """False for a process of this machine that is no more; of others nothing can be seen from here."""
    try:
        return place != _PLACE or psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.Error as error:
        return not isinstance(error, psutil.NoSuchProcess)


@contextlib.contextmanager
def name_failures(ranks: Ranks, note: Path) -> Iterator[None]:
    """Reports a failure: the failed process prints its error, and the others name that process, in one line each."""
    # The one that fails leaves a note in the run folder before it ends; the others meet the end of a connection, which
    # tells nothing. For one that was killed, the first who meets that leaves a note, without an error.
    members: list[tuple[str, int]] = []
    try:
        members = ranks.gather((_PLACE, os.getpid()))
        yield
    except Exception as error:
        if ranks.count == 1:
            raise
        is_lost = isinstance(error, LostProcessError) or (isinstance(error, RuntimeError) and _LOST.search(str(error)))
        if not is_lost:
            with contextlib.suppress(OSError):
                write_json(note, {"process": ranks.index, "error": f"{type(error).__name__}: {error}"})
            raise
        told: dict[str, Any] = {"process": None, "error": None}
        end = time.monotonic() + 5
        while not (note.exists() or told["process"]) and time.monotonic() < end:
            time.sleep(0.1)
            ended = [str(index) for index, member in enumerate(members) if not _is_running(*member)]
            told["process"] = ", ".join(ended) or None
        with contextlib.suppress(OSError):
            if note.exists():
                told = read_json(note)
            else:
                write_json(note, told)
        if told["error"] is not None:
            text = f"process {told['process']} of {ranks.count} failed: {told['error']}"
            sys.stderr.write(f"{text}\n")
            raise FailedElsewhereError(text) from None
        reason = str(error).partition("\n")[0]
        who = "another process" if told["process"] is None else f"process {told['process']}"
        raise LostProcessError(
            f"{who} of the {ranks.count} was killed, for instance for want of memory, or busy longer than "
            f"timeout_minutes ({reason:.200}). The same command resumes from the last state."
        ) from None


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


def seed_step(seed: int, device: torch.device) -> None:
    """Seeds what draws random numbers: Python, numpy, torch, and torch on the training's own device."""
    # To the same states as accelerate's `set_seed`, which takes up to a millisecond: for every kind of device that is
    # not there, or not used yet, torch writes down who called, and keeps that for ever.
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


class Run:
    """One process's part in a run, ready to train."""

    def __init__(
        self,
        task: Task,
        arguments: TrainingArguments,
        folder: RunFolder,
        train_dataset: datasets.Dataset | datasets.IterableDataset | None,
        eval_dataset: datasets.Dataset | dict[str, datasets.Dataset] | None,
        callbacks: Sequence[Callback],
    ):
        self.task = task
        self.arguments = arguments
        self.folder = folder
        self.progress = Progress()
        # The step whose state this process has written.
        self.saved_step: int | None = None
        self.metrics: dict[str, float] = {}
        self.metrics_step = -1
        check_installed(*["tensorboard"] * ("tensorboard" in arguments.trackers), "matplotlib")
        if not (isinstance(callbacks, Sequence) and all(isinstance(one, Callback) for one in callbacks)):
            raise UsageError(f"callbacks is {callbacks!r}; allowed: a list of hf_ext.training.Callback objects.")
        self.train_data, self.eval_data = train_dataset, name_sets(eval_dataset)
        for rows in (*[train_dataset] * (train_dataset is not None), *self.eval_data.values()):
            if not isinstance(rows, datasets.Dataset | datasets.IterableDataset):
                raise UsageError(
                    f"train_dataset or eval_dataset is {type(rows).__name__}; allowed: a datasets.Dataset (of rows: "
                    "Dataset.from_list, of a DatasetDict: one split), a stream to train on, a dict of evaluation sets."
                )
        read_optimizer(arguments)
        self.accelerator = make_accelerator(arguments, folder.path)
        publisher = [] if arguments.hub_model_id is None else [PushModels(arguments, folder)]
        self.callbacks = [*callbacks, *publisher] if self.accelerator.is_main_process else []
        self.failures: Counter[str] = Counter()
        ranks = self.ranks = Ranks(self.accelerator)
        with ranks.first_before_others():
            self._open()
        self._build()
        # Only now: what cannot be trained leaves no folder behind.
        self.start, self.changes = ranks.ask_first(self._prepare)
        self._warn()

    def _open(self) -> None:
        """The run folder, looked at by the main process, and the data."""
        accelerator, sources = self.accelerator, self.arguments.data_arguments
        if accelerator.is_main_process:
            kind = accelerator.distributed_type
            sharding = kind.value if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED) else None
            if sharding and self.arguments.hub_strategy == "checkpoint":
                raise UsageError(f"states of {sharding} are not pushed: choose another hub_strategy.")
            if self.arguments.resume_from_checkpoint is not None:
                fetch_run(self.arguments.resume_from_checkpoint, self.folder)
            about = describe_run(self.arguments, accelerator.num_processes, sharding)
            self.folder.check(self.arguments, about, type(self.task))
        if self.train_data is None:
            self.train_data = open_source(sources.require_train_source(), "data.train")
        self.eval_sources = {name: describe_memory(data) for name, data in self.eval_data.items()}
        if not self.eval_data:
            self.eval_sources = sources.eval_sources
            self.eval_data = {name: open_source(source, "data.eval") for name, source in self.eval_sources.items()}
        for rows in self.eval_data.values():
            require_examples(rows)
        if isinstance(self.train_data, datasets.Dataset) and len(self.train_data) == 0:
            raise DataError("the training data is empty: check data.train.path and data.train.split.")
        pushes_best = self.arguments.hub_model_id is not None and self.arguments.hub_strategy == "best"
        needs = "early_stopping_patience" if self.arguments.early_stopping_patience else "hub_strategy best"
        if not self.eval_data and (self.arguments.early_stopping_patience or pushes_best):
            raise UsageError(f"{needs} needs an evaluation: set data.eval, or change {needs}.")
        if accelerator.is_main_process:
            self.folder.check_data(fingerprint(self.train_data, self.arguments.data.get("train")))

    def _prepare(self) -> tuple[int | None, Changes]:
        """Prepares the folder; the step from which the run continues, and how it has changed since then."""
        if self.groups is not None and self.folder.changes.new_batch_size:
            told = f"{self.folder.path}: per_device_train_batch_size must stay"
            raise DataError(f"{told}, as each batch has pictures of one size.")
        self.folder.check_classes(getattr(self.task, "known_classes", None))
        self.folder.prepare()
        return self.folder.start, self.folder.changes

    def _warn(self) -> None:
        """Warns of changes since the last state, and of settings that are probably unintended."""
        arguments, folder = self.arguments, self.folder
        small = describe_small_groups(self.groups, arguments.per_device_train_batch_size)
        warnings = [*small, *describe_warm_up(arguments), *arguments.data_arguments.overlaps]
        changes = [f"changed since step {self.start}: {text}" for text in self.changes.notes]
        for text in [*(f"warning: {text}" for text in warnings), *folder.notes, *changes]:
            self._say(f"{text}.")

    def _build(self) -> None:
        """Model, optimizer, schedule and average; equal on all processes, as the seed is."""
        arguments = self.arguments
        seed_step(arguments.seed, self.accelerator.device)
        assert self.train_data is not None
        check_workers(self.train_data, arguments.data_arguments.num_workers, self.accelerator.num_processes)
        with self.ranks.share_scans():
            self.groups = self.task.read_data(self.train_data)
        if (epochs := arguments.num_train_epochs) is not None:
            if isinstance(self.train_data, datasets.IterableDataset):
                raise UsageError("num_train_epochs needs the number of examples, unknown for a stream: set max_steps.")
            positions = count_positions(len(self.train_data), self.groups, arguments.per_device_train_batch_size)
            steps = math.ceil(epochs * positions / self._batch_size)
            arguments = self.arguments = replace(arguments, max_steps=steps)
            self.folder.notes.append(f"num_train_epochs {epochs:g}: {steps} steps, in place of max_steps")
        init_from = None if arguments.init_from is None else pin_revision(arguments.init_from)
        module = build_model(self.task, arguments.model, init_from, "adapt" if arguments.peft else "train")
        self.train_data = match_classes(self.train_data, self.task, "the training data")
        self.eval_data = {name: match_classes(data, self.task) for name, data in self.eval_data.items()}
        for name, rows in self.eval_data.items():
            check_labels(rows, self.task, self.eval_sources[name])
        if arguments.peft is not None and init_from is not None:
            refuse_lost_fields(module, arguments.model, init_from, self.task.changes_beside(init_from))
            module = add_adapter(module, arguments.peft, init_from)
        if arguments.activation_checkpointing:
            enable_activation_checkpointing(module)
        if arguments.torch_compile:
            # In place: wrapping would rename the parameters.
            module.compile()
        self.names = [*module.state_dict()]
        if arguments.optim in ("Muon", "OneBit") and self.accelerator.distributed_type not in WHOLE_WEIGHTS:
            raise UsageError(f"optim {arguments.optim} needs whole weights; FSDP and DeepSpeed shard them: use AdamW.")
        optimizer = build_optimizer(self.task, module, arguments)
        self.scheduler = build_schedule(optimizer, arguments)
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            # DeepSpeed asks for the one where it is given no loader of its own, and clips to 1 without the other.
            config = self.accelerator.state.deepspeed_plugin.deepspeed_config
            config["train_micro_batch_size_per_gpu"] = arguments.per_device_train_batch_size
            config["gradient_clipping"] = arguments.max_grad_norm
        self.is_sharded = self.accelerator.distributed_type == DistributedType.FSDP
        if self.is_sharded:
            # By itself accelerate has FSDP2 cast all weights and inputs to bf16, which keeps 8 bits: timesteps above
            # 256 and sizes of pictures would be rounded, and what meets buffers in float32 fails. Here weights are
            # gathered as they are, twice the bytes, and the forward pass runs under autocast.
            plugin = self.accelerator.state.fsdp_plugin
            plugin.mixed_precision_policy = MixedPrecisionPolicy()
            # What accelerate would wrap for it gets other names; the model does it in place.
            plugin.activation_checkpointing = False
            if self.accelerator.native_amp:
                autocast = self.accelerator.autocast()
                module.forward = convert_outputs_to_fp32(autocast(module.forward))  # type: ignore[method-assign]
        self.ranks.wait()  # for the slowest disk: `prepare` exchanges tensors, which has a time limit
        self.model, self.optimizer = self.accelerator.prepare(module, optimizer)
        self.weights = list(self.model.parameters())
        self.module = self.accelerator.unwrap_model(self.model)
        self.average = WeightAverage(self.module, arguments.ema_decay) if arguments.ema_decay else None
        use_plain_names(self.accelerator)
        # Where the weights are sharded, every process saves its part of the average; else the main process saves it.
        whole_average = [] if self.average is None or self.is_sharded else [self.average]
        self.sharded_average = None if whole_average else self.average
        self.accelerator.register_for_checkpointing(self.progress, self.scheduler, *whole_average)

    def resume(self) -> None:
        stream_states = None
        if self.start is not None:
            found = load_state(self.accelerator, self.folder, self.start, self.sharded_average)
            stream_states = None if self.changes.new_data else found
            self._say(f"continuing {self.folder.path} from step {self.progress.step}")
        if self.changes.new_evaluation:
            # Scores on other data cannot be compared.
            self.progress.best_step, self.progress.best_value, self.progress.stale = -1, float("nan"), 0
            self.progress.scored = {}
        if self.accelerator.is_main_process:
            self.folder.truncate_metrics(self.progress)
        self.ranks.wait()
        for row in self.folder.read_metrics():
            if names := [name for name in row if name.startswith("eval_")]:
                self.metrics = {name.removeprefix("eval_"): row[name] for name in names}
                self.metrics_step = row["step"]
        sources, rank = self.arguments.data_arguments, self.accelerator.process_index
        assert self.train_data is not None
        total = None if isinstance(self.train_data, datasets.IterableDataset) else len(self.train_data)
        listed = f"bad_examples{f'-{rank}' if rank else ''}.jsonl"
        self.loader = TrainingLoader(
            self.train_data,
            sources.train_source,
            self.task.training_sample,
            self.arguments.seed,
            self.arguments.per_device_train_batch_size,
            sources.num_workers,
            rank,
            self.accelerator.num_processes,
            first_batch=self.progress.step * self.arguments.gradient_accumulation_steps,
            stream_states=stream_states,
            groups=self.groups,
            bad=BadExamples(sources.max_bad_examples, total, self.folder.path / listed),
        )

    @property
    def _batch_size(self) -> int:
        passes = self.arguments.gradient_accumulation_steps * self.accelerator.num_processes
        return self.arguments.per_device_train_batch_size * passes

    def _say(self, text: str) -> None:
        if self.accelerator.is_main_process and not is_quiet():
            tqdm.write(text, file=sys.stderr)
