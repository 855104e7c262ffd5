"""Names and settings of a checkpoint as the installed transformers reads them.

Versions of transformers renamed layers and settings, and read old files by rules of their own. Two checkpoints of one
model may so have other names for the same tensors. The library is asked only where files differ, as it takes seconds.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch

# Settings that change the meaning of the weights: heads, groups, layers and the kind and base of positions. A scale
# of rotary ones, as of YaRN, is mostly set without training.
MEANINGS = re.compile(
    r"\w*heads|(n|num)_head|\w*head_(dim|size)|\w*(d_head|dim_head)|\w*groups"
    r"|(\w+_)?(num|n)_(hidden_)?layers?|(en|de)coder_layers|layers_per_block"
    r"|\w*theta|\w*rotary\w*|axes_dims?_rope|rope_interleaved?|alibi|no_rope_layers|position_embeddings?_type"
)
# Labels, origin, tokens and how a model is trained or run. Sizes of tensors are compared with the tensors.
_NO_SETTINGS = re.compile(
    r"_.*|id2label|label2id|num_labels|problem_type|finetuning_task|architectures|auto_map|(torch_)?dtype"
    r"|transformers_version|task_specific_params|\w*_token(_id|_index)?|\w*vocab_size|use_cache|output_\w+|return_dict"
    r"|\w*dropout\w*|\w*_pdrop|\w*drop_path\w*|layerdrop|initializer_\w+|gradient_checkpointing|tie_word_embeddings"
    r"|name_or_path|train_\w+|emr_tasks|base_model_name_or_path|label_(names|descriptions)"
)

# Sizes of a vocabulary of tokens. Others have rows of their own: types of tokens, entities, characters.
_VOCABULARY = re.compile(r"(?!\w*(type|entity|char)_)(\w+_)?vocab_size|n_words|n_vocab")

# The kind of a model, in the configurations of transformers and diffusers.
KINDS = ("model_type", "_class_name")
# Model types of this package, whose rooms are imported only when needed.
OWN_KINDS = ("semanir", "mrconv")

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def find_class(config: Mapping[str, Any]) -> type[PreTrainedModel] | None:
    """The class of a configuration, if transformers or this package has it."""
    import transformers

    kind = config.get("model_type")
    place = import_module(f"hf_ext.{kind}") if kind in OWN_KINDS else transformers
    model_class = getattr(place, next(iter(config.get("architectures") or ()), ""), None)
    is_model = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
    return model_class if is_model else None


def decode_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as transformers reads it from its file, where infinity is {"__float__": "Infinity"}."""

    def decode(part: dict[str, Any]) -> Any:
        return float(part["__float__"]) if part.keys() == {"__float__"} else part

    return cast(dict[str, Any], json.loads(json.dumps(config), object_hook=decode))


def build_empty(config: Mapping[str, Any]) -> PreTrainedModel | None:
    """The model of a configuration without weights, `None` if its class is unknown; or a `ValueError`."""
    model_class = find_class(config)
    if model_class is None:
        return None
    assert model_class.config_class is not None
    try:
        with torch.device("meta"):
            return model_class(model_class.config_class.from_dict(decode_settings(config)))
    except Exception as error:
        # hundreds of classes, each with its own ways to fail and packages to need
        name = model_class.__name__
        raise ValueError(f"{name} cannot be built from its configuration ({type(error).__name__}: {error})") from error


def find_tied(model: torch.nn.Module) -> list[list[str]]:
    """Names of parameters that are one and the same in the model."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)].append(name)
    return [names for names in groups.values() if len(names) > 1]


def find_loaded_names(names: Mapping[str, object], config: Mapping[str, Any]) -> dict[str, str]:
    """The names of a file's tensors by their names in the model. A tensor that the class ties has several. Those that
    are computed from others when they are read, such as stacked experts, keep the file's."""
    model = build_empty(config)
    if model is None:
        return {name: name for name in names}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    places, found = model.state_dict(), dict[str, str]()
    for name in names:
        own, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, places)
        keeps = (own not in places and name in places) or converted is not None
        found.setdefault(name if keeps else own, name)
    for tied in find_tied(model):
        kept = next((name for name in tied if name in found), None)
        found |= {name: found[kept] for name in tied if kept is not None and name not in found}
    return found


def read_labels(config: Mapping[str, Any]) -> dict[str, str]:
    """Class names of a configuration, also of timm, by their numbers, without the default names of transformers."""
    told = config.get("id2label") or config.get("label_names")
    told = dict(enumerate(told)) if isinstance(told, list) else told if isinstance(told, dict) else {}
    names = {str(key): str(name) for key, name in told.items()}
    return {} if any(name in ("", f"LABEL_{key}") for key, name in names.items()) else names


def find_label_rows(tensors: Mapping[str, Any], config: Mapping[str, Any], count: int) -> list[str] | None:
    """Tensors with a row for each of `count` classes, and perhaps one for none of them: those outside the base model,
    if there are any. `None` for a model that is known to have no head."""
    model_class = find_class(config)
    if model_class is not None and not re.search("For[A-Z]|Head", model_class.__name__):
        return None
    prefix = "" if model_class is None else f"{model_class.base_model_prefix}."
    rows = [name for name, info in tensors.items() if info.shape[:1] in ((count,), (count + 1,))]
    return [name for name in rows if not name.startswith(prefix)] or rows


def find_part(config: Mapping[str, Any], part: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of a part of a model, such as CLIP, in that of the whole; empty if there is none."""
    places = [config, *(inner for inner in config.values() if isinstance(inner, Mapping) and "model_type" in inner)]
    return next((inner for inner in places if all(inner.get(key) == part.get(key) for key in KINDS)), {})


def find_vocabularies(config: Mapping[str, Any]) -> frozenset[int]:
    """All sizes of vocabularies of tokens in a configuration and its parts."""
    parts = [find_vocabularies(part) for part in config.values() if isinstance(part, Mapping)]
    own = (size for key, size in config.items() if _VOCABULARY.fullmatch(str(key)) and isinstance(size, int))
    return frozenset(own).union(*parts)


def compare_settings(base: Mapping[str, Any], task: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Settings of the network that a task does not share with its base, or with its part there, and both values."""
    whole = find_part(base, task)
    if not whole or not any(_differences(whole, task)):
        return []
    first, second = resolve_settings(whole), resolve_settings(task)
    # A missing setting may have a default that is unknown here.
    return [*_differences(first, second, both=first is whole or second is task)]


def resolve_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A configuration with all defaults, in the words of the installed transformers; as it is if that has none."""
    from transformers import CONFIG_MAPPING

    kind = str(config.get("model_type"))
    if kind in OWN_KINDS and kind not in CONFIG_MAPPING:
        # importing the room registers its classes
        import_module(f"hf_ext.{kind}")
    if kind not in CONFIG_MAPPING and "_class_name" not in config:
        return config
    try:
        if "_class_name" in config:
            import diffusers

            known = inspect.signature(getattr(diffusers, config["_class_name"])).bind_partial()
            known.apply_defaults()
            # tuples are lists in JSON
            return {**json.loads(json.dumps(known.arguments, default=str)), **config}
        # Other keys of the file are nobody's settings.
        settings = CONFIG_MAPPING[kind]().to_dict()
        resolved = CONFIG_MAPPING[kind].from_dict(decode_settings(config)).to_dict()
        return {key: value for key, value in resolved.items() if key in settings}
    except Exception:
        # hundreds of classes, each with its own ways to fail
        return config


def _differences(
    first: Mapping[str, Any], second: Mapping[str, Any], prefix: str = "", *, both: bool = False
) -> Iterator[tuple[str, Any, Any]]:
    for key in dict.fromkeys([*first, *second]):
        ours, theirs = first.get(key), second.get(key)
        if ours == theirs or _NO_SETTINGS.fullmatch(key) or (both and not (key in first and key in second)):
            continue
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            yield from _differences(ours, theirs, f"{prefix}{key}.", both=both)
        else:
            yield prefix + key, ours, theirs
