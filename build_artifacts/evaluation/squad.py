"""Reader of SQuAD files, and the metrics exact match and F1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from build_artifacts.evaluation.files import FileLocation, Record, read_bytes

EXPECTED = "SQuAD 1.1 or 2.0: `data`, `paragraphs`, `context`, `qas`, `question`, `answers`, `text`"

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


@dataclass(frozen=True, slots=True)
class SquadQuestion:
    """A question, its context and all correct answers; none if the context has no answer."""

    question: str
    context: str
    golds: tuple[str, ...]


def read_questions(path: Path) -> list[SquadQuestion]:
    """Read the questions of a file. Raises BadEvaluationData for an unusable file."""
    location = FileLocation(path, EXPECTED)
    raw = read_bytes(location)
    if not raw.strip():
        raise location.data_error("no examples")
    try:
        value = orjson.loads(raw.removeprefix(b"\xef\xbb\xbf"))
    except orjson.JSONDecodeError as exc:
        raise location.at(f"line {exc.lineno}").data_error(f"not JSON: {exc.msg}") from exc
    if not isinstance(value, dict):
        raise location.data_error("not a JSON object")
    questions = [
        _parse_question(question_record, context)
        for article in _read_children(Record(location, value), "data")
        for paragraph in _read_children(article, "paragraphs")
        for context in [paragraph.text("context")]
        for question_record in _read_children(paragraph, "qas")
    ]
    if not questions:
        raise location.data_error("no examples")
    return questions


def _read_children(record: Record, field: str) -> Iterator[Record]:
    """Yield the objects of a list; their locations are paths such as `data[0].paragraphs[3]`."""
    value = record.require(field)
    if not isinstance(value, list):
        raise record.data_error("not a list", field)
    path = f"{record.location.position}.{field}" if record.location.position else field
    for i, child in enumerate(value):
        location = record.location.at(f"{path}[{i}]")
        if not isinstance(child, dict):
            raise location.data_error("not a JSON object")
        yield Record(location, child)


def _parse_question(question_record: Record, context: str) -> SquadQuestion:
    question = question_record.text("question")
    if question_record.values.get("is_impossible") is True:
        return SquadQuestion(question, context, ())
    golds = tuple(answer.text("text") for answer in _read_children(question_record, "answers"))
    if not golds:
        raise question_record.data_error("empty, but `is_impossible` is not true", "answers")
    return SquadQuestion(question, context, golds)


def normalize_answer(answer: str) -> str:
    """Return the words of an answer in lower case, without punctuation and articles."""
    bare = answer.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(answer: str, golds: Sequence[str]) -> float:
    """Return 1 if the normalized answer equals one of `golds`, else 0.

    If `golds` is empty, only an empty answer is correct. An answer counts as empty if it consists
    of articles and punctuation.
    """
    return float(
        max(normalize_answer(answer) == normalize_answer(gold) for gold in _drop_blank(golds))
    )


def overlap_f1(answer: str, golds: Sequence[str]) -> float:
    """Return the highest word F1, 0 to 1, of the answer with one of `golds`."""
    return max(_word_f1(answer, gold) for gold in _drop_blank(golds))


def _drop_blank(golds: Sequence[str]) -> Sequence[str]:
    return [gold for gold in golds if normalize_answer(gold)] or [""]


def _word_f1(answer: str, gold: str) -> float:
    actual, expected = normalize_answer(answer).split(), normalize_answer(gold).split()
    if not actual or not expected:
        return float(actual == expected)
    common = (Counter(actual) & Counter(expected)).total()
    return 2 * common / (len(actual) + len(expected))
