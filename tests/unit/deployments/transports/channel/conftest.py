from __future__ import annotations

import pytest

from tests.support.waiting import TIMEOUT_S


@pytest.fixture(autouse=True)
def patient_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no limit of a few seconds expire because the machine is busy."""
    for limit in (
        "client_connection.OTHER_LOAD_S",
        "replica_connections.SUCCESSOR_S",
        "server.BACKLOG_S",
    ):
        monkeypatch.setattr(f"deployments.transports.channel.{limit}", TIMEOUT_S)
