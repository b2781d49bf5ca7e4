"""Stop signals: the first raises, later ones are counted."""

from __future__ import annotations

import os
import signal

import pytest

from cluster.launcher import stop_signals
from cluster.launcher.stop_signals import StopSignal, count_stop_signals, stop_signals_raise


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_later_signals_are_counted_and_interrupt_nothing(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_signals, "COPY_S", 0.0)
    with stop_signals_raise():  # restores the signals
        with pytest.raises(StopSignal):
            send(number)
        send(number)  # nothing counts yet, and nothing is raised
        count = count_stop_signals()
        assert count() == 0
        send(number)
        send(number)
        assert count() == 2


def test_copies_of_the_first_signal_do_not_count() -> None:
    with stop_signals_raise():
        count = count_stop_signals()
        send(signal.SIGINT)
        send(signal.SIGTERM)
        assert count() == 0


def test_closed_terminal_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signals, "COPY_S", 0.0)
    with stop_signals_raise():
        count = count_stop_signals()
        send(signal.SIGHUP)
        assert count() == 0
