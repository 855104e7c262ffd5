"""The loss of a batch of several tasks: the mean over all its targets, which are its rows, or the tokens that have a
label. So each task's own loss counts as often as the task has targets. Where the heads are alike, that is what the
model itself computes for the batch; where they are not, each task's loss is computed for its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.loss.loss_utils import LOSS_MAPPING

from .batches import Rows, all_rows
from .units import NotByRows

if TYPE_CHECKING:
    from .model import EMRModel

_IGNORED = -100
_BY_SAMPLE = tuple(f"For{what}Classification" for what in ("Sequence", "Image", "Video", "Audio"))
# Losses that are a mean over labels, by parts of classes' names; CTC's can be a sum, those of boxes are other things.
_MEANS = (
    *_BY_SAMPLE,
    *("ForCausalLM", "LMHead", "ForMaskedLM", "ForConditionalGeneration", "ForTokenClassification"),
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
        raise ValueError(
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


def loss_of_heads(emr: EMRModel, configs: Mapping[str, Any], output: Any, labels: torch.Tensor, rows: Rows) -> Any:
    """Adds to what a model returned for several tasks the loss of heads that differ, by functions of transformers."""
    model: Any = emr.model
    kind = getattr(model, "loss_type", None)
    if kind not in (*_BY_SAMPLE, "ForTokenClassification") or not isinstance(output, Mapping):
        raise NotByRows(f"the loss of {type(model).__name__} for heads that differ is not known")
    losses, counts = {}, {}
    for task, indices in rows.items():
        logits = torch.stack([output["logits"][row] for row in indices.tolist()])
        config = type(model.config).from_dict(dict(configs[task]))
        own = as_labels(labels[all_rows(indices, 1, labels.device)], config)
        given = {"pooled_logits": logits} if kind in _BY_SAMPLE else {"logits": logits}
        losses[task] = model.loss_function(labels=own, config=config, **given)
        counts[task] = count_targets(model, own)
    return type(output)(**{"loss": mean_loss(losses, counts), **output})
