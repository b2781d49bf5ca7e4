from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deployments.errors import EmptyInput, InvalidField, ServeError, UnknownParameter
from deployments.messages import Truncation
from deployments.tasks.base import DecodeContext
from deployments.tasks.embedding import EmbeddingOptions, FeatureExtraction, SentenceSimilarity
from tests.support.artifacts import WIDTH, tiny_manifest

MANIFEST = tiny_manifest()  # WIDTH values, normalised, no prompts
PROMPTED = MANIFEST.model_copy(
    update={"prompts": {"query": "the query: ", "passage": "the text: "}, "default_prompt": "query"}
)


def computed(rows: list[list[float]]) -> DecodeContext:
    """What an encoder knows of texts with these rows."""
    arrays = [np.array(row, dtype=np.float32) for row in rows]
    return DecodeContext(rows=arrays, items=(), token_offsets=(), manifest=MANIFEST)


PAIR = {"source_sentence": "a", "sentences": ["b", "c"]}


@pytest.mark.parametrize(
    ("inputs", "fields"),
    [("a", ("inputs",)), (["a"], ("inputs[0]",)), (["a", "b"], ("inputs[0]", "inputs[1]"))],
)
def test_every_text_knows_where_in_the_request_it_stood(
    inputs: Any, fields: tuple[str, ...]
) -> None:
    parsed = FeatureExtraction().parse(inputs, {}, MANIFEST)
    assert parsed.fields == fields
    assert parsed.options == EmbeddingOptions(normalize=True, dimensions=WIDTH)
    assert parsed.truncation is Truncation.REFUSE


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
def test_parameters_say_how_rows_become_embeddings(
    parameters: dict[str, Any], options: tuple[bool, int]
) -> None:
    assert FeatureExtraction().parse("a", parameters, MANIFEST).options == options


@pytest.mark.parametrize(
    ("parameters", "error", "field"),
    [
        ({"dimensions": 0}, InvalidField, "parameters.dimensions"),
        ({"dimensions": WIDTH + 1}, InvalidField, "parameters.dimensions"),
        ({"dimensions": "3"}, InvalidField, "parameters.dimensions"),
        ({"dimensions": True}, InvalidField, "parameters.dimensions"),
        ({"normalize": "yes"}, InvalidField, "parameters.normalize"),
        ({"prompt_name": "poem"}, InvalidField, "parameters.prompt_name"),
        ({"top_k": 1}, UnknownParameter, "parameters.top_k"),
    ],
)
def test_parameters_that_cannot_be_met_are_named(
    parameters: dict[str, Any], error: type[ServeError], field: str
) -> None:
    with pytest.raises(error) as refusal:
        FeatureExtraction().parse("a", parameters, MANIFEST)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({}, "the query: a"),
        ({"prompt_name": None}, "the query: a"),
        ({"prompt_name": "passage"}, "the text: a"),
    ],
)
def test_texts_stand_behind_the_prompt_that_was_named_or_is_the_default(
    parameters: dict[str, Any], text: str
) -> None:
    assert FeatureExtraction().parse("a", parameters, PROMPTED).texts == (text,)


def test_a_model_without_prompts_leaves_texts_alone() -> None:
    assert FeatureExtraction().parse(["a", "b"], {}, MANIFEST).texts == ("a", "b")


ROWS = [[3.0, 4, 12, 0]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (EmbeddingOptions(normalize=False, dimensions=4), [[3, 4, 12, 0]]),
        (EmbeddingOptions(normalize=True, dimensions=4), [[3 / 13, 4 / 13, 12 / 13, 0]]),
        (EmbeddingOptions(normalize=False, dimensions=2), [[3, 4]]),
        (EmbeddingOptions(normalize=True, dimensions=2), [[0.6, 0.8]]),  # scaled anew
    ],
)
def test_embeddings_are_cut_first_and_scaled_afterwards(
    options: EmbeddingOptions, expected: list[list[float]]
) -> None:
    rows = FeatureExtraction().decode(computed(ROWS), options)
    assert rows == pytest.approx(np.array(expected), abs=1e-6)
    assert rows.dtype == np.float32
    assert rows.flags["C_CONTIGUOUS"], "the JSON encoder copies whole buffers"


def test_a_source_and_its_sentences_become_items_in_that_order() -> None:
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
def test_a_comparison_that_lacks_a_side_is_refused_by_name(
    inputs: Any, error: type[ServeError], field: str
) -> None:
    with pytest.raises(error) as refusal:
        SentenceSimilarity().parse(inputs, {}, MANIFEST)
    assert refusal.value.field == field


def test_similarity_is_the_cosine_with_the_source_in_the_order_sent() -> None:
    rows: list[list[float]] = [[2, 0], [3, 0], [0, 5], [-1, 0], [1, 1]]
    cosines = SentenceSimilarity().decode(computed(rows), None)
    assert cosines == pytest.approx([1, 0, -1, 0.5**0.5], abs=1e-6)


@pytest.mark.parametrize(
    ("inputs", "claimed"),
    [
        (PAIR, True),
        ({"sentences": []}, True),
        ({"source_sentence": "a"}, True),
        ("a", False),
        (["a"], False),
        ({"question": "a"}, False),
    ],
)
def test_similarity_claims_inputs_by_their_shape(inputs: Any, claimed: bool) -> None:
    assert SentenceSimilarity().matches(inputs, {}) is claimed
    assert FeatureExtraction().matches(inputs, {}) is False


@pytest.mark.parametrize(
    ("parameters", "claimed"),
    [({"normalize": True}, True), ({"dimensions": 3}, True), ({"truncate": True}, False)],
)
def test_feature_extraction_claims_parameters_of_its_own(
    parameters: dict[str, Any], claimed: bool
) -> None:
    assert FeatureExtraction().matches("a", parameters) is claimed


def test_only_models_that_answer_vectors_embed_and_compare() -> None:
    classifier = tiny_manifest(labels=("GOOD", "BAD"))
    for task in (FeatureExtraction(), SentenceSimilarity()):
        assert task.fits(MANIFEST)
        assert not task.fits(classifier)
