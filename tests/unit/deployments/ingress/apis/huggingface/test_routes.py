"""Tests of the formats of successful responses on the Hugging Face routes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.artifacts.types import TaskName
from deployments.config import IngressUserConfig, LimitSettings
from tests.support.all_models import QA_MODEL, seal_token_model
from tests.support.artifacts import (
    CLASSIFIER,
    EMBEDDER,
    MAX_TOKENS,
    WIDTH,
    seal_tiny,
    tiny_manifest,
)
from tests.support.in_process import InProcess

EMBED = f"/models/{EMBEDDER}"
CLASSIFY = f"/models/{CLASSIFIER}"
PAIR = {"source_sentence": "good film", "sentences": ["great movie", "good film"]}


async def test_one_text_returns_a_list_of_one_embedding(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await http.post(EMBED, json={"inputs": "good film"})
    assert response.status_code == 200
    rows = np.array(response.json(), dtype=np.float32)
    assert rows.shape == (1, WIDTH)
    assert np.linalg.norm(rows) == pytest.approx(1, abs=1e-6)


async def test_model_path_may_end_in_v1(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        own, alias = [await http.post(EMBED + end, json={"inputs": "a"}) for end in ("", "/v1")]
    assert (alias.status_code, alias.json()) == (200, own.json())


async def test_embeddings_have_the_order_of_the_texts(tiny_store: Path) -> None:
    texts = ["good film", "the river and the city", "night"]
    async with InProcess(tiny_store).client() as http:
        together = (await http.post(EMBED, json={"inputs": texts})).json()
        alone = [(await http.post(EMBED, json={"inputs": text})).json()[0] for text in texts]
    np.testing.assert_allclose(together, alone, atol=1e-6)
    assert not np.allclose(together[0], together[1], atol=0.01), "the model tells texts apart"


async def test_classification_returns_a_sorted_nested_list(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await http.post(CLASSIFY, json={"inputs": "good film"})
    ((first, second, third),) = response.json()
    assert {e["label"] for e in (first, second, third)} == {"NEGATIVE", "NEUTRAL", "POSITIVE"}
    assert first["score"] >= second["score"] >= third["score"]
    assert first["score"] + second["score"] + third["score"] == pytest.approx(1, abs=1e-6)


async def test_parameters_may_be_nested_or_at_the_top_level(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        nested = await http.post(EMBED, json={"inputs": "a", "parameters": {"dimensions": 3}})
        loose = await http.post(EMBED, json={"inputs": "a", "dimensions": 3})
        both = await http.post(
            EMBED, json={"inputs": "a", "dimensions": 5, "parameters": {"dimensions": 3}}
        )
        top = await http.post(CLASSIFY, json={"inputs": ["a", "b"], "parameters": {"top_k": 1}})
    assert np.shape(nested.json()) == (1, 3)
    assert nested.json() == loose.json() == both.json()
    assert [len(entries) for entries in top.json()] == [1, 1]


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": PAIR},
        {"inputs": PAIR, "parameters": {}},
        PAIR,  # huggingface_hub before 0.28
        {"inputs": None, **PAIR},  # huggingface_hub from 0.28 to 0.30
    ],
)
async def test_similarity_is_detected_from_the_inputs(
    body: dict[str, Any], tiny_store: Path
) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await http.post(EMBED, json=body)
    cosines = response.json()
    assert len(cosines) == 2
    assert cosines[1] == pytest.approx(1, abs=1e-6)
    assert cosines[0] < 0.99


@pytest.mark.parametrize(
    "path",
    [
        f"/models/{EMBEDDER}",
        f"/models/{EMBEDDER}/",
        "/models/tiny%2Fembedder",
        f"/models/{EMBEDDER}/pipeline/feature-extraction",
        "/models/tiny%2Fembedder/pipeline/feature-extraction",
        f"/pipeline/feature-extraction/{EMBEDDER}",
        f"/pipeline/feature-extraction/{EMBEDDER}/",
        "/pipeline/feature-extraction/tiny%2Fembedder",
        "/",
    ],
)
async def test_all_forms_of_a_path_find_the_model(path: str, tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await http.post(path, json={"inputs": "good film"})
        plain = await http.post(EMBED, json={"inputs": "good film"})
    assert response.status_code == 200
    assert response.json() == plain.json()


@pytest.mark.parametrize(
    "path", [f"/models/{EMBEDDER}/pipeline/{{}}", f"/pipeline/{{}}/{EMBEDDER}"]
)
async def test_path_task_overrides_detection(path: str, tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        compared = await http.post(path.format("sentence-similarity"), json={"inputs": PAIR})
        embedded = await http.post(path.format("feature-extraction"), json={"inputs": "a"})
    assert np.shape(compared.json()) == (2,)
    assert np.shape(embedded.json()) == (1, WIDTH)


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/octet-stream"])
async def test_content_type_is_ignored(content_type: str | None, tiny_store: Path) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    async with InProcess(tiny_store).client() as http:
        response = await http.post(EMBED, content=b'{"inputs": "good film"}', headers=headers)
        assert response.request.headers.get("content-type") == content_type
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"


async def test_headers_have_compute_type_and_counts(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await http.post(EMBED, json={"inputs": ["good film", "night"]})
    assert response.headers["x-compute-type"] == "cpu-fp32"
    assert response.headers["x-compute-characters"] == "14"
    assert (
        response.headers["x-compute-tokens"] == "7"
    )  # good, film, night and two pairs of [CLS] and [SEP]
    assert response.headers["x-sha"] == tiny_manifest(EMBEDDER).version
    assert 0 < float(response.headers["x-compute-time"]) < 30
    stages = [part.split(";")[0] for part in response.headers["server-timing"].split(", ")]
    assert stages == ["tokenization", "queue", "forward", "total"]


async def test_truncated_text_sets_a_warning_header(tiny_store: Path) -> None:
    texts = ["good " * 20, "night"]
    async with InProcess(tiny_store).client() as http:
        cut = await http.post(EMBED, json={"inputs": texts, "parameters": {"truncate": True}})
        fits = await http.post(EMBED, json={"inputs": ["good " * (MAX_TOKENS - 2), "night"]})
    assert cut.headers["x-hf-warning"] == "input-truncated; 1 of 2 texts cut to 16 tokens"
    assert "x-hf-warning" not in fits.headers
    np.testing.assert_allclose(cut.json(), fits.json(), atol=1e-6)


async def test_warning_names_the_limit_that_cut_a_text(tmp_path: Path) -> None:
    seal_tiny(tmp_path, EMBEDDER)
    seal_token_model(tmp_path, QA_MODEL, TaskName.QUESTION_ANSWERING)
    settings = IngressUserConfig(limits=LimitSettings(item_chars=60))
    server = InProcess(tmp_path, models=(EMBEDDER, QA_MODEL), settings=settings)
    pair = {"question": "good " * 10, "context": "night"}
    async with server.client() as http:
        question = await http.post(f"/models/{QA_MODEL}", json={"inputs": pair})
        text = await http.post(EMBED, json={"inputs": "good" + " " * 60 + "film"})
    assert question.headers["x-hf-warning"] == "input-truncated; 1 of 1 questions cut to 8 tokens"
    assert text.headers["x-hf-warning"] == "input-truncated; 1 of 1 texts cut to 60 characters"


async def test_truncation_direction_selects_the_side(tiny_store: Path) -> None:
    text = "good " * 14 + "night " * 14
    async with InProcess(tiny_store).client() as http:
        kept_sides = {
            side: await http.post(
                EMBED, json={"inputs": text, "truncate": True, "truncation_direction": side}
            )
            for side in ("left", "Right")
        }
        good, night = [
            (await http.post(EMBED, json={"inputs": f"{word} " * 14})).json()
            for word in ("good", "night")
        ]
    np.testing.assert_allclose(kept_sides["left"].json(), night, atol=1e-6)
    np.testing.assert_allclose(kept_sides["Right"].json(), good, atol=1e-6)


@pytest.mark.parametrize(
    ("user_agent", "kind"),
    [
        ("unknown/None; hf_hub/1.1.9; python/3.11.7", dict),
        ("unknown/None; hf_hub/1.2.0; python/3.11.7", list),
        ("curl/8", list),
        ("hf_hub/" + "1" * 5_000 + ".1", list),  # more digits than int() accepts
    ],
)
async def test_zero_shot_response_depends_on_the_client_version(
    user_agent: str, kind: type, tmp_path: Path
) -> None:
    seal_tiny(tmp_path, CLASSIFIER, labels=("entailment", "contradiction"))
    body = {"inputs": "a", "parameters": {"candidate_labels": ["good", "night"]}}
    async with InProcess(tmp_path, models=(CLASSIFIER,)).client() as http:
        response = await http.post(CLASSIFY, json=body, headers={"user-agent": user_agent})
    assert (response.status_code, type(response.json())) == (200, kind)


async def test_zero_shot_response_is_a_list_wherever_the_task_is_named(tmp_path: Path) -> None:
    labels = ("entailment", "contradiction")
    seal_tiny(tmp_path, CLASSIFIER, labels=labels, tasks=(TaskName.ZERO_SHOT_CLASSIFICATION,))
    body = {"inputs": "a", "parameters": {"candidate_labels": ["good", "night"]}}
    async with InProcess(tmp_path, models=(CLASSIFIER,)).client() as http:
        for path in (CLASSIFY, f"{CLASSIFY}/pipeline/zero-shot-classification"):
            response = await http.post(path, json=body)
            assert (response.status_code, type(response.json())) == (200, list), path


async def test_model_of_the_body_is_used_without_a_path_model(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        named = await http.post("/", json={"inputs": "a", "model": CLASSIFIER})
        filler = await http.post("/", json={"inputs": "a", "model": "http://localhost:8000"})
        unknown = await http.post("/", json={"inputs": "a", "model": "no/such"})
    assert "label" in named.json()[0][0]
    assert np.shape(filler.json()) == (1, WIDTH)
    assert (unknown.status_code, unknown.json()["code"]) == (404, "model_not_found")


async def test_redundant_client_keys_are_accepted(tiny_store: Path) -> None:
    body = {"inputs": "a", "stream": False, "model": "somewhere/else", "options": None}
    async with InProcess(tiny_store).client() as http:
        assert (await http.post(EMBED, json=body)).status_code == 200
