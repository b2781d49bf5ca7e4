from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import Device
from deployments.config import AppArgs, EncoderSettings, ModelSettings
from deployments.errors import (
    ArtifactError,
    ArtifactMissing,
    DigestMismatch,
    ManifestInvalid,
    UnknownModel,
    UnknownTask,
)
from deployments.messages import ModelRef
from deployments.plan import changes
from deployments.plan.plan import Shadow
from deployments.registry.model_registry import REFRESH_S, ModelRegistry
from tests.support.artifacts import GRAPH_NAME, seal, seal_tiny, seal_tiny_version
from tests.support.fakes import FakeClock, fail_with

NEW, NEWEST = "bbbbbbbbbbb2", "ccccccccccc3"


def build_settings(*model_ids: str) -> list[ModelSettings]:
    return [ModelSettings(id=model_id) for model_id in model_ids]


def find_answering(registry: ModelRegistry, clock: FakeClock) -> str:
    """Return the version that answers a client after the look-up has expired."""
    clock.now_s += REFRESH_S
    return registry.find("tiny/model", lambda: "anybody").ref.version


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


def test_log_names_the_store_of_a_rejected_model_and_the_error_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = seal_tiny(tmp_path, "tiny/damaged")
    (damaged / GRAPH_NAME).unlink()
    (error,) = ModelRegistry(tmp_path, build_settings("tiny/damaged")).rejected().values()
    assert f"tiny/damaged@{damaged.name}: `{GRAPH_NAME}`" in error.message
    assert str(tmp_path) not in error.message
    assert f"tiny/damaged of {tmp_path} rejected: " in caplog.text


def test_find_of_a_rejected_model_raises_a_new_error_each_time(tmp_path: Path) -> None:
    (seal_tiny(tmp_path, "tiny/damaged") / GRAPH_NAME).unlink()
    registry = ModelRegistry(tmp_path, build_settings("tiny/damaged"))
    errors = []
    for _ in range(2):
        with pytest.raises(DigestMismatch, match="tiny/damaged is not usable") as raised:
            registry.find("tiny/damaged")
        errors.append(raised.value)
    assert errors[0] is not errors[1], "a shared exception would accumulate tracebacks"


def test_find_returns_every_sealed_model_and_lists_the_configured_ones(tmp_path: Path) -> None:
    seal_tiny(tmp_path, "tiny/whole")
    unlisted = seal_tiny(tmp_path, "tiny/unlisted")
    registry = ModelRegistry(tmp_path, build_settings("tiny/whole"))
    assert registry.find("tiny/whole").manifest.id == "tiny/whole"
    assert registry.find("tiny/unlisted").directory == unlisted
    assert registry.find(f"tiny/unlisted@{unlisted.name}").directory == unlisted
    assert [model.ref.id for model in registry.open_models()] == ["tiny/whole"]
    for name in ("never/built", "tiny/WHOLE", "", "../store/tiny--whole", "tiny/whole@nope", "@"):
        with pytest.raises(UnknownModel) as raised:
            registry.find(name)
        assert raised.value.field == "model"


def test_find_reads_no_manifest_but_the_one_it_needs(tmp_path: Path) -> None:
    seal_tiny(tmp_path, "tiny/whole")
    other = seal_tiny(tmp_path, "tiny/other")
    (other / "manifest.json").write_text("no JSON")
    registry = ModelRegistry(tmp_path, [])
    assert registry.find("tiny/whole").ref.id == "tiny/whole"
    with pytest.raises(ManifestInvalid):
        registry.find("tiny/other")


def test_manifest_is_read_again_after_a_failed_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal_tiny(tmp_path, "tiny/model")
    registry = ModelRegistry(tmp_path, [])
    with monkeypatch.context() as failing:
        failing.setattr(Path, "read_bytes", fail_with(errno.EIO))
        with pytest.raises(ManifestInvalid):
            registry.find("tiny/model")
    assert registry.find("tiny/model").ref.id == "tiny/model"


def make_unreadable(latest: Path) -> None:
    """Replace a file `latest` by a directory, which no user can read as a file."""
    latest.unlink()
    latest.mkdir()


def test_route_and_pin_stay_while_latest_cannot_be_read(tmp_path: Path) -> None:
    directory = seal_tiny(tmp_path, "tiny/model")
    changes.set_pinned(tmp_path, "tiny/model", True)
    clock = FakeClock()
    registry = ModelRegistry(tmp_path, [], clock)
    model = registry.find("tiny/model")
    make_unreadable(directory.with_name("latest"))
    clock.now_s += REFRESH_S
    assert registry.find("tiny/model") == model
    assert registry.list_kept_loaded() == [model]
    directory.with_name("latest").rmdir()
    new = seal_tiny_version(tmp_path, "tiny/model", NEW)
    clock.now_s += REFRESH_S
    assert registry.find("tiny/model").directory == new


def test_model_whose_latest_cannot_be_read_is_not_unknown(tmp_path: Path) -> None:
    make_unreadable(seal_tiny(tmp_path, "tiny/model").with_name("latest"))
    with pytest.raises(ArtifactError, match="`latest` of `tiny/model` cannot be read") as raised:
        ModelRegistry(tmp_path, []).find("tiny/model")
    assert not isinstance(raised.value, ArtifactMissing), "so that no build of it is queued"
    assert str(tmp_path) not in raised.value.message


def test_rebuild_and_plan_are_followed_without_restart(tmp_path: Path) -> None:
    old = seal_tiny(tmp_path, "tiny/model")
    clock = FakeClock()
    registry = ModelRegistry(tmp_path, build_settings("tiny/model"), clock)
    assert registry.find("tiny/model").directory == old

    new = seal_tiny_version(tmp_path, "tiny/model", NEW)
    assert registry.find("tiny/model").directory == old, "a name is looked up once a second"
    clock.now_s += REFRESH_S
    assert registry.find("tiny/model").directory == new
    assert registry.find(f"tiny/model@{old.name}").directory == old

    changes.promote(tmp_path, "tiny/model", old.name)
    clock.now_s += REFRESH_S
    assert registry.find("tiny/model").directory == old
    assert registry.find("tiny/model@latest").directory == new
    assert [model.directory for model in registry.open_models()] == [old]


def test_split_is_served_to_its_clients(tmp_path: Path) -> None:
    old = seal_tiny(tmp_path, "tiny/model")
    seal_tiny_version(tmp_path, "tiny/model", NEW)
    changes.promote(tmp_path, "tiny/model", old.name)
    changes.set_split(tmp_path, "tiny/model", NEW, 50)
    registry = ModelRegistry(tmp_path, [])

    def serve(client: str) -> str:
        return registry.find("tiny/model", lambda: client).ref.version

    answers = {client: serve(client) for client in map(str, range(50))}
    assert set(answers.values()) == {old.name, NEW}
    assert answers == {client: serve(client) for client in answers}


def test_split_changes_neither_pins_nor_listed_models(tmp_path: Path) -> None:
    old = seal_tiny(tmp_path, "tiny/model")
    seal_tiny_version(tmp_path, "tiny/model", NEW)
    changes.promote(tmp_path, "tiny/model", old.name)
    changes.set_split(tmp_path, "tiny/model", NEW, 99)
    registry = ModelRegistry(tmp_path, build_settings("tiny/model"))
    assert [model.ref.version for model in registry.list_kept_loaded()] == [old.name]
    assert [model.ref.version for model in registry.open_models()] == [old.name]


def test_ended_split_ends_while_a_new_version_is_tried(tmp_path: Path) -> None:
    old = seal_tiny(tmp_path, "tiny/model").name
    seal_tiny_version(tmp_path, "tiny/model", NEW)
    changes.promote(tmp_path, "tiny/model", old)
    changes.set_split(tmp_path, "tiny/model", NEW, 100)
    clock = FakeClock()
    registry = ModelRegistry(tmp_path, [], clock)
    tried: list[str] = []
    registry.start_trial = lambda model: tried.append(model.ref.version)

    assert find_answering(registry, clock) == NEW
    seal_tiny_version(tmp_path, "tiny/model", NEWEST)
    changes.remove_alias(tmp_path, "tiny/model", "stable")
    assert (find_answering(registry, clock), tried) == (NEW, [NEWEST]), (
        "the trial of the new default does not end it"
    )
    changes.set_split(tmp_path, "tiny/model", NEW, 0)
    assert find_answering(registry, clock) == old
    registry.accept(ModelRef("tiny/model", NEWEST))
    assert find_answering(registry, clock) == NEWEST


def test_removed_version_of_a_split_ends_while_a_new_version_is_tried(tmp_path: Path) -> None:
    old = seal_tiny(tmp_path, "tiny/model").name
    new = seal_tiny_version(tmp_path, "tiny/model", NEW)
    changes.promote(tmp_path, "tiny/model", old)
    changes.set_split(tmp_path, "tiny/model", NEW, 100)
    clock = FakeClock()
    registry = ModelRegistry(tmp_path, [], clock)
    registry.start_trial = lambda _model: None
    assert registry.find("tiny/model", lambda: "anybody").directory == new
    seal_tiny_version(tmp_path, "tiny/model", NEWEST)
    changes.remove_alias(tmp_path, "tiny/model", "stable")
    shutil.rmtree(new)
    clock.now_s += REFRESH_S
    assert registry.find("tiny/model", lambda: "anybody").ref.version == old


def test_split_ends_although_latest_is_damaged(tmp_path: Path) -> None:
    old = seal_tiny(tmp_path, "tiny/model").name
    new = seal_tiny_version(tmp_path, "tiny/model", NEW)
    (new.parent / "latest").write_text(old)
    changes.set_split(tmp_path, "tiny/model", NEW, 100)
    clock = FakeClock()
    registry = ModelRegistry(tmp_path, [], clock)

    assert find_answering(registry, clock) == NEW
    (new.parent / "latest").write_text("")
    assert find_answering(registry, clock) == NEW
    changes.set_split(tmp_path, "tiny/model", NEW, 0)
    assert find_answering(registry, clock) == old


def test_version_on_trial_is_replaced_by_one_that_is_not_its_own_shadow(tmp_path: Path) -> None:
    old = seal_tiny(tmp_path, "tiny/model").name
    clock = FakeClock()
    registry = ModelRegistry(tmp_path, [], clock)
    registry.start_trial = lambda _model: None
    registry.find("tiny/model")
    seal_tiny_version(tmp_path, "tiny/model", NEW)
    changes.promote(tmp_path, "tiny/model", NEW)
    changes.set_shadow(tmp_path, "tiny/model", old, 100)
    clock.now_s += REFRESH_S
    answering = registry.find("tiny/model").ref
    assert answering.version == old
    assert registry.find_shadow("tiny/model", answering) is None


def test_new_split_begins_when_its_version_is_accepted(tmp_path: Path) -> None:
    old = seal_tiny(tmp_path, "tiny/model").name
    clock = FakeClock()
    registry = ModelRegistry(tmp_path, [], clock)
    registry.start_trial = lambda _model: None
    registry.find("tiny/model")
    changes.promote(tmp_path, "tiny/model", old)
    seal_tiny_version(tmp_path, "tiny/model", NEW)
    changes.set_split(tmp_path, "tiny/model", NEW, 100)

    assert find_answering(registry, clock) == old
    registry.accept(ModelRef("tiny/model", NEW))
    assert find_answering(registry, clock) == NEW


def test_shadow_repeats_requests_that_name_no_version_and_ends_at_once(tmp_path: Path) -> None:
    old = seal_tiny(tmp_path, "tiny/model").name
    seal_tiny_version(tmp_path, "tiny/model", NEW)
    changes.promote(tmp_path, "tiny/model", old)
    changes.set_shadow(tmp_path, "tiny/model", NEW, 100)
    clock = FakeClock()
    registry = ModelRegistry(tmp_path, [], clock)

    def find_shadow(name: str) -> Shadow | None:
        clock.now_s += REFRESH_S
        return registry.find_shadow(name, registry.find(name).ref)

    assert find_shadow("tiny/model") == Shadow(version=NEW, percent=100)
    for name in (f"tiny/model@{old}", "tiny/model@stable", f"tiny/model@{NEW}"):
        assert find_shadow(name) is None
    changes.set_shadow(tmp_path, "tiny/model", NEW, 0)
    assert find_shadow("tiny/model") is None


def test_split_to_a_damaged_version_is_left_out(tmp_path: Path) -> None:
    old = seal_tiny(tmp_path, "tiny/model")
    new = seal_tiny_version(tmp_path, "tiny/model", NEW)
    changes.promote(tmp_path, "tiny/model", old.name)
    changes.set_split(tmp_path, "tiny/model", NEW, 100)
    (new / "manifest.json").write_text("no JSON")
    registry = ModelRegistry(tmp_path, [])
    assert registry.find("tiny/model", lambda: "anybody").directory == old


def test_repaired_model_is_served_again(tmp_path: Path) -> None:
    damaged = seal_tiny(tmp_path, "tiny/model")
    (damaged / GRAPH_NAME).write_bytes(b"")
    clock = FakeClock()
    registry = ModelRegistry(tmp_path, build_settings("tiny/model"), clock)
    assert list(registry.rejected()) == ["tiny/model"]
    seal_tiny(tmp_path, "tiny/model")
    os.utime(damaged / "manifest.json", (1, 1))
    clock.now_s += REFRESH_S
    assert registry.rejected() == {}


def test_remembered_names_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.registry.model_registry.MAX_NAMES", 3)
    names = [f"tiny/model{number}" for number in range(6)]
    for name in names:
        seal_tiny(tmp_path, name)
    registry = ModelRegistry(tmp_path, [])
    assert [registry.find(name).ref.id for name in names * 2] == names * 2
    assert len(registry._routes) <= 3


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
    message = registry.rejected()["tiny/yours"].message
    assert "`tiny/mine`" in message
    assert str(tmp_path) not in message


def test_model_of_an_unknown_task_is_rejected(tmp_path: Path) -> None:
    directory = seal_tiny(tmp_path, "tiny/poet")
    manifest = ArtifactManifest.read(directory)
    seal(directory, manifest.model_copy(update={"tasks": (*manifest.tasks, "poetry")}))
    registry = ModelRegistry(tmp_path, build_settings("tiny/poet"))
    (error,) = registry.rejected().values()
    assert isinstance(error, UnknownTask)
    assert "`poetry`" in error.message
    assert str(tmp_path) not in error.message


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
