"""Choice of scales: the factors that equalize the channels of an activation, and byte ranges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from build_artifacts.smoothing.calibration import Observed
from build_artifacts.types import MAX_INT8, FloatArray

# Exponents to try for the activation range in SmoothQuant's factor; 1 gives all channels one range.
_STRENGTHS = (0.6, 0.7, 0.8, 0.9, 1.0)
_MIN_SIZE = 1e-5  # lower bound of magnitudes of channels and weights
_MAX_UINT8 = 255
# x86 without VNNI adds pairs of products in 16 bits: 2 * 255 * 64 is below 2**15.
MAX_INT8_WITHOUT_OVERFLOW = 64
# Byte ranges to try for neurons, relative to the largest value.
_RANGES = (1.0, 0.85, 0.7, 0.6, 0.5, 0.42, 0.35, 0.3, 0.25, 0.2, 0.16, 0.13, 0.1)
# Slopes to try for copies of neurons (see Saturation). With a larger slope s, GELU(s x) / s is
# closer to max(x, 0), but a copy covers a smaller range.
_SLOPES = (1, 2, 4)
# Maximum number of copies in a layer, as a share of its neurons. A copy takes as long as a neuron.
_MAX_COPIES = 1 / 48
# Number of weight columns that kernels compute at once. Fewer copies would save no time, so a layer
# may have this many copies even if `_MAX_COPIES` allows fewer.
COLUMNS = 16
# Byte ranges to try for attention outputs, relative to the range of all observed values.
_CLIPPED_RANGES = (1.0, 0.9, 0.8, 0.7)


class ByteRange(NamedTuple):
    """Range of a byte, which stores x as round(x / scale) + zero, clipped to 0 to 255."""

    scale: np.float32
    zero: np.uint8

    @classmethod
    def of(cls, low: float, high: float) -> ByteRange:
        """Return the range from `low` to `high`, extended to include zero."""
        low, high = min(low, 0.0), max(high, 0.0)
        scale = max(high - low, _MIN_SIZE) / _MAX_UINT8
        return cls(np.float32(scale), np.uint8(np.clip(round(-low / scale), 0, _MAX_UINT8)))

    @classmethod
    def covering(cls, observed: Observed) -> ByteRange:
        """Return the range of all observed values."""
        return cls.of(float(observed.low.min()), float(observed.high.max()))

    def round(self, values: FloatArray) -> FloatArray:
        """Return `values` after a conversion to bytes and back."""
        zero = np.float32(self.zero)
        steps = np.clip(np.rint(values / self.scale) + zero, 0, _MAX_UINT8)
        rounded: FloatArray = (steps - zero) * self.scale
        return rounded


class TokenRange(NamedTuple):
    """Range of each token, from its largest magnitude down to the negative of that.

    A byte stores a value x of a token as round(127 x / largest) + 128.
    """

    step: np.float32 = np.float32(1 / MAX_INT8)
    zero: np.uint8 = np.uint8(128)


class Int8Weights(NamedTuple):
    """Weights [K, N] as integers, with one scale per column [N], or per row [K] for `axis` 1."""

    values: NDArray[np.int8]
    scales: FloatArray

    @classmethod
    def of(cls, weights: FloatArray, axis: int = 0, limit: int = MAX_INT8) -> Int8Weights:
        """Round `weights` to -`limit` to `limit`; values along `axis` share a scale."""
        largest = np.abs(weights).max(axis=axis, keepdims=True)
        scales = np.where(largest == 0, 1, largest / limit).astype(np.float32)
        rounded = np.rint(weights / scales).clip(-limit, limit).astype(np.int8)
        return cls(rounded, scales.squeeze(axis))

    def restore(self) -> FloatArray:
        """Return the rounded weights as floats. Only for weights with one scale per column."""
        restored: FloatArray = self.values.astype(np.float32) * self.scales
        return restored


class Evening(NamedTuple):
    """Factors and shift, [K] each, that change an activation x to (x - shift) / factors."""

    factors: FloatArray
    shift: FloatArray


def even_channels(observed: Observed, weights: Sequence[FloatArray], *, centered: bool) -> Evening:
    """Choose factors that move differences between channels into the `weights` [K, N] of products.

    This is SmoothQuant (Xiao et al. 2023, https://arxiv.org/abs/2211.10438) with two changes. If
    `centered`, the middle of each channel first moves to zero. The migration strength is the one
    with the least error.
    """
    middle = (observed.high + observed.low) / 2
    shift = (middle if centered else 0 * middle).astype(np.float32)
    sizes = np.maximum(observed.high - shift, shift - observed.low).clip(min=_MIN_SIZE)
    rows = np.max([np.abs(each).max(axis=1) for each in weights], axis=0).clip(min=_MIN_SIZE)
    centered_sample: FloatArray = observed.sample - shift
    exact = [np.asarray(centered_sample @ each, np.float32) for each in weights]

    def error(factors: FloatArray) -> float:
        evened = observed.transform(factors, shift)
        rounded = ByteRange.covering(evened).round(evened.sample)
        total = 0.0
        for each, due in zip(weights, exact, strict=True):
            total += _distance(rounded @ Int8Weights.of(each * factors[:, None]).restore(), due)
        return total

    tried = [(sizes**a / rows ** (1 - a)).astype(np.float32) for a in _STRENGTHS]
    return Evening(min(tried, key=error), shift)


def choose_range(observed: Observed, weights: Sequence[FloatArray]) -> ByteRange:
    """Choose the range with the least error of the products with `weights` [K, N]."""
    low, high = float(observed.low.min()), float(observed.high.max())
    exact = [observed.sample @ each for each in weights]

    def error(byte_range: ByteRange) -> float:
        rounded = byte_range.round(observed.sample)
        return sum(_distance(rounded @ w, due) for w, due in zip(weights, exact, strict=True))

    return min((ByteRange.of(low * share, high * share) for share in _CLIPPED_RANGES), key=error)


class Saturation(NamedTuple):
    """Copies of neurons. A neuron returns at most `top`, and its copies return the excess.

    Copy i computes activation(slope * (x - offsets[i])), where x is the input of `neurons[i]`. The
    weights that read the copy are divided by `slope`.
    """

    top: float
    slope: int
    neurons: NDArray[np.intp]
    offsets: FloatArray


def choose_saturation(
    observed: Observed, weights: FloatArray, activation: Callable[[FloatArray], FloatArray]
) -> Saturation:
    """Choose the saturation with the least error of (activations as bytes) @ `weights` [K, N].

    For x well above 0, an `activation` such as GELU returns x. Therefore activation(x) is about the
    sum of min(activation(x), top), min(activation(x - top), top), ... With slope s, the second term
    is min(activation(s (x - top)), top) / s. The third term is
    min(activation(s (x - top - top / s)), top) / s, and so on.
    """
    low, high = float(observed.low.min()), float(observed.high.max())
    exact = observed.sample @ weights
    most = max(COLUMNS, int(len(observed.high) * _MAX_COPIES))

    def error(saturation: Saturation) -> float:
        top, slope, neurons, offsets = saturation
        bytes_ = ByteRange.of(low, top)
        result = bytes_.round(observed.sample) @ weights
        values = bytes_.round(activation(slope * (observed.sample[:, neurons] - offsets)))
        return _distance(result + values @ weights[neurons] / np.float32(slope), exact)

    tops = [high * share for share in _RANGES]
    tried = [_saturate(observed.high, top, slope) for slope in _SLOPES for top in tops]
    allowed = [each for each in tried if len(each.neurons) <= most]
    return min(allowed, key=error)


def _saturate(high: FloatArray, top: float, slope: int) -> Saturation:
    step = max(top, _MIN_SIZE) / slope
    counts = np.ceil((high - top).clip(min=0) / step - _MIN_SIZE).astype(np.intp).clip(min=0)
    neurons = np.repeat(np.arange(len(high)), counts)
    offsets = [top + i * step for count in counts for i in range(count)]
    return Saturation(top, slope, neurons, np.array(offsets, np.float32))


def _distance(a: FloatArray, b: FloatArray) -> float:
    return float(np.square(a - b, dtype=np.float64).sum())
