"""Tests of builds that failed before, and of the longest time that a client watches a build."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.builds.queue import BuildClaim
from deployments.ingress import builds
from tests.support.fake_builds import FakeBuilder, fail, seal_at_once
from tests.support.fakes import wait_until
from tests.unit.deployments.ingress.test_builds import (
    MODEL,
    WAITING,
    fast,
    held,
    serving,
)

__all__ = ["fast", "held"]  # fixtures


def fail_first() -> FakeBuilder:
    """Build a fake builder whose first build fails."""

    def work(store: Path, claim: BuildClaim) -> None:
        (fail if len(builder.builds) == 1 else seal_at_once)(store, claim)

    builder = FakeBuilder(work)
    return builder


async def test_failed_build_is_repeated_by_a_request_after_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert builds.FAILED_FOR_S == 600, "docs/apis.md says ten minutes"
    builder = fail_first()
    async with serving(tmp_path, builder) as http:
        for _ in range(2):
            failed = await http.post(f"/models/{MODEL}", json=WAITING)
            assert (failed.status_code, failed.json()["code"]) == (404, "build_failed")
        monkeypatch.setattr(builds, "FAILED_FOR_S", -1.0)  # the time is over
        answered = await http.post(f"/models/{MODEL}", json=WAITING)
        assert answered.status_code == 200, answered.text
    assert builder.builds == [MODEL] * 2


async def test_failed_build_is_repeated_by_an_operator_at_once(tmp_path: Path) -> None:
    builder = fail_first()
    async with serving(tmp_path, builder) as http:
        failed = await http.post(f"/models/{MODEL}", json=WAITING)
        assert (failed.status_code, failed.json()["code"]) == (404, "build_failed")
        pulled = await http.post("/models", json={"source": MODEL})
        assert pulled.status_code == 200, pulled.text
        await wait_until(lambda: len(builder.builds) == 2)
        answered = await http.post(f"/models/{MODEL}", json=WAITING)
        assert answered.status_code == 200, answered.text
