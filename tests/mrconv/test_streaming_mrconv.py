"""Streaming of one convolution and the cache of a model: chunks equal the whole; copies, interruptions, refusals."""

import copy
import io

import pytest
import torch
from torch.overrides import TorchFunctionMode

from hf_ext.mrconv.configuration_mrconv import MRConvConfig
from hf_ext.mrconv.streaming_mrconv import TILE, MRConvCache, StreamingConvolution, StreamingKernel
from tests.kit.refusals import refused
from tests.mrconv.mrconv_testing import make_layer
from tests.mrconv.reference_ops import long_conv

BATCH, CHANNELS = 2, 3


class Stream(StreamingConvolution):
    """A layer of a cache with the kernel that its model would give."""

    def __init__(self, kernel, phase=0.0):
        super().__init__(phase)
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


TOKENS, MIXED = [1], [5, 64, 1, 1, 31, 200]
# Taps, positions, chunks, dtype, tolerance.
STREAMS = [
    # Kernels shorter than a tile, of one, of a head, of one and two levels and beside; inputs beyond several blocks.
    *((taps, 520, chunks, torch.float64, 1e-12) for taps in (1, TILE - 1, 2 * TILE, 2 * TILE + 1, 256, 261)
      for chunks in (TOKENS, [520], MIXED)),
    # A prompt leaves the state that tokens go on from.
    *((taps, prompt + 1200, [prompt, *[1] * 70, 31, 900, 16], torch.float64, 1e-12)
      for taps in (40, 1100) for prompt in (256, 300, 2600)),
    # Rounding does not add up over thousands of positions.
    (1000, 3000, TOKENS, torch.float32, 1e-5),
]  # fmt: skip


@pytest.mark.parametrize(("taps", "length", "chunks", "dtype", "tolerance"), STREAMS)
def test_chunks_equal_the_whole(taps, length, chunks, dtype, tolerance, deterministic):
    sizes = {} if length == 520 else {"batch": 1, "channels": 2}
    kernel, bias, u = make(taps, length, dtype, **sizes)
    result = stream(kernel, bias, u, chunks)
    assert result.dtype == dtype
    assert_near(result.double(), long_conv(u.double(), kernel.double()) + bias.double()[:, None], tolerance)


def test_half_precision_inputs_have_a_float32_state():
    kernel, bias, u = make(100, 300)
    result = stream(kernel.bfloat16(), bias.bfloat16(), u.bfloat16(), [1])
    assert result.dtype == torch.bfloat16
    expected = long_conv(u.bfloat16().double(), kernel.bfloat16().double()) + bias.bfloat16().double()[:, None]
    # Only the result is rounded, to 8 bits.
    assert ((result.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-4).all()


class DirectStream:
    """What a stream is: all inputs are kept, and each output is a sum over the taps."""

    def __init__(self, kernel, bias):
        self.kernel, self.bias, self.inputs = kernel.double(), bias.double(), None

    def __call__(self, u):
        u = u.double()
        self.inputs = u if self.inputs is None else torch.cat([self.inputs, u], dim=-1)
        reached = self.inputs[..., -u.shape[-1] - self.kernel.shape[-1] + 1 :]
        return (long_conv(reached, self.kernel) + self.bias[:, None])[..., -u.shape[-1] :]

    def batch_select_indices(self, indices):
        self.inputs = self.inputs[indices]


@pytest.mark.parametrize(
    ("taps", "dtype", "tolerance"),
    [(50, torch.float64, 1e-12), (300, torch.float32, 3e-6), (1100, torch.float64, 1e-12)],
)
def test_whatever_is_done_with_a_stream_it_equals_direct_sums(taps, dtype, tolerance, deterministic):
    """Chunks of all kinds, samples selected, in random order and into the third level."""
    kernel, bias, _ = make(taps, 1, dtype)
    stream, direct = begin(kernel, bias), DirectStream(kernel, bias)
    draw, batch = torch.Generator().manual_seed(taps), BATCH

    def number(most):
        return int(torch.randint(1, most + 1, (), generator=draw))

    for turn in range(16):
        most = (1300, 1, 3, 40)[turn % 4]
        for _ in range(3 if most < 40 else 1):
            u = torch.randn(batch, CHANNELS, number(most), generator=draw).to(dtype)
            assert_near(stream(u).double(), direct(u), tolerance)
        if turn % 5 == 4:
            batch, chosen = number(3), torch.randint(0, batch, (3,), generator=draw)
            for one in (stream, direct):
                one.batch_select_indices(chosen[:batch])


def count_numbers(convolution: StreamingConvolution) -> int:
    """Real numbers that a stream holds for a channel of a sample; the kernel is its layer's."""
    tensors = [convolution.tile, *convolution.tail]
    for level in convolution.levels:
        tensors += [level.input_m_minus_2, level.input_m_minus_1, level.input_m, level.added_m, level.added_m_plus_1]
        tensors += level.spectra
    different = {id(tensor): tensor for tensor in tensors if tensor is not None}.values()
    return sum(x.numel() * (1 + x.is_complex()) for x in different) // convolution.tile[:, 0].numel()


def test_memory_is_that_of_the_kernel_however_long_the_stream():
    taps = 8 * 4 * TILE
    kernel, bias, u = make(taps, 4 * taps, batch=1, channels=1)
    convolution, held = begin(kernel, bias), []
    for chunk in u.split(taps // 4, dim=-1):
        convolution(chunk)
        held.append(count_numbers(convolution))
    # It grows with the stream, and ends with the kernel.
    assert held[0] < held[1] < held[3]
    assert len(set(held[5:])) == 1
    assert held[-1] <= 3.1 * taps
    # The spectra of a kernel, which all streams share, are two numbers a tap.
    taps *= 4
    prepared = StreamingKernel(*make(taps, 1)[:2])
    assert 1.9 * taps < sum(2 * spectra[:, 0].numel() for spectra in prepared.levels) <= 2.1 * taps


class CountWork(TorchFunctionMode):
    """Points that FFTs and products of spectra compute, and FFTs of the levels: those of a tile's end have 4 TILE."""

    def __init__(self):
        super().__init__()
        self.points = self.works = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.fft.irfft:
            self.points += 2 * result.numel()
            self.works += kwargs["n"] != 4 * TILE
        elif function is torch.Tensor.addcmul_:
            self.points += args[1].numel()
        return result


def count_work(convolutions, u):
    """What each position costs, and how many levels of all these streams work at it, after one long chunk."""
    _, channels, points = convolutions[0].of.levels[-1].shape
    found = []
    for convolution in convolutions:
        # In two, so that all levels have seen all of it.
        for chunk in torch.zeros(1, channels, 7 * (points - 1), dtype=u.dtype).tensor_split([TILE], dim=-1):
            convolution(chunk)
    for position in u.split(1, dim=-1):
        with CountWork() as count:
            for convolution in convolutions:
                convolution(position)
        found.append((count.points, count.works))
    return found


def test_no_position_waits_for_a_long_fft():
    """Counted, not timed: the most and the mean work of a position, with 4,096 and 16,384 taps."""
    worst, mean = [], []
    for block in (16 * TILE, 64 * TILE):
        kernel, bias, u = make(8 * block, 16 * TILE, torch.float32, batch=1, channels=8)
        work = count_work([begin(kernel, bias)], u)
        # What is due depends on the position only.
        assert work == count_work([begin(kernel, bias)], torch.zeros_like(u))
        found = [points for points, _ in work]
        worst.append(max(found))
        mean.append(sum(found) / len(found))
    # Four times the taps are one more level, of five; and the share of a level that is done at once does not grow.
    assert mean[1] <= 1.4 * mean[0]
    assert worst[1] <= 1.3 * worst[0]


@pytest.mark.parametrize("depth", [2, 8])
def test_layers_and_levels_of_a_model_take_turns(depth):
    """None works at the position of another, where there are as many positions in a tile as layers and levels."""
    kernel, bias, u = make(8 * 16 * TILE, 16 * TILE, torch.float32, batch=1, channels=8)
    cache = MRConvCache(MRConvConfig(num_hidden_layers=depth))
    convolutions = [Stream(StreamingKernel(kernel, bias), layer.phase) for layer in cache.layers]
    found = [works for _, works in count_work(convolutions, u)]
    assert max(found) == 1
    # In 16 tiles: 16, 4 and 1 times.
    assert sum(found) == 21 * depth


def read_back(convolution):
    file = io.BytesIO()
    torch.save(convolution, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, read_back])
def test_a_stream_or_copy_of_inference_mode_goes_on_in_and_outside_of_it(make_copy):
    kernel, bias, u = make(300, 400)
    expected = long_conv(u, kernel) + bias[:, None]
    with torch.inference_mode():
        convolution = begin(kernel, bias)
        convolution(u[..., :160])
        inside, outside = (make_copy(convolution) for _ in range(2))
        assert inside.tile.is_inference()
    for one in (inside, outside, convolution):
        with torch.inference_mode(one is inside):
            found = torch.cat([one(part) for part in u[..., 160:].split(7, dim=-1)], dim=-1)
        assert_near(found, expected[..., 160:], 1e-12)


def test_a_batch_in_its_order_is_not_copied_and_wrong_ones_and_wrong_chunks_change_nothing():
    kernel, bias, u = make(100, 200)
    convolution = begin(kernel, bias)
    convolution(u[..., :90])
    tile, spectra = convolution.tile, convolution.levels[0].spectra
    convolution.batch_select_indices(torch.tensor([0, 1]))
    assert convolution.tile is tile and convolution.levels[0].spectra is spectra
    for wrong in (torch.tensor([0, BATCH]), torch.tensor([True] * (BATCH + 1))):
        with pytest.raises((IndexError, RuntimeError)):
            convolution.batch_select_indices(wrong)
    for shape in ((BATCH + 1, CHANNELS, 1), (BATCH, CHANNELS + 1, 1)):
        with refused(ValueError, "channels", "cache"):
            convolution(torch.zeros(shape))
    for shape in ((BATCH, CHANNELS, 0), (0, CHANNELS, 3)):
        with refused(ValueError, "position", "sample"):
            begin(kernel, bias)(torch.zeros(shape))
    assert_near(convolution(u[..., 90:]), (long_conv(u, kernel) + bias[:, None])[..., 90:], 1e-12)


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
    assert again.layers[0].kernel is cache.layers[0].kernel
    torch.testing.assert_close(equal(u, cache=again), layer(u, cache=cache))
    cache.reset()
    equal(u, cache=cache)


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
        assert (cache.is_compileable, cache.is_croppable, cache.is_sliding) == (False, False, [False, False])

    def test_batches_are_selected_and_reordered_and_reset(self):
        cache = MRConvCache(self.config)
        u = make(5, 100)[2]
        kernel, bias, _ = make(60, 1)
        expected = long_conv(u, kernel) + bias[:, None]
        # Nothing to do before the first call.
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.convolve(0, u[..., :50], self.kernel)
        cache.batch_select_indices(torch.tensor([0, 0, 1, 1]))
        assert cache.batch_size == 4
        cache.reorder_cache(torch.tensor([3, 0, 0, 1]))
        cache.batch_select_indices(torch.tensor([0, 1]))
        # A mask, and each twice.
        cache.batch_select_indices(torch.tensor([False, True]))
        cache.batch_repeat_interleave(2)
        order = [0, 0]
        assert_near(cache.convolve(0, u[order, :, 50:], self.kernel), expected[order, :, 50:], 1e-12)
        with refused(ValueError, "crop(3)"):
            cache.crop(3)
        # After a reset it begins anew with the present kernel.
        cache.reset()
        assert (cache.get_seq_length(), cache.batch_size) == (0, -1)
        kernel, bias, _ = make(7, 1)
        assert_near(cache.convolve(0, u[:1], lambda: self.kernel(7)), long_conv(u[:1], kernel) + bias[:, None], 1e-12)

    def test_gradients_through_the_cache_and_bidirectional_layers_are_refused(self):
        cache = MRConvCache(self.config)
        u = torch.ones(1, CHANNELS, 4, dtype=torch.float64, requires_grad=True)
        result = cache.convolve(0, u, self.kernel)
        with refused(RuntimeError, "use_cache=False"):
            result.sum().backward()
        with torch.no_grad():
            assert not cache.convolve(0, u, self.kernel).requires_grad
        # To the kernel it is too, where the inputs ask for none.
        layer, inputs = make_layer(), torch.ones(1, 4, 5)
        with refused(RuntimeError, "use_cache=False"):
            layer(inputs, cache=MRConvCache(self.config)).sum().backward()
        layer.requires_grad_(False)
        assert not layer(inputs, cache=MRConvCache(self.config)).requires_grad
        layer = make_layer(bidirectional=True, layer_index=1)
        with refused(ValueError, "Layer 1", "bidirectional=False"):
            MRConvCache(self.config).convolve(1, torch.zeros(1, 4, 4), layer.streaming_kernel)
