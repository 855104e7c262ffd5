"""Tasks that are peft adapters: refused with advice, LoRA as full weights, or (IA)³ merged among themselves."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from hf_ext.emr.ops import lora_rows
from hf_ext.hub.safetensors_headers import TensorInfo

from ..errors import DataError, UsageError
from .companions import Companions
from .loading import build_empty, find_tied
from .name_matching import Names
from .sources import CONFIGURATION_FILES, Library, Source

# Suffixes of tensor names in LoRA files of diffusers and of kohya's scripts.
_LORA_FILE_ENDS = (".lora_down.weight", "lora.down.weight", "lora_linear_layer.down.weight", ".lora_A.weight")


def read_adapters(how: str, base: Source, tasks: Sequence[Source]) -> tuple[Source, tuple[Source, ...]]:
    """Replaces adapters among base and tasks by the weights that are merged, as `adapters` of the configuration
    says."""
    for source in (base, *tasks):
        _refuse_what_is_no_adapter(source)
    if base.library == "peft":
        raise DataError(f"{base.title} is an adapter; give the model that it was trained on as base.")
    adapters = [task for task in tasks if task.library == "peft"]
    if adapters and how == "refuse":
        raise UsageError(
            f"{', '.join(repr(task.label) for task in adapters)} are peft adapters, which are exact, and mostly "
            "smaller than a mask of what they change: keep them as they are; or set adapters: delta to merge the full "
            "weights that LoRA gives, or adapters: adapter to merge (IA)³ among themselves."
        )
    if how == "delta":
        return base, tuple(DeltaSource(task, base) if task.library == "peft" else task for task in tasks)
    others = [task.title for task in tasks if task.library != "peft" or task.config.get("peft_type") != "IA3"]
    if adapters and others:
        raise UsageError(
            f"adapters: adapter merges (IA)³ among themselves, and {others[0]} is none: use adapters: delta, or "
            "peft's add_weighted_adapter, which joins LoRA."
        )
    if not adapters:
        return base, tuple(tasks)
    base.close()
    return BaseOfOnes(base, tasks), tuple(tasks)


def _refuse_what_is_no_adapter(source: Source) -> None:
    """Refuses the configuration of an adapter beside other weights, and a LoRA in another form than peft's."""
    kind = source.config.get("peft_type", "LORA") if source.library == "peft" else None
    if kind in ("LORA", "IA3") and not any(map(is_adapter_part, source.tensors)):
        raise DataError(
            f"{source.title} has an adapter_config.json, and its weights are no adapter. Remove that file if it was "
            "left over, or give the adapter's folder."
        )
    if kind is None and any(name.endswith(_LORA_FILE_ENDS) for name in source.tensors):
        raise DataError(
            f"{source.title} is a LoRA file of diffusers or of another program, and only adapters of peft are read. "
            "Let diffusers convert it: pipeline.load_lora_weights(FILE), pipeline.fuse_lora(), "
            "pipeline.unload_lora_weights(), then save the model that it changes, such as "
            "pipeline.unet.save_pretrained(FOLDER), and give that folder as the task."
        )


class VirtualSource(Source):
    """A checkpoint whose tensors are made when they are read."""

    def location(self, name: str) -> tuple[int, int] | None:
        """As [`Source.location`]: None, since the elements are in no file."""
        return None

    def will_need(self, name: str, start: int, stop: int) -> None:
        """As [`Source.will_need`]: there is nothing to fetch, or others fetch it anyway."""


class BaseOfOnes(VirtualSource):
    """The (IA)³ adapter that changes nothing, as the base of adapters that are merged among themselves."""

    def __init__(self, base: Source, tasks: Sequence[Source]) -> None:
        super().__init__("base", base.spec, tasks[0].checkpoint, tasks[0].place)
        self.repo_id, self.commit = base.repo_id, base.commit
        parts = {name: task.tensors[name] for task in reversed(tasks) for name in task.tensors}
        self.tensors = {name: info for name, info in parts.items() if is_adapter_part(name)}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    def read_into(self, name: str, start: int, stop: int, out: torch.Tensor) -> None:
        """As [`Source.read_into`]."""
        out.fill_(1.0)

    def identity(self, *, hash_files: bool = False) -> dict[str, Any]:
        """As [`Source.identity`]; it has no files of its own."""
        return {"source": self.spec, "revision": None, "files": {}}

    def fingerprint(self) -> dict[str, Any]:
        """As [`Source.fingerprint`]; the tasks' say all."""
        return self.identity()

    def close(self) -> None:
        """Nothing to close: the files are the tasks'."""


# Variants whose weights are not W0 + s·B·A, or that only act on some tokens.
_OTHER_VARIANTS = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
)
# The others start from a changed W0, which the adapter's file does not hold.
_KEPT_BASE = (None, True, False, "gaussian", "orthogonal", "eva")
PREFIX = "base_model.model."
# By which end of a name a factor is known, and with which the other one.
_FACTORS = ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B"))
BIAS = ".lora_B.bias"
_CACHED_FACTORS = 8
_ADVICE = "Merge it into its model with merge_and_unload(), save that with save_pretrained, and give it as the task."
_HEADS = {
    "SEQ_CLS": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "TOKEN_CLS": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "QUESTION_ANS": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "CAUSAL_LM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "SEQ_2_SEQ_LM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}


@dataclass(frozen=True)
class _Delta:
    """One tensor of the base with what an adapter adds to it; `second` is `None` for a bias."""

    base: str
    first: str
    second: str | None
    scaling: float
    transposed: bool


class DeltaSource(VirtualSource):
    """The full weights that a LoRA adapter gives, read as if they were a checkpoint: base + s·B·A in float32, computed
    when it is read. Tensors that the adapter replaces (`modules_to_save`, `bias`) are its own; all others are the
    base's."""

    def __init__(self, adapter: Source, base: Source) -> None:
        refuse_variants(adapter)
        super().__init__(adapter.label, adapter.spec, adapter.checkpoint, adapter.place)
        self._base = base
        self._adapter = adapter
        # those of the last few tensors are kept
        self._both_factors = lru_cache(_CACHED_FACTORS)(self._read_factors)
        # tensors that the adapter holds whole, by their names in the model
        self._own = {
            name.removeprefix(PREFIX).replace(".base_layer.", "."): name
            for name in adapter.tensors
            if not is_adapter_part(name)
        }
        modules = lora_modules(adapter)
        targets = {f"{module}.weight" for module in modules} | set(self._own)
        repeated = _find_repeated(adapter, base, targets)
        self._own = {name: own for name, own in self._own.items() if name not in repeated}
        modules = {module: pair for module, pair in modules.items() if f"{module}.weight" not in repeated}
        self._names = Names(base.tensors, targets - repeated)
        self._deltas: dict[str, _Delta] = {}
        for module, (first, second) in modules.items():
            name = f"{module}.weight"
            self._deltas[name] = self._weight_delta(module, first, second)
            bias = first.removesuffix(_FACTORS[0][0]) + BIAS
            if bias in adapter.tensors:
                self._deltas[f"{module}.bias"] = self._bias_delta(module, bias, self._deltas[name].scaling)
        # the sum is not rounded to the base's type before it is compared with the base
        shapes = {name: base.tensors[delta.base].shape for name, delta in self._deltas.items()}
        sums = {name: TensorInfo(torch.float32, shape, 4 * math.prod(shape), "", 0) for name, shape in shapes.items()}
        self.tensors = {name: adapter.tensors[own] for name, own in self._own.items()} | sums
        taken = {self._names.in_base(name) for name in self.tensors}
        self.same_as_base = frozenset(name for name in base.tensors if name not in taken)
        self.library: Library = base.library
        new = {name for name in self._own if self._names.in_base(name) not in base.tensors}
        self.config = _task_configuration(adapter, base, [self.tensors[name].shape for name in new])

    @property
    def nbytes(self) -> int:
        """Bytes of the adapter as it is stored."""
        return self._adapter.nbytes

    def read_into(self, name: str, start: int, stop: int, out: torch.Tensor) -> None:
        """As [`Source.read_into`]."""
        delta = self._deltas.get(name)
        if delta is None:
            self._adapter.read_into(self._own[name], start, stop, out)
            return
        source, stored = (self._adapter, self._own[name]) if name in self._own else (self._base, delta.base)
        block = torch.empty(stop - start, dtype=source.tensors[stored].dtype)
        source.read_into(stored, start, stop, block)
        a, b = self._both_factors(delta)
        lora_rows(block, a, b, delta.scaling, start, stop, out)

    @cached_property
    def companions(self) -> Companions:
        """As [`Source.companions`], without configurations: the adapter's are not those of the full weights."""
        own = super().companions
        files = {name: path for name, path in own.files.items() if name not in CONFIGURATION_FILES}
        return dataclasses.replace(own, files=files)

    def _weight_delta(self, module: str, first: str, second: str) -> _Delta:
        """The factors of one module, shaped to fit its weight; an error where they do not."""
        target = self._in_base(f"{module}.weight")
        shape = self._base.tensors[target].shape
        a, b = self._adapter.tensors[first].shape, self._adapter.tensors[second].shape
        rows, columns = b[0], math.prod(a[1:])
        # [vocabulary, width] and the [in, out] of GPT-2 are the transposed product
        transposed = first.endswith(".lora_embedding_A") or bool(self._adapter.config.get("fan_in_fan_out"))
        straight = rows == shape[0] and columns == math.prod(shape[1:])
        turned = len(shape) == 2 and (columns, rows) == tuple(shape)
        if not (straight or turned):
            raise self._misfit(f"{first} {list(a)} and {second} {list(b)} do not give {target!r} {list(shape)}")
        return _Delta(
            target,
            first,
            second,
            self._find_scaling(module, a[0]),
            transposed if straight and turned else turned,
        )

    def _bias_delta(self, module: str, bias: str, scaling: float) -> _Delta:
        target = self._in_base(f"{module}.bias")
        if self._base.tensors[target].shape != self._adapter.tensors[bias].shape:
            raise self._misfit(f"{bias} does not fit {target!r}")
        return _Delta(target, bias, None, scaling, False)

    def _in_base(self, name: str) -> str:
        found = self._names.in_base(name)
        if found not in self._base.tensors:
            raise self._misfit(f"{name!r} is not there")
        return found

    def _misfit(self, what: str) -> DataError:
        return DataError(
            f"{self._adapter.title} does not fit {self._base.title}: {what}. Give the model that the adapter was "
            "trained on as base."
        )

    def _find_scaling(self, module: str, rank: int) -> float:
        """s of one module, as peft finds it."""
        from peft.utils.other import get_pattern_key

        config = self._adapter.config
        try:
            patterns = config.get("alpha_pattern") or {}
            alpha = patterns.get(get_pattern_key(list(patterns), module), config.get("lora_alpha", 8))
            scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            if math.isfinite(scaling):
                return float(scaling)
        except (ArithmeticError, AttributeError, TypeError, re.error):
            pass
        raise DataError(
            f"{self._adapter.title}: no scale of {module!r} follows from its rank {rank}, lora_alpha and "
            "alpha_pattern; save or get the adapter again."
        )

    def _read_factors(self, delta: _Delta) -> tuple[torch.Tensor, torch.Tensor]:
        """The factors of a tensor as matrices, A and B."""
        first = self._adapter.read(delta.first).float()
        if delta.second is None:
            return first.reshape(1, -1), torch.ones(1, 1)
        a, b = first.flatten(1), self._adapter.read(delta.second).float().flatten(1)
        return (b.T.contiguous(), a.T.contiguous()) if delta.transposed else (a, b)


def _find_repeated(adapter: Source, base: Source, targets: set[str]) -> set[str]:
    """Targets that are the same tensor as another target, which the base has; a part of a tied tensor is refused."""
    try:
        model = build_empty(_task_configuration(adapter, base, []))
    except ValueError:
        return set()
    repeated: set[str] = set()
    for tied in [] if model is None else find_tied(model):
        changed = targets & set(tied)
        stored = {name for name in changed if Names(base.tensors, targets).in_base(name) in base.tensors}
        if changed and not (adapter.config.get("ensure_weight_tying") and stored):
            others = ", ".join(sorted(set(tied) - {min(changed)}))
            raise DataError(
                f"{adapter.title} changes {min(changed)!r}, which the model ties to {others}, so that full weights "
                "would be another model than base and adapter. Train it with ensure_weight_tying, or merge it with "
                "merge_and_unload() into the base saved with tie_word_embeddings false, and give that as the task."
            )
        repeated |= changed - stored
    return repeated


def is_adapter_part(name: str) -> bool:
    """True if a tensor is part of an adapter, not a whole tensor of the model."""
    return ".lora_" in name or name.endswith("ia3_l")


def lora_modules(adapter: Source) -> dict[str, tuple[str, str]]:
    """The two factors of each module that a LoRA changes."""
    found = {}
    known = {name for name in adapter.tensors if not is_adapter_part(name) or name.endswith(BIAS)}
    for name in adapter.tensors:
        for first, second in _FACTORS:
            partner = name.removesuffix(first) + second
            if name.endswith(first) and partner in adapter.tensors:
                # A is [rank, …], B [rows, rank], each with more sides of a kernel.
                a, b = (list(adapter.tensors[factor].shape) for factor in (name, partner))
                if min(len(a), len(b)) < 2 or math.prod(b[1:]) != a[0]:
                    raise DataError(
                        f"{adapter.title}: {name} {a} and {partner} {b} have different ranks; save or get the adapter "
                        "again."
                    )
                found[name.removesuffix(first).removeprefix(PREFIX)] = (name, partner)
                known |= {name, partner}
    unknown = [name for name in adapter.tensors if name not in known]
    if unknown:
        raise DataError(f"{adapter.title}: {unknown[0]!r} is not part of a plain LoRA. {_ADVICE}")
    return found


def refuse_variants(adapter: Source) -> None:
    config = adapter.config
    if config.get("peft_type") != "LORA":
        more = " (adapters: adapter merges (IA)³)" if config.get("peft_type") == "IA3" else ""
        raise DataError(f"{adapter.title} is {config.get('peft_type')!r}, not LoRA{more}. {_ADVICE}")
    for key in _OTHER_VARIANTS:
        if config.get(key):
            raise DataError(f"{adapter.title} uses {key}, whose weights are not base + s·B·A. {_ADVICE}")
    if config.get("init_lora_weights") not in _KEPT_BASE:
        raise DataError(
            f"{adapter.title} was initialised with {config['init_lora_weights']!r}, which changes the base's own "
            f"weights. {_ADVICE}"
        )


def _task_configuration(adapter: Source, base: Source, new: list[tuple[int, ...]]) -> dict[str, Any]:
    """The base's configuration with the task's class and number of labels; `new` are shapes that the base lacks."""
    from transformers.models.auto import modeling_auto

    config = dict(base.config)
    if base.library != "transformers":
        return config
    # what peft wrapped; else the usual class for the task
    name = (adapter.config.get("auto_mapping") or {}).get("base_model_class")
    names = getattr(modeling_auto, _HEADS.get(str(adapter.config.get("task_type")), ""), {})
    name = name or names.get(config.get("model_type"))
    if name:
        config["architectures"] = [name]
    if adapter.config.get("task_type") in ("SEQ_CLS", "TOKEN_CLS"):
        heads = [shape[0] for shape in new if len(shape) == 2]
        labels = len(config.get("id2label") or ()) or 2
        if len(heads) == 1 and heads[0] != labels:
            config["id2label"] = {str(index): f"LABEL_{index}" for index in range(heads[0])}
            config["label2id"] = {f"LABEL_{index}": index for index in range(heads[0])}
    return config
