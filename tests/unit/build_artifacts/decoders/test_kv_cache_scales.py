"""Scales of the int8 KV cache: the two channels of a pair that RoPE rotates share a scale."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from build_artifacts.decoders.int8_kv_cache import ChannelScales
from build_artifacts.types import FloatArray
from tests.support.attention_graphs import KINDS, int8_graph


def scales_of(values: FloatArray, pairs: int = 0, *, interleaved: bool = False) -> FloatArray:
    """Return the scales [heads, size] of a text with cache values [tokens, heads, size]."""
    scales = ChannelScales(pairs, interleaved=interleaved)
    scales.update(values.swapaxes(0, 1))
    return scales.table


def test_rotated_pair_shares_scale() -> None:
    values = np.zeros((2, 1, 4), np.float32)
    values[0, 0] = 3, 0.5, -4, 0.25
    values[1, 0] = 0, -2, 0, 1
    unit = 1.1 / 127
    lengths = 5, np.hypot(2, 1)
    halves, neighbors = (scales_of(values, 2, interleaved=way)[0] for way in (False, True))
    np.testing.assert_allclose(halves, np.array([lengths[0], lengths[1]] * 2) * unit, rtol=1e-6)
    lengths = np.hypot(3, 0.5), np.hypot(4, 0.25)
    np.testing.assert_allclose(neighbors, np.repeat(lengths, 2) * unit, rtol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_unrotated_channels_have_own_scales(interleaved: bool) -> None:
    values = np.random.default_rng(2).normal(size=(50, 3, 6)).astype(np.float32)
    scales = scales_of(values, 1, interleaved=interleaved)
    assert scales.shape == (3, 6)
    assert scales.dtype == np.float32
    longest = np.hypot(values[..., 0], values[..., 1]).max(axis=0)
    np.testing.assert_allclose(scales[:, :2], longest[:, None].repeat(2, 1) * 1.1 / 127, rtol=1e-6)
    expected = np.abs(values).max(axis=0) * np.float32(1.1 / 127)
    np.testing.assert_allclose(scales[:, 2:], expected[:, 2:], rtol=1e-6)
    np.testing.assert_allclose(scales_of(values), expected, rtol=1e-6)


def test_zero_channels_have_positive_scale() -> None:
    for pairs in (0, 2):
        assert scales_of(np.zeros((5, 2, 8), np.float32), pairs).min() > 0


@pytest.mark.parametrize("pairs", [0, 2])
def test_scales_are_independent_of_text_split(pairs: int) -> None:
    values = np.random.default_rng(2).normal(size=(3, 50, 6)).astype(np.float32)
    scales = ChannelScales(pairs)
    for text in np.split(values, (1, 20, 30), axis=1):
        scales.update(text)
    np.testing.assert_array_equal(scales.table, scales_of(values.swapaxes(0, 1), pairs))


def test_update_does_not_modify_values() -> None:
    values = np.random.default_rng(2).normal(size=(5, 2, 8)).astype(np.float32)
    before = values.copy()
    scales_of(values, 4)
    np.testing.assert_array_equal(values, before)


@pytest.mark.parametrize(
    ("kind", "pairs"),
    [
        ("packed", [(i, i + 8) for i in range(8)]),
        ("interleaved", [(2 * i, 2 * i + 1) for i in range(8)]),
        ("half_rotated", [(i, i + 8) for i in range(8)]),
        ("half_rotated_neighbors", [(2 * i, 2 * i + 1) for i in range(8)]),
        ("unrotated", []),
    ],
)
def test_scales_follow_rope_attributes(
    kind: str, pairs: list[tuple[int, int]], tmp_path: Path
) -> None:
    graph = onnx.load(int8_graph(tmp_path / "model.onnx", KINDS[kind])).graph
    tables = {table.name: numpy_helper.to_array(table) for table in graph.initializer}
    steps = [
        node
        for chosen in graph.node
        for attribute in chosen.attribute
        if attribute.name == "else_branch"
        for node in attribute.g.node
    ]
    assert len(steps) == 2
    for step in steps:
        keys, values = (tables[step.input[place]] for place in (12, 13))
        assert shared(keys) == pairs
        assert shared(values) == []


def shared(scales: FloatArray) -> list[tuple[int, int]]:
    """Return the pairs of channels that share a scale in every head."""
    heads = scales.reshape(-1, scales.shape[-1])
    size = heads.shape[1]
    return [
        (a, b)
        for a in range(size)
        for b in range(a + 1, size)
        if np.array_equal(heads[:, a], heads[:, b])
    ]
