"""Control conditions: the weight gamma and its direction, zero initial effect, null controls."""

import math

import pytest
import torch

from hf_ext.pipelines.disentangled_dit.transformer_disentangled_dit import DisentangledDiTTransformer2DModel
from tests.disentangled_dit.dit_testing import SIZES, make_controls, make_inputs, make_transformer
from tests.kit.models import assert_same_answers

CONTROLS = list(DisentangledDiTTransformer2DModel.CONTROL_SIZES)


def modulation(model, timestep: float, controls: dict | None = None, mask: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        return model(timestep=timestep, controls=controls, control_mask=mask, return_conditioning=True)[1]


def test_the_weight_is_one_at_the_clean_end_and_zero_in_pure_noise():
    """t = 0 is the END of sampling: the weight rises while an image is made, later with a larger exponent."""
    weigh = make_transformer(num_train_timesteps=500).control_weight
    times = torch.linspace(0, 500, 101)
    for alpha in (0.5, 1.0, 4.0, 8.0):
        weight = weigh(times, alpha)
        assert weight[0] == 1 and weight[-1] == 0 and (weight.diff() <= 0).all()
        assert (weigh(times, 2 * alpha) <= weight).all()
    # The specification's numbers.
    torch.testing.assert_close(weigh(times[[25, 50]], 8.0), torch.tensor([0.282, 0.0039]), atol=5e-4, rtol=0)
    assert weigh(times[30], 2.0).item() == pytest.approx(((1 + math.cos(0.3 * math.pi)) / 2) ** 2)
    assert torch.equal(weigh(times, 0.0), torch.ones(101))
    # Whole numbers are timesteps too.
    assert torch.equal(weigh(torch.tensor([0, 125, 500]), 1.0), weigh(torch.tensor([0.0, 125.0, 500.0]), 1.0))


def test_each_control_has_its_own_weight():
    """A size has no effect in pure noise, a crop the same at every time."""
    model = make_transformer()
    for name, values in make_controls(1).items():
        changes = [
            (modulation(model, timestep, {name: values}) - modulation(model, timestep)).abs().max().item()
            for timestep in (1000.0, 400.0, 0.0)
        ]
        if name in ("original_size", "target_size"):
            assert changes[0] == 0
            assert 0 < changes[1] < changes[2]
        else:
            assert min(changes) > 0.1 * max(changes)


def test_default_exponents_are_saved_and_an_empty_dictionary_means_none(tmp_path):
    make_transformer().save_pretrained(tmp_path)
    loaded = DisentangledDiTTransformer2DModel.from_pretrained(tmp_path)
    assert loaded.config.control_alpha == {
        "original_size": 8.0, "crop": 0.0, "target_size": 8.0, "flip": 0.0, "aspect_ratio": 0.0
    }  # fmt: skip
    assert list(loaded.control_embedders) == CONTROLS
    assert not any("control" in name for name in make_transformer(control_alpha={}).state_dict())


def test_controls_of_a_new_model_change_nothing():
    """Their last layer is zero, so that a trained model can be given controls."""
    trained = make_transformer(control_alpha={})
    torch.manual_seed(1)
    model = DisentangledDiTTransformer2DModel(**SIZES)
    missing, unexpected = model.load_state_dict(trained.state_dict(), strict=False)
    assert all(name.startswith("control_embedders") for name in missing)
    assert not unexpected
    inputs = make_inputs(model)
    with torch.no_grad():
        found = model(**inputs).sample
        expected = trained(**{**inputs, "controls": None, "control_mask": None}).sample
    assert_same_answers(found, expected)
    # They are not dead: the gradient reaches the zero layer.
    model(**inputs).sample.sum().backward()
    assert all(embedder.linear_2.weight.grad.any() for embedder in model.control_embedders.values())


def adaln_vector(model, controls: dict) -> torch.Tensor:
    """e: what the model gives to its own SiLU."""
    seen = []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "silu", lambda x, **_: seen.append(x) or x)
        model(timestep=torch.tensor([150.0], dtype=torch.float64), controls=controls, return_conditioning=True)
    return seen[-1]


@pytest.mark.parametrize("absent", CONTROLS)
def test_what_is_absent_adds_nothing(absent):
    """The parts add up to the whole: e is a sum."""
    model = make_transformer().double()
    controls = make_controls(1)
    alone = {absent: controls.pop(absent)}
    base, rest, only, both = (adaln_vector(model, given) for given in ({}, controls, alone, {**controls, **alone}))
    torch.testing.assert_close(rest + only - base, both, atol=1e-9, rtol=1e-9)
    assert not torch.allclose(rest, both)
