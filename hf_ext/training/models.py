"""Preparation of a model for the loop: weights from a checkpoint, adapters, activation checkpointing."""

import contextlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import peft
import torch
from accelerate.utils import convert_outputs_to_fp32
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel

from hf_ext.files import read_json
from hf_ext.hub.checkpoints import open_checkpoint, split_revision
from hf_ext.hub.released import find_model
from hf_ext.settings import SettingsError, explain, matters_in_use, refuse_unknown

from ..errors import DataError, UsageError
from .classes import Use, settle_classes

if TYPE_CHECKING:
    from .task import Task

logger = logging.getLogger(__name__)

# Attribute of a model: names of its tensors that no checkpoint provided.
STARTED_ANEW = "hf_ext_started_anew"
# Fields of configurations that a task takes from its data, where the base has none.
_MEASURED = dict.fromkeys(("input_mean", "input_std", "target_mean", "target_std"))
_MEASURED |= dict.fromkeys(("num_classes", "joint_attention_dim", "pos_embed_base_size"))

# What the names of classes say of their heads; those of one thing as a whole, such as a sound, share one.
_HEADS = ("ForCausalLM", "ForMaskedLM", "ForTokenClassification", "ForRetrieval", "Classification")


def pin_revision(source: str) -> str:
    """Names the commit that a Hub id stands for now, so that configuration and weights are of one commit."""
    source = find_model(source)
    index = pipeline_index(source)
    if index is not None:
        # A pipeline has no weights of its own: those of its components lie in folders.
        local = Path(source).expanduser().exists()
        return source if local else f"{source.partition('@')[0]}@{index.parent.name}"
    with open_checkpoint(source) as checkpoint:
        return source if checkpoint.commit is None else f"{source.partition('@')[0]}@{checkpoint.commit}"


def pipeline_index(source: str) -> Path | None:
    """The `model_index.json` of a diffusers pipeline, of a Hub in a folder named by its commit; `None` of others."""
    return _find_file(source, "model_index.json")


def _find_file(source: str, file: str) -> Path | None:
    """A file of a folder or, from a Hub, in the cache, which serves where the Hub cannot be asked."""
    name, revision = split_revision(source)
    if Path(name).exists():
        return path if (path := Path(name) / file).is_file() else None
    try:
        return Path(hf_hub_download(name, file, revision=revision))
    # No such file or repository, or no Hub; that a source is wrong is for those to say who open its weights.
    except (OSError, ValueError):
        return None


def build_model(task: "Task", section: dict[str, Any], init_from: str | None, use: Use = "train") -> torch.nn.Module:
    """Builds a task's model; a wrong value in a configuration is said with the section that holds it."""
    if getattr(task, "known_classes", None) is not None:
        stored = [] if init_from is None else _read_classes(init_from)
        # Other numbers are other classes.
        count = section.get("num_classes") or getattr(task, "num_labels", None) or len(stored)
        settle_classes(task, stored if len(stored) == count else [], init_from, use)
    try:
        model = task.build_model(section, init_from)
    except StrictDataclassError as error:
        where = "section 'model'" if section or init_from is None else f"the configuration of {init_from}"
        raise SettingsError(f"bad value in {where}: {explain(error)}") from error
    if use != "train" and init_from is not None and isinstance(model, PreTrainedModel):
        _match_columns(model.config, _read_config(model, init_from), init_from)
    return model


def _match_columns(config: Any, stored: Any, source: str) -> None:
    """Refuses the columns of a checkpoint in another order; where some are others, it says that the places count."""
    parts = (config, stored)
    targets = [[*part.id2label.values()] if part and part.problem_type == "regression" else None for part in parts]
    columns = [getattr(part, "input_columns", None) for part in parts]
    for option, (now, before) in {"task.columns": columns, "task.target_columns": targets}.items():
        if not now or not before or len(now) != len(before) or now == before or "LABEL_0" in before:
            continue
        told = f"the columns (such as {option}) are {now!s:.200}, those of {source} {before!s:.200}"
        # With others among them that order cannot be followed.
        if {*now} == {*before}:
            raise DataError(f"{told}: list them in this order.")
        logger.warning("%s: by their places", told)


def _read_classes(source: str) -> list[str]:
    """Names of a checkpoint's classes in the order of their numbers; none where it has no words for them."""
    index, (name, revision) = pipeline_index(source), split_revision(source)
    # What cannot be read is said where the model is built.
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        about = read_json(index) if index else PreTrainedConfig.get_config_dict(name, revision=revision)[0]
        told = {int(number): str(name) for number, name in dict(about.get("id2label") or {}).items()}
        names = [told[number] for number in range(len(told))]
        unnamed = [f"LABEL_{number}" for number in range(len(told))]
        return [] if names == unnamed else names
    return []


def read_model_section(
    section: dict[str, Any],
    fields: Iterable[str],
    init_from: str | None,
    presets: Mapping[str, dict[str, Any]] = MappingProxyType({}),
    decided: Iterable[str] = (),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of the preset that the `model` section of a run names, and those that it gives itself."""
    decided = {*decided}
    more = f"; the section 'task' decides {', '.join(sorted(decided))}" if decided else ""
    refuse_unknown(section, {*fields, *["preset"] * bool(presets)} - decided, " in section 'model'", more=more)
    changes = dict(section)
    preset = changes.pop("preset", None) if presets else None
    if preset is not None and (preset not in [*presets] or init_from):
        told = f"model.preset is {preset!r} with init_from {init_from!r}; allowed: one of {', '.join(presets)}"
        raise UsageError(f"{told}, and none with init_from, which brings its own sizes.")
    return ({} if preset is None else dict(presets[preset])), changes


def initialize_from(model: torch.nn.Module, source: str, of_data: tuple[str, ...] = ()) -> list[str]:
    """Copies the tensors of a checkpoint into a model; returns the names of those that it does not have."""
    # Every tensor that both have must have the same shape, but for those of a transformers model's head and of the
    # modules in `of_data` (an embedding of classes): these start anew where they are for other classes.
    refuse_adapter(source)
    # With its variables: what is tied is one of them under several names, and a checkpoint has one of these.
    tensors = model.state_dict(keep_vars=True)
    with open_checkpoint(source) as checkpoint, torch.no_grad():
        found = {name: tuple(checkpoint.info(name).shape) for name in tensors if name in checkpoint}
        fitting = [name for name, shape in found.items() if shape == tuple(tensors[name].shape)]
        if not fitting:
            raise DataError(
                f"init_from: no tensor of {source} fits {type(model).__name__} by name and shape, such as "
                f"{next(iter(tensors))!r}: choose a checkpoint of the same method, or the same sizes."
            )
        free = tuple(f"{module}." for module in of_data)
        others = [name for name in found if name not in set(fitting) and not name.startswith(free)]
        prefix = getattr(model, "base_model_prefix", "")
        has_head = bool(prefix) and hasattr(model, prefix)
        different = [name for name in others if not has_head or name.startswith(f"{prefix}.")]
        if different:
            shapes = [f"{name} {list(found[name])} → {list(tensors[name].shape)}" for name in different[:4]]
            raise DataError(
                f"init_from: {len(different)} of {len(tensors)} tensors have other sizes than in {source}: "
                f"{', '.join(shapes)}{', …' if len(different) > 4 else ''}. They would be initialised at random: "
                "remove the sizes from the model section to use those of the checkpoint."
            )
        for name in fitting:
            tensors[name].copy_(checkpoint[name])
    copied = {id(tensors[name]) for name in fitting}
    missing = [name for name, tensor in tensors.items() if id(tensor) not in copied]
    # An adapter must not be put on them.
    setattr(model, STARTED_ANEW, missing)
    if missing:
        logger.warning("init_from %s: %d of %d tensors are new: %s", source, len(missing), len(tensors), missing[:8])
    return missing


def refuse_lost_fields(model: torch.nn.Module, section: dict[str, Any], base: str, beside: Iterable[str] = ()) -> None:
    """Refuses changes of the base by the `model` section, the data or `beside` it, which an adapter does not save."""
    config: Any = getattr(model, "config", None)
    given = [name for name in {**section, **_MEASURED} if matters_in_use(name) and hasattr(config, name)]
    stored: Any = _read_config(model, base) if given else None
    changed = [
        f"{name} ({getattr(stored, name)} → {getattr(config, name)})"
        for name in given
        if hasattr(stored, name) and _plain(getattr(stored, name)) != _plain(getattr(config, name))
    ]
    changed += beside
    if changed:
        raise DataError(
            f"section 'model' or 'task' or the data change {', '.join(sorted(changed))} of {base}, which an adapter "
            "does not save: leave the change out, or train the whole model without 'peft'."
        )


def _read_config(model: torch.nn.Module, source: str) -> Any:
    """The configuration of the checkpoint that a model started from; `None` where that has none."""
    name, revision = split_revision(source)
    kind: Any = type(model)
    try:
        if isinstance(model, PreTrainedModel):
            config: Any = type(model.config)
            # A folder without the file has an empty one, and all defaults.
            known = "model_type" in config.get_config_dict(name, revision=revision)[0]
            return config.from_pretrained(name, revision=revision) if known else None
        if not hasattr(kind, "load_config"):
            return None
        index = pipeline_index(source)
        parts = {} if index is None else read_json(index)
        part = next((key for key, about in parts.items() if isinstance(about, list) and kind.__name__ in about), None)
        with torch.device("meta"):
            # A model of diffusers: with the defaults of what its file does not say.
            return kind.from_config(kind.load_config(name, subfolder=part, revision=revision)).config
    # A task of somebody's own may start from weights alone.
    except OSError:
        return None


def _plain(value: Any) -> Any:
    """A value as JSON has it; a side stands for height and width."""
    value = list(value) if isinstance(value, tuple) else value
    return [value, value] if type(value) is int else value


def add_adapter(model: torch.nn.Module, configuration: dict[str, Any], base: str) -> peft.PeftModel:
    known = sorted(kind.value for kind in peft.PeftType)
    if configuration.get("peft_type") not in known:
        raise UsageError(f"peft.peft_type is {configuration.get('peft_type')!r}; allowed: {', '.join(known)}.")
    name, revision = split_revision(base)
    # peft takes the name of the base from this attribute, as from_pretrained would have set it.
    cast(Any, model).name_or_path = name
    try:
        adapter = peft.get_peft_config({"revision": revision, **configuration})
        adapted = peft.get_peft_model(cast(PreTrainedModel, model), adapter)
    except TypeError as error:
        raise UsageError(f"section 'peft': {error}. Allowed keys are those of peft's configuration class.") from error
    # peft may have added the head itself.
    if random := _find_random(model, adapter):
        raise DataError(
            f"section 'peft': {base} lacks {len(random)} tensors of the model, such as {random[:4]}, which an adapter "
            "does not save: remove sizes from the model section, or list their modules in peft.modules_to_save."
        )
    return adapted


def _find_random(model: torch.nn.Module, adapter: Any = None) -> list[str]:
    """Names of the tensors that neither the checkpoint of a model nor an adapter brings."""
    saved = set(getattr(adapter, "modules_to_save", None) or ())
    return [name for name in getattr(model, STARTED_ANEW, ()) if not saved & set(name.split("."))]


def adapter_base(source: str) -> str | None:
    """Names the model that a peft adapter belongs to; `None` where `source` is no adapter."""
    if (found := _find_file(source, "adapter_config.json")) is None:
        return None
    adapter = peft.PeftConfig.from_pretrained(str(found.parent))
    base = adapter.base_model_name_or_path
    if not base:
        raise DataError(f"the adapter {source} names no base model: set base_model_name_or_path in {found.name}.")
    return base if Path(base).exists() or not adapter.revision else f"{base}@{adapter.revision}"


def refuse_adapter(source: str) -> None:
    """Refuses an adapter where a whole checkpoint is needed."""
    if base := adapter_base(source):
        raise DataError(
            f"init_from: {source} is a peft adapter for {base}: merge it, with peft's merge_and_unload and "
            "save_pretrained, and give the folder; or start from the base with a `peft` section."
        )


def load_adapter(model: torch.nn.Module, source: str) -> peft.PeftModel:
    name, revision = split_revision(source)
    # peft asks a Hub for weights that are in the cache.
    if (weights := _find_file(source, "adapter_model.safetensors")) is not None:
        name = str(weights.parent)
    return peft.PeftModel.from_pretrained(cast(PreTrainedModel, model), name, revision=revision)


def load_trained(task: "Task", source: str) -> torch.nn.Module:
    """A task's model with all weights of a checkpoint, or of a peft adapter on the model that it names."""
    base = adapter_base(source)
    model = build_model(task, {}, source if base is None else pin_revision(base), "evaluate")
    adapted = None if base is None else load_adapter(model, source)
    random = _find_random(model, None if adapted is None else adapted.active_peft_config)
    stored = _read_config(model, source) if base is None and hasattr(model, STARTED_ANEW) else None
    heads = _find_other_heads(model, stored)
    if random or heads:
        told = f"no {', '.join(random[:4])} of the size that" if random else f"a head of another kind ({heads}) than"
        more = ", with its own number of classes or targets in the section 'task'" if random else ""
        raise DataError(
            f"{source} has {told} {type(task).__name__} asks for, so its answers would be random: give a checkpoint "
            f"that was trained for this method{more}."
        )
    return model if adapted is None else adapted


def _find_other_heads(model: torch.nn.Module, stored: Any) -> str:
    """Both heads, where equal tensors have answered another question: of positions, of values, of a whole text."""
    config: Any = getattr(model, "config", None)
    if not isinstance(stored, PreTrainedConfig):
        return ""
    name, own = (stored.architectures or [""])[0], type(model).__name__
    heads = {next((head for head in _HEADS if head in kind.__name__), None) for kind in type(model).__mro__}
    # One that nobody knows may be a subclass with the same head.
    if next((head for head in _HEADS if head in name), None) not in {None, *heads}:
        return f"{name}, not {own}"
    was, now = stored.problem_type, config.problem_type
    # A loss of one's own leaves the kind unsaid.
    is_unsaid = was is None and (stored.num_labels == 1 or getattr(stored, "target_mean", None) is not None)
    return "" if is_unsaid or was == now or "regression" not in {was, now} else f"{name} of {was}, not {own} of {now}"


def compute_in(precision: str, model: torch.nn.Module) -> None:
    """Has a model compute under autocast, as accelerate has that of a training with `mixed_precision`."""
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    autocast: Any = torch.autocast(next(model.parameters()).device.type, kind)
    model.forward = convert_outputs_to_fp32(autocast(model.forward))  # type: ignore[method-assign]


def enable_activation_checkpointing(model: torch.nn.Module) -> None:
    base: Any = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    for name in ("activation_checkpointing_enable", "enable_gradient_checkpointing"):
        if enable := getattr(base, name, None):
            enable()
            return
    raise TypeError(f"activation_checkpointing needs a model of transformers or diffusers, got {type(base).__name__}.")
