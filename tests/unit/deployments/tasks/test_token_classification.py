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
from tests.support.builders import tiny_tokenizer
from tests.support.labelled_tokens import MANIFEST, TASK, ask, spans

STRATEGIES = ("none", "simple", "first", "average", "max")
WORDS = ("good", "film", "bad", "river", "it", "x", "y", "z", "of", "filmy", "日", "city's", "7")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(path)
    return path


def test_a_text_stands_alone_or_in_a_list() -> None:
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
def test_parameters_say_how_tokens_become_entities(
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
def test_what_cannot_be_met_is_refused_by_name(
    inputs: Any, parameters: dict[str, Any], error: type[ServeError], field: str
) -> None:
    with pytest.raises(error) as refusal:
        TASK.parse(inputs, parameters, MANIFEST)
    assert refusal.value.field == field


def test_a_list_of_wrong_labels_is_refused_at_the_first() -> None:
    with pytest.raises(ValidationError) as refusal:
        EntityParameters.model_validate({"ignore_labels": [7] * 100})
    assert refusal.value.error_count() == 1


@pytest.mark.parametrize(
    ("parameters", "claimed"),
    [
        ({"aggregation_strategy": "max"}, True),
        ({"ignore_labels": []}, True),
        ({"stride": 1}, False),
        ({}, False),
    ],
)
def test_a_body_with_parameters_of_its_own_is_claimed(
    parameters: dict[str, Any], claimed: bool
) -> None:
    assert TASK.matches("a", parameters) is claimed


def test_without_aggregation_every_labelled_token_is_named(directory: Path) -> None:
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


def test_lists_have_a_list_for_every_text_in_order(directory: Path) -> None:
    texts = ["good", "film bad", " "]
    answers = ask(directory, texts, [["B-PER"], ["O", "B-LOC"], []])
    assert [spans(answer) for answer in answers] == [[("PER", "good")], [("LOC", "bad")], []]
    assert ask(directory, ["good"], [["B-PER"]]) == [ask(directory, "good", [["B-PER"]])]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_text_without_tokens_has_no_entities(strategy: str, directory: Path) -> None:
    assert ask(directory, " ", [[]], aggregation_strategy=strategy) == []


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize("stride", [8, 9])
def test_windows_find_what_one_window_finds(strategy: str, stride: int, directory: Path) -> None:
    """Labels that depend on the token alone, and no entity longer than windows share."""
    text = " ".join(np.random.default_rng(5).choice(WORDS, 90))
    whole = ask(directory, text, most=1000, aggregation_strategy=strategy)
    windows = ask(directory, text, most=22, aggregation_strategy=strategy, stride=stride)
    assert len(whole) > 20
    assert max(len(group["word"].split()) for group in whole) < stride
    assert windows == [{**group, "score": pytest.approx(group["score"])} for group in whole]


def test_decoding_without_the_vocabulary_is_a_bug() -> None:
    computed = DecodeContext(rows=(), items=(), token_offsets=(), manifest=MANIFEST)
    with pytest.raises(AssertionError, match="bug: "):
        TASK.decode(computed, EntityOptions("simple", ("O",), (), single=False))


def test_the_answer_has_a_schema(directory: Path) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(TASK.response_type)
    names = set(adapter.json_schema()["$defs"])
    assert names == {"TokenEntity", "EntityGroup"}
    for strategy in ("none", "simple"):
        answer = ask(directory, ["good"], [["B-PER"]], aggregation_strategy=strategy)
        assert adapter.validate_python(answer) == answer
