from __future__ import annotations

import threading
from pathlib import Path

import pytest

from deployments.artifacts.store import LATEST_NAME
from deployments.artifacts.types import Device
from deployments.config import AppArgs, EncoderSettings, ModelSettings
from deployments.errors import ArtifactMissing, EngineFailed, HardwareUnavailable, ServeError
from deployments.messages import ModelRef
from deployments.plan import changes
from deployments.registry import RegisteredModel
from deployments.replicas import pinned_models
from deployments.replicas.model_pool import ModelLoader, ModelPool
from deployments.replicas.pinned_models import PinnedModels
from tests.support.artifacts import seal_tiny, seal_tiny_version
from tests.support.fakes import TIMEOUT_S, wait_until

MODEL = "tiny/model"
NEW = "bbbbbbbbbbb2"


def build_args(store: Path, version: str = LATEST_NAME) -> AppArgs:
    models = (ModelSettings(id=MODEL, version=version),)
    return AppArgs(store=store, models=models, encoders={Device.CPU: EncoderSettings()})


def build_pool(store: Path, error: Exception | None = None) -> ModelPool[str]:
    def load(model: RegisteredModel) -> str:
        if error is not None:
            raise error
        return model.ref.id

    return ModelPool(store, ModelLoader(lambda _: 1, load, lambda _ref, _model: None), 10)


@pytest.mark.parametrize(
    ("error", "is_pinned", "ends_the_start"),
    [
        (EngineFailed, True, True),
        (EngineFailed, False, False),
        (HardwareUnavailable, True, False),  # the model has no graph for this device
        (MemoryError, True, True),
        (MemoryError, False, False),
    ],
)
async def test_version_of_the_configuration_must_load(
    tmp_path: Path, error: type[Exception], is_pinned: bool, ends_the_start: bool
) -> None:
    version = seal_tiny(tmp_path, MODEL).name
    pinned = PinnedModels(build_args(tmp_path, version if is_pinned else LATEST_NAME), bool)
    pool = build_pool(tmp_path, error("not here"))
    if ends_the_start:
        with pytest.raises(error):
            pinned.load_into(pool)
    else:
        pinned.load_into(pool)
        with pytest.raises(error if issubclass(error, ServeError) else EngineFailed):
            async with pool.lease(ModelRef(MODEL, version)):
                pass


def test_missing_version_of_the_configuration_ends_the_start(tmp_path: Path) -> None:
    seal_tiny(tmp_path, MODEL)
    with pytest.raises(ArtifactMissing):
        PinnedModels(build_args(tmp_path, NEW), bool)


def test_models_of_other_replicas_are_not_pinned_here(tmp_path: Path) -> None:
    seal_tiny(tmp_path, MODEL)
    assert PinnedModels(build_args(tmp_path), lambda _: False).refs() == frozenset()


async def test_store_that_does_not_answer_does_not_block_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_models, "CHECK_INTERVAL_S", 0.01)
    ref = ModelRef(MODEL, seal_tiny(tmp_path, MODEL).name)
    pinned, pool = PinnedModels(build_args(tmp_path), bool), build_pool(tmp_path)
    pinned.load_into(pool)
    stalled, answers = threading.Event(), threading.Event()

    def stall() -> list[RegisteredModel]:
        stalled.set()
        assert answers.wait(TIMEOUT_S)
        return []

    monkeypatch.setattr(pinned._registry, "list_kept_loaded", stall)
    pinned.start(pool)
    try:
        await wait_until(stalled.is_set)  # the event loop still runs
        assert pinned.refs() == {ref}
    finally:
        answers.set()
    await wait_until(lambda: pinned.refs() == frozenset())
    pinned.close()
    await pool.close()


async def test_new_default_version_and_new_pins_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_models, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr("deployments.registry.model_registry.REFRESH_S", 0.0)
    monkeypatch.setattr("deployments.watched_file.CHECK_INTERVAL_S", 0.0)
    old = ModelRef(MODEL, seal_tiny(tmp_path, MODEL).name)
    other = ModelRef("tiny/other", seal_tiny(tmp_path, "tiny/other").name)
    pinned, pool = PinnedModels(build_args(tmp_path), bool), build_pool(tmp_path)
    pinned.load_into(pool)
    pinned.start(pool)
    assert pinned.refs() == {old}
    seal_tiny_version(tmp_path, MODEL, NEW)
    changes.set_pinned(tmp_path, other.id, True)
    await wait_until(lambda: ModelRef(MODEL, NEW) in pool and other in pool)
    assert old in pool, "requests may still name it"
    pinned.close()
    await pool.close()
