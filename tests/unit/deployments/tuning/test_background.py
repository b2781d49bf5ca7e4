from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deployments.engines import EncoderEngine
from deployments.messages import ModelRef
from deployments.tuning.background import BackgroundTuner
from deployments.tuning.costs import TuningTarget
from deployments.tuning.process import ExitCode
from tests.support.fakes import TIMEOUT_S
from tests.support.tuning_artifacts import seal_tunable, write_table
from tests.unit.deployments.tuning.test_session import somebody_tunes

REF = ModelRef("tiny/embedder", "0123456789ab")
OTHER = ModelRef("tiny/other", "0123456789ab")


class FakeProcesses:
    """Starts, in place of the process that measures, a shell with a script of the test's."""

    def __init__(
        self, script: str, before: Callable[[TuningTarget], object] = lambda _: None
    ) -> None:
        self.started: list[TuningTarget] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._script = script
        self._before = before

    def __call__(self, target: TuningTarget) -> subprocess.Popen[bytes]:
        self.started.append(target)
        self._before(target)
        child = subprocess.Popen(
            ["sh", "-c", self._script], stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.processes.append(child)
        return child


def processes_electing(winner: str) -> FakeProcesses:
    """Children that keep a table in which `winner` won."""
    return FakeProcesses("exit 0", lambda target: write_table(target, {"1x16": winner}))


@pytest.fixture
def target(tmp_path: Path) -> TuningTarget:
    return seal_tunable(tmp_path)


@pytest.fixture(autouse=True)
def capture_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "ray.serve.hundredfold"):
        yield


class Run:
    """A tuning, and the engines it would have its replica use."""

    def __init__(
        self,
        untuned: dict[ModelRef, TuningTarget],
        children: FakeProcesses,
        poll_s: float = 0.01,
    ) -> None:
        self.adopted: list[tuple[ModelRef, EncoderEngine]] = []
        self.tuning = BackgroundTuner(untuned, self._adopt, children, poll_s)

    def _adopt(self, ref: ModelRef, engine: EncoderEngine) -> None:
        self.adopted.append((ref, engine))

    def to_its_end(self) -> list[ModelRef]:
        """Run until nothing is left to tune; the models whose engine was exchanged."""
        self.tuning.start()
        return self.when_done()

    def when_done(self) -> list[ModelRef]:
        """The models whose engine was exchanged, once nothing is left to tune."""
        wait_until(lambda: not tuning_threads())
        self.tuning.close()
        return [ref for ref, _ in self.adopted]


def tuning_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tuning"]


def wait_until(happened: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    while not happened():
        assert time.monotonic() < give_up_s, "waited in vain"
        time.sleep(0.005)


def test_a_winner_takes_the_place_of_the_default(
    target: TuningTarget, caplog: pytest.LogCaptureFixture
) -> None:
    assert Run({REF: target}, processes_electing("twin")).to_its_end() == [REF]
    begun, ended = (record.message for record in caplog.records)
    assert begun == "tiny/embedder is being tuned for this host in the background"
    assert ended.startswith("tiny/embedder is tuned for this host after ")
    assert ended.endswith(" s: twin")


def test_where_the_default_wins_nothing_is_exchanged(target: TuningTarget) -> None:
    assert Run({REF: target}, processes_electing("plain")).to_its_end() == []


def test_nothing_to_tune_needs_no_thread() -> None:
    run = Run({}, FakeProcesses("exit 1"))
    run.tuning.start()
    assert not tuning_threads()
    run.tuning.close()


def test_one_model_after_the_other(tmp_path: Path) -> None:
    targets = {ref: seal_tunable(tmp_path, ref.id) for ref in (REF, OTHER)}
    at_once: list[int] = []

    def before(target: TuningTarget) -> None:
        at_once.append(sum(child.poll() is None for child in children.processes))
        write_table(target, {"1x16": "twin"})

    children = FakeProcesses("sleep 0.05", before)
    assert Run(targets, children).to_its_end() == [REF, OTHER]
    assert at_once == [0, 0]


def test_a_failure_is_told_once_and_the_next_model_has_its_turn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    targets = {ref: seal_tunable(tmp_path, ref.id) for ref in (REF, OTHER)}
    children = FakeProcesses("echo 'a warning' >&2; echo 'error: no graph is right' >&2; exit 1")
    assert Run(targets, children).to_its_end() == []
    failures = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert failures == [
        f"{ref.id} is not tuned for this host: no graph is right (1)" for ref in targets
    ]
    assert len(children.started) == 2


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("kill -9 $$", "it wrote no message (-9)"),
        ("echo Traceback >&2; echo 'KeyError: 1' >&2; exit 1", "KeyError: 1 (1)"),
        ("exit 0", "it wrote no message (0)"),  # and kept no table that holds
    ],
)
def test_whatever_happens_to_the_process_it_is_told_once(
    target: TuningTarget, script: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    children = FakeProcesses(script)
    assert Run({REF: target}, children).to_its_end() == []
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        f"tiny/embedder is not tuned for this host: {reason}"
    ]
    assert len(children.started) == 1


def test_a_process_that_cannot_be_started_is_told_once(
    target: TuningTarget, caplog: pytest.LogCaptureFixture
) -> None:
    def no_more_processes(_: TuningTarget) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    assert Run({REF: target}, FakeProcesses("exit 0", no_more_processes)).to_its_end() == []
    (capture_log,) = (r.message for r in caplog.records if r.levelname != "INFO")
    assert (
        capture_log == "tiny/embedder is not tuned for this host: Resource temporarily unavailable"
    )


def test_a_table_that_came_meanwhile_is_used_as_it_is(target: TuningTarget) -> None:
    write_table(target, {"1x16": "twin"})
    children = FakeProcesses("exit 1")
    assert Run({REF: target}, children).to_its_end() == [REF]
    assert children.started == []


def test_what_another_replica_measures_is_waited_for(
    target: TuningTarget,
) -> None:
    children = FakeProcesses("exit 1")
    run = Run({REF: target}, children)
    with somebody_tunes(target):
        run.tuning.start()
        time.sleep(0.1)
        assert not run.adopted
        write_table(target, {"1x16": "twin"})
    assert run.when_done() == [REF]
    assert children.started == []


def test_who_comes_second_to_the_lock_waits_too(
    target: TuningTarget,
) -> None:
    turns = iter([lambda _: None, lambda p: write_table(p, {"1x16": "twin"})])
    children = FakeProcesses(f"exit {ExitCode.BUSY}", lambda target: next(turns)(target))
    assert Run({REF: target}, children).to_its_end() == [REF]
    assert len(children.started) == 2


def test_a_store_that_cannot_be_written_is_told_once_and_no_other_model_is_tried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    targets = {ref: seal_tunable(tmp_path, ref.id) for ref in (REF, OTHER)}
    children = FakeProcesses(f"echo 'error: read-only' >&2; exit {ExitCode.STORE_NOT_WRITABLE}")
    assert Run(targets, children).to_its_end() == []
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        "models are not tuned for this host: read-only"
    ]
    assert len(children.started) == 1


def test_closing_ends_the_process_and_starts_no_other(tmp_path: Path) -> None:
    targets = {ref: seal_tunable(tmp_path, ref.id) for ref in (REF, OTHER)}
    children = FakeProcesses("exec sleep 60")
    run = Run(targets, children)
    run.tuning.start()
    wait_until(lambda: bool(children.processes))
    run.tuning.close()
    assert not tuning_threads()
    assert len(children.started) == 1
    assert children.processes[0].returncode == -9


def test_closing_does_not_wait_for_another_replica(target: TuningTarget) -> None:
    run = Run({REF: target}, FakeProcesses("exit 1"), poll_s=TIMEOUT_S)
    with somebody_tunes(target):
        run.tuning.start()
        started_s = time.monotonic()
        run.tuning.close()
        assert time.monotonic() - started_s < TIMEOUT_S / 2
    assert not tuning_threads()
