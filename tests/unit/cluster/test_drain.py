"""The command of the preStop hook asks Ray to drain the node of its container."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ray
from ray.scripts import scripts

from cluster.kuberay import drain
from cluster.kuberay.drain import drain_node

NODE_ID = "ab" * 28


class FakeGcs:
    """Ray's control service, which records the requests to drain a node."""

    requests: list[tuple[Any, ...]]

    def __init__(self, address: str) -> None:
        assert address == "127.0.0.1:6379"
        self.requests = []

    def drain_node(self, *request: Any) -> tuple[bool, str]:
        self.requests.append(request)
        return True, ""


def test_own_node_is_drained_with_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    gcs = FakeGcs("127.0.0.1:6379")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    monkeypatch.setattr(drain, "find_node_ids", lambda: {NODE_ID})
    monkeypatch.setattr(ray._raylet, "GcsClient", lambda address: gcs)
    monkeypatch.setattr(scripts, "_check_ray_version", lambda _gcs: None)
    before_ms = time.time() * 1_000
    drain_node(245)
    ((node_id, reason, _message, deadline_ms),) = gcs.requests
    assert node_id == NODE_ID
    # If a request states any other reason, Ray may refuse to drain a busy node.
    assert reason == scripts.autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION
    assert before_ms + 244_000 < deadline_ms < time.time() * 1_000 + 246_000
    assert not ray.is_initialized()  # no driver was started
