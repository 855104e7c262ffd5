"""The state of a stream when it is copied, selected, interrupted or met by another model."""

import copy
import io

import pytest
import torch

from hf_ext.mrconv.configuration_mrconv import MRConvConfig
from hf_ext.mrconv.streaming_mrconv import MRConvCache, StreamingKernel
from tests.kit.refusals import refused
from tests.mrconv.mrconv_testing import make_layer
from tests.mrconv.reference_ops import long_conv
from tests.mrconv.test_streaming_mrconv import BATCH, CHANNELS, assert_near, begin, make


def read_back(convolution):
    file = io.BytesIO()
    torch.save(convolution, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, read_back])
def test_a_copy_made_in_inference_mode_goes_on_in_and_outside_of_it(make_copy):
    kernel, bias, u = make(300, 400)
    expected = long_conv(u, kernel) + bias[:, None]
    with torch.inference_mode():
        convolution = begin(kernel, bias)
        convolution(u[..., :160])
        copies = [make_copy(convolution) for _ in range(2)]
        assert copies[0].tile.is_inference()
        inside = torch.cat([copies[0](part) for part in u[..., 160:].split(7, dim=-1)], dim=-1)
    outside = torch.cat([copies[1](part) for part in u[..., 160:].split(7, dim=-1)], dim=-1)
    assert_near(inside, expected[..., 160:], 1e-12)
    assert_near(outside, expected[..., 160:], 1e-12)


def test_a_batch_in_its_order_is_not_copied_and_a_wrong_one_changes_nothing():
    kernel, bias, u = make(100, 200)
    convolution = begin(kernel, bias)
    convolution(u[..., :90])
    tile, spectra = convolution.tile, convolution.levels[0].spectra
    convolution.batch_select_indices(torch.tensor([0, 1]))
    assert convolution.tile is tile and convolution.levels[0].spectra is spectra
    for wrong in (torch.tensor([0, BATCH]), torch.tensor([True, False])):
        with pytest.raises((IndexError, RuntimeError)):
            convolution.batch_select_indices(wrong)
    assert_near(convolution(u[..., 90:]), (long_conv(u, kernel) + bias[:, None])[..., 90:], 1e-12)


@pytest.mark.parametrize("shape", [(BATCH, CHANNELS, 0), (0, CHANNELS, 3)])
def test_a_chunk_of_nothing_is_refused(shape):
    with refused(ValueError, "position", "sample"):
        begin(*make(50, 10)[:2])(torch.zeros(shape))


def test_a_stream_that_was_interrupted_in_its_work_is_refused_until_it_is_reset(monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    kernel, bias, u = make(50, 100)
    convolution = begin(kernel, bias)
    convolution(u[..., :40])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(StreamingKernel, "respond", stop)
        convolution(u[..., 40:70])
    with refused(ValueError, "reset()"):
        convolution(u[..., 40:70])
    convolution.reset()
    assert_near(convolution(u), long_conv(u, kernel) + bias[:, None], 1e-12)


def test_another_model_is_refused_and_a_copy_goes_on_with_an_equal_one():
    cache, u = MRConvCache(MRConvConfig(num_hidden_layers=2)), torch.ones(1, 4, 9)
    layer = make_layer().requires_grad_(False)
    equal = copy.deepcopy(layer)
    layer(u, cache=cache)
    with refused(ValueError, "another", "model"):
        equal(u, cache=cache)
    again = copy.deepcopy(cache)
    torch.testing.assert_close(equal(u, cache=again), layer(u, cache=cache))
    cache.reset()
    equal(u, cache=cache)
