from __future__ import annotations

from pathlib import Path

import pytest

from deployments.artifacts.types import Device
from deployments.config import AppArgs, EncoderSettings, ModelSettings
from deployments.errors import ArtifactMissing, DigestMismatch, ManifestInvalid, UnknownModel
from deployments.registry import ModelRegistry
from tests.support.artifacts import GRAPH_NAME, seal_tiny


def configured(*model_ids: str) -> list[ModelSettings]:
    return [ModelSettings(id=model_id) for model_id in model_ids]


def test_a_damaged_model_is_refused_with_its_reason_and_the_others_open(tmp_path: Path) -> None:
    seal_tiny(tmp_path, "tiny/whole")
    damaged = seal_tiny(tmp_path, "tiny/damaged")
    (damaged / GRAPH_NAME).write_bytes(b"")
    registry = ModelRegistry(
        tmp_path, configured("tiny/damaged", "never/built", "../escape", "tiny/whole")
    )

    assert [model.ref.id for model in registry.open_models()] == ["tiny/whole"]
    assert {model: type(error) for model, error in registry.rejected().items()} == {
        "tiny/damaged": DigestMismatch,
        "never/built": ArtifactMissing,
        "../escape": ManifestInvalid,
    }


def test_a_refused_model_answers_with_its_reason_each_time_anew(tmp_path: Path) -> None:
    (seal_tiny(tmp_path, "tiny/damaged") / GRAPH_NAME).unlink()
    registry = ModelRegistry(tmp_path, configured("tiny/damaged"))
    raised = []
    for _ in range(2):
        with pytest.raises(DigestMismatch, match="tiny/damaged is not usable") as refusal:
            registry.find("tiny/damaged")
        raised.append(refusal.value)
    assert raised[0] is not raised[1], "one shared exception would gather tracebacks for ever"


def test_only_configured_models_are_found(tmp_path: Path) -> None:
    seal_tiny(tmp_path, "tiny/whole")
    seal_tiny(tmp_path, "tiny/unlisted")
    registry = ModelRegistry(tmp_path, configured("tiny/whole"))
    assert registry.find("tiny/whole").manifest.id == "tiny/whole"
    for model_id in ("tiny/unlisted", "tiny/WHOLE", "", "../store/tiny--whole"):
        with pytest.raises(UnknownModel) as refusal:
            registry.find(model_id)
        assert refusal.value.field == "model"


def test_a_named_version_is_served_whatever_latest_says(tmp_path: Path) -> None:
    sealed = seal_tiny(tmp_path, "tiny/model")
    (sealed.parent / "latest").write_text("feedfeedfeed\n")
    (pinned,) = ModelRegistry(
        tmp_path, [ModelSettings(id="tiny/model", version=sealed.name)]
    ).open_models()
    assert pinned.ref == ("tiny/model", sealed.name)
    assert pinned.directory == sealed


def test_every_replica_reads_the_same_registry_from_the_same_settings(tmp_path: Path) -> None:
    seal_tiny(tmp_path, "tiny/model")
    args = AppArgs(
        store=tmp_path,
        models=tuple(configured("tiny/model")),
        encoders={Device.CPU: EncoderSettings()},
    )
    first, second = (list(ModelRegistry.of(args).open_models()) for _ in range(2))
    assert first == second


def test_an_artifact_under_another_name_is_refused(tmp_path: Path) -> None:
    mine = seal_tiny(tmp_path, "tiny/mine")
    mine.parent.rename(tmp_path / "tiny--yours")
    registry = ModelRegistry(tmp_path, [ModelSettings(id="tiny/yours")])
    assert "`tiny/mine`" in registry.rejected()["tiny/yours"].message
