"""Names that the installed transformers gives the tensors of a checkpoint when it loads it.

Versions of transformers renamed layers, and read old files by rules of their own. Two checkpoints of one model may so
have other names for the same tensors. The library is asked only where names do not fit, as it takes seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_empty(config: Mapping[str, Any]) -> PreTrainedModel | None:
    """
    The model of a configuration without its weights.

    Returns:
        `PreTrainedModel`: The model, or `None` if its class is not one of transformers.

    Raises:
        ValueError: The class cannot be built.
    """
    import transformers

    name = next(iter(config.get("architectures") or ()), "")
    model_class = getattr(transformers, name, None) if name.isidentifier() else None
    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        return None
    assert model_class.config_class is not None
    try:
        configuration = model_class.config_class.from_dict(dict(config))
        with torch.device("meta"):
            return model_class(configuration)
    except Exception as error:
        # hundreds of classes, each with its own ways to fail and packages to need
        raise ValueError(f"{name} cannot be built from its configuration ({type(error).__name__}: {error})") from error


def find_tied(model: torch.nn.Module) -> list[list[str]]:
    """Names of parameters that are one and the same in the model."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)].append(name)
    return [names for names in groups.values() if len(names) > 1]


def find_loaded_names(names: Mapping[str, object], config: Mapping[str, Any]) -> dict[str, str]:
    """
    The names that tensors have in the model.

    Args:
        names (`Mapping[str, object]`): Tensors of the file.
        config (`Mapping[str, Any]`): The configuration of the model.

    Returns:
        `dict[str, str]`: Names in the file by names in the model. A tensor that the class ties has several. Those that
        are computed from others when they are read, such as stacked experts, keep the file's.
    """
    model = build_empty(config)
    if model is None:
        return {name: name for name in names}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    places, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, str] = {}
    for name in names:
        own, converted = rename_source_key(name, renamings, converters, prefix, places)
        if own not in places and name in places or converted is not None:
            own = name
        found.setdefault(own, name)
    for tied in find_tied(model):
        kept = next((name for name in tied if name in found), None)
        found |= {name: found[kept] for name in tied if kept is not None and name not in found}
    return found
