from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deployments.engines import EncoderEngine
from deployments.messages import ModelRef
from deployments.tuning.background import BackgroundTuner, Untuned
from deployments.tuning.costs import TuningTarget
from deployments.tuning.process import ExitCode
from tests.support.cost_tables import variant
from tests.support.fakes import TIMEOUT_S
from tests.support.tuning_artifacts import hold_tuning_lock, seal_tunable, write_table
from tests.support.waiting import wait_for

REF = ModelRef("tiny/embedder", "0123456789ab")
OTHER = ModelRef("tiny/other", "0123456789ab")


class FakeProcesses:
    """Starter that calls `before`, then runs a shell script in place of the tuning process."""

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
    """Return fake processes that write a cost table in which `winner` is selected."""
    return FakeProcesses("exit 0", lambda target: write_table(target, {"1x16": winner}))


@pytest.fixture
def target(tmp_path: Path) -> TuningTarget:
    return seal_tunable(tmp_path)


@pytest.fixture(autouse=True)
def capture_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "ray.serve.hundredfold"):
        yield


def untuned(*targets: TuningTarget, serving: str = "plain") -> Untuned:
    """Describe a model that the variant `serving` serves with the settings of the first target."""
    return Untuned(targets[0], variant(serving), targets)


def with_two_threads(target: TuningTarget) -> TuningTarget:
    settings = target.settings.model_copy(update={"intra_op_threads": 2})
    return replace(target, settings=settings)


class TunerRun:
    """A background tuner, and the engines that its replica opens for it."""

    def __init__(
        self,
        models: dict[ModelRef, TuningTarget] | dict[ModelRef, Untuned],
        children: FakeProcesses,
        poll_s: float = 0.01,
    ) -> None:
        self.used: list[tuple[ModelRef, EncoderEngine | None]] = []
        self.evicted: set[ModelRef] = set()
        self.tuning = BackgroundTuner(self._use, self._is_loaded, children, poll_s)
        self._models = {
            ref: each if isinstance(each, Untuned) else untuned(each)
            for ref, each in models.items()
        }

    def _use(
        self, ref: ModelRef, _: TuningTarget, open_new: Callable[[], EncoderEngine] | None
    ) -> None:
        self.used.append((ref, None if open_new is None else open_new()))

    def _is_loaded(self, ref: ModelRef) -> bool:
        return ref not in self.evicted

    def start(self) -> None:
        for ref, each in self._models.items():
            self.tuning.submit(ref, each)

    def run(self) -> list[ModelRef]:
        """Run until all models are tuned, and return the models with a new engine."""
        self.start()
        return self.wait()

    def wait(self) -> list[ModelRef]:
        """Wait until all models are tuned, and return the models with a new engine."""
        wait_for(lambda: not tuning_threads())
        self.tuning.close()
        return [ref for ref, engine in self.used if engine is not None]


def tuning_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tuning"]


def test_winner_replaces_the_default_engine(
    target: TuningTarget, caplog: pytest.LogCaptureFixture
) -> None:
    assert TunerRun({REF: target}, processes_electing("twin")).run() == [REF]
    start_message, end_message = (record.message for record in caplog.records)
    assert (
        start_message == "tiny/embedder is being tuned for this host in the background (threads: 1)"
    )
    assert end_message.startswith("tiny/embedder is tuned for this host after ")
    assert end_message.endswith(" s (threads: 1): twin")


def test_winning_default_keeps_its_engine_and_its_tables_are_used(target: TuningTarget) -> None:
    run = TunerRun({REF: target}, processes_electing("plain"))
    assert run.run() == []
    assert run.used == [(REF, None)]


def test_default_replaces_what_the_table_of_another_host_had_selected(
    target: TuningTarget,
) -> None:
    models = {REF: untuned(target, serving="twin")}
    assert TunerRun(models, processes_electing("plain")).run() == [REF]


def test_default_replaces_several_variants(target: TuningTarget) -> None:
    models = {REF: Untuned(target, None, (target,))}
    assert TunerRun(models, processes_electing("plain")).run() == [REF]


def test_all_cores_are_measured_after_one_thread(target: TuningTarget) -> None:
    children = processes_electing("plain")
    run = TunerRun({REF: untuned(target, with_two_threads(target))}, children)
    assert run.run() == []
    assert [each.settings.intra_op_threads for each in children.started] == [1, 2]
    assert run.used == [(REF, None), (REF, None)]


def test_winner_with_all_cores_does_not_replace_the_usual_engine(target: TuningTarget) -> None:
    both = with_two_threads(target)
    run = TunerRun({REF: Untuned(target, variant("plain"), (both,))}, processes_electing("twin"))
    assert run.run() == []
    assert run.used == [(REF, None)]


def test_failure_with_all_cores_keeps_the_table_of_one_thread(target: TuningTarget) -> None:
    before_each_start = iter([lambda t: write_table(t, {"1x16": "twin"}), lambda _: None])
    children = FakeProcesses("exit 1", lambda each: next(before_each_start)(each))
    assert TunerRun({REF: untuned(target, with_two_threads(target))}, children).run() == [REF]
    assert len(children.started) == 2


def test_evicted_model_is_skipped_and_may_come_again(target: TuningTarget) -> None:
    children = processes_electing("twin")
    run = TunerRun({REF: target}, children)
    run.evicted.add(REF)
    run.start()
    wait_for(lambda: run.tuning.is_idle)
    assert children.started == []
    assert not run.tuning.has_submitted(REF)
    run.evicted.clear()
    assert run.run() == [REF]


def test_model_is_tuned_once(target: TuningTarget) -> None:
    children = FakeProcesses("exit 1")
    run = TunerRun({REF: target}, children)
    for _ in range(2):
        run.start()
        wait_for(lambda: run.tuning.is_idle)
    assert len(children.started) == 1
    run.wait()


def test_no_models_start_no_thread() -> None:
    run = TunerRun({}, FakeProcesses("exit 1"))
    run.start()
    assert not tuning_threads()
    run.tuning.close()


def test_models_are_tuned_one_at_a_time(tmp_path: Path) -> None:
    targets = {ref: seal_tunable(tmp_path, ref.id) for ref in (REF, OTHER)}
    running_children: list[int] = []

    def before(target: TuningTarget) -> None:
        running_children.append(sum(child.poll() is None for child in children.processes))
        write_table(target, {"1x16": "twin"})

    children = FakeProcesses("sleep 0.05", before)
    assert TunerRun(targets, children).run() == [REF, OTHER]
    assert running_children == [0, 0]


def test_failure_is_logged_once_and_the_next_model_is_tuned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    targets = {ref: seal_tunable(tmp_path, ref.id) for ref in (REF, OTHER)}
    children = FakeProcesses("echo 'a warning' >&2; echo 'error: no graph is right' >&2; exit 1")
    assert TunerRun(targets, children).run() == []
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
        ("exit 0", "it wrote no message (0)"),  # exit code 0, but no valid table
    ],
)
def test_process_failure_is_logged_once(
    target: TuningTarget, script: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    children = FakeProcesses(script)
    assert TunerRun({REF: target}, children).run() == []
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        f"tiny/embedder is not tuned for this host: {reason}"
    ]
    assert len(children.started) == 1


def test_process_that_does_not_start_is_logged_once(
    target: TuningTarget, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_to_start(_: TuningTarget) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    assert TunerRun({REF: target}, FakeProcesses("exit 0", fail_to_start)).run() == []
    (message,) = (r.message for r in caplog.records if r.levelname != "INFO")
    assert message == "tiny/embedder is not tuned for this host: Resource temporarily unavailable"


def test_existing_table_is_used_without_a_process(target: TuningTarget) -> None:
    write_table(target, {"1x16": "twin"})
    children = FakeProcesses("exit 1")
    assert TunerRun({REF: target}, children).run() == [REF]
    assert children.started == []


def test_tuning_waits_for_another_replica(
    target: TuningTarget,
) -> None:
    children = FakeProcesses("exit 1")
    run = TunerRun({REF: target}, children)
    with hold_tuning_lock(target):
        run.start()
        time.sleep(0.1)
        assert not run.used
        write_table(target, {"1x16": "twin"})
    assert run.wait() == [REF]
    assert children.started == []


def test_busy_process_waits_for_another_replica(
    target: TuningTarget,
) -> None:
    before_each_start = iter([lambda _: None, lambda p: write_table(p, {"1x16": "twin"})])
    children = FakeProcesses(
        f"exit {ExitCode.BUSY}", lambda target: next(before_each_start)(target)
    )
    assert TunerRun({REF: target}, children).run() == [REF]
    assert len(children.started) == 2


def test_read_only_store_is_logged_once_and_ends_tuning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    targets = {ref: seal_tunable(tmp_path, ref.id) for ref in (REF, OTHER)}
    children = FakeProcesses(f"echo 'error: read-only' >&2; exit {ExitCode.STORE_NOT_WRITABLE}")
    assert TunerRun(targets, children).run() == []
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        "models are not tuned for this host: read-only"
    ]
    assert len(children.started) == 1


def test_close_kills_the_process_and_starts_no_other(tmp_path: Path) -> None:
    targets = {ref: seal_tunable(tmp_path, ref.id) for ref in (REF, OTHER)}
    children = FakeProcesses("exec sleep 60")
    run = TunerRun(targets, children)
    run.start()
    wait_for(lambda: bool(children.processes))
    run.tuning.close()
    assert not tuning_threads()
    assert len(children.started) == 1
    assert children.processes[0].returncode == -9


def test_close_does_not_wait_for_another_replica(target: TuningTarget) -> None:
    run = TunerRun({REF: target}, FakeProcesses("exit 1"), poll_s=TIMEOUT_S)
    with hold_tuning_lock(target):
        run.start()
        started_s = time.monotonic()
        run.tuning.close()
        assert time.monotonic() - started_s < TIMEOUT_S / 2
    assert not tuning_threads()
