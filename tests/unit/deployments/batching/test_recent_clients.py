from __future__ import annotations

from deployments.batching.recent_clients import RECENT_S, RecentClients

LOUD, QUIET = ("loud", 0), ("quiet", 0)


def test_single_client_has_no_limit() -> None:
    clients = RecentClients()
    assert clients.find_fewest_items(0.0) is None
    clients.start(LOUD, 9, 0.0)
    assert clients.find_fewest_items(0.0) is None


def test_smallest_client_sets_the_number() -> None:
    clients = RecentClients()
    for _ in range(200):
        clients.start(LOUD, 1, 0.0)
    for _ in range(200):
        clients.start(QUIET, 2, 0.0)
        clients.end(QUIET, 2)
    assert clients.find_fewest_items(0.0) == 2


def test_number_follows_the_load_of_a_client() -> None:
    clients = RecentClients()
    clients.start(LOUD, 500, 0.0)
    for _ in range(20):
        clients.start(QUIET, 1, 0.0)
    assert 5 < (clients.find_fewest_items(0.0) or 0) < 20


def test_priorities_of_a_client_count_apart() -> None:
    clients = RecentClients()
    clients.start(("a", 0), 1, 0.0)
    clients.start(("a", 1), 50, 0.0)
    assert clients.find_fewest_items(0.0) == 1


def test_client_whose_call_takes_long_is_kept_until_the_call_ends() -> None:
    clients = RecentClients()
    clients.start(LOUD, 5, 0.0)
    clients.start(QUIET, 1, 0.0)
    clients.find_fewest_items(2 * RECENT_S)
    clients.end(LOUD, 5)
    clients.end(QUIET, 1)


def test_client_counts_for_a_while_after_its_last_call() -> None:
    clients = RecentClients()
    clients.start(LOUD, 50, 0.0)
    clients.start(QUIET, 1, 0.0)
    clients.end(QUIET, 1)
    clients.start(LOUD, 1, 2 * RECENT_S)
    assert clients.find_fewest_items(RECENT_S) == 1
    assert clients.has_several(RECENT_S)
    assert not clients.has_several(2 * RECENT_S)
    assert clients.find_fewest_items(2 * RECENT_S) is None
    clients.start(QUIET, 3, 2 * RECENT_S)
    assert clients.find_fewest_items(2 * RECENT_S) == 3, "its former calls are forgotten"
