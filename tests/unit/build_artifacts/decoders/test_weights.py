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
