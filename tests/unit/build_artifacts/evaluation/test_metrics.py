from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from build_artifacts.evaluation.metrics import (
    accuracy,
    compute_ranks,
    f1,
    macro_f1,
    micro_f1,
    ndcg,
    pearson,
    rank_documents,
    reciprocal_rank,
    row_cosines,
    spearman,
)


def bits(*rows: str) -> np.ndarray:
    return np.array([[mark == "x" for mark in row] for row in rows])


def test_tied_values_have_their_mean_rank() -> None:
    assert compute_ranks([10, 30, 20, 30, 30]).tolist() == [1, 4, 2, 4, 4]


def test_spearman_correlates_ranks() -> None:
    # Ranks 1 2 3 4 5 and 1 2 3 5 4: 1 - 6 * (1 + 1) / (5 * 24).
    assert spearman([1, 2, 3, 4, 9], [1, 8, 9, 64, 10]) == pytest.approx(0.9)
    assert spearman([1, 2, 3], [9, 4, 1]) == pytest.approx(-1)


def test_spearman_with_ties_matches_hand_calculation() -> None:
    # Ranks 1 2 3 4 and 1.5 1.5 3 4, centered: -1.5 -0.5 0.5 1.5 and -1 -1 0.5 1.5.
    assert spearman([1, 2, 3, 4], [5, 5, 6, 7]) == pytest.approx(4.5 / math.sqrt(5 * 4.5))


def test_correlations_match_scipy() -> None:
    chance = np.random.default_rng(7)
    left, right = chance.integers(0, 20, size=(2, 300))
    assert spearman(left, right) == pytest.approx(stats.spearmanr(left, right).statistic)
    assert pearson(left, right) == pytest.approx(stats.pearsonr(left, right).statistic)


def test_correlation_with_a_constant_is_zero() -> None:
    assert pearson([0.1] * 3, [1, 2, 3]) == 0
    assert spearman([1, 2, 3], [0.1] * 3) == 0


def test_pearson_measures_linear_correlation() -> None:
    # Centered: -1 0 1 and -3 -1 4.
    assert pearson([1, 2, 3], [0, 2, 7]) == pytest.approx(7 / math.sqrt(2 * 26))
    assert spearman([1, 2, 3], [0, 2, 7]) == pytest.approx(1)


def test_cosine_of_zero_row_is_0() -> None:
    cosines = row_cosines([[1, 1], [0, 0], [3, 0]], [[1, 0], [1, 0], [-1, 0]])
    assert cosines == pytest.approx([math.sqrt(0.5), 0, -1])


def test_accuracy_is_fraction_of_equal_entries() -> None:
    assert accuracy([0, 1, 2, 1], [0, 1, 1, 1]) == 0.75


@pytest.mark.parametrize(
    ("hits", "predicted", "relevant", "expected"),
    [(2, 4, 2, 2 / 3), (0, 3, 2, 0), (5, 5, 5, 1), (0, 0, 3, 0), (0, 0, 0, 0)],
)
def test_f1_is_harmonic_mean_of_precision_and_recall(
    hits: int, predicted: int, relevant: int, expected: float
) -> None:
    assert f1(hits, predicted, relevant) == pytest.approx(expected)


def test_micro_f1_averages_decisions_and_macro_f1_labels() -> None:
    predicted = bits("x..", "xx.", "x..")
    expected = bits("x..", ".x.", "xx.")
    # Three of four predictions are correct; four are expected.
    assert micro_f1(predicted, expected) == pytest.approx(2 * 3 / (4 + 4))
    # Label 0: 2 of 3 predictions correct, 2 expected. Label 1: 1 of 1, 2 expected. Label 2: none.
    assert macro_f1(predicted, expected) == pytest.approx((4 / 5 + 2 / 3) / 2)


def test_label_that_is_only_predicted_lowers_macro_f1() -> None:
    # Label 0 is right; label 1 is never expected.
    assert macro_f1(bits("x.", "xx"), bits("x.", "x.")) == pytest.approx((1 + 0) / 2)


def test_macro_f1_of_no_rows_is_0() -> None:
    assert macro_f1(bits("..", ".."), bits("..", "..")) == 0


def test_relevant_documents_rank_last_among_equal_scores() -> None:
    assert rank_documents([0.5, 0.5, 0.9, 0.5], frozenset({0, 3})) == [False, False, True, True]
    assert rank_documents([3, 1, 2], frozenset({2})) == [False, True, False]


@pytest.mark.parametrize(
    ("places", "expected"),
    [([True, False], 1), ([False, False, True, True], 1 / 3), ([False], 0)],
)
def test_reciprocal_rank_uses_first_relevant_place(places: list[bool], expected: float) -> None:
    assert reciprocal_rank(places) == pytest.approx(expected)


def test_ndcg_matches_hand_calculation() -> None:
    # Gains are at places 2 and 3; the ideal order has them at 1 and 2.
    ideal_dcg = 1 + 1 / math.log2(3)
    assert ndcg([False, True, True], 10) == pytest.approx((1 / math.log2(3) + 0.5) / ideal_dcg)
    assert ndcg([True, True, False], 10) == 1
    assert ndcg([False, False, True], 2) == 0
    # Three documents are relevant; the first two places hold two of them at most.
    assert ndcg([True, False, True, True], 2) == pytest.approx(1 / ideal_dcg)
