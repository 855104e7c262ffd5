"""Changes from position to position as further channels: against the obvious loop, at padding, and what is refused."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from hf_ext.mrconv import MRConvCache, MRConvConfig, MRConvForTokenClassification
from hf_ext.mrconv.modeling_mrconv import delta_features
from tests.mrconv.mrconv_testing import make_model
from tests.mrconv.test_heads_mrconv import CHANNELS, make_measurements

DELTAS = {**CHANNELS, "input_delta_std": [5.0, 0.02], "bidirectional": True}


def reference(values, mask, observed):
    """The change of each number from the one before, if both are there."""
    found = torch.zeros_like(values)
    there = (observed != 0) & (mask[..., None] != 0)
    for row, position, channel in torch.cartesian_prod(*(torch.arange(size) for size in values.shape)).tolist():
        if position and there[row, position, channel] and there[row, position - 1, channel]:
            found[row, position, channel] = values[row, position, channel] - values[row, position - 1, channel]
    return found


def make_masks(rows=4, length=9):
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[1, 6:] = mask[2, :3] = 0
    observed = torch.ones(rows, length, 2)
    observed[0, 4, 0] = observed[3, 0, 1] = observed[3, 5:8, 0] = 0
    return mask, observed


@pytest.mark.parametrize("held", [0.0, 1e6, float("nan")])
def test_changes_are_those_between_numbers_that_are_there(held):
    mask, observed = make_masks()
    values = torch.randn(4, 9, 2, requires_grad=True)
    given = values.masked_fill((observed == 0) | (mask[..., None] == 0), held)
    found, expected = delta_features(given, mask, observed), reference(values, mask, observed)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    grads = [torch.autograd.grad((each * weights).sum(), values, retain_graph=True)[0] for each in (found, expected)]
    if held == held:
        torch.testing.assert_close(*grads)
    torch.testing.assert_close(
        delta_features(values, None, None), reference(values, torch.ones(4, 9), torch.ones(4, 9, 2))
    )


def test_the_model_is_one_of_twice_as_many_channels():
    """The same weights without the option, given normalised numbers and changes as channels of their own."""
    model = make_model(**DELTAS)
    plain = make_model(**{**DELTAS, "input_delta_std": None, "input_size": 4, "input_mean": None, "input_std": None})
    plain.load_state_dict(model.state_dict())
    values = make_measurements(3, 17)
    # The helper shakes statistics too.
    units = model.model.units, model.model.delta_units
    changes = torch.nn.functional.pad(values.diff(dim=1), (0, 0, 1, 0))
    normal, changes = ((each - unit.mean) / unit.std for each, unit in zip((values, changes), units, strict=True))
    expected = plain(input_values=torch.cat([normal, changes], -1)).logits
    torch.testing.assert_close(model(input_values=values).logits, expected, atol=1e-4, rtol=1e-4)


def test_a_series_of_one_step_has_no_change():
    assert torch.isfinite(make_model(**DELTAS)(input_values=make_measurements(2, 1)).logits).all()


def test_a_stream_and_packed_rows_are_refused():
    model = make_model(MRConvForTokenClassification, **{**DELTAS, "bidirectional": False})
    values = make_measurements(1, 8)
    with pytest.raises(ValueError):
        model(input_values=values, cache=MRConvCache(model.config))
    with pytest.raises(ValueError):
        model(input_values=values, position_ids=torch.arange(8)[None] % 4)


@pytest.mark.parametrize("wrong", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, 1.0, 1.0], "1"])
def test_spreads_that_fit_no_input_are_refused(wrong):
    with pytest.raises(StrictDataclassError):
        MRConvConfig(**{**DELTAS, "input_delta_std": wrong})
