from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deployments.artifacts.manifest import Gate
from deployments.artifacts.types import ModelHead
from deployments.errors import ArtifactError
from deployments.messages import Batch, Outputs
from deployments.tuning.parity import (
    Floats,
    ParityResult,
    ReferenceOutputs,
    compare_outputs,
    run_probes,
    top1_agreement,
)
from tests.support.builders import ENCODER_HEADS
from tests.support.fakes import ScriptedEngine, build_item, item

GATE = Gate()
# What one probe of a ragged head is answered with: tokens or masks, each a row of logits.
RAGGED = (3, 1, 7, 2, 12, 4, 4, 9, 2, 6)


def rows(width: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(size=(100, width)).astype(np.float32)


def ragged(width: int, seed: int = 0) -> list[Floats]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(n, width)).astype(np.float32) for n in RAGGED]


def reference(due: Floats | list[Floats]) -> ReferenceOutputs:
    return ReferenceOutputs(tuple(item(1) for _ in due), tuple(due))


def verdict(
    due: Floats | list[Floats],
    alone: Floats | list[Floats],
    company: Floats | list[Floats] | None = None,
    *,
    head: ModelHead = ModelHead.VECTOR,
    gate: Gate = GATE,
) -> ParityResult:
    return compare_outputs(reference(due), alone, alone if company is None else company, gate, head)


def test_the_same_vectors_pass_with_full_marks() -> None:
    same = verdict(rows(16), rows(16))
    assert same.passed
    assert same.parity is not None
    assert same.parity.cosine_worst == pytest.approx(1.0)
    assert same.parity.top1_agreement is None


def test_scale_does_not_count_and_direction_does() -> None:
    assert verdict(rows(16), rows(16) * 3).passed
    noisy = rows(16) + 0.5 * rows(16, seed=1)
    assert any(reason.startswith("mean cosine") for reason in verdict(rows(16), noisy).reasons)


def test_one_bad_vector_is_enough_to_fail() -> None:
    bad = rows(16)
    bad[7] = -bad[7]
    found = verdict(rows(16), bad)
    assert found.parity is not None
    assert found.parity.cosine_worst == pytest.approx(-1.0)
    assert any(reason.startswith("worst cosine -1.0") for reason in found.reasons)


def test_a_vector_that_company_changes_is_seen() -> None:
    company = rows(16)
    company[3] = rows(16, seed=2)[3]
    found = verdict(rows(16), rows(16), company)
    assert found.parity is not None
    assert found.parity.batched_cosine_worst < 0.93
    assert [r.partition(" 0.")[0].partition(" -")[0] for r in found.reasons] == [
        "worst cosine unbatched to batched"
    ]


ANYTHING = Gate(cosine_mean=-2.0, cosine_worst=-2.0, top1_agreement=-1.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["alone", "company"])
@pytest.mark.parametrize("head", ENCODER_HEADS)
def test_what_is_not_a_number_never_passes(bad: float, where: str, head: ModelHead) -> None:
    def answered() -> list[Floats]:
        return (
            ragged(2)
            if head in (ModelHead.TOKENS, ModelHead.SPAN, ModelHead.MASKS)
            else list(rows(16))
        )

    corrupted = answered()
    corrupted[-1].flat[-1] = bad
    alone, company = (corrupted, answered()) if where == "alone" else (answered(), corrupted)
    found = verdict(answered(), alone, company, head=head, gate=ANYTHING)
    assert not found.passed
    assert found.parity is None


def test_answers_of_another_shape_never_pass() -> None:
    shorter = [answer[1:] for answer in ragged(3)]
    found = verdict(ragged(3), shorter, head=ModelHead.TOKENS, gate=ANYTHING)
    assert found.reasons == ("an output does not have the shape of the reference",)
    assert not verdict(rows(16), rows(16)[1:], gate=ANYTHING).passed


def test_labels_are_judged_by_the_best_one_and_not_by_cosine() -> None:
    due = rows(2)
    shifted = due + np.array([2.0, 2.0], dtype=np.float32)
    found = verdict(due, shifted, head=ModelHead.LABELS)
    assert found.passed
    assert found.parity is not None
    assert found.parity.top1_agreement == 1.0
    assert found.parity.cosine_worst < 0.93


@pytest.mark.parametrize(("flipped", "passes"), [(2, True), (3, False)])
def test_98_percent_of_the_labels_must_agree(flipped: int, passes: bool) -> None:
    due = rows(2) * 1000  # no near-ties
    answered = due.copy()
    answered[:flipped] = answered[:flipped, ::-1]
    assert verdict(due, answered, head=ModelHead.LABELS).passed is passes


def test_a_label_the_reference_is_undecided_about_does_not_count() -> None:
    due = np.array([[0.0, 0.1], [0.0, 3.0]], dtype=np.float32)  # gaps 0.05 and 0.90
    near_tie_flipped = due[:, ::-1] * [[1], [-1]]
    assert top1_agreement(near_tie_flipped, due, ModelHead.LABELS, near_tie_margin=0.1) == 1.0
    assert top1_agreement(near_tie_flipped, due, ModelHead.LABELS, near_tie_margin=0.01) == 0.5
    assert top1_agreement(due[:, ::-1], due, ModelHead.LABELS, near_tie_margin=0.1) == 0.0


def test_a_label_that_only_company_changes_counts() -> None:
    company = rows(2)
    company[:40] = company[:40, ::-1]
    assert not verdict(rows(2), rows(2), company, head=ModelHead.LABELS).passed


def test_a_single_score_is_judged_by_correlation() -> None:
    due = np.abs(rows(1)) + 5
    unrelated = np.abs(rows(1, seed=4)) + 5
    assert verdict(due, due, head=ModelHead.LABELS).passed
    # Every cosine of two positive numbers is 1.
    found = verdict(due, unrelated, head=ModelHead.LABELS)
    assert not found.passed
    assert found.parity is not None
    assert found.parity.top1_agreement is None


@pytest.mark.parametrize("head", [ModelHead.TOKENS, ModelHead.MASKS])
def test_every_token_and_every_mask_is_a_choice_of_its_own(head: ModelHead) -> None:
    due = [answer * 1000 for answer in ragged(5)]
    changed = [answer.copy() for answer in due]
    changed[4][[2, 8]] = np.roll(changed[4][[2, 8]], 1, axis=1)  # two rows choose another
    assert top1_agreement(changed, due, head, near_tie_margin=0.1) == 1 - 2 / sum(RAGGED)
    assert verdict(due, due, head=head).passed
    assert not verdict(due, changed, head=head).passed


def test_a_span_is_two_choices_its_start_and_its_end() -> None:
    due = [np.zeros((9, 2), dtype=np.float32) for _ in range(10)]
    for answer in due:
        answer[2, 0] = answer[5, 1] = 10
    later_end = [answer.copy() for answer in due]
    later_end[0][:, 1] = np.roll(later_end[0][:, 1], 1)
    assert top1_agreement(later_end, due, ModelHead.SPAN, near_tie_margin=0.1) == 0.95
    assert not verdict(due, later_end, head=ModelHead.SPAN).passed
    assert verdict(due, due, head=ModelHead.SPAN).passed


def test_a_probe_without_a_mask_is_no_reason_to_fail() -> None:
    due = [*ragged(5), np.zeros((0, 5), dtype=np.float32)]
    found = verdict(due, due, head=ModelHead.MASKS)
    assert found.passed
    assert found.parity is not None
    assert found.parity.cosine_worst == pytest.approx(1.0)


def test_a_verdict_survives_as_json() -> None:
    for found in (verdict(rows(3), rows(3), head=ModelHead.LABELS), verdict(rows(3), rows(3)[1:])):
        assert ParityResult.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize("due", [list(rows(4)), ragged(4), [np.zeros((0, 4), np.float32)] * 2])
def test_a_reference_comes_back_from_its_file_as_it_was(due: list[Floats], tmp_path: Path) -> None:
    items = tuple(build_item(range(n + 2), second_segment_start=n) for n in range(len(due)))
    ReferenceOutputs(items, tuple(due)).write(tmp_path / "reference.npz")
    read = ReferenceOutputs.read(tmp_path / "reference.npz")
    assert [i.ids.tolist() for i in read.items] == [i.ids.tolist() for i in items]
    assert [i.second_segment_start for i in read.items] == [i.second_segment_start for i in items]
    assert {i.ids.dtype for i in read.items} == {np.dtype(np.int32)}
    assert [answer.shape for answer in read.outputs] == [answer.shape for answer in due]
    assert all((mine == theirs).all() for mine, theirs in zip(read.outputs, due, strict=True))
    assert {answer.dtype for answer in read.outputs} == {np.dtype(np.float32)}


def written(path: Path, **changed: object) -> None:
    ReferenceOutputs((item(1, 3), item(2)), tuple(rows(2)[:2])).write(path)
    with np.load(path) as file:
        arrays = dict(file) | changed
    with path.open("wb") as file:
        np.savez(file, **{name: array for name, array in arrays.items() if array is not None})


@pytest.mark.parametrize(
    "damage",
    [
        {"ids": None},
        {"id_ends": np.array([3, 5])},  # beyond the end
        {"id_ends": np.array([4, 3])},
        {"second_segment_start": np.array([3])},
        {"outputs": np.array([{}], dtype=object)},  # would have to be unpickled
    ],
    ids=["missing", "too long", "backwards", "too few", "pickled"],
)
def test_a_damaged_reference_is_refused(damage: dict[str, object], tmp_path: Path) -> None:
    written(tmp_path / "reference.npz")
    ReferenceOutputs.read(tmp_path / "reference.npz")
    written(tmp_path / "reference.npz", **damage)
    with pytest.raises(ArtifactError, match="not a file of reference outputs"):
        ReferenceOutputs.read(tmp_path / "reference.npz")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a zip", b"\x93NUMPY"])
def test_a_file_that_is_no_reference_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "reference.npz").write_bytes(content)
    with pytest.raises(ArtifactError, match="not a file of reference outputs"):
        ReferenceOutputs.read(tmp_path / "reference.npz")
    with pytest.raises(ArtifactError, match="not a file of reference outputs"):
        ReferenceOutputs.read(tmp_path / "none.npz")


def test_answers_come_in_the_order_of_the_probes_whatever_the_company() -> None:
    shapes: list[tuple[int, ...]] = []

    def act(batch: Batch) -> Outputs:
        shapes.append(batch.input_ids.shape)
        firsts = zip(batch.input_ids[:, :1], batch.lengths, strict=True)
        return Outputs([np.repeat(first, n).astype(np.float32) for first, n in firsts])

    items = [item(marker, length) for marker, length in ((7, 2), (8, 5), (9, 1))]
    given = [answer.tolist() for answer in run_probes(ScriptedEngine(act), items, 2)]
    assert given == [[7, 7], [8] * 5, [9]]
    assert shapes == [(2, 5), (1, 1)]
