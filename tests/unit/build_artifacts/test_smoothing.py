"""Activation ranges of smoothed int8: equalized channels, copies of neurons, rounding."""

from __future__ import annotations

import numpy as np
import pytest

from build_artifacts.smoothing.calibration import Observed
from build_artifacts.smoothing.ranges import (
    ByteRange,
    Int8Weights,
    choose_range,
    choose_saturation,
    even_channels,
)
from build_artifacts.types import FloatArray

RNG = np.random.default_rng(0)


def observe(rows: FloatArray) -> Observed:
    return Observed.merge([Observed(rows.min(axis=0), rows.max(axis=0), rows)])


def normal(*shape: int) -> FloatArray:
    return RNG.normal(size=shape).astype(np.float32)


def relu(values: FloatArray) -> FloatArray:
    return np.maximum(values, 0)


@pytest.mark.parametrize(("low", "high"), [(-3.0, 5.0), (1.0, 2.0), (-2.0, -1.0), (0.0, 0.0)])
def test_range_restores_zero_exactly_and_others_within_half_a_step(low: float, high: float) -> None:
    byte_range = ByteRange.of(low, high)
    values = np.linspace(min(low, 0), max(high, 0), 99, dtype=np.float32)
    assert byte_range.round(np.zeros(1, np.float32))[0] == 0
    assert np.abs(byte_range.round(values) - values).max() <= byte_range.scale * 1.01


def test_values_outside_a_range_saturate() -> None:
    rounded = ByteRange.of(-1, 1).round(np.array([-9, 9], np.float32))
    assert rounded == pytest.approx([-1, 1], abs=0.01)


def test_weights_have_a_scale_per_column() -> None:
    weights = normal(20, 3) * np.array([1, 100, 0], np.float32)
    stored = Int8Weights.of(weights)
    assert np.abs(stored.values).max() == 127
    assert stored.scales.shape == (3,)
    assert np.abs(stored.restore() - weights).max(axis=0) == pytest.approx([0, 0, 0], abs=1)
    assert np.all(stored.restore()[:, 2] == 0)


def test_evening_reduces_the_error_of_a_loud_channel() -> None:
    rows, weights = normal(200, 16), normal(16, 8)
    rows[:, 3] = rows[:, 3] * 50 + 400
    observed = observe(rows)
    factors, shift = even_channels(observed, [weights], centered=True)
    assert shift[3] == pytest.approx((rows[:, 3].max() + rows[:, 3].min()) / 2)
    evened = observed.transform(factors, shift)

    def error(seen: Observed, scaled: FloatArray, added: FloatArray) -> float:
        rounded = ByteRange.covering(seen).round(seen.sample)
        return float(np.abs(rounded @ scaled + added - rows @ weights).max())

    plain = error(observed, weights, np.zeros(8, np.float32))
    assert error(evened, weights * factors[:, None], shift @ weights) < plain / 10


def test_activations_that_cannot_be_shifted_are_only_scaled() -> None:
    observed = observe(normal(50, 4) + 3)
    assert not even_channels(observed, [normal(4, 2)], centered=False).shift.any()


def test_range_excludes_a_rare_value_if_others_gain_more() -> None:
    even, weights = RNG.uniform(-1, 1, size=(2000, 16)).astype(np.float32), [normal(16, 8)]
    assert choose_range(observe(even), weights) == ByteRange.covering(observe(even))
    peaked = RNG.laplace(size=(2000, 16)).astype(np.float32)
    assert choose_range(observe(peaked), weights).scale < ByteRange.covering(observe(peaked)).scale


def test_steeper_copies_of_gelu_reduce_the_error() -> None:
    def gelu(values: FloatArray) -> FloatArray:
        return values / (1 + np.exp(-1.702 * values))

    rows = gelu(normal(300, 64))
    rows[:, 7] = gelu(RNG.uniform(-2, 12, size=300).astype(np.float32))
    assert choose_saturation(observe(rows), normal(64, 8), gelu).slope > 1


def test_copies_of_rectified_neurons_sum_to_the_neuron() -> None:
    rows = relu(normal(300, 64))
    rows[:, 7] *= 12
    saturation = choose_saturation(observe(rows), normal(64, 8), relu)
    assert 7 in saturation.neurons
    assert len(saturation.neurons) <= 16
    assert saturation.top < rows[:, 7].max()
    top, slope, neurons, offsets = saturation
    copies = [
        np.clip(slope * (rows[:, 7] - offset), 0, top) / slope for offset in offsets[neurons == 7]
    ]
    assert np.sum([np.clip(rows[:, 7], 0, top), *copies], axis=0) == pytest.approx(
        rows[:, 7], rel=1e-4, abs=1e-4
    )


def test_even_neurons_get_no_copies() -> None:
    rows = relu(RNG.uniform(-1, 1, size=(300, 64)).astype(np.float32))
    assert len(choose_saturation(observe(rows), normal(64, 8), relu).neurons) == 0
