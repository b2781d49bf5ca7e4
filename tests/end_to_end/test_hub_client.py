"""Every task with the client of huggingface_hub, on every route."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import BadRequestError, HfHubHTTPError

from tests.support.ray_cluster import Cluster
from tests.support.served_models import (
    CLASSIFIER,
    DAMAGED,
    EMBEDDER,
    MASK_FILLER,
    NER_MODEL,
    NLI_MODEL,
    QA_MODEL,
    RANKER,
)
from tests.support.vectors import cosine, is_same_embedding

FILM = "a gorgeous, witty film"
STORY = (
    "The lighthouse on Gull Point was built in 1871 from grey granite that was shipped across the "
    "bay in forty barges. Its first keeper, Martha Kell, lived there for nineteen years."
)
CHAT = [{"role": "user", "content": "Hello"}]
GUITAR = "A man is playing a guitar."
COMPARED = ["Someone plays guitar.", "The market fell on Monday."]


class Ask(Protocol):
    """Function that calls `method` of a hub client whose base URL ends with `path`."""

    def __call__(self, path: str, method: str, /, *given: Any, **parameters: Any) -> Any: ...


@pytest.fixture(params=["sync", "async"])
def ask(request: pytest.FixtureRequest, cluster: Cluster) -> Ask:
    def at_once(path: str, method: str, /, *given: Any, **parameters: Any) -> Any:
        client = InferenceClient(cluster.url + path, provider="hf-inference")
        return getattr(client, method)(*given, **parameters)

    def awaited(path: str, method: str, /, *given: Any, **parameters: Any) -> Any:
        async def call() -> Any:
            async with AsyncInferenceClient(cluster.url + path, provider="hf-inference") as client:
                return await getattr(client, method)(*given, **parameters)

        return asyncio.run(call())

    return at_once if request.param == "sync" else awaited


def test_list_of_texts_is_embedded(ask: Ask) -> None:
    texts = ["a dog", "a puppy", "a tax form"]
    rows = ask(f"/models/{EMBEDDER}", "feature_extraction", texts)
    assert rows.shape == (3, 384)
    assert np.linalg.norm(rows, axis=1) == pytest.approx(1, abs=1e-4)
    assert cosine(rows[0], rows[1]) > cosine(rows[0], rows[2]) + 0.2


@pytest.mark.parametrize(
    "path",
    [
        f"/models/{EMBEDDER}",
        f"/models/{EMBEDDER}/",
        f"/models/{EMBEDDER}/pipeline/feature-extraction",
        f"/pipeline/feature-extraction/{EMBEDDER}",
        f"/models/{EMBEDDER}/embed",
        "/embed",
        "",
        "/",
        "/v1",
        "/v1/",
        "/invocations",
    ],
)
def test_embedding_is_equal_on_every_route(ask: Ask, path: str) -> None:
    (row,) = ask(path, "feature_extraction", GUITAR)
    (due,) = ask(f"/models/{EMBEDDER}", "feature_extraction", GUITAR)
    assert is_same_embedding(row, due)


def test_embedding_parameters_are_applied(ask: Ask) -> None:
    path = f"/models/{EMBEDDER}"
    (short,) = ask(path, "feature_extraction", GUITAR, dimensions=64, encoding_format="base64")
    assert short.shape == (64,)
    long = "A violin plays a sonata. " * 100 + "Taxes are due in May. " * 100
    start, end = (
        ask(path, "feature_extraction", long, truncate=True, truncation_direction=side)[0]
        for side in ("right", "left")
    )
    assert not is_same_embedding(start, end)
    (raw,) = ask(path, "feature_extraction", GUITAR, normalize=False)
    (normalized,) = ask(path, "feature_extraction", GUITAR)
    assert is_same_embedding(raw, normalized)
    assert np.linalg.norm(normalized) == pytest.approx(1, abs=1e-3)
    assert np.linalg.norm(raw) != pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    "path",
    [
        f"/models/{EMBEDDER}",
        f"/models/{EMBEDDER}/pipeline/sentence-similarity",
        f"/pipeline/sentence-similarity/{EMBEDDER}",
        "/similarity",
        "",
        "/v1",
    ],
)
def test_sentences_are_compared(ask: Ask, path: str) -> None:
    near, far = ask(path, "sentence_similarity", GUITAR, COMPARED)
    assert near > 0.7 > 0.3 > far


def test_texts_are_classified(ask: Ask) -> None:
    best, other = ask(f"/models/{CLASSIFIER}", "text_classification", FILM)
    assert (best.label, other.label) == ("POSITIVE", "NEGATIVE")
    assert best.score > 0.9
    assert best.score + other.score == pytest.approx(1)
    (only,) = ask(f"/models/{CLASSIFIER}", "text_classification", FILM, top_k=1)
    assert only.label == "POSITIVE"
    raw, _ = ask(f"/models/{CLASSIFIER}", "text_classification", FILM, function_to_apply="none")
    assert raw.score > 1


def test_pair_is_classified(ask: Ask) -> None:
    pair = [{"text": "Which animal purrs?", "text_pair": "A cat purrs."}]
    (score,) = ask(f"/models/{RANKER}", "text_classification", pair)
    assert 0 < score.score < 1


def test_entities_have_offsets_in_characters(ask: Ask) -> None:
    text = "A lovely night train 🚂 to Łódź"
    entities = ask(f"/models/{NER_MODEL}", "token_classification", text, ignore_labels=[])
    assert {e.entity_group for e in entities} <= {"O", "PER", "LOC"}
    assert all(0 <= e.start < e.end <= len(text) for e in entities)
    assert all(before.end <= after.start for before, after in pairwise(entities))
    assert entities[0].start == 0
    assert entities[-1].end == len(text)


@pytest.mark.parametrize("strategy", ["simple", "first", "average", "max"])
def test_every_aggregation_strategy_is_supported(ask: Ask, strategy: str) -> None:
    text = "the river and the city at night"
    path = f"/models/{NER_MODEL}"
    groups = ask(
        path,
        "token_classification",
        text,
        aggregation_strategy=strategy,
        ignore_labels=[],
        stride=8,
    )
    assert [text[g.start : g.end] for g in groups] == [g.word for g in groups]
    tokens = ask(path, "token_classification", text, aggregation_strategy="none", ignore_labels=[])
    assert [t.index for t in tokens] == list(range(1, len(tokens) + 1))
    assert {t.entity.removeprefix("B-").removeprefix("I-") for t in tokens} >= {
        g.entity_group for g in groups
    }


def test_questions_are_answered(ask: Ask) -> None:
    path = f"/models/{QA_MODEL}"
    question = "When was the lighthouse on Gull Point built?"
    answer = ask(path, "question_answering", question=question, context=STORY)
    assert answer.answer == "1871" == STORY[answer.start : answer.end]
    assert 0 < answer.score <= 1
    several = ask(
        path,
        "question_answering",
        question=question,
        context=STORY * 12,
        top_k=3,
        doc_stride=64,
        max_answer_len=5,
        align_to_words=True,
        handle_impossible_answer=True,
        max_question_len=32,
        max_seq_len=200,
    )
    assert len(several) == 3
    assert "1871" in [answer.answer for answer in several]


def test_masks_are_filled(ask: Ask) -> None:
    path = f"/models/{MASK_FILLER}"
    candidates = ask(path, "fill_mask", "the [MASK] film", top_k=3)
    assert len(candidates) == 3
    assert [c.score for c in candidates] == sorted((c.score for c in candidates), reverse=True)
    assert len(ask(path, "fill_mask", "the [MASK] film")) == 5
    chosen = ask(path, "fill_mask", "the [MASK] film", targets=["good", "awful"])
    sequences = {c.token_str: c.sequence for c in chosen}
    assert sequences == {"good": "the good film", "awful": "the awful film"}


def test_candidate_labels_are_classified(ask: Ask) -> None:
    path, labels = f"/models/{NLI_MODEL}", ["film", "food", "city"]
    scored = ask(path, "zero_shot_classification", "a good film", labels)
    assert {j.label for j in scored} == set(labels)
    assert sum(j.score for j in scored) == pytest.approx(1)
    assert scored[0].score == max(j.score for j in scored)
    each = ask(
        path,
        "zero_shot_classification",
        "a good film",
        labels,
        multi_label=True,
        hypothesis_template="it is about {}",
    )
    assert sum(j.score for j in each) != pytest.approx(1, abs=1e-3)


def test_parameters_select_the_model_without_a_model_id(ask: Ask) -> None:
    """Without a model id, a request goes to the first model with a task that fits the body."""
    best, _ = ask("", "text_classification", FILM, function_to_apply="softmax")
    assert best.label == "POSITIVE"
    assert ask("", "token_classification", FILM, aggregation_strategy="simple", ignore_labels=[])
    assert len(ask("", "fill_mask", "the [MASK] film", targets=["good"])) == 1
    assert len(ask("", "zero_shot_classification", FILM, ["film", "food"])) == 2
    question = "Who was the first keeper?"
    answer = ask("", "question_answering", question=question, context=STORY)
    assert answer.answer == "Martha Kell"


def test_health_and_model_information_are_returned(ask: Ask) -> None:
    assert ask(f"/models/{EMBEDDER}", "health_check")
    assert ask("", "health_check")
    assert ask(f"/models/{CLASSIFIER}", "get_endpoint_info")["labels"] == ["NEGATIVE", "POSITIVE"]
    assert ask("", "get_endpoint_info")["model_id"] == EMBEDDER


@pytest.mark.parametrize(
    ("path", "method", "given", "sentence"),
    [
        ("/models/nobody/nothing", "text_classification", ["a"], "nobody/nothing does not exist"),
        (f"/models/{DAMAGED}", "text_classification", ["a"], "tokenizer.json"),
        (f"/models/{EMBEDDER}/pipeline/fill-mask", "fill_mask", ["a"], "cannot do `fill-mask`"),
        (f"/models/{EMBEDDER}/pipeline/dance", "fill_mask", ["a"], "`dance` is not a task"),
        (f"/models/{MASK_FILLER}", "fill_mask", ["no gap"], "mask"),
        (f"/models/{EMBEDDER}", "feature_extraction", [[]], "empty list"),
        (f"/models/{CLASSIFIER}", "text_classification", ["word " * 1000], "tokens"),
        (
            f"/models/{EMBEDDER}",
            "table_question_answering",
            [{"a": ["1"]}, "b"],
            "must be a string",
        ),
        (f"/models/{CLASSIFIER}", "chat_completion", [CHAT], "generates no text"),
    ],
)
def test_errors_have_their_message(
    ask: Ask, path: str, method: str, given: list[Any], sentence: str
) -> None:
    with pytest.raises(HfHubHTTPError, match=sentence):
        ask(path, method, *given)


def test_long_text_is_embedded_unless_the_client_forbids_truncation(ask: Ask) -> None:
    path = f"/models/{EMBEDDER}"
    assert ask(path, "feature_extraction", "word " * 1000).size
    with pytest.raises(HfHubHTTPError, match="tokens"):
        ask(path, "feature_extraction", "word " * 1000, truncate=False)


def test_parameter_out_of_range_is_a_bad_request(ask: Ask) -> None:
    with pytest.raises(BadRequestError, match="top_k"):
        ask(f"/models/{QA_MODEL}", "question_answering", question="a", context="b", top_k=0)


def test_generation_is_rejected_for_encoders(ask: Ask) -> None:
    with pytest.raises(HfHubHTTPError, match="max_new_tokens"):
        ask(f"/models/{EMBEDDER}", "text_generation", "Once upon", max_new_tokens=5)
