"""CUDA graphs of torch decoders, with fakes that repeat the captured computation on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="`torch` is not installed")
pytest.importorskip("transformers", reason="`transformers` is not installed")

from deployments.artifacts.types import Precision  # noqa: E402
from deployments.config import GeneratorSettings  # noqa: E402
from deployments.engines.decoder import DecoderSpec  # noqa: E402
from deployments.engines.decoder_factory import kv_bytes_per_token, measure_kv_cache  # noqa: E402
from deployments.engines.pytorch import captured_calls  # noqa: E402
from deployments.engines.pytorch import decoder as torch_decoder  # noqa: E402
from deployments.engines.pytorch.capture import (  # noqa: E402
    EngineGraphs,
    can_capture,
    count_staging_slots,
)
from deployments.engines.pytorch.capture_lock import CaptureLock  # noqa: E402
from deployments.engines.pytorch.decoder import TorchDecoder  # noqa: E402
from deployments.errors import EngineFailed  # noqa: E402
from tests.support.decoder_programs import program_spec  # noqa: E402
from tests.support.tiny_decoders import tiny_llama  # noqa: E402
from tests.support.torch_memory import count_tensor_bytes, without_collections  # noqa: E402

PROMPT = list(range(10, 45))
OTHER = list(range(90, 40, -1))


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> DecoderSpec:
    directory = tmp_path_factory.mktemp("program")
    return program_spec(tiny_llama(tmp_path_factory.mktemp("checkpoint")), directory)


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    # Matrix products round differently for other numbers of rows.
    np.testing.assert_allclose(actual, expected, atol=1e-4)


class Replayed:
    """A fake of a captured call that repeats the computation on the CPU."""

    def __init__(
        self, call: Callable[[], None], graphs: EngineGraphs, _lock: object, *, waits: bool
    ) -> None:
        self.replay, self.graphs, self.waits = call, graphs, waits


def test_steps_are_captured_by_slots_and_kv_length(
    spec: DecoderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_calls, "capture", Replayed)
    monkeypatch.setattr(torch_decoder, "_MIN_GRAPH_KV_LENGTH", 16)
    plain, captured = (TorchDecoder(spec, GeneratorSettings(), slots=2, context=100) for _ in "ab")
    captured._captures = True
    for rows, length in ((1, 3), (2, 3), (1, 15), (1, 16), (2, 50), (2, 99), (1, 4)):
        ids, lengths = np.full(rows, 7), np.full(rows, length)
        assert_close(captured.decode(ids, lengths), plain.decode(ids, lengths))
    steps = captured._captured.calls.values()
    assert list(captured._captured.calls) == [(1, 16), (2, 16), (1, 32), (2, 64), (2, 100)]
    assert {step.graphs for step in steps} == {captured._captured._graphs}
    assert [step.waits for step in steps] == [True] + [False] * 4
    for decoder in (plain, captured):
        decoder.close()


def test_chunks_are_captured_by_size_and_kv_length(
    spec: DecoderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured prefill pads its tokens, and does not disturb other slots or later tokens."""
    plain = TorchDecoder(spec, GeneratorSettings(), slots=2, context=100)
    monkeypatch.setattr(captured_calls, "capture", Replayed)
    monkeypatch.setattr(torch_decoder, "count_staging_slots", lambda *_: 1)
    monkeypatch.setattr(torch_decoder, "_MIN_GRAPH_KV_LENGTH", 32)
    captured = TorchDecoder(spec, GeneratorSettings(), slots=2, context=100)
    opened = [(1, 32, 16), (1, 32, 32), (1, 64, 64)]
    assert list(captured._captured.calls) == opened, "128 tokens exceed the context"
    for chunk in (
        (0, OTHER, 0),
        (1, PROMPT, 0),
        (1, OTHER[:3], 35),
        (0, OTHER[:5], 50),  # the staging slot holds tokens of the other slot
        (0, PROMPT, 55),  # 64 tokens would exceed the context
    ):
        assert_close(captured.prefill(*chunk), plain.prefill(*chunk))
    assert list(captured._captured.calls) == [*opened, (1, 64, 16), (1, 100, 16)]
    assert_close(captured.prefill(0, [7] * 10, 90), plain.prefill(0, [7] * 10, 90))
    captured._captures = True
    step = np.array([5, 6]), np.array([90, 38])
    assert_close(captured.decode(*step), plain.decode(*step))
    waiting = [key for key, call in captured._captured.calls.items() if call.waits]
    assert waiting == [(1, 32, 16), (2, 100)], "the first prefill, and the first step"
    for decoder in (plain, captured):
        decoder.close()


def test_longest_chunk_is_captured_for_every_kv_length(
    spec: DecoderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_calls, "capture", Replayed)
    monkeypatch.setattr(torch_decoder, "count_staging_slots", lambda *_: 1)
    monkeypatch.setattr(torch_decoder, "_MIN_GRAPH_KV_LENGTH", 16)
    monkeypatch.setattr(torch_decoder, "_CHUNK_SIZES", (8, 16))
    decoder = TorchDecoder(spec, GeneratorSettings(), slots=1, context=100)
    assert list(decoder._captured.calls) == [
        (1, 16, 8),
        (1, 16, 16),
        (1, 32, 16),
        (1, 64, 16),
        (1, 100, 16),
    ]
    decoder.close()


def run_out_of_memory(*_: object, **__: object) -> None:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("module", "function"),
    [
        (captured_calls, "capture"),
        (torch_decoder, "_compile"),
        (torch_decoder, "_LoadedDecoder"),
    ],
    ids=["in a capture", "after the weights", "after the KV cache"],
)
def test_decoder_that_fails_for_lack_of_memory_frees_its_own(
    spec: DecoderSpec, monkeypatch: pytest.MonkeyPatch, module: ModuleType, function: str
) -> None:
    """The pool gives the bytes of the model to the next load as soon as this one has failed."""
    compiled = replace(spec, options=spec.options.model_copy(update={"compile": True}))
    monkeypatch.setattr(torch_decoder, "_compile", lambda module: module)
    monkeypatch.setattr(torch_decoder, "count_staging_slots", lambda *_: 1)
    monkeypatch.setattr(module, function, run_out_of_memory)
    with without_collections():
        before = count_tensor_bytes()
        with pytest.raises(EngineFailed, match="out of memory") as error:
            TorchDecoder(compiled, GeneratorSettings(), slots=1, context=100)
        assert count_tensor_bytes() == before, error


def test_prompt_logits_are_computed_uncaptured(
    spec: DecoderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_calls, "capture", Replayed)
    monkeypatch.setattr(torch_decoder, "count_staging_slots", lambda *_: 1)
    decoder = TorchDecoder(spec, GeneratorSettings(), slots=1, context=100)
    known = list(decoder._captured.calls)
    logits = decoder.prefill(0, PROMPT, 0, all_logits=True)
    assert_close(logits[-1], decoder.prefill(0, PROMPT, 0))
    assert list(decoder._captured.calls) == known
    decoder.close()


def test_staging_slot_counts_towards_the_kv_cache(spec: DecoderSpec) -> None:
    slot = 64 * kv_bytes_per_token(spec)
    settings = GeneratorSettings(
        providers=("CUDAExecutionProvider",), max_context_tokens=64, kv_cache_bytes=3 * slot
    )
    assert measure_kv_cache(spec, settings) == 3 * slot, "two slots and the staging slot"
    small = settings.model_copy(update={"kv_cache_bytes": 2 * slot - 1})
    with pytest.raises(EngineFailed, match=f"the smallest KV cache for 64 tokens needs {2 * slot}"):
        measure_kv_cache(spec, small)
    whole = replace(spec, engine="transformers")
    assert measure_kv_cache(whole, small) == slot, "its prefills are not captured"


@pytest.mark.parametrize(
    ("precision", "capability", "captures"),
    [("bf16", (9, 0), True), ("bf16", (10, 0), True), ("bf16", (8, 9), False),
     ("bf16", (12, 0), False), ("fp16", (9, 0), False), ("bf16", None, False)],
)  # fmt: skip
def test_experts_are_captured_where_torch_has_kernels_for_groups(
    spec: DecoderSpec,
    monkeypatch: pytest.MonkeyPatch,
    precision: Precision,
    capability: tuple[int, int] | None,
    captures: bool,
) -> None:
    """Elsewhere the CPU waits for the sizes of the groups, which ends a capture."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    on_gpu = GeneratorSettings(providers=("CUDAExecutionProvider",))
    dense = replace(spec, precision=precision)
    experts = spec.generation_config.model_copy(update={"has_experts": True})
    mixture = replace(dense, generation_config=experts)
    assert can_capture(dense, on_gpu)
    assert can_capture(mixture, on_gpu) is captures
    assert count_staging_slots(mixture, on_gpu) == captures
    assert not can_capture(mixture, GeneratorSettings())


def test_steps_run_uncaptured_while_a_model_is_opened(
    spec: DecoderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture waits until a model is opened, up to a minute. Generation must not wait for it."""
    lock = CaptureLock()
    monkeypatch.setattr(torch_decoder, "find_capture_lock", lambda *, is_gpu: lock)
    monkeypatch.setattr(captured_calls, "capture", Replayed)
    monkeypatch.setattr(torch_decoder, "_MIN_GRAPH_KV_LENGTH", 16)
    plain, captured = (TorchDecoder(spec, GeneratorSettings(), slots=2, context=100) for _ in "ab")
    captured._captures = True
    for decoder in (plain, captured):
        decoder.decode(np.array([7]), np.array([3]))
    with lock.open_model():
        step = np.array([7]), np.array([20])
        assert_close(captured.decode(*step), plain.decode(*step))
        assert list(captured._captured.calls) == [(1, 16)]
    captured.decode(*step)
    assert list(captured._captured.calls) == [(1, 16), (1, 32)]
    for decoder in (plain, captured):
        decoder.close()


def test_stream_is_given_back_after_the_graphs_are_gone(
    spec: DecoderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a graph would free memory that the next engine on the stream uses."""
    events: list[str] = []

    class RecordedReplay(Replayed):
        def __del__(self) -> None:
            events.append("graph")

    def give_back(_graphs: object) -> None:
        events.append("stream")

    monkeypatch.setattr(captured_calls, "capture", RecordedReplay)
    monkeypatch.setattr(EngineGraphs, "give_back_stream", give_back)
    decoder = TorchDecoder(spec, GeneratorSettings(), slots=1, context=100)
    decoder._captures = True
    decoder.decode(np.array([7]), np.array([3]))
    step = next(iter(decoder._captured.calls.values()))
    step.cycle = step  # as modules, which refer to themselves
    del step
    decoder.close()
    assert events == ["graph", "stream"]
