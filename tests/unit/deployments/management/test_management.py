"""Operations on the models of a store: listing, changes and removal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deployments.artifacts.locks import exclusive_lock
from deployments.artifacts.manifest import MANIFEST_NAME
from deployments.artifacts.store import (
    LATEST_NAME,
    build_path,
    lock_path,
    model_directory,
    resolve_version,
)
from deployments.builds.queue import BuildQueue
from deployments.errors import (
    InvalidField,
    ModelInUse,
    PlanUnusable,
    StoreNotWritable,
    UnknownModel,
)
from deployments.management.actions import ACTIONS
from deployments.management.listing import ModelEntry, describe_model, list_default_versions
from deployments.management.removal import remove
from deployments.plan.plan_file import PLAN_NAME, read_plan
from tests.support.artifacts import GRAPH_NAME, refuse_version, seal_tiny_version
from tests.support.ordinary_rights import ordinary_rights

MODEL, OLD, NEW = "acme/tiny", "000000000001", "000000000002"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for version in (OLD, NEW):
        seal_tiny_version(tmp_path, MODEL, version)
    return tmp_path


def act(
    store: Path, action: str, name: str = MODEL, configured: str = "latest", **fields: object
) -> ModelEntry:
    arguments = ACTIONS[action].arguments(**fields)
    return ACTIONS[action].run(store, name, arguments, {MODEL: configured})


def facts(entry: ModelEntry) -> dict[str, tuple[list[str], float]]:
    return {one.version: (one.aliases, one.percent) for one in entry.versions}


def test_listing_has_versions_aliases_and_shares(store: Path) -> None:
    entry = describe_model(store, MODEL)
    assert facts(entry) == {NEW: (["latest"], 100.0), OLD: ([], 0.0)}
    graph = model_directory(store, MODEL) / NEW / GRAPH_NAME
    assert entry.versions[0].size_bytes > graph.stat().st_size
    assert entry.versions[0].created > 1_700_000_000
    assert (entry.pinned, entry.shadow, entry.build) == (False, None, None)


def test_listing_keeps_a_damaged_version_with_its_reason(store: Path) -> None:
    (model_directory(store, MODEL) / OLD / MANIFEST_NAME).write_text("{")
    entry = describe_model(store, MODEL)
    (damaged,) = (one for one in entry.versions if one.version == OLD)
    assert damaged.size_bytes == 0
    assert MANIFEST_NAME in damaged.reason


def test_model_whose_latest_cannot_be_read_does_not_break_lists(store: Path) -> None:
    seal_tiny_version(store, "acme/other", NEW)
    latest = model_directory(store, MODEL) / LATEST_NAME
    latest.unlink()
    latest.mkdir()
    assert facts(describe_model(store, MODEL)) == {NEW: ([], 0.0), OLD: ([], 0.0)}
    assert list_default_versions(store) == {"acme/other": NEW}


def test_empty_store_has_no_models(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel):
        describe_model(tmp_path, MODEL)


def test_promotion_and_rollback_move_all_requests(store: Path) -> None:
    assert facts(act(store, "promote", f"{MODEL}@{OLD}")) == {
        NEW: (["latest"], 0.0),
        OLD: (["stable"], 100.0),
    }
    assert facts(act(store, "promote"))[NEW] == (["latest", "stable"], 100.0)
    assert facts(act(store, "rollback"))[OLD] == (["stable"], 100.0)


def test_configured_version_has_the_requests_until_another_is_promoted(store: Path) -> None:
    newest = "000000000003"
    seal_tiny_version(store, MODEL, newest)
    assert facts(describe_model(store, MODEL, {MODEL: OLD}))[OLD] == ([], 100.0)
    with pytest.raises(InvalidField, match=f"no version before {OLD}"):
        act(store, "rollback", configured=OLD)
    assert facts(act(store, "promote", configured=OLD))[newest] == (["latest", "stable"], 100.0)
    assert facts(act(store, "rollback", configured=OLD))[OLD] == (["stable"], 100.0)


def test_split_shadow_alias_and_pin_are_told(store: Path) -> None:
    act(store, "promote", f"{MODEL}@{OLD}")
    assert facts(act(store, "split", f"{MODEL}@{NEW}", percent=10.0))[NEW][1] == 10.0
    entry = act(store, "shadow", f"{MODEL}@{NEW}", percent=5.0)
    assert entry.shadow is not None
    assert entry.shadow.percent == 5.0
    assert facts(act(store, "alias", f"{MODEL}@{OLD}", alias="old"))[OLD][0] == ["stable", "old"]
    assert facts(act(store, "alias", alias="old", remove=True))[OLD][0] == ["stable"]
    assert act(store, "pin").pinned
    assert not act(store, "unpin").pinned


@pytest.mark.parametrize(
    ("action", "name", "fields", "error"),
    [
        ("promote", "no/such", {}, UnknownModel),
        ("promote", f"{MODEL}@ffffffffffff", {}, UnknownModel),
        ("promote", "../x", {}, UnknownModel),
        ("rollback", "a/../../b", {}, UnknownModel),
        ("alias", MODEL, {"alias": "Not An Alias"}, InvalidField),
        ("alias", MODEL, {"alias": "gone", "remove": True}, InvalidField),
        ("pin", "no/such", {}, UnknownModel),
        ("pin", f"{MODEL}@{OLD}", {}, InvalidField),
        ("unpin", f"{MODEL}@{OLD}", {}, InvalidField),
        ("rollback", f"{MODEL}@{OLD}", {}, InvalidField),
    ],
)
def test_impossible_changes_say_why(
    store: Path, action: str, name: str, fields: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        act(store, action, name, **fields)
    assert read_plan(store).number == 0


def test_plan_that_cannot_be_written_is_named(store: Path) -> None:
    (store / f"{PLAN_NAME}.lock").mkdir()
    with pytest.raises(PlanUnusable, match="cannot write the plan"):
        act(store, "pin")


def test_damaged_plan_is_named(store: Path) -> None:
    (store / PLAN_NAME).write_text('{"number": -1}')
    with pytest.raises(PlanUnusable, match="`number`"):
        act(store, "pin")
    with pytest.raises(PlanUnusable, match="`number`"):
        describe_model(store, MODEL)


def test_model_keeps_its_files_if_the_plan_cannot_be_written(store: Path) -> None:
    (store / f"{PLAN_NAME}.lock").mkdir()
    with pytest.raises(PlanUnusable):
        remove(store, MODEL)
    assert facts(describe_model(store, MODEL)).keys() == {OLD, NEW}


def test_removed_model_leaves_nothing(store: Path) -> None:
    queue = BuildQueue(store)
    queue.submit(MODEL, "/nowhere")
    act(store, "pin")
    assert sorted(remove(store, MODEL)) == [OLD, NEW]
    assert not model_directory(store, MODEL).exists()
    assert MODEL not in read_plan(store).models
    assert queue.read(MODEL) is None
    with pytest.raises(UnknownModel):
        remove(store, MODEL)


def test_unused_version_is_removed_alone(store: Path) -> None:
    assert remove(store, f"{MODEL}@{OLD}") == [OLD]
    assert list(facts(describe_model(store, MODEL))) == [NEW]


def test_latest_names_the_newest_version_that_is_left(store: Path) -> None:
    act(store, "promote", f"{MODEL}@{OLD}")
    assert remove(store, f"{MODEL}@{NEW}") == [NEW]
    assert resolve_version(store, MODEL, LATEST_NAME) == OLD


def test_store_without_rights_to_change_it_is_named(public_directory: Path) -> None:
    for version in (OLD, NEW):
        seal_tiny_version(public_directory, MODEL, version)
    with ordinary_rights(), pytest.raises(StoreNotWritable, match="cannot remove acme/tiny"):
        remove(public_directory, f"{MODEL}@{OLD}")


def test_version_in_use_stays(store: Path) -> None:
    with pytest.raises(ModelInUse, match="requests that name no version"):
        remove(store, f"{MODEL}@latest")
    act(store, "promote", f"{MODEL}@{OLD}")
    with pytest.raises(ModelInUse, match="the alias `stable`"):
        remove(store, f"{MODEL}@stable")
    act(store, "split", f"{MODEL}@{NEW}", percent=1.0)
    with pytest.raises(ModelInUse, match="a split"):
        remove(store, f"{MODEL}@{NEW}")
    act(store, "split", f"{MODEL}@{NEW}", percent=0.0)
    act(store, "shadow", f"{MODEL}@{NEW}", percent=1.0)
    with pytest.raises(ModelInUse, match="the shadow"):
        remove(store, f"{MODEL}@{NEW}")
    assert len(describe_model(store, MODEL).versions) == 2


def test_refused_version_is_removed_itself(store: Path) -> None:
    newest = "000000000003"
    act(store, "promote", f"{MODEL}@{OLD}")
    seal_tiny_version(store, MODEL, newest)
    refuse_version(store, MODEL, newest)
    assert remove(store, f"{MODEL}@latest") == [newest]


def test_promoted_model_keeps_the_version_of_the_configuration(store: Path) -> None:
    act(store, "promote", f"{MODEL}@{NEW}")
    with pytest.raises(ModelInUse, match="the configuration"):
        remove(store, f"{MODEL}@{OLD}", {MODEL: OLD})


def test_version_of_the_configuration_stays(store: Path) -> None:
    with pytest.raises(ModelInUse, match="requests that name no version"):
        remove(store, f"{MODEL}@{OLD}", {MODEL: OLD})


def test_model_that_is_being_built_stays(store: Path) -> None:
    for version in (OLD, "000000000003"):
        lock = lock_path(build_path(store, MODEL, version))
        lock.parent.mkdir(exist_ok=True)
        with exclusive_lock(lock, lambda _: None), pytest.raises(ModelInUse, match="being built"):
            remove(store, MODEL)
    queue = BuildQueue(store)
    queue.submit(MODEL, "/nowhere")
    with queue.claim(MODEL), pytest.raises(ModelInUse, match="being built"):
        remove(store, MODEL)
    assert len(describe_model(store, MODEL).versions) == 2


def test_failed_build_alone_is_removed(tmp_path: Path) -> None:
    queue = BuildQueue(tmp_path)
    queue.submit(MODEL, "/nowhere")
    with queue.claim(MODEL) as claim:
        assert claim is not None
        claim.fail("no weights")
    entry = describe_model(tmp_path, MODEL)
    assert entry.build is not None
    assert entry.build.reason == "no weights"
    assert remove(tmp_path, MODEL) == []
    with pytest.raises(UnknownModel):
        describe_model(tmp_path, MODEL)


@pytest.mark.parametrize("name", ["../x", "a/../../b", "/etc", ".builds", "", "x@../y"])
def test_nothing_outside_of_the_store_is_removed(store: Path, name: str) -> None:
    outside = store.parent / "x"
    outside.mkdir(exist_ok=True)
    with pytest.raises(UnknownModel):
        remove(store, name)
    assert outside.is_dir()
    assert len(describe_model(store, MODEL).versions) == 2


def test_listing_is_json(store: Path) -> None:
    entry = describe_model(store, MODEL)
    assert json.loads(entry.model_dump_json())["versions"][0]["version"] == NEW
