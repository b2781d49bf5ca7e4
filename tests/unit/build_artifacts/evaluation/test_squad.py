from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from build_artifacts.evaluation import BadEvaluationData
from build_artifacts.evaluation.squad import (
    SquadQuestion,
    exact_match,
    normalize_answer,
    overlap_f1,
    read_questions,
)


def squad(
    *question_record: dict[str, Any], context: object = "the river is good"
) -> dict[str, Any]:
    return {"data": [{"paragraphs": [{"context": context, "qas": list(question_record)}]}]}


def write(path: Path, value: object) -> Path:
    path.write_bytes(value if isinstance(value, bytes) else orjson.dumps(value))
    return path


@pytest.mark.parametrize(
    ("answer", "normalized"),
    [
        ("The  Vistula\nRiver.", "vistula river"),
        ("an apple a day", "apple day"),
        ("U.S.", "us"),
        ("theatre and Ananas", "theatre and ananas"),
        ("the", ""),
        ("twenty-two", "twentytwo"),
    ],
)
def test_answer_normalization(answer: str, normalized: str) -> None:
    assert normalize_answer(answer) == normalized


@pytest.mark.parametrize(
    ("answer", "golds", "exact", "f1"),
    [
        ("the Vistula", ["Vistula", "Vistula River"], 1, 1),
        ("on Vistula River banks", ["Vistula", "Vistula River"], 0, 2 * 2 / (4 + 2)),
        ("Oder", ["Vistula"], 0, 0),
        # The answers share one `New`: the smaller count of a repeated word applies.
        ("New New York", ["New Jersey"], 0, 2 * 1 / (3 + 2)),
        ("", ["Vistula"], 0, 0),
        ("", [], 1, 1),
        ("Vistula", [], 0, 0),
        # Both gold answers are empty after normalization, so an empty answer is correct.
        ("", ["a", "!"], 1, 1),
    ],
)
def test_nearest_gold_answer_is_scored(
    answer: str, golds: list[str], exact: float, f1: float
) -> None:
    assert exact_match(answer, golds) == exact
    assert overlap_f1(answer, golds) == pytest.approx(f1)


def test_squad_versions_1_and_2_are_read(tmp_path: Path) -> None:
    first = {"question": "what is good", "answers": [{"text": "the river"}, {"text": "river"}]}
    second = {"question": "who", "answers": [], "is_impossible": True}
    path = write(tmp_path / "squad.json", b"\xef\xbb\xbf" + orjson.dumps(squad(first, second)))
    context = "the river is good"
    assert read_questions(path) == [
        SquadQuestion("what is good", context, ("the river", "river")),
        SquadQuestion("who", context, ()),
    ]


RIGHT = {"question": "q", "answers": [{"text": "river"}]}


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (b" \n", "no examples"),
        (b'{"data":\n[', "line 2: not JSON"),
        (b'{"data": "\xff"}', "not JSON"),
        (b"[" * 5000, "not JSON: depth limit"),
        ([], "not a JSON object"),
        ({"version": "1"}, "`data`: missing"),
        ({"data": []}, "no examples"),
        ({"data": {"paragraphs": []}}, "`data`: not a list"),
        ({"data": ["x"]}, r"data\[0\]: not a JSON object"),
        ({"data": [{"paragraphs": [{"qas": []}]}]}, r"data\[0\].paragraphs\[0\], `context`: miss"),
        (squad(RIGHT, context=" "), "`context`: empty"),
        (squad(RIGHT, context=3), "`context`: not a string"),
        (squad(RIGHT, {"answers": []}), r"paragraphs\[0\].qas\[1\], `question`: missing"),
        (squad({"question": "q", "answers": []}), "`answers`: empty, but `is_impossible` is not"),
        (squad({"question": "q", "answers": [{}]}), r"qas\[0\].answers\[0\], `text`: missing"),
    ],
)
def test_invalid_squad_file_error_names_part(tmp_path: Path, value: object, complaint: str) -> None:
    path = write(tmp_path / "squad.json", value)
    with pytest.raises(BadEvaluationData, match=complaint) as caught:
        read_questions(path)
    assert str(path) in caught.value.message
    assert "SQuAD" in caught.value.hint
