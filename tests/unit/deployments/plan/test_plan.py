from __future__ import annotations

import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from deployments.artifacts.manifest import MANIFEST_NAME
from deployments.artifacts.store import model_directory, set_latest
from deployments.errors import (
    ArtifactMissing,
    BadSetting,
    ManifestInvalid,
    PlanUnusable,
    UnknownModel,
)
from deployments.plan import changes, resolution
from deployments.plan.plan import MAX_FORMER, STABLE, ModelPlan, Plan
from deployments.plan.plan_file import PLAN_NAME, PlanWatch, read_plan
from deployments.plan.resolution import (
    find_for_inspection,
    find_traffic,
    list_rollback_versions,
    select_version,
    split_name,
)
from deployments.watched_file import CHECK_INTERVAL_S
from tests.support.artifacts import refuse_version
from tests.support.fakes import FakeClock
from tests.support.plan_stores import MODEL, NEW, NEWEST, OLD, default_version, seal_version


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("org/model", ("org/model", None)),
        ("org/model@stable", ("org/model", "stable")),
        ("a@b@c", ("a@b", "c")),
        ("org/model@", ("org/model", "")),
    ],
)
def test_split_name_returns_id_and_selector(name: str, parts: tuple[str, str | None]) -> None:
    assert split_name(name) == parts


def test_without_a_plan_the_default_is_the_last_build(store: Path) -> None:
    assert read_plan(store) == Plan()
    assert default_version(store) == NEW
    assert find_traffic(store, Plan(), f"{MODEL}@{OLD}").version == OLD
    seal_version(store, NEWEST, 3)
    assert default_version(store) == NEWEST


def test_configured_version_is_the_default_until_another_is_promoted(store: Path) -> None:
    assert default_version(store, **{MODEL: OLD}) == OLD
    changes.promote(store, MODEL)
    assert default_version(store, **{MODEL: OLD}) == NEW


@pytest.mark.parametrize(
    "name",
    [
        "no/model",
        "../store",
        "",
        "@",
        f"{MODEL}@",
        f"{MODEL}@nope",
        f"{MODEL}@{NEWEST}",
        ".x@latest",
    ],
)
def test_unknown_names_raise(store: Path, name: str) -> None:
    with pytest.raises(UnknownModel):
        find_traffic(store, Plan(), name)


def test_unknown_version_lists_the_known_ones(store: Path) -> None:
    with pytest.raises(UnknownModel, match=f"`latest`, `{NEW}`, `{OLD}`"):
        find_traffic(store, Plan(), f"{MODEL}@nope")


def test_promote_holds_the_default_while_builds_move_latest(store: Path) -> None:
    plan = changes.promote(store, MODEL)
    assert plan.number == 1
    seal_version(store, NEWEST, 3)
    assert default_version(store) == NEW
    assert find_traffic(store, plan, f"{MODEL}@latest").version == NEWEST
    assert changes.promote(store, MODEL).find(MODEL).former == {STABLE: (NEW,)}
    assert default_version(store) == NEWEST


def test_rollback_undoes_promotions_one_by_one(store: Path) -> None:
    changes.promote(store, MODEL, OLD)
    changes.promote(store, MODEL, NEW)
    seal_version(store, NEWEST, 3)
    changes.promote(store, MODEL, NEWEST)
    assert [changes.rollback(store, MODEL).find(MODEL).aliases[STABLE] for _ in range(2)] == [
        NEW,
        OLD,
    ]
    with pytest.raises(BadSetting, match="no version before"):
        changes.rollback(store, MODEL)


def test_rollback_follows_the_order_of_the_promotions_not_of_the_builds(store: Path) -> None:
    seal_version(store, NEWEST, 3)
    for version in (OLD, NEWEST, NEW):
        changes.promote(store, MODEL, version)
    assert [changes.rollback(store, MODEL).find(MODEL).aliases[STABLE] for _ in range(2)] == [
        NEWEST,
        OLD,
    ]


def test_rollback_of_a_refused_promotion_returns_to_the_version_that_answers(store: Path) -> None:
    seal_version(store, NEWEST, 3)
    for version in (OLD, NEW, NEWEST):
        changes.promote(store, MODEL, version)
    refuse_version(store, MODEL, NEWEST)
    assert default_version(store) == NEW
    assert changes.rollback(store, MODEL).find(MODEL).aliases[STABLE] == NEW


@pytest.mark.parametrize("configured", [{}, {MODEL: OLD}])
def test_rollback_of_the_first_promotion_returns_to_the_version_that_answered(
    store: Path, configured: dict[str, str]
) -> None:
    seal_version(store, NEWEST, 3)
    answered = find_traffic(store, read_plan(store), MODEL, configured).version
    changes.promote(store, MODEL, NEW, configured)
    assert changes.rollback(store, MODEL, configured).find(MODEL).aliases[STABLE] == answered


def test_rollback_without_a_former_version_takes_the_configured_one(store: Path) -> None:
    seal_version(store, NEWEST, 3)
    entry = ModelPlan(aliases={STABLE: NEWEST})
    assert list_rollback_versions(store, MODEL, entry, {MODEL: OLD}) == [OLD]


def test_rollback_without_a_promotion_takes_the_version_before(store: Path) -> None:
    changes.rollback(store, MODEL)
    assert default_version(store) == OLD


def test_rollback_passes_over_refused_former_versions(store: Path) -> None:
    seal_version(store, NEWEST, 3)
    changes.promote(store, MODEL, NEW)
    changes.promote(store, MODEL, NEWEST)
    refuse_version(store, MODEL, NEW)
    changes.rollback(store, MODEL)
    assert default_version(store) == OLD


def test_rollback_passes_over_a_version_without_manifest(store: Path) -> None:
    seal_version(store, NEWEST, 3)
    for version in (OLD, NEW, NEWEST):
        changes.promote(store, MODEL, version)
    (model_directory(store, MODEL) / NEW / MANIFEST_NAME).unlink()
    changes.rollback(store, MODEL)
    assert default_version(store) == OLD


def test_aliases_remember_a_bounded_number_of_versions(store: Path) -> None:
    versions = [f"{number:012x}" for number in range(MAX_FORMER + 5)]
    for number, version in enumerate(versions):
        seal_version(store, version, 10 + number)
        plan = changes.set_alias(store, MODEL, "beta", version)
    assert plan.find(MODEL).former["beta"] == tuple(versions[-2 : -2 - MAX_FORMER : -1])


@pytest.mark.parametrize(
    "alias", ["latest", "", "UPPER", "a/b", "0" * 12, "a" * 12, "a" * 64, "a@b"]
)
def test_invalid_aliases_are_refused(store: Path, alias: str) -> None:
    with pytest.raises(BadSetting, match="cannot be an alias"):
        changes.set_alias(store, MODEL, alias, OLD)
    assert not (store / PLAN_NAME).exists()


def test_removed_alias_is_unknown(store: Path) -> None:
    changes.set_alias(store, MODEL, "beta", OLD)
    plan = changes.remove_alias(store, MODEL, "beta")
    assert plan.models == {}
    with pytest.raises(BadSetting, match="no alias"):
        changes.remove_alias(store, MODEL, "beta")


def test_changes_of_unknown_versions_write_nothing(store: Path) -> None:
    for change in (
        lambda: changes.promote(store, MODEL, NEWEST),
        lambda: changes.set_split(store, MODEL, NEWEST, 10),
        lambda: changes.set_pinned(store, "no/model", True),
    ):
        with pytest.raises(UnknownModel):
            change()
    assert not (store / PLAN_NAME).exists()


def test_change_without_effect_keeps_the_number(store: Path) -> None:
    assert changes.set_pinned(store, MODEL, True).number == 1
    assert changes.set_pinned(store, MODEL, True).number == 1


def test_splits_beyond_all_requests_are_refused(store: Path) -> None:
    seal_version(store, NEWEST, 3)
    changes.set_split(store, MODEL, OLD, 60)
    with pytest.raises(BadSetting, match="110 percent"):
        changes.set_split(store, MODEL, NEW, 50)
    with pytest.raises(BadSetting):
        changes.set_split(store, MODEL, OLD, -1)


def test_splits_of_exactly_all_requests_are_accepted_whatever_their_rounding(store: Path) -> None:
    others = ["ddddddddddd4", OLD, NEW]
    seal_version(store, others[0], 0)
    seal_version(store, NEWEST, 3)
    percents = (28.6, 35.7, 35.7)
    assert percents[0] + percents[1] + percents[2] > 100, "rounded; `sum` corrects it since 3.12"
    for version, percent in zip(others, percents, strict=True):
        plan = changes.set_split(store, MODEL, version, percent)
    assert len(find_traffic(store, plan, MODEL).splits) == 3


def test_version_that_answers_already_gets_neither_split_nor_shadow(store: Path) -> None:
    for change in (changes.set_split, changes.set_shadow):
        with pytest.raises(BadSetting, match=f"{NEW} of {MODEL} is the default"):
            change(store, MODEL, "latest", 10)
        with pytest.raises(BadSetting, match=f"{OLD} of {MODEL} is the default"):
            change(store, MODEL, OLD, 10, {MODEL: OLD})
        change(store, MODEL, "latest", 10, {MODEL: OLD})


def test_inspected_version_is_named_as_in_requests_and_may_be_refused(store: Path) -> None:
    plan = changes.set_alias(store, MODEL, "tested", OLD)
    plan = refuse_version(store, MODEL, NEW)
    names = {MODEL: NEW, f"{MODEL}@latest": NEW, f"{MODEL}@tested": OLD, f"{MODEL}@{OLD}": OLD}
    assert {name: find_for_inspection(store, plan, name).name for name in names} == names
    with pytest.raises(ArtifactMissing, match="no version `nope`"):
        find_for_inspection(store, plan, f"{MODEL}@nope")
    with pytest.raises(ManifestInvalid, match="is not a model id"):
        find_for_inspection(store, plan, f"{MODEL}:{OLD}")


def test_split_has_its_share_of_the_clients_and_is_sticky(store: Path) -> None:
    changes.promote(store, MODEL, OLD)
    plan = changes.set_split(store, MODEL, NEW, 10)
    traffic = find_traffic(store, plan, MODEL)
    clients = [f"client {number}" for number in range(5_000)]
    first = {client: select_version(traffic, client) for client in clients}
    assert Counter(first.values())[NEW] / len(clients) == pytest.approx(0.10, abs=0.02)
    assert first == {client: select_version(traffic, client) for client in clients}

    more = find_traffic(store, changes.set_split(store, MODEL, NEW, 20), MODEL)
    moved = {client for client in clients if select_version(more, client) != first[client]}
    assert all(first[client] == OLD for client in moved), "a growing split only gains clients"


@pytest.mark.parametrize("byte", [b"\0", b"\xff"])
def test_client_with_an_extreme_hash_gets_a_version(
    store: Path, monkeypatch: pytest.MonkeyPatch, byte: bytes
) -> None:
    changes.promote(store, MODEL, OLD)
    traffic = find_traffic(store, changes.set_split(store, MODEL, NEW, 10), MODEL)
    monkeypatch.setattr(
        resolution, "blake2b", lambda *_, **__: SimpleNamespace(digest=lambda: byte * 8)
    )
    assert select_version(traffic, "client") in (OLD, NEW)


def test_split_of_all_requests_leaves_none(store: Path) -> None:
    changes.promote(store, MODEL, OLD)
    traffic = find_traffic(store, changes.set_split(store, MODEL, NEW, 100), MODEL)
    assert {select_version(traffic, str(number)) for number in range(100)} == {NEW}


def test_split_is_ignored_where_a_version_is_named(store: Path) -> None:
    changes.promote(store, MODEL, OLD)
    plan = changes.set_split(store, MODEL, NEW, 50)
    assert find_traffic(store, plan, f"{MODEL}@stable").splits == ()


def test_promote_ends_splits_and_shadow(store: Path) -> None:
    changes.promote(store, MODEL, OLD)
    changes.set_split(store, MODEL, NEW, 50)
    changes.set_shadow(store, MODEL, NEW, 5)
    traffic = find_traffic(store, changes.promote(store, MODEL, NEW), MODEL)
    assert traffic == (NEW, (), None)


def test_shadow_of_the_default_version_is_none(store: Path) -> None:
    changes.set_shadow(store, MODEL, OLD, 5)
    assert find_traffic(store, read_plan(store), MODEL).shadow
    set_latest(store, MODEL, OLD)
    assert find_traffic(store, read_plan(store), MODEL).shadow is None
    traffic = find_traffic(store, changes.promote(store, MODEL, NEW), MODEL)
    assert traffic.shadow is None, "a promotion ends it"


@pytest.mark.parametrize("selector", [NEWEST, "canary"])
def test_split_and_shadow_end_after_their_version_was_deleted(store: Path, selector: str) -> None:
    seal_version(store, NEWEST, 3)
    changes.set_alias(store, MODEL, "canary", NEWEST)
    changes.promote(store, MODEL, OLD)
    changes.set_split(store, MODEL, NEWEST, 10)
    changes.set_split(store, MODEL, NEW, 20)
    changes.set_shadow(store, MODEL, NEWEST, 5)
    shutil.rmtree(model_directory(store, MODEL) / NEWEST)
    assert changes.set_split(store, MODEL, selector, 0).find(MODEL).splits == {NEW: 20}
    assert changes.set_shadow(store, MODEL, selector, 0).find(MODEL).shadow is None
    with pytest.raises(UnknownModel):
        changes.set_split(store, MODEL, selector, 0)


def test_forgotten_model_leaves_the_plan(store: Path) -> None:
    changes.promote(store, MODEL)
    assert changes.forget(store, MODEL).models == {}
    assert read_plan(store).number == 2


def test_concurrent_changes_all_count(store: Path) -> None:
    def pin(number: int) -> None:
        seal_version(store, OLD, 1, f"org/model{number}")
        changes.set_pinned(store, f"org/model{number}", True)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(pin, range(40)))
    plan = read_plan(store)
    assert (plan.number, len(plan.models)) == (40, 40)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"number": -1}', b'{"models": {"a": {"aliases": {"latest": "aaaaaaaaaaa1"}}}}'],
)
def test_invalid_plan_is_refused_at_the_start_and_ignored_later(
    store: Path, content: bytes
) -> None:
    changes.promote(store, MODEL)
    clock = FakeClock()
    watch = PlanWatch(store, clock)
    (store / PLAN_NAME).write_bytes(content)
    clock.now_s += CHECK_INTERVAL_S
    assert watch.current().number == 1
    with pytest.raises(PlanUnusable, match=PLAN_NAME):
        PlanWatch(store)


def test_watch_follows_the_file_and_survives_its_removal(store: Path) -> None:
    clock = FakeClock()
    watch = PlanWatch(store, clock)
    changes.promote(store, MODEL, OLD)
    assert watch.current().number == 0, "it looks once a second"
    clock.now_s += CHECK_INTERVAL_S
    assert watch.current().find(MODEL).aliases == {STABLE: OLD}
    (store / PLAN_NAME).unlink()
    clock.now_s += CHECK_INTERVAL_S
    assert watch.current().number == 1
