"""Configuration of a merge: which checkpoints, by which method, into what. From YAML, a mapping or keywords."""

import contextlib
import dataclasses
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn

from huggingface_hub.dataclasses import strict

from ..errors import DataError, UsageError
from ..settings import build, read_yaml
from .mergekit import MergekitError, read_mergekit
from .methods import METHODS, Method, options_by_name

# Fields that do not change the merged weights.
RUNNING = ("measure", "memory", "workers", "max_shard_size")


def whole_number(name: str, value: Any) -> int:
    """An `int` of a setting of the Python API: of numpy's and torch's whole numbers too, not of a float or a bool."""
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool) and (found := operator.index(value)) >= 1:
            return found
    raise UsageError(f"{name} must be a whole number of at least 1; got {value!r:.80}.")


def _take_numpy(kind: Any) -> Any:
    """Lets a strict dataclass take numpy's numbers and truths as Python's, and a whole number for a fraction."""
    checked = kind.__setattr__

    def set_plain(self: Any, name: str, value: Any) -> None:
        value = value.item() if getattr(value, "shape", None) == () else value
        is_fraction = type(value) is int and isinstance(getattr(kind, name, None), float)
        checked(self, name, float(value) if is_fraction else value)

    kind.__setattr__ = set_plain
    return kind


# @strict checks annotations that are types: no `from __future__ import annotations` here
@_take_numpy
@strict
@dataclass
class MergeConfig:
    """
    Configuration of a merge. Its fields are the keys of the YAML file; options that contradict each other are refused.

    Args:
        base (`str`): The model that all tasks were fine-tuned from: a folder, or `org/name` or `org/name@revision`.
        tasks (`dict[str, str]`):
            The fine-tunes by name, each a folder or `org/name[@revision]`. Another order changes at most the last bit
            of sums. A name has up to 64 letters, digits, `.`, `_` and `-`; `base` and `merged` are reserved.
        method (`str`, defaults to `"emr"`):
            Merge method; the page *Merge methods* lists all with their options.
        options (`dict`):
            Options of the method; in YAML they stand beside the other keys. A number may be given for each task
            (`{a: 0.5, b: 0.2}`), by layer (`[0.2, 0.8]`: from the first to the last) or by a text in the tensors'
            names (`[{filter: mlp, value: 0.5}, {value: 0.3}]`).
        masks (`bool`, *optional*):
            Give each task a mask and a scale. `"emr"` and `"given"` always do; `True` with another method applies
            them to its result (Table 9 of the paper).
        rescale (`str`, defaults to `"global"`):
            The scale λ: ratio of L1 norms over the whole model (`"global"`, the paper), ratio of sums of the tensors'
            means (`"official"`, the authors' scripts), ratio of L1 norms of each `"tensor"`, the least-squares scale
            (`"l2"`, `"tensor_l2"`), or 1 (`"none"`).
        drop (`float`, defaults to 0.0):
            DARE, before any method but `"given"`: share of each task vector, in [0, 1), that is dropped at random.
            The rest is divided by `1 - drop`.
        seed (`int`, defaults to 0): Seed of DARE's random choice.
        merged (`str`, *optional*): The merged model of method `"given"`: a folder or `org/name[@revision]`.
        statistics (`dict[str, str]`):
            Statistics for the methods `"fisher"` and `"regmean"`: a safetensors file for each task, which
            `hf-ext emr statistics` writes.
        exclude (`list[str]`):
            Regular expressions for tensors that are not merged, matched from the start of their names in the base or
            in a task; each task keeps its own.
        allow_missing (`bool`, defaults to `False`):
            For methods without masks: merge a tensor that a task lacks, or has in another shape or type, from the
            other tasks; without it such a merge is refused. With masks each task keeps its own tensor.
        measure (`bool`, defaults to `False`):
            Measure how far one model is from each task, for its report and `hf-ext emr compare`. Merges with masks,
            and by `"elect"`, are always measured.
        dtype (`str`, *optional*): Type of the merged tensors; the base's if not given.
        adapters (`str`, defaults to `"refuse"`):
            Treatment of tasks that are peft adapters: refuse them (`"refuse"`), or merge the adapters themselves, for
            (IA)³ (`"adapter"`).
        include_base (`bool`, defaults to `False`): Store a copy of the base in the result.
        max_shard_size (`str`, defaults to `"5GB"`): Largest weights file.
        memory (`str`, defaults to `"64MB"`): Memory of all I/O buffers together.
        workers (`int`, *optional*): Number of threads; one for each processor if not given.

    Example:
        >>> from hf_ext import MergeConfig
        >>> config = MergeConfig(base="org/base", tasks={"a": "org/a", "b": "org/b@v1"})
        >>> config.method, config.with_masks, config.memory_bytes
        ('emr', True, 64000000)
    """

    base: str
    tasks: dict[str, str]
    method: str = "emr"
    options: dict[str, Any] = field(default_factory=dict)
    masks: bool | None = None
    rescale: Literal["global", "official", "tensor", "l2", "tensor_l2", "none"] = "global"
    drop: float = 0.0
    seed: int = 0
    merged: str | None = None
    statistics: dict[str, str] = field(default_factory=dict)
    exclude: list[str] = field(default_factory=list)
    allow_missing: bool = False
    measure: bool = False
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    adapters: Literal["refuse", "adapter"] = "refuse"
    include_base: bool = False
    max_shard_size: str = "5GB"
    memory: str = "64MB"
    workers: int | None = None

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "MergeConfig":
        """
        Builds a configuration from a mapping.

        Args:
            mapping (`Mapping[str, Any]`):
                Values of the fields, and of the method's options beside them; or a configuration of mergekit, for
                linear, slerp, task_arithmetic, ties and model_stock.

        Returns:
            [`MergeConfig`]: The configuration.

        Raises:
            ValueError: A key is unknown or missing, a value is not allowed, or two contradict each other.
        """
        return load_config(mapping)

    @classmethod
    def from_yaml(cls, path: str | Path) -> "MergeConfig":
        """
        Reads a configuration from a YAML file. Relative folders in it are relative to the working directory.

        Args:
            path (`str` or `Path`): The file.

        Returns:
            [`MergeConfig`]: The configuration.

        Raises:
            ValueError: It is no YAML, repeats a key, or holds what [`MergeConfig.from_dict`] refuses.
            FileNotFoundError: There is no such file.
        """
        return load_config(path)

    def to_dict(self) -> dict[str, Any]:
        """
        The fields as plain values; [`MergeConfig.from_dict`] makes the same configuration of them.

        Returns:
            `dict[str, Any]`: Value of each field, and of each option of the method that was given.
        """
        fields = dataclasses.asdict(self)
        return fields | fields.pop("options")

    @property
    def merge_method(self) -> Method:
        return METHODS[self.method]

    @property
    def arguments(self) -> dict[str, Any]:
        """The options of the method, with the default of what was not given."""
        return {name: self.options.get(name, option.default) for name, option in self.merge_method.options.items()}

    def find_options(self, tensor: str, depth: float, tasks: Sequence[str]) -> dict[str, Any]:
        """The options of the method for a tensor at a depth from 0, the first layer, to 1, and its tasks."""
        given, options = self.arguments, self.merge_method.options
        return {name: option.find(given[name], tensor, depth, tasks) for name, option in options.items()}

    def find_shares(self, tensor: str, depth: float, tasks: Sequence[str]) -> list[float]:
        """Shares of the base and of these tasks in a running statistic; none is negative, as no variance may be."""
        given = self.find_options(tensor, depth, tasks)
        weight = given["weight"] if isinstance(given.get("weight"), list) else [1.0] * len(tasks)
        shares = [0.0, *(value / (sum(weight) or 1.0) for value in weight)]
        if self.method == "task_arithmetic":
            shares = [1 - sum(weight), *weight]
        if self.method == "slerp" and len(tasks) == len(self.tasks):
            shares = [0.0, 1 - given["t"], given["t"]][-len(tasks) - 1 :]
        total = sum(share for share in shares if share > 0)
        return [share / total if share > 1e-12 * total else 0.0 for share in shares]

    @property
    def with_masks(self) -> bool:
        """True if the result has a mask and a scale for each task."""
        return self.merge_method.masks if self.masks is None else self.masks

    @property
    def is_measured(self) -> bool:
        """True if the tasks are compared with the result: scales need it, and the kernel of the election does it."""
        return self.measure or self.with_masks or self.merge_method.fused

    @property
    def scaling(self) -> str:
        """The choice of scales: deltas use least squares per tensor."""
        return "tensor_l2" if self.merge_method.deltas else self.rescale

    @property
    def memory_bytes(self) -> int:
        return _in_bytes("memory", self.memory)

    @property
    def shard_bytes(self) -> int:
        return _in_bytes("max_shard_size", self.max_shard_size)

    def validate_sources(self) -> None:
        if not self.base.strip():
            raise ValueError("base is empty: give the folder or org/name that the tasks were fine-tuned from.")
        if not self.tasks:
            raise ValueError("tasks is empty: give at least one `name: folder` or `name: org/name[@revision]`.")
        for name, source in self.tasks.items():
            # "base" and "merged" name the other two sources in messages
            if not re.fullmatch("[A-Za-z0-9._-]{1,64}", name) or name in (".", "..", "base", "merged"):
                raise ValueError(
                    f"task name {name!r:.80} is not allowed: it names a folder, so use up to 64 of the letters A-Z, "
                    "a-z, digits, '.', '_' and '-', and not '.', '..', 'base' or 'merged' alone."
                )
            if not source.strip():
                raise ValueError(f"task {name!r} has no source: give a folder or org/name[@revision].")
        # both would get the same folder on a case-insensitive file system
        for first, second in pairwise(sorted(self.tasks, key=str.casefold)):
            if first.casefold() == second.casefold():
                raise ValueError(f"tasks {first!r} and {second!r} differ only in upper and lower case; rename one.")

    def validate_numbers(self) -> None:
        for name, is_right, allowed in (
            ("drop", 0 <= self.drop < 1, "in [0, 1); 0 is off"),
            ("seed", 0 <= self.seed < 2**64, "0 or more and under 2**64"),
            ("workers", self.workers is None or self.workers >= 1, "a whole number of at least 1"),
            ("memory", self.memory_bytes >= 10**6, "at least 1MB"),
            ("max_shard_size", self.shard_bytes >= 1, "at least 1B"),
        ):
            if not is_right:
                raise ValueError(f"{name} must be {allowed}; got {getattr(self, name)!r}.")
        for pattern in self.exclude:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"exclude: {pattern!r} is not a valid regular expression ({error}).") from error

    def validate_method(self) -> None:
        """Refuses an unknown method, options that it does not have, a missing input and contradicting settings."""
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}; got {self.method!r:.80}.")
        name, method, found = self.method, self.merge_method, {}
        for option, value in self.options.items():
            if option not in method.options:
                users = " and ".join(options_by_name().get(option, ()))
                _refuse(option, name, f"it is an option of {users}" if users else "no method has it")
            found[option] = method.options[option].read(option, value)
            for task in found[option] if isinstance(found[option], dict) else ():
                if task not in self.tasks:
                    raise ValueError(f"{option} is given for {task!r:.80}; the tasks are {', '.join(self.tasks)}.")
        self.options = found
        if method.takes_merged and self.merged is None:
            raise ValueError(f"method {name!r} needs `merged`: the folder or org/name[@revision] of the merged model.")
        if method.most_tasks is not None and len(self.tasks) > method.most_tasks:
            raise ValueError(f"method {name!r} takes at most {method.most_tasks} tasks; got {', '.join(self.tasks)}.")
        if method.statistics is not None and self.statistics.keys() != self.tasks.keys():
            raise ValueError(
                f"method {name!r} needs `statistics` of each task, {', '.join(self.tasks)}; got those of "
                f"{', '.join(self.statistics) or 'none'}. hf-ext emr statistics --kind {method.statistics} makes them."
            )
        for field_name, is_wrong, why in _RULES:
            if is_wrong(self, method):
                _refuse(field_name, name, why)


# Fields that have no effect with a method or contradict it: condition and reason.
_RULES: tuple[tuple[str, Callable[[MergeConfig, Any], bool], str], ...] = (
    ("merged", lambda c, m: c.merged is not None and not m.takes_merged, "only method 'given' uses it"),
    ("statistics", lambda c, m: bool(c.statistics) and m.statistics is None, "this method uses no statistics"),
    ("drop", lambda c, m: c.drop != 0 and m.takes_merged, "the model is merged already"),
    ("masks: false", lambda c, m: c.masks is False and m.name == "emr", "without masks it is method 'elect'"),
    ("masks: false", lambda c, m: c.masks is False and m.takes_merged, "without masks it would copy `merged`"),
    ("masks: false", lambda c, m: c.masks is False and bool(m.deltas), "this method stores only signs of the tasks"),
    ("drop", lambda c, m: c.drop != 0 and bool(m.deltas), "this method cannot store dropped elements"),
    ("rescale", lambda c, m: c.rescale not in (c.scaling, "global"), "each tensor has its own scale"),
    ("rescale", lambda c, m: c.rescale != "global" and not c.with_masks, "it scales masks, which masks: true writes"),
    ("include_base", lambda c, m: c.include_base and not c.with_masks, "only masks, of masks: true, need the base"),
    ("allow_missing", lambda c, m: c.allow_missing and c.with_masks, "with masks each task keeps its own"),
    ("allow_missing", lambda c, m: c.allow_missing and c.adapters != "refuse", "peft loads the first's parts"),
)


def load_config(config: MergeConfig | Mapping[str, Any] | str | Path) -> MergeConfig:
    """A configuration as it is, of a mapping, or of a YAML file, which its errors then name."""
    if isinstance(config, MergeConfig):
        return config
    if isinstance(config, Mapping):
        mapping, file = config, None
    elif isinstance(config, (str, Path)):
        mapping, file = read_yaml(config), config
    else:
        kind = type(config).__name__
        raise TypeError(f"a merge is described by a MergeConfig, a mapping or a YAML file; got {kind}.")
    try:
        if "merge_method" in mapping:
            mapping = read_mergekit(mapping)
        known = options_by_name()
        options = {key: value for key, value in mapping.items() if key in known and value is not None}
        fields = {key: value for key, value in mapping.items() if key not in known}
        own = fields.get("options", {})
        if options and isinstance(own, Mapping):
            fields["options"] = {**own, **options}
        return build(MergeConfig, fields, also=known)
    except ValueError as error:
        if file is None:
            raise
        line = f", line {error.find_line(file)}" if isinstance(error, MergekitError) else ""
        raise DataError(f"{file}{line}: {error}") from error


def _refuse(name: str, method: str, why: str) -> NoReturn:
    raise ValueError(f"{name} does not go with method {method!r}: {why}. Remove {name} or change the method.")


def _in_bytes(name: str, text: str) -> int:
    # Limits the number of digits.
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?B)\s*", text, re.IGNORECASE)
    if found is None:
        raise ValueError(f"{name} must be a number and a unit, such as '64MB' or '5GB'; got {text!r:.80}.")
    return int(float(found[1]) * 1000 ** "BKMGT".index(found[2][0].upper()))
