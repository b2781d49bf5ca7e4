"""int8 KV cache: accuracy, batch invariance, verification and chunking."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto

from build_artifacts.decoders import int8_kv_cache
from build_artifacts.decoders.float_graph import ATTENTION
from build_artifacts.decoders.int8_kv_cache import has_int8_kv_cache, quantize_kv_cache
from build_artifacts.decoders.per_token_int8 import quantize_per_token
from build_artifacts.types import FloatArray
from deployments.engines.onnx.decoder import MAX_DRAFT_TOKENS, OnnxDecoder
from tests.support.attention_graphs import (
    KINDS,
    OTHERS,
    UNKNOWN,
    calibration_for,
    float_graph,
    int8_graph,
    opened,
)
from tests.support.decoder_graphs import CONTEXT

LONGEST = max(map(len, OTHERS))
PROMPTS = OTHERS[0][:17], OTHERS[1][:4], OTHERS[2]  # for three slots
FOLLOWING = OTHERS[1][10 : 11 + MAX_DRAFT_TOKENS]  # tokens that follow each prompt


@pytest.fixture(scope="module", params=["fp32", "int8"])
def converted_graph(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Write a graph with int8 KV cache: once with float weights, once with int8 weights."""
    directory = tmp_path_factory.mktemp("kept")
    if request.param == "fp32":
        return int8_graph(directory / "model.onnx")
    path, floats = directory / "int8.onnx", float_graph(directory / "model.onnx")
    quantize_per_token(floats, path, calibration_for(floats))
    quantize_kv_cache(path, calibration_for(path))
    return path


@pytest.fixture
def decoder(converted_graph: Path) -> Iterator[OnnxDecoder]:
    decoder = opened(converted_graph)
    yield decoder
    decoder.close()


def prefill_all(decoder: OnnxDecoder, text: Sequence[int], row: int = 0) -> FloatArray:
    """Prefill and return the logits after every token, [T, V]."""
    return decoder.prefill(row, text, 0, all_logits=True).copy()


def decode_all(
    decoder: OnnxDecoder, text: Sequence[int], start: int = 0, slots: int = 1
) -> FloatArray:
    """Decode step by step in the last of `slots` slots; return the logits, [T, V]."""
    result = []
    for place, token in enumerate(text, start):
        ids, lengths = np.full(slots, token), np.arange(slots) * 3
        lengths[-1] = place
        result.append(decoder.decode(ids, lengths)[-1].copy())
    return np.stack(result)


def distance(result: FloatArray, expected: FloatArray) -> float:
    return float(np.linalg.norm(result - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("kind", KINDS)
def test_int8_kv_cache_logits_are_close_to_float(kind: str, tmp_path: Path) -> None:
    """The relative error is 0.0056. Scales 1.5 times as large give 0.008, half as large 0.16."""
    floats = opened(float_graph(tmp_path / "float.onnx", KINDS[kind]))
    rounded = opened(int8_graph(tmp_path / "int8.onnx", KINDS[kind]))
    for read in (prefill_all, decode_all):
        expected = np.concatenate([read(floats, text) for text in OTHERS])
        result = np.concatenate([read(rounded, text) for text in OTHERS])
        assert 0.001 < distance(result, expected) < 0.007
    singly = np.concatenate([decode_all(rounded, text) for text in OTHERS])
    at_once = np.concatenate([prefill_all(rounded, text) for text in OTHERS])
    assert distance(at_once, singly) < 0.001, "the two ways attend differently"


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_and_decode_write_equal_caches(kind: str, tmp_path: Path) -> None:
    decoder = opened(int8_graph(tmp_path / "model.onnx", KINDS[kind]))
    prefill_all(decoder, OTHERS[0], row=1)
    decode_all(decoder, OTHERS[0])
    for array in first_layer(decoder):
        whole = array.astype(int)
        assert np.abs(whole[1] - whole[0]).max() <= 1, "one rounds a half up, the other down"
        assert np.mean(whole[1] == whole[0]) > 0.99
        assert np.abs(whole[0, :, :LONGEST]).max(axis=(0, 1)).min() > 50, "scales are too large"


def test_values_above_scale_are_clipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_kv_cache, "SCALE_MARGIN", 0.25)
    decoder = opened(int8_graph(tmp_path / "model.onnx"))
    prefill_all(decoder, OTHERS[0], row=1)
    decode_all(decoder, OTHERS[0])
    for array in first_layer(decoder):
        whole = array.astype(int)
        assert np.abs(whole[1]).max() == 127
        assert np.abs(whole[1] - whole[0]).max() <= 1


def first_layer(decoder: OnnxDecoder) -> Sequence[NDArray[np.generic]]:
    """Return the int8 keys and values of the first layer, each [slots, heads, tokens, size]."""
    arrays = decoder.kv_cache.arrays[:2]
    assert [array.dtype for array in arrays] == [np.int8, np.int8]
    return arrays


def test_graph_has_int8_cache_and_is_prefill_input(converted_graph: Path) -> None:
    graph = onnx.load(converted_graph, load_external_data=False).graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.output)}
    memory = {name for name in types if name.startswith(("past_key_values.", "present."))}
    assert len(memory) == 8
    assert {types[name] for name in memory} == {TensorProto.INT8}
    assert types["is_prefill"] == TensorProto.BOOL
    assert types["logits"] == TensorProto.FLOAT
    assert ATTENTION not in {node.op_type for node in graph.node}


def test_quantize_kv_cache_changes_graph_once(tmp_path: Path) -> None:
    path = float_graph(tmp_path / "model.onnx")
    assert not has_int8_kv_cache(path)
    quantize_kv_cache(path, calibration_for(path))
    assert has_int8_kv_cache(path)
    before = path.read_bytes()
    quantize_kv_cache(path, calibration_for(path))
    assert path.read_bytes() == before


@pytest.mark.parametrize("kind", UNKNOWN)
def test_quantize_kv_cache_skips_unsupported_attention(kind: str, tmp_path: Path) -> None:
    path = float_graph(tmp_path / "model.onnx", UNKNOWN[kind])
    assert opened(path).prefill(0, OTHERS[0][:8], 0).any()
    before = path.read_bytes()
    quantize_kv_cache(path, calibration_for(path))
    assert path.read_bytes() == before
    assert not has_int8_kv_cache(path)


def test_quantize_kv_cache_accepts_unnamed_nodes(tmp_path: Path) -> None:
    named, unnamed = int8_graph(tmp_path / "named.onnx"), float_graph(tmp_path / "unnamed.onnx")
    model = onnx.load(unnamed)
    for node in model.graph.node:
        node.name = ""
    onnx.save(model, unnamed)
    quantize_kv_cache(unnamed, calibration_for(unnamed))
    result, expected = (prefill_all(opened(path), OTHERS[0]) for path in (unnamed, named))
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("ends", [(2, 40), (7, 9, 31, 40), (20, 38, 40), tuple(range(2, 41, 2))])
def test_prefill_is_independent_of_chunking(decoder: OnnxDecoder, ends: Sequence[int]) -> None:
    text = OTHERS[2]
    whole = prefill_all(decoder, text)
    decoder.prefill(1, OTHERS[0], 0)  # stale tokens in the slot must not affect the next prompt
    starts = (0, *ends[:-1])
    parts = [
        decoder.prefill(1, text[start:end], start, all_logits=True).copy()
        for start, end in zip(starts, ends, strict=True)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    for array in decoder.kv_cache.arrays:
        np.testing.assert_array_equal(array[1, :, : len(text)], array[0, :, : len(text)])


def test_prefill_accepts_single_token_chunk(decoder: OnnxDecoder) -> None:
    text = OTHERS[2]
    whole = prefill_all(decoder, text)
    decoder.prefill(2, text[:1], 0)
    for start, end in ((1, 20), (20, 21), (21, 39), (39, 40)):
        result = decoder.prefill(2, text[start:end], start)
        np.testing.assert_allclose(result, whole[end - 1], atol=1e-3)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_decode_is_batch_invariant(decoder: OnnxDecoder, row: int) -> None:
    decoder.prefill(0, PROMPTS[row], 0)
    alone = decode_all(decoder, FOLLOWING, len(PROMPTS[row]))
    for other, prompt in enumerate(PROMPTS):
        decoder.prefill(other, prompt, 0)
    lengths = np.array([len(prompt) for prompt in PROMPTS])
    result = []
    for step, token in enumerate(FOLLOWING):
        ids = np.array([3, 50, 90]) - step
        ids[row] = token
        result.append(decoder.decode(ids, lengths + step)[row].copy())
    np.testing.assert_array_equal(np.stack(result), alone)


@pytest.mark.parametrize("row", [0, 1, 3])
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_verify_equals_single_decode_steps(
    decoder: OnnxDecoder, row: int, prompt: Sequence[int]
) -> None:
    for other in range(row):
        decoder.prefill(other, OTHERS[other % 3], 0)
    decoder.prefill(row, prompt, 0)
    singly = decode_all(decoder, FOLLOWING, len(prompt), slots=row + 1)
    expected = [array[row].copy() for array in decoder.kv_cache.arrays]
    for count in range(1, len(FOLLOWING) + 1):
        decoder.prefill(row, prompt, 0)
        together = decoder.verify(row, FOLLOWING[:count], len(prompt))
        np.testing.assert_array_equal(together, singly[:count])
    for array, expected_row in zip(decoder.kv_cache.arrays, expected, strict=True):
        np.testing.assert_array_equal(array[row], expected_row)


def test_rejected_draft_tokens_are_overwritten(decoder: OnnxDecoder) -> None:
    prompt, wrong = PROMPTS[0], FOLLOWING[::-1]
    decoder.prefill(1, prompt, 0)
    expected = decoder.verify(1, FOLLOWING, len(prompt)).copy()
    decoder.verify(1, wrong, len(prompt))
    np.testing.assert_array_equal(decoder.verify(1, FOLLOWING, len(prompt)), expected)
    assert not np.array_equal(decoder.verify(1, wrong, len(prompt)), expected)


def test_verify_reaches_end_of_slot(decoder: OnnxDecoder) -> None:
    prompt = (*OTHERS[0], *OTHERS[1])[: CONTEXT - len(FOLLOWING)]
    decoder.prefill(2, prompt, 0)
    decoder.prefill(3, OTHERS[2], 0)
    neighbors = [array[3].copy() for array in decoder.kv_cache.arrays]
    together = decoder.verify(2, FOLLOWING, len(prompt)).copy()
    for array, before in zip(decoder.kv_cache.arrays, neighbors, strict=True):
        np.testing.assert_array_equal(array[3], before)
    np.testing.assert_array_equal(decode_all(decoder, FOLLOWING, len(prompt), slots=3), together)


def test_copied_and_swapped_slots_continue_equally(decoder: OnnxDecoder) -> None:
    first, second = PROMPTS[0], PROMPTS[2]
    expected = {}
    for prompt in (first, second):
        decoder.prefill(0, prompt, 0)
        expected[prompt] = decoder.verify(0, FOLLOWING, len(prompt)).copy()
    decoder.prefill(0, first, 0)
    decoder.prefill(1, second, 0)
    decoder.copy(0, 3, len(first))
    decoder.swap(0, 1, max(len(first), len(second)))
    for row, prompt in ((0, second), (1, first), (3, first)):
        result = decoder.verify(row, FOLLOWING, len(prompt))
        np.testing.assert_array_equal(result, expected[prompt])
    decoder.copy(0, 2, 20)  # reuse 20 tokens of `second` as a prefix, prefill the rest
    result = decoder.prefill(2, second[20:], 20)
    np.testing.assert_array_equal(result, prefill_all(decoder, second)[-1])
