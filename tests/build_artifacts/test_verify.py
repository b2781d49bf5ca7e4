from __future__ import annotations

import numpy as np
import pytest

from build_artifacts.facts import EMBEDDING_TASKS, ModelFacts
from build_artifacts.probes import PROBES
from build_artifacts.recipe import Gate
from build_artifacts.steps.verify import Rows, judge, label_agreement
from deployments.manifest import TaskName

EMBEDDING = ModelFacts(tasks=EMBEDDING_TASKS, architecture="B", max_tokens=8, width=16)
GATE = Gate()


def scorer(*labels: str) -> ModelFacts:
    return ModelFacts(
        tasks=(TaskName.TEXT_CLASSIFICATION,),
        architecture="B",
        max_tokens=8,
        width=len(labels),
        labels=labels,
    )


def rows(width: int, seed: int = 0) -> Rows:
    return np.random.default_rng(seed).normal(size=(100, width)).astype(np.float32)


def test_the_same_rows_pass_with_full_marks() -> None:
    verdict = judge(rows(16), rows(16), rows(16), EMBEDDING, GATE)
    assert verdict.passed
    assert verdict.parity is not None
    assert verdict.parity.cosine_worst == pytest.approx(1.0)
    assert verdict.parity.top1_agreement is None


def test_scale_does_not_count_and_direction_does() -> None:
    assert judge(rows(16), rows(16) * 3, rows(16) * 3, EMBEDDING, GATE).passed
    noisy = rows(16) + 0.5 * rows(16, seed=1)
    verdict = judge(rows(16), noisy, noisy, EMBEDDING, GATE)
    assert any(reason.startswith("mean cosine") for reason in verdict.reasons)


def test_one_bad_row_is_enough_to_fail() -> None:
    bad = rows(16)
    bad[7] = -bad[7]
    verdict = judge(rows(16), bad, bad, EMBEDDING, GATE)
    assert verdict.parity is not None
    assert verdict.parity.cosine_worst == pytest.approx(-1.0)
    assert any(reason.startswith("worst cosine -1.0") for reason in verdict.reasons)


def test_a_row_that_company_changes_is_seen() -> None:
    company = rows(16)
    company[3] = rows(16, seed=2)[3]
    verdict = judge(rows(16), rows(16), company, EMBEDDING, GATE)
    assert verdict.parity is not None
    assert verdict.parity.company_cosine_worst < 0.93
    assert [r.partition(" 0.")[0].partition(" -")[0] for r in verdict.reasons] == [
        "worst cosine alone to company"
    ]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["alone", "company"])
def test_what_is_not_a_number_never_passes(bad: float, where: str) -> None:
    spoilt = rows(16)
    spoilt[0, 0] = bad
    alone, company = (spoilt, rows(16)) if where == "alone" else (rows(16), spoilt)
    anything = Gate(cosine_mean=-2.0, cosine_worst=-2.0, top1_agreement=-1.0)
    verdict = judge(rows(16), alone, company, EMBEDDING, anything)
    assert not verdict.passed
    assert verdict.parity is None


def test_labels_are_judged_by_the_best_one_and_not_by_cosine() -> None:
    reference = rows(2)
    shifted = reference + np.array([2.0, 2.0], dtype=np.float32)
    verdict = judge(reference, shifted, shifted, scorer("NO", "YES"), GATE)
    assert verdict.passed
    assert verdict.parity is not None
    assert verdict.parity.top1_agreement == 1.0
    assert verdict.parity.cosine_worst < 0.93


@pytest.mark.parametrize(("flipped", "passes"), [(2, True), (3, False)])
def test_98_percent_of_the_labels_must_agree(flipped: int, passes: bool) -> None:
    reference = rows(2) * 1000  # no near-ties
    answered = reference.copy()
    answered[:flipped] = answered[:flipped, ::-1]
    verdict = judge(reference, answered, answered, scorer("NO", "YES"), GATE)
    assert verdict.passed is passes


def test_a_label_the_reference_is_undecided_about_does_not_count() -> None:
    reference = np.array([[0.0, 0.1], [0.0, 3.0]], dtype=np.float32)  # gaps 0.05 and 0.90
    near_tie_flipped = reference[:, ::-1] * [[1], [-1]]
    assert label_agreement(near_tie_flipped, reference, decided_gap=0.1) == 1.0
    assert label_agreement(near_tie_flipped, reference, decided_gap=0.01) == 0.5
    assert label_agreement(reference[:, ::-1], reference, decided_gap=0.1) == 0.0


def test_a_label_that_only_company_changes_counts() -> None:
    company = rows(2)
    company[:40] = company[:40, ::-1]
    assert not judge(rows(2), rows(2), company, scorer("NO", "YES"), GATE).passed


def test_a_single_score_is_judged_by_correlation() -> None:
    reference = np.abs(rows(1)) + 5
    unrelated = np.abs(rows(1, seed=4)) + 5
    assert judge(reference, reference, reference, scorer("SCORE"), GATE).passed
    # Every cosine of two positive numbers is 1.
    assert not judge(reference, unrelated, unrelated, scorer("SCORE"), GATE).passed


def test_the_probes_are_many_and_of_all_lengths() -> None:
    words = sorted(len(text.split()) for text in PROBES)
    assert len(set(PROBES)) == len(PROBES) >= 64
    assert words[0] == 1
    assert words[-1] > 300
    assert sum(not text.isascii() for text in PROBES) >= 8
