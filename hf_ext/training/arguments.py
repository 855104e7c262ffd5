"""Arguments of a training run: one dataclass, filled from a YAML file and `--field value` overrides."""

import copy
import logging
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.dataclasses import strict

from ..data.source import DataSource as DataSource
from ..data.source import SourcePart as SourcePart
from ..settings import Section, SettingsError, Unread, as_meant, parse_words
from ..settings import build as build
from ..settings import read_yaml as read_yaml

logger = logging.getLogger(__name__)

# The schedules of transformers that need no metric; the last two need `lr_scheduler_kwargs`.
SCHEDULES = (
    *("constant", "constant_with_warmup", "cosine", "cosine_with_restarts", "inverse_sqrt", "linear", "polynomial"),
    *("cosine_with_min_lr", "warmup_stable_decay"),
)
# Schedules whose learning rate at a step does not depend on max_steps.
SCHEDULES_WITHOUT_END = ("constant", "constant_with_warmup", "inverse_sqrt")
# Metadata of fields that may change when a run resumes; `changes` describes the effect of each kind. A field without
# it must not change.
FREE, LENGTH, BATCHING = {"change": "free"}, {"change": "length"}, {"change": "batching"}
TRAINING_DATA, EVALUATION_DATA, WORKERS = {"change": "train"}, {"change": "eval"}, {"change": "workers"}
# Fields that choose a part of a source.
_PARTS = ("split", "hold_out", "hold_out_seed")


@strict
@dataclass
class DataArguments:
    """
    Data of a run.

    Args:
        train (`dict`): Source of the training examples.
        eval (`dict`, *optional*):
            Source of the evaluation examples, never a stream; or several by name, `{kodak: {path: …}, own: {path:
            …}}`, whose metrics begin with the name. The first metric of the first source selects the best state.
        num_workers (`int`, defaults to 0): Loader processes for each training process, and for its evaluation.
        max_bad_examples (`float`, defaults to 0.001):
            Largest share of unreadable training examples. They are skipped, counted and listed in
            `bad_examples.jsonl` of the run folder. A larger share ends the run with an error.
    """

    train: dict | None = field(default=None, metadata=TRAINING_DATA)
    eval: dict | None = field(default=None, metadata=EVALUATION_DATA)
    num_workers: int = field(default=0, metadata=WORKERS)
    max_bad_examples: float = field(default=0.001, metadata=FREE)

    @property
    def train_source(self) -> DataSource | None:
        return None if self.train is None else build(DataSource, self.train, "data.train")

    @property
    def eval_sources(self) -> dict[str, DataSource]:
        """The evaluation sets by name; a single set has an empty name."""
        if self.eval is None:
            return {}
        if "path" in self.eval or not all(isinstance(value, dict) for value in self.eval.values()):
            return {"": build(DataSource, self.eval, "data.eval")}
        return {str(name): build(DataSource, value, f"data.eval.{name}") for name, value in self.eval.items()}

    def require_train_source(self) -> DataSource:
        if (source := self.train_source) is None:
            raise SettingsError("missing key train in section 'data': give the training data with --data.train.path.")
        return source

    @property
    def overlaps(self) -> list[str]:
        """A warning for each evaluation set that overlaps the training data."""
        learned = self.train_source
        return [
            f"data.eval reads examples of data.train, {source.path} ({source.split}): its scores will be too good. To "
            "evaluate on held-out examples, set hold_out: 0.1 in both, and split: validation in data.eval"
            for source in self.eval_sources.values()
            if learned is not None and source.shares_with(learned)
        ]

    def validate_sources(self) -> None:
        """Validates all sources, and refuses options that an evaluation does not support."""
        _ = self.train_source
        if any(source.streaming for source in self.eval_sources.values()):
            raise ValueError("data.eval.streaming must be false, because evaluation needs the number of examples.")
        _require(self.num_workers >= 0, "data.num_workers", self.num_workers, "0 or more")
        _require(0 <= self.max_bad_examples <= 1, "data.max_bad_examples", self.max_bad_examples, "from 0 to 1")


_RANGES: list[tuple[str, Callable[[Any], bool], str]] = [
    ("num_train_epochs timeout_minutes", lambda value: 0 < value < 1e6, "more than 0, below 1e6"),
    (
        "max_steps logging_steps eval_steps save_steps save_total_limit",
        lambda value: value >= 1,
        "a whole number of at least 1",
    ),
    (
        # More would fill the memory before the first step.
        "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps",
        lambda value: 1 <= value <= 10**7,
        "a whole number from 1 to 10 million",
    ),
    ("early_stopping_patience warmup_steps", lambda value: value >= 0, "0 or more"),
    ("seed", lambda value: 0 <= value < 2**32, "0 or more, below 2**32"),
    (
        "weight_decay max_grad_norm save_minutes deadline_minutes",
        lambda value: 0 <= value < math.inf,
        "0 or more, and finite",
    ),
    ("learning_rate", lambda value: 0 < value < math.inf, "more than 0, and finite"),
    ("ema_decay", lambda value: 0 <= value < 1, "in [0, 1); 0 is off"),
    ("lr_scheduler_type", lambda value: value in SCHEDULES, f"one of {', '.join(SCHEDULES)}"),
]


@strict
@dataclass
class TrainingArguments:
    """
    Configuration of a run. Its fields are the keys of the YAML file and the flags `--field value`; a key of a section
    has the flag `--section.key value`.

    Args:
        method (`str`):
            Method: `"semanir"`, `"disentangled-dit"`, or MRConv as `"mrconv-listops"`, `"mrconv-text"`,
            `"mrconv-retrieval"`, `"mrconv-lm"`, `"mrconv-masked-lm"`, `"mrconv-series"`, `"mrconv-regression"`,
            `"mrconv-positions"`, `"mrconv-pixels"`, `"mrconv-audio"` or `"mrconv-images"`.
        output_dir (`str`): The run folder. An unfinished run in it is continued.
        data (`dict`): The sections `train` and `eval`, and how they are read; empty if a program passes data sets.
        task (`dict`): Options of the method's task, for instance its degradation; the task checks them.
        model (`dict`): Configuration of the model; with `init_from`, changes to the checkpoint's configuration.
        init_from (`str`, *optional*): Folder or `org/name@revision` whose safetensors weights start the run.
        peft (`dict`, *optional*):
            A peft configuration, for instance `{peft_type: LORA, r: 8, target_modules: [query_key_value]}`. It needs
            `init_from`.
        seed (`int`, defaults to 0): Seed of initial weights, order, augmentation and dropout.
        max_steps (`int`, defaults to 1000): Number of optimizer steps.
        num_train_epochs (`float`, *optional*): Number of epochs, in place of `max_steps`; not for streams.
        per_device_train_batch_size (`int`, defaults to 8): Examples per process and backward pass.
        per_device_eval_batch_size (`int`, *optional*): Examples per process and forward pass; by default the task's.
        gradient_accumulation_steps (`int`, defaults to 1): Backward passes per optimizer step.
        optim (`str`, defaults to `"AdamW"`): Optimizer, a class of `torch.optim`. `Muon` trains matrices and
            kernels, AdamW the rest; `OneBit` trains signs and sizes of the difference from `init_from`, which a merge
            by `onebit` keeps whole.
        optim_args (`dict`, *optional*): Further arguments of the optimizer, for instance `{betas: [0.9, 0.95]}`.
        learning_rate (`float`, defaults to 2e-4): Peak learning rate.
        weight_decay (`float`, defaults to 0.0): Weight decay of the parameters that the task decays.
        lr_scheduler_type (`str`, defaults to `"cosine"`): A schedule of transformers.
        lr_scheduler_kwargs (`dict`, *optional*):
            Further arguments of the schedule: `{min_lr_rate: 0.1}` for `cosine_with_min_lr`, `{num_decay_steps: 100}`
            for `warmup_stable_decay`.
        warmup_steps (`int`, defaults to 0): Steps of linear warm-up.
        max_grad_norm (`float`, defaults to 1.0): Largest global norm of the gradient, which is clipped; 0 is off.
        mixed_precision (`"no"`, `"bf16"` or `"fp16"`, defaults to `"no"`): Autocast type.
        activation_checkpointing (`bool`, defaults to `False`): Recompute activations in the backward pass.
        ema_decay (`float`, defaults to 0.0): Decay of the weight average that is evaluated and published; 0 is off.
        torch_compile (`bool`, defaults to `False`): Compile the model.
        logging_steps (`int`, defaults to 10): Steps between rows of `metrics.jsonl`.
        eval_steps (`int`, defaults to 500): Steps between evaluations; the last step is always evaluated.
        early_stopping_patience (`int`, defaults to 0): Evaluations in a row without a best that end a run; 0 is off.
        save_steps (`int`, defaults to 500): Steps between resume states; evaluations and the last step have one too.
        save_minutes (`float`, defaults to 0.0): Most minutes between two resume states; 0 is off.
        deadline_minutes (`float`, defaults to 0.0): Minutes after which the run saves its state and ends; 0 is off.
        timeout_minutes (`float`, defaults to 1440.0):
            Minutes that an exchange of tensors, such as gradients, may take; then the run fails. Processes wait longer
            for one that prepares data, draws or pushes.
        save_total_limit (`int`, defaults to 2):
            Number of resume states kept, besides the best. If the last one is damaged, the run resumes from the one
            before; with 1 there is none, for half the disk space.
        report_to (`str` or `list[str]`, defaults to `"tensorboard"`): An accelerate tracker, several, or `"none"`.
        tracker_project (`str`, defaults to `"hf-ext"`): Name of the project in the tracker.
        run_name (`str`, *optional*): Name of the run in the tracker; the run folder's name when not given.
        strict_callbacks (`bool`, defaults to `False`): End the run if a tracker, a picture or a callback fails.
        hub_model_id (`str`, *optional*): Repository `org/name` to which models are pushed during the training.
        hub_strategy (`str`, defaults to `"best"`): Models that are pushed: each best one (`"best"`), the snapshot of
            each save (`"every_save"`), the same with its resume state in `last-checkpoint/` (`"checkpoint"`), or the
            last one (`"end"`). States contain paths of this machine: `"checkpoint"` needs `hub_private_repo`.
        hub_private_repo (`bool`, defaults to `False`): Make that repository private.
        resume_from_checkpoint (`str`, *optional*):
            Repository, `org/name@revision`, from whose `last-checkpoint/` a run in a new `output_dir` resumes. If
            `output_dir` contains a run, that run is resumed instead.
        allow_other_data (`bool`, defaults to `False`): Resume with other training data, which is refused otherwise.

    Example:
        >>> from hf_ext.training import TrainingArguments
        >>> arguments = TrainingArguments("semanir", "runs/first", {"train": {"path": "photos"}}, max_steps=100)
        >>> arguments.learning_rate, arguments.max_steps
        (0.0002, 100)
    """

    method: str
    output_dir: str = field(metadata=FREE)
    data: dict = field(default_factory=dict)
    task: dict = field(default_factory=dict)
    model: dict = field(default_factory=dict)
    init_from: str | None = None
    peft: dict | None = None
    seed: int = 0
    max_steps: int = field(default=1000, metadata=LENGTH)
    num_train_epochs: float | None = field(default=None, metadata=LENGTH)
    per_device_train_batch_size: int = field(default=8, metadata=BATCHING)
    per_device_eval_batch_size: int | None = field(default=None, metadata=FREE)
    gradient_accumulation_steps: int = field(default=1, metadata=BATCHING)
    optim: str = "AdamW"
    optim_args: dict = field(default_factory=dict)
    learning_rate: float = 2e-4
    weight_decay: float = 0.0
    lr_scheduler_type: str = "cosine"
    lr_scheduler_kwargs: dict = field(default_factory=dict)
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    activation_checkpointing: bool = False
    ema_decay: float = 0.0
    torch_compile: bool = False
    logging_steps: int = field(default=10, metadata=FREE)
    eval_steps: int = field(default=500, metadata=FREE)
    early_stopping_patience: int = field(default=0, metadata=FREE)
    save_steps: int = field(default=500, metadata=FREE)
    save_minutes: float = field(default=0.0, metadata=FREE)
    deadline_minutes: float = field(default=0.0, metadata=FREE)
    timeout_minutes: float = field(default=1440.0, metadata=FREE)
    save_total_limit: int = field(default=2, metadata=FREE)
    report_to: str | list[str] = field(default="tensorboard", metadata=FREE)
    tracker_project: str = field(default="hf-ext", metadata=FREE)
    run_name: str | None = field(default=None, metadata=FREE)
    strict_callbacks: bool = field(default=False, metadata=FREE)
    hub_model_id: str | None = field(default=None, metadata=FREE)
    hub_strategy: Literal["best", "every_save", "checkpoint", "end"] = field(default="best", metadata=FREE)
    hub_private_repo: bool = field(default=False, metadata=FREE)
    resume_from_checkpoint: str | None = field(default=None, metadata=FREE)
    allow_other_data: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.data, Section):
            # Paths as they were written.
            self.data = map_paths(self.data, lambda path: path)

    @property
    def data_arguments(self) -> DataArguments:
        return build(DataArguments, self.data, "data")

    @property
    def trackers(self) -> list[str]:
        named = [self.report_to] if isinstance(self.report_to, str) else self.report_to
        return [name for name in dict.fromkeys(named) if name != "none"]

    def validate_ranges(self) -> None:
        for names, is_right, words in _RANGES:
            for name in names.split():
                value = getattr(self, name)
                _require(value is None or is_right(value), name, value, words)

    def validate_peft(self) -> None:
        if self.peft is not None and self.init_from is None:
            raise ValueError("peft adapts an existing model: set init_from, or remove the section 'peft'.")

    def validate_report_to(self) -> None:
        if any("," in name for name in self.trackers):
            names = [name.strip() for tracker in self.trackers for name in tracker.split(",")]
            raise ValueError(f"report_to is {self.report_to!r}; several trackers are a list: [{', '.join(names)}].")

    def validate_hub(self) -> None:
        if self.hub_model_id is not None:
            from huggingface_hub.utils import validate_repo_id

            try:
                validate_repo_id(self.hub_model_id)
            except ValueError as error:
                raise ValueError(f"hub_model_id is {self.hub_model_id!r}; allowed: org/name. {error}") from error
        if self.hub_strategy == "checkpoint" and not self.hub_private_repo:
            raise ValueError("hub_strategy checkpoint pushes states with local paths: set hub_private_repo to true.")
        if self.resume_from_checkpoint is not None and Path(self.resume_from_checkpoint).expanduser().exists():
            raise ValueError(
                f"resume_from_checkpoint is the local {self.resume_from_checkpoint}; allowed: a Hub repository, "
                "org/name@revision. To go on with a run on this machine set output_dir to its folder."
            )

    def validate_data(self) -> None:
        _ = self.data_arguments


def _require(condition: bool, name: str, value: Any, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{name} must be {allowed}; got {value!r}.")


def map_paths(section: Any, change: Callable[[str], Any]) -> Any:
    """The section `data`, or one below it, with each path of a source changed."""
    if not isinstance(section, dict):
        return section
    # A copy of a section of a file has its texts too.
    changed, text = copy.copy(section), getattr(section, "texts", {}).get("path")
    if isinstance(path := as_meant(section.get("path"), str | list, text), list):
        changed["path"] = [map_paths(part if isinstance(part, dict) else {"path": part}, change) for part in path]
    elif path is not None:
        changed["path"] = change(path)
    else:
        changed.update((name, map_paths(item, change)) for name, item in section.items())
    return changed


def find_paths(section: Any) -> list[str]:
    """The paths of all sources in the section `data`, or in one below it."""
    found: list[str] = []
    map_paths(section, found.append)
    return found


def apply_overrides(mapping: dict[str, Any], flags: list[str]) -> dict[str, Any]:
    """Applies `--field value`, `--field=value` and `--section.field value`; a flag without a value means `true`."""
    # `null` removes a key, so that its default applies: `--model.num_classes null`, `--data.eval null`.
    result = copy.deepcopy(mapping)
    words, given = list(flags), set[str]()
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            raise ValueError(f"unexpected argument {word!r}: write overrides as `--field value` or `--field=value`.")
        name, sign, value = word[2:].partition("=")
        is_bare = not sign and (not words or words[0].startswith("--"))
        if not sign:
            value = "true" if is_bare else words.pop(0)
        if not value.strip():
            raise SettingsError(f"--{name} has no value: give one, or null for the default.")
        *sections, last = name.split(".")
        target = result
        for section in sections:
            section = _find_key(target, section)
            if target.get(section) is None:
                target[section] = type(target)()
            target = target[section]
            if not isinstance(target, dict):
                raise ValueError(f"--{name}: {section!r} is a value, not a section.")
        key, text = _find_key(target, last), value.strip()
        # YAML would cut or refuse it, such as `photos #1` or `*.png`.
        is_text = text[0] in "*&@%`" or (" #" in text and text[0] not in "'\"[{")
        try:
            target[key] = text if is_text else parse_words(text)[0]
        except SettingsError as error:
            target[key] = Unread(text, f"--{name} {value!r:.200} cannot be read as a YAML value: {error}")
        if isinstance(target, Section):
            # A flag without a value names nothing.
            target.texts[key] = None if is_bare else text
        given.add(name.replace("-", "_"))
        if target[key] is None:
            del target[key]
    _forget_parts(mapping.get("data"), result.get("data"), given)
    return result


def _forget_parts(before: Any, after: Any, given: set[str]) -> None:
    """Drops the share or slice of a source whose path a flag replaced: it was chosen for the path of the file."""
    sources, earlier = (_list_sources(section, "data") for section in (after, before))
    for place, source in sources.items():
        # Sources that share a path divide it, as in --data.train.path new --data.eval.path new.
        others = [other["path"] for key, other in sources.items() if key != place]
        others += [earlier[place]["path"]] if place in earlier else []
        chosen = [key for key in _PARTS if f"{place}.{key}" in given]
        shared = _resolve(source["path"]) in map(_resolve, others)
        # A given split replaces the share as well.
        if f"{place}.path" not in given or shared or chosen not in ([], ["split"]):
            continue
        earlier_part = {key: source[key] for key in _PARTS[:2] if key in source and key not in chosen}
        held, _ = source.pop("hold_out", 0), source.pop("hold_out_seed", None)
        if held and not chosen:
            source.pop("split", None)
        elif "split" in source and not chosen:
            # Of train[:25]+train[100:125] the word train stays.
            words = re.sub(r"\[[^\]]*\]", "", str(source["split"])).split("+")
            source["split"] = "+".join(dict.fromkeys(words))
        if earlier_part not in ({}, {"split": source.get("split")}):
            logger.warning(
                f"--{place}.path is another path than the file's, whose {earlier_part} is left out: "
                f"{source.get('split', 'train')!r} of the new path is read. For a part of it give --{place}.split."
            )


def _list_sources(section: Any, place: str) -> dict[str, dict[str, Any]]:
    """The mappings with a path in a section and below, by their place, as flags name it."""
    if not isinstance(section, dict):
        return {}
    found = {place: section} if "path" in section else {}
    for name, below in section.items():
        found |= _list_sources(below, f"{place}.{name}".replace("-", "_"))
    return found


def _resolve(path: Any) -> Any:
    """A path in full, of which two spellings are one; anything else as it is."""
    return os.path.realpath(os.path.expanduser(path)) if isinstance(path, str) else path


def _find_key(section: dict[Any, Any], word: str) -> Any:
    """The key for a word of a flag: `-` stands for `_`, except in names of the file, such as those of tasks."""
    return next((key for key in section if str(key) == word), word.replace("-", "_"))
