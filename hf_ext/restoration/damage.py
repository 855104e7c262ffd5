"""Estimates of the noise and the JPEG quality of a picture, and the strength of a restoration that they call for."""

from typing import NamedTuple

import numpy as np

# Pixels of a side of the blocks of JPEG, and of those in which noise is measured.
_BLOCK = 8
# Share of the quietest blocks: in the others texture looks like noise. The root mean square of 16 standard normal
# numbers is below the second number with that probability: a quantile of the chi distribution of 16 degrees, over 4.
_QUIET, _QUIET_NOISE = 0.02, 0.64295
# A block with more black or white pixels than this share has lost noise.
_CLIPPED = 0.02
# Coefficients of a decoded picture tell of a quality if so many are not 0, of so many values, and so much more than by
# chance they are multiples of its steps: natural ones reach 0.02 of 1, and Photoshop's tables 0.3.
_FEWEST, _FEWEST_VALUES, _FIT, _CERTAIN = 20, 8, 0.15, 0.5
# Qualities of more than the first number need a better fit.
_FINE, _FIT_OF_FINE = 88, 0.35
_MOST_BLOCKS = 4096
# Estimated noise, and 100 less the quality, up to which a restoration harms some pictures, and from which it is whole.
_NO_NOISE, _FULL_NOISE, _NO_LOSS, _FULL_LOSS = 2.3, 8.0, 16, 25
# The cosine transform of eight values as a matrix [frequency, place].
_COSINES = np.sqrt(2 / 8) * np.cos(np.pi / 8 * np.outer(np.arange(8), np.arange(8) + 0.5)).astype(np.float32)
_COSINES[0] /= np.sqrt(2)
# JPEG's own table of luminance at quality 50, the corner of low frequencies (ITU-T T.81, annex K).
_TABLE = np.array(
    [
        [16, 11, 10, 16, 24, 40],
        [12, 12, 14, 19, 26, 58],
        [14, 13, 16, 24, 40, 57],
        [14, 17, 22, 29, 51, 87],
        [18, 22, 37, 56, 68, 109],
        [24, 35, 55, 64, 81, 104],
    ]
)


class Damage(NamedTuple):
    """Noise of a picture, σ in levels of 255, and the quality of its JPEG compression, None if it has no trace."""

    noise: float
    quality: int | None

    def __str__(self) -> str:
        return f"noise σ {self.noise:.1f}, {'no JPEG' if self.quality is None else f'JPEG quality {self.quality}'}"


def estimate_damage(image: np.ndarray) -> Damage:
    """
    Estimate the noise and the JPEG quality of a picture from its pixels.

    Noise: the diagonal details of the finest scale, (a - b - c + d) / 2 of each 2 x 2 pixels, keep the standard
    deviation of white noise and little of a photograph. In blocks of 8 x 8 pixels their root mean square has a known
    distribution, so its second percentile gives σ, and the blocks with more texture do not matter. A picture that is
    texture everywhere seems to have noise of up to 15. Blocks that touch black or white are left out, where clipping
    took noise away, unless nearly all do.

    JPEG: the cosine coefficients c of 8 x 8 pixels are multiples of a step s of the compression's table, and so are
    differences of means. The mean of cos(2π c / s) over those beyond s / 2 is then near 1, less by the rounding of
    pixels, and near 0 for any other picture. The quality whose table fits best is the answer; of Photoshop's tables it
    is the nearest. The grid begins at the corner or, in a cropped or turned picture, where neighbouring rows and
    columns differ most. Of a cropped picture a quality of 90 and more may be missed, as is 97 and more of any.

    The image is uint8, uint16 or floats in [0, 1], `(height, width, channels)`; of 2 or 4 channels the last is alpha,
    and blocks with pixels of next to no alpha are left out, unless few others are.
    """
    colours = image[..., : image.shape[2] - (image.shape[2] % 2 == 0)]
    white = np.iinfo(image.dtype).max if image.dtype.kind == "u" else 1
    levels = colours.astype(np.float32) * np.float32(255 / white)
    if image.shape[2] % 2 == 0:
        # What cannot be seen tells nothing; `_blocks` leaves it out.
        seen = np.where(image[..., -1:] > white / 16, levels, np.nan)
        levels = seen if len(_blocks(seen[..., 0])) >= _FEWEST else levels
    noise = float(np.mean([_estimate_noise(levels[..., channel]) for channel in range(levels.shape[2])]))
    weights = (0.299, 0.587, 0.114) if levels.shape[2] == 3 else (1.0,)
    return Damage(round(noise, 1), _estimate_quality(levels @ np.array(weights, np.float32)))


def choose_strength(damage: Damage) -> float:
    """The share of a restoration's change that a damage calls for, 0 to 1."""
    # It rises evenly with the noise, from 2.3 to 8, and as the JPEG quality falls from 84 to 75. A share of s makes
    # 1 - (1 - s)² of the gain where a model gains, and s² of the harm where it harms. Of 40 pictures with noise
    # of 2 or a quality from 85 up, `photo` so makes those alone worse by 0.1 dB that are texture all over.
    compressed = 0.0 if damage.quality is None else (100 - damage.quality - _NO_LOSS) / (_FULL_LOSS - _NO_LOSS)
    return round(min(1.0, max(0.0, (damage.noise - _NO_NOISE) / (_FULL_NOISE - _NO_NOISE), compressed)), 2)


def _estimate_noise(levels: np.ndarray) -> float:
    pixels = _blocks(levels)
    if not len(pixels):
        return 0.0
    inside = ((pixels <= 0) | (pixels >= 255)).mean((1, 2)) <= _CLIPPED
    # On paper or a black sky nearly all touch: what clipping has left of the noise is better than a few of letters.
    pixels = pixels[inside] if inside.mean() > _QUIET else pixels
    top, bottom = pixels[:, ::2], pixels[:, 1::2]
    details = (top[..., ::2] - top[..., 1::2] - bottom[..., ::2] + bottom[..., 1::2]) / 2
    return float(np.quantile(np.sqrt((details**2).mean((1, 2))), _QUIET) / _QUIET_NOISE)


def _estimate_quality(luminance: np.ndarray) -> int | None:
    """The quality that fits best, by the grid at the corner or that which the picture shows, upright or turned."""
    best, found = 0.0, None
    rows, columns = (_find_grid(luminance, axis) for axis in (0, 1))
    shown = luminance[rows:, columns:]
    for part in (luminance, shown, luminance.T, shown.T):
        fit, quality = _quality_of_blocks(part)
        if fit > best:
            best, found = fit, quality
        if best > _CERTAIN:
            break
    return found


def _quality_of_blocks(luminance: np.ndarray) -> tuple[float, int | None]:
    """The quality of blocks that begin at the corner, and how well it fits, up to 1."""
    blocks = _blocks(luminance)
    blocks = blocks[: len(blocks) // 2 * 2].reshape(-1, 2, _BLOCK, _BLOCK)[:: -(-len(blocks) // _MOST_BLOCKS) or 1]
    coefficients = _COSINES @ blocks @ _COSINES.T
    means = coefficients[:, 1, 0, 0] - coefficients[:, 0, 0, 0]
    places = [place for place in np.ndindex(_TABLE.shape) if 0 < sum(place) < 6]
    sizes = {place: np.abs(coefficients[:, :, *place]).ravel() for place in places}
    sizes[0, 0] = np.abs(means)
    best, found = 0.0, None
    for quality in range(1, 97):
        percent = 5000 / quality if quality < 50 else 200 - 2 * quality
        steps = np.clip(np.floor((_TABLE * percent + 50) / 100), 1, 255)
        # What would be 0 is a multiple of anything, and pixels hide a step of 1.
        used = ((float(steps[place]), values) for place, values in sizes.items())
        parts = [(step, values[values > step / 2]) for step, values in used if step > 1]
        count = sum(len(values) for _, values in parts)
        if count < _FEWEST:
            continue
        fit = sum(float(np.cos(2 * np.pi / step * values).sum()) for step, values in parts) / count
        # Four standard deviations of chance. Small coefficients of any kind fit small steps a bit.
        least = (_FIT if quality <= _FINE else _FIT_OF_FINE) + 2.8 / np.sqrt(count)
        if fit > max(best, least):
            # A drawing of squares has few different values.
            different = np.unique(np.rint(np.concatenate([values for _, values in parts])))
            if len(different) >= _FEWEST_VALUES:
                best, found = fit, quality
    return best, found


def _find_grid(luminance: np.ndarray, axis: int) -> int:
    """The first row or column, of eight, at which blocks begin: steps there are larger than those beside them."""
    steps = np.nan_to_num(np.abs(np.diff(luminance if axis == 0 else luminance.T, axis=0)))
    if len(steps) < 3:
        return 0
    larger = (steps[1:-1] - (steps[:-2] + steps[2:]) / 2).mean(axis=1)
    begins = [larger[place::_BLOCK].mean() for place in range(min(_BLOCK, len(larger)))]
    return (int(np.argmax(begins)) + 2) % _BLOCK


def _blocks(levels: np.ndarray) -> np.ndarray:
    """Whole blocks of a plane that have all their pixels: `(count, 8, 8)`."""
    rows, columns = (length // _BLOCK for length in levels.shape)
    blocks = levels[: rows * _BLOCK, : columns * _BLOCK].reshape(rows, _BLOCK, columns, _BLOCK)
    listed = blocks.swapaxes(1, 2).reshape(-1, _BLOCK, _BLOCK)
    return listed[~np.isnan(listed).any((1, 2))]
