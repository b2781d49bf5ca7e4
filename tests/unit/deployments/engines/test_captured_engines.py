"""Engines that capture CUDA graphs, with a fake of CUDA: threads, the capture lock, fallbacks."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.artifacts.generation_config import EncoderDecoderConfig
from deployments.artifacts.manifest import EngineOptions
from deployments.artifacts.types import Device, ModelHead
from deployments.batching.batch_policy import collate
from deployments.config import EncoderSettings, GeneratorSettings
from deployments.engines import GraphSpec
from deployments.engines.onnx import decoder as onnx_decoder
from deployments.engines.onnx import encoder as onnx_encoder
from deployments.engines.onnx import io_binding as onnx_io_binding
from deployments.engines.onnx import sessions as onnx_sessions
from deployments.engines.onnx.encoder_decoder import OnnxEncoderDecoder
from deployments.engines.onnx.engine import ONNXRUNTIME
from deployments.engines.onnx.io_binding import IoBindingEngine
from deployments.engines.onnx.memory import SMALL_PASSES
from deployments.engines.onnx.sessions import UNCAPTURED
from deployments.errors import EngineFailed
from tests.support.captured_sessions import CUDA, FakeCuda
from tests.support.decoder_graphs import CONTEXT, spec_of, tiny_graph
from tests.support.engine_programs import write_onnx
from tests.support.fakes import build_item, item

BUCKETS = ((1, 4), (2, 8))
ENCODER = EncoderSettings(providers=(CUDA,), concurrent_passes=2)
GENERATOR = GeneratorSettings(providers=(CUDA,))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    open_bare_session = onnx_sessions.open_bare_session

    def open_on_cpu(path: Path, options: Any, settings: Any, precision: Any, **named: Any) -> Any:
        on_cpu = settings.model_copy(update={"providers": ("CPUExecutionProvider",)})
        mode = named.pop("mode", "plain")
        return fake.open(open_bare_session(path, options, on_cpu, precision, **named), mode)

    for module in (onnx_sessions, onnx_decoder):
        monkeypatch.setattr(module, "open_bare_session", open_on_cpu)
    for module in (onnx_encoder, onnx_decoder, onnx_io_binding):
        monkeypatch.setattr(module, "find_capture_lock", lambda *, is_gpu: fake.lock)
    monkeypatch.setattr(onnx_io_binding, "_DEVICES", {})  # memory is bound on the host
    return fake


@pytest.fixture
def encoder(tmp_path: Path) -> GraphSpec:
    path = tmp_path / "encoder.onnx"
    write_onnx(path, ModelHead.VECTOR)
    return GraphSpec(
        path=path,
        device=Device.GPU,
        precision="fp16",
        engine="onnxruntime",
        options=EngineOptions(buckets=BUCKETS),
        head=ModelHead.VECTOR,
    )


@pytest.fixture
def open_decoder(tmp_path: Path) -> Callable[[], Any]:
    spec = spec_of(tiny_graph(tmp_path / "model.onnx"))
    assert ONNXRUNTIME.open_decoder is not None
    factory = ONNXRUNTIME.open_decoder
    return lambda: factory(spec, GENERATOR, slots=3, context=CONTEXT)


def run_in_threads(calls: list[Callable[[], object]]) -> None:
    """Run each call in a thread of its own, all at the same time."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> object:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(run, calls))


def test_encoder_captures_and_runs_on_one_thread(encoder: GraphSpec, cuda: FakeCuda) -> None:
    """Another thread would capture each bucket again, at the first request."""
    with closing(IoBindingEngine(encoder, ENCODER)) as engine:
        assert [call.graph for call in cuda.captures()] == ["1", "2"]
        single, pair = collate([item(1)]), collate([item(2), item(3)])
        long = collate([build_item([1] * 20)])
        run_in_threads([lambda batch=batch: engine.run(batch) for batch in (single, pair, long)])
        np.testing.assert_array_equal(engine.run(single).items[0], engine.run(single).items[0])
    assert len(cuda.threads()) == 1
    assert threading.get_ident() not in cuda.threads()


def test_captures_of_an_encoder_hold_the_lock_alone(encoder: GraphSpec, cuda: FakeCuda) -> None:
    with closing(IoBindingEngine(encoder, ENCODER)) as engine:
        assert {call.held for call in cuda.openings} == {"opening"}
        assert [call.held for call in cuda.captures()] == ["capture"] * len(BUCKETS)
        assert [call.held for call in cuda.calls if call.graph == UNCAPTURED] == ["opening"] * 2
        cuda.calls.clear()
        engine.run(collate([item(1)]))
        engine.run(collate([build_item([1] * 20)]))
        assert [(call.graph, call.held) for call in cuda.calls] == [
            ("1", "pass"),
            (UNCAPTURED, "pass"),
        ]


def test_encoder_whose_capture_is_refused_runs_uncaptured(
    encoder: GraphSpec, cuda: FakeCuda
) -> None:
    cuda.refuses_captures = True
    with closing(IoBindingEngine(encoder, ENCODER)) as engine:
        assert cuda.modes == ["captured", "plain"]
        assert len(engine.run(collate([item(1)])).items) == 1
    assert [call.graph for call in cuda.calls] == [UNCAPTURED], "a bucket would only pad the batch"


def test_closed_encoder_ends_its_thread(encoder: GraphSpec, cuda: FakeCuda) -> None:
    before = set(threading.enumerate())
    engine = IoBindingEngine(encoder, ENCODER)
    (thread,) = set(threading.enumerate()) - before
    engine.close()
    engine.close()
    assert not thread.is_alive()


def test_encoder_without_memory_for_its_buckets_keeps_no_session(
    encoder: GraphSpec, cuda: FakeCuda
) -> None:
    """Replicas collect garbage rarely, and the pool lets the next model use the memory at once."""
    cuda.has_memory = False
    gc.collect()
    gc.disable()
    try:
        with suppress(EngineFailed):
            IoBindingEngine(encoder, ENCODER)
        assert [session() for session in cuda.sessions] == [None]
    finally:
        gc.enable()


def test_unbound_encoder_shares_the_lock(encoder: GraphSpec, cuda: FakeCuda) -> None:
    with closing(onnx_encoder.OnnxEngine(encoder, ENCODER)) as engine:
        engine.run(collate([item(1)]))
    assert [call.held for call in cuda.openings] == ["opening"]
    assert [call.held for call in cuda.calls] == ["pass"]


@pytest.mark.parametrize(("is_reported", "arenas"), [(True, "cpu:0;gpu:0"), (False, "cpu:0")])
def test_sessions_on_cuda_return_unused_memory_of_the_gpu(
    encoder: GraphSpec, cuda: FakeCuda, is_reported: bool, arenas: str
) -> None:
    cuda.is_reported = is_reported
    with closing(onnx_encoder.OnnxEngine(encoder, ENCODER)) as engine:
        for tokens in (20, *[1] * SMALL_PASSES):
            engine.run(collate([build_item([1] * tokens)]))
    assert cuda.shrunk == [arenas]


def test_decoder_captures_and_steps_on_one_thread(
    open_decoder: Callable[[], Any], cuda: FakeCuda
) -> None:
    """A loading thread warms up the decoder, and the thread of its generations runs it."""
    with ThreadPoolExecutor(1) as loading:
        decoder = loading.submit(open_decoder).result()
    with closing(decoder), ThreadPoolExecutor(1) as generating:
        steps = [np.zeros(slots, np.int64) for slots in (1, 2, 2, 1)]
        for ids in steps:
            decoder.decode(ids, ids)
        generating.submit(decoder.decode, steps[0], steps[0]).result()
        generating.submit(decoder.prefill, 0, [1, 2], 0).result()
    assert len(cuda.threads()) == 1
    assert [(call.graph, call.held) for call in cuda.calls] == [
        ("1", "capture"),
        ("2", "capture"),
        ("2", "pass"),
        ("1", "pass"),
        ("1", "pass"),
        (UNCAPTURED, "pass"),
    ]
    assert {call.held for call in cuda.openings} == {"opening"}


def test_decoder_whose_capture_is_refused_steps_uncaptured(
    open_decoder: Callable[[], Any], cuda: FakeCuda
) -> None:
    cuda.refuses_captures = True
    with closing(open_decoder()) as decoder:
        ids = np.zeros(2, np.int64)
        decoder.decode(ids, ids)
        assert cuda.modes == ["captured", "balanced"]
    assert [(call.graph, call.held) for call in cuda.calls] == [(UNCAPTURED, "pass")]


def test_failed_capture_is_repeated_alone(open_decoder: Callable[[], Any], cuda: FakeCuda) -> None:
    with closing(open_decoder()) as decoder:
        ids = np.zeros(1, np.int64)
        cuda.has_memory = False
        with pytest.raises(EngineFailed, match="out of memory"):
            decoder.decode(ids, ids)
        cuda.has_memory = True
        decoder.decode(ids, ids)
    assert [call.held for call in cuda.calls] == ["capture", "capture"]


def test_decoder_with_fp32_keys_is_refused(open_decoder: Callable[[], Any], cuda: FakeCuda) -> None:
    """CUDA has no kernel for fp32 attention, which would run on the host with a stale KV cache."""
    cuda.is_reported = True
    with pytest.raises(EngineFailed, match=r"float32; .* on a GPU needs float16"):
        open_decoder()


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    spec = spec_of(tmp_path / "not written.onnx")
    source = EncoderDecoderConfig(max_source_tokens=64, decoder_start_token_id=0)
    config = spec.generation_config.model_copy(update={"encoder_decoder": source})
    spec = replace(spec, generation_config=config, encoder=tmp_path / "encoder.onnx")
    with pytest.raises(EngineFailed, match="run on the CPU only"):
        OnnxEncoderDecoder(spec, GENERATOR, slots=1, context=CONTEXT)
