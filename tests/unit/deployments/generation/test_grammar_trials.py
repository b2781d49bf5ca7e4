from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from deployments.errors import EngineFailed
from deployments.generation import grammar_trials
from deployments.generation.grammar_trials import QUICK, GrammarTrials
from tests.support.fakes import TIMEOUT_S


class SlowServer:
    """A server that starts once `may_start` is set, and whose trials last until it is closed."""

    started, may_start, closed = threading.Event(), threading.Event(), threading.Event()

    def __init__(self, _tokenizer: bytes) -> None:
        self.started.set()
        assert self.may_start.wait(TIMEOUT_S)

    def ask(self, _request: bytes, _deadline_s: float) -> bytes:
        assert self.closed.wait(TIMEOUT_S)
        return b""

    def close(self) -> None:
        self.closed.set()


def test_close_ends_a_server_that_is_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trials, "_TrialProcess", SlowServer)
    trials = GrammarTrials("{}", (0,))
    with ThreadPoolExecutor() as threads:
        trial = threads.submit(trials.run, "grammar", QUICK)
        assert SlowServer.started.wait(TIMEOUT_S)
        closing = threads.submit(trials.close)
        with pytest.raises(TimeoutError):
            closing.result(0.05)  # it waits for the server
        SlowServer.may_start.set()
        closing.result(TIMEOUT_S)
        with pytest.raises(EngineFailed, match="this replica is stopping"):
            trial.result(TIMEOUT_S)
