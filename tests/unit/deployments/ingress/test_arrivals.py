"""Arrival times of requests at HAProxy."""

from __future__ import annotations

import time

import pytest

from deployments.ingress.arrivals import read_arrival
from deployments.request_headers import ARRIVAL_HEADER


def test_arrival_is_the_time_that_haproxy_states() -> None:
    arrived_ms = round((time.time() - 2) * 1000)
    assert 1.9 < time.monotonic() - read_arrival({ARRIVAL_HEADER: str(arrived_ms)}) < 60


@pytest.mark.parametrize("text", [None, "", "soon", "-5", "1.5", "9" * 5000])
def test_request_without_a_time_in_the_past_arrives_now(text: str | None) -> None:
    headers = {} if text is None else {ARRIVAL_HEADER: text}
    before_s = time.monotonic()
    assert before_s <= read_arrival(headers) <= time.monotonic()
