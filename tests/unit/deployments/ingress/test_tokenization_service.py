"""Tests of /tokenize, of /decode, and of token ids as inputs of other routes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from deployments.config import IngressUserConfig, LimitSettings
from deployments.errors import EngineFailed
from deployments.ingress.encoder_executor import EncoderExecutor
from deployments.ingress.requests import ResolvedRequest
from deployments.ingress.tokenization_service import TokenizationService
from deployments.messages import CallResult, DecodeRequest, TextTokens, TokenizeRequest
from tests.support.artifacts import CLASSIFIER, EMBEDDER
from tests.support.fakes import TIMEOUT_S, batch_by
from tests.support.in_process import InProcess

TEXT = "Good Café 😀 night"


async def tokens_of(store: Path, body: dict[str, Any]) -> list[list[dict[str, Any]]]:
    async with InProcess(store).client() as http:
        response = await http.post("/tokenize", json=body)
    assert response.status_code == 200
    batches: list[list[dict[str, Any]]] = response.json()
    return batches


async def test_offsets_are_characters_after_accents_and_emoji(tiny_store: Path) -> None:
    (tokens,) = await tokens_of(tiny_store, {"inputs": TEXT})
    first, *inner, last = tokens
    assert (first["text"], first["special"], first["start"], first["stop"]) == (
        "[CLS]", True, None, None,
    )  # fmt: skip
    assert (last["text"], last["special"]) == ("[SEP]", True)
    assert all(TEXT[t["start"] : t["stop"]] == t["text"] and not t["special"] for t in inner)
    assert [t["text"] for t in inner] == ["Good", "C", "a", "f", "é", "😀", "night"]
    assert (inner[-1]["start"], inner[-1]["stop"]) == (12, 17)


async def test_special_tokens_can_be_omitted(tiny_store: Path) -> None:
    first, second = await tokens_of(
        tiny_store, {"inputs": ["good night", "a"], "add_special_tokens": False}
    )
    assert [t["text"] for t in first] == ["good", "night"]
    assert [t["special"] for t in (*first, *second)] == [False] * 3


async def test_texts_above_max_tokens_are_tokenized_whole(tiny_store: Path) -> None:
    (tokens,) = await tokens_of(tiny_store, {"inputs": "good " * 40})
    assert len(tokens) == 42


async def test_decode_returns_the_tokenized_text(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        path = f"/models/{CLASSIFIER}"
        response = await http.post(f"{path}/tokenize", json={"inputs": ["good night", "the film"]})
        ids = [[token["id"] for token in tokens] for tokens in response.json()]
        both = await http.post(f"{path}/decode", json={"ids": ids})
        one = await http.post("/decode", json={"ids": ids[1]})
        full = await http.post("/decode", json={"ids": ids[1], "skip_special_tokens": False})
        null = await http.post("/decode", json={"ids": ids[1], "skip_special_tokens": None})
    assert both.json() == ["good night", "the film"]
    assert one.json() == null.json() == ["the film"]
    assert full.json() == ["[CLS] the film [SEP]"]


@pytest.mark.parametrize(
    ("path", "key", "tokenized"),
    [
        (
            "/v1/embeddings",
            "input",
            lambda response: [one["embedding"] for one in response["data"]],
        ),
        ("/embed", "inputs", lambda response: response),
    ],
)
async def test_token_ids_have_the_embedding_of_their_text(
    path: str, key: str, tokenized: Any, tiny_store: Path
) -> None:
    async with InProcess(tiny_store).client() as http:
        tokens = await http.post("/tokenize", json={"inputs": ["good night", "the film"]})
        first, second = [[token["id"] for token in one] for one in tokens.json()]

        async def vectors(value: Any) -> Any:
            response = await http.post(path, json={key: value})
            assert response.status_code == 200
            return tokenized(response.json())

        expected = await vectors(["good night", "the film"])
        assert await vectors(first) == expected[:1], "a list of numbers is one sequence"
        assert await vectors(first[1:-1]) == expected[:1], "also without special tokens"
        assert await vectors([first, second]) == expected
        assert await vectors([first, "the film"]) == expected


async def test_special_tokens_within_token_ids_are_embedded(tiny_store: Path) -> None:
    text = "good [MASK] night"
    async with InProcess(tiny_store).client() as http:
        (tokens,) = (await http.post("/tokenize", json={"inputs": text})).json()
        ids = [token["id"] for token in tokens]
        of_text = (await http.post("/embed", json={"inputs": text})).json()
        for sequence in (ids, ids[1:], ids[:-1], ids[1:-1]):
            response = await http.post("/embed", json={"inputs": sequence})
            assert response.json() == of_text


async def test_usage_counts_the_tokens_of_the_model_input(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        tokens = (await http.post("/tokenize", json={"inputs": "good night"})).json()[0]
        ids = [token["id"] for token in tokens if not token["special"]]
        response = await http.post("/v1/embeddings", json={"input": [ids, ids]})
    assert response.json()["usage"]["prompt_tokens"] == 8


@pytest.mark.parametrize(
    ("value", "status", "code", "param"),
    [
        ([10**6], 400, "unknown_token", "input"),
        ([[5], [10**6]], 400, "unknown_token", "input"),
        ([-1], 400, "invalid_field", "input[0]"),
        ([5, "a"], 400, "invalid_field", "input[1]"),
        ([5, 1.5], 400, "invalid_field", "input[1]"),
        ([[5], []], 400, "empty_input", "input[1]"),
        ([[5]] * 4, 400, "too_many_items", "input"),
        ([2], 400, "empty_input", "input"),  # only a special token
        ([2, 3], 400, "empty_input", "input"),
    ],
)
async def test_invalid_token_ids_are_named(
    value: Any, status: int, code: str, param: str, tiny_store: Path
) -> None:
    settings = IngressUserConfig(limits=LimitSettings(items=3))
    async with InProcess(tiny_store, settings=settings).client() as http:
        response = await http.post("/v1/embeddings", json={"input": value})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)


async def test_token_ids_without_text_are_named(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await http.post("/v1/embeddings", json={"input": [[5], [2, 3]]})
    assert response.json()["error"]["message"] == "`input[1]` has only special tokens"


async def test_tokenization_requests_are_recorded(tiny_store: Path) -> None:
    server = InProcess(tiny_store)
    async with server.client() as http:
        await http.post("/tokenize", json={"inputs": ["a", "b"]})
        await http.post("/decode", json={"ids": [[5], [10**6]]})
        await http.post("/embed", json={"inputs": [5]})
    known = [(r.model, r.task, r.compute, r.status, r.items) for r in server.recorder.records]
    assert known == [
        (EMBEDDER, "tokenize", "none", 200, 2),
        (EMBEDDER, "decode", "none", 422, 2),
        (EMBEDDER, "feature-extraction", "cpu-fp32", 200, 1),
    ]


class StuckTokenizer:
    """A TokenizerClient whose `tokenize` fails and whose `decode` hangs."""

    async def tokenize(self, request: TokenizeRequest) -> tuple[TextTokens, ...]:
        raise EngineFailed("the replica was lost twice while computing")

    async def decode(self, request: DecodeRequest) -> tuple[str, ...]:
        await asyncio.Event().wait()
        raise AssertionError("bug: an event that is never set was set")


async def test_failing_or_hanging_tokenizer_is_reported(tiny_store: Path) -> None:
    hasty = IngressUserConfig(timeout_s=0.05)
    server = InProcess(tiny_store, settings=hasty, tokenizer=StuckTokenizer())
    async with server.client() as http:
        failed = await http.post("/tokenize", json={"inputs": "a"})
        hanging = await http.post("/decode", json={"ids": [5]})
        embedding = await http.post("/v1/embeddings", json={"input": [5]})
    assert (failed.status_code, failed.json()["error_type"]) == (424, "Backend")
    assert (hanging.status_code, embedding.status_code) == (504, 504)
    assert server.pipeline.admission.items.used == 0


async def test_decoded_token_ids_leave_the_deadline_as_it_is(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines: list[float] = []
    decode, execute = TokenizationService.decode, EncoderExecutor.execute

    async def note_decode(self: TokenizationService, *args: Any, **options: Any) -> tuple[str, ...]:
        deadlines.append(options["deadline_s"])
        return await decode(self, *args, **options)

    async def note_execute(
        self: EncoderExecutor, request: ResolvedRequest
    ) -> tuple[CallResult, bool]:
        deadlines.append(request.deadline_s)
        return await execute(self, request)

    monkeypatch.setattr(TokenizationService, "decode", note_decode)
    monkeypatch.setattr(EncoderExecutor, "execute", note_execute)
    async with InProcess(tiny_store).client() as http:
        assert (await http.post("/v1/embeddings", json={"input": [5]})).status_code == 200
    decoding, computing = deadlines
    assert decoding == computing


async def test_full_item_limit_rejects_tokenization(tiny_store: Path) -> None:
    settings = IngressUserConfig(limits=LimitSettings(items=3, inflight_items=3))
    server = InProcess(tiny_store, settings=settings, batched=batch_by(1))
    async with server.client() as http:
        server.pipeline.admission.items.reserve(1)
        rejected = await http.post("/tokenize", json={"inputs": ["a", "b", "c"]})
        fits = await http.post("/decode", json={"ids": [[5], [6]]})
    assert (rejected.status_code, rejected.json()["error_type"]) == (429, "Overloaded")
    assert fits.status_code == 200


class RecordingTokenizer:
    """A TokenizerClient that records its requests."""

    def __init__(self) -> None:
        self.requests: list[TokenizeRequest | DecodeRequest] = []

    async def tokenize(self, request: TokenizeRequest) -> tuple[TextTokens, ...]:
        self.requests.append(request)
        return ()

    async def decode(self, request: DecodeRequest) -> tuple[str, ...]:
        self.requests.append(request)
        return ("a",) * len(request.sequences)


async def test_requests_name_their_client_and_priority(tiny_store: Path) -> None:
    tokenizer = RecordingTokenizer()
    headers = {"x-forwarded-for": "10.0.0.1", "x-priority": "batch"}
    async with InProcess(tiny_store, tokenizer=tokenizer).client() as http:
        await http.post("/tokenize", json={"inputs": "a"}, headers=headers)
        await http.post("/decode", json={"ids": [5]}, headers=headers)
        await http.post("/embed", json={"inputs": [5]}, headers=headers)
    assert [request.client for request in tokenizer.requests] == ["10.0.0.1"] * 3
    assert [request.priority for request in tokenizer.requests] == [1] * 3


@pytest.mark.parametrize("path", ["/tokenize", "/decode", f"/models/{EMBEDDER}/tokenize"])
@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        ("x-request-timeout-ms", "a positive number of milliseconds"),
        ("x-priority", "one of `interactive`, `batch`"),
        ("x-hardware", "one of `cpu`, `gpu`"),
        ("x-use-gpu", "`true` or `false`, `required`"),
    ],
)
async def test_invalid_option_header_has_the_error_of_inference(
    path: str, header: str, allowed: str, tiny_store: Path
) -> None:
    body = {"inputs": "a", "ids": [5]}
    async with InProcess(tiny_store).client() as http:
        rejected = await http.post(path, json=body, headers={header: "soon"})
        reference = await http.post("/embed", json={"inputs": "a"}, headers={header: "soon"})
    assert rejected.json()["error"] == f"header `{header}` must be {allowed}"
    assert rejected.json() == reference.json()
    assert rejected.status_code == reference.status_code == 422


async def test_tokenization_keeps_the_timeout_of_its_request(tiny_store: Path) -> None:
    server = InProcess(tiny_store, tokenizer=StuckTokenizer())
    async with server.client() as http, asyncio.timeout(TIMEOUT_S):
        by_header = await http.post(
            "/decode", json={"ids": [5]}, headers={"x-request-timeout-ms": "50"}
        )
        by_client = await http.post(
            "/decode", json={"ids": [5]}, headers={"x-stainless-timeout": "0.05"}
        )
    for response in (by_header, by_client):
        assert response.status_code == 504
        assert response.json()["error"] == "the tokenizer exceeded the deadline of the request"


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"inputs": ["a", "b"]}), ("/decode", {"ids": [[5], [6]]})]
)
async def test_one_client_may_tokenize_half_of_the_items(
    tiny_store: Path, path: str, body: dict[str, Any]
) -> None:
    settings = IngressUserConfig(limits=LimitSettings(items=4, inflight_items=4))
    server = InProcess(tiny_store, settings=settings)
    async with server.client() as http:
        server.pipeline.admission.items.reserve(1, "10.0.0.1")
        statuses = [
            (await http.post(path, json=body, headers={"x-forwarded-for": address})).status_code
            for address in ("10.0.0.1", "10.0.0.2")
        ]
    assert statuses == [429, 200]
