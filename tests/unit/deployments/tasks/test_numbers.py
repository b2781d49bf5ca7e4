from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from deployments.tasks.numbers import identity, normalize, sigmoid, softmax

NumberFunction = Callable[[NDArray[np.float32]], NDArray[np.float32]]


@pytest.mark.parametrize(
    ("function", "logits", "scores"),
    [
        # e^0 : e^ln3 = 1 : 3
        (softmax, [0.0, np.log(3)], [0.25, 0.75]),
        (softmax, [1000.0, 1000.0], [0.5, 0.5]),
        (softmax, [-1000.0, 1000.0], [0.0, 1.0]),
        # 1 / (1 + e^-ln3) = 3/4
        (sigmoid, [0.0, np.log(3)], [0.5, 0.75]),
        (sigmoid, [-1000.0, 1000.0], [0.0, 1.0]),
        (identity, [-2.5, 7.0], [-2.5, 7.0]),
    ],
)
def test_score_functions_are_exact_and_do_not_overflow(
    function: NumberFunction, logits: list[float], scores: list[float]
) -> None:
    with np.errstate(over="raise", invalid="raise"):
        computed = function(np.array([logits], dtype=np.float32))
    assert computed == pytest.approx(np.array([scores]), abs=1e-6)
    assert computed.dtype == np.float32


def test_sigmoid_keeps_its_precision_near_zero() -> None:
    logits = np.array([-11, -17, -20, -80], dtype=np.float32)
    expected = 1 / (1 + np.exp(-logits.astype(np.float64)))
    assert sigmoid(logits) == pytest.approx(expected, rel=1e-5)


def test_softmax_is_over_the_last_axis() -> None:
    logits = np.random.default_rng(0).standard_normal((2, 3, 4), dtype=np.float32)
    scores = softmax(logits)
    assert scores.sum(axis=-1) == pytest.approx(np.ones((2, 3)), abs=1e-6)
    assert np.array_equal(softmax(logits[1, 2]), scores[1, 2])


def test_normalize_rows_keeps_zero_rows() -> None:
    rows = np.array([[3, 4], [0, 0]], dtype=np.float32)
    assert normalize(rows) == pytest.approx(np.array([[0.6, 0.8], [0, 0]]), abs=1e-7)
    assert normalize(rows).dtype == np.float32
