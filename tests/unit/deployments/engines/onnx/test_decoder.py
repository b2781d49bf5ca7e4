from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import Device
from deployments.config import GeneratorSettings
from deployments.engines.decoder import DecoderSpec, Logits
from deployments.engines.decoder_factory import kv_bytes_per_token, open_decoder
from deployments.engines.onnx import sessions
from deployments.engines.onnx.decoder import MAX_DRAFT_TOKENS, OnnxDecoder
from deployments.engines.onnx.kv_cache import DeviceKvCache, IoBuffer, KvCache
from deployments.errors import EngineFailed, RequirementMissing
from tests.integration.engines.conftest import OpenRows, rows_of
from tests.support.attention_graphs import int8_graph, spec_for
from tests.support.decoder_artifacts import seal_tiny_decoder
from tests.support.decoder_contract import check_batch_invariance

PROMPT = list(range(10, 45))
OTHER = list(range(90, 40, -1))


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seal_tiny_decoder(tmp_path_factory.mktemp("decoder"))


@pytest.fixture
def spec(sealed: Path) -> DecoderSpec:
    manifest = ArtifactManifest.read(sealed)
    candidate = manifest.candidate_for(Device.CPU)
    assert candidate is not None
    return DecoderSpec.of(sealed, manifest, candidate)


@pytest.fixture(scope="module")
def int8_spec(tmp_path_factory: pytest.TempPathFactory) -> DecoderSpec:
    return spec_for(int8_graph(tmp_path_factory.mktemp("int8") / "model.onnx"))


@pytest.fixture
def open_rows(spec: DecoderSpec) -> Iterator[OpenRows]:
    with rows_of(OnnxDecoder, spec) as open_:
        yield open_


def tokens_of(decoder: OnnxDecoder, row: int, prompt: list[int], count: int) -> list[int]:
    """Decode `count` tokens greedily in the slot `row`. All slots take part in every step."""
    tokens = [int(decoder.prefill(row, prompt, 0).argmax())]
    for step in range(count - 1):
        ids = np.zeros(decoder.info.slots, np.int64)
        lengths = np.zeros(decoder.info.slots, np.int64)
        ids[row], lengths[row] = tokens[-1], len(prompt) + step
        tokens.append(int(decoder.decode(ids, lengths)[row].argmax()))
    return tokens


@pytest.mark.parametrize("part", [2, 3, 7, 16, 33])
def test_chunked_prefill_matches_whole_prefill(open_rows: OpenRows, part: int) -> None:
    expected = open_rows().prefill(0, PROMPT, 0).copy()
    decoder = open_rows()
    starts = [start for start in range(0, len(PROMPT), part) if len(PROMPT) - start > 1]
    for start, end in zip(starts, [*starts[1:], len(PROMPT)], strict=True):
        logits = decoder.prefill(1, PROMPT[start:end], start)
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_all_logits_match_separate_prefills(open_rows: OpenRows) -> None:
    decoder = open_rows()
    every = decoder.prefill(0, PROMPT, 0, all_logits=True).copy()
    assert every.shape == (len(PROMPT), decoder.info.vocabulary)
    for end in (5, 20, len(PROMPT)):
        np.testing.assert_allclose(decoder.prefill(1, PROMPT[:end], 0), every[end - 1], atol=1e-4)


def test_decode_is_batch_invariant(open_rows: OpenRows) -> None:
    single, batched = open_rows(slots=1), open_rows(slots=3)
    check_batch_invariance(single, batched, (PROMPT, OTHER), np.testing.assert_array_equal)


def test_decode_matches_prefill(open_rows: OpenRows) -> None:
    decoder = open_rows()
    decoder.prefill(0, PROMPT[:-3], 0)
    for place in range(len(PROMPT) - 3, len(PROMPT)):
        logits = decoder.decode(np.array([PROMPT[place]]), np.array([place]))[0].copy()
    np.testing.assert_allclose(logits, decoder.prefill(1, PROMPT, 0), atol=1e-3)


def test_copied_prefix_matches_computed_prefix(open_rows: OpenRows) -> None:
    decoder = open_rows()
    computed = decoder.prefill(0, PROMPT, 0).copy()
    decoder.copy(0, 2, 30)
    np.testing.assert_array_equal(decoder.prefill(2, PROMPT[30:], 30), computed)


def test_swapped_slots_continue(open_rows: OpenRows) -> None:
    expected = [tokens_of(open_rows(), 0, prompt, 4) for prompt in (PROMPT, OTHER)]
    decoder = open_rows()
    tokens = [[int(decoder.prefill(row, p, 0).argmax())] for row, p in enumerate((PROMPT, OTHER))]
    decoder.swap(0, 1, max(len(PROMPT), len(OTHER)))
    for step in range(3):
        ids = np.array([tokens[1][-1], tokens[0][-1]])
        logits = decoder.decode(ids, np.array([len(OTHER) + step, len(PROMPT) + step]))
        tokens[1].append(int(logits[0].argmax()))
        tokens[0].append(int(logits[1].argmax()))
    assert tokens == expected


class OnDevice(OnnxDecoder):
    """Decoder with DeviceKvCache, the KV cache for GPUs, on the CPU as device."""

    def _create_kv_cache(self) -> KvCache:
        return DeviceKvCache(self.layout, self.session, "cpu", "CPUExecutionProvider")


def test_device_kv_cache_matches_host_kv_cache(open_rows: OpenRows, spec: DecoderSpec) -> None:
    device, host = OnDevice(spec, GeneratorSettings(), slots=3, context=128), open_rows()
    try:
        for decoder in (device, host):
            decoder.prefill(0, PROMPT, 0)
            decoder.prefill(1, OTHER, 0)
            decoder.copy(0, 2, len(PROMPT))
            decoder.swap(0, 1, max(len(PROMPT), len(OTHER)))
        lengths = np.array([len(OTHER), len(PROMPT), len(PROMPT)])
        for step in range(3):  # the slots decode different tokens
            ids = np.array([5, 6, 7]) + step
            on_device, on_host = (d.decode(ids, lengths + step) for d in (device, host))
            np.testing.assert_array_equal(on_device, on_host)
        assert len({tuple(row) for row in on_host}) == 3
    finally:
        device.close()


def test_kept_calls_keep_their_memory_on_a_device(
    spec: DecoderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a call binds does not own the memory of its buffers."""
    buffers: list[weakref.ref[IoBuffer]] = []
    create = DeviceKvCache.create_buffer

    def create_and_watch(cache: DeviceKvCache, values: np.ndarray) -> IoBuffer:
        buffer = create(cache, values)
        buffers.append(weakref.ref(buffer))
        return buffer

    decoder = OnDevice(spec, GeneratorSettings(), slots=2, context=64)
    monkeypatch.setattr(DeviceKvCache, "create_buffer", create_and_watch)
    decoder.verify(0, PROMPT[:3], 0)
    assert len(buffers) == 3
    assert all(each() is not None for each in buffers)
    decoder.close()


def test_device_kv_cache_allocates_in_its_session(
    spec: DecoderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory outside of a session stays with the process when the model is evicted."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise AssertionError("allocated outside of the session")

    for name in ("ortvalue_from_shape_and_type", "ortvalue_from_numpy"):
        monkeypatch.setattr(ort.OrtValue, name, fail)
    decoder = OnDevice(spec, GeneratorSettings(), slots=2, context=64)
    decoder.prefill(0, PROMPT, 0)
    decoder.decode(np.array([5]), np.array([len(PROMPT)]))
    decoder.close()


def test_decoders_on_cuda_allocate_what_they_request(
    spec: DecoderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default CUDA's arena doubles with each allocation, beyond the memory that is counted."""
    given: list[dict[str, dict[str, str]]] = []

    def open_session(*_: object, providers: list[tuple[str, dict[str, str]]], **__: object) -> None:
        given.append(dict(providers))
        raise RuntimeError("there is no GPU")

    monkeypatch.setattr(sessions, "_load_cuda_libraries", lambda: None)
    monkeypatch.setattr(sessions.ort, "InferenceSession", open_session)
    cuda = "CUDAExecutionProvider"
    with pytest.raises(EngineFailed, match="no GPU"):
        OnnxDecoder(spec, GeneratorSettings(providers=(cuda,)), slots=1, context=64)
    exact = {"arena_extend_strategy": "kSameAsRequested"}
    assert given == [{cuda: {"enable_cuda_graph": "1", **exact}}, {cuda: exact}]


@pytest.mark.parametrize("kind", [OnnxDecoder, OnDevice])
def test_decode_steps_share_their_buffers(spec: DecoderSpec, kind: type[OnnxDecoder]) -> None:
    """A buffer for each number of slots would take memory that grows with their square."""
    with closing(kind(spec, GeneratorSettings(), slots=6, context=64)) as decoder:
        for slots in range(1, 7):
            decoder.decode(np.zeros(slots, np.int64), np.zeros(slots, np.int64))
        masks = [call.mask for call in decoder._decode_calls.values()]
        assert [len(mask) for mask in masks] == [1, 2, 3, 4, 5, 6]
        assert len({mask.ctypes.data for mask in masks}) == 1
        outputs = [call._receive() for call in decoder._decode_calls.values()]
        if kind is OnnxDecoder:
            assert len({output.ctypes.data for output in outputs}) == 1


def test_prompt_beyond_the_context_or_the_vocabulary_is_refused(open_rows: OpenRows) -> None:
    decoder = open_rows()
    with pytest.raises(EngineFailed, match="exceed the context of 128"):
        decoder.prefill(0, [5] * 100, 29)
    with pytest.raises(EngineFailed, match="token id 5000; the maximum is"):
        decoder.prefill(0, [5, 5_000], 0)


def test_closed_decoder_fails(open_rows: OpenRows) -> None:
    decoder = open_rows()
    decoder.close()
    with pytest.raises(EngineFailed, match="closed"):
        decoder.prefill(0, PROMPT, 0)
    with pytest.raises(EngineFailed, match="closed"):
        decoder.decode(np.array([5]), np.array([3]))
    with pytest.raises(EngineFailed, match="closed"):
        decoder.verify(0, PROMPT[:3], 0)


def multiply(channels: int, columns: int) -> np.ndarray:
    """Return the first columns of a product of random matrices, as one thread computes it."""
    names = [("a", ["M", channels]), ("b", [channels, "N"]), ("c", ["M", "N"])]
    *given, result = [helper.make_tensor_value_info(name, 1, shape) for name, shape in names]
    node = helper.make_node("MatMul", ["a", "b"], ["c"])
    graph = helper.make_graph([node], "product", given, [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options)
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape).astype("f") for shape in ((9, channels), (channels, 99)))
    return session.run(None, {"a": a, "b": np.ascontiguousarray(b[:, :columns])})[0][:, :16]


def test_products_round_alike_on_each_side_of_the_minimum_end_of_chunks() -> None:
    """More than 128 channels round by the number of columns, on some CPUs.

    `min_chunk_end` keeps a row of such channels on one side. It is needless, not wrong, where
    both sides round alike too.
    """
    np.testing.assert_array_equal(multiply(128, 20), multiply(128, 99))
    np.testing.assert_array_equal(multiply(256, 20), multiply(256, 64))
    np.testing.assert_array_equal(multiply(256, 65), multiply(256, 99))


@pytest.mark.parametrize(("head_dim", "end"), [(64, 0), (128, 0), (256, 65)])
def test_wide_heads_have_a_minimum_end_of_chunks(
    head_dim: int, end: int, spec: DecoderSpec
) -> None:
    config = spec.generation_config.model_copy(update={"head_dim": head_dim})
    wide = replace(spec, generation_config=config)
    decoder = OnnxDecoder(wide, GeneratorSettings(), slots=1, context=16)
    assert decoder.info.min_chunk_end == end


def test_slots_are_limited_by_kv_cache_bytes(spec: DecoderSpec) -> None:
    one_row = 64 * kv_bytes_per_token(spec)
    settings = GeneratorSettings(kv_slots=8, max_context_tokens=64, kv_cache_bytes=3 * one_row)
    assert open_decoder(spec, settings).info.slots == 3
    with pytest.raises(RequirementMissing, match="kv_cache_bytes"):
        open_decoder(spec, settings.model_copy(update={"kv_cache_bytes": one_row - 1}))


def test_int8_kv_cache_takes_a_quarter(int8_spec: DecoderSpec) -> None:
    assert int8_spec.kv_cache_dtype == "int8"
    one_row = 64 * kv_bytes_per_token(int8_spec)
    settings = GeneratorSettings(kv_slots=8, max_context_tokens=64, kv_cache_bytes=3 * one_row)
    decoder = open_decoder(int8_spec, settings)
    assert isinstance(decoder, OnnxDecoder)
    assert decoder.info.slots == 3
    assert sum(array.nbytes for array in decoder.kv_cache.arrays) == settings.kv_cache_bytes
    floats = replace(int8_spec, kv_cache_dtype=None)
    with pytest.raises(RequirementMissing, match="kv_cache_bytes"):
        open_decoder(floats, settings)
    with pytest.raises(RequirementMissing, match="kv_cache_bytes"):
        open_decoder(int8_spec, settings.model_copy(update={"kv_cache_bytes": one_row - 1}))


def max_draft_tokens(
    spec: DecoderSpec, kind: type[OnnxDecoder] = OnnxDecoder, *, context: int = 64, threads: int = 1
) -> int:
    settings = GeneratorSettings(intra_op_threads=threads)
    decoder = kind(spec, settings, slots=2, context=context)
    decoder.close()
    return decoder.info.max_draft_tokens


def test_only_int8_kv_cache_supports_verification(
    spec: DecoderSpec, int8_spec: DecoderSpec
) -> None:
    assert max_draft_tokens(spec) == 0
    assert max_draft_tokens(int8_spec) == MAX_DRAFT_TOKENS
    assert max_draft_tokens(int8_spec, threads=3) == MAX_DRAFT_TOKENS


def test_short_context_disables_verification(int8_spec: DecoderSpec) -> None:
    least = 2 * (MAX_DRAFT_TOKENS + 1)
    assert max_draft_tokens(int8_spec, context=least - 1) == 0
    assert max_draft_tokens(int8_spec, context=least) == MAX_DRAFT_TOKENS


@pytest.mark.parametrize(("heads", "threads"), [(None, 2), (4, 4), (64, 16)])
def test_threads_are_limited_by_heads(spec: DecoderSpec, heads: int | None, threads: int) -> None:
    """With more threads than heads, attention rounds a single slot differently from a batch."""
    generation_config = spec.generation_config.model_copy(update={"heads": heads})
    settings = GeneratorSettings(intra_op_threads=16)
    decoder = OnnxDecoder(
        replace(spec, generation_config=generation_config), settings, slots=1, context=64
    )
    assert decoder.session.get_session_options().intra_op_num_threads == threads
    decoder.close()


class Uneven(OnnxDecoder):
    """Decoder whose `verify` changes the last bit of a logit of the last token."""

    def verify(self, row: int, ids: Sequence[int], start: int) -> Logits:
        logits = super().verify(row, ids, start)
        logits[-1, 0] = np.nextafter(logits[-1, 0], np.float32(np.inf))
        return logits


class UnevenPairs(Uneven):
    """Decoder whose `verify` is inexact only for calls with two tokens."""

    def verify(self, row: int, ids: Sequence[int], start: int) -> Logits:
        return (super() if len(ids) == 2 else super(Uneven, self)).verify(row, ids, start)


@pytest.mark.parametrize("kind", [Uneven, UnevenPairs])
def test_inexact_verification_is_disabled(int8_spec: DecoderSpec, kind: type[OnnxDecoder]) -> None:
    assert max_draft_tokens(int8_spec, kind) == 0


def test_context_is_limited_by_max_tokens(spec: DecoderSpec) -> None:
    decoder = open_decoder(spec, GeneratorSettings(max_context_tokens=100_000))
    assert decoder.info.context == spec.max_tokens


def test_threads_share_out_decode_steps_in_blocks(spec: DecoderSpec) -> None:
    """Without blocks, every operator waits for the slowest thread."""
    decoder = OnnxDecoder(spec, GeneratorSettings(intra_op_threads=2), slots=2, context=64)
    options = decoder.session.get_session_options()
    assert options.get_session_config_entry("session.dynamic_block_base") == "16"
    decoder.close()
