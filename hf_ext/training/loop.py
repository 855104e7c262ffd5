"""The training loop of all methods, on `accelerate.Accelerator`; a method fills it by being a [`Task`]."""

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from accelerate.utils import broadcast, send_to_device
from tqdm import tqdm

from ..errors import UsageError
from ..files import whole_folder, write_json
from ..progress import progress as show_progress
from .arguments import TrainingArguments
from .callbacks import Callback, Clock, start_trackers
from .evaluation import evaluate_sets, provenance, write_results
from .launcher import honour_launcher
from .optimizing import clear_gradients, clip_gradients, own_part
from .pushing import PushModels
from .run import Run, gather_weights, name_failures, plain_class, seed_step
from .state import RunFolder, clear_write_errors, keep_others, save_progress, save_state
from .stopping import END, EVALUATE, EvaluationStopped, Stopping
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
        train_dataset (`Dataset` or `IterableDataset`, *optional*): In place of the data that `arguments.data` names.
        eval_dataset (`Dataset` or `dict[str, Dataset]`, *optional*): Likewise, one set or several by name.
        callbacks (`Sequence[Callback]`, *optional*): Who looks on, in the main process.

    Returns:
        `dict[str, float]`: Metrics of the last evaluation; empty without evaluation data.

    Raises:
        ValueError: If arguments, data and an existing run do not fit each other.
        FloatingPointError: If the loss is no longer finite.
        OSError: If the disk is full or a data file vanished.
        RunStopped: After a signal or `deadline_minutes`, once the state is saved; a `KeyboardInterrupt`.

    Example:
        >>> import torch
        >>> from datasets import Dataset
        >>> from hf_ext import MRConvConfig, MRConvForCausalLM
        >>> from hf_ext.training import Task, TrainingArguments, train
        >>> class NumbersTask(Task):
        ...     def build_model(self, config, init_from):
        ...         return MRConvForCausalLM(MRConvConfig(**config))
        ...     def training_sample(self, example, generator):
        ...         return {name: torch.tensor(example["tokens"]) for name in ("input_ids", "labels")}
        >>> model = {"vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 1}
        >>> arguments = TrainingArguments("numbers", "runs/numbers", model=model, max_steps=2, report_to="none")
        >>> data = Dataset.from_dict({"tokens": [[3, 1, 4], [1, 5, 9]] * 8})
        >>> sorted(train(NumbersTask(), arguments, data, data))
        ['loss']
    """
    arguments, launched = honour_launcher(arguments)
    with RunFolder(arguments.output_dir) as folder:
        folder.notes += launched
        run = _Training(task, arguments, folder, train_dataset, eval_dataset, callbacks)
        with name_failures(run.ranks, folder.failure):
            run.resume()
            run.fit()
            run.ranks.part()
    return run.metrics


class _Training(Run):
    """One process's steps of a run."""

    # One step, from top to bottom (`fit`):
    #   batch      the loader yields batch `step * passes + index` of this process; its examples, their order and their
    #              augmentation depend on (seed, rank, batch) alone
    #   seed       dropout and the like are drawn from (seed, rank, batch) too
    #   loss       the task's; backward; gradients are summed over the passes and averaged over the processes
    #   update     clipped norm, AdamW, schedule, weight average
    #   log        every logging_steps: one row, which is also where a loss that is not finite ends the run
    #   evaluate   every eval_steps, with the averaged weights; the best ones become best/. The resume state is written
    #              before, and its progress again after it
    #   save       every save_steps: snapshot/, then, last of all, the resume state
    #   stop       a signal or the clock asks for a state now, and mostly for the end (`stopping`)
    # No step reads a random state that an earlier one left. So a run that is continued from a state goes on as the run
    # that was never interrupted: only weights, optimizer, schedule, average and progress have to be saved.

    def fit(self) -> None:
        arguments, progress = self.arguments, self.progress
        if self._is_over() and not progress.owes_evaluation:
            self._push_missing()
            return
        if self.changes.new_evaluation:
            # They are of other data.
            self.metrics = {}
        with self._guard("the start of a tracker"):
            start_trackers(self.accelerator, arguments, self.folder.path, progress.step)
        self.model.train()
        self.clock, window, norm = Clock(), torch.zeros((), device=self.accelerator.device), None
        window_start, window_samples = progress.step, progress.samples
        stopping = self.stopping = Stopping(self.ranks, arguments.save_minutes, arguments.deadline_minutes)
        bar_options = {"unit": " samples", "mininterval": 0.5, "shown": self.accelerator.is_main_process}
        done, total = progress.samples, arguments.max_steps * self._batch_size
        # Closed by name: the traceback of an error would keep the loader processes alive.
        bar = show_progress(initial=done, total=total, **bar_options)
        with bar, stopping, contextlib.closing(iter(self.loader)) as batches:
            self._tell("on_begin", progress.step, self.folder.path, self.module)
            if progress.owes_evaluation:
                with self.clock.count("excluded"):
                    self._checkpoint(save=True, evaluate=True)
            while not self._is_over():
                with self._explain_divergence():
                    loss, norm = self._step(batches)
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
                shown = {"loss": f"{mean:.4g}", "samples_per_second": f"{times['samples_per_second']:.3g}"}
                bar.set_postfix(shown, refresh=False)
                window.zero_()
                window_start, window_samples = progress.step, progress.samples
                progress.ended = answer == END
                with self.clock.count("excluded"):
                    self._checkpoint(save=bool(answer), evaluate=answer in (EVALUATE, END))
                if not self._is_over():
                    stopping.end(answer, progress.step, arguments.max_steps)
        self._tell("on_end", progress.step)
        # `end_training` of accelerate would end the groups of the processes as well.
        for tracker in self.accelerator.trackers:
            with self._guard(f"the tracker {tracker.name}"):
                tracker.finish()
        for name, count in self.failures.items():
            self._report(f"{name} failed {count} time{'s' * (count > 1)}")

    def _push_missing(self) -> None:
        """Says that the run is complete, and pushes what an earlier process did not."""
        step = self.progress.step
        self._say(f"{self.folder.path} is complete: {step} of {self.arguments.max_steps} steps are done.")
        for publisher in (callback for callback in self.callbacks if isinstance(callback, PushModels)):
            with self._guard("PushModels"):
                publisher.on_begin(step, self.folder.path, self.module)
                publisher.on_end(step)

    def _is_over(self) -> bool:
        patience, progress = self.arguments.early_stopping_patience, self.progress
        return progress.ended or progress.step >= self.arguments.max_steps or 0 < patience <= progress.stale

    def _step(self, batches: Iterator[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One optimizer step; the mean loss of this process and, where clipped, the gradient norm."""
        arguments, accelerator = self.arguments, self.accelerator
        passes, norm = arguments.gradient_accumulation_steps, None
        total = torch.zeros((), device=accelerator.device)
        with self.clock.count("data"):
            read = [next(batches) for _ in range(passes)]
        shares = self._weigh(read)
        for index, batch in enumerate(read):
            with self.clock.count("data"):
                # Batches for CUDA lie in pinned memory: the copy runs while the last step is computed.
                batch = send_to_device(batch, accelerator.device, non_blocking=accelerator.device.type == "cuda")
            sequence = (arguments.seed, 3, accelerator.process_index, self.progress.step * passes + index)
            seed_step(int(np.random.SeedSequence(sequence).generate_state(1)[0]), accelerator.device)
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

    def _weigh(self, batches: list[dict[str, Any]]) -> torch.Tensor | None:
        """The weight of each batch's mean loss in the mean of the step; None if all weigh the same."""
        # Accelerate takes the mean over the passes, DDP that over the processes. A mean of means is the mean of all
        # values only where each was taken of equally many: n_i values of N in all are worth n_i / N in place of 1 in
        # passes · processes. All worths together are the number of batches.
        counts = [count for batch in batches if (count := self.task.count_targets(batch)) is not None]
        if len(counts) < len(batches):
            return None
        mine = torch.stack(counts).to(self.accelerator.device, torch.float32)
        total = self.accelerator.reduce(mine.sum(), reduction="sum")
        return mine * (len(batches) * self.accelerator.num_processes) / total.clamp_min(1)

    @contextlib.contextmanager
    def _explain_divergence(self) -> Iterator[None]:
        """Explains what a method's arithmetic raises once weights are infinite: a division by zero, a bad index."""
        try:
            yield
        except (ArithmeticError, ValueError, IndexError, RuntimeError) as error:
            if all(own_part(weight).isfinite().all() for weight in self.weights):
                raise
            raise self._divergence() from error

    def _divergence(self, what: str = "weights are no longer finite after step") -> FloatingPointError:
        return FloatingPointError(
            f"{what} {self.progress.step}; {self.folder.last_good}. Lower learning_rate or max_grad_norm, lengthen "
            "warmup_steps, use mixed_precision: bf16 or 'no', and check the data for NaN."
        )

    def _due(self, *intervals: int) -> bool:
        step = self.progress.step
        return step == self.arguments.max_steps or any(step % interval == 0 for interval in intervals)

    def _mean_loss(self, window: torch.Tensor, steps: int) -> float:
        """Mean loss since the last row, over all processes. One check here finds a bad loss of any step in between."""
        mean = float(self.accelerator.reduce(window / steps, reduction="mean"))
        if not math.isfinite(mean):
            raise self._divergence(f"the loss is {mean} between steps {self.progress.step - steps + 1} and")
        return mean

    def _rates(self, norm: torch.Tensor | None) -> dict[str, float]:
        rates = {"learning_rate": float(self.scheduler.get_last_lr()[0])}
        if bad := len(self.loader.bad.found):
            rates["bad_examples"] = bad
        return rates if norm is None else {**rates, "gradient_norm": float(norm)}

    def _log(self, values: dict[str, float]) -> None:
        for tracker in self.accelerator.trackers:
            with self._guard(f"the tracker {tracker.name}"):
                tracker.log(values, step=self.progress.step)
        row = {"step": self.progress.step, "samples": self.progress.samples, **values}
        if self.accelerator.is_main_process:
            self.folder.add_metrics(row)
        self._tell("on_log", self.progress.step, row)

    @contextlib.contextmanager
    def _guard(self, name: str) -> Iterator[None]:
        """Reports and counts an error of who looks on: a tracker, a picture, a callback. A strict run ends with it."""
        try:
            yield
        except Exception as error:
            if self.arguments.strict_callbacks:
                raise
            self.failures[name] += 1
            if self.failures[name] == 1:
                self._report(f"{name} failed ({type(error).__name__}: {error}); the run continues")

    def _report(self, text: str) -> None:
        tqdm.write(f"warning: {text}. --strict_callbacks true ends a run at the first one.", file=sys.stderr)

    def _tell(self, event: str, *values: Any) -> None:
        for callback in self.callbacks:
            with self._guard(type(callback).__name__):
                self.stopping.take(getattr(callback, event)(*values))
        # For the main process, which draws and tells alone: an exchange of tensors would not wait as long.
        self.ranks.wait()

    def _checkpoint(self, save: bool, evaluate: bool = False) -> None:
        """Evaluation, resume state and snapshots where they are due, or asked for."""
        arguments, progress, improved = self.arguments, self.progress, False
        save, evaluate = save or self._due(arguments.save_steps), evaluate or self._due(arguments.eval_steps)
        if not (save or evaluate):
            return
        # A gradient may overflow in a step whose loss was still finite.
        bad = torch.stack([(~own_part(weight).isfinite()).sum() for weight in self.weights]).sum()
        if self.accelerator.reduce(bad) > 0:
            raise self._divergence()
        evaluate = evaluate and bool(self.eval_data)
        if evaluate:
            if not progress.owes_evaluation:
                # What ends this process in an evaluation takes the scores with it, not the steps before.
                progress.owes_evaluation = True
                self._save_state()
            try:
                improved = self._evaluate()
            except EvaluationStopped as stopped:
                # A batch is scored once, so that an evaluation that is interrupted again and again ends.
                parts = self.ranks.gather(progress.scored)
                rows = {name: [row for part in parts for row in part[name].items()] for name in parts[0]}
                progress.scored = {name: dict(found) for name, found in rows.items()}
                self._save_state()
                self.stopping.end(stopped.args[0], progress.step, arguments.max_steps)
            save = save or self._is_over()
        if not (save or evaluate):
            return
        written = [(self.folder.best, True)] * improved + [(self.folder.snapshot, False)] * save
        for model, _ in written:
            self._write_snapshot(model)
        # Last: a state says that everything of its step is on disk.
        progress.owes_evaluation = False
        self._save_state()
        self.ranks.ask_first(lambda: self.folder.prune(arguments.save_total_limit, progress.best_step))
        if written:
            self.stopping.saved = time.monotonic()
        for model, is_best in written:
            self._tell("on_save", progress.step, model, is_best)

    def _save_state(self) -> None:
        """Saves the state of this step; once it is there, its progress alone."""
        if self.saved_step == self.progress.step:
            save_progress(self.accelerator, self.folder, self.progress)
            return
        save_state(self.accelerator, self.folder, self.progress.step, self.loader.stream_states, self.sharded_average)
        self.saved_step = self.progress.step

    def _evaluate(self) -> bool:
        """Evaluates the weights that are published; whether they are the best so far."""
        with self._published_weights():
            # Statistics such as those of BatchNorm follow each process's own examples; the main process's are saved.
            for buffer in self.module.buffers():
                broadcast(buffer)
            options: dict[str, Any] = {"batch_size": self.arguments.per_device_eval_batch_size}
            options["num_workers"] = self.arguments.data_arguments.num_workers
            options |= {"after_batch": self.stopping.interrupt_evaluation, "scored": self.progress.scored}
            self.metrics = evaluate_sets(self.task, self.module, self.eval_data, self.accelerator, **options)
            self.metrics_step = self.progress.step
            # Whole: the next evaluation is one of other weights, whatever is saved meanwhile.
            self.progress.scored = {}
            # A forward pass of a sharded model is an exchange between all processes.
            if self.accelerator.is_main_process or self.is_sharded:
                self._draw_samples(next(iter(self.eval_data.values())))
            self._tell("on_evaluate", self.progress.step, {**self.metrics}, self.module)
        self._log({f"eval_{name}": value for name, value in self.metrics.items()})
        # Of several evaluation sets the first one decides.
        first = "_".join(filter(None, [next(iter(self.eval_data)), next(iter(self.task.metric_names))]))
        if first not in self.metrics:
            raise UsageError(f"{type(self.task).__name__}.summarize gave no {first}, the first of its metric_names.")
        value, progress = self.metrics[first], self.progress
        if math.isnan(value):
            self._say(f"warning: {first} of step {progress.step} is NaN, which is never the best")
        better = value > progress.best_value if self.task.greater_is_better else value < progress.best_value
        # No value yet is NaN, and a first NaN is no best.
        if better or (math.isnan(progress.best_value) and not math.isnan(value)):
            progress.best_step, progress.best_value, progress.stale = progress.step, value, 0
            return True
        progress.stale += 1
        return False

    def _draw_samples(self, data: datasets.Dataset) -> None:
        self.module.eval()
        picture, folder = None, self.folder.path / "samples"
        with self._guard("samples/"), torch.no_grad():
            picture = self.task.sample_picture(self.module, [data[index] for index in range(min(3, len(data)))])
        self.module.train()
        if picture is None or not self.accelerator.is_main_process:
            return
        with self._guard("samples/"):
            folder.mkdir(exist_ok=True)
            picture.save(folder / f"step-{self.progress.step}.png")
        for tracker in (each for each in self.accelerator.trackers if hasattr(each, "log_images")):
            with self._guard("a tracker's picture"):
                is_array = tracker.name == "tensorboard"
                shown = np.asarray(picture.convert("RGB"))[None] if is_array else [picture]
                form = {"dataformats": "NHWC"} if is_array else {}
                tracker.log_images({"samples": shown}, step=self.progress.step, **form)

    def _published_weights(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.average is None else self.average.apply()

    def _write_snapshot(self, final: Path) -> None:
        """A loadable model folder with what its card needs."""
        with clear_write_errors(final.name, self.folder), self._published_weights():
            state_dict = gather_weights(self.model, self.accelerator, self.names)
            if self.accelerator.is_main_process:
                with whole_folder(final) as folder, plain_class(self.module):
                    self.task.save_model(self.module, state_dict, folder)
                    # peft writes a card full of blanks; publishing writes a real one.
                    (folder / "README.md").unlink(missing_ok=True)
                    told = provenance(self.arguments, self.task, self.progress, self.accelerator.num_processes)
                    write_json(folder / "training.json", told)
                    # Those of an earlier step are of other weights.
                    if self.metrics and self.metrics_step == self.progress.step:
                        precision = self.arguments.mixed_precision
                        write_results(
                            folder / "eval.json", self.task, self.metrics, self.eval_sources, precision=precision
                        )
                    keep_others(final, folder)
        self.ranks.wait()
