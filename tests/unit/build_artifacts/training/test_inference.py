"""Rated opinions become labeled pairs of premise and hypothesis."""

from __future__ import annotations

from pathlib import Path

from build_artifacts.training.inference import LABELS, read_opinions


def test_clear_ratings_decide_and_weak_ones_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "opinions.tsv"
    path.write_text("2.50\tI love it.\n-1.00\tIt broke.\n0.10\tIt is a radio.\n0.60\tFine.\n")
    pairs = [(premise, LABELS[label]) for premise, _, label in read_opinions(path)]
    assert pairs == [
        ("I love it.", "entailment"),
        ("I love it.", "contradiction"),
        ("It broke.", "entailment"),
        ("It broke.", "contradiction"),
        ("It is a radio.", "neutral"),
        ("It is a radio.", "neutral"),
    ]


def test_bad_opinions_entail_the_other_hypothesis(tmp_path: Path) -> None:
    path = tmp_path / "opinions.tsv"
    path.write_text("\n".join(["2\tI love it.", "-2\tI hate it."] * 20))
    entailed = {(premise, claim) for premise, claim, label in read_opinions(path) if label == 2}
    loved = {claim for premise, claim in entailed if premise == "I love it."}
    hated = {claim for premise, claim in entailed if premise == "I hate it."}
    assert len(loved) > 1
    assert not loved & hated
