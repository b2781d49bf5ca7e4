from __future__ import annotations

import asyncio

import pytest

from deployments.ingress.apis.operations import metrics_text
from deployments.ingress.apis.operations.metrics_text import SharedScrape
from tests.support.fakes import TIMEOUT_S


class Scrapes:
    """A scrape that counts its calls and ends once `release` is set."""

    def __init__(self) -> None:
        self.count = 0
        self.release = asyncio.Event()

    async def __call__(self) -> str:
        self.count += 1
        await self.release.wait()
        return f"scrape {self.count}"


async def test_simultaneous_requests_share_a_scrape() -> None:
    scrapes = Scrapes()
    shared = SharedScrape(scrapes)
    asked = [asyncio.create_task(shared()) for _ in range(5)]
    await asyncio.sleep(0)
    scrapes.release.set()
    assert await asyncio.gather(*asked) == ["scrape 1"] * 5


async def test_scrape_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    scrapes = Scrapes()
    scrapes.release.set()
    monkeypatch.setattr(metrics_text, "MAX_AGE_S", TIMEOUT_S)
    shared = SharedScrape(scrapes)
    assert [await shared(), await shared()] == ["scrape 1"] * 2
    monkeypatch.setattr(metrics_text, "MAX_AGE_S", 0.0)
    expired = SharedScrape(scrapes)
    assert [await expired(), await expired()] == ["scrape 2", "scrape 3"]


async def test_cancelled_and_failed_scrapes_are_repeated() -> None:
    scrapes = Scrapes()
    shared = SharedScrape(scrapes)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(shared(), 0.01)
    scrapes.release.set()
    assert await shared() == "scrape 2"
