"""Files from which the graph builders read the weights of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from build_artifacts.decoders.graphs.weights import CheckpointWeights
from tests.support.tiny_encoders import write_json


def test_whole_file_comes_before_shards_as_in_transformers(tmp_path: Path) -> None:
    shard = "model-00001-of-00001.safetensors"
    stale, present = np.zeros(3, np.float32), np.ones(3, np.float32)
    save_file({"base.a": stale}, tmp_path / shard)
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": {"base.a": shard}})
    np.testing.assert_array_equal(CheckpointWeights(tmp_path, "base.").read("a"), stale)
    save_file({"base.a": present}, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(CheckpointWeights(tmp_path, "base.").read("a"), present)
