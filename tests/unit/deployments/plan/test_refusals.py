"""Refused versions: which versions answer in their place, and what operators may still do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deployments.artifacts.manifest import MANIFEST_NAME, sealed_ns
from deployments.artifacts.store import model_directory
from deployments.errors import BadSetting
from deployments.messages import ModelRef
from deployments.plan import changes
from deployments.plan.plan import Refusal
from deployments.plan.plan_file import AVOID_S, PlanWatch, read_plan
from deployments.plan.resolution import find_traffic
from tests.support.artifacts import refuse_version
from tests.support.fakes import FakeClock
from tests.support.plan_stores import MODEL, NEW, NEWEST, OLD, default_version, seal_version


def test_refusal_of_a_former_seal_has_no_effect(store: Path) -> None:
    refusal = Refusal(reason="its graph does not open", sealed_ns=1)
    for version in (NEW, "ddddddddddd4"):  # sealed again, and removed
        assert changes.refuse(store, ModelRef(MODEL, version), refusal).models == {}


def test_refused_version_is_no_shadow(store: Path) -> None:
    changes.promote(store, MODEL, OLD)
    changes.set_shadow(store, MODEL, NEW, 5)
    refuse_version(store, MODEL, NEW)
    assert find_traffic(store, read_plan(store), MODEL).shadow is None


def test_refused_version_is_skipped_until_it_is_sealed_again(store: Path) -> None:
    refuse_version(store, MODEL, NEW)
    assert default_version(store) == OLD
    assert find_traffic(store, read_plan(store), f"{MODEL}@{NEW}").version == NEW, "named exactly"
    os.utime(model_directory(store, MODEL) / NEW / MANIFEST_NAME, (9, 9))
    assert default_version(store) == NEW


def test_version_that_this_host_cannot_run_is_avoided_for_some_minutes(store: Path) -> None:
    clock = FakeClock()
    watch = PlanWatch(store, clock)
    seal = sealed_ns(model_directory(store, MODEL) / NEW)
    watch.avoid(ModelRef(MODEL, NEW), Refusal(reason="no GPU", sealed_ns=seal))
    clock.now_s += AVOID_S - 1
    assert find_traffic(store, watch.current(), MODEL).version == OLD
    clock.now_s += 1
    assert find_traffic(store, watch.current(), MODEL).version == NEW


def test_refused_promotion_serves_the_version_before(store: Path) -> None:
    changes.promote(store, MODEL, OLD)
    seal_version(store, NEWEST, 3)
    changes.promote(store, MODEL, NEWEST)
    refuse_version(store, MODEL, NEWEST)
    assert default_version(store) == OLD, "not the newer one that was never promoted"
    changes.promote(store, MODEL, NEWEST)
    assert default_version(store) == NEWEST, "a promotion gives it another chance"


def test_operator_who_names_a_refused_version_by_an_alias_gets_no_other(store: Path) -> None:
    refuse_version(store, MODEL, NEW)
    before = read_plan(store)
    for change in (
        lambda: changes.promote(store, MODEL, "latest"),
        lambda: changes.set_split(store, MODEL, "latest", 10),
        lambda: changes.set_shadow(store, MODEL, "latest", 10),
        lambda: changes.set_alias(store, MODEL, "canary", "latest"),
    ):
        with pytest.raises(BadSetting, match=f"{NEW}, which is refused: its graph does not open"):
            change()
    assert read_plan(store) == before


def test_split_and_shadow_end_while_latest_is_refused(store: Path) -> None:
    changes.promote(store, MODEL, OLD)
    changes.set_shadow(store, MODEL, NEW, 5)
    refuse_version(store, MODEL, NEW)
    assert changes.set_split(store, MODEL, "latest", 0).find(MODEL).splits == {}
    assert changes.set_shadow(store, MODEL, "latest", 0).find(MODEL).shadow is None


def test_alias_of_a_refused_version_ends_the_split_of_that_version(store: Path) -> None:
    seal_version(store, NEWEST, 3)
    changes.set_alias(store, MODEL, "canary", NEWEST)
    changes.promote(store, MODEL, OLD)
    refuse_version(store, MODEL, NEWEST)
    changes.set_split(store, MODEL, NEWEST, 10)
    changes.set_split(store, MODEL, NEW, 20)
    assert changes.set_split(store, MODEL, "canary", 0).find(MODEL).splits == {NEW: 20}


def test_alias_of_a_refused_version_ends_no_split_of_another_version(store: Path) -> None:
    seal_version(store, NEWEST, 3)
    changes.set_alias(store, MODEL, "canary", NEWEST)
    changes.set_split(store, MODEL, NEW, 20)
    refuse_version(store, MODEL, NEWEST)
    assert changes.set_split(store, MODEL, "canary", 0).find(MODEL).splits == {NEW: 20}


def test_only_version_is_served_although_it_is_refused(tmp_path: Path) -> None:
    seal_version(tmp_path, NEW, 1)
    refuse_version(tmp_path, MODEL, NEW)
    assert default_version(tmp_path) == NEW
