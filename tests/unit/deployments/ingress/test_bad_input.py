"""Invalid input of the Hugging Face routes: status, code and field of the error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from deployments.config import IngressUserConfig, LimitSettings
from tests.support.artifacts import CLASSIFIER, EMBEDDER, GRAPH_NAME, seal_tiny
from tests.support.fakes import batch_by
from tests.support.in_process import InProcess

EMBED = f"/models/{EMBEDDER}"
CLASSIFY = f"/models/{CLASSIFIER}"
COMPARE = f"/pipeline/sentence-similarity/{EMBEDDER}"
TOO_LONG = "good " * 20  # 22 tokens; the maximum is 16

WHOLE = {"parameters": {"truncate": False}}

LIMITS = IngressUserConfig(limits=LimitSettings(items=4, body_bytes=2_000, item_chars=500))


def is_refused(response: Any, status: int, code: str, named: str | None) -> None:
    """Assert that the response is an error in the format of Hugging Face's hosted API."""
    body = response.json()
    assert (response.status_code, body["code"], body.get("field")) == (status, code, named)
    message = body["error"] if isinstance(body["error"], str) else "".join(body["error"])
    assert message
    assert int(response.headers["content-length"]) == len(response.content)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"inputs=a",
        b'{"inputs": NaN}',
        b'{"inputs": "\xff\xfe"}',
        b'{"inputs": "\\ud800"}',  # lone surrogate
        b"\xef\xbb\xbf{}",
        b"[" * 1_900,
        b"null",
        b"7",
    ],
)
async def test_body_without_strict_json_object_is_malformed(
    content: bytes, tiny_store: Path
) -> None:
    async with InProcess(tiny_store, settings=LIMITS).client() as http:
        is_refused(await http.post(EMBED, content=content), 400, "malformed_body", "body")


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "named"),
    [
        (EMBED, {}, 400, "invalid_field", "inputs"),
        (EMBED, {"inputs": None}, 400, "invalid_field", "inputs"),
        (EMBED, {"parameters": {}}, 400, "invalid_field", "inputs"),
        (EMBED, {"inputs": 7}, 400, "invalid_field", "inputs"),
        (EMBED, {"inputs": {"text": "a"}}, 400, "invalid_field", "inputs"),
        (EMBED, {"inputs": ["a", 7]}, 400, "invalid_field", "inputs[1]"),
        (EMBED, {"inputs": ["a", ["b"]]}, 400, "invalid_field", "inputs[1]"),
        (EMBED, {"inputs": ""}, 400, "empty_input", "inputs"),
        (EMBED, {"inputs": []}, 400, "empty_input", "inputs"),
        (EMBED, {"inputs": ["a", ""]}, 400, "empty_input", "inputs[1]"),
        (EMBED, {"sentences": ["a"]}, 400, "invalid_field", "inputs.source_sentence"),
        (COMPARE, {"inputs": "a"}, 400, "invalid_field", "inputs"),
        (EMBED, {"inputs": "a", "parameters": []}, 400, "invalid_field", "parameters"),
        (EMBED, {"inputs": "a", "options": "fast"}, 400, "invalid_field", "options"),
        (
            EMBED,
            {"inputs": "a", "parameters": {"dimensions": 99}},
            400,
            "invalid_field",
            "parameters.dimensions",
        ),
        (
            EMBED,
            {"inputs": "a", "parameters": {"truncate": "yes"}},
            400,
            "invalid_field",
            "parameters.truncate",
        ),
        (
            EMBED,
            {"inputs": "a", "options": {"use_cache": "no"}},
            400,
            "invalid_field",
            "options.use_cache",
        ),
        (
            EMBED,
            {"inputs": "a", "options": {"hardware": "tpu"}},
            400,
            "invalid_field",
            "options.hardware",
        ),
        ("/models/no/such", {"inputs": "a"}, 404, "model_not_found", "model"),
        ("/models/no/such", {"inputs": ""}, 404, "model_not_found", "model"),
        ("/pipeline/text-classification/no/such", {"inputs": "a"}, 404, "model_not_found", "model"),
        (f"/pipeline/text-classification/{EMBEDDER}", {"inputs": "a"}, 400, "wrong_task", "model"),
        (f"{CLASSIFY}/pipeline/feature-extraction", {"inputs": "a"}, 400, "wrong_task", "model"),
        (f"/pipeline/poetry/{EMBEDDER}", {"inputs": "a"}, 400, "invalid_field", "task"),
        (f"{EMBED}/pipeline/poetry", {"inputs": "a"}, 400, "invalid_field", "task"),
        (EMBED, {"inputs": ["a"] * 5}, 422, "too_many_items", "inputs"),
        (
            COMPARE,
            {"inputs": {"source_sentence": "a", "sentences": ["b"] * 5}},
            422,
            "too_many_items",
            "inputs.sentences",
        ),
        (EMBED, {"inputs": TOO_LONG, **WHOLE}, 422, "input_too_long", "inputs"),
        (EMBED, {"inputs": ["a", TOO_LONG], **WHOLE}, 422, "input_too_long", "inputs[1]"),
        (
            EMBED,
            {"inputs": {"source_sentence": "a", "sentences": ["b", TOO_LONG]}, **WHOLE},
            422,
            "input_too_long",
            "inputs.sentences[1]",
        ),
        (EMBED, {"inputs": "x" * 501, **WHOLE}, 422, "input_too_long", "inputs"),
        (
            EMBED,
            {"inputs": "a", "parameters": {"top_k": 1}},
            422,
            "unknown_parameter",
            "parameters.top_k",
        ),
        (
            CLASSIFY,
            {"inputs": "a", "parameters": {"topk": 1}},
            422,
            "unknown_parameter",
            "parameters.topk",
        ),
        (EMBED, {"inputs": "a", "top": 1}, 422, "unknown_parameter", "top"),
        (
            EMBED,
            {"inputs": "a", "options": {"gpu": True}},
            422,
            "unknown_parameter",
            "options.gpu",
        ),
    ],
)
async def test_bad_input_names_the_field(
    path: str, body: dict[str, Any], status: int, code: str, named: str, tiny_store: Path
) -> None:
    async with InProcess(tiny_store, settings=LIMITS).client() as http:
        is_refused(await http.post(path, json=body), status, code, named)


async def test_wrong_task_error_lists_the_supported_tasks(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await http.post(
            f"/pipeline/text-classification/{EMBEDDER}", json={"inputs": "a"}
        )
    assert "`feature-extraction`, `sentence-similarity`" in response.json()["error"]


@pytest.mark.parametrize(
    ("body", "numbers"),
    [
        ({"inputs": TOO_LONG, **WHOLE}, ("22 tokens", "16")),
        ({"inputs": "x" * 501, **WHOLE}, ("501 characters", "500")),
        ({"inputs": ["a"] * 5}, ("5 items", "4")),
    ],
)
async def test_exceeded_limits_report_value_and_limit(
    body: dict[str, Any], numbers: tuple[str, str], tiny_store: Path
) -> None:
    async with InProcess(tiny_store, settings=LIMITS).client() as http:
        message = (await http.post(EMBED, json=body)).json()["error"]
    assert all(number in message for number in numbers)


@pytest.mark.parametrize("parameters", [{}, {"truncate": None}, {"truncate": True}])
@pytest.mark.parametrize(
    "inputs",
    ["x" * 501, TOO_LONG, {"source_sentence": "a", "sentences": [TOO_LONG]}],
    ids=["characters", "tokens", "similarity"],
)
async def test_vector_tasks_truncate_by_default_and_say_so(
    inputs: Any, parameters: dict[str, Any], tiny_store: Path
) -> None:
    body = {"inputs": inputs, "parameters": parameters}
    async with InProcess(tiny_store, settings=LIMITS).client() as http:
        response = await http.post(EMBED, json=body)
    assert response.status_code == 200
    assert response.headers["x-hf-warning"].startswith("input-truncated")


async def test_too_many_pairs_of_texts_and_labels_name_both_lists(tmp_path: Path) -> None:
    seal_tiny(tmp_path, CLASSIFIER, labels=("contradiction", "entailment"))
    body = {"inputs": ["a", "b", "c"], "parameters": {"candidate_labels": ["x", "y"]}}
    async with InProcess(tmp_path, models=(CLASSIFIER,), settings=LIMITS).client() as http:
        response = await http.post(CLASSIFY, json=body)
        single = await http.post(
            CLASSIFY, json={"inputs": "a", "parameters": {"candidate_labels": list("vwxyz")}}
        )
    is_refused(response, 422, "too_many_items", "inputs")
    assert "`inputs` and `parameters.candidate_labels` make 6 pairs" in response.json()["error"]
    is_refused(single, 422, "too_many_items", "parameters.candidate_labels")


async def in_chunks(body: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize(("size", "status"), [(2_000, 200), (2_001, 413)])
async def test_body_above_the_limit_is_rejected_with_and_without_content_length(
    declared: bool, size: int, status: int, tiny_store: Path
) -> None:
    body = json.dumps({"inputs": "night"}).ljust(size).encode()
    content = body if declared else in_chunks(body, 300)
    async with InProcess(tiny_store, settings=LIMITS).client() as http:
        response = await http.post(EMBED, content=content)
        assert ("content-length" in response.request.headers) is declared
    if status == 200:
        assert response.status_code == 200
    else:
        is_refused(response, 413, "body_too_large", "body")
        assert "2000" in response.json()["error"]


async def test_content_length_above_the_limit_is_rejected_before_reading(tiny_store: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    async with InProcess(tiny_store, settings=LIMITS).client() as http:
        response = await http.post(EMBED, content=endless(), headers={"content-length": "2001"})
    is_refused(response, 413, "body_too_large", "body")


async def test_damaged_artifact_is_rejected_and_others_serve(tmp_path: Path) -> None:
    (seal_tiny(tmp_path, EMBEDDER) / GRAPH_NAME).write_bytes(b"")
    seal_tiny(tmp_path, CLASSIFIER, labels=("NO", "YES"))
    async with InProcess(tmp_path).client() as http:
        response = await http.post(EMBED, json={"inputs": "a"})
        served = await http.post(CLASSIFY, json={"inputs": "a"})
        listed = {m["id"]: m["state"] for m in (await http.get("/models")).json()["data"]}
    is_refused(response, 503, "digest_mismatch", None)
    assert served.status_code == 200
    assert listed == {EMBEDDER: "refused", CLASSIFIER: "ready"}


@pytest.mark.parametrize(
    ("bad", "status", "code"),
    [(TOO_LONG, 422, "input_too_long"), ("an awful night", 500, "engine_failed")],
)
async def test_failed_call_does_not_fail_others_of_its_batch(
    bad: str, status: int, code: str, tmp_path: Path
) -> None:
    seal_tiny(tmp_path, EMBEDDER, nan_word="awful")
    together = InProcess(tmp_path, models=(EMBEDDER,), batched=batch_by(2))
    async with together.client() as http:
        good, failed = await asyncio.gather(
            http.post(EMBED, json={"inputs": "good film"}),
            http.post(EMBED, json={"inputs": bad, **WHOLE}),
        )
    assert good.status_code == 200
    assert (failed.status_code, failed.json()["code"]) == (status, code)
