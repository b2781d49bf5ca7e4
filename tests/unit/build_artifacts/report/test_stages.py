from __future__ import annotations

from pathlib import Path

from build_artifacts.report.stages import sum_weight_bytes
from tests.support.tiny_encoders import write_json


def test_shards_beside_a_whole_file_are_not_counted(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    write_json(tmp_path / "model.safetensors.index.json", index)
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(bytes(7))
    assert sum_weight_bytes(tmp_path) == 7
    (tmp_path / "model.safetensors").write_bytes(bytes(5))
    assert sum_weight_bytes(tmp_path) == 5
