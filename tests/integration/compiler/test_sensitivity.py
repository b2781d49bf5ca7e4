"""Ranking of MatMuls by their int8 error."""

from __future__ import annotations

import numpy as np
import pytest

from build_artifacts.presets import CPU_INT8
from build_artifacts.steps.sensitivity import rank_by_sensitivity, relative_error
from tests.support.prepared_build import PreparedBuild, matrices
from tests.support.tiny_encoders import HIDDEN

ROWS = 64  # width of the tiny feed-forward network


def floats(*rows: tuple[float, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.array(rows, dtype=np.float32)


def test_values_on_grid_have_no_error() -> None:
    # Activations from 0 to 255 and weights from -127 to 128: int8 has steps of 1 in both ranges.
    activations = floats((0, 255), (17, 130))
    weights = floats((-127, 0), (128, 255))
    assert relative_error(activations, weights) < 1e-6


def test_values_between_steps_have_error() -> None:
    # Activations 0, 255 and 100.4 in steps of 1: rounding loses 0.4 of 100.4.
    # The weights are exact.
    activations, weights = floats((0, 255, 100.4)), floats((0,), (0,), (1,))
    assert relative_error(activations, weights) == pytest.approx(0.4 / 100.4, rel=1e-3)


def test_outlier_increases_error() -> None:
    rng = np.random.default_rng(0)
    activations = rng.standard_normal((32, 16)).astype(np.float32)
    weights = rng.standard_normal((16, 8)).astype(np.float32)
    modest = relative_error(activations, weights)
    activations[3, 5] = 300.0
    weights[5] /= 300.0
    assert modest < 0.02
    assert relative_error(activations, weights) > 10 * modest


def test_weight_columns_have_own_scales() -> None:
    rng = np.random.default_rng(0)
    activations = rng.standard_normal((32, 16)).astype(np.float32)
    weights = rng.standard_normal((16, 8)).astype(np.float32)
    scaled = weights * np.geomspace(1, 1000, 8, dtype=np.float32)
    assert relative_error(activations, scaled) < 2 * relative_error(activations, weights)


def test_zero_product_has_no_error() -> None:
    assert relative_error(floats((0, 0)), floats((1,), (2,))) == 0.0


def test_outlier_ranks_first(prepared_build: PreparedBuild) -> None:
    graph = prepared_build.graphs.float_graph(CPU_INT8)
    order = rank_by_sensitivity(graph, prepared_build.items, None)
    weights = matrices(graph)
    assert sorted(order) == sorted(weights)
    # `plant_outlier` divided row 5 of the second feed-forward matrix of the second layer
    # by 1000.
    first = weights[order[0]]
    assert first.shape == (ROWS, HIDDEN)
    assert np.abs(first[5]).max() < 0.01 < np.abs(first[6]).max()


def test_rank_is_deterministic(prepared_build: PreparedBuild) -> None:
    graph = prepared_build.graphs.float_graph(CPU_INT8)
    assert rank_by_sensitivity(
        graph, prepared_build.items, None
    ) == prepared_build.graphs.sensitive_nodes(CPU_INT8)
