"""Whether checkpoints fit together: quantised ones, other models, tied weights, other tokens; and what to warn of."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .sources import Source

# What quantised checkpoints keep beside their packed weights.
_QUANTISED_PARTS = (
    "SCB",
    "absmax",
    "g_idx",
    "nested_absmax",
    "nested_quant_map",
    "qweight",
    "qzeros",
    "quant_map",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_zero_point",
)
_WARNED_SETTINGS = ("num_attention_heads", "num_key_value_heads", "hidden_act", "rope_theta", "n_head", "num_heads")
# Of SemanIR; of what it did not have at first, with what a configuration means that lacks it.
_SEMANIR_SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("num_channels", "num_channels_out", "scale", "image_mean"), None),
    **dict.fromkeys(("window_size", "shift_policy", "similarity", "include_self", "top_k"), None),
    "interpolated_base": False,
}


def refuse_quantised(source: Source) -> None:
    """Refuses a checkpoint whose numbers are codes of something else."""
    reason = None
    if source.config.get("quantization_config"):
        method = source.config["quantization_config"]
        name = method.get("quant_method") if isinstance(method, dict) else method
        reason = f"its configuration has a quantization_config ({name})"
    for name, info in source.tensors.items():
        last = name.rpartition(".")[2]
        if info.dtype.itemsize == 1 and info.dtype.is_floating_point:
            reason = f"tensor {name!r} is {info.dtype}"
        elif last in _QUANTISED_PARTS or ".quant_state." in name:
            reason = f"tensor {name!r} belongs to a quantised weight"
        elif info.dtype in (torch.int8, torch.uint8) and last == "weight":
            reason = f"weight {name!r} is {info.dtype}"
        if reason is not None:
            break
    if reason is not None:
        raise ValueError(
            f"{source.title} is quantised: {reason}. Its differences from the base would be meaningless; merge "
            "the checkpoint that it was made from, or dequantise it: model.dequantize(), model.save_pretrained(…)."
        )


def meta_model(config: Mapping[str, Any]) -> torch.nn.Module | None:
    """The model of a configuration without its weights."""
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


def tied_names(base: Source, tasks: Sequence[Source], warnings: list[str]) -> dict[str, str]:
    """Tensors that are one and the same in the model: as the file says, and as the class of transformers ties
    them. The class is asked only where a checkpoint holds two tensors that it could tie."""
    # what huggingface_hub and transformers write for a tensor that was left out: its name and the one that was kept
    tied = {name: kept for name, kept in base.metadata.items() if kept in base.tensors and name not in base.tensors}
    model = None
    if base.library == "transformers" and any(_has_vocabulary_twice(source, base.config) for source in (base, *tasks)):
        try:
            model = meta_model(base.config)
        except ValueError as error:
            warnings.append(f"{base.title}: {error}; only what its file says about tied tensors is known")
    if model is not None:
        stored = base.tensors
        groups: dict[int, list[str]] = defaultdict(list)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            groups[id(parameter)].append(name)
        for names in groups.values():
            kept = next((name for name in names if name in base.tensors), None)
            if kept is not None:
                shape = base.tensors[kept].shape
                others = [name for name in names if name != kept]
                tied |= {name: kept for name in others if name not in stored or stored[name].shape == shape}
    return tied


def _has_vocabulary_twice(source: Source, config: Mapping[str, Any]) -> bool:
    """Whether two tensors of one shape have a row for each token: those are what models tie."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    rows = {(part["vocab_size"],) for part in parts if "vocab_size" in part}
    shapes = [info.shape for info in source.tensors.values() if info.shape[:1] in rows]
    return len(set(shapes)) < len(shapes)


def refuse_other_model(base: Source, task: Source) -> None:
    """Refuses a task whose configuration says that it is another kind of model than the base."""
    if base.config and task.config and base.library != task.library:
        raise ValueError(f"{task.title} is a {task.library} model, {base.title} a {base.library} model.")
    for key in ("model_type", "_class_name"):
        expected, found = base.config.get(key), task.config.get(key)
        # Of a model of several parts, such as CLIP, one may have been fine-tuned and saved alone.
        parts = [part.get(key) for part in base.config.values() if isinstance(part, dict)]
        if expected is not None and found is not None and found not in (expected, *parts):
            raise ValueError(
                f"{task.title} has {key} {found!r}, {base.title} has {expected!r}: they cannot come from "
                "one model. Give the model that the task was fine-tuned from as base, or leave the task out."
            )


def provenance_warnings(base: Source, task: Source) -> list[str]:
    """What in a task's configuration speaks against its being a fine-tune of the base."""
    warnings = []
    origin = task.config.get("base_model_name_or_path") or task.config.get("_name_or_path")
    known = {base.repo_id, base.spec, base.spec.partition("@")[0], base.config.get("_name_or_path")}
    if isinstance(origin, str) and origin and base.repo_id and origin not in known and not Path(origin).is_absolute():
        warnings.append(f"{task.title} says that it comes from {origin!r}, not from {base.repo_id!r}: check it")
    settings = {key: (base.config.get(key), task.config.get(key)) for key in _WARNED_SETTINGS}
    settings = {key: pair for key, pair in settings.items() if None not in pair}
    if base.config.get("model_type") == task.config.get("model_type") == "semanir":
        settings |= {
            key: (base.config.get(key, default), task.config.get(key, default))
            for key, default in _SEMANIR_SETTINGS.items()
        }
    for key, (expected, found) in settings.items():
        if expected != found:
            warnings.append(f"{task.title} has {key} {found!r}, the base {expected!r}: the elected model mixes them")
    return warnings


def refuse_little_overlap(base: Source, task: Source, pairs: Mapping[str, str], fitting: Collection[str]) -> None:
    """Refuses a task that shares too few tensors with the base to be a fine-tune of it."""
    counts = [sum(info.dtype.is_floating_point for info in source.tensors.values()) for source in (base, task)]
    if 2 * len(fitting) >= min(counts) and fitting:
        return
    message = (
        f"{task.title} is no fine-tune of {base.title}: of {counts[1]} floating-point tensors (base: "
        f"{counts[0]}) only {len(fitting)} have the same name and shape."
    )
    other_shapes = [name for name in pairs if name not in fitting and base.tensors[name].dtype.is_floating_point]
    if other_shapes:
        name = other_shapes[0]
        shapes = list(base.tensors[name].shape), list(task.tensors[pairs[name]].shape)
        message += (
            f" {len(other_shapes)} have another shape, for instance {name!r}: base {shapes[0]}, task {shapes[1]}."
        )
    absent = [name for name in task.tensors if name not in set(pairs.values())]
    if absent:
        message += f" {len(absent)} are not in the base, for instance {absent[:3]}."
    raise ValueError(message + " Give the model that the task was fine-tuned from as base, or leave the task out.")


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """The `vocab_size` of a configuration, of its text model if it has several."""
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping) and isinstance(part.get("vocab_size"), int):
            return int(part["vocab_size"])
    return None


def refuse_other_tokens(base: Source, task: Source, count: int, name: str) -> None:
    """Refuses to merge leading rows of a resized vocabulary if they do not mean the same tokens."""
    advice = "Use shape_policy: extra, which keeps the whole tensor with the task."
    tokens = []
    for source in (base, task):
        found = tokens_by_id(source)
        if not found:
            raise ValueError(
                f"{name!r}: {source.title} has no tokenizer.json, vocab.json or vocab.txt, so that nobody can "
                f"tell which rows of the vocabularies belong together. {advice}"
            )
        tokens.append({index: token for index, token in found.items() if index < count})
    if tokens[0] != tokens[1]:
        both = tokens[0].keys() | tokens[1].keys()
        index = min(index for index in both if tokens[0].get(index) != tokens[1].get(index))
        raise ValueError(
            f"{name!r}: token {index} is {tokens[0].get(index)!r} in the base and {tokens[1].get(index)!r} in "
            f"{task.title}: the rows do not belong together. {advice}"
        )


def tokens_by_id(source: Source) -> dict[int, str]:
    """The vocabulary of a source's tokenizer, read from its files."""
    files = source.small_files(("tokenizer.json", "vocab.json", "vocab.txt"))
    try:
        if "tokenizer.json" in files:
            return _tokens_of(json.loads(files["tokenizer.json"].read_text(encoding="utf-8")))
        if "vocab.json" in files:
            found = json.loads(files["vocab.json"].read_text(encoding="utf-8"))
            return {index: token for token, index in found.items()}
        if "vocab.txt" in files:
            return dict(enumerate(files["vocab.txt"].read_text(encoding="utf-8").split("\n")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{source.title}: {next(iter(files))} is malformed ({error}); fetch it again.") from error
    return {}


def _tokens_of(tokenizer: dict[str, Any]) -> dict[int, str]:
    vocabulary = tokenizer["model"]["vocab"]
    # a unigram model lists [token, score]; the others map token to id
    if isinstance(vocabulary, list):
        tokens = {index: item[0] for index, item in enumerate(vocabulary)}
    else:
        tokens = {index: token for token, index in vocabulary.items()}
    return tokens | {item["id"]: item["content"] for item in tokenizer.get("added_tokens", ())}
