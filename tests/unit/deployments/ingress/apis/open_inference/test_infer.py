"""`infer` with request bodies of the Triton client."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient.http import (
    InferenceServerClient,
    InferInput,
    InferRequestedOutput,
    InferResult,
)

from deployments.artifacts.types import TaskName
from deployments.config import AppArgs, ModelSettings
from deployments.errors import EngineFailed, Overloaded, ServeError
from deployments.ingress.apis.open_inference.requests import parse_tensor_request
from deployments.ingress.apis.open_inference.tensors import Tensor
from deployments.messages import Call, CallBatch, CallResult
from deployments.registry import ModelRegistry, RegisteredModel
from deployments.transports.base import Deliver
from tests.support.artifacts import CLASSIFIER, EMBEDDER, WIDTH, seal_tiny
from tests.support.in_process import InProcess

LENGTH = "inference-header-content-length"
ONE_TEXT = {"inputs": [{"name": "args", "shape": [1], "datatype": "BYTES", "data": ["good film"]}]}


def infer_path(model: str) -> str:
    return f"/v2/models/{model}/infer"


def texts(name: str, *values: str, binary: bool = True, column: bool = False) -> InferInput:
    array = np.array([value.encode() for value in values], object)
    array = array.reshape(-1, 1) if column else array
    sent = InferInput(name, list(array.shape), "BYTES")
    return sent.set_data_from_numpy(array, binary_data=binary)


async def infer(
    http: httpx.AsyncClient, model: str, inputs: list[InferInput], **request_options: Any
) -> InferResult:
    """Send a request encoded by the Triton client; decode the response with the Triton client."""
    body, length = InferenceServerClient.generate_request_body(inputs, **request_options)
    headers = {} if length is None else {LENGTH: str(length)}
    response = await http.post(infer_path(model), content=body, headers=headers)
    assert response.status_code == 200, response.text
    json_bytes = response.headers.get(LENGTH)
    return InferenceServerClient.parse_response_body(
        response.content, header_length=None if json_bytes is None else int(json_bytes)
    )


@dataclass
class CannedEncoder:
    """Encoder that returns the same value or failure for every call and records the calls."""

    value: Any
    calls: list[Call] = field(default_factory=list)

    async def infer(self, batch: CallBatch, deliver: Deliver) -> None:
        self.calls += batch.calls
        failed = isinstance(self.value, ServeError)
        for index in range(len(batch.calls)):
            deliver(index, self.value if failed else CallResult(self.value, "cpu-fake"))


@pytest.mark.parametrize("column", [False, True], ids=["n", "n,1"])
@pytest.mark.parametrize("binary", [False, True], ids=["json", "binary"])
@pytest.mark.parametrize("outputs", [None, True, False], ids=["default", "raw", "plain"])
async def test_embeddings_equal_those_of_other_apis(
    outputs: bool | None, binary: bool, column: bool, tiny_store: Path
) -> None:
    outputs_requested = None
    if outputs is not None:
        outputs_requested = [InferRequestedOutput("embedding", binary_data=outputs)]
    async with InProcess(tiny_store).client() as http:
        plain = await http.post(f"/models/{EMBEDDER}", json={"inputs": ["good film", "night 🦦"]})
        sent = texts("text", "good film", "night 🦦", binary=binary, column=column)
        result = await infer(http, EMBEDDER, [sent], outputs=outputs_requested, request_id="r-1")
    rows = result.as_numpy("embedding")
    assert (rows.shape, rows.dtype) == ((2, WIDTH), np.float32)
    np.testing.assert_array_equal(rows, np.array(plain.json(), np.float32))
    parsed = result.get_response()
    assert (parsed["model_name"], parsed["id"]) == (EMBEDDER, "r-1")
    binary_size = parsed["outputs"][0].get("parameters", {}).get("binary_data_size")
    assert binary_size == (None if outputs is False else 2 * WIDTH * 4)


async def test_json_request_returns_json(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await http.post(infer_path(EMBEDDER), content=json.dumps(ONE_TEXT))
        (model,) = [m for m in http_models(await http.get("/models")) if m["id"] == EMBEDDER]
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert LENGTH not in response.headers
    parsed = response.json()
    assert "id" not in parsed
    assert parsed["model_version"] == model["version"]
    (output,) = parsed["outputs"]
    assert (output["shape"], len(output["data"])) == ([1, WIDTH], WIDTH)


def http_models(response: httpx.Response) -> list[dict[str, Any]]:
    models: list[dict[str, Any]] = response.json()["data"]
    return models


async def test_labels_and_scores_are_sorted_rows(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        plain = (await http.post(f"/models/{CLASSIFIER}", json={"inputs": ["good", "bad"]})).json()
        result = await infer(http, CLASSIFIER, [texts("text", "good", "bad")])
        mixed = await infer(
            http,
            CLASSIFIER,
            [texts("text", "good", "bad")],
            outputs=[
                InferRequestedOutput("score", binary_data=True),
                InferRequestedOutput("label", binary_data=False),
            ],
        )
    labels = [[one["label"] for one in row] for row in plain]
    scores = np.array([[one["score"] for one in row] for row in plain], np.float32)
    assert [[one.decode() for one in row] for row in result.as_numpy("label")] == labels
    np.testing.assert_array_equal(result.as_numpy("score"), scores)
    assert mixed.as_numpy("label").tolist() == labels, "labels in JSON are strings, not bytes"
    np.testing.assert_array_equal(mixed.as_numpy("score"), scores)
    assert [one["name"] for one in mixed.get_response()["outputs"]] == ["score", "label"]


async def test_only_requested_outputs_are_returned(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        result = await infer(
            http, CLASSIFIER, [texts("text", "good")], outputs=[InferRequestedOutput("score")]
        )
    assert [one["name"] for one in result.get_response()["outputs"]] == ["score"]


async def test_text_pair_is_classified_together(tiny_store: Path) -> None:
    body = {"inputs": [{"text": "good", "text_pair": "night"}]}
    async with InProcess(tiny_store).client() as http:
        plain = (await http.post(f"/models/{CLASSIFIER}", json=body)).json()
        result = await infer(http, CLASSIFIER, [texts("text", "good"), texts("text_pair", "night")])
    scores = [one["score"] for one in plain[0]]
    assert result.as_numpy("score")[0].tolist() == pytest.approx(scores)


async def test_request_parameters_reach_the_task(tiny_store: Path) -> None:
    mine = {"dimensions": 3, "use_cache": False, "use_gpu": False, "content_type": "str"}
    async with InProcess(tiny_store).client() as http:
        result = await infer(
            http,
            EMBEDDER,
            [texts("text", "good film")],
            parameters=mine,
            priority=3,
            timeout=10_000_000,
            sequence_id=7,
            sequence_start=True,
        )
        as_tensor = InferInput("dimensions", [1], "INT64")
        as_tensor.set_data_from_numpy(np.array([3], np.int64))
        same = await infer(http, EMBEDDER, [as_tensor, texts("text", "good film")])
    assert result.as_numpy("embedding").shape == (1, 3)
    np.testing.assert_array_equal(same.as_numpy("embedding"), result.as_numpy("embedding"))


async def test_other_results_are_rows_of_json(tiny_store: Path) -> None:
    sentences = ["good film", "train", "night"]
    async with InProcess(tiny_store).client() as http:
        body = {"inputs": {"source_sentence": "good", "sentences": sentences}}
        cosines = (await http.post(f"/models/{EMBEDDER}", json=body)).json()
        similar = await infer(
            http, EMBEDDER, [texts("source_sentence", "good"), texts("sentences", *sentences)]
        )
        ranked = await infer(http, EMBEDDER, [texts("query", "good"), texts("texts", *sentences)])
    output = similar.get_output("output")
    assert (output["shape"], output["parameters"]["content_type"]) == ([3, 1], "hg_jsonlist")
    assert [json.loads(row[0]) for row in similar.as_numpy("output")] == cosines
    ranking = [json.loads(row[0]) for row in ranked.as_numpy("output")]
    assert [row["index"] for row in ranking] == np.argsort(-np.array(cosines)).tolist()


async def test_candidate_labels_may_be_json_or_a_tensor(tmp_path: Path) -> None:
    seal_tiny(tmp_path, "tiny/nli", labels=("contradiction", "neutral", "entailment"))
    async with InProcess(tmp_path, models=("tiny/nli",)).client() as http:
        body = {"inputs": "good", "parameters": {"candidate_labels": ["food", "city", "river"]}}
        plain = (await http.post("/models/tiny/nli", json=body)).json()
        by_tensor = await infer(
            http, "tiny/nli", [texts("text", "good"), texts("candidate_labels", *LABELS)]
        )
        for labels in (json.dumps(LABELS), ",".join(LABELS)):
            request_options = {"candidate_labels": labels}
            result = await infer(
                http, "tiny/nli", [texts("text", "good")], parameters=request_options
            )
            assert result.as_numpy("label").tolist() == by_tensor.as_numpy("label").tolist()
    assert [one.decode() for one in by_tensor.as_numpy("label")[0]] == [p["label"] for p in plain]
    scores = [one["score"] for one in plain]
    assert by_tensor.as_numpy("score")[0].tolist() == pytest.approx(scores)


LABELS = ["food", "city", "river"]


async def test_questions_form_one_call_and_return_rows(tmp_path: Path) -> None:
    seal_tiny(tmp_path, "tiny/reader", tasks=(TaskName.QUESTION_ANSWERING,))
    answers = [{"score": 0.5, "start": i, "end": i + 1, "answer": "ż"} for i in range(2)]
    encoder = CannedEncoder(answers)
    async with InProcess(tmp_path, models=("tiny/reader",), encoder=encoder).client() as http:
        result = await infer(
            http, "tiny/reader", [texts("question", "who", "what"), texts("context", "the train")]
        )
    assert [json.loads(row[0]) for row in result.as_numpy("output")] == answers
    (call,) = encoder.calls
    assert call.texts == (("who", "the train"), ("what", "the train"))


async def test_parameter_task_selects_the_task(tiny_store: Path) -> None:
    request_options = {"task": "feature-extraction"}
    async with InProcess(tiny_store).client() as http:
        result = await infer(http, EMBEDDER, [texts("text", "good")], parameters=request_options)
        assert result.as_numpy("embedding").shape == (1, WIDTH)
        for task, path in (("text-ranking", "query"), ("feature-extraction", "query")):
            body, length = InferenceServerClient.generate_request_body(
                [texts("text", "a"), texts("query", "b")], parameters={"task": task}
            )
            response = await http.post(
                infer_path(EMBEDDER), content=body, headers={LENGTH: str(length)}
            )
            assert response.status_code == 400
            assert f"`{path}`" in response.json()["error"] or "`texts`" in response.json()["error"]


async def test_header_length_of_a_compressed_body_is_that_of_the_inflated_one(
    tiny_store: Path,
) -> None:
    body, length = InferenceServerClient.generate_request_body([texts("text", "good")])
    headers = {LENGTH: str(length), "content-encoding": "gzip"}
    async with InProcess(tiny_store).client() as http:
        response = await http.post(
            infer_path(EMBEDDER), content=gzip.compress(body), headers=headers
        )
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("failure", "status", "retry"),
    [(Overloaded("full"), 429, "1"), (EngineFailed("gave up"), 500, None)],
)
async def test_encoder_failures_keep_their_status(
    failure: ServeError, status: int, retry: str | None, tiny_store: Path
) -> None:
    async with InProcess(tiny_store, encoder=CannedEncoder(failure)).client() as http:
        response = await http.post(infer_path(EMBEDDER), json=ONE_TEXT)
    assert (response.status_code, response.headers.get("retry-after")) == (status, retry)
    assert response.json()["error"] == failure.message


def find_model(store: Path, model_id: str) -> RegisteredModel:
    args = AppArgs(store=store, models=(ModelSettings(id=model_id),), encoders={})
    return ModelRegistry.of(args).find(model_id)


def test_tensors_of_parameters_do_not_change_the_requested_name(tiny_store: Path) -> None:
    model = find_model(tiny_store, CLASSIFIER)
    tensors = {
        "text": Tensor("text", "BYTES", (1,), ["good"]),
        "top_k": Tensor("top_k", "INT64", (1,), np.array([1])),
    }
    name = f"{CLASSIFIER}@stable"
    request = parse_tensor_request(name, model, {}, tensors, {}).inference_request
    assert (request.model_id, request.parameters) == (name, {"top_k": 1})


@pytest.mark.parametrize(
    ("parameters", "deadline_ms", "priority"),
    [
        ({"timeout": 250_000, "priority": 2}, 250.0, "batch"),
        ({"timeout": 0, "priority": 0}, None, "interactive"),
        ({"priority": 1}, None, "interactive"),
        ({"priority": "batch", "deadline_ms": 40}, 40, "batch"),
        ({}, None, None),
    ],
)
def test_timeout_and_priority_of_triton_are_options(
    parameters: dict[str, Any], deadline_ms: float | None, priority: str | None, tiny_store: Path
) -> None:
    model = find_model(tiny_store, EMBEDDER)
    tensors = {"text": Tensor("text", "BYTES", (1,), ["good"])}
    options = parse_tensor_request(
        model.ref.id, model, parameters, tensors, {}
    ).inference_request.options
    assert (options.deadline_ms, options.priority) == (deadline_ms, priority)
