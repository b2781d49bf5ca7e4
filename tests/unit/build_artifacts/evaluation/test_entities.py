from __future__ import annotations

import pytest

from build_artifacts.evaluation.token_classification import Entity, extract_entities


def entity_spans(tags: str) -> list[tuple[str, int, int]]:
    return sorted(map(tuple, extract_entities(tags.split())), key=lambda entity: entity[1])


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O O", []),
        ("B-PER I-PER O B-LOC", [("PER", 0, 2), ("LOC", 3, 4)]),
        ("B-PER B-PER I-PER", [("PER", 0, 1), ("PER", 1, 3)]),
        ("O I-PER I-PER O", [("PER", 1, 3)]),
        ("B-PER I-LOC I-LOC", [("PER", 0, 1), ("LOC", 1, 3)]),
        ("S-PER S-PER O", [("PER", 0, 1), ("PER", 1, 2)]),
        ("B-ORG I-ORG E-ORG I-ORG", [("ORG", 0, 3), ("ORG", 3, 4)]),
        ("B-ORG E-ORG E-ORG", [("ORG", 0, 2), ("ORG", 2, 3)]),
        ("S-PER I-PER", [("PER", 0, 1), ("PER", 1, 2)]),
        ("PER PER O LOC PER", [("PER", 0, 2), ("LOC", 3, 4), ("PER", 4, 5)]),
        ("B I O", [("", 0, 2)]),
        ("B-work-of-art I-work-of-art", [("work-of-art", 0, 2)]),
        ("date-time date-time", [("date-time", 0, 2)]),
    ],
)
def test_entity_spans_read_bio_bioes_and_io_tags(
    tags: str, expected: list[tuple[str, int, int]]
) -> None:
    assert entity_spans(tags) == expected


def test_entity_spans_without_tags_are_empty() -> None:
    assert extract_entities([]) == set()


def test_entities_compare_kind_and_both_ends() -> None:
    assert Entity("PER", 0, 2) not in extract_entities(["B-PER", "O"])
    assert Entity("PER", 0, 2) in extract_entities(["B-PER", "I-PER"])
