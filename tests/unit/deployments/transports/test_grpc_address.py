"""Ray Serve's gRPC server of a replica listens on the address of its node only."""

from __future__ import annotations

import inspect

import pytest
import ray
from ray.serve._private import replica

from deployments.transports.serve import bind_grpc_to_node


@pytest.mark.parametrize(
    ("node", "bound"), [("127.0.0.1", "127.0.0.1:0"), ("fd00::1", "[fd00::1]:0")]
)
def test_wildcard_becomes_the_node(monkeypatch: pytest.MonkeyPatch, node: str, bound: str) -> None:
    targets: list[str] = []
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: node)
    monkeypatch.setattr(
        replica, "add_port_to_grpc_server", lambda _server, target: targets.append(target)
    )
    bind_grpc_to_node()
    replica.add_port_to_grpc_server(None, "[::]:0")
    assert targets == [bound]


def test_serve_still_binds_after_the_constructor() -> None:
    source = inspect.getsource(replica.Replica._on_initialized)
    assert 'add_port_to_grpc_server(self._server, "[::]:0")' in source
