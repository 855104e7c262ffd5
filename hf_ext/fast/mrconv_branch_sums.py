"""Sum and energy of the branches of an MRConv layer, and their gradients, without forming most of the branches.

Shapes: u [batch, channels, length], kernels [channels, taps], n is the FFT size, spectra [..., n // 2 + 1]. A wing is
a kernel of the future, for negative lags. Each line is derived in docs/mrconv_gradients.md, sections 5 and 6."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_ext.mrconv.ops_mrconv import fft_size, kernel_spectrum, valid_positions

Wings = list[Tensor] | list[None]

# Samples up to which a sum over the batch is taken one by one: an array as large as the batch takes longer then.
_FEW = 8


def product_sum(values: Tensor, factors: Tensor) -> Tensor:
    """Sum of the products over the first dimension."""
    if len(values) > _FEW:
        return (values * factors).sum(0)
    total = values[0] * factors[0]
    for value, factor in zip(values[1:], factors[1:], strict=True):
        total.addcmul_(value, factor)
    return total


def correlation(conjugate: Tensor, spectrum: Tensor, n: int) -> Tensor:
    """Gradient of a two-sided kernel, [channels, n]: conj(U) G summed over the batch."""
    return torch.fft.irfft(product_sum(conjugate, spectrum), n=n)


def response(spectrum: Tensor, kernel: Tensor, n: int, length: int) -> Tensor:
    return torch.fft.irfft(spectrum * kernel, n=n)[..., :length]


def exact_dtype(values: Tensor) -> torch.dtype:
    """float64, where a device has it: the variance is a small difference of large sums."""
    return values.dtype if values.device.type == "mps" else torch.float64


def _exact(values: Tensor) -> Tensor:
    return values.to(exact_dtype(values))


def _sum(values: Tensor) -> Tensor:
    """Over the batch and all positions, [..., batch, channels, length]."""
    return values.sum((-3, -1), dtype=exact_dtype(values))


def _energy(values: Tensor) -> Tensor:
    return _exact(torch.linalg.vector_norm(values, dim=-1)).square().sum(-2)


def _power(spectrum: Tensor) -> Tensor:
    """|X|^2, without the square root and the care for overflow that `abs` takes."""
    return spectrum.real.square().addcmul_(spectrum.imag, spectrum.imag)


def _symmetric(lags: Tensor, n: int) -> Tensor:
    """Spectrum, real, of a symmetric sequence of which the lags 0, 1, ... are given."""
    return 2 * torch.fft.rfft(lags, n=n).real - lags[:, :1]


def _mean_of_all(density: Tensor, n: int) -> Tensor:
    """Mean over all n frequencies of what is given at half of them."""
    # Frequencies between zero and the highest stand for two of the full spectrum.
    return (2 * density.sum(-1) - density[..., 0] - density[..., -1]) / n


def _gather(values: Tensor, index: Tensor) -> Tensor:
    """values[b, :, index[b, t]], zero where the index lies outside."""
    size = values.shape[-1]
    places = index.clamp(0, size - 1)[:, None].expand(-1, values.shape[1], -1)
    return values.gather(2, places) * ((index >= 0) & (index < size))[:, None]


@dataclass(eq=False)
class Signal:
    """Some channels of the input, and their spectrum. Positions start, ..., stop - 1 are valid; u is zero outside."""

    u: Tensor
    spectrum: Tensor
    n: int
    start: Tensor | None
    stop: Tensor | None

    @cached_property
    def valid(self) -> Tensor | None:
        """The mask of valid positions of each sample, [batch, 1, length]; None: all are."""
        every = self.start is None and self.stop is None
        return None if every else valid_positions(self.u, self.start, self.stop)

    @cached_property
    def positions(self) -> Tensor:
        """Number of valid positions."""
        dtype = exact_dtype(self.u)
        if self.valid is None:
            return torch.full((), len(self.u) * self.u.shape[2], dtype=dtype, device=self.u.device)
        return self.valid.sum(dtype=dtype)

    @cached_property
    def sum(self) -> Tensor:
        """Sum of all inputs of a channel. Of the spectrum: it is in the energies too, and so are its last digits."""
        return _exact(self.spectrum[..., 0].real).sum(0)

    def _begin(self, last: bool, count: int) -> Tensor | None:
        """Starts of the last or the first valid positions in each sample, [batch, 1]; None: at the buffer's ends."""
        if last:
            return None if self.stop is None else self.stop[:, None] - count
        return None if self.start is None else self.start[:, None]

    def at_end(self, last: bool, count: int) -> Tensor:
        """The last or the first valid inputs in the order of time, [batch, channels, count]."""
        begin = self._begin(last, count)
        if begin is None:
            return self.u[..., self.u.shape[2] - count :] if last else self.u[..., :count]
        return _gather(self.u, begin + torch.arange(count, device=self.u.device))

    def subtract_at_end_(self, target: Tensor, last: bool, values: Tensor) -> None:
        """Subtract values from those positions of another array."""
        count = values.shape[2]
        begin = self._begin(last, count)
        if begin is None:
            target[..., target.shape[2] - count if last else 0 :][..., :count].sub_(values)
        else:
            target -= _gather(values, torch.arange(target.shape[2], device=target.device) - begin)


class Formed(NamedTuple):
    """A branch whose output is formed: spectrum of its kernel, mean of the output, and the output less the mean."""

    factors: Tensor
    mean: Tensor
    centred: Tensor


class Group(NamedTuple):
    """G branches of about one length of which only the response beyond the ends of the input is formed.

    With FFTs of size m: spectra of the kernels, [G, channels, m // 2 + 1], their squared magnitudes and the sums of
    the kernels; spectrum of the autocorrelation of u at the lags they have; and for each end, the last and the first,
    spectrum of the inputs next to it and response beyond it, [G, batch, channels, positions], None where no tap
    crosses that end."""

    factors: Tensor
    strength: Tensor
    gain: Tensor
    power: Tensor
    last: Tensor | None
    after: Tensor | None
    first: Tensor | None
    before: Tensor | None


Part = Formed | Group


class Layout(NamedTuple):
    """Branches that are worked on together: their numbers, longest kernel, longest wing, FFT size; formed or not."""

    members: tuple[int, ...]
    taps: int
    ahead: int
    n: int
    formed: bool


# What decides which branches share their FFTs, which are those of the longest: fewer calls, more points. Up to so many
# taps the calls are all that counts; up to so many, branches of less than so many times the taps share; longer ones
# are alone.
_ALL_SHARE, _SOME_SHARE, _FACTOR = 128, 512, 4


@lru_cache
def layouts(sizes: tuple[tuple[int, int], ...], n: int) -> list[Layout]:
    """Division of branches of so many taps, of the past and of the future. Formed is what reaches a quarter of n: two
    FFTs of size n beat four at each end."""
    found: list[Layout] = []
    least = 0
    for index in sorted(range(len(sizes)), key=lambda index: -sum(sizes[index])):
        taps, ahead = sizes[index]
        if 4 * (taps + ahead) >= n:
            found.append(Layout((index,), taps, ahead, n, True))
            continue
        if least and taps + ahead >= least:
            group = found.pop()
            members, taps, ahead = (*group.members, index), max(taps, group.taps), max(ahead, group.ahead)
        else:
            members, span = (index,), taps + ahead
            least = 1 if span <= _ALL_SHARE else span // _FACTOR + 1 if span <= _SOME_SHARE else 0
        found.append(Layout(members, taps, ahead, fft_size(2 * (taps + ahead)), False))
    return found


def two_sided(kernels: list[Tensor], wings: Sequence[Tensor | None], n: int) -> Tensor:
    buffer = kernels[0].new_zeros(len(kernels), len(kernels[0]), n)
    for row, kernel, wing in zip(buffer, kernels, wings, strict=True):
        row[:, : kernel.shape[1]] = kernel
        if wing is not None:
            row[:, n - wing.shape[1] :] = wing.flip(1)
    return torch.fft.rfft(buffer)


class Branches:
    """The branches of some channels: input, kernels of the past, and of the future, all in one dtype."""

    def __init__(
        self, signal: Signal, kernels: list[Tensor], wings: Wings, kept: Sequence[Tensor | None] | None = None
    ):
        """`kept`: formed branches of another instance, to be reused."""
        self.signal, self.kernels, self.wings = signal, kernels, wings
        self.formed: list[Tensor | None] = []
        self.kept = kept

    @property
    def dtype(self) -> torch.dtype:
        return self.signal.u.dtype

    @cached_property
    def layouts(self) -> list[Layout]:
        pairs = zip(self.kernels, self.wings, strict=True)
        return layouts(tuple((k.shape[1], 0 if w is None else w.shape[1]) for k, w in pairs), self.signal.n)

    def parts(self, keep: bool = False) -> Iterator[tuple[Layout, Part]]:
        """The formed parts of the branches, one part at a time; to `keep` it, in `formed`, takes memory for all."""
        kept: Any = None if self.kept is None else iter(self.kept)
        lags = self._autocorrelation() if kept is None else None
        for layout in self.layouts:
            if lags is None:
                part: Part = Formed(*islice(kept, 3)) if layout.formed else Group(*islice(kept, 8))
            else:
                part = self._form(layout.members[0]) if layout.formed else self._group(layout, lags)
            if keep:
                self.formed.extend(part)
            yield layout, part

    def sums(self, keep: bool = False) -> Tensor:
        """Sum and squared sum of each branch over batch and valid positions, and their number: [3, N, channels], in
        float64."""
        rows: dict[int, tuple[Tensor, Tensor]] = {}
        for layout, part in self.parts(keep):
            if isinstance(part, Formed):
                count = self.signal.positions
                found = (part.mean * count)[None], (_energy(part.centred) + part.mean.square() * count)[None]
            else:
                found = self._group_sums(layout, part)
            rows.update(zip(layout.members, zip(*found, strict=True), strict=True))
        totals, squares = zip(*(rows[index] for index in range(len(rows))), strict=True)
        counts = [self.signal.positions.expand_as(totals[0])] * len(rows)
        return torch.stack([*totals, *squares, *counts]).unflatten(0, (3, -1))

    def span(self) -> int:
        """Lags of the autocorrelation of u that count."""
        return max((layout.taps + layout.ahead for layout in self.layouts if not layout.formed), default=0)

    def _autocorrelation(self) -> Tensor:
        """Autocorrelation of u, summed over the batch."""
        span, spectrum = self.span(), self.signal.spectrum
        if span == 0:
            return _exact(self.signal.u.new_zeros(self.signal.u.shape[1], 0))
        return torch.fft.irfft(_exact(_power(spectrum).sum(0)), n=self.signal.n)[:, :span]

    def _form(self, index: int) -> Formed:
        """The output around its mean: then the variance suffers no cancellation."""
        signal = self.signal
        factors, valid = kernel_spectrum(self.kernels[index], self.wings[index], signal.n), signal.valid
        y = response(signal.spectrum, factors, signal.n, signal.u.shape[2])
        mean = _sum(y if valid is None else y * valid) / signal.positions.clamp_min(1)
        y = y.sub_(mean.to(y.dtype)[:, None])
        return Formed(factors, mean, y if valid is None else y.mul_(valid))

    def _group(self, layout: Layout, lags: Tensor) -> Group:
        members, taps, ahead, m, _ = layout
        factors = two_sided([self.kernels[index] for index in members], [self.wings[index] for index in members], m)
        last, after = self._end(factors, True, taps - 1, m)
        first, before = self._end(factors, False, ahead, m)
        gain, power = _exact(factors[..., 0].real), _symmetric(lags[:, : taps + ahead], m)
        return Group(factors, _power(factors), gain, power, last, after, first, before)

    def _end(self, factors: Tensor, last: bool, count: int, m: int) -> tuple[Tensor | None, Tensor | None]:
        """Spectrum of the inputs that reach beyond an end, and what they give there."""
        if count == 0:
            return None, None
        inputs = torch.fft.rfft(self.signal.at_end(last, count), n=m)
        whole = torch.fft.irfft(factors[:, None] * inputs, n=m)
        return inputs, whole[..., count : 2 * count] if last else whole[..., m - count :]

    def _group_sums(self, layout: Layout, part: Group) -> tuple[Tensor, Tensor]:
        """Of the whole response, less what lies beyond the ends: [G, channels] each."""
        total, square = self.signal.sum * part.gain, _mean_of_all(part.power * part.strength, layout.n)
        for beyond in (part.after, part.before):
            if beyond is not None:
                total, square = total - _sum(beyond), square - _energy(beyond)
        return total, square


class SumGradients:
    """Gradients of the branches' sums for some channels, part by part; of the kernels also what `merged` gives."""

    def __init__(self, branches: Branches, conjugate: Tensor, g_sums: Tensor, lags: Tensor, scale: Tensor):
        """`g_sums`: of sums and squared sums, [2, N, channels]; `lags`: gradient of the merged kernel, [channels, n];
        `conjugate`: of the spectrum of u."""
        self.branches, self.conjugate = branches, conjugate
        # In the order of the parts, exact and in the dtype of the branches: gradients of the sums, and twice those of
        # the squared sums, which is what an output is multiplied by.
        order = [index for layout in branches.layouts for index in layout.members]
        self.g_totals, g_squares = torch.stack([row[index] for row in g_sums for index in order]).chunk(2)
        self.slopes = 2 * g_squares
        self.own_totals, self.own_slopes = (x.to(branches.dtype) for x in (self.g_totals, self.slopes))
        self.lags, self.scales = lags, scale.to(lags.dtype)[..., None].unbind(0)
        self.found: dict[int, Tensor] = {}
        # Twice the gradients of the autocorrelation of u; those of every input alike; and, with the other sign, those
        # of the inputs next to an end.
        self.g_lags = self.lags.new_zeros(len(self.lags), branches.span())
        self.g_all = torch.zeros_like(branches.signal.sum)
        self.g_ends: list[tuple[bool, Tensor]] = []

    @property
    def kernel_gradients(self) -> list[Tensor]:
        """Those of the kernels of the past, then those of the wings."""
        return [gradient for _, gradient in sorted(self.found.items())]

    def _set_kernel(self, index: int, gradient: Tensor) -> None:
        """`gradient`: that of all lags, the negative ones at the end."""
        taps, wing, scale = self.branches.kernels[index].shape[1], self.branches.wings[index], self.scales[index]
        self.found[index] = torch.addcmul(gradient[:, :taps], self.lags[:, :taps], scale)
        if wing is not None:
            own, merged = (values[:, values.shape[1] - wing.shape[1] :] for values in (gradient, self.lags))
            self.found[len(self.scales) + index] = torch.addcmul(own, merged, scale).flip(1)

    def _add_formed(self, index: int, part: Formed, row: int, g_spectrum: Tensor) -> None:
        signal, dtype = self.branches.signal, self.branches.dtype
        level = self.g_totals[row] + self.slopes[row] * part.mean
        g_y = torch.addcmul(level.to(dtype)[:, None], part.centred, self.own_slopes[row][:, None])
        g_y = torch.fft.rfft(g_y if signal.valid is None else g_y.mul_(signal.valid), n=signal.n)
        g_spectrum.addcmul_(g_y, part.factors.conj_physical())
        self._set_kernel(index, correlation(self.conjugate, g_y, signal.n))

    def _add_group(self, layout: Layout, part: Group, rows: slice) -> None:
        members, taps, ahead, m, _ = layout
        dtype, conjugate = part.factors.dtype, part.factors.conj_physical()[:, None]
        g_totals, slopes = self.g_totals[rows], self.slopes[rows]
        level, slope = self.own_totals[rows, None, :, None], self.own_slopes[rows, None, :, None]
        self.g_all += (g_totals * part.gain).sum(0)
        g_power = (slope[:, 0] * part.strength).sum(0)
        # Not `+=`, which copies what it has changed onto itself.
        self.g_lags[:, : taps + ahead].add_(torch.fft.irfft(g_power, n=m)[:, : taps + ahead])
        g_factors = part.factors * (slopes[..., None] * part.power).to(dtype)
        for last, inputs, beyond in ((True, part.last, part.after), (False, part.first, part.before)):
            if inputs is None or beyond is None:
                continue
            count, g_beyond = beyond.shape[-1], torch.addcmul(level, beyond, slope)
            g_beyond = torch.fft.rfft(F.pad(g_beyond, (count, m - 2 * count) if last else (m - count, 0)))
            self.g_ends.append((last, torch.fft.irfft(product_sum(conjugate, g_beyond), n=m)[..., :count]))
            g_factors -= product_sum(g_beyond.transpose(0, 1), inputs.conj_physical()[:, None])
        gradient = torch.fft.irfft(g_factors, n=m)
        gradient += (g_totals * self.branches.signal.sum).to(gradient.dtype)[..., None]
        for index, row in zip(members, gradient, strict=True):
            self._set_kernel(index, row)

    def input_gradient(self, g_spectrum: Tensor) -> Tensor:
        """Gradient of u, and of the kernels, from all parts. Overwrites `g_spectrum`, to which that is added which is
        known as a spectrum."""
        signal, rows = self.branches.signal, slice(0)
        for layout, part in self.branches.parts():
            rows = slice(rows.stop, rows.stop + len(layout.members))
            if isinstance(part, Formed):
                self._add_formed(layout.members[0], part, rows.start, g_spectrum)
            else:
                self._add_group(layout, part, rows)
        if self.g_lags.shape[1] > 0:
            g_spectrum.addcmul_(signal.spectrum, _symmetric(self.g_lags, signal.n).to(g_spectrum.dtype))
        g_u = torch.fft.irfft(g_spectrum, n=signal.n)[..., : signal.u.shape[2]]
        g_u += self.g_all.to(g_u.dtype)[:, None]
        for last, values in self.g_ends:
            signal.subtract_at_end_(g_u, last, values)
        return g_u
