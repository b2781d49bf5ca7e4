from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deployments.artifacts.manifest import ArtifactManifest
from deployments.errors import EmptyInput, InvalidField, ServeError, UnknownParameter
from deployments.messages import Truncation
from deployments.tasks.base import DecodeContext
from deployments.tasks.embedding import EmbeddingOptions, FeatureExtraction, SentenceSimilarity
from tests.support.artifacts import WIDTH, tiny_manifest

MANIFEST = tiny_manifest()  # normalized vectors of WIDTH values; no prompts
PROMPTED = MANIFEST.model_copy(
    update={"prompts": {"query": "the query: ", "passage": "the text: "}, "default_prompt": "query"}
)


def decode_context(rows: list[list[float]], manifest: ArtifactManifest = MANIFEST) -> DecodeContext:
    arrays = [np.array(row, dtype=np.float32) for row in rows]
    return DecodeContext(rows=arrays, items=(), token_offsets=(), manifest=manifest)


PAIR = {"source_sentence": "a", "sentences": ["b", "c"]}


@pytest.mark.parametrize(
    ("inputs", "fields"),
    [("a", ("inputs",)), (["a"], ("inputs[0]",)), (["a", "b"], ("inputs[0]", "inputs[1]"))],
)
def test_parse_returns_the_path_of_every_text(inputs: Any, fields: tuple[str, ...]) -> None:
    parsed = FeatureExtraction().parse(inputs, {}, MANIFEST)
    assert parsed.fields == fields
    assert parsed.options == EmbeddingOptions(normalize=True, dimensions=WIDTH)
    assert parsed.truncation is Truncation.KEEP_START


@pytest.mark.parametrize(
    ("parameters", "options"),
    [
        ({"normalize": False}, (False, WIDTH)),
        ({"normalize": None, "dimensions": None}, (True, WIDTH)),
        ({"dimensions": 3}, (True, 3)),
        ({"dimensions": WIDTH}, (True, WIDTH)),
        ({"encoding_format": "base64"}, (True, WIDTH)),
    ],
)
def test_parse_reads_embedding_options(
    parameters: dict[str, Any], options: tuple[bool, int]
) -> None:
    assert FeatureExtraction().parse("a", parameters, MANIFEST).options == options


SHORTENED = MANIFEST.model_copy(update={"normalize": False, "default_dimensions": 2})


@pytest.mark.parametrize(
    ("parameters", "dimensions"), [({}, 2), ({"dimensions": 3}, 3), ({"dimensions": WIDTH}, WIDTH)]
)
def test_truncation_of_the_checkpoint_is_the_default(
    parameters: dict[str, Any], dimensions: int
) -> None:
    options = FeatureExtraction().parse("a", parameters, SHORTENED).options
    assert options == (False, dimensions)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, [3 / 13, 4 / 13]),  # as in sentence-transformers
        ({"normalize": False}, [3, 4]),
        ({"normalize": True}, [0.6, 0.8]),
        ({"dimensions": 2}, [0.6, 0.8]),
    ],
)
def test_truncation_of_the_checkpoint_follows_its_normalization(
    parameters: dict[str, Any], expected: list[float]
) -> None:
    task, manifest = FeatureExtraction(), SHORTENED.model_copy(update={"normalize": True})
    options = task.parse("a", parameters, manifest).options
    (row,) = task.decode(decode_context(ROWS, manifest), options)
    assert row == pytest.approx(expected, abs=1e-6)


def test_dot_product_of_truncated_vectors_is_below_their_cosine() -> None:
    manifest = SHORTENED.model_copy(update={"normalize": True, "similarity": "dot"})
    rows: list[list[float]] = [[3, 4, 12], [3, 4, 0]]
    assert SentenceSimilarity().decode(decode_context(rows, manifest), None) == pytest.approx(
        [5 / 13]
    )


@pytest.mark.parametrize(("measure", "similarity"), [("dot", 25.0), ("cosine", 1.0)])
def test_similarity_compares_vectors_of_the_default_length(measure: str, similarity: float) -> None:
    manifest = SHORTENED.model_copy(update={"similarity": measure})
    rows: list[list[float]] = [[3, 4, 0], [3, 4, 12]]
    assert SentenceSimilarity().decode(decode_context(rows, manifest), None) == [similarity]


@pytest.mark.parametrize(
    ("parameters", "error", "field"),
    [
        ({"dimensions": 0}, InvalidField, "parameters.dimensions"),
        ({"dimensions": WIDTH + 1}, InvalidField, "parameters.dimensions"),
        ({"dimensions": "3"}, InvalidField, "parameters.dimensions"),
        ({"dimensions": True}, InvalidField, "parameters.dimensions"),
        ({"normalize": "yes"}, InvalidField, "parameters.normalize"),
        ({"prompt_name": "poem"}, InvalidField, "parameters.prompt_name"),
        ({"prompt_name": ""}, InvalidField, "parameters.prompt_name"),
        ({"input_type": "image"}, InvalidField, "parameters.input_type"),
        ({"top_k": 1}, UnknownParameter, "parameters.top_k"),
    ],
)
def test_invalid_parameter_is_rejected_with_its_path(
    parameters: dict[str, Any], error: type[ServeError], field: str
) -> None:
    with pytest.raises(error) as caught:
        FeatureExtraction().parse("a", parameters, MANIFEST)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({}, "the query: a"),
        ({"prompt_name": None}, "the query: a"),
        ({"prompt_name": "passage"}, "the text: a"),
        ({"input_type": "query"}, "the query: a"),
        ({"input_type": "search_document"}, "the text: a"),
        ({"input_type": "document"}, "the text: a"),
        ({"input_type": "clustering"}, "the query: a"),
        ({"input_type": "document", "prompt_name": "query"}, "the query: a"),
    ],
)
def test_texts_start_with_the_selected_or_default_prompt(
    parameters: dict[str, Any], text: str
) -> None:
    assert FeatureExtraction().parse("a", parameters, PROMPTED).texts == (text,)


@pytest.mark.parametrize("parameters", [{}, {"input_type": "search_query"}])
def test_texts_are_unchanged_for_a_model_without_prompts(parameters: dict[str, Any]) -> None:
    assert FeatureExtraction().parse(["a", "b"], parameters, MANIFEST).texts == ("a", "b")


@pytest.mark.parametrize(
    ("input_type", "text"),
    [("search_query", "s: a"), ("query", "s: a"), ("clustering", "c: a"), ("passage", "d: a")],
)
def test_most_specific_prompt_of_a_type_is_selected(input_type: str, text: str) -> None:
    prompts = {"query": "q: ", "search_query": "s: ", "Clustering": "c: ", "document": "d: "}
    manifest = MANIFEST.model_copy(update={"prompts": prompts})
    assert FeatureExtraction().parse("a", {"input_type": input_type}, manifest).texts == (text,)


ROWS = [[3.0, 4, 12, 0]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (EmbeddingOptions(normalize=False, dimensions=4), [[3, 4, 12, 0]]),
        (EmbeddingOptions(normalize=True, dimensions=4), [[3 / 13, 4 / 13, 12 / 13, 0]]),
        (EmbeddingOptions(normalize=False, dimensions=2), [[3, 4]]),
        (EmbeddingOptions(normalize=True, dimensions=2), [[0.6, 0.8]]),  # normalized again
    ],
)
def test_embeddings_are_truncated_before_normalization(
    options: EmbeddingOptions, expected: list[list[float]]
) -> None:
    rows = FeatureExtraction().decode(decode_context(ROWS), options)
    assert rows == pytest.approx(np.array(expected), abs=1e-6)
    assert rows.dtype == np.float32
    assert rows.flags["C_CONTIGUOUS"], "the JSON encoder copies whole buffers"


def test_similarity_items_are_the_source_then_the_sentences() -> None:
    parsed = SentenceSimilarity().parse(PAIR, {}, MANIFEST)
    assert parsed.texts == ("a", "b", "c")
    assert parsed.fields == (
        "inputs.source_sentence",
        "inputs.sentences[0]",
        "inputs.sentences[1]",
    )


@pytest.mark.parametrize(
    ("inputs", "error", "field"),
    [
        ("a", InvalidField, "inputs"),
        (["a", "b"], InvalidField, "inputs"),
        ({}, InvalidField, "inputs.source_sentence"),
        ({"source_sentence": "a"}, InvalidField, "inputs.sentences"),
        ({"sentences": ["b"]}, InvalidField, "inputs.source_sentence"),
        ({**PAIR, "source_sentence": ""}, EmptyInput, "inputs.source_sentence"),
        ({**PAIR, "source_sentence": ["a"]}, InvalidField, "inputs.source_sentence"),
        ({**PAIR, "sentences": []}, EmptyInput, "inputs.sentences"),
        ({**PAIR, "sentences": "b"}, InvalidField, "inputs.sentences"),
        ({**PAIR, "sentences": ["b", 3]}, InvalidField, "inputs.sentences[1]"),
        ({**PAIR, "sentences": ["b", ""]}, EmptyInput, "inputs.sentences[1]"),
    ],
)
def test_invalid_similarity_inputs_are_rejected_with_their_path(
    inputs: Any, error: type[ServeError], field: str
) -> None:
    with pytest.raises(error) as caught:
        SentenceSimilarity().parse(inputs, {}, MANIFEST)
    assert caught.value.field == field


def test_similarity_is_the_cosine_with_the_source_in_request_order() -> None:
    rows: list[list[float]] = [[2, 0], [3, 0], [0, 5], [-1, 0], [1, 1]]
    cosines = SentenceSimilarity().decode(decode_context(rows), None)
    assert cosines == pytest.approx([1, 0, -1, 0.5**0.5], abs=1e-6)


def test_similarity_is_the_dot_product_for_a_model_trained_with_it() -> None:
    manifest = MANIFEST.model_copy(update={"similarity": "dot"})
    rows: list[list[float]] = [[2, 0], [3, 0], [0, 5], [-1, 0], [1, 1]]
    products = SentenceSimilarity().decode(decode_context(rows, manifest), None)
    assert products == [6, 0, -2, 2]


@pytest.mark.parametrize(
    ("inputs", "matches"),
    [
        (PAIR, True),
        ({"sentences": []}, True),
        ({"source_sentence": "a"}, True),
        ("a", False),
        (["a"], False),
        ({"question": "a"}, False),
    ],
)
def test_similarity_matches_inputs_with_its_keys(inputs: Any, matches: bool) -> None:
    assert SentenceSimilarity().matches(inputs, {}) is matches
    assert FeatureExtraction().matches(inputs, {}) is False


@pytest.mark.parametrize(
    ("parameters", "matches"),
    [({"normalize": True}, True), ({"dimensions": 3}, True), ({"truncate": True}, False)],
)
def test_feature_extraction_matches_its_own_parameters(
    parameters: dict[str, Any], matches: bool
) -> None:
    assert FeatureExtraction().matches("a", parameters) is matches
