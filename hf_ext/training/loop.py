"""The training loop of all methods, on `accelerate.Accelerator`; a method fills it by being a [`Task`].

Order, augmentation and randomness are functions of (seed, rank, step), so that a run continued from a state equals the
run that was never interrupted.
"""

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from accelerate.utils import DistributedType, broadcast, send_to_device, set_seed
from tqdm import tqdm

from hf_ext.distributed import Ranks
from hf_ext.extras import check_installed

from ..data.opening import describe_memory, match_classes, name_sets, open_source
from ..errors import DataError, UsageError
from ..files import whole_folder, write_json
from ..progress import progress
from ..terminal import is_quiet
from .arguments import TrainingArguments
from .bad_examples import BadExamples
from .callbacks import Callback, Onlookers, PushBest
from .changes import describe_run
from .data import TrainingLoader, describe_small_groups
from .evaluation import evaluate_sets, write_results
from .fingerprint import fingerprint
from .launcher import honour_launcher
from .models import add_adapter, build_model, enable_activation_checkpointing, pin_revision, refuse_lost_fields
from .observing import Clock, Profile, plot_curves, show_picture, start_trackers
from .optimizing import build_optimizer, build_schedule, clear_gradients, clip_gradients, count_steps
from .processes import (
    check_tracker,
    check_weights,
    gather_weights,
    make_accelerator,
    name_failures,
    plain_class,
    prepare_sharding,
    seed_step,
    weigh_batches,
)
from .provenance import provenance
from .state import Progress, RunFolder, WeightAverage, clear_write_errors, load_state, save_state, use_plain_names
from .stopping import Stopping
from .task import Task


def train(
    task: Task,
    arguments: TrainingArguments,
    train_dataset: datasets.Dataset | datasets.IterableDataset | None = None,
    eval_dataset: datasets.Dataset | dict[str, datasets.Dataset] | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, float]:
    """
    Trains a task's model, or continues the run that `arguments.output_dir` holds.

    Args:
        task ([`Task`]): The method's part.
        arguments ([`TrainingArguments`]): The run.
        train_dataset (`datasets.Dataset` or `datasets.IterableDataset`, *optional*):
            What to train on, in place of what `arguments.data` names.
        eval_dataset (`datasets.Dataset` or `dict[str, datasets.Dataset]`, *optional*):
            What to evaluate on, one set or several by name, likewise.
        callbacks (`Sequence[Callback]`, *optional*): Who looks on, in the main process.

    Returns:
        `dict[str, float]`: Metrics of the last evaluation; empty without evaluation data.

    Raises:
        ValueError: If arguments, data and an existing run do not fit each other.
        FloatingPointError: If the loss is no longer finite.
        OSError: If the disk is full or a data file vanished.
        RunStopped: After a signal or `deadline_minutes`, once the state is saved; a `KeyboardInterrupt`.
    """
    arguments, launched = honour_launcher(arguments)
    with RunFolder(arguments.output_dir) as folder:
        folder.notes += launched
        run = _Training(task, arguments, folder, train_dataset, eval_dataset, callbacks)
        with name_failures(run.ranks, folder.failure):
            run.resume()
            run.fit()
    return run.metrics


class _Training:
    """One process's part in a run."""

    # One step, from top to bottom (`fit`):
    #   batch      the loader yields batch `step * passes + index` of this process; its examples, their order and their
    #              augmentation depend on (seed, rank, batch) alone
    #   seed       dropout and the like are drawn from (seed, rank, batch) too
    #   loss       the task's; backward; gradients are summed over the passes and averaged over the processes
    #   update     clipped norm, AdamW, schedule, weight average
    #   log        every logging_steps: one row, which is also where a loss that is not finite ends the run
    #   evaluate   every eval_steps, with the averaged weights; the best ones become best/
    #   save       every save_steps: snapshot/, then, last of all, the resume state
    #   stop       a signal or the clock asks for a state now, and mostly for the end (`stopping`)
    # No step reads a random state that an earlier one left. So a run that is continued from a state goes on as the run
    # that was never interrupted: only weights, optimizer, schedule, average and progress have to be saved.

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
        check_installed(*["tensorboard"] * (arguments.report_to == "tensorboard"), "matplotlib")
        check_tracker(arguments.report_to)
        self.accelerator = make_accelerator(arguments, folder.path)
        publisher = [] if arguments.hub_model_id is None else [PushBest(arguments)]
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
            is_sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
            about = describe_run(self.arguments, accelerator.num_processes, is_sharded)
            self.folder.check(self.arguments, about)
        if self.train_data is None:
            self.train_data = open_source(sources.require_train_source(), "data.train")
        self.eval_sources = {name: describe_memory(data) for name, data in self.eval_data.items()}
        if not self.eval_data:
            self.eval_sources = sources.eval_sources
            self.eval_data = {name: open_source(source, "data.eval") for name, source in self.eval_sources.items()}
        if self.arguments.early_stopping_patience and not self.eval_data:
            raise UsageError("early_stopping_patience needs an evaluation: set data.eval, or leave it out.")
        if accelerator.is_main_process:
            self.folder.check_data(fingerprint(self.train_data, self.arguments.data.get("train")))

    def _prepare(self) -> None:
        if not self.accelerator.is_main_process:
            return
        if self.groups is not None and self.folder.changes.new_batch_size:
            raise DataError(
                f"{self.folder.path} holds a run whose batches do not mix examples of different groups, such as sizes "
                "of pictures: the order of its examples depends on per_device_train_batch_size, which must stay."
            )
        self.folder.prepare()

    def _warn(self) -> None:
        """Says what is otherwise than before, and what is probably not meant, but is right for a short trial."""
        arguments = self.arguments
        small = describe_small_groups(self.groups, arguments.per_device_train_batch_size)
        for text in [*self.folder.warnings, *small, *arguments.data_arguments.overlaps]:
            self._say(f"warning: {text}.")
        for text in self.folder.notes:
            self._say(f"{text}.")
        for text in self.folder.changes.notes:
            self._say(f"changed since step {self.folder.start}: {text}.")
        if arguments.warmup_steps > arguments.max_steps and arguments.lr_scheduler_type != "constant":
            peak = arguments.learning_rate * arguments.max_steps / arguments.warmup_steps
            self._say(
                f"warning: warmup_steps is {arguments.warmup_steps}, max_steps {arguments.max_steps}: the learning "
                f"rate rises to {peak:.3g} and never reaches {arguments.learning_rate:.3g}. For a short run set "
                "warmup_steps too."
            )

    def _build(self) -> None:
        """Model, optimizer, schedule and average; equal on all processes, as the seed is."""
        arguments = self.arguments
        set_seed(arguments.seed)
        self.train_data = match_classes(self.train_data, self.task, training=True)
        self.groups = self.task.read_data(self.train_data)
        if self.arguments.num_train_epochs is not None:
            steps = count_steps(self.arguments, self.train_data, self._batch_size, self.groups)
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
            # DeepSpeed asks for it where it is given no loader of its own.
            plugin = self.accelerator.state.deepspeed_plugin
            plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = arguments.per_device_train_batch_size
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
        if self.average is not None and not self.is_sharded:
            self.accelerator.register_for_checkpointing(self.average)

    @property
    def _own_average(self) -> WeightAverage | None:
        return self.average if self.is_sharded else None

    def resume(self) -> None:
        """Continues from the state that the main process found, if there is one."""
        step, changes = self.ranks.of_first((self.folder.start, self.folder.changes))
        stream_states = None
        if step is not None:
            stream_states = load_state(self.accelerator, self.folder, step, self._own_average)
            self._say(f"continuing {self.folder.path} from step {self.progress.step}")
        if changes.new_data:
            # A place in streams that are no longer read.
            stream_states = None
        if changes.new_evaluation:
            # Scores on other data cannot be compared.
            self.progress.best_step, self.progress.best_value, self.progress.stale = -1, float("nan"), 0
        if self.accelerator.is_main_process:
            self.folder.truncate_metrics(self.progress.step)
        self.ranks.wait()
        for row in self.folder.read_metrics():
            names = [name for name in row if name.startswith("eval_")]
            self.metrics = {name.removeprefix("eval_"): row[name] for name in names} or self.metrics
        sources, rank = self.arguments.data_arguments, self.accelerator.process_index
        assert self.train_data is not None
        total = None if isinstance(self.train_data, datasets.IterableDataset) else len(self.train_data)
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
            bad=BadExamples(sources.max_bad_examples, total, self.folder.name_bad_examples(rank)),
        )

    def fit(self) -> None:
        """Runs the remaining steps."""
        arguments, progress = self.arguments, self.progress
        if self._is_over():
            self._say(f"{self.folder.path} is complete: {progress.step} of {arguments.max_steps} steps are done.")
            self.accelerator.end_training()
            return
        start_trackers(self.accelerator, arguments, self.folder.path, progress.step)
        self.model.train()
        self.clock, window, norm = Clock(), torch.zeros((), device=self.accelerator.device), None
        profile = Profile(arguments.profile_steps, self.folder.path / f"profile-{self.accelerator.process_index}")
        window_start, window_samples = progress.step, progress.samples
        stopping = Stopping(self.ranks, arguments.save_minutes, arguments.deadline_minutes)
        with self._bar() as bar, stopping:
            batches = iter(self.loader)
            self._tell("on_begin", progress.step, self.folder.path, self.module)
            while not self._is_over():
                profile.before(progress.step)
                loss, norm = self._step(batches)
                profile.after(progress.step)
                window += loss
                bar.update(self._batch_size)
                answer = stopping.ask()
                if not (answer or self._due(arguments.logging_steps, arguments.eval_steps, arguments.save_steps)):
                    continue
                with self.clock.count("compute"):
                    mean = self._mean_loss(window, progress.step - window_start)
                progress.seconds += self.clock.seconds
                left = (arguments.max_steps - progress.step) * self._batch_size
                times = self.clock.row(progress.samples - window_samples, left, self.accelerator.device)
                self.clock.restart()
                self._log({"loss": mean, **times, **self._rates(norm)})
                # Shown when the bar is drawn next.
                shown = {"loss": f"{mean:.4g}", "samples_per_second": f"{times['samples_per_second']:.3g}"}
                bar.set_postfix(shown, refresh=False)
                window.zero_()
                window_start, window_samples = progress.step, progress.samples
                with self.clock.stop():
                    if self._checkpoint(save=bool(answer)):
                        stopping.restart_clock()
                stopping.end(answer, progress.step, arguments.max_steps)
        with self.onlookers.guard("the tracker"):
            self.accelerator.end_training()
        self.onlookers.sum_up()

    def _is_over(self) -> bool:
        """Whether the steps are done, or the scores have not become better for long."""
        patience = self.arguments.early_stopping_patience
        return self.progress.step >= self.arguments.max_steps or 0 < patience <= self.progress.stale

    @property
    def _batch_size(self) -> int:
        arguments = self.arguments
        per_process = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
        return per_process * self.accelerator.num_processes

    def _step(self, batches: Iterator[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One optimizer step; the mean loss of this process and, where clipped, the gradient norm."""
        arguments, accelerator = self.arguments, self.accelerator
        passes, norm = arguments.gradient_accumulation_steps, None
        total = torch.zeros((), device=accelerator.device)
        with self.clock.count("data"):
            read = [next(batches) for _ in range(passes)]
        shares = weigh_batches([self.task.count_targets(batch) for batch in read], accelerator)
        for index, batch in enumerate(read):
            with self.clock.count("data"):
                # Batches for CUDA lie in pinned memory: the copy runs while the last step is computed.
                batch = send_to_device(batch, accelerator.device, non_blocking=accelerator.device.type == "cuda")
            self._seed(self.progress.step * passes + index)
            with self.clock.count("compute"), accelerator.accumulate(self.model):
                loss = self.task.loss(self.model, batch, self.progress.step)
                loss = loss if shares is None else loss * shares[index]
                accelerator.backward(loss)
                total.add_(loss.detach(), alpha=1 / passes)
                if accelerator.sync_gradients:
                    if arguments.max_grad_norm:
                        norm = clip_gradients(accelerator, self.weights, arguments.max_grad_norm)
                    self.optimizer.step()
                    clear_gradients(self.optimizer)
        if not accelerator.optimizer_step_was_skipped:
            with self.clock.count("compute"):
                self.scheduler.step()
                if self.average is not None:
                    self.average.step()
        self.progress.step += 1
        self.progress.samples += self._batch_size
        return total, norm

    def _seed(self, batch: int) -> None:
        """Dropout and the like as a function of (seed, rank, batch)."""
        sequence = np.random.SeedSequence((self.arguments.seed, 3, self.accelerator.process_index, batch))
        seed_step(int(sequence.generate_state(1)[0]), self.accelerator.device)

    def _due(self, *intervals: int) -> bool:
        step = self.progress.step
        return step == self.arguments.max_steps or any(step % interval == 0 for interval in intervals)

    def _mean_loss(self, window: torch.Tensor, steps: int) -> float:
        """Mean loss since the last row, over all processes. One check here finds a bad loss of any step in between."""
        mean = float(self.accelerator.reduce(window / steps, reduction="mean"))
        if not math.isfinite(mean):
            raise FloatingPointError(
                f"the loss is {mean} between steps {self.progress.step - steps + 1} and {self.progress.step}; "
                f"{self.folder.last_good}. Lower learning_rate or max_grad_norm, lengthen warmup_steps, use "
                "mixed_precision: bf16 or 'no', and check the data for NaN."
            )
        return mean

    def _rates(self, norm: torch.Tensor | None) -> dict[str, float]:
        rates = {"learning_rate": float(self.scheduler.get_last_lr()[0])}
        if bad := len(self.loader.bad.found):
            rates["bad_examples"] = bad
        return rates if norm is None else {**rates, "gradient_norm": float(norm)}

    def _log(self, values: dict[str, float]) -> None:
        """One row in metrics.jsonl and the tracker."""
        with self.onlookers.guard("the tracker"):
            self.accelerator.log(values, step=self.progress.step)
        if self.accelerator.is_main_process:
            row = {"step": self.progress.step, "samples": self.progress.samples, **values}
            self.folder.add_metrics(row)
            self._tell("on_log", self.progress.step, row)

    def _tell(self, event: str, *values: Any) -> None:
        """Calls a method of all callbacks."""
        for callback in self.callbacks:
            with self.onlookers.guard(type(callback).__name__):
                getattr(callback, event)(*values)

    def _checkpoint(self, save: bool) -> bool:
        """Evaluation, resume state and snapshots where they are due, or asked for; whether a state was saved."""
        arguments, improved = self.arguments, False
        save = save or self._due(arguments.save_steps)
        if not (save or self._due(arguments.eval_steps)):
            return False
        check_weights(self.model, self.accelerator, self.folder, self.progress.step)
        if self.eval_data and self._due(arguments.eval_steps):
            improved = self._evaluate()
            save = save or self._is_over()
        if not (improved or save):
            return False
        if improved:
            self._write_snapshot(self.folder.best)
        if save:
            self._write_snapshot(self.folder.snapshot)
        # Last: a state says that everything of its step is on disk.
        states = self.loader.stream_states if self.loader.is_stream else None
        save_state(self.accelerator, self.folder, self.progress.step, states, self._own_average)
        if self.accelerator.is_main_process:
            self.folder.prune(arguments.save_total_limit, self.progress.best_step)
            with self.onlookers.guard("curves.png"):
                plot_curves(self.folder)
        written = [(self.folder.best, True)] * improved + [(self.folder.snapshot, False)] * save
        for model, is_best in written:
            self._tell("on_save", self.progress.step, model, is_best)
        return True

    def _evaluate(self) -> bool:
        """Evaluates the weights that are published; whether they are the best so far."""
        with self._published_weights():
            # Statistics such as those of BatchNorm follow each process's own examples; the main process's are saved.
            for buffer in self.module.buffers():
                broadcast(buffer)
            options: dict[str, Any] = {"batch_size": self.arguments.per_device_eval_batch_size}
            options["num_workers"] = self.arguments.data_arguments.num_workers
            self.metrics = evaluate_sets(self.task, self.module, self.eval_data, self.accelerator, **options)
            # A forward pass of a sharded model is an exchange between all processes.
            if self.accelerator.is_main_process or self.is_sharded:
                self._draw_samples(next(iter(self.eval_data.values())))
            self._tell("on_evaluate", self.progress.step, self.metrics, self.module)
        self._log({f"eval_{name}": value for name, value in self.metrics.items()})
        # Of several evaluation sets the first one decides.
        first = "_".join(filter(None, [next(iter(self.eval_data)), next(iter(self.task.metric_names))]))
        value, best = self.metrics[first], self.progress.best_value
        better = value > best if self.task.greater_is_better else value < best
        # No value yet is NaN, and a first NaN is no best.
        if better or (math.isnan(best) and not math.isnan(value)):
            self.progress.best_step, self.progress.best_value = self.progress.step, value
            self.progress.stale = 0
            return True
        self.progress.stale += 1
        return False

    def _draw_samples(self, data: datasets.Dataset) -> None:
        self.module.eval()
        with torch.no_grad():
            picture = self.task.sample_picture(self.module, [data[index] for index in range(min(3, len(data)))])
        self.module.train()
        if picture is not None and self.accelerator.is_main_process:
            folder = self.folder.path / "samples"
            with self.onlookers.guard("samples/"):
                folder.mkdir(exist_ok=True)
                picture.save(folder / f"step-{self.progress.step}.png")
            with self.onlookers.guard("the tracker"):
                show_picture(self.accelerator, picture, self.progress.step)

    def _published_weights(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.average is None else self.average.apply()

    def _write_snapshot(self, final: Path) -> None:
        """A loadable model folder with what its card needs."""
        with clear_write_errors(final.name, self.folder), self._published_weights():
            state_dict = gather_weights(self.model, self.accelerator, self.names)
            if self.accelerator.is_main_process:
                with whole_folder(final) as folder:
                    self._fill_snapshot(folder, state_dict)
        self.ranks.wait()

    def _fill_snapshot(self, folder: Path, state_dict: dict[str, torch.Tensor]) -> None:
        with plain_class(self.module):
            self.task.save_model(self.module, state_dict, folder)
        # peft writes a card full of blanks; publishing writes a real one.
        (folder / "README.md").unlink(missing_ok=True)
        write_json(
            folder / "training.json",
            provenance(self.arguments, self.task.describe(), self.progress, self.accelerator.num_processes),
        )
        if self.metrics:
            write_results(folder / "eval.json", self.task, self.metrics, self.eval_sources)

    def _bar(self) -> tqdm:
        return progress(
            total=self.arguments.max_steps * self._batch_size,
            initial=self.progress.samples,
            unit=" samples",
            mininterval=0.5,
            shown=self.accelerator.is_main_process,
        )

    def _say(self, text: str) -> None:
        if self.accelerator.is_main_process and not is_quiet():
            tqdm.write(text, file=sys.stderr)
