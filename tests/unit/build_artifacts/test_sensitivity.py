"""The products that int8 hurts most come first."""

from __future__ import annotations

import numpy as np
import pytest

from build_artifacts.recipes import CPU_INT8
from build_artifacts.steps.sensitivity import rank_by_sensitivity, relative_error
from tests.support.builders import HIDDEN
from tests.support.prepared_build import PreparedBuild, matrices

ROWS = 64  # of the tiny model's feed-forward network


def floats(*rows: tuple[float, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.array(rows, dtype=np.float32)


def test_values_on_the_grid_lose_nothing() -> None:
    # 255 steps of 1 between 0 and 255, and of 1 between -127 and 128.
    activations = floats((0, 255), (17, 130))
    weights = floats((-127, 0), (128, 255))
    assert relative_error(activations, weights) < 1e-6


def test_what_falls_between_two_steps_is_lost() -> None:
    # Activations 0, 255 and 100.4, in steps of 1: 0.4 of 100.4 is lost in the one product asked
    # for; the weights lie on their own grid.
    activations, weights = floats((0, 255, 100.4)), floats((0,), (0,), (1,))
    assert relative_error(activations, weights) == pytest.approx(0.4 / 100.4, rel=1e-3)


def test_one_outlier_takes_the_digits_of_all_the_others() -> None:
    rng = np.random.default_rng(0)
    activations = rng.standard_normal((32, 16)).astype(np.float32)
    weights = rng.standard_normal((16, 8)).astype(np.float32)
    modest = relative_error(activations, weights)
    activations[3, 5] = 300.0
    weights[5] /= 300.0
    assert modest < 0.02
    assert relative_error(activations, weights) > 10 * modest


def test_columns_of_weights_have_a_scale_of_their_own() -> None:
    rng = np.random.default_rng(0)
    activations = rng.standard_normal((32, 16)).astype(np.float32)
    weights = rng.standard_normal((16, 8)).astype(np.float32)
    scaled = weights * np.geomspace(1, 1000, 8, dtype=np.float32)
    assert relative_error(activations, scaled) < 2 * relative_error(activations, weights)


def test_a_product_that_is_zero_has_lost_nothing() -> None:
    assert relative_error(floats((0, 0)), floats((1,), (2,))) == 0.0


def test_a_planted_outlier_puts_its_product_first(workshop: PreparedBuild) -> None:
    graph = workshop.graphs.floating(CPU_INT8)
    order = rank_by_sensitivity(graph, workshop.items, None)
    weights = matrices(graph)
    assert sorted(order) == sorted(weights)
    # Row 5 of the second layer's second feed-forward matrix was divided by a thousand.
    first = weights[order[0]]
    assert first.shape == (ROWS, HIDDEN)
    assert np.abs(first[5]).max() < 0.01 < np.abs(first[6]).max()


def test_the_order_is_the_same_every_time(workshop: PreparedBuild) -> None:
    graph = workshop.graphs.floating(CPU_INT8)
    assert rank_by_sensitivity(graph, workshop.items, None) == workshop.graphs.sensitive_nodes(
        CPU_INT8
    )
