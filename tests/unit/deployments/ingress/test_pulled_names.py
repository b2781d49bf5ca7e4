"""Names that the store knows are never pulled: the hub may have another model of the same name."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.artifacts.store import LATEST_NAME, model_directory
from deployments.builds.queue import BuildQueue
from deployments.config import BuildSettings
from deployments.errors import ArtifactMissing, LatestInvalid, ModelLoading
from deployments.ingress.builds import BuildService
from deployments.registry import ModelRegistry
from tests.support.artifacts import EMBEDDER, seal_tiny


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildService:
    monkeypatch.setattr("deployments.ingress.builds.has_compiler", lambda: True)
    service = BuildService(BuildQueue(tmp_path), lambda _: False)
    service.settings = BuildSettings(allow_pull=True)
    return service


async def test_model_whose_latest_version_is_gone_is_not_pulled(
    service: BuildService, tmp_path: Path
) -> None:
    sealed = seal_tiny(tmp_path, EMBEDDER)
    (sealed.parent / LATEST_NAME).write_text("feedfeedfeed\n")
    error = ArtifactMissing("no version `feedfeedfeed`")
    with pytest.raises(ArtifactMissing):
        await service.wait_for_missing(EMBEDDER, error, waits=False, may_pull=True)
    assert BuildQueue(tmp_path).read(EMBEDDER) is None


async def test_model_without_a_version_is_pulled(service: BuildService, tmp_path: Path) -> None:
    model_directory(tmp_path, EMBEDDER).mkdir()
    error = ArtifactMissing("not built")
    with pytest.raises(ModelLoading):
        await service.wait_for_missing(EMBEDDER, error, waits=False, may_pull=True)
    assert BuildQueue(tmp_path).read(EMBEDDER)


@pytest.mark.parametrize("content", ["", "garbage"])
def test_damaged_latest_is_an_error_of_the_model_and_not_of_its_name(
    tmp_path: Path, content: str
) -> None:
    (seal_tiny(tmp_path, EMBEDDER).parent / LATEST_NAME).write_text(content)
    with pytest.raises(LatestInvalid, match=f"`latest` of `{EMBEDDER}` names no version") as raised:
        ModelRegistry(tmp_path, ()).find(EMBEDDER)
    assert raised.value.status == 503
