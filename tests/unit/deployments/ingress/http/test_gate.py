"""Tests of the API key check of every route, and of refusals in the error format of each API."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from pathlib import Path

import httpx
import pytest

from deployments.builds.queue import BuildQueue
from deployments.config import BuildSettings, CacheSettings, IngressUserConfig
from deployments.grpc_status import HEALTH_CHECK, INFERENCE_SERVICE, STATUS_HEADER, GrpcStatus
from deployments.ingress import builds
from deployments.ingress.apis.playground.routes import ASSETS
from deployments.ingress.http.api import Access
from deployments.keys.key import KeyLimits, Scope
from deployments.keys.limits import KeyMeter
from tests.support.artifacts import EMBEDDER
from tests.support.fakes import FakeClock, HangingEncoder, wait_until
from tests.support.in_process import ONE_OF_EACH, InProcess
from tests.support.keys import add_key, bearer

EMBED = f"/models/{EMBEDDER}"
OWN = {"host": "localhost", "origin": "http://localhost"}  # headers of the page of this server
# Paths that report liveness or describe the API; everything else needs a key.
PUBLIC = {
    "/", "/health", "/healthz", "/ping", "/ready",
    "/v2", "/v2/health/live", "/v2/health/ready",
    "/docs", "/docs/start.js", "/docs/swagger-ui.css", "/docs/swagger-ui-bundle.js",
    "/openapi.json", *(f"/page/{name}" for name in ASSETS),
}  # fmt: skip
PUBLIC_CALLS = {
    HEALTH_CHECK,
    *(INFERENCE_SERVICE + method for method in ("ServerLive", "ServerReady", "ServerMetadata")),
}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def keyed(store: Path, key_file: Path, **options: float) -> InProcess:
    return InProcess(store, settings=IngressUserConfig(key_file=key_file), **options)


def fill(path: str) -> str:
    return re.sub(r"\{(\w+)(?::\w+)?\}", lambda m: EMBEDDER if m[1] == "id" else "1", path)


async def test_every_route_says_which_access_it_needs(tiny_store: Path, key_file: Path) -> None:
    useless = add_key(key_file, scopes=(Scope.GPU,))
    async with keyed(tiny_store, key_file).application() as app:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            for route in app.table.routes:
                (method,) = route.methods - {"HEAD"}
                if route.operation.access is Access.PUBLIC:
                    assert method == ("POST" if route.path in PUBLIC_CALLS else "GET")
                    continue
                without = await http.request(method, fill(route.path))
                assert read_status(without) == 401, route.path
                assert without.headers["www-authenticate"] == "Bearer"
                invalid = await http.request(method, fill(route.path), headers=bearer("-" * 40))
                assert read_status(invalid) == 401, route.path
                lacking = await http.request(method, fill(route.path), headers=bearer(useless))
                assert read_status(lacking) == 403, route.path
    public = {r.path for r in app.table.routes if r.operation.access is Access.PUBLIC}
    assert public == PUBLIC | PUBLIC_CALLS


def read_status(response: httpx.Response) -> int:
    """Return the HTTP status, or the one of the same meaning as the status of gRPC."""
    by_grpc = {GrpcStatus.UNAUTHENTICATED: 401, GrpcStatus.PERMISSION_DENIED: 403}
    grpc_status = int(response.headers.get(STATUS_HEADER, GrpcStatus.OK))
    return by_grpc.get(GrpcStatus(grpc_status), response.status_code)


async def test_public_routes_need_no_key(tiny_store: Path, key_file: Path) -> None:
    add_key(key_file)
    async with keyed(tiny_store, key_file).client() as http:
        for path in sorted(PUBLIC):
            response = await http.get(path)
            assert response.status_code == 200, path
        assert (await http.get("/v1/models")).status_code == 401


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        (None, "localhost:8000", 404),
        ("http://localhost:8000", "localhost:8000", 404),
        ("http://127.0.0.1", "127.0.0.1", 404),
        ("http://[::1]:8000", "[::1]:8000", 404),
        ("https://evil.example", "localhost:8000", 403),
        ("http://localhost:3000", "localhost:8000", 403),
        ("http://evil.example:8000", "evil.example:8000", 403),  # DNS rebinding to this host
        ("null", "localhost:8000", 403),
    ],
)
async def test_web_pages_of_others_cannot_manage_a_server_without_keys(
    origin: str | None, host: str, status: int, tiny_store: Path
) -> None:
    headers = {"host": host} | ({} if origin is None else {"origin": origin})
    async with InProcess(tiny_store).client() as http:
        response = await http.post("/models/no/such/rollback", headers=headers)
        assert response.status_code == status, response.text
        run = await http.post(EMBED, json={"inputs": "a"}, headers=headers)
        assert run.status_code == 200


@pytest.mark.parametrize(
    ("host", "headers", "status"),
    [
        # Browsers send no `origin` when a page reads from its own host.
        ("evil.example:8000", {"accept-language": "en"}, 403),
        ("evil.example:8000", {"accept-language": ""}, 403),  # as a script may set it
        ("127.0.0.1.evil.example", {"accept-language": "en"}, 403),
        ("localhost:8000", {"accept-language": "en"}, 200),
        ("127.0.0.1:8000", {"accept-language": "en"}, 200),
        ("[::1]", {"accept-language": "en"}, 200),
        ("hundredfold-serve-svc:8000", {}, 200),  # Prometheus, curl
        ("hundredfold-serve-svc", {"accept-language": "*", "sec-fetch-mode": "cors"}, 200),  # Node
        # Browsers send `sec-fetch-mode` if a certificate proves the name of the server.
        ("models.example", {"accept-language": "en", "sec-fetch-mode": "cors"}, 200),
    ],
)
async def test_pages_whose_name_leads_here_cannot_read_what_only_operators_may(
    host: str, headers: dict[str, str], status: int, tiny_store: Path
) -> None:
    async with InProcess(tiny_store).client() as http:
        for path in ("/usage", "/metrics", "/models/ps"):
            response = await http.get(path, headers={"host": host, **headers})
            assert response.status_code == status, response.text
        run = await http.post(EMBED, json={"inputs": "a"}, headers={"host": host, **headers})
        assert run.status_code == 200


@pytest.mark.parametrize(("has_key", "status"), [(False, 404), (True, 503)])
async def test_web_pages_of_others_pull_nothing_from_a_server_without_keys(
    has_key: bool, status: int, tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds, "has_compiler", lambda: True)
    headers = {"origin": "http://evil.example"} | (bearer(add_key(key_file)) if has_key else {})
    user_config = IngressUserConfig(
        builds=BuildSettings(allow_pull=True), key_file=key_file if has_key else None
    )
    async with InProcess(tmp_path, settings=user_config).client() as http:
        response = await http.post("/models/evil/model", json={"inputs": "a"}, headers=headers)
        assert response.status_code == status, response.text
        assert len(BuildQueue(tmp_path).pending()) == has_key
        own = await http.post("/models/acme/model", json={"inputs": "a"}, headers=headers | OWN)
        assert own.status_code == 503, "the page of this server may pull"


async def test_without_a_key_file_any_key_passes(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        for headers in ({}, bearer("hf_token"), {"x-api-key": "-"}):
            response = await http.post(EMBED, json={"inputs": "a"}, headers=headers)
            assert response.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer KEY"},
        {"authorization": "bearer KEY"},
        {"x-api-key": "KEY"},
        {"api-key": "KEY"},
        # Hugging Face's client also sends the user's Hugging Face token.
        {"authorization": "Bearer hf_token", "x-api-key": "KEY"},
    ],
)
async def test_key_is_found_in_each_header(
    headers: dict[str, str], tiny_store: Path, key_file: Path
) -> None:
    key = add_key(key_file)
    sent = {name: text.replace("KEY", key) for name, text in headers.items()}
    async with keyed(tiny_store, key_file).client() as http:
        response = await http.post(EMBED, json={"inputs": "a"}, headers=sent)
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("path", "types"),
    [
        (EMBED, ({}, {})),
        ("/embed", ({"error_type": "Unauthorized"}, {"error_type": "Forbidden"})),
        ("/generate", ({"error_type": "unauthorized"}, {"error_type": "forbidden"})),
        ("/v2/models/x/infer", ({}, {})),
    ],
)
async def test_refusals_are_in_the_words_of_the_dialect(
    path: str, types: tuple[dict[str, str], ...], tiny_store: Path, key_file: Path
) -> None:
    lacking = bearer(add_key(key_file, scopes=(Scope.GPU,)))
    async with keyed(tiny_store, key_file).client() as http:
        for headers, status, code, words in (
            ({}, 401, "invalid_api_key", types[0]),
            (lacking, 403, "permission_denied", types[1]),
        ):
            response = await http.post(path, json={}, headers=headers)
            assert response.status_code == status
            body = response.json()
            assert isinstance(body.pop("error"), str)
            assert body == {"code": code, **words}


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/completions", "/v1/chat/completions", "/v1/responses"]
)
async def test_refusals_are_in_the_words_of_openai(
    path: str, tiny_store: Path, key_file: Path
) -> None:
    lacking = bearer(add_key(key_file, scopes=(Scope.GPU,)))
    async with keyed(tiny_store, key_file).client() as http:
        for headers, status, kind, code in (
            ({}, 401, "authentication_error", "invalid_api_key"),
            (lacking, 403, "permission_error", "permission_denied"),
        ):
            response = await http.post(path, json={}, headers=headers)
            assert response.status_code == status
            error = response.json()["error"]
            assert (error["type"], error["code"]) == (kind, code)
            assert response.headers["x-should-retry"] == "false"


async def test_refused_key_is_not_repeated_in_the_answer(tiny_store: Path, key_file: Path) -> None:
    add_key(key_file)
    async with keyed(tiny_store, key_file).client() as http:
        response = await http.post(EMBED, json={}, headers=bearer("hk-12345678-my-secret"))
    assert "12345678" not in response.text


async def test_refusal_reads_no_body(tiny_store: Path, key_file: Path) -> None:
    add_key(key_file)

    async def endless() -> object:
        raise AssertionError("the body was read")
        yield b""

    async with keyed(tiny_store, key_file).client() as http:
        # The transport of httpx reads the content only if the application reads the body.
        response = await http.post(EMBED, content=endless())
    assert response.status_code == 401


async def test_gpu_needs_its_scope(tiny_store: Path, key_file: Path) -> None:
    plain = add_key(key_file, "plain")
    gpu = add_key(key_file, "gpu", scopes=(Scope.INFER, Scope.GPU))
    body = {"inputs": "a", "options": {"require_gpu": True}}
    hint = {"inputs": "a", "options": {"use_gpu": True}}
    async with keyed(tiny_store, key_file, gpus=1.0).client() as http:
        refused = await http.post(EMBED, json=body, headers=bearer(plain))
        assert (refused.status_code, refused.json()["code"]) == (403, "permission_denied")
        hinted = await http.post(EMBED, json=hint, headers=bearer(plain))
        assert hinted.status_code == 200
        assert hinted.headers["x-compute-type"].startswith("cpu")
        allowed = await http.post(EMBED, json=body, headers=bearer(gpu))
        assert allowed.headers["x-compute-type"].startswith("gpu")


@pytest.mark.parametrize(
    ("scope", "statuses"),
    [
        (Scope.INFER, [403, 403, 403, 200]),
        (Scope.METRICS, [200, 200, 403, 403]),
        (Scope.ADMIN, [200, 200, 200, 403]),
    ],
)
async def test_routes_need_their_scope(
    tiny_store: Path, key_file: Path, scope: Scope, statuses: list[int]
) -> None:
    key = add_key(key_file, scopes=(scope,))
    async with keyed(tiny_store, key_file).client() as http:
        answers = [
            await http.get(path, headers=bearer(key))
            for path in ("/metrics", "/usage", "/models/ps", "/v1/models")
        ]
    assert [answer.status_code for answer in answers] == statuses


async def test_limited_key_gets_429_with_headers(
    tiny_store: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = partial(KeyMeter, clock=FakeClock())
    monkeypatch.setattr("deployments.keys.key_ring.KeyMeter", meter)
    limits = KeyLimits(requests_per_minute=20, tokens_per_minute=10_000)
    headers = bearer(add_key(key_file, limits=limits))
    async with keyed(tiny_store, key_file).client() as http:
        http.headers.update(headers)
        for remaining in ("1", "0"):
            allowed = await http.post("/v1/embeddings", json={"input": "a"})
            assert allowed.status_code == 200
            assert allowed.headers["x-ratelimit-limit-requests"] == "20"
            assert allowed.headers["x-ratelimit-remaining-requests"] == remaining
            assert allowed.headers["x-ratelimit-limit-tokens"] == "10000"
        refused = await http.post("/v1/embeddings", json={"input": "a"})
        embed = await http.post("/embed", json={"inputs": "a"})
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert refused.headers["retry-after"] == "3"
    assert 0 < int(refused.headers["retry-after-ms"]) <= 3000
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-limit-tokens"] == "10000", "every answer has all limits"
    assert refused.headers["x-should-retry"] == "true"
    assert (embed.status_code, embed.json()["error_type"]) == (429, "Overloaded")


async def test_limits_are_divided_by_the_ingress_replicas(tiny_store: Path, key_file: Path) -> None:
    headers = bearer(add_key(key_file, limits=KeyLimits(concurrent_requests=4)))
    running = {**ONE_OF_EACH, "Ingress": 2}
    encoder = HangingEncoder()
    server = InProcess(
        tiny_store,
        settings=IngressUserConfig(key_file=key_file, cache=CacheSettings(max_bytes=0)),
        encoder=encoder,
        running=running,
    )
    async with server.client() as http:
        http.headers.update(headers)
        waiting = [asyncio.create_task(http.post(EMBED, json={"inputs": "a"})) for _ in range(2)]
        await wait_until(lambda: encoder.batches == 2)
        refused = await http.post(EMBED, json={"inputs": "a"})
        waiting.pop().cancel()
        await wait_until(lambda: encoder.cancelled == 1)
        waiting.append(asyncio.create_task(http.post(EMBED, json={"inputs": "a"})))
        await wait_until(lambda: encoder.batches == 3)
        for task in waiting:
            task.cancel()
    assert (refused.status_code, refused.json()["code"]) == (429, "rate_limit_exceeded")


async def test_usage_is_recorded_with_the_name_of_the_key(tiny_store: Path, key_file: Path) -> None:
    key = add_key(key_file, limits=KeyLimits(tokens_per_minute=600))
    server = keyed(tiny_store, key_file)
    async with server.client() as http:
        await http.post(EMBED, json={"inputs": "a b c"}, headers=bearer(key))
        after = await http.post(EMBED, json={"inputs": "a"}, headers=bearer(key))
        await http.post(EMBED, json={"inputs": "a"})
    first, _, refused = server.recorder.records
    assert (first.key, refused.key) == ("alice", "")
    assert refused.status == 401
    assert first.compute_s > 0
    used = 60 - int(after.headers["x-ratelimit-remaining-tokens"])
    assert used >= first.timings.tokens > 0
