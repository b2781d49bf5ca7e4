from __future__ import annotations

from pathlib import Path

import pytest

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.store import LATEST_NAME
from deployments.artifacts.types import Device
from deployments.config import AppArgs, EncoderSettings, ModelSettings
from deployments.errors import (
    ArtifactMissing,
    DigestMismatch,
    EngineFailed,
    HardwareUnavailable,
    ManifestInvalid,
    ServeError,
    UnknownModel,
    UnknownTask,
)
from deployments.registry import ModelRegistry
from tests.support.artifacts import GRAPH_NAME, seal, seal_tiny


def build_settings(*model_ids: str) -> list[ModelSettings]:
    return [ModelSettings(id=model_id) for model_id in model_ids]


def test_damaged_models_are_rejected_and_the_others_open(tmp_path: Path) -> None:
    seal_tiny(tmp_path, "tiny/whole")
    damaged = seal_tiny(tmp_path, "tiny/damaged")
    (damaged / GRAPH_NAME).write_bytes(b"")
    registry = ModelRegistry(
        tmp_path, build_settings("tiny/damaged", "never/built", "../escape", "tiny/whole")
    )

    assert [model.ref.id for model in registry.open_models()] == ["tiny/whole"]
    assert {model: type(error) for model, error in registry.rejected().items()} == {
        "tiny/damaged": DigestMismatch,
        "never/built": ArtifactMissing,
        "../escape": ManifestInvalid,
    }


def test_find_of_a_rejected_model_raises_a_new_error_each_time(tmp_path: Path) -> None:
    (seal_tiny(tmp_path, "tiny/damaged") / GRAPH_NAME).unlink()
    registry = ModelRegistry(tmp_path, build_settings("tiny/damaged"))
    errors = []
    for _ in range(2):
        with pytest.raises(DigestMismatch, match="tiny/damaged is not usable") as raised:
            registry.find("tiny/damaged")
        errors.append(raised.value)
    assert errors[0] is not errors[1], "a shared exception would accumulate tracebacks"


def test_find_returns_configured_models_only(tmp_path: Path) -> None:
    seal_tiny(tmp_path, "tiny/whole")
    seal_tiny(tmp_path, "tiny/unlisted")
    registry = ModelRegistry(tmp_path, build_settings("tiny/whole"))
    assert registry.find("tiny/whole").manifest.id == "tiny/whole"
    for model_id in ("tiny/unlisted", "tiny/WHOLE", "", "../store/tiny--whole"):
        with pytest.raises(UnknownModel) as raised:
            registry.find(model_id)
        assert raised.value.field == "model"


def test_pinned_version_overrides_latest(tmp_path: Path) -> None:
    sealed = seal_tiny(tmp_path, "tiny/model")
    (sealed.parent / "latest").write_text("feedfeedfeed\n")
    (pinned,) = ModelRegistry(
        tmp_path, [ModelSettings(id="tiny/model", version=sealed.name)]
    ).open_models()
    assert pinned.ref == ("tiny/model", sealed.name)
    assert pinned.directory == sealed


def test_registries_of_equal_settings_are_equal(tmp_path: Path) -> None:
    seal_tiny(tmp_path, "tiny/model")
    args = AppArgs(
        store=tmp_path,
        models=tuple(build_settings("tiny/model")),
        encoders={Device.CPU: EncoderSettings()},
    )
    first, second = (list(ModelRegistry.of(args).open_models()) for _ in range(2))
    assert first == second


def test_artifact_in_the_directory_of_another_id_is_rejected(tmp_path: Path) -> None:
    sealed = seal_tiny(tmp_path, "tiny/mine")
    sealed.parent.rename(tmp_path / "tiny--yours")
    registry = ModelRegistry(tmp_path, [ModelSettings(id="tiny/yours")])
    assert "`tiny/mine`" in registry.rejected()["tiny/yours"].message


def test_model_of_an_unknown_task_is_rejected(tmp_path: Path) -> None:
    directory = seal_tiny(tmp_path, "tiny/poet")
    manifest = ArtifactManifest.read(directory)
    seal(directory, manifest.model_copy(update={"tasks": (*manifest.tasks, "poetry")}))
    registry = ModelRegistry(tmp_path, build_settings("tiny/poet"))
    (error,) = registry.rejected().values()
    assert isinstance(error, UnknownTask)
    assert "`poetry`" in error.message


def test_pinned_version_that_is_refused_ends_the_start(tmp_path: Path) -> None:
    whole, damaged = (seal_tiny(tmp_path, f"tiny/{name}") for name in ("whole", "damaged"))
    (damaged / GRAPH_NAME).write_bytes(b"")
    pinned = [
        ModelSettings(id="tiny/whole", version=whole.name),
        ModelSettings(id="tiny/damaged", version=damaged.name),
    ]
    with pytest.raises(DigestMismatch, match=GRAPH_NAME):
        ModelRegistry(tmp_path, pinned)
    with pytest.raises(ArtifactMissing, match="feedfeedfeed"):
        ModelRegistry(tmp_path, [ModelSettings(id="tiny/whole", version="feedfeedfeed")])


@pytest.mark.parametrize(
    ("error", "is_pinned", "ends_the_start"),
    [
        (EngineFailed, True, True),
        (EngineFailed, False, False),
        (HardwareUnavailable, True, False),  # the model has no graph for this device
    ],
)
def test_pinned_version_that_cannot_be_loaded_ends_the_start(
    tmp_path: Path, error: type[ServeError], is_pinned: bool, ends_the_start: bool
) -> None:
    version = seal_tiny(tmp_path, "tiny/model").name if is_pinned else LATEST_NAME
    if not is_pinned:
        seal_tiny(tmp_path, "tiny/model")
    registry = ModelRegistry(tmp_path, [ModelSettings(id="tiny/model", version=version)])

    def fail(_model: object) -> None:
        raise error("not here")

    if ends_the_start:
        with pytest.raises(error):
            registry.load_each(fail)
    else:
        (failure,) = registry.load_each(fail)[1].values()
        assert isinstance(failure, error)
