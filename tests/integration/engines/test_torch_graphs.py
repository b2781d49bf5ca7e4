"""Captures of CUDA graphs, with a fake of torch.cuda: streams, memory pools and failures."""

from __future__ import annotations

import gc
import logging
import math
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

torch = pytest.importorskip("torch", reason="`torch` is not installed")

from deployments.engines.pytorch import capture as torch_capture  # noqa: E402
from deployments.engines.pytorch import captured_calls  # noqa: E402
from deployments.engines.pytorch.capture import (  # noqa: E402
    CaptureFailed,
    EngineGraphs,
    capture,
)
from deployments.engines.pytorch.capture_streams import CaptureStreams  # noqa: E402
from deployments.engines.pytorch.captured_calls import CapturedCalls  # noqa: E402
from deployments.engines.pytorch.decoder import (  # noqa: E402
    _CHUNK_SIZES,
    _MIN_GRAPH_KV_LENGTH,
)
from tests.support.captured_sessions import RecordedLock  # noqa: E402
from tests.support.fake_capture import POOL_STREAMS, FakeCaptures, fake_captures  # noqa: E402

ROOT = Path(__file__).parents[3]
REFUSED = "CUDA error: operation failed due to a previous error during capture"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCaptures:
    monkeypatch.setattr(torch_capture, "CAPTURE_STREAMS", CaptureStreams())
    return fake_captures(monkeypatch)


def do_nothing() -> None:
    """Stand for a call."""


def find(calls: CapturedCalls, key: tuple[int, ...], call: Callable[[], None] = do_nothing) -> bool:
    """Return whether a use of `key` replays a CUDA graph."""
    return calls.find(key, call, nullcontext) is not call


def test_captures_of_an_engine_share_a_stream_of_their_own(cuda: FakeCaptures) -> None:
    """The stream that torch takes without `stream` belongs to all captures of the process."""
    lock, held = RecordedLock(), []
    engine, other = EngineGraphs(), EngineGraphs()
    for graphs, waits in ((engine, True), (other, True), (engine, False)):
        assert capture(lambda: held.append(lock.held), graphs, lock, waits=waits)
    assert cuda.streams == [engine.stream, other.stream, engine.stream]
    assert engine.stream is not other.stream
    first, others, second = cuda.graphs
    assert second.used_pool is first.pool()
    assert others.used_pool is None
    assert held == ["opening", "opening", "opening", "capture"] * 3
    with lock.open_model(), ThreadPoolExecutor(1) as executor:
        late = executor.submit(capture, do_nothing, engine, lock, waits=False).result(60)
    assert late is None, "a step must not wait for a model that another thread opens"


def test_current_stream_is_restored_after_a_failed_capture(cuda: FakeCaptures) -> None:
    before = cuda.current
    cuda.end_error = REFUSED
    with pytest.raises(CaptureFailed):
        capture(do_nothing, EngineGraphs(), RecordedLock(), waits=True)
    assert cuda.current is before


def test_key_whose_capture_failed_runs_uncaptured_from_then_on(cuda: FakeCaptures) -> None:
    calls = CapturedCalls(RecordedLock())
    assert find(calls, (1, 256))
    cuda.end_error = REFUSED
    assert not find(calls, (2, 256))
    cuda.end_error = ""
    assert not find(calls, (2, 256))
    assert len(cuda.graphs) == 2, "a second capture of the key would fail too"
    assert find(calls, (1, 256))
    assert find(calls, (3, 256))
    assert cuda.graphs[2].used_pool is None, "torch refuses captures in the pool of a failed one"
    assert find(calls, (4, 256))
    assert cuda.graphs[3].used_pool is cuda.graphs[2].pool()


@pytest.mark.parametrize("has_end", [True, False])
def test_graph_of_a_failed_capture_lives_as_long_as_its_engine(
    cuda: FakeCaptures, caplog: pytest.LogCaptureFixture, has_end: bool
) -> None:
    """The end of a graph frees memory that the other graphs of the engine use."""

    def run_out_of_memory() -> None:
        if cuda.graphs:
            raise torch.OutOfMemoryError("CUDA out of memory")

    # A warning in the log of pytest would hold the traceback, which has the graph.
    caplog.set_level(logging.ERROR, torch_capture.log.name)
    calls = CapturedCalls(RecordedLock())
    cuda.end_error = "" if has_end else REFUSED
    if has_end:
        with pytest.raises(torch.OutOfMemoryError):
            find(calls, (1, 256), run_out_of_memory)
    else:
        assert not find(calls, (1, 256))
    failed = weakref.ref(cuda.graphs.pop())
    gc.collect()
    assert failed() is not None
    calls.clear()
    gc.collect()
    assert (failed() is None) == has_end, "torch keeps a pointer to a graph without an end"


def test_lack_of_memory_in_a_capture_fails_its_call_only(cuda: FakeCaptures) -> None:
    """Memory may become free, so a later use tries again."""

    def run_out_of_memory() -> None:
        if cuda.graphs:
            raise torch.OutOfMemoryError("CUDA out of memory")

    calls = CapturedCalls(RecordedLock())
    with pytest.raises(torch.OutOfMemoryError):
        find(calls, (1, 256), run_out_of_memory)
    assert find(calls, (1, 256))
    assert cuda.graphs[1].used_pool is cuda.graphs[0].pool(), "the next one uses the same memory"


def test_no_two_open_engines_capture_on_one_stream(cuda: FakeCaptures) -> None:
    """torch returns the streams of its pool in turn, also those that are in use."""
    engines = [CapturedCalls(RecordedLock()) for _ in range(POOL_STREAMS)]
    assert all([find(calls, (1, 256)) for calls in engines])
    assert len({stream.cuda_stream for stream in cuda.streams}) == POOL_STREAMS
    free = cuda.streams[5].cuda_stream
    engines[5].clear()
    engines[5].give_back_stream()
    late = CapturedCalls(RecordedLock())
    assert find(late, (1, 256))
    assert cuda.streams[-1].cuda_stream == free


def test_engine_without_a_stream_runs_uncaptured(
    cuda: FakeCaptures, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [CapturedCalls(RecordedLock()) for _ in range(POOL_STREAMS + 1)]
    *others, last = [find(calls, (1, 256)) for calls in engines]
    assert all(others)
    assert not last
    assert not find(engines[-1], (2, 256))
    assert len(cuda.graphs) == POOL_STREAMS
    assert [record.message for record in caplog.records] == [
        "an engine runs uncaptured: other engines use all streams of torch"
    ]
    drawn = cuda.drawn
    find(engines[-1], (3, 256))
    assert cuda.drawn == drawn, "a step must not search for a stream again"


def test_keys_beyond_the_limit_of_graphs_run_uncaptured(
    cuda: FakeCaptures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each graph takes memory of the GPU, and requests choose the keys."""
    monkeypatch.setattr(captured_calls, "MAX_GRAPHS", 3)
    calls = CapturedCalls(RecordedLock())
    replayed = [find(calls, (slots, 256)) for slots in (1, 2, 3, 4, 5, 1)]
    assert replayed == [True, True, True, False, False, True]
    assert len(cuda.graphs) == 3


def test_limit_of_graphs_suffices_for_the_usual_settings_of_a_gpu() -> None:
    settings = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
    (generator,) = (
        application["args"]["generators"]["gpu"] for application in settings["applications"]
    )
    lengths = 1 + math.ceil(math.log2(generator["max_context_tokens"] / _MIN_GRAPH_KV_LENGTH))
    assert (generator["kv_slots"] + len(_CHUNK_SIZES)) * lengths <= captured_calls.MAX_GRAPHS
