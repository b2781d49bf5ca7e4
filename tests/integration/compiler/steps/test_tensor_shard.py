"""Safetensors files written in parts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from build_artifacts.steps.tensor_shard import VALUE_BYTES, PlannedTensor, write_shard


def test_tensors_start_at_multiples_of_their_values(tmp_path: Path) -> None:
    """A mapped file can then be used as it is."""
    tensors = {
        "flags": ("BOOL", torch.tensor([True, False, True])),
        "halves": ("BF16", torch.arange(5).to(torch.bfloat16)),
        "floats": ("F32", torch.arange(6.0).reshape(2, 3)),
        "ids": ("I64", torch.arange(3)),
        "scalar": ("F32", torch.tensor(2.5)),
        "empty": ("F32", torch.empty(0, 3)),
    }
    path = tmp_path / "model.safetensors"
    planned = {
        name: PlannedTensor(dtype, tuple(tensor.shape), lambda tensor=tensor: iter([tensor]))
        for name, (dtype, tensor) in tensors.items()
    }
    write_shard(path, planned)
    for name, found in load_file(path).items():
        torch.testing.assert_close(found, tensors[name][1], atol=0, rtol=0)
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert header.keys() == tensors.keys()
    assert size % 8 == 0
    for entry in header.values():
        assert entry["data_offsets"][0] % VALUE_BYTES[entry["dtype"]] == 0
