"""Files from which the graph builders read the weights of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from build_artifacts.decoders.graphs.weights import CheckpointWeights, FusedModule
from build_artifacts.errors import UnsupportedModel
from tests.support.tiny_encoders import write_json


def test_whole_file_comes_before_shards_as_in_transformers(tmp_path: Path) -> None:
    shard = "model-00001-of-00001.safetensors"
    stale, present = np.zeros(3, np.float32), np.ones(3, np.float32)
    save_file({"base.a": stale}, tmp_path / shard)
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": {"base.a": shard}})
    np.testing.assert_array_equal(CheckpointWeights(tmp_path, "base.").read("a"), stale)
    save_file({"base.a": present}, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(CheckpointWeights(tmp_path, "base.").read("a"), present)


def test_parts_of_fused_modules_have_names_of_their_own(tmp_path: Path) -> None:
    rows = np.arange(12, dtype=np.float32)
    save_file({"m.attn.qkv.bias": rows, "m.attn.dense.bias": rows}, tmp_path / "model.safetensors")
    fused = FusedModule("attn.qkv", ("attn.q", "attn.k", "attn.v"), groups=2)
    weights = CheckpointWeights(tmp_path, renames=(("dense", "o"),), fused=[fused])
    assert weights.shape("m.attn.k.bias") == (4,)
    np.testing.assert_array_equal(weights.read("m.attn.k.bias"), [2, 3, 8, 9])
    np.testing.assert_array_equal(weights.read("m.attn.o.bias"), rows)
    assert "m.attn.qkv.bias" not in weights


def test_fused_module_of_another_size_is_rejected(tmp_path: Path) -> None:
    save_file({"m.attn.qkv.bias": np.zeros(10, np.float32)}, tmp_path / "model.safetensors")
    fused = FusedModule("attn.qkv", ("attn.q", "attn.k", "attn.v"), groups=2)
    with pytest.raises(UnsupportedModel, match=r"`m\.attn\.qkv\.bias` has 10 rows"):
        CheckpointWeights(tmp_path, fused=[fused])


def test_parts_of_a_fused_module_have_sizes_of_their_own(tmp_path: Path) -> None:
    """Two groups of three query heads, which share a key head and a value head."""
    rows = np.arange(20, dtype=np.float32).reshape(20, 1)
    save_file({"m.attn.qkv.weight": rows}, tmp_path / "model.safetensors")
    parts = ("attn.q", "attn.k", "attn.v")
    fused = FusedModule("attn.qkv", parts, groups=2, shares=(3, 1, 1))
    weights = CheckpointWeights(tmp_path, fused=[fused])
    expected = ([0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15], [6, 7, 16, 17], [8, 9, 18, 19])
    for part, values in zip(parts, expected, strict=True):
        name = f"m.{part}.weight"
        assert weights.shape(name) == (len(values), 1)
        np.testing.assert_array_equal(weights.read(name).ravel(), values)


def test_weights_stored_by_inputs_are_transposed(tmp_path: Path) -> None:
    weight, bias = np.arange(12, dtype=np.float32).reshape(2, 6), np.arange(6, dtype=np.float32)
    stored = {"m.attn.qkv.weight": weight, "m.attn.qkv.bias": bias, "m.table.weight": weight}
    save_file(stored, tmp_path / "model.safetensors")
    fused = FusedModule("attn.qkv", ("attn.q", "attn.k", "attn.v"))
    weights = CheckpointWeights(tmp_path, fused=[fused], transposed=("qkv",))
    assert weights.shape("m.attn.k.weight") == (2, 2)
    np.testing.assert_array_equal(weights.read("m.attn.k.weight"), weight.T[2:4])
    np.testing.assert_array_equal(weights.read("m.attn.k.bias"), bias[2:4])
    np.testing.assert_array_equal(weights.read("m.table.weight"), weight)


def test_renames_apply_to_whole_parts_of_names(tmp_path: Path) -> None:
    row = np.zeros(1, np.float32)
    names = {"base.h.0.a_to_h.bias": row, "base.end.bias": row}
    save_file(names, tmp_path / "model.safetensors")
    weights = CheckpointWeights(tmp_path, "base.", renames=((".h.", ".layers."), (".end.", ".z.")))
    assert "layers.0.a_to_h.bias" in weights
    assert "z.bias" in weights


def test_rows_are_multiplied_by_factors(tmp_path: Path) -> None:
    ones = np.ones((2, 3), np.float32)
    names = {"0.down.weight": ones, "0.mixer.weight": ones, "0.mixer.bias": ones[:, 0]}
    save_file(names, tmp_path / "model.safetensors")
    factors = {"down.weight": 0.5, "mixer.weight": np.array([2, 3], np.float32)}
    weights = CheckpointWeights(tmp_path, factors=factors)
    np.testing.assert_array_equal(weights.read("0.down.weight"), np.full((2, 3), 0.5))
    np.testing.assert_array_equal(weights.read("0.mixer.weight"), [[2, 2, 2], [3, 3, 3]])
    np.testing.assert_array_equal(weights.read_columns("0.mixer.weight", slice(1, 2)), [[2], [3]])
    np.testing.assert_array_equal(weights.read("0.mixer.bias"), [1, 1])
