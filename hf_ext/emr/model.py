"""A model that turns into any task of an artifact: EMR-Merging (arXiv 2405.17461) in use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig

from ..errors import UsageError
from ..merging.loading import decode_settings
from .batches import Generation, Rows, explain_division, find_by_sample, join_outputs, kind_of, rows_of, take_rows
from .building import BuiltModel, build_model, relabel, require_places, same_network, take_over
from .mixed import Mixer, NotByRows
from .turns import Turns
from .weights import TaskWeights, Uncopied


class EMRModel(Uncopied):
    """
    A merge as the model of one of its tasks, switched to another in place; load it with [`~EMRModel.from_pretrained`].

    `model` is an ordinary model of transformers, diffusers or peft, with the weights, head and label names of the
    current task. The weights of a task are always computed from the base, Ŵ_t = W_0 + λ_t·M_t ⊙ τ_uni: switching back
    and forth changes no bit.

    There is one set of weights, so threads take turns. `with em.task(name) as model:` and calls of the object itself
    (`em(...)` and `em.generate(...)`, with `task_ids` or without) are thread-safe: they wait for each other.

    A batch of several tasks (`task_ids`) is faster than one task after the other if each task has few rows, because it
    reads base and merged model once for all tasks. With eight tasks of a BERT (384 wide, 6 layers) it took 0.33 of the
    processor time at one row of 16 tokens per task, 0.53 at one of 64 and 0.91 at four of 64; with four tasks of a
    GPT-2 0.43 (`examples/benchmarks/emr_mixed.py`). `generate` with `task_ids` takes turns, which is faster there: it
    switches once per task, not once per token.

    [`~EMRModel.set_task`] is for one thread: a second thread that calls it gets a `RuntimeError`, and so does a plain
    `em.model(...)` if another thread changes the weights meanwhile. Calls of a compiled model are not watched. Threads
    that must not wait need an [`EMRModel`] each; these share base and root weights in memory.

    Attributes:
        model (`torch.nn.Module`): The model of the current task.
        current (`str` or `None`): The current task; `None` after a switch that failed half way.
        weights ([`TaskWeights`]): The artifact's weights.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from hf_ext import EMRModel, merge_checkpoints
        >>> tiny = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
        >>> for name in ("base", "topic", "mood"):
        ...     BertForSequenceClassification(BertConfig(**tiny)).save_pretrained(name)
        >>> config = {"base": "base", "tasks": {"topic": "topic", "mood": "mood"}}
        >>> em = EMRModel.from_pretrained(merge_checkpoints(config, "merged").path, "topic")
        >>> em.set_task("mood").current, em.tasks
        ('mood', ['topic', 'mood'])
    """

    def __init__(
        self,
        weights: TaskWeights,
        task: str,
        *,
        source: str,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.weights, self._source, self._dtype, self._trust_remote_code = weights, source, dtype, trust_remote_code
        self.current: str | None = None
        self._device = torch.device("cpu" if device is None else device)
        self._turns, self._mixer = Turns(), Mixer(weights)
        self._told: set[str] = set()
        # by kind of batch that takes turns: the outputs that have a row for each sample
        self._by_sample: dict[Any, list[Any]] = {}
        # by what the tasks' files say: the settings of generation of tasks that were the current one
        self._generation: dict[str, GenerationConfig] = {}
        self._outlines: dict[Any, dict[str, Any]] = {}
        self._built: BuiltModel = self._build(task)
        self._config = self.read_config(task)
        self.current = task

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | Path,
        task: str | None = None,
        *,
        base: str | Path | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        endpoint: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rescale: str | None = None,
        trust_remote_code: bool = False,
    ) -> EMRModel:
        """
        Loads an artifact of `hf-ext merge` with one of its tasks. From a Hub, only the root files, the base and the
        used tasks are downloaded.

        There is no `device_map` and no `quantization_config`: weights are restored in place, on one device. To
        quantise a task, use a checkpoint of [`~EMRModel.export`].

        Args:
            path_or_id (`str` or `Path`): Folder, or `org/name` or `org/name@revision` on a Hub.
            task (`str`, *optional*): The task to start with; the first one by default.
            base (`str` or `Path`, *optional*): Folder or Hub id of the base, if it is not where the artifact says. It
                must be the base of the merge.
            revision (`str`, *optional*): Branch, tag or commit of the artifact.
            token (`str` or `bool`, *optional*): Token of the Hub; `None` uses the one that was logged in with.
            endpoint (`str`, *optional*): Address of the Hub. Defaults to `HF_ENDPOINT`.
            device (`torch.device` or `str`, *optional*): Device of the model, and of base and root weights; the CPU by
                default.
            dtype (`torch.dtype`, *optional*): Type of the model's weights; by default that of `from_pretrained`.
            rescale (`str`, *optional*): Rescale mode: `global`, `official`, `tensor`, `l2`, `tensor_l2` or `none`; by
                default that of the merge. Of signs of differences (`onebit`, `ternary`) it is always `tensor_l2`.
            trust_remote_code (`bool`, *optional*, defaults to `False`): Allow code of the artifact to run if no
                installed package knows the model.

        Returns:
            [`EMRModel`]: The model.

        Raises:
            ValueError: No such artifact or task, a base that is not the merge's, a model class that is not installed;
                the message says what to do.
        """
        weights = TaskWeights(
            path_or_id, base=base, revision=revision, token=token, endpoint=endpoint, rescale=rescale
        )
        first = next(iter(weights.manifest.tasks)) if task is None else task
        options: dict[str, Any] = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
        return cls(weights, first, source=str(path_or_id), **options)

    def __repr__(self) -> str:
        kind, size = type(self._built.model).__name__, sum(part.numel() for part in self._built.model.parameters())
        return (
            f"EMRModel({self._source!r}, task={self.current!r}, tasks={self.tasks}, model={kind} of {size:,} "
            f"parameters, {self.dtype}, on {self.device})"
        )

    @property
    def config(self) -> Any:
        """Configuration of the current task's model."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return cast(torch.device, next(self._built.model.parameters()).device)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the model's weights."""
        return cast(torch.dtype, next(self._built.model.parameters()).dtype)

    def train(self, mode: bool = True) -> EMRModel:
        """Sets the model to training mode, or back."""
        self.model.train(mode)
        return self

    def eval(self) -> EMRModel:
        """Sets the model to evaluation mode, as it is when it was loaded."""
        return self.train(False)

    @torch.inference_mode(False)
    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> EMRModel:
        """Moves the model, or gives its weights another type; tasks that are set later follow."""
        device, dtype = (None, device) if isinstance(device, torch.dtype) else (device, dtype)
        with self._turns.hold():
            self._turns.note_change()
            for name, held in self._built.model.state_dict().items() if dtype == torch.float16 else ():
                if held.is_floating_point():
                    self.weights.require_range(str(self.current), name, held.to(dtype), [held])
            self._built.model.to(device=device, dtype=dtype)
            # After it: what it refuses is not for later tasks either.
            self._device = self._device if device is None else torch.device(device)
            self._dtype = dtype or self._dtype
        return self

    @property
    def model(self) -> Any:
        """The model of the current task; while another thread is inside `with em.task(...)`, this waits for it."""
        with self._turns.hold():
            return self._built.model

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks."""
        return list(self.weights.manifest.tasks)

    def set_task(self, task: str) -> EMRModel:
        """
        Gives the model another task's weights, head and label names.

        The weights of `model` are replaced in place if the configurations of the tasks differ only in their labels. A
        task of another class, or with another configuration, gets a new `model`, with the training mode,
        `requires_grad` and attention that were set; so does every task if the library changes weights on loading in an
        unknown way, with a warning. A switch to the current task does nothing:
        weights that were changed in place, by training for instance, stay as they are. Any other switch overwrites
        them.

        Args:
            task (`str`): Name of the task. Its files are fetched when they are first used.

        Returns:
            [`EMRModel`]: This object.

        Raises:
            ValueError: There is no such task, or its files are damaged.
            RuntimeError: Another thread has called it, and is alive; use [`~EMRModel.task`].
        """
        with self._turns.hold() as inside:
            if not inside:
                self._turns.choose()
            self._switch(task)
        return self

    def _switch(self, task: str) -> None:
        """Gives the model another task's weights; this thread holds the lock."""
        if task == self.current:
            return
        config = self.read_config(task)
        if self._fits(task):
            require_places(self._built, *map(self.weights.entries, (str(self.current), task)))
            self._switch_in_place(task, config)
        else:
            if not self._built.complete and same_network(config, self._config):
                self._warn_once(
                    f"the weights of {type(self._built.model).__name__} are changed on loading in a way that cannot "
                    "be followed: every switch of tasks makes a new `model`, and what holds the old one (a pipeline, "
                    "an optimizer) keeps the old task. Take `model` anew after each switch."
                )
            built = self._build(task)
            if told := take_over(self._built, built.model):
                self._warn_once(told)
            self._built = built
            self._generation.clear()
            self._outlines.clear()
        self._config, self.current = config, task

    def _switch_in_place(self, task: str, config: dict[str, Any]) -> None:
        """Puts a task's weights into the model; where that fails or is interrupted, those of the task before again."""
        model, previous, before = self._built.model, cast(str, self.current), self._config
        settings = getattr(model, "generation_config", None)
        self._switch_settings(task)
        # Half-way through, the model is of no task.
        self.current = None
        try:
            self._restore_in_place(task, config)
        except BaseException:
            if settings is not None:
                model.generation_config = settings
            self._restore_in_place(previous, before)
            self.current = previous
            raise

    def _switch_settings(self, task: str) -> None:
        """Gives the model a task's settings of generation; what a user set in another's is there again with it."""
        own, before = self.generation_config(task), self.generation_config(str(self.current))
        if own != before:
            model, kept = cast(Any, self._built.model), self._generation
            kept[str(before)] = model.generation_config
            if str(own) not in kept:
                # Without a file of its own it is what from_pretrained takes from the model's configuration.
                new = GenerationConfig.from_dict(own) if own else GenerationConfig.from_model_config(model.config)
                kept[str(own)] = new
            model.generation_config = kept[str(own)]

    def _warn_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            warnings.warn(text, stacklevel=4)

    def _fits(self, task: str) -> bool:
        """True if a task's network is that of `model`, but for labels and width of the head."""
        whole = self.current is not None and self._built.complete
        same = whole and same_network(self.read_config(task), self._config)
        return same and self.weights.entries(task).keys() == self.weights.entries(str(self.current)).keys()

    @contextmanager
    def task(self, name: str) -> Iterator[Any]:
        """
        Switches to a task inside a `with` block, and back after it. Other threads that want a task wait until the
        block ends.

        Args:
            name (`str`): Name of the task.

        Yields:
            `torch.nn.Module`: `model`, with that task's weights.
        """
        with self._turns.hold():
            previous = self.current
            try:
                self._switch(name)
                yield self._built.model
            finally:
                if previous is not None:
                    self._switch(previous)

    def export(self, task: str, out: str | Path) -> Path:
        """
        Writes a task as a plain checkpoint folder, which `from_pretrained` loads without this package: weights in
        safetensors, configuration, and the task's tokenizer or processor. The weights pass tensor by tensor.

        Args:
            task (`str`): Name of the task.
            out (`str` or `Path`): A folder that does not exist or is empty.

        Returns:
            `Path`: The folder.

        Raises:
            TakenError: There is something at `out`.
            ValueError: There is no such task.
        """
        return self.weights.export(task, out)

    def __call__(self, *arguments: Any, task_ids: Sequence[str] | None = None, **batch: Any) -> Any:
        """
        Runs the model on a batch. Several threads may do so: they wait for each other.

        Args:
            *arguments, **batch: Arguments of the model; `labels` and a cache only with a single task. With several,
                samples whose text has a place for pictures have one picture each, or none has.
            task_ids (`Sequence[str]`, *optional*): The task of each sample; by default the current task for all. With
                several tasks, there are no gradients.

        Returns:
            The output of the model. If the heads of several tasks differ in width, `logits` is a list with a tensor
            for each sample. If the tasks had to run one after the other, outputs without a row for each sample, or
            that compare samples, are left out, and a warning names them once.

        Raises:
            ValueError: No task is current, `task_ids` does not fit the batch, or several tasks have labels, a cache,
                or pictures whose samples are unknown.
        """
        with self._turns.hold():
            if task_ids is None:
                return self._model_of_a_task()(*arguments, **batch)
            rows = rows_of(task_ids, self.tasks, (arguments, batch), self._built.model)
            if len(rows) == 1:
                with self.task(*rows) as model:
                    return model(*arguments, **batch)
            if batch.get("labels") is not None:
                raise UsageError(
                    "a batch of several tasks has no common loss: leave out labels and compute each task's loss from "
                    "its rows of the output, or run one task at a time"
                )
            return self._answer(rows, (arguments, batch))

    def generate(self, inputs: Tensor | None = None, *, task_ids: Sequence[str] | None = None, **options: Any) -> Any:
        """
        Generates with the current task, or for prompts of several tasks in turns: each row equals the one that its
        task generates alone, and shorter rows are padded. Each task samples from the random state of the call, as it
        would alone. The switches overwrite weights that were changed in place.

        Args:
            inputs, **options: Arguments of the model's own `generate`. With several tasks, pictures are as in a call.
            task_ids (`Sequence[str]`, *optional*): The task of each row.

        Returns:
            The output of the model's own `generate`; for several tasks, the token ids.

        Raises:
            ValueError: `task_ids` does not fit; or several tasks get a cache, or are asked for more than token ids.
        """
        with self._turns.hold():
            arguments = () if inputs is None else (inputs,)
            if task_ids is None:
                return self._model_of_a_task().generate(*arguments, **options)
            rows = rows_of(task_ids, self.tasks, (arguments, options), self._built.model)
            if len(rows) == 1:
                with self.task(*rows) as model:
                    return model.generate(*arguments, **options)
            turns = Generation(rows, self.device)
            options = turns.share(self._built.model, options)
            return turns.join(self._run_in_turns(rows, (arguments, options), turns.run))

    def _run_in_turns(self, rows: Rows, given: tuple[Any, Any], run: Callable[..., Any]) -> dict[str, Any]:
        """Calls `run(model, task, *given)` for each task and its rows; the task before is current again."""
        previous, size, found = self.current, sum(map(len, rows.values())), {}
        try:
            # The current task first, which is there already.
            for task in sorted(rows, key=lambda task: task != previous):
                self._switch(task)
                with explain_division(task, given, size):
                    found[task] = run(self._built.model, task, *take_rows(given, rows[task], size))
        finally:
            if previous is not None:
                self._switch(previous)
        return found

    def _answer(self, rows: Rows, given: tuple[Any, Any]) -> Any:
        """Answers a batch of several tasks: in one forward pass, or in turns."""
        different = [task for task in rows if not self._fits(task)]
        try:
            if different or self.current is None:
                raise NotByRows(f"{different} cannot be put into the model of {self.current!r}")
            entries = self.weights.entries(self.current)
            require_places(self._built, entries, entries)
            # Weights of other tasks stand in for the model's own while it runs.
            self._turns.note_change()
            return self._mixer.run(self._built, self.current, rows, given)
        except NotByRows as error:
            failure = str(error)
        output, left_out = self._answer_in_turns(rows, given)
        missing = f", and these outputs, which are not by sample, are left out: {left_out}" if left_out else ""
        self._warn_once(
            f"samples of several tasks could not run in one forward pass, so each task gets its own: {failure}. This "
            f"is slower{missing}."
        )
        return output

    @torch.no_grad()
    def _answer_in_turns(self, rows: Rows, given: tuple[Any, Any]) -> tuple[Any, list[Any]]:
        size, classes = sum(map(len, rows.values())), set[str]()
        kind = kind_of(self._built.model, given, size)

        def run(model: Any, task: str, arguments: tuple[Any, ...], batch: dict[str, Any]) -> Any:
            classes.add(type(model).__name__)
            output = model(*arguments, **batch)
            if kind not in self._by_sample:
                self._by_sample[kind] = find_by_sample(model, given, output, rows[task], size)
            return output

        outputs = self._run_in_turns(rows, given, run)
        if len(classes) > 1 and not all(isinstance(output, Mapping) for output in outputs.values()):
            raise UsageError(f"tuples of {sorted(classes)} do not hold the same outputs: leave out return_dict=False")
        return join_outputs(outputs, rows, self._by_sample[kind])

    def _model_of_a_task(self) -> Any:
        if self.current is None:
            raise UsageError("a switch of tasks failed, so the weights belong to no task: call set_task")
        return self._built.model

    def save_pretrained(self, out: str | Path) -> Path:
        """
        Copies the whole artifact with all tasks, without weights that were changed in place, for
        [`~EMRModel.from_pretrained`]. [`~EMRModel.export`] writes a single task as a plain checkpoint.

        Args:
            out (`str` or `Path`): A folder that does not exist or is empty.

        Returns:
            `Path`: The folder.

        Raises:
            TakenError: There is something at `out`.
        """
        return self.weights.copy_artifact(out)

    def push_to_hub(self, repo_id: str, **options: Any) -> Any:
        """Publishes the artifact as `hf-ext push` does, with its checks and rules; `options` are those of
        [`hf_ext.push`]."""
        from ..hub.publish import push

        self.weights.fetch_all()
        return push(self.weights.folder, repo_id, **options)

    def read_config(self, task: str) -> dict[str, Any]:
        """The content of `config.json` of a task; of an adapter, that of peft's file."""
        return self.weights.read_config(task)

    def generation_config(self, task: str) -> dict[str, Any]:
        """The content of `generation_config.json` of a task, but for versions; empty where it has none."""
        found = self.weights.read_small_file(task, "generation_config.json")
        return {key: value for key, value in found.items() if key != "transformers_version"}

    @torch.inference_mode(False)
    def _build(self, task: str) -> BuiltModel:
        built = build_model(self.weights, task, self._source, self._dtype, self._trust_remote_code)
        cast(Any, built.model).to(self._device)
        self._turns.watch(built.model)
        return built

    @torch.inference_mode(False)
    def _restore_in_place(self, task: str, config: dict[str, Any]) -> None:
        with self._turns.change(self._built.model):
            before, self._config = self._config, config
            if config != before and self.weights.manifest.library == "transformers":
                kind = type(self.model.config)
                settings = (kind.from_dict(decode_settings(each)) for each in (before, config))
                relabel(self.model, self._outlines, *settings)
            held = self.model.state_dict()
            for name, place in self._built.places.items():
                self.weights.restore_into(task, name, place.within(held[place.tensor]))
