from __future__ import annotations

import threading

from deployments.records import DeferredRecorder, TokenizeRecord
from tests.support.fakes import TIMEOUT_S

RECORDS = [TokenizeRecord("model", 0.1, texts, 0) for texts in range(100)]


class FailingRecorder:
    """Recorder that fails for the first record, collects the others and sets `done` at the last."""

    def __init__(self) -> None:
        self.received: list[TokenizeRecord] = []
        self.threads: set[int] = set()
        self.done = threading.Event()

    def record(self, record: TokenizeRecord, /) -> None:
        if record is RECORDS[0]:
            raise RuntimeError("the metrics library fails")
        self.received.append(record)
        self.threads.add(threading.get_ident())
        if record is RECORDS[-1]:
            self.done.set()


def test_deferred_recorder_passes_every_record_on_from_its_thread() -> None:
    recorder = FailingRecorder()
    deferred = DeferredRecorder(recorder)
    for record in RECORDS:
        deferred.record(record)
    assert recorder.done.wait(TIMEOUT_S), "a failure must not end the thread"
    assert recorder.received == RECORDS[1:]
    assert threading.get_ident() not in recorder.threads
