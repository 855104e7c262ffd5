"""Streaming of one convolution and the cache of a model: chunks of any length equal the whole."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from hf_ext.mrconv.configuration_mrconv import MRConvConfig
from hf_ext.mrconv.kernels_mrconv import TILE, StreamingKernel
from hf_ext.mrconv.streaming_mrconv import MRConvCache, StreamingConvolution
from tests.mrconv.mrconv_testing import make_layer
from tests.mrconv.reference_ops import long_conv

BATCH, CHANNELS = 2, 3


class Stream(StreamingConvolution):
    """A layer of a cache with the kernel that its model would give."""

    def __init__(self, kernel):
        super().__init__()
        self.of = kernel

    def __call__(self, u):
        return self.update(u, lambda: self.of)


def make(taps: int, length: int, dtype=torch.float64, batch: int = BATCH, channels: int = CHANNELS):
    """A kernel with its bias and inputs: [channels, taps], [channels], [batch, channels, length]."""
    generator = torch.Generator().manual_seed(taps)
    shapes = ((channels, taps), (channels,), (batch, channels, length))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def begin(kernel, bias) -> Stream:
    return Stream(StreamingKernel(kernel, bias))


def stream(kernel, bias, u, chunks) -> torch.Tensor:
    """Outputs for chunks of these lengths, the last of which is repeated to the end."""
    convolution, outputs, done = begin(kernel, bias), [], 0
    for length in [*chunks, *[chunks[-1]] * u.shape[-1]]:
        outputs.append(convolution(u[..., done : done + length]))
        done += length
        if done >= u.shape[-1]:
            break
    assert convolution.seen == u.shape[-1]
    return torch.cat(outputs, dim=-1)


def assert_near(result, expected, tolerance):
    """Absolute difference, relative to the largest value."""
    assert result.shape == expected.shape
    assert (result - expected).abs().max() <= tolerance * max(1.0, expected.abs().max().item())


# Kernels shorter than a tile, of one, of powers of two and beside them; inputs beyond one and several periods.
@pytest.mark.parametrize("taps", [1, TILE - 1, TILE, TILE + 1, 256])
@pytest.mark.parametrize("chunks", [[1], [520], [5, 64, 1, 1, 31, 200]])
def test_chunks_equal_the_whole(taps, chunks):
    kernel, bias, u = make(taps, 520)
    assert_near(stream(kernel, bias, u, chunks), long_conv(u, kernel) + bias[:, None], 1e-12)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 200), st.lists(st.integers(1, 90), min_size=1, max_size=12))
def test_any_kernel_and_any_chunks_equal_the_whole(taps, chunks):
    kernel, bias, u = make(taps, 300)
    assert_near(stream(kernel, bias, u, chunks), long_conv(u, kernel) + bias[:, None], 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_rounding_does_not_add_up_over_thousands_of_positions(dtype, tolerance):
    kernel, bias, u = make(1000, 3000, dtype, batch=1, channels=2)
    expected = long_conv(u.double(), kernel.double()) + bias.double()[:, None]
    result = stream(kernel, bias, u, [1])
    assert result.dtype == dtype
    assert_near(result.double(), expected, tolerance)


def test_half_precision_inputs_have_a_float32_state():
    kernel, bias, u = make(100, 300)
    result = stream(kernel.bfloat16(), bias.bfloat16(), u.bfloat16(), [1])
    assert result.dtype == torch.bfloat16
    expected = long_conv(u.bfloat16().double(), kernel.bfloat16().double()) + bias.bfloat16().double()[:, None]
    # Only the result is rounded, to 8 bits.
    assert ((result.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-4).all()


def test_memory_is_that_of_the_kernel_however_long_the_stream():
    kernel, bias, u = make(200, 3000)
    convolution = begin(kernel, bias)
    convolution(u[..., :10])
    assert convolution.history.shape[-1] == TILE
    for chunk in u[..., 10:].split(7, dim=-1):
        convolution(chunk)
    assert convolution.history.shape[-1] == 256
    assert convolution.tile.shape[1] == TILE


def test_spectra_of_large_tiles_are_not_kept():
    kernel, bias, u = make(8 * KEPT_FFT, 9 * KEPT_FFT, torch.float32, batch=1, channels=1)
    prepared = StreamingKernel(kernel, bias)
    convolution = Stream(prepared)
    for chunk in u.split(1000, dim=-1):
        convolution(chunk)
    numbers = sum(spectrum.numel() for spectrum in prepared.spectra.values())
    assert 0 < numbers <= 4 * KEPT_FFT


class CountPoints(TorchFunctionMode):
    """Points of the FFTs of inputs, which have a batch; kernels have none."""

    def __init__(self):
        super().__init__()
        self.points = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.fft.rfft:
            self.points += kwargs["n"] * (args[0].ndim == 3)
        return function(*args, **(kwargs or {}))


def test_the_points_transformed_for_a_position_grow_like_the_logarithm():
    """Counted, not timed: as many points as positions are in the longest kernel."""
    cost = []
    for length in (256, 1024, 4096):
        kernel, bias, u = make(length, length, torch.float32, batch=1, channels=1)
        with CountPoints() as count:
            stream(kernel, bias, u, [1])
        cost.append(count.points / length)
    # Two points a position for each size of tiles, of which two more come with each length.
    assert cost[0] < cost[1] < cost[2]
    assert cost[2] - cost[1] == pytest.approx(cost[1] - cost[0], rel=0.1)


def test_samples_are_selected_repeated_and_copied():
    kernel, bias, u = make(100, 200, batch=3)
    expected = long_conv(u, kernel) + bias[:, None]
    convolution = begin(kernel, bias)
    convolution(u[..., :90])
    kept = copy.deepcopy(convolution)
    chosen = torch.tensor([2, 0, 0, 1])
    convolution.batch_select_indices(chosen)
    assert_near(convolution(u[chosen, :, 90:]), expected[chosen, :, 90:], 1e-12)
    assert_near(kept(u[..., 90:]), expected[..., 90:], 1e-12)


def test_a_stream_goes_on_in_and_outside_of_inference_mode():
    kernel, bias, u = make(100, 300)
    expected = long_conv(u, kernel) + bias[:, None]
    with torch.inference_mode():
        convolution = begin(kernel, bias)
        first = convolution(u[..., :70])
    convolution.batch_select_indices(torch.tensor([1, 0]))
    second = convolution(u.flip(0)[..., 70:180])
    with torch.inference_mode():
        third = convolution(u.flip(0)[..., 180:])
    assert_near(first, expected[..., :70], 1e-12)
    assert_near(torch.cat([second, third], dim=-1), expected.flip(0)[..., 70:], 1e-12)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 150), st.integers(0, 200), st.lists(st.integers(1, 70), min_size=1, max_size=4), st.data())
def test_cropping_takes_positions_back(taps, seen, wrong, data):
    kernel, bias, u = make(taps, 300)
    expected = long_conv(u, kernel) + bias[:, None]
    convolution = begin(kernel, bias)
    if seen:
        convolution(u[..., :seen])
    convolution.record_past = True
    # Candidates of which the first `right` are accepted, in chunks of any lengths.
    right = data.draw(st.integers(0, min(sum(wrong), 300 - seen)))
    candidates = torch.cat([u[..., seen : seen + right], torch.ones(BATCH, CHANNELS, sum(wrong) - right)], dim=-1)
    for chunk in candidates.split(wrong, dim=-1):
        convolution(chunk)
    convolution.crop(-(sum(wrong) - right))
    assert convolution.seen == seen + right
    if seen + right < 300:
        rest = torch.cat([convolution(chunk) for chunk in u[..., seen + right :].split(11, dim=-1)], dim=-1)
        assert_near(rest, expected[..., seen + right :], 1e-12)


def test_cropping_more_than_was_recorded_is_refused_and_changes_nothing():
    kernel, bias, u = make(50, 100)
    convolution = begin(kernel, bias)
    convolution(u[..., :20])
    convolution.record_past = True
    convolution(u[..., 20:25])
    for tokens in (-6, 3):
        with pytest.raises(ValueError, match=rf"crop\({tokens}\).*last 5 positions.*allowed are -5 to 0"):
            convolution.crop(tokens)
    assert_near(convolution(u[..., 25:]), (long_conv(u, kernel) + bias[:, None])[..., 25:], 1e-12)


@pytest.mark.parametrize("shape", [(BATCH + 1, CHANNELS, 1), (BATCH, CHANNELS + 1, 1)])
def test_other_samples_or_channels_are_refused(shape):
    kernel, bias, u = make(50, 10)
    convolution = begin(kernel, bias)
    convolution(u)
    with pytest.raises(ValueError, match=r"This cache holds \[batch, channels\] = \[2, 3\]"):
        convolution(torch.zeros(shape))


class TestCache:
    config = MRConvConfig(num_hidden_layers=2)

    def kernel(self, taps=60):
        kernel, bias, _ = make(taps, 1)
        return StreamingKernel(kernel, bias)

    def test_layers_have_streams_of_their_own_and_ask_once(self):
        calls = []

        def ask(layer):
            calls.append(layer)
            return self.kernel(60 + layer)

        cache = MRConvCache(self.config)
        assert (len(cache), cache.get_seq_length(), cache.batch_size) == (2, 0, -1)
        u = make(5, 100)[2]
        for layer in (0, 1):
            first = cache.convolve(layer, u[..., :70], lambda layer=layer: ask(layer))
            second = cache.convolve(layer, u[..., 70:], lambda layer=layer: ask(layer))
            kernel, bias, _ = make(60 + layer, 1)
            assert_near(torch.cat([first, second], dim=-1), long_conv(u, kernel) + bias[:, None], 1e-12)
            assert cache.get_seq_length(layer) == 100
        assert calls == [0, 1]
        assert cache.get_mask_sizes(5, 0) == (105, 0)
        assert cache.get_max_length() == -1
        assert (cache.is_compileable, cache.is_croppable, cache.is_sliding) == (False, True, [False, False])

    def test_batches_are_repeated_selected_and_reordered(self):
        cache = MRConvCache(self.config)
        u = make(5, 100)[2]
        kernel, bias, _ = make(60, 1)
        expected = long_conv(u, kernel) + bias[:, None]
        # Nothing to do before the first call.
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.convolve(0, u[..., :50], self.kernel)
        cache.batch_repeat_interleave(2)
        assert cache.batch_size == 4
        cache.reorder_cache(torch.tensor([3, 0, 0, 1]))
        cache.batch_select_indices(torch.tensor([0, 1]))
        order = [1, 0]
        assert_near(cache.convolve(0, u[order, :, 50:], self.kernel), expected[order, :, 50:], 1e-12)

    def test_reset_begins_anew_with_the_present_kernel(self):
        cache = MRConvCache(self.config)
        u = make(5, 40)[2]
        cache.convolve(0, u, self.kernel)
        cache.reset()
        assert (cache.get_seq_length(), cache.batch_size) == (0, -1)
        kernel, bias, _ = make(7, 1)
        result = cache.convolve(0, u[:1], lambda: self.kernel(7))
        assert_near(result, long_conv(u[:1], kernel) + bias[:, None], 1e-12)

    def test_recorded_positions_are_cropped_in_every_layer(self):
        cache = MRConvCache(self.config)
        u = make(5, 40)[2]
        kernel, bias, _ = make(60, 1)
        cache.activate_past_recording()
        for layer in (0, 1):
            cache.convolve(layer, u[..., :30], self.kernel)
        cache.crop(-20)
        for layer in (0, 1):
            assert cache.get_seq_length(layer) == 10
            expected = (long_conv(u, kernel) + bias[:, None])[..., 10:]
            assert_near(cache.convolve(layer, u[..., 10:], self.kernel), expected, 1e-12)

    def test_bidirectional_layers_are_refused(self):
        layer = make_layer(bidirectional=True, layer_index=1)
        with pytest.raises(ValueError, match="Layer 1 is bidirectional.*bidirectional=False"):
            MRConvCache(self.config).convolve(1, torch.zeros(1, 4, 4), layer.streaming_kernel)

    def test_a_layer_that_the_cache_was_not_made_for_is_refused(self):
        with pytest.raises(ValueError, match="for 2 layers; layer 2 has none"):
            MRConvCache(self.config).convolve(2, torch.zeros(1, CHANNELS, 4), self.kernel)

    def test_copies_of_a_cache_share_the_kernel(self):
        cache = MRConvCache(self.config)
        cache.convolve(0, make(5, 40)[2], self.kernel)
        assert copy.deepcopy(cache).layers[0].kernel is cache.layers[0].kernel

    def test_a_gradient_through_the_cache_is_refused_where_it_is_asked_for(self):
        cache = MRConvCache(self.config)
        u = torch.ones(1, CHANNELS, 4, dtype=torch.float64, requires_grad=True)
        result = cache.convolve(0, u, self.kernel)
        with pytest.raises(RuntimeError, match="use_cache=False"):
            result.sum().backward()
        with torch.no_grad():
            assert not cache.convolve(0, u, self.kernel).requires_grad
