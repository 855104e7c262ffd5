"""The loss of a batch of several tasks: the mean over all its targets, which are its rows, or the tokens that have a
label. So each task's own loss counts as often as the task has targets. Where the heads are alike, that is what the
model itself computes for the batch; where they are not, the tasks take turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.loss.loss_utils import LOSS_MAPPING

from ..errors import UsageError

_IGNORED = -100
# Losses that are a mean over labels, by parts of classes' names; CTC's can be a sum, those of boxes are other things.
_MEANS = (
    *(f"For{kind}Classification" for kind in ("Sequence", "Image", "Video", "Audio", "Token")),
    *("ForCausalLM", "LMHead", "ForMaskedLM", "ForConditionalGeneration"),
    *("ForSemanticSegmentation", "ForMultipleChoice"),
)


def heads_are_alike(configs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether one loss can be computed for the heads that some configurations describe."""
    return len({(len(config.get("id2label") or {}), config.get("problem_type")) for config in configs}) == 1


def count_targets(model: Any, labels: torch.Tensor) -> int:
    """Over how many targets the mean goes that a model's loss is."""
    if not isinstance(labels, torch.Tensor):
        raise ValueError(
            f"labels of samples of several tasks are a tensor, got a {type(labels).__name__}; run one task at a time"
        )
    if labels.is_floating_point():
        return len(labels)
    name = type(model).__name__
    ignored: Any = _IGNORED
    known = any(part in name for part in _MEANS)
    if "ForSemanticSegmentation" in name:
        # That of a single class is a mean over all places.
        ignored = getattr(model.config, "semantic_loss_ignore_index", None)
        known = ignored is not None and model.config.num_labels > 1
    if not known:
        raise UsageError(
            f"the loss of {name} is not known to be a mean over labels, so that it cannot be put together from those "
            "of several tasks: leave out labels, or run one task at a time"
        )
    causal = getattr(model, "loss_function", None) is LOSS_MAPPING["ForCausalLM"]
    shifted = causal and not model.config.is_encoder_decoder
    return int(((labels[:, 1:] if shifted else labels) != ignored).sum())


def as_labels(labels: Any, config: Any) -> Any:
    """Numbers of classes as integers, where they stood beside the values of a regression in one tensor."""
    if not isinstance(labels, torch.Tensor) or labels.ndim != 1 or not labels.is_floating_point():
        return labels
    return labels.long() if config.num_labels > 1 and torch.equal(labels, labels.round()) else labels


def mean_loss(losses: Mapping[str, torch.Tensor], counts: Mapping[str, int]) -> torch.Tensor:
    """The mean over all targets of tasks that each have the mean over their own; NaN without any."""
    total = sum(counts.values())
    first = next(iter(losses.values()))
    # A task without a target has a loss of 0 / 0.
    kept = [losses[task] * (counts[task] / total) for task in losses if counts[task]]
    return torch.stack(kept).sum() if kept else torch.full_like(first, torch.nan)
