"""Preparation of a run: folder, data, model, optimizer and loader, from a state or from the seed."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import datasets
from accelerate.utils import DistributedType, set_seed
from tqdm import tqdm

from hf_ext.distributed import Ranks
from hf_ext.extras import check_installed

from ..data.opening import describe_memory, match_classes, name_sets, open_source
from ..errors import DataError, UsageError
from ..terminal import is_quiet
from .arguments import TrainingArguments
from .bad_examples import BadExamples
from .callbacks import Callback, Onlookers, check_callbacks
from .changes import describe_run, fingerprint
from .data import TrainingLoader, describe_small_groups
from .models import add_adapter, build_model, enable_activation_checkpointing, pin_revision, refuse_lost_fields
from .optimizing import (
    WeightAverage,
    build_optimizer,
    build_schedule,
    count_steps,
    describe_warm_up,
    read_optimizer,
)
from .processes import check_trackers, make_accelerator, prepare_sharding
from .pushing import PushModels, fetch_run
from .state import Progress, RunFolder, load_state, use_plain_names
from .task import Task


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
        self.metrics: dict[str, float] = {}
        check_installed(*["tensorboard"] * ("tensorboard" in arguments.trackers), "matplotlib")
        check_trackers(arguments.trackers)
        check_callbacks(callbacks)
        read_optimizer(arguments)
        self.accelerator = make_accelerator(arguments, folder.path)
        publisher = [] if arguments.hub_model_id is None else [PushModels(arguments, folder)]
        self.callbacks = [*callbacks, *publisher] if self.accelerator.is_main_process else []
        self.train_data, self.eval_data = train_dataset, name_sets(eval_dataset)
        self.onlookers = Onlookers(arguments.strict_callbacks)
        ranks = self.ranks = Ranks(self.accelerator, timedelta(minutes=arguments.timeout_minutes))
        with ranks.first_before_others():
            self._open()
        self._build()
        # Only now: what cannot be trained leaves no folder behind.
        with ranks.first_before_others():
            self._prepare()
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
            self.folder.check(self.arguments, about)
        if self.train_data is None:
            self.train_data = open_source(sources.require_train_source(), "data.train")
        self.eval_sources = {name: describe_memory(data) for name, data in self.eval_data.items()}
        if not self.eval_data:
            self.eval_sources = sources.eval_sources
            self.eval_data = {name: open_source(source, "data.eval") for name, source in self.eval_sources.items()}
        needs = {
            "early_stopping_patience": self.arguments.early_stopping_patience > 0,
            "hub_strategy best": self.arguments.hub_model_id is not None and self.arguments.hub_strategy == "best",
        }
        if not self.eval_data and (given := [name for name, is_given in needs.items() if is_given]):
            raise UsageError(f"{given[0]} needs an evaluation: set data.eval, or change {given[0]}.")
        if accelerator.is_main_process:
            self.folder.check_data(fingerprint(self.train_data, self.arguments.data.get("train")))

    def _prepare(self) -> None:
        if not self.accelerator.is_main_process:
            return
        if self.groups is not None and self.folder.changes.new_batch_size:
            raise DataError(
                f"{self.folder.path}: per_device_train_batch_size must stay, as each batch has pictures of one size."
            )
        self.folder.prepare()

    def _warn(self) -> None:
        """Warns of changes since the last state, and of settings that are probably unintended."""
        arguments, folder = self.arguments, self.folder
        small = describe_small_groups(self.groups, arguments.per_device_train_batch_size)
        warnings = [*small, *describe_warm_up(arguments), *arguments.data_arguments.overlaps]
        changes = [f"changed since step {folder.start}: {text}" for text in folder.changes.notes]
        for text in [*(f"warning: {text}" for text in warnings), *folder.notes, *changes]:
            self._say(f"{text}.")

    def _build(self) -> None:
        """Model, optimizer, schedule and average; equal on all processes, as the seed is."""
        arguments = self.arguments
        set_seed(arguments.seed)
        self.train_data = match_classes(self.train_data, self.task, training=True)
        self.groups = self.task.read_data(self.train_data)
        if (epochs := arguments.num_train_epochs) is not None:
            steps = count_steps(arguments, epochs, self.train_data, self._batch_size, self.groups)
            arguments = self.arguments = replace(arguments, max_steps=steps)
        init_from = None if arguments.init_from is None else pin_revision(arguments.init_from)
        module = build_model(self.task, arguments.model, init_from)
        self.eval_data = {name: match_classes(data, self.task) for name, data in self.eval_data.items()}
        if arguments.peft is not None and init_from is not None:
            refuse_lost_fields(module, arguments.model, init_from)
            module = add_adapter(module, arguments.peft, init_from)
        if arguments.activation_checkpointing:
            enable_activation_checkpointing(module)
        if arguments.torch_compile:
            # In place: wrapping would rename the parameters.
            module.compile()
        self.names = [*module.state_dict()]
        optimizer = build_optimizer(self.task, module, arguments)
        self.scheduler = build_schedule(optimizer, arguments)
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            # DeepSpeed asks for the one where it is given no loader of its own, and clips to 1 without the other.
            config = self.accelerator.state.deepspeed_plugin.deepspeed_config
            config["train_micro_batch_size_per_gpu"] = arguments.per_device_train_batch_size
            config["gradient_clipping"] = arguments.max_grad_norm
        # Where the weights are sharded, every process saves its part of the average; else the main process saves it.
        self.is_sharded = self.accelerator.distributed_type == DistributedType.FSDP
        if self.is_sharded:
            prepare_sharding(module, self.accelerator)
        self.model, self.optimizer = self.accelerator.prepare(module, optimizer)
        self.weights = list(self.model.parameters())
        self.module = self.accelerator.unwrap_model(self.model)
        self.average = WeightAverage(self.module, arguments.ema_decay) if arguments.ema_decay else None
        use_plain_names(self.accelerator)
        self.accelerator.register_for_checkpointing(self.progress, self.scheduler)
        self.sharded_average = self.average if self.is_sharded else None
        if self.average is not None and not self.is_sharded:
            self.accelerator.register_for_checkpointing(self.average)

    def resume(self) -> None:
        """Continues from the state that the main process found, if there is one."""
        step, changes = self.ranks.of_first((self.folder.start, self.folder.changes))
        stream_states = None
        if step is not None:
            stream_states = load_state(self.accelerator, self.folder, step, self.sharded_average)
            self._say(f"continuing {self.folder.path} from step {self.progress.step}")
        if changes.new_data:
            # A place in streams that are no longer read.
            stream_states = None
        if changes.new_evaluation:
            # Scores on other data cannot be compared.
            self.progress.best_step, self.progress.best_value, self.progress.stale = -1, float("nan"), 0
        if self.accelerator.is_main_process:
            self.folder.truncate_metrics(self.progress)
        self.ranks.wait()
        for row in self.folder.read_metrics():
            names = [name for name in row if name.startswith("eval_")]
            self.metrics = {name.removeprefix("eval_"): row[name] for name in names} or self.metrics
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
        arguments = self.arguments
        per_process = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
        return per_process * self.accelerator.num_processes

    def _say(self, text: str) -> None:
        if self.accelerator.is_main_process and not is_quiet():
            tqdm.write(text, file=sys.stderr)
