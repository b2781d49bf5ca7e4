"""Captures of CUDA graphs, with a fake of torch.cuda: streams, memory pools and failures."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch", reason="`torch` is not installed")

from deployments.engines.pytorch.capture import capture  # noqa: E402
from tests.support.captured_sessions import RecordedLock  # noqa: E402
from tests.support.fake_capture import FakeCaptures, fake_captures  # noqa: E402


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCaptures:
    return fake_captures(monkeypatch)


def do_nothing() -> None:
    """Stand for a call."""


def test_captures_of_an_engine_share_a_stream_of_their_own(cuda: FakeCaptures) -> None:
    """The stream that torch takes without `stream` belongs to all captures of the process."""
    lock, held = RecordedLock(), []
    first, other = (capture(lambda: held.append(lock.held), None, lock, waits=True) for _ in "ab")
    assert first is not None
    assert other is not None
    capture(lambda: held.append(lock.held), first, lock, waits=False)
    assert cuda.streams == [first.stream, other.stream, first.stream]
    assert first.stream is not other.stream
    assert held == ["opening", "opening", "opening", "capture"] * 3
    with lock.open_model(), ThreadPoolExecutor(1) as executor:
        late = executor.submit(capture, lambda: None, first, lock, waits=False).result(60)
    assert late is None, "a step must not wait for a model that another thread opens"


def test_current_stream_is_restored_after_a_failed_capture(cuda: FakeCaptures) -> None:
    before = cuda.current
    cuda.end_error = torch.AcceleratorError("CUDA error: operation failed due to a previous error")
    with pytest.raises(torch.AcceleratorError):
        capture(do_nothing, None, RecordedLock(), waits=True)
    assert cuda.current is before
