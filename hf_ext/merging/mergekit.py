"""Configurations of mergekit, for methods that both have: the same models, numbers and result.

All is computed in float32 and rounded once. Mergekit computes in `dtype` and rounds after every step, so in half
precision the two results differ by several roundings. Whatever would give something else is refused, with its line.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hf_ext.emr.artifact import fetch_file
from hf_ext.files import read_json

from ..errors import UsageError

_KEYS = (
    "base_model",
    "chat_template",
    "dtype",
    "merge_method",
    "models",
    "name",
    "out_dtype",
    "parameters",
    "slices",
    "tokenizer",
    "tokenizer_source",
)
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
# The last one tells how mergekit keeps masks, which changes nothing.
_PARAMETERS = ("weight", "density", "lambda", "normalize", "rescale", "t", "filter_wise", "int8_mask")
# A source of a slice or an entry of `models`: model and parameters.
_Source = tuple[str, Mapping[str, Any]]


class MergekitError(UsageError):
    """An entry of a mergekit configuration that is not supported; `entry` is the key or value that says it."""

    entry = ""

    def find_line(self, text: str) -> int | None:
        """The line of the file that has the entry, if one has."""
        word = re.compile(rf"(?<![\w.-]){re.escape(self.entry)}(?![\w.-])")
        lines = enumerate(text.split("\n"), 1)
        return next((number for number, line in lines if self.entry and word.search(line.partition("#")[0])), None)


def read_mergekit(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a [`MergeConfig`] that means the same."""
    method = given.get("merge_method")
    if not isinstance(method, str) or method not in _METHODS:
        random = isinstance(method, str) and method.startswith(("dare", "della"))
        _refuse(
            f"merge_method {method!r:.80}; supported methods: {', '.join(_METHODS)}"
            + (". Its random draws would differ here: see `drop` and method della" if random else ""),
            "merge_method",
        )
    for key in given:
        if key not in _KEYS:
            _refuse(f"{key!r:.80}; {', '.join(_KEYS)} are known", str(key))
    template = given.get("chat_template")
    if template not in (None, "auto"):
        _refuse(f"chat_template {template!r:.80}; supported: auto, the one in which all models agree", "chat_template")
    sources, levels = _read_sources(given)
    base = None if given.get("base_model") is None else _read_model(given["base_model"])
    _check_tokenizer(given, base)
    fields = _METHODS[method](_Reader(base, sources, levels))
    dtype = given.get("out_dtype") or given.get("dtype")
    return fields | ({} if dtype is None else {"dtype": dtype})


def _check_tokenizer(given: Mapping[str, Any], base: str | None) -> None:
    """Refuses another tokenizer than the base's, by either key of mergekit."""
    key, source = "tokenizer_source", given.get("tokenizer_source")
    if given.get("tokenizer") is not None:
        told = _mapping("tokenizer", given["tokenizer"])
        if source is not None or set(told) != {"source"}:
            _refuse(
                f"tokenizer with {', '.join(map(str, told))} here; it has source alone, without tokenizer_source",
                "tokenizer",
            )
        key, source = "tokenizer.source", told["source"]
    if source not in (None, "base", base):
        _refuse(
            f"{key} {source!r:.80}: the result has the base's tokens; mergekit makes a model with others",
            key.partition(".")[0],
        )


class _Reader:
    """Models and parameters: of a model, of its slice, of all, in this order."""

    def __init__(self, base: str | None, sources: Sequence[_Source], levels: Sequence[Mapping[str, Any]]) -> None:
        self.base, self.levels = base, levels
        self.sources = dict(sources)
        if len(self.sources) < len(sources):
            _refuse("a model that comes twice")
        for key in {key for part in (*self.sources.values(), *levels) for key in part} - {*_PARAMETERS}:
            _refuse(f"parameter {key!r:.80}; {', '.join(_PARAMETERS)} are known", str(key))

    def name_tasks(self, *, without_base: bool = True, least: int = 1) -> dict[str, str]:
        """The tasks by a name of their own, which is the last part of where they are."""
        if without_base and self.base is None:
            _refuse("a merge by differences without base_model")
        found: dict[str, str] = {}
        for model in self.sources:
            if without_base and model == self.base:
                continue
            last = Path(model.partition("@")[0]).name
            plain = re.sub(r"[^A-Za-z0-9._-]", "-", last).strip(".")[:58] or "model"
            plain = f"{plain}-model" if plain in ("base", "merged") else plain
            taken = {name.casefold() for name in found}
            numbered = (f"{plain}-{number}" if number > 1 else plain for number in range(1, len(found) + 2))
            found[next(name for name in numbered if name.casefold() not in taken)] = model
        if len(found) < least:
            _refuse(f"{len(found)} model(s) beside the base, of which this method needs {least} or more")
        return found

    def read(self, name: str, default: Any = None, *, model: str | None = None) -> Any:
        """A parameter of a model, or of all; levels are joined where filters of one leave tensors to the next."""
        chain = [self.sources[model]] if model is not None else []
        parts: list[Any] = []
        for level in (*chain, *self.levels, {name: default}):
            setting = level.get(name)
            if setting is None:
                continue
            entries = [setting] if isinstance(setting, Mapping) else setting
            if not (isinstance(entries, list) and entries and isinstance(entries[0], Mapping)):
                return [*parts, {"value": setting}] if parts else setting
            parts += entries
            if any(isinstance(entry, Mapping) and entry.get("filter", "*") in (None, "*") for entry in entries):
                return parts
        of = f" of {model}" if model is not None else ""
        _refuse(f"no {name}{of}{' where no filter fits' if parts else ''}, which this method needs")

    def read_each(self, name: str, tasks: Mapping[str, str], default: Any = None) -> Any:
        """A parameter of the tasks: one for all, or one for each."""
        found = {task: self.read(name, default, model=model) for task, model in tasks.items()}
        first = next(iter(found.values()))
        return first if all(setting == first for setting in found.values()) else found

    def read_flag(self, name: str, default: bool) -> bool:
        """A parameter that is true or false for the whole model."""
        flag = self.read(name, default)
        if not isinstance(flag, bool):
            _refuse(f"{name} {flag!r:.80}, which must be true or false", name)
        return bool(flag)


def _read_linear(reader: _Reader) -> dict[str, Any]:
    if reader.base is not None and reader.base not in reader.sources:
        _refuse("a base_model of linear that is none of its models, and would be averaged in")
    # of an average it does not matter what the differences are from
    tasks = reader.name_tasks(without_base=False)
    weight = reader.read_each("weight", tasks)
    return {
        "method": "average",
        "base": reader.base or next(iter(tasks.values())),
        "tasks": tasks,
        "weight": weight,
        "normalize": reader.read_flag("normalize", True),
    }


def _read_slerp(reader: _Reader) -> dict[str, Any]:
    tasks = reader.name_tasks()
    if len(tasks) != 1:
        _refuse(f"slerp of {len(tasks) + 1} models; base_model and one more are needed")
    return {"method": "slerp", "base": reader.base, "tasks": tasks, "t": reader.read("t")}


def _read_task_arithmetic(reader: _Reader) -> dict[str, Any]:
    tasks, factor = reader.name_tasks(), reader.read("lambda", 1.0)
    weight = reader.read_each("weight", tasks)
    normalize = reader.read_flag("normalize", False)
    if isinstance(factor, list | bool) or (normalize and factor != 1):
        _refuse(f"lambda {factor!r:.80} here: put it into the weights", "lambda")
    if normalize:
        return {"method": "average", "base": reader.base, "tasks": tasks, "weight": weight}
    weight = weight if factor == 1 else _multiply(weight, factor)
    return {"method": "task_arithmetic", "base": reader.base, "tasks": tasks, "weight": weight}


def _read_ties(reader: _Reader) -> dict[str, Any]:
    if reader.read_flag("rescale", False):
        _refuse("rescale: true of ties", "rescale")
    tasks = reader.name_tasks()
    return {
        "method": "ties_by_tensor",
        "base": reader.base,
        "tasks": tasks,
        "weight": reader.read_each("weight", tasks),
        "density": reader.read_each("density", tasks, 1.0),
        "normalize": reader.read("normalize", True),
        "scale": reader.read("lambda", 1.0),
    }


def _read_model_stock(reader: _Reader) -> dict[str, Any]:
    tasks = reader.name_tasks(least=2)
    rows = reader.read("filter_wise", False)
    return {"method": "model_stock", "base": reader.base, "tasks": tasks, "filter_wise": rows, "away": True}


_METHODS: dict[str, Callable[[_Reader], dict[str, Any]]] = {
    "linear": _read_linear,
    "slerp": _read_slerp,
    "task_arithmetic": _read_task_arithmetic,
    "ties": _read_ties,
    "model_stock": _read_model_stock,
}


def _read_sources(given: Mapping[str, Any]) -> tuple[list[_Source], list[Mapping[str, Any]]]:
    """The models with their own parameters, and those of all, the nearer first."""
    models, slices = given.get("models"), given.get("slices")
    shared = _mapping("parameters", given.get("parameters") or {})
    if (models is None) == (slices is None):
        _refuse("`models` and `slices` both, or none of them", "slices")
    if slices is None:
        return [_read_source(entry, "model", "parameters") for entry in _list("models", models)], [shared]
    # Slices of the same models with the same parameters are one, in their order.
    first, reached = _mapping("a slice", _list("slices", slices)[0]), 0
    for part in (_mapping("a slice", item) for item in slices):
        if not {"sources"} <= set(part) <= {"sources", "parameters"}:
            _refuse(f"a slice with {', '.join(map(str, part))}; it has sources and parameters", "slices")
        ranges = [_mapping("a source", entry).get("layer_range") for entry in _list("sources", part["sources"])]
        if _without_layers(part) != _without_layers(first):
            _refuse("slices of other models or parameters: put what differs by layer into one slice", "slices")
        start, stop = ranges[0] if isinstance(ranges[0], list) and len(ranges[0]) == 2 else (None, None)
        if start != reached or not isinstance(stop, int) or any(item != ranges[0] for item in ranges):
            _refuse(f"layer_range {ranges!r:.80}: every model gives the layers from {reached} on", "layer_range")
        reached = stop
    entries = _list("sources", first["sources"])
    sources = [_read_source(entry, "model", "parameters", "layer_range") for entry in entries]
    for model, _ in sources:
        if (layers := _count_layers(model)) != reached:
            _refuse(f"layer_range up to {reached} of {model}: all its layers are [0, {layers}]", "layer_range")
    return sources, [_mapping("parameters", first.get("parameters") or {}), shared]


def _without_layers(part: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    entries = [{key: value for key, value in entry.items() if key != "layer_range"} for entry in part["sources"]]
    return part.get("parameters"), entries


def _read_source(entry: Any, *known: str) -> _Source:
    mapping = _mapping("an entry of the models", entry)
    if not {"model"} <= set(mapping) <= set(known):
        _refuse(f"a model with {', '.join(map(str, mapping))}; it has {', '.join(known)}", "model")
    return _read_model(mapping["model"]), _mapping("parameters", mapping.get("parameters") or {})


def _read_model(model: Any) -> str:
    if not isinstance(model, str) or "+" in model:
        _refuse(
            f"model {model!r:.80}: name a folder or org/name[@revision]; adapters are merged in by peft first",
            str(model),
        )
    return str(model)


def _count_layers(model: str) -> int:
    """Layers by the configuration of a model, on this disk or on the Hub."""
    folder = Path(model).expanduser()
    path = folder / "config.json" if folder.exists() else fetch_file(model, "config.json")
    config = _mapping(f"config.json of {model}", read_json(path)) if path.is_file() else {}
    found = next((config[key] for key in _LAYERS if isinstance(config.get(key), int)), None)
    if found is None:
        _refuse(f"slices of {model}, whose config.json does not tell its layers: give `models` instead")
    return int(found)


def _multiply(setting: Any, factor: Any) -> Any:
    """A setting with all its numbers multiplied; what is none is refused later, with the name of its task."""
    if isinstance(setting, Mapping):
        return {key: value if key == "filter" else _multiply(value, factor) for key, value in setting.items()}
    if isinstance(setting, list):
        return [_multiply(value, factor) for value in setting]
    try:
        return float(setting) * float(factor)
    except (TypeError, ValueError):
        return f"{setting!r} times lambda {factor!r}"


def _mapping(what: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        _refuse(f"{what} {value!r:.80}, which must be `key: value` lines")
    return value


def _list(what: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        _refuse(f"{what} {value!r:.80}, which must be a list")
    return value


def _refuse(what: str, entry: str = "") -> NoReturn:
    error = MergekitError(f"a mergekit configuration cannot be taken over with {what}.")
    error.entry = entry
    raise error
