"""Targets of the Disentangled DiT: noise schedules, noisy samples, predictions and loss weights.

Images x, noise e [batch, channels, height, width]; u in [0, 1) is the place on the schedule, 0 the clean end.
"""

import inspect
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from huggingface_hub.dataclasses import strict
from torch import Tensor

from hf_ext.settings import refuse_unknown

from ..errors import DataError, UsageError

# A SchedulerMixin, of which diffusers' types know neither its configuration nor its numbers.
Scheduler = Any
# The schedule of latent diffusion.
_BETAS = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}


@strict
@dataclass
class Timesteps:
    """
    Distribution of the positions u in the noise schedule in training, and weights of their errors. An evaluation takes
    all positions equally often, with equal weights.

    Args:
        distribution (`"uniform"` or `"logit_normal"`, defaults to `"uniform"`):
            `logit_normal`, arXiv 2403.03206: u = 1 / (1 + exp(-n)), n ~ N(0, 1). For larger pictures, which need more
            noise, a flow schedule has a shift of its own, `task.noise_schedule: {shift: 3.0}`.
        loss_weight (`"equal"` or `"min_snr"`, defaults to `"equal"`):
            `min_snr`, arXiv 2303.09556: the error of the predicted picture has the weight min(SNR, gamma).
        gamma (`float`, defaults to 5.0): For `min_snr`.
    """

    distribution: Literal["uniform", "logit_normal"] = "uniform"
    loss_weight: Literal["equal", "min_snr"] = "equal"
    gamma: float = 5.0

    def validate_numbers(self) -> None:
        if not 0 < self.gamma < math.inf:
            raise ValueError(f"timesteps.gamma must be more than 0, got {self.gamma}.")

    def draw(self, count: int, device: torch.device) -> Tensor:
        """Places [count] in [0, 1)."""
        if self.distribution == "logit_normal":
            # Of very large numbers the sigmoid is 1, which is no place.
            return torch.sigmoid(torch.randn(count, device=device)).clamp(max=1 - 2**-24)
        return torch.rand(count, device=device)

    def weigh(self, objective: str, signal: Tensor, noise: Tensor) -> Tensor:
        """
        Weights [B] of the squared errors of noisy samples `signal x + noise e`, both [B].

        With a x + b e as the sample, an error d of the predicted x is one of -d a/b of the predicted e, of -d/b of v
        (where a^2 + b^2 = 1) and of -d (a+b)/b of the velocity e - x. So d^2 is the squared error of e times (b/a)^2,
        of v times b^2, of the velocity times (b/(a+b))^2; `min_snr` takes it times min((a/b)^2, gamma).
        """
        if self.loss_weight == "equal":
            return torch.ones_like(signal)
        # What the squared error of the objective is divided by for d^2 / b^2: no infinity at either end.
        scale = {"epsilon": signal, "v_prediction": torch.ones_like(signal), "flow": signal + noise}[objective]
        # b^2 min(a^2 / b^2, gamma)
        return torch.minimum(signal.square(), self.gamma * noise.square()) / scale.square()


def make_scheduler(objective: str, changes: dict[str, Any], clip_sample: bool) -> SchedulerMixin:
    """The noise schedule of an objective, as a sampler that is saved with the model; `changes` are its options."""
    kind: Any = FlowMatchEulerDiscreteScheduler if objective == "flow" else DDIMScheduler
    own = {**_BETAS, "timestep_spacing": "trailing", "clip_sample": clip_sample, "prediction_type": objective}
    allowed = set(inspect.signature(kind).parameters) - {"prediction_type", "use_dynamic_shifting"}
    refuse_unknown(changes, allowed, f" in task.noise_schedule of {kind.__name__}")
    try:
        scheduler: SchedulerMixin = kind(**({} if objective == "flow" else own) | changes)
    except (RuntimeError, TypeError, ArithmeticError) as error:
        raise UsageError(f"task.noise_schedule: {error}.") from error
    check_signal(scheduler, "task.noise_schedule")
    return scheduler


def check_signal(scheduler: Scheduler, source: str) -> None:
    """Refuses levels that are none, and a schedule that ends in noise alone for a network that predicts the noise."""
    count, levels = scheduler.config.num_train_timesteps, getattr(scheduler, "alphas_cumprod", None)
    levels = scheduler.sigmas if levels is None else levels
    if levels.is_meta:
        # Of a task that is built without memory nothing is known.
        return
    if levels.shape != (count,) or not levels.any() or not ((levels >= 0) & (levels <= 1)).all():
        raise DataError(f"{source} has no level of noise from 0 to 1 for each of its {count} timesteps: correct it.")
    # There the input is the answer, and no picture follows: x0 = (x - sqrt(1 - a) e) / sqrt(a) with a = 0.
    if objective_of(scheduler) == "epsilon" and not scheduler.alphas_cumprod.all():
        told = f"{source} ends in noise alone (zero-terminal SNR), where objective epsilon has nothing to learn"
        raise DataError(f"{told}: set rescale_betas_zero_snr to false, or objective to v_prediction.")


def objective_of(scheduler: Scheduler) -> str:
    """The objective of a training that a saved pipeline's scheduler was made for."""
    # Schedulers that are for flow matching only do not say it.
    prediction: str = scheduler.config.get("prediction_type", "flow_prediction")
    return "flow" if prediction == "flow_prediction" else prediction


def noise_shares(scheduler: Scheduler, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The timesteps [B] that the network is given at places u [B] in [0, 1), and the shares of image and noise there.

    diffusion  t = floor(u T),  shares sqrt(a_t) and sqrt(1 - a_t)
    flow       s = k u / (1 + (k - 1) u),  t = s T,  shares 1 - s and s;  k the schedule's shift
    """
    count = scheduler.config.num_train_timesteps
    if objective_of(scheduler) == "flow":
        shift = scheduler.config.get("flow_shift", scheduler.config.get("shift"))
        sigma = shift * places / (1 + (shift - 1) * places)
        return sigma * count, 1 - sigma, sigma
    timesteps = (places * count).long()
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.to(places.device)
    kept = scheduler.alphas_cumprod[timesteps].to(places.dtype)
    return timesteps, kept.sqrt(), (1 - kept).sqrt()


def noisy_samples(scheduler: SchedulerMixin, clean: Tensor, noise: Tensor, places: Tensor) -> tuple[Tensor, ...]:
    """Noisy samples [B, C, H, W], the timesteps [B] that the network is given, and what it is to predict.

    With a and b the shares of image x and standard normal noise e at places u [B] in [0, 1):
        a x + b e,  target e, v = a e - b x  or, of flow, e - x
    """
    timesteps, *shares = noise_shares(scheduler, places)
    # `scheduler.add_noise` is not used: sigma-based samplers (Euler, Heun) do not scale the image.
    signal, rest = (share.to(clean.dtype)[:, None, None, None] for share in shares)
    noisy, objective = signal * clean + rest * noise, objective_of(scheduler)
    if objective == "flow":
        return noisy, timesteps, noise - clean
    return noisy, timesteps, signal * noise - rest * clean if objective == "v_prediction" else noise


def weighted_error(found: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """Mean over the batch of each sample's mean squared error times its weight [B]."""
    return ((found.float() - target).square().mean((1, 2, 3)) * weights).mean()
