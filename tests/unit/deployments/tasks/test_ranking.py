from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.pair_template import PairTemplate
from deployments.artifacts.types import TaskName
from deployments.errors import EmptyInput, InvalidField, ServeError, UnknownParameter
from deployments.messages import Truncation
from deployments.tasks.base import DecodeContext
from deployments.tasks.ranking import RankingOptions, TextRanking
from tests.support.artifacts import tiny_manifest, with_tasks

TASK = TextRanking()
CROSS_ENCODER = tiny_manifest(labels=("SCORE",))
EMBEDDER = tiny_manifest()
SEARCH = {"query": "what?", "texts": ["this", "that", "those"]}
# A decoder that reads an instruction, and one that reads a fixed text.
PARTS = {"before_first": " Q: ", "before_second": " D: ", "end": ""}
RERANKER, FIXED = (
    CROSS_ENCODER.model_copy(update={"pair_template": PairTemplate(**PARTS, **instruction)})
    for instruction in ({"instruction": "find"}, {})
)
PLAIN = RankingOptions(raw_scores=False, texts=None)


def with_prompts(default: str | None = None, **prompts: str) -> ArtifactManifest:
    return EMBEDDER.model_copy(update={"prompts": prompts, "default_prompt": default})


def tagger() -> ArtifactManifest:
    return with_tasks(CROSS_ENCODER, TaskName.TOKEN_CLASSIFICATION)


@pytest.mark.parametrize(
    ("model", "fits"),
    [
        (CROSS_ENCODER, True),
        (EMBEDDER, True),
        (tiny_manifest(labels=("NO", "YES")), False),
        (tagger(), False),
    ],
)
def test_task_fits_single_scores_and_embeddings(model: ArtifactManifest, fits: bool) -> None:
    assert TASK.fits(model) is fits


@pytest.mark.parametrize(
    ("inputs", "matches"),
    [(SEARCH, True), ({"query": "a"}, False), ({"texts": ["a"]}, False), ("query, texts", False)],
)
def test_task_matches_a_query_with_texts(inputs: Any, matches: bool) -> None:
    assert TASK.matches(inputs, {}) is matches


def test_cross_encoder_items_are_pairs() -> None:
    parsed = TASK.parse(SEARCH, {}, CROSS_ENCODER)
    assert parsed.texts == (("what?", "this"), ("what?", "that"), ("what?", "those"))
    assert parsed.fields == ("inputs.texts[0]", "inputs.texts[1]", "inputs.texts[2]")


def test_instruction_is_part_of_each_pair() -> None:
    parsed = TASK.parse(SEARCH, {"instruction": "prove"}, RERANKER)
    assert parsed.texts[:2] == (("what?", "this", "prove"), ("what?", "that", "prove"))
    assert parsed.fields[0] == "inputs.texts[0]"
    assert TASK.parse(SEARCH, {"instruction": None}, RERANKER).texts[0] == ("what?", "this")


@pytest.mark.parametrize("model", [FIXED, CROSS_ENCODER, EMBEDDER])
def test_instruction_is_refused_by_models_that_read_none(model: ArtifactManifest) -> None:
    with pytest.raises(InvalidField, match="reads no instruction") as caught:
        TASK.parse(SEARCH, {"instruction": "prove"}, model)
    assert caught.value.field == "parameters.instruction"


def test_embedder_items_are_separate_texts() -> None:
    parsed = TASK.parse(SEARCH, {}, EMBEDDER)
    assert parsed.texts == ("what?", "this", "that", "those")
    assert parsed.fields == (
        "inputs.query",
        "inputs.texts[0]",
        "inputs.texts[1]",
        "inputs.texts[2]",
    )


def test_an_empty_text_is_scored() -> None:
    sent = {"query": "what?", "texts": ["", "this"]}
    assert TASK.parse(sent, {}, CROSS_ENCODER).texts == (("what?", ""), ("what?", "this"))
    assert TASK.parse(sent, {}, EMBEDDER).texts == ("what?", "", "this")


@pytest.mark.parametrize(
    ("model", "query", "text"),
    [
        (with_prompts(), "what?", "this"),
        (with_prompts(query="Q: "), "Q: what?", "this"),
        (with_prompts(query="Q: ", document="D: "), "Q: what?", "D: this"),
        (with_prompts(query="Q: ", corpus="C: ", passage="P: "), "Q: what?", "P: this"),
        (with_prompts("other", query="Q: ", other="O: "), "Q: what?", "O: this"),
        (with_prompts(similar="S: "), "what?", "this"),
    ],
)
def test_search_prompts_precede_query_and_texts(
    model: ArtifactManifest, query: str, text: str
) -> None:
    sent = {"query": "what?", "texts": ["this"]}
    parsed = TASK.parse(sent, {"return_text": True}, model)
    assert parsed.texts == (query, text)
    assert parsed.options.texts == ("this",)  # without the prompts


@pytest.mark.parametrize(
    ("parameters", "options"),
    [
        ({}, PLAIN),
        ({"raw_scores": None, "return_text": None}, PLAIN),
        ({"raw_scores": True}, RankingOptions(True, None)),
        ({"return_text": True}, RankingOptions(False, ("this", "that", "those"))),
    ],
)
@pytest.mark.parametrize("model", [CROSS_ENCODER, EMBEDDER], ids=["cross-encoder", "embedder"])
def test_parse_reads_ranking_options(
    model: ArtifactManifest, parameters: dict[str, Any], options: RankingOptions
) -> None:
    assert TASK.parse(SEARCH, parameters, model).options == options


def test_long_texts_are_truncated_unless_the_request_forbids_it() -> None:
    assert TASK.parse(SEARCH, {}, CROSS_ENCODER).truncation is Truncation.KEEP_START
    assert TASK.parse(SEARCH, {"truncate": False}, CROSS_ENCODER).truncation is Truncation.REFUSE
    left = {"truncation_direction": "left"}
    assert TASK.parse(SEARCH, left, CROSS_ENCODER).truncation is Truncation.KEEP_END


@pytest.mark.parametrize(
    ("inputs", "parameters", "error", "field"),
    [
        ("what?", {}, InvalidField, "inputs"),
        ({"query": "a"}, {}, InvalidField, "inputs.texts"),
        ({"texts": ["a"]}, {}, InvalidField, "inputs.query"),
        ({"query": "a", "texts": "b"}, {}, InvalidField, "inputs.texts"),
        ({"query": ["a"], "texts": ["b"]}, {}, InvalidField, "inputs.query"),
        ({"query": "a", "texts": ["b", 3]}, {}, InvalidField, "inputs.texts[1]"),
        ({"query": "", "texts": ["b"]}, {}, EmptyInput, "inputs.query"),
        ({"query": "a", "texts": []}, {}, EmptyInput, "inputs.texts"),
        (SEARCH, {"raw_scores": "yes"}, InvalidField, "parameters.raw_scores"),
        (SEARCH, {"top_k": 2}, UnknownParameter, "parameters.top_k"),
    ],
)
@pytest.mark.parametrize("model", [CROSS_ENCODER, EMBEDDER], ids=["cross-encoder", "embedder"])
def test_invalid_request_is_rejected_with_its_path(
    model: ArtifactManifest,
    inputs: Any,
    parameters: dict[str, Any],
    error: type[ServeError],
    field: str,
) -> None:
    with pytest.raises(error) as caught:
        TASK.parse(inputs, parameters, model)
    assert caught.value.field == field


def decode(model: ArtifactManifest, options: RankingOptions, *rows: list[float]) -> Any:
    outputs = [np.array(row, dtype=np.float32) for row in rows]
    return TASK.decode(
        DecodeContext(rows=outputs, items=(), token_offsets=(), manifest=model), options
    )


def test_entries_have_probabilities_in_descending_order() -> None:
    ln3 = float(np.log(3))
    answer = decode(CROSS_ENCODER, PLAIN, [-ln3], [ln3], [0.0])
    assert answer == [
        {"index": 1, "score": pytest.approx(0.75, abs=1e-6)},
        {"index": 2, "score": 0.5},
        {"index": 0, "score": pytest.approx(0.25, abs=1e-6)},
    ]
    assert {(type(entry["index"]), type(entry["score"])) for entry in answer} == {(int, float)}
    TypeAdapter(TextRanking.response_type).validate_python(answer, strict=True)


def test_raw_scores_returns_logits_and_return_text_returns_texts() -> None:
    options = RankingOptions(raw_scores=True, texts=("this", "that"))
    answer = decode(CROSS_ENCODER, options, [-2.5], [7.0])
    assert answer == [
        {"index": 1, "score": 7.0, "text": "that"},
        {"index": 0, "score": -2.5, "text": "this"},
    ]
    TypeAdapter(TextRanking.response_type).validate_python(answer, strict=True)


def test_large_logits_with_equal_probabilities_keep_their_order() -> None:
    with np.errstate(over="raise"):
        answer = decode(CROSS_ENCODER, PLAIN, [500.0], [1000.0], [-1000.0], [-500.0])
    assert [(entry["index"], entry["score"]) for entry in answer] == [
        (1, 1.0),
        (0, 1.0),
        (3, 0.0),
        (2, 0.0),
    ]


@pytest.mark.parametrize("raw_scores", [False, True])
def test_embedder_scores_are_cosines_for_any_vector_length(raw_scores: bool) -> None:
    options = RankingOptions(raw_scores, texts=("opposite", "same way", "across", "nothing"))
    answer = decode(EMBEDDER, options, [2, 0], [-9, 0], [0.3, 0], [0, 50], [0, 0])
    assert answer == [
        {"index": 1, "score": pytest.approx(1.0), "text": "same way"},
        {"index": 2, "score": 0.0, "text": "across"},
        {"index": 3, "score": 0.0, "text": "nothing"},
        {"index": 0, "score": pytest.approx(-1.0), "text": "opposite"},
    ]


def test_embedder_trained_with_dot_products_is_ranked_by_them() -> None:
    model = EMBEDDER.model_copy(update={"similarity": "dot"})
    answer = decode(model, PLAIN, [2, 0], [1, 0], [3, 4])
    assert answer == [{"index": 1, "score": 6.0}, {"index": 0, "score": 2.0}]
