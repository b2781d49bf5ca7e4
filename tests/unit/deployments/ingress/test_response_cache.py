from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from deployments.config import CacheSettings
from deployments.errors import Overloaded
from deployments.ingress.response_cache import ENTRY_OVERHEAD_BYTES, ResponseCache
from tests.support.fakes import FakeClock

MakeCache = Callable[..., ResponseCache[str]]


@pytest.fixture
def make_cache() -> MakeCache:
    """Caches of texts whose size is their length, bounded to `entries` of 100 bytes each."""

    def make(*, entries: int = 3, ttl_s: float = 60.0, clock: FakeClock | None = None):
        settings = CacheSettings(max_bytes=entries * (100 + ENTRY_OVERHEAD_BYTES), ttl_s=ttl_s)
        return ResponseCache(settings, lambda key, value: len(value), clock or FakeClock())

    return make


class Computation:
    """Something slow that a test finishes; counts how often it was begun and given up."""

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


def test_what_was_put_is_there_until_its_time_is_over(make_cache: MakeCache) -> None:
    clock = FakeClock()
    cache = make_cache(ttl_s=60, clock=clock)
    cache.put("key", "value")
    clock.now_s += 59.9
    assert cache.get("key") == "value"
    clock.now_s += 0.1
    assert cache.get("key") is None
    assert cache.bytes == 0, "what has expired is not held"


def test_bytes_never_exceed_the_bound_and_the_least_used_goes_first(make_cache: MakeCache) -> None:
    cache = make_cache(entries=3)
    for key in "abc":
        cache.put(key, "x" * 100)
    assert cache.get("a") is not None  # now b is the least recently used
    cache.put("d", "x" * 100)
    assert [key for key in "abcd" if cache.get(key)] == ["a", "c", "d"]
    assert cache.bytes == cache.settings.max_bytes


def test_a_large_value_displaces_as_many_as_it_needs(make_cache: MakeCache) -> None:
    cache = make_cache(entries=3)
    for key in "abc":
        cache.put(key, "x" * 100)
    cache.put("large", "x" * 300)
    assert [key for key in ("a", "b", "c", "large") if cache.get(key)] == ["c", "large"]


def test_a_value_larger_than_the_whole_cache_is_not_kept(make_cache: MakeCache) -> None:
    cache = make_cache(entries=1)
    cache.put("small", "x" * 100)
    cache.put("large", "x" * 101)
    assert cache.get("large") is None
    assert cache.get("small") is not None


def test_a_new_value_replaces_the_old_one_and_its_bytes(make_cache: MakeCache) -> None:
    cache = make_cache()
    cache.put("key", "x" * 100)
    cache.put("key", "y")
    assert cache.get("key") == "y"
    assert cache.bytes == 1 + ENTRY_OVERHEAD_BYTES


async def test_one_computation_serves_all_who_ask_meanwhile(make_cache: MakeCache) -> None:
    cache, compute = make_cache(), Computation()
    asked = [asyncio.create_task(cache.compute_once("key", compute)) for _ in range(5)]
    await asyncio.sleep(0)
    compute.result.set_result("value")
    assert await asyncio.gather(*asked) == ["value"] * 5
    assert compute.begun == 1
    assert cache.get("key") == "value"


async def test_different_keys_are_computed_apart(make_cache: MakeCache) -> None:
    cache, compute = make_cache(), Computation()
    compute.result.set_result("value")
    await asyncio.gather(*(cache.compute_once(key, compute) for key in "ab"))
    assert compute.begun == 2


async def test_a_failure_reaches_all_who_asked_and_is_not_kept(make_cache: MakeCache) -> None:
    cache, failing, working = make_cache(), Computation(), Computation()
    asked = [asyncio.create_task(cache.compute_once("key", failing)) for _ in range(2)]
    await asyncio.sleep(0)
    failing.result.set_exception(Overloaded("full"))
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Overloaded, Overloaded]
    working.result.set_result("better")
    assert await cache.compute_once("key", working) == "better"


async def test_one_who_leaves_does_not_disturb_the_others(make_cache: MakeCache) -> None:
    cache, compute = make_cache(), Computation()
    leaving, staying = (asyncio.create_task(cache.compute_once("key", compute)) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    compute.result.set_result("value")
    assert await staying == "value"
    assert (compute.begun, compute.given_up) == (1, 0)


async def test_when_the_last_one_leaves_the_computation_ends(make_cache: MakeCache) -> None:
    cache, compute = make_cache(), Computation()
    asked = [asyncio.create_task(cache.compute_once("key", compute)) for _ in range(2)]
    await asyncio.sleep(0)
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await asyncio.sleep(0)
    assert (compute.begun, compute.given_up) == (1, 1)


async def test_a_computation_given_up_is_begun_anew_by_the_next(make_cache: MakeCache) -> None:
    cache, abandoned, fresh = make_cache(), Computation(), Computation()
    leaving = asyncio.create_task(cache.compute_once("key", abandoned))
    await asyncio.sleep(0)
    leaving.cancel()
    asked = asyncio.create_task(cache.compute_once("key", fresh))
    fresh.result.set_result("value")
    assert await asked == "value"
    assert fresh.begun == 1


async def test_who_computes_another_way_does_not_share(make_cache: MakeCache) -> None:
    cache = make_cache()
    calls: list[str] = []

    def counted(name: str) -> Callable[[], Coroutine[Any, Any, str]]:
        async def compute() -> str:
            calls.append(name)
            await asyncio.sleep(0)
            return name

        return compute

    await asyncio.gather(
        cache.compute_once("key", counted("patient"), variant=True),
        cache.compute_once("key", counted("hasty"), variant=False),
        cache.compute_once("key", counted("hasty too"), variant=False),
    )
    assert calls == ["patient", "hasty"]


def test_a_smaller_bound_holds_at_once(make_cache: MakeCache) -> None:
    cache = make_cache(entries=3)
    for key in "abc":
        cache.put(key, "x" * 100)
    cache.configure(CacheSettings(max_bytes=0))
    assert cache.bytes == 0
    assert cache.get("c") is None
