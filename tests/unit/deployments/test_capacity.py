from __future__ import annotations

import pytest

from deployments.capacity import Capacity
from deployments.errors import Overloaded


@pytest.fixture
def capacity() -> Capacity:
    return Capacity(lambda: 10, "texts")


def test_known_client_may_use_half_and_leaves_the_rest_to_others(capacity: Capacity) -> None:
    capacity.reserve(3, "loud")
    capacity.reserve(2, "loud")
    with pytest.raises(Overloaded, match="one client may have 5"):
        capacity.reserve(1, "loud")
    capacity.reserve(5, "quiet")
    capacity.release(3, "loud")
    capacity.reserve(1, "loud")
    assert capacity.used == 8


def test_single_request_may_use_all(capacity: Capacity) -> None:
    with capacity.hold(10, "loud"):
        assert capacity.used == 10
    assert capacity.used == 0


def test_request_that_grows_counts_only_other_requests_of_its_client(capacity: Capacity) -> None:
    capacity.reserve(4, "loud")
    capacity.reserve(4, "loud", held=4)
    with pytest.raises(Overloaded, match="one client may have 5"):
        capacity.reserve(1, "loud")
    capacity.reserve(2, "quiet")


def test_nothing_always_fits(capacity: Capacity) -> None:
    capacity.reserve(8, "loud")
    capacity.reserve(0, "loud")
    assert capacity.used == 8


def test_clients_that_are_not_known_share_all(capacity: Capacity) -> None:
    capacity.reserve(6)
    capacity.reserve(4)
    with pytest.raises(Overloaded, match="10 of 10 texts are in use"):
        capacity.reserve(1)


def test_error_names_the_setting() -> None:
    capacity = Capacity(lambda: 10, "texts", "limits.inflight_items")
    with pytest.raises(Overloaded) as refused:
        capacity.reserve(11)
    assert refused.value.message == (
        "`limits.inflight_items` is reached: 0 of 10 texts are in use, the request needs 11. "
        "Retry later."
    )
    assert not refused.value.from_queue
