from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from deployments.artifacts.manifest import MANIFEST_NAME
from deployments.deadlines import deadline_after
from deployments.errors import (
    DeadlineExceeded,
    DigestMismatch,
    EngineFailed,
    HardwareUnavailable,
    RequirementMissing,
    ServeError,
    StoreNotWritable,
)
from deployments.health import MIN_QUARANTINE_S
from deployments.ingress.models import version_trials
from deployments.ingress.models.version_trials import VersionTrials
from deployments.keys.caller import UNRESTRICTED, Caller, current_caller, set_current_caller
from deployments.keys.key import Scope
from deployments.plan.plan_file import AVOID_S, read_plan
from deployments.registry import ModelRegistry, RegisteredModel
from tests.support.artifacts import EMBEDDER, seal_tiny_version
from tests.support.fakes import TIMEOUT_S, FakeClock, wait_until

OLD, NEW = "aaaaaaaaaaa1", "bbbbbbbbbbb2"


@pytest.fixture
def registry(tmp_path: Path) -> ModelRegistry:
    for version in (OLD, NEW):
        seal_tiny_version(tmp_path, EMBEDDER, version)
    return ModelRegistry(tmp_path, ())


async def test_trial_ends_no_later_than_the_deadline_of_its_request(
    registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def load(_model: RegisteredModel) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(version_trials, "MAX_WAIT_S", 2 * TIMEOUT_S)
    trials = VersionTrials(registry, load)
    model = registry.find(EMBEDDER)
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(DeadlineExceeded, match="new version of the model"):
            await trials.is_refused_after_trial(EMBEDDER, model, deadline_after(0.02))
    trials.start(model).cancel()


async def test_request_that_waits_for_a_cancelled_trial_uses_the_version(
    registry: ModelRegistry,
) -> None:
    loading = asyncio.Event()

    async def load(_model: RegisteredModel) -> None:
        loading.set()
        await asyncio.Event().wait()

    trials = VersionTrials(registry, load)
    model = registry.find(EMBEDDER)
    waiting = asyncio.create_task(trials.is_refused_after_trial(EMBEDDER, model))
    await loading.wait()
    trials.start(model).cancel()
    assert await waiting is False
    assert registry.needs_trial(EMBEDDER, model.ref), "the next request repeats the trial"


async def test_trial_has_all_permissions_whoever_starts_it(registry: ModelRegistry) -> None:
    callers: list[Caller] = []

    async def load(_model: RegisteredModel) -> None:
        callers.append(current_caller())

    set_current_caller(Caller("bob", scopes=(Scope.INFER,)))
    trials = VersionTrials(registry, load)
    assert not await trials.is_refused_after_trial(EMBEDDER, registry.find(EMBEDDER))
    assert callers == [UNRESTRICTED]


async def test_trial_refuses_only_the_files_that_it_loaded(
    registry: ModelRegistry, tmp_path: Path
) -> None:
    async def load(model: RegisteredModel) -> None:
        seal_tiny_version(tmp_path, EMBEDDER, NEW)
        os.utime(model.directory / MANIFEST_NAME, ns=(1, model.sealed_ns + 1))
        raise DigestMismatch("the graph is damaged")

    trials = VersionTrials(registry, load)
    await trials.is_refused_after_trial(EMBEDDER, registry.find(EMBEDDER))
    assert not read_plan(tmp_path).find(EMBEDDER).refused


async def test_version_is_avoided_where_its_refusal_cannot_be_recorded(
    registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a read-only store. Otherwise each request would repeat the trial, and fail."""

    async def load(_model: RegisteredModel) -> None:
        raise DigestMismatch("the graph is damaged")

    def refuse(_model: RegisteredModel, _reason: str) -> None:
        raise StoreNotWritable("the store is read-only")

    monkeypatch.setattr(version_trials, "RETRY_S", 0)
    monkeypatch.setattr(registry, "refuse", refuse)
    trials = VersionTrials(registry, load)
    assert await trials.is_refused_after_trial(EMBEDDER, registry.find(EMBEDDER))
    assert registry.find(EMBEDDER).ref.version == OLD


async def test_second_attempt_comes_after_replicas_have_forgotten_the_first(
    registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[object] = []

    async def load(_model: RegisteredModel) -> None:
        steps.append("load")
        if len(steps) == 1:
            raise EngineFailed("cannot allocate memory")

    async def sleep(seconds: float) -> None:
        steps.append(seconds > MIN_QUARANTINE_S)

    monkeypatch.setattr("deployments.ingress.models.version_trials.asyncio.sleep", sleep)
    assert not await VersionTrials(registry, load).is_refused_after_trial(
        EMBEDDER, registry.find(EMBEDDER)
    )
    assert steps == ["load", True, "load"]


def lacking_graph() -> HardwareUnavailable:
    error = HardwareUnavailable("Model tiny/embedder has no graph for `cpu`")
    error.lacks_graph = True
    return error


async def test_version_whose_hardware_is_away_is_tried_again_at_once(
    registry: ModelRegistry,
) -> None:
    async def load(_model: RegisteredModel) -> None:
        raise HardwareUnavailable("this cluster runs no model on `gpu`")

    trials = VersionTrials(registry, load)
    new = registry.find(EMBEDDER)
    assert not await trials.is_refused_after_trial(EMBEDDER, new)
    registry.follow_plan()
    assert registry.find(EMBEDDER).ref == new.ref


@pytest.mark.parametrize(
    "error",
    [
        RequirementMissing("the package `openvino` is not installed"),
        lacking_graph(),
    ],
)
async def test_version_that_this_host_cannot_run_is_avoided_here_for_some_minutes(
    registry: ModelRegistry, tmp_path: Path, error: ServeError
) -> None:
    tried: list[str] = []

    async def load(model: RegisteredModel) -> None:
        tried.append(model.ref.version)
        raise error

    clock = FakeClock()
    registry = ModelRegistry(tmp_path, (), clock)
    trials = VersionTrials(registry, load)
    new = registry.find(EMBEDDER)
    assert await trials.is_refused_after_trial(EMBEDDER, new)
    old = registry.find(EMBEDDER)
    assert (new.ref.version, old.ref.version) == (NEW, OLD)
    assert not await trials.is_refused_after_trial(EMBEDDER, old), "no other version can answer"
    assert registry.find(f"{EMBEDDER}@{NEW}").ref == new.ref
    assert not read_plan(tmp_path).find(EMBEDDER).refused
    clock.now_s += AVOID_S
    assert tried == [NEW]
    assert registry.find(EMBEDDER).ref == old.ref, "it answers until the trial accepts the other"
    await wait_until(lambda: tried == [NEW, NEW])
