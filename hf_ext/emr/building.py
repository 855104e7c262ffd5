"""From a task's files and weights to its model: the class that its configuration names, of transformers, diffusers or
peft; and where in the model each tensor of the checkpoint went, so that another task's can be put there.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto import modeling_auto

from ..errors import DataError, UsageError
from ..files import copy_into
from .artifact import find_code
from .weights import TaskWeights

# Keys that may differ between tasks of one network: none that its construction reads, except the width of a head.
_LABEL_KEYS = ("id2label", "label2id", "num_labels", "problem_type", "finetuning_task")
_ORIGIN_KEYS = ("_name_or_path", "transformers_version", "_diffusers_version", "base_model_name_or_path")


Entries: TypeAlias = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class Place(NamedTuple):
    """The place in a model of a tensor of the checkpoint."""

    tensor: str  # name of the model's tensor
    # shape, strides and first element of the part of it, as of [`torch.Tensor.as_strided`]: transformers fuses the
    # experts of a layer on loading, for instance. `None` if it is the whole tensor
    part: tuple[tuple[int, ...], tuple[int, ...], int] | None = None

    def within(self, whole: Tensor) -> Tensor:
        """The part, or all, of a tensor that is laid out as the model's, in its memory."""
        if self.part is None:
            return whole
        shape, strides, first = self.part
        return whole.as_strided(shape, strides, whole.storage_offset() + first)


class BuiltModel(NamedTuple):
    model: torch.nn.Module  # the model, in evaluation mode
    places: dict[str, Place]  # where in the model each tensor of the checkpoint is that the model uses
    # whether this tells all. If not, the library transforms tensors or initialises new ones, and the weights of
    # another task cannot be put into the model in place
    complete: bool
    attention: str | None = None  # the implementation of attention that the library chose


def build_model(
    weights: TaskWeights, task: str, source: str, dtype: torch.dtype | None, trust_remote_code: bool
) -> BuiltModel:
    """Builds the model of a task, on the CPU."""
    told = weights.read_config(task)
    tensors = {name: weights.restore(task, name) for name in weights.entries(task)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_into(weights.small_files(task), folder)
        if weights.manifest.library == "transformers":
            built = _build_transformers(folder, told, tensors, source, dtype, trust_remote_code)
        elif weights.manifest.library == "diffusers":
            built = _build_diffusers(told, tensors, dtype)
        else:
            built = _build_adapter(folder, tensors, dtype, trust_remote_code)
    sources = {place.tensor: tensors[name] for name, place in built.places.items()}
    for name, held in built.model.state_dict().items():
        weights.require_range(task, name, held, [sources[name]] if name in sources else tensors.values())
    built.model.eval()
    return built._replace(attention=_find_attention(built.model))


def take_over(built: BuiltModel, new: torch.nn.Module) -> str | None:
    """Sets a new model as a user set the one before it: training, gradients and attention; tells what it lacks."""
    old, modules = built.model, dict(built.model.named_modules())
    trained = {name: part.requires_grad for name, part in old.named_parameters()}
    for name, module in new.named_modules():
        module.training = modules.get(name, old).training
    for name, part in new.named_parameters():
        part.requires_grad_(trained.get(name, part.requires_grad and any(trained.values())))
    if (chosen := _find_attention(old)) != built.attention and _find_attention(new) is not None:
        try:
            cast(Any, new).set_attn_implementation(chosen)
        except (ValueError, ImportError) as error:
            return f"{type(new).__name__} keeps its own attention, {_find_attention(new)!r}, not {chosen!r}: {error}"
    return None


def _find_attention(model: torch.nn.Module) -> str | None:
    """The implementation of attention of a model of transformers."""
    return cast("str | None", getattr(getattr(model, "config", None), "_attn_implementation", None))


def require_places(built: BuiltModel, entries: Entries, wanted: Entries) -> None:
    """Refuses a model that has lost a tensor of its task since it was built, or has it in another shape, except where
    that wanted next has another shape in any case."""
    held = cast(Any, built.model).state_dict()
    for name, place in built.places.items():
        whole = held.get(place.tensor)
        shape, strides, first = place.part or (entries[name][1], (), 0)
        last = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=False))
        resized = entries[name][1] != wanted[name][1]
        if whole is None or (last >= whole.numel() if place.part else whole.shape != shape and not resized):
            raise UsageError(
                "the modules of `model` were changed since its task was set, by an adapter or new embeddings for "
                f"instance: {place.tensor!r} {'is gone' if whole is None else f'is now {tuple(whole.shape)}'}, so "
                "that no other task can be put into it. Undo the change, or load another EMRModel for the other task"
            )


def same_network(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """True for two configurations of one network, which may have heads for other labels."""
    keys = first.keys() | second.keys()
    return all(first.get(key, keys) == second.get(key, keys) for key in keys.difference(_LABEL_KEYS, _ORIGIN_KEYS))


def relabel(
    model: torch.nn.Module, outlines: dict[Any, dict[str, Any]], before: PreTrainedConfig, config: PreTrainedConfig
) -> None:
    """Gives a model the label names of another task than the one before, and its head the width that they need;
    the modules that a new model would have are kept in `outlines`, by width."""
    owned = cast(Any, model).config
    same_width = owned.num_labels == config.num_labels
    for key in ("id2label", "label2id", "problem_type"):
        setattr(owned, key, getattr(config, key, None))
    if same_width:
        return
    for each in (before, config):
        if each.num_labels not in outlines:
            with torch.device("meta"):
                outlines[each.num_labels] = dict(type(model)(each).named_modules())
    modules, previous = dict(model.named_modules()), outlines[before.num_labels]
    for name, part in outlines[config.num_labels].items():
        for key, value in vars(part).items():
            # `num_labels`, `out_features` and the like; not what a user switched on the model at hand
            plain = isinstance(value, int | float | str | tuple) and key != "training" and not key.startswith("_")
            if plain and vars(previous[name]).get(key) != value:
                setattr(modules[name], key, value)
        for key, wanted in part.named_parameters(recurse=False):
            held = getattr(modules[name], key)
            if held.shape != wanted.shape:
                fresh = torch.empty(wanted.shape, dtype=held.dtype, device=held.device)
                setattr(modules[name], key, torch.nn.Parameter(fresh, requires_grad=held.requires_grad))


def model_class(config: PreTrainedConfig, folder: Path, trust_remote_code: bool) -> type[PreTrainedModel]:
    """The class that a configuration names: in transformers, registered with it as ours are, or remote code."""
    import transformers

    names = config.architectures or []
    if len(names) != 1:
        raise ValueError(f"config.json of the task names the architectures {names}; exactly one class is needed")
    name = names[0]
    found = getattr(transformers, name, None)
    if isinstance(found, type) and issubclass(found, PreTrainedModel):
        return found
    for auto in vars(modeling_auto).values():
        mapping = getattr(auto, "_model_mapping", None)
        registered = None if mapping is None else mapping.get(type(config), None)
        for candidate in registered if isinstance(registered, list | tuple) else [registered]:
            if getattr(candidate, "__name__", None) == name:
                return cast(type[PreTrainedModel], candidate)
    for reference in (getattr(config, "auto_map", None) or {}).values():
        if trust_remote_code and isinstance(reference, str) and reference.rpartition(".")[2] == name:
            return cast(type[PreTrainedModel], get_class_from_dynamic_module(reference, str(folder)))
    raise ValueError(
        f"the model class {name!r} of the task is neither in transformers nor registered with it; import the package "
        "that defines it, or, if you trust the code that came with the artifact, pass trust_remote_code=True"
    )


def _build_transformers(
    folder: Path,
    told: Mapping[str, Any],
    weights: dict[str, Tensor],
    source: str,
    dtype: torch.dtype | None,
    trust_remote_code: bool,
) -> BuiltModel:
    absent = sorted(file for file in find_code(told) if not (folder / file).is_file())
    if trust_remote_code and absent and told.get("model_type") not in CONFIG_MAPPING:
        raise UsageError(f"the model's code is not in the artifact; add {', '.join(absent)} to the folder of emr.json")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    kind = model_class(config, folder, trust_remote_code)
    model, report = cast(Any, kind).from_pretrained(
        None, config=config, state_dict=dict(weights), dtype=dtype or "auto", output_loading_info=True
    )
    if missing := sorted({*report["missing_keys"]}):
        raise DataError(
            f"{source}: no tensor of the task is {missing[0]!r} of its {kind.__name__} ({len(missing)} of that kind), "
            f"which would be random. Its tensors are named as {next(iter(weights), '')!r}: correct the names or the "
            "configuration of its checkpoint, and merge again."
        )
    model.config.name_or_path = source
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    unused = set(report["unexpected_keys"])
    used = {name: value for name, value in weights.items() if name not in unused}
    places = _find_places(model, used)
    places |= _find_parts(model, {name: value for name, value in used.items() if name not in places}, places)
    complete = len(places) == len(used) and not report["mismatched_keys"]
    return BuiltModel(model, places, complete)


def _build_diffusers(config: Any, weights: dict[str, Tensor], dtype: torch.dtype | None) -> BuiltModel:
    import diffusers

    name = config.get("_class_name")
    kind = getattr(diffusers, str(name), None)
    if not isinstance(kind, type) or not issubclass(kind, diffusers.ModelMixin):
        raise ValueError(f"config.json of the task names {name!r}, which is not a class of the installed diffusers")
    model = cast(Any, kind).from_config(config)
    model.load_state_dict(weights, strict=True)
    kept = next((value.dtype for value in weights.values() if value.is_floating_point()), torch.float32)
    model.to(dtype or kept)
    return BuiltModel(model, {name: Place(name) for name in weights}, True)


def _build_adapter(
    folder: Path, weights: dict[str, Tensor], dtype: torch.dtype | None, trust_remote_code: bool
) -> BuiltModel:
    import peft

    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    if trust_remote_code:
        options["trust_remote_code"] = True
    task_type = peft.PeftConfig.from_pretrained(str(folder)).task_type
    name = "PeftModel" if task_type is None else peft.MODEL_TYPE_TO_PEFT_MODEL_MAPPING[task_type].__name__
    kind = getattr(peft, f"Auto{name}")
    model = kind.from_pretrained(str(folder), import_allowlist=["transformers", "diffusers", "hf_ext"], **options)
    # The names of the file are peft's own for its parameters, which lie where these tensors do.
    own = {value.data_ptr(): name for name, value in model.named_parameters(remove_duplicate=False)}
    saved = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    places = {name: Place(own[saved[name].data_ptr()]) for name in weights if name in saved}
    return BuiltModel(model, places, len(places) == len(weights))


def _find_places(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Place]:
    """The place of each tensor in the model, which took the tensor itself, or a converted copy under its name with or
    without the prefix of the base model. Others were transformed and have no place."""
    held = model.state_dict()
    pointers = {value.data_ptr(): name for name, value in reversed(held.items()) if value.numel()}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    places = {}
    for name, value in weights.items():
        place = pointers.get(value.data_ptr()) if value.numel() else None
        if place is not None and held[place].shape == value.shape and held[place].stride() == value.stride():
            places[name] = Place(place)
            continue
        candidates = (name, prefix + name, name.removeprefix(prefix))
        if found := [own for own in candidates if own in held and _equal(held[own], value)]:
            places[name] = Place(found[0])
    return places


# transformers can take a fused tensor apart again, to save it. Given a tensor of the same shape that holds its own
# element numbers in place of weights, it gives for each name of the checkpoint the numbers of the elements that belong
# to it. Where these are evenly spaced, the piece is a view of the fused tensor. That the weights at hand lie in these
# views is compared in the end, so a library that does otherwise leads to no wrong place, but to none.
def _find_parts(model: torch.nn.Module, weights: Mapping[str, Tensor], found: Mapping[str, Place]) -> dict[str, Place]:
    """The places of the checkpoint's tensors inside fused ones of the model, such as the experts of a layer."""
    taken = {place.tensor for place in found.values()}
    places: dict[str, Place] = {}
    for tensor, held in model.state_dict().items() if weights else ():
        if tensor in taken or not held.numel() or not held.is_contiguous():
            continue
        # One tensor at a time: the numbers take as much memory as the weights, or twice as much.
        numbers = torch.arange(held.numel(), dtype=torch.int32 if held.numel() < 2**31 else torch.int64)
        try:
            pieces = revert_weight_conversion(cast(PreTrainedModel, model), {tensor: numbers.view(held.shape)})
        except Exception:
            # A conversion that needs more than this tensor, or other values.
            continue
        parts = {name: _find_even_spacing(piece, numbers) for name, piece in pieces.items()}
        own = {name: Place(tensor, part) for name, part in parts.items() if part is not None and name in weights}
        whole = len(own) == len(pieces) and sum(piece.numel() for piece in pieces.values()) == held.numel()
        if whole and all(_equal(place.within(held), weights[name]) for name, place in own.items()):
            places |= own
    return places


def _find_even_spacing(piece: Tensor, numbers: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Shape, strides and first element of the view of `numbers` that a tensor equals, or None."""
    if not piece.numel():
        return None
    first = int(piece.reshape(-1)[0])
    corner = (0,) * piece.ndim
    steps = [(*corner[:axis], 1, *corner[axis + 1 :]) for axis in range(piece.ndim)]
    strides = tuple(int(piece[step]) - first if piece.shape[axis] > 1 else 1 for axis, step in enumerate(steps))
    last = first + sum((size - 1) * stride for size, stride in zip(piece.shape, strides, strict=True))
    if min(strides, default=1) < 1 or not 0 <= last < len(numbers):
        return None
    same = torch.equal(numbers.as_strided(piece.shape, strides, first), piece)
    return (tuple(piece.shape), strides, first) if same else None


def _equal(held: Tensor, given: Tensor) -> bool:
    return held.shape == given.shape and torch.equal(held.cpu(), given.to(held.dtype).cpu())
