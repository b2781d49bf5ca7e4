"""Routes of text-embeddings-inference: response formats, statuses and error types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.artifacts.types import TaskName
from deployments.config import IngressUserConfig, LimitSettings
from deployments.errors import EngineFailed, Overloaded
from deployments.ingress.apis.text_embeddings.schemas import model_dtype, model_type
from deployments.messages import CallBatch, CallResult, CallTimings
from deployments.transports.base import Deliver
from tests.support.artifacts import (
    CLASSIFIER,
    EMBEDDER,
    WIDTH,
    seal_tiny,
    seal_without_token_vectors,
    tiny_manifest,
    with_tasks,
)
from tests.support.fakes import FailingEncoder
from tests.support.in_process import InProcess

TOO_LONG = "good " * 20  # 22 tokens; the maximum is 16
LIMITS = IngressUserConfig(limits=LimitSettings(items=3, body_bytes=2_000, item_chars=500))


async def ask(store: Path, path: str, body: Any, **options: Any) -> Any:
    async with InProcess(store, **options).client() as http:
        return await http.post(path, json=body)


@pytest.mark.parametrize(("inputs", "rows"), [("good film", 1), (["good film", "night"], 2)])
@pytest.mark.parametrize("path", ["/embed", f"/models/{EMBEDDER}/embed"])
async def test_embed_returns_a_normalized_row_per_text(
    path: str, inputs: Any, rows: int, tiny_store: Path
) -> None:
    response = await ask(tiny_store, path, {"inputs": inputs})
    vectors = np.array(response.json())
    assert vectors.shape == (rows, WIDTH)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-6)


async def test_embed_accepts_top_level_parameters(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        full = (await http.post("/embed", json={"inputs": "good", "normalize": False})).json()
        cut = (await http.post("/embed", json={"inputs": "good", "dimensions": 3})).json()
    (raw,) = np.array(full)
    assert np.linalg.norm(raw) != pytest.approx(1, abs=1e-3)
    np.testing.assert_allclose(cut[0], raw[:3] / np.linalg.norm(raw[:3]), atol=1e-6)


async def test_unknown_keys_are_ignored(tiny_store: Path) -> None:
    body = {"inputs": "good", "encoding_format": "float", "modality": "text", "truncate": None}
    assert (await ask(tiny_store, "/embed", body)).status_code == 200


async def test_long_texts_are_truncated_with_a_warning_header(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        cut = await http.post("/embed", json={"inputs": "night " + TOO_LONG})
        ends = [
            (await http.post("/embed", json={"inputs": "night " + TOO_LONG, **more})).json()
            for more in ({}, {"truncation_direction": "Right"}, {"truncation_direction": "Left"})
        ]
        rejected = await http.post("/embed", json={"inputs": TOO_LONG, "truncate": False})
    assert cut.headers["x-hf-warning"].startswith("input-truncated")
    assert cut.headers["x-compute-tokens"] == "16"
    assert ends[0] == ends[1] != ends[2]
    assert (rejected.status_code, rejected.json()["error_type"]) == (422, "Validation")
    assert "22 tokens" in rejected.json()["error"]


class TimedEncoder:
    """An EncoderClient with fixed timings."""

    async def infer(self, batch: CallBatch, deliver: Deliver) -> None:
        timings = CallTimings(tokenize_s=0.002, queue_s=0.01, forward_s=0.06, tokens=4)
        for index in range(len(batch.calls)):
            deliver(index, CallResult(np.ones((1, WIDTH), np.float32), "cpu-fake", 0, timings))


async def test_time_headers_are_whole_milliseconds(tiny_store: Path) -> None:
    response = await ask(tiny_store, "/embed", {"inputs": "good film"}, encoder=TimedEncoder())
    names = ("compute", "total", "tokenization", "queue", "inference")
    times = [response.headers[f"x-{name}-time"] for name in names]
    assert all(time.isdecimal() for time in times)
    assert times[2:] == ["2", "10", "60"]
    assert response.headers["x-compute-characters"] == "9"
    assert response.headers["x-compute-tokens"] == "4"


async def test_predict_returns_a_flat_list_for_one_text(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await http.post("/predict", json={"inputs": "good film"})
        nested = await http.post(f"/models/{CLASSIFIER}", json={"inputs": "good film"})
    labels = response.json()
    assert [set(one) for one in labels] == [{"label", "score"}] * 3
    assert [labels] == nested.json()
    assert sum(one["score"] for one in labels) == pytest.approx(1, abs=1e-6)


async def test_predict_distinguishes_pairs_and_batches(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        path = f"/models/{CLASSIFIER}/predict"
        pair, single, batch, wrapped = [
            (await http.post(path, json={"inputs": inputs})).json()
            for inputs in (["good", "night"], "good", [["good"], ["good", "night"]], ["good"])
        ]
        as_pair = await http.post(
            f"/models/{CLASSIFIER}", json={"inputs": {"text": "good", "text_pair": "night"}}
        )
    assert [pair] == as_pair.json()
    assert pair != single == wrapped
    assert batch == [single, pair]


@pytest.mark.parametrize("pair", [["good", ""], ["", "night"]])
async def test_one_segment_of_a_pair_may_be_empty(pair: list[str], tiny_store: Path) -> None:
    single = await ask(tiny_store, "/predict", {"inputs": pair})
    batch = await ask(tiny_store, "/predict", {"inputs": [["good"], pair]})
    assert single.json() == batch.json()[1]


@pytest.mark.parametrize(
    ("inputs", "path"),
    [("", "inputs"), (["", ""], "inputs"), ([["a"], [""]], "inputs[1]"), ([["", ""]], "inputs[0]")],
)
async def test_items_without_text_are_rejected_with_their_path(
    inputs: Any, path: str, tiny_store: Path
) -> None:
    response = await ask(tiny_store, "/predict", {"inputs": inputs})
    body = response.json()
    assert (response.status_code, body["error"]) == (400, f"`{path}` is empty")


async def test_raw_scores_are_logits(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        plain = (await http.post("/predict", json={"inputs": "good"})).json()
        raw = (await http.post("/predict", json={"inputs": "good", "raw_scores": True})).json()
    powers = np.exp([one["score"] for one in raw])
    np.testing.assert_allclose(powers / powers.sum(), [one["score"] for one in plain], atol=1e-6)


async def test_similarity_returns_cosines_in_request_order(tiny_store: Path) -> None:
    body = {"inputs": {"source_sentence": "good film", "sentences": ["night", "good film"]}}
    async with InProcess(tiny_store).client() as http:
        bare = await http.post("/similarity", json=body)
        hub = await http.post(f"/models/{EMBEDDER}/similarity", json=body | {"parameters": {}})
        long = body | {"inputs": {"source_sentence": "a", "sentences": [TOO_LONG]}}
        cut = await http.post("/similarity", json=long)
        full = await http.post("/similarity", json=long | {"parameters": {"truncate": False}})
    assert bare.json() == hub.json()
    assert bare.json()[1] == pytest.approx(1, abs=1e-6)
    assert abs(bare.json()[0]) < 0.999
    assert (cut.status_code, full.status_code) == (200, 422)


@pytest.mark.parametrize(
    ("inputs", "tokens"),
    [("good film", [4]), (["good film", "night"], [4, 3]), ([5, 6], [4]), (["a", [5]], [3, 3])],
)
@pytest.mark.parametrize("path", ["/embed_all", f"/models/{EMBEDDER}/embed_all"])
async def test_embed_all_returns_a_vector_per_token(
    path: str, inputs: Any, tokens: list[int], tiny_store: Path
) -> None:
    async with InProcess(tiny_store).client() as http:
        every = await http.post(path, json={"inputs": inputs, "normalize": True})
        pooled = await http.post("/embed", json={"inputs": inputs, "normalize": False})
        again = await http.post(path, json={"inputs": inputs})
    assert [np.shape(text) for text in every.json()] == [(count, WIDTH) for count in tokens]
    means = [np.mean(text, axis=0) for text in every.json()]
    np.testing.assert_allclose(means, pooled.json(), atol=1e-6)
    assert again.headers["x-cache"] == "hit"
    assert again.json() == every.json()


async def test_embed_all_truncates_unless_disabled(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        cut = await http.post("/embed_all", json={"inputs": TOO_LONG})
        full = await http.post("/embed_all", json={"inputs": TOO_LONG, "truncate": False})
    assert np.shape(cut.json()) == (1, 16, WIDTH)
    assert (full.status_code, full.json()["error_type"]) == (422, "Validation")


async def test_embed_all_of_an_older_artifact_asks_for_a_rebuild(tmp_path: Path) -> None:
    seal_without_token_vectors(tmp_path, EMBEDDER)
    async with InProcess(tmp_path, models=(EMBEDDER,)).client() as http:
        response = await http.post("/embed_all", json={"inputs": "good"})
        pooled = await http.post("/embed", json={"inputs": "good"})
    assert (response.status_code, response.json()["error_type"]) == (424, "Backend")
    assert "Build the model again" in response.json()["error"]
    assert pooled.status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/embed", {}, 422, "Validation"),
        ("/embed", {"inputs": None}, 422, "Validation"),
        ("/embed", {"inputs": 7}, 422, "Validation"),
        ("/embed", {"inputs": [1, "a"]}, 422, "Validation"),
        ("/embed", {"inputs": [True]}, 422, "Validation"),
        ("/embed", {"inputs": "a", "normalize": "yes"}, 422, "Validation"),
        ("/embed", {"inputs": "a", "dimensions": 0}, 422, "Validation"),
        ("/embed", {"inputs": "a", "dimensions": 99}, 422, "Validation"),
        ("/embed", {"inputs": "a", "prompt_name": "poem"}, 422, "Validation"),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}, 422, "Validation"),
        ("/embed", {"inputs": ["a"] * 4}, 422, "Validation"),
        ("/embed", {"inputs": []}, 400, "Empty"),
        ("/embed", {"inputs": ""}, 400, "Empty"),
        ("/embed", {"inputs": ["a", ""]}, 400, "Empty"),
        ("/embed", {"inputs": "a", "model": "no/such"}, 404, "Validation"),
        ("/embed", {"inputs": "a", "model": CLASSIFIER}, 424, "Backend"),
        (f"/models/{CLASSIFIER}/embed", {"inputs": "a"}, 424, "Backend"),
        ("/models/no/such/embed", {"inputs": "a"}, 404, "Validation"),
        ("/embed_sparse", {}, 422, "Validation"),
        ("/embed_sparse", {"inputs": []}, 400, "Empty"),
        (f"/models/{EMBEDDER}/embed_sparse", {"inputs": "a", "prompt_name": "q"}, 424, "Backend"),
        ("/predict", {"inputs": ["a", "b", "c"]}, 422, "Validation"),
        ("/predict", {"inputs": [["a", "b", "c"]]}, 422, "Validation"),
        ("/predict", {"inputs": [["a"], "b"]}, 422, "Validation"),
        ("/predict", {"inputs": []}, 400, "Empty"),
        (f"/models/{EMBEDDER}/predict", {"inputs": "a"}, 424, "Backend"),
        ("/similarity", {"inputs": {"sentences": ["a"]}}, 422, "Validation"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "Empty"),
        ("/rerank", {"query": "a"}, 422, "Validation"),
        ("/rerank", {"query": "a", "texts": []}, 400, "Empty"),
    ],
)
async def test_errors_have_tei_statuses_and_title_case_types(
    path: str, body: dict[str, Any], status: int, kind: str, tiny_store: Path
) -> None:
    response = await ask(tiny_store, path, body, settings=LIMITS)
    error = response.json()
    assert (response.status_code, error["error_type"]) == (status, kind)
    assert isinstance(error["error"], str)
    assert "`parameters." not in error["error"], "the client has no `parameters`"


async def test_predict_rejects_three_texts_and_explains_batches(tiny_store: Path) -> None:
    response = await ask(tiny_store, "/predict", {"inputs": ["a", "b", "c"]})
    assert "Send a batch as a list of such lists" in response.json()["error"]


@pytest.mark.parametrize(
    ("content", "status", "kind"),
    [(b"{", 400, "Validation"), (b"[]", 400, "Validation"), (b" " * 2_001, 413, "Validation")],
)
async def test_unreadable_bodies_return_error_objects(
    content: bytes, status: int, kind: str, tiny_store: Path
) -> None:
    async with InProcess(tiny_store, settings=LIMITS).client() as http:
        response = await http.post("/embed", content=content)
    assert (response.status_code, response.json()["error_type"]) == (status, kind)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("full"), 429, "Overloaded"),
        (EngineFailed("the output is not a number"), 424, "Backend"),
    ],
)
async def test_encoder_failures_have_tei_statuses(
    error: Exception, status: int, kind: str, tiny_store: Path
) -> None:
    response = await ask(tiny_store, "/embed", {"inputs": "a"}, encoder=FailingEncoder(error))
    assert (response.status_code, response.json()["error_type"]) == (status, kind)
    assert ("retry-after" in response.headers) == (status == 429)


@pytest.mark.parametrize("path", ["/embed", "/rerank", f"/models/{EMBEDDER}/tokenize"])
async def test_wrong_method_has_the_tei_error_format(path: str, tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await http.put(path)
    assert (response.status_code, response.json()["error_type"]) == (405, "Validation")


async def test_info_describes_the_default_model_and_lists_all(tiny_store: Path) -> None:
    async with InProcess(tiny_store, settings=LIMITS).client() as http:
        info = (await http.get("/info")).json()
    assert info["model_id"] == info["served_model_name"] == EMBEDDER
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (info["model_dtype"], info["max_input_length"]) == ("float32", 16)
    assert info["max_client_batch_size"] == 3
    assert info["auto_truncate"] is True
    assert [model["id"] for model in info["models"]] == [EMBEDDER, CLASSIFIER]


def test_model_types_have_tei_names() -> None:
    classifier = model_type(tiny_manifest(labels=("NO", "YES")))["classifier"]
    assert classifier == {"id2label": {"0": "NO", "1": "YES"}, "label2id": {"NO": 0, "YES": 1}}
    assert set(model_type(tiny_manifest(labels=("SCORE",)))) == {"reranker"}
    last = tiny_manifest().model_copy(update={"pooling": "last"})
    assert model_type(last) == {"embedding": {"pooling": "lasttoken"}}
    sparse = with_tasks(tiny_manifest(), TaskName.SPARSE_EMBEDDINGS)
    assert model_type(sparse) == {"embedding": {"pooling": "splade"}}
    tagger = with_tasks(tiny_manifest(), TaskName.TOKEN_CLASSIFICATION)
    assert model_type(tagger) == {"token-classification": {}}
    assert model_dtype(tagger) == "float32"


async def test_prompt_name_prepends_the_prompt(tmp_path: Path) -> None:
    seal_tiny(tmp_path, EMBEDDER)
    server = InProcess(tmp_path, models=(EMBEDDER,))
    async with server.client() as http:
        manifest = server.pipeline.permitted.find(EMBEDDER).manifest
        manifest.prompts["query"] = "you "
        prompted = await http.post("/embed", json={"inputs": "good", "prompt_name": "query"})
        written = await http.post("/embed", json={"inputs": "you good"})
        tokens = await http.post("/tokenize", json={"inputs": "good", "prompt_name": "query"})
    assert prompted.json() == written.json()
    assert [one["text"] for one in tokens.json()[0]] == ["[CLS]", "you", "good", "[SEP]"]
