from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from deployments.config import CacheSettings
from deployments.deadlines import deadline_after
from deployments.errors import DeadlineExceeded, Overloaded
from deployments.ingress.response_cache import ENTRY_OVERHEAD_BYTES, ResponseCache
from tests.support.fakes import FakeClock, far_deadline

MakeCache = Callable[..., ResponseCache[str]]


@pytest.fixture
def make_cache() -> MakeCache:
    """Return a factory of text caches with room for `entries` texts of 100 bytes."""

    def make(*, entries: int = 3, ttl_s: float = 60.0, clock: FakeClock | None = None):
        settings = CacheSettings(max_bytes=entries * (100 + ENTRY_OVERHEAD_BYTES), ttl_s=ttl_s)
        return ResponseCache(settings, lambda key, value: len(value), clock or FakeClock())

    return make


class Computation:
    """A computation that the test finishes. It counts starts and cancellations."""

    def __init__(self) -> None:
        self.begun = 0
        self.given_up = 0
        self.result: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __call__(self) -> str:
        self.begun += 1
        try:
            return await asyncio.shield(self.result)
        except asyncio.CancelledError:
            self.given_up += 1
            raise


def test_value_is_cached_until_the_ttl(make_cache: MakeCache) -> None:
    clock = FakeClock()
    cache = make_cache(ttl_s=60, clock=clock)
    cache.put("key", "value")
    clock.now_s += 59.9
    assert cache.get("key") == "value"
    clock.now_s += 0.1
    assert cache.get("key") is None
    assert cache.bytes == 0, "what has expired is not held"


def test_least_recently_used_value_is_evicted_at_the_limit(make_cache: MakeCache) -> None:
    cache = make_cache(entries=3)
    for key in "abc":
        cache.put(key, "x" * 100)
    assert cache.get("a") is not None  # b is now the least recently used
    cache.put("d", "x" * 100)
    assert [key for key in "abcd" if cache.get(key)] == ["a", "c", "d"]
    assert cache.bytes == cache.settings.max_bytes


def test_large_value_evicts_several_values(make_cache: MakeCache) -> None:
    cache = make_cache(entries=3)
    for key in "abc":
        cache.put(key, "x" * 100)
    cache.put("large", "x" * 300)
    assert [key for key in ("a", "b", "c", "large") if cache.get(key)] == ["c", "large"]


def test_value_above_max_bytes_is_not_cached(make_cache: MakeCache) -> None:
    cache = make_cache(entries=1)
    cache.put("small", "x" * 100)
    cache.put("large", "x" * 101)
    assert cache.get("large") is None
    assert cache.get("small") is not None


def test_value_above_max_bytes_removes_the_old_value(make_cache: MakeCache) -> None:
    cache = make_cache(entries=1)
    cache.put("key", "old")
    cache.put("key", "x" * 101)
    assert cache.get("key") is None
    assert cache.bytes == 0


def test_new_value_replaces_the_old_value_and_its_bytes(make_cache: MakeCache) -> None:
    cache = make_cache()
    cache.put("key", "x" * 100)
    cache.put("key", "y")
    assert cache.get("key") == "y"
    assert cache.bytes == 1 + ENTRY_OVERHEAD_BYTES


async def test_concurrent_requests_share_one_computation(make_cache: MakeCache) -> None:
    cache, compute = make_cache(), Computation()
    requests = [
        asyncio.create_task(cache.compute_once("key", compute, far_deadline())) for _ in range(5)
    ]
    await asyncio.sleep(0)
    compute.result.set_result("value")
    assert await asyncio.gather(*requests) == ["value"] * 5
    assert compute.begun == 1
    assert cache.get("key") == "value"


async def test_different_keys_are_computed_separately(make_cache: MakeCache) -> None:
    cache, compute = make_cache(), Computation()
    compute.result.set_result("value")
    await asyncio.gather(*(cache.compute_once(key, compute, far_deadline()) for key in "ab"))
    assert compute.begun == 2


async def test_failure_is_raised_for_all_requests_and_not_cached(make_cache: MakeCache) -> None:
    cache, failing, working = make_cache(), Computation(), Computation()
    requests = [
        asyncio.create_task(cache.compute_once("key", failing, far_deadline())) for _ in range(2)
    ]
    await asyncio.sleep(0)
    failing.result.set_exception(Overloaded("full"))
    outcomes = await asyncio.gather(*requests, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Overloaded, Overloaded]
    working.result.set_result("better")
    assert await cache.compute_once("key", working, far_deadline()) == "better"


async def test_crowd_of_equal_requests_is_refused_together(make_cache: MakeCache) -> None:
    cache, begun = make_cache(), 0

    async def refuse() -> str:
        nonlocal begun
        begun += 1
        await asyncio.sleep(0)
        raise Overloaded("full")

    requests = [cache.compute_once("key", refuse, far_deadline()) for _ in range(50)]
    outcomes = await asyncio.gather(*requests, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {Overloaded}
    assert begun == 2


async def test_cancelled_request_does_not_affect_the_others(make_cache: MakeCache) -> None:
    cache, compute = make_cache(), Computation()
    leaving, staying = (
        asyncio.create_task(cache.compute_once("key", compute, far_deadline())) for _ in range(2)
    )
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    compute.result.set_result("value")
    assert await staying == "value"
    assert (compute.begun, compute.given_up) == (1, 0)


async def test_last_cancelled_request_ends_the_computation(make_cache: MakeCache) -> None:
    cache, compute = make_cache(), Computation()
    requests = [
        asyncio.create_task(cache.compute_once("key", compute, far_deadline())) for _ in range(2)
    ]
    await asyncio.sleep(0)
    for task in requests:
        task.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    await asyncio.sleep(0)
    assert (compute.begun, compute.given_up) == (1, 1)


async def test_cancelled_computation_is_restarted_by_the_next_request(
    make_cache: MakeCache,
) -> None:
    cache, abandoned, fresh = make_cache(), Computation(), Computation()
    leaving = asyncio.create_task(cache.compute_once("key", abandoned, far_deadline()))
    await asyncio.sleep(0)
    leaving.cancel()
    request = asyncio.create_task(cache.compute_once("key", fresh, far_deadline()))
    fresh.result.set_result("value")
    assert await request == "value"
    assert fresh.begun == 1


async def test_different_variants_are_computed_separately(make_cache: MakeCache) -> None:
    cache = make_cache()
    calls: list[str] = []

    def counted(name: str) -> Callable[[], Coroutine[Any, Any, str]]:
        async def compute() -> str:
            calls.append(name)
            await asyncio.sleep(0)
            return name

        return compute

    await asyncio.gather(
        cache.compute_once("key", counted("patient"), far_deadline(), variant=True),
        cache.compute_once("key", counted("hasty"), far_deadline(), variant=False),
        cache.compute_once("key", counted("hasty too"), far_deadline(), variant=False),
    )
    assert calls == ["patient", "hasty"]


async def test_joined_request_computes_again_after_the_deadline_of_the_first(
    make_cache: MakeCache,
) -> None:
    cache, expired, fresh = make_cache(), Computation(), Computation()
    first = asyncio.create_task(cache.compute_once("key", expired, far_deadline()))
    await asyncio.sleep(0)
    joined = [
        asyncio.create_task(cache.compute_once("key", fresh, far_deadline())) for _ in range(3)
    ]
    await asyncio.sleep(0)
    assert (expired.begun, fresh.begun) == (1, 0)
    expired.result.set_exception(DeadlineExceeded("the deadline of the first"))
    with pytest.raises(DeadlineExceeded, match="of the first"):
        await first
    fresh.result.set_result("value")
    assert await asyncio.gather(*joined) == ["value"] * 3
    assert fresh.begun == 1


async def test_joined_request_keeps_an_earlier_deadline(make_cache: MakeCache) -> None:
    cache, compute = make_cache(), Computation()
    first = asyncio.create_task(cache.compute_once("key", compute, far_deadline()))
    await asyncio.sleep(0)
    with pytest.raises(DeadlineExceeded):
        await cache.compute_once("key", compute, deadline_after(0.01))
    compute.result.set_result("value")
    assert await first == "value"
    assert compute.begun == 1


def test_smaller_limit_applies_at_once(make_cache: MakeCache) -> None:
    cache = make_cache(entries=3)
    for key in "abc":
        cache.put(key, "x" * 100)
    cache.configure(CacheSettings(max_bytes=0))
    assert cache.bytes == 0
    assert cache.get("c") is None
