"""The section of HAProxy's configuration for gRPC. tests/integration/edge/test_grpc.py uses it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.edge.grpc_frontend import GrpcFrontend
from cluster.edge.haproxy_config import ClientLimits
from deployments.grpc_status import GRPC_PATHS

ROUTED = """frontend http_frontend
    acl is_http-app path_beg /
    use_backend http-app if is_http-app
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as it:
        yield it


def test_port_is_the_given_listener(listener: socket.socket, tmp_path: Path) -> None:
    section = GrpcFrontend(listener, tmp_path, ClientLimits()).build(None, ROUTED)
    binds = [line.strip() for line in section.splitlines() if "bind" in line.split()]
    assert binds == [f"bind fd@{listener.fileno()} proto h2"]


def test_certificate_encrypts_the_port(listener: socket.socket, tmp_path: Path) -> None:
    section = GrpcFrontend(listener, tmp_path, ClientLimits()).build(tmp_path / "tls.pem")
    assert f"ssl crt {tmp_path / 'tls.pem'} alpn h2 ssl-min-ver TLSv1.2" in section


def test_calls_take_the_routes_of_serve(listener: socket.socket, tmp_path: Path) -> None:
    frontend = GrpcFrontend(listener, tmp_path, ClientLimits())
    routed = frontend.build(None, ROUTED)
    assert "use_backend http-app if is_http-app" in routed
    assert "default_backend" not in routed
    assert "default_backend starting" in frontend.build(None)


def test_only_methods_of_the_protocol_pass(listener: socket.socket, tmp_path: Path) -> None:
    section = GrpcFrontend(listener, tmp_path, ClientLimits()).build(None, ROUTED)
    (denial,) = [line for line in section.splitlines() if "deny_status 404" in line]
    paths = denial.partition("unless { path ")[2].removesuffix(" }").split()
    assert paths == list(GRPC_PATHS)
    assert section.index(denial) < section.index("use_backend")


def test_errors_are_those_of_grpc(listener: socket.socket, tmp_path: Path) -> None:
    frontend = GrpcFrontend(listener, tmp_path, ClientLimits())
    frontend.write_errors()
    section = frontend.build(None, ROUTED)
    found = {}
    for path in tmp_path.glob("*.grpc"):
        status = int(path.stem)
        assert f"    errorfile {status} {path}\n" in section
        head, _, body = path.read_bytes().partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        assert (lines[0], body) == ("HTTP/1.1 200 OK", b"")
        headers = dict(line.split(": ", 1) for line in lines[1:])
        found[status] = headers["grpc-status"]
        assert ("grpc-retry-pushback-ms" in headers) == (status == 429 or status >= 500)
    assert b"in place of `Watch`, repeat" in (tmp_path / "404.grpc").read_bytes()
    assert found == {404: "12", 408: "4", 429: "8", 502: "14", 503: "14", 504: "4"}
