from __future__ import annotations

import numpy as np
import pytest

from deployments.artifacts.manifest import Gate, Parity
from deployments.artifacts.types import ModelHead
from deployments.engines.forward_pass import Batch, Outputs
from deployments.tuning.parity import (
    CHOICES,
    Floats,
    ParityResult,
    ReferenceOutputs,
    compare_outputs,
    run_probes,
    top1_agreement,
)
from tests.support.fakes import ScriptedEngine, item
from tests.support.tiny_encoders import ENCODER_HEADS

GATE = Gate()
# Number of logit rows in the output of each probe, for heads with a row per token or mask.
RAGGED = (3, 1, 7, 2, 12, 4, 4, 9, 2, 6)


def create_rows(width: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(size=(100, width)).astype(np.float32)


def create_ragged_rows(width: int) -> list[Floats]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(n, width)).astype(np.float32) for n in RAGGED]


def create_reference(
    expected: Floats | list[Floats], problem_type: str | None = None
) -> ReferenceOutputs:
    return ReferenceOutputs(tuple(item(1) for _ in expected), tuple(expected), problem_type)


def compare(
    expected: Floats | list[Floats],
    alone: Floats | list[Floats],
    batched: Floats | list[Floats] | None = None,
    *,
    head: ModelHead = ModelHead.VECTOR,
    gate: Gate = GATE,
    problem_type: str | None = None,
) -> ParityResult:
    return compare_outputs(
        create_reference(expected, problem_type),
        alone,
        alone if batched is None else batched,
        gate,
        head,
    )


def test_equal_vectors_have_cosine_one() -> None:
    same = compare(create_rows(16), create_rows(16))
    assert same.passed
    assert same.parity is not None
    assert same.parity.cosine_worst == pytest.approx(1.0)
    assert same.parity.top1_agreement is None


def test_rotated_vectors_fail() -> None:
    noisy = create_rows(16) + 0.5 * create_rows(16, seed=1)
    assert any(
        reason.startswith("mean cosine") for reason in compare(create_rows(16), noisy).reasons
    )


def test_every_label_of_a_multi_label_model_is_compared() -> None:
    expected = 3 * create_rows(6)
    others_flipped = -expected
    best = np.arange(len(expected)), expected.argmax(axis=1)
    others_flipped[best] = np.abs(expected).max() + 1
    any_logits = Gate(logit_correlation=-2)
    assert compare(expected, others_flipped, head=ModelHead.LABELS, gate=any_logits).passed
    result = compare(expected, others_flipped, head=ModelHead.LABELS, problem_type="multi_label")
    assert any(reason.startswith("top-1 agreement 0.") for reason in result.reasons)
    same = compare(expected, expected, head=ModelHead.LABELS, problem_type="multi_label")
    assert same.passed


def test_several_scores_of_a_regression_are_compared_as_a_vector() -> None:
    expected = create_rows(4)
    others = np.where(expected == expected.max(axis=1, keepdims=True), expected, -expected)
    for wrong in (others, 0.5 * expected):
        result = compare(expected, wrong, head=ModelHead.LABELS, problem_type="regression")
        assert any(reason.startswith("mean cosine") for reason in result.reasons)


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (1.05, True), (1.5, False)])
def test_lengths_of_vectors_count(factor: float, passes: bool) -> None:
    expected = create_rows(16)
    assert compare(expected, expected * np.float32(factor)).passed is passes


def test_vectors_with_a_factor_each_fail() -> None:
    expected = create_rows(16)
    factors = np.random.default_rng(1).uniform(0.3, 3, size=(len(expected), 1))
    assert not compare(expected, expected * factors).passed


def test_one_bad_vector_fails() -> None:
    bad = create_rows(16)
    bad[7] = -bad[7]
    result = compare(create_rows(16), bad)
    assert result.parity is not None
    assert result.parity.cosine_worst == pytest.approx(-1.0)
    assert any(reason.startswith("worst cosine -1.0") for reason in result.reasons)


def test_vector_changed_by_batching_fails() -> None:
    batched = create_rows(16)
    batched[3] = create_rows(16, seed=2)[3]
    result = compare(create_rows(16), create_rows(16), batched)
    assert result.parity is not None
    assert result.parity.batched_cosine_worst < 0.93
    assert [r.partition(" 0.")[0].partition(" -")[0] for r in result.reasons] == [
        "worst batched cosine"
    ]


def test_sparse_vectors_are_compared_as_vectors() -> None:
    expected = np.maximum(create_rows(16) - 1, 0)
    same = compare(expected, expected, head=ModelHead.SPARSE)
    assert same.passed
    assert same.parity is not None
    assert same.parity.cosine_worst == pytest.approx(1.0)
    assert same.parity.top1_agreement is None
    assert not compare(expected, expected * np.float32(1.5), head=ModelHead.SPARSE).passed
    other = expected.copy()
    other[4] = np.roll(other[4], 1)
    result = compare(expected, other, head=ModelHead.SPARSE)
    assert any(reason.startswith("worst cosine 0.") for reason in result.reasons)
    assert not compare(expected, expected, other, head=ModelHead.SPARSE).passed


@pytest.mark.parametrize(("error", "passes"), [(0.0, True), (0.02, True), (2.0, False)])
def test_small_errors_of_a_nearly_empty_sparse_vector_do_not_count(
    error: float, passes: bool
) -> None:
    expected = np.maximum(create_rows(16) - 1, 0)
    expected[4] = 0
    actual = expected.copy()
    actual[4, 7] = error
    assert compare(expected, actual, head=ModelHead.SPARSE).passed is passes


ACCEPT_ALL_GATE = Gate(
    cosine_mean=-2.0, cosine_worst=-2.0, top1_agreement=-1.0, logit_correlation=-2.0
)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["alone", "batched"])
@pytest.mark.parametrize("head", ENCODER_HEADS)
def test_nonfinite_value_fails(bad: float, where: str, head: ModelHead) -> None:
    def outputs() -> list[Floats]:
        return (
            create_ragged_rows(2)
            if head in (ModelHead.TOKENS, ModelHead.SPAN, ModelHead.MASKS)
            else list(create_rows(16))
        )

    corrupted_outputs = outputs()
    corrupted_outputs[-1].flat[-1] = bad
    alone, batched = (
        (corrupted_outputs, outputs()) if where == "alone" else (outputs(), corrupted_outputs)
    )
    result = compare(outputs(), alone, batched, head=head, gate=ACCEPT_ALL_GATE)
    assert not result.passed
    assert result.parity is None


def test_output_of_another_shape_fails() -> None:
    shorter = [output[1:] for output in create_ragged_rows(3)]
    result = compare(create_ragged_rows(3), shorter, head=ModelHead.TOKENS, gate=ACCEPT_ALL_GATE)
    assert result.reasons == ("an output does not have the shape of the reference",)
    assert not compare(create_rows(16), create_rows(16)[1:], gate=ACCEPT_ALL_GATE).passed


def test_labels_are_compared_by_top1_and_not_by_cosine() -> None:
    expected = create_rows(2)
    shifted = expected + np.array([2.0, 2.0], dtype=np.float32)
    result = compare(expected, shifted, head=ModelHead.LABELS)
    assert result.passed
    assert result.parity is not None
    assert result.parity.top1_agreement == 1.0
    assert result.parity.cosine_worst < 0.93


@pytest.mark.parametrize(("flipped", "passes"), [(2, True), (3, False)])
def test_98_percent_of_the_labels_must_agree(flipped: int, passes: bool) -> None:
    expected = create_rows(2) * 1000  # no near-ties
    outputs = expected.copy()
    outputs[:flipped] = outputs[:flipped, ::-1]
    assert compare(expected, outputs, head=ModelHead.LABELS).passed is passes


def test_near_ties_of_the_reference_do_not_count() -> None:
    expected = np.array([[0.0, 0.1], [0.0, 3.0]], dtype=np.float32)  # softmax gaps 0.05 and 0.90
    near_tie_flipped = expected[:, ::-1] * [[1], [-1]]
    assert (
        top1_agreement(near_tie_flipped, expected, CHOICES[ModelHead.LABELS], near_tie_margin=0.1)
        == 1.0
    )
    assert (
        top1_agreement(near_tie_flipped, expected, CHOICES[ModelHead.LABELS], near_tie_margin=0.01)
        == 0.5
    )
    assert (
        top1_agreement(expected[:, ::-1], expected, CHOICES[ModelHead.LABELS], near_tie_margin=0.1)
        == 0.0
    )


ONE_CLASS = np.array([3, -3], np.float32) + create_rows(2)
NO_LABEL = -5 + create_rows(6)  # of a multi-label model
UNCLEAR = 0.3 * create_rows(150)  # no probe has a clear label


@pytest.mark.parametrize(
    ("expected", "actual", "problem_type"),
    [
        (ONE_CLASS, np.full_like(ONE_CLASS, [9, -9]), "single_label"),
        (NO_LABEL, np.full_like(NO_LABEL, -20), "multi_label"),
        (UNCLEAR, create_rows(150, seed=1), "single_label"),
    ],
    ids=["one class", "no label", "no clear choice"],
)
def test_labels_without_the_variation_of_the_reference_fail(
    expected: Floats, actual: Floats, problem_type: str
) -> None:
    for alone, batched in ((actual, actual), (expected, actual)):
        result = compare(expected, alone, batched, head=ModelHead.LABELS, problem_type=problem_type)
        assert result.parity is not None
        assert result.parity.top1_agreement == 1.0
        assert result.parity.logit_correlation is not None
        assert result.parity.logit_correlation < 0.5
        assert "logit correlation 0." in " ".join(result.reasons)
    assert compare(expected, expected, head=ModelHead.LABELS, problem_type=problem_type).passed


def test_tagger_that_finds_no_entity_fails() -> None:
    other = np.tile(np.array([6, -1, -1], np.float32), (60, 1))
    entity = other.copy()
    entity[3] = [-1, 6, -1]
    expected = [entity, other] * 32
    result = compare(expected, [other] * 64, head=ModelHead.TOKENS)
    assert result.parity is not None
    assert result.parity.top1_agreement == pytest.approx(1 - 32 / (64 * 60))
    (reason,) = result.reasons
    assert reason.startswith("logit correlation ")
    noise = [0.05 * create_rows(3, seed)[:60] for seed in range(64)]
    noisy = [output + each for output, each in zip(expected, noise, strict=True)]
    assert compare(expected, noisy, head=ModelHead.TOKENS).passed


@pytest.mark.parametrize("factor", [0.6, 3.0])
@pytest.mark.parametrize("problem_type", ["single_label", "multi_label"])
def test_logits_with_a_factor_fail(factor: float, problem_type: str) -> None:
    expected = create_rows(3)
    result = compare(expected, factor * expected, head=ModelHead.LABELS, problem_type=problem_type)
    (reason,) = result.reasons
    assert reason.startswith("logit correlation ")


@pytest.mark.parametrize("width", [2, 150])
def test_rounding_of_constant_logits_passes(width: int) -> None:
    constant = np.linspace(3, -3, width, dtype=np.float32) + 1e-3 * create_rows(width)
    for error in (constant * 0, 0.04 * create_rows(width, seed=1)):
        result = compare(constant, constant + error, head=ModelHead.LABELS)
        assert result.passed, result.reasons


def test_parity_without_logit_correlation_is_read() -> None:
    parity = compare(create_rows(3), create_rows(3), head=ModelHead.LABELS).parity
    assert parity is not None
    stored = parity.model_dump(exclude={"logit_correlation"})
    assert Parity.model_validate(stored).logit_correlation is None
    limits = GATE.model_dump(exclude={"logit_correlation"})
    assert Gate.model_validate(limits) == GATE


def test_label_changed_by_batching_fails() -> None:
    batched = create_rows(2)
    batched[:40] = batched[:40, ::-1]
    assert not compare(create_rows(2), create_rows(2), batched, head=ModelHead.LABELS).passed


def test_single_score_is_compared_by_concordance() -> None:
    expected = np.abs(create_rows(1)) + 5
    unrelated = np.abs(create_rows(1, seed=4)) + 5
    assert compare(expected, expected, head=ModelHead.LABELS).passed
    # Every cosine of two positive numbers is 1.
    result = compare(expected, unrelated, head=ModelHead.LABELS)
    (reason,) = result.reasons
    assert reason.startswith("concordance ")
    assert result.parity is not None
    assert result.parity.top1_agreement is None
    (reason,) = compare(expected, expected, unrelated, head=ModelHead.LABELS).reasons
    assert reason.startswith("batched concordance ")


@pytest.mark.parametrize("problem_type", ["regression", "single_label"])
@pytest.mark.parametrize(
    ("factor", "offset", "passes"),
    [
        (1, 0.1, True),
        (1.1, 0, True),
        (1, 0.3, False),
        (1, 5, False),
        (0.3, 0, False),
        (2, 0, False),
    ],
)
def test_offset_and_factor_of_a_single_score_count(
    factor: float, offset: float, passes: bool, problem_type: str
) -> None:
    expected = create_rows(1)  # with a standard deviation near 1
    changed = np.float32(factor) * expected + np.float32(offset)
    result = compare(expected, changed, head=ModelHead.LABELS, problem_type=problem_type)
    assert result.passed is passes


@pytest.mark.parametrize("head", [ModelHead.TOKENS, ModelHead.MASKS])
def test_each_token_and_mask_counts_in_top1_agreement(head: ModelHead) -> None:
    expected = [output * 1000 for output in create_ragged_rows(5)]
    changed = [output.copy() for output in expected]
    changed[4][[2, 8]] = np.roll(changed[4][[2, 8]], 1, axis=1)  # another best label in two rows
    assert top1_agreement(changed, expected, CHOICES[head], near_tie_margin=0.1) == 1 - 2 / sum(
        RAGGED
    )
    assert compare(expected, expected, head=head).passed
    assert not compare(expected, changed, head=head).passed


def test_start_and_end_of_a_span_count_in_top1_agreement() -> None:
    expected = [np.zeros((9, 2), dtype=np.float32) for _ in range(10)]
    for output in expected:
        output[2, 0] = output[5, 1] = 10
    later_end = [output.copy() for output in expected]
    later_end[0][:, 1] = np.roll(later_end[0][:, 1], 1)
    assert top1_agreement(later_end, expected, CHOICES[ModelHead.SPAN], near_tie_margin=0.1) == 0.95
    assert not compare(expected, later_end, head=ModelHead.SPAN).passed
    assert compare(expected, expected, head=ModelHead.SPAN).passed


def test_probe_without_mask_passes() -> None:
    expected = [*create_ragged_rows(5), np.zeros((0, 5), dtype=np.float32)]
    result = compare(expected, expected, head=ModelHead.MASKS)
    assert result.passed
    assert result.parity is not None
    assert result.parity.cosine_worst == pytest.approx(1.0)


def test_parity_result_round_trips_through_json() -> None:
    for result in (
        compare(create_rows(3), create_rows(3), head=ModelHead.LABELS),
        compare(create_rows(3), create_rows(3)[1:]),
    ):
        assert ParityResult.model_validate_json(result.model_dump_json()) == result


def test_outputs_have_the_order_of_the_probes() -> None:
    shapes: list[tuple[int, ...]] = []

    def act(batch: Batch) -> Outputs:
        shapes.append(batch.input_ids.shape)
        firsts = zip(batch.input_ids[:, :1], batch.lengths, strict=True)
        return Outputs([np.repeat(first, n).astype(np.float32) for first, n in firsts])

    items = [item(marker, length) for marker, length in ((7, 2), (8, 5), (9, 1))]
    outputs = [output.tolist() for output in run_probes(ScriptedEngine(act), items, 2)]
    assert outputs == [[7, 7], [8] * 5, [9]]
    assert shapes == [(2, 5), (1, 1)]
