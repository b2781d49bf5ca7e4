from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from deployments.errors import EmptyInput, InvalidField, ServeError, UnknownParameter
from deployments.messages import Truncation, Windowing
from deployments.tasks.base import DecodeContext
from deployments.tasks.token_classification import EntityOptions, EntityParameters
from tests.support.artifacts import MAX_TOKENS
from tests.support.labeled_tokens import MANIFEST, TASK, ask, spans
from tests.support.tiny_encoders import tiny_tokenizer

STRATEGIES = ("none", "simple", "first", "average", "max")
WORDS = ("good", "film", "bad", "river", "it", "x", "y", "z", "of", "filmy", "日", "city's", "7")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(path)
    return path


def test_texts_are_a_string_or_a_list() -> None:
    single, many = TASK.parse("a", {}, MANIFEST), TASK.parse(["a", "b"], {}, MANIFEST)
    assert single.options == EntityOptions("simple", ("O",), ("a",), single=True)
    assert many.options == EntityOptions("simple", ("O",), ("a", "b"), single=False)
    assert (single.fields, many.fields) == (("inputs",), ("inputs[0]", "inputs[1]"))
    assert single.windowing == Windowing()
    assert single.truncation is Truncation.REFUSE


@pytest.mark.parametrize(
    ("parameters", "strategy", "ignored", "stride"),
    [
        ({"aggregation_strategy": None, "ignore_labels": None}, "simple", ("O",), None),
        ({"aggregation_strategy": "none"}, "none", ("O",), None),
        ({"aggregation_strategy": "MAX"}, "max", ("O",), None),
        ({"ignore_labels": []}, "simple", (), None),
        ({"ignore_labels": ["PER", "O"]}, "simple", ("PER", "O"), None),
        ({"stride": 0}, "simple", ("O",), 0),
        ({"stride": MAX_TOKENS // 2 - 2}, "simple", ("O",), MAX_TOKENS // 2 - 2),
    ],
)
def test_parse_reads_entity_options(
    parameters: dict[str, Any], strategy: str, ignored: tuple[str, ...], stride: int | None
) -> None:
    parsed = TASK.parse("a", parameters, MANIFEST)
    assert (parsed.options.strategy, parsed.options.ignored) == (strategy, ignored)
    assert parsed.windowing == Windowing(stride=stride)


@pytest.mark.parametrize(
    ("inputs", "parameters", "error", "field"),
    [
        ("", {}, EmptyInput, "inputs"),
        ([], {}, EmptyInput, "inputs"),
        (["a", ""], {}, EmptyInput, "inputs[1]"),
        (["a", 7], {}, InvalidField, "inputs[1]"),
        ({"text": "a"}, {}, InvalidField, "inputs"),
        ("a", {"aggregation_strategy": "best"}, InvalidField, "parameters.aggregation_strategy"),
        ("a", {"aggregation_strategy": 1}, InvalidField, "parameters.aggregation_strategy"),
        ("a", {"ignore_labels": "O"}, InvalidField, "parameters.ignore_labels"),
        ("a", {"ignore_labels": [0]}, InvalidField, "parameters.ignore_labels[0]"),
        ("a", {"stride": -1}, InvalidField, "parameters.stride"),
        ("a", {"stride": "3"}, InvalidField, "parameters.stride"),
        ("a", {"stride": MAX_TOKENS // 2 - 1}, InvalidField, "parameters.stride"),
        ("a", {"stride": 2, "aggregation_strategy": "none"}, InvalidField, "parameters.stride"),
        ("a", {"top_k": 1}, UnknownParameter, "parameters.top_k"),
    ],
)
def test_invalid_request_is_rejected_with_its_path(
    inputs: Any, parameters: dict[str, Any], error: type[ServeError], field: str
) -> None:
    with pytest.raises(error) as caught:
        TASK.parse(inputs, parameters, MANIFEST)
    assert caught.value.field == field


def test_list_of_invalid_labels_has_one_error() -> None:
    with pytest.raises(ValidationError) as caught:
        EntityParameters.model_validate({"ignore_labels": [7] * 100})
    assert caught.value.error_count() == 1


@pytest.mark.parametrize(
    ("parameters", "matches"),
    [
        ({"aggregation_strategy": "max"}, True),
        ({"ignore_labels": []}, True),
        ({"stride": 1}, False),
        ({}, False),
    ],
)
def test_task_matches_its_own_parameters(parameters: dict[str, Any], matches: bool) -> None:
    assert TASK.matches("a", parameters) is matches


def test_without_aggregation_every_labeled_token_is_returned(directory: Path) -> None:
    answer = ask(
        directory, "the filmy City", [["O", "B-PER", "I-PER", "MISC"]], aggregation_strategy="none"
    )
    score = pytest.approx(0.9, abs=1e-6)
    assert answer == [
        {"entity": "B-PER", "score": score, "index": 2, "word": "film", "start": 4, "end": 8},
        {"entity": "I-PER", "score": score, "index": 3, "word": "##y", "start": 8, "end": 9},
        {"entity": "MISC", "score": score, "index": 4, "word": "city", "start": 10, "end": 14},
    ]
    assert json.loads(json.dumps(answer)) == answer, "plain values"


def test_list_of_texts_returns_a_list_per_text_in_order(directory: Path) -> None:
    texts = ["good", "film bad", " "]
    answers = ask(directory, texts, [["B-PER"], ["O", "B-LOC"], []])
    assert [spans(answer) for answer in answers] == [[("PER", "good")], [("LOC", "bad")], []]
    assert ask(directory, ["good"], [["B-PER"]]) == [ask(directory, "good", [["B-PER"]])]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_text_without_tokens_has_no_entities(strategy: str, directory: Path) -> None:
    assert ask(directory, " ", [[]], aggregation_strategy=strategy) == []


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize("stride", [8, 9])
def test_several_windows_find_the_entities_of_one_window(
    strategy: str, stride: int, directory: Path
) -> None:
    """Labels depend only on the token here. The overlap of windows is longer than any entity."""
    text = " ".join(np.random.default_rng(5).choice(WORDS, 90))
    whole = ask(directory, text, most=1000, aggregation_strategy=strategy)
    windows = ask(directory, text, most=22, aggregation_strategy=strategy, stride=stride)
    assert len(whole) > 20
    assert max(len(group["word"].split()) for group in whole) < stride
    assert windows == [{**group, "score": pytest.approx(group["score"])} for group in whole]


def test_decode_without_vocabulary_raises_assertion_error() -> None:
    computed = DecodeContext(rows=(), items=(), token_offsets=(), manifest=MANIFEST)
    with pytest.raises(AssertionError, match="bug: "):
        TASK.decode(computed, EntityOptions("simple", ("O",), (), single=False))


def test_response_fits_its_schema(directory: Path) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(TASK.response_type)
    names = set(adapter.json_schema()["$defs"])
    assert names == {"TokenEntity", "EntityGroup"}
    for strategy in ("none", "simple"):
        answer = ask(directory, ["good"], [["B-PER"]], aggregation_strategy=strategy)
        assert adapter.validate_python(answer) == answer
