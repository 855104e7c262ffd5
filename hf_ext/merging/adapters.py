"""Tasks that are peft adapters: refused with advice, or (IA)³ merged among themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import DataError, UsageError
from .sources import Source

# Suffixes of tensor names in LoRA files of diffusers and of kohya's scripts.
_LORA_FILE_ENDS = (".lora_down.weight", "lora.down.weight", "lora_linear_layer.down.weight", ".lora_A.weight")


def read_adapters(how: str, base: Source, tasks: Sequence[Source]) -> tuple[Source, tuple[Source, ...]]:
    """Base and tasks with the base of adapters in place of their model, as `adapters` of the configuration says."""
    for source in (base, *tasks):
        _refuse_other_files(source)
    if base.library == "peft":
        raise DataError(f"{base.title} is an adapter; give the model that it was trained on as base.")
    adapters = [task for task in tasks if task.library == "peft"]
    if not adapters:
        return base, tuple(tasks)
    if how == "refuse":
        raise UsageError(
            f"{', '.join(repr(task.label) for task in adapters)} are peft adapters, which are exact, and mostly "
            "smaller than a mask of what they change: keep them as they are. To merge the full weights that they "
            "give, let peft write them: PeftModel.from_pretrained(MODEL, ADAPTER).merge_and_unload()"
            ".save_pretrained(FOLDER), and give that folder as the task. adapters: adapter merges (IA)³ among "
            "themselves."
        )
    others = [task.title for task in tasks if task.library != "peft" or task.config.get("peft_type") != "IA3"]
    if others:
        raise UsageError(
            f"adapters: adapter merges (IA)³ among themselves, and {others[0]} is none: use peft's "
            "add_weighted_adapter, which joins LoRA, or merge_and_unload(), which writes full weights."
        )
    base.close()
    return BaseOfOnes(base, tasks), tuple(tasks)


def _refuse_other_files(source: Source) -> None:
    """Refuses an artifact, the configuration of an adapter beside other weights, and a LoRA in another form than
    peft's."""
    if source.is_artifact:
        raise DataError(
            f"{source.title} is a merge with masks, whose folder is not the model of a task: write a task with hf-ext "
            "emr export, and give that folder."
        )
    kind = source.config.get("peft_type", "LORA") if source.library == "peft" else None
    if kind in ("LORA", "IA3") and not any(map(_is_adapter_part, source.tensors)):
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


class BaseOfOnes(Source):
    """The (IA)³ adapter that changes nothing, as the base of adapters that are merged among themselves. Its elements
    are in no file."""

    def __init__(self, base: Source, tasks: Sequence[Source]) -> None:
        super().__init__("base", base.spec, tasks[0].checkpoint, tasks[0].place)
        self.repo_id, self.commit = base.repo_id, base.commit
        parts = {name: task.tensors[name] for task in reversed(tasks) for name in task.tensors}
        self._stored = {name: info for name, info in parts.items() if _is_adapter_part(name)}
        self.rename({name: name for name in self._stored})

    def read_into(self, name: str, start: int, stop: int, out: torch.Tensor) -> None:
        """As [`Source.read_into`]."""
        out.fill_(1.0)

    def location(self, name: str) -> tuple[int, int] | None:
        """As [`Source.location`]: None."""
        return None

    def will_need(self, name: str, start: int, stop: int) -> None:
        """As [`Source.will_need`]: there is nothing to fetch."""

    def identity(self, *, hash_files: bool = False) -> dict[str, Any]:
        """As [`Source.identity`]; it has no files of its own."""
        return {"source": self.spec, "revision": None, "files": {}}

    def fingerprint(self) -> dict[str, Any]:
        """As [`Source.fingerprint`]; the tasks' say all."""
        return self.identity()

    def close(self) -> None:
        """Nothing to close: the files are the tasks'."""


def _is_adapter_part(name: str) -> bool:
    """True if a tensor is part of an adapter, not a whole tensor of the model."""
    return ".lora_" in name or name.endswith("ia3_l")
