"""Estimated percentage and remaining time of builds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from deployments.builds.estimates import BuildStatus, build_status
from deployments.builds.record import BuildDurations, BuildRecord, BuildState

PULLING, BUILDING, VERIFYING = BuildState.PULLING, BuildState.BUILDING, BuildState.VERIFYING
NOW_S = 1_000.0


def durations(size: int, pulling: float, building: float, verifying: float) -> BuildDurations:
    seconds = {PULLING: pulling, BUILDING: building, VERIFYING: verifying}
    return BuildDurations(id="acme/done", size=size, seconds=seconds)


def record(state: BuildState, since_s: float = 0.0, **changes: object) -> BuildRecord:
    plain = BuildRecord(id="acme/new", source="acme/new", queued_s=NOW_S - 50, changed_s=NOW_S)
    return plain.enter(state, NOW_S - since_s, **changes)


def describe(
    one: BuildRecord,
    history: Sequence[BuildDurations] = (),
    before: Sequence[BuildRecord] = (),
) -> BuildStatus:
    return build_status(one, history, before, NOW_S)


@pytest.mark.parametrize("state", [BuildState.QUEUED, PULLING, BUILDING, VERIFYING])
def test_nothing_is_claimed_before_a_build_was_measured(state: BuildState) -> None:
    status = describe(record(state, 5.0))
    assert (status.percent, status.estimated_time) == (None, None)
    assert status.elapsed_s == 50.0


def test_remaining_time_is_that_of_earlier_builds() -> None:
    history = [durations(10, 10, 20, 30)]
    assert describe(record(BuildState.QUEUED), history).estimated_time == 60.0
    building = record(BUILDING, 5.0, spent_s={PULLING: 12.0})
    status = describe(building, history)
    assert (status.estimated_time, status.percent) == (45.0, 25)


def test_stage_that_outlasts_its_estimate_does_not_go_back() -> None:
    late = describe(
        record(VERIFYING, 99.0, spent_s={PULLING: 99, BUILDING: 99}), [durations(1, 1, 1, 1)]
    )
    assert (late.estimated_time, late.percent) == (0.0, 99)


def test_builder_whose_clock_is_ahead_has_done_nothing_yet() -> None:
    status = describe(record(PULLING, -500.0), [durations(10, 10, 20, 30)])
    assert (status.percent, status.estimated_time) == (0, 60.0)


def test_builds_of_similar_size_count() -> None:
    history = [durations(size, 1, size, 1) for size in (10, 11, 12, 1_000, 1_100, 1_200)]
    assert describe(record(BuildState.QUEUED, size=11), history).estimated_time == 13.0
    assert describe(record(BuildState.QUEUED, size=1_100), history).estimated_time == 1_102.0
    assert describe(record(BuildState.QUEUED), history).estimated_time == 508.0


def test_builds_ahead_add_their_time() -> None:
    history = [durations(10, 10, 20, 30)]
    before = [record(BUILDING, 5.0, spent_s={PULLING: 10.0}), record(BuildState.QUEUED)]
    status = describe(record(BuildState.QUEUED), history, before)
    assert (status.estimated_time, status.ahead) == (60 + 45 + 60, 2)


def test_ended_builds_have_no_estimate_to_wait_for() -> None:
    history = [durations(10, 10, 20, 30)]
    ready = describe(record(BuildState.READY, version="0123456789ab"), history)
    assert (ready.percent, ready.estimated_time, ready.version) == (100, 0.0, "0123456789ab")
    failed = describe(record(BuildState.FAILED, reason="no weights"), history)
    assert (failed.percent, failed.estimated_time, failed.reason) == (None, None, "no weights")


def test_time_in_a_stage_adds_up_over_candidates() -> None:
    one = record(BUILDING)
    for state in (VERIFYING, BUILDING, VERIFYING):
        one = one.enter(state, one.changed_s + 4)
    assert one.spent_s == {BUILDING: 8.0, VERIFYING: 4.0}


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("`/srv/My Models/a/config.json` is corrupt", "`.../config.json` is corrupt"),
        ("cannot read /home/u/a/b: full", "cannot read .../b: full"),
        ("[Errno 2] path:/home/u/x", "[Errno 2] path:.../x"),
        ("pass `/srv/models`; see https://host/a/b", "pass `.../models`; see https://host/a/b"),
        ("acme/tiny has no `onnx/model.onnx`", "acme/tiny has no `onnx/model.onnx`"),
    ],
)
def test_clients_see_no_directories_of_the_host(reason: str, shown: str) -> None:
    assert describe(record(PULLING, reason=reason)).hide_directories().reason == shown


def test_clients_see_no_directories_of_a_local_source() -> None:
    local = record(PULLING, source="/srv/My Models/tiny", step="resolve /srv/My Models/tiny")
    shown = describe(local).hide_directories()
    assert (shown.source, shown.step) == (".../tiny", "resolve .../tiny")


@pytest.mark.parametrize("source", ["/srv/models/tiny/", "../models/tiny", "~/models/tiny"])
def test_clients_see_only_the_last_name_of_a_source(source: str) -> None:
    assert describe(record(PULLING, source=source)).hide_directories().source == ".../tiny"
