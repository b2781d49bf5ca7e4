"""Tests of the events that tell a client how a build goes on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from deployments.builds.queue import BuildQueue
from deployments.builds.record import BuildState
from deployments.ingress import builds
from tests.support.asgi_client import AsgiClient
from tests.support.fake_builds import seal_at_once
from tests.support.fakes import TIMEOUT_S
from tests.support.in_process import InProcess

MODEL = "acme/tiny"


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "EVENT_S", 0.005)


def watch(app: ASGIApp, model_id: str = MODEL) -> AsgiClient:
    accept = (b"accept", b"text/event-stream")
    return AsgiClient(app, f"/status/{model_id}", None, method="GET", headers=(accept,))


def read_events(client: AsgiClient) -> list[dict[str, Any]]:
    events = [line.removeprefix("data: ") for line in client.text.splitlines() if line]
    return [json.loads(event)["build"] for event in events]


async def test_events_follow_a_build_to_its_end(tmp_path: Path) -> None:
    queue = BuildQueue(tmp_path)
    queue.submit("acme/before", "demo")
    with queue.claim("acme/before") as claim:
        assert claim is not None
        claim.enter(BuildState.BUILDING, "export")
        await asyncio.sleep(0.02)
        claim.finish("0" * 12)  # the next build is expected to take as long
    queue.submit(MODEL, "demo")
    async with InProcess(tmp_path, models=(MODEL,)).application() as app:
        client = watch(app)
        await client.wait_for_text('"state":"queued"')
        with queue.claim(MODEL) as claim:
            assert claim is not None
            claim.enter(BuildState.BUILDING, "export")
            await client.wait_for_text('"state":"building"')
            seal_at_once(tmp_path, claim)
        await asyncio.wait_for(client.task, TIMEOUT_S)
    headers = dict(client.messages[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    events = [(event["state"], event["percent"]) for event in read_events(client)]
    assert all(0 <= percent <= 99 for _, percent in events[:-1]), events
    assert events[-1] == ("ready", 100)


async def test_events_end_after_the_longest_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert builds.MAX_WATCH_S == 100, "docs/apis.md says 100 s"
    monkeypatch.setattr(builds, "MAX_WATCH_S", 3 * builds.EVENT_S)
    BuildQueue(tmp_path).submit(MODEL, "demo")
    async with InProcess(tmp_path, models=(MODEL,)).application() as app:
        client = watch(app)
        await asyncio.wait_for(client.task, TIMEOUT_S)
    assert [event["state"] for event in read_events(client)] == ["queued"] * 3


async def test_events_of_a_model_without_a_build_are_one(tiny_store: Path) -> None:
    async with InProcess(tiny_store).application() as app:
        client = watch(app, "tiny/embedder")
        await asyncio.wait_for(client.task, TIMEOUT_S)
    (event,) = read_events(client)
    assert (event["state"], event["percent"]) == ("ready", 100)


async def test_watching_client_may_leave(tmp_path: Path) -> None:
    BuildQueue(tmp_path).submit(MODEL, "demo")
    async with InProcess(tmp_path, models=(MODEL,)).application() as app:
        client = watch(app)
        await client.wait_for_text('"state":"queued"')
        client.disconnect()
        await asyncio.wait_for(client.task, TIMEOUT_S)
        assert len(asyncio.all_tasks()) == 1, "nothing looks at the build any more"
