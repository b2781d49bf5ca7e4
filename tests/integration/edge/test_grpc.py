"""Calls of gRPC clients, through HAProxy, to the application behind its HTTP server."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import orjson
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from cluster.edge.certificate import CertificateFiles
from cluster.edge.haproxy_config import ClientLimits
from cluster.edge.supervisor import EdgeSettings
from deployments.config import IngressUserConfig, LimitSettings
from deployments.errors import ServeError, build_overloaded
from deployments.grpc_status import (
    HEALTH_CALLS,
    HEALTH_CHECK,
    HEALTH_PACKAGE,
    INFERENCE_SERVICE,
)
from deployments.ingress.apis.open_inference.grpc_messages import find_type
from deployments.messages import CallBatch
from deployments.transports.base import Deliver
from tests.support.artifacts import CLASSIFIER, EMBEDDER, WIDTH
from tests.support.certificates import create_certificate
from tests.support.edge_harness import EdgeHarness, run_harness
from tests.support.http_server import HttpServer, serve_http
from tests.support.in_process import InProcess
from tests.support.keys import add_key
from tests.support.waiting import wait_for

INFER = "ModelInfer"
HEALTH = "/v2/health/live"


@dataclass
class ScriptedEncoder:
    """Encoder that refuses all calls with `error`, or runs until they are cancelled."""

    error: ServeError | None = None
    calls: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)

    async def infer(self, batch: CallBatch, deliver: Deliver) -> None:
        self.calls += len(batch.calls)
        if self.error is None:
            try:
                await asyncio.sleep(60)
            finally:
                self.cancelled.set()
        for index in range(len(batch.calls)):
            deliver(index, self.error)


@dataclass(frozen=True)
class GrpcServer:
    """The edge, and the server behind it."""

    edge: EdgeHarness
    server: HttpServer

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.edge.grpc_port}"

    @contextmanager
    def triton(self) -> Iterator[InferenceServerClient]:
        with InferenceServerClient(self.address) as client:
            yield client

    def call(self, method: str, request: bytes = b"", **options: Any) -> bytes:
        """Call a method with a serialized message."""
        with grpc.insecure_channel(self.address) as channel:
            return call(channel, method, request, **options)


def call(channel: grpc.Channel, method: str, request: bytes = b"", **options: Any) -> bytes:
    path = f"{INFERENCE_SERVICE}{method}"
    result: bytes = channel.unary_unary(path)(request, timeout=20, **options)
    return result


@contextmanager
def run_server(in_process: InProcess, settings: EdgeSettings | None = None) -> Iterator[GrpcServer]:
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="edge-"))
        edge = stack.enter_context(run_harness(Path(name), settings))
        server = stack.enter_context(serve_http(in_process))
        edge.start_manager()
        edge.route(server.port, health_path=HEALTH)
        yield GrpcServer(edge, server)


@pytest.fixture(scope="module")
def grpc_server(tiny_store: Path) -> Iterator[GrpcServer]:
    limits = LimitSettings(body_bytes=100_000)
    with run_server(InProcess(tiny_store, settings=IngressUserConfig(limits=limits))) as server:
        yield server


def texts(*values: str, name: str = "text") -> InferInput:
    sent = InferInput(name, [len(values)], "BYTES")
    return sent.set_data_from_numpy(np.array([value.encode() for value in values], object))


def infer_request(*values: str, model: str = EMBEDDER, **parameters: int) -> Any:
    request = find_type("ModelInferRequest")(model_name=model)
    tensor = request.inputs.add(name="text", datatype="BYTES", shape=[len(values)])
    tensor.contents.bytes_contents.extend(value.encode() for value in values)
    for name, value in parameters.items():
        request.parameters[name].int64_param = value
    return request


def failure(server: GrpcServer, request: bytes, **options: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as raised:
        server.call(INFER, request, **options)
    return raised.value


def test_triton_client_reads_server_and_model(grpc_server: GrpcServer) -> None:
    with grpc_server.triton() as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready(EMBEDDER)
        assert client.get_server_metadata().name == "hundredfold"
        described = client.get_model_metadata(EMBEDDER)
    over_http = httpx.get(f"{grpc_server.edge.url}/v2/models/{EMBEDDER}").json()
    assert list(described.versions) == over_http["versions"]
    (output,) = described.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("embedding", "FP32", [-1, -1])


def test_triton_client_gets_the_tensors_of_http(grpc_server: GrpcServer) -> None:
    with grpc_server.triton() as client:
        result = client.infer(EMBEDDER, [texts("a cat", "a kitten")], request_id="42")
        version = result.get_response().model_version
        same = client.infer(EMBEDDER, [texts("a cat")], model_version=version)
    tensor = {"name": "text", "shape": [2], "datatype": "BYTES", "data": ["a cat", "a kitten"]}
    url = f"{grpc_server.edge.url}/v2/models/{EMBEDDER}/infer"
    over_http = httpx.post(url, json={"inputs": [tensor]}).json()
    vectors = np.array(over_http["outputs"][0]["data"], np.float32).reshape(2, WIDTH)
    assert result.get_response().id == "42"
    assert np.array_equal(result.as_numpy("embedding"), vectors)
    assert np.allclose(same.as_numpy("embedding"), vectors[:1], atol=1e-6)


def test_texts_and_compressed_messages_are_answered(grpc_server: GrpcServer) -> None:
    outputs = [InferRequestedOutput("label"), InferRequestedOutput("score")]
    with grpc_server.triton() as client:
        result = client.infer(
            CLASSIFIER,
            [texts("good film")],
            outputs=outputs,
            parameters={"top_k": 1},
            compression_algorithm="gzip",
        )
    assert result.as_numpy("label").shape == result.as_numpy("score").shape == (1, 1)
    assert isinstance(result.as_numpy("label")[0, 0], bytes)


def test_large_answers_arrive_whole(grpc_server: GrpcServer) -> None:
    values = [f"text {number}" for number in range(1_000)]
    with grpc_server.triton() as client:
        result = client.infer(EMBEDDER, [texts(*values)])
    assert result.as_numpy("embedding").shape == (1_000, WIDTH)


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        (infer_request("x", model="no/such"), grpc.StatusCode.NOT_FOUND, "no/such"),
        (infer_request("x", tok_k=1), grpc.StatusCode.INVALID_ARGUMENT, "tok_k"),
        (infer_request("é" * 60_000), grpc.StatusCode.RESOURCE_EXHAUSTED, "100000 bytes"),
    ],
    ids=["model", "parameter", "size"],
)
def test_errors_have_the_codes_of_grpc(
    request_: Any, code: grpc.StatusCode, message: str, grpc_server: GrpcServer
) -> None:
    error = failure(grpc_server, request_.SerializeToString())
    assert error.code() is code
    assert message in error.details()


def test_unknown_methods_are_unimplemented(grpc_server: GrpcServer) -> None:
    with grpc_server.triton() as client, pytest.raises(InferenceServerException) as raised:
        client.get_model_config(EMBEDDER)
    assert raised.value.status() == "StatusCode.UNIMPLEMENTED"
    with grpc.insecure_channel(grpc_server.address) as channel:
        other = channel.unary_unary("/metrics")
        with pytest.raises(grpc.RpcError) as refused:
            other(b"", timeout=20)
        stream = channel.stream_stream(f"{INFERENCE_SERVICE}ModelStreamInfer")
        never = threading.Event()
        with pytest.raises(grpc.RpcError) as unknown:
            next(stream(iter(never.wait, True), timeout=20))
        never.set()
    assert refused.value.code() is unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "this port serves only ServerLive, " in refused.value.details()


def test_probes_check_the_health_of_the_server(grpc_server: GrpcServer) -> None:
    request = find_type("HealthCheckRequest", HEALTH_PACKAGE)()
    kind = find_type("HealthCheckResponse", HEALTH_PACKAGE)
    with grpc.insecure_channel(grpc_server.address) as channel:
        check = channel.unary_unary(
            HEALTH_CHECK, lambda sent: sent.SerializeToString(), kind.FromString
        )
        assert check(request, timeout=20).status == kind.SERVING
        with pytest.raises(grpc.RpcError) as unknown:
            check(type(request)(service="other"), timeout=20)
        with pytest.raises(grpc.RpcError) as too_long:
            check(type(request)(service="x" * 2_000), timeout=20)
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    assert too_long.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_clients_that_watch_the_health_are_told_to_stop_and_still_call(
    grpc_server: GrpcServer,
) -> None:
    watching = {
        "healthCheckConfig": {"serviceName": ""},
        "loadBalancingConfig": [{"round_robin": {}}],
    }
    options = [("grpc.service_config", orjson.dumps(watching).decode())]
    with grpc.insecure_channel(grpc_server.address) as channel:
        watch = channel.unary_stream(HEALTH_CHECK.replace("Check", "Watch"))
        with pytest.raises(grpc.RpcError) as refused:
            next(watch(b"", timeout=20))
    with grpc.insecure_channel(grpc_server.address, options) as channel:
        assert call(channel, "ServerLive")
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "in place of `Watch`, repeat `Check`" in refused.value.details()


def test_keys_come_in_the_metadata(tiny_store: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    alice, bob = add_key(keys), add_key(keys, "bob", models=(CLASSIFIER,))
    request = infer_request("x").SerializeToString()
    in_process = InProcess(tiny_store, settings=IngressUserConfig(key_file=keys))
    with run_server(in_process) as server:
        assert server.call("ServerLive")
        assert failure(server, request).code() is grpc.StatusCode.UNAUTHENTICATED
        other = failure(server, request, metadata=[("x-api-key", bob)])
        assert other.code() is grpc.StatusCode.PERMISSION_DENIED
        for key in (("authorization", f"Bearer {alice}"), ("x-api-key", alice)):
            assert server.call(INFER, request, metadata=[key])
    assert [each.key for each in in_process.recorder.records[-2:]] == ["alice", "alice"]
    assert [each.status for each in in_process.recorder.records[-2:]] == [200, 200]


def test_cancelled_call_frees_its_work(tiny_store: Path) -> None:
    encoder = ScriptedEncoder()
    in_process = InProcess(tiny_store, encoder=encoder)
    with run_server(in_process) as server, grpc.insecure_channel(server.address) as channel:
        path = f"{INFERENCE_SERVICE}{INFER}"
        pending = channel.unary_unary(path).future(infer_request("x").SerializeToString())
        wait_for(lambda: encoder.calls == 1, 20)
        pending.cancel()
        assert encoder.cancelled.wait(20)
        wait_for(lambda: [each.status for each in in_process.recorder.records] == [499], 20)


def test_timeout_of_the_request_is_a_deadline(tiny_store: Path) -> None:
    with run_server(InProcess(tiny_store, encoder=ScriptedEncoder())) as server:
        error = failure(server, infer_request("x", timeout=50_000).SerializeToString())
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert error.details() == "the request exceeded its deadline", "the server noticed it"


def test_refusals_tell_when_to_retry_also_those_of_haproxy(tiny_store: Path) -> None:
    encoder = ScriptedEncoder(build_overloaded("the queue is full", 7.0))
    request = infer_request("x").SerializeToString()
    with run_server(InProcess(tiny_store, encoder=encoder)) as server:
        error = failure(server, request)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details() == "the queue is full"
        assert dict(error.trailing_metadata())["retry-after"] == "7"
        assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "7000"
    with run_server(InProcess(tiny_store), EdgeSettings(ClientLimits(requests=0))) as server:
        error = failure(server, request)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(error.trailing_metadata())["retry-after"] == "1"


def test_health_calls_pass_while_haproxy_refuses_others(tiny_store: Path) -> None:
    """A load balancer would take a busy server for a dead one."""
    encoder = ScriptedEncoder()
    settings = EdgeSettings(ClientLimits(requests=2))  # of which an address gets one
    with (
        run_server(InProcess(tiny_store, encoder=encoder), settings) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        infer = channel.unary_unary(f"{INFERENCE_SERVICE}{INFER}")
        running = infer.future(infer_request("x").SerializeToString())
        wait_for(lambda: encoder.calls == 1, 20)
        with pytest.raises(grpc.RpcError) as refused:
            infer(infer_request("y").SerializeToString(), timeout=20)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for path in HEALTH_CALLS:
            assert channel.unary_unary(path)(b"", timeout=20), path
        running.cancel()


def test_calls_before_the_start_are_unavailable(tmp_path: Path) -> None:
    with (
        run_harness(tmp_path) as edge,
        grpc.insecure_channel(f"127.0.0.1:{edge.grpc_port}") as channel,
        pytest.raises(grpc.RpcError) as raised,
    ):
        call(channel, "ServerReady")
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "no server is ready" in raised.value.details()


def test_calls_of_a_client_are_limited_over_all_its_connections(tiny_store: Path) -> None:
    encoder = ScriptedEncoder()
    settings = EdgeSettings(ClientLimits(connections=3))
    with (
        run_server(InProcess(tiny_store, encoder=encoder), settings) as server,
        ExitStack() as all_,
    ):
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [
            all_.enter_context(grpc.insecure_channel(server.address, options)) for _ in range(2)
        ]
        first, second = (each.unary_unary(f"{INFERENCE_SERVICE}{INFER}") for each in channels)
        running = [first.future(infer_request(f"text {n}").SerializeToString()) for n in range(3)]
        wait_for(lambda: encoder.calls == 3, 20)
        with pytest.raises(grpc.RpcError) as refused:
            second(infer_request("one more").SerializeToString(), timeout=20)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert encoder.calls == 3
        for each in running:
            each.cancel()


def test_connections_of_a_client_are_limited(tiny_store: Path) -> None:
    """Each connection answers before the next opens: HAProxy's threads accept in any order."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    with run_server(InProcess(tiny_store), EdgeSettings(ClientLimits(connections=2))) as server:
        with ExitStack() as opened:
            *accepted, refused = [
                opened.enter_context(grpc.insecure_channel(server.address, options))
                for _ in range(3)
            ]
            for channel in accepted:
                assert call(channel, "ServerLive")
            with pytest.raises(grpc.RpcError) as error:
                call(refused, "ServerLive")
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        # HAProxy counts a closed connection until it has read its end.
        assert server.call("ServerLive", wait_for_ready=True)


def test_port_stays_open_while_haproxy_is_replaced(grpc_server: GrpcServer) -> None:
    edge = grpc_server.edge
    with grpc.insecure_channel(grpc_server.address) as channel:
        assert call(channel, "ServerLive")
        edge.route(grpc_server.server.port, 1, health_path=HEALTH)
        assert call(channel, "ServerLive"), "the client reconnects unasked"
    edge.kill_haproxies()
    assert grpc_server.call("ServerLive")


def test_calls_are_encrypted(tiny_store: Path, tmp_path: Path) -> None:
    files = create_certificate(tmp_path / "files")
    credentials = grpc.ssl_channel_credentials(files.certificate.read_bytes())
    with run_server(
        InProcess(tiny_store), EdgeSettings(certificate=CertificateFiles(*files))
    ) as server:
        with grpc.secure_channel(server.address, credentials) as channel:
            assert call(channel, INFER, infer_request("x").SerializeToString())
        with grpc.insecure_channel(server.address) as plain, pytest.raises(grpc.RpcError):
            call(plain, "ServerLive")
