from __future__ import annotations

import time

import pytest

from deployments.errors import RequirementMissing
from deployments.messages import ModelRef
from deployments.replicas.failed_loads import FailedLoads


def test_reason_that_clients_do_not_get_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    error = RequirementMissing("TensorRT cannot be loaded: no libnvinfer.so.10")
    error.__cause__ = OSError("no libnvinfer.so.10")
    ref = ModelRef("tiny/embedder", "0123456789ab")
    assert "libnvinfer" not in FailedLoads(time.monotonic).add(ref, error).message
    (record,) = caplog.records
    assert record.message == f"model {ref.name} cannot be loaded: {error.message}"
