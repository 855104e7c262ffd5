"""Which places of the schedule a training sees, and what their errors weigh."""

import pytest
import torch

from hf_ext.settings import build
from hf_ext.tasks.diffusion_noise import Timesteps, make_scheduler, noise_shares, noisy_samples, weighted_error

PLACES = torch.tensor([0.0, 0.02, 0.3, 0.7, 0.98])


def timesteps(**changes) -> Timesteps:
    return build(Timesteps, changes, "task.timesteps")


def draw(**changes) -> torch.Tensor:
    torch.manual_seed(0)
    places = timesteps(**changes).draw(40_000, torch.device("cpu"))
    assert places.min() >= 0 and places.max() < 1
    return places.double()


def test_places_follow_their_distribution():
    assert torch.equal(draw(), torch.rand(40_000, generator=torch.Generator().manual_seed(0)).double())
    logits = torch.logit(draw(distribution="logit_normal"))
    assert float(logits.mean()) == pytest.approx(0, abs=0.03) and float(logits.std()) == pytest.approx(1, abs=0.03)
    # Half of the places of a flow schedule of shift 2 are above 2/3: more noise.
    shifted = noise_shares(make_scheduler("flow", {"shift": 2.0}, False), draw())[2]
    assert torch.quantile(shifted, 0.5) == pytest.approx(2 / 3, abs=0.01)


@pytest.mark.parametrize("objective", ["epsilon", "v_prediction", "flow"])
def test_a_weight_is_that_of_the_picture_that_the_output_means(objective):
    """An error of the output is turned into that of the picture by what the sample is made of."""
    scheduler = make_scheduler(objective, {}, False)
    generator = torch.Generator().manual_seed(0)
    clean, noise, error = (torch.randn(5, 2, 4, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    noisy, _, target = noisy_samples(scheduler, clean, noise, PLACES.double())
    _, signal, rest = noise_shares(scheduler, PLACES.double())
    a, b = (share[:, None, None, None] for share in (signal, rest))
    found = target + error
    picture = {
        "epsilon": lambda: (noisy - b * found) / a,
        "v_prediction": lambda: a * noisy - b * found,
        "flow": lambda: noisy - b * found,
    }[objective]()
    snr = (signal / rest).square()
    expected = {
        "equal": error.square().mean((1, 2, 3)),
        "min_snr": (picture - clean).square().mean((1, 2, 3)) * snr.clamp(max=3.0),
    }
    for kind, wanted in expected.items():
        weights = timesteps(loss_weight=kind, gamma=3.0).weigh(objective, signal, rest)
        assert weights.isfinite().all()
        # At the clean end of flow matching there is no noise to divide by.
        some = slice(1, None) if objective == "flow" else slice(None)
        torch.testing.assert_close((error.square().mean((1, 2, 3)) * weights)[some], wanted[some])
        total = weighted_error(found, target, weights)
        torch.testing.assert_close(total, (error.square().mean((1, 2, 3)) * weights).mean())
    if objective == "v_prediction":
        weights = timesteps(loss_weight="min_snr").weigh(objective, signal, rest)
        torch.testing.assert_close(weights, snr.clamp(max=5.0) / (snr + 1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"distribution": "cosine"}, "distribution"),
        ({"loss_weight": "snr"}, "loss_weight"),
        ({"gamma": -1.0}, "timesteps.gamma must be more than 0, got -1.0"),
        ({"shift": 3}, "unknown key 'shift' in section 'task.timesteps'"),
    ],
)
def test_wrong_timesteps_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        timesteps(**changes)
