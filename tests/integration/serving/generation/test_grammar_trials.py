from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
from llguidance import LLMatcher

from deployments.errors import EngineFailed, Overloaded
from deployments.generation import grammar_trials
from deployments.generation.grammar_trials import FULL, QUICK, GrammarTrials, Trial, TrialLimits
from tests.support.fakes import wait_until
from tests.support.small_tokenizers import byte_level
from tests.support.waiting import wait_for

# Without limits, the compilation of COSTLY takes minutes and gigabytes. The limit of llguidance,
# called fuel, does not stop the compilation in time.
COSTLY = LLMatcher.grammar_from_json_schema('{"type": "integer", "multipleOf": 9999991}')
SIMPLE = LLMatcher.grammar_from_json_schema('{"type": "boolean"}')
ENDLESS = TrialLimits(cpu_s=100.0, memory_bytes=16 << 30, nice=19)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow more time: a trial of low priority waits for tests that run on the same core."""
    monkeypatch.setattr(grammar_trials, "WAIT_S", 120.0)


@pytest.fixture
def trials() -> Iterator[GrammarTrials]:
    opened = GrammarTrials(byte_level().to_str(), (0,))
    yield opened
    opened.close()


class Processes:
    """Processes that a test started, without the grammar servers that other tests left running."""

    def __init__(self) -> None:
        self._before = set(psutil.Process().children())

    def servers(self) -> list[psutil.Process]:
        return [one for one in psutil.Process().children() if one not in self._before]

    def trials(self) -> list[psutil.Process]:
        return [trial for server in self.servers() for trial in server.children()]


@pytest.fixture
def processes() -> Processes:
    return Processes()


def test_run_returns_the_memory_or_the_error(trials: GrammarTrials) -> None:
    trial = trials.run(SIMPLE, QUICK)
    assert trial is not None
    assert trial.error is None
    assert 0 < trial.memory_bytes < 8 << 20
    faulty = trials.run(LLMatcher.grammar_from_json_schema('{"type": "nonsense"}'), QUICK)
    assert faulty is not None
    assert "nonsense" in (faulty.error or "")


@pytest.mark.parametrize(
    "limits",
    [QUICK, FULL, TrialLimits(cpu_s=100.0, memory_bytes=20 << 20)],
    ids=["quick", "full", "memory"],
)
def test_trial_beyond_its_limits_is_killed(
    processes: Processes,
    trials: GrammarTrials,
    limits: TrialLimits,
) -> None:
    assert trials.run(COSTLY, limits) is None
    assert isinstance(trials.run(SIMPLE, QUICK), Trial), "the next one runs"
    (server,) = processes.servers()
    assert server.memory_info().rss < 100 << 20


async def test_grammars_compile_while_others_run_without_end(
    processes: Processes, trials: GrammarTrials
) -> None:
    trials.run(SIMPLE, QUICK)
    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(trials.run, COSTLY, ENDLESS) for _ in range(3)]
        await wait_until(lambda: len(processes.trials()) == 3)
        assert isinstance(trials.run(SIMPLE, QUICK), Trial)
        assert not any(one.done() for one in running)
        trials.close()
        for one in running:
            with pytest.raises(EngineFailed, match="stopping"):
                one.result()
    await wait_until(lambda: not processes.servers())


async def test_killed_server_is_replaced(processes: Processes, trials: GrammarTrials) -> None:
    trials.run(SIMPLE, QUICK)
    (server,) = processes.servers()
    server.kill()
    assert isinstance(trials.run(SIMPLE, QUICK), Trial), "killed between trials"
    (server,) = processes.servers()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(trials.run, COSTLY, TrialLimits(2.0, 16 << 30))
        await wait_until(lambda: len(processes.trials()) == 1)
        server.kill()
        assert running.result() is None, "killed amid a trial, which is repeated"
    (replacement,) = processes.servers()
    assert replacement.pid != server.pid


class AdvancedClock:
    """The monotonic clock, ahead by some seconds."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.readings = 0

    def __call__(self) -> float:
        self.readings += 1
        return time.monotonic() + self.ahead_s


def test_trial_that_starts_late_ends_in_time(
    processes: Processes, trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child would be killed later, after its own WAIT_S."""
    trials.run(SIMPLE, QUICK)
    (server,) = processes.servers()
    server.suspend()
    clock = AdvancedClock()
    monkeypatch.setattr(grammar_trials, "time", SimpleNamespace(monotonic=clock))
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(trials.run, COSTLY, ENDLESS)
        wait_for(lambda: clock.readings >= 3)  # it waits for the suspended server
        clock.ahead_s = grammar_trials.WAIT_S - 0.5
        server.resume()
        with pytest.raises(Overloaded, match="within 120 s"):
            running.result()


OWNER = """
import threading, time, psutil
from deployments.generation import grammar_trials
from tests.integration.serving.generation import test_grammar_trials as tests
grammar_trials.WAIT_S = 120.0
trials = grammar_trials.GrammarTrials(tests.byte_level().to_str(), (0,))
trials.run(tests.SIMPLE, tests.QUICK)
threading.Thread(target=trials.run, args=(tests.COSTLY, tests.ENDLESS)).start()
descendants = []
while len(descendants) < 2:
    time.sleep(0.01)
    descendants = psutil.Process().children(recursive=True)
print(*(process.pid for process in descendants), flush=True)
"""


async def test_server_and_trials_end_with_the_process_that_started_them() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        owner.send_signal(signal.SIGKILL)
    assert len(pids) == 2
    await wait_until(lambda: not any(map(psutil.pid_exists, pids)))


def test_process_that_does_not_start_is_an_error(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineFailed, match="ended twice"):
        trials.run(SIMPLE, QUICK)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(EngineFailed, match="does not start: No such file"):
        trials.run(SIMPLE, QUICK)
