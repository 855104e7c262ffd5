"""Continuing a Disentangled DiT at another resolution or on other data: everything that changes, in one place.

Positions: the coordinates of the larger grid are those of the pre-training's, sampled more finely.
Schedule: with s'/s times the size, noise variances grow so that a patch, averaged over the (s'/s)^2 pixels that show
what one pixel showed, is as uncertain at the same t as it was. With flow matching t = s T is the share of noise,
as diffusers' samplers tell it: there a patch is as uncertain at the same place u of the schedule, and t moves.
Crops: whole pictures again, where the pre-training saw parts of larger ones.
"""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from huggingface_hub import snapshot_download
from huggingface_hub.dataclasses import strict

from hf_ext.files import read_json_object
from hf_ext.hub.checkpoints import open_checkpoint, split_revision
from hf_ext.pipelines.disentangled_dit.scheduling import rescale_noise_schedule
from hf_ext.training.models import pipeline_index

from ..errors import DataError
from .diffusion_data import Crops, Size
from .diffusion_noise import check_signal


@strict
@dataclass
class Transfer:
    """
    Changes for a picture size that differs from the checkpoint's.

    Args:
        positions (`bool`, defaults to `True`):
            Resample the position grid of the pre-training; otherwise it grows beyond the trained positions.
        schedule (`bool`, defaults to `True`): Rescale the noise schedule; otherwise it stays unchanged.
    """

    positions: bool = True
    schedule: bool = True


@dataclass(frozen=True)
class Checkpoint:
    """A saved pipeline from which a training starts: its transformer's folder and configuration, its schedule."""

    folder: Path
    config: dict[str, Any]
    scheduler: SchedulerMixin
    id2label: dict[int, str] | None
    index: dict[str, Any] = field(default_factory=dict)


def open_pipeline(source: str) -> Checkpoint:
    """Opens a saved pipeline, a folder or `org/name[@revision]`, for transformer, schedule and classes."""
    if pipeline_index(source) is None:
        raise DataError(f"{source} is no diffusers pipeline, without model_index.json: give one, or a run's snapshot.")
    folder = _fetch(source, "model_index.json", "transformer/*", "scheduler/*")
    index = read_json_object(folder / "model_index.json")
    found = index.get("scheduler")
    kind: Any = getattr(diffusers, str(found[-1]), None) if isinstance(found, list) and found else None
    if not hasattr(kind, "from_pretrained"):
        raise DataError(f"{source}: model_index.json has the scheduler {found!r}, none of diffusers: add one.")
    names = index.get("id2label")
    # JSON has no whole numbers as keys.
    id2label = None if names is None else {int(key): value for key, value in dict(names).items()}
    config = read_json_object(folder / "transformer" / "config.json")
    if absent := {"sample_size", "patch_size"} - config.keys():
        raise DataError(f"{source}: transformer/config.json lacks {', '.join(sorted(absent))}: save the model again.")
    try:
        scheduler: SchedulerMixin = kind.from_pretrained(folder, subfolder="scheduler")
    except NotImplementedError as error:
        raise DataError(f"the schedule of {source} cannot be used: {error}.") from error
    check_signal(scheduler, f"the schedule of {source}")
    return Checkpoint(folder / "transformer", config, scheduler, id2label, index)


def _fetch(source: str, *patterns: str) -> Path:
    """The folder of a pipeline; of one on a Hub with the files of these patterns."""
    name, revision = split_revision(source)
    folder = Path(name)
    return folder if folder.exists() else Path(snapshot_download(name, revision=revision, allow_patterns=[*patterns]))


def is_part_of(source: str, part: str, module: Any, origin: str) -> bool:
    """True where a saved pipeline lacks this component, or has it with the weights of the module, from `origin`."""
    if pipeline_index(origin) == pipeline_index(source):
        return True
    folder = _fetch(source, f"{part}/*")
    if not (folder / part).is_dir():
        return True
    own = module.state_dict()
    with open_checkpoint(folder / part) as stored:
        # Tied tensors are saved once; the file may have another precision. Of large networks one pair at a time.
        pairs = ((stored[name].float(), own[name].cpu().float()) for name in own if name in stored)
        same = (a.shape == b.shape and torch.allclose(a, b, rtol=0.01, atol=1e-4) for a, b in pairs)
        return not own.keys().isdisjoint(stored) and all(same)


def transfer(
    checkpoint: Checkpoint, sample_size: Size, how: Transfer, crops: Crops
) -> tuple[dict[str, Any], SchedulerMixin, Crops]:
    """Configuration of the transformer, noise schedule and crops that a training from a checkpoint starts with."""
    size = checkpoint.config["sample_size"]
    before: Size = (size, size) if isinstance(size, int) else (size[0], size[1])
    config = {**checkpoint.config, "sample_size": list(sample_size)}
    if before == sample_size:
        return config, checkpoint.scheduler, crops
    if not how.positions:
        patch = config["patch_size"]
        config["pos_embed_base_size"] = [side // patch for side in sample_size]
    scheduler = checkpoint.scheduler
    if how.schedule and math.prod(before) != math.prod(sample_size):
        scheduler = rescale_noise_schedule(scheduler, before, sample_size)
    return config, scheduler, replace(crops, local_prob=0.0, local_size=None)
