from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deployments.ingress.version_prober import VersionProber
from deployments.registry import ModelRegistry, RegisteredModel
from tests.support.artifacts import EMBEDDER, seal_tiny_version

OLD, NEW = "aaaaaaaaaaa1", "bbbbbbbbbbb2"


@pytest.fixture
def registry(tmp_path: Path) -> ModelRegistry:
    for version in (OLD, NEW):
        seal_tiny_version(tmp_path, EMBEDDER, version)
    return ModelRegistry(tmp_path, ())


async def test_request_that_waits_for_a_cancelled_trial_uses_the_version(
    registry: ModelRegistry,
) -> None:
    loading = asyncio.Event()

    async def load(_model: RegisteredModel) -> None:
        loading.set()
        await asyncio.Event().wait()

    prober = VersionProber(registry, load)
    model = registry.find(EMBEDDER)
    waiting = asyncio.create_task(prober.refuses(EMBEDDER, model))
    await loading.wait()
    prober.start(model).cancel()
    assert await waiting is False
    assert registry.must_try(EMBEDDER, model.ref), "the next request repeats the trial"
