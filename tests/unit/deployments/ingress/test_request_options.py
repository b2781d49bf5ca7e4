from __future__ import annotations

import pytest

from deployments.ingress.request_options import RequestOptions


@pytest.mark.parametrize(
    ("options", "compute"),
    [
        (RequestOptions(), None),
        (RequestOptions(use_gpu=False), "cpu"),
        (RequestOptions(use_gpu=True), "gpu"),
        (RequestOptions(require_gpu=True), "gpu"),
        (RequestOptions(hardware="gpu"), "gpu"),
        (RequestOptions(hardware="cpu", use_gpu=True), "cpu"),
        (RequestOptions(compute="auto"), "auto"),
        (RequestOptions(compute="auto", use_gpu=True), "gpu"),
        (RequestOptions(compute="gpu", use_gpu=False), "cpu"),
        (RequestOptions(compute="auto", hardware="cpu"), "cpu"),
    ],
)
def test_requested_compute_prefers_hardware_then_use_gpu(
    options: RequestOptions, compute: str | None
) -> None:
    assert options.requested_compute == compute


@pytest.mark.parametrize(("deadline_ms", "timeout_s"), [(None, 30.0), (50, 0.05), (60_000, 30.0)])
def test_deadline_of_the_client_is_bounded_by_the_timeout(
    deadline_ms: float | None, timeout_s: float
) -> None:
    assert RequestOptions(deadline_ms=deadline_ms).limit_timeout(30.0) == timeout_s
