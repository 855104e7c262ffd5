"""Noise schedules across resolutions (Berrada Ifriqi et al., NeurIPS 2024, arXiv 2411.03177).

A picture that is s'/s times as large shows every patch (s'/s)^2 times, each time with noise of its own; averaging them
tells as much about the patch as a noise of s/s' times the standard deviation would. For equal uncertainty at equal t:

    (1 - ab') / ab' = (s'/s)^2 (1 - ab) / ab          for a schedule of cumulative products ab
    sigma' = k sigma / (1 + (k - 1) sigma), k = s'/s  for flow matching
"""

import inspect
import math
from numbers import Real
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler, SchedulerMixin

from .pipeline import DisentangledDiTPipeline

# Without these, FlowMatchEulerDiscreteScheduler spaces its noise levels by `shift`.
_FLOW_SPACINGS = ("use_dynamic_shifting", "shift_terminal", "invert_sigmas", *DisentangledDiTPipeline._SPACINGS)


def rescale_noise_schedule(
    scheduler: SchedulerMixin, from_size: int | tuple[int, int], to_size: int | tuple[int, int]
) -> SchedulerMixin:
    """
    Adapts the noise schedule of a model to pictures of another size, such as from 256 to 512.

    Args:
        scheduler (`SchedulerMixin`): Of the DDPM family, or flow matching with a constant shift. It is not changed.
        from_size, to_size (`int` or `tuple[int, int]`): Side, or height and width, that the schedule is for, and
            should be for, in any unit.

    Returns:
        `SchedulerMixin`: A new scheduler of the same class. One of the DDPM family gets `trained_betas`, which are
        saved and survive `from_config` inside the family; one of flow matching another `shift` (or `flow_shift`).

    Raises:
        ValueError: A size is not positive, or the scheduler spaces its noise in a way that neither betas nor a shift
            describe.
        TypeError: The scheduler is of another kind.

    Example:
        >>> from diffusers import DDIMScheduler
        >>> scheduler = rescale_noise_schedule(DDIMScheduler(beta_schedule="scaled_linear"), 256, 512)
    """
    ratio = math.sqrt(_area(to_size, "to_size") / _area(from_size, "from_size"))
    # Of a scheduler diffusers' types know neither its configuration nor its numbers.
    given: Any = scheduler
    kind, config = type(given), given.config
    flow_match = isinstance(scheduler, FlowMatchEulerDiscreteScheduler | FlowMatchHeunDiscreteScheduler)
    if flow_match or config.get("use_flow_sigmas"):
        shift = "shift" if flow_match else "flow_shift"
        if found := [name for name in _FLOW_SPACINGS if config.get(name)]:
            raise ValueError(
                f"{kind.__name__} has {found[0]}={config[found[0]]!r}, so its noise levels do not follow `{shift}`; "
                "make it without that option, with a constant shift."
            )
        return kind.from_config(config, **{shift: ratio * config[shift]})
    # IPNDMScheduler takes betas, and has a schedule of its own all the same.
    if "trained_betas" not in inspect.signature(kind.__init__).parameters or not hasattr(given, "alphas_cumprod"):
        raise TypeError(
            f"{kind.__name__} has neither betas nor a constant flow shift to rescale; use a scheduler of "
            "the DDPM family (DDIM, DPM++, UniPC, Euler ...), FlowMatchEulerDiscreteScheduler or "
            "FlowMatchHeunDiscreteScheduler."
        )
    return kind.from_config(config, trained_betas=_rescale_betas(given.betas, ratio).tolist())


def _area(size: int | tuple[int, int], name: str) -> float:
    sides: Any = [size, size] if isinstance(size, Real) else [*(size or ())]  # type: ignore[misc]
    if len(sides) != 2 or not all(isinstance(side, Real) and 0 < float(side) < math.inf for side in sides):
        raise ValueError(f"{name} is {size!r}; a positive side, or a positive height and width, is needed.")
    return float(sides[0]) * float(sides[1])


def _rescale_betas(betas: torch.Tensor, ratio: float) -> torch.Tensor:
    """beta'_t = 1 - ab'_t / ab'_(t-1), in double precision."""
    kept = torch.cumprod(1 - betas.double(), dim=0)
    rescaled = kept / (ratio**2 + kept * (1 - ratio**2))
    previous = torch.cat([rescaled.new_ones(1), rescaled[:-1]])
    return 1 - rescaled / previous
