"""Configurations of mergekit, for methods that both have: the same models, numbers and result.

All is computed in float32 and rounded once. Mergekit computes in `dtype` and rounds after every step, so in half
precision the two results differ by several roundings. Of equal elements where a share of TIES ends, mergekit keeps
what its sort puts first, which depends on the processor; here it is as many, evenly spaced. Whatever
would give something else is refused, with its line.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ..emr.artifact import fetch_file
from ..errors import UsageError
from ..files import read_json_object
from .methods import METHODS, Option

_KEYS = (
    *("base_model", "chat_template", "dtype", "merge_method", "models", "name", "out_dtype", "parameters", "slices"),
    *("tokenizer", "tokenizer_source"),
)
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_DTYPES = ("float32", "float16", "bfloat16")
# The last one tells how mergekit keeps masks, which changes nothing.
_PARAMETERS = ("weight", "density", "lambda", "normalize", "rescale", "t", "filter_wise", "int8_mask")
# The others mergekit reads for all models together, and one model's would have no effect.
_OF_A_MODEL = ("weight", "density", "int8_mask")


class MergekitError(UsageError):
    """An entry of a mergekit configuration that is not supported; `place` holds the keys that lead to it."""

    place: tuple[Any, ...] = ()

    def find_line(self, file: str | Path) -> int:
        """The line of the file that has the entry, or of what is around it."""
        node: Any = yaml.compose(Path(file).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        line = node.start_mark.line
        for key in self.place:
            if isinstance(node, yaml.SequenceNode):
                node = node.value[key]
                line = node.start_mark.line
                continue
            found = [(own, value) for own, value in node.value if own.value == str(key)]
            if not found:
                break
            line, node = found[0][0].start_mark.line, found[0][1]
        return int(line) + 1


@dataclass(frozen=True)
class _Entry:
    """A value of the configuration, and the keys that lead to it."""

    value: Any
    place: tuple[Any, ...] = ()

    def refuse(self, what: str) -> NoReturn:
        error = MergekitError(f"this mergekit configuration is not supported: it has {what}.")
        error.place = self.place
        raise error

    def get(self, key: Any) -> "_Entry":
        """The entry of a mapping; what is not there is `None`."""
        return _Entry(self.value.get(key), (*self.place, key))

    def check(self, what: str, *known: str, needed: str | None = None) -> "_Entry":
        """The same, after anything but a mapping with these keys was refused; `None` is an empty one."""
        found = {} if self.value is None and needed is None else self.value
        if not isinstance(found, Mapping):
            self.refuse(f"{what} {found!r:.80}, which must be `key: value` lines")
        for key in found if known else ():
            if key not in known:
                _Entry(None, (*self.place, key)).refuse(f"{key!r:.80} in {what}; {', '.join(known)} are known")
        if needed is not None and needed not in found:
            self.refuse(f"{what} without {needed}")
        return _Entry(found, self.place)

    def items(self, what: str) -> list["_Entry"]:
        """The entries of a list that holds one or more."""
        if not isinstance(self.value, list) or not self.value:
            self.refuse(f"{what} {self.value!r:.80}, which must be a list")
        return [_Entry(item, (*self.place, index)) for index, item in enumerate(self.value)]


def read_mergekit(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a [`MergeConfig`] that means the same."""
    root = _Entry(given)
    method = root.get("merge_method")
    if not isinstance(method.value, str) or method.value not in _METHODS:
        random = ". Its random draws would differ here: see `drop`" if str(method.value).startswith("dare") else ""
        method.refuse(f"merge_method {method.value!r:.80}; supported methods: {', '.join(_METHODS)}{random}")
    ours, read = _METHODS[method.value]
    root.check("the file", *_KEYS)
    template = root.get("chat_template")
    if template.value not in (None, "auto"):
        template.refuse(f"chat_template {template.value!r:.80}; supported: auto, the one in which all models agree")
    reader = _Reader(root, METHODS[ours].options)
    tokens = root.get("tokenizer_source")
    if root.value.get("tokenizer") is not None:
        if tokens.value is not None:
            tokens.refuse("tokenizer_source beside tokenizer")
        told = root.get("tokenizer").check("tokenizer")
        # no tokens and no padding say nothing
        given_ones = {key: value for key, value in told.value.items() if value}
        tokens = _Entry(given_ones, told.place).check("tokenizer", "source", needed="source").get("source")
    if tokens.value not in (None, "base", reader.base):
        others = f"{tokens.value!r:.80}: the result has the base's tokens; mergekit makes a model of others"
        tokens.refuse(f"{'.'.join(tokens.place)} {others}")
    fields = {"method": ours, "base": reader.base, **read(reader), "tasks": reader.tasks}
    # the later one counts
    for key in ("dtype", "out_dtype"):
        if (dtype := root.get(key)).value is not None:
            fields["dtype"] = str(dtype.value).removeprefix("torch.")
            if fields["dtype"] not in _DTYPES:
                dtype.refuse(f"{key} {dtype.value!r:.80}; {', '.join(_DTYPES)} are known")
    return fields


class _Reader:
    """Models and parameters: of a model, of its slice, of all, in this order."""

    def __init__(self, root: _Entry, options: Mapping[str, Option]) -> None:
        self.root, self.options = root, options
        self.base = None if root.value.get("base_model") is None else _read_model(root.get("base_model"))
        sources, self.levels = _read_sources(root)
        self.sources: dict[str, _Entry] = {}
        for entry in sources:
            model = _read_model(entry.get("model"))
            if model in self.sources:
                entry.get("model").refuse("a model that comes twice")
            self.sources[model] = entry.get("parameters").check("parameters of one model", *_OF_A_MODEL)
        # of an average it does not matter what the differences are from
        averages = root.value["merge_method"] == "linear"
        if self.base is None and not averages:
            root.get("merge_method").refuse("a merge by differences without base_model")
        self.tasks: dict[str, str] = {}
        for model in self.sources:
            if averages or model != self.base:
                # named by the last part of where it is
                last = re.sub(r"[^A-Za-z0-9._-]", "-", Path(model.partition("@")[0]).name).strip(".")[:58] or "model"
                plain = f"{last}-model" if last in ("base", "merged") else last
                taken = {name.casefold() for name in self.tasks}
                names = (plain, *(f"{plain}-{number}" for number in range(2, len(taken) + 2)))
                self.tasks[next(name for name in names if name.casefold() not in taken)] = model
        least = 2 if root.value["merge_method"] == "model_stock" else 1
        if len(self.tasks) < least:
            self.refuse(f"{len(self.tasks)} model(s) beside the base, of which this method needs {least} or more")

    def refuse(self, what: str) -> NoReturn:
        """Refuses the models together."""
        self.root.get("models" if "models" in self.root.value else "slices").refuse(what)

    def read(self, name: str, default: Any = None, *, option: Option | None = None, model: str | None = None) -> Any:
        """A parameter of a model, or of all; levels are joined where filters of one leave tensors to the next."""
        option = option or self.options[name]
        chain = [self.sources[model]] if model is not None else []
        parts: list[Any] = []
        for level in (*chain, *self.levels, _Entry({name: default})):
            entry = level.get(name)
            if entry.value is None:
                continue
            entries = [entry.value] if isinstance(entry.value, Mapping) else entry.value
            try:
                option.read(name, entries)
            except ValueError as error:
                entry.refuse(f"a parameter that this method does not take: {str(error).rstrip('.')}")
            if not (isinstance(entries, list) and isinstance(entries[0], Mapping)):
                return [*parts, {"value": entry.value}] if parts else entry.value
            parts += entries
            if any(part.get("filter", "*") in (None, "*") for part in entries):
                return parts
        of = f" of {model}" if model is not None else ""
        place = self.sources[model] if model is not None else self.root.get("merge_method")
        place.refuse(f"no {name}{of}{' where no filter fits' if parts else ''}, which this method needs")

    def read_each(self, name: str, default: Any = None) -> Any:
        """A parameter of the tasks: one for all, or one for each."""
        found = {task: self.read(name, default, model=model) for task, model in self.tasks.items()}
        first = next(iter(found.values()))
        return first if all(setting == first for setting in found.values()) else found

    def read_flag(self, name: str, default: bool) -> bool:
        return bool(self.read(name, default, option=Option("", kind=bool, by_layer=False)))


def _read_linear(reader: _Reader) -> dict[str, Any]:
    if reader.base is not None and reader.base not in reader.sources:
        reader.root.get("base_model").refuse("a base_model of linear that is none of its models and would be averaged")
    base = reader.base or next(iter(reader.tasks.values()))
    return {"base": base, "weight": reader.read_each("weight"), "normalize": reader.read_flag("normalize", True)}


def _read_slerp(reader: _Reader) -> dict[str, Any]:
    if len(reader.tasks) != 1:
        reader.refuse(f"slerp of {len(reader.tasks) + 1} models; base_model and one more are needed")
    return {"t": reader.read("t")}


def _read_task_arithmetic(reader: _Reader) -> dict[str, Any]:
    weight = reader.read_each("weight")
    factor = float(reader.read("lambda", 1.0, option=Option("", by_layer=False)))
    if reader.read_flag("normalize", False):
        if factor == 1:
            return {"method": "average", "weight": weight}
        weights = weight if isinstance(weight, Mapping) else dict.fromkeys(reader.tasks, weight)
        if not all(isinstance(own, int | float) for own in weights.values()) or not sum(weights.values()):
            reader.root.get("merge_method").refuse("lambda beside normalize, and weights by layer or of no sum")
        factor, weight = factor / sum(weights.values()), weights
    return {"weight": weight if factor == 1 else _multiply(weight, factor)}


def _read_ties(reader: _Reader) -> dict[str, Any]:
    if reader.read_flag("rescale", False):
        next(level for level in reader.levels if "rescale" in level.value).get("rescale").refuse("rescale of ties")
    return {
        "weight": reader.read_each("weight"),
        "density": reader.read_each("density", 1.0),
        "normalize": reader.read("normalize", True),
        "scale": reader.read("lambda", 1.0, option=reader.options["scale"]),
    }


def _read_model_stock(reader: _Reader) -> dict[str, Any]:
    return {"filter_wise": reader.read("filter_wise", False), "away": True, "clamp": 1e-6}


# Of each method of mergekit ours, and its options.
_METHODS: dict[str, tuple[str, Callable[[_Reader], dict[str, Any]]]] = {
    "linear": ("average", _read_linear),
    "slerp": ("slerp", _read_slerp),
    "task_arithmetic": ("task_arithmetic", _read_task_arithmetic),
    "ties": ("ties_by_tensor", _read_ties),
    "model_stock": ("model_stock", _read_model_stock),
}


def _read_sources(root: _Entry) -> tuple[list[_Entry], list[_Entry]]:
    """The models with their own parameters, and those of all, the nearer first."""
    models, slices = root.get("models"), root.get("slices")
    shared = root.get("parameters").check("parameters", *_PARAMETERS)
    if (models.value is None) == (slices.value is None):
        slices.refuse("`models` and `slices` both, or none of them")
    if slices.value is None:
        entries = models.items("models")
        return [entry.check("a model", "model", "parameters", needed="model") for entry in entries], [shared]
    part, *others = (
        item.check("a slice", "sources", "parameters", needed="sources") for item in slices.items("slices")
    )
    sources, every = _read_slice(part), [shared.value, part.value, *(item.value for item in others)]
    for other in others:
        if other.value.get("parameters") != part.value.get("parameters") or any(map(_is_by_layer, every)):
            other.refuse("a second slice with parameters of its own or by layer, which are mergekit's alone")
        sources = _join_slices(sources, _read_slice(other), other)
    for item in sources:
        model, given = _read_model(item.get("model")), item.get("layer_range")
        folder = Path(model).expanduser()
        path = folder / "config.json" if folder.exists() else fetch_file(model, "config.json")
        config = read_json_object(path, optional=True)
        layers = next((config[key] for key in _LAYERS if isinstance(config.get(key), int)), None)
        if layers is None:
            item.refuse(f"slices of {model}, whose config.json does not tell its layers: give `models` instead")
        if given.value != [0, layers]:
            given.refuse(f"layer_range {given.value!r:.80}: all layers of the model are [0, {layers}]")
    return sources, [part.get("parameters").check("parameters", *_PARAMETERS), shared]


def _read_slice(part: _Entry) -> list[_Entry]:
    keys = ("model", "parameters", "layer_range")
    return [item.check("a source", *keys, needed="model") for item in part.get("sources").items("sources")]


def _join_slices(first: list[_Entry], second: list[_Entry], place: _Entry) -> list[_Entry]:
    """The sources of two slices of the same models, whose layers follow each other, as those of one."""
    plain = [[{**item.value, "layer_range": None} for item in sources] for sources in (first, second)]
    ranges = [
        (one.value.get("layer_range"), two.value.get("layer_range")) for one, two in zip(first, second, strict=False)
    ]
    lists = all(isinstance(layers, list) and len(layers) == 2 for two in ranges for layers in two)
    if plain[0] != plain[1] or not lists or not all(_follow(*two) for two in ranges):
        place.refuse(
            "a second slice that does not go on with the layers of the same models, which is mergekit's alone"
        )
    joined = zip(first, ranges, strict=True)
    return [_Entry({**item.value, "layer_range": [one[0], two[1]]}, item.place) for item, (one, two) in joined]


def _follow(one: list[Any], two: list[Any]) -> bool:
    rising = [*one, *two[1:]]
    return all(type(at) is int for at in (*one, *two)) and one[1] == two[0] and rising == sorted({*rising})


def _is_by_layer(setting: Any) -> bool:
    """True if a parameter in it is a list of values, which mergekit spreads over the layers of each slice."""
    if isinstance(setting, Mapping):
        return any(_is_by_layer(value) for key, value in setting.items() if key != "layer_range")
    parts = setting if isinstance(setting, list) else []
    return any(isinstance(part, int | float) or _is_by_layer(part) for part in parts)


def _read_model(model: _Entry) -> str:
    told = model.value
    # the forms in which mergekit writes a model: `{model: {path, revision}}`, with nothing else that is not null
    for keys in (("model", "lora", "override_architecture"), ("path", "revision")):
        if isinstance(told, Mapping) and keys[0] in told and told.keys() <= {*keys}:
            first, *others = (told.get(key) for key in keys)
            if keys[0] == "path" and others[0] and isinstance(first, str):
                told = f"{first}@{others[0]}"
            elif not any(others):
                told = first
    if not isinstance(told, str) or not told.strip() or "+" in told:
        advice = "name a folder or org/name[@revision]; adapters are merged in by peft first"
        model.refuse(f"model {told!r:.80}: {advice}")
    return told


def _multiply(setting: Any, factor: float) -> Any:
    if isinstance(setting, Mapping):
        return {key: value if key == "filter" else _multiply(value, factor) for key, value in setting.items()}
    if isinstance(setting, list):
        return [_multiply(value, factor) for value in setting]
    return float(setting) * factor
