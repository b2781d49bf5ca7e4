"""Waits of requests before the ingress reads them."""

from __future__ import annotations

import time

import pytest

from deployments.ingress.http.arrivals import measure_wait
from deployments.request_headers import ARRIVAL_HEADER


def test_wait_is_the_time_since_arrival() -> None:
    arrived_ms = round((time.time() - 2) * 1000)
    assert 1.9 < measure_wait({ARRIVAL_HEADER: str(arrived_ms)}) < 60


@pytest.mark.parametrize("text", [None, "", "soon", "-5", "1.5", "9" * 5000])
def test_request_without_a_time_in_the_past_did_not_wait(text: str | None) -> None:
    headers = {} if text is None else {ARRIVAL_HEADER: text}
    assert measure_wait(headers) == 0
