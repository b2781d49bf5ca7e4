from __future__ import annotations

import random
from collections import Counter

import pytest

from deployments.fair_queue import MAX_IDLE_CLIENTS, FairQueue


def take_all(queue: FairQueue[str]) -> list[str]:
    return [queue.take_first() for _ in range(len(queue))]


def test_one_client_is_served_in_order() -> None:
    queue: FairQueue[str] = FairQueue()
    for item, cost in (("a", 5.0), ("b", 1.0), ("c", 3.0)):
        queue.push(item, cost=cost)
    assert list(queue) == ["a", "b", "c"]
    assert queue.first == "a"
    assert take_all(queue) == ["a", "b", "c"]
    assert queue.first is None


def test_later_client_does_not_wait_for_all_items_of_an_earlier_one() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(5):
        queue.push(f"greedy {number}", cost=1.0, client="greedy")
    queue.take_first()
    queue.push("quiet", cost=1.0, client="quiet")
    assert take_all(queue)[:2] == ["greedy 1", "quiet"]


def test_clients_that_come_and_go_do_not_starve_a_large_item() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("large", cost=10.0, client="patient")
    served = []
    for number in range(15):
        queue.push(f"small {number}", cost=1.0, client=f"client {number}")
        served.append(queue.take_first())
    assert served.index("large") == 9


def test_lower_priority_waits_for_all_others() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("batch", cost=1.0, priority=1)
    queue.push("interactive", cost=1.0, priority=0)
    queue.push("another", cost=1.0, client="other", priority=0)
    assert take_all(queue) == ["interactive", "another", "batch"]


def test_lower_priority_gets_its_share_and_never_starves() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(4):
        queue.push(f"batch {number}", cost=1.0, priority=1)
    served = []
    for _ in range(60):
        queue.push("interactive", cost=1.0)
        served.append(queue.take_first())
    turns = [index for index, item in enumerate(served) if item.startswith("batch")]
    assert turns == [16, 33, 50]
    assert all(item == "interactive" for item in served[:16])


@pytest.mark.parametrize(("higher", "lower"), [(1.0, 1.0), (100.0, 1.0), (1.0, 5.0)])
def test_cost_ahead_of_a_lower_priority_is_bounded_by_its_share(
    higher: float, lower: float
) -> None:
    """Items of the highest priority that arrive later do not delay the others further."""
    queue: FairQueue[float] = FairQueue()
    for _ in range(400):
        queue.push(higher, cost=higher)
    for _ in range(3):
        queue.push(lower, cost=lower, priority=1)
    predicted = queue.cost_ahead(cost=lower, priority=1)
    assert predicted < queue.cost
    assert queue.count_ahead(cost=lower, priority=1) == len(queue)
    assert queue.ahead(cost=lower, priority=1)[-3:] == [lower] * 3
    queue.push(-1.0, cost=lower, priority=1)
    served = 0.0
    while (item := queue.take_first()) > 0:
        served += item
        queue.push(higher, cost=higher, client="another")
    assert served == pytest.approx(predicted)


def test_take_charges_the_items_that_share_the_turn_of_the_first() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(4):
        queue.push(f"a{number}", cost=1.0, client="a")
        queue.push(f"b{number}", cost=1.0, client="b")
    assert queue.peek(3) == ["a0", "b0", "a1"]
    assert queue.take(5, lambda items: [0, *(i for i, item in enumerate(items) if item == "a2")])
    queue.push("c", cost=1.0, client="c")
    assert take_all(queue) == ["b0", "a1", "b1", "c", "b2", "a3", "b3"]


def test_cost_is_that_of_the_queued_items() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a0", cost=2.0, client="a")
    queue.push("a1", cost=3.0, client="a")
    queue.push("batch", cost=5.0, client="b", priority=1)
    assert queue.cost == 10.0
    assert queue.cost_ahead(cost=1.0, client="b") == 0.0
    assert queue.cost_ahead(cost=2.5, client="b") == 2.0
    assert queue.cost_ahead(cost=1.0, client="a") == 5.0
    assert queue.cost_ahead(cost=1.0, client="c", priority=1) == 5.0
    queue.take_first()
    assert queue.cost == 8.0


@pytest.mark.parametrize("seed", range(5))
def test_clients_get_equal_shares_of_cost(seed: int) -> None:
    """Every client always has items in the queue. The items of the clients differ in cost."""
    chance = random.Random(seed)
    sizes = {"small": 1.0, "medium": 7.0, "large": 30.0}
    queue: FairQueue[tuple[str, float]] = FairQueue()
    served: Counter[str] = Counter()

    def refill(client: str) -> None:
        cost = sizes[client] * chance.uniform(0.5, 1.5)
        queue.push((client, cost), cost=cost, client=client)

    for client in sizes:
        for _ in range(chance.randint(2, 60)):
            refill(client)
    while sum(served.values()) < 3_000:
        client, cost = queue.take_first()
        served[client] += cost  # type: ignore[assignment]
        refill(client)
    largest = 1.5 * max(sizes.values())
    assert max(served.values()) - min(served.values()) <= 2 * largest


def test_removed_items_are_not_charged() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("other 1", cost=1.0, client="other")
    for number in range(9):
        queue.push(f"gone {number}", cost=10.0, client="gone")
    queue.push("other 2", cost=1.0, client="other")
    assert queue.take_last() == "gone 8"
    assert len(queue.discard(lambda item: item.startswith("gone"))) == 8
    queue.push("back", cost=1.0, client="gone")
    assert take_all(queue) == ["other 1", "back", "other 2"]


def test_items_after_a_discarded_one_move_forward() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(4):
        queue.push(f"other {number}", cost=1.0, client="other")
    for item, cost in (("large", 10.0), ("small", 1.0), ("next", 1.0)):
        queue.push(item, cost=cost, client="own")
    assert queue.discard(lambda item: item == "large") == ["large"]
    queue.push("last", cost=1.0, client="own")
    own_and_other = [f"{name} {number}" for number in range(3) for name in ("other", "own")]
    names = {"small": "own 0", "next": "own 1", "last": "own 2"}
    assert [names.get(item, item) for item in take_all(queue)] == [*own_and_other, "other 3"]


def test_items_that_move_forward_do_not_overtake_what_waits_now() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("large", cost=10.0, client="own")
    queue.push("small", cost=1.0, client="own")
    for number in range(9):
        queue.push(f"other {number}", cost=1.0, client="other")
    for _ in range(8):
        queue.take_first()
    queue.discard(lambda item: item == "large")
    assert take_all(queue) == ["small", "other 8"]


def test_item_that_moves_forward_ends_no_earlier_than_if_pushed_now() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("gone", "own"):
        queue.push(item, cost=10.0, client="own")
    for number in range(3):
        queue.push(f"other {number}", cost=4.0, client="other")
    for _ in range(2):
        queue.take_first()
    queue.discard(lambda item: item == "gone")
    queue.push("new", cost=8.0, client="new")
    assert take_all(queue) == ["other 2", "new", "own"]


def test_queue_is_empty_after_all_items_are_removed() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a", "b"):
        queue.push(item, cost=1.0, client=item)
    assert queue.discard(lambda item: True) == ["a", "b"]
    queue.push("c", cost=1.0, client="a")
    assert take_all(queue) == ["c"]


def test_idle_clients_are_forgotten() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("stays", cost=1e6, priority=1)
    for number in range(1_000):
        queue.push("one", cost=1.0, client=f"client {number}")
        queue.take_first()
    known = sum(len(group.last_finish) for group in queue._classes.values())
    assert known <= MAX_IDLE_CLIENTS + 2
    assert queue.take_first() == "stays"
    assert not queue._classes


def test_client_served_before_its_turn_waits_although_many_clients_were_idle() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("stays", cost=100.0, client="patient")
    for number in range(10):
        queue.push(f"early {number}", cost=1.0, client="early")
    queue.take(10, lambda items: list(range(len(items))))
    for number in range(MAX_IDLE_CLIENTS + 1):
        queue.push("one", cost=1.0, client=f"client {number}")
    for _ in range(MAX_IDLE_CLIENTS + 1):
        queue.take_first()
    queue.push("early again", cost=1.0, client="early")
    queue.push("new", cost=1.0, client="new")
    assert take_all(queue) == ["new", "early again", "stays"]


@pytest.mark.parametrize("count", [1, 2, 16, 32, 256])
def test_share_of_a_lower_priority_does_not_depend_on_the_items_per_turn(count: int) -> None:
    """Turns take many items at once, as the forward passes of an encoder do."""
    queue: FairQueue[int] = FairQueue()
    served: Counter[int] = Counter()
    pushed: Counter[int] = Counter()
    for _ in range(20_000 // count + 600):
        for priority in (0, 1):
            while pushed[priority] - served[priority] < 2 * count:
                queue.push(priority, cost=1.0, priority=priority)
                pushed[priority] += 1
        served.update(queue.take(count, lambda items: list(range(len(items)))))
    assert served[1] / served[0] == pytest.approx(1 / 16, rel=0.06)


def test_lower_priority_pays_for_the_items_that_share_a_turn_of_the_highest() -> None:
    """A client keeps one item of the highest priority in the queue, beside many lower ones."""
    queue: FairQueue[int] = FairQueue()
    served: Counter[int] = Counter()
    for _ in range(1_000):
        queue.push(1, cost=1.0, priority=1)
    queue.push(0, cost=1.0)
    for _ in range(400):
        taken = queue.take(32, lambda items: list(range(len(items))))
        served.update(taken)
        if 0 in taken:
            queue.push(0, cost=1.0)
    assert 0 < served[1] <= served[0] / 16 + 31


def test_lower_priority_that_waits_alone_still_owes_for_its_turn() -> None:
    queue: FairQueue[int] = FairQueue()
    queue.push(0, cost=1.0)
    for _ in range(30):
        queue.push(1, cost=1.0, priority=1)
    queue.take(10, lambda items: list(range(len(items))))
    assert queue.take_first() == 1
    for _ in range(3):
        queue.push(0, cost=1.0)
    assert queue.peek(6) == [0] * 3, "the turn has no place for lower items"


def test_lower_priority_owes_for_its_turn_until_others_had_theirs() -> None:
    """A client empties the lower priority and refills it while the highest one still waits."""
    queue: FairQueue[int] = FairQueue()
    served: Counter[int] = Counter()
    for _ in range(2_000):
        for priority in (0, 1):
            if priority not in queue:
                for _ in range(16):
                    queue.push(priority, cost=1.0, priority=priority)
        served.update(queue.take(16, lambda items: list(range(len(items)))))
    assert served[1] / served[0] == pytest.approx(1 / 16, rel=0.1)
