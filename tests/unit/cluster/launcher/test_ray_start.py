"""`ray start` restarts a dead dashboard. The death of another process ends `ray start`."""

from __future__ import annotations

from typing import Any

import pytest
from ray._private.node import Node
from ray._private.ray_constants import PROCESS_TYPE_DASHBOARD, PROCESS_TYPE_GCS_SERVER

from cluster.launcher import ray_start
from cluster.launcher.ray_start import keep_dashboard


class FakeProcess:
    def __init__(self, code: int | None) -> None:
        self.process = self
        self.code = code

    def poll(self) -> int | None:
        return self.code


class FakeNode:
    """The part of a Ray node that the loop of `ray start` uses.

    `codes` has the exit code of each process; None means that it runs.
    """

    def __init__(self, **codes: int | None) -> None:
        self.all_processes: dict[str, Any] = {k: [FakeProcess(v)] for k, v in codes.items()}
        self.is_port_free = True


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[FakeNode]:
    """Fake `start_dashboard`. Return the list of the nodes on which it started a dashboard."""
    nodes: list[FakeNode] = []

    def start(node: FakeNode, *, include_dashboard: bool, raise_on_failure: bool) -> None:
        assert PROCESS_TYPE_DASHBOARD not in node.all_processes
        if not node.is_port_free:
            raise ValueError("Failed to bind")
        node.all_processes[PROCESS_TYPE_DASHBOARD] = [FakeProcess(None)]
        nodes.append(node)

    monkeypatch.setattr(ray_start, "start_dashboard", start)
    return nodes


def test_missing_dashboard_is_started_once(started: list[FakeNode]) -> None:
    node = FakeNode(**{PROCESS_TYPE_GCS_SERVER: None})
    assert [keep_dashboard(node), keep_dashboard(node)] == [[], []]
    assert started == [node]


def test_dead_dashboard_is_started_again(started: list[FakeNode]) -> None:
    node = FakeNode(**{PROCESS_TYPE_DASHBOARD: -9, PROCESS_TYPE_GCS_SERVER: None})
    node.is_port_free = False
    assert keep_dashboard(node) == []
    assert started == []
    node.is_port_free = True
    assert keep_dashboard(node) == []
    assert started == [node]
    assert Node.dead_processes(node) == []


@pytest.mark.parametrize("dashboard", [None, -9])
def test_other_dead_processes_are_reported(dashboard: int | None) -> None:
    node = FakeNode(**{PROCESS_TYPE_DASHBOARD: dashboard, PROCESS_TYPE_GCS_SERVER: -9})
    assert [name for name, _ in keep_dashboard(node)] == [PROCESS_TYPE_GCS_SERVER]
