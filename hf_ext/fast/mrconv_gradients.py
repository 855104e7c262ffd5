"""MRConv's convolutions with gradients written by hand: same values as `ops_mrconv`, less time and memory.

Importing this module enters them in `ops_mrconv.FAST`. Shapes are those of `mrconv_branch_sums`. Each gradient is
derived in docs/mrconv_gradients.md."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from hf_ext.mrconv.ops_mrconv import (
    FAST,
    SumOverProcesses,
    branch_sums,
    fft_size,
    grouped_batch_norm_conv,
    kernel_spectrum,
)

from .derivatives import needs_plain_gradients, plain_gradients
from .mrconv_branch_sums import Branches, Signal, SumGradients, correlation, exact_dtype, response
from .mrconv_kernels import add_kernels

# Autograd would keep every spectrum, and every branch of a layer in training. Here a call saves its input and the
# kernels, computes the rest again in the backward pass, and works on a few channels at a time, so that no other array
# is as large as the input.

# Points of the real FFTs that run together: what caches hold, or enough to fill a GPU without filling its memory.
POINTS_CPU = 2**21
POINTS_GPU = 2**26
# Points of a whole layer up to which spectra and formed outputs are kept for the backward pass, not made again, which
# would take a quarter of the time. They are 9 to 16 times the input, which is 4 MiB at most: up to 64 MiB a layer.
KEPT_POINTS = 2**21


def channel_chunks(u: Tensor, n: int) -> Iterator[slice]:
    """Channels that are worked on together. Large arrays made and dropped cost more than the FFTs between them."""
    points = POINTS_CPU if u.device.type == "cpu" else POINTS_GPU
    size = max(1, points // (n * len(u)))
    return (slice(first, min(first + size, u.shape[1])) for first in range(0, u.shape[1], size))


class LongConv(torch.autograd.Function):
    """Saves the input and the kernels, of a small input also spectra; others are computed again."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, kernel: Tensor, wing: Tensor | None, spectrum: Tensor | None, bias: Tensor | None, n: int
    ) -> Tensor:
        y, parts = torch.empty(u.shape, dtype=u.dtype, device=u.device), list(channel_chunks(u, n))
        keep = n * u[:, :, 0].numel() <= KEPT_POINTS and len(parts) == 1 and any(ctx.needs_input_grad)
        kept: list[Tensor] = []
        for part in parts:
            factors = _factors(kernel, wing, spectrum, part, n)
            inputs = torch.fft.rfft(u[:, part].to(kernel.dtype), n=n)
            kept = [inputs, factors] if keep else []
            spectra = inputs * factors if keep else inputs.mul_(factors)
            chunk = torch.fft.irfft(spectra, n=n)[..., : u.shape[2]]
            if bias is None:
                y[:, part] = chunk
            else:
                torch.add(chunk, bias[part, None], out=y[:, part])
        ctx.save_for_backward(u, kernel, wing, spectrum, *kept)
        ctx.n = n
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        u, kernel, wing, spectrum, *kept = ctx.saved_tensors
        (g_y,), n, needed = gradients, ctx.n, ctx.needs_input_grad
        # What is written here can be differentiated; what was kept cannot.
        kept = [] if needs_plain_gradients() else kept
        g_u, g_kernel, g_wing = (
            g_y.new_empty(x.shape, dtype=x.dtype) if x is not None and need else None
            for x, need in zip((u, kernel, wing), needed, strict=False)
        )
        for part in channel_chunks(u, n):
            g_spectrum = torch.fft.rfft(g_y[:, part].to(kernel.dtype), n=n)
            if g_u is not None:
                factors = kept[1] if kept else _factors(kernel, wing, spectrum, part, n)
                g_u[:, part] = response(g_spectrum, factors.conj_physical(), n, u.shape[2])
            if spectrum is None and (g_kernel is not None or g_wing is not None):
                inputs = kept[0] if kept else torch.fft.rfft(u[:, part].to(kernel.dtype), n=n)
                conjugate = inputs.conj_physical() if kept else inputs.conj_physical_()
                lags = correlation(conjugate, g_spectrum, n)
                if g_kernel is not None:
                    g_kernel[part] = lags[:, : kernel.shape[1]]
                if g_wing is not None:
                    g_wing[part] = lags[:, n - g_wing.shape[1] :].flip(1)
        g_bias = g_y.sum((0, 2), dtype=kernel.dtype) if needed[4] else None
        return g_u, g_kernel, g_wing, None, g_bias, None


def _factors(kernel: Tensor, wing: Tensor | None, spectrum: Tensor | None, part: slice, n: int) -> Tensor:
    """The spectrum of some channels of a kernel, which may be known."""
    return kernel_spectrum(_rows(kernel, part), _rows(wing, part), n) if spectrum is None else spectrum[part]


def _rows(kernel: Any, part: slice) -> Any:
    """Some channels of a kernel or spectrum, or of None; of all channels what is given, without a call."""
    return kernel if kernel is None or len(kernel) == part.stop - part.start else kernel[part]


# Large means. What the mean of the input gives at the output of a branch is a constant, which the normalisation takes
# off again. Where the mean is large, the variance is the small difference of a large square and a large squared mean,
# and the digits of float32 that both have in common are lost. How many those are is known as soon as the sums are:
# mean^2 / var. Channels that lose more than two digits of seven are computed again in float64, forward and backward;
# the others pay nothing. It is the same function of the same numbers, rounded less: there is nothing to derive, and
# tests/mrconv/test_layer_ops_mrconv.py compares it with float64. Processes that share statistics decide by their
# own samples: where mean^2 <= 100 var in all of them, it holds of the joined batch, whose variance is at least the
# mean of theirs. The numbers are looked at on a CPU only: that would hold up another device, and some have no float64.
_LARGE_MEAN = 100


# The layer needs of a branch no more than its sum A_i and its squared sum Q_i over all C valid positions
# (`mrconv_branch_sums`): y = m * u + t with the merged kernel m = sum_i s_i k_i, t = sum_i (alpha_i b_i - s_i mean_i),
# s_i = alpha_i w_i / sqrt(var_i + eps), mean_i = A_i / C and var_i = Q_i / C - mean_i^2.
class BatchNormLayer(NamedTuple):
    """The settings of a layer, without its tensors. Of its kernels the first `branch_count` are those of the past."""

    n: int
    branch_count: int
    eps: float
    start: Tensor | None
    stop: Tensor | None
    group: torch.distributed.ProcessGroup | None = None

    def branches(
        self, u: Tensor, kernels: Sequence[Tensor], part: slice, dtype: torch.dtype, kept: Sequence[Any] = ()
    ) -> Branches:
        """Some channels; `kept` are the spectrum of the input and what was formed, if they are there from before."""
        samples = u[:, part].to(dtype)
        spectrum = kept[0] if kept else torch.fft.rfft(samples, n=self.n)
        rows = [_rows(kernel, part).to(dtype) for kernel in kernels]
        signal = Signal(samples, spectrum, self.n, self.start, self.stop)
        wings = rows[self.branch_count :] or [None] * self.branch_count
        return Branches(signal, rows[: self.branch_count], wings, kept[1:] if kept else None)

    def measure(
        self, u: Tensor, kernels: Sequence[Tensor], part: slice, keep: bool = False
    ) -> tuple[Branches, Tensor]:
        """Some channels, in float64 where float32 is not enough, and their [`Branches.sums`], [3, N, channels]."""
        branches = self.branches(u, kernels, part, kernels[0].dtype)
        sums = branches.sums(keep)
        dtype = self.dtype(branches.dtype, u, sums)
        if dtype == branches.dtype:
            return branches, sums
        branches = self.branches(u, kernels, part, dtype)
        return branches, branches.sums(keep)

    @staticmethod
    def dtype(dtype: torch.dtype, u: Tensor, sums: Tensor) -> torch.dtype:
        """float64 for channels of such sums that need it, and the dtype of the kernels for the others."""
        if u.device.type != "cpu" or dtype == torch.float64:
            return dtype
        total, square, count = sums
        # mean^2 > 100 var, with var = square / count - mean^2.
        large = (1 + 1 / _LARGE_MEAN) * total.square() > square * count
        return torch.float64 if bool(large.any()) else dtype

    def exchange(
        self, parts: list[slice], begin: Callable[[slice], tuple[Any, Tensor]], again: Callable[[slice, Tensor], Any]
    ) -> Iterator[tuple[slice, Any, Tensor]]:
        """Work on parts of the channels that have sums in common with other processes: each part with what `begin`
        made of it and its sums, [..., channels], over all processes.

        All sums travel in one collective, so that no process waits for each part. Until it is there all parts have to
        be begun, and what they work on is not kept, as there is no memory for it, but made `again`."""
        if self.group is None:
            for part in parts:
                yield part, *begin(part)
            return
        begun = [begin(part) if len(parts) == 1 else (None, begin(part)[1]) for part in parts]
        sums: Tensor = SumOverProcesses.apply(torch.cat([found for _, found in begun], dim=-1), self.group)
        for part, (work, _) in zip(parts, begun, strict=True):
            found = sums[..., part]
            yield part, again(part, found) if work is None else work, found

    def plain(self, u: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor, *kernels: Tensor) -> Tensor:
        """The outputs by expressions that autograd follows."""
        own, wings, span = [*kernels[: self.branch_count]], [*kernels[self.branch_count :]], (self.start, self.stop)
        return grouped_batch_norm_conv([u], [span], own, alpha, weight, bias, self.eps, wings, self.group)[3]

    def plain_sums(self, u: Tensor, *kernels: Tensor) -> Tensor:
        own, wings = [*kernels[: self.branch_count]], [*kernels[self.branch_count :]]
        return branch_sums(u, own, wings, self.n, self.start, self.stop)

    def merged_spectrum(self, branches: Branches, scale: Tensor) -> Tensor:
        wing = None if branches.wings[0] is None else add_kernels(branches.wings, scale)
        return kernel_spectrum(add_kernels(branches.kernels, scale), wing, self.n)

    def normalization(self, sums: Tensor, alpha: Tensor, weight: Tensor) -> list[Tensor]:
        """Numbers of each branch, from sums over the batch (eqs. 4-6): positions, mean, variance as rounding left it
        and without negative ones, 1 / sqrt(variance + eps), and scale."""
        positions = sums[2].clamp_min(1)
        mean, square = sums[:2] / positions
        rounded = square - mean.square()
        var = rounded.clamp_min(0)
        inverse = (var + self.eps).rsqrt()
        return [positions, mean, rounded, var, inverse, alpha * weight * inverse]

    @staticmethod
    def normalization_gradient(
        norm: list[Tensor], g_scale: Tensor, g_shift: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """From the gradients of scale and shift those of the two sums, [2, N, channels], of alpha, weight and bias."""
        positions, mean, rounded, _, inverse, scale = norm
        # shift = sum_i alpha_i b_i - scale_i mean_i
        g_mean, g_scale = -scale * g_shift, g_scale - mean * g_shift
        # d scale / d var = -scale / (2 (var + eps)), and nothing where rounding had made var negative.
        g_var = torch.where(rounded >= 0, -0.5 * g_scale * scale * inverse.square(), 0)
        # var = square / C - mean^2
        g_total = (g_mean - 2 * mean * g_var) / positions
        g_sums = torch.stack([g_total, g_var / positions])
        return g_sums, g_scale * weight * inverse + bias * g_shift, g_scale * alpha * inverse, alpha * g_shift


class BatchNormConv(torch.autograd.Function):
    """Sums of the branches, their normalization, and one convolution with the merged kernel, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor, layer: BatchNormLayer, *kernels: Tensor
    ) -> tuple[Tensor, ...]:
        keep = layer.n * u[:, :, 0].numel() <= KEPT_POINTS and any(ctx.needs_input_grad)
        *results, kept = _normalize(layer, u, [alpha, weight, bias], kernels, keep)
        ctx.save_for_backward(u, alpha, weight, bias, results[3], *kernels, *kept)
        ctx.layer, ctx.kernels = layer, len(kernels)
        ctx.mark_non_differentiable(*results[1:])
        # Else autograd makes zeros for those that have no gradient.
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if gradients[0] is None:
            return (None,) * len(ctx.needs_input_grad)
        u, alpha, weight, bias, sums, *rest = ctx.saved_tensors
        kernels, kept = rest[: ctx.kernels], rest[ctx.kernels :]
        if needs_plain_gradients():
            plain = plain_gradients(ctx.layer.plain, gradients[0], u, alpha, weight, bias, *kernels)
            return *plain[:4], None, *plain[4:]
        found = _gradients(ctx.layer, u, [alpha, weight, bias], sums, kernels, kept, gradients[0])
        return *found[:4], None, *found[4:]


def _normalize(
    layer: BatchNormLayer, u: Tensor, coefficients: list[Tensor], kernels: Sequence[Tensor], keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor | None]]:
    """Outputs, means and variances; sums of the branches, [3, N, channels]; and what is kept of a single part."""
    y = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    (alpha, weight, bias), parts = coefficients, list(channel_chunks(u, layer.n))
    keep = keep and len(parts) == 1

    def begin(part: slice) -> tuple[Branches, Tensor]:
        return layer.measure(u, kernels, part, keep)

    def again(part: slice, sums: Tensor) -> Branches:
        return layer.branches(u, kernels, part, layer.dtype(kernels[0].dtype, u, sums))

    statistics, kept = [], []
    for part, branches, sums in layer.exchange(parts, begin, again):
        _, mean, _, var, _, scale = norm = layer.normalization(sums, alpha[:, part], weight[:, part])
        merged = layer.merged_spectrum(branches, scale)
        chunk = response(branches.signal.spectrum, merged, layer.n, u.shape[2])
        shift = (alpha[:, part] * bias[:, part] - scale * mean).sum(0)
        torch.add(chunk, shift.to(chunk.dtype)[:, None], out=y[:, part])
        statistics.append((mean, var, sums))
        if keep:
            kept = [merged, *norm, branches.signal.spectrum, *branches.formed]
    whole = zip(*statistics, strict=True)
    mean, var, sums = (values[0] if len(values) == 1 else torch.cat(values, dim=-1) for values in whole)
    return y, mean.to(kernels[0].dtype), var.to(kernels[0].dtype), sums, kept


def _gradients(
    layer: BatchNormLayer,
    u: Tensor,
    coefficients: list[Tensor],
    all_sums: Tensor,
    kernels: list[Tensor],
    kept: list[Tensor],
    g_y: Tensor,
) -> list[Tensor]:
    """Gradients of the input, the three coefficients and the kernels, from that of the outputs."""
    g_u, parts = torch.empty(u.shape, dtype=u.dtype, device=u.device), list(channel_chunks(u, layer.n))
    leaves = [*coefficients, *kernels]
    targets = [torch.empty_like(x) for x in leaves] if len(parts) > 1 else []

    def begin(part: slice) -> tuple[tuple[Any, ...], Tensor]:
        sums, values = all_sums[..., part], [x[:, part] for x in coefficients]
        dtype = kept[0].real.dtype if kept else layer.dtype(kernels[0].dtype, u, sums)
        branches = layer.branches(u, kernels, part, dtype, kept[7:])
        norm = kept[1:7] or layer.normalization(sums, *values[:2])
        g_chunk = g_y[:, part].to(branches.dtype)
        g_spectrum = torch.fft.rfft(g_chunk, n=layer.n)
        conjugate = branches.signal.spectrum.conj_physical()
        lags = correlation(conjugate, g_spectrum, layer.n)
        g_scale = _scale_gradient(lags, branches).to(sums.dtype)
        g_shift = g_chunk.sum((0, 2), dtype=sums.dtype)
        g_sums, *found = layer.normalization_gradient(norm, g_scale, g_shift, *values)
        return (branches, norm[-1], g_spectrum, conjugate, lags, found), g_sums

    for part, work, g_sums in layer.exchange(parts, begin, lambda part, _: begin(part)[0]):
        branches, scale, g_spectrum, conjugate, lags, found = work
        merged = kept[0] if kept else layer.merged_spectrum(branches, scale)
        g_spectrum.mul_(merged.conj_physical())
        sums = SumGradients(branches, conjugate, g_sums, lags, scale)
        g_u[:, part] = sums.input_gradient(g_spectrum)
        found += sums.kernel_gradients
        if not targets:
            return [g_u, *(gradient.to(x.dtype) for gradient, x in zip(found, leaves, strict=True))]
        for index, (target, gradient) in enumerate(zip(targets, found, strict=True)):
            target[(slice(None), part) if index < len(coefficients) else part] = gradient
    return [g_u, *targets]


# Compilers cannot trace the functions above, which look at values. A graph calls them as one operation, of which it
# knows the shapes alone: there is nothing to fuse, and chunks would be unrolled. Shapes may be symbols: the FFT size
# is made a fast one in here, and nothing is kept for the backward pass.
@torch.library.custom_op("hf_ext::normalize_branches", mutates_args=())
def _normalize_branches(
    u: Tensor, coefficients: list[Tensor], kernels: list[Tensor], n: int, eps: float,
    start: Tensor | None, stop: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    layer = BatchNormLayer(fft_size(n), len(coefficients[0]), eps, start, stop)
    return _normalize(layer, u, coefficients, kernels, False)[:4]


@_normalize_branches.register_fake
def _(u: Tensor, coefficients: list[Tensor], kernels: list[Tensor], *_: Any) -> tuple[Tensor, ...]:
    mean = kernels[0].new_empty(coefficients[0].shape)
    return u.new_empty(u.shape), mean, mean.clone(), mean.new_empty((3, *mean.shape), dtype=exact_dtype(u))


@torch.library.custom_op("hf_ext::normalize_branches_backward", mutates_args=())
def _normalize_branches_backward(
    u: Tensor, coefficients: list[Tensor], kernels: list[Tensor], n: int, eps: float,
    start: Tensor | None, stop: Tensor | None, sums: Tensor, g_y: Tensor,
) -> list[Tensor]:  # fmt: skip
    layer = BatchNormLayer(fft_size(n), len(coefficients[0]), eps, start, stop)
    return _gradients(layer, u, coefficients, sums, kernels, [], g_y)


@_normalize_branches_backward.register_fake
def _(u: Tensor, coefficients: list[Tensor], kernels: list[Tensor], *_: Any) -> list[Tensor]:
    return [value.new_empty(value.shape) for value in (u, *coefficients, *kernels)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    u, coefficients, kernels, ctx.n, ctx.eps, start, stop = inputs
    ctx.counts = len(coefficients), len(kernels)
    ctx.save_for_backward(u, start, stop, output[3], *coefficients, *kernels)


def _compiled_gradients(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
    u, start, stop, sums, *rest = ctx.saved_tensors
    coefficients, kernels = rest[:3], rest[3:]
    found = _normalize_branches_backward(u, coefficients, kernels, ctx.n, ctx.eps, start, stop, sums, gradients[0])
    return found[0], found[1:4], found[4:], None, None, None, None


_normalize_branches.register_autograd(_compiled_gradients, setup_context=_save)


def normalized_conv(
    u: Tensor,
    kernels: list[Tensor],
    wings: list[Tensor],
    n: int,
    coefficients: list[Tensor],
    eps: float,
    start: Tensor | None,
    stop: Tensor | None,
    group: torch.distributed.ProcessGroup | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[`BatchNormConv`]; in a compiled graph, one operation of it."""
    if torch.compiler.is_compiling() and group is None:
        y, mean, var, sums = _normalize_branches(u, coefficients, [*kernels, *wings], n, eps, start, stop)
    else:
        layer = BatchNormLayer(n, len(kernels), eps, start, stop, group)
        y, mean, var, sums = _apply(u, *coefficients, layer, *kernels, *wings)
    return y, mean.detach(), var.detach(), sums[2, 0, 0].detach().to(mean.dtype)


# Outside of the graph, which breaks here where processes share statistics.
_apply = torch.compiler.disable(BatchNormConv.apply)


def _scale_gradient(lags: Tensor, branches: Branches) -> Tensor:
    """Gradient of the factor of each branch from that of the merged kernel's lags: [N, channels]."""
    found = [torch.linalg.vecdot(lags[:, : kernel.shape[1]], kernel) for kernel in branches.kernels]
    for index, wing in enumerate(branches.wings):
        if wing is not None:
            found[index] += torch.linalg.vecdot(lags[:, lags.shape[1] - wing.shape[1] :].flip(1), wing)
    return torch.stack(found)


# Packed sequences: groups of samples of different lengths add their sums up, and are convolved group by group.
class BranchSums(torch.autograd.Function):
    """The first half of `BatchNormConv`, A_i, Q_i and the number of positions, with the gradients that stand there."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, layer: BatchNormLayer, *kernels: Tensor) -> Tensor:
        all_sums = torch.cat([layer.measure(u, kernels, part)[1] for part in channel_chunks(u, layer.n)], dim=-1)
        ctx.save_for_backward(u, all_sums, *kernels)
        ctx.layer = layer
        return all_sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (u, all_sums, *kernels), layer = ctx.saved_tensors, ctx.layer
        if needs_plain_gradients():
            found = plain_gradients(layer.plain_sums, gradients[0], u, *kernels)
            return found[0], None, *found[1:]
        g_u = torch.empty(u.shape, dtype=u.dtype, device=u.device)
        g_kernels = [torch.empty_like(kernel) for kernel in kernels]
        for part in channel_chunks(u, layer.n):
            dtype = layer.dtype(kernels[0].dtype, u, all_sums[..., part])
            branches = layer.branches(u, kernels, part, dtype)
            spectrum, g_sums = branches.signal.spectrum, gradients[0][:2, :, part]
            # The merged kernel is convolved elsewhere: it has no gradient here.
            merged = spectrum.real.new_zeros(spectrum.shape[1], layer.n)
            none = torch.zeros_like(g_sums[0])
            sums = SumGradients(branches, spectrum.conj_physical(), g_sums, merged, none)
            g_u[:, part] = sums.input_gradient(torch.zeros_like(spectrum))
            for target, gradient in zip(g_kernels, sums.kernel_gradients, strict=True):
                target[part] = gradient
        return g_u, None, *g_kernels


@torch.compiler.disable
def grouped_sums(
    u: Tensor, kernels: list[Tensor], wings: list[Tensor], n: int, start: Tensor | None, stop: Tensor | None
) -> Tensor:
    """Sum and squared sum of each branch over batch and valid positions, and their number: [3, N, channels]."""
    sums: Tensor = BranchSums.apply(u, BatchNormLayer(n, len(kernels), 0.0, start, stop), *kernels, *wings)
    return sums


FAST.update(long_conv=LongConv.apply, batch_norm_conv=normalized_conv, branch_sums=grouped_sums)
