"""Methods over gRPC, as the requests that HAProxy makes of them."""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from deployments.errors import build_overloaded
from deployments.grpc_status import GRPC_PATHS, HEALTH_CHECK, INFERENCE_SERVICE, GrpcStatus
from deployments.ingress.apis.open_inference.grpc_messages import PREFIX, find_type, frame_message
from deployments.ingress.apis.open_inference.grpc_routes import GrpcInferenceRoutes
from deployments.request_headers import REFUSAL_HEADER
from tests.support.artifacts import EMBEDDER
from tests.support.fakes import FailingEncoder
from tests.support.in_process import ONE_OF_EACH, InProcess

# A HealthCheckResponse whose `status`, field 1, is SERVING (1) or NOT_SERVING (2).
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"


async def send(
    http: httpx.AsyncClient, method: str, headers: Mapping[str, str] = {}, **fields: Any
) -> httpx.Response:
    body = frame_message(find_type(f"{method}Request")(**fields))
    headers = {"content-type": "application/grpc", "te": "trailers", **headers}
    return await http.post(f"{INFERENCE_SERVICE}{method}", content=body, headers=headers)


def parse(method: str, response: httpx.Response) -> Any:
    assert "grpc-status" not in response.headers, response.headers
    return find_type(f"{method}Response").FromString(response.content[PREFIX.size :])


def tensor(text: str = "a cat") -> dict[str, Any]:
    contents = {"bytes_contents": [text.encode()]}
    return {"name": "text", "datatype": "BYTES", "shape": [1], "contents": contents}


async def test_readiness_is_a_field(tiny_store: Path) -> None:
    async with InProcess(tiny_store, running={}).client() as http:
        assert parse("ServerLive", await send(http, "ServerLive")).live
        assert not parse("ServerReady", await send(http, "ServerReady")).ready
        assert not parse("ModelReady", await send(http, "ModelReady", name=EMBEDDER)).ready


async def test_response_has_the_headers_of_http(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await send(http, "ModelInfer", model_name=EMBEDDER, inputs=[tensor()])
        tensor_ = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a cat"]}
        path = f"/v2/models/{EMBEDDER}/infer"
        over_http = await http.post(path, json={"inputs": [tensor_]})
    assert parse("ModelInfer", response).model_name == EMBEDDER
    assert {*over_http.headers} - {*response.headers} == {"content-length"}
    assert over_http.headers["x-cache"] == "hit", "both share the cache"


@pytest.mark.parametrize(("timeout", "is_late"), [("1n", True), ("500u", True), ("1H", False)])
async def test_deadline_of_the_call_is_that_of_the_request(
    timeout: str, is_late: bool, tiny_store: Path
) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await send(
            http,
            "ModelInfer",
            {"grpc-timeout": timeout},
            model_name=EMBEDDER,
            inputs=[tensor(f"text {timeout}")],
        )
    status = response.headers.get("grpc-status")
    assert status == (str(int(GrpcStatus.DEADLINE_EXCEEDED)) if is_late else None)


async def test_time_limit_in_another_form_is_refused(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        call = partial(send, http, "ModelInfer", model_name=EMBEDDER, inputs=[tensor()])
        response = await call(headers={"grpc-timeout": "soon"})
    assert response.headers["grpc-status"] == str(int(GrpcStatus.INVALID_ARGUMENT))
    assert "`grpc-timeout`" in response.headers["grpc-message"]


def test_routes_are_the_methods_that_haproxy_lets_pass() -> None:
    context: Any = SimpleNamespace(pipeline=None)
    paths = [path for each in GrpcInferenceRoutes(context).operations() for path in each.paths]
    assert paths == list(GRPC_PATHS)


@pytest.mark.parametrize(
    ("service", "running", "expected"),
    [
        pytest.param("", ONE_OF_EACH, SERVING, id="server"),
        pytest.param("inference.GRPCInferenceService", ONE_OF_EACH, SERVING, id="service"),
        pytest.param("", {}, NOT_SERVING, id="starting"),
    ],
)
async def test_health_check_answers_as_the_protocol_of_grpc_says(
    service: str, running: Mapping[str, int], expected: bytes, tiny_store: Path
) -> None:
    async with InProcess(tiny_store, running=running).client() as http:
        response = await http.post(HEALTH_CHECK, content=health_request(service))
    assert "grpc-status" not in response.headers
    assert response.content[PREFIX.size :] == expected


async def test_health_check_of_an_unknown_service_finds_nothing(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await http.post(HEALTH_CHECK, content=health_request("other"))
    assert response.headers["grpc-status"] == str(int(GrpcStatus.NOT_FOUND))
    assert "`other`" in response.headers["grpc-message"]


async def test_watch_is_unimplemented_so_that_clients_do_not_watch(tiny_store: Path) -> None:
    watch = HEALTH_CHECK.replace("Check", "Watch")
    async with InProcess(tiny_store).client() as http:
        response = await http.post(watch, content=health_request(""))
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["grpc-status"] == str(int(GrpcStatus.UNIMPLEMENTED))
    assert HEALTH_CHECK in response.headers["grpc-message"]


def health_request(service: str) -> bytes:
    """Return the frame of a message whose field 1 is `service`, in protobuf's encoding."""
    text = service.encode()
    message = bytes([0x0A, len(text)]) + text if text else b""
    return PREFIX.pack(0, len(message)) + message


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_body_that_sets_its_deadline_is_no_mark_for_others(
    encoding: str, tiny_store: Path
) -> None:
    """HAProxy would refuse calls with later deadlines, whose headers are the same."""
    encoder = FailingEncoder(build_overloaded("full", 1.0))
    raw = find_type("ModelInferRequest")(
        model_name=EMBEDDER,
        inputs=[tensor()],
        parameters={"deadline_ms": {"int64_param": 5_000}},
    ).SerializeToString()
    packed = gzip.compress(raw) if encoding == "gzip" else raw
    headers = {"content-type": "application/grpc", "grpc-encoding": encoding}
    async with InProcess(tiny_store, encoder=encoder).client() as http:
        response = await http.post(
            f"{INFERENCE_SERVICE}ModelInfer",
            content=PREFIX.pack(encoding == "gzip", len(packed)) + packed,
            headers=headers,
        )
    assert response.headers["grpc-status"] == str(int(GrpcStatus.RESOURCE_EXHAUSTED))
    assert REFUSAL_HEADER not in response.headers


async def test_errors_have_no_body(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await send(http, "ModelMetadata", name="no/such")
        other = await http.post(f"{INFERENCE_SERVICE}RepositoryIndex", content=b"\0\0\0\0\0")
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["grpc-status"] == str(int(GrpcStatus.NOT_FOUND))
    assert other.headers["grpc-status"] == str(int(GrpcStatus.UNIMPLEMENTED))


async def test_calls_are_recorded(tiny_store: Path) -> None:
    in_process = InProcess(tiny_store)
    async with in_process.client() as http:
        await send(http, "ModelInfer", model_name=EMBEDDER, inputs=[tensor()])
        await send(http, "ModelInfer", model_name="no/such", inputs=[tensor()])
    assert [each.status for each in in_process.recorder.records] == [200, 404]


def test_server_without_calls_imports_no_protobuf() -> None:
    code = (
        "import sys, deployments.ingress.app as app; "
        "sys.exit('deployments.ingress.apis.open_inference.grpc_messages' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
