"""The queue of builds in the store."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from deployments.artifacts.locks import exclusive_lock
from deployments.builds.queue import MAX_CRASHES, MAX_FAILED, BuildClaim, BuildQueue
from deployments.builds.record import BuildState
from deployments.errors import ManifestInvalid, Overloaded, StoreNotWritable
from tests.support.fake_builds import Killed

MODEL, SOURCE = "acme/tiny", "/models/tiny"


class Clock:
    """Clock whose seconds a test sets."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(tmp_path: Path, clock: Clock) -> BuildQueue:
    return BuildQueue(tmp_path / "store", clock)


def run_build(queue: BuildQueue, clock: Clock) -> None:
    """Run a build of 10 s per stage."""
    with queue.claim(MODEL) as claim:
        assert claim is not None
        claim.set_size(100)
        for state in (BuildState.BUILDING, BuildState.VERIFYING):
            clock.now_s += 10
            claim.enter(state, state.value)
        clock.now_s += 10
        claim.finish("0123456789ab")


def test_build_ends_if_its_durations_cannot_be_stored(queue: BuildQueue, clock: Clock) -> None:
    queue.submit(MODEL, SOURCE)
    (queue.directory / "history.jsonl").mkdir()
    run_build(queue, clock)
    record = queue.read(MODEL)
    assert record is not None
    assert record.state is BuildState.READY


def test_records_of_failed_builds_are_bounded(queue: BuildQueue, clock: Clock) -> None:
    def submit_failing(number: int) -> None:
        clock.now_s += 1
        queue.submit(f"acme/failing-{number}", SOURCE)
        with queue.claim(f"acme/failing-{number}") as claim:
            assert claim is not None
            claim.fail("no such model")

    queue.submit(MODEL, SOURCE)
    run_build(queue, clock)
    for number in range(MAX_FAILED + 5):
        submit_failing(number)
    assert queue.read("acme/failing-0") is None
    assert len(list(queue.directory.glob("*.json"))) <= MAX_FAILED + 2
    assert queue.read(MODEL)
    assert queue.read(f"acme/failing-{MAX_FAILED + 4}")


def test_build_is_read_in_each_state(queue: BuildQueue) -> None:
    assert queue.read(MODEL) is None
    assert queue.status(MODEL) is None
    queue.submit(MODEL, SOURCE)
    seen = [queue.status(MODEL)]
    with queue.claim(MODEL) as claim:
        assert claim is not None
        seen.append(queue.status(MODEL))
        claim.enter(BuildState.BUILDING, "export float32 graph")
        seen.append(queue.status(MODEL))
        claim.finish("0123456789ab")
    seen.append(queue.status(MODEL))
    assert [one and one.state.value for one in seen] == ["queued", "pulling", "building", "ready"]
    assert seen[2] is not None
    assert seen[2].step == "export float32 graph"
    assert seen[3] is not None
    assert (seen[3].percent, seen[3].version) == (100, "0123456789ab")


def test_concurrent_submissions_queue_one_build(queue: BuildQueue) -> None:
    submitted: list[bool] = []
    threads = [
        threading.Thread(target=lambda: submitted.append(queue.submit(MODEL, SOURCE)[1]))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(submitted) == [False] * 7 + [True]
    assert len(queue.pending()) == 1


def test_build_has_one_builder(queue: BuildQueue) -> None:
    queue.submit(MODEL, SOURCE)
    with queue.claim(MODEL) as first, queue.claim(MODEL) as second:
        assert isinstance(first, BuildClaim)
        assert second is None


def test_ended_build_is_not_claimed_but_can_be_submitted_again(queue: BuildQueue) -> None:
    queue.submit(MODEL, SOURCE)
    with queue.claim(MODEL) as claim:
        assert claim is not None
        claim.fail("no weights")
    with queue.claim(MODEL) as again:
        assert again is None
    record, is_new = queue.submit(MODEL, "/models/other")
    assert (record.state, record.source, is_new) == (BuildState.QUEUED, "/models/other", True)


def test_build_of_a_killed_builder_is_queued_again(queue: BuildQueue) -> None:
    queue.submit(MODEL, SOURCE)
    lock = queue.directory / "acme--tiny.lock"
    child = os.fork()
    if child == 0:
        try:
            with queue.claim(MODEL):
                os.kill(os.getpid(), 9)
        finally:
            os._exit(1)  # else the child would run the rest of the tests
    os.waitpid(child, 0)
    assert lock.exists()
    status = queue.status(MODEL)
    assert status is not None
    assert (status.state, status.reason[:17]) == (BuildState.QUEUED, "its builder ended")
    assert [record.id for record in queue.pending()] == [MODEL]
    with queue.claim(MODEL) as claim:
        assert claim is not None
        assert claim.record.attempts == 2


def test_build_that_keeps_killing_its_builder_fails(queue: BuildQueue) -> None:
    queue.submit(MODEL, SOURCE)
    for _ in range(MAX_CRASHES):
        with pytest.raises(Killed), queue.claim(MODEL):
            raise Killed
    with queue.claim(MODEL) as claim:
        assert claim is None
    status = queue.status(MODEL)
    assert status is not None
    assert status.state is BuildState.FAILED
    assert f"ended {MAX_CRASHES} times" in status.reason


def test_stopped_builders_do_not_count_as_crashed(queue: BuildQueue) -> None:
    queue.submit(MODEL, SOURCE)
    for _ in range(MAX_CRASHES + 1):
        with queue.claim(MODEL) as claim:
            assert claim is not None
            claim.enter(BuildState.BUILDING, "export")
            queue.interrupt()
            claim.enter(BuildState.VERIFYING, "too late")
        status = queue.status(MODEL)
        assert status is not None
        assert (status.state, status.step) == (BuildState.QUEUED, "")
    with queue.claim(MODEL) as claim:
        assert claim is not None
        claim.finish("0123456789ab")
        queue.interrupt()
    record = queue.read(MODEL)
    assert record is not None
    assert (record.state, record.crashes) == (BuildState.READY, 1), "the last builder alone"


@pytest.mark.parametrize("is_before", [True, False])
def test_builder_that_is_stopped_as_it_begins_does_not_count_as_crashed(
    queue: BuildQueue, monkeypatch: pytest.MonkeyPatch, is_before: bool
) -> None:
    begin = BuildClaim.begin

    def begin_and_stop(claim: BuildClaim) -> None:
        if is_before:
            queue.interrupt()
        begin(claim)
        if not is_before:
            queue.interrupt()

    monkeypatch.setattr(BuildClaim, "begin", begin_and_stop)
    queue.submit("org/model", "org/model")
    with queue.claim("org/model"):
        pass
    record = queue.read("org/model")
    assert record is not None
    assert (record.state, record.crashes) == (BuildState.QUEUED, 0)


def test_durations_of_finished_builds_are_kept(queue: BuildQueue, clock: Clock) -> None:
    queue.submit(MODEL, SOURCE)
    run_build(queue, clock)
    (durations,) = queue.history()
    assert durations.size == 100
    assert dict(durations.seconds) == dict.fromkeys(("pulling", "building", "verifying"), 10.0)
    assert BuildQueue(queue.store).history() == [durations]


def test_stored_version_and_resumed_build_are_not_measured(queue: BuildQueue, clock: Clock) -> None:
    queue.submit(MODEL, SOURCE)
    with queue.claim(MODEL) as claim:
        assert claim is not None
        claim.finish("0123456789ab", was_stored=True)
    queue.submit(MODEL, SOURCE)
    with queue.claim(MODEL):
        queue.interrupt()
    run_build(queue, clock)
    assert queue.history() == []


def test_damaged_history_and_records_are_ignored(queue: BuildQueue, clock: Clock) -> None:
    queue.submit(MODEL, SOURCE)
    run_build(queue, clock)
    with (queue.directory / "history.jsonl").open("ab") as file:
        file.write(b'{"id": "cut')
    assert len(queue.history()) == 1
    (queue.directory / "acme--tiny.json").write_bytes(b"{")
    assert queue.read(MODEL) is None
    assert queue.submit(MODEL, SOURCE)[1]


@pytest.mark.parametrize("name", ["../x", "a/../b", "/etc/passwd", "a/b/c", ".builds", ""])
def test_names_that_leave_the_store_are_refused(queue: BuildQueue, name: str) -> None:
    for use in (queue.read, queue.forget, lambda one: queue.submit(one, SOURCE)):
        with pytest.raises(ManifestInvalid, match="is not a model id"):
            use(name)


def test_full_queue_refuses(queue: BuildQueue) -> None:
    queue.submit(MODEL, SOURCE, max_queued=1)
    assert not queue.submit(MODEL, SOURCE, max_queued=1)[1], "the same model is no further build"
    with pytest.raises(Overloaded, match="1 builds are queued"):
        queue.submit("acme/other", SOURCE, max_queued=1)


def test_builds_keep_their_order_and_name_what_is_ahead(queue: BuildQueue, clock: Clock) -> None:
    names = ["acme/b", "acme/a", "c"]
    for name in names:
        queue.submit(name, SOURCE)
        clock.now_s += 1
    assert [record.id for record in queue.pending()] == names
    status = queue.status("c")
    assert status is not None
    assert status.ahead == 2


def test_record_of_an_ended_build_is_read_again_only_after_a_change(
    queue: BuildQueue, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.submit(MODEL, SOURCE)
    run_build(queue, clock)
    reads = Mock(side_effect=Path.read_bytes)
    monkeypatch.setattr(Path, "read_bytes", lambda path: reads(path))
    for _ in range(3):
        assert queue.pending() == []
    assert reads.call_count == 1
    queue.submit("acme/other", SOURCE)  # removes old failures
    assert {call.args[0].stem for call in reads.call_args_list[1:]} == {"acme--other"}
    queue.forget("acme/other")
    BuildQueue(queue.store, clock).submit(MODEL, SOURCE)  # as another process does
    assert [record.id for record in queue.pending()] == [MODEL]


def test_status_of_an_ended_build_reads_no_record_of_others(
    queue: BuildQueue, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.submit(MODEL, SOURCE)
    run_build(queue, clock)
    queue.submit("acme/other", SOURCE)
    monkeypatch.setattr(queue, "pending", Mock(side_effect=AssertionError))
    status = queue.status(MODEL)
    assert status is not None
    assert (status.state, status.ahead) == (BuildState.READY, 0)


def test_store_that_cannot_be_written_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.touch()
    queue = BuildQueue(file)  # a file: even root cannot create a directory in it
    for _ in range(3):
        with pytest.raises(StoreNotWritable, match="the store: Not a directory") as raised:
            queue.submit(MODEL, SOURCE)
    assert str(tmp_path) not in raised.value.message, "clients read the message"
    (line,) = caplog.messages  # not one for each request
    assert str(tmp_path) in line
    assert queue.read(MODEL) is None


def test_record_of_a_running_build_is_not_forgotten(queue: BuildQueue) -> None:
    queue.submit(MODEL, SOURCE)
    with exclusive_lock(queue.directory / "acme--tiny.lock", lambda _: None):
        assert not queue.forget(MODEL)
    assert queue.forget(MODEL)
    assert queue.read(MODEL) is None


def test_queue_has_one_drainer(queue: BuildQueue) -> None:
    with queue.drain_lock() as first, queue.drain_lock() as second:
        assert (first, second) == (True, False)


def test_model_named_like_a_lock_can_be_built(queue: BuildQueue) -> None:
    queue.submit("drain", SOURCE)
    with queue.drain_lock(), queue.claim("drain") as claim:
        assert claim is not None


def test_builder_is_needed_for_what_nobody_builds(queue: BuildQueue) -> None:
    assert not queue.needs_builder()
    queue.submit(MODEL, SOURCE)
    assert queue.needs_builder()
    with queue.drain_lock():
        assert not queue.needs_builder()
    with queue.claim(MODEL):
        assert not queue.needs_builder()
    assert queue.needs_builder(), "its builder ended"
